"""Reading policies: files and texts (YAML, JSON), dictionaries, names of presets. Errors say file and line.

Guards against a file that says one thing to a person and another to a parser: a key written twice, YAML 1.1's
surprises (`no` as false, `22:22` as a number), aliases that blow up, files of unbounded size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from ringfence.errors import PolicyError
from ringfence.policy import presets
from ringfence.policy.default import DefaultPolicy
from ringfence.policy.model import Policy, nearest, policy_error, shorten

LARGEST_FILE = 1 << 20
DEEPEST = 32

Source = str | os.PathLike[str] | Mapping[str, Any] | Policy | DefaultPolicy | None


def load(source: Source = None) -> Policy:
    """The policy that `source` means: None (the default), a Policy, a dictionary, a preset's name, presets joined
    by `+`, or the path of a YAML or JSON file.

    In a file or dictionary, `presets: [NAME, ...]` starts from presets, which add up; what the file says itself
    replaces single values and joins lists. A relative `workspace.source` in a file is relative to the file.

    Raises:
        PolicyError: it cannot be read or makes no sense; the message says file and line where there are any.
    """
    if source is None or isinstance(source, DefaultPolicy):
        return Policy()
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        return _build(dict(source), "", {})
    text = os.fspath(source)
    if isinstance(source, str) and _is_preset_name(text):
        return Policy(**presets.combine(text.split("+")))
    return load_file(text)


def load_file(path: str | os.PathLike[str]) -> Policy:
    """The policy in a YAML or JSON file, see `load`."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as problem:
        known = ", ".join(sorted({*presets.PRESETS, *presets.ALIASES}))
        raise PolicyError(
            f"cannot read the policy {name}: {problem.strerror}", hint=f"give a file, or a preset: {known}"
        ) from None
    if len(raw) > LARGEST_FILE:
        raise PolicyError(f"the policy {name} is larger than 1 MiB", hint="split it, or name fewer rules")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PolicyError(f"the policy {name} is not UTF-8 text", hint="save it as UTF-8") from None
    policy = load_text(text, name)
    workspace = policy.filesystem.workspace
    if workspace is not None and not os.path.isabs(workspace.source):
        folder = os.path.dirname(os.path.abspath(name))
        source = os.path.normpath(os.path.join(folder, os.path.expanduser(workspace.source)))
        placed = workspace.model_copy(update={"source": source})
        policy = policy.model_copy(
            update={"filesystem": policy.filesystem.model_copy(update={"workspace": placed})}
        )
    return policy


def load_text(text: str, name: str = "") -> Policy:
    """The policy in a YAML or JSON text; `name` is what errors call it."""
    values, lines = read(text, name)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise PolicyError(f"{_at(name, 1)}a policy is a mapping of keys, not {type(values).__name__}")
    return _build(values, name, lines)


def _build(values: dict[str, Any], name: str, lines: dict[tuple[Any, ...], int]) -> Policy:
    chosen = values.pop("presets", [])
    if not isinstance(chosen, list) or not all(isinstance(item, str) for item in chosen):
        raise PolicyError(
            f"{_at(name, lines.get(('presets',)))}presets: it is a list of names", hint="presets: [untrusted]"
        )
    for key in values:
        if key not in Policy.model_fields:
            where = _at(name, lines.get((key,)))
            raise PolicyError(
                f"{where}{key}: unknown key `{key}`",
                hint=nearest(str(key), [*Policy.model_fields, "presets"]),
            )
    try:
        base = presets.combine(chosen)
    except PolicyError as problem:
        raise PolicyError(
            f"{_at(name, lines.get(('presets',)))}{problem.message}", hint=problem.hint
        ) from None
    own = values.get("limits")
    if isinstance(own, Mapping) and "limits" in base:
        base = {**base, "limits": dict(base["limits"])}
        shorten(base["limits"], own)
    merged = presets.override(base, values)
    try:
        return Policy(**merged)
    except PolicyError as problem:
        # Policy's own error has no lines; what pydantic found is its context.
        if not isinstance(problem.__context__, ValidationError):
            raise
        raise policy_error(problem.__context__, _places(name, lines)) from None


def _places(name: str, lines: dict[tuple[Any, ...], int]) -> Callable[[tuple[Any, ...]], str]:
    def place(path: tuple[Any, ...]) -> str:
        for length in range(len(path), 0, -1):
            if line := lines.get(path[:length]):
                return _at(name, line)
        return _at(name, None)

    return place


def _at(name: str, line: int | None) -> str:
    if name and line:
        return f"{name}:{line}: "
    return f"line {line}: " if line else f"{name}: " if name else ""


def _is_preset_name(text: str) -> bool:
    return all(re.fullmatch(r"[a-z][a-z-]*", part) for part in text.split("+")) and not os.path.exists(text)


_PLAIN_TAGS = frozenset({"str", "int", "float", "bool", "null", "seq", "map"})


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of its 1.2 core schema only."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def read(text: str, name: str = "") -> tuple[Any, dict[tuple[Any, ...], int]]:
    """The plain values in a YAML or JSON text, and the line (from 1) of each key and item by its path.

    Raises:
        PolicyError: a syntax error, a key written twice, an alias, or nesting deeper than 32.
    """
    if text.lstrip().startswith("{"):
        try:
            json.loads(text)
            text = text.replace("\t", " ")  # YAML forbids tabs where JSON allows them; JSON strings hold none
        except (ValueError, RecursionError):
            pass  # YAML's flow style starts the same way
    lines: dict[tuple[Any, ...], int] = {}
    loader = _Loader(text)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.events.AliasEvent):
                raise PolicyError(
                    f"{_at(name, event.start_mark.line + 1)}aliases (`*{event.anchor}`) are not allowed in policies",
                    hint="write the value out",
                )
        node = loader.get_single_node()
        return (None if node is None else _value(loader, node, (), lines, name)), lines
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        raise PolicyError(
            f"{_at(name, mark.line + 1 if mark else None)}not valid YAML: {problem.problem or problem.context}",
            hint="check indentation, quotes and brackets near this line",
        ) from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise PolicyError(f"{_at(name, None)}not valid YAML: {problem}") from None
    finally:
        loader.dispose()


def _value(
    loader: _Loader, node: yaml.Node, path: tuple[Any, ...], lines: dict[tuple[Any, ...], int], name: str
) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(path) > DEEPEST:
        raise PolicyError(f"{_at(name, line)}nested too deeply")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS:
        raise PolicyError(f"{_at(name, line)}tags such as {node.tag} are not allowed in policies")
    if isinstance(node, yaml.MappingNode):
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise PolicyError(f"{_at(name, line)}keys are plain words")
            key = key_node.value  # as written: `on`, `1` and `null` are words here
            if key in values:
                raise PolicyError(
                    f"{_at(name, line)}the key `{key}` is written twice", hint="keep one of them"
                )
            lines[(*path, key)] = line
            values[key] = _value(loader, value_node, (*path, key), lines, name)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, (*path, index), lines, name) for index, item in enumerate(node.value)]
    return loader.construct_object(node)
