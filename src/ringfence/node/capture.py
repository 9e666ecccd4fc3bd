"""What a sandbox changed below its workspace, as records that a process beside the sandbox wrote.

The upper layer of an overlay workspace belongs to ids that the owner of a sandbox may not read, so a process of ours
reads it (guest/capture.py, which is the other end of this file) and writes it down here. It is a parser of hostile
input all the same: names, modes, link targets and contents are the sandbox's, and whoever captured the writer captured
the stream. Guards against names that lead out (`..`, absolute, NUL), against two records of one name, a child without
its parent, and against sizes without end: every field has a bound, and what breaks one is a `CaptureError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ringfence.errors import CaptureError

HEADER = struct.Struct("!BBHHHHQq")
"""kind, flags, mode, and the lengths of path, target and names; size in bytes, modification time in nanoseconds."""

CHUNK = struct.Struct("!BI")
"""A piece of a file: whether it is a hole, and its length in bytes. A hole carries no bytes."""

KINDS = ("file", "directory", "link", "whiteout", "other")
END, FAILED = 0xFE, 0xFF
OPAQUE = 1
MAXIMUM_CHUNK = 1 << 20
_PIECE = 1 << 16  # bytes of one piece of `Entry.content`, where a hole is longer


@dataclass(frozen=True)
class Bounds:
    """How much one capture may hold. Sizes are in bytes; `content` is the sum of all files, holes included."""

    entries: int = 500_000
    content: int = 2 << 30
    depth: int = 1000
    path: int = 4096
    name: int = 255


@dataclass(frozen=True)
class Entry:
    """One name in the upper layer. Nothing in it may be believed to be harmless: see `ringfence.node.capture`."""

    path: bytes
    """Relative to the workspace, no leading slash; b"" is the workspace itself. Parents come before children."""
    kind: str
    """"file" | "directory" | "link" | "whiteout" | "other" (device, socket, FIFO)."""
    mode: int
    """Permission bits as the sandbox set them, `& 0o7777`."""
    size: int
    """Bytes of a file; 0 for everything else."""
    opaque: bool
    """The directory hides what the host's directory of that name holds."""
    strange: tuple[str, ...]
    """Overlay attributes that our mounts never make (redirect, metacopy, ...): names only."""
    target: bytes
    """Where a link points."""
    mtime_ns: int
    content: Iterator[bytes] | None
    """Of a file: exactly `size` bytes. What is left of it is skipped when the next entry is asked for."""


class Stream(Protocol):
    """Where the records come from: a buffered binary file, say `os.fdopen(descriptor, "rb")`."""

    def read(self, size: int, /) -> bytes: ...


class _Order:
    """Holds that records come parents first and sorted, which leaves no room for a name that comes twice."""

    def __init__(self, bounds: Bounds):
        self._bounds = bounds
        self._directories: list[bytes] = []  # the chain of directories that the next record may lie in
        self._last: list[bytes] = [b""]  # the greatest name so far in each of them, and in the workspace itself
        self._begun = False

    def check(self, path: bytes, kind: str) -> None:
        if not self._begun:
            if path or kind != "directory":
                raise _broken("the first record is not the workspace itself")
            self._begun = True
            return
        parts = path.split(b"/")
        if len(path) > self._bounds.path or len(parts) > self._bounds.depth:
            raise _broken("a path is too long")
        for part in parts:
            if part in (b"", b".", b"..") or b"\0" in part or len(part) > self._bounds.name:
                raise _broken("a path leads out of the workspace or is none")
        parents, name = parts[:-1], parts[-1]
        if self._directories[: len(parents)] != parents:
            raise _broken("a name comes before the directory it lies in")
        del self._directories[len(parents) :]
        del self._last[len(parents) + 1 :]
        if name <= self._last[-1]:
            raise _broken("a name comes twice or out of order")
        self._last[-1] = name
        if kind == "directory":
            self._directories.append(name)
            self._last.append(b"")


class _Content(Iterator[bytes]):
    """The bytes of one file, read as they are asked for."""

    def __init__(self, stream: Stream, size: int):
        self._stream = stream
        self._left = size
        self._hole = 0

    def __next__(self) -> bytes:
        if self._left == 0:
            raise StopIteration
        if self._hole == 0:
            hole, length = CHUNK.unpack(_exactly(self._stream, CHUNK.size))
            if hole not in (0, 1) or not 0 < length <= self._left or (not hole and length > MAXIMUM_CHUNK):
                raise _broken("a piece of a file is longer than the file")
            if not hole:
                self._left -= length
                return _exactly(self._stream, length)
            self._hole = length
        length = min(self._hole, _PIECE)
        self._hole -= length
        self._left -= length
        return bytes(length)

    def skip(self) -> None:
        while self._left:
            next(self)


def read_capture(stream: Stream, bounds: Bounds | None = None) -> Iterator[Entry]:
    """The entries of one capture, the workspace itself first.

    `content` of an entry must be consumed before the next entry is asked for. Raises CaptureError where the records
    break a rule or a bound, where they end early, and where the writer says that it could not go on.
    """
    bounds = bounds or Bounds()
    order = _Order(bounds)
    left = bounds.content
    for _ in range(bounds.entries + 1):
        raw = _exactly(stream, HEADER.size)
        number, flags, mode, path_length, target_length, names_length, size, mtime_ns = HEADER.unpack(raw)
        if number == END:
            return
        path, target = _exactly(stream, path_length), _exactly(stream, target_length)
        names = _exactly(stream, names_length)
        if number == FAILED:
            reason = path.decode("utf-8", "backslashreplace")[:500]
            raise CaptureError(f"the changes could not be read: {reason}", hint="discard them, or copy files out")
        if number >= len(KINDS):
            raise _broken("a record is of no known kind")
        kind = KINDS[number]
        order.check(path, kind)
        if (size and kind != "file") or (target and kind != "link") or b"\0" in target or len(target) > bounds.path:
            raise _broken("a record has a size or a target that its kind cannot have")
        left -= size
        if left < 0:
            raise CaptureError(
                f"the changed files hold more than {bounds.content} bytes",
                hint="holes count: a sparse file is written out in full. Remove what is large, or copy it out",
            )
        content = _Content(stream, size) if kind == "file" else None
        yield Entry(
            path=path, kind=kind, mode=mode & 0o7777, size=size, opaque=bool(flags & OPAQUE) and kind == "directory",
            strange=tuple(name.decode("utf-8", "backslashreplace") for name in names.split(b"\0") if name),
            target=target, mtime_ns=mtime_ns, content=content,
        )  # fmt: skip
        if content is not None:
            content.skip()
    raise CaptureError(
        f"more than {bounds.entries} files were changed", hint="remove generated files inside, or discard the changes"
    )


def _exactly(stream: Stream, size: int) -> bytes:
    pieces: list[bytes] = []
    while size:
        piece = stream.read(size)
        if not piece:
            raise _broken("it ends early")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _broken(why: str) -> CaptureError:
    return CaptureError(f"the capture of the workspace is malformed: {why}", hint="the sandbox is not to be trusted")
