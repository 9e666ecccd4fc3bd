"""Watching a directory: a small forked process per watch, as the user, that turns inotify into events.

Walking a tree and adding watches touches paths that user code shapes, so the agent does neither. Guards
against: a tree that changes while it is walked (what appears in a new directory before its watch is reported
as created), a reader that does not keep up (the kernel's queue overflows and the host is told), and the
agent's own temporary names (an upload is one "write", not a create and a rename).

Facts: inotify(7).
"""

from __future__ import annotations

import ctypes
import gc
import os
import stat
import struct

from ringfence.guest import processes
from ringfence.guest.credentials import User, decode, encode
from ringfence.guest.files import FileError, describe_error, is_temporary, resolve
from ringfence.guest.jobs import Refused, text_of
from ringfence.guest.protocol import MAX_JSON
from ringfence.linux.json_text import dumps, loads
from ringfence.linux.syscalls import check, close_from, libc

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    import socket
    from typing import Any

    from ringfence.guest.agent import Agent
else:
    import _signal as signal
    import _socket as socket

MAX_WATCHES = 16
_PACKET = 60 << 10
_EVENT = struct.Struct("iIII")
_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE, _DELETE_SELF = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200, 0x400
_Q_OVERFLOW, _IGNORED, _ISDIR = 0x4000, 0x8000, 0x40000000
_ONLYDIR, _DONT_FOLLOW = 0x1000000, 0x2000000
_WANTED = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF


class Watch:
    """The agent's side: a channel of operation "file.watch"."""

    def __init__(self, agent: Agent, channel: int, request: dict[str, Any]):
        if sum(isinstance(item, Watch) for item in agent.channels.values()) >= MAX_WATCHES:
            raise Refused("limit", f"{MAX_WATCHES} watches are active", "close one first, or watch a parent recursively")
        self.agent = agent
        self.channel = channel
        user = agent.credentials.user(request.get("user"))
        path = resolve(text_of(request.get("path"), "path"), encode(user.home))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            agent.check_descriptors(ours.fileno())
            self.pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise Refused("limit", f"no watcher can start: {error.strerror}") from None
        if self.pid == 0:
            _become_watcher(agent, theirs, user, path, bool(request.get("recursive")))
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._descriptor = ours.fileno()
        self._paused = False
        agent.children[self.pid] = self._exited
        agent.loop.watch(self._descriptor, self._ready)

    def _ready(self, events: int = 0) -> bool:
        if self._descriptor < 0:
            return False
        if self.agent.congested or self.agent.mux.data_room(self.channel) < MAX_JSON:
            # The watcher then waits too, and the kernel's queue overflows: which is reported.
            self.agent.loop.forget(self._descriptor)
            self.agent.stalled.add(self)
            self._paused = True
            return False
        try:
            packet = self._socket.recv(_PACKET)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            self.close({"ok": False, "error": {"code": "worker_died", "message": "the watcher was killed"}})
            return False
        try:
            message = loads(packet)
            error = message.get("error")
            if error is not None:
                self.close({"ok": False, "error": error})
                return False
            self.agent.mux.send_event(self.channel, message)
        except (ValueError, AttributeError, RecursionError):
            self.close({"ok": False, "error": {"code": "worker_died", "message": "the watcher broke"}})
            return False
        return True

    def resume(self) -> None:
        if self._paused and self._descriptor >= 0:
            self._paused = False
            self.agent.stalled.discard(self)
            self.agent.loop.watch(self._descriptor, self._ready)

    def _exited(self, status: int, usage: Any) -> None:
        if not self._paused:
            while self._ready():
                pass

    def close(self, result: dict[str, Any]) -> None:
        if self._descriptor >= 0:
            self.agent.loop.forget(self._descriptor)
            self.agent.stalled.discard(self)
            self._descriptor = -1
            self._socket.close()
            if self.pid in self.agent.children:
                processes.send(self.pid, signal.SIGKILL)
            self.agent.close_channel(self.channel, result)

    def on_data(self, stream: int, data: Any) -> None:
        self.agent.mux.grant(self.channel, len(data))

    def on_eof(self, stream: int) -> None:
        pass

    def on_event(self, event: dict[str, Any]) -> None:
        pass

    def on_credit(self) -> None:
        self.resume()

    def cancel(self) -> None:
        self.close({"ok": True})

    def fail(self, error: Exception) -> None:
        self.close({"ok": False, "error": {"code": "internal", "message": f"the agent failed: {error!r}"[:500]}})


class Watcher:
    """The forked side: inotify to events."""

    def __init__(self, channel: socket.socket, top: bytes, recursive: bool):
        self._channel = channel
        self._recursive = recursive
        self._top = top.rstrip(b"/") or b"/"
        self._inotify = check(libc.inotify_init1(ctypes.c_int(os.O_CLOEXEC)), "inotify_init1")
        self._names: dict[int, bytes] = {}  # watch descriptor to path relative to the top, b"" for the top
        self._moved: tuple[int, bytes, bool] | None = None  # cookie, old name and kind of a rename's first half

    def run(self) -> None:
        if not stat.S_ISDIR(os.stat(self._top).st_mode):
            raise FileError("not_a_directory", f"{decode(self._top)}: is not a directory", "watch the directory it is in")
        self._add(b"", report=False)
        self._send({"started": True})
        while True:
            buffer = os.read(self._inotify, 64 << 10)
            position = 0
            written: set[bytes] = set()
            while position < len(buffer):
                watch, mask, cookie, length = _EVENT.unpack_from(buffer, position)
                position += _EVENT.size
                name = buffer[position : position + length].rstrip(b"\0")
                position += length
                self._event(watch, mask, cookie, name, written)
            self._flush_move()

    def _add(self, relative: bytes, report: bool) -> None:
        """Watch a directory, and what is below it; with `report`, tell of what is there already."""
        waiting = [relative]
        while waiting:
            item = waiting.pop()
            path = self._top + b"/" + item if item else self._top
            flags = _WANTED | _ONLYDIR | (_DONT_FOLLOW if item else 0)
            number = libc.inotify_add_watch(ctypes.c_int(self._inotify), ctypes.c_char_p(path), ctypes.c_uint32(flags))
            if number < 0:
                error = ctypes.get_errno()
                if not item:
                    raise OSError(error, os.strerror(error), path)
                if error == 28:  # ENOSPC: the limit of watches
                    self._send({"type": "overflow", "path": decode(item)})
                continue
            self._names[number] = item
            if not self._recursive:
                return
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        below = item + b"/" + entry.name if item else entry.name
                        if report and not is_temporary(entry.name):
                            self._send({"type": "create", "path": decode(below)})
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(below)
            except OSError:
                continue

    def _event(self, watch: int, mask: int, cookie: int, name: bytes, written: set[bytes]) -> None:
        if mask & _Q_OVERFLOW:
            self._send({"type": "overflow", "path": ""})
            return
        if mask & _IGNORED:
            self._names.pop(watch, None)
            return
        directory = self._names.get(watch)
        if directory is None:
            return
        if mask & _DELETE_SELF:
            if not directory:
                self._send({"type": "remove", "path": ""})
            return
        if not name:
            return
        path = directory + b"/" + name if directory else name
        if self._moved is not None and not (mask & _MOVED_TO and cookie == self._moved[0]):
            self._flush_move()
        if mask & _MOVED_FROM:
            self._moved = (cookie, path, bool(mask & _ISDIR))
        elif mask & _MOVED_TO:
            moved, self._moved = self._moved, None
            if moved is None:
                self._created(path, mask, written)
            elif is_temporary(moved[1].rpartition(b"/")[2]):
                self._send({"type": "write", "path": decode(path)})
            else:
                if mask & _ISDIR:
                    self._renamed(moved[1], path)
                self._send({"type": "rename", "path": decode(moved[1]), "target": decode(path)})
        elif is_temporary(name) or (name[:1] == b"#" and name[1:].isdigit() and not self._exists(path)):
            return  # the second kind is how the kernel calls a file without a name
        elif mask & _CREATE:
            self._created(path, mask, written)
        elif mask & _MODIFY:
            if path not in written:
                written.add(path)
                self._send({"type": "write", "path": decode(path)})
        elif mask & _ATTRIB:
            self._send({"type": "chmod", "path": decode(path)})
        elif mask & _DELETE:
            self._send({"type": "remove", "path": decode(path)})

    def _exists(self, path: bytes) -> bool:
        try:
            os.lstat(self._top + b"/" + path)
        except OSError:
            return False
        return True

    def _created(self, path: bytes, mask: int, written: set[bytes]) -> None:
        self._send({"type": "create", "path": decode(path)})
        if mask & _ISDIR:
            if self._recursive:
                self._add(path, report=True)
            return
        try:
            status = os.lstat(self._top + b"/" + path)
        except OSError:
            return
        if stat.S_ISREG(status.st_mode) and status.st_size and path not in written:
            # A file that was linked in with its content (an upload) sees no write of its own.
            written.add(path)
            self._send({"type": "write", "path": decode(path)})

    def _renamed(self, old: bytes, new: bytes) -> None:
        for watch, name in self._names.items():
            if name == old or name.startswith(old + b"/"):
                self._names[watch] = new + name[len(old) :]

    def _flush_move(self) -> None:
        """A rename whose second half did not follow has left the watched tree."""
        moved, self._moved = self._moved, None
        if moved is not None and not is_temporary(moved[1].rpartition(b"/")[2]):
            self._send({"type": "rename", "path": decode(moved[1])})

    def _send(self, event: dict[str, Any]) -> None:
        self._channel.send(dumps(event).encode("ascii"))


def _become_watcher(agent: Agent, channel: socket.socket, user: User, path: bytes, recursive: bool) -> None:
    """In a fork of the agent: become a watcher. Never returns."""
    try:
        agent.forsake()
        close_from([0, 1, 2, channel.fileno(), *agent.credentials.needed])
        channel.setblocking(True)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        agent.credentials.shed(user, None, dumpable=False)
        gc.enable()
        os.chdir("/")
        Watcher(channel, path, recursive).run()
    except OSError as error:
        _tell(channel, error)
    except FileError as error:
        _tell(channel, error)
    finally:
        os._exit(0)


def _tell(channel: socket.socket, error: Exception) -> None:
    try:
        channel.send(dumps({"error": describe_error(error)}).encode("ascii"))
    except OSError:
        pass
