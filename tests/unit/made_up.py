"""Upper layers made up for tests: entries as a capture gives them, from a short description or a real directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringfence.changes.collecting import collect
from ringfence.changes.model import Changes
from ringfence.changes.places import Tree
from ringfence.node.capture import Entry

GONE = "gone"
OTHER = "other"


def entry(
    path: str | bytes, content: bytes | str | None = None, *, mode: int = 0, opaque: bool = False,
    strange: tuple[str, ...] = (),
) -> Entry:  # fmt: skip
    """bytes: a file; None: a directory; GONE: a whiteout; OTHER: a special file; any other text: a link's target."""
    kind = (
        "directory" if content is None else "file" if isinstance(content, bytes) else
        "whiteout" if content == GONE else "other" if content == OTHER else "link"
    )  # fmt: skip
    raw = os.fsencode(path)
    return Entry(
        path=raw, kind=kind, mode=mode or (0o755 if kind == "directory" else 0o644),
        size=len(content) if isinstance(content, bytes) else 0, opaque=opaque, strange=strange,
        target=os.fsencode(content) if kind == "link" and isinstance(content, str) else b"", mtime_ns=0,
        content=iter([content] if content else []) if isinstance(content, bytes) else None,
    )  # fmt: skip




def entries(described: dict[str, bytes | str | None], opaque: Iterable[str] = ()) -> list[Entry]:
    """Entries in the order of a capture, with the directories above them where they are not described."""
    whole: dict[str, bytes | str | None] = {"": None}
    for path, content in described.items():
        parts = path.split("/")
        for count in range(1, len(parts)):
            whole.setdefault("/".join(parts[:count]), None)
        whole[path] = content
    hidden = set(opaque)
    order = sorted(whole, key=lambda path: path.split("/") if path else [])
    return [entry(path, whole[path], opaque=path in hidden) for path in order]


def captured(source: Path, described: dict[str, bytes | str | None], opaque: Iterable[str] = (), **options: object) -> Changes:
    """What `collect` makes of a made-up upper above a real directory."""
    with Tree.open(str(source)) as tree:
        return collect(entries(described, opaque), tree, str(source), **options)  # type: ignore[arg-type]


def read_upper(directory: str) -> Iterator[Entry]:
    """The entries of a real upper layer that this process may read."""

    def walk(path: bytes) -> Iterator[Entry]:
        place = os.path.join(os.fsencode(directory), path) if path else os.fsencode(directory)
        state = os.lstat(place)
        names = [name for name in os.listxattr(place, follow_symlinks=False) if ".overlay." in name] if not stat.S_ISLNK(state.st_mode) else []
        words = {name.rpartition(".overlay.")[2] for name in names}
        opaque = any(os.getxattr(place, name) == b"y" for name in names if name.endswith(".opaque"))
        strange = tuple(sorted(words & {"redirect", "metacopy"}))
        mode, kind, content, target = state.st_mode & 0o7777, "other", None, b""
        if stat.S_ISCHR(state.st_mode) and state.st_rdev == 0:
            kind = "whiteout"
        elif stat.S_ISREG(state.st_mode):
            kind, content = "file", Path(os.fsdecode(place)).read_bytes()
        elif stat.S_ISDIR(state.st_mode):
            kind = "directory"
        elif stat.S_ISLNK(state.st_mode):
            kind, target = "link", os.readlink(place)
        yield Entry(
            path=path, kind=kind, mode=mode, size=len(content or b""), opaque=opaque, strange=strange, target=target,
            mtime_ns=state.st_mtime_ns, content=None if content is None else iter([content] if content else []),
        )  # fmt: skip
        if kind == "directory":
            for name in sorted(os.listdir(place)):
                yield from walk(path + b"/" + name if path else name)

    return walk(b"")
