"""Write the sync facade from the async one: `python tools/generate_sync.py`; `--check` says whether it is current.

Guards against twins that drift apart. The async source marks the few lines that differ: a line that ends in
`# async only` is dropped, `# sync only: code` becomes code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "ringfence"
SOURCE = PACKAGE / "_sandbox_async.py"
TARGET = PACKAGE / "_sandbox_sync.py"

DOCSTRING = '''"""`Sandbox` and what hangs on it: generated from `_sandbox_async.py` by `tools/generate_sync.py`. Do not edit.

Guards against twins that drift apart: a test fails when this file is not what the generator writes.
"""

# fmt: off
'''

RULES = (
    (r"\brun_async\b", "run_sync"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (
        r"\bAsyncIterable, AsyncIterator, Callable, Coroutine, Iterable,",
        "Callable, Coroutine, Iterable, Iterator,",
    ),
    (r" \| AsyncIterable\[Any\]", ""),
    (r"\bAsync([A-Z])", r"\1"),
)


def generate(source: str) -> str:
    """The sync module for an async source."""
    start = source.index('"""', 3) + 4
    lines = []
    for line in source[start:].splitlines():
        if line.endswith("# async only"):
            continue
        marked = re.match(r"(\s*)# sync only:(?: (.*))?$", line)
        if marked:
            line = f"{marked[1]}{marked[2]}" if marked[2] else ""
        for pattern, replacement in RULES:
            line = re.sub(pattern, replacement, line)
        lines.append(line)
    text = "\n".join(lines)
    # A dropped import leaves its blank line behind.
    return DOCSTRING + re.sub(r"(-> None:\n)\n+", r"\1", text) + "\n"


def main() -> int:
    """Write, or with `--check` compare and return 1 when the twin is stale."""
    wanted = generate(SOURCE.read_text())
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text() == wanted:
            return 0
        sys.stderr.write(f"{TARGET.name} is not current: run python tools/generate_sync.py\n")
        return 1
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
