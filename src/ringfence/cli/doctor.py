"""What works on this machine: every primitive tried, none judged by a version number.

Guards against a check that says yes where the sandbox then says no. Each probe makes the real call, in a child
process where the call would change this one. Each failure names the remedy. Standard library and ringfence.linux
only, so that it also runs where an installation is half broken.

Verdicts: `ok`; `weaker` (sandboxes work, and say that something is watched or shared); `missing` (sandboxes do not
start); `unused` (nothing needs it yet).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

OK, WEAKER, MISSING, UNUSED = "ok", "weaker", "missing", "unused"

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x02000000, 0x04000000, 0x08000000

_APPARMOR = (
    "add an AppArmor profile that allows it to this Python: write\n"
    "  abi <abi/4.0>,\n  include <tunables/global>\n  profile ringfence {python} flags=(unconfined) {{ userns, }}\n"
    "to /etc/apparmor.d/ringfence and run: sudo apparmor_parser -r /etc/apparmor.d/ringfence"
)


@dataclass
class Finding:
    """One line of the doctor's report: what was tried, how it went, what to do."""

    name: str
    verdict: str
    detail: str
    fix: str = ""


def examine(start_sandbox: bool = True) -> list[Finding]:
    """All probes, in the order in which a start needs them. With `start_sandbox` a real one is started at the end."""
    probes: list[Callable[[], Finding]] = [
        _python, _kernel, _user_namespaces, _subordinate_ids, _network_namespace, _overlay, _seccomp, _landlock,
        _cgroup_memory, _cgroup_pids, _cgroup_cpus, _freezer, _nftables, _kvm, _cache,
    ]  # fmt: skip
    findings = [_guarded(probe) for probe in probes]
    if start_sandbox:
        findings.append(_guarded(_real_start))
    return findings


def works(findings: list[Finding]) -> bool:
    """Whether sandboxes start here."""
    return all(finding.verdict != MISSING for finding in findings)


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    return {"works": works(findings), "findings": [asdict(finding) for finding in findings]}


def _guarded(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 a probe that fails in an unforeseen way is a finding too
        return Finding(probe.__name__.strip("_"), MISSING, f"the probe failed: {type(error).__name__}: {error}")


def _in_child(action: Callable[[], None]) -> OSError | None:
    """Run `action` in a fork; None when it went well, else its OSError."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        number = 255
        try:
            action()
            number = 0
        except OSError as error:
            number = error.errno or 255
        finally:
            os.write(write, struct.pack("i", number))
            os._exit(0)
    os.close(write)
    data = os.read(read, 4)
    os.close(read)
    os.waitpid(pid, 0)
    number = struct.unpack("i", data)[0] if len(data) == 4 else 255
    return None if number == 0 else OSError(number, os.strerror(number))


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(ctypes.c_int(flags)) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _map_root(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _python() -> Finding:
    from ringfence.errors import RingfenceError
    from ringfence.node import environments

    detail = f"{platform.python_version()} at {sys.executable}"
    try:
        interpreter = environments.interpreter()
    except RingfenceError as error:
        return Finding("python", MISSING, f"{detail}: {error.message}", error.hint)
    return Finding("python", OK, f"{detail}; inside sandboxes {interpreter.executable_inside}")


def _kernel() -> Finding:
    release, machine = os.uname().release, os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        return Finding("kernel", MISSING, f"Linux {release} on {machine}", "the system call filter is for x86_64 and aarch64")
    # open_tree(2), move_mount(2) since 5.2, mount_setattr(2) since 5.12: tried, not read off the release.
    missing = [name for name, number in (("clone3", 435), ("open_tree", 428), ("mount_setattr", 442), ("close_range", 436))
               if _answers_enosys(number)]  # fmt: skip
    if missing:
        return Finding("kernel", MISSING, f"Linux {release} lacks {', '.join(missing)}", "use Linux 5.14 or newer")
    return Finding("kernel", OK, f"Linux {release} on {machine}")


def _answers_enosys(number: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    # Arguments that every one of these refuses: nothing happens but the kernel's answer.
    libc.syscall(ctypes.c_long(number), ctypes.c_long(-1), None, ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(-1))
    return ctypes.get_errno() == errno.ENOSYS


def _user_namespaces() -> Finding:
    uid, gid = os.geteuid(), os.getegid()

    def action() -> None:
        _unshare(CLONE_NEWUSER)
        _map_root(uid, gid)
        # AppArmor on Ubuntu lets the namespace be made and then takes its capabilities: so use one.
        _unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

    error = _in_child(action)
    name = "user namespaces"
    if error is None:
        return Finding(name, OK, "made, mapped, and used to make mount, pid, IPC, UTS and cgroup namespaces")
    if _number("/proc/sys/user/max_user_namespaces") == 0:
        return Finding(name, MISSING, "user.max_user_namespaces is 0", "sudo sysctl -w user.max_user_namespaces=15000")
    if _number("/proc/sys/kernel/unprivileged_userns_clone") == 0 and uid != 0:
        return Finding(name, MISSING, "kernel.unprivileged_userns_clone is 0", "sudo sysctl -w kernel.unprivileged_userns_clone=1")
    if _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1 and uid != 0:
        python = os.path.realpath(sys.executable)
        return Finding(name, MISSING, "AppArmor restricts them (kernel.apparmor_restrict_unprivileged_userns is 1)", _APPARMOR.format(python=python))
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return Finding(name, MISSING, f"refused in this container: {error.strerror}",
                       "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined, or as root with --privileged")  # fmt: skip
    return Finding(name, MISSING, f"refused: {error.strerror}", "look for a security module or a seccomp filter around this process")


def _subordinate_ids() -> Finding:
    from ringfence.engines.namespace import identifiers

    name = "ids for sandboxes"
    if os.geteuid() == 0:
        return Finding(name, OK, "root: an id range of its own for every template, no two sandboxes share one")
    uid, gid = identifiers.subordinate_range("/etc/subuid"), identifiers.subordinate_range("/etc/subgid")
    account = _account()
    if shutil.which("newuidmap") is None:
        return Finding(name, WEAKER, "newuidmap is not installed: one single uid, shared by the agent and the code it guards",
                       "sudo apt-get install uidmap")  # fmt: skip
    if not (uid and gid):
        return Finding(name, WEAKER, "no range for this user in /etc/subuid and /etc/subgid: one single uid",
                       _grant_ids(account))  # fmt: skip
    if not identifiers.newidmap_works():
        return Finding(name, WEAKER, "newuidmap is there, and may not be used", "reinstall the package uidmap: newuidmap needs its file capability or set-id bit")
    return Finding(name, OK, f"{uid[1]} subordinate uids from {uid[0]}, {gid[1]} gids from {gid[0]}")


def _grant_ids(account: str, tables: tuple[str, ...] = ("/etc/subuid", "/etc/subgid")) -> str:
    """The command that gives `account` 65536 subordinate ids which nobody has: two users with one range could
    reach into each other's sandboxes."""
    taken = []
    for path in tables:
        try:
            with open(path) as table:
                lines = table.readlines()
        except FileNotFoundError:
            continue
        except OSError:
            return f"have an administrator give {account} 65536 free ids in /etc/subuid and /etc/subgid ({path} cannot be read)"
        for line in lines:
            parts = line.split("#")[0].strip().split(":")
            if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
                taken.append((int(parts[1]), int(parts[1]) + int(parts[2])))
    first = 100_000  # where distributions begin (SUB_UID_MIN, login.defs(5))
    for start, end in sorted(taken):
        if start < first + 65536 and end > first:
            first = end
    last = first + 65535
    if last >= 0x80000000:  # above are the ranges of sandboxes that root starts, and ids that programs misread
        return f"have an administrator give {account} 65536 free ids in /etc/subuid and /etc/subgid"
    return f"sudo usermod --add-subuids {first}-{last} --add-subgids {first}-{last} {account}"


def _account() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _network_namespace() -> Finding:
    uid, gid = os.geteuid(), os.getegid()

    def action() -> None:
        if uid != 0:
            _unshare(CLONE_NEWUSER)
            _map_root(uid, gid)
        _unshare(CLONE_NEWNET)
        from ringfence.linux import namespaces

        namespaces.raise_loopback()

    error = _in_child(action)
    if error is None:
        return Finding("network namespace", OK, "made, its private loopback raised")
    return Finding("network namespace", MISSING, f"refused: {error.strerror}", "allow user namespaces first; some containers refuse the loopback (CAP_NET_ADMIN)")


def _overlay() -> Finding:
    uid, gid = os.geteuid(), os.getegid()

    def action() -> None:
        from ringfence.linux import mounts

        _unshare(CLONE_NEWUSER | CLONE_NEWNS)
        _map_root(uid, gid)
        mounts.make_private()
        mounts.attach(mounts.new_filesystem("tmpfs", size="1m"), "/tmp")
        for name in ("lower", "upper", "work", "merged"):
            os.mkdir("/tmp/" + name)
        overlay = mounts.new_filesystem("overlay", lowerdir="/tmp/lower", upperdir="/tmp/upper", workdir="/tmp/work", userxattr=True)
        mounts.attach(overlay, "/tmp/merged")
        with open("/tmp/merged/file", "w") as file:
            file.write("x")

    error = _in_child(action)
    if error is None:
        return Finding("overlay", OK, "mounted in a user namespace on a sized tmpfs, and written to")
    return Finding("overlay", MISSING, f"refused in a user namespace: {error.strerror}", "use Linux 5.11 or newer with CONFIG_OVERLAY_FS (sudo modprobe overlay)")


def _seccomp() -> Finding:
    def action() -> None:
        from ringfence.linux import filters, seccomp
        from ringfence.linux.syscalls import prctl

        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        seccomp.install(filters.guest_filter(single_uid=os.geteuid() != 0))
        try:
            os.open("/", os.O_RDONLY)
            _unshare(CLONE_NEWUSER)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                return
            raise
        raise OSError(errno.EINVAL, "the filter let unshare through")

    error = _in_child(action)
    if error is None:
        return Finding("seccomp", OK, "the sandbox's filter was installed, and refused a forbidden call")
    return Finding("seccomp", MISSING, f"{error.strerror}", "the kernel needs CONFIG_SECCOMP_FILTER")


def _landlock() -> Finding:
    from ringfence.linux import landlock

    abi = landlock.abi()
    if abi >= 6:
        return Finding("landlock", OK, f"ABI {abi}: signals and abstract sockets stay inside")
    why = f"ABI {abi}" if abi else "not available"
    return Finding("landlock", WEAKER, f"{why}; scopes need ABI 6: a second wall is missing, the namespaces hold alone",
                   "Linux 6.12 or newer with `landlock` in the kernel's lsm= list")  # fmt: skip


def _cgroups() -> tuple[Any, dict[str, Any]]:
    from ringfence.linux import cgroups

    hierarchy = cgroups.detect()
    return hierarchy, cgroups.report(hierarchy, memory=1, pids=1, cpus=1)


def _limit(name: str) -> Finding:
    strength, why, hint = _cgroups()[1][name]
    if strength == "watched":
        why += (". Not seen: socket and pipe buffers, and shared pages that no page table refers to, so it stops accidents "
                "and is no wall against code that hides memory on purpose; only a control group is")  # fmt: skip
    return Finding(f"limit {name}", OK if strength == "hard" else WEAKER, f"{strength}: {why}", hint)


def _cgroup_memory() -> Finding:
    return _limit("memory")


def _cgroup_pids() -> Finding:
    return _limit("pids")


def _cgroup_cpus() -> Finding:
    return _limit("cpus")


def _freezer() -> Finding:
    from ringfence.linux import cgroups

    hierarchy = _cgroups()[0]
    if hierarchy.trees:
        return Finding("cgroups", OK, f"{hierarchy.kind}; groups can be made")
    # systemd delegates to users in a pure v2 hierarchy only; elsewhere its command would change nothing.
    fix = cgroups.HYBRID_REMEDY
    if hierarchy.kind == "v2":
        fix = hierarchy.places["memory"].hint or "run as root, or below a group that belongs to this user"
    return Finding("cgroups", WEAKER, f"{hierarchy.kind}; this user may make none, so no pause and no hard memory limit", fix)


def _nftables() -> Finding:
    if shutil.which("nft"):
        done = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Finding("nftables", OK, "rules can be read")
        return Finding("nftables", UNUSED, (done.stderr.strip().splitlines() or ["refused"])[0])
    return Finding("nftables", UNUSED, "the program nft is not installed; nothing needs it yet")


def _kvm() -> Finding:
    if not os.path.exists("/dev/kvm"):
        return Finding("kvm", UNUSED, "no /dev/kvm; no engine needs it yet", "enable virtualisation in the firmware, or nested virtualisation in the hypervisor")
    import fcntl

    try:
        with open("/dev/kvm", "rb+", buffering=0) as device:
            version = fcntl.ioctl(device, 0xAE00, 0)  # KVM_GET_API_VERSION
            machine = fcntl.ioctl(device, 0xAE01, 0)  # KVM_CREATE_VM
        try:
            processor = fcntl.ioctl(machine, 0xAE41, 0)  # KVM_CREATE_VCPU
            os.close(processor)
        finally:
            os.close(machine)
    except OSError as error:
        # No advice to join the group kvm: nothing here needs it, and it would be a right given for nothing.
        return Finding("kvm", UNUSED, f"/dev/kvm does not work: {error.strerror}; no engine needs it yet")
    return Finding("kvm", OK, f"a virtual machine and a processor were made (API {version}); no engine needs it yet")


def _cache() -> Finding:
    from ringfence.errors import RingfenceError
    from ringfence.node import cache

    try:
        directory = cache.cache_directory()
    except RingfenceError as error:
        return Finding("cache", MISSING, error.message, error.hint)
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    if free < 1 << 30:
        return Finding("cache", WEAKER, f"{directory} has {free >> 20} MiB free", "the data template needs some 300 MiB once")
    return Finding("cache", OK, directory)


def _real_start() -> Finding:
    import time

    from ringfence.cli import once
    from ringfence.cli.arguments import parse

    request = parse("run", ["--json", "-c", "print('alive')"])
    begun = time.monotonic()
    outcome = once.run_quietly(request)
    took = (time.monotonic() - begun) * 1000
    if outcome["exit_code"] == 0 and outcome["stdout"] == "alive\n":
        return Finding("a sandbox", OK, f"started, ran Python, and was gone again after {took:.0f} ms")
    error = outcome.get("error") or {}
    return Finding("a sandbox", MISSING, error.get("message") or f"exit code {outcome['exit_code']}", error.get("hint", ""))


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
