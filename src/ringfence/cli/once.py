"""One program in a sandbox of its own: `ringfence run` and `ringfence exec`, by the standard library alone.

This is the fast path. It starts a launcher, sends it everything at once (configure, template, create), writes the
guest's first requests into the stream before the guest exists, and then is a plain loop over four descriptors:
the guest's stream, the launcher's socket, standard input, and signals. No thread, no event loop library, no model
library, no IPython. What the loop guards:

- the program's bytes pass through unchanged both ways; a slow reader of our output slows the program, nothing grows
- except to a terminal: there what would act on it (clipboard, title, cursor, hidden text) is shown instead
- the deadline is kept by this process's clock; whatever the program does, it and all its children are then killed
- Ringfence's own failure is exit code 125 and a message that begins with `ringfence:`; the program's exit code is
  the program's

Exit codes: the program's own; 128 + n when it died by signal n; 124 when the time was up; 125 when Ringfence failed;
126 when a command could not be run; 127 when there is none of that name; 2 for arguments that make no sense.
"""

from __future__ import annotations

import gc
import os
import select
import sys
import time

from ringfence.cli import precompiled
from ringfence.cli.arguments import Request, UsageError
from ringfence.engines.namespace.client import PASSED_ENVIRONMENT, Launcher
from ringfence.errors import EngineError, RingfenceError
from ringfence.guest.protocol import (
    CLOSE,
    CREDIT,
    DATA,
    EVENT,
    FILE,
    STDERR,
    STDIN,
    STDOUT,
    Mux,
    ProtocolViolation,
)
from ringfence.node import environments

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable
    from typing import Any
else:
    import _signal as signal
    import _socket as socket

TIMED_OUT, FAILED, NOT_RUNNABLE, NOT_FOUND = 124, 125, 126, 127
MISUSED = 2  # arguments that make no sense
IDENTIFIER = "once"
HOME = "/home/user"
START_PATIENCE = 60.0  # seconds until a guest that said nothing counts as failed
DRAIN_PATIENCE = 2.0  # seconds a killed program's last output may take
RECEIVE = 256 << 10
SLACK_AGE = 60.0  # seconds the launcher's own deadline comes after ours: it only matters when we are stopped


class _Settings:
    """What a request means: the launcher's limits, the program's environment and time."""

    def __init__(self, request: Request) -> None:
        options = request.options
        self.limits = dict(precompiled.LIMITS)
        self.timeout: float | None = precompiled.TIMEOUT
        self.template = "plain"
        self.cwd = HOME
        self.environment = dict(precompiled.ENVIRONMENT)
        self.policy = "default"
        self.root = False
        self.directories: list[dict] = []
        self.opened: list[int] = []  # a descriptor for each of them
        if "policy" in options or "workspace" in options:
            self._take_policy(options.get("policy"), options)
        if "template" in options:
            self.template = options["template"]
        if "cwd" in options:
            self.cwd = options["cwd"]
        if options:
            self._take_limits(options)
        if "TERM" in os.environ:
            self.environment["TERM"] = os.environ["TERM"]
        self.environment.update(request.variables)
        if self.timeout is not None:
            self.limits["max_age"] = min(self.limits["max_age"], self.timeout + SLACK_AGE)

    def _take_policy(self, name: str | None, options: dict[str, str]) -> None:
        from ringfence.engines.namespace import engine
        from ringfence.policy.resolve import resolve

        fields: dict[str, Any] = {}
        if "workspace" in options:
            mode = options.get("mode", "overlay")
            fields["workspace"] = {"source": options["workspace"], "mode": mode}
            fields["cwd"] = engine.WORKSPACE
        spec = resolve(name).compile(**fields)
        engine.check(spec)
        self.opened = engine.open_directories(spec)
        self.directories = engine.directories(spec, self.opened)
        for key in self.limits:
            self.limits[key] = getattr(spec.limits, key)
        self.timeout = spec.limits.timeout
        self.cwd = spec.cwd
        self.environment.update(spec.envs)
        self.policy, self.root = spec.policy_name, spec.root

    def _take_limits(self, options: dict[str, str]) -> None:
        from ringfence.policy.units import format_duration, parse_duration, parse_size

        def read(name: str, parse: Callable[[str], Any], hint: str, low: float, high: float, show: Callable[[Any], str]) -> Any:
            text = options[name]
            try:
                value = parse(text)
            except (ValueError, OverflowError) as error:
                raise UsageError(f"--{name}: {error.args[0] if isinstance(error, RingfenceError) else f'{text!r} is not a number'}; {hint}") from None
            if not low <= value <= high:
                raise UsageError(f"--{name} must be between {show(low)} and {show(high)}, not {show(value)}; {hint}")
            return value

        for name, parse, hint, low, high, show in (
            ("memory", parse_size, "write 512MiB or 1GiB; a plain number is bytes", 16 << 20, 1 << 40, _mebibytes),
            ("disk", parse_size, "write 512MiB or 1GiB; a plain number is bytes", 1 << 20, 1 << 40, _mebibytes),
            ("cpus", float, "write 1 or 0.5", 0.01, 4096, "{:g}".format),
            ("pids", int, "write a whole number", 8, 4_000_000, "{:,}".format),
        ):
            if name in options:
                self.limits[name] = read(name, parse, hint, low, high, show)
        text = options.get("timeout")
        if text == "none":
            self.timeout = None
        elif text is not None:
            hint = "write 30s or 2min, a plain number is seconds; `none` sets no deadline of its own"
            seconds = read("timeout", parse_duration, hint, 0.001, 3650 * 86400, format_duration)
            self.timeout = seconds
            # An explicit wish for a long run is a wish for a sandbox that lives as long.
            longest = min(seconds + SLACK_AGE, 3650 * 86400.0)
            self.limits["max_age"] = max(self.limits["max_age"], longest)


class _Failed(Exception):
    """Ringfence itself failed; nothing of the program's is to blame."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class _Run:
    """The exchange with one sandbox, from the launcher's start to the program's end."""

    def __init__(self, request: Request, settings: _Settings, early: tuple[int, int] | None) -> None:
        self.request = request
        self.early = early
        self.settings = settings
        self.running: Launcher | None = None
        self.mux = Mux("host")
        self.channel = 0
        self.upload = 0
        self.upload_data = b""
        self.result: dict | None = None
        self.failure: _Failed | None = None
        self.gone: dict | None = None
        self.timed_out = False
        self.kill_sent = False
        self.broken_pipe = False
        self.interrupts = 0
        self.exec_request: dict = {}
        self.deadline: float | None = None
        self.started = 0.0
        self.begun = time.monotonic()
        self.captured = {STDOUT: bytearray(), STDERR: bytearray()}
        self.sanitisers: dict[int, Any] = {}
        if not request.json and (os.isatty(1) or os.isatty(2)):
            from ringfence.terminal import Sanitiser

            self.sanitisers = {stream: Sanitiser() for stream, number in ((STDOUT, 1), (STDERR, 2)) if os.isatty(number)}
        self.truncated = False
        self.stdin_open = True
        self.stdin_data = b""
        self.signals: list[int] = []
        self.oom = False

    @property
    def launcher(self) -> Launcher:
        assert self.running is not None, "start() comes first"
        return self.running

    # Start ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for everything at once: the kernel's sockets keep the order, so nothing waits for an answer."""
        settings = self.settings
        interpreter = environments.interpreter()
        self.running = Launcher(interpreter.executable_outside, self._event, lambda: None, self.early)
        self.stream, theirs = socket.socketpair()
        for each in (self.stream, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.stream.setblocking(False)
        passed = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
        sources = {"ringfence": environments.guest_library_directory(_progress)}
        if interpreter.prefix_outside is not None:
            sources["python"] = interpreter.prefix_outside
        self.python = interpreter.executable_inside
        environment = settings.environment
        if settings.template in ("base", "data"):
            sources["env"] = environments.python_environment_directory(settings.template, _progress)
            self.python = environments.ENVIRONMENT_INSIDE + "/bin/python3"
        elif settings.template != "plain":
            from ringfence.node import cache, packages

            sources["packages"] = packages.prepare(settings.template, (), _progress)[0]
            sources["env"] = environments.python_environment_directory("base", _progress)
            self.python = packages.INSIDE + "/bin/python3"
            if environment["PATH"] == precompiled.ENVIRONMENT["PATH"]:
                environment["PATH"] = f"{packages.INSIDE}/bin:{environment['PATH']}"
            cache.hold(sources["packages"])  # until this process ends
        if interpreter.library_path:
            environment.setdefault("LD_LIBRARY_PATH", interpreter.library_path)
        ask = self.launcher.ask
        # As engine.zygote_name has it; the launcher is of this program alone.
        template = settings.template + "--root" if settings.root else settings.template
        ask({"do": "configure", "owner": os.getpid(), "pass_environment": passed, "spares": 0}, self._checked)
        ask(
            {
                "do": "template", "name": template, "sources": sources, "python": interpreter.executable_inside,
                "library": interpreter.library_path, "modules": None, "isolated": True,
                "masks": list(interpreter.masks), "root": settings.root,
            },
            self._checked,
        )  # fmt: skip
        ask(
            {
                "do": "create", "id": IDENTIFIER, "template": template, "limits": settings.limits,
                "environment": environment, "cwd": HOME, "host_name": "sandbox", "prefork": False,
                "directories": settings.directories,
            },
            self._checked, [theirs.fileno(), *settings.opened],
        )  # fmt: skip
        theirs.close()
        for descriptor in settings.opened:
            os.close(descriptor)
        self._first_requests()

    def _first_requests(self) -> None:
        request = self.request
        if request.command is not None:
            argv = request.command
        elif request.code is not None:
            argv = [*self._beginning(code=request.code), *request.arguments]
        elif request.file in (None, "-"):
            argv = [*self._beginning(), *request.arguments]
        else:
            name = os.path.basename(request.file)
            self.upload_data = _read_script(request.file)
            script = name if not name.startswith("-") else "./" + name
            if self.settings.cwd != HOME:
                script = f"{HOME}/{name}"
            argv = [*self._beginning(file=script), *request.arguments]
            self.upload = self.mux.open({"op": "file.write", "path": f"{HOME}/{name}", "parents": False})
            self._feed_upload()
        self.exec_request = {"op": "exec", "argv": argv, "cwd": self.settings.cwd, "env": None, "pty": None, "stdin": True}
        if not self.upload:
            self.channel = self.mux.open(self.exec_request)

    def _beginning(self, code: str | None = None, file: str | None = None) -> list[str]:
        if self.request.language == "python":
            return [self.python, "-c", code] if code is not None else [self.python, file or "-"]
        from ringfence.stream import languages

        return languages.command(self.request.language, code=code, file=file)

    def _feed_upload(self) -> None:
        room = self.mux.data_room(self.upload)
        if self.upload_data and room:
            piece, self.upload_data = self.upload_data[:room], self.upload_data[room:]
            self.mux.send_data(self.upload, FILE, piece)
        if not self.upload_data:
            self.mux.send_eof(self.upload, FILE)

    def _checked(self, answer: dict) -> None:
        if not answer.get("ok") and self.failure is None:
            self.failure = _Failed(f"{answer.get('primitive')}: {answer.get('message')}", answer.get("hint", ""))

    def _event(self, message: dict) -> None:
        if message.get("event") == "gone":
            self.gone = message

    # The loop ------------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Until the program's result, Ringfence's failure or the sandbox's end."""
        gc.enable()  # entry.py switched collections off for the start
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.signals.append(number))
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        poll = select.poll()
        stream, control = self.stream.fileno(), self.launcher.fileno()
        poll.register(control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        watched_stream, watched_input = 0, False
        start_by = self.begun + START_PATIENCE
        while self.result is None and self.failure is None and self.gone is None:
            if self.signals:
                self._forward_signals()
            self._flush()
            wanted = select.POLLIN | (select.POLLOUT if self.mux.queued else 0)
            if wanted != watched_stream:
                poll.register(stream, wanted)
                watched_stream = wanted
            wants_input = (
                self.stdin_open and self.channel > 0 and self.mux.queued < RECEIVE
                and self.mux.data_room(self.channel) > 0 and self.started > 0
            )
            if wants_input != watched_input:
                poll.register(0, select.POLLIN) if wants_input else poll.unregister(0)
                watched_input = wants_input
            now = time.monotonic()
            due = self.deadline if self.started else start_by
            if due is not None and now >= due:
                self._late()
                continue
            patience = None if due is None else (due - now) * 1000 + 1
            for descriptor, events in poll.poll(patience):
                if descriptor == stream:
                    if events & ~select.POLLOUT:
                        self._receive()
                elif descriptor == control:
                    if not self.launcher.read():
                        poll.unregister(control)
                        self._stream_ended()
                elif descriptor == 0:
                    self._read_input()
                else:
                    os.read(wake, 512)
        signal.set_wakeup_fd(-1)

    def _flush(self) -> None:
        while buffers := self.mux.pending():
            try:
                self.mux.consumed(self.stream.sendmsg(buffers))
            except BlockingIOError:
                return
            except OSError:
                return  # reading says how it ended

    def _receive(self) -> None:
        try:
            data = self.stream.recv(RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stream_ended()
            return
        try:
            events = self.mux.receive(data)
        except ProtocolViolation as violation:
            self.failure = _Failed(f"the guest broke the protocol: {violation}", "the sandbox was killed")
            return
        for kind, channel, stream, payload in events:
            if channel == self.channel and channel:
                if kind == DATA:
                    self._output(stream, payload)
                elif kind == EVENT and "started" in payload and not self.started:
                    self._mark_started()
                elif kind == CLOSE:
                    if not self.started:
                        self._mark_started()
                    self.result = payload
            elif channel == self.upload and channel:
                if kind == CREDIT and self.upload_data:
                    self._feed_upload()
                elif kind == CLOSE:
                    self._uploaded(payload)

    def _mark_started(self) -> None:
        self.started = time.monotonic()
        if self.settings.timeout is not None:
            self.deadline = self.started + self.settings.timeout

    def _uploaded(self, answer: dict) -> None:
        if answer.get("ok") is not True:
            error = answer.get("error")
            self.failure = _Failed(f"the script did not arrive: {error}")
            return
        self.channel = self.mux.open(self.exec_request)

    def _output(self, stream: int, data: bytes) -> None:
        if self.request.json:
            kept = self.captured[stream]
            kept += data
            if len(kept) > 2 * precompiled.OUTPUT:
                del kept[: -precompiled.OUTPUT]
                self.truncated = True
        elif not self.broken_pipe:
            sanitiser = self.sanitisers.get(stream)
            self._write(stream, data if sanitiser is None else sanitiser.feed(data))
        self.mux.grant(self.channel, len(data))

    def _write(self, stream: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(1 if stream == STDOUT else 2, view) :]
        except OSError:
            # Nobody reads us any more: the program gets what it would get from a closed pipe, its end.
            self.broken_pipe = True
            self._kill()

    def _read_input(self) -> None:
        try:
            data = os.read(0, min(64 << 10, self.mux.data_room(self.channel)))
        except OSError:
            data = b""
        if data:
            self.mux.send_data(self.channel, STDIN, data)
        else:
            self.stdin_open = False
            self.mux.send_eof(self.channel, STDIN)

    def _forward_signals(self) -> None:
        numbers, self.signals = self.signals, []
        for number in numbers:
            self.interrupts += 1
            if not self.channel or not self.started or self.interrupts > 2:
                # Before there is a program, or when it has been asked twice: end it all.
                self.result = {"ok": True, "exit_code": None, "signal": number}
                return
            self.mux.send_event(self.channel, {"signal": int(number), "tree": True})

    def _kill(self) -> None:
        if not self.kill_sent and self.channel:
            self.kill_sent = True
            self.deadline = time.monotonic() + DRAIN_PATIENCE
            self.mux.send_event(self.channel, {"kill": True})

    def _late(self) -> None:
        if not self.started:
            self.failure = _Failed("the sandbox did not answer", "`ringfence doctor` looks for the cause")
        elif self.kill_sent:
            self.result = {"ok": True, "exit_code": None, "signal": 9}  # the guest is no help: its end comes below
        else:
            self.timed_out = True
            self._kill()

    def _stream_ended(self) -> None:
        """The sandbox is gone. The launcher knows why, and says so within a moment."""
        waiter = select.poll()
        waiter.register(self.launcher.fileno() if not self.launcher.lost else 2, select.POLLIN)
        until = time.monotonic() + 1.0
        while self.gone is None and self.failure is None and not self.launcher.lost and time.monotonic() < until:
            if waiter.poll(200):
                self.launcher.read()
        if self.gone is None and self.failure is None:
            self.failure = _Failed("the sandbox ended without a word", "`ringfence doctor` looks for the cause")

    # The end -------------------------------------------------------------------------------------------

    def ask_and_wait(self, question: dict, patience: float = 1.0, descriptors: list[int] | None = None) -> dict:
        """One question to the launcher, with its answer; {} when there is none in time."""
        answers: list[dict] = []
        try:
            self.launcher.ask(question, answers.append, descriptors)
        except RingfenceError:
            return {}
        waiter = select.poll()
        waiter.register(self.launcher.fileno(), select.POLLIN)
        until = time.monotonic() + patience
        while not answers and time.monotonic() < until and not self.launcher.lost:
            if waiter.poll(max(1, (until - time.monotonic()) * 1000)) and not self.launcher.read():
                break
        return answers[0] if answers else {}

    def finish(self) -> tuple[int, str, str, str]:
        """(exit code, what ended it, message, hint)."""
        failure, result = self.failure, self.result
        if failure is not None:
            return FAILED, "failure", str(failure), failure.hint
        limits = self.settings.limits
        if result is None:
            gone = self.gone or {}
            if gone.get("failure"):
                why = gone["failure"]
                return FAILED, "failure", f"{why.get('primitive')}: {why.get('message')}", "run `ringfence doctor`"
            reason = gone.get("reason", "crashed")
            if reason == "oom":
                return 137, "memory", f"killed: more memory than limits.memory ({_size(limits['memory'])})", "--memory raises it"
            if reason == "max-age":
                return TIMED_OUT, "max_age", "killed: limits.max_age was reached", "--timeout sets both"
            return FAILED, "failure", f"the sandbox ended: {reason}", "`ringfence doctor` looks for the cause"
        if self.timed_out:
            limit = f"{self.settings.timeout:g} s"
            return TIMED_OUT, "timeout", f"killed: the time limit of {limit} was reached", "--timeout raises it"
        if self.broken_pipe:
            return 128 + signal.SIGPIPE, "signal", "", ""
        if result.get("ok") is not True:
            error = result.get("error") or {}
            return FAILED, "failure", f"{error.get('code')}: {error.get('message')}", str(error.get("hint") or "")
        number, code = result.get("signal"), result.get("exit_code")
        if type(number) is int and 0 < number < 128:
            if number == signal.SIGKILL and self._memory_kills():
                return 137, "memory", f"killed: more memory than limits.memory ({_size(limits['memory'])})", "--memory raises it"
            return 128 + number, "signal", "", ""
        if type(code) is not int or not 0 <= code <= 255:
            return FAILED, "failure", f"the guest reported an impossible exit code: {code!r}", ""
        return code, "exit", "", ""

    def _memory_kills(self) -> bool:
        stats = self.ask_and_wait({"do": "stats", "id": IDENTIFIER}).get("stats") or {}
        return bool(stats.get("oom_kills"))

    def close(self) -> None:
        """End the launcher and with it everything it started; returns when it is gone, or after 5 seconds."""
        for stream, sanitiser in self.sanitisers.items():
            if not self.broken_pipe:
                self._write(stream, sanitiser.finish())
        try:
            self.launcher.ask({"do": "close"}, lambda answer: None)
        except RingfenceError:
            pass
        waiter = select.poll()
        if not self.launcher.lost:
            waiter.register(self.launcher.fileno(), select.POLLIN)
        until = time.monotonic() + 5.0
        while not self.launcher.lost and time.monotonic() < until:
            if waiter.poll(100) and not self.launcher.read():
                break
        try:
            os.waitpid(self.launcher.pid, 0)
        except ChildProcessError:
            pass


def main(request: Request, early: tuple[int, int] | None = None) -> int:
    """Run what `request` asks for; returns this process's exit code.

    `early` is a launcher that comes up already, as (pid, descriptor): see entry.py.
    """
    run, (code, ended, message, hint) = perform(request, early)
    if request.json:
        import json

        os.write(1, json.dumps(document(run, code, ended, message, hint)).encode() + b"\n")
    elif message:
        say(message, hint)
    return code


def run_quietly(request: Request) -> dict:
    """As `main`, and returns what `--json` prints. `request.json` must be set: nothing passes through."""
    run, outcome = perform(request, None)
    return document(run, *outcome)


def perform(
    request: Request, early: tuple[int, int] | None, before_the_end: Callable[[_Run], object] | None = None
) -> tuple[_Run | None, tuple[int, str, str, str]]:
    """(the exchange, what `finish` says); `before_the_end` is called while the sandbox is still there, if it is."""
    run: _Run | None = None
    try:
        run = _Run(request, _Settings(request), early)
        run.start()
        run.loop()
        outcome = run.finish()
        if before_the_end is not None and run.started:
            before_the_end(run)
        return run, outcome
    except UsageError as error:
        return run, (MISUSED, "usage", str(error), "")
    except RingfenceError as error:
        return run, (FAILED, "failure", error.message, error.hint)
    finally:
        if run is not None and run.running is not None:
            run.close()


def document(run: _Run | None, code: int, ended: str, message: str, hint: str) -> dict:
    """What `--json` prints."""
    document: dict = {
        "exit_code": code,
        "ended_by": ended,
        "stdout": "",
        "stderr": "",
        "error": {"message": message, "hint": hint} if message else None,
    }
    if run is not None:
        now = time.monotonic()
        document.update(
            stdout=run.captured[STDOUT][-precompiled.OUTPUT :].decode("utf-8", "replace"),
            stderr=run.captured[STDERR][-precompiled.OUTPUT :].decode("utf-8", "replace"),
            truncated=run.truncated or any(len(kept) > precompiled.OUTPUT for kept in run.captured.values()),
            start_seconds=round(run.started - run.begun, 4) if run.started else None,
            run_seconds=round(now - run.started, 4) if run.started else None,
            policy=run.settings.policy,
            limits={**run.settings.limits, "timeout": run.settings.timeout},
        )
    return document


def say(message: str, hint: str = "") -> None:
    """A message of ours, and what to do about it, to standard error."""
    from ringfence import terminal  # a message may quote what the guest said

    text = f"ringfence: {terminal.text(message)}\n" + (f"ringfence: {terminal.text(hint)}\n" if hint else "")
    try:
        os.write(2, text.encode("utf-8", "replace"))
    except OSError:
        pass


def _progress(message: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        say(message + " (once)")


def _read_script(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise EngineError(
            f"cannot read {path}: {error.strerror}", hint="ringfence run takes a file, -c CODE, or - for standard input"
        ) from None


def _mebibytes(count: int) -> str:
    return f"{count >> 20} MiB" if count % (1 << 20) == 0 else f"{count / (1 << 20):.6f}".rstrip("0") + " MiB"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return f"{count} bytes"
