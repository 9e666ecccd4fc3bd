"""The agent's event loop: one epoll, a few timers, no threads.

asyncio would cost memory and start time in every sandbox and keep state that a fork must not inherit. Guards
against one failing handler taking the agent down: an exception ends the handler's owner, never the loop.
Standard library only; everything is imported here and now, since the agent must not import from paths that
user code can write.
"""

# ruff: noqa: BLE001  (one failing handler must not end the loop)

from __future__ import annotations

import heapq
import itertools
import select
import time

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from typing import Any
else:
    from _collections import deque

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Timer:
    """One call that is still to come; `cancel()` forgets it."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], Any]):
        self.function: Callable[[], Any] | None = function

    def cancel(self) -> None:
        self.function = None


class Loop:
    """Waits for descriptors and timers and calls what was registered for them, level-triggered.

    `failed(handler, error)` hears of every exception that a handler raised.
    """

    def __init__(self, failed: Callable[[Callable[..., Any], Exception], None]):
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], Any]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._soon: deque[Callable[[], Any]] = deque()
        self._failed = failed

    def watch(self, descriptor: int, handler: Callable[[int], Any], events: int = READ) -> None:
        """Call `handler(events)` whenever `descriptor` is ready. Watching it again replaces both."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def forget(self, descriptor: int) -> None:
        """Stop watching; needed before the descriptor is closed, and to pause a source: a hang-up can't be masked."""
        if self._handlers.pop(descriptor, None) is not None:
            try:
                self._epoll.unregister(descriptor)
            except OSError:
                pass

    def soon(self, function: Callable[[], Any]) -> None:
        """Call `function` once, in the next round, after the descriptors that are ready by then."""
        self._soon.append(function)

    def after(self, seconds: float, function: Callable[[], Any]) -> Timer:
        """Call `function` once when `seconds` have passed."""
        timer = Timer(function)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._sequence), timer))
        return timer

    def run_forever(self, before_wait: Callable[[], Any]) -> None:
        """Serve events; `before_wait` runs each time before the loop may sleep."""
        poll = self._epoll.poll
        handlers = self._handlers
        soon = self._soon
        timers = self._timers
        while True:
            before_wait()
            timeout = -1.0
            if soon:
                timeout = 0.0
            elif timers:
                timeout = max(0.0, timers[0][0] - time.monotonic())
            for descriptor, events in poll(timeout, 64):
                handler = handlers.get(descriptor)
                if handler is not None:
                    try:
                        handler(events)
                    except Exception as error:
                        self._failed(handler, error)
            for _ in range(len(soon)):
                self._call(soon.popleft())
            if timers:
                now = time.monotonic()
                while timers and timers[0][0] <= now:
                    function = heapq.heappop(timers)[2].function
                    if function is not None:
                        self._call(function)

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            self._failed(function, error)

    def close(self) -> None:
        """In a forked child: let go of the epoll, so that no later close hits a descriptor of the same number."""
        self._epoll.close()
        self._handlers = {}
