"""The two tables of languages, the host's and the guest's, name the same ones."""

from __future__ import annotations

from ringfence.cli.arguments import RUN_OPTIONS, parse
from ringfence.guest import languages as inside
from ringfence.stream import languages as outside


def test_host_and_guest_know_the_same_languages() -> None:
    assert set(outside.LANGUAGES) == {"python", *inside.LANGUAGES}
    assert set(outside.SUFFIXES.values()) == set(inside.LANGUAGES)
    for language in inside.LANGUAGES:
        assert outside.command(language) and outside.command(language, code="1") and outside.command(language, file="f")
        assert f"`{language}`" in RUN_OPTIONS["--language"]


def test_a_suffix_decides_and_python_is_the_rest() -> None:
    names = {"a.js": "javascript", "b/c.SH": "bash", "x.R": "r", "a.py": "python", "README": "python", "d.js/e": "python", "-": "python"}
    assert {name: parse("run", [name]).language for name in names} == names
    assert parse("run", ["--language", "Node", "a.py"]).language == "javascript"
