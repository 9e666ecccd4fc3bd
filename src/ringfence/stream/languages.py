"""The languages as the host names them: what people call them, their files' suffixes, their programs.

Imports nothing: the command line's fast path reads it too. How the guest runs each as a context is
`guest/languages.py`; a test holds the two together.
"""

from __future__ import annotations

ALIASES = {
    "python": "python", "py": "python", "python3": "python",
    "bash": "bash", "sh": "bash", "shell": "bash",
    "javascript": "javascript", "js": "javascript", "node": "javascript", "nodejs": "javascript",
    "r": "r",
}  # fmt: skip
LANGUAGES = tuple(dict.fromkeys(ALIASES.values()))

SUFFIXES = {"sh": "bash", "bash": "bash", "js": "javascript", "mjs": "javascript", "cjs": "javascript", "r": "r"}
"""Suffix of a file, in small letters, to its language; Python's is everyone else's."""

# How a program of each language is started; the program's own arguments follow.
_OF_FILE = {"bash": ("bash",), "javascript": ("node",), "r": ("Rscript", "--vanilla")}
_OF_CODE = {"bash": ("bash", "-c"), "javascript": ("node", "-e"), "r": ("Rscript", "--vanilla", "-e")}
_OF_INPUT = {"bash": ("bash", "-s", "--"), "javascript": ("node", "-"), "r": ("Rscript", "--vanilla", "/dev/stdin")}


def language_of(path: str) -> str:
    """The language of a file, by its suffix."""
    _, dot, suffix = path.rpartition("/")[2].rpartition(".")
    return SUFFIXES.get(suffix.lower(), "python") if dot else "python"


def command(language: str, *, code: str | None = None, file: str | None = None) -> list[str]:
    """The beginning of a command that runs `code`, or the file at `file`, or standard input. Not for Python, whose
    interpreter is the template's."""
    if code is not None:
        # The shell's first argument after the code is its `$0`.
        return [*_OF_CODE[language], code, *(["bash"] if language == "bash" else [])]
    if file is not None:
        return [*_OF_FILE[language], file]
    return list(_OF_INPUT[language])
