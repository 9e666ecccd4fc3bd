"""Commands: start a program, stream what it writes, feed it, stop its whole tree, and say exactly how it ended.

Guards the process contract: a non-zero exit is a result; time is measured by the host's clock and a timeout ends
the whole tree (or the sandbox, when the guest does not obey) and keeps the partial output; output is bounded,
counted and addressable; a dead sandbox is never reported as a failed command.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ringfence.errors import (
    CommandExitError,
    GuestError,
    InvalidArgumentError,
    NotFoundError,
    RingfenceError,
    SandboxError,
    TimeoutExceededError,
)
from ringfence.stream.checks import (
    check_argv,
    check_callback,
    check_count,
    check_envs,
    check_path,
    check_seconds,
    check_text,
)
from ringfence.stream.exchange import ANSWER_SECONDS, Exchange, Session, deliver, integer_of
from ringfence.stream.log import Entry
from ringfence.stream.output import OutputRing, TextDecoder
from ringfence.stream.results import CommandResult, ProcessInfo, PtySize, Usage, clean_text, signal_name
from ringfence.stream.usage import Reading
from ringfence.stream.waiting import run_sync, sleep

__all__ = ["Command", "CommandRunner"]

KILL_SECONDS = 10.0
"""How long an explicit `kill()` waits for the guest before the whole sandbox is killed."""
_FINISHED_KEPT = 16
_FINISHED_SECONDS = 30.0
_PIECE = 1 << 20

_STDIN, _STDOUT, _STDERR, _PTY = 0, 1, 2, 3


class Command(Exchange):
    """One command, and the sink of its channel.

    Output always goes to the rings. While somebody consumes (callbacks, iteration) it is queued for them as well,
    and credit is granted only after they took it, so that a slow consumer slows the program down instead of
    growing a queue.
    """

    __slots__ = (
        "_consumed",
        "_decoders",
        "_entry",
        "_expired",
        "_live",
        "_oom_kills",
        "_queue",
        "_reading",
        "_registry",
        "_reserved",
        "_result",
        "_stopped",
        "_wake_on_start",
        "begun",
        "check",
        "deadline",
        "failed",
        "last_output",
        "limit",
        "name",
        "no_output",
        "pid",
        "pty",
        "session",
        "stderr",
        "stdin",
        "stdout",
        "usage",
    )

    def __init__(self, session: Session, registry: CommandRunner, name: str, output: int) -> None:
        super().__init__()
        self.session = session
        self.name = name
        self.stdout = OutputRing(output)
        self.stderr = OutputRing(output)
        self.pid: int | None = None
        self.pty = False
        self.stdin = False
        self.check = False
        self.failed: str | None = None
        self.clock = session.clock
        self.begun = self.last_output = session.clock.now()
        self.limit: float | None = None
        self.deadline: float | None = None
        self.no_output: float | None = None
        self._registry = registry
        self._queue: deque[tuple[int, bytes, int]] = deque()
        self._live = False
        self._consumed = False
        self._reserved = False  # attached before the start, for the callbacks of `run`
        self._decoders: dict[int, Any] = {}
        self._wake_on_start = False
        self._oom_kills = session.oom_kills
        self._expired: TimeoutExceededError | None = None
        self._stopped = False
        self._result: CommandResult | None = None
        self._reading: Reading | None = None
        self.usage: Usage | None = None
        self._entry: Entry | None = None

    # -- I/O thread

    def on_data(self, stream: int, data: memoryview) -> int | None:
        self.last_output = self.clock.now()
        size = len(data)
        with self._lock:
            # Under the lock, so that `attach` sees each piece either in the ring or in the queue.
            (self.stderr if stream == _STDERR else self.stdout).write(data)
            live = self._live
            if live:
                self._queue.append((stream, bytes(data), size))
        if not live:
            return size
        self.wake()
        return None

    def take_event(self, event: dict[str, Any]) -> None:
        started, failed = event.get("started"), event.get("failed")
        if isinstance(started, dict) and self.pid is None:
            self.pid = integer_of(started, "pid")
            self._registry.started(self)
            if self._wake_on_start:
                self.wake()
        elif isinstance(failed, dict):
            message = failed.get("message")
            self.failed = (
                clean_text(message)[:1000] if isinstance(message, str) else "it could not be started"
            )
            if self._wake_on_start:
                self.wake()

    def _finish(self) -> None:
        # Now, not when somebody asks for the result: what runs afterwards is not this command's.
        self.usage = self.session.meter.end(self._reading)
        if self._entry is not None:
            self.session.log.end(self._entry)
        self._registry.ended(self)
        super()._finish()

    # -- consuming output

    def attach(self) -> None:
        """Begin to consume: what is kept comes first, then what arrives."""
        with self._lock:
            if self._live or self._consumed:
                raise InvalidArgumentError(
                    "somebody consumes the output of this command already", hint="use read_output(offset)"
                )
            self._live = self._consumed = True
            kept = [
                (_PTY if self.pty else _STDOUT, self.stdout.bytes(), 0),
                (_STDERR, self.stderr.bytes(), 0),
            ]
            self._queue.extend(piece for piece in kept if piece[1])

    def detach(self) -> None:
        """Consume no more: output goes on to the rings, and nothing blocks the program."""
        with self._lock:
            self._live = self._consumed = False
            owed = sum(credit for _, _, credit in self._queue)
            self._queue.clear()
        self._grant(owed)

    def _grant(self, size: int) -> None:
        if size and self.channel is not None and not self.done:
            self.channel.grant(size)

    async def next_piece(self) -> tuple[int, bytes] | None:
        """The next piece of output, waiting for it; None at the end. Only after `attach`."""
        while True:
            seen = self.version
            if self._queue:
                break
            if self.done:
                return None
            await self._changed(seen)
        stream, data, credit = self._queue.popleft()
        self._grant(credit)
        return stream, data

    def decode(self, stream: int, data: bytes, final: bool = False) -> str:
        """Text of the next piece of a stream; a character cut in two comes with the later piece."""
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = TextDecoder("replace")
        return decoder.decode(data, final)

    # -- waiting

    async def started(self) -> None:
        """Wait until the program runs or could not be started."""
        while True:
            seen = self.version
            if self.pid is not None or self.failed is not None or self.done:
                return
            await self._changed(seen)

    async def _changed(self, seen: int, until: float | None = None) -> bool:
        """Wait for news, and stop the command when its time is over. False when `until` came first."""
        while True:
            limit = self._next_deadline()
            left = None if limit is None else self.clock.left(limit)
            if until is not None:
                ours = until - time.monotonic()
                left = ours if left is None or ours < left else left
            if await self.news(left, seen):
                return True
            limit = self._next_deadline()
            if limit is not None and self.clock.now() >= limit:
                await self.expire()
                return True
            if until is not None and time.monotonic() >= until:
                return False

    def _next_deadline(self) -> float | None:
        if self._expired is not None or self.done:
            return None
        if self.no_output is None:
            return self.deadline
        silent = self.last_output + self.no_output
        return silent if self.deadline is None or silent < self.deadline else self.deadline

    async def expire(self) -> None:
        """The time is over: kill the tree inside, or the sandbox when the guest does not answer in 2 s."""
        if self._expired is not None or self.done:
            return
        silent = self.deadline is None or self.clock.now() < self.deadline
        limit = self.no_output if silent else self.limit
        what = "wrote nothing for" if silent else "ran longer than"
        error = self._expired = TimeoutExceededError(
            f"the command {what} {limit:g} s and was killed with all its children: {self.name}",
            hint="pass a larger timeout (0: none), or background=True",
            what="commands.run",
            limit=limit,
            outcome="killed",
        )
        if self._live:
            self.detach()
        if not await self._kill(ANSWER_SECONDS):
            error.outcome = "sandbox_killed"
            error.message += "; the guest did not answer, so the whole sandbox was killed"

    async def _kill(self, seconds: float) -> bool:
        """Kill the tree; False when that took the whole sandbox."""
        assert self.channel is not None
        self._stopped = True
        self.channel.send_event({"kill": True})
        if await self.finished(self.clock.now() + seconds):
            return True
        await self.session.kill()
        await self.finished(self.clock.now() + ANSWER_SECONDS)
        return False

    async def wait(
        self,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        on_pty: Callable[[bytes], Any] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Wait for the end. `timeout` bounds the waiting only, not the command."""
        until = None if timeout is None else time.monotonic() + timeout
        if on_stdout is not None or on_stderr is not None or on_pty is not None:
            if not self._reserved:
                self.attach()
            self._reserved = False
            try:
                await self._call_back(on_stdout, on_stderr, on_pty, until)
            finally:
                if not self.done:
                    self.detach()
        while not self.done:
            if not await self._changed(self.version, until):
                raise self._still_running(timeout)
        return await self.result()

    def _still_running(self, timeout: float | None) -> TimeoutExceededError:
        return TimeoutExceededError(
            f"the command still runs after waiting {timeout:g} s: {self.name}",
            hint="wait again, or kill() it",
            what="wait",
            limit=timeout,
            partial=self._describe({}),
            outcome="running",
        )

    async def _call_back(
        self,
        on_stdout: Callable[[str], Any] | None,
        on_stderr: Callable[[str], Any] | None,
        on_pty: Callable[[bytes], Any] | None,
        until: float | None,
    ) -> None:
        callbacks = {_STDOUT: on_stdout, _STDERR: on_stderr}
        while True:
            seen = self.version
            while self._queue:
                stream, data, credit = self._queue.popleft()
                if stream == _PTY:
                    if on_pty is not None:
                        await deliver(on_pty, data)
                elif (callback := callbacks.get(stream)) is not None and (text := self.decode(stream, data)):
                    await deliver(callback, text)
                self._grant(credit)
            limit = self._next_deadline()
            if limit is not None and self.clock.now() >= limit:
                await self.expire()
            if self.done:
                if self._queue:
                    continue
                break
            if not await self._changed(seen, until):
                return
        for stream, callback in callbacks.items():
            if callback is not None and (text := self.decode(stream, b"", True)):
                await deliver(callback, text)

    async def result(self) -> CommandResult:
        """The result of a command that has ended; raises what its end means."""
        if self._result is None:
            if self.reply is None:
                if self._expired is not None:
                    self._expired.partial = self._describe({})
                    raise self._expired
                raise await self.session.fail(self, f"command {self.name}")
            reply = await self.session.reply(self, self.name)
            result = self._describe(reply)
            # 137 is how a shell passes on that a child of its died by SIGKILL.
            murdered = not self._stopped and (result.signal == 9 or result.exit_code == 137)
            if murdered and await self.session.oom_struck(self._oom_kills):
                memory = self.session.limits.memory >> 20
                result.oom = True
                result.error = f"killed: limits.memory of {memory} MiB was reached"
            self._result = result
        if self._expired is not None:
            self._expired.partial = self._result
            raise self._expired
        result = self._result
        if self.check and result.exit_code != 0:
            raise CommandExitError(
                f"the command failed ({result.error}): {self.name}",
                hint="the whole result is in error.result",
                result=result,
            )
        return result

    def _describe(self, reply: dict[str, Any]) -> CommandResult:
        code, number = reply.get("exit_code"), reply.get("signal")
        if type(number) is int and 0 < number < 128:
            code, error = 128 + number, f"killed by {signal_name(number)}"
        elif type(code) is int and 0 <= code < 256:
            number, error = None, None if code == 0 else self.failed or f"exit status {code}"
        elif reply:
            raise GuestError(f"{self.name}: the guest gave a malformed answer", code="malformed")
        else:
            number, code, error = None, -1, "no exit status"
        cpu = reply.get("cpu_seconds")
        out, err = self.stdout, self.stderr
        return CommandResult(
            exit_code=code,
            signal=number,
            error=error,
            stdout_bytes=out.bytes(),
            stderr_bytes=err.bytes(),
            stdout_total=out.total,
            stderr_total=err.total,
            pid=self.pid,
            background=reply.get("background") is True,
            duration=self.clock.now() - self.begun,
            cpu_seconds=float(cpu) if isinstance(cpu, (int, float)) else None,
            max_rss=integer_of(reply, "max_rss"),
            usage=self.usage,
        )

    # -- acting on it

    async def kill(self) -> bool:
        """Kill the command and every process it started; False when it had ended already."""
        if self.done:
            return False
        self.session.check_going()
        await self._kill(KILL_SECONDS)
        return True

    async def signal(self, number: int, tree: bool = False) -> bool:
        """Send a signal to the main process, or to all; False when the command has ended."""
        check_count(number, "signal", lowest=1, highest=64)
        if self.done or self.channel is None:
            return False
        self.session.check_going()
        self.channel.send_event({"signal": number, "tree": tree})
        return True

    async def send_stdin(self, data: str | bytes, timeout: float | None = None) -> None:
        """Write to the program's input. Waits while the program does not read, at most `timeout` seconds:
        by default those of the command, or `limits.timeout` where it has none; 0: for ever."""
        timeout = check_seconds(timeout, "timeout")
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogateescape")
        elif isinstance(data, (bytearray, memoryview)):
            data = bytes(data)
        elif not isinstance(data, bytes):
            raise InvalidArgumentError(f"stdin must be str or bytes, not {type(data).__name__}")
        if not (self.stdin or self.pty):
            raise InvalidArgumentError(
                "the command was started without an input", hint="pass stdin=True to commands.run"
            )
        if self.done or self.channel is None:
            raise NotFoundError(f"the command has ended: {self.name}")
        self.session.check_going()
        if timeout is None:
            timeout = self.limit or self.session.limits.timeout
        deadline = self.clock.now() + timeout if timeout else None
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE] if len(data) > _PIECE else data
            if not await self.session.send(self, _PTY if self.pty else _STDIN, piece, deadline):
                if self.done:
                    return
                raise TimeoutExceededError(
                    f"the command did not read its input for {timeout or 0.0:g} s: {self.name}",
                    hint="pass a larger timeout (0: none); what was sent already may still be read",
                    what="send_stdin",
                    limit=timeout,
                    outcome="running",
                )

    async def close_stdin(self) -> None:
        """End the program's input; on a PTY this types the end-of-file character (^D)."""
        if self.done or self.channel is None:
            return
        if self.pty:
            await self.send_stdin(b"\x04")
        elif self.stdin:
            self.session.check_going()
            self.channel.send_eof(_STDIN)

    async def resize(self, size: PtySize) -> None:
        """Change the size of the command's PTY."""
        if not self.pty:
            raise InvalidArgumentError("the command has no PTY", hint="pass pty=PtySize(rows, cols)")
        if not self.done and self.channel is not None:
            self.session.check_going()
            self.channel.send_event({"resize": _check_size(size)})

    def feed(self, data: bytes) -> None:
        """Send all of the input, then its end, as fast as the program reads; whether it does is its own affair."""
        channel = self.channel
        if channel is None or self.done:
            return
        if data:
            channel.send_data(_PTY if self.pty else _STDIN, data)
        if self.pty:
            channel.send_data(_PTY, b"\x04")
        else:
            channel.send_eof(_STDIN)

    def watch(self) -> None:
        """Enforce the deadlines of a command that nobody waits for."""
        if self.deadline is None and self.no_output is None:
            return

        async def work() -> None:
            while (limit := self._next_deadline()) is not None:
                pause = limit - self.clock.now()
                if pause <= 0:
                    await self.expire()
                    return
                await self._registry.pause(self, pause)

        def run() -> None:
            try:
                run_sync(work())
            except SandboxError:
                pass  # It died meanwhile; whoever waits hears of it.

        threading.Thread(target=run, name="ringfence-timeout", daemon=True).start()


class CommandRunner:
    """`sandbox.commands` and `sandbox.pty` of one sandbox."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alive: dict[int, Command] = {}
        self._finished: deque[tuple[float, Command]] = deque(maxlen=_FINISHED_KEPT)

    # -- I/O thread

    def started(self, command: Command) -> None:
        """A command runs and can be found by its pid."""
        if command.pid is not None:
            self._alive[command.pid] = command

    def ended(self, command: Command) -> None:
        """A command has ended; one in the background stays findable for a while."""
        if command.pid is not None and self._alive.get(command.pid) is command:
            del self._alive[command.pid]
            if command._wake_on_start:
                self._finished.append((time.monotonic(), command))

    # -- caller

    async def pause(self, command: Command, seconds: float) -> None:
        """Sleep, in steps that notice the end of the command."""
        if not command.done:
            await sleep(min(seconds, 1.0))

    def prepare(
        self,
        cmd: Any,
        *,
        background: bool,
        envs: Mapping[str, str] | None,
        user: str | None,
        cwd: Any,
        stdin: bool | str | bytes | None,
        timeout: float | None,
        no_output_timeout: float | None,
        pty: PtySize | None,
        check: bool,
        output_limit: int | None,
    ) -> tuple[Command, dict[str, Any], bytes | None]:
        """Judge the arguments; returns the command, its request, and the input to send."""
        session = self._session
        argv = check_argv(cmd)
        limit = check_seconds(timeout, "timeout")
        if limit is None and not background:
            limit = session.limits.timeout
        text: bytes | None = None
        if isinstance(stdin, str):
            text = stdin.encode("utf-8", "surrogateescape")
        elif isinstance(stdin, (bytes, bytearray, memoryview)):
            text = bytes(stdin)
        elif stdin is not None and not isinstance(stdin, bool):
            raise InvalidArgumentError(f"stdin must be a bool, str or bytes, not {type(stdin).__name__}")
        output = session.limits.output if output_limit is None else check_count(output_limit, "output_limit")
        command = Command(session, self, cmd if isinstance(cmd, str) else " ".join(argv)[:200], output)
        command.check = bool(check)
        command.pty = pty is not None
        command.stdin = stdin is not None and stdin is not False
        command.limit = limit or None
        command.deadline = command.begun + limit if limit else None
        command.no_output = check_seconds(no_output_timeout, "no_output_timeout") or None
        request = {
            "op": "exec",
            "argv": argv,
            "user": "user" if user is None else check_text(user, "user", empty=False),
            "cwd": None if cwd is None else check_path(cwd, "cwd"),
            "env": check_envs(envs),
            "pty": None if pty is None else _check_size(pty),
            "stdin": command.stdin and pty is None,
        }
        return command, request, text

    def begin(self, command: Command, request: dict[str, Any]) -> None:
        """Send the request."""
        meter, log = self._session.meter, self._session.log
        entry = command._entry = log.begin("command", command.name, command.stdout, command.stderr)
        try:
            self._session.open(request, command)
        except BaseException as error:
            log.end(entry)
            if not isinstance(error, ValueError) or isinstance(error, RingfenceError):
                raise
            raise InvalidArgumentError(
                f"the command cannot be sent: {error}",
                hint="write what is large to a file with files.write and name that, or pass it as stdin",
            ) from error
        command._reading = meter.begin()  # while the guest works already
        if command.done:
            command.usage = meter.end(command._reading)  # it was so quick that its end found no reading

    async def run(
        self,
        command: Command,
        request: dict[str, Any],
        text: bytes | None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        on_pty: Callable[[bytes], Any] | None = None,
    ) -> CommandResult:
        """Run in the foreground."""
        for name, callback in (("on_stdout", on_stdout), ("on_stderr", on_stderr), ("on_pty", on_pty)):
            check_callback(callback, name)
            if callback is not None and not command._reserved:
                # Before the start, so that the order of the two streams is kept from the first byte on.
                command.attach()
                command._reserved = True
        self.begin(command, request)
        try:
            if text is not None:
                command.feed(text)
            return await command.wait(on_stdout, on_stderr, on_pty)
        except TimeoutExceededError:
            raise
        except BaseException:
            self._session.abandon(command, {"kill": True})
            raise

    async def start(self, command: Command, request: dict[str, Any], text: bytes | None) -> Command:
        """Run in the background: returns as soon as the program runs."""
        command._wake_on_start = True
        self.begin(command, request)
        try:
            await command.started()
            if command.pid is None and command.failed is None:
                await command.result()
            if text is not None:
                command.feed(text)
        except BaseException:
            self._session.abandon(command, {"kill": True})
            raise
        command.watch()
        return command

    def find(self, pid: int) -> Command:
        """The command with that pid: alive, or in the background and ended at most 30 s ago."""
        check_count(pid, "pid", lowest=1)
        command = self._alive.get(pid)
        if command is None:
            oldest = time.monotonic() - _FINISHED_SECONDS
            while self._finished and self._finished[0][0] < oldest:
                self._finished.popleft()
            command = next((known for _, known in reversed(self._finished) if known.pid == pid), None)
        if command is None:
            raise NotFoundError(f"no command with pid {pid} was started through this sandbox object")
        return command

    async def list(self) -> list[ProcessInfo]:
        """The commands that run."""
        reply = await self._session.call({"op": "process.list"}, "commands.list")
        processes = reply.get("processes")
        if not isinstance(processes, list):
            raise GuestError("commands.list: the guest gave a malformed answer", code="malformed")
        found = []
        for item in processes:
            pid = integer_of(item, "pid") if isinstance(item, dict) else None
            if pid is not None:
                argv = item.get("argv")
                argv = [clean_text(str(part)) for part in argv] if isinstance(argv, list) else []
                found.append(ProcessInfo(pid, argv, clean_text(str(item.get("user", "user")))))
        return found

    async def kill(self, pid: int) -> bool:
        """Kill a command and all that it started; False when there is none with that pid."""
        try:
            return await self.find(pid).kill()
        except NotFoundError:
            pass
        try:
            await self._session.call(
                {"op": "process.signal", "pid": pid, "signal": 9, "tree": True}, "commands.kill"
            )
        except NotFoundError:
            return False
        return True


def _check_size(size: Any) -> dict[str, int]:
    rows, cols = getattr(size, "rows", None), getattr(size, "cols", None)
    if isinstance(size, (tuple, list)) and len(size) == 2:
        rows, cols = size
    return {
        "rows": check_count(rows, "rows", lowest=1, highest=65535),
        "cols": check_count(cols, "cols", lowest=1, highest=65535),
    }
