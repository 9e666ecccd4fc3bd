"""The launcher does what the grammar names, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.engines.base import CellSpec
from ringfence.engines.namespace import engine, grammar


def create(**changes: object) -> dict:
    request = engine.create_request("abc", CellSpec(), None, prefork=True)
    request.update(changes)
    request.setdefault("number", 1)
    return request


def parse(request: object) -> dict:
    return grammar.parse(json.dumps(request).encode())


def test_what_the_engine_asks_is_in_the_grammar():
    assert parse(create())["id"] == "abc"
    request = engine.template_request("base", python="/opt/env/bin/python3", sources={}, library=None, masks=("/opt/x",))
    assert parse({**request, "number": 2})["masks"] == ["/opt/x"]


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "../x"}, {"id": ""}, {"id": "A"}, {"id": "a" * 64}, {"id": 7}, {"id": "-rf"},
        {"cwd": "home"}, {"cwd": "/a\0b"}, {"host_name": "a b"}, {"prefork": 1},
        {"environment": {"A=B": "x"}}, {"environment": {"A": "x\0y"}}, {"environment": {"": "x"}}, {"environment": []},
        {"environment": {"A": 1}}, {"number": -1}, {"number": "1"}, {"surprise": 1}, {"do": "exec"}, {"do": None},
        {"template": "a/b"}, {"directories": {}}, {"directories": [{"place": "/workspace"}]},
        {"directories": [{"place": "/data", "mode": "rw", "root_owned": False, "protected": []}]},
        {"directories": [{"place": "/workspace", "mode": "none", "root_owned": False, "protected": []}]},
        {"directories": [{"place": "workspace", "mode": "ro", "root_owned": False, "protected": []}]},
        {"directories": [{"place": "/data/../etc", "mode": "ro", "root_owned": False, "protected": []}]},
        {"directories": [{"place": "/data//x", "mode": "ro", "root_owned": False, "protected": []}]},
        {"directories": [{"place": "/data", "mode": "ro", "root_owned": 1, "protected": []}]},
        {"directories": [{"place": "/data", "mode": "ro", "root_owned": False, "protected": [], "source": "/"}]},
        {"directories": [{"place": "/data", "mode": "ro", "root_owned": False, "protected": []}] * 2},
        {"directories": [{"place": f"/data/{n}", "mode": "ro", "root_owned": False, "protected": []} for n in range(34)]},
    ],
)  # fmt: skip
def test_a_field_outside_its_bounds_is_refused(changes):
    with pytest.raises(grammar.GrammarError):
        parse(create(**changes))


@pytest.mark.parametrize(
    "name, value",
    [("memory", 1), ("memory", True), ("memory", 1e9), ("cpus", 0), ("pids", 0), ("pids", "9"), ("disk", -1),
     ("max_age", float("inf")), ("required", "maybe"), ("open_files", 1 << 40)],
)  # fmt: skip
def test_a_limit_outside_its_bounds_is_refused(name, value):
    request = create()
    request["limits"] = {**request["limits"], name: value}
    with pytest.raises(grammar.GrammarError):
        parse(request)


def test_a_missing_limit_is_refused_not_filled_in():
    request = create()
    limits = dict(request["limits"])
    del limits["memory"]
    with pytest.raises(grammar.GrammarError):
        parse({**request, "limits": limits})


def test_sources_may_only_go_to_the_three_places_below_opt():
    request = engine.template_request("base", python="/x", sources={"etc": "/etc"}, library=None, masks=())
    with pytest.raises(grammar.GrammarError):
        parse({**request, "number": 1})


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"1", b"{", b"[" * 100_000, b"x" * (grammar.MAXIMUM_REQUEST + 1)])
def test_what_is_no_request_is_refused(raw):
    with pytest.raises(grammar.GrammarError):
        grammar.parse(raw)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=10),
       lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=6)).map(
       lambda value: json.dumps(value).encode()))  # fmt: skip
def test_nothing_but_a_grammar_error_comes_out_of_arbitrary_input(raw):
    try:
        grammar.parse(raw)
    except grammar.GrammarError:
        pass
