"""Class A, sideways: other processes, of the host, of other sandboxes and of the agent, are out of reach."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from arena import assert_answers, assert_ordinary, inside, one_uid, outside

INSIDES = ("mem", "environ", "maps", "cwd/.", "root/.", "exe")


def test_host_processes_cannot_be_seen_read_or_signalled(box, victim):
    pid, token = victim
    found, control = inside(box, "proc", pid), outside("proc", pid)
    assert pid in control["processes"] and control[f"/proc/{pid}/environ"] == "done"
    assert all(found[f"/proc/{pid}/{name}"] in ("ENOENT", "EACCES") for name in INSIDES)
    code = (
        "import os\nreached = []\n"
        f"for pid in [*range(2, 70000), {pid}]:\n"
        "    try: os.kill(pid, 0); reached.append(pid)\n"
        "    except OSError: pass\n"
        "alive = [int(name) for name in os.listdir('/proc') if name.isdigit()]\n"
        "print(set(reached) <= set(alive), len(alive) < 20)"
    )
    assert box.commands.run(["python3", "-c", code]).stdout == "True True\n"
    # The host's own file of that process holds the canary; nothing the sandbox can open does.
    with open(f"/proc/{pid}/environ") as environment:
        assert token in environment.read()
    assert token not in box.commands.run("cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'").stdout


def test_the_agents_memory_environment_and_descriptors_cannot_be_opened(box):
    found = inside(box, "proc", 1)
    for name in ("mem", "environ", "maps", "auxv", "fd/0", "cwd/.", "root/.", "exe", "pagemap", "task/1/mem"):
        assert found[f"/proc/1/{name}"] in ("EACCES", "EPERM"), name
    own = inside(box, "proc", "self")
    assert own["/proc/self/mem"] == own["/proc/self/environ"] == "done"
    links = box.commands.run("for d in /proc/1/fd/*; do readlink $d && echo LEAK; done; true")
    assert "LEAK" not in links.stdout


def test_no_signal_limit_or_priority_reaches_the_agent(make):
    sandbox = make()
    code = """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
done = []
def tried(name, action):
    try: action(); done.append(name)
    except OSError: pass
for number in range(1, 65):
    for pid in (1, (1 << 32) + 1):
        if libc.kill(ctypes.c_long(pid), number) == 0: done.append(("kill", pid, number))
    if libc.syscall(200, 1, number) == 0: done.append(("tkill", number))
    if libc.syscall(234, 1, 1, number) == 0: done.append(("tgkill", number))
tried("prlimit", lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))
tried("prlimit files", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))
tried("affinity", lambda: os.sched_setaffinity(1, {0}))
tried("scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
tried("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
tried("group priority", lambda: os.setpriority(os.PRIO_PGRP, 1, 19))
tried("user priority", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
tried("setpgid", lambda: os.setpgid(0, 1))
tried("pidfd", lambda: os.pidfd_open(1))
for path in ("/proc/1/mem", "/proc/1/comm", "/proc/1/timerslack_ns"):
    tried("write " + path, lambda: os.write(os.open(path, os.O_WRONLY), b"1"))
print(done)
"""
    result = sandbox.commands.run(["python3", "-c", code])
    assert result.stdout == "[]\n", result
    assert_answers(sandbox)
    # The control: a process of one's own is reached by every one of these.
    assert sandbox.commands.run("sleep 30 & kill -STOP $! && renice 19 $! >/dev/null && kill -9 $! && echo reached").stdout == "reached\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killing_everything_leaves_a_sandbox_that_answers(make, neighbour, number):
    sandbox = make()
    sandbox.run_code("kept = 1")
    sandbox.files.write("/tmp/before", "x")
    result = sandbox.commands.run(["python3", "-c", f"import os; os.kill(-1, {int(number)}); print('sent')"])
    assert result.stdout == "sent\n"
    sandbox.run_code("after = 1", timeout=5)  # reports the kernel's death, where the signal was for it
    assert_answers(sandbox)


def test_a_killer_that_never_stops_ends_with_its_command(make):
    sandbox = make()
    loop = (
        "import os, signal\nwhile True:\n  for name in os.listdir('/proc'):\n    if name.isdigit() and int(name) != os.getpid():\n"
        "      try: os.kill(int(name), signal.SIGKILL)\n      except OSError: pass"
    )
    killer = sandbox.commands.run(["python3", "-c", loop], background=True)
    time.sleep(0.3)
    assert killer.kill()
    sandbox.run_code("1", timeout=5)
    assert_answers(sandbox)


def test_processes_of_another_sandbox_share_nothing(make, neighbour):
    first = make()
    opened = first.run_code(
        "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind('\\0ringfence-shared'); listener.listen()\n"
        "port = socket.create_server(('127.0.0.1', 5999))\n"
        "libc.msgget(0x5246, 0o1666), libc.shmget(0x5246, 4096, 0o1666), libc.semget(0x5246, 1, 0o1666)"
    )
    assert opened.error is None
    look = (
        "import ctypes, errno, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def connects(family, place):\n"
        "    try: socket.socket(family).connect(place); return True\n    except OSError: return False\n"
        "connects(1, '\\0ringfence-shared'), connects(2, ('127.0.0.1', 5999)), max(libc.msgget(0x5246, 0), libc.shmget(0x5246, 0, 0), libc.semget(0x5246, 0, 0))"
    )
    assert first.run_code(look).text.startswith("(True, True,")
    assert neighbour.run_code(look).text == "(False, False, -1)"


def test_nothing_of_the_caller_is_inherited(box):
    found = inside(box, "proc")
    assert found["descriptors"][:3] == [0, 1, 2] and len(found["descriptors"]) <= 4  # one is the listing itself
    control = subprocess.run(
        [sys.executable, "-c", "import os; os.set_inheritable(os.open('/', os.O_PATH), True); os.execvp('ls', ['ls', '/proc/self/fd'])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(control.stdout.split()) > 4
    assert_ordinary(box)


def test_a_command_with_a_name_like_an_option_is_a_name(box):
    for argv in (["--dev-bind", "/", "/", "sh"], ["-c", "id"], ["--inadvisable"]):
        assert box.commands.run(argv).exit_code == 127
    for text in ("--help", "-l", "-c id"):
        result = box.commands.run(text)
        assert result.exit_code == 127 and "Usage" not in result.stderr and "uid=" not in result.stdout
    assert box.commands.run(["echo", *["x"] * 100_000]).stdout.count("x") == 100_000


def test_a_job_cannot_shed_its_mark(box):
    if one_uid(box):
        pytest.skip("with a single uid jobs are found by descent, not by a mark")
    code = "import os\nbefore = os.getgroups()\ntry: os.setgroups([])\nexcept OSError: pass\nprint(os.getgroups() == before and len(before) == 2)"
    assert box.commands.run(["python3", "-c", code]).stdout == "True\n"
