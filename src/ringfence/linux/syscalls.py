"""Raw system calls through libc, one error path for all of them.

Every kernel wrapper of this package goes through here, so that a refusal always surfaces as an
`OSError` which names the call: a wrapper that swallowed an errno would be a sandbox that is weaker than it
says. Standard library only.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the interpreter lock across the call: needed where the call returns twice (clone3).
libc_with_lock = ctypes.PyDLL(None, use_errno=True)
_syscall = libc.syscall
_syscall.restype = ctypes.c_long
_syscall_with_lock = libc_with_lock.syscall
_syscall_with_lock.restype = ctypes.c_long

MACHINE = os.uname().machine if hasattr(os, "uname") else ""

# Calls older than the unified table (numbers >= 424 are the same everywhere; source: the kernel's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h).
_BY_MACHINE = {
    "x86_64": {"pivot_root": 155, "keyctl": 250, "capset": 126, "renameat2": 316},
    "aarch64": {"pivot_root": 41, "keyctl": 219, "capset": 91, "renameat2": 276},
}
NUMBER = {
    "pidfd_send_signal": 424,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "pidfd_open": 434,
    "clone3": 435,
    "close_range": 436,
    "mount_setattr": 442,
}
NUMBER.update(_BY_MACHINE.get(MACHINE, {}))


def check(result: int, what: str) -> int:
    """Return `result`, or raise `OSError` naming `what` when the C call reported failure."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)
    return result


def call(number: int, *arguments: Any, what: str = "") -> int:
    """Make system call `number`; integers travel as C longs, bytes and ctypes objects as they are.

    Raises OSError naming the call when the kernel refuses it.
    """
    converted = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return check(_syscall(ctypes.c_long(number), *converted), what or f"system call {number}")


def call_holding_lock(number: int, *arguments: Any) -> int:
    """Like `call`, without releasing the interpreter lock and without raising: the caller reads errno."""
    converted = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    return _syscall_with_lock(ctypes.c_long(number), *converted)


def close_from(keep: list[int]) -> None:
    """Close every descriptor of this process except those in `keep` (close_range(2), Linux 5.9)."""
    first = 0
    for descriptor in sorted(set(keep)):
        if descriptor > first:
            call(NUMBER["close_range"], first, descriptor - 1, 0, what="close_range")
        first = descriptor + 1
    call(NUMBER["close_range"], first, 0x7FFFFFFF, 0, what="close_range")


def prctl(option: int, *arguments: int) -> int:
    """prctl(2) with unsigned long arguments."""
    values = [ctypes.c_ulong(item) for item in arguments] + [ctypes.c_ulong(0)] * (4 - len(arguments))
    return check(libc.prctl(ctypes.c_int(option), *values), f"prctl({option})")


def write_file(path: str, text: str, directory: int | None = None) -> None:
    """Write `text` in one write(2), as files below /proc and /sys want it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
