"""The desk of a node: what other processes of the same user may ask it, answered on the I/O thread.

Guards against whoever is not the user (node/presence.py), against a visitor that floods, stalls or never reads (one
request of bounded size, an answer of bounded size, few visitors at a time, nothing blocks), and against a forked
child that would answer for its parent. It opens with the node's first launcher, costs one socket, and has no thread.

A request is one line of JSON, the answer too: `list`, `kill`, `logs`, and `attach`, which hands the connection to
whoever holds a terminal (`attach_to`).
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringfence.errors import RingfenceError
from ringfence.node import presence
from ringfence.stream.waiting import Pending

if TYPE_CHECKING:
    from ringfence.node.node import Handle, Node
    from ringfence.stream.connection import Reactor

__all__ = ["Desk"]

_REQUEST = 64 << 10  # bytes of one request
_ANSWER_LOGS = 2 << 20  # bytes of output in one answer
_VISITORS = 32
_VISIT_SECONDS = 30.0  # after which a silent visitor makes room for another one


class Desk:
    """The listening socket of one node, in the reactor's set."""

    def __init__(self, node: Node, reactor: Reactor) -> None:
        self._node = weakref.ref(node)
        self._reactor = reactor
        self._listener, self._path = presence.listen()
        self._process = os.getpid()
        self._descriptor = self._listener.fileno()
        self._visitors: list[_Visitor] = []
        self.attach_to: Callable[[socket.socket, dict[str, Any]], None] | None = None
        """Takes over a connection that asked to `attach`; called on the I/O thread."""
        reactor._add(self)  # type: ignore[arg-type]
        atexit.register(self._withdraw)

    @classmethod
    def open(cls, node: Node, reactor: Reactor) -> Desk | None:
        """The desk of a node; None where it cannot have one: it works all the same and `ls` shows less of it."""
        try:
            return cls(node, reactor)
        except (OSError, RingfenceError):
            return None

    def close(self) -> None:
        """Nobody can ask any more."""
        self._withdraw()
        atexit.unregister(self._withdraw)
        if os.getpid() == self._process:
            self._reactor.call_soon(self._end)

    def _withdraw(self) -> None:
        if os.getpid() == self._process:  # a forked child has the name of its parent
            presence.withdraw(self._path)

    def _end(self) -> None:
        self._reactor._remove(self)  # type: ignore[arg-type]
        self._listener.close()

    # What the reactor calls ----------------------------------------------------------------------------

    def _on_readable(self, view: memoryview) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        now = time.monotonic()
        for visitor in [one for one in self._visitors if now - one.came > _VISIT_SECONDS]:
            visitor.leave()
        if len(self._visitors) >= _VISITORS or not presence.peer_is_ours(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._visitors.append(_Visitor(self, connection))

    def _on_writable(self) -> None: ...

    def _die(self, error: BaseException) -> None:
        self._end()

    def _disown(self) -> None:
        self._listener.close()

    # Requests ------------------------------------------------------------------------------------------

    def answer(self, request: dict[str, Any], visitor: _Visitor) -> None:
        """Answer now, or when what was asked for is known."""
        node, what = self._node(), request.get("do")
        if node is None:
            visitor.say({"error": "the node is closed"})
        elif what == "list":
            self._list(node, visitor)
        elif what == "attach" and self.attach_to is not None:
            self.attach_to(visitor.give_up(), request)
        elif what in ("kill", "logs"):
            handle = node.find(str(request.get("id")))
            if handle is None:
                visitor.say({"error": "there is no such sandbox"})
            elif what == "kill":
                handle.kill().add_done_callback(lambda _: visitor.say({"killed": True}))
            else:
                visitor.say({"entries": _logs(handle, request.get("seen"))})
        else:
            visitor.say({"error": f"the node cannot {what!r}"[:200]})

    def _list(self, node: Node, visitor: _Visitor) -> None:
        handles = node.handles()
        rows: list[dict[str, Any]] = []
        waiting = len(handles)

        def measured(handle: Handle, pending: Pending[Any]) -> None:
            nonlocal waiting
            if pending.exception() is None:
                rows.append({**_describe(handle), "shell": self.attach_to is not None, "usage": pending.result()})
            waiting -= 1
            if not waiting:
                visitor.say({"sandboxes": rows})

        if not handles:
            visitor.say({"sandboxes": []})
        for handle in handles:
            handle.measure().add_done_callback(lambda pending, handle=handle: measured(handle, pending))


class _Visitor:
    """One connection: reads a line, says a line, ends."""

    def __init__(self, desk: Desk, connection: socket.socket) -> None:
        self._desk = desk
        self._connection = connection
        self._descriptor = connection.fileno()
        self._heard = b""
        self._asked = False
        self._rest = memoryview(b"")
        self._ended = False
        self.came = time.monotonic()
        desk._reactor._add(self)  # type: ignore[arg-type]

    def _on_readable(self, view: memoryview) -> None:
        try:
            data = self._connection.recv(_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or self._asked:
            self.leave()
            return
        self._heard += data
        line, newline, _ = self._heard.partition(b"\n")
        if not newline:
            if len(self._heard) > _REQUEST:
                self.leave()
            return
        self._asked = True
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if isinstance(request, dict):
            self._desk.answer(request, self)
        else:
            self.say({"error": "not a request"})

    def say(self, answer: dict[str, Any]) -> None:
        """The answer, from any thread, as far as the socket takes it now; the rest when it takes more."""
        self._desk._reactor._run_soon(self._say, json.dumps(answer).encode() + b"\n")

    def _say(self, data: bytes) -> None:
        if not self._ended:
            self._rest = memoryview(data)
            self._on_writable()

    def _on_writable(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[self._connection.send(self._rest) :]
        except BlockingIOError:
            self._desk._reactor._epoll.modify(self._descriptor, select.EPOLLIN | select.EPOLLOUT)
            return
        except OSError:
            pass
        self.leave()

    def give_up(self) -> socket.socket:
        """The connection, which is somebody else's from now on."""
        self._forget()
        return self._connection

    def leave(self) -> None:
        """Close the connection."""
        if not self._ended:
            self._forget()
            self._connection.close()

    def _forget(self) -> None:
        self._ended = True
        self._desk._reactor._remove(self)  # type: ignore[arg-type]
        if self in self._desk._visitors:
            self._desk._visitors.remove(self)

    def _die(self, error: BaseException) -> None:
        self.leave()

    def _disown(self) -> None:
        self._connection.close()


def _describe(handle: Handle) -> dict[str, Any]:
    spec, limits = handle.spec, handle.limits
    return {
        "id": handle.id, "template": handle.template, "engine": handle.engine, "policy": spec.policy_name,
        "state": "paused" if handle.paused else "running", "started_at": handle.started_at,
        "expires_at": handle.expires_at, "metadata": dict(spec.metadata),
        "limits": {"memory": limits.memory, "cpus": limits.cpus, "pids": limits.pids},
    }  # fmt: skip


def _logs(handle: Handle, seen: Any) -> list[dict[str, Any]]:
    """The log after what a reader has seen, as JSON takes it; the newest where it would be too much."""
    known: dict[int, tuple[int, int]] = {}
    for number, totals in (seen.items() if isinstance(seen, dict) else ()):
        if str(number).isdigit() and isinstance(totals, list) and len(totals) == 2 and all(isinstance(one, int) for one in totals):
            known[int(number)] = (totals[0], totals[1])
    found: list[dict[str, Any]] = []
    room = _ANSWER_LOGS
    for entry in reversed(handle.log.since(known) if handle.log is not None else []):
        for stream in (entry["stdout"], entry["stderr"]):
            data = stream["data"][-room:] if room > 0 else b""
            room -= len(data)
            stream["data"] = base64.b64encode(data).decode()
        found.append(entry)
    return found[::-1]
