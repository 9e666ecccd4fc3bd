"""Write down what a sandbox changed below its workspace, for an owner who may not read the upper layer himself.

A fork of the zygote does it: it never ran user code and is root of the user namespace that the files' ids belong to.
It holds a descriptor of the upper layer since the sandbox's start, walks it by openat(2) alone, never through a link,
and reads no content as anything but bytes. While it walks, the sandbox stands still, by its control group or, where
there is none, by signals from here. `ringfence.node.capture` is the other end, and says what a record looks like.
Standard library and ringfence.linux only.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import struct
import time

from ringfence.linux import namespaces
from ringfence.linux.syscalls import NUMBER, call, close_from

HEADER = struct.Struct("!BBHHHHQq")
CHUNK = struct.Struct("!BI")
FILE, DIRECTORY, LINK, WHITEOUT, OTHER = range(5)
END, FAILED = 0xFE, 0xFF
OPAQUE = 1
PIECE = 1 << 20
LONGEST_HOLE = 1 << 30
DEPTH = 1000
PATIENCE = 600.0  # seconds one capture may take, a reader that is slow included
STOP_PATIENCE = 5.0  # seconds until every process has taken note of a stop signal

MARK = "user.overlay."
_ORDINARY = ("opaque", "impure", "origin", "uuid", "upper", "nlink", "protattr")
"""Attributes that the kernel itself makes in an upper layer (fs/overlayfs/overlayfs.h); `opaque` is told apart."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class TooDeepError(Exception):
    """More directories within each other than any program makes."""


def main(upper: int, out: int, first: int = -1) -> int:
    """Write the capture of `upper` to `out`. `first`, where it is given, is a pidfd of process 1 of the sandbox, which
    is to be stopped meanwhile. Returns 0, or 3 where a process did not stand still. Raises OSError where nobody reads.
    """
    close_from([number for number in (0, 1, 2, upper, out, first) if number >= 0])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    still = True
    try:
        if first >= 0:
            still = stop(first)
        signal.signal(signal.SIGALRM, _late)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        write(upper, out)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if first >= 0:
            resume(first)
    return 0 if still else 3


def _late(number: int, frame: object) -> None:
    raise TimeoutError(errno.ETIMEDOUT, "nobody read the capture in time")


def write(upper: int, out: int) -> None:
    """Write the records of everything below the directory `upper`, and an end; or a record that says why not."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        _Writer(out).tree(upper)
    except TimeoutError:
        raise
    except BrokenPipeError:
        raise
    except (OSError, TooDeepError) as error:
        text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        _all(out, HEADER.pack(FAILED, 0, 0, len(text), 0, 0, 0, 0) + text.encode()[:1000])


class _Writer:
    def __init__(self, out: int):
        self.out = out
        self.buffer = bytearray()

    def tree(self, upper: int) -> None:
        """Directories before what is in them, names of one directory in order: no name can come twice unnoticed."""
        root = os.open(".", _READ | os.O_DIRECTORY, dir_fd=upper)
        self.directory(b"", root)
        waiting = [(b"", root, self.names(root))]
        while waiting:
            path, descriptor, names = waiting[-1]
            if not names:
                os.close(descriptor)
                waiting.pop()
                continue
            name = names.pop()
            below = path + b"/" + name if path else name
            child = self.entry(below, name, descriptor)
            if child >= 0:
                if len(waiting) >= DEPTH or len(below) > 4096:
                    raise TooDeepError("directories lie too deep within each other: " + repr(below[:60]))
                waiting.append((below, child, self.names(child)))
        self.flush()
        _all(self.out, HEADER.pack(END, 0, 0, 0, 0, 0, 0, 0))

    @staticmethod
    def names(descriptor: int) -> list[bytes]:
        """Last one first: they are taken from the end."""
        return sorted((os.fsencode(name) for name in os.listdir(descriptor)), reverse=True)

    def directory(self, path: bytes, descriptor: int) -> None:
        self.record(DIRECTORY, path, os.fstat(descriptor), b"", _attributes(descriptor))

    def entry(self, path: bytes, name: bytes, parent: int) -> int:
        """Write one record; the descriptor of a directory, whose names come next, else -1."""
        state = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = stat.S_IFMT(state.st_mode)
        if kind == stat.S_IFDIR:
            descriptor = os.open(name, _READ | os.O_DIRECTORY, dir_fd=parent)
            self.directory(path, descriptor)
            return descriptor
        if kind == stat.S_IFREG:
            descriptor = os.open(name, _READ, dir_fd=parent)
            try:
                self.file(path, descriptor)
            finally:
                os.close(descriptor)
        elif kind == stat.S_IFLNK:
            self.record(LINK, path, state, os.fsencode(os.readlink(name, dir_fd=parent)), ())
        elif kind == stat.S_IFCHR and state.st_rdev == 0:
            self.record(WHITEOUT, path, state, b"", ())
        else:
            self.record(OTHER, path, state, b"", ())
        return -1

    def file(self, path: bytes, descriptor: int) -> None:
        state = os.fstat(descriptor)
        names = _attributes(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EAGAIN, "a file was exchanged while it was read")
        if state.st_size == 0 and MARK + "whiteout" in names:
            self.record(WHITEOUT, path, state, b"", ())  # the form for file systems without device nodes
            return
        self.record(FILE, path, state, b"", names)
        position = 0
        while position < state.st_size:
            try:
                start = os.lseek(descriptor, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                start = state.st_size
            start = min(start, state.st_size)
            while position < start:
                length = min(start - position, LONGEST_HOLE)
                self.put(CHUNK.pack(1, length))
                position += length
            if position < state.st_size:
                end = min(os.lseek(descriptor, position, os.SEEK_HOLE), state.st_size, position + PIECE)
                data = os.pread(descriptor, end - position, position)
                if not data:
                    raise OSError(errno.EAGAIN, "a file shrank while it was read")
                self.put(CHUNK.pack(0, len(data)))
                self.put(data)
                position += len(data)

    def record(self, kind: int, path: bytes, state: os.stat_result, target: bytes, names: tuple) -> None:
        opaque = OPAQUE if MARK + "opaque" in names else 0
        strange = b"\0".join(
            os.fsencode(name) for name in names if name[len(MARK) :] not in _ORDINARY
        )[: 1 << 15]  # fmt: skip
        size = state.st_size if kind == FILE else 0
        mode, moment = state.st_mode & 0o7777, state.st_mtime_ns
        self.put(HEADER.pack(kind, opaque, mode, len(path), len(target), len(strange), size, moment))
        self.put(path + target + strange)

    def put(self, data: bytes) -> None:
        self.buffer += data
        if len(self.buffer) >= PIECE:
            self.flush()

    def flush(self) -> None:
        _all(self.out, self.buffer)
        self.buffer = bytearray()


def _attributes(descriptor: int) -> tuple:
    """The overlay's attributes of a file or directory: names only."""
    return tuple(sorted(name for name in os.listxattr(descriptor) if name.startswith(MARK)))


def _all(out: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


# Standing still without a control group ----------------------------------------------------------------


def stop(first: int) -> bool:
    """SIGSTOP to every process of the sandbox whose first one is behind `first`; True once all of them stand still.

    The first one stops first, so that none comes to life after: it answers to signals of an outer pid namespace only.
    """
    _signal_all(first, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_PATIENCE
    with open(f"/proc/self/fdinfo/{first}") as information:
        pid = next(line.split()[1] for line in information if line.startswith("Pid:"))
    space = os.readlink(f"/proc/{pid}/ns/pid")
    while time.monotonic() < deadline:
        if all(_stands(name, space) for name in os.listdir("/proc") if name.isdigit()):
            return True
        time.sleep(0.002)
    return False


def resume(first: int) -> None:
    """SIGCONT to every process of the sandbox, those included that had been stopped before."""
    _signal_all(first, signal.SIGCONT)


def _signal_all(first: int, number: int) -> None:
    call(NUMBER["pidfd_send_signal"], first, number, None, 0, what="pidfd_send_signal")
    child = namespaces.fork_alone()
    if child == 0:
        try:
            # A process enters a pid namespace by its children; kill(2) with -1 reaches all of its own namespace.
            namespaces.enter(first, namespaces.CLONE_NEWPID)
            grandchild = namespaces.fork_alone()
            if grandchild == 0:
                try:
                    os.kill(-1, number)
                except ProcessLookupError:
                    pass
                os._exit(0)
            os.waitpid(grandchild, 0)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _stands(name: str, space: str) -> bool:
    try:
        if os.readlink(f"/proc/{name}/ns/pid") != space:
            return True
        with open(f"/proc/{name}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z", b"X")
    except OSError:
        return True  # gone
