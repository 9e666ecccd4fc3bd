"""Class A, upwards: nothing in a sandbox gains a right, by a file, a device, a namespace or a call."""

from __future__ import annotations

import os

import pytest
from arena import STOPPED, assert_ordinary, inside, outside

ZERO = "0000000000000000"


def test_every_process_runs_without_capabilities_filtered_and_never_gains(box):
    status = inside(box, "privileges", "/home/user")["status"]
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {ZERO}
    kernel = box.run_code("' '.join(line.split()[1] for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew', 'Seccomp:')))")
    assert kernel.text == " ".join([ZERO] * 5 + ["1", "2"])


@pytest.mark.parametrize("place", ["/home/user", "/tmp", "/dev/shm", "/workspace"])
def test_no_set_id_file_no_device_no_file_capability_can_be_made(make, place, tmp_path):
    found = inside(make(), "privileges", place)
    control = outside("privileges", tmp_path)
    for name in ("chmod set-uid", "open set-uid", "mkdir set-gid", "mknod set-uid"):
        assert found[name] == "EPERM"
        assert control[name] == "done"
    assert found["mode after chmod"] == "0o755"
    refused = [name for name in found if name.startswith(("mknod ", "chown ", "file cap", "trusted", "setuid", "setgroups", "setresuid"))]
    assert len(refused) == 13
    assert all(found[name] in ("EPERM", "EINVAL") for name in refused), {name: found[name] for name in refused}
    if os.geteuid() == 0:
        assert all(control[name] == "done" for name in ("mknod mem", "file capability", "setuid 0", "setgroups"))


def test_no_namespace_can_be_made_by_any_call(make, tmp_path):
    found = inside(make(), "privileges", "/home/user")
    control = outside("privileges", tmp_path)
    for name in ("unshare user", "unshare mount", "unshare pid", "unshare network", "unshare ipc", "clone user"):
        assert found[name] == "refused"
    assert control["unshare user"] == control["clone user"] == "done"
    assert found["clear no_new_privs"] == -1
    assert found["write /proc/sys/user/max_user_namespaces"] in ("EROFS", "EACCES", "EPERM")


def test_set_uid_programs_of_the_host_give_nothing(box):
    answer = box.commands.run("for tool in su mount passwd newuidmap; do $tool --version >/dev/null 2>&1; done; su -c id; cat /proc/self/status | grep CapEff")
    assert "uid=0" not in answer.stdout
    assert ZERO in answer.stdout


def test_refused_system_calls_never_reach_the_kernel(box):
    found = inside(box, "system_calls")
    control = outside("system_calls") if os.geteuid() == 0 else outside("system_calls", "--own-namespace")
    got_through = {name: answer for name, answer in found.items() if answer not in STOPPED}
    assert not got_through, f"these calls reach the kernel: {got_through}"
    # A call counts when the weaker place shows that the arguments get past the door there.
    counted = [name for name, answer in control.items() if answer not in STOPPED]
    assert len(counted) >= (55 if os.geteuid() == 0 else 30), sorted(set(control) - set(counted))
    assert {"mount", "unshare", "ptrace", "open_tree", "keyctl"} <= set(counted)
    assert_ordinary(box)


def test_only_local_internet_and_route_sockets_exist(box):
    found, control = inside(box, "sockets"), outside("sockets")
    allowed = {name for name in found if name.startswith("allowed ")} | {"netlink 0"}
    assert {name for name, answer in found.items() if answer == "done"} == allowed
    opened_outside = {name for name, answer in control.items() if answer == "done"} - allowed
    assert len(opened_outside) >= 5, opened_outside
    assert_ordinary(box)


def test_a_terminal_cannot_be_typed_into(make):
    code = (
        "import fcntl, os, termios\n"
        "answers = []\n"
        "for command, argument in ((termios.TIOCSTI, b'X'), (0x541C, b'\\x02'), (0x541C, b'\\x03'), (termios.TIOCSETD, b'\\0\\0\\0\\0')):\n"
        "    try: fcntl.ioctl(0, command, argument); answers.append('done')\n"
        "    except OSError as problem: answers.append(problem.errno)\n"
        "    try: fcntl.ioctl(0, command | 1 << 32, argument); answers.append('done')\n"
        "    except (OSError, OverflowError) as problem: answers.append(1)\n"
        "print('answers', answers)"
    )
    from ringfence import PtySize

    result = make().commands.run(["python3", "-c", code], pty=PtySize(24, 80))
    assert "answers [1, 1, 1, 1, 1, 1, 1, 1]" in result.stdout
