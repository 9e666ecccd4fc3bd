"""The agent's answer to `sudo`: it runs a command as root for a process inside, and hands its end back.

Only in a sandbox whose policy has `root: true`. Asking is free for the sandbox's `user` and for root: what holds root
is around the sandbox, not between the two. Guards the agent, which reads here what user code wrote: it never waits,
sizes and counts are bounded, descriptors are passed to the child and never read, a target id is checked by the kernel
in the namespace where the agent's ids do not exist, and the job that asked is known from the kernel (the peer's
groups, or its keeper), so that what sudo starts ends with it. A client that dies takes its command along.

Facts: unix(7) (SO_PEERCRED, SO_PEERGROUPS, SCM_RIGHTS), sudo(8).
"""

from __future__ import annotations

import json
import os
import socket
import struct

from ringfence.guest import inner, processes
from ringfence.guest.credentials import User, encode
from ringfence.guest.jobs import Refused, Terminal, become
from ringfence.guest.pipes import new_pipe
from ringfence.guest.sudo import ADDRESS, LENGTH, MAXIMUM_REQUEST

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import Any

    from ringfence.guest.agent import Agent
    from ringfence.guest.keepers import Keepers

MAX_ASKING = 32  # connections at a time: each holds five descriptors until its command runs, one afterwards
_MAX_WORDS = 20_000
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59
_STREAMS = 4  # descriptors of a request: input, output, errors, working directory
_HANDED_ON = frozenset((1, 2, 3, 10, 12, 14, 15, 18, 20))  # what sudo(8) relays; also SIGTSTP and SIGCONT


class Elevation:
    """The listening socket, and the commands that run for somebody."""

    def __init__(self, agent: Agent):
        self.agent = agent
        self.asking: set[Asking] = set()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.bind(ADDRESS)
        self.socket.listen(MAX_ASKING)
        agent.loop.watch(self.socket.fileno(), self._accept)

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return
        if len(self.asking) >= MAX_ASKING:
            connection.close()
            return
        try:
            self.agent.check_descriptors(connection.fileno() + _STREAMS)
            connection.setblocking(False)
            self.asking.add(Asking(self, connection))
        except OSError:
            connection.close()


class Asking:
    """One client of sudo and its command."""

    def __init__(self, service: Elevation, connection: socket.socket):
        self.service = service
        self.agent = service.agent
        assert self.agent.keepers is not None
        self._keepers: Keepers = self.agent.keepers
        self._socket = connection
        self._descriptor = connection.fileno()
        self._streams: list[int] = []
        self._raw = bytearray()
        self._wanted = -1
        self.pid = 0
        self._report = -1
        self._failed = False
        self._detached = False
        self._kill: processes.TreeKill | None = None
        self.agent.loop.watch(self._descriptor, self._readable)

    def _readable(self, events: int) -> None:
        try:
            if self._wanted < 0:
                self._begin()
            elif self.pid:
                self._signals()
            else:
                self._more()
        except (BlockingIOError, InterruptedError):
            return
        except Refused as refusal:
            self._refuse(str(refusal))
        except (ValueError, KeyError, TypeError, RecursionError, struct.error):
            self._refuse("this is no request of sudo's")
        except OSError as error:
            self._refuse(f"the command can't start: {error.strerror}")

    def _begin(self) -> None:
        """The length of the request, and with it the descriptors."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, LENGTH.size, _STREAMS, socket.MSG_CMSG_CLOEXEC)
        self._streams += descriptors
        if len(data) != LENGTH.size or len(self._streams) != _STREAMS:
            raise ValueError("a length and four descriptors were expected")
        self._wanted = LENGTH.unpack(data)[0]
        if not 0 < self._wanted <= MAXIMUM_REQUEST:
            raise ValueError("a request of that length is not taken")

    def _more(self) -> None:
        data = self._socket.recv(min(64 << 10, self._wanted - len(self._raw)))
        if not data:
            self.close()
            return
        self._raw += data
        if len(self._raw) == self._wanted:
            request = json.loads(self._raw)
            self._raw = bytearray()
            self._run(request)

    def _job(self) -> int:
        """The mark of the job that asks. Raises Refused."""
        pid, uid, _ = _CREDENTIALS.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in {user.uid for user in self.agent.credentials.users.values()}:
            raise Refused("permission", "only `user` and `root` may use sudo in this sandbox")
        try:
            raw = self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
        except OSError:
            raw = b""
        for (group,) in struct.iter_unpack("I", raw[: len(raw) & ~3]):
            if self.agent.is_mark(group):
                return group
        mark = self._keepers.mark_of(pid)
        if mark is None:
            raise Refused("invalid", "the process that asks belongs to no command of this sandbox")
        return mark

    def _run(self, request: dict[str, Any]) -> None:
        agent = self.agent
        mark = self._job()
        argv = [encode(str(word)) for word in request["argv"]]
        env = {encode(str(name)): encode(str(value)) for name, value in request["env"]}
        if not argv or not argv[0] or len(argv) + len(env) > _MAX_WORDS or any(b"\0" in word for word in [*argv, *env, *env.values()]):
            raise ValueError("not an argument list")
        user = User("", _identifier(request["uid"]), _identifier(request["gid"]), "/", "/bin/sh")
        groups = [_identifier(group) for group in request["groups"]][:1000]
        terminals = [number for number in request.get("terminals") or () if number in (0, 1, 2)]
        directory = encode(str(request["cwd"]))
        master, path = -1, b""
        streams = list(self._streams[:3])
        if terminals:
            terminal = Terminal(agent.credentials, user, bytes.fromhex(request["size"])[:8].ljust(8, b"\0"))
            master, path = terminal.master, terminal.path
            os.set_blocking(master, True)  # the client's; the agent closes its copy in a moment
        read = -1
        try:
            read, write = new_pipe()
            try:
                pid = self._keepers.fork(mark)
            except OSError:
                os.close(write)
                raise
            if pid == 0:
                self._child(argv, env, user, groups, mark, streams, terminals, path, directory, write)
            os.close(write)
            self.pid, self._report = pid, read
            agent.children[pid] = self._exited
            agent.loop.watch(read, self._reported)
            if master >= 0:
                socket.send_fds(self._socket, [b"\n"], [master])
        finally:
            if master >= 0:
                os.close(master)
            if not self.pid and read >= 0:
                os.close(read)
            self._close_streams()
        if request.get("background") is True:
            self._detached = True
            self._answer({"over": 0})

    def _child(
        self, argv: list[bytes], env: dict[bytes, bytes], user: User, groups: list[int], mark: int, streams: list[int],
        terminals: list[int], terminal: bytes, directory: bytes, report: int,
    ) -> None:  # fmt: skip
        """In the job's first process. Never returns."""

        def shed() -> None:
            self.agent.credentials.shed(user, mark, dumpable=False, groups=groups)
            if terminal:
                # A session leader that opens a terminal gets it as its controlling one.
                slave = os.open(terminal, os.O_RDWR)
                for number in terminals:
                    streams[number] = slave
            if directory:
                os.fchdir(self._streams[3])

        try:
            # `streams` is filled in by `shed`, before it is read.
            become(argv, env, streams, None, report, shed, directory or self._streams[3])
        finally:
            os._exit(127)

    def _reported(self, events: int) -> None:
        """The exec went through (end of the pipe), or failed."""
        descriptor, self._report = self._report, -1
        self.agent.loop.forget(descriptor)
        text = os.read(descriptor, 16)
        os.close(descriptor)
        if text.lstrip(b"d").isdigit():
            self._failed = True
            number = int(text.lstrip(b"d"))
            if text[:1] == b"d":
                self._answer({"refused": f"the working directory can't be entered: {os.strerror(number)}"})
            else:
                self._answer({"failed": number})
            self.close()
        elif self.agent.kill_order and self.pid:
            self.agent.spawner.started(self.pid, self.agent.credentials.users["root"])

    def _signals(self) -> None:
        """A byte is a signal for the command; the end of the stream is the client's."""
        data = self._socket.recv(64)
        if not data:
            self._client_gone()
            return
        for number in data:
            if number in _HANDED_ON and self.pid in self.agent.children:
                try:
                    os.killpg(self.pid, number)
                except OSError:
                    processes.send(self.pid, number)

    def _client_gone(self) -> None:
        self._forget_socket()
        if not self._detached and self.pid in self.agent.children and self._kill is None:
            self._kill = processes.TreeKill(lambda: self._keepers.below(self.pid))
            self._kill_step()
        elif self._kill is None:
            self.close()

    def _kill_step(self) -> None:
        pause = self._kill.step() if self._kill is not None else None
        if pause is not None:
            self.agent.loop.after(pause, self._kill_step)
        else:
            self.close()

    def _exited(self, status: int, usage: Any) -> None:
        if self._report >= 0:
            self._reported(0)
        if not self._failed and self._kill is None:
            if not self._detached:
                self._answer({"over": status})
            self.close()

    def _answer(self, message: dict[str, Any]) -> None:
        if self._descriptor >= 0:
            try:
                self._socket.send(json.dumps(message).encode() + b"\n")
            except OSError:
                pass  # it is gone, or does not read a hundred bytes

    def _refuse(self, why: str) -> None:
        self._answer({"refused": why})
        self.close()

    def fail(self, error: Exception) -> None:
        self._refuse("the agent failed")

    def _forget_socket(self) -> None:
        if self._descriptor >= 0:
            self.agent.loop.forget(self._descriptor)
            self._descriptor = -1
            self._socket.close()

    def _close_streams(self) -> None:
        streams, self._streams = self._streams, []
        for descriptor in streams:
            os.close(descriptor)

    def close(self) -> None:
        self._forget_socket()
        self._close_streams()
        self.service.asking.discard(self)


def _identifier(value: Any) -> int:
    """An id that user code may have. Raises ValueError: groups are set where the agent's are mapped as well."""
    if type(value) is not int or not (0 <= value < inner.HIGHEST_ID or value == inner.NOBODY_ID):
        raise ValueError("an id that is not there")
    return value
