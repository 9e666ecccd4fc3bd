"""Every test that SPECIFICATION.md names exists, and every promise names one or says that it is pending."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "SPECIFICATION.md"


def _rows() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [(promise, test) for promise, test in rows if promise != "promise"]


def test_every_promise_names_a_test_or_is_pending() -> None:
    assert len(_rows()) > 40
    for promise, test in _rows():
        assert test == "*pending*" or test.startswith("`"), promise


def test_every_test_that_is_named_exists() -> None:
    for promise, test in _rows():
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", test):
            path = ROOT / file
            assert path.exists(), f"{promise}: {file} does not exist"
            assert f"def {name}(" in path.read_text("utf-8"), f"{promise}: {file} has no {name}"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [PAGE, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
