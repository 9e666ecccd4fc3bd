"""Every file that the host acts on by itself is on the list, under every spelling that some file system takes for it."""

from __future__ import annotations

import pytest

from ringfence.policy.protected import PROTECTED, protection


@pytest.mark.parametrize(
    "path",
    [
        ".git/hooks/pre-commit", ".git/hooks", ".git/config", ".git/config.worktree", "vendor/x/.git/config",
        ".git/modules/a/config", ".git/modules/a/modules/b/hooks/x", ".git/worktrees/w/gitdir", ".git/worktrees/w/commondir",
        ".git/commondir", ".git/objects/info/alternates", ".git/info/attributes", ".git/rebase-merge/git-rebase-todo",
        ".gitmodules", ".husky/pre-commit", ".pre-commit-config.yaml", ".bashrc", "home/.profile", ".config/fish/conf.d/x.fish",
        ".envrc", ".ssh/authorized_keys", ".npmrc", ".yarnrc.yml", ".gdbinit", ".vscode/tasks.json", "x.code-workspace",
        ".idea/workspace.xml", ".devcontainer/devcontainer.json", ".exrc", ".dir-locals.el", ".mcp.json", ".claude/settings.json",
        "sub/CLAUDE.md", "AGENTS.md", "GEMINI.md", ".cursor/rules/x.mdc", ".cursorrules", ".github/copilot-instructions.md",
        ".aider.conf.yml", ".ringfence-apply-0/n1",
    ],
)  # fmt: skip
def test_what_acts_by_itself_is_protected(path: str) -> None:
    row = protection(path)
    assert row is not None and row.reason


@pytest.mark.parametrize(
    "path",
    [
        ".GIT/hooks/x", ".Git/HOOKS/x", ".git /hooks/x", ".git./hooks/x", ".git::$INDEX_ALLOCATION/hooks/x", "git~1/hooks/x",
        "GIT~1/config", "gi7eba~1/config", ".g\u200cit/config", ".gi\ufefft/hooks/x", ".\uff47it/config", "AGENTS.MD", "agents.md",
        "AGENTS~1.MD", "AGENTS.md.", "CLAUDE~1/settings.json", ".VSCODE/tasks.json", "\u212a/../.bashrc", "gitmod~1", ".git/./hooks/x",
        ".BASHRC ", "./.git/config", ".mcp.json:stream",
    ],
)  # fmt: skip
def test_under_any_spelling(path: str) -> None:
    assert protection(path) is not None


@pytest.mark.parametrize(
    "path",
    [
        "src/main.py", "Makefile", "package.json", "conftest.py", ".gitignore", ".gitattributes", ".git/index", ".git/HEAD",
        ".git/refs/heads/main", ".git/objects/ab/cd", ".git/logs/HEAD", ".git/COMMIT_EDITMSG", ".github/workflows/test.yml", ".env",
        "config", "hooks/x", "git/config", "docs/agents-md.txt", "x~", "backup~1", "file.py~1~", "digit/hooks", ".gitlab-ci.yml", "",
    ],
)  # fmt: skip
def test_the_projects_own_code_is_not(path: str) -> None:
    assert protection(path) is None


def test_a_git_directory_itself_may_be_made_but_not_a_file_or_link_of_that_name() -> None:
    assert protection(".git", "directory") is None
    assert protection("sub/.git", "file") is not None and protection(".git", "link") is not None


def test_every_row_has_a_reason_and_matches_itself() -> None:
    for row in PROTECTED:
        assert row.reason and not row.reason.endswith(".")
        path = row.pattern.replace("**", "x").replace("*", "x")
        assert protection(path, row.only[0] if row.only else "file") is not None
    assert len({row.pattern for row in PROTECTED}) == len(PROTECTED)
