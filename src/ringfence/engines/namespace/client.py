"""The owner's end of a launcher: start it, ask it, hear of deaths.

Guards against a question that never gets its answer: when the launcher ends, every open one is answered with that.
How a launcher is started, and what it must not inherit, is in starting.py. Answers arrive on one descriptor that the
node's I/O thread watches; nothing here blocks. Standard library only.
"""

from __future__ import annotations

import _thread
import os

from ringfence.engines.namespace.starting import PASSED_ENVIRONMENT, start_launcher
from ringfence.errors import EnforcementError, EngineError
from ringfence.linux.channels import send_descriptors
from ringfence.linux.json_text import dumps, loads

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    Answer = Callable[[dict[str, Any]], object]
else:
    import _socket as socket

__all__ = ["PASSED_ENVIRONMENT", "Launcher", "refusal"]

MAXIMUM_ANSWER = 256 << 10


class Launcher:
    """A running launcher process. `on_event(message)` hears of every sandbox that ended by itself.

    `started` is the pid and our descriptor of one that `start_launcher` has started already.
    """

    def __init__(
        self,
        executable: str,
        on_event: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None],
        started: tuple[int, int] | None = None,
    ):
        self._on_event = on_event
        self._on_lost = on_lost
        self._lock = _thread.allocate_lock()
        self._number = 0
        self._answers: dict[int, Answer] = {}
        self._view = memoryview(bytearray(MAXIMUM_ANSWER))
        self.lost = False
        if started is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.pid = start_launcher(executable, theirs.fileno())
            except OSError as error:
                ours.close()
                raise EngineError(
                    f"the launcher could not be started: {error.strerror}: {executable}",
                    hint="reinstall ringfence with a working Python interpreter",
                ) from error
            finally:
                theirs.close()
        else:
            self.pid, descriptor = started
            ours = socket.socket(fileno=descriptor)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.socket = ours

    def fileno(self) -> int:
        return self.socket.fileno()

    def ask(self, request: dict[str, Any], answer: Answer, descriptors: list[int] | None = None) -> None:
        """Send `request`; `answer` is called with the launcher's message on the reading thread."""
        with self._lock:
            if self.lost:
                raise EngineError("the launcher is gone", hint="create a new sandbox: it starts a new launcher")
            self._number += 1
            number = self._number
            self._answers[number] = answer
            raw = dumps({**request, "number": number}).encode()
            try:
                send_descriptors(self.socket, raw, descriptors or [])
            except OSError as error:
                self._answers.pop(number, None)
                raise EngineError(f"the launcher does not listen: {error.strerror}") from error

    def read(self) -> bool:
        """Handle one message; False when the launcher is gone. Called when the socket is readable."""
        try:
            count = self.socket.recv_into(self._view)
        except BlockingIOError:
            return True
        except OSError:
            count = 0
        if not count:
            self.lose()
            return False
        message = loads(bytes(self._view[:count]))
        if "re" in message:
            self._answer(message["re"], message)
        else:
            self._on_event(message)
            for number in message.get("answers", ()):
                self._answer(number, {"ok": True, "gone": True})
        return True

    def _answer(self, number: int, message: dict[str, Any]) -> None:
        with self._lock:
            answer = self._answers.pop(number, None)
        if answer is not None:
            answer(message)

    def lose(self) -> None:
        """The launcher ended: every open question is answered with that."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            answers, self._answers = list(self._answers.values()), {}
        self.socket.close()
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pass
        for answer in answers:
            answer({"ok": False, "primitive": "launcher", "message": "the launcher ended", "hint": ""})
        self._on_lost()

    def forget(self) -> None:
        """In a forked child: drop the socket without a word, so that it does not keep the launcher's open."""
        self.lost = True
        self.socket.close()


def refusal(message: dict[str, Any]) -> EnforcementError:
    """The error for an answer that was not ok."""
    return EnforcementError(
        f"{message.get('primitive', 'engine')}: {message.get('message', 'refused')}",
        hint=message.get("hint", ""),
        primitive=message.get("primitive", ""),
    )
