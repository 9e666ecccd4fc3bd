"""Warnings about policies that are valid and still let out more than their writer may think.

Guards against the usual ways in which an allow-list leaks: hosts where anybody can put or fetch data (a bucket, a
gist, a paste, a chat hook), names over which many tenants share one domain, private address ranges, host paths
that hold credentials, rules that never decide anything. Each finding says why, and what to do.

Pure: nothing is read from the machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any, NamedTuple

from ringfence.linux import paths
from ringfence.policy import commands as command_decisions
from ringfence.policy.hosts import host_matches, parse_host
from ringfence.policy.model import Limits, NetworkRule, Policy
from ringfence.policy.units import format_duration, format_size

SHARED_DOMAINS = {
    "amazonaws.com": "anybody's buckets and functions",
    "cloudfront.net": "anybody's distributions",
    "storage.googleapis.com": "anybody's buckets",
    "googleusercontent.com": "anybody's content",
    "appspot.com": "anybody's applications",
    "run.app": "anybody's services",
    "firebaseio.com": "anybody's databases",
    "web.app": "anybody's sites",
    "blob.core.windows.net": "anybody's storage accounts",
    "azurewebsites.net": "anybody's applications",
    "azureedge.net": "anybody's content",
    "workers.dev": "anybody's workers",
    "pages.dev": "anybody's sites",
    "r2.dev": "anybody's buckets",
    "r2.cloudflarestorage.com": "anybody's buckets",
    "trycloudflare.com": "anybody's tunnels",
    "digitaloceanspaces.com": "anybody's buckets",
    "vercel.app": "anybody's sites",
    "netlify.app": "anybody's sites",
    "herokuapp.com": "anybody's applications",
    "fly.dev": "anybody's applications",
    "onrender.com": "anybody's applications",
    "github.io": "anybody's sites",
    "githubusercontent.com": "anybody's repositories and gists",
    "github.com": "anybody's repositories",
    "api.github.com": "anybody's repositories, with any token the code holds",
    "gist.github.com": "anybody's gists",
    "gitlab.com": "anybody's projects",
    "gitlab.io": "anybody's sites",
    "bitbucket.org": "anybody's repositories",
    "huggingface.co": "anybody's models and data sets",
    "hf.space": "anybody's applications",
    "ngrok.io": "anybody's tunnels",
    "ngrok-free.app": "anybody's tunnels",
    "webhook.site": "anybody's inboxes",
    "requestbin.com": "anybody's inboxes",
    "pipedream.net": "anybody's inboxes",
    "pastebin.com": "anybody's pastes",
    "transfer.sh": "anybody's files",
    "file.io": "anybody's files",
    "dropboxusercontent.com": "anybody's files",
    "drive.google.com": "anybody's files",
    "docs.google.com": "anybody's documents and forms",
    "hooks.slack.com": "anybody's channels",
    "slack.com": "anybody's channels",
    "discord.com": "anybody's channels",
    "discordapp.com": "anybody's channels",
    "api.telegram.org": "anybody's chats",
    "dns.google": "a resolver: names carry data out",
    "cloudflare-dns.com": "a resolver: names carry data out",
}
"""Domains that many tenants share, and what of theirs a rule opens."""

WIDE_SUFFIXES = frozenset(
    f"{second}.{top}"
    for top in ("uk", "jp", "au", "nz", "za", "br", "in", "kr", "cn", "tw", "il", "tr", "mx", "ar")
    for second in ("co", "com", "org", "net", "ac", "gov", "edu", "or", "ne", "go", "gob")
)
"""Second-level suffixes under which anybody registers (a small part of the public suffix list)."""

INTERPRETERS = frozenset(
    {
        "bash",
        "sh",
        "dash",
        "zsh",
        "ksh",
        "python",
        "python3",
        "node",
        "perl",
        "ruby",
        "php",
        "lua",
        "awk",
        "gdb",
        "make",
    }
    | {"env", "xargs", "find", "ssh", "vim", "vi", "tar", "busybox", "sudo"}
)


class Finding(NamedTuple):
    """One warning: a stable code, where in the policy, what and why, and what to do."""

    code: str
    where: str
    message: str
    hint: str


def lint(policy: Policy) -> list[Finding]:
    """Warnings about `policy`, in the order of its parts; an empty list is good news."""
    findings: list[Finding] = []
    for index, rule in enumerate(policy.network.allow):
        findings += _network_rule(rule, f"network.allow.{index}")
    for index, injection in enumerate(policy.network.inject):
        where = f"network.inject.{index}"
        if "${secret:" not in injection.value:
            findings.append(
                Finding(
                    "literal-secret",
                    f"{where}.value",
                    "The value is written into the policy, so whoever reads the policy has it.",
                    "refer to a secret: ${secret:NAME}",
                )
            )
        rules = [rule for rule in policy.network.allow if rule.host and _covers(rule, injection.host)]
        if any(not rule.methods and not rule.paths for rule in rules):
            findings.append(
                Finding(
                    "wide-injection",
                    where,
                    f"Every request to {injection.host} carries the secret's power: the "
                    "code can do there all that the secret can.",
                    "narrow the allow rule by `methods` and `paths`",
                )
            )
    findings += _filesystem(policy)
    findings += _commands(policy)
    findings += _limits(policy.limits)
    return findings


def _covers(rule: NetworkRule, host: str) -> bool:
    return host_matches(parse_host(rule.host).host, parse_host(host).host)


def _network_rule(rule: NetworkRule, where: str) -> list[Finding]:
    findings: list[Finding] = []
    if not rule.host:
        findings.append(
            Finding(
                "registries",
                where,
                "Package registries serve anybody's packages and accept uploads from whoever holds a token.",
                "keep tokens out of the sandbox",
            )
        )
        return findings
    pattern = parse_host(rule.host)
    name = pattern.host.removeprefix("*.")
    narrowed = bool(rule.paths)
    if pattern.is_address:
        address = ipaddress.ip_address(pattern.host)
        if not address.is_global:
            findings.append(
                Finding(
                    "private-address",
                    where,
                    f"{pattern.host} is not a public address: services there often "
                    "trust whoever reaches them.",
                    "name the one service and port that is needed, or remove it",
                )
            )
        else:
            findings.append(
                Finding(
                    "bare-address",
                    where,
                    f"{pattern.host} has no name, so its certificate cannot be checked against one.",
                    "write the host's name",
                )
            )
    elif "." not in name or name.endswith(
        (".local", ".internal", ".lan", ".home.arpa", ".localhost", ".corp")
    ):
        findings.append(
            Finding(
                "private-name",
                where,
                f"{pattern.host} names a host of the private network: services there often "
                "trust whoever reaches them.",
                "name the one service and port that is needed, or remove it",
            )
        )
    if pattern.host.startswith("*.") and (name in WIDE_SUFFIXES or name.count(".") == 0):
        findings.append(
            Finding(
                "wide-wildcard",
                where,
                f"Anybody can register a name that {pattern.host} covers.",
                "name the hosts, or a domain of theirs",
            )
        )
    shared = next(
        (
            domain
            for domain in SHARED_DOMAINS
            if name == domain
            or (name.endswith("." + domain))
            or (pattern.host.startswith("*.") and domain.endswith("." + name))
        ),
        None,
    )
    if shared and not narrowed and (pattern.host.startswith("*.") or name == shared or _is_shared_host(name)):
        findings.append(
            Finding(
                "shared-host",
                where,
                f"{pattern.host} serves {SHARED_DOMAINS[shared]}: what can be sent there can "
                "be read by a stranger, so data can leave.",
                "narrow the rule by `paths` (and `methods: [GET]`), or name the one host that is yours",
            )
        )
    if 80 in rule.all_ports:
        findings.append(
            Finding(
                "plain-http",
                where,
                "Port 80 is not encrypted: whoever is on the way can read and change it.",
                "use port 443",
            )
        )
    if 22 in rule.all_ports or 25 in rule.all_ports or 53 in rule.all_ports:
        findings.append(
            Finding(
                "tunnel-port",
                where,
                "Over ports 22, 25 and 53 anything can be carried; methods and paths cannot "
                "be checked there.",
                "use HTTPS",
            )
        )
    return findings


def _is_shared_host(name: str) -> bool:
    """Whether a single host below a shared domain is itself shared (a raw-content host rather than one tenant's)."""
    return bool(re.match(r"(raw|gist|objects|media|codeload|s3|storage|cdn|user-images|avatars)\b", name))


def _filesystem(policy: Policy) -> list[Finding]:
    findings: list[Finding] = []
    workspace = policy.filesystem.workspace
    shown: list[tuple[str, str, bool]] = [
        (f"filesystem.read_only.{index}", path, False)
        for index, path in enumerate(policy.filesystem.read_only)
    ]
    if workspace is not None and workspace.mode != "none":
        shown.append(
            ("filesystem.workspace.source", os.path.expanduser(workspace.source), workspace.mode == "rw")
        )
    for where, path, writable in shown:
        clean = os.path.normpath(path)
        if paths.holds_credentials(clean):
            findings.append(
                Finding(
                    "credentials",
                    where,
                    f"{path} holds credentials; the sandbox would read them.",
                    "leave it out; inject headers instead",
                )
            )
        elif paths.is_wide(clean):
            findings.append(
                Finding(
                    "wide-path",
                    where,
                    f"{path} holds far more than one project: keys, histories, sockets.",
                    "name the directory that is needed",
                )
            )
        if writable:
            findings.append(
                Finding(
                    "direct-write",
                    where,
                    "With `mode: rw` the code can change files that you or your tools will "
                    "run later (.git/hooks, Makefile, .envrc).",
                    "use `mode: overlay` and review the changes",
                )
            )
    if workspace is not None and workspace.mode == "rw":
        source = os.path.normpath(os.path.expanduser(workspace.source))
        for index, path in enumerate(policy.filesystem.read_only):
            if os.path.isabs(source) and (path + "/").startswith(source.rstrip("/") + "/"):
                findings.append(
                    Finding(
                        "writable-parent",
                        f"filesystem.read_only.{index}",
                        f"{path} lies in the writable workspace "
                        f"{source}, where it can be changed or replaced through its parent.",
                        "move it out of the workspace, or use `mode: overlay`",
                    )
                )
    return findings


def _commands(policy: Policy) -> list[Finding]:
    findings: list[Finding] = []
    rules = policy.commands.rules
    for index, rule in enumerate(rules):
        where = f"commands.rules.{index}"
        text = command_decisions.describe(rule.prefix)
        stricter = [
            other
            for other in rules
            if other is not rule
            and command_decisions.STRICTNESS[other.decision] > command_decisions.STRICTNESS[rule.decision]
            and len(other.prefix) <= len(rule.prefix)
            and all(
                set(_words(mine)) <= set(_words(theirs))
                for mine, theirs in zip(rule.prefix, other.prefix, strict=False)
            )
        ]
        if stricter:
            findings.append(
                Finding(
                    "never-decides",
                    where,
                    f"`{text}` is {rule.decision}, but the rule for "
                    f"`{command_decisions.describe(stricter[0].prefix)}` is stricter and always wins.",
                    "remove one of them",
                )
            )
        program = {os.path.basename(word) for word in _words(rule.prefix[0])}
        if (
            rule.decision == "allow"
            and policy.commands.default != "allow"
            and program & INTERPRETERS
            and len(rule.prefix) == 1
        ):
            findings.append(
                Finding(
                    "allows-everything",
                    where,
                    f"`{text}` runs any other program, so this rule allows everything.",
                    "allow the programs that are needed",
                )
            )
        if rule.decision == "deny" and not rule.justification:
            findings.append(
                Finding(
                    "no-reason",
                    where,
                    f"Whoever is refused `{text}` is not told why.",
                    "add a `justification`",
                )
            )
        if not rule.match:
            findings.append(
                Finding(
                    "no-example",
                    where,
                    f"Nothing shows that the rule for `{text}` matches what it is meant for.",
                    "add an example under `match`",
                )
            )
    if policy.commands.default == "allow" and any(rule.decision == "deny" for rule in rules):
        findings.append(
            Finding(
                "deny-by-name",
                "commands",
                "A denied program can be copied or written anew under another name; "
                "names are asked for, not enforced.",
                "rely on files, network and limits for what must not happen",
            )
        )
    return findings


def _words(element: Any) -> tuple[str, ...]:
    return (element,) if isinstance(element, str) else tuple(element)


def _limits(limits: Limits) -> list[Finding]:
    findings: list[Finding] = []
    if limits.file_size > max(limits.disk, limits.tmp):
        findings.append(
            Finding(
                "unreachable-limit",
                "limits.file_size",
                f"file_size ({format_size(limits.file_size)}) can never be "
                "reached: disk and tmp are smaller.",
                "raise `disk` or lower `file_size`",
            )
        )
    if limits.idle > limits.max_age:
        findings.append(
            Finding(
                "unreachable-limit",
                "limits.idle",
                f"idle ({format_duration(limits.idle)}) can never pass before "
                f"max_age ({format_duration(limits.max_age)}).",
                "raise `max_age` or lower `idle`",
            )
        )
    if limits.result > limits.memory:
        findings.append(
            Finding(
                "unreachable-limit",
                "limits.result",
                f"result ({format_size(limits.result)}) does not fit into "
                f"memory ({format_size(limits.memory)}).",
                "raise `memory` or lower `result`",
            )
        )
    if limits.timeout > limits.idle:
        findings.append(
            Finding(
                "idle-first",
                "limits.idle",
                "A sandbox counts as active while something runs in it, but its "
                f"idle time ({format_duration(limits.idle)}) is shorter than one run may be "
                f"({format_duration(limits.timeout)}).",
                "raise `idle`",
            )
        )
    return findings
