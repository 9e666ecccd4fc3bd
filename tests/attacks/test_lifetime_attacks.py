"""Lifetime and leftovers: a kill reaches everything, nothing survives it, and the next sandbox finds a clean place."""

from __future__ import annotations

import os
import time

import pytest
from arena import assert_answers, canary, inside, one_uid, until

from ringfence import Sandbox, TimeoutExceededError

ESCAPES = """
import os, signal, sys, time
def ignore():
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
def alive(name):
    while True:
        with open("/tmp/alive-" + name, "w") as file: file.write(str(time.time()))
        time.sleep(0.05)
def start(name, daemon):
    if os.fork(): return
    if daemon:
        os.setsid()
        if os.fork(): os._exit(0)
        os.closerange(0, 100)
    ignore()
    alive(name)
start("daemon", True)
start("ignoring", False)
if os.fork() == 0:
    os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: alive("twice")
    os.waitpid(-1, 0)
ignore()
print("begun", flush=True)
"""


def stragglers(sandbox: Sandbox) -> list[str]:
    """Names of the escaped processes that still write."""
    time.sleep(0.3)
    now = time.time()
    found = []
    for entry in sandbox.files.list("/tmp"):
        if entry.name.startswith("alive-") and now - float(sandbox.files.read(entry.path) or 0) < 0.25:
            found.append(entry.name)
    return found


def test_a_timeout_ends_the_whole_tree(make):
    box = make()
    started = time.monotonic()
    with pytest.raises(TimeoutExceededError) as caught:
        box.commands.run(["python3", "-c", ESCAPES + "time.sleep(60)"], timeout=1.5)
    assert time.monotonic() - started < 4.5
    assert "begun" in caught.value.partial.stdout
    assert stragglers(box) == []
    listing = "import os; print(sorted(open('/proc/%s/comm' % n).read().strip() for n in os.listdir('/proc') if n.isdigit()))"
    assert box.commands.run(["python3", "-c", listing]).stdout.count("python3") == 1
    assert_answers(box)


def test_the_control_shows_the_escapes_alive(make):
    box = make()
    handle = until(box.commands.run(["python3", "-c", ESCAPES + "time.sleep(60)"], background=True), "begun")
    assert len(stragglers(box)) == 3
    assert handle.kill()
    assert stragglers(box) == []


def test_restarting_a_context_ends_what_its_cells_started(make):
    box = make()
    box.run_code(ESCAPES)
    assert len(stragglers(box)) == 3
    box.restart_code_context("default")
    assert box.run_code("1 + 1").text == "2"
    assert stragglers(box) == []


def test_a_daemon_that_kills_its_leader_is_still_a_background_process_of_the_sandbox_only(make):
    box = make()
    box.commands.run(["python3", "-c", ESCAPES + "os.kill(os.getpid(), 9)"], timeout=10)
    before = set(os.listdir("/proc"))
    left = stragglers(box)
    assert left or one_uid(box)
    box.kill()
    time.sleep(0.2)
    assert not [name for name in set(os.listdir("/proc")) - before if name.isdigit() and b"alive-" in _command(name)]


def _command(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.mark.parametrize("attack", ["fork bomb", "stopped", "memory", "deep directory", "many files"])
def test_a_sandbox_under_attack_is_gone_within_five_seconds(make, neighbour, attack):
    token = canary()
    code = {
        "fork bomb": "while True:\n  try: os.fork()\n  except OSError: pass",
        "stopped": "import signal\nfor _ in range(20):\n  if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
        "memory": "kept = b'x' * (60 << 20)\ntime.sleep(60)",
        "deep directory": "try:\n  while True: os.mkdir('d'); os.chdir('d')\nexcept OSError: time.sleep(60)",
        "many files": "n = 0\ntry:\n  while True: open('/tmp/f%d' % n, 'w').close(); n += 1\nexcept OSError: time.sleep(60)",
    }[attack]
    box = make()
    until(box.commands.run(["python3", "-c", f"import os, time\nprint('begun', flush=True)\n'{token}'\n{code}"], background=True), "begun")
    time.sleep(0.3)
    pids = [name for name in os.listdir("/proc") if name.isdigit() and token.encode() in _command(name)]
    assert pids, "the host does not see the attack"
    started = time.monotonic()
    box.kill()
    assert time.monotonic() - started < 5
    assert not [name for name in os.listdir("/proc") if name.isdigit() and token.encode() in _command(name)]


def test_the_next_sandbox_finds_nothing_of_the_last(make):
    token = canary()
    for turn in range(3):
        box = make()
        assert inside(box, "walk", token, "/")["found"] == []
        state = "import os, socket\n(sorted(os.listdir('/tmp')), os.listdir('/dev/shm'), os.listdir('/workspace'), os.path.exists('/home/user/.bashrc'), 'left' in os.environ, len([n for n in os.listdir('/proc') if n.isdigit()]) <= 4, socket.socket().connect_ex(('127.0.0.1', 5998)) != 0)"
        assert box.run_code(state).text == "([], [], [], False, False, True, True)"
        box.commands.run(f"for place in /tmp /dev/shm /workspace /var/tmp /home/user; do echo {token} > $place/{token}; done; echo {token} > .bashrc; (setsid sleep 100 &)")
        box.run_code(f"import os, socket; os.environ['left'] = '{token}'; server = socket.create_server(('127.0.0.1', 5998))")
        box.commands.run("mkdir -p .local/lib/python3.11/site-packages; echo 'raise SystemExit(1)' > .local/lib/python3.11/site-packages/sitecustomize.py; echo x >> /opt/env/pyvenv.cfg; echo x >> /etc/passwd")
        box.kill()


def test_a_sandbox_cannot_extend_its_life(make):
    box = Sandbox(timeout=1.5, memory="128MiB", pids=32)
    handle = box.commands.run(["python3", "-c", "import os, signal, time\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: time.sleep(1)"], background=True)
    assert handle.pid
    deadline = time.monotonic() + 6
    while box.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not box.is_running()
