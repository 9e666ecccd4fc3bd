"""Which installed distributions a package environment needs, and which of their files it copies.

Guards against two leaks: *too little* (a dependency that the metadata names and nobody copied, found only when
a sandbox imports it) and *too much* (an editable install, a `.pth` file or a `direct_url.json` that carries the
host's paths, or somebody's whole site-packages, into a sandbox).

Sources: core metadata (PEP 566, 643), environment markers (PEP 508), installed projects (PEP 376, 610, 627).
Markers are evaluated here, by one small evaluator, because `packaging` is not always installed and a second
code path would be tested by nobody; a test compares it with `packaging` where that is present.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from typing import NamedTuple

from ringfence.errors import EngineError


class Installed(NamedTuple):
    """One installed distribution: its name (normalised), version, root directory, and its RECORD."""

    name: str
    version: str
    root: str
    metadata_directory: str
    record: str
    distribution: Distribution


class CopiedFile(NamedTuple):
    """One file to copy: from where, to where below the environment, and its RECORD line."""

    source: str
    destination: str
    record_path: str


def normalise(name: str) -> str:
    """A project's canonical name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find(name: str, paths: list[str]) -> Installed | None:
    """The installed distribution `name`, first on `paths`, or None.

    Raises:
        EngineError: it is there, but as an editable install or without a list of its files.
    """
    distribution = next(iter(Distribution.discover(name=name, path=paths)), None)
    if distribution is None:
        return None
    record = distribution.read_text("RECORD")
    if not record:
        raise EngineError(
            f"the installed package {name} has no list of its files (RECORD), so it cannot be copied",
            hint="install ringfence and its packages with pip into a virtual environment",
        )
    if _is_editable(distribution, record):
        raise EngineError(
            f"the package {name} is installed in editable mode, which a sandbox cannot use",
            hint=f"install it as a copy: pip install --no-deps {name}",
        )
    metadata_directory = next(
        (
            os.path.dirname(path)
            for path, *_ in csv.reader(record.splitlines())
            if path.endswith(".dist-info/METADATA")
        ),
        "",
    )
    root = os.path.abspath(str(distribution.locate_file("")))
    return Installed(normalise(name), distribution.version, root, metadata_directory, record, distribution)


def _is_editable(distribution: Distribution, record: str) -> bool:
    if "__editable__" in record:
        return True
    direct_url = distribution.read_text("direct_url.json")
    if not direct_url:
        return False
    import json

    return bool(json.loads(direct_url).get("dir_info", {}).get("editable"))


def closure(roots: Iterable[str], paths: list[str], hint: str) -> list[Installed]:
    """`roots` and everything their metadata requires here, sorted by name.

    Extras are followed only where a requirement asks for them (`name[extra]`). Version ranges are not checked:
    that was the installer's work.

    Raises:
        EngineError: one is missing, with `hint`.
    """
    found: dict[str, Installed] = {}
    seen: set[tuple[str, str]] = set()
    queue: list[tuple[str, str, str]] = [(normalise(root), "", "") for root in roots]
    while queue:
        name, extra, wanted_by = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name not in found:
            installed = find(name, paths)
            if installed is None:
                because = f" (needed by {wanted_by})" if wanted_by else ""
                raise EngineError(f"the Python package {name} is not installed{because}", hint=hint)
            found[name] = installed
        for text in found[name].distribution.requires or ():
            requirement = parse_requirement(text)
            if requirement.marker and not evaluate_marker(requirement.marker, extra):
                continue
            for wanted in ("", *requirement.extras):
                queue.append((requirement.name, wanted, name))
    return [found[name] for name in sorted(found)]


def files_to_copy(installed: Installed, site_packages: str) -> Iterator[CopiedFile]:
    """The files of one distribution, with places below the environment.

    `site_packages` is the relative place, such as `lib/python3.11/site-packages`. Left out: byte code (made
    anew for the inside paths), `.pth` files (they run code at start-up and hold paths), `direct_url.json` (a host
    path or URL), `RECORD` (written anew), and anything that would lie outside the environment.
    """
    for row in csv.reader(installed.record.splitlines()):
        path = row[0] if row else ""
        name = os.path.basename(path)
        if not path or os.path.isabs(path) or name.endswith((".pyc", ".pyo", ".pth")):
            continue
        if os.path.dirname(path) == installed.metadata_directory and name in ("direct_url.json", "RECORD"):
            continue
        destination = os.path.normpath(os.path.join(site_packages, path))
        top = destination.split(os.sep, 1)[0]
        if top not in ("lib", "bin", "share", "etc", "include"):
            continue
        if top == "lib" and not destination.startswith(site_packages + os.sep):
            continue
        source = os.path.normpath(os.path.join(installed.root, path))
        if os.path.isfile(source):
            yield CopiedFile(source, destination, path)


class Requirement(NamedTuple):
    """A parsed requirement line: normalised name, requested extras, marker text ("" if none)."""

    name: str
    extras: tuple[str, ...]
    marker: str


def parse_requirement(text: str) -> Requirement:
    """Name, extras and marker of a PEP 508 requirement. Raises EngineError if it is none."""
    match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?\s*(.*)$", text, re.DOTALL)
    if match is None:
        raise EngineError(f"cannot read the requirement {text!r}", hint="reinstall the package that names it")
    name, extras, rest = match.groups()
    # A URL may hold semicolons; before a marker it needs a space (PEP 508).
    _, _, marker = rest.partition(" ;" if rest.startswith("@") else ";")
    wanted = tuple(sorted(normalise(extra) for extra in (extras or "").split(",") if extra.strip()))
    return Requirement(normalise(name), tuple(extra.strip() for extra in wanted), marker.strip())


_TOKEN = re.compile(
    r"\s*(?:(?P<string>'[^']*'|\"[^\"]*\")|(?P<operator>===|==|~=|!=|<=|>=|<|>)|(?P<bracket>[()])|(?P<word>[A-Za-z_.]+))"
)


_OLD_NAMES = {
    "os.name": "os_name",
    "sys.platform": "sys_platform",
    "platform.version": "platform_version",
    "platform.machine": "platform_machine",
    "platform.python_implementation": "platform_python_implementation",
    "python_implementation": "platform_python_implementation",
}
"""Names from before PEP 508 that old metadata still uses."""


def marker_environment() -> dict[str, str]:
    """The values of PEP 508's variables on this interpreter."""
    version = sys.implementation.version
    implementation = f"{version.major}.{version.minor}.{version.micro}"
    if version.releaselevel != "final":
        implementation += version.releaselevel[0] + str(version.serial)
    return {
        "os_name": os.name,
        "sys_platform": sys.platform,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "python_full_version": platform.python_version(),
        "implementation_name": sys.implementation.name,
        "implementation_version": implementation,
    }


def evaluate_marker(marker: str, extra: str = "", environment: dict[str, str] | None = None) -> bool:
    """Whether a PEP 508 marker holds here. Raises EngineError if it is malformed."""
    values = {**(environment or marker_environment()), "extra": normalise(extra) if extra else ""}
    tokens: list[tuple[str, str]] = []
    position = 0
    while marker[position:].strip():
        match = _TOKEN.match(marker, position)
        if match is None or match.lastgroup is None:
            raise _bad_marker(marker)
        tokens.append((match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    parser = _MarkerParser(marker, tokens, values)
    result = parser.either()
    if parser.position != len(tokens):
        raise _bad_marker(marker)
    return result


class _MarkerParser:
    """Recursive descent over the tokens: `or` binds weaker than `and`, brackets bind strongest."""

    def __init__(self, text: str, tokens: list[tuple[str, str]], values: dict[str, str]) -> None:
        self.text, self.tokens, self.values, self.position = text, tokens, values, 0

    def either(self) -> bool:
        result = self.both()
        while self.accept("word", "or"):
            other = self.both()
            result = result or other
        return result

    def both(self) -> bool:
        result = self.term()
        while self.accept("word", "and"):
            other = self.term()
            result = result and other
        return result

    def term(self) -> bool:
        if self.accept("bracket", "("):
            result = self.either()
            if not self.accept("bracket", ")"):
                raise _bad_marker(self.text)
            return result
        left, left_name = self.value()
        kind, operator = self.next()
        if (kind, operator) == ("word", "not"):
            if not self.accept("word", "in"):
                raise _bad_marker(self.text)
            operator = "not in"
        elif kind != "operator" and (kind, operator) != ("word", "in"):
            raise _bad_marker(self.text)
        right, right_name = self.value()
        if "extra" in (left_name, right_name):
            left, right = normalise(left), normalise(right)
        versions = any(name.endswith("_version") for name in (left_name, right_name)) and not any(
            name == "platform_version" for name in (left_name, right_name)
        )
        return _compare(left, operator, right, versions)

    def value(self) -> tuple[str, str]:
        kind, text = self.next()
        if kind == "string":
            return text[1:-1], ""
        name = _OLD_NAMES.get(text, text)
        if kind != "word" or name not in self.values:
            raise _bad_marker(self.text)
        return self.values[name], name

    def next(self) -> tuple[str, str]:
        if self.position >= len(self.tokens):
            raise _bad_marker(self.text)
        self.position += 1
        return self.tokens[self.position - 1]

    def accept(self, kind: str, text: str) -> bool:
        if self.position < len(self.tokens) and self.tokens[self.position] == (kind, text):
            self.position += 1
            return True
        return False


def _compare(left: str, operator: str, right: str, versions: bool) -> bool:
    if operator == "in":
        return left in right
    if operator == "not in":
        return left not in right
    if operator == "===":
        return left == right
    first = _version(left) if versions else None
    if first is not None and operator in ("==", "!=") and right.endswith(".*"):
        prefix = [int(part) for part in right[:-2].split(".")]
        padded = [*first[0], *[0] * len(prefix)]
        return (padded[: len(prefix)] == prefix) == (operator == "==")
    second = _version(right) if versions else None
    if first is not None and second is not None:
        if operator == "~=":
            prefix = [int(part) for part in right.split(".")[:-1] if part.isdigit()]
            padded = [*first[0], *[0] * len(prefix)]
            return first >= second and padded[: len(prefix)] == prefix
        return _ordered(first, operator, second)
    return _ordered(left, operator, right)


def _ordered(left: object, operator: str, right: object) -> bool:
    if operator == "==":
        return left == right
    if operator == "!=":
        return left != right
    return {
        "<": left < right,  # type: ignore[operator]
        "<=": left <= right,  # type: ignore[operator]
        ">": left > right,  # type: ignore[operator]
        ">=": left >= right,  # type: ignore[operator]
        "~=": left == right,
    }[operator]


def _version(text: str) -> tuple[list[int], int] | None:
    """A version as something that sorts: release numbers without trailing zeros, then 0 for a pre-release."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)(.*)$", text)
    if match is None:
        return None
    release = [int(part) for part in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    pre_release = re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", match[2].strip())
    return release, 0 if pre_release else 1


def _bad_marker(text: str) -> EngineError:
    return EngineError(
        f"cannot read the environment marker {text!r}", hint="reinstall the package that names it"
    )
