"""Finding and ending all processes of a job, whatever they did to hide.

A job is a command or a code kernel with everything it started. Where many ids are mapped each job has a group
id as its mark, which no child can shed; where there is a single uid, a job is what descends from its leader,
which is a subreaper. Guards against setsid, double forks, SIGSTOP, ignored signals and fork races: everything
found is stopped first, until a scan finds nothing new, and only then killed, until a scan finds nothing.

Works in short steps, so that a fork bomb can't keep the agent from its other channels.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    import _signal as signal

_STEP_SECONDS = 0.02
_STOP_ROUNDS = 40
_GIVE_UP_SECONDS = 10.0


def all_pids() -> list[int]:
    """Every process of this pid namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_process_file(pid: int, name: str) -> bytes:
    """The first 4 KiB of a file below /proc/PID; empty when the process is gone or hides it.

    Any other failure is raised: a scan that could not open files must not count as one that found nothing.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
    try:
        return os.read(descriptor, 4096)
    except (ProcessLookupError, PermissionError):
        return b""
    finally:
        os.close(descriptor)


def marked(mark: int) -> list[int]:
    """Live processes that carry group `mark`, this one not counted.

    A zombie whose threads live on counts; one that only waits to be reaped does not.
    """
    found = []
    own = os.getpid()
    needle = b"%d" % mark
    for pid in all_pids():
        if pid == own:
            continue
        text = read_process_file(pid, "status")
        start = text.find(b"\nGroups:")
        if start < 0 or needle not in text[start + 8 : text.find(b"\n", start + 1)].split():
            continue
        if _is_gone(text):
            continue
        found.append(pid)
    return found


def _is_gone(status: bytes) -> bool:
    start = status.find(b"\nState:\t")
    if status[start + 8 : start + 9] not in (b"Z", b"X"):
        return False
    threads = status.find(b"\nThreads:\t")
    return status[threads + 10 : threads + 12].strip() in (b"0", b"1")


class Stat:
    """The few fields of /proc/PID/stat that descent needs."""

    __slots__ = ("gone", "parent", "pid", "session", "start", "state")

    def __init__(self, pid: int, text: bytes):
        fields = text[text.rfind(b")") + 2 :].split()
        self.pid = pid
        self.state = fields[0]
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.start = int(fields[19])
        self.gone = self.state in (b"Z", b"X") and int(fields[17]) <= 1


def table() -> dict[int, Stat]:
    """All processes by pid."""
    result = {}
    for pid in all_pids():
        text = read_process_file(pid, "stat")
        if text:
            try:
                result[pid] = Stat(pid, text)
            except (ValueError, IndexError):
                continue
    return result


def descendants(leader: int) -> list[int]:
    """Live processes that descend from `leader` or are in its session, the leader included.

    The session finds what outlived its leader; a daemon that called setsid and whose leader is gone is lost,
    which is the weakness of a single uid (the leader is killed last for that reason).
    """
    processes = table()
    children: dict[int, list[int]] = {}
    for item in processes.values():
        children.setdefault(item.parent, []).append(item.pid)
    own = os.getpid()
    found: set[int] = set()
    waiting = [leader] + [item.pid for item in processes.values() if item.session == leader]
    while waiting:
        pid = waiting.pop()
        if pid in found or pid == own or pid not in processes:
            continue
        found.add(pid)
        waiting.extend(children.get(pid, ()))
    return sorted(pid for pid in found if not processes[pid].gone)


def send(pid: int, number: int) -> bool:
    """kill(2); False when there is no such process or it is not ours to signal."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


class TreeKill:
    """Ends all processes that `members()` finds; call `step()` until it returns None.

    `leader` is killed last where its death would lose track of its children (single uid); else None.
    `step()` returns the seconds after which it wants to be called again. `complete` is then True when nothing
    was left, False when some process survived ten seconds of SIGKILL (in the kernel, on a dead disk).
    """

    def __init__(self, members: Callable[[], list[int]], leader: int | None = None):
        self._members = members
        self._leader = leader
        self._stopped: set[int] = set()
        self._rounds = 0
        self._killing = False
        self._started = time.monotonic()
        self._pause = 0.0005
        self.complete = False

    def step(self) -> float | None:
        deadline = time.monotonic() + _STEP_SECONDS
        while not self._killing:
            new = [pid for pid in self._members() if pid not in self._stopped]
            for pid in new:
                send(pid, signal.SIGSTOP)
            self._stopped.update(new)
            self._rounds += 1
            # Other jobs of the same uid can wake and refill this one for ever: at some point kill what there is.
            if not new or self._rounds >= _STOP_ROUNDS:
                self._killing = True
            elif time.monotonic() > deadline:
                return 0.0
        found = self._members()
        if not found:
            self.complete = True
            return None
        others = [pid for pid in found if pid != self._leader]
        for pid in others or found:
            send(pid, signal.SIGKILL)
        if time.monotonic() - self._started > _GIVE_UP_SECONDS:
            return None
        self._pause = min(self._pause * 2, 0.05)
        return self._pause


class Marks:
    """Hands out job marks (group ids) and takes one back only when no process carries it any more."""

    def __init__(self, first: int, count: int, members: Callable[[int], list[int]] = marked):
        self._members = members
        self._free = list(range(first + count - 1, first - 1, -1))
        self._lingering: list[int] = []

    def take(self) -> int | None:
        """A mark that no process carries, or None when all are in use."""
        if not self._free:
            for mark in self._lingering[:8]:
                self._lingering.remove(mark)
                self.give_back(mark, checked=False)
        if not self._free:
            return None
        return self._free.pop()

    def give_back(self, mark: int, checked: bool) -> None:
        """The job is over. `checked`: its last process is known to be gone."""
        if checked or not self._members(mark):
            self._free.append(mark)
        else:
            self._lingering.append(mark)
