"""The time of one sandbox: it stands still while the sandbox is paused.

Guards against a timeout that fires, or a guest that is taken for dead, because its owner paused it: deadlines of
all that runs in a sandbox are moments of its clock, and waits ask the clock how many of our own seconds are left.
"""

from __future__ import annotations

import threading
import time

__all__ = ["REAL", "Clock"]


class Clock:
    """`now()` is time.monotonic() less all the time that was spent paused."""

    __slots__ = ("_lock", "_since", "_stood", "now")

    def __init__(self) -> None:
        # A sandbox that was never paused pays nothing for being able to.
        self.now = time.monotonic
        self._stood = 0.0
        self._since: float | None = None
        self._lock = threading.Lock()

    @property
    def paused(self) -> bool:
        """True while it stands."""
        return self._since is not None

    def left(self, deadline: float) -> float | None:
        """Seconds of ours until `deadline` (of this clock) if nothing changes; None, for ever, while it stands."""
        return None if self._since is not None else deadline - self.now()

    def stop(self) -> bool:
        """Stand still from now on; False when it did already."""
        with self._lock:
            if self._since is not None:
                return False
            self._since = time.monotonic()
            self.now = self._now
            return True

    def go(self) -> bool:
        """Go on from where it stood; False when it was going."""
        with self._lock:
            if self._since is None:
                return False
            self._stood += time.monotonic() - self._since
            self._since = None
            return True

    def _now(self) -> float:
        with self._lock:
            since = self._since
            return (time.monotonic() if since is None else since) - self._stood


REAL = Clock()
"""For what belongs to no sandbox. Nobody stops it."""
