"""The owner's end of a launcher: start it, ask it, hear of deaths.

Guards against a launcher that inherits what it must not: it is started by exec (posix_spawn, safe in a
threaded program), with a built environment, three descriptors on /dev/null and one socket, from `/`. Answers
arrive on one descriptor that the node's I/O thread watches; nothing here blocks. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from ringfence.errors import EnforcementError, EngineError

MAXIMUM_ANSWER = 256 << 10
# What the owner's environment may lend a launcher and its zygotes: settings that work around processor bugs.
PASSED_ENVIRONMENT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "RINGFENCE_DEBUG")

Answer = Callable[[dict[str, Any]], None]


class Launcher:
    """A running launcher process. `on_gone(id, message)` hears of every sandbox that ended by itself."""

    def __init__(self, executable: str, on_event: Callable[[dict[str, Any]], None], on_lost: Callable[[], None]):
        self._on_event = on_event
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, Answer] = {}
        self.lost = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.socket = ours
        try:
            self.pid = self._start(executable, theirs)
        finally:
            theirs.close()

    @staticmethod
    def _start(executable: str, theirs: socket.socket) -> int:
        package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        code = (
            f"import sys; sys.path.append({package_parent!r}); "
            "from ringfence.engines.namespace.launcher import main; main(3)"
        )
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        environment.update({name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ})
        if os.environ.get("XDG_RUNTIME_DIR"):
            environment["XDG_RUNTIME_DIR"] = os.environ["XDG_RUNTIME_DIR"]
        debug = "RINGFENCE_DEBUG" in os.environ and _is_open(2)
        # Numbers below 4 could be overwritten by the actions before they are used.
        source = theirs.fileno()
        spare = []
        while source < 4:
            source = os.dup(source)
            spare.append(source)
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 1)]
        if not debug:
            actions.append((os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_RDWR, 0))
        actions.append((os.POSIX_SPAWN_DUP2, source, 3))
        # posix_spawn cannot change directory; the launcher does it first thing.
        try:
            return os.posix_spawn(
                executable, [executable, "-I", "-S", "-c", "import os; os.chdir('/'); " + code], environment,
                file_actions=actions, setsigmask=[], setsigdef=[13],
            )  # fmt: skip
        except OSError as error:
            raise EngineError(
                f"the launcher could not be started: {error.strerror}: {executable}",
                hint="reinstall ringfence with a working Python interpreter",
            ) from error
        finally:
            for descriptor in spare:
                os.close(descriptor)

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
            raw = json.dumps({**request, "number": number}).encode()
            try:
                if descriptors:
                    socket.send_fds(self.socket, [raw], descriptors)
                else:
                    self.socket.send(raw)
            except OSError as error:
                self._answers.pop(number, None)
                raise EngineError(f"the launcher does not listen: {error.strerror}") from error

    def read(self) -> bool:
        """Handle one message; False when the launcher is gone. Called when the socket is readable."""
        try:
            raw = self.socket.recv(MAXIMUM_ANSWER)
        except BlockingIOError:
            return True
        except OSError:
            raw = b""
        if not raw:
            self.lose()
            return False
        message = json.loads(raw)
        if "re" in message:
            with self._lock:
                answer = self._answers.pop(message["re"], None)
            if answer is not None:
                answer(message)
        else:
            self._on_event(message)
        return True

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


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False


