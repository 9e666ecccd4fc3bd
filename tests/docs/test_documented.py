"""Nothing that a user can meet is undocumented, and the generated reference is what the code says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def test_the_reference_is_current() -> None:
    done = subprocess.run([sys.executable, "tools/generate_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_option_of_the_command_line_has_help() -> None:
    import typer

    from ringfence.cli.app import app

    def judge(group: Any, path: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                judge(command, f"{path} {name}")
                continue
            assert command.help, f"{path} {name} has no help"
            options = {option for parameter in command.params for option in parameter.opts}
            assert "--json" in options, f"{path} {name} has no --json"
            for parameter in command.params:
                if parameter.name != "help":
                    assert getattr(parameter, "help", ""), f"{path} {name}: {parameter.opts} has no help"

    judge(typer.main.get_command(app), "ringfence")


def test_the_fast_paths_options_are_those_of_the_help() -> None:
    """`run` and `exec` are parsed by hand; what their help declares is what the parser takes."""
    import typer

    from ringfence.cli import arguments
    from ringfence.cli.app import app

    parsed = {*arguments.VALUE_OPTIONS, *arguments.FLAGS}
    group: Any = typer.main.get_command(app)
    for verb in ("run", "exec"):
        declared = {option for parameter in group.commands[verb].params for option in parameter.opts if option.startswith("--")}
        assert declared | {"--help"} == parsed | ({*arguments.RUN_OPTIONS, *arguments.REVIEW_OPTIONS} if verb == "run" else set()), verb


def test_every_exported_name_limit_error_and_field_is_in_the_reference() -> None:
    import ringfence
    from ringfence.policy import model

    text = "".join(path.read_text("utf-8") for path in REFERENCE.glob("*.md"))
    for name in ringfence.__all__:
        assert f"`{name}`" in text or f"## {name}\n" in text, name
    kinds = [kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, model._Part) and kind is not model._Part]
    assert len(kinds) >= 9
    for kind in kinds:
        for field in kind.model_fields:
            assert f"| `{field}` |" in text, f"{kind.__name__}.{field}"


def test_everything_exported_has_a_docstring() -> None:
    import ringfence

    for name in ringfence.__all__:
        value = getattr(ringfence, name)
        assert (value.__doc__ or "").strip(), name


def test_the_pages_speak_of_this_project_alone() -> None:
    """No path of a builder's machine gets into what users read."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text("utf-8")
        for word in ("/work/", "/root/.pyenv", "localhost:", "file:///"):
            assert word not in text or word == "localhost:", f"{page.name}: {word}"
