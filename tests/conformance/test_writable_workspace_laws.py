"""The laws of `mode: rw`: writes reach the host as its owner's, and what the host acts on by itself stays as it is.

Guards against a mode that is weaker than it says: what cannot be held has to be accepted by name, or is refused.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import EnforcementError, PolicyError, Sandbox, Workspace

PROTECTED = (".git/config", ".git/hooks/pre-commit", ".envrc", "deep/down/nested repo/.git/config", ".vscode/tasks.json")


@pytest.fixture
def project() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp")) / "project"
    for name in (*PROTECTED, "file", "deep/file", ".git/HEAD"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("of the host\n")
    yield place
    shutil.rmtree(place.parent)


def rw(source: Path, **fields: Any) -> Workspace:
    return Workspace(source=str(source), mode="rw", **{"allow_root_owned": True, "accept_new_protected": True, **fields})


def row(sandbox: Sandbox, primitive: str) -> Any:
    return next(row for row in sandbox.info().enforcement if row.primitive == primitive)


def test_writes_reach_the_host_at_once_and_belong_to_the_directorys_owner(make, project):
    sandbox = make("plain", workspace=rw(project))
    script = "id -un; stat -c %U file; echo more >> file; mkdir new; echo x > new/file; ln -s file link; mv deep/file moved"
    assert sandbox.commands.run(script).stdout == "user\nuser\n"
    assert (project / "file").read_text() == "of the host\nmore\n" and (project / "moved").exists()
    owner = project.stat()
    for name in ("new", "new/file", "link", "file"):
        state = (project / name).lstat()
        assert (state.st_uid, state.st_gid) == (owner.st_uid, owner.st_gid)
    assert row(sandbox, "workspace").strength == "hard" and row(sandbox, "workspace").detail.startswith("rw, from ")
    (project / "later").write_text("from outside")
    assert sandbox.commands.run("cat later").stdout == "from outside"


@pytest.mark.parametrize("name", PROTECTED)
def test_what_the_host_acts_on_by_itself_cannot_be_changed_moved_or_replaced(make, project, name):
    sandbox = make("plain", workspace=rw(project))
    top = name.split("/")[0]
    deeds = [f"echo x > '{name}'", f"echo x >> '{name}'", f"rm '{name}'", f"mv '{name}' taken", f"mv file '{name}'",
             f"chmod 777 '{name}'", f"ln '{name}' second", f"ln -sf /tmp '{name}'", f"truncate -s 0 '{name}'",
             f"mv '{top}' elsewhere", f"rm -r '{top}'", f"touch -d 2001-01-01 '{name}'"]  # fmt: skip
    part = os.path.dirname(name)
    while part:
        deeds.append(f"mv '{part}' elsewhere")
        part = os.path.dirname(part)
    before = (project / name).stat()
    for deed in deeds:
        assert not sandbox.commands.run(deed).ok, deed
    assert (project / name).read_text() == "of the host\n"
    assert ((project / name).stat().st_mode, (project / name).stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert row(sandbox, "protected names").strength == "watched"


def test_the_same_deeds_work_on_what_is_not_protected(make, project):
    """The control: they are refused for what they touch."""
    named = [".git/hooks" if "hooks" in name else ".vscode" if "vscode" in name else name for name in PROTECTED]
    sandbox = make("plain", workspace=rw(project, writable=named))
    for name in PROTECTED:
        assert sandbox.commands.run(f"echo x > '{name}' && chmod 700 '{name}' && mv '{name}' taken && mv taken '{name}'").ok
        assert (project / name).read_text() == "x\n"
    assert sandbox.commands.run("mv deep elsewhere && rm -r elsewhere .vscode").ok


def test_ordinary_work_of_git_goes_on(make, project):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    shutil.rmtree(project / ".git")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    import subprocess

    subprocess.run(["git", "init", "-q"], cwd=project, env=environment, check=True)
    sandbox = make("plain", workspace=rw(project))
    script = """set -e
    export HOME=/tmp; git config --global user.name a; git config --global user.email a@b
    git add file deep/file; git commit -qm one; git checkout -qb other; git mv file moved; git commit -qm two; git log --oneline | wc -l"""
    result = sandbox.commands.run(script, timeout=60)
    assert (result.stdout.strip(), result.ok) == ("2", True), result.stderr
    assert not sandbox.commands.run("git config core.hooksPath /tmp").ok


def test_nothing_is_left_behind_where_there_was_nothing(project):
    def names() -> list[str]:
        return sorted(os.path.join(folder, name) for folder, folders, files in os.walk(project) for name in (*folders, *files))

    before = names()
    with Sandbox("plain", workspace=rw(project)) as sandbox:
        assert sandbox.commands.run("true").ok
    assert names() == before


def test_it_is_refused_unless_the_caller_accepts_what_cannot_be_held(make, project):
    with pytest.raises(EnforcementError) as caught:
        Sandbox("plain", workspace=rw(project, accept_new_protected=False))
    assert caught.value.primitive == "protected names" and "overlay" in caught.value.hint
    sandbox = make("plain", workspace=rw(project))
    assert sandbox.commands.run("mkdir fresh && echo x > fresh/.envrc").ok
    assert "can be created" in row(sandbox, "protected names").detail


def test_a_protected_link_or_a_second_name_is_refused_unless_named(make, project):
    (project / "AGENTS.md").symlink_to("file")
    with pytest.raises(EnforcementError, match="AGENTS.md"):
        Sandbox("plain", workspace=rw(project))
    assert make("plain", workspace=rw(project, writable=["AGENTS.md"])).commands.run("rm AGENTS.md").ok
    os.link(project / ".envrc", project / "second")
    with pytest.raises(EnforcementError, match="second name"):
        Sandbox("plain", workspace=rw(project))


def test_what_the_host_replaces_meanwhile_is_told_as_lost(make, project):
    sandbox = make("plain", workspace=rw(project))
    (project / "spare").write_text("replaced by the host\n")
    (project / "spare").rename(project / ".envrc")
    lost = row(sandbox, "protected names")
    assert lost.strength == "none" and ".envrc" in lost.detail


def test_set_id_bits_and_devices_do_not_reach_the_host(make, project):
    sandbox = make("plain", workspace=rw(project))
    code = """
import os, stat
for deed in (lambda: os.chmod("file", 0o4755), lambda: os.chmod("file", 0o2755), lambda: os.chmod("deep", 0o2777),
             lambda: os.close(os.open("made", os.O_CREAT | os.O_WRONLY, 0o6755)), lambda: os.mkdir("setgid", 0o2777),
             lambda: os.mknod("device", 0o666 | stat.S_IFCHR, os.makedev(1, 5)),
             lambda: os.setxattr("file", "security.capability", b"\\x01\\x00\\x00\\x02" + bytes(16)),
             lambda: os.chown("file", 0, 0)):
    try: deed()
    except OSError: pass
"""
    assert sandbox.commands.run(["python3", "-c", code]).ok
    for folder, folders, files in os.walk(project):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            assert not state.st_mode & (stat.S_ISUID | stat.S_ISGID), path
            assert state.st_uid == project.stat().st_uid and not (stat.S_ISCHR(state.st_mode) and state.st_rdev), path
            assert "security.capability" not in os.listxattr(path, follow_symlinks=False)


@pytest.mark.root
def test_a_directory_of_root_is_refused_unless_allowed(project):
    with pytest.raises(EnforcementError, match="belongs to root") as caught:
        Sandbox("plain", workspace=rw(project, allow_root_owned=False))
    assert "allow_root_owned" in caught.value.hint
    for folder, folders, files in os.walk(project.parent):
        for name in (".", *folders, *files):
            os.chown(os.path.join(folder, name), 64998, 64998)
    with Sandbox("plain", workspace=rw(project, allow_root_owned=False)) as sandbox:
        assert sandbox.commands.run("echo x > new").ok
    assert (project / "new").stat().st_uid == 64998


def test_root_inside_and_a_workspace_that_is_written_exclude_each_other(project):
    with pytest.raises((PolicyError, EnforcementError)):
        Sandbox("plain", policy={"root": True}, workspace=rw(project))


def test_a_name_below_a_protected_directory_has_to_be_the_directory(project):
    with pytest.raises(EnforcementError) as caught:
        Sandbox("plain", workspace=rw(project, writable=[".git/hooks/pre-commit"]))
    assert ".git/hooks itself" in caught.value.hint


@pytest.mark.parametrize("path", ["", "/", "a/../b", "./a", "a\0b"])
def test_a_writable_name_that_is_none_is_refused(path):
    with pytest.raises(ValueError, match="not a path below"):
        Workspace(source="/x", mode="rw", writable=[path])
