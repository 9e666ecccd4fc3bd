"""The arguments of `ringfence run` and `ringfence exec`, read without a command line library.

Guards against the price of one: importing typer and rich costs more than starting the sandbox. The table below
is the only list of these options; `app.py` declares the same ones for `--help`, and a test compares the two.

    ringfence run  [OPTIONS] [FILE | -c CODE | -] [ARGUMENTS...]
    ringfence run  --workspace DIR [--review] [OPTIONS] -- COMMAND [ARGUMENTS...]
    ringfence exec [OPTIONS] [--] COMMAND [ARGUMENTS...]

Options end at the first word that is none: what follows belongs to the program. Standard library only.
"""

from __future__ import annotations

import os

VALUE_OPTIONS = {
    "--timeout": "the longest run, in seconds or as `2min`, above 0; `none` leaves it to limits.max_age [30s]",
    "--memory": "memory of all its processes together, from 16 MiB, as `1GiB` or in bytes; files inside (disk and tmp) are charged to the same group [512MiB]",
    "--cpus": "processors; fractions are shares of one [1]",
    "--pids": "processes and threads at a time [100]",
    "--disk": "what it may write outside /tmp, from 1 MiB, as `1GiB` or in bytes [200MiB]",
    "--env": "a variable for the program, NAME=VALUE; NAME alone takes the caller's value; may be repeated",
    "--cwd": "the working directory inside [/home/user]",
    "--template": "`plain` (Python and its standard library), `base`, `data` (with numpy, pandas, matplotlib), `current-env` (this Python's packages) or an environment that `ringfence env create` made [plain]",
    "--policy": "a policy file, or the name of a preset",
    "--workspace": "a host directory to show at /workspace, where the program then starts; replaces the policy's",
    "--mode": "how --workspace is shown: `overlay` (changes stay inside and end with it), `ro` or `rw` [overlay]",
}
RUN_OPTIONS = {
    "--language": "`python`, `bash`, `javascript` or `r` [by the file's suffix, else python]",
}
"""Options of `run` alone."""
REVIEW_OPTIONS = {
    "--review": "after the program, show what it changed in --workspace, and ask what of it to write there",
    "--yes": "with --review: do not ask; apply every change that needs no name of its own",
    "--apply": "with --review: do not ask; apply what changed at this path below the workspace, protected or not; may be repeated",
}
"""Options of `run` that say what becomes of changes; --apply takes a value."""
FLAGS = {
    "--json": "print one JSON object instead of passing output through",
    "--help": "show this and exit",
}
TEMPLATES = ("plain", "base", "data")
MODES = ("overlay", "ro", "rw")


class UsageError(Exception):
    """Arguments that make no sense; `str()` says what and how to do it right."""


class Request:
    """What is to be run: exactly one of `code`, `file` and `command` is set; `file` may be `-`."""

    __slots__ = (
        "apply", "arguments", "code", "command", "file", "help", "json", "language", "options", "review", "variables", "verb", "yes",
    )  # fmt: skip

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.code: str | None = None
        self.file: str | None = None
        self.command: list[str] | None = None
        self.language = "python"  # of `code` and `file`
        self.arguments: list[str] = []
        self.options: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.apply: list[str] = []
        self.json = False
        self.help = False
        self.review = False
        self.yes = False


def parse(verb: str, words: list[str]) -> Request:
    """Read the words after `ringfence VERB`. Raises UsageError."""
    request = Request(verb)
    position, ended = 0, False
    while position < len(words):
        word = words[position]
        if word == "--":
            position, ended = position + 1, True
            break
        if word == "-" or not word.startswith("-"):
            break
        position += 1
        if word == "-c" and verb == "run":
            if position == len(words):
                raise UsageError("-c needs the code to run: ringfence run -c 'print(1)'")
            request.code = words[position]
            request.arguments = words[position + 1 :]
            return _checked(request)
        name, equals, value = word.partition("=")
        if (name in FLAGS or (verb == "run" and name in ("--review", "--yes"))) and not equals:
            setattr(request, name[2:], True)
            if request.help:
                return request
            continue
        meaning = VALUE_OPTIONS.get(name)
        if meaning is None and verb == "run":
            meaning = RUN_OPTIONS.get(name) or (REVIEW_OPTIONS["--apply"] if name == "--apply" else None)
        if meaning is None:
            raise UsageError(f"there is no option {name}; `ringfence {verb} --help` lists them")
        if not equals:
            if position == len(words):
                raise UsageError(f"{name} needs a value: {meaning}")
            value = words[position]
            position += 1
        if name == "--env":
            _variable(request, value)
        elif name == "--apply":
            request.apply.append(value)
        else:
            request.options[name[2:]] = value
    rest = words[position:]
    if verb == "exec" or (ended and rest and "workspace" in request.options):
        # Whoever names a directory and then `--` means a command for it, not a file of that name.
        request.command = rest
        if not rest:
            raise UsageError("exec needs a command: ringfence exec -- ls -la")
    else:
        request.file = rest[0] if rest else "-"
        request.arguments = rest[1:]
    return _checked(request)


def _variable(request: Request, text: str) -> None:
    name, equals, value = text.partition("=")
    if not name:
        raise UsageError(f"--env takes NAME=VALUE, not {text!r}")
    if equals:
        request.variables[name] = value
    elif name in os.environ:
        request.variables[name] = os.environ[name]
    else:
        raise UsageError(f"--env {name}: there is no such variable here; write {name}=VALUE")


def _checked(request: Request) -> Request:
    mode = request.options.get("mode")
    if mode is not None and mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}")
    if mode is not None and "workspace" not in request.options:
        raise UsageError("--mode says how a workspace is shown, and there is none: add --workspace DIR")
    if request.review and ("workspace" not in request.options or mode not in (None, "overlay")):
        raise UsageError("--review shows what was held back in a workspace: add --workspace DIR, without another --mode")
    if (request.yes or request.apply) and not request.review:
        raise UsageError("--yes and --apply say what becomes of changes, and there is no review of any: add --review")
    template = request.options.get("template")
    if template is not None and template not in TEMPLATES:
        from ringfence.node import packages

        if not packages.exists(template):
            raise UsageError(
                f"there is no template {template!r}; choose one of {', '.join(TEMPLATES)}, current-env, "
                "or an environment of `ringfence env ls`"
            )
    language = request.options.pop("language", None)
    if language is not None or (request.file is not None and not request.file.endswith((".py", "-"))):
        from ringfence.stream import languages

        known = languages.language_of(request.file or "") if language is None else languages.ALIASES.get(language.lower())
        if known is None:
            raise UsageError(f"there is no language {language!r}; choose one of {', '.join(languages.LANGUAGES)}")
        request.language = known
    return request
