"""Drives a kernel over its control socket as the agent does, without a sandbox: for tests of the guest kernel.

`Zygote` is a warmed process (exec'd, so that the test process stays clean) that forks kernels on request; `Kernel` is
one of them, with its control socket and output pipes on this side.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.guest.kernel import NUDGE, token_of

PYTHON = os.environ.get("RINGFENCE_TEST_PYTHON") or sys.executable
"""Interpreter of the kernels: set RINGFENCE_TEST_PYTHON to test another Python or IPython than that of the tests."""

SOURCE = str(Path(__file__).resolve().parents[2] / "src")

# Forks a kernel for each [length][JSON config] with three descriptors; the child becomes the kernel.
ZYGOTE = r"""
import array, json, os, socket, struct, sys
sys.path.insert(0, SOURCE)
wire = socket.socket(fileno=int(sys.argv[1]))
wire.set_inheritable(False)
from ringfence.guest import python_kernel
problems = python_kernel.warm(json.loads(sys.argv[2]))
wire.sendall(json.dumps({
    "problems": problems, "threads": os.listdir("/proc/self/task"),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd")), "wire": wire.fileno(),
    "asyncio_loop": repr(getattr(sys.modules.get("IPython.core.async_helpers"), "_asyncio_event_loop", None)),
}).encode() + b"\n")
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    data, ancillary, flags, address = wire.recvmsg(65536, 4096)
    if not data:
        os._exit(0)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        fds.frombytes(payload)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wire.close()
        control, out, err = fds
        os.dup2(out, 1); os.dup2(err, 2)
        null = os.open("/dev/null", os.O_RDONLY); os.dup2(null, 0)
        for fd in (null, out, err):
            os.close(fd)
        from ringfence.guest import kernel
        kernel.run(socket.socket(fileno=control), json.loads(data))
    for fd in fds:
        os.close(fd)
    wire.sendall(b"%d\n" % pid)
""".replace("SOURCE", repr(SOURCE))


@dataclass
class Run:
    """Everything that came out of one execution."""

    status: str = ""
    execution_count: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, str] | None = None
    stdout: str = ""
    stderr: str = ""
    dropped: int = 0
    died: bool = False

    @property
    def main(self) -> dict[str, Any] | None:
        mains = [result["data"] for result in self.results if result["main"]]
        return mains[-1] if mains else None

    @property
    def text(self) -> str | None:
        return self.main.get("text/plain") if self.main else None

    @property
    def displays(self) -> list[dict[str, Any]]:
        return [result["data"] for result in self.results if not result["main"]]


class Zygote:
    def __init__(self, modules: list[str] = (), python: str = PYTHON, home: str = "/nonexistent",  # type: ignore[assignment]
                 env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.home = home
        self.process = subprocess.Popen(
            [python, "-I", "-c", ZYGOTE, str(theirs.fileno()), json.dumps(list(modules))], pass_fds=[theirs.fileno()],
            cwd="/", env={"HOME": home, "PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8",
                          **(env or {})},
            stdin=subprocess.DEVNULL, close_fds=True)
        theirs.close()
        self.wire = ours
        self.report = json.loads(self._line())

    def _line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            piece = self.wire.recv(65536)
            if not piece:
                raise RuntimeError("the zygote died")
            data += piece
        return data

    def kernel(self, **config: Any) -> Kernel:
        control, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        config.setdefault("cwd", "/tmp")
        config.setdefault("random", os.urandom(32).hex())
        config["secret"] = os.urandom(32).hex()
        config.setdefault("context", "default")
        config.setdefault("language", "python")
        self.wire.sendmsg([json.dumps(config).encode()], [(
            socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno(), out_w, err_w]))])
        for fd in (out_w, err_w):
            os.close(fd)
        theirs.close()
        return Kernel(int(self._line()), control, out_r, err_r, bytes.fromhex(config["secret"]))

    def close(self) -> None:
        self.wire.close()
        self.process.wait(10)


class Kernel:
    def __init__(self, pid: int, control: socket.socket, out: int, err: int, secret: bytes) -> None:
        self.secret = secret
        self.pid, self.control, self.out, self.err = pid, control, out, err
        self.buffer = bytearray()
        self.zero_token_messages = 0
        kind, token, payload = self._message(time.monotonic() + 20)
        assert (kind, token) == (4, bytes(16)), (kind, token, payload)

    def _take(self) -> tuple[int, bytes, bytes] | None:
        if len(self.buffer) < 21:
            return None
        length, kind, token = struct.unpack_from("!IB16s", self.buffer)
        if len(self.buffer) < 21 + length:
            return None
        payload = bytes(self.buffer[21:21 + length])
        del self.buffer[:21 + length]
        return kind, token, payload

    def _message(self, deadline: float) -> tuple[int, bytes, bytes]:
        while True:
            message = self._take()
            if message:
                return message
            self.control.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self.control.recv(1 << 20)
            if not piece:
                raise EOFError
            self.buffer += piece

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.control.settimeout(10)
        self.control.sendall(struct.pack("!I", len(data)) + data)

    def start(self, code: str, **options: Any) -> bytes:
        nonce = os.urandom(16)
        self.send({"do": "execute", "nonce": nonce.hex(), "code": code, "quiet": False, **options})
        return token_of(self.secret, nonce)

    def run(self, code: str, timeout: float = 20, interrupt_after: float | None = None,
            interrupt_on: str | None = None, **options: Any) -> Run:
        return self.collect(self.start(code, **options), timeout, interrupt_after, interrupt_on)

    def collect(self, token: bytes, timeout: float = 20, interrupt_after: float | None = None,
                interrupt_on: str | None = None) -> Run:
        """Reads everything up to DONE of `token`, and then what is in the pipes, as the agent does."""
        run = Run()
        streams = {self.out: bytearray(), self.err: bytearray()}
        start = time.monotonic()
        poller = select.poll()
        for fd in (self.control.fileno(), self.out, self.err):
            poller.register(fd, select.POLLIN)
        finished = False
        nudge_at = float("inf")
        while True:
            while (message := self._take()) is not None:
                kind, message_token, payload = message
                if message_token != token:
                    run.dropped += 1
                elif kind == 1:
                    run.results.append(json.loads(payload))
                elif kind == 2:
                    run.error = json.loads(payload)
                elif kind == 3:
                    done = json.loads(payload)
                    run.status, run.execution_count = done["status"], done["execution_count"]
                    finished = True
            now = time.monotonic()
            if now - start > timeout:
                raise TimeoutError(f"no DONE in {timeout} s; so far {run} {bytes(streams[self.out])[-500:]!r} "
                                   f"{bytes(streams[self.err])[-2000:]!r}")
            if (interrupt_after is not None and now - start > interrupt_after) or (
                    interrupt_on is not None and interrupt_on.encode() in streams[self.out]):
                os.kill(self.pid, signal.SIGINT)
                interrupt_after = interrupt_on = None
                nudge_at = now + 0.05   # as the agent does
            if now > nudge_at and not finished:
                os.kill(self.pid, NUDGE)
                nudge_at = float("inf")
            ready = poller.poll(0 if finished else 50)
            if finished and not [1 for fd, _ in ready if fd != self.control.fileno()]:
                break
            for fd, _event in ready:
                if fd == self.control.fileno():
                    if finished:
                        continue
                    piece = self.control.recv(1 << 20)
                    if not piece:
                        run.died = finished = True
                        poller.unregister(fd)
                    self.buffer += piece
                else:
                    piece = os.read(fd, 1 << 20)
                    if not piece:
                        poller.unregister(fd)
                    streams[fd] += piece
        run.stdout = streams[self.out].decode("utf-8", "replace")
        run.stderr = streams[self.err].decode("utf-8", "replace")
        return run

    def close(self) -> None:
        self.control.close()
        deadline = time.monotonic() + 5
        while os.path.exists(f"/proc/{self.pid}") and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.close(self.out)
        os.close(self.err)
