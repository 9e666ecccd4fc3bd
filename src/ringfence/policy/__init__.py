"""What a sandbox may do: the model, presets, loading, linting, decisions. Pure: no I/O beyond reading the file.

Names load lazily: `DEFAULT` and the unit parsers cost nothing, `Policy` brings pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.policy.commands import CommandDecision
    from ringfence.policy.default import DEFAULT, DefaultPolicy
    from ringfence.policy.explanation import explain
    from ringfence.policy.linting import Finding, lint
    from ringfence.policy.loading import load, load_file, load_text
    from ringfence.policy.model import (
        CommandRule,
        Commands,
        Filesystem,
        Injection,
        Isolation,
        Limits,
        Network,
        NetworkRule,
        Policy,
        Workspace,
    )
    from ringfence.policy.presets import PRESETS
    from ringfence.policy.units import format_duration, format_size, parse_duration, parse_size

_HOMES = {
    "CommandDecision": "commands",
    "CommandRule": "model",
    "Commands": "model",
    "DEFAULT": "default",
    "DefaultPolicy": "default",
    "Filesystem": "model",
    "Finding": "linting",
    "Injection": "model",
    "Isolation": "model",
    "Limits": "model",
    "Network": "model",
    "NetworkRule": "model",
    "PRESETS": "presets",
    "Policy": "model",
    "Workspace": "model",
    "explain": "explanation",
    "format_duration": "units",
    "format_size": "units",
    "lint": "linting",
    "load": "loading",
    "load_file": "loading",
    "load_text": "loading",
    "parse_duration": "units",
    "parse_size": "units",
}

__all__ = [
    "DEFAULT",
    "PRESETS",
    "CommandDecision",
    "CommandRule",
    "Commands",
    "DefaultPolicy",
    "Filesystem",
    "Finding",
    "Injection",
    "Isolation",
    "Limits",
    "Network",
    "NetworkRule",
    "Policy",
    "Workspace",
    "explain",
    "format_duration",
    "format_size",
    "lint",
    "load",
    "load_file",
    "load_text",
    "parse_duration",
    "parse_size",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
