"""Hostile code, each piece in a sandbox of its own, judged by what the host saw.

Every attack is an ordinary program that tries in earnest and prints a line `TRIED n` at its end, n being the number
of its attempts: a script that did not run proves nothing, and counts as BROKEN. What it says about its success is
not believed; `Judgement.evidence` comes from demo/host.py and from the kernel's counters.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from host import Processes, Sampler, Witness

from ringfence import Execution, Sandbox, SandboxDeadError, TimeoutExceededError

MIB = 1 << 20


@dataclass
class Judgement:
    """What became of one attack. `verdict` is HELD, BREACH (it got through) or BROKEN (nothing was proved)."""

    attack: str
    verdict: str = "BROKEN"
    held_by: str = ""
    evidence: str = ""
    start_ms: float = 0.0
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Scene:
    """One sandbox, its attacker and the host's witness."""

    def __init__(self, witness: Witness, judgement: Judgement, sandbox: Sandbox) -> None:
        self.witness = witness
        self.judgement = judgement
        self.sandbox = sandbox
        self.first = Processes.first()
        self.output = ""
        self.end: BaseException | None = None

    def attack(self, code: str, timeout: float = 15.0) -> Execution | None:
        """Run hostile Python; returns its execution, also when it hit a limit (then `end` is the error)."""
        try:
            execution = self.sandbox.run_code(_PRELUDE + code, timeout=timeout)
        except (TimeoutExceededError, SandboxDeadError) as error:
            self.end = error
            partial = getattr(error, "partial", None)
            execution = partial if isinstance(partial, Execution) else None
        if execution is not None:
            self.output = "".join(execution.logs.stdout) + "".join(execution.logs.stderr) + (execution.text or "")
        return execution

    def tried(self) -> int:
        """How many attempts the script made."""
        return sum(int(number) for number in re.findall(r"^TRIED (\d+)$", self.output, re.MULTILINE))

    def in_force(self, *primitives: str) -> str:
        """What of `primitives` the kernel says is in force, with its strength."""
        rows = {row.primitive: row for row in self.sandbox.info().enforcement}
        return ", ".join(f"{name.removeprefix('namespace ')} ({rows[name].strength})" if name in rows else name for name in primitives)

    def judge(self, held: bool, held_by: str, evidence: str, broken: bool = False) -> None:
        self.judgement.verdict = "BROKEN" if broken else "HELD" if held else "BREACH"
        self.judgement.held_by = held_by
        self.judgement.evidence = evidence


_PRELUDE = """
attempts = 0
def attempt(action):
    global attempts
    attempts += 1
    try:
        print("GOT", repr(action())[:2000])
    except BaseException as error:
        print(type(error).__name__, error)
"""


def read_secrets(scene: Scene) -> None:
    witness = scene.witness
    control = witness.control_watch()
    scene.attack(
        f"""
import glob, os
paths = [{str(witness.key)!r}, os.path.expanduser("~/.ssh/id_rsa"), "/root/.ssh/id_rsa", "/etc/shadow",
         {os.path.expanduser("~/.ssh")!r}, "/proc/1/root" + {str(witness.key)!r}, "/proc/1/environ",
         *glob.glob("/home/*/.ssh/*"), *glob.glob("/root/*"), *glob.glob("/proc/*/root/etc/shadow")]
for path in paths:
    attempt(lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
print("TRIED", attempts)
"""
    )
    leaked = witness.secret in scene.output or any(line in scene.output for line in witness.shadow_lines())
    touches = witness.touches()
    scene.judge(
        not leaked and touches == 0,
        scene.in_force("namespace mnt", "root file system"),
        f"{scene.tried()} paths tried; the canary key was opened {touches} times (inotify), "
        f"neither it nor a line of the host's /etc/shadow came out",
        broken=not control or not scene.tried(),
    )


def reach_the_network(scene: Scene) -> None:
    witness = scene.witness
    control = witness.control_listeners()
    scene.attack(
        f"""
import socket, urllib.request
def connect(host, port):
    with socket.create_connection((host, port), timeout=2) as each:
        return each.getpeername()
for host, port in [("1.1.1.1", 443), ("8.8.8.8", 53), ("169.254.169.254", 80), ("fd00:ec2::254", 80), ("pypi.org", 443),
                   ("127.0.0.1", {witness.port}), ({witness.address()!r}, {witness.port}), ("host.docker.internal", 80)]:
    attempt(lambda: connect(host, port))
attempt(lambda: urllib.request.urlopen("http://169.254.169.254/latest/meta-data/", timeout=2).read())
attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
print("TRIED", attempts)
""",
        30,
    )
    interfaces = []
    with suppress(OSError), open(f"/proc/{scene.first}/net/dev") as file:
        interfaces = [line.split(":")[0].strip() for line in file.readlines()[2:]]
    arrived = [name for name in witness.connections if name == "tcp"]
    scene.judge(
        not arrived and interfaces == ["lo"],
        scene.in_force("namespace net", "seccomp"),
        f"{scene.tried()} addresses tried; the host's listener logged {len(arrived)} connections (our own test: 1); "
        f"interfaces of its namespace, read from the host: {', '.join(interfaces) or 'unreadable'}",
        broken=not control or not scene.tried() or not interfaces,
    )


def host_sockets(scene: Scene) -> None:
    witness = scene.witness
    control = witness.control_listeners()
    scene.attack(
        f"""
import socket, glob
def connect(name):
    with socket.socket(socket.AF_UNIX) as each:
        each.settimeout(2)
        each.connect(name)
        return name
for name in [{str(witness.unix_path)!r}, "\\0" + {witness.abstract!r}, "/var/run/docker.sock", "/run/docker.sock",
             "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket", "/run/systemd/private",
             *glob.glob("/run/**/*.sock", recursive=True), *glob.glob("/tmp/**/*", recursive=True)]:
    attempt(lambda: connect(name))
print("TRIED", attempts)
"""
    )
    arrived = [name for name in witness.connections if name.startswith("unix")]
    scene.judge(
        not arrived,
        scene.in_force("namespace mnt", "namespace net", "landlock scopes"),
        f"{scene.tried()} sockets tried; the host's listeners (a path and an abstract name) logged {len(arrived)} "
        "connections (our own test: 2)",
        broken=not control or scene.tried() < 2,
    )


def fork_bomb(scene: Scene) -> None:
    with Sampler() as sampler:
        scene.attack(
            """
import os, time
print("TRIED 1", flush=True)
while True:
    try:
        if os.fork() == 0:
            while True:
                try: os.fork()
                except OSError: time.sleep(0.01)
    except OSError:
        time.sleep(0.01)
""",
            3,
        )
    limit = scene.sandbox.info().limits.pids
    scene.judge(
        1 < sampler.processes <= limit + 8 and sampler.slowest_fork < 2,
        scene.in_force("limit pids") + ", timeout",
        f"at most {sampler.processes} processes in it, counted in the host's /proc (limit {limit}); the host itself "
        f"kept starting processes, the slowest in {sampler.slowest_fork * 1000:.0f} ms; " + _ending(scene),
        broken=not scene.tried() or sampler.processes < limit // 2,
    )


def fill_the_disk(scene: Scene) -> None:
    before = {path: os.statvfs(path).f_bavail * os.statvfs(path).f_frsize for path in ("/", "/tmp")}
    scene.attack(
        """
import os
written = 0
def fill(path):
    global written
    number = 0
    while True:
        with open(f"{path}/fill{number}", "wb", buffering=0) as file:
            number += 1
            try:
                while True:
                    written += file.write(bytes(1 << 20))
            except OSError as error:
                if error.errno == 28:
                    raise
for path in ("/home/user", "/tmp", "/dev/shm", "/var/tmp", "/"):
    attempt(lambda: fill(path))
print(written >> 20, "MiB")
print("TRIED", attempts)
""",
        30,
    )
    inside = ""
    full = False
    with suppress(OSError):
        state = os.statvfs(f"/proc/{scene.first}/root/home/user")
        full = state.f_bavail < state.f_blocks * 0.02
        size = state.f_blocks * state.f_frsize // MIB
        inside = f"its disk, seen from the host: {size} MiB, {state.f_bavail * state.f_frsize // MIB} MiB free; "
    lost = max((before[path] - os.statvfs(path).f_bavail * os.statvfs(path).f_frsize) // MIB for path in before)
    scene.judge(
        lost < 150,
        scene.in_force("disk", "tmp"),
        inside + f"the host's / and /tmp lost {max(lost, 0)} MiB meanwhile",
        broken=not scene.tried() or (bool(inside) and not full),
    )


def eat_memory(scene: Scene) -> None:
    with Sampler() as sampler:
        execution = scene.attack(
            """
print("TRIED 1", flush=True)
hoard = []
while True:
    hoard.append(bytearray(b"x" * (8 << 20)))
""",
            20,
        )
    limits = scene.sandbox.info().limits
    # The group also pays for files in memory: that is why its bound is memory + disk + tmp.
    bound = limits.memory + limits.disk + limits.tmp
    error = getattr(execution, "error", None)
    how = f"{error.name}" if error is not None else type(scene.end).__name__
    reason = getattr(scene.end, "reason", "")
    kills = 0
    with suppress(Exception):
        kills = scene.sandbox.stats().get("oom_kills") or 0
    stopped = kills > 0 or reason == "oom" or "Memory" in how
    row = next((row for row in _enforcement(scene) if row.primitive == "limit memory"), None)
    scene.judge(
        stopped and sampler.memory < bound * 1.3,
        f"limit memory ({row.strength})" if row else "limit memory",
        f"at most {sampler.memory // MIB} MiB resident, summed from the host's /proc (limit {limits.memory // MIB} MiB, "
        f"with files {bound // MIB}); kernel's out-of-memory kills: {kills}; reported as {how}{' ' + reason if reason else ''}",
        broken=not stopped and sampler.memory < limits.memory // 2,
    )


def spin(scene: Scene) -> None:
    begun = time.monotonic()
    scene.attack("print('TRIED 1', flush=True)\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass", 2)
    wall = time.monotonic() - begun
    again = scene.sandbox.run_code("1 + 1", timeout=10)
    scene.judge(
        isinstance(scene.end, TimeoutExceededError) and wall < 8 and again.text == "2",
        "timeout, kept by the host's clock",
        f"stopped after {wall:.1f} s by the host's clock (limit 2 s; it catches every exception); "
        f"{_ending(scene)}; the next cell answered {again.text}",
        broken=not scene.tried(),
    )


def flood_output(scene: Scene) -> None:
    before = Processes.resident()
    with Sampler() as sampler:
        try:
            result = scene.sandbox.commands.run("echo TRIED 1 >&2; yes 0123456789abcdef | head -c 10737418240", timeout=6)
        except TimeoutExceededError as error:
            scene.end = error
            result = error.partial
    grown = (max(sampler.own_memory, Processes.resident()) - before) // MIB
    total = getattr(result, "stdout_total", 0)
    kept = len(getattr(result, "stdout", ""))
    scene.output = getattr(result, "stderr", "")
    scene.judge(
        grown < 64 and kept <= 2 * MIB and bool(getattr(result, "truncated", False)),
        "limit output, credit on the stream",
        f"{total / (1 << 30):.1f} GiB counted, {kept / MIB:.1f} MiB kept; this process's memory grew by {max(grown, 0)} MiB; "
        + (_ending(scene) if scene.end else "it ran to its end"),
        broken=not scene.tried() or total < 100 * MIB,
    )


def leave_a_daemon(scene: Scene) -> None:
    scene.attack(
        """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.execvp("sleep", ["ringfence-demo-daemon", "86400"])
    os._exit(0)
time.sleep(0.3)
print("TRIED 1")
"""
    )
    before = Processes.inside()
    daemons = [pid for pid in before if b"ringfence-demo-daemon" in _command_line(pid)]
    begun = time.monotonic()
    scene.sandbox.kill()
    took = (time.monotonic() - begun) * 1000
    left = [pid for pid in before if Processes.started(pid)]
    scene.judge(
        not left,
        "namespace pid: its end is the end of all in it",
        f"the daemon ran as host process {daemons[0] if daemons else '?'}; kill() returned after {took:.0f} ms with "
        f"{len(left)} of {len(before)} processes left in the host's /proc",
        broken=not daemons,
    )


def kill_the_keeper(scene: Scene) -> None:
    born = Processes.started(scene.first)
    scene.attack(
        """
import ctypes, os, resource, signal
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP):
    attempt(lambda: os.kill(1, number))
attempt(lambda: ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0))
attempt(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))
attempt(lambda: open("/proc/1/mem", "wb"))
print("TRIED", attempts, flush=True)
os.kill(-1, signal.SIGKILL)
"""
    )
    answer = scene.sandbox.run_code("6 * 7", timeout=10)
    same = bool(born) and Processes.started(scene.first) == born
    scene.judge(
        same and answer.text == "42",
        scene.in_force("user ids", "capabilities", "seccomp"),
        f"host process {scene.first} is still the one that was started (start time {born}), "
        f"and answered 6 * 7 = {answer.text} after `kill -9 -1`",
        broken=not scene.tried(),
    )


def write_outside(scene: Scene) -> None:
    witness = scene.witness
    control = witness.control_watch()
    scene.attack(
        f"""
import os
def write(path):
    with open(path, "a") as file:
        return file.write("owned")
for path in [{str(witness.victim)!r}, "/proc/1/root" + {str(witness.victim)!r}, "../../../../../../.." + {str(witness.victim)!r},
             "/etc/passwd", "/usr/bin/python3", "/opt/ringfence/ringfence/guest/agent.py", "/proc/sys/kernel/core_pattern",
             "/proc/sys/kernel/hostname", "/sys/kernel/uevent_helper", "/dev/sda", "/dev/mem"]:
    attempt(lambda: write(path))
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for arguments in [(b"none", b"/mnt", b"tmpfs", 0, 0), (b"/", b"/mnt", 0, 4096, 0)]:
    attempt(lambda: (libc.mount(*arguments), os.strerror(ctypes.get_errno())))
attempt(lambda: (libc.unshare(0x10000000), os.strerror(ctypes.get_errno())))
attempt(lambda: os.chroot("/proc/1/root"))
print("TRIED", attempts)
"""
    )
    touches = witness.touches()  # before the hashing below, which opens them too
    changed = witness.changed()
    scene.judge(
        not changed and touches == 0,
        scene.in_force("namespace mnt", "root file system", "capabilities", "seccomp"),
        f"{scene.tried()} ways tried; SHA-256 of the canary, /etc/passwd, core_pattern and host name on the host: "
        f"{'unchanged' if not changed else 'CHANGED: ' + ', '.join(changed)}; canaries opened {touches} times",
        broken=not control or not scene.tried(),
    )


def _ending(scene: Scene) -> str:
    outcome = getattr(scene.end, "outcome", "")
    words = {"interrupted": "interrupted, variables kept", "restarted": "its interpreter was replaced",
             "killed": "its whole process tree was killed", "sandbox_killed": "the sandbox was killed"}  # fmt: skip
    return words.get(outcome, str(getattr(scene.end, "reason", "") or "no deadline was needed"))


def _enforcement(scene: Scene) -> tuple[Any, ...]:
    with suppress(Exception):
        rows = scene.sandbox.info().enforcement
        if rows:
            return rows
    return scene.judgement.facts.get("enforcement", ())


def _command_line(pid: int) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


ATTACKS: list[tuple[str, Callable[[Scene], None]]] = [
    ("read ~/.ssh and /etc/shadow", read_secrets),
    ("reach the internet and cloud metadata", reach_the_network),
    ("fork bomb", fork_bomb),
    ("fill the disk", fill_the_disk),
    ("eat all memory", eat_memory),
    ("spin past the timeout", spin),
    ("print 10 GiB", flood_output),
    ("leave a daemon behind", leave_a_daemon),
    ("kill pid 1", kill_the_keeper),
    ("write outside its files", write_outside),
    ("connect to the host's Unix sockets", host_sockets),
]


@contextmanager
def scene(witness: Witness, judgement: Judgement) -> Iterator[Scene]:
    """A fresh sandbox for one attack; its start is timed."""
    begun = time.perf_counter()
    with Sandbox(memory="256MiB", disk="100MiB", tmp="50MiB", pids=64) as sandbox:
        judgement.start_ms = (time.perf_counter() - begun) * 1000
        judgement.facts["enforcement"] = sandbox.info().enforcement
        yield Scene(witness, judgement, sandbox)


def run_all(witness: Witness, say: Callable[[str], None]) -> Iterator[Judgement]:
    """Every attack, one after the other, each in its own sandbox."""
    with Sandbox() as sandbox:  # the first start warms the template; the attackers' are what a running program sees
        sandbox.run_code("1")
    for name, attack in ATTACKS:
        say(name)
        judgement = Judgement(name)
        begun = time.monotonic()
        try:
            with scene(witness, judgement) as stage:
                attack(stage)
                judgement.facts["output"] = stage.output[-4000:]
        except Exception as error:  # noqa: BLE001 one broken attack must not hide the others
            judgement.verdict = "BROKEN"
            judgement.evidence = f"{type(error).__name__}: {error}"
        judgement.seconds = time.monotonic() - begun
        yield judgement
