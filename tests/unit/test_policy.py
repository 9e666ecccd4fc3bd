"""The policy model: defaults, strictness, loading with line numbers, presets, compilation."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from ringfence.engines.base import CellSpec
from ringfence.engines.base import Limits as PlainLimits
from ringfence.errors import EnforcementError, PolicyError
from ringfence.policy import DEFAULT, PRESETS, Policy, explain, load, load_text
from ringfence.policy import model as policy_model
from ringfence.policy.presets import combine
from ringfence.policy.resolve import resolve

EXAMPLE = """
isolation: {at_least: namespace}
filesystem:
  workspace: {source: ., mode: overlay}
  read_only: [/data/reference]
network:
  default: deny
  allow:
    - {preset: package-registries}
    - "*.example.org:443"
    - {host: api.openai.com, methods: [POST], paths: ["/v1/**"]}
    - {host: api.github.com, methods: [GET], paths: ["/repos/**"]}
  inject:
    - {host: api.openai.com, header: Authorization, value: "Bearer ${secret:OPENAI_API_KEY}"}
commands:
  rules:
    - {prefix: [git, push], decision: deny, justification: "publishing needs a person", match: ["git push origin main"], not_match: ["git pull"]}
limits: {timeout: 30s, memory: 512MiB, cpus: 1, pids: 100, disk: 200MiB, tmp: 100MiB, output: 1MiB, result: 32MiB, file_size: 100MiB, idle: 10min, max_age: 1h}
"""


def test_the_default_needs_no_model_library():
    code = (
        "import sys; from ringfence.policy import DEFAULT, parse_size; from ringfence.policy.resolve import resolve; spec = resolve('default').compile();"
        "assert 'pydantic' not in sys.modules and 'yaml' not in sys.modules, 'imported'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_and_the_empty_policy_compile_to_the_same():
    assert (
        DEFAULT.compile() == Policy().compile() == load({}).compile() == load_text("").compile() == CellSpec()
    )
    assert DEFAULT.model() == Policy()


def test_the_limits_of_the_model_are_those_of_the_engine_contract():
    assert PlainLimits(**Policy().limits.model_dump()) == PlainLimits()
    assert set(policy_model.Limits.model_fields) == {field.name for field in dataclasses.fields(PlainLimits)}


def test_the_example_of_the_design_is_read():
    policy = load_text(EXAMPLE)
    assert policy.limits == Policy().limits
    assert policy.decide_command("git push -f").decision == "deny"
    assert policy.decide_request("https://a.example.org/x") is policy.network.allow[1]
    assert policy.decide_request("POST https://api.github.com/repos/x") is None
    assert policy.decide_request("https://api.github.com/repos/x/y") is not None
    assert len(explain(policy)) > 8


def test_every_field_is_described():
    models = [
        value
        for value in vars(policy_model).values()
        if isinstance(value, type)
        and issubclass(value, policy_model.BaseModel)
        and value.__module__ == policy_model.__name__
    ]
    assert len(models) > 8
    missing = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert not missing


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("limits:\n  memry: 1GiB", "p.yaml:2: limits.memry", "did you mean `memory`?"),
        ("limits:\n  timeout: 30s\n  memory: 1M", "p.yaml:3: limits.memory", "1MiB"),
        ("isolation:\n  at_least: hypervisor", "p.yaml:2: isolation.at_least", "'vm'"),
        ("netwrok: {}", "p.yaml:1: netwrok", "did you mean `network`?"),
        ("name: a\nname: b", "p.yaml:2: ", "written twice"),
        ("a: [", "p.yaml:", "not valid YAML"),
        ("- a", "p.yaml:1: ", "mapping"),
        ("limits: &x {}\nname: *x", "p.yaml:2: ", "alias"),
        ("name: !!python/object/apply:os.system [id]", "p.yaml:1: ", "tags"),
        ("network:\n  allow:\n    - ok.example.org\n    - '*'", "p.yaml:4: network.allow.1", "too wide"),
        ("network:\n  allow: [{host: a.example.org, preset: package-registries}]", "p.yaml:2: ", "either"),
        (
            "network:\n  inject: [{host: a.example.org, header: X, value: y}]",
            "p.yaml:1: network",
            "no `allow` rule",
        ),
        (
            "commands:\n  rules:\n    - {prefix: git, decision: deny, match: [ls]}",
            "p.yaml:3: commands.rules.0",
            "not matched",
        ),
        (
            "commands:\n  rules:\n    - {prefix: git, decision: deny, not_match: [git x]}",
            "p.yaml:3: ",
            "is matched",
        ),
        ("limits: {timeout: 2h}", "p.yaml:1: limits", "max_age"),
        ("limits: {pids: '12'}", "p.yaml:1: limits.pids", "not a number"),
        ("limits: {memory: 20TiB}", "p.yaml:1: limits.memory", "at most 1TiB"),
        ("limits: {max_age: 100000h}", "p.yaml:1: limits.max_age", "at most 3650d"),
        ("limits: {memory: 1}", "p.yaml:1: limits.memory", "16MiB, not 1B"),
        ("root: true\nfilesystem: {workspace: {source: /x, mode: rw}}", "p.yaml", "exclude"),
        ("presets: [nothing]", "p.yaml:1: ", "no preset"),
        ("presets: data-analysis", "p.yaml:1: ", "list"),
        ("filesystem: {read_only: [a/../b]}", "p.yaml:1: filesystem.read_only", "absolute"),
        ('{\n\t"limits": {\n\t\t"memry": 1}}', "p.yaml:3: limits.memry", "memory"),
    ],
)
def test_errors_say_where_and_what(text, place, says):
    with pytest.raises(PolicyError) as problem:
        load_text(text, "p.yaml")
    assert str(problem.value).startswith(place)
    assert says in str(problem.value)


def test_python_users_get_the_same_error():
    with pytest.raises(PolicyError, match="did you mean `memory`"):
        Policy(limits={"memry": "1GiB"})  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="unknown key `netwrok`"):
        load({"netwrok": {}})


def test_yaml_means_what_it_shows():
    # YAML 1.1 would read these as False, a sexagesimal number and an octal one.
    values, _ = __import__("ringfence.policy.loading", fromlist=["read"]).read(
        "{a: no, b: 22:22, c: 010, on: 1, d: , e: 1.5}"
    )
    assert values == {"a": "no", "b": "22:22", "c": "010", "on": 1, "d": None, "e": 1.5}


def test_policies_load_from_files_presets_and_policies(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(
        "presets: [data-analysis]\nlimits: {memory: 1GiB}\nfilesystem: {workspace: {source: work}}\n"
    )
    policy = load(file)
    assert policy.limits.memory == 1 << 30
    assert policy.limits.cpus == 2
    assert policy.filesystem.workspace is not None
    assert policy.filesystem.workspace.source == str(tmp_path / "work")
    assert load(policy) is policy
    (tmp_path / "policy.json").write_text(json.dumps({"limits": {"timeout": "1min"}}))
    assert load(str(tmp_path / "policy.json")).limits.timeout == 60
    assert load("data-analysis").name == "data-analysis"
    with pytest.raises(PolicyError, match="cannot read"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(PolicyError, match="did you mean `data-analysis`"):
        load("data-analisys")
    (tmp_path / "big").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(PolicyError, match="larger"):
        load(tmp_path / "big")


def test_presets_add_up():
    both = load("data-analysis+coding-agent")
    one, other = load("data-analysis"), load("coding-agent")
    assert both.limits.memory == max(one.limits.memory, other.limits.memory)
    assert both.limits.max_age == max(one.limits.max_age, other.limits.max_age)
    assert both.name == "data-analysis+coding-agent"
    assert combine(["untrusted"]) == PRESETS["untrusted"]


@pytest.mark.parametrize("name", [*PRESETS, "default"])
def test_every_preset_compiles_and_needs_no_network(name):
    spec = resolve(name).compile(template="data")
    assert spec.network == "none"
    assert spec.template == "data"


def test_network_rules_compile_to_what_engines_refuse_never_to_nothing():
    spec = Policy(network={"allow": ["example.org"]}).compile()  # type: ignore[arg-type]
    assert spec.network == "gateway"
    assert spec.network_allow[0]["host"] == "example.org"
    assert Policy(network={"allow": []}).compile().network == "none"  # type: ignore[arg-type]


def test_command_rules_are_refused_until_they_are_enforced():
    policy = load({"commands": {"rules": [{"prefix": "git push", "decision": "deny"}]}})
    with pytest.raises(EnforcementError) as problem:
        policy.compile()
    assert problem.value.primitive == "command rules"


def test_a_policy_survives_the_way_through_a_file():
    policy = load_text(EXAMPLE)
    assert load(policy.to_dict()) == policy
    assert load("coding-agent").with_limits(memory="1GiB").limits.memory == 1 << 30
    assert load("coding-agent").with_limits(memory="1GiB").limits.timeout == 600


def test_a_default_timeout_gives_way_to_a_shorter_age_and_one_that_was_asked_for_does_not():
    assert load({"limits": {"max_age": 4}}).limits.timeout == 4
    assert load().with_limits(max_age=4).limits.timeout == 4
    assert load().with_limits(max_age=4).with_limits(max_age=60).limits.timeout == 30
    assert load("coding-agent").with_limits(max_age="5min").limits.timeout == 300
    assert load({"presets": ["coding-agent"], "limits": {"max_age": "5min"}}).limits.timeout == 300
    with pytest.raises(PolicyError) as problem:
        load({"limits": {"max_age": 4, "timeout": 5}})
    assert '`limits={"timeout": ...}`' in problem.value.hint


def test_whatever_limits_the_policy_lets_through_the_launcher_takes():
    from ringfence.engines.namespace import grammar
    from ringfence.policy.model import Limits

    for name, check in grammar._LIMITS.items():
        for part in Limits.model_fields[name].metadata:
            for bound in ("ge", "le"):
                if hasattr(part, bound):
                    check(getattr(part, bound))
