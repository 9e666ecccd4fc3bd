"""What a launcher does to, and reads of, a sandbox that runs: new limits, and what it uses.

Guards a running sandbox against half a change (all that was asked for takes effect or nothing), against being
killed by a smaller limit (one below what is in use is refused), and its owner against a promise that does not hold:
what this machine cannot enforce is refused with the primitive and the remedy. All numbers are the kernel's; paths
that lead through the sandbox are opened by descriptor, one component at a time, following nothing.

The launcher imports it when it is first asked for. Standard library and ringfence.linux only.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from ringfence.engines.namespace.spawn import SpawnError
from ringfence.linux import cgroups, memory_watch
from ringfence.linux.syscalls import NUMBER, call

FREEZE_PATIENCE = 0.5  # seconds a sandbox may take to stand still while its limits change
PASSES = 20  # looks for processes that were forked while limits changed, where nothing can be frozen
_TICKS = os.sysconf("SC_CLK_TCK")


class Refused(SpawnError):
    """A change that cannot be. `.primitive` names what is in the way, `.hint` says what to do."""


def resize(cell: Any, wanted: dict[str, Any], report: dict[str, Any], agent_tasks: int) -> None:
    """Put the limits in `wanted` (memory, cpus, pids) in force in a running sandbox. Raises Refused, OSError.

    `cell.limits` says what is in force afterwards.
    """
    wanted = {name: value for name, value in wanted.items() if value != cell.limits[name]}
    if not wanted:
        return
    for name, value in wanted.items():
        strength, why, hint = report[name]
        if strength == "none":
            raise Refused(f"limit {name}", f"{name} is not limited here: {why}", hint)
        _check_machine(cell, name, value)
    if not {"memory", "pids"} & wanted.keys():
        _apply(cell, wanted, report, agent_tasks)
        return
    frozen = _freeze(cell)
    try:
        _check_use(cell, wanted, report, agent_tasks)
        _apply(cell, wanted, report, agent_tasks)
    finally:
        if frozen:
            cell.group.thaw()


def _freeze(cell: Any) -> bool:
    """Stop the sandbox for the change; False where it stands already or nothing here can stop it."""
    if cell.frozen:
        return False
    try:
        if cell.group.freeze(FREEZE_PATIENCE):
            return True
    except cgroups.CgroupError:
        return False  # no freezer here
    cell.group.thaw(0)
    raise Refused("cgroup freezer", "the sandbox could not be stopped for the change", "try again in a moment")


def _check_machine(cell: Any, name: str, value: float) -> None:
    """Refuse what this machine, or a group around us, does not have."""
    bound: float | None = cell.group.bound_above(name)
    has = {"memory": _total_memory(), "cpus": os.cpu_count(), "pids": _number("/proc/sys/kernel/pid_max")}[name]
    if has is not None and (bound is None or has < bound):
        bound = has
    if bound is not None and value > bound and value > cell.limits[name]:
        raise Refused(f"limit {name}", f"{_shown(name, value)} were asked for and this machine lends {_shown(name, bound)}", "ask for less")


def _shown(name: str, value: float) -> str:
    return f"{int(value) >> 20} MiB" if name == "memory" else f"{value:g} {'processors' if name == 'cpus' else 'processes'}"


def _check_use(cell: Any, wanted: dict[str, Any], report: dict[str, Any], agent_tasks: int) -> None:
    if "memory" in wanted:
        memory = wanted["memory"]
        if report["memory"][0] == "hard":
            used = cell.group.anonymous() or 0
        else:
            used = max(cell.watch.last.bytes if cell.watch else 0, *(size - cell.zygote.data_size for size in _data_sizes(cell)))
        if used > memory:
            raise Refused("limit memory", f"processes hold {used >> 20} MiB and limits.memory would be {memory >> 20} MiB",
                          "end some of them first, or ask for more")  # fmt: skip
    if "pids" in wanted:
        running = cell.group.stats()["pids"]
        running = len(processes(cell)) if running is None else running
        if running > wanted["pids"] + agent_tasks:
            raise Refused("limit pids", f"{running} processes run and limits.pids would be {wanted['pids']}", "end some of them first")


def _apply(cell: Any, wanted: dict[str, Any], report: dict[str, Any], agent_tasks: int) -> None:
    new = {**cell.limits, **wanted}
    grouped = {}
    if "memory" in wanted and report["memory"][0] == "hard":
        grouped["memory"] = new["memory"] + new["disk"] + new["tmp"]
    if "cpus" in wanted:
        grouped["cpus"] = new["cpus"]
    if "pids" in wanted and cell.group.stats()["pids"] is not None:
        grouped["pids"] = new["pids"] + agent_tasks
    old = cell.group.limits()
    try:
        if grouped:
            cell.group.resize(**grouped)
    except cgroups.CgroupError as error:
        raise Refused("cgroup", error.message, error.hint) from error
    try:
        if "pids" in wanted:
            _set_everywhere(cell, resource.RLIMIT_NPROC, cell.limits["pids"], new["pids"])
    except PermissionError as error:
        cell.group.resize(**{name: old[name] for name in grouped})
        raise Refused("limit pids", "RLIMIT_NPROC cannot be raised for processes that run: CAP_SYS_RESOURCE is missing",
                      "start a sandbox with a larger limits.pids, or run as root") from error  # fmt: skip
    if "memory" in wanted and report["memory"][0] == "watched":
        base = cell.zygote.data_size
        try:
            _set_everywhere(cell, resource.RLIMIT_DATA, cell.limits["memory"] + base, new["memory"] + base)
        except PermissionError:
            pass  # each process stays at its old limit, which is stricter; evidence.py reads and tells it
        if cell.watch is not None:
            cell.watch.limit = new["memory"]
    cell.limits = new


def _set_everywhere(cell: Any, number: int, old: int, new: int) -> None:
    """One resource limit of every process of the sandbox, process 1 first. A process's own, lower limit stays.

    Raises PermissionError, with nothing changed, where the limit cannot be raised.
    """
    _set(cell, cell.pid, number, old, new)
    for _ in range(PASSES):
        changed = sum(_set(cell, pid, number, old, new) for pid in processes(cell))
        if not changed:
            return


def _set(cell: Any, pid: int, number: int, old: int, new: int) -> bool:
    """True when the limit of process `pid` had to be changed."""
    try:
        pidfd = call(NUMBER["pidfd_open"], pid, 0, what="pidfd_open")
    except OSError:
        return False
    try:
        # The number was a process of the sandbox when it was listed; that it still is, the held pidfd says.
        if pid != cell.pid and os.readlink(f"/proc/{pid}/ns/pid") != os.readlink(f"/proc/{cell.pid}/ns/pid"):
            return False
        soft, hard = resource.prlimit(pid, number)
        if hard == new or (hard != old and 0 <= hard < new):
            return False
        resource.prlimit(pid, number, (new if soft == hard or soft < 0 else min(soft, new), new))
        return True
    except PermissionError:
        raise
    except OSError:
        return False  # gone meanwhile
    finally:
        os.close(pidfd)


def processes(cell: Any) -> set[int]:
    """Pids of everything in the sandbox as this process numbers them."""
    found: set[int] = cell.group.pids() - {0}
    if found:
        return found
    found, waiting = set(), [cell.pid]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    waiting += [int(word) for word in file.read().split()]
        except OSError:
            continue  # gone
    return found


def _data_sizes(cell: Any) -> list[int]:
    sizes = [0]
    for pid in processes(cell):
        try:
            with open(f"/proc/{pid}/status") as status:
                sizes += [int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:")]
        except OSError:
            continue
    return sizes


def measure(cell: Any, stats: dict[str, Any]) -> dict[str, Any]:
    """`stats` completed: processor time and processes where no group counts them, and bytes of files."""
    found = {**stats, **_files(cell.pid), "pid": cell.pid}
    if cell.watch is not None and (found["cpu_seconds"] is None or found["pids"] is None):
        seconds, tasks = _times(cell.watch.proc)
        if found["cpu_seconds"] is None:
            found["cpu_seconds"] = seconds
        if found["pids"] is None:
            found["pids"] = tasks
    return found


def _files(pid: int) -> dict[str, Any]:
    """Bytes used of the disk (the overlay's upper, which overlayfs answers statfs(2) with) and of /tmp."""
    found: dict[str, Any] = {"disk": None, "tmp": None}
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        root = os.open(f"/proc/{pid}/root/.", flags)
    except OSError:
        return found
    try:
        found["disk"] = _used(root)
        below = os.open("tmp", flags, dir_fd=root)
        try:
            if os.fstat(below).st_dev != os.fstat(root).st_dev:
                found["tmp"] = _used(below)
        finally:
            os.close(below)
    except OSError:
        pass
    finally:
        os.close(root)
    return found


def _used(descriptor: int) -> int:
    numbers = os.fstatvfs(descriptor)
    return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize


def _times(proc: int) -> tuple[float, int]:
    """(processor seconds, tasks) of a process table: what runs, and what was waited for (proc_pid_stat(5))."""
    ticks = tasks = 0
    for name in os.listdir(proc):
        if name.isdigit():
            try:
                fields = memory_watch.read_at(proc, name + "/stat").rpartition(b")")[2].split()
            except OSError:
                continue
            ticks += sum(int(word) for word in fields[11:15])
            tasks += int(fields[17])
    return ticks / _TICKS, tasks


def _total_memory() -> int | None:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
