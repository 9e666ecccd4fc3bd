"""Hosts in rules and the linter: nothing is matched by its ending, nothing wide passes without a word."""

from __future__ import annotations

import pytest

from ringfence.errors import PolicyError
from ringfence.policy import NetworkRule, lint, load
from ringfence.policy.hosts import host_matches, parse_host


@pytest.mark.parametrize(
    ("pattern", "host", "answer"),
    [
        ("allowed.test", "allowed.test", True),
        ("allowed.test", "ALLOWED.test.", True),
        ("allowed.test", "notallowed.test", False),
        ("allowed.test", "allowed.test.evil.test", False),
        ("allowed.test", "a.allowed.test", False),
        ("*.allowed.test", "a.allowed.test", True),
        ("*.allowed.test", "a.b.allowed.test", True),
        ("*.allowed.test", "allowed.test", False),
        ("*.allowed.test", "xallowed.test", False),
        ("*.allowed.test", ".allowed.test", False),
        ("192.0.2.7", "192.0.2.7", True),
        ("2001:db8::1", "[2001:0db8::0001]", True),
        ("192.0.2.7", "::ffff:192.0.2.7", True),
    ],
)
def test_hosts_match_by_whole_labels(pattern, host, answer):
    assert host_matches(parse_host(pattern).host, host) is answer


@pytest.mark.parametrize(
    "text",
    ["", "*", "*.", "*.com", "a.*.test", "*a.test", "http://x.test", "x.test/path", "x.test:0", "x.test:99999", "x..test",
     "-x.test", "0x7f.1", "2130706433", "0177.0.0.1", "127.1", "exämple.test", "x.test:443:1", "x test", "a" * 64 + ".test"],
)  # fmt: skip
def test_what_is_no_host_or_too_wide_is_refused(text):
    with pytest.raises(PolicyError):
        parse_host(text)


@pytest.mark.parametrize(
    "text",
    ["169.254.169.254", "169.254.170.2", "[fd00:ec2::254]:80", "100.100.100.200", "metadata.google.internal",
     "*.google.internal", "METADATA.google.internal.", "[::ffff:169.254.169.254]"],
)  # fmt: skip
def test_no_policy_opens_a_metadata_service(text):
    with pytest.raises(PolicyError, match="metadata"):
        load({"network": {"allow": [text]}})


def test_examples_of_a_network_rule_are_checked():
    NetworkRule(
        host="a.test",
        paths=("/x/*",),
        match=("https://a.test/x/1",),
        not_match=("https://a.test/x/1/2", "a.test:80"),
    )
    with pytest.raises(ValueError, match="not matched"):
        NetworkRule(host="a.test", match=("https://b.test/",))


def test_a_path_with_dots_is_never_allowed():
    rule = NetworkRule(host="a.test", paths=("/x/**",))
    assert rule.covers("https://a.test/x/y")
    assert not rule.covers("https://a.test/x/../y")
    assert not rule.covers("https://a.test/x/%2e%2e/y")


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("*.amazonaws.com", "shared-host"),
        ("raw.githubusercontent.com", "shared-host"),
        ("github.com", "shared-host"),
        ("*.windows.net", "shared-host"),
        ("*.co.uk", "wide-wildcard"),
        ("10.0.0.1", "private-address"),
        ("127.0.0.1", "private-address"),
        ("database", "private-name"),
        ("db.internal", "private-name"),
        ("example.org:80", "plain-http"),
        ("example.org:22", "tunnel-port"),
        ("8.8.8.8", "bare-address"),
        ({"preset": "package-registries"}, "registries"),
    ],
)
def test_the_linter_warns_of_ways_out(rule, code):
    findings = lint(load({"network": {"allow": [rule]}}))
    assert code in [finding.code for finding in findings]
    assert all(finding.message and finding.hint and finding.where for finding in findings)


@pytest.mark.parametrize(
    "rule", ["example.org", "*.example.org:443", {"host": "github.com", "paths": ["/me/mine/**"]}]
)
def test_the_linter_is_silent_about_narrow_rules(rule):
    assert lint(load({"network": {"allow": [rule]}})) == []


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"filesystem": {"read_only": ["/home/me/.ssh"]}}, "credentials"),
        ({"filesystem": {"read_only": ["/etc"]}}, "wide-path"),
        ({"filesystem": {"workspace": {"source": "/home/me", "mode": "ro"}}}, "wide-path"),
        ({"filesystem": {"workspace": {"source": "/srv/x", "mode": "rw"}}}, "direct-write"),
        (
            {"filesystem": {"workspace": {"source": "/srv/x", "mode": "rw"}, "read_only": ["/srv/x/y"]}},
            "writable-parent",
        ),
        ({"limits": {"file_size": "2GiB"}}, "unreachable-limit"),
        ({"limits": {"idle": "2h"}}, "unreachable-limit"),
        ({"commands": {"rules": [{"prefix": "git", "decision": "deny"}]}}, "no-reason"),
        ({"commands": {"rules": [{"prefix": "git", "decision": "deny"}]}}, "no-example"),
        ({"commands": {"rules": [{"prefix": "git", "decision": "deny"}]}}, "deny-by-name"),
        (
            {
                "commands": {
                    "rules": [
                        {"prefix": "git", "decision": "deny"},
                        {"prefix": "git pull", "decision": "allow"},
                    ]
                }
            },
            "never-decides",
        ),
        (
            {"commands": {"default": "deny", "rules": [{"prefix": "bash", "decision": "allow"}]}},
            "allows-everything",
        ),
        (
            {
                "network": {
                    "allow": ["a.example.org"],
                    "inject": [{"host": "a.example.org", "header": "X", "value": "y"}],
                }
            },
            "literal-secret",
        ),
        (
            {
                "network": {
                    "allow": ["a.example.org"],
                    "inject": [{"host": "a.example.org", "header": "X", "value": "${secret:A}"}],
                }
            },
            "wide-injection",
        ),
    ],
)
def test_the_linter_warns_of_the_rest(values, code):
    assert code in [finding.code for finding in lint(load(values))]


@pytest.mark.parametrize("name", ["untrusted", "data-analysis", "coding-agent"])
def test_our_own_presets_have_no_findings(name):
    assert lint(load(name)) == []


def test_a_secret_is_never_injected_for_unnamed_hosts():
    with pytest.raises(PolicyError, match="nobody named"):
        load(
            {
                "network": {
                    "allow": ["*.example.org"],
                    "inject": [{"host": "*.example.org", "header": "X", "value": "y"}],
                }
            }
        )
