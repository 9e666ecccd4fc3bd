"""Byte code for a tree that will be mounted elsewhere: run as a program, by the interpreter that will read it.

Guards against three costs. Compiling what the installer compiled already: a valid cached file of the source is
taken and its file names replaced, four times as fast. A `stat` per import inside: the tree is read-only, so hashes
are unchecked (PEP 552). And host paths in tracebacks: `co_filename` is the path inside.

    python -I -S bytecode.py TREE INSIDE < pairs      pairs: destination NUL source NUL ..., destination below TREE

Files of the tree that have no pair are compiled. What does not compile is left without byte code, as installers do:
packages ship templates and samples that were never meant to run. Standard library only; imports nothing of ringfence.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
import types

MAGIC = importlib.util.MAGIC_NUMBER


def main() -> int:
    """Compile the tree with one process per usable CPU. The exit code is the number of processes that failed."""
    tree, inside = sys.argv[1:3]
    fields = sys.stdin.buffer.read().split(b"\0")[:-1]
    sources = {os.fsdecode(fields[at]): os.fsdecode(fields[at + 1]) for at in range(0, len(fields), 2)}
    files = []
    for folder, directories, names in os.walk(tree):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        modules = sorted(name for name in names if name.endswith(".py"))
        if modules:
            os.makedirs(os.path.join(folder, "__pycache__"), exist_ok=True)
        files += [os.path.relpath(os.path.join(folder, name), tree) for name in modules]
    workers = max(1, min(len(os.sched_getaffinity(0)), 8, len(files) // 50))
    children = []
    for number in range(workers):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for path in files[number::workers]:
                    write(tree, inside, path, sources.get(path))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def write(tree: str, inside: str, path: str, source: str | None) -> None:
    """Byte code for one file of the tree."""
    target = os.path.join(tree, path)
    with open(target, "rb") as file:
        content = file.read()
    place = f"{inside}/{path}"
    code = cached(source, content) if source else None
    if code is not None:
        code = renamed(code, place)
    else:
        try:
            code = compile(content, place, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, OverflowError):
            return
    # Flags 0b01: hash-based, not checked (PEP 552).
    header = MAGIC + (1).to_bytes(4, "little") + importlib.util.source_hash(content)
    with open(importlib.util.cache_from_source(target), "wb") as file:
        file.write(header + marshal.dumps(code))


def cached(source: str, content: bytes) -> types.CodeType | None:
    """The code in the byte code file beside `source`, if it belongs to exactly this content."""
    try:
        state = os.stat(source)
        with open(importlib.util.cache_from_source(source), "rb") as file:
            data = file.read()
    except OSError:
        return None
    if data[:4] != MAGIC or len(data) <= 16:
        return None
    flags = int.from_bytes(data[4:8], "little")
    if flags & 1:
        valid = data[8:16] == importlib.util.source_hash(content)
    else:
        when, size = int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")
        valid = when == int(state.st_mtime) & 0xFFFFFFFF and size == state.st_size == len(content)
    if not valid:
        return None
    try:
        code = marshal.loads(data[16:])
    except (EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, types.CodeType) else None


def renamed(code: types.CodeType, place: str) -> types.CodeType:
    """The same code, said to come from `place`, with all code inside it."""
    constants = tuple(
        renamed(constant, place) if isinstance(constant, types.CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_filename=place, co_consts=constants)


if __name__ == "__main__":
    sys.exit(main())
