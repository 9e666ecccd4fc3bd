"""The kernel process of a context whose language is not Python: it keeps the token, the interpreter runs the code.

The agent speaks to it as to a Python kernel (`kernel.py` has the channel and what a token holds). It starts the
language's own interpreter with a small driver, and relays: requests one way, results and the end of an execution the
other. Output does not pass through here: the interpreter's fd 1 and 2 are the agent's pipes.

Guards against an execution that ends or speaks for another one. The interpreter and all it starts are user code, and
nothing they could find opens the agent's channel: this process is not dumpable, so its memory and descriptors are
closed to other processes of its uid. Within the context each execution has a nonce, which travels in the request and
must come back with every message: what an earlier execution's child writes is dropped, since it never saw the nonce
(drivers keep their two descriptors close-on-exec). Code *inside* the interpreter, and processes that a shell forks
without executing anything, can find the nonce and so end their own execution early or speak for their own context, as
in Python. Another process of the same user and sandbox can look into an interpreter, which no program can be kept from
once it was executed; contexts that must not trust each other belong in different sandboxes.

It also guards the interpreter against an interrupt at the wrong moment: SIGINT comes to this process, and goes on to
the interpreter's process group only while user code runs there.

Driver, from here:    `run NONCE CODE_BYTES VARIABLES\n`, the code in UTF-8, and for each variable
                      `NAME_BYTES VALUE_BYTES\n`, name, value (-1 and no value: unset it for this execution)
driver, to here:      `ready\n` once; then for an execution
                      `begin NONCE\n` just before user code runs
                      `part NONCE NAME BYTES\n` and the bytes: one format of a result (a MIME type), or of an error
                      (name, value, traceback)
                      `show NONCE main|display\n`: the parts so far are a result;  `error NONCE\n`: they are the error
                      `done NONCE ok|error|interrupted\n`
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
from binascii import b2a_hex
from typing import Any, NoReturn

from ringfence.guest.credentials import IGNORED_SIGNALS, PR_SET_DUMPABLE, decode, encode
from ringfence.guest.jobs import text_of
from ringfence.guest.kernel import (
    DEFAULT_RESULT_LIMIT,
    DONE,
    ERROR,
    MAX_REQUEST,
    NUDGE,
    READY,
    RESULT,
    token_of,
)
from ringfence.guest.languages import DRIVERS, LANGUAGES
from ringfence.guest.rich_results import cut, result_payload
from ringfence.guest.rich_results import encode as encode_json
from ringfence.linux.syscalls import prctl

VALUE_LIMIT = 64 * 1024  # characters of an error's value; as in python_kernel
TRACEBACK_LIMIT = 256 * 1024
_LINE_LIMIT = 4096
_REPEAT_SECONDS = 0.4  # an interpreter may lose an interrupt that comes as its code begins: the agent's nudge repeats it
_LENGTH = struct.Struct("!I")
_FRAME = struct.Struct("!IB16s")


class Broken(Exception):
    """The driver's words make no sense any more."""


class Interpreter:
    """One interpreter and its driver. Languages whose driver needs other words override `command` and `request`."""

    def __init__(self, control: socket.socket, config: dict[str, Any]):
        self.control = control
        self.config = config
        self.language = LANGUAGES[config["language"]]
        self.driver = os.path.join(DRIVERS, self.language.driver)
        self.limit = int(config.get("result_limit") or DEFAULT_RESULT_LIMIT)
        self._secret = bytes.fromhex(config.pop("secret"))
        self._token = b""  # of the running execution
        self._count = 0
        self._quiet = False
        self.nonce = b""  # the interpreter's, of the running execution
        self.begun = False
        self.interrupted = False
        self._last_interrupt = 0.0
        self._parts: dict[str, bytes] = {}
        self._error: bytes | None = None
        self._ready = False
        self._incoming = bytearray()  # from the agent
        self._outgoing = bytearray()  # to the driver
        self._said = bytearray()  # by the driver
        self.pid = 0

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Start the interpreter. Raises OSError."""
        self.place = _private_directory()
        paths = [os.path.join(self.place, name) for name in ("requests", "messages")]
        for path in paths:
            os.mkfifo(path, 0o600)
        # Open for both, so that neither side waits for the other and no end is ever reached.
        self.requests, self.messages = (os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for path in paths)
        self.wake, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGCHLD, NUDGE):
            signal.signal(number, self._signalled)
        names = {"driver": self.driver, "requests": paths[0], "messages": paths[1]}
        argv = [argument.format_map(names) for argument in self.language.arguments]
        environment = {encode(name): encode(value) for name, value in self.config["env"].items()}
        for name, value in self.language.variables:
            environment.setdefault(encode(name), encode(value))
        self.pid = os.posix_spawn(
            self.config["program"], [self.language.program, *argv], environment, file_actions=self.descriptors(paths),
            setpgroup=0, setsigmask=(), setsigdef=(*IGNORED_SIGNALS, signal.SIGCHLD),
        )  # fmt: skip

    def descriptors(self, paths: list[str]) -> list[tuple[Any, ...]]:
        """What posix_spawn does to descriptors; 0, 1 and 2 are right already."""
        return []

    def request(self, code: bytes, variables: list[tuple[bytes, bytes | None]]) -> bytes:
        """The words that make the driver run `code`."""
        words = [b"run %s %d %d\n" % (self.nonce, len(code), len(variables)), code]
        for name, value in variables:
            words += [b"%d %d\n" % (len(name), -1 if value is None else len(value)), name, value or b""]
        return b"".join(words)

    def conclude(self, status: str) -> str:
        """Judge the word of `done`. Raises Broken for one that it does not know."""
        if status not in ("ok", "error", "interrupted"):
            raise Broken(f"unknown status {status[:100]!r}")
        return status

    # ------------------------------------------------------------------- loop

    def run(self) -> NoReturn:
        """Relay until the agent goes or the interpreter ends."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.messages, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        poll.register(self.requests, 0)
        while True:
            poll.modify(self.requests, select.POLLOUT if self._outgoing else 0)
            ready = dict(poll.poll())
            if self.wake in ready:
                self._read_all(self.wake)
                self._reap()
            if self.messages in ready:
                self._said += self._read_all(self.messages)
                self._listen()
            if self._outgoing:
                self._write()
            if self.control.fileno() in ready:
                self._receive()

    @staticmethod
    def _read_all(descriptor: int) -> bytes:
        try:
            return os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return b""

    def _write(self) -> None:
        try:
            del self._outgoing[: os.write(self.requests, self._outgoing[: 1 << 20])]
        except BlockingIOError:
            pass

    def _receive(self) -> None:
        piece = self.control.recv(1 << 18)
        if not piece:
            os._exit(0)  # the agent takes what is left of us with it
        self._incoming += piece
        while len(self._incoming) >= 4:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > MAX_REQUEST:
                os._exit(0)
            if len(self._incoming) < 4 + length:
                return
            message = json.loads(bytes(self._incoming[4 : 4 + length]).decode("utf-8", "surrogatepass"))
            del self._incoming[: 4 + length]
            if message["do"] == "execute":
                self._execute(message)
            elif message["do"] == "exit":
                os._exit(0)

    def _execute(self, message: dict[str, Any]) -> None:
        self._token = token_of(self._secret, bytes.fromhex(message["nonce"]))
        self._count += 1
        self._quiet = bool(message.get("quiet"))
        self.nonce = b2a_hex(os.urandom(16))
        self.begun = self.interrupted = False
        self._parts, self._error = {}, None
        variables = [
            (text_of(name, "a name"), None if value is None else text_of(value, "a value"))
            for name, value in (message.get("env") or {}).items()
        ]
        self.code = message["code"].encode("utf-8", "replace")
        if b"\0" in self.code:
            self.report("SyntaxError", "a NUL character in the code")
            self._done("error")
            return
        self._outgoing += self.request(self.code, variables)

    def _send(self, kind: int, payload: bytes) -> None:
        try:
            self.control.sendall(_FRAME.pack(len(payload), kind, self._token or bytes(16)) + payload)
        except OSError:
            os._exit(0)

    # -------------------------------------------------------- driver's words

    def _listen(self) -> None:
        while True:
            end = self._said.find(b"\n")
            if end < 0:
                if len(self._said) > _LINE_LIMIT:
                    raise Broken("a line without end")
                return
            words = decode(bytes(self._said[:end])).split(" ")
            taken = end + 1
            content = b""
            if words[0] == "part":
                if len(words) != 4 or not words[3].isdecimal() or len(words[3]) > 12:
                    raise Broken("a part without a length")
                taken += int(words[3])
                if len(self._said) < taken:
                    return
                content = bytes(self._said[end + 1 : taken])
            del self._said[:taken]
            if words == ["ready"]:
                self._begin_service()
            elif len(words) < 2 or words[0] not in ("begin", "part", "show", "error", "done"):
                raise Broken(f"unknown words {' '.join(words)[:100]!r}")
            elif self.nonce and encode(words[1]) == self.nonce:
                self._hear(words, content)

    def _begin_service(self) -> None:
        if not self._ready:
            self._ready = True
            self._forget_place()
            token, self._token = self._token, b""
            self._send(READY, b"{}")
            self._token = token

    def _hear(self, words: list[str], content: bytes) -> None:
        if words[0] == "begin":
            self.begun = True
            if self.interrupted:
                self.interrupt()
        elif words[0] == "part":
            self._parts[words[2]] = content
        elif words[0] == "show":
            self._show(words[2:] == ["main"])
        elif words[0] == "error":
            text = {name: value.decode("utf-8", "replace") for name, value in self._parts.items()}
            self._parts = {}
            self.report(text.get("name") or "Error", text.get("value", ""), text.get("traceback", ""))
        else:
            self._done(self.conclude(" ".join(words[2:])))

    def _show(self, main: bool) -> None:
        bundle: dict[str, Any] = {}
        for name, value in self._parts.items():
            if name.endswith("json"):
                try:
                    bundle[name] = json.loads(value)
                    continue
                except (ValueError, RecursionError):
                    pass  # then it is text
            bundle[name] = value
        self._parts = {}
        if bundle and not self._quiet:
            payload, notes = result_payload(bundle, None, main, self.limit)
            self._send(RESULT, payload)
            for note in notes:
                self.note(note)

    def report(self, name: str, value: str, traceback: str = "") -> None:
        """The error of the running execution; it travels with its end."""
        self._error = encode_json({
            "name": name[:1000], "value": cut(value, VALUE_LIMIT), "traceback": cut(traceback, TRACEBACK_LIMIT),
        })  # fmt: skip

    def _done(self, status: str) -> None:
        if status == "interrupted":
            self.report("KeyboardInterrupt", "")
        if status != "ok" and self._error is not None:
            self._send(ERROR, self._error)
        payload = json.dumps({"status": status, "execution_count": self._count}).encode()
        self.nonce, self.begun = b"", False
        self._send(DONE, payload)
        self._token = b""

    @staticmethod
    def note(text: str) -> None:
        """A line for the user, on stderr."""
        os.write(2, f"[ringfence] {text}\n".encode("utf-8", "replace"))

    # ---------------------------------------------------------------- signals

    def _signalled(self, number: int, frame: Any) -> None:
        if not self.nonce:
            return
        if number == signal.SIGINT:
            self.interrupted = True
            self.interrupt()
        elif number == NUDGE and self.interrupted and os.times().elapsed - self._last_interrupt > _REPEAT_SECONDS:
            self.interrupt()

    def interrupt(self) -> None:
        """SIGINT to the interpreter and its foreground, as a terminal's Ctrl-C; not before user code runs."""
        if self.begun:
            self._last_interrupt = os.times().elapsed
            try:
                os.killpg(self.pid, signal.SIGINT)
            except OSError:
                pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self.pid:
                self._follow(status)
            if not pid:
                return

    def _follow(self, status: int) -> NoReturn:
        """The interpreter has ended: deliver its last words, then end as it did, so that the agent can tell how."""
        try:
            self._said += self._read_all(self.messages)
            self._listen()
        except Broken:
            pass
        self._forget_place()
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.WEXITSTATUS(status))

    def _forget_place(self) -> None:
        for name in ("requests", "messages", ""):
            path = os.path.join(self.place, name)
            try:
                os.unlink(path) if name else os.rmdir(path)
            except OSError:
                pass


def _private_directory() -> str:
    name = ".ringfence-" + os.urandom(8).hex()
    for parent in ("/tmp", "/dev/shm", os.path.expanduser("~")):
        try:
            os.mkdir(os.path.join(parent, name), 0o700)
        except OSError:
            continue
        return os.path.join(parent, name)
    raise OSError("no directory can be made in /tmp, /dev/shm or the home directory")


def run(control: socket.socket, config: dict[str, Any]) -> NoReturn:
    """Serve executions on `control` until the agent closes it; never returns.

    config: as in `kernel.run`, with "program" (path of the interpreter). Precondition: single-threaded fork of the
    agent that became the user; fd 0 /dev/null, fd 1 and 2 pipes to the agent.
    """
    if config["language"] == "bash":
        from ringfence.guest.bash import Bash as kind
    else:
        kind = Interpreter
    interpreter = kind(control, config)
    try:
        prctl(PR_SET_DUMPABLE, 0)
        interpreter.start()
        interpreter.run()
    except Broken as problem:
        interpreter.note(f"the code broke this context's own channel ({problem})")
    except BaseException as error:  # noqa: BLE001  (nothing may unwind into the agent's code)
        interpreter.note(f"the context's kernel failed: {type(error).__name__}: {error}")
    finally:
        os._exit(70)
