"""The clock of a sandbox, the meter of its executions, and the counters below it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ringfence.linux.counters import Counters
from ringfence.stream.clock import Clock
from ringfence.stream.exchange import Patience
from ringfence.stream.usage import Meter


def test_a_clock_that_stands_leaves_deadlines_as_far_away_as_they_were() -> None:
    clock = Clock()
    deadline = clock.now() + 100
    patience = Patience(100, 50, clock)
    assert clock.stop() and not clock.stop() and clock.paused
    assert clock.left(deadline) is None
    stood = clock.now()
    time.sleep(0.05)
    assert clock.now() == stood
    assert clock.go() and not clock.go() and not clock.paused
    left = clock.left(deadline)
    assert left is not None and left > deadline - time.monotonic() + 0.04  # real time went on, this did not
    assert patience.until is not None and clock.left(patience.until) is not None


def files(folder: Path, cpu: str, peak: str, kind: str = "memory.max_usage_in_bytes") -> dict[str, str]:
    paths = {"cpu": folder / ("cpuacct.usage" if kind.endswith("bytes") else "cpu.stat"), "peak": folder / kind}
    paths["cpu"].write_text(cpu)
    paths["peak"].write_text(peak)
    return {name: str(path) for name, path in paths.items()}


def test_counters_of_both_versions_are_read_and_what_is_not_there_is_none(tmp_path: Path) -> None:
    old = Counters(files(tmp_path, "1500000000\n", "4096\n"))
    assert (old.cpu_seconds(), old.peak(), old.reset()) == (1.5, 4096, True)
    assert (tmp_path / "memory.max_usage_in_bytes").read_text()[0] == "0"
    new = Counters(files(tmp_path, "usage_usec 250000\nuser_usec 1\n", "8192\n", "memory.peak"))
    assert (new.cpu_seconds(), new.peak(), new.reset()) == (0.25, 8192, False)
    gone = Counters({"cpu": str(tmp_path / "none"), "peak": str(tmp_path / "nothing/memory.peak")})
    assert (gone.cpu_seconds(), gone.peak(), gone.reset()) == (None, None, False)
    for each in (old, new, gone):
        each.close()


def test_descriptors_held_are_bounded_and_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    many = [Counters(files(tmp_path, "1\n", "1\n")) for _ in range(100)]
    assert all(each.peak() == 1 and each.cpu_seconds() is not None for each in many)
    assert len(os.listdir("/proc/self/fd")) <= before + 128
    for each in many:
        each.close()
    del many, each
    assert len(os.listdir("/proc/self/fd")) <= before


def test_executions_at_the_same_time_know_of_each_other(tmp_path: Path) -> None:
    meter = Meter()
    assert meter.begin() is None and meter.end(None) is None
    meter.attach(files(tmp_path, "1000000000\n", "4096\n"))
    first, second = meter.begin(), meter.begin()
    (tmp_path / "cpuacct.usage").write_text("3000000000\n")
    ended = meter.end(first), meter.end(second)
    assert all(usage is not None and usage.shared and usage.cpu_seconds == 2.0 for usage in ended)
    third = meter.end(meter.begin())
    assert third is not None and not third.shared and third.cpu_seconds == 0.0
    meter.close()
    assert meter.begin() is None


def test_a_peak_that_cannot_begin_anew_is_told_only_where_it_grew(tmp_path: Path) -> None:
    meter = Meter()
    meter.attach(files(tmp_path, "usage_usec 0\n", "8192\n", "memory.peak"))
    same = meter.end(meter.begin())
    reading = meter.begin()
    (tmp_path / "memory.peak").write_text("9000\n")
    grown = meter.end(reading)
    assert same is not None and same.memory_peak is None
    assert grown is not None and grown.memory_peak == 9000 and meter.highest == 9000
    meter.close()
