"""linux/json_text.py: it writes and reads what the json module does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ringfence.linux import json_text

VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
)


@pytest.fixture(params=["the C half", "the json module"], autouse=True)
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "the json module":
        monkeypatch.setattr(json_text, "_json", None)
        monkeypatch.setattr(json_text, "_scan", json_text.scanner())
        monkeypatch.setattr(json_text, "dumps", json_text.encoder())


@given(VALUES)
def test_values_are_written_and_read_as_the_json_module_does(value: Any) -> None:
    text = json_text.dumps(value)
    assert text == json.dumps(value) and json_text.loads(text) == json.loads(text) == value
    assert json_text.dumps_compactly(value) == json.dumps(value, separators=(",", ":"))
    assert json_text.loads(b" \r\n\t" + text.encode() + b" \n") == value


@pytest.mark.parametrize("data", ["", " ", "{", "[1,]", "1 2", "nul", "'a'", b"\xff", '{"a" 1}', "[1]]", '"\x01"', "\xa0 1"])
def test_what_is_not_json_is_a_value_error(data: str | bytes) -> None:
    with pytest.raises(ValueError):
        json_text.loads(data)
    with pytest.raises(ValueError):  # the control: so does the json module
        json.loads(data)


def test_numbers_without_end_are_refused_where_asked_and_nesting_has_a_bound() -> None:
    with pytest.raises(ValueError):
        json_text.encoder(allow_nan=False)(float("inf"))
    with pytest.raises(RecursionError):
        json_text.loads("[" * 200_000)
    with pytest.raises(TypeError):
        json_text.dumps(b"bytes")
