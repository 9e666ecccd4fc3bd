"""Host directories inside: how what the launcher lends is put into a sandbox's root.

Guards the host directory: it is the lower of an overlay, read only or under an upper layer of the sandbox's own, so
that nothing inside can write it, and its sockets and FIFOs are dead (an overlay makes an inode of its own for each).
Only `rw` attaches the mount itself, where sockets are live and writes go to the host at once; what the host acts on by
itself (git hooks, shell start-up files) is mounted read-only over itself there. Runs in the mount
namespace of one sandbox, before its root is entered. Standard library and ringfence.linux only.
"""

from __future__ import annotations

import os

from ringfence.linux import mounts

_GUARDED = mounts.NO_SET_ID | mounts.NO_DEVICES
_UPPER, _WORK, _EMPTY = "/mnt/x", "/mnt/y", "/mnt/e"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def place(lent: list, descriptors: list, root: str, owner: tuple) -> int:
    """Put each of `lent` (`place` inside and `mode`) at its place below `root`; `descriptors` are their mounts.

    `owner` is (root, user) as ids of this user namespace. Lowers and upper lie on the sandbox's sized tmpfs at /mnt,
    which has no path once the root is entered. Returns a descriptor of the upper layer of an overlay, else -1.
    """
    upper = -1
    for number, (each, descriptor) in enumerate(zip(lent, descriptors)):
        parent, name = _make_place(root, each["place"], owner[0])
        try:
            if each["mode"] == "rw":
                mounts.attach(descriptor, name, parent)
                _protect(name, parent, each["protected"])
                continue
            lower = f"/mnt/l{number}"
            os.mkdir(lower, 0o700)
            mounts.attach(descriptor, lower)
            if each["mode"] == "overlay":
                upper = _make_upper(lower, owner[1])
                tree = mounts.new_filesystem(
                    "overlay", _GUARDED, lowerdir=lower, upperdir=_UPPER, workdir=_WORK, userxattr=True
                )
            else:
                if not os.path.isdir(_EMPTY):
                    os.mkdir(_EMPTY, 0o555)
                tree = mounts.new_filesystem("overlay", _GUARDED | mounts.READ_ONLY, lowerdir=f"{lower}:{_EMPTY}")
            mounts.attach(tree, name, parent)
        finally:
            os.close(parent)
    return upper


def _protect(name: str, parent: int, protected: list) -> None:
    """Make each of the `protected` paths below the workspace read-only, and every directory above it immovable.

    A mount point can be neither renamed, replaced nor removed in its own mount namespace (rename(2), EBUSY), but the
    directories above it can, and it with them: so each of those becomes a mount point of its own, bound to itself.
    """
    held = {"": os.open(name, _DIRECTORY, dir_fd=parent)}
    try:
        for path in protected:
            above, _, last = path.rpartition("/")
            _hold(above, held)
            leaf = os.open(last, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held[above])
            try:
                tree = mounts.clone_tree("", leaf, recursive=False)
            finally:
                os.close(leaf)
            mounts.set_apart(tree, _GUARDED | mounts.READ_ONLY)
            mounts.attach(tree, last, held[above])
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def _hold(path: str, held: dict) -> None:
    if path in held:
        return
    above, _, last = path.rpartition("/")
    _hold(above, held)
    plain = os.open(last, _DIRECTORY, dir_fd=held[above])
    try:
        mounts.attach(mounts.clone_tree("", plain, recursive=False), last, held[above])
    finally:
        os.close(plain)
    held[path] = os.open(last, _DIRECTORY, dir_fd=held[above])  # now the mount's own root


def _make_upper(lower: str, user: int) -> int:
    """An empty upper layer; what the workspace's own mode and owner are is read from it, not from the lower."""
    mode = os.stat(lower).st_mode & 0o777 | 0o700
    for path, bits in ((_UPPER, mode), (_WORK, 0o700)):
        os.mkdir(path)
        os.chmod(path, bits)
        os.chown(path, user, user)
    return os.open(_UPPER, _DIRECTORY)


def _make_place(root: str, path: str, owner: int) -> tuple:
    """(parent's descriptor, name) of the directory `path` below `root`, made where it is missing; links are refused."""
    current = os.open(root, _DIRECTORY)
    *parents, name = path.strip("/").split("/")
    for part in (*parents, name):
        made = True
        try:
            os.mkdir(part, 0o755, dir_fd=current)
        except FileExistsError:
            made = False
        below = os.open(part, _DIRECTORY, dir_fd=current)
        if made:
            os.chown(part, owner, owner, dir_fd=current, follow_symlinks=False)
        if part is name:
            os.close(below)
        else:
            os.close(current)
            current = below
    return current, name
