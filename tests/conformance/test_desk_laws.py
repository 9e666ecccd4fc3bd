"""Sandboxes of other processes of the same user: listed, read and ended; and by nobody else."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.node import presence

COMMAND = [sys.executable, "-c", "from ringfence.cli.entry import main; main()"]
PATIENCE = 60.0
CLONE_NEWUSER = 0x10000000

OWNER = """
import sys
from ringfence import Sandbox
with Sandbox("base", metadata={"job": "\\x1b]0;owned\\x07nightly"}) as sandbox:
    sandbox.run_code("import sys; print('out'); sys.stdout.write('\\\\x1b]52;c;eA==\\\\x07\\\\n'); print('err', file=sys.stderr)")
    command = sandbox.commands.run("echo begun; read line; echo got $line", background=True, stdin=True)
    print(sandbox.id, flush=True)
    sys.stdin.readline()
    command.send_stdin("more\\n")
    command.wait()
    sys.stdin.readline()
    print("alive" if sandbox.is_running() else "ended", flush=True)
"""


def ringfence(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *words], capture_output=True, timeout=PATIENCE, check=False)


def listed(identifier: str) -> dict[str, Any] | None:
    return next((row for row in json.loads(ringfence("ls", "--json").stdout) if row["id"] == identifier), None)


class Owner:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.id = self.process.stdout.readline().decode().strip()
        assert self.id, "the owner started no sandbox"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def ends(self) -> bytes:
        self.go_on()
        return self.process.communicate(timeout=PATIENCE)[0]


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.process.kill()
    made.process.wait()
    for stream in (made.process.stdin, made.process.stdout):
        assert stream is not None
        stream.close()


def test_a_sandbox_of_another_process_is_listed_read_and_killed(owner: Owner) -> None:
    row = listed(owner.id)
    assert row is not None
    assert (row["template"], row["state"], row["owner"]) == ("base", "running", owner.process.pid)
    assert row["metadata"] == {"job": "\x1b]0;owned\x07nightly"} and row["memory"] > 0 and row["age"] >= 0
    table = ringfence("ls").stdout
    assert owner.id.encode() in table and b"\x1b" not in table and b"nightly" in table  # S133

    shown = ringfence("logs", owner.id)
    assert shown.stdout == b"out\n\x1b]52;c;eA==\x07\nbegun\n" and shown.stderr == b"err\n" and shown.returncode == 0
    entries = [json.loads(line) for line in ringfence("logs", owner.id[:8], "--json").stdout.splitlines()]
    assert [(each["kind"], each["ended"] is None) for each in entries] == [("code", False), ("command", True)]

    done = ringfence("kill", owner.id, "--json")
    assert json.loads(done.stdout) == {"killed": [owner.id], "failed": []} and done.returncode == 0
    assert listed(owner.id) is None
    assert ringfence("kill", owner.id).returncode == 1
    assert ringfence("logs", owner.id).returncode == 1


def test_a_log_is_followed_to_the_end_of_its_sandbox(owner: Owner) -> None:
    process = subprocess.Popen([*COMMAND, "logs", "-f", owner.id], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    seen = b""
    while b"begun\n" not in seen:
        seen += process.stdout.readline()
    owner.go_on()
    while b"got more\n" not in seen:
        seen += process.stdout.readline()
    assert ringfence("kill", owner.id).returncode == 0
    rest, _ = process.communicate(timeout=PATIENCE)
    assert (seen + rest).count(b"begun\n") == 1 and process.returncode == 0


def test_an_owner_that_does_not_answer_is_listed_by_the_kernels_word_and_killed_all_the_same(owner: Owner) -> None:
    row = listed(owner.id)
    assert row is not None
    os.kill(owner.process.pid, 19)  # SIGSTOP
    try:
        rows = json.loads(ringfence("ls", "--json").stdout)
        assert [each["id"] for each in rows if each["pid"] == row["pid"]] == [""]
        assert ringfence("kill", str(row["pid"])).returncode == 0
    finally:
        os.kill(owner.process.pid, 18)
    owner.go_on()
    assert owner.process.wait(PATIENCE) != 0 or True  # whatever it makes of it, its sandbox is gone
    assert all(each["pid"] != row["pid"] for each in json.loads(ringfence("ls", "--json").stdout))


def test_an_owner_that_ends_leaves_no_entry_and_a_forked_child_of_it_none_either(sandbox: Sandbox) -> None:
    assert any(each.pid == os.getpid() for each in presence.entries())
    code = (
        "import os, sys, time\nfrom ringfence import Sandbox\nSandbox('plain').kill()\n"
        "if os.fork() == 0:\n    sys.stdin.readline(); os._exit(0)\nprint(os.getpid(), flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    pid = int(process.stdout.readline())
    process.wait(PATIENCE)
    assert all(each.pid != pid for each in presence.entries())
    process.stdin.close()
    process.stdout.close()


def test_what_a_killed_owner_left_is_removed_and_never_taken_for_another_process() -> None:
    place = presence._own_directory()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    left = [Path(place, f"node-{os.getpid()}-1-{namespace}"), Path(place, f"node-4194304-5-{namespace}")]
    foreign = Path(place, f"node-{os.getpid()}-1-7")  # another pid namespace: alive for all we know
    for path in (*left, foreign):
        with socket.socket(socket.AF_UNIX) as listener:
            directory = os.open(place, os.O_PATH)
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
            os.close(directory)
    found = presence.entries()
    assert not any(path.name == each.name for path in (*left, foreign) for each in found)
    assert not any(path.exists() for path in left) and foreign.exists()
    foreign.unlink()


def _asks(listener: socket.socket, change: Any) -> bool:
    """Whether `peer_is_ours` says yes to a child that did `change` and connected to `listener`."""
    ready, going = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(going)
            change()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(listener.getsockname())
                os.read(ready, 1)
        finally:
            os._exit(0)
    os.close(ready)
    try:
        listener.settimeout(PATIENCE)
        connection, _ = listener.accept()
        with connection:
            return presence.peer_is_ours(connection)
    finally:
        os.close(going)
        os.waitpid(child, 0)


@pytest.fixture
def open_to_all() -> Iterator[socket.socket]:
    """A socket that everybody can reach: what is left when the directory's mode does not hold."""
    with tempfile.TemporaryDirectory(prefix="ringfence-test-", dir="/var/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        listener.bind(folder + "/desk")
        os.chmod(folder + "/desk", 0o777)
        listener.listen(4)
        yield listener


def test_another_user_is_not_answered(open_to_all: socket.socket) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    assert not _asks(open_to_all, lambda: os.setresuid(65534, 65534, 65534))
    assert _asks(open_to_all, lambda: None)  # the control


def test_a_process_of_another_user_namespace_is_not_answered_though_its_uid_is_ours(open_to_all: socket.socket) -> None:
    library = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        if library.unshare(CLONE_NEWUSER):
            os._exit(1)

    assert not _asks(open_to_all, enter)
    assert _asks(open_to_all, lambda: None)  # the control


def test_the_directory_is_ours_alone_or_not_used(sandbox: Sandbox) -> None:
    place = presence._own_directory()
    assert os.stat(place).st_mode & 0o077 == 0 and os.stat(place).st_uid == os.geteuid()
    with tempfile.TemporaryDirectory(prefix="ringfence-test-", dir="/var/tmp") as folder:
        os.mkdir(folder + "/open", 0o755)
        with pytest.raises(PermissionError, match="not ours alone"):
            presence._open(folder + "/open")
        os.symlink(place, folder + "/link")
        with pytest.raises(OSError):
            presence._open(folder + "/link")
        os.close(presence._open(place))  # the control


def test_no_sandbox_has_the_directory(sandbox: Sandbox) -> None:
    place = presence._own_directory()
    assert sandbox.commands.run(["ls", "-d", place]).exit_code != 0
    assert sandbox.commands.run("find / -xdev -name 'node-*-*-*' 2>/dev/null; grep node- /proc/net/unix").stdout == ""


def test_a_visitor_that_says_nothing_or_nonsense_holds_nobody_up(sandbox: Sandbox) -> None:
    mine = next(each for each in presence.entries() if each.pid == os.getpid())
    silent = [presence.connect(mine) for _ in range(40)]
    try:
        assert sandbox.run_code("1 + 1").text == "2"
        for raw in (b"\x00\xff\n", b"[" * 60000 + b"\n", b'{"do": "fly"}\n', b'{"do": "kill", "id": {}}\n', b"x" * 200000):
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                if silent:
                    silent.pop().close()  # room for one more
                with presence.connect(mine) as visitor:
                    try:
                        visitor.sendall(raw)
                        answer = visitor.recv(1000)
                    except ConnectionError:
                        answer = b""
                if answer or raw.startswith(b"x"):
                    break
            assert not answer or "error" in json.loads(answer)
        assert sandbox.run_code("2 + 2").text == "4"
    finally:
        for each in silent:
            each.close()
