"""The laws of a review: what a sandbox did to its workspace is captured whole, and written exactly or not at all.

On real sandboxes, as every kind of user. The host's directory is compared before and after, never what the sandbox says.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence import (
    ApplyConflictError,
    ApplyRefusedError,
    AsyncSandbox,
    Changes,
    InvalidArgumentError,
    Sandbox,
    SandboxDeadError,
    Workspace,
)

Make = Callable[..., Sandbox]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small directory of this user's, with a state directory beside it."""
    top = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp"))
    monkeypatch.setenv("RINGFENCE_STATE", str(top / "state"))
    place = top / "project"
    for name, text in {
        "readme.md": "one\ntwo\n", "src/main.py": "print(1)\n", "src/lib/x.py": "x = 1\n", "src/lib/y.py": "y = 2\n",
        "old/a": "a\n", "old/b/c": "c\n", "run.sh": "true\n",
    }.items():  # fmt: skip
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
        (place / name).chmod(0o644)
    yield place
    left = list((top / "state").rglob("*.json*"))
    shutil.rmtree(top)
    assert not left, "a journal is left"


def picture(place: Path) -> dict[str, tuple[str, bytes, int]]:
    """Every name below with its kind and mode, content and owner."""
    found = {}
    for root, directories, files in os.walk(place):
        for each in directories + files:
            path = Path(root, each)
            state = path.lstat()
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
            found[str(path.relative_to(place))] = (oct(state.st_mode), content, state.st_uid)
    return found


EDITS = """set -e; umask 022
printf 'one\\n2\\n' > readme.md; mkdir -p new/deep; echo new > new/deep/file; rm src/main.py; rm -r old
mv src/lib library; chmod 755 run.sh; ln -s readme.md link; printf '\\000\\001' > binary"""


def edited(sandbox: Sandbox, script: str = EDITS) -> Changes:
    result = sandbox.commands.run(script)
    assert result.exit_code == 0, result.stderr
    return sandbox.changes()


def kinds(changes: Changes) -> dict[str, str]:
    return {change.path: change.kind for change in changes}


def test_what_was_changed_is_captured_and_the_host_is_as_it_was(make: Make, project: Path) -> None:
    before = picture(project)
    sandbox = make("plain", workspace=project)
    assert len(sandbox.changes()) == 0
    changes = edited(sandbox)
    assert kinds(changes) == {
        "readme.md": "modified", "new": "created", "new/deep": "created", "new/deep/file": "created", "src/main.py": "deleted",
        "old": "deleted", "old/a": "deleted", "old/b": "deleted", "old/b/c": "deleted", "library": "renamed",
        "library/x.py": "renamed", "library/y.py": "renamed", "run.sh": "mode", "link": "created", "binary": "created",
    }  # fmt: skip
    assert changes["readme.md"].diff == "@@ -1,2 +1,2 @@\n one\n-two\n+2\n" and changes["binary"].binary
    assert changes["library/x.py"].old_path == "src/lib/x.py"
    assert changes.frozen and all(change.ordinary for change in changes)
    assert picture(project) == before


def test_apply_writes_exactly_what_was_captured(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    changes = edited(sandbox)
    sandbox.commands.run("echo later > readme.md; echo later > new/deep/file; touch another")
    done = sandbox.apply(changes)
    assert len(done.changes) == len(changes) and not done.kept
    after = picture(project)
    assert {name: content for name, (_, content, _) in after.items()} == {
        "readme.md": b"one\n2\n", "new": b"", "new/deep": b"", "new/deep/file": b"new\n", "src": b"", "library": b"",
        "library/x.py": b"x = 1\n", "library/y.py": b"y = 2\n", "run.sh": b"true\n", "link": b"readme.md", "binary": b"\0\1",
    }  # fmt: skip
    assert after["run.sh"][0] == "0o100755" and after["new"][0] == "0o40755" and after["new/deep/file"][0] == "0o100644"
    assert {owner for _, _, owner in after.values()} == {os.geteuid()}


def test_work_goes_on_after_an_apply_and_only_the_rest_is_left(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    sandbox.apply(edited(sandbox))
    assert len(sandbox.changes()) == 0
    changes = edited(sandbox, "echo 3 >> readme.md; rm -r library; echo x > src/again")
    assert kinds(changes) == {
        "readme.md": "modified", "library": "deleted", "library/x.py": "deleted", "library/y.py": "deleted", "src/again": "created",
    }  # fmt: skip
    sandbox.apply(changes)
    assert (project / "readme.md").read_text() == "one\n2\n3\n" and not (project / "library").exists()


def test_some_paths_can_be_applied_and_the_others_stay_held_back(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    changes = edited(sandbox)
    sandbox.apply(changes, paths=["new", "src/main.py", changes["run.sh"]])
    names = {name for name in picture(project)}
    assert {"new/deep/file", "old/b/c", "src/lib/x.py"} <= names and not {"library", "src/main.py"} & names
    left = kinds(sandbox.changes())
    assert "library" in left and not {"new", "new/deep/file", "src/main.py", "run.sh"} & left.keys()


def test_captured_changes_can_be_applied_after_the_end(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    changes = edited(sandbox)
    sandbox.kill()
    with pytest.raises(SandboxDeadError):
        sandbox.changes()
    sandbox.apply(changes)
    assert (project / "library/x.py").read_text() == "x = 1\n"


def test_an_edit_of_the_host_is_never_overwritten(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    early = edited(sandbox)
    (project / "readme.md").write_text("a person's edit\n")
    before = picture(project)
    with pytest.raises(ApplyConflictError) as refused:
        sandbox.apply(early)
    assert refused.value.paths == ("readme.md",) and refused.value.hint
    late = sandbox.changes()
    assert late["readme.md"].conflict
    with pytest.raises(ApplyConflictError):
        sandbox.apply(late)
    assert picture(project) == before
    sandbox.apply(late, paths=late.ordinary)
    assert (project / "readme.md").read_text() == "a person's edit\n" and (project / "new/deep/file").exists()


def test_discarded_changes_are_gone_for_good(make: Make, project: Path) -> None:
    before = picture(project)
    sandbox = make("plain", workspace=project)
    changes = edited(sandbox)
    sandbox.discard()
    assert changes.closed
    for act in (lambda: sandbox.apply(changes), sandbox.changes):
        with pytest.raises(InvalidArgumentError, match="discarded"):
            act()
    assert picture(project) == before


def test_without_an_overlay_there_is_nothing_to_review(make: Make, project: Path) -> None:
    for sandbox in (make("plain"), make("plain", workspace=Workspace(source=str(project), mode="ro"))):
        for act in (sandbox.changes, sandbox.discard):
            with pytest.raises(InvalidArgumentError, match="holds no changes back") as refused:
                act()
            assert refused.value.hint


def test_changes_of_another_directory_are_refused(make: Make, project: Path) -> None:
    other = project.parent / "other"
    shutil.copytree(project, other)
    before = picture(other)
    changes = edited(make("plain", workspace=project))
    with pytest.raises(ApplyConflictError):
        make("plain", workspace=other).apply(changes)
    assert picture(other) == before


def test_a_workspace_that_was_replaced_is_refused(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    edited(sandbox)
    project.rename(project.parent / "moved")
    shutil.copytree(project.parent / "moved", project)
    before = picture(project)
    with pytest.raises(ApplyConflictError, match="not the directory"):
        sandbox.changes()
    assert picture(project) == before


def test_a_mode_that_shuts_the_owner_out_is_captured_all_the_same(make: Make, project: Path) -> None:
    changes = edited(make("plain", workspace=project), "echo x > shut; chmod 0 shut; mkdir dark; echo y > dark/in; chmod 0 dark")
    assert changes.read("shut") == b"x\n" and changes.read("dark/in") == b"y\n"


def test_refusals_name_what_stands_in_the_way(make: Make, project: Path) -> None:
    sandbox = make("plain", workspace=project)
    changes = edited(sandbox, "mkdir -p .git/hooks; echo evil > .git/hooks/pre-commit; echo fine > fine; mkfifo pipe")
    with pytest.raises(ApplyRefusedError, match="never"):
        sandbox.apply(changes)
    with pytest.raises(ApplyRefusedError, match=r"\.git/hooks/pre-commit.*must be named|must be named.*pre-commit") as refused:
        sandbox.apply(changes, paths=[".git", "fine"])
    assert ".git/hooks/pre-commit" in refused.value.paths and refused.value.hint
    assert not (project / "fine").exists()
    sandbox.apply(changes, paths=changes.ordinary)
    assert (project / "fine").exists() and not (project / ".git/hooks").exists()


def test_the_asynchronous_facade_does_the_same(project: Path) -> None:
    async def review() -> int:
        async with AsyncSandbox("plain", workspace=project) as sandbox:
            await sandbox.commands.run("echo async > made")
            changes = await sandbox.changes()
            done = await sandbox.apply(changes, ["made"])
            await sandbox.discard()
            return len(done.changes)

    assert asyncio.run(review()) == 1
    assert (project / "made").read_text() == "async\n"
