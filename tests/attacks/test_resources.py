"""Class C: a sandbox that eats hits its own limit; the host keeps its head-room and the neighbour answers."""

from __future__ import annotations

import ctypes
import errno
import os
import time

import pytest
from arena import assert_answers, memory_is_hard, sampled, until

from ringfence import LimitExceededError, RingfenceError, Sandbox, SandboxDeadError, TimeoutExceededError

MIB = 1 << 20


def attack(sandbox: Sandbox, code: str, timeout: float = 12) -> str:
    """How the attack ended: its output, or the name of the error."""
    try:
        result = sandbox.commands.run(["python3", "-c", code], timeout=timeout)
    except (SandboxDeadError, TimeoutExceededError) as problem:
        return type(problem).__name__ + ": " + str(problem)
    return f"exit {result.exit_code} signal {result.signal}\n" + result.stdout + result.stderr


def counter(path: str, line: str, field: int) -> int:
    with open(path) as file:
        for text in file:
            if text.startswith(line):
                return int(text.split()[field])
    return 0


PROCESS_MEMORY = {
    "private": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "shared": "import mmap\nkept = []\nwhile True:\n  page = mmap.mmap(-1, 1 << 20); page.write(b'x' * (1 << 20)); kept.append(page)",
    "many processes": "import os, time\nfor _ in range(12):\n  if os.fork() == 0:\n    kept = bytearray(b'x') * (24 << 20); time.sleep(6); os._exit(0)\nstatuses = [os.wait()[1] for _ in range(12)]\nprint('all lived', not any(statuses))",
    "page tables": "import mmap\nkept = []\nwhile True:\n  area = mmap.mmap(-1, 1 << 33, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=1)\n  for offset in range(0, 1 << 33, 1 << 21): area[offset]\n  kept.append(area)",
}


@pytest.mark.parametrize("kind", PROCESS_MEMORY)
def test_memory_of_processes_ends_at_the_limit(make, neighbour, kind):
    box = make(memory="64MiB", tmp="8MiB", disk="8MiB")
    answer = attack(box, PROCESS_MEMORY[kind])
    assert "all lived True" not in answer
    assert "signal 9" in answer or "MemoryError" in answer or "memory limit" in answer or "Cannot allocate" in answer or "all lived False" in answer, answer


KERNEL_MEMORY = {
    "memfd": "import os\nkept = []\nwhile len(kept) < 400:\n  kept.append(os.memfd_create('x')); os.write(kept[-1], b'x' * (1 << 20))\nprint('held', len(kept))",
    "untouched shared pages": "import mmap\nkept = []\nwhile len(kept) < 400:\n  page = mmap.mmap(-1, 1 << 20); page.write(b'x' * (1 << 20)); page.madvise(4); kept.append(page)\nprint('held', len(kept))",
    "unix sockets": "import socket\nkept = []\nn = 0\ntry:\n  while True:\n    pair = socket.socketpair(); pair[0].setblocking(False); kept.append(pair)\n    try:\n      while True: n += pair[0].send(b'x' * 65536)\n    except BlockingIOError: pass\nexcept OSError: pass\nprint('held', n >> 20)",
    "pipes": "import fcntl, os\nn = 0\ntry:\n  while True:\n    read, write = os.pipe(); os.set_blocking(write, False)\n    try: fcntl.fcntl(write, 1031, 1 << 20)\n    except OSError: pass\n    try:\n      while True: n += os.write(write, b'x' * 65536)\n    except BlockingIOError: pass\nexcept OSError: pass\nprint('held', n >> 20)",
}


@pytest.mark.parametrize("kind", KERNEL_MEMORY)
def test_memory_that_belongs_to_no_process_ends_at_the_limit(make, neighbour, kind):
    box = make(memory="64MiB", tmp="8MiB", disk="8MiB")
    if not memory_is_hard(box):
        pytest.skip("without a control group memory is watched, and a watch does not see this; info() says so")
    answer = attack(box, KERNEL_MEMORY[kind])
    held = int(answer.rpartition("held ")[2].split()[0]) if "held " in answer else 0
    assert held <= 80, answer


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
def test_socket_buffers_do_not_take_the_machines_share(make, neighbour, protocol):
    box = make(memory="64MiB", tmp="8MiB", disk="8MiB", open_files=512)
    if not memory_is_hard(box):
        pytest.skip("without a control group memory is watched, and a watch does not see socket buffers; info() says so")
    receiver = {
        "UDP": "a = socket.socket(2, 2); a.bind(('127.0.0.1', 0)); b = socket.socket(2, 2); b.setblocking(False)\n      kept += [a]; b.connect(a.getsockname())",
        "TCP": "b = socket.create_connection(l.getsockname()); a, _ = l.accept(); b.setblocking(False); kept += [a, b]",
    }[protocol]
    code = f"""
import os, socket, time
for _ in range(4):
  if os.fork() == 0:
    kept = []; l = socket.create_server(("127.0.0.1", 0), backlog=1000)
    try:
     while True:
      {receiver}
      try:
        while True: b.send(b"x" * 60000)
      except (BlockingIOError, ConnectionRefusedError): pass
    except OSError: pass
    time.sleep(1.5); os._exit(0)
for _ in range(4): os.wait()
print("over")
"""
    with sampled(lambda: counter("/proc/net/sockstat", protocol + ":", -1)) as pages:
        attack(box, code)
    assert pages[0] * 4096 < 220 * MIB  # 900 MiB and more where nothing bills them


def test_files_of_every_place_stop_at_the_limits(make, neighbour):
    box = make(memory="128MiB", tmp="8MiB", disk="8MiB")
    code = """
import os
total = 0
for place in ("/tmp", "/dev/shm", "/home/user", "/workspace", "/var/tmp", "/dev", "/run", "/", "/root", "/proc", "/dev/pts"):
    n = 0
    try:
        while n < 64:
            with open("%s/fill%d" % (place, n), "wb") as file: file.write(b"x" * (1 << 20))
            n += 1
    except OSError: pass
    total += n
print("total", total)
count = 0
for place in ("/tmp", "/dev/shm", "/home/user"):
    try:
        while count < 100000: os.close(os.open("%s/empty%d" % (place, count), os.O_CREAT | os.O_WRONLY)); count += 1
    except OSError: pass
print("inodes", count)
"""
    with sampled(lambda: counter("/proc/meminfo", "Shmem:", 1)) as shared:
        before = shared[0]
        answer = attack(box, code)
    total = int(answer.split("total ")[1].split()[0])
    assert 8 <= total <= 26, answer
    assert int(answer.split("inodes ")[1].split()[0]) < 30000, answer
    assert (shared[0] - before) // 1024 < 200
    with pytest.raises(RingfenceError):
        box.files.write("/home/user/more", b"x" * MIB)
    box.commands.run("rm -rf /tmp/* /home/user/fill* /home/user/empty*")
    box.files.write("/home/user/more", b"x" * MIB)


@pytest.mark.parametrize("kind", ["fork", "fork and setsid", "threads"])
def test_bombs_stop_at_the_limit_and_leave_nothing(make, neighbour, kind):
    box = make()
    code = {
        "fork": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "fork and setsid": "import os\nwhile True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass",
        "threads": "import threading, time\nwhile True:\n  try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n  except (RuntimeError, MemoryError): pass",
    }[kind]
    with sampled(lambda: len([name for name in os.listdir("/proc") if name.isdigit()])) as tasks:
        before = tasks[0]
        answer = attack(box, code, timeout=2)
    assert "TimeoutExceededError" in answer or "memory limit" in answer
    assert tasks[0] - before < 64 + 60  # other programs of the machine start as well
    if "memory limit" not in answer:
        assert_answers(box)
        count = "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))"
        assert int(box.commands.run(["python3", "-c", count]).stdout) < 10
    started = time.monotonic()
    box.kill()
    assert time.monotonic() - started < 5


def test_orphans_leave_no_zombies(make):
    box = make()
    code = """
import os, time
for _ in range(200):
    child = os.fork()
    if child == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass  # with a single uid the command is its orphans' reaper
    except ChildProcessError: pass
"""
    assert attack(box, code).startswith("exit 0")
    time.sleep(0.5)
    look = "import os; print(sum(b') Z' in open('/proc/%s/stat' % n, 'rb').read() for n in os.listdir('/proc') if n.isdigit()))"
    assert box.commands.run(["python3", "-c", look]).stdout == "0\n"


def test_open_files_stop_per_process(make, neighbour):
    box = make(open_files=128)
    code = "import os, resource\nkept = []\ntry:\n  while True: kept.append(os.open('/dev/null', 0))\nexcept OSError as problem: print(len(kept), problem.errno)\ntry: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); print('raised')\nexcept (OSError, ValueError): print('kept')"
    answer = attack(box, code)
    count, number = answer.splitlines()[1].split()
    assert int(count) < 128 and int(number) == errno.EMFILE and answer.endswith("kept\n")
    assert_answers(box)


def test_inotify_of_the_host_and_of_the_neighbour_is_not_used_up(make, neighbour):
    """What is used inside counts for the namespaces' owner outside too: one sandbox took all 128 of root's."""
    box = make()
    code = "import ctypes\nlibc = ctypes.CDLL(None)\ncount = 0\nwhile libc.inotify_init1(0) >= 0: count += 1\ncount"
    count = int(box.run_code(code).text)
    assert 4 <= count <= 32
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [libc.inotify_init1(0) for _ in range(8)]
    assert min(descriptors) >= 0, os.strerror(ctypes.get_errno())
    for descriptor in descriptors:
        os.close(descriptor)
    assert int(neighbour.run_code(code).text) >= 4


def test_other_counters_of_a_user_are_not_felt_by_the_neighbour(make, neighbour):
    box = make()
    code = """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
queued = timers = 0
while queued < 100000 and libc.sigqueue(os.getpid(), 40, None) == 0: queued += 1
identity = ctypes.c_void_p()
while timers < 100000 and libc.timer_create(1, None, ctypes.byref(identity)) == 0: timers += 1
queues = []
class Attributes(ctypes.Structure): _fields_ = [(n, ctypes.c_long) for n in ("flags", "maximum", "size", "current")] + [("pad", ctypes.c_long * 4)]
try:
    number = 0
    while number < 200 and libc.mq_open(b"/q%d" % number, os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(Attributes(0, 10, 8192, 0))) >= 0: number += 1
except AttributeError: number = 0
locked = ctypes.create_string_buffer(1 << 20)
print(queued, timers, number, libc.mlock(locked, 1 << 20), flush=True)
import time, sys
time.sleep(float(sys.argv[1]))
"""
    holding = until(box.commands.run(["python3", "-c", code, "20"], background=True), "\n")
    second = neighbour.commands.run(["python3", "-c", code, "0"])
    assert holding.stdout == second.stdout
    queued, timers, queues, locked = map(int, second.stdout.split())
    assert 0 < queued <= 2048 and timers <= 2048 and queues < 64 and locked == -1
    # The host's user: one queue of its own, while the sandbox holds what it may.
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.mq_open(b"/ringfence-attack", os.O_CREAT | os.O_RDWR, 0o600, None)
    assert number >= 0 or ctypes.get_errno() == errno.ENOSYS
    if number >= 0:
        libc.mq_unlink(b"/ringfence-attack")
        os.close(number)
    assert holding.kill()


def test_limits_cannot_be_raised_or_left(make):
    box = make()
    code = """
import os, resource
raised = []
for name in ("NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING", "RTPRIO", "NICE", "DATA", "STACK"):
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    if hard == resource.RLIM_INFINITY: continue
    for pid in (0, os.getppid()):
        try: resource.prlimit(pid, number, (hard + 1, hard + 1)); raised.append((name, pid))
        except (OSError, ValueError): pass
for action in (lambda: os.nice(-1), lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)), lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000")):
    try: action(); raised.append(action)
    except OSError: pass
print(raised, resource.getrlimit(resource.RLIMIT_CORE), os.path.exists("/sys/fs/cgroup"))
"""
    assert box.commands.run(["python3", "-c", code]).stdout == "[] (1, 1) False\n"


def test_a_crash_leaves_no_core_anywhere(make, tmp_path):
    box = make()
    before = set(os.listdir("/")) | set(os.listdir("/tmp")) | set(os.listdir(os.getcwd()))
    result = box.commands.run(["python3", "-c", "import ctypes\nkept = b'canary' * 1000\nctypes.string_at(0)"])
    assert result.signal == 11 and result.exit_code == 139
    assert box.commands.run("ls / /home/user /tmp /var/tmp | grep -i core").stdout == ""
    after = set(os.listdir("/")) | set(os.listdir("/tmp")) | set(os.listdir(os.getcwd()))
    assert not [name for name in after - before if "core" in name]


def test_a_full_sandbox_answers_with_the_name_of_the_limit(make):
    box = make(pids=20)
    held = box.run_code("import threading, time\nheld = []\ntry:\n  while True:\n    held.append(threading.Thread(target=time.sleep, args=(30,), daemon=True)); held[-1].start()\nexcept RuntimeError: print(len(held))")
    assert held.error is None
    if int("".join(held.logs.stdout)) >= 19:
        with pytest.raises(LimitExceededError):
            box.commands.run(["true"])
    box.restart_code_context("default")
    assert_answers(box)
