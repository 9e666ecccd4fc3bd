"""The closed grammar of what a node may ask of its launcher.

The launcher does privileged work for whoever holds the other end of its socket, so every field of every
request is checked against a type and a bound here, and unknown verbs or fields are refused: nothing is
passed on to the kernel that this page does not name. Standard library only.
"""

from __future__ import annotations

from ringfence.linux.json_text import loads

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAXIMUM_REQUEST = 192 << 10  # bytes of one request
MAXIMUM_DIRECTORIES = 33  # host directories of one sandbox: the workspace and those it may read

WORKSPACE = "/workspace"

_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")  # of an id and of a host name; the first is no "-"
_LONGEST_NAME = 63


class GrammarError(ValueError):
    """A request that the grammar does not know."""


def _number(low: float, high: float) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise GrammarError(f"a number between {low} and {high} was expected, not {value!r}")
        return value

    return check


def _integer(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise GrammarError(f"an integer between {low} and {high} was expected, not {value!r}")
        return value

    return check


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or value[0] == "-" or set(value) - _NAME:
        raise GrammarError(f"a name of small letters, digits and dashes was expected, not {value!r}")
    return value


def _strength(value: Any) -> str:
    if value not in ("any", "hard"):
        raise GrammarError(f"any or hard was expected, not {value!r}")
    return value


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or len(value) > 4096:
        raise GrammarError(f"an absolute path was expected, not {value!r}")
    return value


def _paths(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > 100:
        raise GrammarError("a list of at most 100 paths was expected")
    return [_path(item) for item in value]


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise GrammarError(f"true or false was expected, not {value!r}")
    return value


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 1000:
        raise GrammarError("an environment of at most 1000 names was expected")
    for name, text in value.items():
        if not isinstance(text, str) or "\0" in text or not 0 < len(name) <= 256 or "=" in name or "\0" in name:
            raise GrammarError(f"the environment variable {name!r} is not valid")
    return value


def _modules(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > 100:
        raise GrammarError("a list of at most 100 modules was expected")
    for name in value:
        if not isinstance(name, str) or not name.isascii() or not all(part.isidentifier() for part in name.split(".")):
            raise GrammarError(f"the name of a module was expected, not {name!r}")
    return value


def _sources(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or set(value) - {"python", "env", "packages", "ringfence"}:
        raise GrammarError(f"sources may be python, env, packages and ringfence, not {sorted(value)!r}")
    return {name: _path(path) for name, path in value.items()}


_MODES = ("ro", "rw", "overlay")
_DIRECTORY = {"place", "mode", "root_owned", "protected"}


def _protected(value: Any) -> list[str]:
    """Relative paths of what stays read-only in a directory that is written. All of them travel in one message."""
    if not isinstance(value, list) or len(value) > 200 or sum(len(str(item)) for item in value) > 24 << 10:
        raise GrammarError("a list of at most 200 protected paths, 24 KiB together, was expected")
    for item in value:
        if not isinstance(item, str) or "\0" in item or {"", ".", ".."} & set(item.split("/")):
            raise GrammarError(f"{item!r} is not a plain relative path")
    return value


def _directories(value: Any) -> list[dict[str, Any]]:
    """Host directories: their descriptors come with the request, in this order."""
    if not isinstance(value, list) or len(value) > MAXIMUM_DIRECTORIES:
        raise GrammarError(f"a list of at most {MAXIMUM_DIRECTORIES} directories was expected")
    for item in value:
        if not isinstance(item, dict) or set(item) != _DIRECTORY or item["mode"] not in _MODES:
            raise GrammarError(f"a directory has a place, a mode, root_owned and protected, not {item!r}")
        place = _path(item["place"])
        if any(part in ("", ".", "..") for part in place.split("/")[1:]):
            raise GrammarError(f"{place!r} is not a plain path")
        _boolean(item["root_owned"])
        if item["mode"] != "ro" and place != WORKSPACE:
            raise GrammarError("only the workspace can be written")
        _protected(item["protected"])
    if len({item["place"] for item in value}) != len(value):
        raise GrammarError("two directories have the same place")
    return value


_TIB = 1 << 40
_LIMITS: dict[str, Callable[[Any], Any]] = {
    "memory": _integer(16 << 20, _TIB),
    "cpus": _number(0.01, 4096),
    "pids": _integer(4, 1 << 22),
    "disk": _integer(1 << 20, _TIB),
    "tmp": _integer(1 << 16, _TIB),
    "file_size": _integer(1 << 12, _TIB),
    "open_files": _integer(32, 1 << 20),
    "max_age": _number(0.1, 10 * 365 * 86400),
    "required": _strength,
}


def _limits(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(_LIMITS):
        raise GrammarError(f"limits must name exactly {sorted(_LIMITS)}")
    return {name: _LIMITS[name](item) for name, item in value.items()}


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


_VERBS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "configure": {"owner": _integer(1, 1 << 22), "pass_environment": _environment, "spares": _integer(0, 1000)},
    "template": {
        "name": _name, "sources": _sources, "python": _path, "library": lambda v: v and _path(v),
        "modules": _modules, "isolated": _boolean, "masks": _paths, "root": _boolean,
    },
    "create": {
        "id": _name, "template": _name, "limits": _limits, "environment": _environment,
        "cwd": _path, "host_name": _name, "prefork": _boolean, "directories": _directories,
    },
    "kill": {"id": _name, "reason": _name},
    "expire": {"id": _name, "seconds": _number(0, 10 * 365 * 86400), "fresh": _boolean},
    "resize": {
        "id": _name, "memory": _optional(_LIMITS["memory"]), "cpus": _optional(_LIMITS["cpus"]),
        "pids": _optional(_LIMITS["pids"]),
    },
    "measure": {"id": _name},
    "freeze": {"id": _name},
    "thaw": {"id": _name},
    "capture": {"id": _name},
    "stats": {"id": _name},
    "inspect": {"id": _name},
    "probe": {},
    "close": {},
}  # fmt: skip


def parse(raw: bytes) -> dict[str, Any]:
    """Parse one request. Raises GrammarError for anything the grammar does not name."""
    if len(raw) > MAXIMUM_REQUEST:
        raise GrammarError("the request is too large")
    try:
        message = loads(raw)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise GrammarError("an object was expected")
    verb = message.get("do")
    fields = _VERBS.get(verb) if isinstance(verb, str) else None
    if fields is None:
        raise GrammarError(f"unknown request {verb!r}")
    if set(message) != set(fields) | {"do", "number"}:
        raise GrammarError(f"{verb} takes exactly {sorted(fields)}, not {sorted(set(message) - {'do', 'number'})}")
    checked = {name: check(message[name]) for name, check in fields.items()}
    checked["do"], checked["number"] = verb, _integer(0, 1 << 53)(message["number"])
    return checked
