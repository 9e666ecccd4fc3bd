"""The laws of host directories: what a sandbox sees and may do in each mode, and that the host's side is untouched.

Guards the promise that a workspace costs the host nothing it did not lend. The judge is the host's own tree: every
name, kind, mode, owner, time and byte, before and after.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import EnforcementError, InvalidArgumentError, Sandbox, Workspace

SMALL = {"disk": "8MiB", "tmp": "4MiB"}


def digest(root: Path) -> dict[str, tuple]:
    """Everything about a tree that a write would change; not the access times, which reading changes."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (".", *folders, *files):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            content = b""
            if os.path.islink(path):
                content = os.fsencode(os.readlink(path))
            elif os.path.isfile(path):
                content = hashlib.sha256(Path(path).read_bytes()).digest()
            found[path] = (state.st_mode, state.st_uid, state.st_gid, state.st_mtime_ns, state.st_ino, content)
    return found


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory of this user's own, as people have it."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp")) / "project"
    (place / "src" / "deep" / "er").mkdir(parents=True)
    (place / "docs").mkdir()
    (place / "readme.md").write_text("hello\n")
    (place / "src" / "main.py").write_text("print('main')\n")
    (place / "src" / "deep" / "er" / "leaf.txt").write_text("leaf\n")
    (place / "docs" / "guide.md").write_text("guide\n")
    (place / "private").write_text("for the owner\n")
    (place / "private").chmod(0o600)
    (place / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (place / "run.sh").chmod(0o755)
    (place / "link").symlink_to("readme.md")
    os.link(place / "readme.md", place / "hard")
    yield place
    shutil.rmtree(place.parent)


def workspace_row(sandbox: Sandbox) -> tuple[str, str]:
    return next((row.strength, row.detail) for row in sandbox.info().enforcement if row.primitive == "workspace")


EDITS = """
set -e
echo more >> readme.md
echo new > new.txt
chmod 700 run.sh
chmod 755 src
rm docs/guide.md
rmdir docs
mkdir docs && echo other > docs/other.md
mv src/deep moved
ln -s /etc/passwd outward
ln moved/er/leaf.txt twin
mv readme.md renamed.md
truncate -s 1 private
rm -rf src && mkdir -p src/again && touch -d 2001-01-01 src/again/old
: > run.sh
"""


@pytest.mark.parametrize("mode", ["ro", "overlay"])
def test_a_workspace_is_where_commands_code_and_files_start_and_belongs_to_the_user(make, project, mode):
    sandbox = make("base", workspace=Workspace(source=str(project), mode=mode))
    assert sandbox.commands.run("pwd").stdout == "/workspace\n"
    assert sandbox.run_code("import os; os.getcwd()").text == "/workspace"
    assert sandbox.commands.run("find . ! -user user -o ! -group user").stdout == ""
    assert sandbox.commands.run("cat private && ./run.sh && cat src/deep/er/leaf.txt").stdout == "for the owner\nran\nleaf\n"
    assert sandbox.files.read("/workspace/readme.md") == "hello\n"
    assert sandbox.commands.run("stat -c %a . src private run.sh").stdout.split() == [
        oct(path.stat().st_mode & 0o777)[2:] for path in (project, project / "src", project / "private", project / "run.sh")
    ]


def test_read_only_refuses_every_verb_and_the_host_is_untouched(make, project):
    before = digest(project)
    sandbox = make("plain", workspace=Workspace(source=str(project), mode="ro"))
    for line in ("echo x > new", "echo x >> readme.md", "rm readme.md", "mv src gone", "chmod 777 readme.md", "mkdir d",
                 "ln readme.md hard2", "ln -s x y", "touch readme.md", "truncate -s 0 readme.md", "mkfifo f"):  # fmt: skip
        result = sandbox.commands.run(line)
        assert not result.ok and "Read-only file system" in result.stderr, line
    assert digest(project) == before


def test_an_overlay_is_edited_freely_and_the_host_is_untouched(make, project):
    before = digest(project)
    sandbox = make("plain", workspace=project)
    result = sandbox.commands.run(EDITS)
    assert result.ok, result.stderr
    sandbox.files.write("/workspace/by-files", b"x")
    sandbox.files.make_dir("/workspace/made")
    assert sorted(sandbox.commands.run("find . -type f").stdout.split()) == [
        "./by-files", "./docs/other.md", "./hard", "./moved/er/leaf.txt", "./new.txt", "./private", "./renamed.md",
        "./run.sh", "./src/again/old", "./twin",
    ]  # fmt: skip
    assert sandbox.commands.run("cat renamed.md moved/er/leaf.txt").stdout == "hello\nmore\nleaf\n"
    assert digest(project) == before


def test_directories_of_the_lower_are_renamed_by_copying_where_the_kernel_will_not(make, project):
    """An overlay in a user namespace answers EXDEV (no redirects): mv, Python and git go on by copying."""
    sandbox = make("plain", workspace=project)
    code = "import os, shutil\ntry: os.rename('src', 'r')\nexcept OSError as e: print(e.errno == 18)\nshutil.move('src', 'moved'); print(os.listdir('moved'))"
    assert sandbox.commands.run(["python3", "-c", code]).stdout.split("\n")[0] == "True"
    assert sandbox.commands.run("mv moved again && cat again/deep/er/leaf.txt && mkdir n && mv n m").stdout == "leaf\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_works_in_an_overlay_and_the_hosts_repository_is_untouched(make, project):
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=project, check=True, env=environment)
    before = digest(project)
    sandbox = make("plain", workspace=project)
    script = """set -e
    export HOME=/tmp; git config --global user.name a; git config --global user.email a@b
    git status --porcelain; echo x >> readme.md; mv src source; git mv run.sh go.sh; git add -A; git commit -qm two; git gc -q
    git checkout -q -b other; git rm -q docs/guide.md; git commit -qm three; git log --oneline | wc -l"""
    result = sandbox.commands.run(script, timeout=60)
    assert result.ok and result.stdout.strip() == "3", result.stderr
    assert digest(project) == before


def test_what_an_overlay_takes_counts_to_the_disk_limit(make, project):
    sandbox = make("plain", workspace=project, **SMALL)
    result = sandbox.commands.run("head -c 20000000 /dev/zero > big; stat -c %s big")
    assert "No space left" in result.stderr and 1 << 20 < int(result.stdout) <= 8 << 20
    assert not sandbox.commands.run("head -c 4000000 /dev/zero > /home/user/more").ok, "one limit holds both"
    assert sorted(os.listdir(project)) == ["docs", "hard", "link", "private", "readme.md", "run.sh", "src"]


def test_two_sandboxes_on_one_directory_do_not_see_each_others_changes(make, project):
    one, two = make("plain", workspace=project), make("plain", workspace=project)
    one.commands.run("echo mine > readme.md; echo mine > mine")
    assert two.commands.run("cat readme.md; ls mine").stdout == "hello\n"


def test_enforcement_shows_the_workspace_its_mode_and_where_it_comes_from(make, project):
    (project.parent / "shortcut").symlink_to(project)
    for mode in ("ro", "overlay"):
        sandbox = make("plain", workspace=Workspace(source=str(project.parent / "shortcut"), mode=mode))
        strength, detail = workspace_row(sandbox)
        assert strength == "hard" and detail.startswith(f"{mode}, from {project}: ")
        assert str(project) not in sandbox.commands.run("cat /proc/self/mountinfo /proc/self/mounts").stdout
    assert "workspace" not in [row.primitive for row in make("plain").info().enforcement]


def test_a_link_is_followed_once_and_never_again(make, project):
    shortcut, other = project.parent / "shortcut", project.parent / "other"
    other.mkdir()
    (other / "secret").write_text("secret")
    shortcut.symlink_to(project)
    sandbox = make("plain", workspace=shortcut)
    shortcut.unlink()
    shortcut.symlink_to(other)
    assert sandbox.commands.run("ls").stdout.split() == ["docs", "hard", "link", "private", "readme.md", "run.sh", "src"]


def test_a_relative_path_counts_from_where_the_caller_was(make, project, monkeypatch):
    monkeypatch.chdir(project)
    assert make("plain", workspace=".").commands.run("cat readme.md").stdout == "hello\n"
    assert make("plain", workspace={"source": "src", "mode": "ro"}).commands.run("ls").stdout == "deep\nmain.py\n"


def test_the_policy_lends_and_the_option_replaces_it(make, project):
    policy = {"filesystem": {"workspace": {"source": str(project), "mode": "ro"}}}
    assert make("plain", policy=policy).commands.run("pwd; cat readme.md").stdout == "/workspace\nhello\n"
    with_docs = make("plain", policy=policy, workspace=str(project / "docs"))
    assert with_docs.commands.run("ls").stdout == "guide.md\n"
    without = make("plain", policy=policy, workspace=Workspace(source=str(project), mode="none"))
    assert without.commands.run("pwd; ls /workspace").stdout == "/home/user\n"


def test_directories_to_read_appear_at_their_own_path_and_cannot_be_written(make, project):
    (project / "docs").rename(project / "dö cs")
    before = digest(project)
    docs, source = str(project / "dö cs"), str(project / "src")
    sandbox = make("plain", policy={"filesystem": {"read_only": [docs, source]}})
    assert sandbox.commands.run(f"pwd; cat '{docs}/guide.md'; cat {source}/deep/er/leaf.txt").stdout == "/home/user\nguide\nleaf\n"
    assert sandbox.commands.run(f"ls -A {project}").stdout == "dö cs\nsrc\n", "nothing beside them"
    for line in (f"echo x > '{docs}/guide.md'", f"rm -rf '{docs}'", f"mv {source} {source}2"):
        assert not sandbox.commands.run(line).ok, line
    rows = {row.primitive: row for row in sandbox.info().enforcement}
    assert rows[f"read-only directory {docs}"].strength == "hard"
    assert digest(project) == before


def test_sockets_and_pipes_of_the_host_are_dead_below_a_workspace(make, project):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(project / "socket"))
    listener.listen()
    os.mkfifo(project / "pipe")
    reader = os.open(project / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    code = """
import os, socket
try: socket.socket(socket.AF_UNIX).connect("socket"); print("connected")
except OSError as error: print(error.strerror)
try: os.write(os.open("pipe", os.O_WRONLY | os.O_NONBLOCK), b"x"); print("written")
except OSError as error: print(error.strerror)
"""
    try:
        for mode in ("ro", "overlay"):
            sandbox = make("plain", workspace=Workspace(source=str(project), mode=mode))
            assert sandbox.commands.run(["python3", "-c", code]).stdout == "Connection refused\nNo such device or address\n"
        control = subprocess.run(["python3", "-c", code], cwd=project, capture_output=True, text=True, check=True)
        assert control.stdout == "connected\nwritten\n"
    finally:
        listener.close()
        os.close(reader)


@pytest.mark.parametrize("source", ["/", "/etc", "/proc", "/proc/self", "/sys", "/sys/kernel", "/dev", "/home", "/var", "/run"])
def test_a_directory_that_is_too_much_to_lend_is_refused(source):
    if not os.path.isdir(source):
        pytest.skip(f"there is no {source} here")
    with pytest.raises(EnforcementError) as caught:
        Sandbox("plain", workspace=source)
    assert caught.value.primitive == "host directory" and caught.value.hint


def test_credentials_are_refused_through_a_link_too(project):
    keys = project / ".ssh"
    keys.mkdir()
    (project / "innocent").symlink_to(keys)
    for source in (keys, project / "innocent"):
        with pytest.raises(EnforcementError, match="credentials"):
            Sandbox("plain", workspace=source)
        with pytest.raises(EnforcementError, match="credentials"):
            Sandbox("plain", policy={"filesystem": {"read_only": [str(source)]}})


@pytest.mark.parametrize("place", ["/usr/share", "/etc", "/proc", "/opt", "/dev/shm"])
def test_a_directory_to_read_covers_nothing_of_the_sandbox(place):
    if not os.path.isdir(place):
        pytest.skip(f"there is no {place} here")
    with pytest.raises(EnforcementError) as caught:
        Sandbox("plain", policy={"filesystem": {"read_only": [place]}})
    assert caught.value.primitive == "host directory" and caught.value.hint


def test_what_is_no_directory_is_refused(project):
    for source in (project / "missing", project / "readme.md"):
        with pytest.raises(InvalidArgumentError) as caught:
            Sandbox("plain", workspace=source)
        assert caught.value.hint
    for source in ("", "a\0b", b"bytes", 7):
        with pytest.raises((InvalidArgumentError, ValueError)):
            Sandbox("plain", workspace=source)


@pytest.mark.root
def test_mounts_below_a_workspace_are_refused_with_their_name(project):
    subprocess.run(["mount", "-t", "tmpfs", "none", str(project / "docs")], check=True)
    try:
        with pytest.raises(EnforcementError, match="is mounted below") as caught:
            Sandbox("plain", workspace=project)
        assert caught.value.hint
    finally:
        subprocess.run(["umount", str(project / "docs")], check=True)


@pytest.mark.root
def test_what_the_host_mounts_later_does_not_appear_inside(make, project):
    sandbox = make("plain", workspace=project)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(project / "docs")], check=True)
    try:
        (project / "docs" / "later").write_text("x")
        assert sandbox.commands.run("ls docs").stdout == "guide.md\n"
    finally:
        subprocess.run(["umount", str(project / "docs")], check=True)


@pytest.mark.root
def test_a_tmpfs_is_lent_and_an_overlay_is_refused_with_a_hint(make, project):
    place = project.parent / "mounted"
    place.mkdir()
    for kind, options in (("tmpfs", "mode=755"), ("overlay", f"lowerdir={project}/src:{project}/docs")):
        subprocess.run(["mount", "-t", kind, "-o", options, "none", str(place)], check=True)
        try:
            if kind == "tmpfs":
                (place / "a").write_text("a")
                sandbox = make("plain", workspace=place)
                assert sandbox.commands.run("cat a; echo b > a; cat a").stdout == "ab\n"
                assert (place / "a").read_text() == "a"
                sandbox.kill()
            else:
                with pytest.raises(EnforcementError) as caught:
                    Sandbox("plain", workspace=place)
                assert caught.value.primitive == "host directory" and caught.value.hint
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)


def test_refused_and_ended_workspaces_leave_nothing_open_in_the_launcher(project):
    from leftovers import descendants, launcher_pid

    def held() -> tuple[set[int], int]:
        return descendants(launcher_pid()), len(os.listdir(f"/proc/{launcher_pid()}/fd"))

    def use() -> None:
        Sandbox("plain", workspace=project).kill()
        with pytest.raises(EnforcementError):
            Sandbox("plain", workspace=project, policy={"filesystem": {"read_only": ["/etc"]}})

    use()
    before = held()
    for _ in range(3):
        use()
    deadline = time.monotonic() + 60
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == before
