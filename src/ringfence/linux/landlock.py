"""Landlock: scopes for abstract sockets and signals, and the few file-rule calls the `process` engine needs.

Guards against two doors that namespaces leave to a sandbox which shares them with others: abstract unix
sockets of its network namespace (CVE-2020-15257) and signals to processes of its pid namespace. In the
namespace engine it is a second wall, put on identically by every process before any guest code runs; file rules
do not belong there, since a domain with file rules makes mount calls impossible and cannot follow a live fork.

A domain is inherited for good and can only grow stricter; it needs no privilege but no_new_privs. Denials are
not written to the machine's audit log where the kernel lets us say so (ABI 7): a guest could flood it.

Facts: landlock(7), Documentation/userspace-api/landlock.rst, linux/landlock.h.
"""

from __future__ import annotations

import errno
import os
import struct

from ringfence.linux import numbers, syscalls

# ABI version -> kernel: 1 5.13, 2 5.19 (refer), 3 6.2 (truncate), 4 6.7 (TCP), 5 6.10 (ioctl), 6 6.12 (scopes),
# 7 6.15 (audit flags).
SCOPES_ABI = 6
LOG_FLAGS_ABI = 7

SCOPE_ABSTRACT_UNIX_SOCKET = 1
SCOPE_SIGNAL = 2
SCOPES = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL

FILE_EXECUTE = 1 << 0
FILE_WRITE = 1 << 1
FILE_READ = 1 << 2
DIRECTORY_READ = 1 << 3
DIRECTORY_REMOVE_DIRECTORY = 1 << 4
DIRECTORY_REMOVE_FILE = 1 << 5
DIRECTORY_MAKE_CHARACTER_DEVICE = 1 << 6
DIRECTORY_MAKE_DIRECTORY = 1 << 7
DIRECTORY_MAKE_FILE = 1 << 8
DIRECTORY_MAKE_SOCKET = 1 << 9
DIRECTORY_MAKE_FIFO = 1 << 10
DIRECTORY_MAKE_BLOCK_DEVICE = 1 << 11
DIRECTORY_MAKE_SYMLINK = 1 << 12
FILE_REFER = 1 << 13
FILE_TRUNCATE = 1 << 14
DEVICE_IOCTL = 1 << 15
FILE_ONLY = FILE_EXECUTE | FILE_WRITE | FILE_READ | FILE_TRUNCATE | DEVICE_IOCTL
READ_AND_EXECUTE = FILE_EXECUTE | FILE_READ | DIRECTORY_READ

TCP_BIND = 1
TCP_CONNECT = 2

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_RULE_NET_PORT = 2
_LOG_SAME_EXEC_OFF = 1
_LOG_SUBDOMAINS_OFF = 4


def _number(name: str) -> int:
    return numbers.table(numbers.architecture())[name]


def abi() -> int:
    """The Landlock ABI version of this kernel; 0 where Landlock is not built in or not enabled."""
    try:
        return syscalls.call(
            _number("landlock_create_ruleset"), 0, 0, _CREATE_RULESET_VERSION, what="landlock_create_ruleset"
        )
    except OSError as problem:
        if problem.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


_known_abi = -1


def _cached_abi() -> int:
    # A forked sandbox finds its zygote's answer: the kernel stays the same.
    global _known_abi
    if _known_abi < 0:
        _known_abi = abi()
    return _known_abi


def file_rights(version: int) -> int:
    """All file rights that ABI `version` knows: a ruleset that handles them refuses what no rule allows."""
    bits = {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    return (1 << bits) - 1


def create_ruleset(*, files: int = 0, network: int = 0, scopes: int = 0) -> int:
    """A descriptor (close-on-exec) of a ruleset that handles the given rights.

    Raises OSError: ENOSYS or EOPNOTSUPP without Landlock, EINVAL or E2BIG where the kernel does not know one of
    the rights, ENOMSG when nothing is asked for. Nothing is left out silently.
    """
    attributes = struct.pack("=QQQ", files, network, scopes)
    # A shorter structure is what older kernels know; trailing zeroes would be accepted as well.
    length = 24 if scopes else 16 if network else 8
    return syscalls.call(
        _number("landlock_create_ruleset"), attributes, length, 0, what="landlock_create_ruleset"
    )


def allow_beneath(ruleset: int, path: str | bytes | int, rights: int) -> None:
    """Allow `rights` on `path` (or an O_PATH descriptor) and, where it is a directory, on all below it.

    The path is followed now, once. Rights that only a directory can have are dropped for other files, as the
    kernel demands. Raises OSError.
    """
    opened = -1
    if not isinstance(path, int):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    descriptor = opened if opened >= 0 else int(path)
    try:
        mode = os.fstat(descriptor).st_mode
        if (mode & 0o170000) != 0o040000:
            rights &= FILE_ONLY
        rule = struct.pack("=Qi", rights, descriptor)
        syscalls.call(
            _number("landlock_add_rule"),
            ruleset,
            _RULE_PATH_BENEATH,
            rule,
            0,
            what=f"landlock_add_rule {path!r}",
        )
    finally:
        if opened >= 0:
            os.close(opened)


def allow_port(ruleset: int, port: int, rights: int) -> None:
    """Allow `rights` (TCP_BIND, TCP_CONNECT) on a TCP port. Raises OSError."""
    rule = struct.pack("=QQ", rights, port)
    syscalls.call(
        _number("landlock_add_rule"), ruleset, _RULE_NET_PORT, rule, 0, what=f"landlock_add_rule port {port}"
    )


def scopes_ruleset() -> int:
    """A ruleset with both scopes and nothing else; built once, it serves every sandbox of a zygote.

    Raises OSError where the kernel's ABI is below 6 (Linux 6.12).
    """
    return create_ruleset(scopes=SCOPES)


def restrict_self(ruleset: int) -> None:
    """Put the calling thread into a new domain of `ruleset`, for good; children inherit it.

    Preconditions: no_new_privs, or CAP_SYS_ADMIN in the caller's user namespace. Raises OSError (EPERM without
    either, E2BIG after 16 nested domains).
    """
    flags = _LOG_SAME_EXEC_OFF | _LOG_SUBDOMAINS_OFF if _cached_abi() >= LOG_FLAGS_ABI else 0
    syscalls.call(_number("landlock_restrict_self"), ruleset, flags, what="landlock_restrict_self")
