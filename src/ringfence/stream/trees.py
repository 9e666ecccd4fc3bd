"""The local side of directory transfers: writing a tree that a sandbox made up, reading one to send it.

Guards the host's files. Everything that comes out of a sandbox is hostile, its names first: each is checked
and then created relative to a directory descriptor, never following a link (openat(2) with O_NOFOLLOW), so
that no name and no link, however it got there, leads outside of the destination. No special file and no
set-id bit is ever made. Uploads take regular files by descriptor, so a FIFO or device cannot block or flood.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from typing import NamedTuple, Self

from ringfence.errors import FileConflictError, InvalidArgumentError
from ringfence.stream.results import SkippedEntry, TransferReport

__all__ = ["LocalEntry", "TreeWriter", "WriteTarget", "link_stays_inside", "open_regular", "walk_tree"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def name_is_safe(name: str) -> bool:
    """True for a name that can be one directory entry: not empty, `.`, `..`, no slash, no NUL, at most 255 bytes."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def link_stays_inside(depth: int, target: str) -> bool:
    """True when a link at `depth` directories below the root, with this target, cannot lead above the root.

    Only a run of leading `..` is allowed: the directories above the link are real, so each `..` goes up by
    exactly one. A `..` after a name could follow another link first and come out anywhere.
    """
    if not target or "\0" in target or target.startswith("/"):
        return False
    names = [name for name in target.split("/") if name not in ("", ".")]
    ups = 0
    while ups < len(names) and names[ups] == "..":
        ups += 1
    return ups <= depth and ".." not in names[ups:]


class WriteTarget:
    """One file being written below the destination; either `commit()` or `discard()` ends it."""

    def __init__(
        self, descriptor: int, directory: int, temporary: str, name: str, replace: bool, umask: int
    ) -> None:
        self.descriptor = descriptor
        self._directory = directory
        self._temporary = temporary
        self._name = name
        self._replace = replace
        self._umask = umask

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]

    def commit(self, executable: bool = False) -> None:
        """Give the file its name. Raises FileConflictError when the name is taken and may not be replaced."""
        os.fchmod(self.descriptor, (0o755 if executable else 0o644) & ~self._umask)
        self._close()
        try:
            if self._replace:
                os.rename(self._temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            else:
                # link(2) refuses an existing name, which rename(2) would replace.
                os.link(
                    self._temporary,
                    self._name,
                    src_dir_fd=self._directory,
                    dst_dir_fd=self._directory,
                    follow_symlinks=False,
                )
                os.unlink(self._temporary, dir_fd=self._directory)
        except FileExistsError:
            self.discard()
            raise FileConflictError(f"{self._name!r} exists") from None
        except OSError:
            self.discard()
            raise

    def _link(self) -> bool:
        """Give the name with link(2), which refuses one that is taken, where rename(2) would replace it.

        False on a file system without links (FAT), where a look has to do.
        """
        directory = self._directory
        try:
            os.link(
                self._temporary, self._name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False
            )
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            try:
                os.stat(self._name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                return False
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.unlink(self._temporary, dir_fd=directory)
        return True

    def discard(self) -> None:
        """Remove what was written so far."""
        self._close()
        try:
            os.unlink(self._temporary, dir_fd=self._directory)
        except FileNotFoundError:
            pass

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _umask() -> int:
    # There is no call that only reads the mask without a race between threads, but the kernel tells it here.
    try:
        with open("/proc/thread-self/status", "rb") as status:
            for line in status:
                if line.startswith(b"Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022


class TreeWriter:
    """Creates files, directories and links below `destination`, and nothing anywhere else.

    `destination` itself is the caller's word: it is made if missing, and links on the way to it are followed.
    With `overwrite`, an existing file or link of the same name is replaced (never written through); without,
    it stays and the entry is reported as skipped. Use as a context manager.
    """

    def __init__(self, destination: str, overwrite: bool = False) -> None:
        os.makedirs(destination, exist_ok=True)
        self._root = os.open(destination, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._overwrite = overwrite
        self._umask = _umask()
        self.report = TransferReport()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the destination's descriptor."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def skip(self, parts: tuple[str, ...], reason: str) -> None:
        """Report an entry as left out."""
        self.report.skipped.append(SkippedEntry("/".join(parts), reason))

    def open_directory(self, parts: tuple[str, ...]) -> int:
        """A descriptor of the directory at `parts`, reached without following any link. The caller closes it."""
        descriptor = os.dup(self._root)
        try:
            for name in parts:
                below = os.open(name, _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def add_directory(self, parts: tuple[str, ...]) -> bool:
        """Make one directory, or take the real directory that is there. False when it had to be skipped."""
        if not name_is_safe(parts[-1]):
            self.skip(parts, "its name is not a legal file name")
            return False
        parent = self.open_directory(parts[:-1])
        try:
            try:
                os.mkdir(parts[-1], 0o755, dir_fd=parent)
            except FileExistsError:
                try:
                    os.close(os.open(parts[-1], _DIRECTORY, dir_fd=parent))
                except OSError:
                    self.skip(parts, "something that is not a directory has its name")
                    return False
        finally:
            os.close(parent)
        self.report.directories += 1
        return True

    def open_file(self, parts: tuple[str, ...], parent: int) -> WriteTarget | None:
        """Begin one file in the directory `parent` (a descriptor that must outlive the target)."""
        if not name_is_safe(parts[-1]):
            self.skip(parts, "its name is not a legal file name")
            return None
        try:
            there = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(there.st_mode):
                self.skip(parts, "a directory has its name")
                return None
            if not self._overwrite:
                self.skip(parts, "it exists already")
                return None
        temporary = f".ringfence-{os.urandom(8).hex()}"
        descriptor = os.open(
            temporary,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=parent,
        )
        return WriteTarget(descriptor, parent, temporary, parts[-1], self._overwrite, self._umask)

    def add_symlink(self, parts: tuple[str, ...], target: str | None) -> None:
        """Make a link when its target is relative and stays inside; report it as skipped otherwise."""
        if not name_is_safe(parts[-1]):
            return self.skip(parts, "its name is not a legal file name")
        if target is None or not link_stays_inside(len(parts) - 1, target):
            return self.skip(parts, "a link that points outside")
        parent = self.open_directory(parts[:-1])
        try:
            os.symlink(target, parts[-1], dir_fd=parent)
        except FileExistsError:
            return self.skip(parts, "it exists already")
        except (OSError, ValueError) as error:
            return self.skip(parts, f"the link could not be made: {error}")
        finally:
            os.close(parent)
        self.report.symlinks += 1


class LocalEntry(NamedTuple):
    """One local entry to upload: `parts` below the root; a descriptor for files, a target for links."""

    parts: tuple[str, ...]
    kind: str
    descriptor: int = -1
    mode: int = 0
    target: str = ""


def open_regular(
    path: str | bytes | os.PathLike[str], *, dir_fd: int | None = None, follow: bool = True
) -> int:
    """Open a regular file for reading, never blocking on a FIFO. Raises InvalidArgumentError for other kinds."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgumentError(f"{os.fsdecode(path)!r} is not a regular file")
    return descriptor


def walk_tree(root: str, report: TransferReport) -> Generator[LocalEntry, None, None]:
    """Entries below `root`, directories before what is in them, in order of name; what cannot be sent is
    reported as skipped. The caller closes the descriptor of each file entry.

    Only `root` itself may be a link. No descriptor is held for a directory while the caller works, except
    the root's, and no link below it is followed.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    waiting: list[tuple[str, ...]] = [()]
    try:
        while waiting:
            parts = waiting.pop()
            try:
                directory = _open_below(top, parts)
            except OSError as error:
                report.skipped.append(SkippedEntry("/".join(parts), f"cannot be read: {error.strerror}"))
                continue
            try:
                if parts:
                    yield LocalEntry(parts, "dir", mode=os.fstat(directory).st_mode & 0o777)
                below: list[tuple[str, ...]] = []
                for name in sorted(os.listdir(directory)):
                    entry = _look(directory, (*parts, name), report)
                    if entry is None:
                        continue
                    if entry.kind == "dir":
                        below.append(entry.parts)
                    else:
                        yield entry
                waiting.extend(reversed(below))
            except PermissionError as error:
                report.skipped.append(SkippedEntry("/".join(parts), f"cannot be read: {error.strerror}"))
            finally:
                os.close(directory)
    finally:
        os.close(top)


def _open_below(top: int, parts: tuple[str, ...]) -> int:
    descriptor = os.dup(top)
    for name in parts:
        try:
            below = os.open(name, _DIRECTORY, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def _look(directory: int, parts: tuple[str, ...], report: TransferReport) -> LocalEntry | None:
    name = parts[-1]

    def skip(reason: str) -> None:
        report.skipped.append(SkippedEntry("/".join(parts), reason))

    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            return LocalEntry(parts, "dir")
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(name, dir_fd=directory)
            if link_stays_inside(len(parts) - 1, target):
                return LocalEntry(parts, "symlink", target=target)
            return skip("a link that points outside")
        if not stat.S_ISREG(found.st_mode):
            return skip("a special file")
        descriptor = open_regular(name, dir_fd=directory, follow=False)
    except InvalidArgumentError:
        return skip("a special file")
    except OSError as error:
        return skip(f"cannot be read: {error.strerror}")
    return LocalEntry(parts, "file", descriptor, found.st_mode & 0o777)
