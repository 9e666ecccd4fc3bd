"""The laws of a capture: what a sandbox changed below its workspace, whole, under a sandbox that stands still.

Guards against a review of something else than what is there: names, kinds, modes, targets, bytes and deletions are
compared with what the sandbox did, as every kind of user.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import CaptureError, EnforcementError, Sandbox, SandboxDeadError, Workspace
from ringfence.node.capture import Entry, read_capture
from ringfence.node.node import Node


@pytest.fixture
def project() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp")) / "project"
    (place / "src" / "deep").mkdir(parents=True)
    (place / "old").mkdir()
    (place / "keep").write_text("keep\n")
    (place / "gone").write_text("gone\n")
    (place / "src" / "main.py").write_text("print(1)\n")
    (place / "src" / "deep" / "leaf").write_text("leaf\n")
    (place / "old" / "inside").write_text("inside\n")
    yield place
    shutil.rmtree(place.parent)


def capture(sandbox: Sandbox, during: Any = None) -> tuple[dict[bytes, tuple[Entry, bytes]], dict[str, Any]]:
    """(path -> entry and content, the launcher's answer)."""
    handle = Node.current().find(sandbox.sandbox_id)
    assert handle is not None
    receive, send = os.pipe()
    try:
        done = handle.capture(send)
    finally:
        os.close(send)
    found = {}
    with os.fdopen(receive, "rb") as stream:
        if during is not None:
            during()
        try:
            for entry in read_capture(stream):
                found[entry.path] = (entry, b"".join(entry.content or ()))
        except CaptureError:
            done.wait(60)  # says why it was refused, if it was
            raise
    return found, done.wait(60)


def test_a_capture_holds_exactly_what_was_changed(make, project):
    sandbox = make("plain", workspace=project)
    script = """set -e
    echo new > src/new; echo more >> src/main.py; rm gone; chmod 4 src/new; ln -s ../../etc/passwd src/link
    rm -rf old; mkdir old; echo again > old/other; mkfifo pipe; mkdir -p a/b/c; mv src/deep moved
    truncate -s 5000000 sparse; printf end >> sparse; touch -d '2001-02-03 04:05:06 UTC' a/b/c/dated"""
    result = sandbox.commands.run(script)
    assert result.ok, result.stderr
    found, answer = capture(sandbox)
    assert answer["frozen"] is True
    kinds = {path: entry.kind for path, (entry, _) in found.items()}
    assert kinds == {
        b"": "directory", b"a": "directory", b"a/b": "directory", b"a/b/c": "directory", b"a/b/c/dated": "file",
        b"gone": "whiteout", b"moved": "directory", b"moved/leaf": "file", b"old": "directory", b"old/other": "file",
        b"pipe": "other", b"sparse": "file", b"src": "directory", b"src/deep": "whiteout", b"src/link": "link",
        b"src/main.py": "file", b"src/new": "file",
    }  # fmt: skip
    assert found[b"src/main.py"][1] == b"print(1)\nmore\n" and found[b"src/new"][1] == b"new\n"
    assert found[b"sparse"][1] == bytes(5_000_000) + b"end" and found[b"moved/leaf"][1] == b"leaf\n"
    assert found[b"src/link"][0].target == b"../../etc/passwd" and found[b"src/new"][0].mode == 0o004
    assert found[b"a/b/c/dated"][0].mtime_ns == 981173106 * 10**9
    assert {path for path, (entry, _) in found.items() if entry.opaque} == {b"old"}
    assert not any(entry.strange for entry, _ in found.values())
    assert (project / "gone").read_text() == "gone\n"


def test_a_capture_of_nothing_is_the_workspace_alone(make, project):
    found, answer = capture(make("plain", workspace=project))
    assert list(found) == [b""] and answer["frozen"] is True


def test_a_sandbox_stands_still_while_it_is_captured_and_goes_on_after(make, project):
    sandbox = make("plain", workspace=project)
    busy = sandbox.commands.run(
        "i=0; while :; do i=$((i+1)); echo $i > left; echo $i > right; done", background=True, timeout=None
    )
    deadline = time.monotonic() + 60
    while not sandbox.files.exists("/workspace/right") and time.monotonic() < deadline:
        pass
    for _ in range(5):
        found, answer = capture(sandbox, during=lambda: time.sleep(0.05))
        assert answer["frozen"] is True
        left, right = int(found[b"left"][1] or 0), int(found[b"right"][1] or 0)
        assert left == 0 or right == 0 or left - right in (0, 1), "two moments in one capture"
    before = sandbox.files.read("/workspace/left")
    deadline = time.monotonic() + 60
    while sandbox.files.read("/workspace/left") == before and time.monotonic() < deadline:
        pass
    assert sandbox.files.read("/workspace/left") != before, "it goes on"
    busy.kill()


def test_a_paused_sandbox_is_captured_and_stays_paused(make, project, strength):
    sandbox = make("plain", workspace=project)
    sandbox.files.write("/workspace/made", b"x")
    handle = Node.current().find(sandbox.sandbox_id)
    assert handle is not None
    try:
        handle.pause().wait(60)
    except EnforcementError:
        pytest.skip("no freezer for this user")
    found, answer = capture(sandbox)
    assert b"made" in found and answer["frozen"] is True
    answered = threading.Event()
    thread = threading.Thread(target=lambda: (sandbox.commands.run("true", timeout=60), answered.set()))
    thread.start()
    assert not answered.wait(0.3)
    handle.resume().wait(60)
    thread.join(60)
    assert answered.is_set()


def test_only_an_overlay_holds_changes_back(make, project):
    for sandbox in (make("plain"), make("plain", workspace=Workspace(source=str(project), mode="ro"))):
        with pytest.raises(EnforcementError) as caught:
            capture(sandbox)
        assert "held back" in str(caught.value) and caught.value.hint


def test_a_reader_that_goes_away_harms_nothing(make, project):
    sandbox = make("plain", workspace=project)
    sandbox.commands.run("head -c 5000000 /dev/urandom > big")
    handle = Node.current().find(sandbox.sandbox_id)
    assert handle is not None
    receive, send = os.pipe()
    done = handle.capture(send)
    os.close(send)
    os.close(receive)
    with pytest.raises(EnforcementError):
        done.wait(60)
    assert sandbox.commands.run("echo on").stdout == "on\n"
    assert len(capture(sandbox)[0][b"big"][1]) == 5_000_000


def test_a_sandbox_that_is_killed_meanwhile_ends_its_capture(make, project):
    sandbox = make("plain", workspace=project)
    sandbox.commands.run("head -c 5000000 /dev/urandom > big")
    handle = Node.current().find(sandbox.sandbox_id)
    assert handle is not None
    receive, send = os.pipe()
    done = handle.capture(send)
    os.close(send)
    sandbox.kill()
    os.close(receive)
    with pytest.raises((EnforcementError, SandboxDeadError)):
        done.wait(60)
