"""Classes A and C with a root inside: what holds `user` holds uid 0 of a sandbox as well, and the agent survives it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from arena import PROBES, SMALL, STOPPED, assert_answers, equip, inside, outside, until

from ringfence import EnforcementError, Sandbox

ROOT_CAPABILITIES = "00000000000000fb"  # CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID


@pytest.fixture
def rooted() -> Iterator[Callable[..., Sandbox]]:
    """Makes small sandboxes with root and the probes in them."""
    made: list[Sandbox] = []

    def start(**options) -> Sandbox:
        try:
            made.append(Sandbox(root=True, **{**SMALL, **options}))
        except EnforcementError as refusal:
            assert "uidmap" in refusal.hint
            pytest.skip("this user has one id: root inside is refused")
        return equip(made[-1])

    yield start
    for sandbox in made:
        sandbox.kill()


def as_root(sandbox: Sandbox, probe: str, *arguments: object) -> dict:
    """What the probe said when root ran it inside."""
    result = sandbox.commands.run(["python3", f"/home/user/probes/{probe}.py", *map(str, arguments)], user="root", timeout=60)
    assert result.exit_code == 0, f"the probe broke off: {result.stderr[-2000:]}"
    return dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))


def control() -> dict:
    """The same probe by the machine's root against a process that may die: each attempt has to work somewhere."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        try:
            # In a mount, pid and host name space of its own, so that what works there touches nothing of the machine.
            result = subprocess.run(
                ["unshare", "--mount", "--uts", "--propagation", "private", sys.executable, PROBES / "root.py", str(victim.pid)],
                capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            return dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
        finally:
            victim.kill()


def test_root_gains_nothing_and_reaches_neither_agent_nor_kernel(rooted):
    sandbox = rooted()
    found = as_root(sandbox, "root", 1)
    status = found.pop("status")
    assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd")} == {ROOT_CAPABILITIES}
    assert status["CapInh"] == status["CapAmb"] == "0" * 16 and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert found.pop("kernel files opened for writing") == []
    assert found.pop("mode") == "0o6755" and found.pop("set-id gave") == "1000"
    # The kernel drops a signal from inside that process 1 has no handler for; for this one call it says so by success.
    dropped = {name for name, answer in found.items() if name.startswith("pidfd ") and answer == "done"}
    through = {name: answer for name, answer in found.items() if answer == "done" and name not in dropped}
    assert not through, f"root got through: {through}"
    assert len(found) > 80
    assert_answers(sandbox)


@pytest.mark.skipif(os.geteuid() != 0, reason="the control attacks as the machine's root")
def test_the_same_attempts_work_where_nothing_holds_them():
    found = control()
    assert found["set-id gave"] == "0"
    done = {name for name, answer in found.items() if answer == "done"}
    for name in ("open environ", "open mem", "open maps", "open fd/0", "write oom_score_adj", "become 65533", "become 70000",
                 "chown to 65533", "group 70000", "mount tmpfs", "new mount", "new network", "new user",
                 "host name", "chroot", "mknod whiteout", "xattr trusted.x"):  # fmt: skip
        assert name in done, name


def test_refused_system_calls_stay_refused_for_root(rooted):
    sandbox = rooted()
    found = as_root(sandbox, "system_calls")
    got_through = {name: answer for name, answer in found.items() if answer not in STOPPED and name != "setns"}
    assert not got_through, f"these calls reach the kernel: {got_through}"
    assert {name for name, answer in as_root(sandbox, "sockets").items() if answer == "done"} == {
        name for name, answer in inside(sandbox, "sockets").items() if answer == "done"
    }


@pytest.mark.parametrize("number", [9, 15])
def test_root_killing_everything_leaves_a_sandbox_that_answers(rooted, neighbour, number):
    sandbox = rooted()
    assert sandbox.run_code("6 * 7").text == "42"
    code = f"import os, time\nfor n in range(30):\n    try: os.kill(-1, {number})\n    except OSError: pass\n    time.sleep(0.01)"
    sandbox.commands.run(["python3", "-c", code], user="root", timeout=30)
    sandbox.run_code("after = 1", timeout=20)  # reports the kernel's death
    assert_answers(sandbox, 20)
    assert sandbox.commands.run("sudo id -u", timeout=30).stdout == "0\n"


def test_a_fork_bomb_of_root_under_many_ids_is_bounded_and_ends(rooted, neighbour):
    sandbox = rooted()
    code = (
        "import os, sys, time\nos.setgroups([])\nmade = 0\n"
        "for uid in range(2000):\n"
        "    try:\n"
        "        if not os.fork():\n"
        "            os.setsid()\n            os.setresuid(uid % 1900, uid % 1900, uid % 1900)\n            time.sleep(600)\n"
        "        made += 1\n"
        "    except OSError: break\n"
        "print('made', made, flush=True)\ntime.sleep(600)\n"
    )
    handle = until(sandbox.commands.run(["python3", "-c", code], user="root", background=True), "made", 60)
    assert int(handle.stdout.split()[1]) <= SMALL["pids"] + 4
    handle.kill()
    left = sandbox.commands.run("sleep 0.1; pgrep -fc 'time.sleep\\(600\\)' || true", timeout=30).stdout
    assert left.strip() in ("0", "1")  # pgrep's own shell has the words on its command line
    assert_answers(sandbox, 20)


def test_memory_and_disk_of_root_are_bounded(rooted, neighbour):
    sandbox = rooted()
    result = sandbox.commands.run(["python3", "-c", "x = bytearray(1 << 30); x[:] = b'x' * len(x); print('got it')"], user="root", timeout=60)
    assert "got it" not in result.stdout
    if sandbox.is_running():
        wrote = sandbox.commands.run("cat /dev/zero > /usr/local/fill; stat -c %s /usr/local/fill; rm -f /usr/local/fill", user="root", timeout=60)
        assert "No space left" in wrote.stderr and int(wrote.stdout) <= 32 << 20


def test_an_inotify_hog_of_root_hurts_nobody_else(rooted, neighbour):
    sandbox = rooted()
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nmade = 0\n"
        "for uid in [0] * 40 + list(range(1, 80)):\n"
        "    os.setresuid(uid, uid, 0)\n"
        "    if libc.inotify_init() >= 0: made += 1\n"
        "    os.setresuid(0, 0, 0)\n"
        "print(made)"
    )
    assert int(sandbox.commands.run(["python3", "-c", code], user="root").stdout) <= 16


def test_requests_to_sudo_that_are_none_leave_the_agent_alone(rooted):
    sandbox = rooted()
    code = (
        "import os, socket, struct, json\n"
        "def ask(raw, descriptors=4, length=None):\n"
        "    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:\n"
        "        s.connect('\\0ringfence-sudo'); s.settimeout(10)\n"
        "        fds = [os.open('/', os.O_RDONLY) for _ in range(descriptors)]\n"
        "        try:\n"
        "            head = struct.pack('!I', len(raw) if length is None else length)\n"
        "            socket.send_fds(s, [head], fds) if fds else s.sendall(head)\n"
        "            s.sendall(raw); s.shutdown(socket.SHUT_WR)\n"
        "            while s.recv(4096): pass\n"
        "        except OSError: pass\n"
        "        finally: [os.close(fd) for fd in fds]\n"
        "good = dict(argv=['/usr/bin/true'], env=[], uid=0, gid=0, groups=[0], cwd='', background=False)\n"
        "for raw in (b'', b'x', b'[]', b'{}', b'null', b'[' * 100000, b'{\"argv\": 1}', os.urandom(5000)): ask(raw)\n"
        "for change in (dict(argv=[]), dict(argv=['']), dict(argv=['a\\0b']), dict(uid=65533), dict(gid=65533), dict(groups=[65533]),\n"
        "               dict(groups=[70000]), dict(uid=-1), dict(uid=True), dict(uid='0'), dict(env=[['a']]), dict(env=[['a', 'b\\0']]),\n"
        "               dict(cwd='x\\0'), dict(terminals=[0], size='zz'), dict(terminals=[0]), dict(argv=['x'] * 100000),\n"
        "               dict(groups=['a']), dict(groups=None), dict(env=None)): ask(json.dumps({**good, **change}).encode())\n"
        "ask(b'', length=0); ask(b'', length=0xffffffff); ask(json.dumps(good).encode(), descriptors=0)\n"
        "ask(json.dumps(good).encode(), descriptors=3); ask(json.dumps(good).encode(), descriptors=40)\n"
        "kept = []\n"
        "for _ in range(100):\n"
        "    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); s.setblocking(False)\n"
        "    try: s.connect('\\0ringfence-sudo')\n"
        "    except OSError: pass\n"
        "    kept.append(s)\n"
        "print('asked')"
    )
    assert sandbox.commands.run(["python3", "-c", code], timeout=60).stdout == "asked\n"
    assert sandbox.commands.run("sudo id -u", timeout=30).stdout == "0\n"
    assert_answers(sandbox, 20)


def test_nothing_of_the_machine_is_told_to_root_that_is_not_told_to_the_user(rooted, planted):
    token, _files = planted
    sandbox = rooted()
    seen = sandbox.commands.run(
        f"grep -rs {token} / --include='ringfence-*' --exclude-dir=proc --exclude-dir=sys -l; cat /etc/shadow /var/cache/debconf/* 2>/dev/null; true",
        user="root", timeout=120,
    )  # fmt: skip
    assert token not in seen.stdout
    assert all(line.split(":")[1] == "*" for line in seen.stdout.splitlines() if ":" in line)
    for name in ("shadow", "gshadow", "ssh", "hosts", "resolv.conf", "fstab"):
        path = f"/etc/{name}"
        if os.path.isfile(path) and os.access(path, os.R_OK) and os.path.getsize(path) > 200:
            with open(path) as file:
                assert sandbox.commands.run(["cat", path], user="root").stdout != file.read()
    sandbox.commands.run("rm -rf --no-preserve-root /usr /etc /var /home /opt", user="root", timeout=120)
    assert os.path.exists("/usr/bin/env") and os.path.exists("/etc/passwd")


def test_the_control_sees_the_probe_attack_for_real(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("the control attacks as the machine's root")
    assert outside("privileges", tmp_path)["chmod set-uid"] == "done"


def test_set_id_bits_and_owners_of_root_never_reach_the_host(rooted):
    project = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/var/tmp"))
    try:
        if os.geteuid() == 0:
            os.chown(project, 64321, 64321)
        sandbox = rooted(workspace=project)
        made = sandbox.commands.run("cp /usr/bin/id suid && chmod 6755 suid && mkdir d && chmod 2777 d && ls -l suid", user="root", cwd="/workspace")
        assert made.stdout.startswith("-rwsr-sr-x 1 root root")
        sandbox.apply(sandbox.changes())
        written = (project / "suid").stat()
        assert written.st_mode & 0o7777 == 0o755 and written.st_uid in (os.geteuid(), 64321)
        assert not (project / "d").stat().st_mode & 0o6000
    finally:
        shutil.rmtree(project)
