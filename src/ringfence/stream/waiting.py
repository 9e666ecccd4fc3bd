"""Waiting, once for both worlds: `Pending`, and the two drivers of coroutines that await it.

The core is written once, as `async def` functions that await nothing but `Pending` objects and the helpers
here. `run_sync` drives such a coroutine on the calling thread, without an event loop; `run_async` drives it
as part of an asyncio task. This file guards against what goes wrong in between: a result that arrives while a
waiter gives up, a Ctrl-C in the middle of an update, a cancellation that a coroutine never hears of, a timer
thread nobody stops, and a wait in a forked child for an answer that only the parent will get.

Deadlines belong to the drivers, so that `wait_for` and `sleep` need neither thread nor timer.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, cast, overload

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")

_allocate_lock = threading.Lock
_monotonic = time.monotonic

_generation = 0
"""Counts the forks between this process and the one that imported the module."""


def _note_fork() -> None:
    global _generation
    _generation += 1
    _guard.tripped = False


class Cancelled(BaseException):
    """Thrown into a coroutine whose result is not wanted any more: its sibling in `gather` failed, or its
    time in `wait_for` is over. Let it pass after cleaning up. Outside cancellation (KeyboardInterrupt,
    asyncio's CancelledError) is thrown as what it is."""


class Pending(Generic[T]):
    """A value that will be there later: set once, from any thread, awaited or waited for by any number.

    Awaiting it works under `run_sync` and `run_async` alike. In a forked child a Pending of the parent never
    completes, so waiting for one raises WrongProcessError.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_gate", "_generation", "_lock", "_value", "pump")

    def __init__(self) -> None:
        self._lock = _allocate_lock()
        self._done = False
        self._gate: threading.Lock | None = None
        self._callbacks: list[Callable[[Pending[T]], object]] | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._generation = _generation
        self.pump: Pump | None = None
        """Who can bring the value about, for a thread that waits for it under `run_sync`; goes before the driver's."""

    def set_result(self, value: T) -> bool:
        """Completes with `value`. False, and no effect, when it was complete already."""
        return self._complete(value, None)

    def set_exception(self, error: BaseException) -> bool:
        """Completes with an error. False, and no effect, when it was complete already."""
        return self._complete(None, error)

    def _complete(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._done:
                return False
            self._value = value
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
            gate = self._gate
        if gate is not None:
            _open(gate)
        if callbacks is not None:
            for callback in callbacks:
                _call_safely(callback, self)
        return True

    def done(self) -> bool:
        return self._done

    def result(self) -> T:
        """The value, or raises the error. RuntimeError while it is not complete."""
        if not self._done:
            raise RuntimeError("the value is not there yet")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def exception(self) -> BaseException | None:
        """The error it completed with, if any. RuntimeError while it is not complete."""
        if not self._done:
            raise RuntimeError("the value is not there yet")
        return self._error

    def wait(self, timeout: float | None = None) -> T:
        """Blocks the calling thread for at most `timeout` seconds (None: for ever); returns or raises what
        came.

        Raises TimeoutError when nothing came in time, WrongProcessError in a forked child."""
        if not self._block(timeout):
            raise TimeoutError(f"no answer within {timeout:g} s")
        return self.result()

    def add_done_callback(self, callback: Callable[[Pending[T]], object]) -> None:
        """Calls `callback(self)` on the completing thread, or at once when complete. Errors in it are
        logged."""
        with self._lock:
            if not self._done:
                if self._callbacks is None:
                    self._callbacks = [callback]
                else:
                    self._callbacks.append(callback)
                return
        _call_safely(callback, self)

    def remove_done_callback(self, callback: Callable[[Pending[T]], object]) -> None:
        """Forgets a callback that has not been called. Harmless otherwise."""
        with self._lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    def __await__(self) -> Generator[Any, Any, T]:
        if not self._done:
            self._check_process()
            yield self
        return self.result()

    def _check_process(self) -> None:
        if self._generation != _generation:
            from ringfence.errors import WrongProcessError

            raise WrongProcessError(
                "this answer will arrive in the process that asked, not in its forked child",
                hint="create a sandbox of its own in the child",
            )

    def _block(self, timeout: float | None) -> bool:
        """Waits; True when complete. A gate, once open, stays open: whoever passes leaves it so."""
        if self._done:
            return True
        self._check_process()
        with self._lock:
            if self._done:
                return True
            gate = self._gate
            if gate is None:
                gate = self._gate = _allocate_lock()
                gate.acquire()
        try:
            if timeout is None:
                gate.acquire()
            elif timeout <= 0:
                gate.acquire(False)
            else:
                gate.acquire(True, min(timeout, threading.TIMEOUT_MAX))
        finally:
            # In a finally, since a KeyboardInterrupt may come between passing the gate and this line.
            if self._done:
                _open(gate)
        return self._done


def completed(value: T) -> Pending[T]:
    """A Pending that is complete already."""
    pending: Pending[T] = Pending()
    pending._value = value
    pending._done = True
    return pending


def _open(gate: threading.Lock) -> None:
    try:
        gate.release()
    except RuntimeError:
        pass  # open already: another waiter passed through


def _call_safely(callback: Callable[..., object], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        import logging

        logging.getLogger("ringfence").exception("a callback failed")


# ------------------------------------------------------------------ what coroutines await


class _Timed:
    """What a coroutine yields to its driver: wake me when `pending` completes or at `deadline`
    (monotonic)."""

    __slots__ = ("deadline", "pending")

    def __init__(self, pending: Pending[Any], deadline: float | None) -> None:
        self.pending = pending
        self.deadline = deadline

    def __await__(self) -> Generator[Any, Any, None]:
        self.pending._check_process()
        yield self


class _Turn:
    """Lets the event loop, if there is one, do a round."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield None


@overload
async def wait_for(what: Pending[T], seconds: float | None) -> T: ...
@overload
async def wait_for(what: Coroutine[Any, Any, T], seconds: float | None) -> T: ...
async def wait_for(what: Pending[T] | Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Awaits a Pending or a coroutine for at most `seconds` (None: without limit).

    Raises the builtin TimeoutError when the time is over. A Pending stays as it is and may be awaited again;
    into a coroutine `Cancelled` is thrown, and it is awaited until it has cleaned up. If it returns
    nonetheless, its result counts."""
    if not isinstance(what, Pending):
        if seconds is None:
            return await what
        return await _bounded(what, _monotonic() + seconds, seconds)
    if not what._done:
        if seconds is None:
            return await what
        deadline = _monotonic() + seconds
        while not what._done and _monotonic() < deadline:
            await _Timed(what, deadline)
        if not what._done:
            raise TimeoutError(f"no answer within {seconds:g} s")
    return what.result()


async def sleep(seconds: float) -> None:
    """Waits for `seconds`. Works under both drivers."""
    deadline = _monotonic() + seconds
    never: Pending[None] = Pending()
    while _monotonic() < deadline:
        await _Timed(never, deadline)


async def _bounded(coroutine: Coroutine[Any, Any, T], deadline: float, seconds: float) -> T:
    error: BaseException | None = None
    expired = False
    while True:
        try:
            yielded = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        except Cancelled:
            if expired:
                raise TimeoutError(f"not finished within {seconds:g} s") from None
            raise
        error = None
        pending, inner = _wanted(yielded)
        try:
            if pending is None:
                await _Turn()
            else:
                sooner = expired or (inner is not None and inner < deadline)
                await _Timed(pending, inner if sooner else deadline)
        except BaseException as interruption:  # noqa: BLE001 (passed on)
            error = interruption
            continue
        if not expired and _monotonic() >= deadline and not (pending is not None and pending._done):
            expired = True
            error = Cancelled()


def _wanted(yielded: Any) -> tuple[Pending[Any] | None, float | None]:
    """What a coroutine waits for. An asyncio future, awaited below a coroutine of ours, is wrapped."""
    if isinstance(yielded, Pending):
        return yielded, None
    if type(yielded) is _Timed:
        return yielded.pending, yielded.deadline
    if yielded is None:
        return None, None
    if getattr(yielded, "_asyncio_future_blocking", None) is not None:
        yielded._asyncio_future_blocking = False  # the handshake that asyncio.Task does, too
        wrapped: Pending[None] = Pending()
        yielded.add_done_callback(lambda _: wrapped.set_result(None))
        return wrapped, None
    raise RuntimeError(f"a coroutine of ringfence awaited {yielded!r}, which no driver here can wait for")


class _Child:
    """One coroutine of a `gather`."""

    __slots__ = ("awaiting", "callback", "coroutine", "deadline", "error", "index")

    def __init__(self, index: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.index = index
        self.coroutine = coroutine
        self.error: BaseException | None = None
        self.awaiting: Pending[Any] | None = None
        self.callback: Callable[[Pending[Any]], object] | None = None
        self.deadline: float | None = None

    def unblock(self) -> None:
        if self.awaiting is not None and self.callback is not None:
            self.awaiting.remove_done_callback(self.callback)
        self.awaiting = self.callback = self.deadline = None


@overload
async def gather(first: Coroutine[Any, Any, T1], second: Coroutine[Any, Any, T2], /) -> tuple[T1, T2]: ...
@overload
async def gather(
    first: Coroutine[Any, Any, T1], second: Coroutine[Any, Any, T2], third: Coroutine[Any, Any, T3], /
) -> tuple[T1, T2, T3]: ...
@overload
async def gather(*coroutines: Coroutine[Any, Any, T]) -> tuple[T, ...]: ...
async def gather(*coroutines: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """Runs coroutines side by side, all stepped by the one driver; returns their results in order.

    When one fails, `Cancelled` is thrown into the others, all are awaited to their end, and the first error
    is raised. What interrupts the gather itself (KeyboardInterrupt, asyncio cancellation) is thrown into
    every coroutine and raised when they have ended. None is left behind."""
    results: list[Any] = [None] * len(coroutines)
    live = {index: _Child(index, coroutine) for index, coroutine in enumerate(coroutines)}
    ready = deque(live.values())
    arrived: deque[tuple[_Child, Pending[Any]]] = deque()
    wake: Pending[None] = Pending()
    failure: BaseException | None = None
    interruption: BaseException | None = None

    def throw_into_all(make_error: Callable[[], BaseException]) -> None:
        for other in live.values():
            if other.error is None:
                other.error = make_error()
                other.unblock()
                if other not in ready:
                    ready.append(other)

    def block(child: _Child, pending: Pending[Any], deadline: float | None) -> None:
        def arrive(done: Pending[Any]) -> None:
            # `arrived` first, then `wake`: the loop below looks at them in the opposite order.
            arrived.append((child, done))
            wake.set_result(None)

        child.awaiting, child.callback, child.deadline = pending, arrive, deadline
        pending.add_done_callback(arrive)

    while live:
        turns: list[_Child] = []
        while ready:
            child = ready.popleft()
            error, child.error = child.error, None
            try:
                yielded = child.coroutine.send(None) if error is None else child.coroutine.throw(error)
                pending, deadline = _wanted(yielded)
            except StopIteration as stop:
                results[child.index] = stop.value
                del live[child.index]
            except BaseException as raised:  # noqa: BLE001 (passed on)
                del live[child.index]
                if failure is None:
                    failure = raised
                    throw_into_all(Cancelled)
            else:
                if pending is None:
                    turns.append(child)
                else:
                    block(child, pending, deadline)
        if not live:
            break
        ready.extend(turns)
        wake = Pending()
        try:
            if turns:
                await _Turn()
            elif not arrived:
                deadlines = [child.deadline for child in live.values() if child.deadline is not None]
                await _Timed(wake, min(deadlines) if deadlines else None)
        except BaseException as raised:  # noqa: BLE001 (passed on)
            interruption = raised
            throw_into_all(lambda error=raised: error)
        while arrived:
            child, pending = arrived.popleft()
            if child.awaiting is pending:
                child.unblock()
                ready.append(child)
        now = _monotonic()
        for child in live.values():
            if child.deadline is not None and child.deadline <= now:
                child.unblock()
                ready.append(child)
    if interruption is not None:
        raise interruption
    if failure is not None:
        raise failure
    return tuple(results)


# ------------------------------------------------------------------ the synchronous driver


class _Guard:
    """Keeps Ctrl-C out of the core while it runs, and lets it in while it waits.

    A KeyboardInterrupt raised between two lines of the core could lose the count of what has been written and
    so break the connection. While `run_sync` runs in the main thread, SIGINT only sets `tripped`; it is
    raised at the next wait, or at once during a wait. A second Ctrl-C is raised wherever it hits: a user must
    always get out.
    """

    __slots__ = ("tripped", "waiting")

    def __init__(self) -> None:
        self.waiting = False
        self.tripped = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.waiting or self.tripped:
            self.tripped = False
            raise KeyboardInterrupt
        self.tripped = True

    def raise_if_tripped(self) -> None:
        if self.tripped:
            self.tripped = False
            raise KeyboardInterrupt


_guard = _Guard()
_on_interrupt = _guard.on_signal
# The C functions: those of `signal` turn numbers into enums and back, which takes longer than the system
# call.
_getsignal, _setsignal, _SIGINT, _default_handler = (
    _signal.getsignal, _signal.signal, _signal.SIGINT, _signal.default_int_handler,
)
_main_thread = threading.main_thread()
os.register_at_fork(after_in_child=_note_fork)


class Pump(Protocol):
    """Something that a waiting thread can keep going itself, in place of the I/O thread: a Connection."""

    def lead(self, pending: Pending[Any], deadline: float | None, guard: _Guard | None) -> None:
        """Works until `pending` is complete, `deadline` (monotonic) has passed or somebody else does the
        work."""


def run_sync(
    coroutine: Coroutine[Any, Any, T],
    interrupt: Callable[[], bool] | None = None,
    pump: Pump | None = None,
) -> T:
    """Drives `coroutine` on the calling thread and returns its result.

    `pump`, when given, is the Connection that the awaited answers arrive on: the calling thread then reads it
    itself while it waits, which saves two thread switches per answer.

    KeyboardInterrupt (or whatever a signal handler raises during a wait) is thrown into the coroutine, which
    may clean up and still wait for things. `interrupt`, when given, is called first on a KeyboardInterrupt;
    if it returns True, the interrupt counts as dealt with and the wait goes on."""
    if threading.current_thread() is not _main_thread:
        return _drive(coroutine, interrupt, pump, None)
    if _getsignal(_SIGINT) is not _default_handler:
        # A nested call, or a program with a handler of its own.
        return _drive(coroutine, interrupt, pump, _guard)
    _guard.tripped = _guard.waiting = False
    try:
        _setsignal(_SIGINT, _on_interrupt)
        return _drive(coroutine, interrupt, pump, _guard)
    finally:
        _setsignal(_SIGINT, _default_handler)
        _guard.raise_if_tripped()


def _drive(
    coroutine: Coroutine[Any, Any, T],
    interrupt: Callable[[], bool] | None,
    pump: Pump | None,
    guard: _Guard | None,
) -> T:
    error: BaseException | None = None
    while True:
        try:
            yielded = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        error = None
        if isinstance(yielded, Pending):
            pending, deadline = yielded, None
        elif type(yielded) is _Timed:
            pending, deadline = yielded.pending, yielded.deadline
        elif yielded is None:
            continue
        else:
            error = RuntimeError(f"{yielded!r} can only be awaited under asyncio")
            continue
        while True:
            try:
                leader = pending.pump or pump
                if leader is not None and not pending._done:
                    leader.lead(pending, deadline, guard)
                if guard is None:
                    pending._block(None if deadline is None else deadline - _monotonic())
                else:
                    outer = guard.waiting
                    guard.waiting = True
                    try:
                        guard.raise_if_tripped()
                        pending._block(None if deadline is None else deadline - _monotonic())
                    finally:
                        guard.waiting = outer
            except BaseException as caught:  # noqa: BLE001 (passed on)
                if interrupt is not None and isinstance(caught, KeyboardInterrupt):
                    try:
                        if interrupt():
                            continue
                    except BaseException as raised:  # noqa: BLE001 (passed on)
                        caught = raised
                error = caught
            break


def interruptible(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function of the user's from inside the core, with Ctrl-C raised at once as in any other
    code."""
    if threading.current_thread() is not _main_thread:
        return function(*arguments)
    outer = _guard.waiting
    _guard.waiting = True
    try:
        _guard.raise_if_tripped()
        return function(*arguments)
    finally:
        _guard.waiting = outer


# ------------------------------------------------------------------ the asyncio driver


class _AsyncDriver(Awaitable[T]):
    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        import asyncio

        loop = asyncio.get_running_loop()
        coroutine = self._coroutine
        error: BaseException | None = None
        while True:
            try:
                yielded = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                if isinstance(yielded, Pending):
                    yield from _pause(loop, yielded, None)
                elif type(yielded) is _Timed:
                    yield from _pause(loop, yielded.pending, yielded.deadline)
                else:
                    yield yielded  # asyncio's own futures, awaited by a user's async callback
            except GeneratorExit:
                # The task was dropped together with its loop: nothing can be awaited any more.
                coroutine.close()
                raise
            except BaseException as caught:  # noqa: BLE001 (passed on)
                error = caught


def _pause(loop: Any, pending: Pending[Any], deadline: float | None) -> Generator[Any, Any, None]:
    future = loop.create_future()

    def finish() -> None:
        if not future.done():
            future.set_result(None)

    def arrive(_: Pending[Any]) -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            pass  # the loop is closed; nobody waits any more

    timer = None if deadline is None else loop.call_later(max(0.0, deadline - _monotonic()), finish)
    pending.add_done_callback(arrive)
    try:
        yield from future
    finally:
        pending.remove_done_callback(arrive)
        if timer is not None:
            timer.cancel()


async def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Drives `coroutine` within the running asyncio task. Cancelling the task throws CancelledError into
    it."""
    return await _AsyncDriver(coroutine)
