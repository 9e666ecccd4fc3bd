"""Names below the workspace, reached step by step from one descriptor.

Guards the rest of the host: every step is openat(2) with O_NOFOLLOW, `..` is refused and so is another file system,
so that no link and no mount, whoever made them and whenever, leads anywhere but to what the reviewer was shown.
Paths are bytes, relative to the workspace.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

__all__ = ["OtherFileSystem", "Seen", "Tree", "kind_of", "names_in"]

# O_PATH: to go through a directory one needs the right to search it, not to list it.
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20


class OtherFileSystem(OSError):
    """Something is mounted there, which a sandbox never saw."""


def kind_of(mode: int) -> str:
    """`file`, `directory`, `link` or `other`."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


def names_in(directory: int) -> list[bytes]:
    """The names in the directory of a descriptor, sorted; any descriptor will do, one of O_PATH too. Raises OSError."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return sorted(map(os.fsencode, os.listdir(descriptor)))
    finally:
        os.close(descriptor)


class Seen(NamedTuple):
    """What a look at one name of the host showed. Times are in nanoseconds since 1970, `mode` is all of its bits."""

    kind: str
    mode: int
    size: int
    inode: int
    device: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    gid: int

    @classmethod
    def of(cls, state: os.stat_result) -> Self:
        return cls(
            kind_of(state.st_mode), stat.S_IMODE(state.st_mode), state.st_size, state.st_ino, state.st_dev,
            state.st_mtime_ns, state.st_ctime_ns, state.st_uid, state.st_gid,
        )  # fmt: skip

    def same_content(self, other: Seen) -> bool:
        """Whether nothing suggests that one is not the other; a rename in between changes nothing of this."""
        return (self.kind, self.size, self.mtime_ns) == (other.kind, other.size, other.mtime_ns)


class Tree:
    """The workspace's directory on the host. Takes over the descriptor."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.device = os.fstat(descriptor).st_dev

    @classmethod
    def open(cls, path: str) -> Self:
        """The directory at `path`, which may be reached through links: the caller chose it. Raises OSError."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def directory(self, path: bytes) -> Iterator[int]:
        """A descriptor to reach names in the directory `path` (b"": the workspace itself); not to list it.

        Raises OSError, also for a link.
        """
        descriptor = os.dup(self.descriptor)
        try:
            for name in path.split(b"/") if path else ():
                if name in (b"", b".", b".."):
                    raise ValueError(f"{path!r} is not a plain path")
                below = os.open(name, _STEP, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
                if os.fstat(descriptor).st_dev != self.device:
                    raise OtherFileSystem(f"another file system is mounted on the way to {os.fsdecode(path)!r}")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """(descriptor of the directory that `path` lies in, its last name). Raises OSError."""
        above, _, name = path.rpartition(b"/")
        if name in (b"", b".", b".."):
            raise ValueError(f"{path!r} is not a plain path")
        with self.directory(above) as descriptor:
            yield descriptor, name

    def look(self, path: bytes) -> Seen | None:
        """What is at `path`; None where there is nothing, or where something on the way is no directory."""
        try:
            with self.parent(path) as (directory, name):
                return Seen.of(os.stat(name, dir_fd=directory, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # O_NOFOLLOW met a link
                return None
            raise

    def names(self, path: bytes) -> list[bytes]:
        """The names in a directory, sorted. Raises OSError."""
        with self.directory(path) as descriptor:
            return names_in(descriptor)

    def set_mode(self, path: bytes, mode: int, only_from: int | None = None) -> None:
        """Change a directory's bits; with `only_from` only where it has those now. Raises OSError."""
        with self.directory(path) as descriptor:
            if only_from is None or stat.S_IMODE(os.fstat(descriptor).st_mode) == only_from:
                os.chmod(f"/proc/self/fd/{descriptor}", mode)  # this very directory: the descriptor was opened by O_NOFOLLOW

    def read_link(self, path: bytes) -> bytes:
        """Where a link points. Raises OSError."""
        with self.parent(path) as (directory, name):
            return os.readlink(name, dir_fd=directory)

    def read(self, path: bytes, most: int, keep: int = 0) -> tuple[Seen, str, bytes]:
        """(what was read, SHA-256 of a regular file, its bytes where it has no more than `keep`).

        Raises OSError; also where it is no regular file, is larger than `most`, or changes while it is read.
        """
        with self.parent(path) as (directory, name):
            # O_NONBLOCK: what was a file a moment ago may be a FIFO now.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=directory)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode) or state.st_size > most:
                raise OSError(f"{os.fsdecode(path)!r} is no regular file of at most {most} bytes")
            digest = hashlib.sha256()
            kept: list[bytes] = []
            while piece := os.read(descriptor, _PIECE):
                digest.update(piece)
                if state.st_size <= keep:
                    kept.append(piece)
            after = Seen.of(os.fstat(descriptor))
            if after != Seen.of(state) or sum(map(len, kept)) not in (0, state.st_size):
                raise OSError(f"{os.fsdecode(path)!r} changed while it was read")
            return after, digest.hexdigest(), b"".join(kept)
        finally:
            os.close(descriptor)

    def below(self, path: bytes, unreadable: list[bytes]) -> Iterator[tuple[bytes, Seen]]:
        """Everything below the directory `path`, parents first. What cannot be looked into is added to `unreadable`;
        a directory where something is mounted is named and not entered."""
        waiting = [path]
        while waiting:
            here = waiting.pop()
            found: list[tuple[bytes, Seen]] = []
            try:
                with self.directory(here) as descriptor:
                    for name in names_in(descriptor):
                        state = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                        found.append((here + b"/" + name if here else name, Seen.of(state)))
            except OSError:
                unreadable.append(here)
            for child, seen in found:
                yield child, seen
                if seen.kind == "directory" and seen.device == self.device:
                    waiting.append(child)
