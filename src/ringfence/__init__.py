"""Ringfence: run code that nobody trusts, in a place it cannot leave.

    from ringfence import Sandbox

    with Sandbox() as sandbox:
        print(sandbox.run_code("21 * 2").text)

Names load when they are first used (PEP 562), so that importing the package costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from ringfence.changes.model import Applied, Change, Changes, FileState
    from ringfence.errors import (
        ApplyConflictError,
        ApplyRefusedError,
        CaptureError,
        CommandExitError,
        EnforcementError,
        EngineError,
        FileConflictError,
        FileOperationError,
        GuestError,
        InvalidArgumentError,
        LimitExceededError,
        MemoryLimitExceededError,
        NotEnoughSpaceError,
        NotFoundError,
        OutputGoneError,
        PermissionDeniedError,
        PolicyError,
        ResultError,
        RingfenceError,
        SandboxDeadError,
        SandboxError,
        SandboxPausedError,
        TimeoutExceededError,
        TransferError,
        WrongProcessError,
    )
    from ringfence.policy import Policy, Workspace
    from ringfence.sandbox import (
        AsyncCommandHandle,
        AsyncFileStream,
        AsyncSandbox,
        AsyncWatchHandle,
        CommandHandle,
        FileStream,
        Sandbox,
        SandboxInfo,
        SandboxOptions,
        WatchHandle,
    )
    from ringfence.stream.results import (
        Chart,
        CommandResult,
        Context,
        EntryInfo,
        Execution,
        ExecutionError,
        FilesystemEvent,
        FilesystemEventType,
        FileType,
        Logs,
        OutputMessage,
        ProcessInfo,
        PtySize,
        Result,
        SandboxMetrics,
        SkippedEntry,
        TransferReport,
        Usage,
        WriteInfo,
    )

__version__ = "0.1.0"

_HOMES = {
    "changes.model": ("Applied", "Change", "Changes", "FileState"),
    "errors": (
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
    ),
    "policy": ("Policy", "Workspace"),
    "sandbox": (
        "AsyncCommandHandle",
        "AsyncFileStream",
        "AsyncSandbox",
        "AsyncWatchHandle",
        "CommandHandle",
        "FileStream",
        "Sandbox",
        "SandboxInfo",
        "SandboxOptions",
        "WatchHandle",
    ),
    "stream.results": (
        "Chart",
        "CommandResult",
        "Context",
        "EntryInfo",
        "Execution",
        "ExecutionError",
        "FileType",
        "FilesystemEvent",
        "FilesystemEventType",
        "Logs",
        "OutputMessage",
        "ProcessInfo",
        "PtySize",
        "Result",
        "SandboxMetrics",
        "SkippedEntry",
        "TransferReport",
        "Usage",
        "WriteInfo",
    ),
}

__all__ = [
    "Applied",
    "ApplyConflictError",
    "ApplyRefusedError",
    "AsyncCommandHandle",
    "AsyncFileStream",
    "AsyncSandbox",
    "AsyncWatchHandle",
    "CaptureError",
    "Change",
    "Changes",
    "Chart",
    "CommandExitError",
    "CommandHandle",
    "CommandResult",
    "Context",
    "EnforcementError",
    "EngineError",
    "EntryInfo",
    "Execution",
    "ExecutionError",
    "FileConflictError",
    "FileOperationError",
    "FileState",
    "FileStream",
    "FileType",
    "FilesystemEvent",
    "FilesystemEventType",
    "GuestError",
    "InvalidArgumentError",
    "LimitExceededError",
    "Logs",
    "MemoryLimitExceededError",
    "NotEnoughSpaceError",
    "NotFoundError",
    "OutputGoneError",
    "OutputMessage",
    "PermissionDeniedError",
    "Policy",
    "PolicyError",
    "ProcessInfo",
    "PtySize",
    "Result",
    "ResultError",
    "RingfenceError",
    "Sandbox",
    "SandboxDeadError",
    "SandboxError",
    "SandboxInfo",
    "SandboxMetrics",
    "SandboxOptions",
    "SandboxPausedError",
    "SkippedEntry",
    "TimeoutExceededError",
    "TransferError",
    "TransferReport",
    "Usage",
    "WatchHandle",
    "Workspace",
    "WriteInfo",
    "WrongProcessError",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"ringfence.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
