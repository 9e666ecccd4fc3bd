"""The launcher: the one process of a node that does privileged kernel work.

It is started by exec, has one thread, imports the standard library and ringfence.linux only, speaks the
closed grammar of grammar.py with its owner, and never reads a byte that comes from a guest: streams pass
through as descriptors. It owns what must not be lost: cgroups, id ranges, zygotes. When its owner ends (the
socket closes, or the owner's pidfd fires although a forked worker still holds the socket), it kills all it
started, removes every cgroup it made, and ends; if it is killed itself, the kernel kills its zygotes
(PR_SET_PDEATHSIG) and with them their pid namespaces.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import time

from ringfence.engines.namespace import grammar, identifiers, spawn
from ringfence.linux import cgroups, memory_watch, resource_limits
from ringfence.linux.channels import receive_descriptors, receive_into, send_descriptors
from ringfence.linux.json_text import dumps, loads
from ringfence.linux.syscalls import NUMBER, call, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    import socket
    from typing import Any
else:
    import _signal as signal
    import _socket as socket

PR_SET_NAME = 15
PR_SET_DUMPABLE = 4
_NEVER = float("inf")
WATCH_INTERVAL = 0.05  # seconds between two looks at the memory of sandboxes without a memory cgroup
INODES_PER_MIB = 256  # inodes a sized tmpfs grants per MiB, so that empty files cannot eat kernel memory
SUSPICION_INTERVAL = 0.005  # the second look at a sandbox that was over once
WATCH_TRIES = 20  # looks that may fail while a sandbox is being made, before it counts as not held
AGENT_TASKS = 4  # processes of the agent itself (pid 1 and file workers) on top of the policy's pids
_USERS = {
    "user": {"uid": 1000, "gid": 1000, "home": "/home/user", "shell": "/bin/bash"},
    "root": {"uid": 0, "gid": 0, "home": "/root", "shell": "/bin/bash"},
}
SHARED_MEMORY = 64 << 20  # bytes of /dev/shm; part of the `tmp` limit's order of magnitude


class Zygote:
    """A running template and the id range its sandboxes live in."""

    def __init__(self, name: str, plan: identifiers.IdPlan, spawned: spawn.Spawned, single: bool):
        self.name = name
        self.plan = plan
        self.control = spawned.control
        self.pid = spawned.pid
        self.pidfd = spawned.pidfd
        self.single = single
        self.ready = False
        self.facts: dict[str, Any] = {}
        self.free: list[int] = []
        self.used: set[int] = set()
        self.waiting: list[int] = []
        self.user_namespace = ""
        self.data_size = 0  # bytes a fork inherits as RLIMIT_DATA counts them
        self.kernel = False
        self.root = False  # whether its sandboxes have one
        self.moved: list[str] = []


class Cell:
    """A sandbox as the launcher knows it."""

    def __init__(self, id: str, zygote: Zygote, slot: int, group: Any, limits: dict[str, Any]):
        self.id = id
        self.zygote = zygote
        self.slot = slot
        self.group = group
        self.limits = limits
        self.pidfd = -1
        self.pid = 0
        self.reason = ""
        self.failure: dict[str, Any] | None = None
        self.latest = self.deadline = time.monotonic() + limits["max_age"]
        self.waiters: list[int] = []
        self.watch: memory_watch.MemoryWatch | None = None
        self.watched_kills = 0
        self.watch_failures = 0
        self.frozen = False
        self.lent: list[dict[str, Any]] = []
        self.upper = -1  # of an overlay workspace: where its changes are
        self.capture: Capture | None = None

    def thaw(self) -> None:
        """A frozen task on cgroup v1 dies only after it runs again."""
        if self.frozen:
            self.frozen = False
            try:
                self.group.thaw(0)
            except OSError:
                pass


class Capture:
    """A look at a workspace that is under way: who asked, and how the sandbox is kept still."""

    def __init__(self, number: int, how: str, thaw: bool):
        self.number = number
        self.how = how
        self.thaw = thaw


class Launcher:
    """The event loop: requests, zygotes, deaths, deadlines."""

    def __init__(self, control: socket.socket):
        self.control = control
        self.epoll = select.epoll()
        self.epoll.register(control.fileno(), select.EPOLLIN)
        self.owner = -1
        self.buffer = memoryview(bytearray(grammar.MAXIMUM_REQUEST + 1))
        self.zygotes: dict[str, Zygote] = {}
        self.cells: dict[str, Cell] = {}
        self.by_descriptor: dict[int, Any] = {}
        self.environment: dict[str, str] = {}
        self.identifiers = identifiers.Identifiers()
        self.pool: Any = None
        self.dying_groups: list[Any] = []
        self.zygote_groups: list[Any] = []
        self.closing = False
        self.spares = 0
        self.refill_due = False
        self.sweep_due = False
        self.next_watch = 0.0

    def _detect(self, owner: set[int]) -> None:
        # Only the owner and this process may be moved to a leaf of a delegated group; see linux/cgroups.py.
        self.hierarchy = cgroups.detect(may_move={os.getpid(), *owner})
        self.report = cgroups.report(self.hierarchy, memory=1, pids=1, cpus=1)

    # The loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        gc.enable()  # switched off while modules were loaded: see starting.py
        try:
            while not self.closing:
                for descriptor, _ in self.epoll.poll(self._patience()):
                    self._event(descriptor)
                    if self.closing:
                        break
                else:
                    self._chores()
        finally:
            self._shut_down()

    def _patience(self) -> float:
        if self.refill_due or self.dying_groups or self.sweep_due:
            return 0.002
        due = min((cell.deadline for cell in self.cells.values()), default=_NEVER)
        if self._watched():
            due = min(due, self.next_watch)
        return -1 if due == _NEVER else min(max(0.0, due - time.monotonic()), 3600.0)

    def _watched(self) -> bool:
        return bool(self.cells) and not self._hard("memory")

    def _hard(self, limit: str) -> bool:
        return self.report[limit][0] == "hard"

    def _event(self, descriptor: int) -> None:
        if descriptor == self.control.fileno():
            self._request()
        elif descriptor == self.owner:
            self.closing = True
        else:
            subject = self.by_descriptor.get(descriptor)
            if isinstance(subject, Cell):
                self._cell_gone(subject)
            elif isinstance(subject, Zygote):
                if descriptor == subject.pidfd:
                    self._zygote_gone(subject)
                else:
                    self._zygote_says(subject)

    def _chores(self) -> None:
        now = time.monotonic()
        for cell in [cell for cell in self.cells.values() if cell.deadline <= now]:
            self._kill(cell, "max-age")
        if self._watched() and now >= self.next_watch:
            self.next_watch = now + WATCH_INTERVAL
            self._watch_memory()
        self.dying_groups = [group for group in self.dying_groups if not group.remove()]
        if self.refill_due and self.pool is not None:
            self.refill_due = self.pool.refill(1) > 0
        elif self.sweep_due:
            self.sweep_due = False
            cgroups.sweep(self.hierarchy, timeout=0.2)

    # Requests ------------------------------------------------------------------------------------------

    def _request(self) -> None:
        try:
            raw, descriptors = receive_into(self.control, self.buffer, 4 + grammar.MAXIMUM_DIRECTORIES)
        except ConnectionResetError:
            raw, descriptors = b"", []
        if not raw:
            self.closing = True
            return
        number = -1
        try:
            request = grammar.parse(raw)
            number = request["number"]
            answer = getattr(self, "_do_" + request["do"])(request, descriptors)
            if answer is not None:
                self._say({"re": number, "ok": True, **answer})
        except grammar.GrammarError as error:
            self._say({"re": number, "ok": False, "primitive": "request", "message": str(error), "hint": ""})
        except spawn.SpawnError as error:
            self._say(
                {"re": number, "ok": False, "primitive": error.primitive, "message": str(error), "hint": error.hint}
            )
        except identifiers.NoRangeError as error:
            self._say({"re": number, "ok": False, "primitive": "id range", "message": str(error),
                       "hint": "kill sandboxes that are no longer needed"})  # fmt: skip
        except OSError as error:
            self._say({"re": number, "ok": False, "primitive": "kernel", "message": str(error),
                       "hint": getattr(error, "hint", "")})  # fmt: skip
        finally:
            for descriptor in descriptors:
                try:
                    os.close(descriptor)
                except OSError:
                    pass

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self.control.send(dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.closing = True

    def _do_configure(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self.owner = call(NUMBER["pidfd_open"], request["owner"], 0, what="pidfd_open")
        os.set_inheritable(self.owner, False)
        self.epoll.register(self.owner, select.EPOLLIN)
        self.environment = request["pass_environment"]
        if os.getppid() != request["owner"]:
            self.closing = True  # the owner ended before its pidfd was held
        self._detect({request["owner"]})
        self.spares = request["spares"]
        # Groups that earlier lives left go once, when there is nothing to do; a one-shot owner has no such moment.
        self.sweep_due = bool(self.hierarchy.trees) and self.spares > 0
        self.pool = cgroups.GroupPool(self.hierarchy, size=self.spares)
        self.refill_due = bool(self.hierarchy.trees) and self.spares > 0
        return {"limits": self.report, "uid": os.geteuid()}

    def _do_probe(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if self.pool is None:  # asked before it was configured
            self._detect(set())
        return {"limits": self.report, "uid": os.geteuid()}

    def _do_template(self, request: dict[str, Any], descriptors: list[int]) -> None:
        zygote = self.zygotes.get(request["name"])
        if zygote is None:
            zygote = self._start_zygote(request)
        if zygote.ready:
            self._say({"re": request["number"], "ok": True, **zygote.facts})
        else:
            zygote.waiting.append(request["number"])

    def _start_zygote(self, request: dict[str, Any]) -> Zygote:
        plan = self.identifiers.plan(wide=request["root"])
        if request["root"] and (plan.single or not plan.slots):
            self.identifiers.release(plan)
            raise spawn.SpawnError("ids for root", "the policy asks for root inside, which takes 2048 ids, and this "
                                   "user has " + ("one" if plan.single else "too few"))  # fmt: skip
        environment = {
            "PATH": "/opt/env/bin:/opt/python/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/nonexistent",
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            **self.environment,
        }
        if request["library"]:
            environment["LD_LIBRARY_PATH"] = request["library"]
        # Collections while modules load find nothing and take a fifth of the time; the zygote turns them on again.
        code = "import gc; gc.disable(); import sys; sys.path.append('/opt/ringfence'); from ringfence.guest.zygote import main; main(3)"
        flags = ["-I", "-S"] if request["isolated"] else ["-I"]
        try:
            spawned = spawn.spawn(plan, request["sources"], request["masks"], [request["python"], *flags, "-c", code], environment, "sandbox", request["root"])
        except BaseException:
            self.identifiers.release(plan)
            raise
        zygote = Zygote(request["name"], plan, spawned, plan.single)
        zygote.root = request["root"]
        zygote.kernel = request["modules"] is not None
        zygote.moved = ["usr", "opt", "dev"] + [
            name for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
            if os.path.isdir("/" + name) and not os.path.islink("/" + name)
        ]  # fmt: skip
        zygote.control.send(
            dumps(
                {"modules": request["modules"], "single": plan.single, "networks": self.spares,
                 "watched_memory": not self._hard("memory"), "kernel": zygote.kernel, "root": zygote.root}
            ).encode()
        )  # fmt: skip
        group = self.pool.zygote_group(plan.uid_map[0][1])
        if group is not None:
            group.add(spawned.pid)
            self.zygote_groups.append(group)
        self.zygotes[zygote.name] = zygote
        for descriptor in (zygote.control.fileno(), zygote.pidfd):
            self.by_descriptor[descriptor] = zygote
            self.epoll.register(descriptor, select.EPOLLIN)
        return zygote

    def _do_create(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        zygote = self.zygotes.get(request["template"])
        if zygote is None:
            self._say_missing(request)
            return None
        if request["id"] in self.cells or len(descriptors) != 1 + len(request["directories"]):
            raise grammar.GrammarError("create needs a fresh id, one descriptor, and one for each directory")
        limits = request["limits"]
        if limits["required"] == "hard":
            for name in ("memory", "cpus", "pids"):
                strength, why, hint = self.report[name]
                if strength != "hard":
                    self._say(
                        {"re": request["number"], "ok": False, "primitive": f"cgroup limit {name}", "hint": hint,
                         "message": f"the policy requires hard limits and {name} is {strength} here: {why}"}
                    )  # fmt: skip
                    return None
        slot = self.identifiers.take_slot(zygote.plan, zygote.free, zygote.used)
        lent: list[dict[str, Any]] = []
        mounts: list[int] = []
        try:
            if request["directories"]:
                lent, mounts = self._lend(request, descriptors[1:], zygote, slot)
            usable = self.hierarchy.usable
            group = self.pool.take(
                # tmpfs pages are charged to the group, so what files may take comes on top of the processes'.
                memory := limits["memory"] + limits["disk"] + limits["tmp"] if usable("memory") else None,
                pids := limits["pids"] + AGENT_TASKS if usable("pids") else None,
                cpus := limits["cpus"] if usable("cpu") else None,
            )
            # The next sandbox will most likely want the same: groups made ahead get these limits ahead.
            self.pool.limits = (memory, pids, cpus)
        except (OSError, spawn.SpawnError):
            descriptors += mounts
            self.identifiers.give_slot(zygote.plan, slot, zygote.free)
            raise
        descriptors += mounts  # closed with the others when the request is done
        self.refill_due = bool(self.hierarchy.trees) and self.spares > 0
        cell = Cell(request["id"], zygote, slot, group, limits)
        cell.lent = lent
        self.cells[cell.id] = cell
        born = group.clone_fd()
        message = dumps({**self._zygote_request(request, cell), "born": born is not None}).encode()
        if born is not None:
            group.permit(zygote.plan.uid_map[0][1])
        try:
            send_descriptors(
                zygote.control, message,
                [descriptors[0], *([born] if born is not None else []), *group.procs_fds(v2=False), *mounts],
            )  # fmt: skip
        except OSError as error:
            self._forget(cell)
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise OSError(error.errno, f"the zygote does not answer: {error.strerror}") from error
            # It died a moment ago and its pidfd was not looked at yet: the next request must get another one.
            _signal(zygote.pidfd, signal.SIGKILL)
            if self.zygotes.get(zygote.name) is zygote:
                del self.zygotes[zygote.name]
            self._say_missing(request)
            return None
        group.close_fds()
        return {"counters": group.counters()}

    def _lend(
        self, request: dict[str, Any], sources: list[int], zygote: Zygote, slot: int
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """The directories of a request as the zygote is told of them, and their mounts. Raises SpawnError."""
        from ringfence.engines.namespace import lending

        user = identifiers.slot_maps(zygote.plan, slot, lends=True)[2][1]
        lent: list[dict[str, Any]] = []
        made: list[int] = []
        namespace = os.open(f"/proc/{zygote.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for each, source in zip(request["directories"], sources, strict=True):
                path, state = lending.examine(source, self.control, each["place"], each["mode"], each["root_owned"])
                writable = each["mode"] == "rw"
                made.append(lending.lend(source, state, zygote.plan, namespace, user, writable))
                lent.append({"place": each["place"], "mode": each["mode"], "source": path, "protected": each["protected"]})
        except BaseException:
            for descriptor in made:
                os.close(descriptor)
            raise
        finally:
            os.close(namespace)
        return lent, made

    def _say_missing(self, request: dict[str, Any]) -> None:
        """The template's zygote is gone, or was never asked for: the node asks for it and tries again."""
        self._say({"re": request["number"], "ok": False, "primitive": "zygote", "missing": request["template"],
                   "message": f"the interpreter of template {request['template']!r} is gone",
                   "hint": "create the sandbox again; `ringfence doctor` if that fails too"})  # fmt: skip

    def _zygote_request(self, request: dict[str, Any], cell: Cell) -> dict[str, Any]:
        limits, zygote = cell.limits, cell.zygote
        uid_map, gid_map, owner = identifiers.slot_maps(zygote.plan, cell.slot, lends=bool(cell.lent))
        rlimits = resource_limits.for_policy(
            # With root the agent's own processes count as well: its namespace owns the one of user code.
            pids=limits["pids"] + (AGENT_TASKS if zygote.root else 0),
            open_files=limits["open_files"],
            file_size=limits["file_size"],
            memory=limits["memory"],
            memory_mode="hard" if self._hard("memory") else "watched",
            data_baseline=zygote.data_size,
        )
        boot = {
            "users": _USERS if zygote.root else {"user": _USERS["user"]},
            "default_user": "user",
            "single_uid": zygote.single,
            "agent_uid": 1000 if zygote.single else identifiers.AGENT_ID,
            "job_gids": None if zygote.single else [identifiers.FIRST_JOB_GROUP, identifiers.JOB_GROUPS],
            "env": request["environment"],
            "cwd": request["cwd"],
            "template": zygote.name,
            "python": "/opt/env/bin/python3",
            "kernel": zygote.kernel,
            "prefork": request["prefork"] and zygote.kernel,
            "oom_score_adj": 500,
        }
        return {
            "id": cell.id,
            "host_name": request["host_name"],
            "disk": limits["disk"],
            "tmp": limits["tmp"],
            "shm": min(SHARED_MEMORY, limits["tmp"]),
            "inodes": max(1024, limits["disk"] // (1 << 20) * INODES_PER_MIB),
            "moved": zygote.moved,
            "owner": owner,
            "single": zygote.single,
            "agent_id": identifiers.AGENT_ID,
            "uid_map": uid_map,
            "gid_map": gid_map,
            "rlimits": rlimits,
            "lent": [{name: each[name] for name in ("place", "mode", "protected")} for each in cell.lent],
            "boot": boot,
        }

    def _do_kill(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        cell = self.cells.get(request["id"])
        if cell is None:
            return {"gone": True}
        cell.waiters.append(request["number"])
        self._kill(cell, request["reason"])
        return None

    def _do_expire(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Move a sandbox's end, never beyond its `max_age`. Its age counts from when it was handed out."""
        cell = self.cells.get(request["id"])
        if cell is None:
            raise grammar.GrammarError("no such sandbox")
        now = time.monotonic()
        if request["fresh"]:
            cell.latest = now + cell.limits["max_age"]
        cell.deadline = min(now + request["seconds"], cell.latest)
        return {}

    def _do_resize(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        from ringfence.engines.namespace import live

        cell = self._running(request)
        live.resize(
            cell, {name: value for name in ("memory", "cpus", "pids") if (value := request[name]) is not None},
            self.report, AGENT_TASKS,
        )  # fmt: skip
        return {"limits": {name: cell.limits[name] for name in ("memory", "cpus", "pids")}}

    def _do_measure(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        from ringfence.engines.namespace import live

        cell = self._running(request)
        return {"usage": live.measure(cell, self._stats(cell))}

    def _running(self, request: dict[str, Any]) -> Cell:
        cell = self.cells.get(request["id"])
        if cell is None or not cell.pid:
            raise grammar.GrammarError("no such sandbox")
        return cell

    def _do_freeze(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        cell = self._freezable(request)
        if cell.capture is not None and cell.capture.thaw:
            cell.capture.thaw = False  # it stands already, and stays so when its changes have been read
            return {}
        cell.frozen = True
        if not cell.group.freeze():
            cell.thaw()
            raise spawn.SpawnError("cgroup freezer", "a task could not be stopped within a second", "try again in a moment")
        return {}

    def _do_thaw(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        cell = self._freezable(request)
        if cell.capture is not None and cell.frozen:
            cell.capture.thaw = True  # it goes on when its changes have been read
            return {}
        cell.group.thaw()
        cell.frozen = False
        return {}

    def _do_capture(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        """Let the zygote write what was changed in the workspace to the one descriptor, while the sandbox stands still."""
        cell = self.cells.get(request["id"])
        if cell is None or len(descriptors) != 1:
            raise grammar.GrammarError("capture needs a sandbox and one descriptor")
        if cell.upper < 0:
            raise spawn.SpawnError("workspace", "no changes are held back here", "use a workspace with `mode: overlay`")
        if cell.capture is not None:
            raise spawn.SpawnError("workspace", "its changes are being read already", "wait for the end of that")
        sent, how, thaw = [cell.upper, descriptors[0]], "a pause before", False
        if not cell.frozen:
            how, thaw = "control group", self._stand_still(cell)
            if not thaw:
                how = "signals"
                sent.append(cell.pidfd)
        try:
            send_descriptors(cell.zygote.control, dumps({"capture": cell.id}).encode(), sent)
        except OSError:
            if thaw:
                cell.thaw()
            raise
        cell.capture = Capture(request["number"], how, thaw)
        return None

    def _stand_still(self, cell: Cell) -> bool:
        """Freeze a sandbox by its group; False, and it runs on, where there is none or a task does not stop."""
        if not self.hierarchy.trees:
            return False
        cell.frozen = True
        try:
            if cell.group.freeze():
                return True
        except OSError:
            pass
        cell.thaw()
        return False

    def _captured(self, cell: Cell, code: int) -> None:
        capture, cell.capture = cell.capture, None
        if capture is None:
            return
        if capture.thaw:
            cell.thaw()
        if code in (0, 3):
            still = code == 0
            self._say({"re": capture.number, "ok": True, "frozen": still, "how": capture.how if still else "not in time"})
            return
        self._say({"re": capture.number, "ok": False, "primitive": "workspace", "hint": "try again",
                   "message": "the process that reads the changes ended early"})  # fmt: skip
        if code < 0 and capture.how == "signals":
            self._kill(cell, "crashed")  # it could not set its sandbox going again

    def _freezable(self, request: dict[str, Any]) -> Cell:
        cell = self._running(request)
        place = self.hierarchy.places["freezer"]
        if not place.usable:
            raise spawn.SpawnError("cgroup freezer", f"nothing here can stop a sandbox: {place.reason}", place.hint)
        return cell

    def _do_stats(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        cell = self.cells.get(request["id"])
        if cell is None:
            raise grammar.GrammarError("no such sandbox")
        return {"stats": self._stats(cell)}

    def _stats(self, cell: Cell) -> dict[str, Any]:
        stats = cell.group.stats()
        if stats["memory"] is None and cell.watch is not None:
            stats["memory"], stats["memory_peak"] = cell.watch.last.bytes, cell.watch.peak
        stats["oom_kills"] = (stats["oom_kills"] or 0) + cell.watched_kills
        return stats

    def _do_inspect(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        cell = self.cells.get(request["id"])
        if cell is None or not cell.pid:
            raise grammar.GrammarError("no such sandbox")
        from ringfence.engines.namespace import evidence  # one program asks for none

        return {
            "enforcement": evidence.gather(
                cell.pid, cell.limits, self.report, cell.zygote.plan.kind, cell.zygote.facts, cell.lent,
                cell.zygote.root,
            ),
            "pid": cell.pid,
        }

    def _do_close(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self.closing = True
        return {}

    # What zygotes say ----------------------------------------------------------------------------------

    def _zygote_says(self, zygote: Zygote) -> None:
        try:
            raw, descriptors = receive_descriptors(zygote.control, 1 << 16, 1)
        except OSError:
            raw, descriptors = b"", []
        if not raw:
            self.epoll.unregister(zygote.control.fileno())
            self.by_descriptor.pop(zygote.control.fileno(), None)
            _signal(zygote.pidfd, signal.SIGKILL)
            return
        message = loads(raw)
        if "ready" in message and message["problems"]:
            # What is wrong with a zygote would be wrong with every sandbox forked from it.
            for number in zygote.waiting:
                self._say({"re": number, "ok": False, "primitive": "template", "hint": "run `ringfence doctor`",
                           "message": f"{zygote.name}: " + "; ".join(str(one)[:200] for one in message["problems"])})  # fmt: skip
            zygote.waiting.clear()
            _signal(zygote.pidfd, signal.SIGKILL)
        elif "ready" in message:
            zygote.ready = True
            zygote.data_size = _data_size(zygote.pid)
            zygote.user_namespace = os.readlink(f"/proc/{zygote.pid}/ns/user")
            zygote.facts = {
                "landlock": int(message["landlock"]), "python": str(message["python"])[:40],
                "ids": zygote.plan.kind, "zygote_pid": zygote.pid,
            }  # fmt: skip
            for number in zygote.waiting:
                self._say({"re": number, "ok": True, **zygote.facts})
            zygote.waiting.clear()
        elif "started" in message and descriptors:
            cell = self.cells.get(message["started"])
            if cell is None:
                _signal(descriptors[0], signal.SIGKILL)
                os.close(descriptors[0])
                return
            cell.pidfd = descriptors[0]
            cell.pid = _pid_of(cell.pidfd)
            self.by_descriptor[cell.pidfd] = cell
            self.epoll.register(cell.pidfd, select.EPOLLIN)
            if cell.reason:
                _signal(cell.pidfd, signal.SIGKILL)
        elif "upper" in message and descriptors:
            cell = self.cells.get(message["upper"])
            if cell is None or cell.upper >= 0:
                os.close(descriptors[0])
            else:
                cell.upper = descriptors[0]
        elif "captured" in message:
            cell = self.cells.get(message["captured"])
            if cell is not None:
                self._captured(cell, int(message["code"]))
        elif "failed" in message:
            cell = self.cells.get(message["failed"])
            if cell is not None:
                step = str(message["step"])[:100]
                cell.failure = {
                    "primitive": step, "message": str(message["message"])[:1000], "hint": spawn.HINTS.get(step, "")
                }  # fmt: skip
                if cell.pidfd < 0:
                    self._cell_gone(cell)

    def _zygote_gone(self, zygote: Zygote) -> None:
        for descriptor in (zygote.pidfd, zygote.control.fileno()):
            if self.by_descriptor.pop(descriptor, None) is not None:
                self.epoll.unregister(descriptor)
        try:
            os.waitpid(zygote.pid, 0)
        except ChildProcessError:
            pass
        for number in zygote.waiting:
            self._say({"re": number, "ok": False, "primitive": "zygote", "hint": "run `ringfence doctor`",
                       "message": f"the interpreter of template {zygote.name!r} ended while it warmed up"})  # fmt: skip
        if self.zygotes.get(zygote.name) is zygote:
            del self.zygotes[zygote.name]
        if zygote.ready:
            self._say({"event": "zygote", "name": zygote.name, "pid": zygote.pid})
        for cell in [cell for cell in self.cells.values() if cell.zygote is zygote and cell.pidfd < 0]:
            cell.reason = cell.reason or "crashed"
            self._cell_gone(cell)
        os.close(zygote.pidfd)
        zygote.control.close()
        self.identifiers.release(zygote.plan)

    # Deaths --------------------------------------------------------------------------------------------

    def _kill(self, cell: Cell, reason: str) -> None:
        cell.reason = cell.reason or reason
        cell.deadline = _NEVER
        if cell.pidfd >= 0:
            _signal(cell.pidfd, signal.SIGKILL)
            # Process 1 takes all others with it, but only after it has cleared its own memory: told now, they
            # clear theirs on the other processor meanwhile (a millisecond of five).
            for pid in cell.group.first_pids():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            # Last, so that a paused sandbox runs not one instruction more.
            cell.thaw()

    def _cell_gone(self, cell: Cell) -> None:
        """The last process of the sandbox is gone: a pid namespace's first process ends after all others."""
        reason = cell.reason
        if not reason:
            try:
                reason = "oom" if self._stats(cell).get("oom_kills") else "crashed"
            except OSError:
                reason = "crashed"
        # Whoever waits for the end hears of it before the empty group and the ids are put away.
        self._say(
            {"event": "gone", "id": cell.id, "reason": reason, "failure": cell.failure, "answers": cell.waiters}
        )
        self._forget(cell)

    def _forget(self, cell: Cell) -> None:
        self.cells.pop(cell.id, None)
        if cell.pidfd >= 0:
            self.by_descriptor.pop(cell.pidfd, None)
            self.epoll.unregister(cell.pidfd)
            os.close(cell.pidfd)
        if cell.watch is not None:
            cell.watch.close()
        if cell.upper >= 0:
            os.close(cell.upper)
        if cell.capture is not None:
            self._say({"re": cell.capture.number, "ok": False, "primitive": "workspace", "hint": "",
                       "message": "the sandbox ended while its changes were read"})  # fmt: skip
        if not cell.group.remove():
            self.dying_groups.append(cell.group)
        self.identifiers.give_slot(cell.zygote.plan, cell.slot, cell.zygote.free)

    def _watch_memory(self) -> None:
        if memory_watch.machine_is_short():
            # Something eats the machine where no look at processes sees it (socket buffers, hidden shared pages).
            # Which sandbox it is cannot be told without a cgroup, so none of the watched ones may go on.
            for cell in list(self.cells.values()):
                cell.watched_kills += 1
                self._kill(cell, "oom")
            return
        for cell in list(self.cells.values()):
            if cell.pid == 0 or cell.reason:
                continue
            if cell.watch is None and not self._begin_watch(cell):
                continue
            assert cell.watch is not None
            try:
                over = cell.watch.over()
            except OSError:
                over = True  # what cannot be measured is not held
            if over:
                cell.watched_kills += 1
                self._kill(cell, "oom")
            elif cell.watch.suspicious:
                self.next_watch = min(self.next_watch, time.monotonic() + SUSPICION_INTERVAL)

    def _begin_watch(self, cell: Cell) -> bool:
        """Open the sandbox's own /proc, once it has one: until then the path leads to the zygote's."""
        try:
            proc = os.open(f"/proc/{cell.pid}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if os.readlink(f"/proc/{cell.pid}/ns/user") == cell.zygote.user_namespace:
                os.close(proc)
                return False  # not yet confined
        except OSError:
            cell.watch_failures += 1
            if cell.watch_failures > WATCH_TRIES:
                self._kill(cell, "crashed")
            return False
        cell.watch = memory_watch.MemoryWatch(proc, cell.limits["memory"])
        return True

    # The end -------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Kill everything, see it gone, remove every group. The kernel does the killing: one signal each."""
        for zygote in list(self.zygotes.values()):
            _signal(zygote.pidfd, signal.SIGKILL)
        for cell in self.cells.values():
            if cell.pidfd >= 0:
                _signal(cell.pidfd, signal.SIGKILL)
                cell.thaw()
        for zygote in list(self.zygotes.values()):
            try:
                os.waitpid(zygote.pid, 0)
            except ChildProcessError:
                pass
        groups = [cell.group for cell in self.cells.values()] + self.dying_groups + self.zygote_groups
        deadline = time.monotonic() + 5.0
        while groups and time.monotonic() < deadline:
            groups = [group for group in groups if not group.remove()]
            if groups:
                time.sleep(0.005)
        if self.pool is not None:
            self.pool.close()


def _signal(pidfd: int, number: int) -> None:
    try:
        call(NUMBER["pidfd_send_signal"], pidfd, number, None, 0, what="pidfd_send_signal")
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise


def _data_size(pid: int) -> int:
    """VmData of a process in bytes (proc(5)); 0 when it cannot be read."""
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as information:
        for line in information:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return 0


def main(descriptor: int) -> None:
    """Entry of the executed launcher; `descriptor` is its end of the owner's socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal's Ctrl-C goes to the whole group: the owner decides, the launcher follows the owner.
        signal.signal(number, signal.SIG_IGN)
    # An owner that ignores SIGCHLD hands that on, and with it the kernel throws away our children's exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.umask(0o077)
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    prctl(PR_SET_DUMPABLE, 1)
    Launcher(control).run()
