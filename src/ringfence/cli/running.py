"""Sandboxes of this machine as any other process can see them: by /proc alone.

No register is believed that could be stale: what runs is what the kernel says runs (owners.py asks nodes for the
names that go with it). A launcher is recognised by
the command line it was started with, a zygote as its child one pid namespace down, a sandbox's first process as
the zygote's child two down. Guards `kill` against a recycled pid: the process is named by descriptor, and checked
again after it was opened.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

_MARK = b"ringfence.engines.namespace.launcher"


@dataclass
class Running:
    """One running sandbox. `pid` is its first process on the host; `memory` is resident bytes of all of it.

    What follows `age` is the owner's word, and empty where it gave none; then `memory` is what its group is charged.
    """

    pid: int
    owner: int
    program: str
    launcher: int
    processes: int
    memory: int
    age: float
    id: str = ""
    template: str = ""
    policy: str = ""
    state: str = "running"
    cpu_seconds: float | None = None
    memory_limit: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    shell: bool = False


def running() -> list[Running]:
    """All sandboxes whose processes this user may see, oldest first."""
    parents, children = _tree()
    found = []
    for launcher in parents:
        if not _is_launcher(launcher):
            continue
        own = _depth(launcher)
        for zygote in children.get(launcher, ()):
            if _depth(zygote) != own + 1:
                continue
            for first in children.get(zygote, ()):
                if _depth(first) == own + 2:
                    found.append(_describe(first, launcher, parents, children))
    return sorted(found, key=lambda each: -each.age)


def kill(pid: int, patience: float = 5.0) -> bool:
    """Kill the sandbox whose first process is `pid` and wait until it is gone. False when there is none such."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if all(each.pid != pid for each in running()):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(patience * 1000))
    finally:
        os.close(descriptor)


def _tree() -> tuple[dict[int, int], dict[int, list[int]]]:
    parents: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                parents[int(name)] = parent
                children.setdefault(parent, []).append(int(name))
    return parents, children


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def _is_launcher(pid: int) -> bool:
    words = _read(pid, "cmdline").split(b"\0")
    # Only what we start looks so: `python -I -S -c CODE`, and CODE imports the launcher.
    return len(words) >= 5 and words[1:4] == [b"-I", b"-S", b"-c"] and _MARK in words[4]


def _depth(pid: int) -> int:
    for line in _read(pid, "status").splitlines():
        if line.startswith(b"NSpid:"):
            return len(line.split()) - 1
    return 0


def _describe(first: int, launcher: int, parents: dict[int, int], children: dict[int, list[int]]) -> Running:
    members, waiting = [], [first]
    while waiting:
        pid = waiting.pop()
        members.append(pid)
        waiting += children.get(pid, ())
    memory = 0
    for pid in members:
        for line in _read(pid, "status").splitlines():
            if line.startswith(b"VmRSS:"):
                memory += int(line.split()[1]) * 1024
    owner = parents.get(launcher, 0)
    program = _read(owner, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return Running(first, owner, program, launcher, len(members), memory, _age(first))


def _age(pid: int) -> float:
    try:
        ticks = int(_read(pid, "stat").rpartition(b")")[2].split()[19])
    except (IndexError, ValueError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
