"""Every example in README.md and docs/ runs, and prints what the page says it prints.

A block whose fence says `python` is run; when a block `output` follows, it is what the example prints. In a block
`console`, each line that begins with `$ ` is run by bash, and the lines after it are what comes out (standard error
included). `notest` after the language marks the exceptions, which need a reason in the text around them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ringfence import EnforcementError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts)]


class Example(NamedTuple):
    page: str
    line: int
    code: str
    output: str | None


def _blocks(path: Path) -> list[tuple[int, str, str]]:
    """(line, info string, text) of every fenced block."""
    found, inside, info, start, text = [], False, "", 0, []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        fence = re.match(r"^```(.*)$", line)
        if fence and not inside:
            inside, info, start, text = True, fence[1].strip(), number, []
        elif fence:
            inside = False
            found.append((start, info, "\n".join(text) + "\n"))
        elif inside:
            text.append(line)
    return found


def examples(language: str) -> list[Example]:
    found = []
    for page in PAGES:
        blocks = _blocks(page)
        for position, (line, info, text) in enumerate(blocks):
            if info == language:
                following = blocks[position + 1] if position + 1 < len(blocks) else (0, "", "")
                output = following[2] if following[1] == "output" else None
                found.append(Example(str(page.relative_to(ROOT)), line, text, output))
    return found


def _name(example: Example) -> str:
    return f"{example.page}:{example.line}"


@pytest.mark.parametrize("example", examples("python"), ids=_name)
def test_python_examples_print_what_the_page_says(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(example.code, _name(example), "exec"), {"__name__": "__main__"})  # noqa: S102 our own pages
        except EnforcementError as refusal:
            if refusal.primitive != "ids for root":
                raise
            pytest.skip(f"this user has one id: {refusal}")
    if example.output is not None:
        assert printed.getvalue() == example.output


@pytest.mark.parametrize("example", examples("console"), ids=_name)
def test_console_examples_print_what_the_page_says(example: Example, tmp_path: Path) -> None:
    commands, expected = [], []
    for line in example.code.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
            expected.append("")
        else:
            expected[-1] += line + "\n"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command, output in zip(commands, expected, strict=True):
        done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              cwd=tmp_path, env=environment, timeout=60, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.stdout == output, command


def test_there_are_examples() -> None:
    """A fence that is spelled wrongly must not make every example vanish."""
    assert len(examples("python")) >= 10
    assert len(examples("console")) >= 1
    known = {"python", "python notest", "console", "console notest", "output", "text", "yaml", "sh", "perl", ""}
    for page in PAGES:
        for line, info, _ in _blocks(page):
            assert info in known, f"{page}:{line}: a block of unknown kind {info!r}"
