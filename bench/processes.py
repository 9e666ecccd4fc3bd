"""What our own processes use, read from /proc: the owner, its launcher, the zygotes, and all sandboxes.

Guards against counting the owner alone: most of the work of a sandbox is done in the sandbox. Sandboxes are counted
by the control groups of their owner, where there are some. Where there are none, only what their zygote reaped is
known, and that is not all: what a pid namespace's end kills is counted nowhere.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple, Self

_TICK = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Processor seconds and minor page faults by role."""

    processor: dict[str, float]
    faults: dict[str, int]


def launcher_pid() -> int:
    from ringfence.node.node import Node

    launcher = Node.current().launcher()
    return launcher.pid


def children() -> dict[int, list[int]]:
    """Parent -> children, of the whole machine."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat(int(name))
            if fields:
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: [0] state, [1] parent, [7] minor faults, [11] user ticks."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def zygotes() -> list[int]:
    """The zygotes' pids. They are children of the launcher or, where ids are mapped by helpers, below it."""
    tree, found, todo = children(), [], [launcher_pid()]
    while todo:
        for pid in tree.get(todo.pop(), []):
            try:
                with open(f"/proc/{pid}/comm") as file:
                    name = file.read().strip()
            except OSError:
                continue
            if name.startswith("ringfence-zygot"):
                found.append(pid)
            else:
                todo.append(pid)
    return found


def sandboxed() -> list[int]:
    """The pids of all processes in sandboxes of this process."""
    tree, found, todo = children(), [], zygotes()
    while todo:
        below = tree.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Groups:
    """What all sandboxes of this owner used, those that are gone included: counters of the folder above their groups."""

    def __init__(self) -> None:
        self.time = self.faults = ""
        from ringfence import Sandbox

        with Sandbox():
            pids = sandboxed()
            lines = Path(f"/proc/{pids[0]}/cgroup").read_text().splitlines() if pids else []
        mounted = {}
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options = line.split()[:4]
            for name in ["v2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []:
                mounted[name] = place
        for line in lines:
            _, names, path = line.split(":", 2)
            if "/ringfence" not in path:
                continue
            for name in names.split(",") if names else ["v2"]:
                folder = mounted.get(name, "") + path.rpartition("/")[0]
                self._take(name, folder)

    def _take(self, name: str, folder: str) -> None:
        for file in ("cpuacct.usage", "cpu.stat") if name in ("cpuacct", "v2") else ():
            if os.path.exists(f"{folder}/{file}"):
                self.time = self.time or f"{folder}/{file}"
        if name in ("memory", "v2") and os.path.exists(folder + "/memory.stat"):
            self.faults = self.faults or folder + "/memory.stat"

    def read(self) -> tuple[float | None, int | None]:
        """(processor seconds, page faults); None for what is not counted here."""
        seconds = faults = None
        if self.time.endswith("cpuacct.usage"):
            seconds = int(Path(self.time).read_text()) / 1e9
        elif self.time:
            seconds = _entry(self.time, "usage_usec") / 1e6
        if self.faults:
            faults = _entry(self.faults, "total_pgfault") or _entry(self.faults, "pgfault")
        return seconds, faults


def _entry(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        words = line.split()
        if words[0] == name:
            return int(words[1])
    return 0


_groups: list[Groups] = []


def usage() -> Usage:
    """Counters since the start. Only sandboxes that ended are in them."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    processor = {"owner": own.ru_utime + own.ru_stime, "launcher": 0.0, "zygote": 0.0, "sandboxes": 0.0}
    faults = {"owner": own.ru_minflt, "launcher": 0, "zygote": 0, "sandboxes": 0}
    for role, pids in (("launcher", [launcher_pid()]), ("zygote", zygotes())):
        for pid in pids:
            fields = stat(pid)
            if not fields:
                continue
            processor[role] += (int(fields[11]) + int(fields[12])) / _TICK
            faults[role] += int(fields[7])
            if role == "zygote":
                processor["sandboxes"] += (int(fields[13]) + int(fields[14])) / _TICK
                faults["sandboxes"] += int(fields[8])
    if not _groups:
        _groups.append(Groups())
    seconds, faulted = _groups[0].read()
    if seconds is not None:
        processor["sandboxes"] = seconds
    if faulted is not None:
        faults["sandboxes"] = faulted
    return Usage(processor, faults)


def difference(before: Usage, after: Usage, times: int) -> tuple[dict[str, float], dict[str, float]]:
    """(processor milliseconds, faults) per turn, by role."""
    return (
        {role: (after.processor[role] - before.processor[role]) * 1e3 / times for role in before.processor},
        {role: (after.faults[role] - before.faults[role]) / times for role in before.faults},
    )


def usage_of(cycle, times: int) -> tuple[dict[str, float], dict[str, float]]:
    """(processor milliseconds, faults) per call of `cycle()`, by role."""
    cycle()
    time.sleep(0.1)  # the zygote reaps a moment after the launcher has told us
    before = usage()
    for _ in range(times):
        cycle()
    time.sleep(0.1)
    return difference(before, usage(), times)


def memory_of(pids: list[int]) -> tuple[int, int]:
    """(private dirty bytes, page table bytes) of all `pids` together. Raises PermissionError for an ordinary user,
    who may not look into the agent."""
    private = tables = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                private += _kilobytes(file.read(), "Private_Dirty:")
            with open(f"/proc/{pid}/status") as file:
                tables += _kilobytes(file.read(), "VmPTE:")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return private, tables


def _kilobytes(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """How far this process's resident memory rose: `with PeakMemory() as peak: ...; peak.rise` in bytes."""

    rise = 0

    def __enter__(self) -> Self:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from now (proc(5))
        self._before = self._read("VmRSS:")
        return self

    def __exit__(self, *_: object) -> None:
        self.rise = max(0, self._read("VmHWM:") - self._before)

    @staticmethod
    def _read(name: str) -> int:
        with open("/proc/self/status") as file:
            return _kilobytes(file.read(), name)
