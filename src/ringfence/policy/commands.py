"""Decisions about commands: which rule speaks about an argv, and what it says.

Guards against saying yes to what the rule meant to stop. A rule about `git` also holds for `/usr/bin/git`, for
`env git`, `timeout 5 git`, and inside `bash -c "..."`; where several rules match, the strictest wins, so no rule
can open what another one closes; a script that cannot be read in full is never taken for harmless.

What rules cannot do: they judge what the caller asks for, not what a program does once it runs. A copy of a
denied program under another name is another program. What must not happen is stopped by files, network and
limits; rules are for meaning ("publishing needs a person").

Pure functions, standard library only.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

Word = Literal["allow", "ask", "deny"]

STRICTNESS: dict[str, int] = {"allow": 0, "ask": 1, "deny": 2}
"""Weakest to strictest."""

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})

_WRAPPERS: dict[str, str] = {
    "env": "uCS",
    "nohup": "",
    "setsid": "",
    "nice": "n",
    "ionice": "cnp",
    "timeout": "sk",
    "stdbuf": "ioe",
    "sudo": "ugpCDhRrtTU",
    "doas": "uC",
    "time": "fo",
    "command": "",
    "exec": "a",
    "builtin": "",
    "chrt": "TPD",
    "taskset": "",
    "xargs": "aEeIiLlnPsd",
    "unshare": "",
    "setpriv": "",
    "strace": "eopsuE",
}
"""Programs that run the program in their arguments, with the one-letter options that take a value apart."""

_GLOBAL_OPTIONS: dict[str, frozenset[str]] = {
    "git": frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env"}),
    "docker": frozenset({"-H", "--host", "--config", "--context", "-c", "-l", "--log-level"}),
    "kubectl": frozenset({"-n", "--namespace", "--context", "--cluster", "--kubeconfig", "-s", "--server"}),
    "npm": frozenset({"--prefix", "-C"}),
}
"""Options before the subcommand that take a value: `git -C /elsewhere push` is a `git push`."""

_DEPTH = 8
"""How many wrappers within wrappers are opened; deeper ones count as unreadable."""


class RuleLike(Protocol):
    """What a rule must offer; the model's `CommandRule` does."""

    @property
    def prefix(self) -> Sequence[str | Sequence[str]]: ...
    @property
    def decision(self) -> str: ...
    @property
    def justification(self) -> str: ...


class CommandDecision(NamedTuple):
    """What the policy says about a command.

    `decision`: `allow`, `ask` (a person must agree) or `deny`. `rule`: the rule that decided, None for the default.
    `command`: the part of the request that the rule matched. `reason`: a sentence for whoever asked, models too.
    """

    decision: Word
    rule: RuleLike | None
    command: tuple[str, ...]
    reason: str


def decide(rules: Sequence[RuleLike], default: Word, command: str | Sequence[str]) -> CommandDecision:
    """The decision about `command`: an argv, or a text that goes to bash.

    All commands found in it are judged; the strictest decision counts, the longest matching prefix explains it.
    Where rules or the default restrict anything, a script that cannot be read in full is `ask`, unless a part that
    can be read is denied.
    """
    argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
    found, readable = _unfold(argv, 0)
    if isinstance(command, str) and len(found) > 1:
        found = found[1:]  # the shell is ours, not the caller's wish
    decisions = [_judge(rules, default, tuple(candidate)) for candidate in found]
    strictest = max(decisions, key=lambda decision: STRICTNESS[decision.decision])
    restrictive = default != "allow" or any(rule.decision != "allow" for rule in rules)
    if not readable and restrictive and strictest.decision == "allow":
        return CommandDecision(
            "ask",
            None,
            tuple(argv),
            "The script cannot be read in full (substitutions, redirections or nesting), so the command rules "
            "cannot be applied to it. Run its commands one by one.",
        )
    return strictest


def matches(prefix: Sequence[str | Sequence[str]], argv: Sequence[str]) -> bool:
    """Whether `argv` starts with `prefix`. An element that is a list stands for any of its words. A program named
    without a slash matches any path that ends in it; a program named with a path matches that path only."""
    words = _without_global_options(argv)
    if len(words) < len(prefix):
        return False
    for position, (element, word) in enumerate(zip(prefix, words, strict=False)):
        alternatives = (element,) if isinstance(element, str) else tuple(element)
        candidates = {word, os.path.basename(word)} if position == 0 else {word}
        if not any(alternative in candidates for alternative in alternatives):
            return False
    return bool(prefix)


def _judge(rules: Sequence[RuleLike], default: Word, argv: tuple[str, ...]) -> CommandDecision:
    hits = [rule for rule in rules if matches(rule.prefix, argv)]
    if not hits:
        reason = {
            "allow": "No rule speaks about this command; the policy allows such commands.",
            "ask": "No rule speaks about this command; the policy asks a person about such commands.",
            "deny": "No rule allows this command, and the policy denies all others. Ask for a rule that allows it.",
        }[default]
        return CommandDecision(default, None, argv, reason)
    rule = max(hits, key=lambda hit: (STRICTNESS[hit.decision], len(hit.prefix)))
    decision: Word = "deny" if rule.decision == "deny" else "ask" if rule.decision == "ask" else "allow"
    text = {"allow": "Allowed", "ask": "A person must agree", "deny": "Denied"}[decision]
    because = f": {rule.justification}" if rule.justification else ""
    return CommandDecision(
        decision, rule, argv, f"{text} by the rule for `{describe(rule.prefix)}`{because}."
    )


def describe(prefix: Sequence[str | Sequence[str]]) -> str:
    """A prefix as text: `git push`, `pip (install|download)`."""
    return " ".join(word if isinstance(word, str) else f"({'|'.join(word)})" for word in prefix)


def _unfold(argv: list[str], depth: int) -> tuple[list[list[str]], bool]:
    """`argv` and every command it would start, as far as that can be read; and whether that was all."""
    if not argv:
        return [argv], True
    if depth >= _DEPTH:
        return [argv], False
    found, readable = [argv], True
    program = os.path.basename(argv[0])
    if program in SHELLS:
        rest = argv[1:]
        if program == "busybox":
            inner, readable = _unfold(rest, depth + 1) if rest else ([], True)
            return found + inner, readable
        script = _shell_script(rest)
        if script is not None:
            commands, readable = _split_script(script)
            for command in commands:
                inner, whole = _unfold(command, depth + 1)
                found += inner
                readable = readable and whole
        else:
            # A script file or standard input: what it does cannot be seen from here.
            readable = any(argument in ("--version", "--help") for argument in rest)
    elif program == "eval":
        inner, readable = _unfold(["sh", "-c", " ".join(argv[1:])], depth + 1)
        found += inner[1:]
    elif program in _WRAPPERS:
        inner_argv = _unwrap(program, argv[1:])
        if inner_argv:
            inner, readable = _unfold(inner_argv, depth + 1)
            found += inner
    return found, readable


def _shell_script(arguments: list[str]) -> str | None:
    """The text after `-c` (also `-lc`, `-ec`), or None."""
    for position, argument in enumerate(arguments):
        if not argument.startswith(("-", "+")) or argument == "--":
            return None
        if not argument.startswith("--") and "c" in argument[1:]:
            return arguments[position + 1] if position + 1 < len(arguments) else ""
    return None


_SPLITTERS = frozenset({"&&", "||", ";", "|", "&", "|&"})
_KEYWORDS = frozenset(
    ("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "in")
    + ("function", "select", "{", "}", "!", "[[", "]]", "coproc")
)


def _split_script(script: str) -> tuple[list[list[str]], bool]:
    """The simple commands of a shell script, and whether the script holds nothing else.

    Words whose value a shell would compute (substitution, globbing of the program's name, redirection) make it
    unreadable; what can be read is returned all the same.
    """
    readable = not re.search(r"[`$<>(){}\\]|\bfunction\b|\balias\b", script)
    commands: list[list[str]] = []
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        current: list[str] = []
        try:
            for token in lexer:
                if token in _SPLITTERS:
                    commands.append(current)
                    current = []
                elif token and set(token) <= set(";&|"):
                    readable = False
                else:
                    current.append(token)
        except ValueError:  # an open quote
            readable = False
        commands.append(current)
    cleaned = []
    for words in commands:
        while words and (words[0] in _KEYWORDS or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL)):
            readable = readable and words[0] not in _KEYWORDS
            words = words[1:]
        if words:
            readable = readable and not re.search(r"[*?\[~]", words[0])
            cleaned.append(words)
    return cleaned, readable


def _unwrap(program: str, arguments: list[str]) -> list[str]:
    """The argv that a wrapper runs, [] if none."""
    with_value = _WRAPPERS[program]
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            position += 1
            break
        if program == "env" and (
            argument in ("-S", "--split-string") or argument.startswith(("-S", "--split-string="))
        ):
            if argument in ("-S", "--split-string"):
                text, rest = (arguments[position + 1 : position + 2] or [""])[0], arguments[position + 2 :]
            else:
                text, rest = (
                    argument.removeprefix("--split-string=").removeprefix("-S"),
                    arguments[position + 1 :],
                )
            try:
                return _unwrap(program, shlex.split(text) + rest)
            except ValueError:
                return rest
        if argument.startswith("-") and argument != "-":
            position += 2 if len(argument) == 2 and argument[1] in with_value else 1
            continue
        if program in ("env", "sudo", "doas") and re.fullmatch(r"[A-Za-z_]\w*=.*", argument, re.DOTALL):
            position += 1
            continue
        break
    rest = arguments[position:]
    if program in ("timeout", "chrt", "taskset") and rest:
        rest = rest[1:]  # the duration, priority or mask
    while rest and program in ("env", "sudo") and re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0], re.DOTALL):
        rest = rest[1:]
    return rest


def _without_global_options(argv: Sequence[str]) -> list[str]:
    if not argv:
        return []
    with_value = _GLOBAL_OPTIONS.get(os.path.basename(argv[0]))
    words = list(argv)
    if with_value is None:
        return words
    position = 1
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        position += 2 if words[position] in with_value else 1
    # `git --version` has no subcommand: then the words stay as they are.
    return [words[0], *words[position:]] if position < len(words) else words
