"""Mounts through the descriptor-based API of Linux 5.2 and later, and pivot_root.

Trees are opened once by descriptor and attached by descriptor, so that a path swapped after the check cannot
change what is mounted. Standard library only; each wrapper ends in one OSError that names the call and path.
"""

from __future__ import annotations

import ctypes
import os
import struct

from ringfence.linux.syscalls import NUMBER, call, check, libc

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04
FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6

READ_ONLY = 0x1  # MOUNT_ATTR_RDONLY
NO_SET_ID = 0x2  # MOUNT_ATTR_NOSUID
NO_DEVICES = 0x4  # MOUNT_ATTR_NODEV
NO_EXECUTION = 0x8  # MOUNT_ATTR_NOEXEC
_ID_MAPPED = 0x00100000  # MOUNT_ATTR_IDMAP
_MS_PRIVATE = 1 << 18
MS_REC = 16384
MNT_DETACH = 2


libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND = 32, 4096


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    """mount(2): one call where the descriptor-based API takes seven. For targets nobody else can swap.

    Takes bytes, so that the start of a sandbox converts nothing.
    """
    if libc.mount(source, target, kind, flags, options) < 0:
        check(-1, f"mount {os.fsdecode(target)}")


def make_private() -> None:
    """Stop mount events between this mount namespace and the one it was copied from, both ways."""
    mount(None, b"/", None, MS_REC | _MS_PRIVATE)


def new_filesystem(kind: str, attributes: int = 0, **options: str | bool) -> int:
    """Create a file system and return a descriptor of its detached mount.

    `options` are those of the file system (`size="64m"`); True stands for a flag without a value.
    """
    context = call(NUMBER["fsopen"], ctypes.c_char_p(kind.encode()), FSOPEN_CLOEXEC, what=f"fsopen {kind}")
    try:
        for key, value in options.items():
            if value is True:
                _configure(context, FSCONFIG_SET_FLAG, key, None)
            else:
                _configure(context, FSCONFIG_SET_STRING, key, str(value))
        _configure(context, FSCONFIG_CMD_CREATE, None, None)
        return call(NUMBER["fsmount"], context, FSMOUNT_CLOEXEC, attributes, what=f"fsmount {kind}")
    finally:
        os.close(context)


def _configure(context: int, command: int, key: str | None, value: str | None) -> None:
    raw_key = key.encode() if key is not None else None
    raw_value = os.fsencode(value) if value is not None else None
    call(
        NUMBER["fsconfig"], context, command, ctypes.c_char_p(raw_key), ctypes.c_char_p(raw_value), 0,
        what=f"fsconfig {key}={value}",
    )  # fmt: skip


def clone_tree(path: str, directory: int = AT_FDCWD, *, recursive: bool = True) -> int:
    """open_tree(2) with OPEN_TREE_CLONE: a descriptor of a detached copy of the mount tree at `path`."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    if not path:
        flags |= AT_EMPTY_PATH
    return call(NUMBER["open_tree"], directory, os.fsencode(path), flags, what=f"open_tree {path}")


def set_attributes(descriptor: int, add: int = 0, remove: int = 0, *, recursive: bool = True) -> None:
    """mount_setattr(2) on the mount behind `descriptor` (and those below it)."""
    arguments = ctypes.create_string_buffer(struct.pack("=QQQQ", add, remove, 0, 0))
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    call(NUMBER["mount_setattr"], descriptor, b"", flags, arguments, 32, what="mount_setattr")


def set_apart(descriptor: int, add: int, user_namespace: int = -1) -> None:
    """mount_setattr(2) on the one detached mount behind `descriptor`: attributes, and out of every peer group.

    A copy of a shared mount shares events with it: what the host mounted below later would appear in the copy. With
    `user_namespace` (a descriptor) the mount's ids are mapped as that namespace maps them, which the kernel allows
    to a privileged caller in the namespace that owns the file system. Raises OSError: EINVAL where the file system
    cannot do that, EPERM where the caller may not.
    """
    if user_namespace >= 0:
        add |= _ID_MAPPED
    arguments = ctypes.create_string_buffer(struct.pack("=QQQQ", add, 0, _MS_PRIVATE, max(0, user_namespace)))
    call(NUMBER["mount_setattr"], descriptor, b"", AT_EMPTY_PATH, arguments, 32, what="mount_setattr")


def attach(descriptor: int, path: str, directory: int = AT_FDCWD) -> None:
    """Attach the detached mount behind `descriptor` at `path`; the descriptor is closed."""
    try:
        call(
            NUMBER["move_mount"], descriptor, b"", directory, os.fsencode(path), MOVE_MOUNT_F_EMPTY_PATH,
            what=f"move_mount {path}",
        )  # fmt: skip
    finally:
        os.close(descriptor)


def move(source: str, target: str) -> None:
    """Move an attached mount, with all below it, from `source` to `target`."""
    call(
        NUMBER["move_mount"], AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), 0,
        what=f"move_mount {source} {target}",
    )  # fmt: skip


def unmount(path: str) -> None:
    """Detach the mount at `path`, with all below it (umount2 MNT_DETACH)."""
    check(libc.umount2(os.fsencode(path), MNT_DETACH), f"umount2 {path}")


def change_root(path: str) -> None:
    """Make `path` (a mount point) the root and leave nothing of the old root reachable.

    pivot_root(".", ".") stacks the old root on the new one, and the unmount removes it (pivot_root(2)).
    """
    os.chdir(path)
    call(NUMBER["pivot_root"], b".", b".", what=f"pivot_root {path}")
    unmount(".")
    os.chdir("/")
