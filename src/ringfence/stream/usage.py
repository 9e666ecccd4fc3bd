"""What one execution used, by the counters of the sandbox's control group: never the guest's word.

Guards two things: the price (a few small reads, made while the guest works, or once at the end) and honesty: the
counters belong to the whole sandbox, so an execution that did not have it to itself says `shared`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ringfence.stream.results import Usage

if TYPE_CHECKING:
    from ringfence.linux.counters import Counters

__all__ = ["Meter", "Reading"]


class Reading:
    """The counters at the start of one execution."""

    __slots__ = ("cpu", "exact", "peak", "shared")

    def __init__(self, cpu: float | None, peak: int | None, exact: bool, shared: bool) -> None:
        self.cpu = cpu
        self.peak = peak
        self.exact = exact  # the peak counter began anew for this execution
        self.shared = shared


class Meter:
    """Readings of one sandbox. Usable from any thread."""

    __slots__ = ("_counters", "_lock", "_running", "highest")

    def __init__(self) -> None:
        self._counters: Counters | None = None
        self._lock = threading.Lock()
        self._running: set[Reading] = set()
        self.highest = 0
        """Bytes: the highest memory that was seen before the kernel's counter began anew."""

    def attach(self, paths: dict[str, str]) -> None:
        """Where the counters are; without them there is nothing to read."""
        if paths:
            from ringfence.linux.counters import Counters

            self._counters = Counters(paths)

    def close(self) -> None:
        """The sandbox is gone, and its counters with it."""
        with self._lock:
            counters, self._counters = self._counters, None
            if counters is not None:
                counters.close()

    def begin(self) -> Reading | None:
        """An execution has just been sent. None where nothing counts."""
        if self._counters is None:
            return None
        with self._lock:
            counters = self._counters
            if counters is None:
                return None
            alone = not self._running
            peak, exact = None, False
            if alone:
                peak = counters.peak()
                self.highest = max(self.highest, peak or 0)
                exact = counters.reset()
            else:
                for other in self._running:
                    other.shared = True
            reading = Reading(counters.cpu_seconds(), peak, exact, not alone)
            self._running.add(reading)
            return reading

    def end(self, reading: Reading | None) -> Usage | None:
        """It has ended."""
        if reading is None:
            return None
        with self._lock:
            counters = self._counters
            if counters is None:
                return None
            self._running.discard(reading)
            cpu, peak = counters.cpu_seconds(), counters.peak()
        self.highest = max(self.highest, peak or 0)
        known = peak is not None and (reading.exact or reading.shared or (reading.peak is not None and peak > reading.peak))
        return Usage(
            cpu_seconds=None if cpu is None or reading.cpu is None else max(0.0, cpu - reading.cpu),
            memory_peak=peak if known else None,
            shared=reading.shared,
        )
