"""Code contexts, the agent's side: kernel processes, their executions, their deaths.

A kernel is a fork of the agent that became the user and runs `ringfence.guest.kernel`. Everything it says is
user code's word. Guards against: a forged result (each execution has a token, which never travels to the kernel: what
travels is a nonce, worth nothing without the kernel's secret), a forged end, frames of
any claimed length (forwarded piecewise, never gathered), output that belongs to no execution (counted, not
delivered), and a kernel that dies, hangs, ignores SIGINT or closes its own descriptors.
"""

# ruff: noqa: BLE001  (a forked child reports and leaves, whatever happened)

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import gc
import os
import struct

from ringfence.guest import processes
from ringfence.guest.credentials import IGNORED_SIGNALS, User, decode, raise_kill_order
from ringfence.guest.jobs import Refused, environment
from ringfence.guest.pipes import READ, WRITE, Source, bytes_waiting, new_pipe
from ringfence.guest.protocol import RESULTS, STDERR, STDOUT
from ringfence.linux.json_text import dumps_compactly, loads
from ringfence.linux.namespaces import fork_alone
from ringfence.linux.syscalls import close_from

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    import socket
    from collections import deque
    from typing import Any

    from ringfence.guest.agent import Agent
else:
    import _signal as signal
    import _socket as socket
    from _collections import deque

MAX_CONTEXTS = 64
MAX_QUEUE = 256
_MAX_DONE = 64 << 10
_FRAME = struct.Struct("!IB16s")  # kernel to agent: payload length, type, token
_LENGTH = struct.Struct("!I")  # agent to kernel
_FORWARDED = struct.Struct("!IB")  # agent to host
RESULT, ERROR, DONE, READY = 1, 2, 3, 4
_FORWARD, _KEEP, _DROP = range(3)
# In a kernel these get their defaults back; SIGINT stays ignored until the kernel's own handler is in place. The C
# functions are called with plain numbers, since the enumerations of `signal` touch, and so copy, dozens of pages.
_RESTORED_SIGNALS = tuple(
    int(number) for number in IGNORED_SIGNALS if number not in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
)
_SET_MASK = int(signal.SIG_SETMASK)
_NUDGES = (0.05, 0.5)  # seconds after an interrupt


def run_kernel(control: socket.socket, config: dict[str, Any]) -> None:
    """What a forked kernel becomes; never returns. Tests put a small stand-in here."""
    if config["language"] == "python":
        from ringfence.guest import kernel

        kernel.run(control, config)
    from ringfence.guest import interpreter  # in the fork alone: Python pays nothing for the others

    interpreter.run(control, config)


class Execution:
    """One piece of code: a channel of operation "kernel.execute"."""

    def __init__(self, context: Context, channel: int, request: dict[str, Any]):
        if not isinstance(request.get("code"), str):
            raise Refused("invalid", "code must be text")
        self.context = context
        self.channel = channel
        self.code: str = request["code"]
        self.env = request.get("env")
        environment({}, self.env)  # refuses what is not an environment
        self.quiet = bool(request.get("quiet"))
        self.rehearsal = bool(request.get("rehearsal"))  # see kernel.Request
        self.nonce = os.urandom(16)
        self.token = b""  # known once a kernel is to run it
        self.restarted = False
        self.late_bytes = 0
        self.closed = False

    def on_data(self, stream: int, data: Any) -> None:
        self.context.agent.mux.grant(self.channel, len(data))

    def on_eof(self, stream: int) -> None:
        pass

    def on_event(self, event: dict[str, Any]) -> None:
        if event.get("kill"):
            self.context.kill(self)
        elif event.get("interrupt"):
            self.context.interrupt(self)

    def on_credit(self) -> None:
        kernel = self.context.kernel
        if kernel is not None and self.context.current is self:
            kernel.resume()

    def cancel(self) -> None:
        self.context.kill(self)
        self.on_credit()  # a cancelled channel always has room: what stalled can drain

    def fail(self, error: Exception) -> None:
        self.context.agent.close_channel(
            self.channel, {"ok": False, "error": {"code": "internal", "message": f"the agent failed: {error!r}"[:500]}}
        )
        self.closed = True
        self.context.kill(self)

    def close(self, status: str, count: int | None = None, ended: dict[str, Any] | None = None) -> None:
        if not self.closed:
            self.closed = True
            self.context.agent.close_channel(self.channel, {
                "ok": True, "status": status, "execution_count": count, "exit": ended,
                "restarted": self.restarted, "late_bytes": self.late_bytes,
            })  # fmt: skip


class Kernel:
    """One kernel process. `context` is None before it has its place, and after its end."""

    def __init__(self, agent: Agent, ticket: dict[str, Any], user: User, mark: int | None):
        self.agent = agent
        self.context: Context | None = None
        self.mark = mark
        self.ready = False
        self.exit: tuple[int, Any] | None = None
        self.unexpected = 0
        self._interrupt_pending = False
        self._outgoing = bytearray()
        self._partial = b""
        self._mode = _DROP
        self._type = 0
        self._left = 0
        self._kept = b""
        self._paused = False
        self._kill: processes.TreeKill | None = None
        self._last_bytes = -1  # after its death: what the control socket still holds
        self._draining = 0
        self._status: tuple[str, int | None] | None = None
        control, theirs = socket.socketpair()
        pipes = []
        try:
            pipes = [*new_pipe(), *new_pipe()]
            agent.check_descriptors(max(pipes))
            keepers = agent.keepers_for(user)
            self.pid = fork_alone() if keepers is None else keepers.fork(mark)
        except OSError as error:
            for descriptor in pipes:
                os.close(descriptor)
            control.close()
            theirs.close()
            raise Refused(
                "limit", f"no kernel process can start: {error.strerror}",
                "the sandbox is at its limit of processes, memory or open files",
            ) from None  # fmt: skip
        if self.pid == 0:
            _become_kernel(agent, theirs, pipes[1], pipes[3], ticket, user, mark)
        # Only now and only here: the child, whose frames show this object, takes its copy out of the ticket.
        self._secret = bytes.fromhex(ticket.pop("secret")) if ticket is not None else b""
        theirs.close()
        os.close(pipes[1])
        os.close(pipes[3])
        control.setblocking(False)
        self._control = control
        self._descriptor = control.fileno()
        agent.loop.watch(self._descriptor, self._control_ready)
        self.sources = [
            Source(agent, pipes[0], None, STDOUT, _nothing),
            Source(agent, pipes[2], None, STDERR, _nothing),
        ]
        agent.children[self.pid] = self._exited

    # ---------------------------------------------------------------- sending

    def _send(self, message: dict[str, Any]) -> None:
        raw = dumps_compactly(message).encode("ascii")
        self._outgoing += _LENGTH.pack(len(raw)) + raw
        self._write()

    def _write(self) -> None:
        while self._outgoing:
            try:
                written = self._control.send(self._outgoing)
            except BlockingIOError:
                break
            except OSError:  # it closed its end; reading finds out
                self._outgoing.clear()
                break
            del self._outgoing[:written]
        self._watch()

    def _watch(self) -> None:
        if self._descriptor < 0:
            return
        wanted = (0 if self._paused else READ) | (WRITE if self._outgoing else 0)
        if wanted:
            self.agent.loop.watch(self._descriptor, self._control_ready, wanted)
        else:
            self.agent.loop.forget(self._descriptor)

    def execute(self, execution: Execution) -> None:
        from ringfence.guest import (
            kernel,  # loaded where there are kernels; one program alone does without it
        )

        execution.late_bytes = 0
        for source in self.sources:
            source.drop_waiting()
            execution.late_bytes += source.discarded
            source.discarded = 0
            source.channel = execution.channel
        self._status = None
        execution.token = kernel.token_of(self._secret, execution.nonce)
        self._send({
            "do": "rehearse" if execution.rehearsal else "execute", "nonce": execution.nonce.hex(), "code": execution.code, "quiet": execution.quiet,
            "env": execution.env,
        })  # fmt: skip

    def interrupt(self) -> None:
        """SIGINT to the kernel and to what runs in its process group, as a terminal's Ctrl-C would."""
        if not self.ready:
            # Its handler is not in place yet: the signal would be lost.
            self._interrupt_pending = True
            return
        try:
            os.killpg(self.pid, signal.SIGINT)
        except OSError:
            processes.send(self.pid, signal.SIGINT)
        execution = self.context.current if self.context is not None else None
        for seconds in _NUDGES:
            self.agent.loop.after(seconds, lambda: self._nudge(execution))

    def _nudge(self, execution: Execution | None) -> None:
        """See `kernel.NUDGE`."""
        if execution is not None and self.context is not None and self.context.current is execution:
            from ringfence.guest import kernel

            processes.send(self.pid, kernel.NUDGE)

    # -------------------------------------------------------------- receiving

    def _control_ready(self, events: int) -> None:
        if events & WRITE and self._outgoing:
            self._write()
        if events & ~WRITE:
            self._receive()

    def _receive(self) -> bool:
        """Take one piece from the control socket; False when nothing more can be taken now."""
        if self._descriptor < 0:
            return False
        size = 64 << 10
        execution = self.context.current if self.context is not None else None
        if execution is not None:
            # What goes on to the host is never more than what was read.
            size = min(size, self.agent.mux.data_room(execution.channel))
            if size <= 0 or self.agent.congested:
                self._paused = True
                self.agent.stalled.add(self)
                self._watch()
                return False
        if self._last_bytes >= 0:
            size = min(size, self._last_bytes)
            if not size:
                return False
        try:
            data = self._control.recv(size)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_control()
            if self.exit is None and self._kill is None:
                self.kill()  # alive without its control: of no use to anyone
            return False
        if self._last_bytes >= 0:
            self._last_bytes -= len(data)
        self._parse(data)
        return True

    def _parse(self, data: bytes) -> None:
        if self._partial:
            data, self._partial = self._partial + data, b""
        position = 0
        end = len(data)
        while position < end:
            if not self._left:
                if end - position < _FRAME.size:
                    self._partial = data[position:]
                    return
                length, kind, token = _FRAME.unpack_from(data, position)
                position += _FRAME.size
                whole = end - position >= length
                self._begin(length, kind, token, data[position : position + length] if whole else None)
                if whole:
                    position += length
                else:
                    self._left = length
                continue
            piece = data[position : position + self._left]
            position += len(piece)
            self._left -= len(piece)
            if self._mode == _FORWARD:
                self._forward(piece)
            elif self._mode == _KEEP:
                self._kept += piece
                if not self._left:
                    self._control_message(self._type, self._kept)

    def _begin(self, length: int, kind: int, token: bytes, payload: bytes | None) -> None:
        """A frame's header has arrived, with its payload if that is here whole."""
        execution = self.context.current if self.context is not None else None
        self._type = kind
        self._kept = b""
        genuine = execution is not None and token == execution.token and self._status is None
        if kind in (RESULT, ERROR) and genuine:
            self._mode = _FORWARD
            self._forward(_FORWARDED.pack(length, kind) + (payload or b""))
        elif length <= _MAX_DONE and ((kind == DONE and genuine) or (kind == READY and not self.ready)):
            self._mode = _KEEP
            if payload is not None:
                self._control_message(kind, payload)
        else:
            self._mode = _DROP
            self.unexpected += 1

    def _forward(self, piece: bytes) -> None:
        execution = self.context.current if self.context is not None else None
        if execution is not None:
            self.agent.mux.send_data(execution.channel, RESULTS, piece)

    def _control_message(self, kind: int, payload: bytes) -> None:
        if kind == READY:
            self.ready = True
            if self._interrupt_pending:
                self._interrupt_pending = False
                self.interrupt()
            return
        try:
            message = loads(payload)
            status = message["status"]
            count = message.get("execution_count")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            status, count = "error", None
        if status not in ("ok", "error", "interrupted"):
            status = "error"
        self._finish(status, count if type(count) is int and abs(count) < 1 << 53 else None)

    # ----------------------------------------------------------- its endings

    def _finish(self, status: str, count: int | None) -> None:
        """The execution is over: deliver what its pipes hold now, then close its channel."""
        self._status = (status, count)
        self._draining = len(self.sources)
        for source in self.sources:
            source.drain(self._drained)

    def _drained(self) -> None:
        self._draining -= 1
        if not self._draining and self._status is not None:
            status, self._status = self._status, None
            if self.context is not None:
                self.context.finished(self, *status)

    def resume(self) -> None:
        """Credit has come, or the host stream is free again."""
        if self._paused:
            self._paused = False
            self.agent.stalled.discard(self)
            if self._last_bytes >= 0:
                self._last_words()
            else:
                self._watch()
        for source in self.sources:
            source.resume()

    def kill(self) -> None:
        """End the process and all it started."""
        if self._kill is None and (self.exit is None or self.mark is not None or self.agent.credentials.single_uid):
            leader = self.pid if self.agent.credentials.single_uid else None
            self._kill = processes.TreeKill(self.members, leader)
            self._kill_step()

    def members(self) -> list[int]:
        if self.mark is not None:
            return self.agent.members(self.mark)
        return processes.descendants(self.pid) if self.agent.credentials.single_uid else [self.pid] * (self.exit is None)

    def _kill_step(self) -> None:
        if self._kill is None:
            return
        pause = self._kill.step()
        if pause is not None:
            self.agent.loop.after(pause, self._kill_step)
            return
        complete, self._kill = self._kill.complete, None
        if self.mark is not None:
            mark, self.mark = self.mark, None
            self.agent.marks.give_back(mark, checked=complete)

    def _exited(self, status: int, usage: Any) -> None:
        self.exit = (status, usage)
        self.agent.loop.forget(self._descriptor)
        self._last_bytes = bytes_waiting(self._descriptor) if self._descriptor >= 0 else 0
        if self._kill is None:
            self.kill()  # what it leaves behind belongs to nobody
        self._last_words()

    def _last_words(self) -> None:
        while self._receive():
            pass
        if self._paused:
            return
        self._close_control()
        if self._draining:
            return  # its DONE had come; closing follows from that
        if self.context is not None and self.context.current is not None:
            self._finish("died", None)
        elif self.context is not None:
            self.context.finished(self, "died", None)
        self._dismiss_sources()

    def _dismiss_sources(self) -> None:
        if not self._draining:
            for source in self.sources:
                source.close()

    def _close_control(self) -> None:
        if self._descriptor >= 0:
            self.agent.loop.forget(self._descriptor)
            self.agent.stalled.discard(self)
            self._paused = False
            self._descriptor = -1
            self._control.close()

    def how_it_ended(self) -> dict[str, Any] | None:
        if self.exit is None:
            return None
        status = self.exit[0]
        return {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        }

    def fail(self, error: Exception) -> None:
        context = self.context
        if context is not None and context.current is not None:
            context.current.fail(error)
        else:
            self.kill()


def _nothing() -> None:
    pass


class Context:
    """A named place where code keeps its state: one kernel process at a time, executions one after another."""

    def __init__(self, agent: Agent, name: str, request: dict[str, Any]):
        self.agent = agent
        self.name = name
        self.language = request.get("language") or "python"
        self.user = agent.credentials.user(request.get("user"))
        self.cwd = agent.directory(request.get("cwd"), self.user)
        self.env = environment(agent.base_environment(self.user), request.get("env"))
        self.program = _program_of(self.language, self.env) if self.language != "python" else None
        self.execution_count = 0
        self.kernel: Kernel | None = None
        self.current: Execution | None = None
        self.queue: deque[Execution] = deque()
        self.deleted = False
        self._killed = False
        self._lost = False  # a kernel with state has gone since the last execution
        self.start()

    def start(self) -> None:
        """Have a fresh kernel. Raises Refused at a limit."""
        agent = self.agent
        ticket = {
            "context": self.name, "language": self.language, "cwd": decode(self.cwd),
            "env": {decode(key): decode(value) for key, value in self.env.items()},
            "random": os.urandom(32).hex(), "secret": os.urandom(32).hex(),
        }  # fmt: skip
        if self.program is not None:
            ticket["program"] = self.program
        if agent.boot.get("result_limit"):
            ticket["result_limit"] = agent.boot["result_limit"]
        mark = agent.take_mark()
        try:
            self.kernel = Kernel(agent, ticket, self.user, mark)
        except Refused:
            if mark is not None:
                agent.marks.give_back(mark, checked=True)
            raise
        self.kernel.context = self

    @property
    def alive(self) -> bool:
        return self.kernel is not None and self.kernel.exit is None

    def submit(self, execution: Execution) -> None:
        if len(self.queue) >= MAX_QUEUE:
            raise Refused("busy", f"{MAX_QUEUE} executions wait in context {self.name!r} already")
        self.queue.append(execution)
        self._next()

    def _next(self) -> None:
        # `_killed` without a current execution: a restart waits for the old kernel's death, and so does the queue.
        while self.current is None and self.queue and not self.deleted and not self._killed:
            execution = self.queue.popleft()
            try:
                if not self.alive:
                    self.start()
            except Refused as refusal:
                execution.closed = True
                self.agent.refuse(execution.channel, refusal)
                continue
            assert self.kernel is not None
            execution.restarted, self._lost = self._lost, False
            self.current = execution
            self._killed = False
            self.agent.mux.send_event(execution.channel, {"started": {"pid": self.kernel.pid}})
            self.kernel.execute(execution)

    def interrupt(self, execution: Execution | None) -> None:
        """Interrupt `execution`, or the one that runs for None; one that waits does not run at all."""
        if execution is not None and execution is not self.current:
            self._forget(execution, "interrupted")
        elif self.current is not None and self.kernel is not None:
            self.kernel.interrupt()

    def kill(self, execution: Execution) -> None:
        """End `execution` by ending the kernel; a fresh one takes its place."""
        if execution is not self.current:
            self._forget(execution, "killed")
        elif self.kernel is not None:
            self._killed = True
            self.kernel.kill()

    def _forget(self, execution: Execution, status: str) -> None:
        if execution in self.queue:
            self.queue.remove(execution)
            execution.close(status)

    def restart(self) -> None:
        """End the kernel and what runs and waits in it; a fresh one takes its place."""
        while self.queue:
            self.queue.popleft().close("killed")
        if self.alive and self.kernel is not None:
            self._killed = True
            self.kernel.kill()
        else:
            self.start()

    def delete(self) -> None:
        self.deleted = True
        while self.queue:
            self.queue.popleft().close("killed")
        if self.alive and self.kernel is not None:
            self.kernel.kill()
        self.agent.contexts.pop(self.name, None)

    def finished(self, kernel: Kernel, status: str, count: int | None) -> None:
        """The running execution, or the kernel, has come to its end."""
        if kernel is not self.kernel:
            return
        execution, self.current = self.current, None
        died = status == "died"
        if kernel.exit is not None:
            self.kernel = None
            self._lost = True
        if not died and count is not None and not (execution is not None and execution.rehearsal):
            self.execution_count = count
        if died and (self._killed or self.deleted):
            status = "killed"
            if not self.deleted:
                try:
                    self.start()
                    self._lost = False
                    if execution is not None:
                        execution.restarted = True
                except Refused:
                    pass  # the next execution tries again and says why
        self._killed = False
        if kernel.exit is not None:
            kernel.context = None
            kernel._dismiss_sources()
        if execution is not None:
            execution.close(status, count, kernel.how_it_ended())
        self._next()

    def describe(self) -> dict[str, Any]:
        return {
            "context": self.name, "language": self.language, "cwd": decode(self.cwd),
            "pid": self.kernel.pid if self.kernel is not None else None, "alive": self.alive,
            "execution_count": self.execution_count, "busy": self.current is not None,
        }  # fmt: skip


def _program_of(language: Any, env: dict[bytes, bytes]) -> str:
    """The interpreter of a language that is not Python. Raises Refused."""
    from ringfence.guest import languages  # with the first of them, from our read-only directory

    return languages.program_of(language, decode(env.get(b"PATH", b"")))


def _become_kernel(
    agent: Agent, control: socket.socket, output: int, errors: int, ticket: dict[str, Any], user: User, mark: int | None
) -> None:
    """In a fork of the agent: become a kernel. Never returns."""
    status = 70
    try:
        agent.forsake()
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (errors, 2)):
            os.dup2(source, target, inheritable=True)
        close_from([0, 1, 2, control.fileno(), *agent.credentials.needed])
        for number in _RESTORED_SIGNALS:
            _signal.signal(number, 0)
        _signal.pthread_sigmask(_SET_MASK, ())
        os.setsid()
        gc.enable()  # the agent does without
        agent.credentials.shed(user, mark, dumpable=True)
        if agent.kill_order:
            raise_kill_order("self", agent.kill_order)
        try:
            os.chdir(ticket["cwd"].encode("utf-8", "surrogateescape"))
        except OSError:
            os.chdir("/")  # the kernel says so when its code uses the directory
        run_kernel(control, ticket)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        try:
            os.write(2, f"ringfence: the kernel process failed to start: {error!r}\n".encode("utf-8", "replace"))
        except OSError:
            pass
    finally:
        os._exit(status)
