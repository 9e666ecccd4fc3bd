"""Taking turns: every case of a group is measured once per round, so that other load hits all alike.

Guards against a first call's costs (each case is warmed up) and against a lucky single number (median and 95th
percentile of all rounds are kept, and the raw samples go to results.json).
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Case:
    """One thing to measure. `run()` returns a float, the milliseconds it counted itself, or anything else: then its
    time is taken here."""

    name: str
    run: Callable[[], Any]
    after: Callable[[], Any] | None = None  # not timed; runs after each measurement
    every: int = 1  # measured in each n-th round only
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def p95(self) -> float:
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]

    @property
    def best(self) -> float:
        return min(self.samples)


def take_turns(cases: list[Case], rounds: int, warm: int = 2, burst: int = 1) -> dict[str, Case]:
    """Measure every case `rounds` times, one after the other in each round. Returns them by name.

    A turn is `burst` calls in a row, each of them a sample: a short call after a pause mostly measures how long an
    idle processor of a virtual machine takes to wake up, for us and for the peers.
    """
    for number in range(-warm, rounds):
        # The order changes from round to round: a case must not always follow the same neighbour.
        shift = number % len(cases)
        for case in cases[shift:] + cases[:shift]:
            if number % case.every and number >= 0:
                continue
            gc.collect()
            for _ in range(burst):
                gc.disable()
                begun = time.perf_counter()
                own = case.run()
                took = (time.perf_counter() - begun) * 1e3
                gc.enable()
                if case.after is not None:
                    case.after()
                if number >= 0:
                    case.samples.append(own if isinstance(own, float) else took)
    return {case.name: case for case in cases}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
