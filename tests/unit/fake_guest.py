"""A guest made of Python functions, for tests of the host side: it says what a test wants, lies included.

Each operation is a function `(conversation, request) -> None` that runs in a thread of its own.
"""

from __future__ import annotations

import hashlib
import queue
import socket
import threading
import time
from typing import Any

from ringfence.engines.base import CellSpec, Limits
from ringfence.errors import SandboxDeadError
from ringfence.guest import protocol
from ringfence.guest.protocol import Mux
from ringfence.stream.connection import Connection, Reactor, socket_pair
from ringfence.stream.waiting import Pending, completed


class Conversation:
    """One channel as a handler sees it."""

    def __init__(self, guest: FakeGuest, channel: int) -> None:
        self.guest = guest
        self.channel = channel
        self.inbox: queue.Queue[protocol.Event] = queue.Queue()

    def data(self, stream: int, data: bytes, timeout: float = 5.0) -> bool:
        """Send bytes as credit allows; False when there was none for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        view = memoryview(data)
        with self.guest.changed:
            while view:
                room = min(self.guest.mux.data_room(self.channel), protocol.MAX_PAYLOAD)
                if self.guest.mux.is_cancelled(self.channel):
                    return False
                if not room:
                    if not self.guest.changed.wait(deadline - time.monotonic()):
                        return False
                    continue
                self.guest.mux.send_data(self.channel, stream, bytes(view[:room]))
                self.guest.flush()
                view = view[room:]
        return True

    def event(self, **event: Any) -> None:
        with self.guest.changed:
            self.guest.mux.send_event(self.channel, event)
            self.guest.flush()

    def close(self, **result: Any) -> None:
        with self.guest.changed:
            self.guest.mux.send_close(self.channel, {"ok": True, **result})
            self.guest.flush()

    def fail(self, code: str, message: str = "") -> None:
        with self.guest.changed:
            self.guest.mux.send_close(
                self.channel, {"ok": False, "error": {"code": code, "message": message}}
            )
            self.guest.flush()

    def take(self, timeout: float = 5.0) -> protocol.Event:
        """The next thing that the host sent on this channel."""
        return self.inbox.get(timeout=timeout)

    def body(self, stream: int) -> bytes:
        """All bytes of a stream until its end."""
        received = b""
        while True:
            event = self.take()
            if event.kind == protocol.DATA and event.stream == stream:
                received += event.payload
                with self.guest.changed:
                    self.guest.mux.grant(self.channel, len(event.payload))
                    self.guest.flush()
            elif event.kind == protocol.EOF:
                return received
            elif event.kind == protocol.CLOSE:
                raise ConnectionError("cancelled")


class FakeGuest:
    """Serves `operations` on one end of a socket pair."""

    def __init__(self, stream: socket.socket, operations: dict[str, Any]) -> None:
        self.stream = stream
        self.operations = operations
        self.mux = Mux("guest")
        self.changed = threading.Condition(threading.RLock())
        self.requests: list[dict[str, Any]] = []
        self.conversations: dict[int, Conversation] = {}
        self.cancelled: list[str] = []
        with self.changed:
            self.flush()
        threading.Thread(target=self._run, daemon=True).start()

    def flush(self) -> None:
        while buffers := self.mux.pending():
            try:
                self.mux.consumed(self.stream.sendmsg(buffers))
            except OSError:
                return

    def _run(self) -> None:
        while True:
            try:
                data = self.stream.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            with self.changed:
                events = self.mux.receive(data)
                self.flush()
                self.changed.notify_all()
            for event in events:
                if event.kind == protocol.OPEN:
                    self.requests.append(event.payload)
                    conversation = self.conversations[event.channel] = Conversation(self, event.channel)
                    handler = self.operations[event.payload["op"]]
                    threading.Thread(target=handler, args=(conversation, event.payload), daemon=True).start()
                elif event.channel in self.conversations:
                    if event.kind == protocol.CLOSE:
                        self.cancelled.append(event.payload.get("reason", ""))
                    self.conversations[event.channel].inbox.put(event)


class FakeHandle:
    """A `CellHandle` above a `FakeGuest`."""

    engine, level, template = "fake", "namespace", "base"

    def __init__(self, operations: dict[str, Any], limits: Limits | None = None) -> None:
        self.id = hashlib.sha1(str(id(self)).encode()).hexdigest()[:12]
        self.limits = limits or Limits(timeout=5.0)
        self.spec = CellSpec(limits=self.limits)
        self.timings: dict[str, float] = {}
        self.started_at = time.time()
        self.expires_at = self.started_at + 3600
        self.kills: list[str] = []
        self.oom_kills = 0
        self.operations = 0
        self._gone: Pending[SandboxDeadError] = Pending()
        ours, theirs = socket_pair()
        self.guest = FakeGuest(theirs, operations)
        self.connection = Connection(ours, Reactor.shared())

    def kill(self, reason: str = "killed") -> Pending[None]:
        self.kills.append(reason)
        self.die(reason)
        return completed(None)

    def die(self, reason: str) -> None:
        """The end, as the launcher would tell it."""
        self._gone.set_result(SandboxDeadError("the end", reason=reason))
        self.connection.close(SandboxDeadError("the end", reason=reason))
        self.guest.stream.close()

    def stats(self) -> Pending[dict[str, Any]]:
        return completed({"oom_kills": self.oom_kills, "memory": 1, "pids": 1})

    def inspect(self) -> Pending[Any]:
        return completed(())

    def set_expiry(self, expires_at: float) -> None:
        self.expires_at = expires_at

    def on_dead(self, callback: Any) -> None:
        self._gone.add_done_callback(lambda pending: callback(pending.result()))

    def operation_started(self) -> None:
        self.operations += 1

    def operation_ended(self) -> None:
        self.operations -= 1
