"""The hand-written parser of `run` and `exec`: options end where the program begins."""

from __future__ import annotations

import pytest

from ringfence.cli import precompiled
from ringfence.cli.arguments import UsageError, parse


def test_what_follows_the_program_belongs_to_it() -> None:
    request = parse("run", ["--timeout", "5", "script.py", "--json", "-c", "--", "x"])
    assert request.file == "script.py"
    assert request.arguments == ["--json", "-c", "--", "x"]
    assert request.options == {"timeout": "5"}
    assert not request.json


def test_code_takes_the_rest_as_its_arguments() -> None:
    request = parse("run", ["--memory=1GiB", "-c", "print(1)", "-x", "--json"])
    assert (request.code, request.arguments, request.options) == ("print(1)", ["-x", "--json"], {"memory": "1GiB"})


def test_two_dashes_end_the_options() -> None:
    assert parse("exec", ["--json", "--", "--version"]).command == ["--version"]
    assert parse("run", ["--", "-c"]).file == "-c"


def test_two_dashes_after_a_workspace_begin_a_command() -> None:
    request = parse("run", ["--workspace", ".", "--mode=ro", "--", "make", "-n"])
    assert (request.command, request.file) == (["make", "-n"], None)
    assert request.options == {"workspace": ".", "mode": "ro"}
    assert parse("run", ["--workspace", ".", "script.py", "x"]).file == "script.py"
    assert parse("run", ["--workspace=.", "--"]).file == "-"


def test_no_file_and_a_dash_mean_standard_input() -> None:
    assert parse("run", []).file == parse("run", ["-"]).file == "-"


def test_variables_are_given_or_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "value")
    request = parse("run", ["--env", "A=b=c", "--env=FROM_HERE", "x.py"])
    assert request.variables == {"A": "b=c", "FROM_HERE": "value"}


@pytest.mark.parametrize(
    "words",
    [["run", "-c"], ["run", "--nonsense"], ["run", "--timeout"], ["run", "--env", "=x"], ["run", "--env", "NOT_SET_ANYWHERE"],
     ["run", "--template", "debian", "x"], ["run", "--json=1"], ["exec"], ["exec", "--"], ["exec", "-c", "x"],
     ["run", "--mode", "ro", "x"], ["run", "--workspace", ".", "--mode", "none", "x"]],
    ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_right_way(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words[0], words[1:])
    assert len(str(caught.value)) > 20


def test_the_precompiled_policy_is_the_default_policy() -> None:
    from ringfence.engines.namespace import engine
    from ringfence.policy.model import Policy

    limits = Policy().compile().limits
    assert {name: getattr(limits, name) for name in precompiled.LIMITS} == precompiled.LIMITS
    assert (limits.timeout, limits.output) == (precompiled.TIMEOUT, precompiled.OUTPUT)
    assert engine.BASE_ENVIRONMENT == precompiled.ENVIRONMENT


def test_the_precompiled_request_is_the_engines() -> None:
    """What `once` sends without the engine's help is what the engine would have sent."""
    from ringfence.engines.base import CellSpec
    from ringfence.engines.namespace import engine

    assert set(engine.create_request("x", CellSpec(), None, False)["limits"]) == set(precompiled.LIMITS)
