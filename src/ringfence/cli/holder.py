"""The process that holds the sandbox of an interactive shell; terminals come and go (shell.py).

Guards a shell against the end of its terminal: the holder is a session of its own, so a hang-up does not reach it,
and its node's desk lets the next terminal of the same user in (node/presence.py says who that is). One terminal at a
time: the newest one takes over. A shell that was not asked to be detachable ends with its terminal. What a new
terminal is shown of the past is sanitised: old queries must not be answered into the shell's input.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any, NoReturn

from ringfence import terminal
from ringfence.cli import frames
from ringfence.errors import RingfenceError, SandboxError

REPLAY = 32 << 10  # bytes of the newest output that a new terminal is shown
SHELL = ["/bin/bash", "-i", "-l"]


def hold(connection: socket.socket, wish: dict[str, Any]) -> NoReturn:
    """The life of a forked child: start the sandbox and serve terminals until the shell has ended. Never returns.

    `wish`: `template`, `options` (of Sandbox), `command`, `cwd`, `envs`, `rows`, `columns`, `detachable`.
    """
    code = 1
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1):
            os.dup2(null, number)
        _Holder(connection, wish, null).run()
        code = 0
    except RingfenceError as error:
        _fail(connection, error)
    except BaseException as error:  # noqa: BLE001 - nothing of the parent's may run in this process
        _fail(connection, RingfenceError(f"the shell's holder failed: {type(error).__name__}: {error}"))
    finally:
        from ringfence.node.node import Node

        with contextlib.suppress(BaseException):
            Node.current().close()
        os._exit(code)


def _fail(connection: socket.socket, error: RingfenceError) -> None:
    told = json.dumps({"message": error.message, "hint": error.hint}).encode()
    with contextlib.suppress(OSError):
        connection.sendall(frames.pack(frames.FAILURE, told))


class _Holder:
    def __init__(self, connection: socket.socket, wish: dict[str, Any], null: int) -> None:
        from ringfence import PtySize, Sandbox

        self._client: socket.socket | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._passed = 0  # bytes of output that went by
        self._first = connection
        self.detachable = bool(wish["detachable"])
        self.sandbox = Sandbox(wish["template"], **wish["options"])
        os.chdir("/")
        self.shell = self.sandbox.commands.run(
            wish["command"] or SHELL, background=True, stdin=True, pty=PtySize(wish["rows"], wish["columns"]),
            cwd=wish["cwd"], envs={"LANG": "C.UTF-8", **wish["envs"]}, timeout=0,
        )  # fmt: skip
        os.dup2(null, 2)  # all that a person must see of the start has been said

    def run(self) -> None:
        """Serve until the shell has ended; say how."""
        from ringfence.node.node import Node

        desk = Node.current().desk
        if desk is not None and self.detachable:
            desk.attach_to = self._attach
        threading.Thread(target=self._serve, args=(self._first, None), daemon=True).start()
        last = frames.pack(frames.EXIT, b"\x01")
        try:
            for _, _, data in self.shell:
                if data:
                    self._show(data)
            last = frames.pack(frames.EXIT, bytes([max(0, self.shell.wait().exit_code) & 0xFF]))
        except SandboxError as error:
            last = frames.pack(frames.FAILURE, json.dumps({"message": error.message, "hint": error.hint}).encode())
        with self._sending:
            with self._lock:
                client, self._client = self._client, None
            if client is not None:
                with contextlib.suppress(OSError):
                    client.settimeout(2.0)
                    client.sendall(last)
                    client.shutdown(socket.SHUT_WR)
        self.sandbox.kill()

    def _show(self, data: bytes) -> None:
        with self._sending:
            self._passed += len(data)
            client = self._client
            if client is not None:
                try:
                    for start in range(0, len(data), frames.LARGEST):
                        client.sendall(frames.pack(frames.OUTPUT, data[start : start + frames.LARGEST]))
                except OSError:
                    self._gone(client)

    def _attach(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """On the I/O thread: a terminal asked the desk for this shell."""
        size = (request.get("rows"), request.get("columns"))
        checked = size if all(isinstance(one, int) and 0 < one < 65536 for one in size) else (24, 80)
        threading.Thread(target=self._serve, args=(connection, checked), daemon=True).start()

    def _serve(self, connection: socket.socket, size: tuple[int, int] | None) -> None:
        """One terminal, from its coming to its going; `size` is set for one that came later."""
        connection.setblocking(True)
        with self._lock:
            before, self._client = self._client, None
        if before is not None:
            with contextlib.suppress(OSError):
                before.settimeout(1.0)
                before.sendall(frames.pack(frames.TAKEN))
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        try:
            with self._sending:
                about = {"id": self.sandbox.id, "detachable": self.detachable}
                connection.sendall(frames.pack(frames.READY, json.dumps(about).encode()))
                if size is not None:
                    connection.sendall(frames.pack(frames.OUTPUT, self._past()))
                with self._lock:
                    self._client = connection
            if size is not None:
                self._resize(*size)
            self._listen(connection)
        except (OSError, ValueError):
            pass
        self._gone(connection)

    def _past(self) -> bytes:
        """The newest output that went by already, as text and colours."""
        total, kept = self.shell._command.stdout.newest(REPLAY + (1 << 20))
        shown = kept[: max(0, len(kept) - (total - self._passed))][-REPLAY:]
        if len(shown) == REPLAY:
            shown = shown.partition(b"\n")[2]  # what is cut in the middle begins with its next line
        sanitiser = terminal.Sanitiser()
        return sanitiser.feed(shown) + sanitiser.finish()

    def _listen(self, connection: socket.socket) -> None:
        heard = frames.Frames()
        while data := connection.recv(65536):
            for kind, body in heard.feed(data):
                if kind == frames.INPUT:
                    with contextlib.suppress(SandboxError):  # it has ended, and the reader of its output says how
                        self.shell.send_stdin(body, timeout=0)
                elif kind == frames.SIZE:
                    self._resize(*frames.unpack_size(body))
                else:
                    raise ValueError(f"a frame of kind {kind!r}")

    def _resize(self, rows: int, columns: int) -> None:
        from ringfence import PtySize

        with contextlib.suppress(SandboxError):
            self.shell.resize(PtySize(rows, columns))

    def _gone(self, connection: socket.socket) -> None:
        """A terminal has left. Without another one, a shell that is not detachable has no reason to go on."""
        with self._lock:
            mine = self._client is connection
            if mine:
                self._client = None
        if mine:
            connection.close()
            if not self.detachable:
                with contextlib.suppress(RingfenceError):
                    self.sandbox.kill()
