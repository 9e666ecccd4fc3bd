"""Lend a host directory to a sandbox: from the owner's descriptor to a detached mount that its zygote may attach.

The owner opened the directory once and passes the descriptor, so there is no path here that could be exchanged, and
nobody lends what he cannot open. Guards against a directory that is too much to lend, one that belongs to someone
else than the owner who asks a launcher with more rights, mounts below it (which would be empty or, worse, live), and
against host ids: as root the mount is idmapped, so that the directory's owner is the sandbox's `user` and nobody else
of the host exists in it; an ordinary user's own id is `user` by the sandbox's id map.

Standard library and ringfence.linux only.
"""

from __future__ import annotations

import _socket
import os
import re
import select
import signal
import stat
import struct
from typing import Any

from ringfence.engines.namespace.grammar import WORKSPACE
from ringfence.engines.namespace.identifiers import IdPlan
from ringfence.engines.namespace.spawn import SpawnError
from ringfence.linux import mounts, namespaces, paths
from ringfence.linux.channels import receive_descriptors, send_descriptors

PRIMITIVE = "host directory"
PATIENCE = 10.0  # seconds a file system may take to answer; a network file system that hangs must not hang us


def examine(
    descriptor: int, control: Any, place: str, mode: str, root_owned: bool
) -> tuple[str, os.stat_result]:
    """The resolved path and status of the directory behind `descriptor`. Raises SpawnError where it is not lent."""
    state = os.fstat(descriptor)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if not stat.S_ISDIR(state.st_mode) or not path.startswith("/") or state.st_nlink == 0:
        raise SpawnError(PRIMITIVE, f"{path} is not a directory", "name a directory that exists")
    refused = paths.refused_source(path) or (None if place == WORKSPACE else paths.refused_place(place))
    if refused is not None:
        raise SpawnError(PRIMITIVE, refused[0], refused[1])
    below = _mounted_below(path)
    if below:
        raise SpawnError(
            PRIMITIVE, f"{below} is mounted below {path}, and a sandbox would see an empty directory there",
            "lend a directory without mounts below it, or unmount it",
        )  # fmt: skip
    owner = _peer(control)
    if owner not in (0, state.st_uid) and os.geteuid() == 0:
        raise SpawnError(PRIMITIVE, f"{path} does not belong to the user who asks", "lend a directory of your own")
    if mode == "rw":
        if state.st_uid == 0 and not root_owned:
            raise SpawnError(
                PRIMITIVE, f"{path} belongs to root, and `rw` would let the sandbox write it as root",
                "use `mode: overlay`, change the owner, or set `allow_root_owned`",
            )  # fmt: skip
        if os.geteuid() not in (0, state.st_uid):
            raise SpawnError(
                PRIMITIVE, f"{path} does not belong to the user who asks",
                "`rw` makes the sandbox's user the owner of the directory: use `mode: overlay`",
            )  # fmt: skip
    return path, state


def lend(
    descriptor: int, state: os.stat_result, plan: IdPlan, user_namespace: int, user: int, writable: bool
) -> int:
    """A descriptor of a detached mount of the directory alone (nothing mounted below it comes along).

    `user` is the id of the sandbox's user in the zygote's user namespace, whose descriptor is `user_namespace`.
    Raises SpawnError.
    """
    attributes = mounts.NO_SET_ID | mounts.NO_DEVICES | (0 if writable else mounts.READ_ONLY)
    if plan.kind != "ranges":
        return _lend_as_user(descriptor, user_namespace, attributes)
    try:
        mount = mounts.clone_tree("", descriptor, recursive=False)
    except OSError as error:
        raise SpawnError(PRIMITIVE, str(error)) from error
    try:
        outside = plan.uid_map[0][1] + user
        mounts.set_apart(mount, attributes, _mapping_namespace((state.st_uid, outside), (state.st_gid, outside)))
    except OSError as error:
        os.close(mount)
        raise SpawnError(
            PRIMITIVE, f"the ids of this file system cannot be mapped: {error}",
            "idmapped mounts are needed, which overlay, NFS and most FUSE file systems lack: run as the directory's "
            "owner instead of root, or copy the directory to a local disk",
        ) from error  # fmt: skip
    return mount


def _peer(control: Any) -> int:
    """The uid of the process that made the owner's socket (socket(7), SO_PEERCRED)."""
    raw = control.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", raw)[1]


def _mounted_below(path: str) -> str:
    """The first mount point strictly below `path`, or "" (proc(5), mountinfo; octal escapes for odd bytes)."""
    prefix = os.fsencode(path) + b"/"
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            raw = line.split()[4]
            place = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), raw) if b"\\" in raw else raw
            if place.startswith(prefix):
                return os.fsdecode(place)
    return ""


_mappings: dict[tuple[int, ...], int] = {}
_MAPPINGS_KEPT = 64


def _mapping_namespace(uid: tuple[int, int], gid: tuple[int, int]) -> int:
    """A user namespace that maps one uid and one gid, (in the file system, on the mount), and holds no process.

    It costs a process and a millisecond, and the next sandbox mostly has the slot of the last: some are kept.
    """
    key = (*uid, *gid)
    kept = _mappings.pop(key, -1)
    _mappings[key] = _new_mapping_namespace(uid, gid) if kept < 0 else kept  # the latest is last
    if len(_mappings) > _MAPPINGS_KEPT:
        os.close(_mappings.pop(next(iter(_mappings))))
    return _mappings[key]


def _new_mapping_namespace(uid: tuple[int, int], gid: tuple[int, int]) -> int:
    wake, hold = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = namespaces.fork_into(namespaces.CLONE_NEWUSER, hooks=False)
    if pid == 0:
        os.close(hold)
        os.read(wake, 1)
        os._exit(0)
    try:
        os.close(wake)
        namespaces.write_id_maps(f"/proc/{pid}", [(*uid, 1)], [(*gid, 1)], keep_groups=True)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(hold)
        os.close(pidfd)
        os.waitpid(pid, 0)


def _lend_as_user(descriptor: int, user_namespace: int, attributes: int) -> int:
    """The same without privilege, by a helper that enters the zygote's user namespace, which this user owns.

    Only a mount namespace of one's own can be taken apart, and a descriptor still points into the old one: the kernel
    translates the working directory alone (unshare(2) copies it to the new tree), so the helper goes there first.
    """
    pair: Any = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours, theirs = pair
    pid, pidfd = namespaces.fork_into(0, hooks=False)
    if pid == 0:
        try:
            os.fchdir(descriptor)
            namespaces.enter(user_namespace, namespaces.CLONE_NEWUSER)
            namespaces.unshare(namespaces.CLONE_NEWNS)
            mount = mounts.clone_tree(".", recursive=False)
            mounts.set_apart(mount, attributes)
            send_descriptors(theirs, b"m", [mount])
        except OSError as error:
            theirs.send(b"e" + str(error).encode()[:1000])
        finally:
            os._exit(0)
    theirs.close()
    message, descriptors = b"", []
    try:
        if select.select([ours], [], [], PATIENCE)[0]:
            message, descriptors = receive_descriptors(ours, 2048, 1)
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        ours.close()
        os.close(pidfd)
        os.waitpid(pid, 0)
    if message != b"m" or not descriptors:
        raise SpawnError(PRIMITIVE, message[1:].decode("utf-8", "replace") or "the file system did not answer in time")
    return descriptors[0]
