"""What sandboxes leave on the machine, found without asking them: processes, control groups, mounts, files.

Guards against tests that believe Ringfence about its own traces. Everything is read from /proc, /sys/fs/cgroup and
the file system, and processes are known by pid and start time, so that a reused pid is not taken for one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

LAW_SECONDS = 2.0
"""A crashed, killed or exited owner leaves nothing after this long."""
SOURCES = str(Path(__file__).resolve().parents[2] / "src")


def start_time(pid: int) -> int | None:
    """When a process began, in ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def parents() -> dict[int, int]:
    """pid -> parent of every process that can be seen."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            table[int(name)] = int(text[text.rindex(")") + 2 :].split()[1])
    return table


def descendants(pid: int) -> set[int]:
    """Everything below a process, itself left out."""
    table = parents()
    found: set[int] = set()
    layer = {pid}
    while layer := {child for child, parent in table.items() if parent in layer} - found:
        found |= layer
    return found


def groups_of(launcher: int) -> list[str]:
    """Control group folders of the launcher with that pid (`owner-PID-...`), on every hierarchy."""
    found = []
    for root, names, _ in os.walk("/sys/fs/cgroup"):
        for name in list(names):
            if name.startswith("owner-"):
                names.remove(name)
                if name.startswith(f"owner-{launcher}-"):
                    found.append(os.path.join(root, name))
    return found


def mounts() -> set[str]:
    """The mounts of this process's mount namespace."""
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


# Made and removed by the project's other programs and tests, which may run meanwhile.
_OF_TOOLS = ("ringfence-bench", "ringfence-as-user", "ringfence-demo", "ringfence-sink", "ringfence-test", "pytest-of-")


def files() -> set[str]:
    """Everything with our name in the places where programs leave things."""
    from ringfence.engines.namespace.identifiers import state_directory

    found = set()
    for place in ("/tmp", "/var/tmp", "/dev/shm", state_directory()):
        for entry in os.scandir(place):
            ours = place not in ("/tmp", "/var/tmp", "/dev/shm")
            try:
                mine = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            except OSError:
                continue
            if ours or (mine and "ringfence" in entry.name and not entry.name.startswith(_OF_TOOLS)):
                found.add(entry.path)
    return found


@dataclass
class Traces:
    """What one owner has on the machine at one moment."""

    launcher: int
    processes: dict[int, int] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, launcher: int, *others: int) -> Traces:
        """The traces of a launcher and of everything below it, `others` included."""
        pids = {launcher, *descendants(launcher), *others}
        processes = {pid: started for pid in pids if (started := start_time(pid)) is not None}
        return cls(launcher, processes, files(), mounts())

    def left(self) -> list[str]:
        """What of it is there now. Files and mounts count that are new since then."""
        found = [
            f"process {pid}: {command_of(pid)}"
            for pid, started in self.processes.items()
            if start_time(pid) == started
        ]
        found += [f"process {pid}: {command_of(pid)}" for pid in descendants(self.launcher)]
        found += [f"group {path}" for path in groups_of(self.launcher)]
        found += [f"file {path}" for path in files() - self.files]
        found += [f"mount {line}" for line in mounts() - self.mounts]
        return found

    def gone(self, seconds: float = LAW_SECONDS) -> None:
        """Fail unless nothing is left within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, "left behind: " + "; ".join(left)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def launcher_pid() -> int:
    """The launcher of this process's node."""
    from ringfence.node.node import Node

    return Node.current().launcher().pid


def zygote_pids() -> list[int]:
    """The zygotes of this process's node: the children of its launcher."""
    launcher = launcher_pid()
    return [pid for pid, parent in parents().items() if parent == launcher]


_PRELUDE = """
import json, os, signal, sys, time, threading
from ringfence import *
from ringfence.node.node import Node

def ready(**more):
    print(json.dumps({"pid": os.getpid(), "launcher": Node.current().launcher().pid, **more}), flush=True)

"""


class Owner:
    """Another Python process that owns sandboxes. Its code calls `ready()` when there is something to look at."""

    def __init__(self, code: str, *, prelude: bool = True, group: bool = False, file: Path | None = None) -> None:
        text = (_PRELUDE if prelude else "") + code
        command = [sys.executable, "-c", text]
        if file is not None:
            file.write_text(text)
            command = [sys.executable, str(file)]
        environment = {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
            env=environment, start_new_session=group,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def line(self) -> dict:
        """The next line that it printed, as JSON."""
        assert self.process.stdout is not None and self.process.stderr is not None
        text = self.process.stdout.readline()
        assert text, f"the owner ended: {self.process.stderr.read()}"
        return json.loads(text)

    def traces(self, least: int = 3) -> Traces:
        """Wait for `ready()`, and take what it has on the machine: a launcher, a zygote and a sandbox at `least`."""
        told = self.line()
        traces = Traces.of(told["launcher"])
        assert len(traces.processes) >= least, f"only {traces.processes} are there"
        return traces

    def go_on(self) -> None:
        """Let a `sys.stdin.readline()` of the owner return."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def finish(self, seconds: float = 60) -> str:
        """Wait for a good end; returns what it printed."""
        out, err = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {out}{err}"
        return out


def run_owner(code: str, seconds: float = 60, **options: object) -> str:
    """Run an owner to its good end; returns what it printed."""
    with Owner(code, **options) as owner:  # type: ignore[arg-type]
        return owner.finish(seconds)
