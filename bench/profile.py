"""What a case is made of: processor time and page faults by role, then perf, or cProfile of the owner.

perf samples the owner, the launcher and the zygotes with all that is forked from them meanwhile, by processor
clock (no hardware counters are needed, which virtual machines rarely have).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from bench import processes
from bench.groups import PANDAS_CELL, _fresh
from ringfence import Sandbox


def _cases() -> dict[str, Callable[[], None]]:
    live: list[Sandbox] = []

    def session() -> Sandbox:
        if not live:
            live.append(Sandbox())
        return live[0]

    def run_code() -> None:
        session().run_code("1+1")

    def command() -> None:
        session().commands.run(["true"])

    return {
        "start": _fresh("base", "1+1"),
        "data": _fresh("data", PANDAS_CELL),
        "code": run_code,
        "command": command,
    }


NAMES = tuple(_cases())


def main(name: str, seconds: float = 5.0) -> None:
    """Print the profile of case `name`."""
    cycle = _cases()[name]
    for _ in range(5):
        cycle()
    time.sleep(0.2)
    perf = shutil.which("perf")
    times = 0
    before, begun = processes.usage(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as directory:
        recording = None
        if perf is not None:
            pids = [os.getpid(), processes.launcher_pid(), *processes.zygotes(), *processes.sandboxed()]
            recording = subprocess.Popen(
                [perf, "record", "-q", "-e", "cpu-clock", "-F", "4999", "-g", "-o", directory + "/data",
                 "-p", ",".join(map(str, pids))],
                stderr=subprocess.PIPE,
            )  # fmt: skip
            time.sleep(0.3)
        before, begun = processes.usage(), time.perf_counter()
        while time.perf_counter() - begun < seconds:
            cycle()
            times += 1
        took = time.perf_counter() - begun
        time.sleep(0.1)
        processor, faults = processes.difference(before, processes.usage(), times)
        print(f"{name}: {times} cycles, {took / times * 1e3:.2f} ms each")
        for role in processor:
            print(f"  {role:10} {processor[role]:7.2f} ms of processor time {faults[role]:8.0f} page faults")
        if recording is None:
            _profile_owner(cycle)
            return
        recording.send_signal(signal.SIGINT)
        recording.wait()
        for title, options in (
            ("by process", ["--sort", "comm"]),
            ("by place", ["--sort", "comm,dso", "--percent-limit", "1"]),
            ("by function", ["--sort", "comm,symbol", "--percent-limit", "0.7"]),
        ):
            print(f"\n{title}")
            report = subprocess.run(
                [perf, "report", "-i", directory + "/data", "--stdio", "--no-children", "-g", "none", *options],
                check=False, capture_output=True, text=True,
            )  # fmt: skip
            for line in report.stdout.splitlines():
                if line.strip() and not line.startswith("#"):
                    print("  " + line.strip())


def _profile_owner(cycle: Callable[[], None], times: int = 50) -> None:
    import cProfile
    import pstats

    print("\nperf is not installed: the owner's functions only", file=sys.stderr)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(times):
        cycle()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
