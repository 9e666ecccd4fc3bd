"""The policy: what a sandbox may do, as one model, from YAML, JSON or Python.

Guards against policies that mean less than their writer thinks. Unknown keys are errors that name the nearest
valid one; every rule may carry examples (`match`, `not_match`) that are checked when it is read; contradictions
are refused; and what no engine enforces yet compiles to a specification that engines refuse, never to a weaker one.

This module imports pydantic. A default sandbox does not need it: see `ringfence.policy.DEFAULT`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ringfence.errors import EnforcementError, InvalidArgumentError, PolicyError, RingfenceError
from ringfence.policy import commands as command_decisions
from ringfence.policy.hosts import host_matches, parse_host
from ringfence.policy.units import format_duration, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from ringfence.engines.base import CellSpec

Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes; texts such as `512MiB` are read."""

Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds; texts such as `10min` are read."""

MIB = 1 << 20
LARGEST = 1 << 40
"""The largest size of a limit: 1 TiB."""
LONGEST = 10 * 365 * 86400.0
"""The longest time of a limit: 10 years."""


def nearest(word: str, valid: Sequence[str]) -> str:
    """A hint that names the valid word closest to `word`, or all of them."""
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"valid keys: {', '.join(sorted(valid))}"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, str_strip_whitespace=True)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields:
                raise PydanticCustomError(
                    "unknown_key",
                    "unknown key `{key}`; {hint}",
                    {"key": str(key), "hint": nearest(str(key), list(cls.model_fields))},
                )
        return values


class Isolation(_Part):
    """How strong the walls must be."""

    at_least: Literal["process", "namespace", "kernel", "vm"] = Field(
        default="namespace",
        description="The weakest isolation level that is acceptable: `process` < `namespace` < `kernel` (gVisor) < "
        "`vm`. An engine below it refuses to start.",
    )


class Workspace(_Part):
    """A host directory that appears at `/workspace`."""

    source: str = Field(
        description="The host directory. A relative path is relative to the policy file, or to the "
        "current directory."
    )
    mode: Literal["ro", "rw", "overlay", "none"] = Field(
        default="overlay",
        description="`ro`: read only. `rw`: writes go to the host at once. `overlay`: writes are held back for review. "
        "`none`: not mounted.",
    )
    allow_root_owned: bool = Field(
        default=False, description="Permit `rw` on a directory that root owns, which is refused otherwise."
    )
    accept_new_protected: bool = Field(
        default=False,
        description="Permit `rw` although files that the host acts on by itself (git hooks, shell start-up files, "
        "editor and agent configuration) can be created where there are none; those that exist stay read-only. `rw` is "
        "refused otherwise.",
    )
    writable: tuple[str, ...] = Field(
        default=(),
        description="Protected files, relative to the workspace, that `rw` may write all the same: `.git/config`. What "
        "is protected as a directory is named as one: `.git/hooks`.",
    )

    @field_validator("writable")
    @classmethod
    def _plain_names(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not value.strip("/") or "\0" in value or {"..", "."} & set(value.split("/")):
                raise ValueError(f"{value!r} is not a path below the workspace")
        return values

    @field_validator("source")
    @classmethod
    def _plain_path(cls, value: str) -> str:
        if not value or "\0" in value:
            raise ValueError("the workspace needs a directory")
        return value


class Filesystem(_Part):
    """Host files that a sandbox sees. Without any, it sees none."""

    workspace: Workspace | None = Field(
        default=None, description="A host directory at `/workspace`; none by default."
    )
    read_only: tuple[str, ...] = Field(
        default=(), description="Absolute paths of host directories that appear read-only at the same path inside."
    )

    @field_validator("read_only")
    @classmethod
    def _absolute(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not os.path.isabs(value) or "\0" in value or ".." in value.split("/"):
                raise ValueError(f"{value!r} is not an absolute path without `..`")
        return tuple(os.path.normpath(value) for value in values)


class NetworkRule(_Part):
    """One way out: hosts and ports, narrowed by methods and paths. A text is short for `{host: TEXT}`."""

    host: str = Field(
        default="",
        description="A name, `*.name` (every name below it, not itself), or an IP address; a port may "
        "follow (`example.org:443`).",
    )
    preset: Literal["", "package-registries"] = Field(
        default="",
        description="A named set of hosts instead of `host`: `package-registries` is what pip, npm and apt use here.",
    )
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field(
        default=(), description="TCP ports; 443 when neither this nor the host names one."
    )
    methods: tuple[str, ...] = Field(default=(), description="HTTP methods; empty means any.")
    paths: tuple[str, ...] = Field(
        default=(),
        description="URL paths; `*` matches within one segment, `**` across segments; empty means any.",
    )
    match: tuple[str, ...] = Field(
        default=(),
        description="Examples that the rule must match, checked when it is read: `[METHOD] https://host/path` or "
        "`host:port`.",
    )
    not_match: tuple[str, ...] = Field(default=(), description="Examples that the rule must not match.")
    justification: str = Field(default="", description="Why; shown in explanations.")

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_host(cls, values: Any) -> Any:
        return {"host": values} if isinstance(values, str) else values

    @field_validator("methods")
    @classmethod
    def _method_names(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not re.fullmatch(r"[A-Za-z]{1,20}", value, re.ASCII):
                raise ValueError(f"{value!r} is not an HTTP method")
        return tuple(value.upper() for value in values)

    @field_validator("paths")
    @classmethod
    def _url_paths(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not value.startswith("/") or "?" in value or "#" in value:
                raise ValueError(f"{value!r} is not a URL path: it starts with `/` and has no query")
        return values

    @model_validator(mode="after")
    def _makes_sense(self) -> NetworkRule:
        if bool(self.host) == bool(self.preset):
            raise ValueError("a network rule has either `host` or `preset`")
        if self.preset and (self.ports or self.methods or self.paths or self.match or self.not_match):
            raise ValueError("a preset brings its own hosts and ports; nothing can narrow it")
        if self.host:
            pattern = parse_host(self.host)
            if pattern.port and self.ports and pattern.port not in self.ports:
                raise ValueError(f"the host names port {pattern.port}, `ports` does not")
        for example in self.match:
            if not self.covers(example):
                raise ValueError(f"the example {example!r} under `match` is not matched by this rule")
        for example in self.not_match:
            if self.covers(example):
                raise ValueError(f"the example {example!r} under `not_match` is matched by this rule")
        return self

    @property
    def all_ports(self) -> tuple[int, ...]:
        """The ports in force."""
        port = parse_host(self.host).port if self.host else None
        return self.ports or ((port,) if port else (443,))

    def covers(self, request: str) -> bool:
        """Whether this rule covers `[METHOD] URL` or `host:port`. Always False for a preset: its hosts are read
        when a sandbox starts."""
        if not self.host:
            return False
        method, host, port, path = _parse_request(request)
        if not host_matches(parse_host(self.host).host, host) or port not in self.all_ports:
            return False
        if self.methods and method not in self.methods:
            return False
        return not self.paths or any(_path_matches(pattern, path) for pattern in self.paths)


def _parse_request(text: str) -> tuple[str, str, int, str]:
    from urllib.parse import urlsplit

    method, _, rest = text.strip().rpartition(" ")
    url = rest if "://" in rest else f"tcp://{rest}"
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80, "tcp": 443}.get(parts.scheme)
    except ValueError:
        port, parts = None, None
    if parts is None or port is None or not parts.hostname:
        raise PolicyError(
            f"{text!r} is not an example of a request", hint="write `GET https://host/path` or `host:port`"
        )
    return method.strip().upper() or "GET", parts.hostname, port, parts.path or "/"


def _path_matches(pattern: str, path: str) -> bool:
    from urllib.parse import unquote

    decoded = unquote(path)
    if ".." in decoded.split("/"):
        return False  # who answers decides what it means; nothing here may allow it
    pieces = re.split(r"(\*\*|\*)", pattern)
    regex = "".join({"**": ".*", "*": "[^/]*"}.get(piece, re.escape(piece)) for piece in pieces)
    return re.fullmatch(regex, decoded, re.DOTALL) is not None


class Injection(_Part):
    """A header that the gateway adds to requests for one host, so that the secret never enters the sandbox."""

    host: str = Field(description="The one host, without wildcard; a port may follow.")
    header: str = Field(description="The header's name.")
    value: str = Field(description="The header's value; `${secret:NAME}` is replaced outside the sandbox.")
    justification: str = Field(default="", description="Why; shown in explanations.")

    @field_validator("host")
    @classmethod
    def _one_host(cls, value: str) -> str:
        if parse_host(value).host.startswith("*."):
            raise ValueError(f"{value!r} would hand a secret to hosts that nobody named; name one host")
        return value

    @field_validator("header")
    @classmethod
    def _header_name(cls, value: str) -> str:
        # RFC 9110, section 5.6.2: a token.
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", value, re.ASCII):
            raise ValueError(f"{value!r} is not a header name")
        if value.lower() in ("host", "content-length", "transfer-encoding", "connection"):
            raise ValueError(f"the header {value!r} steers the connection and cannot be injected")
        return value

    @field_validator("value")
    @classmethod
    def _header_value(cls, value: str) -> str:
        if re.search(r"[\r\n\0]", value):
            raise ValueError("a header's value has one line")
        return value


class Network(_Part):
    """Ways out. Without rules there is none: no interface but a private loopback."""

    default: Literal["deny"] = Field(
        default="deny", description="What happens to all else; only `deny` exists."
    )
    allow: tuple[NetworkRule, ...] = Field(
        default=(), description="What may be reached. An empty list allows nothing."
    )
    inject: tuple[Injection, ...] = Field(
        default=(), description="Headers that are added outside the sandbox."
    )

    @model_validator(mode="after")
    def _injected_hosts_are_allowed(self) -> Network:
        for injection in self.inject:
            pattern = parse_host(injection.host)
            covered = any(
                rule.host
                and host_matches(parse_host(rule.host).host, pattern.host)
                and (pattern.port or 443) in rule.all_ports
                for rule in self.allow
            )
            if not covered:
                raise ValueError(f"a header is injected for {injection.host}, which no `allow` rule reaches")
        return self


class CommandRule(_Part):
    """What happens to commands that start with some words."""

    prefix: tuple[str | tuple[str, ...], ...] = Field(
        description="The first words, the program first; a list stands for any of its words: `[pip, [install, download]]`."
    )
    decision: Literal["allow", "ask", "deny"] = Field(description="`ask` needs a person who agrees.")
    justification: str = Field(default="", description="Why; shown on refusal.")
    match: tuple[str | tuple[str, ...], ...] = Field(
        default=(), description="Example commands that the rule must match, checked when it is read."
    )
    not_match: tuple[str | tuple[str, ...], ...] = Field(
        default=(), description="Example commands that it must not match."
    )

    @model_validator(mode="before")
    @classmethod
    def _text_is_words(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("prefix"), str):
            return {**values, "prefix": values["prefix"].split()}
        return values

    @model_validator(mode="after")
    def _examples_hold(self) -> CommandRule:
        if not self.prefix or any(not element for element in self.prefix):
            raise ValueError("a rule's `prefix` needs at least one word, and no empty alternative")
        for example in self.match:
            if not self.covers(example):
                raise ValueError(f"the example {example!r} under `match` is not matched by this rule")
        for example in self.not_match:
            if self.covers(example):
                raise ValueError(f"the example {example!r} under `not_match` is matched by this rule")
        return self

    def covers(self, command: str | Sequence[str]) -> bool:
        """Whether this rule matches a part of `command` (an argv, or a text for bash)."""
        return command_decisions.decide([self], "allow", command).rule is self


class Commands(_Part):
    """Rules about commands that the caller asks to run."""

    default: Literal["allow", "ask", "deny"] = Field(
        default="allow", description="For commands that no rule speaks about."
    )
    rules: tuple[CommandRule, ...] = Field(
        default=(), description="All that match count; the strictest wins."
    )


class Limits(_Part):
    """What a sandbox may use. Sizes are bytes or texts such as `512MiB`; times are seconds or texts such as `30s`."""

    timeout: Duration = Field(
        default=30.0,
        gt=0,
        le=LONGEST,
        description="The longest run of one cell or command that names no `timeout=` of its own; where nobody set it, "
        "at most `max_age`. Not the sandbox's lifetime.",
    )
    memory: Size = Field(
        default=512 * MIB,
        ge=16 * MIB,
        le=LARGEST,
        description="Memory of all processes together. Files in the sandbox are memory too: its control group gets "
        "`memory` + `disk` + `tmp`, so while files are few, processes can use up to that sum. Choose small `disk` and "
        "`tmp` where memory must be sharp.",
    )
    cpus: float = Field(
        default=1.0, ge=0.01, le=4096, description="Processors; fractions are shares of one."
    )
    pids: int = Field(default=100, ge=8, le=4_000_000, description="Processes and threads at a time.")
    disk: Size = Field(
        default=200 * MIB,
        ge=MIB,
        le=LARGEST,
        description="What may be written to the root file system, home included. It is kept in memory and counts in "
        "the same control group as `memory`.",
    )
    tmp: Size = Field(
        default=100 * MIB,
        ge=MIB,
        le=LARGEST,
        description="Size of `/tmp`. `/dev/shm` comes on top with min(64MiB, `tmp`). Both are memory, as `disk` is.",
    )
    output: Size = Field(
        default=1 * MIB,
        ge=1024,
        le=LARGEST,
        description="How much of a command's output stays readable; the newest.",
    )
    result: Size = Field(
        default=32 * MIB,
        ge=1024,
        le=LARGEST,
        description="The largest single result of a cell, and the most of all results of one cell together.",
    )
    file_size: Size = Field(default=100 * MIB, ge=4096, le=LARGEST, description="The largest single file.")
    open_files: int = Field(default=1024, ge=64, le=1_000_000, description="Open files per process.")
    idle: Duration = Field(
        default=600.0,
        gt=0,
        le=LONGEST,
        description="A sandbox without activity ends after this. Activity is any operation that its owner has in "
        "flight: a cell, a command (background ones too), a terminal, a watch, a transfer.",
    )
    max_age: Duration = Field(
        default=3600.0, ge=0.1, le=LONGEST, description="A sandbox ends after this, whatever it does."
    )
    required: Literal["any", "hard"] = Field(
        default="any",
        description="`hard` refuses to start where a limit would be watched (sampled) rather than held by the kernel.",
    )

    @field_validator("cpus", "pids", "open_files", mode="before")
    @classmethod
    def _numbers_only(cls, value: Any) -> Any:
        if isinstance(value, bool | str):
            raise ValueError(f"{value!r} is not a number")  # noqa: TRY004 - pydantic collects ValueError only
        return value

    @model_validator(mode="after")
    def _agree(self) -> Limits:
        if self.timeout <= self.max_age:
            return self
        if "timeout" not in self.model_fields_set:  # nobody asked for it: the default gives way
            object.__setattr__(self, "timeout", self.max_age)
            return self
        raise InvalidArgumentError(
            f"timeout ({format_duration(self.timeout)}) is longer than max_age ({format_duration(self.max_age)}), "
            "so it could never pass",
            hint="raise max_age, or lower what one run may take: `limits={\"timeout\": ...}` in Python, "
            "`limits: {timeout: ...}` in a file",
        )


class Policy(_Part):
    """What a sandbox may do. Everything has a safe default; `Policy()` is the default policy.

    Raises:
        PolicyError: an unknown key, a wrong value, an example that does not hold, or a contradiction.
    """

    name: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$",
        description="A name for reports and audit.",
    )
    description: str = Field(default="", description="What this policy is for.")
    isolation: Isolation = Field(default=Isolation(), description="How strong the walls must be.")
    filesystem: Filesystem = Field(default=Filesystem(), description="Host files that a sandbox sees.")
    network: Network = Field(default=Network(), description="Ways out.")
    commands: Commands = Field(default=Commands(), description="Rules about commands.")
    limits: Limits = Field(default=Limits(), description="What a sandbox may use.")
    root: bool = Field(
        default=False, description="Whether the user `root` exists inside, for package managers."
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            raise policy_error(problem) from None

    @model_validator(mode="after")
    def _agree(self) -> Policy:
        workspace = self.filesystem.workspace
        if self.root and workspace is not None and workspace.mode == "rw":
            raise ValueError(
                "`root: true` and a workspace with `mode: rw` exclude each other: root inside could write files that "
                "the host would trust; use `mode: overlay`"
            )
        return self

    def decide_command(self, command: str | Sequence[str]) -> command_decisions.CommandDecision:
        """What this policy says about a command: an argv, or a text for bash. The strictest matching rule wins."""
        return command_decisions.decide(self.commands.rules, self.commands.default, command)

    def decide_request(self, request: str) -> NetworkRule | None:
        """The network rule that covers `[METHOD] URL` or `host:port`, None if it is denied."""
        return next((rule for rule in self.network.allow if rule.covers(request)), None)

    def compile(self, **fields: Any) -> CellSpec:
        """The specification that engines read. `fields` are further fields of it: template, envs, metadata, ...

        Raises:
            EnforcementError: the policy needs what no engine can be told yet.
        """
        from ringfence.engines import base

        rules = self.commands
        if rules.default != "allow" or any(rule.decision != "allow" for rule in rules.rules):
            raise EnforcementError(
                "this policy has command rules, which are not enforced yet",
                hint="remove `commands` from the policy, or wait for a version that enforces them",
                primitive="command rules",
            )
        workspace = self.filesystem.workspace
        if workspace is not None and workspace.mode == "none":
            workspace = None
        outward = bool(self.network.allow or self.network.inject)
        values: dict[str, Any] = {
            "limits": base.Limits(**self.limits.model_dump()),
            "at_least": self.isolation.at_least,
            # The namespace engine refuses anything but "none" until a gateway exists.
            "network": "gateway" if outward else "none",
            "network_allow": tuple(rule.model_dump() for rule in self.network.allow),
            "network_inject": tuple(rule.model_dump() for rule in self.network.inject),
            "read_only": self.filesystem.read_only,
            "workspace": workspace.model_dump() if workspace else None,
            "cwd": "/workspace" if workspace else "/home/user",
            "root": self.root,
            "policy_name": self.name,
        }
        return base.CellSpec(**{**values, **fields})

    def with_root(self, root: bool) -> Policy:
        """A copy in which the user `root` exists inside, or does not.

        Raises:
            PolicyError: the policy lends a workspace with `mode: rw`, which excludes root.
        """
        return Policy(**{**self.to_dict(), "root": root})

    def with_limits(self, **limits: Any) -> Policy:
        """A copy with some limits replaced: `policy.with_limits(timeout="2min", memory="1GiB")`.

        A `max_age` without a `timeout` beside it takes the policy's own timeout down with it."""
        values = self.limits.model_dump(exclude_unset=True)
        shorten(values, limits)
        return Policy(**{**self.to_dict(), "limits": {**values, **limits}})

    def to_dict(self) -> dict[str, Any]:
        """Plain values that differ from the defaults, as a policy file would hold them."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        for key, value in plain.get("limits", {}).items():
            if key in SIZES:
                plain["limits"][key] = format_size(value)
            elif key in DURATIONS:
                plain["limits"][key] = format_duration(value)
        return plain


def shorten(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Lower `timeout` among the limits in `values` to the `max_age` among `changes` that say nothing about it."""
    if "timeout" in changes or "timeout" not in values or "max_age" not in changes:
        return
    try:
        if parse_duration(values["timeout"]) > parse_duration(changes["max_age"]):
            values["timeout"] = changes["max_age"]
    except InvalidArgumentError:
        return  # the model says what is wrong, and where


SIZES = ("memory", "disk", "tmp", "output", "result", "file_size")
DURATIONS = ("timeout", "idle", "max_age")


def policy_error(problem: ValidationError, place: Any = None) -> PolicyError:
    """One PolicyError for all that pydantic found. `place(path)` may say where in a file a path lies."""
    messages, hints = [], []
    for error in problem.errors(include_url=False):
        path = tuple(part for part in error["loc"] if not _is_branch(part))
        context = error.get("ctx") or {}
        if error["type"] == "unknown_key":
            path += (context["key"],)
            text = f"unknown key `{context['key']}`"
            hints.append(str(context["hint"]))
        else:
            cause = context.get("error")
            text = cause.message if isinstance(cause, RingfenceError) else error["msg"]
            text = text.removeprefix("Value error, ")
            if isinstance(cause, RingfenceError) and cause.hint:
                hints.append(cause.hint)
            if error["type"] in _BOUNDS and path[-2:-1] == ("limits",):
                text, hint = _out_of_range(str(path[-1]), error["input"], error["type"], context)
                hints.append(hint)
        where = place(path) if place else ""
        name = ".".join(str(part) for part in path)
        message = f"{where}{name}: {text}" if name else f"{where}{text}"
        if message not in messages:
            messages.append(message)
    return PolicyError("; ".join(messages), hint="; ".join(dict.fromkeys(hints)))


_BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than_equal": "at most"}


def _out_of_range(name: str, value: Any, kind: str, context: dict[str, Any]) -> tuple[str, str]:
    """What to say, and the hint, about a limit that is too small or too large; sizes and times as people write them."""

    def shown(number: Any) -> str:
        if name in SIZES:
            return format_size(parse_size(number))
        if name in DURATIONS:
            return format_duration(parse_duration(number))
        return f"{number:,}" if isinstance(number, int) else f"{number:g}"

    bounds = {}
    for part in Limits.model_fields[name].metadata:
        bounds.update({each: getattr(part, each) for each in ("gt", "ge", "le") if hasattr(part, each)})
    lowest = f"above {shown(bounds['gt'])}" if "gt" in bounds else f"from {shown(bounds['ge'])}"
    try:
        given = shown(value)
    except (RingfenceError, TypeError, ValueError):
        given = repr(value)
    text = f"must be {_BOUNDS[kind]} {shown(next(iter(context.values())))}, not {given}"
    hint = f"`{name}` goes {lowest} to {shown(bounds['le'])}"
    if name in SIZES:
        hint += "; a plain number is bytes, so write a unit: 512MiB, 1GiB"
    elif name in DURATIONS:
        hint += "; a plain number is seconds; 10min and 1h are read too"
    return text, hint


def _is_branch(part: Any) -> bool:
    """Whether a location part is pydantic's name for a union's branch rather than a key of the policy."""
    return isinstance(part, str) and ("[" in part or part in ("str", "function-before"))
