"""Where attacks are fought: the same probe inside a sandbox and outside, and what shows on the host who won.

A probe is a file in `probes/`. `inside` runs it as a command of a sandbox, `outside` as a plain process of
whoever runs the tests, which is the positive control: an attack that fails there too proves nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringfence import Sandbox

PROBES = Path(__file__).parent / "probes"
INSIDE = "/home/user/probes"
SMALL: dict[str, Any] = {"memory": "128MiB", "pids": 64, "disk": "32MiB", "tmp": "16MiB"}
"""Limits of an attacked sandbox: a test that fails must not hurt the machine."""
STOPPED = ("EPERM", "ENOSYS")


def memory_is_hard(sandbox: Sandbox) -> bool:
    """Whether a control group holds the memory here; an ordinary user without delegation has it watched."""
    return any(row.primitive == "limit memory" and row.strength == "hard" for row in sandbox.info().enforcement)


def one_uid(sandbox: Sandbox) -> bool:
    """Whether agent and user code share the only uid this user has."""
    return any(row.primitive == "user ids" and row.detail.startswith("one id") for row in sandbox.info().enforcement)


def equip(sandbox: Sandbox) -> Sandbox:
    """Put the probes into a sandbox."""
    for path in PROBES.glob("*.py"):
        sandbox.files.write(f"{INSIDE}/{path.name}", path.read_bytes())
    return sandbox


def _answers(text: str) -> dict[str, Any]:
    return dict(json.loads(line) for line in text.splitlines() if line.startswith("["))


def inside(sandbox: Sandbox, probe: str, *arguments: object, timeout: float = 40) -> dict[str, Any]:
    """What the probe said in the sandbox, by name of the attempt. A probe that breaks off proves nothing."""
    result = sandbox.commands.run(
        ["python3", f"{INSIDE}/{probe}.py", *map(str, arguments)], timeout=timeout
    )
    assert result.exit_code == 0, f"the probe broke off: {result.stderr[-2000:]}"
    return _answers(result.stdout)


def outside(probe: str, *arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """The positive control: the same probe without a sandbox. What it mounts ends with it, in a namespace of its own."""
    apart = ["unshare", "--mount", "--propagation", "private"] if os.geteuid() == 0 else []
    result = subprocess.run(
        [*apart, sys.executable, PROBES / f"{probe}.py", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, cwd=cwd, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"the control broke off: {result.stderr[-2000:]}"
    return _answers(result.stdout)


ORDINARY = {"threads": 4, "subprocess": "42", "getifaddrs": 0, "loopback": "own loopback", "files": ["file2"]}


def assert_ordinary(sandbox: Sandbox) -> None:
    """Programs that mean no harm still work: a refusal that breaks Python is no refusal."""
    assert inside(sandbox, "ordinary") == ORDINARY


def assert_answers(sandbox: Sandbox, seconds: float = 5) -> None:
    """Code, commands and files of the sandbox answer."""
    started = time.monotonic()
    assert sandbox.run_code("6 * 7", timeout=seconds).text == "42"
    assert sandbox.commands.run(["echo", "here"], timeout=seconds).stdout == "here\n"
    sandbox.files.write("/tmp/answers", b"x" * 100_000)
    assert len(sandbox.files.read("/tmp/answers", "bytes")) == 100_000
    assert time.monotonic() - started < 3 * seconds


def until(handle: Any, text: str, seconds: float = 10) -> Any:
    """Wait until a background command has printed `text`; returns its handle."""
    deadline = time.monotonic() + seconds
    while text not in handle.stdout and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text in handle.stdout, f"the attack did not begin: {handle!r} {handle.stderr[-500:]}"
    return handle


def canary() -> str:
    return "canary-" + secrets.token_hex(16)


class Sink:
    """Listens on loopback TCP and UDP, an abstract and a path socket and a FIFO, and keeps every byte."""

    def __init__(self, directory: Path):
        self.received = b""
        self.directory = directory
        name = "ringfence-sink-" + secrets.token_hex(4)
        self._doors: list[socket.socket] = []
        self._open(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self._open(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self._open(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + name)
        self.path = str(directory / "socket")
        self._open(socket.AF_UNIX, socket.SOCK_STREAM, self.path)
        os.chmod(self.path, 0o777)
        self.fifo = str(directory / "fifo")
        os.mkfifo(self.fifo)
        os.chmod(self.fifo, 0o666)
        self._fifo = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        tcp, udp = (door.getsockname()[1] for door in self._doors[:2])
        self.network = [f"tcp:127.0.0.1:{tcp}", f"udp:127.0.0.1:{udp}", f"abstract:{name}"]
        self.paths = [f"unix:{self.path}", f"fifo:{self.fifo}"]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _open(self, family: int, kind: int, place: Any) -> None:
        door = socket.socket(family, kind)
        door.bind(place)
        if kind == socket.SOCK_STREAM:
            door.listen()
        door.setblocking(False)
        self._doors.append(door)

    def _listen(self) -> None:
        while not self._over.wait(0.02):
            for door in self._doors:
                try:
                    if door.type == socket.SOCK_STREAM:
                        with door.accept()[0] as guest:
                            guest.settimeout(1)
                            self.received += b"(a connection)" + guest.recv(4096)
                    else:
                        self.received += door.recv(4096)
                except OSError:
                    continue
            try:
                self.received += os.read(self._fifo, 4096)
            except OSError:
                continue

    def saw(self, token: str, seconds: float = 0.3) -> int:
        """How often the token has come, after a moment for what is under way."""
        time.sleep(seconds)
        return self.received.count(token.encode())

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for door in self._doors:
            door.close()
        os.close(self._fifo)
        for path in (self.path, self.fifo):
            os.unlink(path)


@contextmanager
def sampled(read: Callable[[], int], seconds: float = 0.02) -> Iterator[list[int]]:
    """Read a host counter again and again; the list holds the highest value seen."""
    highest = [read()]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(seconds):
            highest[0] = max(highest[0], read())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()
