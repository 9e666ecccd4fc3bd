"""From a fork of the zygote to pid 1 of a sandbox: the steps, in the one order that is safe.

Read `confine()` from top to bottom: it is the sandbox, in the order in which the kernel sees it. The process
starts with the zygote's capabilities over the outer user namespace, which it needs to mount; the user
namespace comes last and owns none of the others, so that even a uid 0 inside could neither mount nor raise
interfaces nor write sysctls. After the last step nothing here can be undone from inside.

Guards against: files (allow-list root, sized overlay), network (an own namespace with a loopback only),
processes (own pid namespace, no capability, filtered calls), resources (sized file systems, rlimits; the
cgroup was joined by descriptor). Standard library and ringfence.linux only.
"""

from __future__ import annotations

import errno
import os

from ringfence.linux import capabilities, landlock, mounts, namespaces, resource_limits
from ringfence.linux.channels import send_descriptors
from ringfence.linux.syscalls import NUMBER, call, close_from, libc, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ringfence.guest.writable import WritableTrees
else:
    import _socket as socket

PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_NAME = 15
KEYCTL_JOIN_SESSION_KEYRING = 1

# What of /proc names the machine or reaches into it. Files are covered by /dev/null, directories by an empty
# read-only tmpfs, and the last group stays readable but can't be written. OCI runtimes mask the same set
# (runtime-spec, "maskedPaths" and "readonlyPaths"); interrupts and softirqs are ours: they time other tenants.
MASKED_FILES = (
    "kcore", "keys", "key-users", "latency_stats", "timer_list", "timer_stats", "sched_debug", "kallsyms",
    "kmsg", "interrupts", "softirqs", "iomem", "ioports", "vmallocinfo", "slabinfo", "pagetypeinfo",
    "kpagecount", "kpageflags", "kpagecgroup", "sysrq-trigger", "modules", "config.gz", "cmdline", "mdstat",
    "diskstats", "partitions", "locks", "schedstat", "zoneinfo", "buddyinfo",
)  # fmt: skip
MASKED_DIRECTORIES = ("acpi", "asound", "scsi", "driver", "tty", "pressure", "dynamic_debug")
READ_ONLY_DIRECTORIES = ("bus", "fs", "irq", "sys", "sysvipc")

# What one sandbox may hold of things the kernel counts per user, its owner outside included, and that no rlimit
# bounds (one sandbox took all 128 inotify instances of the host's root). A second user namespace below this one
# is refused by the filter, and here once more.
COUNTERS = {"max_inotify_instances": 16, "max_inotify_watches": 8192, "max_user_namespaces": 0}
COUNTERS_WITH_ROOT = {**COUNTERS, "max_user_namespaces": 1}  # the one in which user code lives: guest/inner.py


class ConfinementError(Exception):
    """One step was refused by the kernel: `step` names the primitive."""

    def __init__(self, step: str, error: OSError):
        super().__init__(f"{step}: {error}")
        self.step = step
        self.error = error


class Masks:
    """Which masks this kernel needs: decided once in the zygote, applied in every sandbox.

    Paths are kept as bytes below the place where the new root is put together.
    """

    def __init__(self) -> None:
        def place(name: str) -> bytes:
            return b"/mnt/r/proc/" + name.encode()

        self.files = [place(name) for name in MASKED_FILES if _readable(name)]
        self.directories = [place(name) for name in MASKED_DIRECTORIES if os.path.isdir("/proc/" + name)]
        self.read_only = [place(name) for name in READ_ONLY_DIRECTORIES if os.path.isdir("/proc/" + name)]


def _readable(name: str) -> bool:
    # A file that only the machine's root may open is shut already: no uid in here maps to it.
    try:
        mode = os.stat("/proc/" + name).st_mode
    except OSError:
        return False
    return bool(mode & 0o007)


def confine(
    request: dict,
    groups: list[int],
    lent_mounts: list[int],
    network: int,
    stream: socket.socket,
    mapping: socket.socket,
    prepared: Prepared,
) -> None:
    """Turn this process, pid 1 of fresh namespaces, into a sandbox. Raises ConfinementError."""
    step = "descriptors"
    place = None
    if lent_mounts:
        from ringfence.guest import lent  # most sandboxes are lent nothing; its file moves with the mounts

        place = lent.place
    try:
        keep = [0, 1, 2, stream.fileno(), mapping.fileno(), prepared.landlock, network, *groups, *lent_mounts]
        if prepared.writable is not None:
            keep.append(prepared.writable.maps(request))
        close_from([descriptor for descriptor in keep if descriptor >= 0])
        step = "cgroup"
        for descriptor in groups:
            os.write(descriptor, b"0")
            os.close(descriptor)
        step = "cgroup namespace"
        namespaces.unshare(namespaces.CLONE_NEWCGROUP)
        step = "network namespace"
        if network >= 0:
            namespaces.enter(network, namespaces.CLONE_NEWNET)
            os.close(network)
        else:
            namespaces.unshare(namespaces.CLONE_NEWNET)
            namespaces.raise_loopback()
        step = "mounts"
        sysctls = _mount(request, prepared)
        step = "host directory"
        upper = -1 if place is None else place(request["lent"], lent_mounts, "/mnt/r", request["owner"])
        step = "root"
        mounts.change_root("/mnt/r")
        step = "host name"
        namespaces.set_host_name(request["host_name"])
        step = "session keyring"
        call(NUMBER["keyctl"], KEYCTL_JOIN_SESSION_KEYRING, 0, what="keyctl")
        os.setsid()
        step = "user namespace"
        _enter_user_namespace(request, mapping, upper)
        step = "user counters"
        namespaces.limit_counters(sysctls, COUNTERS if prepared.writable is None else COUNTERS_WITH_ROOT)
        os.close(sysctls)
        step = "resource limits"
        resource_limits.apply(request["rlimits"])
        step = "capabilities"
        _drop(request, prepared)
        step = "no_new_privs"
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        step = "landlock"
        if prepared.landlock >= 0:
            landlock.restrict_self(prepared.landlock)
        step = "seccomp"
        prepared.install_filter()
        if prepared.landlock >= 0:
            os.close(prepared.landlock)
        mapping.close()
    except OSError as error:
        raise ConfinementError(step, error) from error


class Prepared:
    """What the zygote makes once so that a sandbox costs less: filter bytes, a ruleset, masks."""

    def __init__(
        self, install_filter: Callable[[], object], ruleset: int, masks: Masks, writable: WritableTrees | None = None
    ):
        self.install_filter = install_filter
        self.landlock = ruleset
        self.masks = masks
        self.writable = writable  # None: a sandbox without a root
        self.capabilities = range(capabilities.last_capability() + 1)


_GUARDED = mounts.MS_NOSUID | mounts.MS_NODEV
_PLAIN = _GUARDED | mounts.MS_NOEXEC


def _mount(request: dict, prepared: Prepared) -> int:
    """Put the new root together at /mnt/r. Returns a descriptor of a still writable /proc/sys.

    The mount namespace is a private copy of the zygote's, in which every path up to here is ours alone, so the
    one-call mount(2) is safe and spares a sandbox some forty system calls.
    """
    root, user = request["owner"]  # uids as the zygote sees them
    inodes = request["inodes"]
    mounts.mount(b"tmpfs", b"/mnt", b"tmpfs", _GUARDED, f"size={request['disk']},mode=755,nr_inodes={inodes}".encode())
    os.umask(0)
    for name, mode in _UPPER:
        os.mkdir(name, mode)
    os.chown("/mnt/u", root, root)
    for name in ("/mnt/u/home/user", "/mnt/u/workspace"):
        os.chown(name, user, user)
    writable = prepared.writable
    lower = b"/" if writable is None else writable.lay_root(writable.maps(request), root, user)
    # Upper and work directories get no path inside: once the old root is gone, only the overlay refers to them.
    mounts.mount(
        b"overlay", b"/mnt/r", b"overlay", _GUARDED, b"lowerdir=" + lower + b",upperdir=/mnt/u,workdir=/mnt/w,userxattr"
    )
    for name in request["moved"]:
        if writable is None or name not in writable.trees:
            mounts.move("/" + name, "/mnt/r/" + name)
    if writable is not None:
        writable.lay_trees(root)
        os.close(writable.maps(request))
    for place, size in ((b"/mnt/r/tmp", request["tmp"]), (b"/mnt/r/dev/shm", request["shm"])):
        options = f"size={size},mode=1777,uid={root},gid={root},nr_inodes={inodes}"
        mounts.mount(b"tmpfs", place, b"tmpfs", _PLAIN, options.encode())
    mounts.mount(
        b"devpts", b"/mnt/r/dev/pts", b"devpts", mounts.MS_NOSUID | mounts.MS_NOEXEC,
        b"newinstance,ptmxmode=0666,mode=0620,max=64",
    )  # fmt: skip
    mounts.mount(b"proc", b"/mnt/r/proc", b"proc", _PLAIN)
    sysctls = os.open("/mnt/r/proc/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _mask_proc(prepared.masks)
    return sysctls


_UPPER = (
    ("/mnt/u", 0o755), ("/mnt/w", 0o755), ("/mnt/r", 0o755), ("/mnt/u/home", 0o755), ("/mnt/u/home/user", 0o755),
    ("/mnt/u/workspace", 0o755), ("/mnt/u/var", 0o755), ("/mnt/u/var/tmp", 0o1777),
)  # fmt: skip


def _mask_proc(masks: Masks) -> None:
    for place in masks.read_only:
        mounts.mount(place, place, None, mounts.MS_BIND)
        mounts.mount(None, place, None, mounts.MS_BIND | mounts.MS_REMOUNT | mounts.MS_RDONLY | _PLAIN)
    for place in masks.files:
        mounts.mount(b"/mnt/r/dev/null", place, None, mounts.MS_BIND)
    if masks.directories:
        first = masks.directories[0]
        mounts.mount(b"tmpfs", first, b"tmpfs", _PLAIN | mounts.MS_RDONLY, b"size=4k,mode=555,nr_inodes=2")
        for place in masks.directories[1:]:
            mounts.mount(first, place, None, mounts.MS_BIND)


def _enter_user_namespace(request: dict, mapping: socket.socket, upper: int) -> None:
    if not request["single"]:
        # The namespace's owner is then an id of this sandbox's own range: kernel counters per owner
        # (RLIMIT_NPROC, namespaces, keys) are not shared with a neighbour.
        os.setgroups([])
        os.setresgid(request["owner"][0], request["owner"][0], request["owner"][0])
        os.setresuid(request["owner"][0], request["owner"][0], request["owner"][0])
    namespaces.unshare(namespaces.CLONE_NEWUSER)
    if upper >= 0:
        # The launcher keeps it: what was changed in the workspace is read from there, from outside.
        send_descriptors(mapping, b"u", [upper])
        os.close(upper)
    else:
        mapping.send(b"u")
    if mapping.recv(1) != b"m":
        raise OSError(0, "the id map was not written")


def _drop(request: dict, prepared: Prepared) -> None:
    """Leave the agent the three capabilities it works with, and its children none at all."""
    for number in prepared.capabilities:
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            raise OSError(errno.EPERM, "not dropped from the bounding set", capabilities.names(1 << number)[0])
    capabilities.clear_ambient()
    if request["single"]:
        capabilities.set_capabilities()
    else:
        agent = request["agent_id"]
        # This process is uid 0 inside now; the kernel would take every capability on the way to another uid.
        capabilities.set_keep_capabilities(True)
        os.setgroups([])
        os.setresgid(agent, agent, agent)
        os.setresuid(agent, agent, agent)
        kept = capabilities.mask("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
        if prepared.writable is not None:
            from ringfence.guest import inner  # loaded already, by a zygote whose sandboxes have a root

            request["boot"]["inner"] = inner.create(kept)
        capabilities.set_capabilities(effective=kept, permitted=kept)
        capabilities.set_keep_capabilities(False)
    prctl(PR_SET_DUMPABLE, 0)


def write_maps(pid: int, request: dict) -> None:
    """Called by the zygote for the child `pid` that has just entered its user namespace."""
    namespaces.write_id_maps(f"/proc/{pid}", request["uid_map"], request["gid_map"], keep_groups=not request["single"])
