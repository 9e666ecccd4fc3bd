"""`ringfence env`: make, list, look into and remove package environments.

Everything is decided in `node.packages`; this file turns words into calls, and records into tables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from ringfence.errors import InvalidArgumentError, RingfenceError

env_app = typer.Typer(
    help="Package environments: what sandboxes can import besides the templates.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="The environment's name; it is then a template's name too.")]


def _console() -> Any:
    from ringfence.cli.app import _console as console

    return console()


def _print_json(document: Any) -> None:
    from ringfence.cli.app import _print_json as print_json

    print_json(document)


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _when(seconds: float | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


@env_app.command("create")
def create_command(
    name: Name,
    packages: Annotated[list[str] | None, typer.Argument(help="Requirements, as `polars` or `polars[excel]>=1.2`. None: build an existing environment again from its lock.")] = None,
    file: Annotated[list[str] | None, typer.Option("--file", help="A requirements file, a pyproject.toml or a pylock.toml; may be repeated.")] = None,
    python: Annotated[str | None, typer.Option("--python", help="The Python it is for. Only the one that runs ringfence; another is refused.")] = None,
    warm: Annotated[list[str] | None, typer.Option("--warm", help="A module that is imported once, ahead of all sandboxes of this environment, instead of in each; may be repeated. Its code then runs in their common parent, which has neither network nor host files, but no system call filter: name modules of packages that you trust.")] = None,
    index_url: Annotated[str | None, typer.Option("--index-url", help="The package index, instead of the one that pip is configured for.")] = None,
    find_links: Annotated[list[str] | None, typer.Option("--find-links", help="A directory of wheels (or a page that links them) besides the index; may be repeated.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no index: wheels come from --find-links alone.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Resolve anew, for an environment that exists.")] = False,
    json: Json = False,
) -> None:
    """Make an environment from wheels, and lock it.

    Wheels only: no build script runs on this machine. pip resolves, with its own configuration; what it chose is
    locked with the SHA-256 of every wheel, and sandboxes mount the result read-only: `Sandbox("NAME")`.
    """
    from ringfence.node import environments, requirements, resolver
    from ringfence.node import packages as store

    if python is not None and python not in (environments.PYTHON_VERSION, ".".join(map(str, sys.version_info[:3]))):
        raise InvalidArgumentError(
            f"environments are for the Python that runs ringfence, {environments.PYTHON_VERSION}, not {python}",
            hint=f"install ringfence into a Python {python} and run this with it",
        )
    asked = requirements.check_all(packages) if packages else []
    for path in file or []:
        asked += requirements.read_file(path)
    given = index_url is not None or bool(find_links) or offline
    source = resolver.Source(index_url, tuple(find_links or ()), offline) if given else None
    if source is not None:
        source.options()  # says now what is wrong with them
    with _progress() as say:
        made = store.create(name, asked, source=source, warm=warm or [], update=update, progress=say)
    if json:
        _print_json(_described(made))
        return
    count = len(made.packages)
    print(f"{name}: {count} package{'s' if count != 1 else ''}, {_mebibytes(made.size)}; use it as Sandbox({name!r}), or --template {name}")


class _Spinner:
    """On a terminal a line that says what goes on; quiet otherwise."""

    def __enter__(self) -> Callable[[str], None]:
        from rich.console import Console

        self._status: Any = nullcontext()
        if not sys.stderr.isatty():
            return lambda message: None
        self._status = Console(stderr=True, highlight=False).status("starting")
        self._status.__enter__()
        from rich.markup import escape

        return lambda message: self._status.update(escape(message))

    def __exit__(self, *exception: object) -> None:
        self._status.__exit__(None, None, None)


def _progress() -> _Spinner:
    return _Spinner()


@env_app.command("ls")
def list_command(json: Json = False) -> None:
    """List the environments, with their size and when a sandbox of each was last started."""
    from ringfence.node import packages as store

    found = []
    for name in store.names():
        try:
            found.append(store.load(name))
        except RingfenceError as error:
            found.append(error)
    if json:
        _print_json([_described(each, brief=True) if isinstance(each, store.Environment) else {"error": str(each)} for each in found])
        return
    if not found:
        print("there are no environments; make one: ringfence env create NAME PACKAGES…")
        return
    table = Table("NAME", "PACKAGES", "SIZE", "PYTHON", "CREATED", "LAST USED", "MADE FROM", box=None, pad_edge=False)
    for each in found:
        if not isinstance(each, store.Environment):
            table.add_row("?", "", "", "", "", "", str(each))
            continue
        made_from = ", ".join(line.split(" --hash")[0] for line in each.requirements)
        table.add_row(each.name, str(len(each.packages)), _mebibytes(each.size), each.python, _when(each.created),
                      _when(each.last_used), made_from[:60] + ("…" if len(made_from) > 60 else ""))  # fmt: skip
    _console().print(table)


@env_app.command("inspect")
def inspect_command(
    name: Annotated[str, typer.Argument(help="An environment, or `current-env`.")],
    lock: Annotated[bool, typer.Option("--lock", help="Print the lock file (pylock.toml, PEP 751) and nothing else.")] = False,
    json: Json = False,
) -> None:
    """Show what an environment holds: packages, versions, hashes, size, Python, where they came from, who uses it.

    Reads every byte of it: exit code 1 when it is not what was unpacked. For `current-env` it shows what is lent, and
    what is not and why.
    """
    from ringfence.node import packages as store

    if name == store.CURRENT:
        _inspect_current(json)
        return
    environment = store.load(name)
    if lock:
        _print_json({"lock": environment.lock()}) if json else print(environment.lock(), end="")
        return
    state = store.verify(environment)
    if json:
        _print_json({**_described(environment), "state": state, "used_by": store.users(environment.tree)})
    else:
        where = environment.index_url or ("no index" if environment.offline else "the index pip is configured for")
        for key, value in (
            ("python", environment.python), ("size", _mebibytes(environment.size)), ("created", _when(environment.created)),
            ("last used", _when(environment.last_used)), ("made from", ", ".join(each.split(" --hash")[0] for each in environment.requirements)),
            ("source", ", ".join([where, *environment.find_links])), ("warmed", ", ".join(environment.warm) or "nothing"),
            ("used by", ", ".join(f"process {pid}" for pid in store.users(environment.tree)) or "nobody"),
            ("contents", {"whole": "as unpacked, every byte", "missing": "not there; the next start builds it from the lock",
                          "changed": "CHANGED since it was unpacked"}[state]),
        ):  # fmt: skip
            print(f"{key:10} {value}")
        table = Table("PACKAGE", "VERSION", "SIZE", "SHA256", "FROM", box=None, pad_edge=False)
        for each in environment.packages:
            table.add_row(each.name + ("" if each.requested else " (needed)"), each.version, _mebibytes(each.size), each.sha256[:16] + "…", each.filename)
        _console().print(table)
    if state == "changed":
        if not json:
            print(f"ringfence: build it again from its lock: ringfence env create {name}", file=sys.stderr)
        raise typer.Exit(1)


def _inspect_current(json: bool) -> None:
    from ringfence.node import lent

    found = lent.describe()
    if json:
        _print_json(found)
        return
    print(f"lent: {', '.join(f'{name} {version}' for name, version in found['lent'])}")
    for name, why in found["not_lent"]:
        print(f"not lent: {name}: {why}")


@env_app.command("rm")
def remove_command(
    names: Annotated[list[str], typer.Argument(help="Environments to remove.")],
    json: Json = False,
) -> None:
    """Remove environments. Refused for one that a running program uses."""
    from ringfence.node import packages as store

    freed = {name: store.remove(name) for name in names}
    if json:
        _print_json({"removed": freed})
        return
    for name, size in freed.items():
        print(f"{name}: removed, {_mebibytes(size)} freed")


def _described(environment: Any, brief: bool = False) -> dict[str, Any]:
    values = asdict(environment)
    values["last_used"] = environment.last_used
    if brief:
        values["packages"] = {each.name: each.version for each in environment.packages}
    for private in ("quick", "contents", "format", "key"):
        values.pop(private)
    return values
