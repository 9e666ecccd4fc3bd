"""The commands that a person reads, and their `--json`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringfence.cli import doctor, running
from ringfence.cli.app import app


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_doctor_names_a_remedy_for_everything_that_is_missing() -> None:
    findings = doctor.examine(start_sandbox=False)
    assert {"python", "user namespaces", "overlay", "seccomp", "landlock", "limit memory", "kvm"} <= {each.name for each in findings}
    for each in findings:
        assert each.detail
        if each.verdict in (doctor.MISSING, doctor.WEAKER):
            assert each.fix, each


def test_the_ids_that_doctor_advises_belong_to_nobody(tmp_path: Path) -> None:
    uids, gids = tmp_path / "subuid", tmp_path / "subgid"
    tables = (str(uids), str(gids))
    assert "--add-subuids 100000-165535 --add-subgids 100000-165535 me" in doctor._grant_ids("me", tables)
    uids.write_text("a:100000:65536\nb:165536:65536\n# c:9:9\nbroken\n")
    gids.write_text("z:2000000000:65536\na:100000:65536\nb:240000:1000\n")
    first = 241_000
    assert f"--add-subuids {first}-{first + 65535} --add-subgids {first}-{first + 65535} me" in doctor._grant_ids("me", tables)
    uids.write_text("a:0:4294967295\n")
    assert "usermod" not in doctor._grant_ids("me", tables)


def test_a_probe_that_fails_is_a_finding_and_not_a_crash() -> None:
    def _broken() -> doctor.Finding:
        raise RuntimeError("unforeseen")

    finding = doctor._guarded(_broken)
    assert (finding.name, finding.verdict) == ("broken", doctor.MISSING)
    assert "unforeseen" in finding.detail


def test_one_missing_primitive_means_that_sandboxes_do_not_start() -> None:
    good = doctor.Finding("a", doctor.OK, "")
    assert doctor.works([good, doctor.Finding("b", doctor.WEAKER, ""), doctor.Finding("c", doctor.UNUSED, "")])
    assert not doctor.works([good, doctor.Finding("b", doctor.MISSING, "")])


def test_doctor_prints_one_json_document() -> None:
    document = json.loads(invoke("doctor", "--json", "--no-start").stdout)
    assert isinstance(document["works"], bool)
    assert {"name", "verdict", "detail", "fix"} == set(document["findings"][0])


def test_a_policy_is_checked_with_its_line(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("limits: {memory: 1GiB}\n")
    assert invoke("policy", "check", str(good)).exit_code == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text("limits:\n  memroy: 1GiB\n")
    result = invoke("policy", "check", str(bad))
    assert result.exit_code == 1
    assert "bad.yaml:2" in str(result.exception) or "line 2" in str(result.exception)
    assert "did you mean `memory`" in str(result.exception)


def test_a_policy_is_explained_with_what_this_machine_holds(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("network: {allow: ['*.example.org:443']}\n")
    document = json.loads(invoke("policy", "explain", str(policy), "--json").stdout)
    assert any("example.org" in sentence for sentence in document["sentences"])
    assert document["here"]["starts"] is False
    assert "gateway" in document["here"]["refusal"]["message"]
    assert set(document["here"]["limits"]) == {"memory", "pids", "cpus"}


def test_a_running_sandbox_is_listed_and_killed() -> None:
    from ringfence import Sandbox, SandboxDeadError

    before = {each.pid for each in running.running()}  # one that a test of another file keeps, say
    with Sandbox() as sandbox:
        mine = [each for each in running.running() if each.owner == os.getpid() and each.pid not in before]
        assert len(mine) == 1
        assert mine[0].processes >= 1
        listed = json.loads(invoke("ls", "--json").stdout)
        assert mine[0].pid in [each["pid"] for each in listed]
        assert json.loads(invoke("kill", str(mine[0].pid), "--json").stdout) == {"killed": [mine[0].pid], "failed": []}
        with pytest.raises(SandboxDeadError):
            sandbox.run_code("1")


def test_kill_kills_no_other_process() -> None:
    child = os.fork()
    if child == 0:
        import signal

        signal.pause()
    try:
        assert not running.kill(child)
        assert invoke("kill", str(child)).exit_code == 1
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_sweep_looks_without_removing() -> None:
    document = json.loads(invoke("sweep", "--dry-run", "--json").stdout)
    assert document["dry_run"] is True
    assert isinstance(document["groups"], list)
