"""Namespaces: fork into them, leave into them, map their ids.

The order in which a sandbox gets its namespaces is a security rule, not a detail: the user namespace comes
last, so that it owns none of the others and a uid 0 inside can neither mount, nor raise interfaces, nor
write sysctls (user_namespaces(7), "ownership"). This file only offers the calls; guest/confine.py keeps the
order. Standard library only.
"""

from __future__ import annotations

import _socket  # the C socket: that of `socket` turns numbers into enumerations, which a forking zygote pays for
import ctypes
import fcntl
import os
import struct

from ringfence.linux import numbers
from ringfence.linux.syscalls import (
    MACHINE,
    NUMBER,
    call_holding_lock,
    check,
    libc,
    libc_with_lock,
    write_file,
)

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_PARENT = 0x00008000
CLONE_PIDFD = 0x00001000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_INTO_CGROUP = 0x200000000

_PR_GET_TID_ADDRESS = 40
_CLONE = numbers.table(numbers.architecture())["clone"]
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_LOOPBACK_UP = struct.pack("16sH22x", b"lo", _IFF_UP)


class _CloneArguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls",
            "set_tid", "set_tid_size", "cgroup",
        )
    ]  # fmt: skip


_before_fork = libc_with_lock.PyOS_BeforeFork
_after_fork_parent = libc_with_lock.PyOS_AfterFork_Parent
_after_fork_child = libc_with_lock.PyOS_AfterFork_Child
for _hook in (_before_fork, _after_fork_parent, _after_fork_child):
    _hook.restype = None
    _hook.argtypes = []

_thread_id_address = ctypes.c_void_p(0)
# Where glibc caches the thread id: the kernel writes the child's there, as glibc's own fork() arranges.
libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(_thread_id_address), 0, 0, 0)


def fork_into(flags: int, cgroup: int = -1, *, hooks: bool = True) -> tuple[int, int]:
    """Fork into new namespaces. Returns (pid, pidfd) in the parent and (0, -1) in the child.

    Preconditions: the calling process has one thread. `flags` are CLONE_NEW* bits (clone(2)). With `cgroup`, a
    descriptor of a v2 group, the child is born in that group (CLONE_INTO_CGROUP, Linux 5.7). Without `hooks`
    the interpreter's own fork handlers are left out: they renew locks that no other thread can hold here, and
    touch two hundred pages for it (about a millisecond); the child must not rely on `random` being reseeded.
    Raises OSError where the kernel refuses, EPERM above all where user namespaces are switched off.
    """
    arguments = _CloneArguments()
    pidfd = ctypes.c_int(-1)
    # With CLONE_PARENT the child inherits the signal of its new parent's choice, and the kernel wants 0 here.
    arguments.exit_signal = 0 if flags & CLONE_PARENT else signal.SIGCHLD
    arguments.flags = flags | CLONE_PIDFD
    arguments.pidfd = ctypes.addressof(pidfd)
    if cgroup >= 0:
        arguments.flags |= CLONE_INTO_CGROUP
        arguments.cgroup = cgroup
    if _thread_id_address.value:
        arguments.flags |= CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
        arguments.child_tid = _thread_id_address.value
    if hooks:
        _before_fork()
    result = call_holding_lock(NUMBER["clone3"], ctypes.byref(arguments), ctypes.sizeof(arguments))
    if result == 0:
        if hooks:
            _after_fork_child()
        return 0, -1
    error = ctypes.get_errno()
    if hooks:
        _after_fork_parent()
    if result < 0:
        raise OSError(error, os.strerror(error), f"clone3({flags:#x})")
    return result, pidfd.value


def fork_alone() -> int:
    """fork(2) without the interpreter's fork handlers: the pid in the parent, 0 in the child.

    Precondition: the calling process has one thread, and the child needs nothing that those handlers renew (locks
    of other threads, `random`, the main thread's native id); see `fork_into`. Made by the old clone(2), whose flags
    a seccomp filter can see: inside a sandbox clone3(2) answers ENOSYS. Raises OSError.
    """
    address = _thread_id_address.value or 0
    flags = signal.SIGCHLD | ((CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID) if address else 0)
    # The last two arguments change places between the two (clone(2), "C library/kernel differences").
    last = (address, 0) if MACHINE == "x86_64" else (0, address)
    result = call_holding_lock(_CLONE, flags, 0, 0, *last)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "clone")
    return result


def unshare(flags: int) -> None:
    """unshare(2)."""
    check(libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def enter(descriptor: int, kind: int) -> None:
    """setns(2): join the namespace behind `descriptor`, which must be of `kind` (a CLONE_NEW* bit)."""
    check(libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), f"setns({kind:#x})")


def write_id_maps(
    process_directory: str, uids: list[tuple[int, int, int]], gids: list[tuple[int, int, int]], *, keep_groups: bool
) -> None:
    """Write uid_map and gid_map of the process behind `process_directory` (a /proc/PID path).

    Each entry is (inside, outside, count), outside as seen by the writer. Without `keep_groups` setgroups(2)
    is switched off for ever in that namespace, which the kernel demands of an unprivileged writer
    (user_namespaces(7)).
    """
    if not keep_groups:
        write_file(process_directory + "/setgroups", "deny")
    write_file(process_directory + "/uid_map", "".join(f"{a} {b} {c}\n" for a, b, c in uids))
    write_file(process_directory + "/gid_map", "".join(f"{a} {b} {c}\n" for a, b, c in gids))


INOTIFY_COUNTERS = ("max_inotify_instances", "max_inotify_watches")


def counters() -> dict[str, int]:
    """The limits of inotify in this user namespace (user_namespaces(7), /proc/sys/user); {} where there are none."""
    found = {}
    for name in INOTIFY_COUNTERS:
        try:
            with open("/proc/sys/user/" + name) as file:
                found[name] = int(file.read())
        except OSError:
            continue
    return found


def limit_counters(sysctls: int, limits: dict[str, int]) -> None:
    """Bound what this user namespace and those below it may hold, on top of what the ones above allow.

    Guards the owner of the namespaces: what is used inside also counts for them, and the machine grants a user
    128 inotify instances in all. `sysctls` is a descriptor of a writable /proc/sys, which shows each caller the
    `user` directory of its own namespace. Raises OSError; a counter that this kernel lacks is left out.
    """
    for name, limit in limits.items():
        try:
            descriptor = os.open("user/" + name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=sysctls)
        except FileNotFoundError:
            continue
        try:
            os.write(descriptor, b"%d" % limit)
        finally:
            os.close(descriptor)


def raise_loopback() -> None:
    """Bring `lo` up in the current network namespace, which gives it 127.0.0.1 and ::1."""
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, _LOOPBACK_UP)
    finally:
        probe.close()


def set_host_name(name: str) -> None:
    """sethostname(2) in the current UTS namespace."""
    raw = name.encode()
    check(libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")
