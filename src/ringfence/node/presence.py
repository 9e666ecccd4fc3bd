"""Where the nodes of one user find each other: one socket for each, in a directory that nobody else may enter.

Guards against other users (the directory is 0700 and ours, every connection's credentials are looked at on both
ends), against sandboxes (none has the directory in its root; one that is lent a directory above it, under the
owner's own uid, is refused because its user namespace is another one), and against names that lie: an entry is
named by pid, start time and pid namespace, so a socket left by a process that is gone, or whose pid was given to
another one, is never taken for a living node. Facts: unix(7), proc_pid_stat(5), user_namespaces(7).

Directory: `$XDG_RUNTIME_DIR/ringfence`, else `/run/user/UID/ringfence`, else `run` in the cache. A reader looks into
all of them. Standard library only.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress

from ringfence.node.cache import cache_directory

__all__ = ["Entry", "connect", "entries", "listen", "peer_is_ours", "withdraw"]

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_SO_PEERPIDFD = 77  # Linux 6.5
_BACKLOG = 16


class Entry:
    """A node that lives, as its socket names it."""

    __slots__ = ("directory", "name", "pid")

    def __init__(self, directory: str, name: str, pid: int) -> None:
        self.directory = directory
        self.name = name
        self.pid = pid


def listen() -> tuple[socket.socket, str]:
    """A listening socket under this process's name, and its path for `withdraw`.

    Raises OSError or EngineError where there is no private directory: then this node cannot be found.
    """
    place = _own_directory()
    directory = _open(place)
    try:
        name = _name(os.getpid())
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # By descriptor: 108 bytes are little for a socket's name, and no link on the way is followed.
            listener.bind(f"/proc/self/fd/{directory}/{name}")
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener, f"{place}/{name}"
    finally:
        os.close(directory)


def withdraw(path: str) -> None:
    """Remove an entry of this process."""
    with suppress(OSError):
        os.unlink(path)


def entries() -> list[Entry]:
    """The nodes of this user that live; what dead ones left is removed."""
    found: list[Entry] = []
    for path in _candidates():
        try:
            directory = _open(path)
        except OSError:
            continue
        try:
            for name in sorted(os.listdir(directory)):
                pid = _pid(name)
                if pid is None:
                    continue
                if _name(pid) == name:
                    found.append(Entry(path, name, pid))
                elif _namespace() == name.rpartition("-")[2]:
                    os.unlink(name, dir_fd=directory)  # of a process that is certainly gone
        except OSError:
            pass  # somebody else was quicker
        finally:
            os.close(directory)
    return found


def connect(entry: Entry, timeout: float = 5.0) -> socket.socket:
    """A connection to a node. Raises OSError when it does not listen or is not who its name says."""
    directory = _open(entry.directory)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A full backlog is waited for by a blocking connect(2) alone, and for no longer than this (socket(7)).
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(timeout), 0))
            connection.connect(f"/proc/self/fd/{directory}/{entry.name}")
            connection.settimeout(timeout)
            pid, uid = _peer(connection)
            if uid != os.geteuid() or pid != entry.pid:
                raise PermissionError(1, f"process {pid} of uid {uid} listens under the name of process {entry.pid}")
        except BaseException:
            connection.close()
            raise
        return connection
    finally:
        os.close(directory)


def peer_is_ours(connection: socket.socket) -> bool:
    """True when the other end is a process of this user (or root), outside of every sandbox."""
    try:
        pid, uid = _peer(connection)
        if uid not in (os.geteuid(), 0) or pid <= 0:
            return False
        ours = os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{pid}/ns/user")
        return ours and _still_there(connection)
    except OSError:
        return False


def _still_there(connection: socket.socket) -> bool:
    """That the pid was not another process's by the time it was looked at; taken for granted before Linux 6.5."""
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(pidfd)


def _peer(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _candidates() -> Iterator[str]:
    seen: set[str] = set()
    for path in (os.environ.get("XDG_RUNTIME_DIR", "").rstrip("/"), f"/run/user/{os.geteuid()}"):
        if os.path.isabs(path) and path not in seen:
            seen.add(path)
            yield path + "/ringfence"
    yield cache_directory() + "/run"


def _own_directory() -> str:
    for path in _candidates():
        try:
            above = os.lstat(os.path.dirname(path))
            if not stat.S_ISDIR(above.st_mode) or above.st_uid != os.geteuid() or above.st_mode & 0o022:
                continue
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError:
            continue
        return path
    raise FileNotFoundError(2, "there is no private directory to be found in")


def _open(path: str) -> int:
    """A descriptor of a directory that is ours alone. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(1, f"{path} is not ours alone (uid {state.st_uid}, mode {stat.S_IMODE(state.st_mode):04o})")
    return descriptor


def _name(pid: int) -> str:
    """How the entry of a process is called; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return ""
    return f"node-{pid}-{started}-{_namespace()}"


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _pid(name: str) -> int | None:
    words = name.split("-")
    if len(words) == 4 and words[0] == "node" and all(word.isascii() and word.isdigit() for word in words[1:]):
        return int(words[1])
    return None
