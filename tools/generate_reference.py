"""Write docs/reference from the code, or check that it is current.

    python tools/generate_reference.py [--check]

Guards against a reference that says what the code once did: everything in these pages is a docstring, a default, a
field's description or an option's help. `make lint` and a test run the check.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by tools/generate_reference.py from the code: change the code, then run `make docs`. -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is not current")
    options = parser.parse_args()
    stale = []
    for name, text in pages().items():
        path = TARGET / name
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'is not current; run `make docs`' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def pages() -> dict[str, str]:
    """Every page of docs/reference as it should be."""
    return {
        "api.md": api(),
        "cli.md": command_line(),
        "errors.md": errors(),
        "limits.md": limits(),
        "policy.md": policy(),
    }


def _document(thing: Any) -> str:
    return textwrap.dedent(inspect.getdoc(thing) or "").strip()


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


# The Python API ----------------------------------------------------------------------------------------------


def api() -> str:
    import ringfence

    lines = [NOTICE, "# Python API\n", ("Everything here is imported from `ringfence`. The asynchronous classes have the same "
             "names and arguments as the synchronous ones, with `await`; they are listed by name only.\n")]  # fmt: skip
    exceptions, classes, others = [], [], []
    for name in ringfence.__all__:
        value = getattr(ringfence, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            exceptions.append(name)
        elif inspect.isclass(value):
            classes.append((name, value))
        else:
            others.append((name, value))
    twins = [name for name, _ in classes if name.startswith("Async")]
    ordered = sorted((each for each in classes if each[0] not in twins), key=lambda each: (each[0] != "Sandbox", each[0]))
    for name, value in ordered:
        lines += _class(name, value)
    for name, value in others:
        lines.append(f"## {name}\n\n{_document(value)}\n")
    lines.append("## Asynchronous twins\n")
    lines.append(", ".join(f"`{name}`" for name in twins) + "\n")
    lines.append("## Errors\n")
    lines.append("Described in [errors.md](errors.md): " + ", ".join(f"`{name}`" for name in exceptions) + "\n")
    return "\n".join(lines)


_PARTS = ("Commands", "Files", "Pty")
"""What `Sandbox` holds as attributes; documented after it although not imported by name."""


def _class(name: str, value: type) -> list[str]:
    lines = [f"## {name}\n", _document(value) + "\n"]
    if dataclasses.is_dataclass(value):
        fields = [f"`{field.name}`" for field in dataclasses.fields(value) if not field.name.startswith("_")]
        lines.append("Fields: " + ", ".join(fields) + "\n")
    elif getattr(value, "__annotations__", None) and _is_typed_dict(value):
        lines += _typed_dict(value)
    else:
        lines += _members(value)
        if name == "Sandbox":
            module = sys.modules[value.__module__]
            for part in _PARTS:
                inner = getattr(module, part)
                attribute = part.lower()
                lines += [f"## Sandbox.{attribute}\n", _document(inner) + "\n", *_members(inner)]
    return lines


def _is_typed_dict(value: type) -> bool:
    return hasattr(value, "__total__")


def _typed_dict(value: type) -> list[str]:
    source = inspect.getsource(value)
    pieces = re.findall(r'^    (\w+): ([^\n]+)\n(?:    """(.*?)"""\n)?', source, re.MULTILINE | re.DOTALL)
    rows = ["| key | type | meaning |", "|---|---|---|"]
    for key, kind, text in pieces:
        meaning = " ".join(text.split()) or "replaces the limit of that name"
        rows.append(f"| `{key}` | `{_cell(kind)}` | {_cell(meaning)} |")
    return ["\n".join(rows) + "\n"]


def _members(value: type) -> list[str]:
    lines = []
    for name, member in vars(value).items():
        if name.startswith("_") and name != "__init__":
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if isinstance(member, property):
            lines.append(f"### `.{name}`\n\n{_document(member)}\n")
        elif inspect.isfunction(function):
            if name == "__init__":
                continue
            lines.append(f"### `{name}{_signature(function)}`\n\n{_document(function)}\n")
    return lines


def _signature(function: Any) -> str:
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in inspect.signature(function).parameters.values()
                  if each.name not in ("self", "cls")]  # fmt: skip
    return str(inspect.Signature(parameters))


# The command line --------------------------------------------------------------------------------------------


def command_line() -> str:
    import typer

    from ringfence.cli.app import app
    from ringfence.cli.once import FAILED, NOT_FOUND, NOT_RUNNABLE, TIMED_OUT

    lines = [NOTICE, "# Command line\n", "Every command takes `--json` and then prints one JSON document.\n"]
    root = typer.main.get_command(app)
    for path, command in _commands(root, ()):
        lines.append(f"## `ringfence {' '.join(path)}`\n\n{textwrap.dedent(command.help or '').strip()}\n")
        rows = ["| option | meaning |", "|---|---|"]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                names = f"`{parameter.metavar or parameter.name.upper()}`"
            rows.append(f"| {names} | {_cell(getattr(parameter, 'help', '') or '')} |")
        lines.append("\n".join(rows) + "\n")
    lines.append(
        "## Exit codes of `run` and `exec`\n\n"
        "| code | meaning |\n|---|---|\n"
        "| the program's | it ended by itself |\n"
        "| 128 + n | it died by signal n; 137 also when it was killed for its memory |\n"
        f"| {TIMED_OUT} | the time was up |\n"
        f"| {FAILED} | Ringfence failed, or the sandbox could not be held here; a line beginning `ringfence:` says why |\n"
        f"| {NOT_RUNNABLE} | the command is there and cannot be executed |\n"
        f"| {NOT_FOUND} | there is no such command |\n"
        "| 2 | arguments that make no sense, such as `--timeout abc`, `--timeout 0` or `--memory 1`; the line says what would, sizes in MiB |\n"
    )
    return "\n".join(lines)


def _commands(group: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found += _commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


# Errors, limits, policies ------------------------------------------------------------------------------------


def errors() -> str:
    from ringfence import errors as module

    text = _document(module)
    tree = text[text.index("RingfenceError  ") :]
    lines = [NOTICE, "# Errors\n", ("Every error that Ringfence raises on purpose has `.message` and `.hint`, which says what to do. "
             "Builtin bases are kept, so ordinary `except` clauses work too.\n"), f"```text\n{tree}\n```\n"]  # fmt: skip
    for name in module.__all__:
        kind = getattr(module, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        lines.append(f"## {name}\n\n{_document(kind)}\n\nIs a {bases}.\n")
    return "\n".join(lines)


def limits() -> str:
    from ringfence.engines.base import Limits as Plain
    from ringfence.policy.model import Limits
    from ringfence.policy.presets import PRESETS

    plain = Plain()
    presets = [name for name in PRESETS if PRESETS[name].get("limits")]
    rows = ["| limit | default | " + " | ".join(f"`{name}`" for name in presets) + " | meaning |", "|---" * (3 + len(presets)) + "|"]
    for name, field in Limits.model_fields.items():
        others = [str(PRESETS[preset]["limits"].get(name, "")) for preset in presets]
        rows.append(f"| `{name}` | {_value(name, getattr(plain, name))} | " + " | ".join(others) + f" | {_cell(field.description)} |")
    lines = [
        NOTICE, "# Limits\n", "The columns after the default are the presets that change it.\n", "\n".join(rows) + "\n",
        "## How strongly a limit is held\n",
        ("`sandbox.info().enforcement` and `ringfence doctor` say for this machine which is which:\n\n"
        "- `hard`: the kernel refuses or kills. Memory, processors and processes are hard where a control group can be\n"
        "  made (root, or a delegated group); processes are hard on Linux 5.14 and newer in any case; disk, tmp, file size\n"
        "  and open files are always hard. Times and the size of output are kept by the host.\n"
        "- `watched`: memory without a control group. Each process is bounded by the kernel (`RLIMIT_DATA`), their sum is\n"
        "  measured every 50 ms and the sandbox killed when it is over.\n"
        "- `none`: processors without a control group.\n\n"
        "A policy with `limits: {required: hard}` refuses to start where one of them is not hard.\n"),
        "## Memory, exactly\n",
        ("Files in a sandbox lie in memory (tmpfs), and the kernel charges them to the control group of the sandbox. So the\n"
        "group gets `memory` + `disk` + `tmp`, or a full disk would kill the processes. The other side of it: while the files\n"
        "are empty, processes can use the whole sum, 812MiB with the defaults. Where memory must be sharp, choose small `disk`\n"
        "and `tmp`: `Sandbox(memory=\"512MiB\", disk=\"10MiB\", tmp=\"10MiB\")`. `/dev/shm`, of min(64MiB, `tmp`), is charged\n"
        "to the same group and adds nothing to it.\n\n"
        "Memory that is only `watched` (an ordinary user without a control group) is what the page tables of the processes\n"
        "show. It does not see the buffers of sockets (Unix, UDP, TCP) and pipes, nor shared pages that no page table refers\n"
        "to (after `madvise` or a partial `munmap`). It stops programs that use too much; it is no wall against code that\n"
        "hides memory on purpose. Only a control group is. As a last line, when the memory available on the machine falls\n"
        "below 5 % of it or 256 MiB, whichever is more (and at most an eighth of a small machine), the launcher ends every\n"
        "sandbox whose memory is watched.\n"),
        "## Time\n",
        ("`timeout`, `idle` and `max_age` are three clocks; [concepts](../concepts.md#three-timeouts) says which is which. The\n"
        "longest time is 3650d, the largest size 1TiB.\n"),
    ]  # fmt: skip
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    from ringfence.policy.units import format_duration, format_size

    if name in ("memory", "disk", "tmp", "output", "result", "file_size"):
        return format_size(value)
    if name in ("timeout", "idle", "max_age"):
        return format_duration(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def policy() -> str:
    from ringfence.policy import model
    from ringfence.policy.presets import ALIASES, PRESETS

    lines = [NOTICE, "# Policy fields\n", ("A policy is a YAML or JSON file, a dictionary, or a `Policy`. Unknown keys are errors. "
             "Network, command and injection rules are read and checked now; a sandbox that needs them refuses to start until "
             "they are enforced.\n")]  # fmt: skip
    seen: list[type] = []
    waiting: list[tuple[str, Any]] = [("", model.Policy)]
    while waiting:
        path, kind = waiting.pop(0)
        if kind in seen:
            continue
        seen.append(kind)
        title = path or "The policy itself"
        lines.append(f"## {'`' + title + '`' if path else title}\n\n{_document(kind).split(chr(10) + chr(10))[0]}\n")
        rows = ["| field | default | meaning |", "|---|---|---|"]
        for name, field in kind.model_fields.items():
            inner = _model_of(field.annotation, model)
            if inner is not None:
                many = "tuple" in str(field.annotation)
                waiting.append((f"{path}.{name}".lstrip(".") + ("[]" if many else ""), inner))
                default = "[]" if many else "see below" if field.default is not None else "none"
            else:
                default = "required" if field.is_required() else f"`{field.default!r}`" if name not in model.Limits.model_fields else _value(name, field.default)
            rows.append(f"| `{name}` | {_cell(default)} | {_cell(field.description or '')} |")
        lines.append("\n".join(rows) + "\n")
    lines.append("## Presets\n\nNames for `presets:` in a file and for `policy=`; joined by `+` they add up.\n")
    lines += [f"- `{name}`: {values['description']}" for name, values in PRESETS.items()]
    lines += [f"- `{alias}`: another name of `{name}`" for alias, name in ALIASES.items()]
    return "\n".join(lines) + "\n"


def _model_of(annotation: Any, model: Any) -> Any:
    import typing

    for each in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(each) and issubclass(each, model.BaseModel):
            return each
    return None


if __name__ == "__main__":
    sys.exit(main())
