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

import os
import socket
from typing import Callable

from ringfence.linux import capabilities, landlock, mounts, namespaces, resource_limits
from ringfence.linux.syscalls import NUMBER, call, close_from, prctl

PR_SET_DUMPABLE = 4
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


class ConfinementError(Exception):
    """One step was refused by the kernel: `step` names the primitive."""

    def __init__(self, step: str, error: OSError):
        super().__init__(f"{step}: {error}")
        self.step = step
        self.error = error


class Masks:
    """Which masks this kernel needs: decided once in the zygote, applied in every sandbox."""

    def __init__(self) -> None:
        self.files = [name for name in MASKED_FILES if _readable(name)]
        self.directories = [name for name in MASKED_DIRECTORIES if os.path.isdir("/proc/" + name)]
        self.read_only = [name for name in READ_ONLY_DIRECTORIES if os.path.isdir("/proc/" + name)]


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
    network: int,
    stream: socket.socket,
    mapping: socket.socket,
    prepared: Prepared,
) -> None:
    """Turn this process, pid 1 of fresh namespaces, into a sandbox. Raises ConfinementError."""
    step = "descriptors"
    try:
        keep = [0, 1, 2, stream.fileno(), mapping.fileno(), prepared.landlock, network, *groups]
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
        _mount(request, prepared)
        step = "host name"
        namespaces.set_host_name(request["host_name"])
        step = "session keyring"
        call(NUMBER["keyctl"], KEYCTL_JOIN_SESSION_KEYRING, 0, what="keyctl")
        os.setsid()
        step = "user namespace"
        _enter_user_namespace(request, mapping)
        step = "resource limits"
        resource_limits.apply(request["rlimits"])
        step = "capabilities"
        _drop(request)
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

    def __init__(self, install_filter: Callable[[], None], ruleset: int, masks: Masks):
        self.install_filter = install_filter
        self.landlock = ruleset
        self.masks = masks


def _mount(request: dict, prepared: Prepared) -> None:
    owner = request["owner"]  # (root, user) uids as the zygote sees them
    guarded = mounts.NO_SET_ID | mounts.NO_DEVICES
    mounts.make_private()
    upper = mounts.new_filesystem("tmpfs", guarded, size=str(request["disk"]), mode="755", nr_inodes=str(request["inodes"]))
    mounts.attach(upper, "/mnt")
    os.umask(0)
    for name, mode in (("u", 0o755), ("w", 0o755), ("r", 0o755), ("u/home", 0o755), ("u/home/user", 0o755),
                       ("u/workspace", 0o755), ("u/var", 0o755), ("u/var/tmp", 0o1777)):  # fmt: skip
        os.mkdir("/mnt/" + name, mode)
    os.chown("/mnt/u", owner[0], owner[0])
    for name in ("u/home/user", "u/workspace"):
        os.chown("/mnt/" + name, owner[1], owner[1])
    # Upper and work directories get no path inside: once this mount is attached and the old root is gone,
    # only the overlay itself refers to them.
    overlay = mounts.new_filesystem(
        "overlay", guarded, lowerdir="/", upperdir="/mnt/u", workdir="/mnt/w", userxattr=True
    )
    mounts.attach(overlay, "/mnt/r")
    for name in request["moved"]:
        mounts.move("/" + name, "/mnt/r/" + name)
    mounts.attach(
        mounts.new_filesystem("tmpfs", guarded | mounts.NO_EXECUTION, size=str(request["tmp"]), mode="1777",
                              uid=str(owner[0]), gid=str(owner[0]), nr_inodes=str(request["inodes"])),
        "/mnt/r/tmp",
    )  # fmt: skip
    mounts.attach(
        mounts.new_filesystem("tmpfs", guarded | mounts.NO_EXECUTION, size=str(request["shm"]), mode="1777",
                              uid=str(owner[0]), gid=str(owner[0]), nr_inodes=str(request["inodes"])),
        "/mnt/r/dev/shm",
    )  # fmt: skip
    mounts.attach(
        mounts.new_filesystem("devpts", mounts.NO_SET_ID | mounts.NO_EXECUTION, newinstance=True, ptmxmode="0666",
                              mode="0620", max="64"),
        "/mnt/r/dev/pts",
    )  # fmt: skip
    _mount_proc(prepared.masks)
    mounts.change_root("/mnt/r")


def _mount_proc(masks: Masks) -> None:
    attributes = mounts.NO_SET_ID | mounts.NO_DEVICES | mounts.NO_EXECUTION
    proc = "/mnt/r/proc"
    mounts.attach(mounts.new_filesystem("proc", attributes), proc)
    for name in masks.read_only:
        tree = mounts.clone_tree(f"{proc}/{name}")
        mounts.set_attributes(tree, add=mounts.READ_ONLY | attributes)
        mounts.attach(tree, f"{proc}/{name}")
    for name in masks.files:
        mounts.attach(mounts.clone_tree("/mnt/r/dev/null", recursive=False), f"{proc}/{name}")
    if masks.directories:
        first = f"{proc}/{masks.directories[0]}"
        mounts.attach(mounts.new_filesystem("tmpfs", attributes | mounts.READ_ONLY, size="4k", mode="555", nr_inodes="2"), first)
        for name in masks.directories[1:]:
            mounts.attach(mounts.clone_tree(first, recursive=False), f"{proc}/{name}")


def _enter_user_namespace(request: dict, mapping: socket.socket) -> None:
    if not request["single"]:
        # The namespace's owner is then an id of this sandbox's own range: kernel counters per owner
        # (RLIMIT_NPROC, namespaces, keys) are not shared with a neighbour.
        os.setgroups([])
        os.setresgid(request["owner"][0], request["owner"][0], request["owner"][0])
        os.setresuid(request["owner"][0], request["owner"][0], request["owner"][0])
    namespaces.unshare(namespaces.CLONE_NEWUSER)
    mapping.send(b"u")
    if mapping.recv(1) != b"m":
        raise OSError(0, "the id map was not written")


def _drop(request: dict) -> None:
    """Leave the agent the three capabilities it works with, and its children none at all."""
    capabilities.drop_bounding_set()
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
        capabilities.set_capabilities(effective=kept, permitted=kept)
        capabilities.set_keep_capabilities(False)
    prctl(PR_SET_DUMPABLE, 0)


def write_maps(pid: int, request: dict) -> None:
    """Called by the zygote for the child `pid` that has just entered its user namespace."""
    namespaces.write_id_maps(f"/proc/{pid}", request["uid_map"], request["gid_map"], keep_groups=not request["single"])
