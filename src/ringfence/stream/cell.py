"""What the stream layer needs of a running sandbox: one small protocol that the node's handles satisfy.

Guards the layering: everything above works on any handle with these members, a remote one included later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ringfence.engines.base import CellSpec, Enforced, Limits
    from ringfence.errors import SandboxDeadError
    from ringfence.stream.connection import Connection
    from ringfence.stream.log import Log
    from ringfence.stream.waiting import Pending

__all__ = ["CellHandle"]


class CellHandle(Protocol):
    """One running sandbox as the node hands it out."""

    id: str
    """Unique name of the sandbox, letters and digits."""
    connection: Connection
    """The stream to the guest agent."""
    engine: str
    level: str
    template: str
    limits: Limits
    spec: CellSpec
    """What it was started from."""
    timings: dict[str, float]
    """Seconds that each step of the start took."""
    started_at: float
    """Seconds since 1970."""
    expires_at: float
    """Seconds since 1970: the node kills the sandbox then, whatever its guest does."""

    def kill(self, reason: str = "killed") -> Pending[Any]:
        """Kill everything inside; completes when the host has seen the last process gone. Idempotent."""
        ...

    def stats(self) -> Pending[Any]:
        """A dict with at least `memory` (bytes), `oom_kills` and `pids`, read from outside of the sandbox."""
        ...

    log: Log
    """The newest output, for whoever asks the node for it; set by the session."""
    counters: dict[str, str]
    """Files of the host that count what it uses, for linux/counters.py; empty where nothing does."""

    def measure(self) -> Pending[dict[str, Any]]:
        """What it uses now: `stats` and bytes of `disk` and `tmp`."""
        ...

    def resize(self, changes: dict[str, Any]) -> Pending[Limits]:
        """Put new limits (`memory`, `cpus`, `pids`) in force; completes with all that are in force then."""
        ...

    def pause(self) -> Pending[Any]:
        """Stop every process; completes when all stand still."""
        ...

    def resume(self) -> Pending[Any]:
        """Let all go on."""
        ...

    def inspect(self) -> Pending[tuple[Enforced, ...]]:
        """What is in force, primitive by primitive, read from the kernel now."""
        ...

    def capture(self, descriptor: int) -> Pending[Any]:
        """Write what was changed in an overlay workspace to `descriptor`; completes with a dict that has `frozen`."""
        ...

    def set_expiry(self, expires_at: float) -> None:
        """Move `expires_at`; the node itself refuses times beyond start + `limits.max_age`."""
        ...

    def on_dead(self, callback: Callable[[SandboxDeadError], None]) -> None:
        """Call back once, from any thread, when the sandbox is gone; at once when it is gone already."""
        ...

    def operation_started(self) -> None:
        """The owner began to use the sandbox; while operations are in flight it is not idle."""
        ...

    def operation_ended(self) -> None:
        """An operation is over; `limits.idle` counts from the end of the last one."""
        ...
