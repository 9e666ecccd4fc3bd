"""One machine's sandboxes as one process sees them: launcher, templates, pools, lifetimes.

Guards against leftovers and against a sandbox that outlives its time: the launcher (a separate process) watches
this one and ends everything with it; age limits are kept by the launcher and idle limits here, where the guest
has no say in either. A forked child gets a node of its own: it closes its copies of the sockets and cannot
reach, nor keep alive, the parent's sandboxes.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.engines.base import CellSpec, Enforced, Limits
from ringfence.engines.namespace import engine as namespace_engine
from ringfence.engines.namespace.client import Launcher, refusal
from ringfence.errors import (
    EngineError,
    InvalidArgumentError,
    RingfenceError,
    SandboxDeadError,
    WrongProcessError,
)
from ringfence.stream.connection import Connection, Reactor, read_until, socket_pair
from ringfence.stream.waiting import Pending, wait_for

if TYPE_CHECKING:
    from ringfence.node.desk import Desk

START_PATIENCE = 30.0  # seconds until a sandbox that said nothing counts as failed
TEMPLATE_PATIENCE = 600.0  # seconds; the first use of a template copies and compiles its packages
DOWNLOAD_PATIENCE = 7200.0  # seconds; packages that were asked for by name are fetched first
SPARES = 8  # network namespaces and control groups that are made ahead, each used once
_REHEARSAL = {
    "op": "kernel.execute", "context": "default", "code": "1+1", "env": None, "quiet": False, "rehearsal": True,
}  # fmt: skip
REFILL_PAUSE = 0.02  # seconds a pool that is not empty leaves the processors to whoever took from it
DEATH_PATIENCE = 0.25  # seconds the I/O thread waits for the launcher's word on why a stream ended

_DEATHS = {
    "killed": ("the sandbox was killed", ""),
    "oom": ("the sandbox ran out of memory and was killed", "raise limits.memory"),
    "idle": ("the sandbox was idle for longer than limits.idle", "raise limits.idle"),
    "max_age": ("the sandbox reached its maximum age", "raise limits.max_age, or the timeout it was made with"),
    "crashed": ("the sandbox ended on its own", "run with RINGFENCE_DEBUG=1 to see the agent's last words"),
    "owner": ("the node was closed", ""),
    "protocol": ("the guest broke the protocol and the sandbox was killed", ""),
}


def death(reason: str) -> SandboxDeadError:
    """The error for a sandbox that ended for `reason`."""
    reason = reason.replace("-", "_")
    message, hint = _DEATHS.get(reason, (f"the sandbox ended: {reason}", ""))
    return SandboxDeadError(message, hint=hint, reason=reason if reason in _DEATHS else "crashed")


class Handle:
    """One running sandbox (see stream.cell.CellHandle for what each member means)."""

    engine = namespace_engine.NAME
    level = namespace_engine.LEVEL

    def __init__(self, node: Node, identifier: str, spec: CellSpec):
        self._node = node
        self.id = identifier
        self.spec = spec
        self.template = spec.template
        self.limits = spec.limits
        self.started_at = time.time()
        self.expires_at = self.started_at + spec.limits.max_age
        self.timings: dict[str, float] = {}
        self.counters: dict[str, str] = {}
        self.log: Any = None  # the session's stream.log.Log, once there is a session
        self.paused = False
        self.connection: Connection
        self.failure: dict[str, Any] | None = None
        self.gone: Pending[SandboxDeadError] = Pending()
        self._operations = 0
        self._idle_since = time.monotonic()
        self._lock = threading.Lock()

    # Verbs of the outside ------------------------------------------------------------------------------

    def kill(self, reason: str = "killed") -> Pending:
        """Kill everything inside; completes when the host has seen the last process gone. Idempotent."""
        done: Pending[None] = Pending()
        if self.gone.done():
            done.set_result(None)
            return done
        done.pump = self._node.pump
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.expect_end()
        self._node.ask(
            {"do": "kill", "id": self.id, "reason": reason.replace("_", "-")}, lambda answer: done.set_result(None)
        )
        return done

    def stats(self) -> Pending:
        """Memory, processor time, pids and OOM kills as the host counts them."""
        return self._node.question({"do": "stats", "id": self.id}, lambda answer: answer["stats"])

    def measure(self) -> Pending:
        """The same with bytes of files, and numbers where no control group counts."""
        return self._node.question({"do": "measure", "id": self.id}, lambda answer: answer["usage"])

    def resize(self, changes: dict[str, Any]) -> Pending:
        """Put new limits in force; completes with `limits` as they are then."""
        request = {"do": "resize", "id": self.id, "memory": None, "cpus": None, "pids": None, **changes}

        def take(answer: dict[str, Any]) -> Limits:
            self.limits = replace(self.limits, **answer["limits"])
            return self.limits

        return self._node.question(request, take)

    def pause(self) -> Pending:
        """Stop every process. Its idle time stands still too; `limits.max_age` goes on."""
        self._node.check_process()
        self.operation_started()  # a paused sandbox is not idle
        pending = self._node.question({"do": "freeze", "id": self.id}, lambda answer: None)

        def stopped(done: Pending[Any]) -> None:
            if done.exception() is None:
                self.paused = True
            else:
                self.operation_ended()

        pending.add_done_callback(stopped)
        return pending

    def resume(self) -> Pending:
        """Let all go on."""
        pending = self._node.question({"do": "thaw", "id": self.id}, lambda answer: None)

        def going(done: Pending[Any]) -> None:
            if done.exception() is None:
                self.paused = False
                self.operation_ended()

        pending.add_done_callback(going)
        return pending

    def capture(self, descriptor: int) -> Pending:
        """Write what was changed in an overlay workspace to `descriptor`, as `node.capture` reads it.

        Completes when all is written, so somebody must read meanwhile, and holds a dict: `frozen`, whether the sandbox
        stood still, and `how`. It stands still until then. The caller closes `descriptor` when this returns.
        """
        return self._node.question(
            {"do": "capture", "id": self.id}, lambda answer: {name: answer[name] for name in ("frozen", "how")}, [descriptor]
        )

    def inspect(self) -> Pending:
        """What is in force, read from the kernel now: a tuple of `Enforced`."""
        return self._node.question(
            {"do": "inspect", "id": self.id}, lambda answer: tuple(Enforced(*row) for row in answer["enforcement"])
        )

    @property
    def enforcement(self) -> tuple[Enforced, ...]:
        return self.inspect().wait(START_PATIENCE)

    def set_expiry(self, expires_at: float) -> None:
        """Move the end; never beyond `limits.max_age` after the start."""
        latest = self.started_at + self.limits.max_age
        if expires_at > latest + 0.001:
            raise InvalidArgumentError(
                f"the sandbox may not live beyond its maximum age of {self.limits.max_age:g} s",
                hint="raise limits.max_age in the policy; it cannot be extended while the sandbox runs",
            )
        self._node.check_process()
        self.expires_at = expires_at
        self._node.ask(
            {"do": "expire", "id": self.id, "seconds": max(0.0, expires_at - time.time()), "fresh": False},
            lambda answer: None,
        )

    # Being used ----------------------------------------------------------------------------------------

    def on_dead(self, callback: Callable[[SandboxDeadError], None]) -> None:
        self.gone.add_done_callback(lambda pending: callback(pending.result()))

    def operation_started(self) -> None:
        with self._lock:
            self._operations += 1

    def operation_ended(self) -> None:
        with self._lock:
            self._operations -= 1
            self._idle_since = time.monotonic()

    def idle_until(self) -> float:
        """When (time.monotonic()) the idle limit is reached if nothing happens; infinity while it is used."""
        with self._lock:
            return float("inf") if self._operations else self._idle_since + self.limits.idle

    def renew(self) -> None:
        """A pooled sandbox is handed out: its times start now."""
        self.started_at = time.time()
        self.expires_at = self.started_at + self.limits.max_age
        self._idle_since = time.monotonic()
        self._node.ask(
            {"do": "expire", "id": self.id, "seconds": self.limits.max_age, "fresh": True}, lambda answer: None
        )

    # Endings -------------------------------------------------------------------------------------------

    def stream_ended(self, error: BaseException) -> BaseException | None:
        """On the I/O thread: the stream is over. Say why, which the launcher knows better."""
        if getattr(error, "reason", "") == "protocol":
            self._node.ask({"do": "kill", "id": self.id, "reason": "protocol"}, lambda answer: None)
            return None
        if not self.gone.done() and getattr(error, "reason", "") == "crashed":
            self._node.drain(lambda: self.gone.done(), DEATH_PATIENCE)
        return self.gone.result() if self.gone.done() else None

    def ended(self, message: dict[str, Any]) -> None:
        """The launcher saw the last process gone."""
        self.failure = message.get("failure")
        error = death(message.get("reason", "crashed"))
        self.gone.set_result(error)
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close(error, known=True)


class _ZygoteGone(Exception):
    """A start met a template whose zygote had ended; `answer` is the launcher's."""

    def __init__(self, answer: dict[str, Any]):
        super().__init__(answer.get("message", ""))
        self.answer = answer


class _Link:
    """The launcher's socket in the reactor's set (the members that `Reactor` calls on a connection)."""

    def __init__(self, node: Node, launcher: Launcher):
        self._node = weakref.ref(node)
        self._reactor = node._reactor
        self._launcher = launcher
        self._descriptor = launcher.fileno()
        self._lock = threading.Lock()
        self._leading = False
        launcher.socket.setblocking(False)

    def _on_readable(self, view: memoryview) -> None:
        if not self._leading and not self._launcher.read():
            self._reactor._remove(self)  # type: ignore[arg-type]

    def lead(self, pending: Pending[Any], deadline: float | None, guard: Any) -> None:
        """Read the launcher's messages on the calling thread, in place of the I/O thread (see waiting.Pump)."""
        with self._lock:
            if self._leading or self._launcher.lost:
                return
            self._leading = True
            self._watch(select.EPOLLET)

        launcher = self._launcher

        def read() -> None:
            with self._reactor._dispatching:
                launcher.read()

        try:
            read_until(lambda: pending._done or launcher.lost, pending, deadline, guard, self._descriptor, read)
        finally:
            with self._lock:
                self._leading = False
                self._watch(select.EPOLLIN)

    def _watch(self, mask: int) -> None:
        if self._launcher.lost:
            self._reactor._remove(self)  # type: ignore[arg-type]
        else:
            self._reactor._epoll.modify(self._descriptor, mask)

    def _on_writable(self) -> None: ...

    def _die(self, error: BaseException) -> None:
        self._launcher.lose()

    def _disown(self) -> None:
        self._launcher.forget()


class Node:
    """The sandboxes of this process. `Node.current()` is the one that `Sandbox` uses."""

    _current: Node | None = None
    _current_lock = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._reactor = Reactor.shared()
        self._launcher: Launcher | None = None
        self._link: _Link | None = None
        self._templates: dict[str, Pending[dict[str, Any]]] = {}
        self._handles: dict[str, Handle] = {}
        self._pools: dict[CellSpec, Pool] = {}
        self._keeper = _Keeper(self)
        self.desk: Desk | None = None
        self._library: str | None = None
        self._held: dict[str, int] = {}  # trees of the cache -> descriptors that keep them

    @classmethod
    def current(cls) -> Node:
        node = cls._current
        if node is None:
            with cls._current_lock:
                node = cls._current
                if node is None:
                    node = cls._current = cls()
        return node

    def check_process(self) -> None:
        """Raise WrongProcessError in a forked child of the process that this node belongs to."""
        if os.getpid() != self._process:
            raise WrongProcessError(
                "this sandbox belongs to the parent process",
                hint="create a sandbox in the child, or use it in the process that created it",
            )

    # The launcher --------------------------------------------------------------------------------------

    def launcher(self) -> Launcher:
        """The running launcher; started when there is none."""
        with self._lock:
            if self._launcher is not None and not self._launcher.lost:
                return self._launcher
            from ringfence.node import environments

            python = environments.interpreter()
            self._library = python.library_path
            launcher = Launcher(python.executable_outside, self._event, self._lost)
            self._launcher = launcher
            self._templates.clear()
            self._link = _Link(self, launcher)
            self._reactor._add(self._link)  # type: ignore[arg-type]
            self._reactor.call_soon(self._open_desk)  # while the launcher and the first template come up
            launcher.ask(
                {
                    "do": "configure", "owner": os.getpid(), "pass_environment": _passed_environment(),
                    "spares": SPARES,
                },
                lambda answer: None,
            )
            return launcher

    @property
    def pump(self) -> Any:
        """Reads the launcher's answers for a thread that waits for one."""
        return self._link

    def _open_desk(self) -> None:
        """On the I/O thread: let other processes of this user find the sandboxes of this one."""
        from ringfence.node.desk import Desk

        if self.desk is None:
            self.desk = Desk.open(self, self._reactor)

    def ask(
        self, request: dict[str, Any], answer: Callable[[dict[str, Any]], object], descriptors: list[int] | None = None
    ) -> None:
        """Ask the launcher if there is one; a lost launcher has taken its sandboxes with it."""
        launcher = self._launcher
        if launcher is None or launcher.lost:
            answer({"ok": False, "message": "the launcher is gone"})
            return
        try:
            launcher.ask(request, answer, descriptors)
        except EngineError as error:
            answer({"ok": False, "message": str(error)})

    def question(
        self, request: dict[str, Any], take: Callable[[dict[str, Any]], Any], descriptors: list[int] | None = None
    ) -> Pending:
        """Like `ask`, as a Pending that holds `take(answer)` or fails with the refusal."""
        self.check_process()
        pending: Pending[Any] = Pending()

        def answered(message: dict[str, Any]) -> None:
            if message.get("ok"):
                pending.set_result(take(message))
            else:
                handle = self._handles.get(request.get("id", ""))
                if handle is None and "id" in request:
                    pending.set_exception(death("killed"))
                else:
                    pending.set_exception(refusal(message))

        self.ask(request, answered, descriptors)
        return pending

    def drain(self, enough: Callable[[], bool], patience: float) -> None:
        """On the I/O thread: read the launcher's messages until `enough()` or `patience` seconds passed."""
        deadline = time.monotonic() + patience
        launcher = self._launcher
        while launcher is not None and not launcher.lost and not enough():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([launcher], [], [], left)[0]:
                return
            launcher.read()

    def _event(self, message: dict[str, Any]) -> None:
        if message.get("event") == "gone":
            handle = self._handles.pop(message["id"], None)
            if handle is not None:
                handle.ended(message)
        elif message.get("event") == "zygote":
            self._forget_template(message["name"], message["pid"])

    def _forget_template(self, name: str, zygote_pid: int | None = None) -> None:
        """The zygote of a template is gone: the next start asks for another one."""
        with self._lock:
            ready = self._templates.get(name)
            if ready is None or not ready.done():
                return
            if zygote_pid is None or ready.exception() is not None or ready.result()["zygote_pid"] == zygote_pid:
                del self._templates[name]

    def _lost(self) -> None:
        handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.ended({"reason": "crashed"})

    # Templates and starts ------------------------------------------------------------------------------

    def template(
        self, name: str, packages: tuple[str, ...] = (), progress: Callable[[str], object] | None = None,
        root: bool = False,
    ) -> Pending[dict[str, Any]]:
        """Starts the zygote of a template once; the Pending holds its facts.

        `packages`: what its environment is made from where there is none yet. `progress` hears, on another thread,
        what takes so long. With `root` it is a zygote of its own.
        """
        launcher = self.launcher()
        with self._lock:
            key = namespace_engine.zygote_name(name, root)
            ready = self._templates.get(key)
            if ready is not None and not (ready.done() and ready.exception() is not None):
                return ready
            ready = self._templates[key] = Pending()
        pending = ready

        def answered(message: dict[str, Any]) -> None:
            if message.get("ok"):
                pending.set_result(message)
            else:
                pending.set_exception(refusal(message))

        def prepare() -> None:
            try:
                launcher.ask(self._template_request(name, packages, progress or _progress, root), answered)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the template
                pending.set_exception(error)

        # The first use of a template on a machine copies its packages, which takes seconds: on a thread, so that
        # an event loop goes on. It is not a daemon: a half-built tree would only be built again.
        threading.Thread(target=prepare, name="ringfence-template").start()
        return pending

    def _template_request(
        self, name: str, asked: tuple[str, ...] = (), progress: Callable[[str], object] | None = None,
        root: bool = False,
    ) -> dict[str, Any]:
        """The launcher's request for a template; builds its package environment when there is none yet."""
        from ringfence.node import cache, environments

        python = environments.interpreter()
        say: Any = progress
        sources = {"ringfence": environments.guest_library_directory(say)}
        executable = python.executable_inside
        modules: list[str] = []
        if namespace_engine.TEMPLATES.get(name, []) is not None:
            sources["env"] = environments.python_environment_directory("data" if name == "data" else "base", say)
            executable = environments.ENVIRONMENT_INSIDE + "/bin/python3"
        if name not in namespace_engine.TEMPLATES:
            from ringfence.node import packages

            sources["packages"], modules = packages.prepare(name, asked, say)
        for tree in sources.values():
            if tree not in self._held:
                self._held[tree] = cache.hold(tree)  # a sweep elsewhere leaves it alone while we live
        if python.prefix_outside is not None:
            sources["python"] = python.prefix_outside
        return namespace_engine.template_request(
            name, python=executable, sources=sources, library=python.library_path, masks=python.masks,
            modules=modules, root=root,
        )  # fmt: skip

    async def start(
        self, spec: CellSpec, prefork: bool = True, progress: Callable[[str], object] | None = None
    ) -> Handle:
        """Start a sandbox, from a pool when one was made for this spec. `progress` as for `template`.

        Raises EnforcementError when the policy cannot be held here (nothing is started), EngineError when the
        engine failed.
        """
        namespace_engine.check(spec, self._knows)
        pool = self._pools.get(_pool_key(spec)) if self._pools else None
        if pool is not None:
            handle = pool.take()
            if handle is not None:
                handle.spec = spec
                handle.renew()
                return handle
        return await self._create(spec, prefork, progress)

    def _knows(self, template: str) -> bool:
        """Whether there is a package environment of that name."""
        if template in self._templates:
            return True
        from ringfence.node import packages

        return packages.exists(template)

    async def _create(
        self, spec: CellSpec, prefork: bool, progress: Callable[[str], object] | None = None
    ) -> Handle:
        """Make one sandbox; a second time when the template's zygote was found dead."""
        if namespace_engine.zygote_name(spec.template, spec.root) not in self._templates:
            # A download may take longer than any template's start should.
            patience = DOWNLOAD_PATIENCE if spec.packages else TEMPLATE_PATIENCE
            await wait_for(self.template(spec.template, spec.packages, progress, spec.root), patience)
        try:
            return await self._create_once(spec, prefork)
        except _ZygoteGone:
            self._forget_template(namespace_engine.zygote_name(spec.template, spec.root))
        try:
            return await self._create_once(spec, prefork)
        except _ZygoteGone as gone:
            raise refusal(gone.answer) from gone

    async def _create_once(self, spec: CellSpec, prefork: bool) -> Handle:
        begun = time.perf_counter()
        await wait_for(self.template(spec.template, spec.packages, root=spec.root), TEMPLATE_PATIENCE)
        warm = time.perf_counter()
        handle = Handle(self, os.urandom(10).hex(), spec)
        lent = namespace_engine.open_directories(spec)
        try:
            request = namespace_engine.create_request(handle.id, spec, self._library, prefork, lent)
        except BaseException:
            for descriptor in lent:
                os.close(descriptor)
            raise
        ours, theirs = socket_pair()
        created: Pending[dict[str, Any]] = Pending()
        try:
            self._handles[handle.id] = handle
            launcher = self.launcher()
            launcher.ask(request, created.set_result, [theirs.fileno(), *lent])
            # Made while the launcher is at work.
            handle.connection = Connection(ours, self._reactor, handle.stream_ended)
        except BaseException:
            self._handles.pop(handle.id, None)
            raise
        finally:
            theirs.close()
            for descriptor in lent:
                os.close(descriptor)
        try:
            await wait_for(handle.connection.ready, START_PATIENCE)
            handle.counters = (await wait_for(created, START_PATIENCE)).get("counters") or {}
        except BaseException as error:
            answer = created.result() if created.done() else {"ok": True}
            await self._failed(handle, answer, error)
            raise
        handle.timings = {"template": warm - begun, "start": time.perf_counter() - warm}
        self._keeper.watch(handle)
        return handle

    async def _failed(self, handle: Handle, answer: dict[str, Any], error: BaseException) -> None:
        """A start went wrong: leave nothing behind and say which primitive it was."""
        self._handles.setdefault(handle.id, handle)
        handle.connection.close()
        if not answer.get("ok"):
            self._handles.pop(handle.id, None)
            if "missing" in answer:
                raise _ZygoteGone(answer) from error
            raise refusal(answer) from error
        if not isinstance(error, (RingfenceError, TimeoutError)):
            handle.kill()
            return
        await wait_for(handle.kill(), START_PATIENCE)
        failure = handle.failure
        if failure is not None:
            raise refusal(failure) from error
        raise EngineError(
            f"the sandbox did not start: {error}", hint="run `ringfence doctor`; RINGFENCE_DEBUG=1 shows more"
        ) from error

    # Pools ---------------------------------------------------------------------------------------------

    def prewarm(self, spec: CellSpec, count: int) -> Pool:
        """Keep `count` sandboxes of this spec ready, each used once. 0 empties the pool."""
        namespace_engine.check(spec, self._knows)
        key = _pool_key(spec)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = Pool(self, key)
        pool.resize(count)
        return pool

    def handles(self) -> list[Handle]:
        """The live sandboxes of this process that were handed out, oldest first."""
        waiting = {handle.id for pool in self._pools.values() for handle in pool.waiting()}
        return [handle for handle in list(self._handles.values()) if handle.id not in waiting]

    def find(self, identifier: str) -> Handle | None:
        return self._handles.get(identifier)

    def close(self) -> None:
        """End every sandbox and the launcher; returns when the launcher is gone."""
        desk, self.desk = self.desk, None
        if desk is not None:
            desk.close()
        launcher = self._launcher
        if launcher is None or launcher.lost:
            return
        for pool in list(self._pools.values()):
            pool.resize(0)
        launcher.ask({"do": "close"}, lambda answer: None)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            try:
                if os.waitpid(launcher.pid, os.WNOHANG)[0]:
                    return
            except ChildProcessError:
                return
            time.sleep(0.002)


class Pool:
    """Sandboxes made ahead of need for one spec. Each is handed out once and never comes back."""

    def __init__(self, node: Node, spec: CellSpec):
        self._node = node
        self._spec = spec
        self._waiting: deque[Handle] = deque()
        self.size = 0
        self._taken = 0.0

    def waiting(self) -> list[Handle]:
        return list(self._waiting)

    def take(self) -> Handle | None:
        self._taken = time.monotonic()
        while self._waiting:
            try:
                handle = self._waiting.popleft()
            except IndexError:
                return None
            if not handle.gone.done():
                self._node._keeper.refill(self)
                return handle
        self._node._keeper.refill(self)
        return None

    def resize(self, size: int) -> None:
        """Change how many wait; growing happens in the background, shrinking at once."""
        self.size = size
        while len(self._waiting) > size:
            self._waiting.pop().kill()
        self._node._keeper.refill(self)

    def wait_full(self, timeout: float = 60.0) -> None:
        """Block until the pool is full. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while len(self._waiting) < self.size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._waiting)} of {self.size} sandboxes are ready")
            time.sleep(0.002)

    def fill(self) -> None:
        """Make what is missing, one after the other, on the keeper's thread."""
        from ringfence.stream.waiting import run_sync

        while len(self._waiting) < self.size:
            rest = self._taken + REFILL_PAUSE - time.monotonic()
            if self._waiting and rest > 0:
                time.sleep(rest)
                continue
            handle = run_sync(self._node._create(self._spec, prefork=True))
            if namespace_engine.TEMPLATES[self._spec.template] is not None:
                run_sync(_rehearse(handle))
            if len(self._waiting) < self.size:
                self._waiting.append(handle)
            else:
                handle.kill()


async def _rehearse(handle: Handle) -> None:
    """Walk a sandbox's path from a request to its result once, and have it forgotten: whoever gets this sandbox finds
    its memory pages copied and its caches filled. A failure is left for the user's own first cell to tell."""
    from ringfence.stream.exchange import Session

    try:
        await Session(handle).call(_REHEARSAL, "getting a pooled sandbox ready", START_PATIENCE)
    except RingfenceError:
        pass


class _Keeper:
    """A daemon thread that ends idle sandboxes and refills pools; it starts with its first task."""

    def __init__(self, node: Node):
        self._node = weakref.ref(node)
        self._condition = threading.Condition()
        self._watched: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._pools: deque[Pool] = deque()
        self._thread: threading.Thread | None = None

    def watch(self, handle: Handle) -> None:
        with self._condition:
            self._watched.add(handle)
            self._start()

    def refill(self, pool: Pool) -> None:
        with self._condition:
            if pool not in self._pools:
                self._pools.append(pool)
            self._start()
            self._condition.notify()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ringfence-keeper", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._pools:
                    due = min((handle.idle_until() for handle in self._watched if not handle.gone.done()), default=0)
                    # Sandboxes come and go without a word to this thread, so it looks at least once a second.
                    self._condition.wait(min(1.0, max(0.01, due - time.monotonic())) if due else 1.0)
                pool = self._pools.popleft() if self._pools else None
                handles = [handle for handle in self._watched if not handle.gone.done()]
            if self._node() is None:
                return
            if pool is not None:
                try:
                    pool.fill()
                except Exception:  # noqa: BLE001
                    pool.size = 0  # a pool that cannot be filled must not try for ever; create will say why
            now = time.monotonic()
            waiting = {id(handle) for pool in list(self._pools) for handle in pool.waiting()}
            for handle in handles:
                if handle.idle_until() <= now and id(handle) not in waiting and not self._pooled(handle):
                    handle.kill("idle")

    def _pooled(self, handle: Handle) -> bool:
        node = self._node()
        return node is not None and any(handle in pool.waiting() for pool in list(node._pools.values()))


def _progress(message: str) -> None:
    """Say what takes so long, where a person is looking."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"ringfence: {message}", file=sys.stderr, flush=True)


def _pool_key(spec: CellSpec) -> Any:
    return _Key(replace(spec, metadata={}))


class _Key(CellSpec):
    """A spec that can be a key of a dictionary: equal when everything but the metadata is."""

    def __init__(self, spec: CellSpec):
        self.__dict__.update(spec.__dict__)

    def __hash__(self) -> int:
        return hash((self.template, self.limits, self.host_name, self.cwd, tuple(sorted(self.envs.items()))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.__dict__ == other.__dict__


def _passed_environment() -> dict[str, str]:
    from ringfence.engines.namespace.client import PASSED_ENVIRONMENT

    return {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}


def _after_fork() -> None:
    # The reactor's own hook has closed this process's copies of all sockets; a new node starts from nothing.
    Node._current = None
    Node._current_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)

