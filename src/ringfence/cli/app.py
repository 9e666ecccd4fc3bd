"""The commands of `ringfence` that a person reads: typer for the arguments, rich for the tables.

Every command takes `--json` and then prints exactly one JSON document. Exit codes: 0 it worked; 1 it did not
(a policy with errors, a machine that starts no sandbox, nothing to kill); 2 arguments that make no sense; those of
`run` and `exec` are in `once`. `run` and `exec` are declared here for their help alone: `entry` runs them.
"""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ringfence import terminal
from ringfence.cli import arguments
from ringfence.cli.environment import env_app
from ringfence.errors import RingfenceError

app = typer.Typer(
    help="Run code that nobody trusts, in a place it cannot leave.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
policy_app = typer.Typer(help="Read, check and explain policies.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(env_app, name="env")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
_HELP = arguments.VALUE_OPTIONS


def run() -> None:
    """Run the command line. Ringfence's own errors are two lines, never a traceback."""
    try:
        app(prog_name="ringfence")
    except RingfenceError as error:
        if "--json" in sys.argv:
            _print_json({"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}})
        else:
            _complain(error.message, error.hint)
        sys.exit(1)


def _print_json(document: Any) -> None:
    print(json_module.dumps(document, indent=2, default=str))


def _complain(message: str, hint: str = "") -> None:
    print(f"ringfence: {terminal.text(message)}", file=sys.stderr)
    if hint:
        print(f"ringfence: {terminal.text(hint)}", file=sys.stderr)


def _console(width: int = 120) -> Console:
    """`width` is for pipes; a terminal has its own."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


# run and exec ------------------------------------------------------------------------------------------------


@app.command("run", context_settings={"ignore_unknown_options": True})
def run_command(
    file: Annotated[str, typer.Argument(help="A file of Python, bash, JavaScript or R, or `-` for standard input.")] = "-",
    rest: Annotated[list[str] | None, typer.Argument(help="The program's own arguments.", metavar="[ARGUMENTS]...")] = None,
    code: Annotated[str | None, typer.Option("-c", help="Code, instead of a file.")] = None,
    language: Annotated[str | None, typer.Option("--language", help=arguments.RUN_OPTIONS["--language"])] = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help=_HELP["--timeout"])] = None,
    memory: Annotated[str | None, typer.Option("--memory", help=_HELP["--memory"])] = None,
    cpus: Annotated[str | None, typer.Option("--cpus", help=_HELP["--cpus"])] = None,
    pids: Annotated[str | None, typer.Option("--pids", help=_HELP["--pids"])] = None,
    disk: Annotated[str | None, typer.Option("--disk", help=_HELP["--disk"])] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help=_HELP["--env"])] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help=_HELP["--cwd"])] = None,
    template: Annotated[str | None, typer.Option("--template", help=_HELP["--template"])] = None,
    policy: Annotated[str | None, typer.Option("--policy", help=_HELP["--policy"])] = None,
    workspace: Annotated[str | None, typer.Option("--workspace", help=_HELP["--workspace"])] = None,
    mode: Annotated[str | None, typer.Option("--mode", help=_HELP["--mode"])] = None,
    review: Annotated[bool, typer.Option("--review", help=arguments.REVIEW_OPTIONS["--review"])] = False,
    yes: Annotated[bool, typer.Option("--yes", help=arguments.REVIEW_OPTIONS["--yes"])] = False,
    apply: Annotated[list[str] | None, typer.Option("--apply", help=arguments.REVIEW_OPTIONS["--apply"])] = None,
    json: Json = False,
) -> None:
    """Run code in a sandbox of its own, as `python` (or `bash`, `node`, `Rscript`) would run it.

    Standard input, output and error, and the exit code, pass through. Only the file itself goes in, not its
    directory. With --workspace, `--` begins a command instead: run --workspace . -- make test. Exit codes: the
    program's own; 128 + n for death by signal n; 124 when the time was up; 125 when Ringfence failed; 2 for arguments
    that make no sense; with --review 123 when the program succeeded and a change was not applied. Without a terminal
    nothing is asked, and nothing applied but what --yes and --apply say; with --json the changes are in the document.
    """
    raise RuntimeError("entry.py runs this command")  # pragma: no cover


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_command(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after `--`.")],
    timeout: Annotated[str | None, typer.Option("--timeout", help=_HELP["--timeout"])] = None,
    memory: Annotated[str | None, typer.Option("--memory", help=_HELP["--memory"])] = None,
    cpus: Annotated[str | None, typer.Option("--cpus", help=_HELP["--cpus"])] = None,
    pids: Annotated[str | None, typer.Option("--pids", help=_HELP["--pids"])] = None,
    disk: Annotated[str | None, typer.Option("--disk", help=_HELP["--disk"])] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help=_HELP["--env"])] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help=_HELP["--cwd"])] = None,
    template: Annotated[str | None, typer.Option("--template", help=_HELP["--template"])] = None,
    policy: Annotated[str | None, typer.Option("--policy", help=_HELP["--policy"])] = None,
    workspace: Annotated[str | None, typer.Option("--workspace", help=_HELP["--workspace"])] = None,
    mode: Annotated[str | None, typer.Option("--mode", help=_HELP["--mode"])] = None,
    json: Json = False,
) -> None:
    """Run a command of the sandbox's own (its `/usr` is this machine's, read-only).

    Exit codes as for `run`, and as in shells 126 for what cannot be executed and 127 for what is not there.
    """
    raise RuntimeError("entry.py runs this command")  # pragma: no cover


@app.command("shell")
def shell_command(
    command: Annotated[list[str] | None, typer.Argument(help="What to run on the terminal, after `--` [a login shell].")] = None,
    attach: Annotated[str | None, typer.Option("--attach", help="Come back to a detached shell: its ID, its first letters, its name, or a PID.")] = None,
    detachable: Annotated[bool, typer.Option("--detachable", help="Let the shell go on when this terminal ends or leaves with `~.`.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="A name for --attach and `ringfence ls`, letters, digits and `-`; includes --detachable.")] = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help="How long the shell may live, in seconds or as `8h` [limits.max_age of the policy: 1h].")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help=_HELP["--memory"])] = None,
    cpus: Annotated[float | None, typer.Option("--cpus", help=_HELP["--cpus"])] = None,
    pids: Annotated[int | None, typer.Option("--pids", help=_HELP["--pids"])] = None,
    disk: Annotated[str | None, typer.Option("--disk", help=_HELP["--disk"])] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help=_HELP["--env"])] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help=_HELP["--cwd"])] = None,
    template: Annotated[str | None, typer.Option("--template", help=_HELP["--template"])] = None,
    policy: Annotated[str | None, typer.Option("--policy", help=_HELP["--policy"])] = None,
    workspace: Annotated[str | None, typer.Option("--workspace", help=_HELP["--workspace"])] = None,
    mode: Annotated[str | None, typer.Option("--mode", help=_HELP["--mode"])] = None,
    json: Annotated[bool, typer.Option("--json", help="Say at the end, as one JSON document, which sandbox it was and how it ended.")] = False,
) -> None:
    """Sit at a shell in a sandbox of its own: this terminal, raw, with its size.

    At the beginning of a line `~.` leaves, `~?` says so and `~~` types one `~`. Closing the terminal leaves too: a
    detachable shell goes on and waits, at most as long as it may live; another one ends. Exit codes: the shell's own;
    128 + n after signal n; 125 when Ringfence failed or the sandbox was lost; 0 after detaching.
    """
    from ringfence.cli import shell

    given = {
        "timeout": timeout, "memory": memory, "cpus": cpus, "pids": pids, "disk": disk, "env": env, "cwd": cwd,
        "template": template, "policy": policy, "workspace": workspace, "mode": mode, "name": name, "command": command,
    }  # fmt: skip
    given = {option: value for option, value in given.items() if value}
    if attach is not None:
        if given or detachable:
            raise typer.BadParameter("--attach takes no other option: the shell runs already")
        ended = shell.attach(attach)
    else:
        ended = shell.start(shell.wish(given, detachable or name is not None))
    if json:
        _print_json(ended._asdict())
    else:
        for message in (ended.message, ended.hint):
            if message:
                print(f"ringfence: {terminal.text(message)}", file=sys.stderr)
    raise typer.Exit(ended.exit_code)


# The machine -------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    json: Json = False,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Also start a real sandbox at the end.")] = True,
) -> None:
    """Try everything that sandboxes need on this machine, and say how to repair what is missing.

    Exit code 0 when sandboxes start here, 1 when not.
    """
    from ringfence.cli import doctor as checks

    findings = checks.examine(start)
    if json:
        _print_json(checks.as_dict(findings))
    else:
        colours = {checks.OK: "green", checks.WEAKER: "yellow", checks.MISSING: "bold red", checks.UNUSED: "dim"}
        table = Table("what", "verdict", "seen", box=None, pad_edge=False)
        for each in findings:
            detail = _escape(each.detail) + (f"\n[cyan]→ {_escape(each.fix)}[/cyan]" if each.fix and each.verdict != checks.OK else "")
            table.add_row(_escape(each.name), f"[{colours[each.verdict]}]{each.verdict}[/]", detail)
        _console().print(table)
        weaker = sum(each.verdict == checks.WEAKER for each in findings)
        if not checks.works(findings):
            print("\nSandboxes do not start here yet; the arrows say what to do.")
        else:
            print("\nSandboxes start here" + (f"; {weaker} things are weaker than they could be." if weaker else "."))
    if not checks.works(findings):
        raise typer.Exit(1)


def _escape(text: str) -> str:
    """`text` for a cell of a table: no markup of rich's, nothing that acts on a terminal."""
    from rich.markup import escape

    return escape(terminal.line(text))


@app.command()
def info(
    json: Json = False,
    template: Annotated[str, typer.Option(help="`plain`, `base`, `data`, `current-env` or an environment's name.")] = "base",
    policy: Annotated[str | None, typer.Option(help="A policy file, or the name of a preset.")] = None,
) -> None:
    """Start a sandbox and show what is in force in it, read from the kernel, primitive by primitive."""
    from ringfence import Sandbox

    with Sandbox(template, policy=policy) as sandbox:
        known = sandbox.info()
    if json:
        _print_json(asdict(known))
        return
    console = _console()
    console.print(
        f"template {known.template}, policy {known.policy}, engine {known.engine}, isolation {known.level}, "
        f"started in {known.timings.get('start', 0) * 1000:.0f} ms"
    )
    colours = {"hard": "green", "watched": "yellow", "none": "bold red"}
    table = Table("primitive", "strength", "detail", box=None, pad_edge=False)
    for row in known.enforcement:
        table.add_row(row.primitive, f"[{colours[row.strength]}]{row.strength}[/]", _escape(row.detail))
    console.print(table)


@app.command("ls")
def list_command(json: Json = False) -> None:
    """List the sandboxes that run on this machine, as far as this user may see them, whichever program holds them.

    A sandbox without an ID belongs to `ringfence run` or `exec`, or to a program that does not answer.
    """
    from ringfence.cli import owners

    found = [each for each, _ in owners.sandboxes()]
    if json:
        _print_json([asdict(each) for each in found])
        return
    if not found:
        print("no sandbox runs here")
        return
    table = Table("ID", "PID", "TEMPLATE", "STATE", "AGE", "CPU", "MEMORY", "TASKS", "OWNER", "PROGRAM", "METADATA", box=None, pad_edge=False)
    for each in found:
        memory = f"{each.memory >> 20}" + (f"/{each.memory_limit >> 20}" if each.memory_limit else "") + " MiB"
        labels = " ".join(f"{name}={value}" for name, value in each.metadata.items())
        table.add_row(
            _escape(each.id[:20] or "-"), str(each.pid), _escape(each.template or "-"), _escape(each.state), f"{each.age:.0f} s",
            "-" if each.cpu_seconds is None else f"{each.cpu_seconds:.1f} s", memory, str(each.processes), str(each.owner),
            _escape(each.program[:40]), _escape(labels[:60]),
        )  # fmt: skip
    _console(250).print(table)


@app.command("kill")
def kill_command(
    sandbox: Annotated[list[str] | None, typer.Argument(help="Ids, the first letters of one, or PIDs, as `ringfence ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Kill every sandbox this user may.")] = False,
    json: Json = False,
) -> None:
    """Kill sandboxes and all that runs in them. Exit code 1 when one was not there or did not end."""
    from ringfence.cli import owners

    if not sandbox and not everything:
        raise typer.BadParameter("name a sandbox by its ID or PID (see `ringfence ls`), or use --all")
    outcome: dict[str | int, bool] = {}
    if everything:
        outcome = {each.id or each.pid: owners.kill(each, owner) for each, owner in owners.sandboxes()}
    for name in [] if everything else sandbox or []:
        shown = int(name) if name.isascii() and name.isdigit() and len(name) < 12 else name
        try:
            each, owner = owners.find(name)
        except RingfenceError:
            outcome[shown] = False
            continue
        outcome[shown] = owners.kill(each, owner)
    if json:
        _print_json({"killed": [each for each, gone in outcome.items() if gone], "failed": [each for each, gone in outcome.items() if not gone]})
    else:
        for name, gone in outcome.items():
            print(f"{terminal.line(name)}: {'killed' if gone else 'no such sandbox'}")
    if not all(outcome.values()):
        raise typer.Exit(1)


@app.command("logs")
def logs_command(
    sandbox: Annotated[str, typer.Argument(help="An id, its first letters, or a PID, as `ringfence ls` shows them.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as output comes, until the sandbox ends.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line: one for each piece of output.")] = False,
) -> None:
    """Show the newest output of a sandbox's cells and commands, as its owner keeps it (64 KiB a stream, 1 MiB in all).

    To a pipe the bytes are exact; on a terminal what would act on it is shown instead.
    """
    from ringfence.cli import logs

    logs.show(sandbox, follow, json)


@app.command()
def sweep(
    json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    stale_trees: Annotated[bool, typer.Option("--stale-trees", help="Also remove cached package environments that nothing uses.")] = False,
) -> None:
    """Remove what programs that were killed left behind: control groups, and cached trees on request.

    Also undoes, or finishes, what `apply` was writing to a workspace when it was killed.
    """
    from ringfence.changes import journal
    from ringfence.node.sweep import sweep as remove

    found = remove(dry_run=dry_run, stale_trees=stale_trees)
    applies = journal.leftovers() if dry_run else [
        ": ".join([each.workspace, each.outcome, *each.kept]) for each in journal.recover()
    ]
    if json:
        _print_json({"dry_run": dry_run, **asdict(found), "applies": applies})
        return
    for path in [*found.groups, *found.trees, *applies]:
        print(terminal.line(path))
    count = len(found.groups) + len(found.trees) + len(applies)
    print(f"{count} leftovers {'found' if dry_run else 'removed'}" if count else "nothing is left of other lives")


@app.command()
def bench(json: Json = False) -> None:
    """Say how the figures are measured: `make bench` in a checkout runs them beside the peers."""
    message = "the benchmark lives in the source checkout: run `make bench` there; its figures are in bench/RESULTS.md"
    _print_json({"message": message}) if json else print(message)


@app.command()
def version(json: Json = False) -> None:
    """Print the version."""
    from ringfence import __version__

    _print_json({"version": __version__}) if json else print(__version__)


# Policies ----------------------------------------------------------------------------------------------------

PolicyArgument = Annotated[str, typer.Argument(help="A policy file, or presets joined by `+`.", metavar="FILE")]


@policy_app.command("check")
def policy_check(source: PolicyArgument, json: Json = False) -> None:
    """Read a policy; report errors with their line, and warnings about what it lets out.

    Exit code 0 when it can be read (warnings included), 1 when not.
    """
    from ringfence.policy.linting import lint
    from ringfence.policy.loading import load

    policy = load(source)
    findings = [finding._asdict() for finding in lint(policy)]
    if json:
        _print_json({"valid": True, "name": policy.name, "findings": findings})
        return
    for finding in findings:
        print("warning: " + terminal.text(": ".join(str(value) for value in finding.values() if value)))
    print(f"policy `{terminal.line(policy.name)}` is valid" + (f", with {len(findings)} warnings" if findings else ""))


@policy_app.command("explain")
def policy_explain(source: PolicyArgument, json: Json = False) -> None:
    """Say in words what a policy allows, and what of it would be in force on this machine."""
    from ringfence.engines.namespace import engine
    from ringfence.policy.explanation import explain
    from ringfence.policy.loading import load

    policy = load(source)
    sentences = explain(policy)
    probe = engine.probe()
    refusal: RingfenceError | None = None
    try:
        engine.check(policy.compile())
    except RingfenceError as error:
        refusal = error
    limits = {name: {"strength": row[0], "why": row[1], "hint": row[2]} for name, row in probe.capabilities["limits"].items()}
    soft = [name for name, row in limits.items() if row["strength"] != "hard"]
    if refusal is None and policy.limits.required == "hard" and soft:
        refusal = RingfenceError(f"the policy requires hard limits; here these are not: {', '.join(soft)}", hint=limits[soft[0]]["hint"])
    here = {
        "engine": probe.engine,
        "starts": probe.works and refusal is None,
        "refusal": {"message": refusal.message, "hint": refusal.hint} if refusal else None,
        "limits": limits,
    }
    if json:
        _print_json({"name": policy.name, "sentences": sentences, "here": here})
        return
    for sentence in sentences:
        print(terminal.text(sentence))
    print()
    if not probe.works:
        print(f"On this machine: no sandbox starts: {probe.why} ({probe.hint})")
    elif refusal is not None:
        print(f"On this machine: refused: {terminal.text(refusal)}")
    else:
        print(f"On this machine: held by the engine `{probe.engine}`, isolation level `{probe.level}`.")
    for name, row in limits.items():
        print(f"  limit {name}: {row['strength']} ({row['why']})")
