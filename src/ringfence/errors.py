"""Every exception that Ringfence raises on purpose, in one tree.

Guards against two confusions that cost users most: a *sandbox* that died taken for a *command* that failed,
and a failure of Ringfence taken for a failure of the user's code. Builtin bases are kept (`ValueError`,
`TimeoutError`, `FileNotFoundError`, ...), so that ordinary `except` clauses work too.

RingfenceError                      message, and a hint that says what to do
├── InvalidArgumentError            (ValueError) a call that cannot mean anything
├── PolicyError                     (ValueError) a policy that contradicts itself or cannot be read
├── EnforcementError                a policy that cannot be held here; `.primitive` names what is missing
├── EngineError                     an engine that is absent, broken or refused to start
├── WrongProcessError               a sandbox used in a forked child of the process that owns it
└── SandboxError                    anything about one sandbox
    ├── SandboxDeadError            it is gone; `.reason` says why
    ├── SandboxPausedError          it is paused: nothing inside can answer until it is resumed
    ├── NotFoundError               (FileNotFoundError) no such file, process, context or sandbox
    ├── PermissionDeniedError       (PermissionError) the user inside may not do that
    ├── FileConflictError           (FileExistsError) the target exists
    ├── NotEnoughSpaceError         (OSError) the sandbox's disk or file limit is used up
    ├── FileOperationError          a file operation that failed otherwise
    ├── TransferError               size or hash of what arrived differ from what was sent
    ├── CaptureError                the changes of a workspace could not be read, or are malformed
    ├── ApplyRefusedError           changes of a workspace that may not be written, or could not; nothing was
    │   └── ApplyConflictError      the host changed the same files meanwhile
    ├── GuestError                  the agent inside failed or answered nonsense; `.code` is its word
    ├── CommandExitError            `check=True` and a non-zero exit; `.result` holds the result
    ├── TimeoutExceededError        (TimeoutError) a deadline passed; `.partial`, `.limit`, `.what`, `.outcome`
    ├── LimitExceededError          a limit other than time; `.limit`, `.value`
    │   └── MemoryLimitExceededError
    ├── OutputGoneError             output older than the ring keeps; `.oldest` is the first offset left
    └── ResultError                 a result that is malformed or larger than `limits.result`
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ApplyConflictError",
    "ApplyRefusedError",
    "CaptureError",
    "CommandExitError",
    "EnforcementError",
    "EngineError",
    "FileConflictError",
    "FileOperationError",
    "GuestError",
    "InvalidArgumentError",
    "LimitExceededError",
    "MemoryLimitExceededError",
    "NotEnoughSpaceError",
    "NotFoundError",
    "OutputGoneError",
    "PermissionDeniedError",
    "PolicyError",
    "ResultError",
    "RingfenceError",
    "SandboxDeadError",
    "SandboxError",
    "SandboxPausedError",
    "TimeoutExceededError",
    "TransferError",
    "WrongProcessError",
]

DEATH_REASONS = ("killed", "oom", "idle", "max_age", "crashed", "owner", "protocol")


class RingfenceError(Exception):
    """Base of all errors here. `str()` shows the message and, when there is one, the hint.

    `message` says what went wrong; `hint` says what to do about it.
    """

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        # The bases of OSError look at the number of arguments, so exactly one is passed on.
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only fields would be lost by the default pickle of exceptions (multiprocessing needs it).
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[RingfenceError], message: str, state: dict[str, Any]) -> RingfenceError:
    # __new__ with the message alone: an OSError that is given two arguments would take them for errno, strerror.
    error = kind.__new__(kind, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidArgumentError(RingfenceError, ValueError):
    """An argument that cannot be right: wrong type, NUL byte, negative time, unknown name."""


class PolicyError(RingfenceError, ValueError):
    """A policy that cannot be read, contradicts itself or demands the impossible."""


class EnforcementError(RingfenceError):
    """The policy cannot be held on this machine, so nothing was started.

    `primitive` names what is missing (`"user namespaces"`, `"cgroup memory controller"`, ...).
    """

    def __init__(self, message: str = "", *, hint: str = "", primitive: str = "") -> None:
        super().__init__(message, hint=hint)
        self.primitive = primitive


class EngineError(RingfenceError):
    """An engine that is absent, broken, or failed to start a sandbox."""


class WrongProcessError(RingfenceError):
    """A sandbox belongs to the process that made it; this is another one (after `fork`, say)."""


class SandboxError(RingfenceError):
    """Base of everything that concerns one sandbox."""


class SandboxDeadError(SandboxError):
    """The sandbox is gone, and with it all its processes. A command that failed is never reported so.

    `reason` is one of killed, oom, idle, max_age, crashed, owner, protocol.
    """

    def __init__(self, message: str = "", *, hint: str = "", reason: str = "crashed") -> None:
        super().__init__(message or f"the sandbox is gone: {reason}", hint=hint)
        self.reason = reason


class SandboxPausedError(SandboxError):
    """The sandbox is paused (`pause()`), so nothing inside can answer; `resume()` it first."""


class NotFoundError(SandboxError, FileNotFoundError):
    """No such file, process, context, template or sandbox."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.ENOENT


class PermissionDeniedError(SandboxError, PermissionError):
    """The user inside the sandbox has no right to do that."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.EACCES


class FileConflictError(SandboxError, FileExistsError):
    """The target exists, and is not what the operation needs."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.EEXIST


class NotEnoughSpaceError(SandboxError, OSError):
    """The sandbox's disk, temporary or single-file limit is used up."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.ENOSPC


class FileOperationError(SandboxError):
    """A file operation that failed for another reason; `code` is the guest's word for it."""

    def __init__(self, message: str = "", *, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class TransferError(SandboxError):
    """What arrived is not what was sent: size or SHA-256 differ. The file must not be used."""


class CaptureError(SandboxError):
    """The changes below a workspace could not be read, are malformed, or are more than the bounds allow."""


class ApplyRefusedError(SandboxError):
    """Changes of a workspace were not written to the host, not one of them. `paths` names those that stood in the way."""

    def __init__(self, message: str = "", *, hint: str = "", paths: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.paths = paths


class ApplyConflictError(ApplyRefusedError):
    """The host's files at `paths` are no longer what the changes were compared with, so nothing was written."""


class GuestError(SandboxError):
    """The agent inside failed, or answered something that it must not. `code` is its own word, untrusted."""

    def __init__(self, message: str = "", *, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class CommandExitError(SandboxError):
    """A command ended with a non-zero exit code or by a signal, and `check=True` was asked.

    `result` is the whole `CommandResult`.
    """

    def __init__(self, message: str = "", *, hint: str = "", result: Any = None) -> None:
        super().__init__(message, hint=hint)
        self.result = result

    @property
    def exit_code(self) -> int:
        """The exit code; 128 + n after death by signal n, as shells count."""
        return self.result.exit_code

    @property
    def stdout(self) -> str:
        """What the command wrote to its output, as far as it was kept."""
        return self.result.stdout

    @property
    def stderr(self) -> str:
        """What the command wrote to its error output, as far as it was kept."""
        return self.result.stderr


class TimeoutExceededError(SandboxError, TimeoutError):
    """A deadline passed on the host's clock, and what was running has been stopped.

    `what` names what ran; `limit` is the deadline in seconds; `partial` holds the output so far
    (a `CommandResult` or `Execution`, or None); `outcome` says what stopping took:

    - `"interrupted"`: code got a KeyboardInterrupt; variables survive
    - `"restarted"`: the kernel did not react and was replaced; variables are gone
    - `"killed"`: the command's whole process tree was killed
    - `"sandbox_killed"`: the guest did not answer, so the whole sandbox was killed
    """

    def __init__(
        self,
        message: str = "",
        *,
        hint: str = "",
        what: str = "",
        limit: float | None = None,
        partial: Any = None,
        outcome: str = "killed",
    ) -> None:
        super().__init__(message, hint=hint)
        self.what = what
        self.limit = limit
        self.partial = partial
        self.outcome = outcome


class LimitExceededError(SandboxError):
    """A limit other than time was reached; `limit` is its name, `value` its configured value."""

    def __init__(self, message: str = "", *, hint: str = "", limit: str = "", value: Any = None) -> None:
        super().__init__(message, hint=hint)
        self.limit = limit
        self.value = value


class MemoryLimitExceededError(LimitExceededError):
    """The kernel's out-of-memory killer, or the memory watch, ended something inside."""

    def __init__(
        self, message: str = "", *, hint: str = "", limit: str = "memory", value: Any = None
    ) -> None:
        super().__init__(message, hint=hint, limit=limit, value=value)


class OutputGoneError(SandboxError):
    """The output at that offset is older than what the ring keeps. `oldest` is the first offset left, in bytes."""

    def __init__(self, message: str = "", *, hint: str = "", oldest: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.oldest = oldest


class ResultError(SandboxError):
    """A result that is malformed, or larger than `limits.result` lets through."""
