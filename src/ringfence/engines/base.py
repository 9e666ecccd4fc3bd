"""The engine contract: what a policy compiles to, what an engine answers, what a started cell is.

This is the first narrow waist of the design. An engine answers `probe()` with what it measured on this
machine, and `start(spec)` with a `Cell`: one byte stream to the guest agent, plus the verbs that only the
outside can do. Everything above (commands, files, code) is written once against the stream.

Standard library only: a default sandbox must not pay for a model library.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LEVELS = ("process", "namespace", "kernel", "vm")
"""Isolation levels from weakest to strongest; `wasm` stands beside them."""


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. Sizes are bytes, times are seconds, `cpus` is a share of processors."""

    timeout: float = 30.0
    memory: int = 512 * MIB
    cpus: float = 1.0
    pids: int = 100
    disk: int = 200 * MIB
    tmp: int = 100 * MIB
    output: int = 1 * MIB
    result: int = 32 * MIB
    file_size: int = 100 * MIB
    open_files: int = 1024
    idle: float = 600.0
    max_age: float = 3600.0
    required: Literal["any", "hard"] = "any"


@dataclass(frozen=True)
class CellSpec:
    """What an engine is asked to hold: a policy in plain values."""

    template: str = "base"
    limits: Limits = field(default_factory=Limits)
    at_least: str = "namespace"
    network: str = "none"
    network_allow: tuple[Any, ...] = ()
    network_inject: tuple[Any, ...] = ()
    read_only: tuple[str, ...] = ()
    workspace: dict[str, Any] | None = None
    """The fields of `policy.Workspace` by name; `source` and `mode` are always there."""
    root: bool = False
    envs: dict[str, str] = field(default_factory=dict)
    cwd: str = "/home/user"
    host_name: str = "sandbox"
    metadata: dict[str, str] = field(default_factory=dict)
    policy_name: str = "default"
    packages: tuple[str, ...] = ()
    """What the template's package environment is made from where there is none of that name yet."""


@dataclass(frozen=True)
class Probe:
    """What an engine measured about itself on this machine."""

    engine: str
    works: bool
    level: str
    why: str = ""
    hint: str = ""
    capabilities: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Enforced:
    """One primitive that is in force in a sandbox: its name, how strongly, and what it does."""

    primitive: str
    strength: Literal["hard", "watched", "none"]
    detail: str


class Cell(Protocol):
    """A started sandbox as an engine sees it."""

    id: str
    stream: socket.socket
    enforcement: tuple[Enforced, ...]

    def kill(self, reason: str = "killed") -> Any: ...

    def pause(self) -> Any: ...

    def resume(self) -> Any: ...

    def stats(self) -> Any: ...


class Engine(Protocol):
    """One isolation technology."""

    name: str
    level: str

    def probe(self) -> Probe: ...

    def start(self, spec: CellSpec) -> Cell: ...
