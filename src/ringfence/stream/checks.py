"""Judges arguments before anything is sent, so that a mistake is an error here and not a riddle from inside.

Guards against NUL bytes (they end a path or an argument early for the kernel), wrong types that JSON would
carry on silently, environment names that cannot exist, and times that are not times.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ringfence.errors import InvalidArgumentError

__all__ = [
    "check_argv",
    "check_callback",
    "check_context_id",
    "check_count",
    "check_envs",
    "check_mode",
    "check_path",
    "check_seconds",
    "check_text",
]

_MAXIMUM_SECONDS = 1e9


def check_text(value: Any, name: str, *, empty: bool = True) -> str:
    """`value` as it is, when it is a str without NUL; surrogate escapes are welcome."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise InvalidArgumentError(f"{name} holds a NUL byte", hint="the kernel would end the text there")
    if not empty and not value:
        raise InvalidArgumentError(f"{name} is empty")
    return value


def check_path(value: Any, name: str = "path") -> str:
    """A path inside the sandbox as str; bytes and path objects are taken too (`os.fsdecode`)."""
    if type(value) is not str:
        try:
            value = os.fsdecode(value)
        except TypeError:
            raise InvalidArgumentError(
                f"{name} must be a path (str, bytes or a path object), not {type(value).__name__}"
            ) from None
    return check_text(value, name, empty=False)


def check_seconds(value: Any, name: str, *, zero: bool = True) -> float | None:
    """A time in seconds, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if math.isnan(value) or value < 0 or value > _MAXIMUM_SECONDS or (value == 0 and not zero):
        raise InvalidArgumentError(f"{name} must be a positive number of seconds, not {value}")
    return float(value)


def check_count(value: Any, name: str, *, lowest: int = 0, highest: int = 1 << 62) -> int:
    """An int between `lowest` and `highest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} must be an int, not {type(value).__name__}")
    if not lowest <= value <= highest:
        raise InvalidArgumentError(f"{name} must lie between {lowest} and {highest}, not {value}")
    return value


def check_mode(value: Any) -> int:
    """Permission bits; set-id bits are refused because nothing in a sandbox may have them."""
    mode = check_count(value, "mode", highest=0o7777)
    if mode & 0o6000:
        raise InvalidArgumentError(f"mode {mode:o} has a set-id bit", hint="a sandbox has no set-id files")
    return mode


def check_envs(value: Any) -> dict[str, str] | None:
    """Environment variables, or None when there are none."""
    if not value:
        if value is None or isinstance(value, Mapping):
            return None
        raise InvalidArgumentError(f"envs must be a dict, not {type(value).__name__}")
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"envs must be a dict, not {type(value).__name__}")
    envs: dict[str, str] = {}
    for name, text in value.items():
        check_text(name, "the name of an environment variable", empty=False)
        if "=" in name:
            raise InvalidArgumentError(f"the name of an environment variable holds '=': {name!r}")
        envs[name] = check_text(text, f"environment variable {name!r}")
    return envs


def check_argv(value: Any) -> list[str]:
    """A command: a str goes to `bash -c`, a sequence is the argument vector itself."""
    if isinstance(value, str):
        return ["/bin/bash", "-c", "--", check_text(value, "cmd")]
    if isinstance(value, (bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgumentError(
            f"cmd must be a str for the shell or a list of arguments, not {type(value).__name__}"
        )
    argv = []
    for item in value:
        if not isinstance(item, (str, bytes, os.PathLike)):
            raise InvalidArgumentError(f"an argument of cmd must be a str, not {type(item).__name__}")
        argv.append(check_text(os.fsdecode(item), "an argument of cmd"))
    if not argv or not argv[0]:
        raise InvalidArgumentError(
            "cmd is empty", hint="pass a str for the shell, or a list whose first item is the program"
        )
    return argv


def check_callback(value: Any, name: str) -> None:
    """Anything that can be called, or None."""
    if value is not None and not callable(value):
        raise InvalidArgumentError(f"{name} must be callable, not {type(value).__name__}")


def check_context_id(value: Any) -> str:
    """The id of a code context, given as itself or as a `Context`."""
    identity = getattr(value, "id", value)
    return check_text(identity, "context", empty=False)
