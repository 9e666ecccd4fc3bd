"""Capabilities, securebits and no_new_privs of the calling thread.

Guards against privilege that outlives its use: the sets are written whole (never "remove these"), and dropping
the bounding set goes to the last capability the running kernel knows, also those that have no name here.

These attributes belong to a thread, not to a process: call them while there is one thread.

Facts: capabilities(7), capset(2), PR_CAPBSET_DROP(2const), PR_CAP_AMBIENT(2const), linux/capability.h.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from ringfence.linux import numbers, syscalls

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ringfence.linux.records import NamedTuple

# In order of number, from 0.
_NAMES_FROM_0 = (
    "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL CAP_SETGID CAP_SETUID "
    "CAP_SETPCAP CAP_LINUX_IMMUTABLE CAP_NET_BIND_SERVICE CAP_NET_BROADCAST CAP_NET_ADMIN CAP_NET_RAW "
    "CAP_IPC_LOCK CAP_IPC_OWNER CAP_SYS_MODULE CAP_SYS_RAWIO CAP_SYS_CHROOT CAP_SYS_PTRACE CAP_SYS_PACCT "
    "CAP_SYS_ADMIN CAP_SYS_BOOT CAP_SYS_NICE CAP_SYS_RESOURCE CAP_SYS_TIME CAP_SYS_TTY_CONFIG CAP_MKNOD "
    "CAP_LEASE CAP_AUDIT_WRITE CAP_AUDIT_CONTROL CAP_SETFCAP CAP_MAC_OVERRIDE CAP_MAC_ADMIN CAP_SYSLOG "
    "CAP_WAKE_ALARM CAP_BLOCK_SUSPEND CAP_AUDIT_READ CAP_PERFMON CAP_BPF CAP_CHECKPOINT_RESTORE"
)
NAMES = _NAMES_FROM_0.split()
NUMBER = {name: number for number, name in enumerate(NAMES)}

PR_GET_KEEPCAPS = 7
PR_SET_KEEPCAPS = 8
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_GET_SECUREBITS = 27
PR_SET_SECUREBITS = 28
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

SECBIT_NOROOT = 1 << 0
SECBIT_NOROOT_LOCKED = 1 << 1
SECBIT_NO_SETUID_FIXUP = 1 << 2
SECBIT_NO_SETUID_FIXUP_LOCKED = 1 << 3
SECBIT_KEEP_CAPS = 1 << 4
SECBIT_KEEP_CAPS_LOCKED = 1 << 5
SECBIT_NO_CAP_AMBIENT_RAISE = 1 << 6
SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED = 1 << 7

# uid 0 means nothing and ambient capabilities cannot be raised, for good.
SECUREBITS_NO_ROOT = (
    SECBIT_NOROOT
    | SECBIT_NOROOT_LOCKED
    | SECBIT_KEEP_CAPS_LOCKED
    | SECBIT_NO_CAP_AMBIENT_RAISE
    | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED
)

_VERSION_3 = 0x20080522
_HEADER = struct.Struct("=Ii")
_DATA = struct.Struct("=6I")  # effective, permitted, inheritable; lower halves, then upper halves
_LOW = 0xFFFFFFFF
_Header = ctypes.c_char * _HEADER.size  # one type for all: making one copies dozens of a forked child's pages


class CapabilitySets(NamedTuple):
    """The five sets of a thread, as bit masks by capability number."""

    inheritable: int
    permitted: int
    effective: int
    bounding: int
    ambient: int

    @property
    def empty(self) -> bool:
        """True when every set is zero: nothing held, nothing to be had from an executed file."""
        return not any(self)


_FIELDS = {"CapInh": 0, "CapPrm": 1, "CapEff": 2, "CapBnd": 3, "CapAmb": 4}


def mask(*names: str) -> int:
    """The bit mask of capabilities by name ("CAP_KILL"). Raises ValueError for an unknown one."""
    bits = 0
    for name in names:
        if name not in NUMBER:
            raise ValueError(f"unknown capability {name!r}")
        bits |= 1 << NUMBER[name]
    return bits


def names(bits: int) -> tuple[str, ...]:
    """The names in a mask; a bit without a name here appears as `CAP_41`."""
    found = []
    for number in range(64):
        if bits >> number & 1:
            found.append(NAMES[number] if number < len(NAMES) else f"CAP_{number}")
    return tuple(found)


def parse_status(text: str) -> CapabilitySets:
    """The sets out of the text of /proc/PID/status. Raises ValueError when one is missing."""
    values: list[int] = [-1] * len(_FIELDS)
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in _FIELDS:
            values[_FIELDS[key]] = int(value, 16)
    if -1 in values:
        raise ValueError("no capability sets in this process status")
    return CapabilitySets(*values)


def read(process: str | int = "self", proc: str = "/proc") -> CapabilitySets:
    """The sets of a process, or of this one. Raises OSError when there is no such process."""
    with open(f"{proc}/{process}/status", encoding="utf-8", errors="surrogateescape") as file:
        return parse_status(file.read())


def set_capabilities(*, effective: int = 0, permitted: int = 0, inheritable: int = 0) -> None:
    """Set the three sets of the calling thread, whole. Raises OSError (EPERM) where it would gain any."""
    header = _Header.from_buffer_copy(_HEADER.pack(_VERSION_3, 0))
    data = _DATA.pack(
        *(effective & _LOW, permitted & _LOW, inheritable & _LOW),
        *(effective >> 32, permitted >> 32, inheritable >> 32),
    )
    syscalls.call(numbers.table(numbers.architecture())["capset"], header, data, what="capset")


def last_capability() -> int:
    """The highest capability number the running kernel knows (there may be more than this file names)."""
    number = len(NAMES) - 1
    while number < 63 and _known(number + 1):
        number += 1
    while number > 0 and not _known(number):
        number -= 1
    return number


def _known(number: int) -> bool:
    try:
        syscalls.prctl(PR_CAPBSET_READ, number)
    except OSError as problem:
        if problem.errno == errno.EINVAL:
            return False
        raise
    return True


def drop_bounding_set(keep: int = 0) -> None:
    """Take everything but `keep` out of the bounding set: no executed file can give it back.

    Precondition: CAP_SETPCAP, unless nothing is left to drop. Raises OSError (EPERM) otherwise.
    """
    for number in range(last_capability() + 1):
        if not keep >> number & 1 and syscalls.prctl(PR_CAPBSET_READ, number):
            syscalls.prctl(PR_CAPBSET_DROP, number)


def clear_ambient() -> None:
    """Empty the ambient set: what would survive the exec of an ordinary file."""
    syscalls.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def drop_all() -> None:
    """Every set to zero: bounding, ambient, effective, permitted, inheritable. Raises OSError."""
    drop_bounding_set()
    clear_ambient()
    set_capabilities()


def securebits() -> int:
    """The securebits of the calling thread."""
    return syscalls.prctl(PR_GET_SECUREBITS)


def set_securebits(bits: int) -> None:
    """Set the securebits. Precondition: CAP_SETPCAP. Raises OSError (EPERM) without, or against a lock."""
    syscalls.prctl(PR_SET_SECUREBITS, bits)


def set_keep_capabilities(keep: bool) -> None:
    """Whether the permitted set survives the next change from uid 0 to others; an exec clears it."""
    syscalls.prctl(PR_SET_KEEPCAPS, int(keep))


def set_no_new_privileges() -> None:
    """From now on, for good, exec gives this thread and its children nothing (set-id bits, file capabilities)."""
    syscalls.prctl(PR_SET_NO_NEW_PRIVS, 1)


def no_new_privileges() -> bool:
    """Whether no_new_privs is set."""
    return bool(syscalls.prctl(PR_GET_NO_NEW_PRIVS))
