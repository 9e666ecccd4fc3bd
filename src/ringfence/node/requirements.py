"""What somebody asks for, as requirement lines that may safely be handed to pip.

Guards against a requirement that is more than a name: an option (`--index-url`, `-e .`), a path, a URL or a checkout
would make pip read, fetch or *build* something that nobody reviewed, on the host. Only PEP 508 requirements with
versions, extras and markers pass, and `--hash=sha256:`; everything else is refused with its line. Files may be
requirements files, a `pyproject.toml` (its `project.dependencies`) and lock files (`pylock.toml`, PEP 751).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ringfence.errors import EngineError, InvalidArgumentError
from ringfence.node import distributions

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.*+!_-]+"
_LINE = re.compile(
    rf"(?P<name>{_NAME})\s*(?P<extras>\[\s*(?:{_NAME}\s*(?:,\s*{_NAME}\s*)*)?\])?\s*"
    rf"(?P<versions>{_VERSION}(?:\s*,\s*{_VERSION})*|\(\s*{_VERSION}(?:\s*,\s*{_VERSION})*\s*\))?\s*(?:;(?P<marker>.*))?\Z",
    re.DOTALL,
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\Z")
LARGEST_FILE = 16 << 20  # bytes of a requirements or lock file
DEEPEST = 10  # files that name files


def check(text: str, where: str = "") -> str:
    """One requirement, trimmed. Raises InvalidArgumentError for what is no PEP 508 requirement of an index."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"a package is named by a text, not by {type(text).__name__}")
    line = text.strip()
    place = f"{where}: " if where else ""
    match = _LINE.match(line) if len(line) <= 2000 and line.isprintable() else None
    if match is None:
        if line.startswith("-"):
            why, hint = "is an option", "pass index and links to ringfence: --index-url, --find-links"
        elif "@" in line or "://" in line or "/" in line or line in (".", ".."):
            why, hint = (
                "is a path or an address, which could make pip build something on this machine",
                "name a package of an index, or put its wheel into a directory for --find-links",
            )
        else:
            why, hint = "is no package requirement (PEP 508)", "write a name, as `polars` or `polars[excel]>=1.2`"
        raise InvalidArgumentError(f"{place}{line[:200]!r} {why}", hint=hint)
    marker = match["marker"]
    if marker is not None:
        try:
            distributions.evaluate_marker(marker)
        except EngineError as error:
            raise InvalidArgumentError(f"{place}{error.message}", hint="see PEP 508 for environment markers") from None
    return line


def check_all(lines: Iterable[str]) -> list[str]:
    """Requirements from arguments; a text alone is refused, since its letters would be packages."""
    if isinstance(lines, str):
        raise InvalidArgumentError("packages must be a list", hint=f"packages=[{lines!r}]")
    checked = [check(line) for line in lines]
    if not checked:
        raise InvalidArgumentError("packages names no package", hint='packages=["polars"]')
    return checked


def read_file(path: str) -> list[str]:
    """The requirements in a file, pip's hashes behind them where the file has some.

    Raises:
        InvalidArgumentError: it cannot be read, or asks for more than packages of an index.
    """
    name = os.path.basename(path)
    if name == "pyproject.toml":
        return _from_pyproject(_toml(path), path)
    if name.startswith("pylock") and name.endswith(".toml"):
        return _from_lock(_toml(path), path)
    if name.endswith((".toml", ".lock")):
        raise InvalidArgumentError(
            f"{path}: this kind of file is not read",
            hint="pass a requirements file, a pyproject.toml or a pylock.toml; other tools export these "
            "(`uv export`, `poetry export`, `pip lock`)",
        )
    return list(dict.fromkeys(_from_requirements(path, 0)))


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > LARGEST_FILE:
        raise InvalidArgumentError(f"{path} is larger than {LARGEST_FILE >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{path} is not UTF-8 text") from None


def _toml(path: str) -> Mapping[str, Any]:
    import tomllib

    try:
        return tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not TOML: {error}") from None


def _from_requirements(path: str, depth: int) -> list[str]:
    if depth > DEEPEST:
        raise InvalidArgumentError(f"{path}: requirements files name each other {DEEPEST} deep")
    found: list[str] = []
    # A backslash at the end joins lines; a comment starts at the line's begin or after a space (pip's own rules).
    for number, raw in enumerate(re.sub(r"\\\r?\n", " ", _text(path)).splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if not line:
            continue
        nested = re.match(r"(?:-r|--requirement)[\s=]*(\S+)\Z", line)
        if nested is not None:
            found += _from_requirements(os.path.join(os.path.dirname(path), nested[1]), depth + 1)
            continue
        words = line.split()
        hashes = [word for word in words if _HASH.match(word)]
        rest = " ".join(word for word in words if not _HASH.match(word))
        found.append(" ".join([check(rest, f"{path}:{number}"), *hashes]))
    return found


def _from_pyproject(document: Mapping[str, Any], path: str) -> list[str]:
    project = document.get("project")
    dependencies = project.get("dependencies") if isinstance(project, Mapping) else None
    if not isinstance(dependencies, list) or not dependencies:
        raise InvalidArgumentError(
            f"{path} has no project.dependencies", hint="list them there (PEP 621), or pass a requirements file"
        )
    return [check(line, path) for line in dependencies]


def _from_lock(document: Mapping[str, Any], path: str) -> list[str]:
    """PEP 751: every package with a version and wheels, as `name==version --hash=...`."""
    packages = document.get("packages")
    if not isinstance(packages, list) or not packages:
        raise InvalidArgumentError(f"{path} locks no packages")
    found = []
    for each in packages:
        try:
            name, version, wheels = each["name"], each["version"], each["wheels"]
            hashes = [f"--hash=sha256:{wheel['hashes']['sha256']}" for wheel in wheels]
        except (KeyError, TypeError):
            name = each.get("name", "?") if isinstance(each, Mapping) else "?"
            raise InvalidArgumentError(
                f"{path}: {name!r} has no version and wheels with sha256", hint="only wheels are installed"
            ) from None
        if not all(_HASH.match(each) for each in hashes) or not hashes:
            raise InvalidArgumentError(f"{path}: the hashes of {name!r} are not sha256 in hexadecimal")
        marker = each.get("marker")
        line = f"{name}=={version}" + (f" ; {marker}" if marker else "")
        found.append(" ".join([check(line, path), *hashes]))
    wanted = document.get("requires-python")
    own = ".".join(map(str, sys.version_info[:3]))
    if isinstance(wanted, str) and not all(
        distributions._compare(own, match[1], match[2], True)
        for match in re.finditer(r"(===|==|~=|!=|<=|>=|<|>)\s*([\w.*]+)", wanted)
    ):
        raise InvalidArgumentError(
            f"{path} is for Python {wanted}, and this is {own}", hint="run ringfence with that Python"
        )
    return found
