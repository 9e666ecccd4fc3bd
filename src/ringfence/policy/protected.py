"""Files of a workspace that the host will act on without being asked: the one table, with a reason a row.

Guards against an escape by waiting. Code that may write a repository need not break out of its sandbox when it can
leave a git hook, a shell start-up file, an editor task or an instruction for the next agent, which then run with the
rights of the person who opens the directory. `apply` writes such a file only where the person named it.

What is in the table: files that act, or instruct something that acts, when somebody merely enters, opens, lists or
commits in the directory. What is not: a project's own code (`Makefile`, `package.json`, `conftest.py`, workflows of a
CI server), which runs when somebody asks for it and is what a review is for.

Names are compared as the least careful file system and program would compare them: without case, in one Unicode form,
without the characters that HFS+ ignores, without NTFS's trailing dots and streams, and by their short names. Such a
name that is harmless on this file system is then named needlessly; the other way round would be a hole.

Pure: nothing here looks at a disk. Standard library only.
"""

from __future__ import annotations

import re
import unicodedata
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

__all__ = ["PROTECTED", "Protected", "protection"]


class Protected(NamedTuple):
    """One row. `pattern` is one or more names joined by `/`, found at any depth; all that lies below matches too.

    `*` stands for part of a name, `**` for any number of names. `only` restricts the row to kinds of entry.
    """

    pattern: str
    reason: str
    only: tuple[str, ...] = ()


_GIT = "git runs programs that it names"
_HOOK = "git runs it"
_SHELL = "a shell runs it when it starts"
_EDITOR = "an editor runs tasks or tools that it names when the directory is opened"
_AGENT = "an agent takes it for instructions, or runs what it names"
_SESSION = "a session runs it when it starts"

PROTECTED: tuple[Protected, ...] = (
    # git: what it executes, and what tells it where to look for that
    Protected(".git/hooks", _HOOK),
    Protected(".git/config", _GIT),
    Protected(".git/config.worktree", _GIT),
    Protected(".git/modules/**/hooks", _HOOK),
    Protected(".git/modules/**/config", _GIT),
    Protected(".git/modules/**/config.worktree", _GIT),
    Protected(".git/worktrees/**/hooks", _HOOK),
    Protected(".git/worktrees/**/config", _GIT),
    Protected(".git/worktrees/**/config.worktree", _GIT),
    Protected(".git/**/commondir", "it tells git where configuration and hooks lie"),
    Protected(".git/**/gitdir", "it tells git where a repository lies"),
    Protected(".git/**/objects/info/alternates", "it makes git read objects from elsewhere"),
    Protected(".git/info/attributes", "it makes git run filters"),
    Protected(".git/**/rebase-merge", "`git rebase --continue` runs the commands in it"),
    Protected(".git/**/rebase-apply", "`git rebase --continue` goes by it"),
    Protected(".git", "it tells git where the repository lies, and with it hooks and configuration", ("file", "link", "other")),
    Protected(".gitmodules", "it makes git fetch from elsewhere, into paths of its choice"),
    Protected(".gitconfig", _GIT),
    Protected(".config/git", _GIT),
    Protected(".githooks", "a usual place of hooks, where core.hooksPath names it"),
    Protected(".husky", _HOOK),
    Protected(".lefthook", _HOOK),
    Protected("lefthook.yml", "git hooks run the commands in it"),
    Protected(".lefthook.yml", "git hooks run the commands in it"),
    Protected(".pre-commit-config.yaml", "git hooks run the programs that it names"),
    # shells, and what runs in one when somebody changes into the directory
    Protected(".bashrc", _SHELL),
    Protected(".bash_profile", _SHELL),
    Protected(".bash_login", _SHELL),
    Protected(".bash_logout", "a shell runs it when it ends"),
    Protected(".bash_aliases", _SHELL),
    Protected(".profile", _SHELL),
    Protected(".zshrc", _SHELL),
    Protected(".zshenv", _SHELL),
    Protected(".zprofile", _SHELL),
    Protected(".zlogin", _SHELL),
    Protected(".zlogout", "a shell runs it when it ends"),
    Protected(".kshrc", _SHELL),
    Protected(".mkshrc", _SHELL),
    Protected(".cshrc", _SHELL),
    Protected(".tcshrc", _SHELL),
    Protected(".login", _SHELL),
    Protected(".config/fish", _SHELL),
    Protected(".inputrc", "it binds keys of the shell to commands"),
    Protected(".envrc", "direnv runs it when somebody changes into the directory"),
    Protected(".autoenv", "autoenv runs it when somebody changes into the directory"),
    Protected("mise.toml", "mise runs hooks that it names when somebody changes into the directory"),
    Protected(".mise.toml", "mise runs hooks that it names when somebody changes into the directory"),
    # sessions and logins, where a home directory is the workspace
    Protected(".ssh", "it says who may log in, and what ssh runs"),
    Protected(".pam_environment", _SESSION),
    Protected(".xprofile", _SESSION),
    Protected(".xinitrc", _SESSION),
    Protected(".xsession", _SESSION),
    Protected(".xsessionrc", _SESSION),
    Protected(".config/autostart", _SESSION),
    Protected(".config/systemd", _SESSION),
    Protected(".config/environment.d", _SESSION),
    # tools that read a file of the directory and run what it names
    Protected(".npmrc", "npm runs the shell that it names, and installs from where it says"),
    Protected(".yarnrc", "yarn runs the program that it names"),
    Protected(".yarnrc.yml", "yarn runs the program that it names"),
    Protected(".gdbinit", "gdb runs it when it starts"),
    Protected(".lldbinit", "lldb runs it when it starts"),
    Protected(".pdbrc", "pdb runs it when it starts"),
    # editors
    Protected(".vscode", _EDITOR),
    Protected("*.code-workspace", _EDITOR),
    Protected(".devcontainer", _EDITOR),
    Protected(".devcontainer.json", _EDITOR),
    Protected(".idea", _EDITOR),
    Protected(".vs", _EDITOR),
    Protected(".fleet", _EDITOR),
    Protected(".zed", _EDITOR),
    Protected(".helix", _EDITOR),
    Protected("*.sublime-project", _EDITOR),
    Protected(".vimrc", _EDITOR),
    Protected(".nvimrc", _EDITOR),
    Protected(".nvim.lua", _EDITOR),
    Protected(".exrc", _EDITOR),
    Protected(".emacs", _EDITOR),
    Protected(".emacs.d", _EDITOR),
    Protected(".dir-locals.el", _EDITOR),
    Protected(".dir-locals-2.el", _EDITOR),
    # agents: an agent that writes its own next instructions has left the sandbox by way of the next session
    Protected(".mcp.json", "an agent starts the programs that it names"),
    Protected("mcp.json", "an agent starts the programs that it names"),
    Protected(".claude", _AGENT),
    Protected(".claude.json", _AGENT),
    Protected("CLAUDE.md", _AGENT),
    Protected("CLAUDE.local.md", _AGENT),
    Protected("AGENTS.md", _AGENT),
    Protected("AGENTS.override.md", _AGENT),
    Protected("AGENT.md", _AGENT),
    Protected(".agents", _AGENT),
    Protected(".codex", _AGENT),
    Protected("GEMINI.md", _AGENT),
    Protected(".gemini", _AGENT),
    Protected(".cursor", _AGENT),
    Protected(".cursorrules", _AGENT),
    Protected(".windsurf", _AGENT),
    Protected(".windsurfrules", _AGENT),
    Protected(".clinerules", _AGENT),
    Protected(".roo", _AGENT),
    Protected(".roorules*", _AGENT),
    Protected(".roomodes", _AGENT),
    Protected(".aider*", _AGENT),
    Protected(".continue", _AGENT),
    Protected(".junie", _AGENT),
    Protected(".kiro", _AGENT),
    Protected(".amazonq", _AGENT),
    Protected(".augment", _AGENT),
    Protected(".trae", _AGENT),
    Protected(".goosehints", _AGENT),
    Protected(".openhands", _AGENT),
    Protected(".opencode", _AGENT),
    Protected("opencode.json", _AGENT),
    Protected("opencode.jsonc", _AGENT),
    Protected(".github/copilot-instructions.md", _AGENT),
    Protected(".github/instructions", _AGENT),
    Protected(".github/prompts", _AGENT),
    Protected(".github/chatmodes", _AGENT),
    Protected(".github/agents", _AGENT),
    # ours
    Protected(".ringfence*", "Ringfence takes it for its own"),
)
"""Every protected name. A new row needs a reason that says who acts on the file, and when."""

# What HFS+ leaves out of comparisons (the kernel's fs/hfsplus/tables.c); git ignores the same in `is_hfs_dotgit`.
_IGNORED = dict.fromkeys([*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF])
_SHORT_NAME = re.compile(r"([^~]{1,8})~[0-9]+(?:\.[^.]{0,3})?")


@lru_cache(maxsize=4096)
def _folded(name: str) -> str:
    """`name` as the least careful file system compares it."""
    name = name.translate(_IGNORED)
    name = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    name = name.translate(_IGNORED).partition(":")[0]  # NTFS: what follows a colon is a stream of the same file
    return name.rstrip(" .") or name


def _name_matches(name: str, pattern: str) -> bool:
    if fnmatchcase(name, pattern):
        return True
    short = _SHORT_NAME.fullmatch(name)
    if short is None:
        return False
    letters = "".join(character for character in pattern.partition("*")[0] if character not in " ._")
    stem = short[1].replace("_", "")
    if not letters or not stem:
        return False
    # FAT keeps the first six characters; NTFS, after four clashes, two of them and four digits of a hash.
    if letters[:6].startswith(stem) and len(stem) >= min(len(letters), 2):
        return True
    return len(stem) == 6 and stem[:2] == letters[:2] and all(digit in "0123456789abcdef" for digit in stem[2:])


def _matches_from(names: list[str], pattern: list[str], exact: bool) -> bool:
    """Whether `pattern` fits `names` from their first on; with `exact` nothing may be left of `names`."""
    if not pattern:
        return not exact or not names
    if pattern[0] == "**":
        return any(_matches_from(names[count:], pattern[1:], exact) for count in range(len(names) + 1))
    return bool(names) and _name_matches(names[0], pattern[0]) and _matches_from(names[1:], pattern[1:], exact)


_PATTERNS = [(row, [part if part == "**" else _folded(part) for part in row.pattern.split("/")]) for row in PROTECTED]
_BY_FIRST_NAME: dict[str, list[tuple[Protected, list[str]]]] = {}
for _row, _pattern in _PATTERNS:
    _BY_FIRST_NAME.setdefault("*" if "*" in _pattern[0] else _pattern[0], []).append((_row, _pattern))


def protection(path: str, kind: str = "file") -> Protected | None:
    """The first row that protects `path`, or None.

    `path` is relative to the workspace; `kind` is that of the entry there: file, directory, link or other. A row
    for files and links matches what lies *at* the path alone; all others match everything below as well.
    """
    names = [_folded(name) for name in path.split("/") if name not in ("", ".")]
    for start, name in enumerate(names):
        # A short name can stand for any; others are looked up, since a whole tree of paths may be asked about.
        rows = _PATTERNS if "~" in name else (*_BY_FIRST_NAME.get(name, ()), *_BY_FIRST_NAME["*"])
        for row, pattern in rows:
            if (not row.only or kind in row.only) and _matches_from(names[start:], pattern, exact=bool(row.only)):
                return row
    return None
