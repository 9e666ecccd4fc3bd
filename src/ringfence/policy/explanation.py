"""A policy in words: what code under it can and cannot do. For people and for models that were refused.

Guards against a policy that only its writer can read. Says what the policy asks for; what a machine can enforce
of it is the engine's answer, not this module's.
"""

from __future__ import annotations

from ringfence.policy import commands as command_decisions
from ringfence.policy.model import NetworkRule, Policy
from ringfence.policy.units import format_duration, format_size


def explain(policy: Policy) -> list[str]:
    """Sentences, one a line, in the order of the policy's parts."""
    limits, lines = policy.limits, []
    lines.append(f"Policy `{policy.name}`{': ' + policy.description if policy.description else '.'}")
    lines.append(f"Isolation: at least `{policy.isolation.at_least}`.")
    lines += _files(policy)
    lines += _network(policy)
    lines += _commands(policy)
    lines.append(
        "User: `user` without any capability" + (", and `root` for package managers." if policy.root else ".")
    )
    lines.append(
        f"Limits: {format_size(limits.memory)} of memory (up to "
        f"{format_size(limits.memory + limits.disk + limits.tmp)} while files are few), {limits.cpus:g} CPU, {limits.pids} processes and threads, "
        f"{format_size(limits.disk)} of disk, {format_size(limits.tmp)} in /tmp, files up to "
        f"{format_size(limits.file_size)}, {limits.open_files} open files per process."
    )
    lines.append(
        f"Output: the newest {format_size(limits.output)} of a command, results up to {format_size(limits.result)}."
    )
    lines.append(
        f"Time: {format_duration(limits.timeout)} for a cell or command; the sandbox ends after "
        f"{format_duration(limits.idle)} without activity and {format_duration(limits.max_age)} in all."
    )
    if limits.required == "hard":
        lines.append("Every limit must be held by the kernel; a machine that can only watch one is refused.")
    return lines


def _files(policy: Policy) -> list[str]:
    workspace, lines = policy.filesystem.workspace, []
    if workspace is not None and workspace.mode != "none":
        how = {
            "ro": "read only",
            "rw": "and may change it directly",
            "overlay": "and may change it; changes are held back until they are reviewed",
        }[workspace.mode]
        lines.append(f"Files: sees {workspace.source} as /workspace, {how}.")
    if policy.filesystem.read_only:
        lines.append(f"Files: reads {', '.join(policy.filesystem.read_only)}.")
    return lines or ["Files: of the host's, programs and libraries below /usr, read only, and copies of a few look-up tables of /etc."]


def _network(policy: Policy) -> list[str]:
    if not policy.network.allow:
        return ["Network: none; only a private loopback."]
    lines = [f"Network: may reach {_rule(rule)}." for rule in policy.network.allow]
    lines += [
        f"Network: requests to {injection.host} get the header {injection.header}, whose value stays outside."
        for injection in policy.network.inject
    ]
    return [*lines, "Network: all else is denied, cloud metadata services always."]


def _rule(rule: NetworkRule) -> str:
    if rule.preset:
        return "the package registries that pip, npm and apt are configured for on this machine"
    ports = ", ".join(map(str, rule.all_ports))
    text = f"{rule.host.partition(':')[0] if rule.host.count(':') == 1 else rule.host} on port {ports}"
    if rule.methods:
        text += f", methods {', '.join(rule.methods)}"
    if rule.paths:
        text += f", paths {', '.join(rule.paths)}"
    return f"{text} ({rule.justification})" if rule.justification else text


def _commands(policy: Policy) -> list[str]:
    words = {"allow": "allowed", "ask": "run only if a person agrees", "deny": "denied"}
    lines = [
        f"Commands: `{command_decisions.describe(rule.prefix)}` is {words[rule.decision]}"
        + (f": {rule.justification}." if rule.justification else ".")
        for rule in policy.commands.rules
    ]
    rest = "Commands: all others are " if lines else "Commands: all are "
    return [*lines, f"{rest}{words[policy.commands.default]}."]
