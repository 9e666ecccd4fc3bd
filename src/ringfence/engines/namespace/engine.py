"""The namespace engine: what it can hold here, and how a spec becomes a request to its launcher.

Guards against a policy that is accepted and then not held: whatever a spec asks for that this engine cannot
enforce is refused here, before anything is started, with the name of the missing primitive and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ringfence.engines.base import LEVELS, CellSpec, Probe
from ringfence.engines.namespace.grammar import MAXIMUM_DIRECTORIES, WORKSPACE
from ringfence.errors import EnforcementError, InvalidArgumentError

NAME = "namespace"
LEVEL = "namespace"

TEMPLATES: dict[str, list[str] | None] = {
    "plain": None,
    "base": [],
    "data": ["numpy", "pandas", "matplotlib", "matplotlib.pyplot", "e2b_charts"],
}
"""Template -> modules its zygote imports ahead; None: no Python kernel, commands and files only."""

BASE_ENVIRONMENT = {
    "PATH": "/opt/env/bin:/opt/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games",
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
    "OPENBLAS_NUM_THREADS": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}

PACKAGES_PATH = "/opt/packages/bin"
"""First on PATH where a template brings packages of the user's own."""


def check(spec: CellSpec, known: Callable[[str], bool] | None = None) -> None:
    """Refuse what this engine does not hold. `known` tells of further templates, which are package environments.

    Raises EnforcementError or InvalidArgumentError.
    """
    if spec.template not in TEMPLATES and not spec.packages and not (known is not None and known(spec.template)):
        raise InvalidArgumentError(
            f"there is no template {spec.template!r}",
            hint="choose one of: " + ", ".join(sorted(TEMPLATES))
            + "; `current-env` lends this Python's packages; `ringfence env create` makes others",
        )
    if spec.at_least not in LEVELS or LEVELS.index(spec.at_least) > LEVELS.index(LEVEL):
        raise EnforcementError(
            f"the policy demands isolation of at least {spec.at_least!r}; the namespace engine gives {LEVEL!r}",
            hint="choose an engine of that level, or lower isolation.at_least in the policy",
            primitive="isolation level",
        )
    if spec.network != "none" or spec.network_allow or spec.network_inject:
        raise EnforcementError(
            "the policy allows network access, which needs the network gateway, and there is none yet",
            hint="use a policy without network rules: a sandbox then has a private loopback only",
            primitive="network gateway",
        )
    if spec.root and spec.workspace is not None and spec.workspace["mode"] == "rw":
        raise EnforcementError(
            "`root: true` and a workspace with `mode: rw` exclude each other",
            hint="use `mode: overlay`: root inside could write files that the host would trust",
            primitive="host directory",
        )
    if spec.workspace is not None and spec.workspace["mode"] == "rw" and not spec.workspace.get("accept_new_protected"):
        raise EnforcementError(
            "with `mode: rw` nothing can keep the sandbox from creating files that your tools act on by themselves, "
            "a new .envrc or a repository with hooks; only those that exist are held",
            hint="use `mode: overlay` and apply the changes after a look, or set `accept_new_protected` of the workspace",
            primitive="protected names",
        )
    if spec.read_only:
        from ringfence.linux import paths

        # By name, so that nothing is started for it; the launcher judges what the name leads to.
        for path in spec.read_only:
            refused = paths.refused_source(path) or paths.refused_place(path)
            if refused is not None:
                raise EnforcementError(refused[0], hint=refused[1], primitive="host directory")
    if len(spec.read_only) >= MAXIMUM_DIRECTORIES:
        raise InvalidArgumentError(
            f"{len(spec.read_only)} directories to read are more than {MAXIMUM_DIRECTORIES - 1}",
            hint="lend a directory above them",
        )


def directories(spec: CellSpec, opened: list[int]) -> list[dict[str, Any]]:
    """The host directories of `spec` as the launcher's grammar names them, without their sources.

    `opened` are the descriptors of `open_directories`. Raises EnforcementError where a protected file cannot be held.
    """
    found: list[dict[str, Any]] = [
        {"place": place, "mode": "ro", "root_owned": False, "protected": []} for place in dict.fromkeys(spec.read_only)
    ]
    workspace = spec.workspace
    if workspace is not None:
        protected: list[str] = []
        if workspace["mode"] == "rw":
            from ringfence.engines.namespace.protecting import protected_paths

            protected = protected_paths(opened[0], tuple(workspace.get("writable", ())))
        rest = {"mode": workspace["mode"], "root_owned": bool(workspace.get("allow_root_owned")), "protected": protected}
        found.insert(0, {"place": WORKSPACE, **rest})
    return found


def open_directories(spec: CellSpec) -> list[int]:
    """Descriptors of the host directories of `spec`, in the order of `directories`: each is opened here, once.

    What is named may be a symlink, which is followed now and never again. Raises InvalidArgumentError.
    """
    sources = list(dict.fromkeys(spec.read_only))
    if spec.workspace is not None:
        sources.insert(0, os.path.expanduser(spec.workspace["source"]))
    opened: list[int] = []
    try:
        for source in sources:
            opened.append(os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        for descriptor in opened:
            os.close(descriptor)
        raise InvalidArgumentError(
            f"the host directory {source!r} cannot be lent: {getattr(error, 'strerror', error)}",
            hint="name a directory that exists and that you may enter; single files are copied in with `sandbox.files`",
        ) from None
    return opened


def template_request(
    name: str, *, python: str, sources: dict[str, str], library: str | None, masks: tuple[str, ...],
    modules: list[str] | None = None, root: bool = False,
) -> dict[str, Any]:
    """The launcher's request for the zygote of template `name`; one with `root` is another zygote.

    `python` is the interpreter's path inside, `sources` the host directories for `/opt`, `library` what
    LD_LIBRARY_PATH must be, `masks` the directories inside that are to be covered, `modules` what a package
    environment wants imported ahead.
    """
    return {
        "do": "template",
        "name": zygote_name(name, root),
        "sources": sources,
        "python": python,
        "library": library,
        "modules": TEMPLATES.get(name, modules or []),
        "isolated": name in TEMPLATES and TEMPLATES[name] is None,
        "masks": list(masks),
        "root": root,
    }


def zygote_name(template: str, root: bool) -> str:
    """The launcher's name for a template: sandboxes with a root start from another file system and other ids.

    No package environment can be called so: their names have no two hyphens in a row.
    """
    return template + "--root" if root else template


def create_request(
    identifier: str, spec: CellSpec, library: str | None, prefork: bool, opened: list[int] | None = None
) -> dict[str, Any]:
    """The launcher's request for one sandbox of `spec`; `opened` are the descriptors of its host directories."""
    limits = spec.limits
    environment = {**BASE_ENVIRONMENT, **spec.envs}
    if spec.template not in TEMPLATES and "PATH" not in spec.envs:
        environment["PATH"] = f"{PACKAGES_PATH}:{environment['PATH']}"
    if library:
        environment.setdefault("LD_LIBRARY_PATH", library)
    return {
        "do": "create",
        "id": identifier,
        "template": zygote_name(spec.template, spec.root),
        "limits": {
            "memory": limits.memory,
            "cpus": limits.cpus,
            "pids": limits.pids,
            "disk": limits.disk,
            "tmp": limits.tmp,
            "file_size": limits.file_size,
            "open_files": limits.open_files,
            "max_age": limits.max_age,
            "required": limits.required,
        },
        "environment": environment,
        "cwd": spec.cwd,
        "host_name": spec.host_name,
        "prefork": prefork,
        "directories": directories(spec, opened or []),
    }


def probe() -> Probe:
    """What this machine offers, by looking; `ringfence doctor` and `selfcheck` try it for real."""
    from ringfence.engines.namespace import identifiers
    from ringfence.linux import cgroups, landlock

    report = cgroups.report(cgroups.detect(), memory=1, pids=1, cpus=1)
    why, hint = "", ""
    maximum = _read_number("/proc/sys/user/max_user_namespaces")
    works = os.path.exists("/proc/self/ns/user") and maximum != 0
    if not works:
        why, hint = "user namespaces are switched off", "set the sysctl user.max_user_namespaces, or run as root"
    elif os.geteuid() != 0 and _read_number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        works, why = False, "unprivileged user namespaces are switched off"
        hint = "sysctl -w kernel.unprivileged_userns_clone=1"
    elif os.geteuid() != 0 and _read_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        why = "AppArmor restricts unprivileged user namespaces"
        hint = "add an AppArmor profile with `userns,` for this Python, or set kernel.apparmor_restrict_unprivileged_userns=0"
    ids = "ranges" if os.geteuid() == 0 else (
        "subids" if identifiers.subordinate_range("/etc/subuid") and identifiers.newidmap_works() else "single"
    )  # fmt: skip
    return Probe(
        engine=NAME, works=works, level=LEVEL, why=why, hint=hint,
        capabilities={"limits": report, "ids": ids, "landlock": landlock.abi()},
    )  # fmt: skip


def _read_number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
