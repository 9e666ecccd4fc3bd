"""Attacks on host directories that were lent, each with the control that it works where nothing holds it.

The judge is the host: a digest of the directory's whole tree, canaries beside it, and what a capture says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena import STOPPED, canary, inside, outside

from ringfence import Sandbox, Workspace
from ringfence.node.capture import read_capture
from ringfence.node.node import Node

MODES = ("ro", "overlay")


def fill(place: Path) -> Path:
    (place / "directory").mkdir(parents=True)
    for name in ("file", "other", "directory/inside"):
        (place / name).write_text(f"{name} of the host\n")
    return place


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory in a place that is the same for every kind of user; a secret lies beside it."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp"))
    (place / "secret").write_text(canary())
    yield fill(place / "project")
    shutil.rmtree(place)


def digest(root: Path) -> dict[str, tuple]:
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (".", *folders, *files):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else ""
            attributes = os.listxattr(path, follow_symlinks=False)
            found[path] = (state.st_mode, state.st_uid, state.st_ino, state.st_mtime_ns, state.st_nlink, content, tuple(attributes))
    return found


def captured(sandbox: Sandbox) -> dict[bytes, tuple[str, bytes, tuple[str, ...]]]:
    handle = Node.current().find(sandbox.sandbox_id)
    assert handle is not None
    receive, send = os.pipe()
    done = handle.capture(send)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        found = {each.path: (each.kind, b"".join(each.content or ()), each.strange) for each in read_capture(stream)}
    assert done.wait(60)["frozen"] is True
    return found


WRITES = ("write", "append", "truncate", "descriptor again", "directory again", "shared map", "hard link", "chmod",
          "times", "attribute", "exchange", "unlink")  # fmt: skip


def test_no_verb_and_no_trick_changes_the_hosts_directory(make, project, tmp_path):
    before = digest(project.parent)
    control = outside("workspace", cwd=fill(tmp_path / "control"))
    assert {name for name in WRITES if control[name] != "done"} == set(), "the control does not attack"
    for mode in MODES:
        sandbox = make(workspace=Workspace(source=str(project), mode=mode))
        answers = inside(sandbox, "workspace")
        expected = "EROFS" if mode == "ro" else "done"
        assert {name: answers[name] for name in WRITES if answers[name] != expected} == {}, mode
        for name in ("set-id", "set-id file", "device", "unmount", "remount", "bind"):
            assert answers[name] != "done", (mode, name)
        assert answers["upwards"] == "done" and "secret" not in answers["upwards names"] and "usr" in answers["upwards names"]
        for place in ("/mnt/x", "/mnt/y", "/mnt/l0", "/mnt/u", "/mnt/r"):
            assert answers[f"enter {place}"] == "ENOENT", "a layer has a path inside"
        assert answers["unmount"] in STOPPED and answers["remount"] in STOPPED and answers["bind"] in STOPPED
        assert digest(project.parent) == before, mode


def test_forged_marks_of_the_overlay_reach_nothing_and_are_told(make, project, tmp_path):
    control = outside("workspace", cwd=fill(tmp_path / "control"))
    assert control["forge user.overlay.redirect on ."] == "done", "the control does not attack"
    sandbox = make(workspace=project)
    answers = inside(sandbox, "workspace")
    forged = {name: answer for name, answer in answers.items() if name.startswith("forge ")}
    assert all(answer != "done" for name, answer in forged.items() if " trusted." in name)
    assert "passwd" not in sandbox.commands.run("ls -a . directory renamed 2>/dev/null").stdout
    # What the kernel let through, it escaped: it means nothing to the overlay, and a capture names it.
    passed = {name.split()[1] for name, answer in forged.items() if answer == "done" and name.endswith(" on .")}
    told = captured(sandbox)[b""][2]
    assert set(told) == {name.replace("user.overlay.", "user.overlay.overlay.", 1) for name in passed}


def test_marks_forged_in_the_hosts_directory_lead_nowhere(make, project):
    """An earlier `rw` sandbox, or an archive, may have left them there."""
    (project.parent / "outside").mkdir()
    (project.parent / "outside" / "canary").write_text(canary())
    try:
        os.setxattr(project / "directory", "user.overlay.redirect", b"/../outside")
        os.setxattr(project / "file", "user.overlay.redirect", b"/../secret")
        os.setxattr(project / "file", "user.overlay.metacopy", b"")
        os.setxattr(project / "directory", "user.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"no user attributes on this file system: {error}")
    before = digest(project.parent)
    for mode in MODES:
        sandbox = make(workspace=Workspace(source=str(project), mode=mode))
        assert sandbox.commands.run("ls directory").stdout == "inside\n"
        shown = sandbox.commands.run("cat file")
        # A file that says its content lies elsewhere: the kernel follows nothing, and refuses it in an overlay.
        assert shown.stdout == "file of the host\n" or (mode, shown.stdout, shown.ok) == ("overlay", "", False)
    assert digest(project.parent) == before


def test_links_in_a_workspace_resolve_inside_the_sandbox(make, project):
    secret = (project.parent / "secret").read_text()
    (project / "absolute").symlink_to(project.parent / "secret")
    (project / "relative").symlink_to("../secret")
    (project / "proc").symlink_to("/proc/1/root" + str(project.parent / "secret"))
    (project / "up").symlink_to("../../../../../../" + str(project.parent).lstrip("/"))
    assert (project / "absolute").read_text() == (project / "relative").read_text() == (project / "up/secret").read_text() == secret
    for mode in MODES:
        sandbox = make(workspace=Workspace(source=str(project), mode=mode))
        output = sandbox.commands.run("cat absolute relative proc up/secret ../secret; find -L . -type f -exec cat {} +")
        assert secret not in output.stdout and "file of the host" in output.stdout


@pytest.mark.root
def test_set_id_programs_and_devices_of_a_workspace_give_nothing(make, project):
    shutil.copy("/usr/bin/id", project / "id")
    (project / "id").chmod(0o6755)
    os.mknod(project / "zero", 0o666 | 0o020000, os.makedev(1, 5))
    project.parent.chmod(0o755)
    control = subprocess.run(
        ["setpriv", "--reuid=64999", "--clear-groups", project / "id", "-u"], capture_output=True, text=True, check=True
    )
    assert control.stdout == "0\n" and (project / "zero").open("rb").read(1) == b"\0", "the control does not attack"
    for mode in MODES:
        sandbox = make(workspace=Workspace(source=str(project), mode=mode))
        assert sandbox.commands.run("./id -u; ./id -g").stdout == "1000\n1000\n"
        result = sandbox.commands.run("head -c 1 zero")
        assert not result.ok and "Permission denied" in result.stderr


EXCHANGING = """
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs("swapped"); open("swapped/secret", "w").write("mine")
os.symlink(os.environ["OUT"], "link")
print("began", flush=True)
number = 316 if os.uname().machine == "x86_64" else 276
while True: libc.syscall(ctypes.c_long(number), -100, b"swapped", -100, b"link", 2)
"""


def test_a_name_that_changes_all_the_time_is_never_followed_out_by_a_capture(make, project):
    secret = (project.parent / "secret").read_text()
    sandbox = make(workspace=project, envs={"OUT": str(project.parent)})
    racing = sandbox.commands.run(["python3", "-c", EXCHANGING], background=True, timeout=None)
    for _ in range(200):
        if sandbox.files.exists("/workspace/link"):
            break
    seen = set()
    for _ in range(15):
        found = captured(sandbox)
        assert all(secret.encode() not in content for _, content, _ in found.values())
        seen.add(found.get(b"swapped", found[b""])[0])
    assert seen <= {"directory", "link"}
    racing.kill()


def test_a_source_that_is_exchanged_while_it_is_opened_is_one_or_the_other_and_info_says_which(project):
    other = fill(project.parent / "elsewhere")
    for place in (project, other):
        (place / "name").write_text(str(place))
    shortcut, spare = project.parent / "shortcut", project.parent / "spare"
    shortcut.symlink_to(project)
    over = threading.Event()

    def swap() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            spare.symlink_to((project, other)[turn % 2])
            spare.rename(shortcut)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(8):
            with Sandbox("plain", workspace=shortcut) as sandbox:
                shown = sandbox.commands.run("cat name").stdout
                detail = next(row.detail for row in sandbox.info().enforcement if row.primitive == "workspace")
                assert shown in (str(project), str(other)) and detail.startswith(f"overlay, from {shown}: ")
    finally:
        over.set()
        thread.join()
