"""The file system of a sandbox that has a root: the system directories are its own to change, the host's stay as they are.

For `root` to install anything, `/usr` and what else it must write have to be overlays whose directories are root's.
The host's directories belong to ids that no sandbox has, and the kernel lets nobody rename or create in those; so a
zygote makes, once, a skeleton: every directory of the lent trees, empty, on the tmpfs of the template root. A sandbox
lays it over the trees through an id-mapped mount, in which what the zygote owns belongs to this sandbox's root. What
files there are in the trees still belongs to nobody inside: they can be read, replaced and removed, and not changed
in place (overlayfs would have to give the copy an owner that does not exist inside).

Guards against: a change that reaches the host (the upper layers lie on the sandbox's own tmpfs), and live sockets and
FIFOs (overlays have none). Standard library and ringfence.linux only.
"""

from __future__ import annotations

import os
import signal

from ringfence.linux import mounts, namespaces
from ringfence.linux.mounts import MS_NODEV, MS_NOSUID

LENT = "/run"  # where the zygote finds the trees; the sandbox's own /run is the empty directory below
SEPARATOR = "%"  # stands for the slash of a tree's name in its directory's name
_GUARDED = MS_NOSUID | MS_NODEV


class WritableTrees:
    """Made once in a zygote whose sandboxes have a root; `lay()` in each of them."""

    def __init__(self) -> None:
        self.trees = sorted(name.replace(SEPARATOR, "/") for name in os.listdir(LENT))
        self.below = [place for place in _mount_points() if any(place.startswith(f"/{name}/") for name in self.trees)]
        self._maps: dict[tuple[int, ...], int] = {}
        mounts.attach(mounts.clone_tree("/", recursive=False), "/mnt")
        try:
            for name in self.trees:
                _copy_directories(f"{LENT}/{_flat(name)}", f"/mnt/{name}")
        finally:
            mounts.unmount("/mnt")

    def maps(self, request: dict) -> int:
        """In the zygote: a user namespace that nobody is in, with the maps of this sandbox's slot. A descriptor."""
        owner = tuple(request["owner"])  # with the user's own id where it was lent directories
        if owner not in self._maps:
            pid, pidfd = namespaces.fork_into(namespaces.CLONE_NEWUSER, hooks=False)
            if pid == 0:
                signal.pause()
                os._exit(0)
            try:
                namespaces.write_id_maps(f"/proc/{pid}", request["uid_map"], request["gid_map"], keep_groups=True)
                self._maps[owner] = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(pidfd)
        return self._maps[owner]

    def lay_root(self, maps: int, root: int, user: int) -> bytes:
        """In a sandbox: the lower layer of its root, with owners it knows; the upper directories become root's."""
        lower = mounts.clone_tree("/", recursive=False)
        mounts.set_apart(lower, 0, maps)
        os.mkdir("/mnt/t", 0o755)
        mounts.attach(lower, "/mnt/t")
        for name in ("/mnt/u/home", "/mnt/u/var", "/mnt/u/var/tmp"):
            os.chown(name, root, root)
        return b"/mnt/t"

    def lay_trees(self, root: int) -> None:
        """In a sandbox: every lent tree, writable, at its place below /mnt/r."""
        os.mkdir("/mnt/v", 0o755)
        for name in self.trees:
            flat = _flat(name)
            os.mkdir(f"/mnt/v/{flat}", 0o755)
            upper, work = f"/mnt/v/{flat}/u", f"/mnt/v/{flat}/w"
            os.mkdir(upper, 0o755)
            os.mkdir(work, 0o755)
            os.chown(upper, root, root)
            options = f"lowerdir=/mnt/t/{name}:{LENT}/{flat},upperdir={upper},workdir={work},userxattr"
            mounts.mount(b"overlay", f"/mnt/r/{name}".encode(), b"overlay", _GUARDED, options.encode())
        for place in self.below:
            mounts.move(place, "/mnt/r" + place)


def _flat(name: str) -> str:
    return name.replace("/", SEPARATOR)


def _mount_points() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        return sorted({line.split()[4] for line in table})


def _copy_directories(source: str, target: str) -> None:
    """Every directory below `source`, empty, below `target`. Owners and set-id bits are not taken over."""
    os.makedirs(target, 0o755, exist_ok=True)
    waiting = [(source, target)]
    while waiting:
        source, target = waiting.pop()
        try:
            found = [entry.name for entry in os.scandir(source) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue  # one that this user may not read is no use inside either
        for name in found:
            path = f"{target}/{name}"
            try:
                os.mkdir(path, os.stat(f"{source}/{name}", follow_symlinks=False).st_mode & 0o777)
            except FileExistsError:
                pass
            waiting.append((f"{source}/{name}", path))
