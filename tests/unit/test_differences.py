"""Diffs are true, survive any bytes, and cost what the budget says, whatever the texts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.changes.differences import Work, is_text, unified

LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"\xff\xfe\n", b"x\r\n", b"\x1b[2J\n", b"\xe2\x80\xa8\n"]), max_size=40)
TEXTS = st.builds(lambda lines, end: b"".join(lines) + end, LINES, st.sampled_from([b"", b"no newline", b"a", b"\r"]))


def patched(before: bytes, diff: str) -> bytes:
    """`before` with a unified diff carried out, every line of context checked."""
    old = before.split(b"\n")
    old = [line + b"\n" for line in old[:-1]] + ([old[-1]] if old[-1] else [])
    out: list[bytes] = []
    position = 0
    lines = diff.encode("utf-8", "surrogateescape").split(b"\n")[:-1]
    for index, line in enumerate(lines):
        mark, text = line[:1], line[1:] + b"\n"
        if index + 1 < len(lines) and lines[index + 1].startswith(b"\\ No newline"):
            text = text[:-1]
        if mark == b"@":
            first, _, count = line.split()[1][1:].partition(b",")
            start = int(first) - (0 if count == b"0" else 1)
            out += old[position:start]
            position = start
        elif mark in b" -" and mark:
            assert old[position] == text
            position += 1
            if mark == b" ":
                out.append(text)
        elif mark == b"+":
            out.append(text)
    return b"".join(out + old[position:])


@given(TEXTS, TEXTS)
@settings(max_examples=300, deadline=None)
def test_a_diff_carried_out_on_the_old_text_gives_the_new_one(before: bytes, after: bytes) -> None:
    diff = unified(before, after, Work())
    assert diff is not None
    assert patched(before, diff) == after
    assert (diff == "") == (before == after)


@given(TEXTS, TEXTS)
@settings(max_examples=100, deadline=None)
def test_without_a_budget_a_diff_is_longer_and_still_true(before: bytes, after: bytes) -> None:
    diff = unified(before, after, Work(steps=0))
    assert diff is not None
    assert patched(before, diff) == after


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("after", [b"one\ntwo\n", b"", b"one\n2\nthree", b"\xff\n\x1b]0;x\x07\ntwo\nthree\n", b"zero\none\r\ntwo\nthree\nfour\n"])
def test_git_applies_it(tmp_path: Path, after: bytes) -> None:
    before = b"one\ntwo\nthree\n"
    (tmp_path / "file").write_bytes(before)
    diff = unified(before, after, Work())
    assert diff is not None
    patch = "--- a/file\n+++ b/file\n" + diff
    subprocess.run(
        ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"], cwd=tmp_path, check=True,
        input=patch.encode("utf-8", "surrogateescape"), env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )  # fmt: skip
    assert (tmp_path / "file").read_bytes() == after


def test_small_edits_of_a_long_text_give_small_diffs() -> None:
    old = [b"line %d\n" % number for number in range(20_000)]
    new = old.copy()
    new[5_000] = b"changed\n"
    del new[10_000:10_003]
    new.insert(15_000, b"}\n")
    diff = unified(b"".join(old), b"".join(new), Work())
    assert diff is not None and len(diff.splitlines()) < 40


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\n" * 40_000, b"a\n" * 20_000 + b"b\n" + b"a\n" * 19_999),
        (b"a\nb\n" * 20_000, b"b\nb\na\n" * 13_000),
        (b"".join(b"%d\n" % (n % 200) for n in range(40_000)), b"".join(b"%d\n" % (n * 7 % 200) for n in range(40_000))),
        (b"".join(b"%d\n" % n for n in range(40_000)), b"".join(b"%d\n" % n for n in reversed(range(40_000)))),
    ],
)
def test_texts_made_to_be_slow_stay_within_the_budget(before: bytes, after: bytes) -> None:
    work = Work(steps=1_000_000)
    diff = unified(before, after, work)
    assert diff is not None and patched(before, diff) == after
    assert work.steps > -200_000, "one step over the end of the budget, no more"


def test_what_is_too_much_is_left_out_and_the_budget_of_text_is_shared() -> None:
    assert unified(b"", b"x\n" * 50_001, Work()) is None
    work = Work(size=100)
    assert unified(b"", b"x" * 60 + b"\n", work) is not None
    assert unified(b"", b"x" * 60 + b"\n", work) is None


def test_a_nul_byte_makes_it_binary() -> None:
    assert is_text(b"\xff\xfe text") and not is_text(b"a\0b")
