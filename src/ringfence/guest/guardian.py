"""A second, tiny keeper that frees the agent when user code stops a child between its birth and its exec.

posix_spawn waits in the kernel until the child has exec'd, and until then the child already is the user's:
`kill -STOP -1` in a loop can hit it, and SIGSTOP can't be blocked. The agent would then wait for ever. The
guardian is a fork of the agent with its uid, which user code can't signal. It sleeps on a timer that the agent
sets before each spawn and clears after it, and kills the stopped child when the timer fires. Forked at the
first command; costs nothing before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time

from ringfence.guest import processes
from ringfence.linux.syscalls import check, close_from, libc, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal

    from ringfence.guest.agent import Agent
else:
    import _signal as signal

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC = os.O_CLOEXEC
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PATIENCE_NANOSECONDS = 250_000_000
_GRACE_SECONDS = 0.25  # a sandbox that was frozen wakes with the timer long over: let the agent go on first
_Times = ctypes.c_long * 4  # struct itimerspec; one type for all, since making one copies dozens of pages
_STATE = struct.Struct("QQ")  # spawn number (0: none under way), boot clock ticks at its begin


class Guardian:
    """`prepare()` once before the ids change, then `arm()` and `disarm()` around each spawn."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._pid = 0
        self._number = 0
        self._descriptor = -1
        self._page: mmap.mmap | None = None
        self._on = _Times(0, 0, 0, _PATIENCE_NANOSECONDS)
        self._off = _Times(0, 0, 0, 0)
        self._ticks = os.sysconf("SC_CLK_TCK")

    def prepare(self) -> None:
        """Fork the guardian unless it runs. Raises OSError at the limit of processes."""
        if self._pid:
            return
        if self._page is None:
            self._page = mmap.mmap(-1, mmap.PAGESIZE)
            self._descriptor = check(libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC), "timerfd_create")
        pid = os.fork()
        if pid == 0:
            try:
                self._guard(os.getppid())
            finally:
                os._exit(1)
        self._pid = pid
        self._agent.children[pid] = self._lost

    def _lost(self, status: int, usage: object) -> None:
        self._pid = 0

    def arm(self) -> None:
        assert self._page is not None
        self._number += 1
        _STATE.pack_into(self._page, 0, self._number, int(time.clock_gettime(time.CLOCK_BOOTTIME) * self._ticks))
        libc.timerfd_settime(self._descriptor, 0, self._on, None)

    def disarm(self) -> None:
        assert self._page is not None
        _STATE.pack_into(self._page, 0, 0, 0)
        libc.timerfd_settime(self._descriptor, 0, self._off, None)

    def _guard(self, agent: int) -> None:
        """The guardian's life."""
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, b"guardian", 0, 0, 0)
        self._agent.forsake()
        close_from([0, 1, 2, self._descriptor])
        assert self._page is not None
        while True:
            os.read(self._descriptor, 8)
            number = _STATE.unpack_from(self._page)[0]
            time.sleep(_GRACE_SECONDS)
            while number and _STATE.unpack_from(self._page)[0] == number:
                begin = _STATE.unpack_from(self._page)[1]
                for item in processes.table().values():
                    if item.parent == agent and item.state in (b"T", b"t") and item.start >= begin:
                        processes.send(item.pid, signal.SIGKILL)
                time.sleep(0.01)
