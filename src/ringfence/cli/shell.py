"""`ringfence shell`: this terminal, in raw mode, on a shell in a sandbox.

Guards the terminal: whatever happens (the shell ends, the sandbox or its holder is lost, a signal, a bug of ours) its
settings come back as they were, and modes that a program inside left on are switched off. Here alone the sandbox's
bytes reach the terminal as they are: an interactive program needs that, and the page about the shell says so.

Escapes, at the beginning of a line: `~.` leaves (a detachable shell goes on without this terminal, another one ends),
`~?` says so, `~~` types one `~`.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
import termios
import tty
from typing import Any, NamedTuple

from ringfence.cli import arguments, frames, holder, owners
from ringfence.errors import EngineError, InvalidArgumentError, RingfenceError

_START_PATIENCE = 700.0  # seconds; the first use of a template copies its packages
_ROOM = 64 << 10  # bytes that wait for the holder before no more is read from the terminal
_MODE = re.compile(rb"\x1b\[\?([0-9;]{1,40})([hl])")
_LEFT_ON = (1, 9, 47, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004)
"""Private modes that make a terminal useless when they stay: mouse, other screen, application keys, pasting."""
_HELP = b"\r\n~.  leave (%s)\r\n~~  type one ~\r\n~?  this page\r\n"
FAILED = 125


class Ended(NamedTuple):
    """How a session ended: the code to exit with, and what there is to say."""

    id: str
    exit_code: int
    message: str
    hint: str


def wish(given: dict[str, Any], detachable: bool) -> dict[str, Any]:
    """What holder.py is asked for, from the options of the command line. Raises InvalidArgumentError."""
    words = [f"--env={text}" for text in given.get("env", [])]
    words += [f"--{name}={given[name]}" for name in ("template", "mode", "workspace") if name in given]
    try:
        request = arguments.parse("exec", [*words, "--", "shell"])  # one reading of these for all commands
    except arguments.UsageError as error:
        raise InvalidArgumentError(str(error)) from None
    name = given.get("name")
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name):
        raise InvalidArgumentError(f"--name {name!r} is no name", hint="letters a to z, digits and `-`, at most 63")
    options: dict[str, Any] = {each: given[each] for each in ("policy", "memory", "cpus", "pids", "disk") if each in given}
    if "timeout" in given:
        options["max_age"] = given["timeout"]
    if "workspace" in given:
        from ringfence import Workspace

        options["workspace"] = Workspace(source=given["workspace"], mode=given.get("mode", "overlay"))
    if name is not None:
        options["metadata"] = {"name": name}
    variables = {"TERM": os.environ.get("TERM", "xterm-256color"), **request.variables}
    return {
        "template": given.get("template", "base"), "options": options, "command": given.get("command"),
        "cwd": given.get("cwd"), "envs": variables, "detachable": detachable,
    }  # fmt: skip


def start(wished: dict[str, Any]) -> Ended:
    """Start a shell in a sandbox of its own and sit at it."""
    _check_terminal()
    rows, columns = _size()
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        ours.close()
        holder.hold(theirs, {**wished, "rows": rows, "columns": columns})
    theirs.close()
    ended = _Session(ours).run()
    if not wished["detachable"]:
        os.waitpid(child, 0)  # the sandbox is gone when we are
    return ended


def attach(name: str) -> Ended:
    """Sit at a shell that another terminal left. Raises NotFoundError, EngineError."""
    _check_terminal()
    sandbox, owner = owners.find(name)
    if owner is None or not sandbox.shell:
        raise EngineError(f"{name} is no shell to attach to", hint="start one with `ringfence shell --detachable`")
    rows, columns = _size()
    return _Session(owner.open({"do": "attach", "id": sandbox.id, "rows": rows, "columns": columns})).run()


def _check_terminal() -> None:
    if not (os.isatty(0) and os.isatty(1)):
        raise InvalidArgumentError("a shell needs a terminal", hint="without one use `ringfence exec -- COMMAND` or `ringfence run`")


def _size() -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(1)
    except OSError:
        columns, rows = 80, 24
    return (rows, columns) if rows > 0 and columns > 0 else (24, 80)


class _Session:
    """One terminal at one shell."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = frames.Frames()
        self._waiting = bytearray()  # for the holder
        self._keys = Keys()
        self._modes = Modes()
        self._detachable = False
        self._id = ""
        self._code: int | None = None
        self._last = ("", "")

    def run(self) -> Ended:
        """Until the shell, the holder or this terminal ends."""
        early = self._begin()
        settings = termios.tcgetattr(0)
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signals = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGCONT)
        before = {number: signal.signal(number, lambda *_: None) for number in signals}
        before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is for the shell
            self._connection.setblocking(False)
            for kind, body in early:
                self._take(kind, body)
            while self._code is None:
                self._turn(wake)
        finally:
            self._restore(settings)
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for descriptor in (wake, woken):
                os.close(descriptor)
            self._connection.close()
        return Ended(self._id, self._code, *self._last)

    def _begin(self) -> list[tuple[bytes, bytes]]:
        """Wait for the shell in the terminal's ordinary mode, so that Ctrl-C works while packages are copied.

        Returns what it said already, which is for a raw terminal."""
        early: list[tuple[bytes, bytes]] = []
        self._connection.settimeout(_START_PATIENCE)
        while not self._id:
            data = self._connection.recv(65536)
            if not data:
                raise EngineError("the shell's holder ended", hint="`ringfence doctor` looks for the cause")
            for kind, body in self._frames.feed(data):
                if kind == frames.FAILURE:
                    told = json.loads(body)
                    raise RingfenceError(str(told.get("message")), hint=str(told.get("hint") or ""))
                if kind == frames.READY:
                    about = json.loads(body)
                    self._id, self._detachable = str(about["id"]), about["detachable"] is True
                else:
                    early.append((kind, body))
        return early

    def _restore(self, settings: list[Any]) -> None:
        try:
            os.write(1, self._modes.undo())
        except OSError:
            pass
        try:
            termios.tcsetattr(0, termios.TCSADRAIN, settings)
        except termios.error:
            pass  # the terminal is gone

    def _turn(self, wake: int) -> None:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._waiting else 0))
        if len(self._waiting) < _ROOM:
            poll.register(0, select.POLLIN)
        for descriptor, events in poll.poll():
            if descriptor == wake:
                for number in os.read(wake, 64):
                    self._signalled(number)
            elif descriptor == 0:
                self._typed()
            else:
                if events & select.POLLOUT:
                    self._send()
                if events & ~select.POLLOUT:
                    self._heard()
            if self._code is not None:
                return

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCONT:
            tty.setraw(0, termios.TCSADRAIN)
        if number in (signal.SIGWINCH, signal.SIGCONT):
            self._waiting += frames.pack_size(*_size())
        else:
            # A detachable shell goes on; the holder of another one ends it when the connection is closed.
            self._code = 128 + number

    def _typed(self) -> None:
        try:
            data = os.read(0, 16384)
        except OSError:
            data = b""
        if not data:
            self._code = 128 + signal.SIGHUP
            return
        for kind, piece in self._keys.feed(data):
            if kind == "type":
                self._waiting += frames.pack(frames.INPUT, piece)
            elif kind == "help":
                os.write(1, _HELP % (b"the shell goes on" if self._detachable else b"the shell ends"))
            else:
                self._leave()
                return
        self._send()

    def _leave(self) -> None:
        self._code = 0 if self._detachable else 128 + signal.SIGHUP
        if self._detachable:
            self._last = (f"detached from {self._id}", f"`ringfence shell --attach {self._id}` comes back to it")

    def _send(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._connection.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            pass  # reading says how it ended

    def _heard(self) -> None:
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost("the shell's holder ended")
            return
        try:
            for kind, body in self._frames.feed(data):
                self._take(kind, body)
        except ValueError as error:
            self._lost(f"the shell's holder makes no sense: {error}")

    def _lost(self, message: str) -> None:
        if self._code is None:
            self._code, self._last = FAILED, (message, "")

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == frames.OUTPUT:
            self._modes.see(body)
            view = memoryview(body)
            while view:
                view = view[os.write(1, view) :]
        elif kind == frames.EXIT:
            self._code = body[0] if body else FAILED
        elif kind == frames.TAKEN:
            self._code, self._last = 0, ("another terminal has taken over this shell", "")
        elif kind == frames.FAILURE:
            told = json.loads(body)
            self._code, self._last = FAILED, (str(told.get("message")), str(told.get("hint") or ""))


class Keys:
    """What was typed, less the escapes."""

    def __init__(self) -> None:
        self._beginning = True  # of a line
        self._tilde = False

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """("type", bytes), ("leave", b"") or ("help", b"") in the order in which they were meant."""
        found: list[tuple[str, bytes]] = []
        typed = bytearray()
        for number in data:
            byte = bytes([number])
            if self._tilde:
                self._tilde = self._beginning = False
                if byte in b".?":
                    if typed:
                        found.append(("type", bytes(typed)))
                        typed.clear()
                    found.append(("leave" if byte == b"." else "help", b""))
                    self._beginning = True
                    continue
                typed += byte if byte == b"~" else b"~" + byte
            elif self._beginning and byte == b"~":
                self._tilde = True
                continue
            else:
                typed += byte
            self._beginning = byte in b"\r\n"
        if typed:
            found.append(("type", bytes(typed)))
        return found


class Modes:
    """Private modes of the terminal that the output switched on and not off again (ECMA-48 DECSET, DECRST)."""

    def __init__(self) -> None:
        self._on: set[int] = set()
        self._hidden = False
        self._rest = b""

    def see(self, data: bytes) -> None:
        """The next piece of output."""
        text = self._rest + data
        for match in _MODE.finditer(text):
            for number in (int(word) for word in match[1].split(b";") if word):
                if number == 25:
                    self._hidden = match[2] == b"l"
                elif number in _LEFT_ON:
                    (self._on.add if match[2] == b"h" else self._on.discard)(number)
        self._rest = text[-44:]  # a sequence cut in two; seeing a whole one twice changes nothing

    def undo(self) -> bytes:
        """What switches them off, and ends colours."""
        off = b"".join(b"\x1b[?%dl" % number for number in sorted(self._on))
        return off + (b"\x1b[?25h" if self._hidden else b"") + b"\x1b[0m"
