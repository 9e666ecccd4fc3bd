"""Resource limits (setrlimit) of everything inside a sandbox: one table, one reason per line.

Guards against what control groups do not count (descriptors, file size, core dumps, locked memory, queues) and
stands in for them where there are none (processes, data). Facts: getrlimit(2), core(5), user_namespaces(7).

What is not here, and why: RLIMIT_AS, since it does not hold memory (a memfd wrote 1 GiB under 64 MiB) and breaks
programs that reserve address space; RLIMIT_RSS, since Linux ignores it; RLIMIT_CPU, since timeouts are the host's
and a sandbox may idle for hours.

Counters kept per user (NPROC, SIGPENDING, MSGQUEUE, MEMLOCK) are counted per user namespace since Linux 5.14, so
a sandbox has a limit of its own; what it uses also counts in the namespaces above, so limits have to stay small.
"""

from __future__ import annotations

import resource

MIB = 1024 * 1024

STACK_SOFT = 8 * MIB  # Linux's default; also the size of each thread's stack in glibc
STACK_HARD = 64 * MIB
MEMORY_LOCKED = 64 * 1024
QUEUE_BYTES = 0  # no POSIX message queues
SIGNALS_PENDING = 256


def for_policy(pids, open_files, file_size, memory=None, memory_mode="hard", data_baseline=0) -> dict:
    """The table {name: [soft, hard]} for a sandbox's limits; JSON-able, for `apply` here or in the guest.

    `pids` tasks, `open_files` per process, `file_size` bytes. `memory` bytes is used with `memory_mode`
    "watched" only; `data_baseline` bytes are what the zygote had mapped already (VmData of /proc/PID/status),
    which a fork inherits and must not pay for.
    """
    table = {
        # A fork bomb's bound where no pids group is, and a second one where there is.
        "NPROC": [pids, pids],
        # Per process; the host's file table is held by pids x open_files.
        "NOFILE": [open_files, open_files],
        # Past it a write ends in SIGXFSZ (Python ignores it: EFBIG). Tmpfs sizes bound the sum.
        "FSIZE": [file_size, file_size],
        # Exactly 1, not 0: a core_pattern that pipes to a host program ignores 0, and the kernel skips the
        # pipe only at exactly 1 (core(5)); for plain files 1 byte is too small for any core to be written.
        "CORE": [1, 1],
        # 8 MiB as everywhere; the higher hard limit lets a program ask for deep recursion.
        "STACK": [STACK_SOFT, STACK_HARD],
        # Locked pages cannot be reclaimed; keyrings and crypto libraries want a few.
        "MEMLOCK": [MEMORY_LOCKED, MEMORY_LOCKED],
        # Queued messages and signals are kernel memory, and count for the owner of the namespaces too: with Linux's
        # default of 819200 bytes one sandbox left no queue for its neighbours or for the host's own user. Each POSIX
        # timer holds one pending signal.
        "MSGQUEUE": [QUEUE_BYTES, QUEUE_BYTES],
        "SIGPENDING": [SIGNALS_PENDING, SIGNALS_PENDING],
        # No real-time scheduling and no negative nice values: both would outrun the host.
        "RTPRIO": [0, 0],
        "NICE": [0, 0],
    }
    if memory is not None and memory_mode == "watched":
        # Per process, so the watcher has to catch only what several processes do together. Counts private
        # writable memory whether touched or not, thread stacks included.
        table["DATA"] = [memory + data_baseline, memory + data_baseline]
    return table


class Shortfall:
    """One limit that is not as asked. `stricter` tells a harmless one (lower than asked) from a hole."""

    __slots__ = ("got", "name", "reason", "wanted")

    def __init__(self, name, wanted, got, reason):
        self.name = name
        self.wanted = wanted  # (soft, hard)
        self.got = got  # (soft, hard)
        self.reason = reason

    @property
    def stricter(self) -> bool:
        # CORE is the one limit where lower is weaker: 0 lets a piped core handler run.
        return self.name != "CORE" and _at_most(self.got[0], self.wanted[0])

    def __repr__(self):
        return f"Shortfall({self.name}: wanted {self.wanted}, got {self.got}: {self.reason})"


def _at_most(left, right) -> bool:
    if right == resource.RLIM_INFINITY:
        return True
    return left != resource.RLIM_INFINITY and left <= right


def _lower(left, right):
    return left if _at_most(left, right) else right


def apply(table, pid=0) -> list:
    """Set the limits of this process (or of `pid`, by prlimit); returns the `Shortfall` list, empty when all took.

    A hard limit cannot be raised without CAP_SYS_RESOURCE in the initial user namespace (which even root lacks
    on some machines), so each value is cut to the hard limit in force, and that is reported. Values are [soft,
    hard] or one number for both. Raises ValueError for an unknown name, OSError when the kernel refuses.
    """
    shortfalls = []
    for name, value in table.items():
        number = getattr(resource, "RLIMIT_" + name, None)
        if number is None:
            raise ValueError("unknown resource limit " + repr(name))
        soft, hard = value if isinstance(value, (list, tuple)) else (value, value)
        wanted = (soft, hard)
        ceiling = resource.prlimit(pid, number)[1]
        target = (_lower(soft, ceiling), _lower(hard, ceiling))
        resource.prlimit(pid, number, target)
        if target != wanted:
            reason = "the hard limit in force is " + str(ceiling) + " and raising it needs CAP_SYS_RESOURCE"
            shortfalls.append(Shortfall(name, wanted, target, reason))
    return shortfalls
