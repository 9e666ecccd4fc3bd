"""The languages of code contexts that are not Python: which program, which driver, which package brings it.

Guards against a language that is half there: the program is looked for when a context is made, and where it is
missing the refusal names the package and what is there instead. A new language is one line in `LANGUAGES` and one
driver below `drivers/` (docs/guides/add-a-language.md).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ringfence.guest.jobs import Refused

DRIVERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "drivers")


class Language(NamedTuple):
    """How one language is run. `arguments` follow the program; `{driver}`, `{requests}` and `{messages}` in them
    become paths. `package` is Debian's. `variables` are added to the environment where they are not set."""

    program: str
    driver: str
    arguments: tuple[str, ...]
    package: str
    variables: tuple[tuple[str, str], ...] = ()


LANGUAGES = {
    "bash": Language("bash", "bash.sh", ("--noprofile", "--noediting", "--rcfile", "{driver}", "-i"), "bash"),
    "javascript": Language("node", "javascript.js", ("{driver}", "{requests}", "{messages}"), "nodejs"),
    "r": Language(
        "R", "r.R", ("--no-echo", "--vanilla", "-f", "{driver}", "--args", "{requests}", "{messages}"), "r-base-core"
    ),
}


def program_of(language: str, path: str) -> str:
    """Where the program of `language` is, along `path` (colons between directories). Raises Refused."""
    known = LANGUAGES.get(language)
    if known is None:
        raise Refused("invalid", f"there is no language {language!r}", "there are: " + _present(path))
    found = _find(known.program, path)
    if found is None:
        raise Refused(
            "invalid", f"this sandbox has no {known.program}, which {language} needs",
            f"install the Debian package {known.package} on this machine; a sandbox sees programs below /usr, not "
            f"those in a home directory. Languages here: {_present(path)}",
        )  # fmt: skip
    return found


def _present(path: str) -> str:
    return ", ".join(["python", *(name for name, known in LANGUAGES.items() if _find(known.program, path))])


def _find(program: str, path: str) -> str | None:
    for directory in path.split(":"):
        candidate = os.path.join(directory, program)
        if directory.startswith("/") and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None
