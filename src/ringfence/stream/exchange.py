"""One request to the guest and what comes back: the sink of a channel, and the wait for it with a deadline.

Guards against waiting for ever on a guest that went silent, against error texts and replies that are not what
they should be, and against work that goes on inside after nobody waits for it any more (`Session.supervise`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringfence import terminal
from ringfence.errors import (
    FileConflictError,
    FileOperationError,
    GuestError,
    InvalidArgumentError,
    LimitExceededError,
    NotEnoughSpaceError,
    NotFoundError,
    PermissionDeniedError,
    SandboxDeadError,
    SandboxError,
    SandboxPausedError,
    TimeoutExceededError,
)
from ringfence.stream.clock import REAL, Clock
from ringfence.stream.connection import ChannelSink
from ringfence.stream.log import Log
from ringfence.stream.results import MAXIMUM_EVENTS
from ringfence.stream.usage import Meter
from ringfence.stream.waiting import Pending, interruptible, run_sync, wait_for

if TYPE_CHECKING:
    from ringfence.engines.base import Limits
    from ringfence.stream.cell import CellHandle
    from ringfence.stream.connection import Channel

__all__ = [
    "ANSWER_SECONDS",
    "OPERATION_SECONDS",
    "Exchange",
    "Patience",
    "Session",
    "deliver",
    "error_of",
    "integer_of",
    "within",
]

OPERATION_SECONDS = 60.0
"""Default deadline of an operation that is over at once on a healthy sandbox."""
STANDING_SECONDS = 1.0
"""How often who waits for room in a stream looks whether a paused sandbox goes on."""
ANSWER_SECONDS = 2.0
"""How long a guest may take to answer an order to stop before the whole sandbox is killed."""


class Patience:
    """How long an operation may take: in all (`limit`), and without any progress (`silence`); None: for ever."""

    __slots__ = ("clock", "limit", "silence", "until")

    def __init__(self, limit: float | None, silence: float | None = None, clock: Clock = REAL) -> None:
        self.limit = limit or None
        self.silence = silence or None
        self.clock = clock
        self.until = clock.now() + limit if limit else None

    def deadline(self) -> float | None:
        """When to give up if nothing happens from now on."""
        if self.silence is None:
            return self.until
        silent = self.clock.now() + self.silence
        return silent if self.until is None or silent < self.until else self.until

    def refusal(self, what: str) -> tuple[str, float, str]:
        """Message, limit and hint of the error when `deadline()` has passed."""
        if self.until is not None and self.limit is not None and self.clock.now() >= self.until:
            return f"{what} took longer than {self.limit:g} s", self.limit, "pass a larger timeout (0: none)"
        silence = self.silence or 0.0
        return (
            f"{what} made no progress for {silence:g} s",
            silence,
            "pass a larger no_progress_timeout (0: none)",
        )


async def within(pending: Pending[Any], seconds: float) -> bool:
    """Wait for a Pending; False when it was not complete in time. Raises what it completed with."""
    try:
        await wait_for(pending, seconds)
    except TimeoutError:
        if pending.done() and pending.exception() is not None:
            raise
        return pending.done()
    return True


async def deliver(callback: Callable[[Any], Any], value: Any) -> None:
    """Call back with a value; an async callback is awaited, which only AsyncSandbox can do."""
    answer = interruptible(callback, value)
    if answer is not None and hasattr(answer, "__await__"):
        await answer


class Exchange(ChannelSink):
    """The sink of one channel. `on_*` run on the I/O thread and are quick; `changed` is awaited by the caller.

    Done when `reply` (the guest's CLOSE) or `failure` (the sandbox died) is set.
    """

    __slots__ = ("_lock", "_on_done", "_waiter", "channel", "clock", "events", "failure", "reply", "version")

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.clock = REAL  # the sandbox's, once the request is sent
        self.reply: dict[str, Any] | None = None
        self.failure: BaseException | None = None
        self.events = 0
        self._lock = threading.Lock()
        self.version = 0
        self._waiter: Pending[None] | None = None
        self._on_done: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """True when nothing more will come."""
        return self.reply is not None or self.failure is not None

    # -- I/O thread

    def on_data(self, stream: int, data: memoryview) -> int | None:
        """Bytes of one stream; the answer is how many to grant now. Here: nobody asked for any, dropped."""
        return len(data)

    def on_event(self, event: dict[str, Any]) -> None:
        """An event; those beyond 10,000 on one channel are dropped."""
        self.events += 1
        if self.events <= MAXIMUM_EVENTS:
            self.take_event(event)

    def take_event(self, event: dict[str, Any]) -> None:
        """What subclasses do with an event."""

    def on_eof(self, stream: int) -> None:
        """The guest ended one stream; CLOSE follows, so nothing to do."""

    def on_close(self, reply: dict[str, Any]) -> None:
        """The guest ended the channel."""
        self.reply = reply
        self._finish()

    def on_dead(self, error: BaseException) -> None:
        """The connection is gone."""
        if self.reply is None:
            self.failure = error
        self._finish()

    def _finish(self) -> None:
        callback, self._on_done = self._on_done, None
        self.wake()
        if callback is not None:
            callback()

    def wake(self) -> None:
        """There is news: let `changed` return."""
        with self._lock:
            self.version += 1
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set_result(None)

    # -- caller

    async def changed(self, deadline: float | None, seen: int) -> bool:
        """Wait until there is news or `deadline` (of the sandbox's clock) came, which is False.

        `seen` is the `version` that the caller read *before* it looked at what it waits for, so that news in
        between are not missed. Any number may wait. Being paused and resumed is news.
        """
        return await self.news(None if deadline is None else self.clock.left(deadline), seen)

    async def news(self, seconds: float | None, seen: int) -> bool:
        """`changed` for at most `seconds` of our own time; None: for ever."""
        with self._lock:
            if self.reply is not None or self.failure is not None or self.version != seen:
                return True
            waiter = self._waiter
            if waiter is None:
                waiter = self._waiter = Pending()
        if seconds is None:
            await waiter
            return True
        await within(waiter, seconds)
        return self.done or self.version != seen

    async def finished(self, deadline: float | None) -> bool:
        """Wait until `done`; False when the deadline came first."""
        while not self.done:
            if not await self.changed(deadline, self.version):
                return self.done
        return True


class Session:
    """A running sandbox as the stream layer uses it: its handle, its limits, and what is known of its end."""

    def __init__(self, handle: CellHandle) -> None:
        self.handle = handle
        self.connection = handle.connection
        self.limits: Limits = handle.limits
        self.death: SandboxDeadError | None = None
        self.oom_kills = 0
        self.clock = Clock()
        self.log = handle.log = Log()
        self.meter = Meter()
        self.meter.attach(getattr(handle, "counters", None) or {})
        self._mourned = Pending()
        handle.on_dead(self._died)

    def _died(self, error: SandboxDeadError) -> None:
        if self.death is None:
            self.death = error
            self.meter.close()
            self._mourned.set_result(None)

    def dead_error(self, what: str = "") -> SandboxDeadError:
        """A fresh error that says why the sandbox is gone."""
        reason = self.death.reason if self.death is not None else "crashed"
        during = f" during {what}" if what else ""
        why = {
            "killed": "it was killed",
            "oom": f"its memory limit of {self.limits.memory >> 20} MiB was reached",
            "idle": f"it was idle for {self.limits.idle:g} s (limits.idle)",
            "max_age": "its lifetime was over (timeout, limits.max_age)",
            "owner": "its owner let go of it",
            "protocol": "its guest broke the protocol",
            "crashed": "its first process ended",
        }.get(reason, reason)
        detail = f" ({self.death.message})" if self.death is not None and self.death.message else ""
        return SandboxDeadError(
            f"the sandbox is gone{during}: {why}{detail}",
            hint="start a new Sandbox(); files and variables of this one are lost",
            reason=reason,
        )

    def check_going(self) -> None:
        """Raise SandboxPausedError while the sandbox is paused: nothing inside could answer."""
        if self.clock.paused:
            raise SandboxPausedError(
                "the sandbox is paused", hint="resume() it first; kill(), info(), metrics() and resize() work meanwhile"
            )

    def pause_clock(self, stand: bool) -> None:
        """The sandbox was stopped, or goes on: all who wait with a deadline count anew."""
        if self.clock.stop() if stand else self.clock.go():
            for sink in self.connection.sinks():
                if isinstance(sink, Exchange):
                    sink.wake()

    def open(self, request: dict[str, Any], exchange: Exchange) -> Channel:
        """Send a request; what comes back goes to `exchange`.

        Raises SandboxDeadError on a dead sandbox, SandboxPausedError on a paused one."""
        if self.death is not None:
            raise self.dead_error()
        self.check_going()
        exchange.clock = self.clock
        handle = self.handle
        handle.operation_started()
        exchange._on_done = handle.operation_ended
        try:
            channel = self.connection.open(request, exchange)
        except BaseException as error:
            if exchange._on_done is not None:
                exchange._on_done = None
                handle.operation_ended()
            if isinstance(error, SandboxDeadError):
                # The connection raises one and the same object to everybody; a traceback wants its own.
                if self.death is None and error.reason == "crashed":
                    # The stream has ended, and the node is about to hear why.
                    try:
                        self._mourned.wait(0.25)
                    except TimeoutError:
                        pass
                if self.death is None:
                    self._died(error)
                raise self.dead_error() from None
            if isinstance(error, RuntimeError):
                raise SandboxError(
                    f"the request could not be sent: {error}", hint="finish some of the open operations first"
                ) from error
            raise
        exchange.channel = channel
        return channel

    async def send(
        self, exchange: Exchange, stream: int, data: bytes | memoryview, deadline: float | None
    ) -> bool:
        """Send bytes on a stream, waiting for credit; False when the exchange ended or the deadline came first."""
        assert exchange.channel is not None
        return await self.settle(exchange.channel.send_data(stream, data), deadline)

    async def settle(self, pending: Pending[None], deadline: float | None) -> bool:
        """Wait until sent bytes have left; False when their channel ended or the deadline came first."""
        try:
            if deadline is None:
                await pending
                return True
            while True:
                left = self.clock.left(deadline)
                if await within(pending, STANDING_SECONDS if left is None else left):
                    return True
                if not self.clock.paused and self.clock.now() >= deadline:
                    return False
        except (BrokenPipeError, SandboxDeadError):
            return False  # The exchange tells why.

    async def fail(self, exchange: Exchange, what: str) -> SandboxDeadError:
        """The error for an exchange that ended with the connection. The node may learn the reason a little
        later than the socket tells the end, so it gets a moment."""
        if self.death is None:
            await within(self._mourned, 1.0)
        if self.death is None and isinstance(exchange.failure, SandboxDeadError):
            self._died(exchange.failure)
        return self.dead_error(what)

    async def reply(self, exchange: Exchange, what: str) -> dict[str, Any]:
        """The reply of an exchange that is done; raises what it says went wrong."""
        if exchange.reply is None:
            raise await self.fail(exchange, what)
        if exchange.reply.get("ok") is not True:
            raise error_of(exchange.reply, what)
        return exchange.reply

    async def call(
        self,
        request: dict[str, Any],
        what: str,
        seconds: float | None = None,
        exchange: Exchange | None = None,
        patience: Patience | None = None,
    ) -> dict[str, Any]:
        """Send a request and wait for its reply, `OPERATION_SECONDS` by default, or as `patience` says.

        Raises what the guest answered, TimeoutExceededError when it does not answer, SandboxDeadError.
        """
        seconds = OPERATION_SECONDS if seconds is None else seconds
        exchange = exchange or Exchange()
        self.open(request, exchange)
        try:
            deadline = self.clock.now() + seconds if patience is None else patience.deadline()
            if not await exchange.finished(deadline):
                raise await self.stop(exchange, what, seconds if patience is None else patience)
        except TimeoutExceededError:
            raise
        except BaseException:
            self.abandon(exchange)
            raise
        return await self.reply(exchange, what)

    async def stop(self, exchange: Exchange, what: str, seconds: float | Patience) -> TimeoutExceededError:
        """A deadline passed: cancel, and kill the sandbox when even that is not answered. Returns the error."""
        assert exchange.channel is not None
        if isinstance(seconds, Patience):
            message, seconds, hint = seconds.refusal(what)
        else:
            # This time is not the caller's to choose.
            message, hint = f"{what} took longer than {seconds:g} s", "try again, or start another sandbox"
        exchange.channel.close("deadline")
        outcome = "killed"
        if not await exchange.finished(self.clock.now() + ANSWER_SECONDS):
            await self.kill()
            outcome = "sandbox_killed"
        return TimeoutExceededError(
            message
            + (
                "; the guest did not answer, so the sandbox was killed" if outcome == "sandbox_killed" else ""
            ),
            hint=hint,
            what=what,
            limit=seconds,
            outcome=outcome,
        )

    async def kill(self, reason: str = "killed") -> None:
        """Kill the sandbox and wait, at most 30 s, until it is gone."""
        if await within(self.handle.kill(reason), 30.0):
            # The answer to the order may overtake the news of the end.
            await within(self._mourned, 1.0)

    def abandon(self, exchange: Exchange, *orders: dict[str, Any], grace: float = ANSWER_SECONDS) -> None:
        """Nobody waits any more (an exception, a cancelled task): stop the work inside without waiting.

        Each order is sent as an event with `grace` seconds between them, then the channel is cancelled, and a
        sandbox that does not even answer that is killed. Returns at once.
        """
        if exchange.done or exchange.channel is None:
            return
        threading.Thread(
            target=_abandon, args=(self, exchange, orders, grace), name="ringfence-cancel", daemon=True
        ).start()

    async def oom_struck(self, since: int) -> bool:
        """True when the out-of-memory killer acted in this sandbox after its count was `since`."""
        try:
            pending = self.handle.stats()
            if not await within(pending, ANSWER_SECONDS):
                return False
            kills = (await pending).get("oom_kills", 0)
        except (SandboxError, OSError):
            return False
        self.oom_kills = max(self.oom_kills, kills)
        return kills > since


def _abandon(session: Session, exchange: Exchange, orders: tuple[dict[str, Any], ...], grace: float) -> None:
    async def work() -> None:
        channel = exchange.channel
        assert channel is not None
        for order in orders:
            channel.send_event(order)
            if await exchange.finished(session.clock.now() + grace):
                return
        channel.close("cancelled")
        if not await exchange.finished(session.clock.now() + ANSWER_SECONDS):
            await session.kill()

    try:
        run_sync(work())
    except (SandboxError, OSError):
        pass  # It died meanwhile, which is what was wanted.


_KINDS: dict[str, type[SandboxError]] = {
    "not_found": NotFoundError,
    "permission": PermissionDeniedError,
    "exists": FileConflictError,
    "no_space": NotEnoughSpaceError,
}


def error_of(reply: dict[str, Any], what: str) -> Exception:
    """The error for a reply that is not `ok`. Its texts are the guest's: cleaned, cut, never trusted."""
    if len(what) > 300:
        what = what[:300] + "…"  # A path may be 4 KiB long.
    error = reply.get("error")
    if not isinstance(error, dict):
        return GuestError(f"{what}: the guest gave a malformed answer", code="malformed")
    code, message, hint = (
        terminal.line(value[:1000]) if isinstance(value := error.get(name), str) else ""
        for name in ("code", "message", "hint")
    )
    text = f"{what}: {message or code or 'failed'}"
    if code in _KINDS:
        return _KINDS[code](text, hint=hint)
    if code == "limit":
        return LimitExceededError(text, hint=hint)
    if code == "invalid":
        return InvalidArgumentError(text, hint=hint)
    if code in ("not_a_directory", "is_a_directory", "busy", "loop", "not_empty", "cross_device"):
        return FileOperationError(text, hint=hint, code=code)
    return GuestError(text, hint=hint, code=code)


def integer_of(reply: dict[str, Any], name: str, default: int | None = None) -> int | None:
    """A number from 0 in the guest's reply, or the default when it is absent or something else."""
    value = reply.get(name)
    return value if type(value) is int and 0 <= value < 1 << 63 else default
