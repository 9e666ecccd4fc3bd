"""Memory of a sandbox by measurement, for machines without a memory control group.

Guards against a sandbox that spreads memory over many processes, where RLIMIT_DATA bounds each one alone. It is
"watched", not "hard": between two looks a sandbox can overshoot, and memory that no page table refers to is not
seen: kernel memory (socket buffers, dentries), and shared anonymous pages that were touched and then let go by
madvise(MADV_DONTNEED), a partial munmap or the end of the child that touched them (1.5 GiB under a limit of
64 MiB was held that way). So it stops programs that eat too much, and not one that is bent on hiding it: that
takes a control group. memfd_create and SysV shm are refused by seccomp in this mode and tmpfs is sized. Facts:
proc(5), madvise(2), Documentation/filesystems/proc.rst.

A look is cheap first: RssAnon + RssShmem + VmSwap + VmPTE of each /proc/PID/status. That bills every fork in full
for the pages it shares with the zygote, so it can only be too high, and below the limit it settles the matter.
Above, the exact share is read from smaps_rollup (Pss_Anon + Pss_Shmem + SwapPss): dearer, since the kernel walks
the page tables.

Two processes that share one address space (vfork until exec) are billed twice, for a moment. Hence a sandbox is
over only when `CONFIRMATIONS` looks in a row say so.

A sandbox's processes are seen through a descriptor of the /proc of its own pid namespace, so a look costs what
the sandbox holds, not what the machine runs. Everything read is the kernel's word; nothing of it can be forged
from inside.
"""

from __future__ import annotations

import os
import time

CONFIRMATIONS = 2
PRECISE_SHARE = 10  # an exact look may take at most one tenth of the time

_CHEAP = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:")
_EXACT = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")


def _open_proc(proc) -> int:
    return os.open(proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_at(directory: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(descriptor, 16384)
    finally:
        os.close(descriptor)


def _kilobytes(text: bytes, names) -> dict:
    """{name: bytes} of "Name:   123 kB" lines. Searched, not split: this runs for every process at every look."""
    found = {}
    for name in names:
        start = text.find(b"\n" + name)
        if start >= 0:
            start += len(name) + 1
            found[name] = int(text[start : text.index(b"kB", start)]) * 1024
    return found


class Measurement:
    """One look. `bytes` is never too low by sharing; `exact` says whether shared pages were billed by share."""

    __slots__ = ("bytes", "exact", "processes")

    def __init__(self, total, exact, processes):
        self.bytes = total
        self.exact = exact
        self.processes = processes

    def __repr__(self):
        return f"Measurement({self.bytes} bytes, exact={self.exact}, {self.processes} processes)"


def measure(proc, pids=None, threshold=0, baseline=0) -> Measurement:
    """Memory of a sandbox's processes in bytes.

    `proc`: a directory descriptor (or path) of a procfs; `pids`: which processes, default all it shows.
    The exact pass runs only when the cheap sum is above `threshold`. `baseline` bytes (what is not to be billed)
    are taken off. A process that ends meanwhile counts as nothing; one whose smaps_rollup may not be read is
    billed by its cheap sum, and `exact` is then False. Raises OSError when `proc` itself cannot be read.
    """
    if not isinstance(proc, int):
        descriptor = _open_proc(proc)
        try:
            return measure(descriptor, pids, threshold, baseline)
        finally:
            os.close(descriptor)
    names = os.listdir(proc) if pids is None else [str(pid) for pid in pids]
    cheap, tables = {}, {}
    for name in names:
        if not name.isdigit():
            continue
        try:
            found = _kilobytes(read_at(proc, name + "/status"), _CHEAP)
        except OSError:
            continue  # gone
        if found:  # a zombie has no memory lines
            cheap[name] = sum(found.values())
            tables[name] = found.get(b"VmPTE:", 0)
    total = sum(cheap.values())
    if total - baseline <= threshold:
        return Measurement(max(0, total - baseline), False, len(cheap))
    total, exact = 0, True
    for name, estimate in cheap.items():
        try:
            text = read_at(proc, name + "/smaps_rollup")
            found = _kilobytes(text, _EXACT)
            if b"Pss_Anon:" in found:
                total += sum(found.values()) + tables[name]
                continue
        except (FileNotFoundError, ProcessLookupError):
            if not _exists(proc, name):
                continue
        except OSError:
            pass
        # No permission, or a kernel before 5.15 without Pss_Anon: too high is the safe side.
        total += estimate
        exact = False
    return Measurement(max(0, total - baseline), exact, len(cheap))


def _exists(proc: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=proc)
    except OSError:
        return False
    return True


MACHINE_FLOOR = 256 << 20  # bytes that must stay available on the machine, or a twentieth of it if that is more


def machine_is_short(meminfo: str = "/proc/meminfo") -> bool:
    """True when the machine's available memory is below the floor: the last line where no cgroup bounds a sandbox.

    A sandbox can hold memory that no process shows (unix socket buffers, shared pages without a page table entry),
    and the kernel's own out-of-memory killer would choose by processes, so it would choose wrongly.
    """
    total = available = 0
    with open(meminfo, "rb") as file:
        for line in file:
            if line.startswith(b"MemTotal:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith(b"MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
    # On a small machine a twentieth of it is the floor; the fixed number must not end every sandbox there.
    return 0 < available < min(max(MACHINE_FLOOR, total // 20), total // 8)


class MemoryWatch:
    """Watches one sandbox against `limit` bytes; the launcher calls `over` every 50 ms and kills on True.

    Takes over `proc`, a directory descriptor of the sandbox's /proc, and closes it in `close`. `baseline` bytes
    are not billed. Exact looks are rationed to a tenth of the time, so that a sandbox which sits just below the
    limit with many processes cannot keep the launcher busy; in between, growth of the cheap sum is added to the
    last exact value, and when that passes the limit an exact look is taken whatever it costs.
    """

    def __init__(self, proc: int, limit: int, baseline: int = 0):
        self.proc = proc
        self.limit = limit
        self.baseline = baseline
        self.last = Measurement(0, False, 0)
        self.peak = 0  # bytes, of what was seen
        self._over = 0
        self._exact = None  # (exact bytes, cheap bytes then)
        self._not_before = 0.0

    def over(self) -> bool:
        """Look once; True when the limit has been passed in `CONFIRMATIONS` looks in a row.

        Raises OSError when /proc cannot be read though it is there: a limit that is not watched must not pass
        for one that holds, so the caller kills the sandbox.
        """
        try:
            self.last = self._look()
        except (FileNotFoundError, ProcessLookupError):
            return False  # the pid namespace is gone: nothing is left that could hold memory
        self.peak = max(self.peak, self.last.bytes)
        self._over = self._over + 1 if self.last.bytes > self.limit else 0
        return self._over >= CONFIRMATIONS

    @property
    def suspicious(self) -> bool:
        """True after one look over the limit: look again soon (a few ms) rather than at the next tick."""
        return self._over > 0

    def _look(self):
        cheap = measure(self.proc, threshold=1 << 62, baseline=self.baseline)
        if cheap.bytes <= self.limit:
            self._exact = None
            return cheap
        now = time.monotonic()
        if self._exact is not None and now < self._not_before:
            estimate = self._exact[0] + max(0, cheap.bytes - self._exact[1])
            if estimate <= self.limit:
                return Measurement(estimate, False, cheap.processes)
        exact = measure(self.proc, baseline=self.baseline)
        ended = time.monotonic()
        self._exact = (exact.bytes, cheap.bytes)
        self._not_before = ended + (ended - now) * PRECISE_SHARE
        return exact

    def close(self) -> None:
        if self.proc >= 0:
            os.close(self.proc)
            self.proc = -1
