"""Command decisions: the strictest rule wins, whatever the command is wrapped in."""

from __future__ import annotations

import pytest

from ringfence.policy import CommandRule, Policy, load
from ringfence.policy.commands import decide

PUSH = CommandRule(prefix=("git", "push"), decision="deny", justification="publishing needs a person")


@pytest.mark.parametrize(
    "command",
    [
        "git push",
        ["git", "push", "origin", "main"],
        ["/usr/bin/git", "push"],
        "git -C /elsewhere push",
        "git -c user.name=x --git-dir=/y push",
        "env git push",
        "env -i A=b -u C git push",
        ["env", "-S", "git push"],
        "A=b git push",
        "timeout -s KILL 5 git push",
        "nohup nice -n 5 git push",
        "sudo -u root git push",
        ["bash", "-c", "git push"],
        ["/bin/sh", "-ec", "cd x && git push"],
        "bash -lc 'git push'",
        "bash -c \"sh -c 'git push'\"",
        "true; git push",
        "true || git push",
        "git pull\ngit push",
        "echo x | xargs -n 1 git push",
        "if true; then git push; fi",
        "eval git push",
        "command git push",
        ["busybox", "sh", "-c", "git push"],
        "echo $(id); git push",
    ],
)
def test_a_denied_command_is_found_in_its_wrappings(command):
    decision = decide([PUSH], "allow", command)
    assert decision.decision == "deny"
    assert decision.rule is PUSH
    assert "publishing needs a person" in decision.reason
    assert "git push" in decision.reason


@pytest.mark.parametrize(
    "command",
    ["git pull", "echo git push", ["ls"], "mygit push", "gitpush", "git log && ls", "grep 'git push' x"],
)
def test_other_commands_are_not_touched(command):
    assert decide([PUSH], "allow", command).decision == "allow"


@pytest.mark.parametrize(
    "command",
    [
        "$(echo git) push",
        "g`echo it` push",
        "x=git; $x push",
        "/usr/bin/g?t push",
        "bash script.sh",
        "git push 'open",
        "cat <<E\ngit\nE",
    ],
)
def test_a_script_that_cannot_be_read_is_not_taken_for_harmless(command):
    assert decide([PUSH], "allow", command).decision in ("ask", "deny")
    assert decide([], "allow", command).decision == "allow"


def test_the_strictest_rule_wins_and_the_longest_explains():
    allow = CommandRule(prefix=("git", "push", "--dry-run"), decision="allow")
    ask = CommandRule(prefix=("git",), decision="ask")
    longer = CommandRule(prefix=("git", "push", "--force"), decision="deny")
    assert decide([allow, PUSH, ask], "allow", "git push --dry-run").rule is PUSH
    assert decide([allow, ask], "allow", "git push --dry-run").rule is ask
    assert decide([PUSH, longer], "allow", "git push --force").rule is longer


def test_a_default_of_deny_covers_what_no_rule_allows():
    policy = load(
        {
            "commands": {
                "default": "deny",
                "rules": [{"prefix": ["pip", ["install", "download"]], "decision": "allow"}],
            }
        }
    )
    assert policy.decide_command("pip install x").decision == "allow"
    assert policy.decide_command("pip uninstall x").decision == "deny"
    assert policy.decide_command("pip install x; rm -rf /").decision == "deny"
    assert policy.decide_command(["pip", "download", "x"]).decision == "allow"


def test_a_rule_with_a_path_means_that_path():
    rule = CommandRule(prefix=("/usr/bin/git",), decision="deny")
    assert decide([rule], "allow", ["/usr/bin/git"]).decision == "deny"
    assert decide([rule], "allow", ["/opt/git"]).decision == "allow"


def test_the_default_policy_allows_commands():
    assert Policy().decide_command("anything at all $(x)").decision == "allow"
    assert decide([PUSH], "allow", []).decision == "allow"
