"""Keepers: one process of the agent's above each job of root's, below which everything the job starts stays.

A job's mark is a group, and root may drop its groups. What it may not do is leave its parent's tree: a keeper is a
subreaper, so that a process whose parent has ended becomes the keeper's child, whatever it did with sessions and
double forks; CLONE_PARENT is refused to all. The keeper has the agent's uid, which nothing inside can signal, and
lives until it has no child left. It says how the job's first process ended and reaps the others.

Facts: PR_SET_CHILD_SUBREAPER(2const), wait4(2).
"""



from __future__ import annotations

import os
import signal
import struct

from ringfence.guest import processes
from ringfence.guest.credentials import PR_SET_CHILD_SUBREAPER
from ringfence.linux.syscalls import close_from, libc, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import Any, NamedTuple

    from ringfence.guest.agent import Agent
else:
    from ringfence.linux.records import NamedTuple

_PR_SET_NAME = 15
_BORN = struct.Struct("=ii")  # errno of the fork, pid of the job's first process
_ENDED = struct.Struct("=iddq")  # wait status, seconds in user and kernel mode, most resident KiB


class Usage(NamedTuple):
    """The part of a resource usage that the agent reports (getrusage(2))."""

    ru_utime: float
    ru_stime: float
    ru_maxrss: int


class _Kept(NamedTuple):
    mark: int
    first: int
    report: int


class Keepers:
    """Forks jobs below keepers, and knows which keepers a mark has."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._kept: dict[int, _Kept] = {}

    def any(self, mark: int) -> bool:
        return any(item.mark == mark for item in self._kept.values())

    def fork(self, mark: int | None) -> int:
        """fork(2) with a keeper between: 0 in the job's first process, its pid here. Raises OSError.

        Waits for the keeper's second fork, which nothing inside can hold up. The end of the first process reaches
        `agent.children` as that of a child does.
        """
        assert mark is not None
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            keeper = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if keeper == 0:
            os.close(read)
            return self._keep(write)
        os.close(write)
        self._agent.children[keeper] = lambda status, usage: self._ended(keeper)
        error, first = _BORN.unpack(os.read(read, _BORN.size).ljust(_BORN.size, b"\0"))
        if error or first <= 0:
            os.close(read)
            raise OSError(error or 11, os.strerror(error or 11), "fork")
        self._kept[keeper] = _Kept(mark, first, read)
        self._agent.loop.watch(read, lambda events: self._reported(keeper))
        return first

    def _keep(self, report: int) -> int:
        """In the keeper: fork the job's first process (0 there), then wait until nothing is left. Never returns here."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            pid = os.fork()
        except OSError as error:
            os.write(report, _BORN.pack(error.errno or 11, 0))
            os._exit(1)
        if pid == 0:
            os.close(report)
            return 0
        try:
            libc.prctl(_PR_SET_NAME, b"keeper", 0, 0, 0)
            self._agent.forsake()
            close_from([0, 1, 2, report])
            os.write(report, _BORN.pack(0, pid))
            while True:
                ended, status, usage = os.wait4(-1, 0)
                if ended == pid:
                    os.write(report, _ENDED.pack(status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss))
        except ChildProcessError:
            os._exit(0)
        finally:
            os._exit(1)

    def _reported(self, keeper: int) -> None:
        """How the first process ended; or the keeper was killed, which only a shortage of memory does."""
        kept = self._kept.get(keeper)
        if kept is None:
            return
        raw = os.read(kept.report, _ENDED.size)
        self._agent.loop.forget(kept.report)
        status, usage = signal.SIGKILL, None
        if len(raw) == _ENDED.size:
            status, user, system, resident = _ENDED.unpack(raw)
            usage = Usage(user, system, resident)
        else:
            for pid in processes.descendants(kept.first):
                processes.send(pid, signal.SIGKILL)
        ended: Any = self._agent.children.pop(kept.first, None)
        if ended is not None:
            ended(status, usage)

    def _ended(self, keeper: int) -> None:
        self._reported_before_end(keeper)
        kept = self._kept.pop(keeper, None)
        if kept is not None:
            os.close(kept.report)

    def _reported_before_end(self, keeper: int) -> None:
        kept = self._kept.get(keeper)
        if kept is not None and kept.first in self._agent.children:
            self._reported(keeper)

    def members(self, mark: int) -> list[int]:
        """Live processes below the keepers of `mark`, the keepers not counted."""
        return self._below({pid for pid, item in self._kept.items() if item.mark == mark})

    @staticmethod
    def _below(keepers: set[int]) -> list[int]:
        table = processes.table()
        children: dict[int, list[int]] = {}
        for item in table.values():
            children.setdefault(item.parent, []).append(item.pid)
        found: list[int] = []
        waiting = [child for keeper in keepers for child in children.get(keeper, ())]
        while waiting:
            pid = waiting.pop()
            if not table[pid].gone:
                found.append(pid)
            waiting.extend(children.get(pid, ()))
        return found

    def below(self, first: int) -> list[int]:
        """Live processes of the job that began with `first`, whoever its parent is now."""
        keepers = {pid for pid, item in self._kept.items() if item.first == first}
        return self._below(keepers)

    def mark_of(self, pid: int) -> int | None:
        """The mark of the job whose keeper is above `pid`, None where there is none."""
        table = processes.table()
        for _ in range(len(table)):
            kept = self._kept.get(pid)
            if kept is not None:
                return kept.mark
            item = table.get(pid)
            if item is None or item.parent <= 0:
                return None
            pid = item.parent
        return None
