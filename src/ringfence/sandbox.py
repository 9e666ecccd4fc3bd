"""`Sandbox` and `AsyncSandbox`, the facade that users hold, and the types in its signatures.

Guards the start-up time: a module here is loaded when its name is first used, so that the sync facade never pays
for the async one. The async facade is the source (`_sandbox_async`), the sync one its generated twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence._sandbox_async import AsyncCommandHandle, AsyncFileStream, AsyncSandbox, AsyncWatchHandle
    from ringfence._sandbox_core import SandboxInfo, SandboxOptions
    from ringfence._sandbox_sync import CommandHandle, FileStream, Sandbox, WatchHandle

__all__ = [
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
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = (
        "async"
        if name.startswith("Async")
        else "core"
        if name.startswith("Sandbox") and name != "Sandbox"
        else "sync"
    )
    value = getattr(import_module(f"ringfence._sandbox_{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
