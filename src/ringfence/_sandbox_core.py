"""What both facades share: starting a sandbox, knowing its end, and finding it again by its id.

Guards against half-started sandboxes, use after fork (a child must not kill its parent's sandbox), and against
paying for a policy model when the default policy is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict

from ringfence.errors import InvalidArgumentError, NotFoundError, SandboxError, WrongProcessError
from ringfence.stream.checks import check_envs, check_seconds, check_text
from ringfence.stream.code import CodeRunner
from ringfence.stream.commands import CommandRunner
from ringfence.stream.exchange import OPERATION_SECONDS, Session
from ringfence.stream.files import FileOperations
from ringfence.stream.transfers import Transfers
from ringfence.stream.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ringfence.changes.model import Applied, Change, Changes
    from ringfence.changes.reviewing import Review
    from ringfence.engines.base import CellSpec, Enforced, Limits
    from ringfence.errors import SandboxDeadError
    from ringfence.policy.default import DefaultPolicy
    from ringfence.policy.model import Policy, Workspace
    from ringfence.stream.cell import CellHandle
    from ringfence.stream.connection import Connection
    from ringfence.stream.results import SandboxMetrics

__all__ = ["SandboxCore", "SandboxInfo", "SandboxOptions"]

_LIMITS = (
    "memory",
    "cpus",
    "pids",
    "disk",
    "tmp",
    "output",
    "result",
    "file_size",
    "open_files",
    "idle",
    "max_age",
)


class SandboxOptions(TypedDict, total=False):
    """What `Sandbox(...)` and `Sandbox.create(...)` take besides the template; all are keywords.

    Sizes are bytes or texts such as `"256MiB"`, times are seconds or texts such as `"10min"`.
    """

    policy: Policy | DefaultPolicy | Mapping[str, Any] | str | os.PathLike[str] | None
    """A policy, a dict, the name of a preset, or the path of a file. None: the default, `untrusted`."""
    workspace: Workspace | Mapping[str, Any] | str | os.PathLike[str] | None
    """A host directory that appears at `/workspace`, where commands and code then start; replaces the policy's. A path
    means `mode="overlay"`: what the sandbox changes is held back, and the host directory stays as it is."""
    packages: Sequence[str] | None
    """Packages that it can import, as requirements (`["polars>=1.2"]`), instead of a template. Their environment is
    made from wheels when there is none for them yet, which takes a network and a while, and is kept."""
    on_progress: Callable[[str], object] | None
    """Called on another thread with a line for each step while an environment is made. None: said on a terminal."""
    engine: str | None
    """Name of the engine that must hold it; None: the best that the policy allows."""
    timeout: float | str | None
    """Time after which the sandbox ends, whatever it does; at most `max_age`, which is also the default. What one
    cell or command may take is `limits={"timeout": ...}`, or `timeout=` of the call."""
    envs: Mapping[str, str] | None
    """Environment variables of everything that runs in it."""
    metadata: Mapping[str, str] | None
    """Labels of your own, shown by `info()` and `list()`."""
    root: bool | None
    """True: the user `root` exists inside, for package managers, and `sudo` works; the same as `root: true` in the
    policy. False: not even where the policy has it. None: as the policy says."""
    limits: Mapping[str, Any] | None
    """Limits of the policy to replace, by name; includes `timeout`, the default for `run_code` and commands."""
    memory: int | str
    cpus: float
    pids: int
    disk: int | str
    tmp: int | str
    output: int | str
    result: int | str
    file_size: int | str
    open_files: int
    idle: float | str
    max_age: float | str


@dataclass(frozen=True)
class SandboxInfo:
    """What is known about a sandbox from the outside. `enforcement` is what is in force, primitive by primitive,
    read from the kernel; it is empty in the answers of `list()`. Times are in UTC."""

    id: str
    template: str
    engine: str
    level: str
    state: str
    started_at: datetime
    expires_at: datetime
    limits: Limits
    metadata: dict[str, str] = field(default_factory=dict)
    policy: str = "default"
    enforcement: tuple[Enforced, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def sandbox_id(self) -> str:
        """The same as `id` (E2B's name)."""
        return self.id

    @property
    def template_id(self) -> str:
        """The same as `template` (E2B's name)."""
        return self.template

    @property
    def end_at(self) -> datetime:
        """The same as `expires_at` (E2B's name)."""
        return self.expires_at


def _seconds(value: Any) -> Any:
    """A lifetime as seconds where it is a text such as `10min`; all else as it is, for `check_seconds` to judge."""
    if not isinstance(value, str):
        return value
    from ringfence.policy.units import parse_duration

    return parse_duration(value)


def build_spec(template: str, options: Mapping[str, Any]) -> tuple[CellSpec, float | None]:
    """The specification that engines read, and the lifetime asked for in seconds.

    Raises InvalidArgumentError, PolicyError, and EnforcementError for what cannot be held.
    """
    from ringfence.policy.resolve import resolve, workspace_fields

    unknown = set(options) - SandboxOptions.__annotations__.keys()
    if unknown:
        raise InvalidArgumentError(
            f"unknown options: {', '.join(sorted(unknown))}",
            hint=f"known are {', '.join(sorted(SandboxOptions.__annotations__))}",
        )
    check_text(template, "template", empty=False)
    packages: tuple[str, ...] = ()
    if options.get("packages") is not None:
        template, packages = _packages(template, options["packages"])
    engine = options.get("engine")
    if engine not in (None, "namespace"):
        raise InvalidArgumentError(f"unknown engine {engine!r}", hint="this version has: namespace")
    policy: Any = resolve(options.get("policy"))
    changes = {name: options[name] for name in _LIMITS if options.get(name) is not None}
    limits = options.get("limits")
    if limits is not None:
        if not isinstance(limits, Mapping):
            raise InvalidArgumentError(f"limits must be a dict, not {type(limits).__name__}")
        changes = {**limits, **changes}
    if changes:
        policy = (policy.model() if hasattr(policy, "model") else policy).with_limits(**changes)
    root = options.get("root")
    if root is not None:
        if not isinstance(root, bool):
            raise InvalidArgumentError(f"root must be true or false, not {root!r}")
        if root or hasattr(policy, "root"):
            policy = (policy.model() if hasattr(policy, "model") else policy).with_root(root)
    metadata = dict(options.get("metadata") or {})
    for name, text in metadata.items():
        check_text(name, "the name of a metadata entry")
        check_text(text, f"metadata {name!r}")
    fields: dict[str, Any] = {"template": template, "metadata": metadata, "packages": packages}
    envs = check_envs(options.get("envs"))
    if envs:
        fields["envs"] = envs
    workspace = options.get("workspace")
    if workspace is not None:
        fields["workspace"] = workspace_fields(workspace)
        fields["cwd"] = "/workspace" if fields["workspace"] else "/home/user"
    spec = policy.compile(**fields)
    if spec.workspace is not None:
        # Relative to where this process is now, not to where it is when the sandbox starts.
        source = os.path.abspath(os.path.expanduser(spec.workspace["source"]))
        spec = replace(spec, workspace={**spec.workspace, "source": source})
    timeout = check_seconds(_seconds(options.get("timeout")), "timeout", zero=False)
    if timeout is not None and timeout > spec.limits.max_age:
        raise InvalidArgumentError(
            f"timeout ({timeout:g} s) is longer than limits.max_age ({spec.limits.max_age:g} s)",
            hint="pass max_age too, or a shorter timeout",
        )
    return spec, timeout


def _packages(template: str, asked: Any) -> tuple[str, tuple[str, ...]]:
    """The template for packages that were asked for, and what it is made from."""
    from ringfence.node import packages, requirements

    if template != "base":
        raise InvalidArgumentError(
            f"packages and the template {template!r} exclude each other",
            hint="leave the template out, or name the packages' environment: ringfence env create",
        )
    lines = tuple(sorted(set(requirements.check_all(asked))))
    return packages.automatic_name(lines), lines


def _review_of(spec: CellSpec | None, handle: CellHandle) -> Review | None:
    workspace = None if spec is None else spec.workspace
    if workspace is None or workspace["mode"] != "overlay":
        return None
    from ringfence.changes.reviewing import Review

    return Review(workspace["source"], handle.started_at, handle.limits.disk)


_known: dict[str, SandboxCore] = {}
_known_lock = threading.Lock()


class SandboxCore:
    """One sandbox, below both facades. Made unstarted, `await start()` starts it."""

    __slots__ = (
        "_code", "_commands", "_files", "_owner", "_progress", "_review", "_session", "_spec", "_timeout", "_transfers",
    )  # fmt: skip

    def __init__(self, template: str = "base", options: Mapping[str, Any] | None = None) -> None:
        self._spec, self._timeout = build_spec(template, options or {})
        self._progress = (options or {}).get("on_progress")
        self._session: Session | None = None
        self._owner = os.getpid()

    @classmethod
    def of_handle(cls, handle: CellHandle) -> SandboxCore:
        """The core of a running sandbox: the one that there is, or a new one."""
        with _known_lock:
            core = _known.get(handle.id)
            if core is None:
                core = cls.__new__(cls)
                core._spec = getattr(handle, "spec", None)  # type: ignore[assignment]
                core._timeout = None
                core._progress = None
                core._owner = os.getpid()
                core._adopt(handle)
            return core

    @classmethod
    def find(cls, identifier: str) -> SandboxCore:
        """The running sandbox of this process with that id. Raises NotFoundError."""
        from ringfence.node.node import Node

        check_text(identifier, "sandbox_id", empty=False)
        handle = Node.current().find(identifier)
        if handle is None:
            raise NotFoundError(
                f"no sandbox {identifier!r} runs in this process", hint="Sandbox.list() shows those that do"
            )
        return cls.of_handle(handle)

    @classmethod
    def all(cls) -> list[SandboxCore]:
        """The running sandboxes of this process, oldest first."""
        from ringfence.node.node import Node

        return [cls.of_handle(handle) for handle in Node.current().handles()]

    async def start(self) -> None:
        """Start it. Raises EnforcementError or EngineError when nothing was started."""
        from ringfence.node.node import Node

        if self._session is not None:
            return
        handle = await Node.current().start(self._spec, progress=self._progress)
        with _known_lock:
            self._adopt(handle)
        if self._timeout is not None:
            handle.set_expiry(handle.started_at + self._timeout)

    def _adopt(self, handle: CellHandle) -> None:
        session = Session(handle)
        self._code = CodeRunner(session)
        self._commands = CommandRunner(session)
        self._files = FileOperations(session)
        self._transfers = Transfers(self._files)
        self._review = _review_of(self._spec, handle)
        self._session = session
        if session.death is None:
            _known[handle.id] = self

            def forget(_: SandboxDeadError) -> None:
                _known.pop(handle.id, None)

            handle.on_dead(forget)

    @property
    def session(self) -> Session:
        """The session. Raises SandboxError while it is not started."""
        if self._session is None:
            raise SandboxError(
                "the sandbox is not started",
                hint="use `async with AsyncSandbox()` or `await AsyncSandbox.create()`",
            )
        return self._session

    @property
    def started(self) -> bool:
        """True once it was started, also when it has ended since."""
        return self._session is not None

    @property
    def pump(self) -> Connection | None:
        """What a thread that waits for this sandbox may read itself."""
        return None if self._session is None else self._session.connection

    @property
    def code(self) -> CodeRunner:
        """Code and contexts."""
        return self._code if self._session is not None else self.session  # type: ignore[return-value]

    @property
    def commands(self) -> CommandRunner:
        """Commands."""
        return self._commands if self._session is not None else self.session  # type: ignore[return-value]

    @property
    def files(self) -> FileOperations:
        """Files."""
        return self._files if self._session is not None else self.session  # type: ignore[return-value]

    @property
    def transfers(self) -> Transfers:
        """Uploads and downloads."""
        return self._transfers if self._session is not None else self.session  # type: ignore[return-value]

    @property
    def review(self) -> Review:
        """What it changed in its workspace. Raises InvalidArgumentError where nothing is held back."""
        self.session  # noqa: B018 - says when it is not started
        if self._review is None:
            raise InvalidArgumentError(
                "this sandbox holds no changes back for review",
                hint="start it with workspace='.', which is mode='overlay'",
            )
        return self._review

    async def changes(self) -> Changes:
        """Capture what was changed in the workspace while the sandbox stands still."""
        review, session = self.review, self.session
        if not self.owned:
            raise WrongProcessError("this sandbox belongs to the parent process", hint="capture its changes there")
        if session.death is not None:
            raise session.dead_error("changes")
        handle = session.handle
        handle.operation_started()
        try:
            return await review.capture(handle.capture)
        finally:
            handle.operation_ended()

    async def apply(self, changes: Changes, paths: Iterable[str | bytes | os.PathLike[str] | Change] | None) -> Applied:
        """Write captured changes to the host's directory."""
        return await self.review.apply(changes, paths)

    @property
    def running(self) -> bool:
        """True while it lives."""
        return self._session is not None and self._session.death is None

    @property
    def state(self) -> str:
        """`running`, `paused` or `ended`."""
        if not self.running:
            return "ended"
        return "paused" if self.session.clock.paused else "running"

    @property
    def owned(self) -> bool:
        """False in a forked child of the process that started it."""
        return os.getpid() == self._owner

    async def kill(self) -> bool:
        """Kill it, and wait until the host has seen the last process gone. False when it was gone already."""
        if not self.owned:
            raise WrongProcessError(
                "this sandbox belongs to the parent process",
                hint="kill it there; a forked child can start sandboxes of its own",
            )
        session = self._session
        if session is None or session.death is not None:
            return False
        await session.kill()
        return True

    async def leave(self) -> None:
        """The end of a `with` block: kill it, except in a forked child, where it is not ours."""
        if self.owned:
            await self.kill()

    def info(self, enforcement: tuple[Enforced, ...] = ()) -> SandboxInfo:
        """What is known without asking anybody."""
        handle: Any = self.session.handle
        spec = self._spec
        return SandboxInfo(
            id=handle.id,
            template=handle.template,
            engine=handle.engine,
            level=handle.level,
            state=self.state,
            started_at=datetime.fromtimestamp(handle.started_at, UTC),
            expires_at=datetime.fromtimestamp(handle.expires_at, UTC),
            limits=handle.limits,
            metadata=dict(spec.metadata),
            policy=spec.policy_name,
            enforcement=tuple(enforcement),
            timings=dict(handle.timings),
        )

    async def inspect(self) -> SandboxInfo:
        """`info` with what is in force, read from the kernel now."""
        if not self.running:
            return self.info()
        handle: Any = self.session.handle
        return self.info(await wait_for(handle.inspect(), OPERATION_SECONDS))

    async def stats(self) -> dict[str, Any]:
        """What the sandbox uses, as the host counts it."""
        session = self.session
        if session.death is not None:
            raise session.dead_error("stats")
        return await wait_for(session.handle.stats(), OPERATION_SECONDS)

    def _living(self, what: str) -> Session:
        session = self.session
        if session.death is not None:
            raise session.dead_error(what)
        return session

    async def metrics(self) -> SandboxMetrics:
        """What it uses now, by counters of the host."""
        import time

        from ringfence.stream.results import SandboxMetrics

        session = self._living("metrics")
        handle, connection, limits = session.handle, session.connection, session.handle.limits
        found = await wait_for(handle.measure(), OPERATION_SECONDS)
        peak = found.get("memory_peak")
        return SandboxMetrics(
            timestamp=datetime.now(UTC),
            uptime=max(0.0, time.time() - handle.started_at),
            cpu_seconds=found.get("cpu_seconds"),
            memory=found.get("memory"),
            memory_peak=None if peak is None else max(peak, session.meter.highest),
            pids=found.get("pids"),
            disk=found.get("disk"),
            tmp=found.get("tmp"),
            bytes_in=connection.bytes_sent,
            bytes_out=connection.bytes_received,
            memory_limit=limits.memory,
            cpus_limit=limits.cpus,
            pids_limit=limits.pids,
            disk_limit=limits.disk,
            tmp_limit=limits.tmp,
            oom_kills=found.get("oom_kills") or 0,
            paused=session.clock.paused,
        )

    async def resize(self, memory: int | str | None, cpus: float | None, pids: int | None) -> SandboxInfo:
        """New limits for a running sandbox: all of them, or an error and none."""
        from ringfence.policy.model import Policy

        session = self._living("resize")
        asked = {"memory": memory, "cpus": cpus, "pids": pids}
        asked = {name: value for name, value in asked.items() if value is not None}
        if not asked:
            raise InvalidArgumentError("resize changes nothing", hint="pass memory=, cpus= or pids=")
        checked = Policy().with_limits(**asked).limits  # the bounds that a policy has
        session.limits = await wait_for(
            session.handle.resize({name: getattr(checked, name) for name in asked}), OPERATION_SECONDS
        )
        return await self.inspect()

    async def pause(self) -> bool:
        """Stop every process in it; False when it was paused already."""
        session = self._living("pause")
        if session.clock.paused:
            return False
        session.pause_clock(True)
        try:
            await wait_for(session.handle.pause(), OPERATION_SECONDS)
        except BaseException:
            session.pause_clock(False)
            raise
        return True

    async def resume(self) -> bool:
        """Let it go on; False when it was not paused."""
        session = self._living("resume")
        if not session.clock.paused:
            return False
        await wait_for(session.handle.resume(), OPERATION_SECONDS)
        session.pause_clock(False)
        return True

    def set_timeout(self, seconds: float | str) -> None:
        """Let the sandbox end `seconds` from now. Raises InvalidArgumentError beyond limits.max_age."""
        import time

        checked = check_seconds(_seconds(seconds), "timeout")
        session = self.session
        if checked is None:
            raise InvalidArgumentError("timeout must be a number of seconds, not None")
        if session.death is not None:
            raise session.dead_error("set_timeout")
        session.handle.set_expiry(time.time() + checked)

    @staticmethod
    def prewarm(template: str, options: Mapping[str, Any], count: int) -> Any:
        """Keep `count` sandboxes of that kind ready; returns the pool."""
        from ringfence.node.node import Node
        from ringfence.stream.checks import check_count

        spec, _ = build_spec(template, options)
        return Node.current().prewarm(spec, check_count(count, "count", highest=10_000))


def _after_fork() -> None:
    # The parent's sandboxes are not this process's: a child must neither list nor find them.
    global _known_lock
    _known.clear()
    _known_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
