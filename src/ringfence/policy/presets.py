"""Named policies, and how several add up.

Guards against a sum that is stricter or weaker than its parts say: limits take the largest value, lists are
joined, of isolation levels the strongest counts, and of command defaults the strictest.

Standard library only; the values are what a policy file would hold.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from ringfence.errors import PolicyError
from ringfence.policy.commands import STRICTNESS
from ringfence.policy.units import parse_duration, parse_size

PRESETS: dict[str, dict[str, Any]] = {
    "untrusted": {
        "description": "Code from anywhere: no network, no host files, small limits. The default.",
    },
    "data-analysis": {
        "description": "Notebooks over tables: more memory, disk and time; no network, no host files.",
        "limits": {
            "timeout": "2min",
            "memory": "2GiB",
            "cpus": 2,
            "pids": 256,
            "disk": "1GiB",
            "tmp": "512MiB",
            "file_size": "512MiB",
            "idle": "30min",
            "max_age": "4h",
        },
    },
    "coding-agent": {
        "description": "An agent that edits, builds and tests: many processes and files, long runs; no network, and "
        "no host files but a workspace that you name.",
        "limits": {
            "timeout": "10min",
            "memory": "2GiB",
            "cpus": 2,
            "pids": 512,
            "disk": "2GiB",
            "tmp": "1GiB",
            "output": "4MiB",
            "file_size": "1GiB",
            "open_files": 4096,
            "idle": "1h",
            "max_age": "8h",
        },
    },
}
"""What the preset policies change in the default policy."""

ALIASES = {"default": "untrusted"}

_LEVELS = ("process", "namespace", "kernel", "vm")
_SIZES = frozenset({"memory", "disk", "tmp", "output", "result", "file_size"})


def preset(name: str) -> dict[str, Any]:
    """The values of one preset.

    Raises:
        PolicyError: there is none of this name.
    """
    found = PRESETS.get(ALIASES.get(name, name))
    if found is None:
        names = sorted({*PRESETS, *ALIASES})
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"presets: {', '.join(names)}"
        raise PolicyError(f"there is no preset policy `{name}`", hint=hint)
    return found


def combine(names: Sequence[str]) -> dict[str, Any]:
    """The sum of presets, as the values of one policy, named after them (`data-analysis+coding-agent`)."""
    total: dict[str, Any] = {}
    for name in names:
        total = add(total, preset(name))
    unique = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    if unique and unique != ["untrusted"]:
        total["name"] = "+".join(name for name in unique if name != "untrusted" or len(unique) == 1)
    return total


def add(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two policies' values added up: whoever needs both presets gets what either permits, under both's demands."""
    total = dict(first)
    for key, value in second.items():
        total[key] = _add(key, total[key], value) if key in total else value
    return total


def _add(key: str, first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return add(first, second)
    if isinstance(first, list) and isinstance(second, list):
        return first + [item for item in second if item not in first]
    if key == "at_least":
        return max(first, second, key=_LEVELS.index)
    if key == "required":
        return "hard" if "hard" in (first, second) else first
    if key == "default" and first in STRICTNESS and second in STRICTNESS:
        return max(first, second, key=STRICTNESS.__getitem__)
    if key == "description":
        return f"{first} {second}"
    if isinstance(first, bool):
        return first or second
    if key in _SIZES:
        return max(first, second, key=parse_size)
    if key in ("timeout", "idle", "max_age"):
        return max(first, second, key=parse_duration)
    if isinstance(first, int | float):
        return max(first, second)
    return second


def override(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A policy's own values laid over its presets: single values replace, lists are joined."""
    total = dict(base)
    for key, value in values.items():
        old = total.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            total[key] = override(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            total[key] = old + [item for item in value if item not in old]
        else:
            total[key] = value
    return total
