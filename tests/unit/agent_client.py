"""A host for tests of the guest agent: starts one as pid 1 of its own pid namespace and speaks to it.

No engine is needed: the agent gets a pid namespace, its own /proc and a tmpfs, and as root real job marks and
the agent's own uid; otherwise it runs in the single-uid way.
"""

# ruff: noqa: BLE001, S102, SIM115  (the stand-in kernel runs code and leaves its streams open, as kernels do)

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import Any

from ringfence.guest import agent, contexts
from ringfence.guest.kernel import token_of
from ringfence.guest.protocol import CLOSE, DATA, EVENT, MAX_PAYLOAD, STDERR, STDIN, STDOUT, Mux
from ringfence.linux.syscalls import close_from

AGENT_ID = 65533
USER_ID = 1000
FIRST_MARK = 70000
HOME = "/mnt/home"
_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWPID, _NEWUSER = 0x20000, 0x20000000, 0x10000000


def can_isolate() -> str:
    """Empty when this machine lets tests make the namespaces they need, else the reason."""
    pid = os.fork()
    if pid == 0:
        flags = _NEWNS | _NEWPID | (_NEWUSER if os.geteuid() else 0)
        os._exit(0 if _libc.unshare(flags) == 0 else 1)
    return "" if os.waitpid(pid, 0)[1] == 0 else "no pid and mount namespaces for this user here"


def _mount(source: bytes, target: bytes, kind: bytes, flags: int = 0, data: bytes | None = None) -> None:
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), data) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target!r}")


def _keep_three_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    wanted = 1 << 5 | 1 << 6 | 1 << 7  # KILL, SETGID, SETUID
    data = (ctypes.c_uint32 * 6)(wanted, wanted, 0, 0, 0, 0)
    if _libc.capset(ctypes.byref(header), ctypes.byref(data)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class AgentProcess:
    """An agent and the host's end of its stream. Use in a `with`."""

    def __init__(self, single: bool = False, marks: int = 200, kernel: Any = None, files: int | None = None, **boot: Any):
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                self._outer(theirs, single, marks, kernel, files, boot)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(99)
        theirs.close()
        self.client = Client(ours)

    def _outer(self, stream: socket.socket, single: bool, marks: int, kernel: Any, files: int | None, boot: dict) -> None:
        uid, gid = os.geteuid(), os.getegid()
        if _libc.unshare(_NEWNS | _NEWPID | (_NEWUSER if uid else 0)):
            raise OSError(ctypes.get_errno(), "unshare")
        if uid:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{USER_ID} {uid} 1"), ("gid_map", f"{USER_ID} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        inner = os.fork()
        if inner:
            stream.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _mount(b"none", b"/", b"", 0x4000 | 0x40000)  # private, recursive
        _mount(b"proc", b"/proc", b"proc")
        _mount(b"tmpfs", b"/mnt", b"tmpfs", 0, b"mode=755")
        os.mkdir(HOME)
        os.chmod("/mnt", 0o755)
        if uid == 0:
            os.chown(HOME, USER_ID, USER_ID)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        # What the tests before left open here is no descriptor of an agent's: some laws count those.
        os.dup2(stream.fileno(), 3)
        stream.detach()
        close_from([0, 1, 2, 3])
        stream = socket.socket(fileno=3)
        if kernel is not None:
            contexts.run_kernel = kernel
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        if single:
            if uid == 0:
                os.setgroups([USER_ID])
                os.setresgid(USER_ID, USER_ID, USER_ID)
                os.setresuid(USER_ID, USER_ID, USER_ID)
        else:
            _libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
            os.setgroups([])
            os.setresgid(AGENT_ID, AGENT_ID, AGENT_ID)
            os.setresuid(AGENT_ID, AGENT_ID, AGENT_ID)
            _keep_three_capabilities()
        os.chdir("/")
        agent.serve(stream, {
            "users": {"user": {"uid": USER_ID, "gid": USER_ID, "home": HOME, "shell": "/bin/bash"}},
            "default_user": "user", "single_uid": single, "agent_uid": AGENT_ID,
            "job_gids": None if single else [FIRST_MARK, marks], "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
            "cwd": HOME, "template": "plain", "kernel": True, "oom_score_adj": 500, **boot,
        })  # fmt: skip

    @property
    def init(self) -> int:
        """The agent's pid as this process sees it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
                children = file.read().split()
            if children:
                return int(children[0])
            time.sleep(0.002)
        raise AssertionError("the agent did not start")

    def root(self, path: str) -> str:
        """Where the agent's `path` is for this process."""
        return f"/proc/{self.init}/root{path}"

    def __enter__(self) -> Client:
        self.client.process = self
        return self.client

    def __exit__(self, *unused: object) -> None:
        self.client.socket.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                return
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("the agent outlived its stream")


class Channel:
    """What has arrived on one channel."""

    def __init__(self, number: int):
        self.number = number
        self.streams: dict[int, bytearray] = {}
        self.events: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self.discard = False
        self.received = 0
        self.hold = False  # grant nothing

    def text(self, stream: int = STDOUT) -> bytes:
        return bytes(self.streams.get(stream, b""))

    def event(self, key: str) -> Any:
        return next((item[key] for item in self.events if key in item), None)


class Client:
    """The host's end, one thread."""

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.socket.setblocking(False)
        self.mux = Mux("host")
        self.channels: dict[int, Channel] = {}
        self.process: Any = None
        self.eof = False

    def open(self, op: str, **request: Any) -> Channel:
        number = self.mux.open({"op": op, **request})
        channel = self.channels[number] = Channel(number)
        return channel

    def flush(self) -> None:
        while self.mux.queued:
            try:
                self.mux.consumed(self.socket.sendmsg(self.mux.pending()))
            except BlockingIOError:
                return

    def step(self, timeout: float) -> None:
        self.flush()
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN | (select.POLLOUT if self.mux.queued else 0))
        for _, events in poll.poll(timeout * 1000):
            if events & select.POLLOUT:
                self.flush()
            if events & ~select.POLLOUT:
                try:
                    data = self.socket.recv(1 << 18)
                except BlockingIOError:
                    continue
                if not data:
                    self.eof = True
                    return
                for event in self.mux.receive(data):
                    self._event(event)

    def _event(self, event: Any) -> None:
        channel = self.channels.get(event.channel)
        if channel is None:
            return
        if event.kind == DATA:
            channel.received += len(event.payload)
            if not channel.discard:
                channel.streams.setdefault(event.stream, bytearray()).extend(event.payload)
            if not channel.hold:
                self.mux.grant(event.channel, len(event.payload))
        elif event.kind == EVENT:
            channel.events.append(event.payload)
        elif event.kind == CLOSE:
            channel.result = event.payload

    def until(self, condition: Any, seconds: float = 15.0) -> None:
        """Serve the stream until `condition()` holds. Raises AssertionError when it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, "nothing more came"
            assert not self.eof, "the agent ended the stream"
            self.step(min(left, 0.5))
        self.flush()

    def wait(self, *channels: Channel, seconds: float = 15.0) -> dict[str, Any]:
        self.until(lambda: all(channel.result is not None for channel in channels), seconds)
        assert channels[-1].result is not None
        return channels[-1].result

    def call(self, op: str, **request: Any) -> dict[str, Any]:
        return self.wait(self.open(op, **request))

    def run(self, *argv: Any, **request: Any) -> Channel:
        channel = self.open("exec", argv=list(argv), **request)
        self.wait(channel)
        return channel

    def shell(self, script: str, **request: Any) -> Channel:
        return self.run("/bin/bash", "-c", script, **request)

    def started(self, channel: Channel) -> int:
        self.until(lambda: channel.event("started") is not None or channel.result is not None)
        return channel.event("started")["pid"]

    def send(self, channel: Channel, data: bytes, stream: int = STDIN) -> None:
        view = memoryview(data)
        while view:
            room = min(self.mux.data_room(channel.number), MAX_PAYLOAD, len(view))
            if room <= 0 or self.mux.queued > 4 << 20:
                self.step(1.0)
                if channel.result is not None:
                    return
                continue
            self.mux.send_data(channel.number, stream, bytes(view[:room]))
            view = view[room:]
            self.flush()

    def pids(self) -> int:
        """How many processes the agent's pid namespace holds, the agent included."""
        init = self.process.init
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        state, parent = file.read().rpartition(")")[2].split()[:2]
                except OSError:
                    continue
                if state not in "ZX":
                    parents[int(name)] = int(parent)

        def inside(pid: int) -> bool:
            while pid not in (0, 1, init):
                pid = parents.get(pid, 0)
            return pid == init

        return sum(inside(pid) for pid in parents)


def fake_kernel(control: socket.socket, config: dict[str, Any]) -> None:
    """A tiny kernel that speaks the contract: `code` is Python, run by exec with `result(...)` at hand."""
    import json
    import sys

    def message(kind: int, token: bytes, payload: Any) -> None:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        control.sendall(struct.pack("!IB16s", len(raw), kind, token) + raw)

    def exactly(count: int) -> bytes:
        raw = b""
        while len(raw) < count:
            piece = control.recv(count - len(raw))
            if not piece:
                os._exit(0)
            raw += piece
        return raw

    running = [False]

    def interrupted(*unused: Any) -> None:
        if running[0]:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(config["env"])
    names: dict[str, Any] = {"config": config, "control": control, "message": message}
    count = 0
    message(4, bytes(16), b"{}")
    while True:
        request = json.loads(exactly(struct.unpack("!I", exactly(4))[0]))
        token = token_of(bytes.fromhex(config["secret"]), bytes.fromhex(request["nonce"]))
        names["token"] = token
        names["result"] = lambda value, token=token: message(1, token, {"data": {"text/plain": value}, "main": True, "metadata": {}})
        count += 1
        status = "ok"
        try:
            running[0] = True
            exec(request["code"], names)
        except KeyboardInterrupt:
            status = "interrupted"
        except Exception as error:
            status = "error"
            message(2, token, {"name": type(error).__name__, "value": str(error), "traceback": ""})
        finally:
            running[0] = False
        sys.stdout.flush()
        sys.stderr.flush()
        message(3, token, {"status": status, "execution_count": count})


def results_of(channel: Channel) -> list[tuple[int, bytes]]:
    """The messages of the RESULTS stream."""
    raw, found = channel.text(4), []
    while raw:
        length, kind = struct.unpack_from("!IB", raw)
        found.append((kind, raw[5 : 5 + length]))
        raw = raw[5 + length :]
    return found


__all__ = ["STDERR", "STDIN", "STDOUT", "AgentProcess", "Channel", "Client", "can_isolate", "fake_kernel", "results_of"]
