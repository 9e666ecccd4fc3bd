"""File operations, the agent's side: a small pool of workers, and the pumps that move file contents.

A worker opens, the agent moves the bytes: the descriptor of a regular file is passed over, and content goes
between it and the host's stream without another process in between. Guards against: workers that die, hang or
send nonsense (each request is then answered with "worker_died"), descriptors that are not regular files, one
slow operation holding up the others (a second worker is forked when the first is busy for long), and uploads
that end early (the target is touched only after the host's EOF).
"""

# ruff: noqa: TRY004  (a worker's nonsense is one kind of error, whatever its type)

from __future__ import annotations

import fcntl
import gc
import os
import stat
import struct

from ringfence.guest import files, processes
from ringfence.guest.credentials import User, encode
from ringfence.guest.files import INLINE, PACKET, describe_error
from ringfence.guest.jobs import Refused, text_of
from ringfence.guest.protocol import FILE
from ringfence.linux.channels import descriptors_in, send_descriptors
from ringfence.linux.json_text import dumps, dumps_compactly, loads
from ringfence.linux.syscalls import close_from

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    import socket
    from collections import deque
    from typing import Any

    from ringfence.guest.agent import Agent
else:
    import _signal as signal
    import _socket as socket
    from _collections import deque

MAX_WORKERS = 4
_PATIENCE = 0.005  # how long requests wait before one more worker is forked
_CHUNK = 256 << 10
_LENGTH = struct.Struct("!I")
_MAX_REQUEST = PACKET - INLINE
_SIMPLE = ("file.stat", "file.list", "file.mkdir", "file.move", "file.remove", "file.chmod", "file.symlink",
           "file.metadata", "file.hash")  # fmt: skip
_PATHS = {"file.move": ("source", "target"), "file.symlink": ("path", "target")}


class _Worker:
    """The agent's end of one worker process."""

    def __init__(self, service: FileService, user: User):
        self._service = service
        self._agent = service.agent
        self.user = user
        self.request: Request | None = None
        self._paused = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._agent.check_descriptors(ours.fileno())
            self.pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise Refused("limit", f"no file worker can start: {error.strerror}",
                          "the sandbox is at its limit of processes, memory or open files") from None  # fmt: skip
        if self.pid == 0:
            _become_worker(self._agent, theirs, user)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._descriptor = ours.fileno()
        self._agent.children[self.pid] = self._exited
        self._agent.loop.watch(self._descriptor, self._ready)

    def ask(self, request: Request, message: dict[str, Any], blob: bytes = b"", descriptors: tuple[int, ...] = ()) -> None:
        self.request = request
        raw = dumps_compactly(message).encode("ascii")
        try:
            send_descriptors(self._socket, _LENGTH.pack(len(raw)) + raw + blob, list(descriptors))
        except OSError:
            self.lose()

    def _ready(self, events: int) -> None:
        request = self.request
        if request is not None and not request.has_room():
            self._agent.loop.forget(self._descriptor)
            self._paused = True
            return
        try:
            packet, ancillary, flags, _ = self._socket.recvmsg(PACKET, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, ancillary, flags = b"", [], 0
        descriptors = descriptors_in(ancillary)
        if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or request is None:
            for descriptor in descriptors:
                os.close(descriptor)
            self.lose()
            return
        try:
            over = request.answered(self, packet[:1], packet[1:], descriptors)
        except (ValueError, KeyError, TypeError, RecursionError, OSError):
            # Only a worker that user code has tampered with says such things.
            self.lose()
            return
        if over:
            self.request = None
            self._service.idle(self)

    def resume(self) -> None:
        if self._paused and self._descriptor >= 0:
            self._paused = False
            self._agent.loop.watch(self._descriptor, self._ready)

    def lose(self) -> None:
        """End the worker; its request, if it still has one, is answered."""
        if self.pid in self._agent.children:
            processes.send(self.pid, signal.SIGKILL)
        self._gone()

    def _exited(self, status: int, usage: Any) -> None:
        # What it said before it died still counts.
        while self._descriptor >= 0 and self.request is not None and self.request.has_room():
            before = self.request
            self._ready(0)
            if self.request is before:
                break
        self._gone()

    def _gone(self) -> None:
        if self._descriptor >= 0:
            self._agent.loop.forget(self._descriptor)
            self._descriptor = -1
            self._socket.close()
        self._service.forget(self)
        request, self.request = self.request, None
        if request is not None:
            request.worker_died()

    def fail(self, error: Exception) -> None:
        self.lose()


class FileService:
    """Gives each request a worker of its user, in order; forks another only when the others take long."""

    def __init__(self, agent: Agent):
        self.agent = agent
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[Request, dict[str, Any], bytes, tuple[int, ...]]] = deque()
        self._growing = False

    def open(self, channel: int, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "file.read":
            request: Request = Download(self, channel, message)
        elif operation == "file.write":
            request = Upload(self, channel, message)
        elif operation in _SIMPLE:
            request = Request(self, channel, message)
        else:
            raise Refused("unsupported", f"this agent has no operation {operation!r}", "host and guest differ in version")
        self.agent.channels[channel] = request
        request.begin()

    def ask(self, request: Request, message: dict[str, Any], blob: bytes = b"", descriptors: tuple[int, ...] = ()) -> None:
        """Have a worker do `message` for `request`. `descriptors` stay the caller's to close."""
        self._queue.append((request, message, blob, descriptors))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._queue:
            request = self._queue[0][0]
            if request.over:
                self._queue.popleft()
                continue
            worker = next((item for item in self._workers if item.request is None and item.user == request.user), None)
            if worker is None:
                if self._workers and (self._growing or not self._can_grow(request.user)):
                    return
                if self._workers:
                    self._growing = True
                    self.agent.loop.after(_PATIENCE, self._grow)
                    return
                worker = self._fork(request)
                if worker is None:
                    continue
            _, message, blob, descriptors = self._queue.popleft()
            worker.ask(request, message, blob, descriptors)

    def _can_grow(self, user: User) -> bool:
        return len(self._workers) < MAX_WORKERS or any(item.request is None for item in self._workers)

    def _grow(self) -> None:
        self._growing = False
        if self._queue:
            request = self._queue[0][0]
            if request.over or any(item.request is None and item.user == request.user for item in self._workers):
                self._dispatch()
                return
            if len(self._workers) >= MAX_WORKERS:
                other = next((item for item in self._workers if item.request is None), None)
                if other is None:
                    return
                other.lose()
            self._fork(request)
            self._dispatch()

    def _fork(self, request: Request) -> _Worker | None:
        try:
            worker = _Worker(self, request.user)
        except Refused as refusal:
            if not self._workers:
                self._queue.popleft()
                request.refuse(refusal)
            return None
        self._workers.append(worker)
        return worker

    def idle(self, worker: _Worker) -> None:
        """A worker has answered: give it more, or let it go when another one rests already."""
        self._dispatch()
        if worker.request is None and sum(item.request is None for item in self._workers) > 1:
            worker.lose()

    def forget(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            if self._queue:
                self.agent.loop.soon(self._dispatch)

    def abandon(self, request: Request) -> None:
        """The host has cancelled: a worker that is at it is ended."""
        for item in list(self._queue):
            if item[0] is request:
                self._queue.remove(item)
        for worker in list(self._workers):
            if worker.request is request:
                worker.request = None
                worker.lose()

    def resume(self, request: Request) -> None:
        for worker in self._workers:
            if worker.request is request:
                worker.resume()


class Request:
    """One file operation: a channel whose answer is the worker's."""

    def __init__(self, service: FileService, channel: int, message: dict[str, Any]):
        self.service = service
        self.agent = service.agent
        self.channel = channel
        self.user = self.agent.credentials.user(message.get("user"))
        self.over = False
        self.message = dict(message)
        for key in _PATHS.get(message["op"], ("path",)):
            if not text_of(message.get(key), key):
                raise Refused("invalid", f"{key} is empty")
        if len(dumps(self.message)) > _MAX_REQUEST:
            raise Refused("invalid", "the request is too long")

    def begin(self) -> None:
        self.service.ask(self, self.message)

    def has_room(self) -> bool:
        """Whether the host takes one more packet of content now."""
        if self.agent.congested:
            self.agent.stalled.add(self)
            return False
        return self.agent.mux.data_room(self.channel) >= PACKET

    def resume(self) -> None:
        self.service.resume(self)

    def answered(self, worker: _Worker, kind: bytes, payload: bytes, descriptors: list[int]) -> bool:
        """A packet of the worker; True when the worker is done with this request."""
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == b"D":
            self.data(payload)
            return False
        if kind != b"J":
            raise ValueError("an unexpected packet")
        answer = loads(payload)
        if not isinstance(answer, dict):
            raise ValueError("not an object")
        self.answer(answer)
        return True

    def data(self, payload: bytes) -> None:
        self.agent.mux.send_data(self.channel, FILE, payload)

    def answer(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.finish({"ok": False, "error": answer["error"]})
        else:
            self.finish({"ok": True, **answer})

    def finish(self, result: dict[str, Any]) -> None:
        if not self.over:
            self.over = True
            self.release()
            self.agent.stalled.discard(self)
            self.agent.close_channel(self.channel, result)

    def refuse(self, refusal: Refused) -> None:
        if not self.over:
            self.over = True
            self.release()
            self.agent.refuse(self.channel, refusal)

    def release(self) -> None:
        """Close what this request holds."""

    def worker_died(self) -> None:
        self.finish({"ok": False, "error": {
            "code": "worker_died", "message": "the file worker was killed during the operation",
            "hint": "code in the sandbox may have killed it, or memory ran out; try again",
        }})  # fmt: skip

    def on_data(self, stream: int, data: Any) -> None:
        self.agent.mux.grant(self.channel, len(data))

    def on_eof(self, stream: int) -> None:
        pass

    def on_event(self, event: dict[str, Any]) -> None:
        pass

    def on_credit(self) -> None:
        self.service.resume(self)

    def cancel(self) -> None:
        self.service.abandon(self)
        self.finish({"ok": False, "error": {"code": "invalid", "message": "cancelled by the host"}})

    def fail(self, error: Exception) -> None:
        self.service.abandon(self)
        self.finish({"ok": False, "error": {"code": "internal", "message": f"the agent failed: {error!r}"[:500]}})


class Download(Request):
    """file.read: a small file comes through the worker, a large one is read here from its descriptor."""

    def __init__(self, service: FileService, channel: int, message: dict[str, Any]):
        super().__init__(service, channel, message)
        self._offset = whole(message.get("offset") or 0, "offset")
        self._length = None if message.get("length") is None else whole(message["length"], "length")
        self._descriptor = -1
        self._left = 0
        self._size = 0
        import hashlib  # as in files.py

        self._digest = hashlib.sha256()
        self._scheduled = False

    def answered(self, worker: _Worker, kind: bytes, payload: bytes, descriptors: list[int]) -> bool:
        if kind == b"W" and not descriptors:
            length = _LENGTH.unpack_from(payload)[0] if len(payload) >= 4 else 0
            entry = loads(payload[4 : 4 + length])["entry"]
            self.agent.mux.send_event(self.channel, {"entry": entry})
            if len(payload) > 4 + length:
                self.data(payload[4 + length :])
            self.answer({})
            return True
        if kind != b"E":
            return super().answered(worker, kind, payload, descriptors)
        try:
            entry = loads(payload)["entry"]
            self.agent.mux.send_event(self.channel, {"entry": entry})
            if not descriptors:
                return False
            status = os.fstat(descriptors[0])
            access = fcntl.fcntl(descriptors[0], fcntl.F_GETFL) & os.O_ACCMODE
            # Reading a regular file of a disk or tmpfs does not wait for anyone; one of /proc may.
            if not stat.S_ISREG(status.st_mode) or status.st_dev in self.agent.special_devices or access == os.O_WRONLY:
                raise ValueError("not a regular file")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self._descriptor = descriptors[0]
        self._left = max(0, status.st_size - self._offset)
        if self._length is not None:
            self._left = min(self._left, self._length)
        self._schedule()
        return True

    def data(self, payload: bytes) -> None:
        self._digest.update(payload)
        self._size += len(payload)
        super().data(payload)

    def answer(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            super().answer(answer)
        else:
            self.finish({"ok": True, "size": self._size, "sha256": self._digest.hexdigest()})

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.agent.loop.soon(self.pump)

    def pump(self) -> None:
        """Move one chunk; the loop serves everyone else before the next."""
        self._scheduled = False
        if self.over or self._descriptor < 0:
            return
        if self.agent.congested:
            self.agent.stalled.add(self)
            return
        size = min(_CHUNK, self._left)
        room = self.agent.mux.data_room(self.channel)
        if room < size:
            if room < INLINE:
                return  # credit will call again
            size = room
        try:
            data = os.pread(self._descriptor, size, self._offset) if size else b""
        except OSError as error:
            self.finish({"ok": False, "error": describe_error(error)})
            return
        if data:
            self._offset += len(data)
            self._left -= len(data)
            self.data(data)
        if data and self._left > 0:
            self._schedule()
        else:
            self.answer({})

    def resume(self) -> None:
        super().resume()
        if self._descriptor >= 0:
            self._schedule()

    def on_credit(self) -> None:
        self.resume()

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Upload(Request):
    """file.write: written into a file without a name, which gets its name after the host's EOF."""

    def __init__(self, service: FileService, channel: int, message: dict[str, Any]):
        super().__init__(service, channel, message)
        try:
            files.permission_bits(message.get("mode"), 0)
        except files.FileError as error:
            raise Refused(error.code, str(error), error.hint) from None
        self._small = message.get("small") is True
        self._early: list[bytes] = []
        self._early_size = 0
        self._descriptors: list[int] = []  # the file, its directory
        self._place: dict[str, Any] = {}
        self._size = 0
        import hashlib  # as in files.py

        self._digest = hashlib.sha256()
        self._end = False
        self._asked = ""

    def begin(self) -> None:
        # What the host sent together with the request is looked at first: a small file then takes one message.
        self.agent.loop.soon(self._choose)

    def _choose(self) -> None:
        if self.over or self._asked:
            return
        if self._small and not self._end and self._early_size <= INLINE:
            return  # the host says that the end comes at once
        if self._end and self._early_size <= INLINE:
            self._asked = "put"
            self.service.ask(self, {**self.message, "op": "put"}, b"".join(self._early))
        else:
            self._asked = "begin"
            self.service.ask(self, {**self.message, "op": "begin", "metadata": None})

    def on_data(self, stream: int, data: Any) -> None:
        if stream != FILE or self.over:
            self.agent.mux.grant(self.channel, len(data))
            return
        self._digest.update(data)
        self._size += len(data)
        if self._descriptors:
            self._write(data)
        else:
            self._early.append(bytes(data))
            self._early_size += len(data)
            if self._small and self._early_size > INLINE:
                self._small = False  # it is not
                self._choose()

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        self.agent.mux.grant(self.channel, len(view))
        try:
            while view:
                view = view[os.write(self._descriptors[0], view) :]
        except OSError as error:
            self.finish({"ok": False, "error": describe_error(error)})

    def on_eof(self, stream: int) -> None:
        if stream == FILE:
            self._end = True
            if self._small:
                self._choose()
            self._commit()

    def _commit(self) -> None:
        if self._end and self._descriptors and not self.over:
            self._asked = "commit"
            self.service.ask(self, {**self.message, "op": "commit", **self._place}, b"", tuple(self._descriptors))

    def has_room(self) -> bool:
        return True

    def answered(self, worker: _Worker, kind: bytes, payload: bytes, descriptors: list[int]) -> bool:
        if self._asked != "begin" or len(descriptors) != 2:
            return super().answered(worker, kind, payload, descriptors)
        try:
            place = loads(payload)
            if not isinstance(place["name"], str) or not isinstance(place["temporary"], str):
                raise ValueError("bad names")
            status = os.fstat(descriptors[0])
            if not stat.S_ISREG(status.st_mode) or status.st_dev in self.agent.special_devices:
                raise ValueError("not a regular file")
            self.agent.check_descriptors(max(descriptors))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self._place = {"name": place["name"], "temporary": place["temporary"]}
        self._descriptors = descriptors
        early, self._early = self._early, []
        for piece in early:
            if not self.over:
                self._write(piece)
        self._asked = ""
        if self._end and not self.over:
            # The worker is free for others only after this call, so the commit is asked for in the next round.
            self.agent.loop.soon(self._commit)
        return True

    def answer(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            super().answer(answer)
        else:
            self._place = {}
            self.finish({"ok": True, "entry": answer["entry"], "size": self._size, "sha256": self._digest.hexdigest()})

    def release(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        self._early = []
        if descriptors and self._place.get("temporary"):
            # Only a file system without nameless files gets here: the name must go as well.
            Cleanup(self.service, self.user, self._place["temporary"], descriptors)
        else:
            for descriptor in descriptors:
                os.close(descriptor)


class Cleanup(Request):
    """Removes the temporary name of an upload that did not come to its end; has no channel."""

    def __init__(self, service: FileService, user: User, temporary: str, descriptors: list[int]):
        self.service = service
        self.agent = service.agent
        self.channel = 0
        self.user = user
        self.over = False
        self._descriptors = descriptors
        service.ask(self, {"op": "discard", "temporary": temporary}, b"", (descriptors[1],))

    def has_room(self) -> bool:
        return True

    def finish(self, result: dict[str, Any]) -> None:
        if not self.over:
            self.over = True
            for descriptor in self._descriptors:
                os.close(descriptor)

    def refuse(self, refusal: Refused) -> None:
        self.finish({})


def whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Refused("invalid", f"{what} must be a whole number from 0")
    return value


def _become_worker(agent: Agent, channel: socket.socket, user: User) -> None:
    """In a fork of the agent: become a file worker. Never returns."""
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
        users = agent.credentials.users.values()
        names = {0: "root", **{item.uid: item.name for item in users}}
        groups = {0: "root", **{item.gid: item.name for item in users}}
        files.Worker(channel, encode(user.home), names, groups).run()
    finally:
        os._exit(0)
