"""The review shows everything that matters, safely, says what it leaves out, and takes silence for a no."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import GONE, OTHER, captured
from rich.console import Console

from ringfence.changes.model import Changes
from ringfence.cli import review


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    for name in ("a.py", "docs/one.md", "docs/two.md", "lib/x.py", "lib/y.py"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name}\n")
    return place


def printed(changes: Changes, colours: bool = False, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, highlight=False, force_terminal=colours, color_system="standard" if colours else None)
    review.show(changes, console, **options)  # type: ignore[arg-type]
    return out.getvalue()


def answers(*replies: str) -> tuple[list[str], Callable[[str], str]]:
    asked: list[str] = []
    left = list(replies)

    def answer(question: str) -> str:
        asked.append(question)
        return left.pop(0) if left else ""

    return asked, answer


def paths(chosen: list[object]) -> list[str]:
    return sorted(change.path for change in chosen)  # type: ignore[attr-defined]


def test_every_change_is_shown_and_what_stands_out_comes_first(source: Path) -> None:
    text = printed(captured(source, {
        "a.py": b"changed\n", "new.py": b"new\n", ".git/hooks/pre-commit": b"#!/bin/sh\nevil\n", "docs": GONE, "lib": GONE,
        "library/x.py": b"lib/x.py\n", "library/y.py": b"lib/y.py\n", "socket": OTHER, "out": "/etc/passwd",
    }))  # fmt: skip
    assert text.index(".git/hooks/pre-commit") < text.index("a.py") and "protected" in text
    for part in ("-a.py", "+changed", "+evil", "docs/ (2 names in it)", "lib -> library/ (2 names in it)", "out -> /etc/passwd", "never written"):
        assert part in text, text
    assert "\x1b" not in text, "no colours where no terminal is"


def test_nothing_from_the_sandbox_acts_on_the_terminal_or_hides(source: Path) -> None:
    """S132, S133: names, contents, targets."""
    hostile = "\x1b]52;c;cm0=\x07\x1b[2J\x9b31m\r\u202e\u2066\u200b\u2028\U000e0041"
    changes = captured(source, {
        f"na{hostile}me".replace("\u2028", ""): f"one{hostile}\nforged\n".encode(), "line\nbreak": b"x\n", "l": hostile, "bad\udcff": b"\xff\n",
    })  # fmt: skip
    for colours in (False, True):
        text = printed(changes, colours)
        rest = text.replace("\x1b[", "", text.count("\x1b[")) if colours else text
        for character in ("\x07", "\x9b", "\r", "\u202e", "\u2066", "\u200b", "\u2028", "\U000e0041", "]52;c;cm0=\x07"):
            assert character not in rest
        if not colours:
            assert "\x1b" not in text
        assert "\\x1b]52" in text and "\\nbreak" in text and "\\xff" in text
        text.encode()
    asked, answer = answers("n")
    review.ask(changes, Console(file=io.StringIO()), answer)
    assert all("\x1b" not in each and "\n" not in each for each in asked)


def test_colours_are_for_terminals_and_are_rich_markup_of_nobody(source: Path) -> None:
    changes = captured(source, {"[red]x[/red]": b"[bold]not markup[/bold]\n"})
    assert "\x1b[" in printed(changes, colours=True)
    assert "[red]x[/red]" in printed(changes) and "+[bold]not markup[/bold]" in printed(changes)


def test_what_does_not_fit_is_said_to_be_left_out(source: Path) -> None:
    changes = captured(source, {f"f{number:04}": b"line\n" * 300 for number in range(300)} | {"long": b"x\n" * 1000, "wide": b"y" * 5000 + b"\n"})
    text = printed(changes)
    assert "more rows are not shown" in text and "more files are not shown" in text
    assert len(text.splitlines()) < review.LINES + review.ROWS + 100
    single = printed(changes, only=[changes["long"]])
    assert "more lines of long are not shown" in single
    assert "more characters" in printed(changes, only=[changes["wide"]])
    assert printed(changes, only=[changes["long"]], bounded=False).count("+x\n") == 1000


@pytest.mark.parametrize("reply", ["", "n", "no", "x", "\x1b[A", "  "])
def test_only_yes_is_yes(source: Path, reply: str) -> None:
    _, answer = answers(reply.strip().lower())
    assert review.ask(captured(source, {"a.py": b"x\n"}), Console(file=io.StringIO()), answer) == []


def test_yes_applies_what_is_ordinary_and_asks_for_the_rest_one_by_one(source: Path) -> None:
    changes = captured(source, {"a.py": b"x\n", ".envrc": b"x", "CLAUDE.md": b"x", "device": OTHER})
    asked, answer = answers("y", "n", "y")
    assert paths(review.ask(changes, Console(file=io.StringIO()), answer)) == ["CLAUDE.md", "a.py"]  # type: ignore[arg-type]
    assert len(asked) == 3 and "direnv" in asked[1], "what can never be applied is not asked for"


def test_some_can_be_selected_and_quitting_applies_nothing(source: Path) -> None:
    changes = captured(source, {"a.py": b"x\n", "b.py": b"y\n", "c.py": b"z\n"})
    _, answer = answers("s", "n", "y", "n")
    assert paths(review.ask(changes, Console(file=io.StringIO()), answer)) == ["b.py"]  # type: ignore[arg-type]
    _, answer = answers("s", "y", "q")
    assert review.ask(changes, Console(file=io.StringIO()), answer) == []


def test_without_a_terminal_there_is_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert not review.can_ask()


def test_options_name_what_to_apply(source: Path) -> None:
    from ringfence.errors import InvalidArgumentError

    changes = captured(source, {"a.py": b"x\n", ".envrc": b"x", "docs/one.md": b"x", "docs/.envrc": b"x"})
    assert paths(review.named(changes, [], True)) == ["a.py", "docs/one.md"]  # type: ignore[arg-type]
    assert paths(review.named(changes, [".envrc"], False)) == [".envrc"]  # type: ignore[arg-type]
    assert paths(review.named(changes, ["docs/"], False)) == ["docs/one.md"]  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        review.named(changes, ["nowhere"], True)
