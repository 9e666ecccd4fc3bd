"""Stateful code: run a cell in a context and collect what it prints, shows and raises.

Guards the host while untrusted code runs: time by the host's own clock (interrupt, then a fresh kernel, then
the end of the whole sandbox), output and results by size and number. Results belong to exactly one execution,
since each has a channel of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ringfence.errors import (
    GuestError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    TimeoutExceededError,
)
from ringfence.stream import languages
from ringfence.stream.checks import (
    check_callback,
    check_context_id,
    check_envs,
    check_path,
    check_seconds,
    check_text,
)
from ringfence.stream.exchange import ANSWER_SECONDS, Exchange, Session, deliver, integer_of
from ringfence.stream.output import OutputRing, TextDecoder
from ringfence.stream.results import (
    Context,
    Execution,
    ExecutionError,
    Logs,
    OutputMessage,
    Result,
    ResultParser,
    clean_text,
    signal_name,
)

__all__ = ["DEFAULT_CONTEXT", "CodeRunner"]

DEFAULT_CONTEXT = "default"
GRACE_SECONDS = 2.0
"""How long code may take to react to a KeyboardInterrupt before its kernel is replaced."""

_STDOUT, _STDERR, _RESULTS = 1, 2, 4


class _Cell(Exchange):
    """One execution. Without callbacks everything is kept as it comes and the caller sleeps until the end;
    with callbacks pieces wait in `queue`, and credit is granted only as they are consumed."""

    __slots__ = ("bodies", "live", "parser", "queue", "started", "stderr", "stdout")

    def __init__(self, output: int, result: int, live: bool) -> None:
        super().__init__()
        self.stdout = OutputRing(output)
        self.stderr = OutputRing(output)
        self.parser = ResultParser(result)
        self.bodies: list[tuple[int, bytearray]] = []
        self.queue: deque[tuple[int, bytes]] = deque()
        self.live = live
        self.started = False

    def on_data(self, stream: int, data: memoryview) -> int | None:
        if self.live:
            self.queue.append((stream, bytes(data)))
            self.wake()
            return None
        self.keep(stream, data)
        return len(data)

    def keep(self, stream: int, data: bytes | memoryview) -> None:
        """File a piece of output or of the results stream."""
        if stream == _STDOUT:
            self.stdout.write(data)
        elif stream == _STDERR:
            self.stderr.write(data)
        elif stream == _RESULTS:
            self.bodies.extend(self.parser.feed(data))

    def take_event(self, event: dict[str, Any]) -> None:
        if "started" in event:
            self.started = True

    def go_quiet(self) -> None:
        """Nobody consumes any more: keep and grant, so that the guest is never blocked on us."""
        self.live = False
        while self.queue:
            stream, data = self.queue.popleft()
            self.keep(stream, data)
            if self.channel is not None and not self.done:
                self.channel.grant(len(data))


class CodeRunner:
    """`run_code` and the contexts of one sandbox."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._default_made = False

    async def run(
        self,
        code: str,
        language: str | None = None,
        context: Context | str | None = None,
        timeout: float | None = None,
        envs: Mapping[str, str] | None = None,
        on_stdout: Callable[[OutputMessage], Any] | None = None,
        on_stderr: Callable[[OutputMessage], Any] | None = None,
        on_result: Callable[[Result], Any] | None = None,
        on_error: Callable[[ExecutionError], Any] | None = None,
    ) -> Execution:
        """See `Sandbox.run_code`."""
        if not isinstance(code, str):
            raise InvalidArgumentError(f"code must be a str, not {type(code).__name__}")
        if language is not None and context is not None:
            raise InvalidArgumentError("language and context exclude each other", hint="a context has one")
        language = _check_language(language)
        session = self._session
        limit = check_seconds(timeout, "timeout")
        limit = session.limits.timeout if limit is None else limit
        live = False
        for name, callback in (
            ("on_stdout", on_stdout),
            ("on_stderr", on_stderr),
            ("on_result", on_result),
            ("on_error", on_error),
        ):
            if callback is not None:
                check_callback(callback, name)
                live = True
        request = {
            "op": "kernel.execute",
            "context": _default_context(language) if context is None else check_context_id(context),
            "code": code,
            "env": check_envs(envs),
            "quiet": False,
        }
        if language != "python":
            request["language"] = language
        oom_kills = session.oom_kills
        cell = _Cell(session.limits.output, session.limits.result, live)
        clock = session.clock
        deadline = clock.now() + limit if limit else None
        execution = Execution()
        consumer = _Consumer(cell, execution, on_stdout, on_stderr, on_result, on_error)
        try:
            session.open(request, cell)
        except ValueError as error:
            raise InvalidArgumentError(
                f"the code cannot be sent: {error}",
                hint="write it to a file with files.write and run that (%run file.py); large data go into files too",
            ) from error
        entry = session.log.begin("code", code[:200], cell.stdout, cell.stderr)
        reading = session.meter.begin()  # while the guest works already
        try:
            while True:
                seen = cell.version
                if not (live and cell.queue):
                    in_time = await cell.changed(deadline, seen)
                else:
                    in_time = True
                if live:
                    await consumer.consume()
                    if deadline is not None and clock.now() >= deadline and not cell.done:
                        in_time = False
                if cell.done:
                    break
                if not in_time:
                    await self._stop(cell, consumer, limit)
        except TimeoutExceededError:
            raise
        except BaseException:
            # A callback raised, the task was cancelled or Ctrl-C pressed: the cell gets a KeyboardInterrupt.
            cell.go_quiet()
            session.abandon(cell, {"interrupt": True}, {"kill": True}, grace=GRACE_SECONDS)
            raise
        finally:
            execution.usage = session.meter.end(reading)
            session.log.end(entry)
        await consumer.finish()
        if cell.reply is None:
            raise await session.fail(cell, "run_code")
        with _own_hints():
            reply = await session.reply(cell, "run_code")
        await self._conclude(execution, reply, oom_kills, on_error)
        return execution

    async def _stop(self, cell: _Cell, consumer: _Consumer, limit: float) -> None:
        """The deadline passed. Interrupt, replace the kernel, or kill the sandbox; then raise."""
        channel, session = cell.channel, self._session
        assert channel is not None
        cell.go_quiet()
        outcome = "interrupted"
        if not cell.started:
            # It waits behind another execution of its context, which an interrupt or a kill would hit.
            channel.close("deadline")
            done = await cell.finished(session.clock.now() + ANSWER_SECONDS)
        else:
            channel.send_event({"interrupt": True})
            done = await cell.finished(session.clock.now() + GRACE_SECONDS)
            if done and cell.reply is not None and cell.reply.get("status") in ("died", "killed"):
                outcome = "restarted"
            if not done:
                outcome = "restarted"
                channel.send_event({"kill": True})
                done = await cell.finished(session.clock.now() + ANSWER_SECONDS)
        if not done:
            outcome = "sandbox_killed"
            await session.kill()
        elif cell.reply is None:
            raise await session.fail(cell, "run_code")
        await consumer.finish(quiet=True)
        execution = consumer.execution
        execution.execution_count = integer_of(cell.reply or {}, "execution_count")
        if execution.error is None:
            execution.error = ExecutionError(
                "TimeoutExceededError", f"the cell ran longer than {limit:g} s", kind="timeout"
            )
        explained = {
            "interrupted": "it was interrupted; variables survive",
            "restarted": "it did not react to KeyboardInterrupt, so its kernel was replaced; variables are gone",
            "sandbox_killed": "the guest did not answer, so the whole sandbox was killed",
        }[outcome if cell.started or outcome == "sandbox_killed" else "interrupted"]
        if not cell.started and outcome == "interrupted":
            explained = "it had not begun, since its context was busy"
        raise TimeoutExceededError(
            f"the code ran longer than {limit:g} s: {explained}",
            hint="pass a larger timeout, or do less in one cell",
            what="run_code",
            limit=limit,
            partial=execution,
            outcome=outcome,
        )

    async def _conclude(
        self,
        execution: Execution,
        reply: dict[str, Any],
        oom_kills: int,
        on_error: Callable[[ExecutionError], Any] | None,
    ) -> None:
        execution.execution_count = integer_of(reply, "execution_count")
        execution.restarted = reply.get("restarted") is True
        status = reply.get("status")
        if status == "ok" or (status in ("error", "interrupted") and execution.error is not None):
            return
        if status == "died":
            error = await self._epitaph(reply.get("exit"), oom_kills)
        elif status == "interrupted":
            error = ExecutionError("KeyboardInterrupt", "", kind="interrupted")
        elif status == "killed":
            error = ExecutionError(
                "KernelDiedError", "the kernel was killed from outside; variables are gone", kind="killed"
            )
        elif status == "error":
            error = ExecutionError("UnknownError", "the kernel reported an error without its text")
        else:
            raise GuestError("run_code: the guest gave a malformed answer", code="malformed")
        execution.error = error
        if on_error is not None:
            await deliver(on_error, error)

    async def _epitaph(self, end: Any, oom_kills: int) -> ExecutionError:
        """Why the kernel process ended, in words."""
        end = end if isinstance(end, dict) else {}
        number = integer_of(end, "signal")
        if number == 9 and await self._session.oom_struck(oom_kills):
            memory = self._session.limits.memory
            return ExecutionError(
                "MemoryLimitExceededError",
                f"the kernel was killed: limits.memory of {memory >> 20} MiB was reached; variables are gone",
                kind="limit",
            )
        if number:
            how = f"was killed by {signal_name(number)}"
        else:
            how = f"exited with code {integer_of(end, 'code', 0)}"
        return ExecutionError(
            "KernelDiedError",
            f"the kernel {how}; variables are gone, the next cell gets a fresh one",
            kind="died",
        )

    async def create_context(
        self, cwd: Any = None, language: str | None = None, envs: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Context:
        """See `Sandbox.create_code_context`."""
        language = _check_language(language)
        identity = os.urandom(8).hex()
        cwd = "/home/user" if cwd is None else check_path(cwd, "cwd")
        request = {
            "op": "kernel.create",
            "context": identity,
            "language": language,
            "cwd": cwd,
            "env": check_envs(envs),
            "user": "user" if user is None else check_text(user, "user", empty=False),
        }
        with _own_hints():
            reply = await self._session.call(request, "create_code_context")
        return Context(identity, language, cwd, integer_of(reply, "pid"))

    async def list_contexts(self) -> list[Context]:
        """See `Sandbox.list_code_contexts`."""
        reply = await self._session.call({"op": "kernel.list"}, "list_code_contexts")
        contexts = reply.get("contexts")
        if not isinstance(contexts, list):
            raise GuestError("list_code_contexts: the guest gave a malformed answer", code="malformed")
        return [
            Context(
                clean_text(str(item.get("context", ""))),
                clean_text(str(item.get("language", "python"))),
                clean_text(str(item.get("cwd", ""))),
                integer_of(item, "pid"),
                item.get("alive") is True,
                integer_of(item, "execution_count", 0) or 0,
            )
            for item in contexts
            if isinstance(item, dict)
        ]

    async def restart_context(self, context: Context | str) -> None:
        """See `Sandbox.restart_code_context`."""
        request = {"op": "kernel.restart", "context": check_context_id(context)}
        with _own_hints():
            await self._session.call(request, "restart_code_context")

    async def remove_context(self, context: Context | str) -> bool:
        """See `Sandbox.remove_code_context`."""
        try:
            await self._session.call(
                {"op": "kernel.delete", "context": check_context_id(context)}, "remove_code_context"
            )
        except NotFoundError:
            return False
        return True

    async def interrupt_context(self, context: Context | str) -> None:
        """See `Sandbox.interrupt_code_context`."""
        request = {"op": "kernel.interrupt", "context": check_context_id(context)}
        with _own_hints():
            await self._session.call(request, "interrupt_code_context")


@contextmanager
def _own_hints() -> Iterator[None]:
    """Errors about contexts name the calls of this side, which the guest does not know."""
    try:
        yield
    except NotFoundError as error:
        error.hint = "make one with create_code_context; list_code_contexts says which exist"
        raise
    except LimitExceededError as error:
        if "contexts exist" in error.message:
            error.hint = "end one with remove_code_context first"
        raise


class _Consumer:
    """Turns what a cell sent into an `Execution`, calling back on the caller's side."""

    def __init__(
        self,
        cell: _Cell,
        execution: Execution,
        on_stdout: Callable[[OutputMessage], Any] | None,
        on_stderr: Callable[[OutputMessage], Any] | None,
        on_result: Callable[[Result], Any] | None,
        on_error: Callable[[ExecutionError], Any] | None,
    ) -> None:
        self.cell = cell
        self.execution = execution
        self._on_result = on_result
        self._on_error = on_error
        self._callbacks = {_STDOUT: on_stdout, _STDERR: on_stderr}
        self._decoders: dict[int, Any] = {}

    async def consume(self) -> None:
        """Take what is queued, call back, and grant credit for it afterwards."""
        cell = self.cell
        while cell.queue:
            stream, data = cell.queue.popleft()
            cell.keep(stream, data)
            if stream == _RESULTS:
                await self._take_results(quiet=False)
            else:
                callback = self._callbacks.get(stream)
                if callback is not None:
                    decoder = self._decoders.get(stream)
                    if decoder is None:
                        decoder = self._decoders[stream] = TextDecoder("replace")
                    text = decoder.decode(data)
                    if text:
                        await deliver(callback, OutputMessage.now(text, stream == _STDERR))
            if not cell.done and cell.channel is not None:
                cell.channel.grant(len(data))

    async def finish(self, quiet: bool = False) -> None:
        """Everything has come: deliver what is left and fill in the execution."""
        cell = self.cell
        if cell.live and not quiet:
            await self.consume()
            for stream, decoder in self._decoders.items():
                rest, callback = decoder.decode(b"", True), self._callbacks[stream]
                if rest and callback is not None:
                    await deliver(callback, OutputMessage.now(rest, stream == _STDERR))
        cell.parser.finish()
        await self._take_results(quiet)
        stdout, stderr = cell.stdout, cell.stderr
        self.execution.logs = Logs(
            [stdout.text()] if stdout.total else [],
            [stderr.text()] if stderr.total else [],
            stdout.truncated or stderr.truncated,
            stdout.total,
            stderr.total,
        )
        self.execution.notes = cell.parser.notes

    async def _take_results(self, quiet: bool) -> None:
        cell = self.cell
        if not cell.bodies:
            return
        bodies, cell.bodies = cell.bodies, []
        for kind, body in bodies:
            message = cell.parser.decode(body)
            if message is None:
                continue
            if kind == ResultParser.RESULT:
                bundle = message.get("data")
                if isinstance(bundle, dict):
                    result = Result.from_bundle(bundle, message.get("main") is True, cell.parser.notes)
                    cell.parser.take_notes(message.get("notes"))
                    self.execution.results.append(result)
                    if self._on_result is not None and not quiet:
                        await deliver(self._on_result, result)
            elif kind == ResultParser.ERROR:
                name, value, traceback = (
                    clean_text(text) if isinstance(text := message.get(field), str) else ""
                    for field in ("name", "value", "traceback")
                )
                error = self.execution.error = ExecutionError(name or "Error", value, traceback)
                if self._on_error is not None and not quiet:
                    await deliver(self._on_error, error)


def _default_context(language: str) -> str:
    return DEFAULT_CONTEXT if language == "python" else f"{DEFAULT_CONTEXT}-{language}"


def _check_language(language: str | None) -> str:
    if language is None:
        return "python"
    check_text(language, "language")
    try:
        return languages.ALIASES[language.lower()]
    except KeyError:
        raise InvalidArgumentError(
            f"language {language!r} is not supported",
            hint=f"there are: {', '.join(languages.LANGUAGES)}; use commands.run for others",
        ) from None
