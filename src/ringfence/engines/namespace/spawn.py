"""Start a zygote: outer user namespace, template root, then exec from inside it.

The child goes through here between the launcher's fork and the zygote's exec. As root the host's trees are
opened first, with privilege and by descriptor, and privilege over the machine ends with the outer user
namespace; as an ordinary user the outer namespace comes first, since only inside it may the user mount.
What is executed runs from neutral paths of the template root, so no path of the host is in its memory.

Standard library and ringfence.linux only.
"""

from __future__ import annotations

import os
import time

from ringfence.engines.namespace.identifiers import IdPlan
from ringfence.engines.namespace.root import TemplateRoot
from ringfence.linux import mounts, namespaces
from ringfence.linux.channels import receive_descriptors, send_descriptors
from ringfence.linux.json_text import dumps, loads
from ringfence.linux.syscalls import close_from, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import socket
    from typing import NamedTuple
else:
    import _socket as socket

    from ringfence.linux.records import NamedTuple

PR_SET_PDEATHSIG = 1
PATIENCE = 20.0  # seconds a zygote may take from fork to exec before it counts as stuck

HINTS = {
    "user namespace": "unprivileged user namespaces are switched off here: set sysctl "
    "user.max_user_namespaces (and kernel.unprivileged_userns_clone or "
    "kernel.apparmor_restrict_unprivileged_userns on Debian and Ubuntu), or run as root",
    "id map": "install the package `uidmap` and grant the user a range in /etc/subuid and /etc/subgid",
    "ids for root": "install the package `uidmap` and grant the user at least 65536 ids in /etc/subuid and "
    "/etc/subgid (`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 NAME`), or leave `root` out of "
    "the policy",
    "proc": "/proc is masked here, as in a container: start the container with an unmasked /proc "
    "(docker run --security-opt systempaths=unconfined) or use another engine",
    "host directory": "the kernel refused to lend this directory: overlayfs cannot stand on every file system (another "
    "overlay, some FUSE and network file systems); copy it to a local one, or copy files in with `sandbox.files`",
    "mounts": "the kernel refused a mount: Linux 5.12 or later with overlayfs in user namespaces is needed",
}


class SpawnError(Exception):
    """A primitive was missing: `.primitive` names it, `.hint` says what to do."""

    def __init__(self, primitive: str, message: str, hint: str = ""):
        super().__init__(message)
        self.primitive = primitive
        self.hint = hint or HINTS.get(primitive, "run `ringfence doctor`")


class Spawned(NamedTuple):
    """A started zygote: its pid and pidfd, and the launcher's end of its control socket."""

    pid: int
    pidfd: int
    control: socket.socket


def spawn(
    plan: IdPlan,
    sources: dict[str, str],
    masks: list[str],
    command: list[str],
    environment: dict[str, str],
    host_name: str,
    root: bool = False,
) -> Spawned:
    """Fork, confine and execute a zygote, whose sandboxes have a `root` if asked. Raises SpawnError naming the primitive that was refused."""
    control, guest_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Streams travel over this socket in bursts; the default buffer holds a handful of requests.
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sync, child_sync = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid, pidfd = namespaces.fork_into(0)
    if pid == 0:
        _child(plan, TemplateRoot(sources, masks, command[0], root), command, environment, host_name, guest_control, child_sync)
    guest_control.close()
    child_sync.close()
    os.close(pidfd)
    try:
        return _follow(plan, pid, sync, control)
    except BaseException:
        control.close()
        raise
    finally:
        sync.close()
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass


def _follow(plan: IdPlan, pid: int, sync: socket.socket, control: socket.socket) -> Spawned:
    """The launcher's side: write the id map when asked, take the zygote's pidfd, wait for its exec."""
    sync.settimeout(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    zygote_pid, zygote_pidfd = -1, -1
    try:
        while time.monotonic() < deadline:
            message, descriptors = receive_descriptors(sync, 8192, 1)
            if not message:
                if zygote_pidfd < 0:
                    raise SpawnError("zygote", "the template's process ended before it was started")
                spawned = Spawned(zygote_pid, zygote_pidfd, control)
                zygote_pidfd = -1
                return spawned
            if message == b"u":
                try:
                    write_outer_maps(plan, pid)
                except OSError as error:
                    raise SpawnError("id map", str(error)) from error
                sync.send(b"m")
            elif message[:1] == b"z":
                zygote_pid, zygote_pidfd = int(message[1:]), descriptors[0]
            elif message[:1] == b"e":
                problem = loads(message[1:])
                raise SpawnError(problem["step"], problem["message"])
        raise SpawnError("zygote", "the template's process did not start in time")
    except TimeoutError:
        raise SpawnError("zygote", f"the template's process did not start within {PATIENCE:.0f} s") from None
    finally:
        if zygote_pidfd >= 0:
            os.kill(zygote_pid, 9)
            os.waitpid(zygote_pid, 0)
            os.close(zygote_pidfd)


def write_outer_maps(plan: IdPlan, pid: int) -> None:
    """Map the outer user namespace of `pid`, through newuidmap(1) where the ids are subordinate ones."""
    if plan.kind != "subids":
        namespaces.write_id_maps(f"/proc/{pid}", list(plan.uid_map), list(plan.gid_map), keep_groups=not plan.single)
        return
    for program, table in (("/usr/bin/newuidmap", plan.uid_map), ("/usr/bin/newgidmap", plan.gid_map)):
        arguments = [program, str(pid)] + [str(number) for entry in table for number in entry]
        helper = os.posix_spawn(program, arguments, {"PATH": "/usr/bin:/bin"})
        status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
        if status != 0:
            raise OSError(1, f"{program} ended with {status}")


def _child(
    plan: IdPlan, root: TemplateRoot, command: list[str], environment: dict[str, str], host_name: str,
    control: socket.socket, sync: socket.socket,
) -> None:  # fmt: skip
    step = "descriptors"
    try:
        _arrange_descriptors(control, sync)
        control, sync = None, socket.socket(fileno=4)  # type: ignore[assignment]
        if plan.kind == "ranges":
            step = "mounts"
            namespaces.unshare(namespaces.CLONE_NEWNS)
            mounts.make_private()
            root.open_sources()
        # Of what the machine grants this user, all sandboxes of a template together get three eighths: the user's
        # own programs, and another template, go on working whatever they do.
        counters = {name: limit * 3 // 8 for name, limit in namespaces.counters().items()}
        step = "user namespace"
        namespaces.unshare(namespaces.CLONE_NEWUSER)
        step = "id map"
        sync.send(b"u")
        if sync.recv(1) != b"m":
            os._exit(70)
        if not plan.single:
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        step = "namespaces"
        namespaces.unshare(
            namespaces.CLONE_NEWNS | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNET
        )
        step = "mounts"
        mounts.make_private()
        if plan.kind != "ranges":
            root.open_sources()
        place = root.build()
        step = "process namespace"
        namespaces.unshare(namespaces.CLONE_NEWPID)
        # With a copy of the mounts: the zygote pivots its own root, and this process still sees the host's /etc.
        pid, pidfd = namespaces.fork_into(namespaces.CLONE_PARENT | namespaces.CLONE_NEWNS)
        if pid == 0:
            step = "proc"
            _become_zygote(place, command, environment, host_name, counters)
        send_descriptors(sync, b"z" + str(_outer_pid(pidfd)).encode(), [pidfd])
        # The interpreter comes up meanwhile; it gets its first message after this process has ended.
        step = "mounts"
        root.fill_etc(place, host_name)
        os._exit(0)
    except OSError as error:
        _complain(sync, step, error)
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the launcher's loop
        _complain(sync, step, error)
    finally:
        os._exit(70)


def _complain(sync: socket.socket, step: str, error: BaseException) -> None:
    try:
        sync.send(b"e" + dumps({"step": step, "message": str(error)[:2000]}).encode())
    except OSError:
        pass


def _arrange_descriptors(control: socket.socket, sync: socket.socket) -> None:
    """Descriptors 0-2 on /dev/null (2 stays in debug mode), control at 3, sync at 4, nothing else."""
    high = os.dup(control.fileno()), os.dup(sync.fileno())
    safe = []
    for descriptor in high:
        while descriptor < 10:
            descriptor = os.dup(descriptor)
        safe.append(descriptor)
    os.dup2(safe[0], 3, inheritable=True)
    os.dup2(safe[1], 4, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1) if os.environ.get("RINGFENCE_DEBUG") else (0, 1, 2):
        os.dup2(null, number, inheritable=True)
    close_from([0, 1, 2, 3, 4])


def _outer_pid(pidfd: int) -> int:
    """The pid behind `pidfd` as this process's own pid namespace numbers it."""
    with open(f"/proc/self/fdinfo/{pidfd}") as information:
        for line in information:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    raise OSError(3, "no pid behind the descriptor")


def _become_zygote(
    place: str, command: list[str], environment: dict[str, str], host_name: str, counters: dict[str, int]
) -> None:
    prctl(PR_SET_PDEATHSIG, 9)
    attributes = mounts.NO_SET_ID | mounts.NO_DEVICES | mounts.NO_EXECUTION
    mounts.attach(mounts.new_filesystem("proc", attributes), place + "/proc")
    mounts.change_root(place)
    sysctls = os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    namespaces.limit_counters(sysctls, counters)
    os.close(sysctls)
    namespaces.set_host_name(host_name)
    os.setsid()
    os.umask(0o022)
    os.execve(command[0], command, environment)
