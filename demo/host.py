"""The host's own eyes: what the demo believes about an attack comes from here, never from the attacking script.

Guards against a demonstration that proves nothing. Each witness first shows that it works (its *control*): the
listener logs a connection of our own, the file watch sees us open the file, the process count sees a process we
start. Only then does "nothing was seen" mean anything. All of it is read by this process, outside the sandboxes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import select
import socket
import struct
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

IN_ACCESS, IN_MODIFY, IN_OPEN, IN_NONBLOCK = 0x1, 0x2, 0x20, 0o4000


class Processes:
    """This process's descendants, from /proc: sandboxes are among them, whatever they call themselves."""

    @staticmethod
    def tree(root: int | None = None) -> dict[int, int]:
        """{pid: parent} of all descendants of `root` (default: this process)."""
        parents: dict[int, int] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    stat = Path("/proc", name, "stat").read_text()
                    parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
        wanted, found = {root or os.getpid()}, {}
        grew = True
        while grew:
            grew = False
            for pid, parent in parents.items():
                if parent in wanted and pid not in found:
                    found[pid] = parent
                    wanted.add(pid)
                    grew = True
        return found

    @staticmethod
    def depth(pid: int) -> int:
        """How many pid namespaces deep a process is (NSpid, proc(5)); 1 is the host's own."""
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    return len(line.split()) - 1
        return 0

    @classmethod
    def inside(cls) -> list[int]:
        """Processes of all sandboxes: two pid namespaces below ours, the zygote being one below."""
        own = cls.depth(os.getpid())
        return [pid for pid in cls.tree() if cls.depth(pid) >= own + 2]

    @classmethod
    def first(cls) -> int:
        """The first process (pid 1 inside) of the only sandbox that runs; 0 when there is none."""
        inside = cls.inside()
        parents = cls.tree()
        return next((pid for pid in inside if parents.get(pid) not in inside), 0)

    @staticmethod
    def started(pid: int) -> str:
        """When a process started, in clock ticks since boot: with the pid, its identity. "" when it is gone."""
        with suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return ""

    @staticmethod
    def resident(pid: int | str = "self") -> int:
        """Memory of one process in bytes (VmRSS)."""
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0


class Sampler:
    """Looks at the sandbox's processes 20 times a second while an attack runs; keeps the peaks."""

    def __init__(self) -> None:
        self.processes = 0
        self.memory = 0
        self.own_memory = 0
        self.slowest_fork = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            inside = Processes.inside()
            self.processes = max(self.processes, len(inside))
            self.memory = max(self.memory, sum(Processes.resident(pid) for pid in inside))
            self.own_memory = max(self.own_memory, Processes.resident())
            begun = time.monotonic()
            subprocess.run(["true"], check=False)  # does the host still start processes at once?
            self.slowest_fork = max(self.slowest_fork, time.monotonic() - begun)
            self._stop.wait(0.05)


class Witness:
    """Canaries on the host's disk, listeners on its loopback and its Unix sockets. All of it temporary."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ringfence-demo-")
        self.home = Path(self._directory.name)
        self.secret = secrets.token_hex(16)
        ssh = self.home / ".ssh"
        ssh.mkdir(mode=0o755)
        self.key = ssh / "id_ed25519"
        self.key.write_text(f"canary {self.secret}\n")
        self.key.chmod(0o644)  # readable by anybody who gets there
        self.victim = self.home / "report.txt"
        self.victim.write_text("do not change\n")
        self.victim.chmod(0o666)
        self.home.chmod(0o777)
        self.unix_path = self.home / "service.sock"
        self.abstract = f"ringfence-demo-{self.secret[:8]}"
        self.connections: list[str] = []
        self._sockets: list[socket.socket] = []
        self._wake, self._woken = os.pipe()
        self._listen()
        self._watch = self._start_watch()
        self._hashes = self._hash()

    # Listeners -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        tcp = socket.socket()
        tcp.bind(("0.0.0.0", 0))
        self.port = tcp.getsockname()[1]
        path, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        path.bind(str(self.unix_path))
        self.unix_path.chmod(0o777)
        abstract.bind("\0" + self.abstract)
        self._sockets = [tcp, path, abstract]
        for each in self._sockets:
            each.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        names = {self._sockets[0]: "tcp", self._sockets[1]: "unix path", self._sockets[2]: "unix abstract"}
        while True:
            ready = select.select([*self._sockets, self._wake], [], [])[0]
            if self._wake in ready:
                return
            for each in (each for each in self._sockets if each in ready):
                connection, _ = each.accept()
                self.connections.append(names[each])
                connection.close()

    def control_listeners(self) -> bool:
        """Connect to each listener ourselves: the log must show all three. Empties the log."""
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", self.port)),
            (socket.AF_UNIX, str(self.unix_path)),
            (socket.AF_UNIX, "\0" + self.abstract),
        ):
            with socket.socket(family) as each:
                each.connect(address)
        until = time.monotonic() + 2
        while len(self.connections) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        works = sorted(self.connections) == ["tcp", "unix abstract", "unix path"]
        self.connections.clear()
        return works

    def address(self) -> str:
        """This machine's address towards the internet; a UDP connect sends nothing."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each, suppress(OSError):
            each.connect(("192.0.2.1", 9))
            return each.getsockname()[0]
        return "127.0.0.1"

    # Files ---------------------------------------------------------------------------------------------

    def _start_watch(self) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.inotify_init1(IN_NONBLOCK)
        for path in (self.key, self.victim):
            if libc.inotify_add_watch(descriptor, os.fsencode(path), IN_ACCESS | IN_MODIFY | IN_OPEN) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
        return descriptor

    def touches(self) -> int:
        """How often anybody opened, read or changed a canary since the last call (inotify(7))."""
        count = 0
        with suppress(BlockingIOError):
            while data := os.read(self._watch, 1 << 16):
                while data:
                    length = struct.unpack_from("iIII", data)[3]
                    data = data[16 + length :]
                    count += 1
        return count

    def control_watch(self) -> bool:
        """Read a canary ourselves: the watch must see it."""
        self.touches()
        self.key.read_text()
        return self.touches() > 0

    def _hash(self) -> dict[str, str]:
        hashes = {}
        for path in (self.victim, self.key, Path("/etc/passwd"), Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/kernel/hostname")):
            with suppress(OSError):
                hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        hashes["names in the canary's directory"] = ",".join(sorted(os.listdir(self.home)))
        return hashes

    def changed(self) -> list[str]:
        """Canaries and system files whose content is not what it was at the start."""
        now = self._hash()
        return [name for name, value in self._hashes.items() if now.get(name) != value]

    @staticmethod
    def shadow_lines() -> list[str]:
        """Lines of the real /etc/shadow that hold a hash, where we may read it: none may come out of a sandbox."""
        with suppress(OSError):
            return [line for line in Path("/etc/shadow").read_text().splitlines() if len(line) > 8]
        return []

    def close(self) -> None:
        os.write(self._woken, b"x")
        os.close(self._watch)
        for each in self._sockets:
            each.close()
        self._directory.cleanup()
