"""`template="current-env"`: the packages of the Python that runs ringfence, lent to sandboxes as a copy.

Guards against lending more than packages. Only files that an installed distribution lists in its RECORD are copied:
no stray file of site-packages, no `.pth` file, no `direct_url.json`, nothing that a link leads out of the
environment to, and no file of the kind that holds passwords (`pip.conf`, `.pypirc`, `.netrc`, `.env`). What is not
lent is told, with the reason: editable installs, and distributions without a list of their files.

It works the same for a virtual environment, a conda environment and a distribution's Python: a distribution is what
`importlib.metadata` finds on this interpreter's package directories.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.metadata import Distribution

from ringfence.errors import EngineError
from ringfence.node import cache, distributions, environments, packages

NOT_LENT = ".not-lent.json"
_SECRETS = ("pip.conf", ".pypirc", ".netrc", ".env")
_OWN = ("ringfence",)
"""The sandbox has its own part of it, at /opt/ringfence."""


def current_environment(progress: packages.Progress | None = None) -> str:
    """The tree for `/opt/packages`; built when what is installed is not what it was built from.

    Raises:
        EngineError: the cache is unusable, or nothing can be lent.
    """
    python = environments.interpreter()
    paths = _paths()
    identity = "\t".join(("current", environments.FORMAT, sys.version, python.executable_inside, *paths))
    if found := cache.recall(packages.KIND, identity):
        return found
    fingerprints = cache.fingerprints(paths)
    chosen, left_out = _look(paths)
    if not chosen:
        raise EngineError(
            "this Python has no packages that can be lent", hint="install some with pip, or use `ringfence env create`"
        )
    fingerprints += cache.fingerprints(os.path.join(each.root, environments._record_path(each)) for each in chosen)
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape"))
    for each in chosen:
        digest.update(f"{each.name}\0{each.version}\0{each.record}\0".encode())

    def build(directory: str) -> None:
        environments.start_environment(directory, python)
        sources: dict[str, str] = {}
        for number, each in enumerate(chosen, 1):
            if progress is not None:
                progress(f"copying packages ({number}/{len(chosen)}): {each.name} {each.version}")
            environments._copy_distribution(
                directory, each, sources, packages.INSIDE, lambda source, root=each.root: _may_be_lent(source, root), tests=True
            )
        if not any(each.name == "pip" for each in chosen):
            packages._lend_pip(directory)
        packages._lend_fonts(os.path.join(directory, environments.SITE_PACKAGES))
        if progress is not None:
            progress("compiling")
        environments._compile(directory, packages.INSIDE, python.executable_outside, sources)
        with open(os.path.join(directory, NOT_LENT), "w", encoding="utf-8") as file:
            json.dump({"lent": [[each.name, each.version] for each in chosen], "not_lent": left_out}, file)

    key = digest.hexdigest()[:32]
    tree = cache.publish(packages.KIND, key, build, progress)
    cache.remember(packages.KIND, identity, key, fingerprints)
    return tree


def describe() -> dict[str, list[list[str]]]:
    """`lent`: [name, version] each; `not_lent`: [name, why] each. Looks, builds nothing."""
    chosen, left_out = _look(_paths())
    return {"lent": [[each.name, each.version] for each in chosen], "not_lent": left_out}


def _paths() -> list[str]:
    return environments._search_paths()


def _look(paths: list[str]) -> tuple[list[distributions.Installed], list[list[str]]]:
    chosen: dict[str, distributions.Installed] = {}
    left_out: list[list[str]] = []
    seen = set()
    for distribution in Distribution.discover(path=paths):
        raw = distribution.metadata["Name"]
        name = distributions.normalise(raw) if raw else ""
        if not name or name in seen:
            continue
        seen.add(name)
        if name in _OWN:
            left_out.append([name, "the sandbox has its own part of it"])
            continue
        try:
            installed = distributions.find(raw, paths)
        except EngineError as error:
            why = "installed in editable mode" if "editable" in error.message else "no list of its files (RECORD)"
            left_out.append([name, why])
            continue
        if installed is not None and installed.metadata_directory:
            chosen[name] = installed
        else:
            left_out.append([name, "no list of its files (RECORD)"])
    return [chosen[name] for name in sorted(chosen)], sorted(left_out)


def _may_be_lent(source: str, root: str) -> bool:
    """Whether a file is one of the environment, by its real place, and none that holds passwords."""
    real = os.path.realpath(source)
    if {os.path.basename(real), os.path.basename(source)} & set(_SECRETS):
        return False
    return any(real.startswith(os.path.realpath(place).rstrip("/") + "/") for place in (sys.prefix, root))
