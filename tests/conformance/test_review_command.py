"""`ringfence run --workspace . --review` as a person and as a script see it: real processes, real terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from ringfence.cli.entry import main; main()"]
EDIT = "printf 'one\\n2\\n' > readme.md; echo x > new; mkdir .vscode; echo '{}' > .vscode/tasks.json"


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp"))
    monkeypatch.setenv("RINGFENCE_STATE", str(top / "state"))
    (top / "project").mkdir()
    (top / "project/readme.md").write_text("one\ntwo\n")
    yield top / "project"
    shutil.rmtree(top)


def review(project: Path, *words: str, script: str = EDIT, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, "run", "--workspace", str(project), "--review", *words, "--", "sh", "-c", script],
        input=input, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


def names(project: Path) -> set[str]:
    return {str(path.relative_to(project)) for path in project.rglob("*")}


def test_without_a_terminal_it_is_shown_and_nothing_is_applied(project: Path) -> None:
    done = review(project, script=EDIT + "; echo out; cat", input=b"in\n")
    assert done.returncode == 123, done.stderr
    assert done.stdout == b"out\nin\n", "the program's output alone"
    for part in (b"readme.md", b"-two", b"+2", b".vscode/tasks.json", b"no terminal", b"created"):
        assert part in done.stderr, done.stderr
    assert b"\x1b" not in done.stderr
    assert names(project) == {"readme.md"} and (project / "readme.md").read_text() == "one\ntwo\n"


def test_yes_applies_what_needs_no_name_and_says_what_is_left(project: Path) -> None:
    done = review(project, "--yes")
    assert done.returncode == 123 and b"left out" in done.stderr
    assert names(project) == {"readme.md", "new"} and (project / "readme.md").read_text() == "one\n2\n"
    done = review(project, "--apply", ".vscode/tasks.json", "--yes")
    assert ".vscode/tasks.json" in names(project)


def test_all_applied_or_nothing_changed_is_the_programs_own_exit_code(project: Path) -> None:
    assert review(project, "--yes", script="echo x > new").returncode == 0
    assert review(project, "--yes", script="echo x > newer; exit 7").returncode == 7
    assert (project / "newer").exists()
    done = review(project, script="true")
    assert done.returncode == 0 and b"Nothing was changed" in done.stderr


def test_json_gives_everything_and_asks_nothing(project: Path) -> None:
    done = review(project, "--json", script=EDIT + "; echo out")
    assert done.returncode == 123 and done.stderr == b""
    document = json.loads(done.stdout)
    assert document["stdout"] == "out\n" and document["exit_code"] == 0 and document["applied"] == []
    found = {change["path"]: change for change in document["changes"]["changes"]}
    assert found["readme.md"]["diff"].endswith("-two\n+2\n") and found[".vscode/tasks.json"]["held"]
    assert names(project) == {"readme.md"}
    document = json.loads(review(project, "--json", "--yes").stdout)
    assert document["applied"] == ["new", "readme.md"]


@pytest.mark.parametrize(
    "words", [["--review", "x.py"], ["--workspace", ".", "--mode", "ro", "--review", "x.py"], ["--workspace", ".", "--yes", "x.py"],
              ["--workspace", ".", "--apply", "x", "x.py"], ["--workspace", ".", "--review", "--apply"]], ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_2(words: list[str]) -> None:
    done = subprocess.run([*COMMAND, "run", *words], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith(b"ringfence: --")


def test_a_path_where_nothing_changed_is_told_and_nothing_is_applied(project: Path) -> None:
    done = review(project, "--yes", "--apply", "nowhere")
    assert done.returncode == 125 and b"nowhere" in done.stderr
    assert names(project) == {"readme.md"}


def on_terminal(project: Path, script: str, answers: list[bytes]) -> tuple[int, bytes]:
    """Run a review on a terminal of its own and answer each question when it is there: (exit code, all that was shown)."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execv(COMMAND[0], [*COMMAND, "run", "--workspace", str(project), "--review", "--", "sh", "-c", script])
        finally:
            os._exit(1)
    shown, left, seen = b"", list(answers), 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        if left and shown.count(b"[n]o") > seen and shown.endswith(b": "):
            seen = shown.count(b"[n]o")
            os.write(terminal, left.pop(0))
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_a_person_is_asked_and_yes_is_not_enough_for_what_is_protected(project: Path) -> None:
    code, shown = on_terminal(project, EDIT, [b"y\n", b"n\n", b"n\n"])
    assert code == 123, shown
    assert b"\x1b[" in shown and b"readme.md" in shown, "colours on a terminal"
    assert names(project) == {"readme.md", "new"}


def test_a_person_says_no(project: Path) -> None:
    code, shown = on_terminal(project, "echo x > new", [b"n\n"])
    assert code == 123 and b"nothing was applied" in shown and names(project) == {"readme.md"}


def test_what_was_typed_before_the_question_is_no_answer(project: Path) -> None:
    """A program can make a terminal answer for the person: what waits in the input when the question comes is dropped."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execv(COMMAND[0], [*COMMAND, "run", "--workspace", str(project), "--review", "--", "sh", "-c", "echo x > new; echo begun; sleep 1"])
        finally:
            os._exit(1)
    shown, typed = b"", False
    deadline = time.monotonic() + 120
    while b"[n]o, [s]elect: " not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 65536)
        if b"begun" in shown and not typed:
            typed = True
            os.write(terminal, b"y\n" * 10)
    os.write(terminal, b"n\n")
    while select.select([terminal], [], [], 60.0)[0]:
        try:
            if not os.read(terminal, 65536):
                break
        except OSError:
            break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 123
    assert names(project) == {"readme.md"}
