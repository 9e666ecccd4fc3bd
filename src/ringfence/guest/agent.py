"""The agent: pid 1 of a sandbox, a keeper that outlives everything user code does.

One thread, one epoll. It starts commands, kernels and file workers, reaps every orphan, and moves bytes between
them and the host's one stream. Guards against: user code that blocks it (no call here waits for anything that
user code controls), floods it (a source is read only while its channel has credit and the host keeps up),
exhausts it (channels, queues, contexts, descriptors are bounded), or raises in it (an internal error ends one
channel, never the loop). When the host's stream ends the agent exits, and the kernel ends the pid namespace.

Everything is imported here and now: after the start the agent must not import from paths user code can write.
The exceptions come from read-only directories: hashlib, with the first file operation, and the table of languages,
with the first context that is not Python.
"""

# ruff: noqa: BLE001  (whatever one channel raises ends that channel, never the agent)

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import ctypes
import faulthandler
import gc
import mmap
import os
import resource
import sys
import time

from ringfence.guest import contexts, files, jobs, processes, transfers, watch
from ringfence.guest.credentials import (
    IGNORED_SIGNALS,
    PR_SET_DUMPABLE,
    Credentials,
    UnknownUser,
    User,
    decode,
    encode,
)
from ringfence.guest.guardian import Guardian
from ringfence.guest.jobs import Command, Refused, Spawner, text_of
from ringfence.guest.loop import READ, WRITE, Loop
from ringfence.guest.processes import Marks
from ringfence.guest.protocol import CLOSE, CREDIT, DATA, EOF, EVENT, MAX_JSON, OPEN, Mux, ProtocolViolation
from ringfence.linux.syscalls import NUMBER, call, check, libc, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable
    from typing import Any, NoReturn

    from ringfence.guest.elevation import Elevation
    from ringfence.guest.keepers import Keepers
else:
    import _signal as signal
    import _socket as socket

_RECEIVE = 256 << 10
_HIGH_WATER = 4 << 20
_LOW_WATER = 1 << 20
_SFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK  # signalfd4 takes the same values (signalfd(2))
_SPARE_DESCRIPTORS = 32
_COLLECT_EVERY = 500
MAX_COMMANDS = 1024
# Plain numbers for the C functions below: the enumerations of `signal` touch, and so copy, dozens of pages.
_IGNORED = frozenset(int(number) for number in IGNORED_SIGNALS)
_SET_MASK, _SIGCHLD = int(signal.SIG_SETMASK), int(signal.SIGCHLD)
FEATURES = ("exec", "pty", "kernel", "file", "watch")


class Agent:
    """What `serve` runs. Its parts reach each other through it."""

    def __init__(self, stream: socket.socket, boot: dict[str, Any]):
        self.boot = boot
        self.stream = stream
        self.loop = Loop(self._handler_failed)
        self.credentials = Credentials(boot)
        self.kill_order = int(boot.get("oom_score_adj") or 0)
        gids = boot.get("job_gids")
        self.keepers: Keepers | None = None
        if self.credentials.inner is not None:
            # Loaded already, by a zygote whose sandboxes have a root.
            from ringfence.guest.keepers import Keepers

            self.keepers = Keepers(self)
        single = self.credentials.single_uid
        self.marks = Marks(gids[0], gids[1], self.members) if gids and not single else Marks(0, 0)
        self.children: dict[int, Callable[[int, Any], Any]] = {}
        self.contexts: dict[str, contexts.Context] = {}
        self._environments: dict[str, dict[bytes, bytes]] = {}
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_DESCRIPTORS
        if boot.get("prefork") and boot.get("kernel", True):
            # As early as can be: it gets ready on another processor while this process makes the rest of itself.
            try:
                self._create_context("default", {})
            except Refused:
                pass  # the first execution tries again and says why
        self.mux = Mux("guest", FEATURES)
        self.guardian = Guardian(self)
        self.spawner = Spawner(self)
        self.channels: dict[int, Any] = {}
        self.commands: dict[int, Command] = {}
        self.background: dict[int, int] = {}
        self.stalled: set[Any] = set()
        self.congested = False
        self.reaped = 0
        self.failures = 0
        self._closings = 0
        self._started = time.monotonic()
        self._buffer = memoryview(mmap.mmap(-1, _RECEIVE))  # pages nobody has used yet cost nothing
        self._blocked = False
        self._leaving = False
        self._operations: dict[str, Callable[[int, dict[str, Any]], Any]] = {
            "exec": self._exec,
            "process.list": self._process_list,
            "process.signal": self._process_signal,
            "kernel.create": self._kernel_create,
            "kernel.execute": self._kernel_execute,
            "kernel.restart": self._kernel_restart,
            "kernel.delete": self._kernel_delete,
            "kernel.list": self._kernel_list,
            "kernel.interrupt": self._kernel_interrupt,
            "file.watch": self._file_watch,
            "info": self._info,
            "shutdown": self._shutdown,
        }
        # Where even a regular file's read may wait for someone: the agent never reads there itself.
        self.special_devices = set()
        for path in ("/proc", "/sys", "/sys/fs/cgroup", "/dev/mqueue"):
            try:
                self.special_devices.add(os.stat(path).st_dev)
            except OSError:
                continue
        self.special_devices.discard(os.stat("/").st_dev)  # one that is not mounted is a directory of the root
        self.file_service = transfers.FileService(self)
        self.elevation: Elevation | None = None
        try:
            self._loadavg = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._loadavg = -1

    # ------------------------------------------------------------------- life

    def run(self) -> NoReturn:
        os.umask(0o022)
        # Whatever the engine left open: no command may inherit it (close_range(2), CLOSE_RANGE_CLOEXEC).
        call(NUMBER["close_range"], 3, 0x7FFFFFFF, 4, what="close_range")
        mask = ctypes.c_uint64(1 << (_SIGCHLD - 1))
        self._signals = check(libc.signalfd(ctypes.c_int(-1), ctypes.byref(mask), ctypes.c_int(_SFD_FLAGS)), "signalfd")
        self.loop.watch(self._signals, self._child_event)
        self.listen()
        if self.credentials.inner is not None:
            from ringfence.guest.elevation import Elevation

            self.elevation = Elevation(self)
        while True:
            try:
                self.loop.run_forever(self._flush)
            except Exception:  # memory may be short for a moment; the sandbox's keeper goes on
                self.failures += 1
                time.sleep(0.01)

    def listen(self) -> None:
        """Hear the host from now on."""
        self.stream.setblocking(False)
        self._descriptor = self.stream.fileno()
        self.loop.watch(self._descriptor, self._stream_event)

    def dispose(self) -> None:
        """Close what this object opened: the end of a rehearsal. An agent ends with its process."""
        self.loop.close()
        self.stream.close()
        if self._loadavg >= 0:
            os.close(self._loadavg)

    def _stream_event(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE:
            self._receive()

    def _receive(self) -> None:
        try:
            count = self.stream.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            os._exit(0)  # the host is gone: pid 1 takes the sandbox with it
        try:
            events = self.mux.receive(self._buffer[:count])
        except ProtocolViolation:
            os._exit(3)
        channels = self.channels
        for kind, channel, stream, payload in events:
            try:
                if kind == OPEN:
                    self._open(channel, payload)
                    continue
                target = channels.get(channel)
                if target is None:
                    if kind == CLOSE:
                        self.close_channel(channel, {"ok": False, "error": {"code": "invalid", "message": "cancelled"}})
                    elif kind == DATA:
                        self.mux.grant(channel, len(payload))
                elif kind == DATA:
                    target.on_data(stream, payload)
                elif kind == CREDIT:
                    target.on_credit()
                elif kind == EVENT:
                    try:
                        target.on_event(payload)
                    except Refused:
                        pass  # an event has no answer of its own
                elif kind == EOF:
                    target.on_eof(stream)
                elif kind == CLOSE:
                    target.cancel()
            except Exception as error:
                self._channel_failed(channel, error)

    def _flush(self) -> None:
        mux = self.mux
        while mux.queued:
            try:
                written = self.stream.sendmsg(mux.pending())
            except (BlockingIOError, InterruptedError):
                if not self._blocked:
                    self._blocked = True
                    self.loop.watch(self._descriptor, self._stream_event, READ | WRITE)
                break
            except OSError:
                os._exit(0)
            mux.consumed(written)
        else:
            if self._blocked:
                self._blocked = False
                self.loop.watch(self._descriptor, self._stream_event, READ)
            if self._leaving:
                os._exit(0)
        if self.congested:
            if mux.queued <= _LOW_WATER:
                self.congested = False
                self.resume_stalled()
        elif mux.queued > _HIGH_WATER:
            self.congested = True

    def resume_stalled(self) -> None:
        """The host keeps up again: everything that waited for it goes on."""
        stalled, self.stalled = self.stalled, set()
        for item in stalled:
            self.loop.soon(item.resume)

    def _child_event(self, events: int) -> None:
        try:
            os.read(self._signals, 4096)
        except BlockingIOError:
            pass
        for _ in range(256):
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if not pid:
                return
            if os.WIFSTOPPED(status):
                # Commands and kernels may stop; a file worker that user code stopped would hold its request for ever.
                worker = getattr(self.children.get(pid), "__self__", None)
                if isinstance(worker, transfers._Worker):
                    worker.lose()
                continue
            self.reaped += 1
            ended = self.children.pop(pid, None)
            if ended is not None:
                try:
                    ended(status, usage)
                except Exception as error:
                    self._handler_failed(ended, error)
        self.loop.soon(lambda: self._child_event(0))  # a flood of orphans must not starve the channels

    def forsake(self) -> None:
        """In a forked child: let go of what is the agent's, so that no later clean-up touches a reused number."""
        self.loop.close()
        self.stream.detach()

    # ----------------------------------------------------------------- errors

    def _handler_failed(self, handler: Callable[..., Any], error: Exception) -> None:
        self.failures += 1
        owner = getattr(handler, "__self__", None)
        agent_parts = (Agent, type(None))
        if isinstance(owner, jobs.Source):
            source, owner = owner, self.channels.get(owner.channel) if owner.channel is not None else None
            if owner is None:
                source.close()
        if owner is None or isinstance(owner, agent_parts):
            return
        fail = getattr(owner, "fail", None)
        if fail is not None:
            try:
                fail(error)
            except Exception:
                self.failures += 1

    def _channel_failed(self, channel: int, error: Exception) -> None:
        target = self.channels.get(channel)
        if isinstance(error, (Refused, UnknownUser)):
            self.refuse(channel, error)
            return
        self.failures += 1
        try:
            if target is not None:
                target.fail(error)
        except Exception:
            self.failures += 1
        try:
            self.close_channel(channel, {"ok": False, "error": {"code": "internal", "message": f"the agent failed: {error!r}"[:500]}})
        except ValueError:
            pass  # it was closed already

    def refuse(self, channel: int, error: Exception) -> None:
        """End a channel with a refusal."""
        code = error.code if isinstance(error, Refused) else "invalid"
        answer = {"code": code, "message": str(error)[:4096]}
        hint = getattr(error, "hint", "")
        if hint:
            answer["hint"] = hint
        self.close_channel(channel, {"ok": False, "error": answer})

    def close_channel(self, channel: int, result: dict[str, Any]) -> None:
        """End a channel with its result; a second time does nothing."""
        self.channels.pop(channel, None)
        self._closings += 1
        if self._closings >= _COLLECT_EVERY:
            # Automatic collection is off (it would touch, and so copy, the zygote's memory); ours is small.
            self._closings = 0
            self.loop.after(0.2, gc.collect)
        try:
            self.mux.send_close(channel, result)
        except ValueError:
            error = {"code": "internal", "message": f"the result exceeds {MAX_JSON} bytes"}
            self.mux.send_close(channel, {"ok": False, "error": error})

    # -------------------------------------------------------- shared services

    def base_environment(self, user: User) -> dict[bytes, bytes]:
        """The environment a process of `user` starts with. Shared: copy before changing it."""
        env = self._environments.get(user.name)
        if env is None:
            env = {encode(key): encode(value) for key, value in (self.boot.get("env") or {}).items()}
            env.update({b"HOME": encode(user.home), b"USER": encode(user.name), b"LOGNAME": encode(user.name), b"SHELL": encode(user.shell)})
            env.setdefault(b"PATH", b"/usr/local/bin:/usr/bin:/bin")
            self._environments[user.name] = env
        return env

    def directory(self, path: Any, user: User) -> bytes:
        """`path` as a working directory: None is the default one; relative and `~` mean the user's home."""
        if path is None:
            if user.name == self.credentials.default_user:
                return encode(self.boot.get("cwd") or user.home)
            return encode(user.home)
        return files.resolve(text_of(path, "cwd"), encode(user.home))

    def take_mark(self) -> int | None:
        """A job mark, or None where a single uid makes descent the way. Raises Refused when none is free."""
        if self.credentials.single_uid:
            return None
        mark = self.marks.take()
        if mark is None:
            raise Refused("limit", "too many commands and kernels are alive", "end background processes first")
        return mark

    def is_mark(self, group: int) -> bool:
        """Whether `group` is one of the marks that jobs carry."""
        first, count = self.boot.get("job_gids") or (0, 0)
        return first <= group < first + count

    def members(self, mark: int) -> list[int]:
        """Live processes of the job with this mark: those that carry it, and what descends from its keepers."""
        found = processes.marked(mark)
        if self.keepers is not None and self.keepers.any(mark):
            found = sorted({*found, *self.keepers.members(mark)})
        return found

    def keepers_for(self, user: User) -> Keepers | None:
        """Who forks for `user`: keepers for root, which could drop its mark; None where the mark is enough."""
        return self.keepers if user.uid == 0 else None

    def last_pid(self) -> int:
        """The pid given out last in this pid namespace, or -1 (proc(5), /proc/loadavg)."""
        if self._loadavg < 0:
            return -1
        try:
            return int(os.pread(self._loadavg, 128, 0).split()[4])
        except (OSError, IndexError, ValueError):
            return -1

    def check_descriptors(self, highest: int) -> None:
        """Keep some descriptors for the agent itself. Raises OSError (EMFILE) when `highest` is too near the limit."""
        if highest >= self._limit:
            raise OSError(24, "too many open pipes and files in the agent")

    def remember_background(self, pid: int, mark: int, checked: bool) -> None:
        """A command is over; `checked` says that nothing of it is left. Else it can still be signalled as a tree."""
        if not checked and len(self.background) < MAX_COMMANDS and self.members(mark):
            self.background[pid] = mark
        else:
            self.marks.give_back(mark, checked=checked)

    def _tidy_background(self) -> None:
        for pid, mark in list(self.background.items()):
            if not self.members(mark):
                del self.background[pid]
                self.marks.give_back(mark, checked=True)

    # ------------------------------------------------------------- operations

    def _open(self, channel: int, request: dict[str, Any]) -> None:
        operation = request.get("op")
        handler = self._operations.get(operation) if isinstance(operation, str) else None
        if handler is not None:
            handler(channel, request)
        elif isinstance(operation, str) and operation.startswith("file."):
            self.file_service.open(channel, request)
        else:
            raise Refused("unsupported", f"this agent has no operation {operation!r}", "host and guest differ in version")

    def _exec(self, channel: int, request: dict[str, Any]) -> None:
        if len(self.commands) >= MAX_COMMANDS:
            raise Refused("limit", f"{MAX_COMMANDS} commands are running", "wait for some to end")
        if self.background and not self.credentials.single_uid:
            self._tidy_background()
        command = Command(self, channel, request)
        if not command.closed:
            self.channels[channel] = command

    def _process_list(self, channel: int, request: dict[str, Any]) -> None:
        found: list[dict[str, Any]] = []
        size = 0
        for command in self.commands.values():
            argv: list[str] = []
            for item in command.argv[:64]:
                argv.append(decode(item[:256]))
            size += sum(len(item) for item in argv) * 6 + 200  # worst case of JSON escapes
            if size > MAX_JSON - 4096:
                argv = []
            if size > 4 * MAX_JSON or len(found) >= 300:
                break
            found.append({
                "pid": command.pid, "argv": argv, "user": command.user.name, "channel": command.channel,
                "pty": command.master >= 0,
            })  # fmt: skip
        self.close_channel(channel, {"ok": True, "processes": found, "total": len(self.commands)})

    def _process_signal(self, channel: int, request: dict[str, Any]) -> None:
        pid, number, tree = request.get("pid"), request.get("signal"), bool(request.get("tree"))
        if type(pid) is not int or type(number) is not int or not 0 <= number < signal.NSIG:
            raise Refused("invalid", "pid and signal must be numbers")
        command = self.commands.get(pid)
        if command is not None:
            if tree and number == signal.SIGKILL:
                command.kill()
            else:
                command.signal(number, tree)
        elif tree and pid in self.background:
            mark = self.background[pid]
            if number == signal.SIGKILL:
                self._kill_background(mark)
            else:
                for item in self.members(mark):
                    processes.send(item, number)
        else:
            raise Refused("not_found", f"no command started here has pid {pid}", "list them with process.list")
        self.close_channel(channel, {"ok": True})

    def _kill_background(self, mark: int) -> None:
        kill = processes.TreeKill(lambda: self.members(mark))

        def step() -> None:
            pause = kill.step()
            if pause is not None:
                self.loop.after(pause, step)

        step()

    def _context(self, request: dict[str, Any]) -> contexts.Context:
        name = request.get("context")
        context = self.contexts.get(name) if isinstance(name, str) else None
        if context is None:
            raise Refused("not_found", f"there is no context {name!r}", "create it first, or list those that exist")
        return context

    def _create_context(self, name: Any, request: dict[str, Any]) -> contexts.Context:
        if not isinstance(name, str) or not 0 < len(name) <= 128:
            raise Refused("invalid", "a context needs a name of 1 to 128 characters")
        if not self.boot.get("kernel", True) and request.get("language") in (None, "python"):
            raise Refused("unsupported", "this template has no Python kernel", "use a template with one, such as 'base'")
        if name in self.contexts:
            raise Refused("exists", f"there is a context {name!r} already")
        if len(self.contexts) >= contexts.MAX_CONTEXTS:
            raise Refused("limit", f"{contexts.MAX_CONTEXTS} contexts exist", "delete one first")
        context = self.contexts[name] = contexts.Context(self, name, request)
        return context

    def _kernel_create(self, channel: int, request: dict[str, Any]) -> None:
        context = self._create_context(request.get("context"), request)
        assert context.kernel is not None
        self.close_channel(channel, {"ok": True, "pid": context.kernel.pid, "cwd": decode(context.cwd)})

    def _kernel_execute(self, channel: int, request: dict[str, Any]) -> None:
        name = request.get("context")
        if name not in self.contexts and name in ("default", f"default-{request.get('language')}"):
            # Saves the very first execution of a language a round trip.
            wanted = {key: request[key] for key in ("cwd", "user", "language") if key in request}
            context = self._create_context(name, wanted)
        else:
            context = self._context(request)
        execution = contexts.Execution(context, channel, request)
        self.channels[channel] = execution
        context.submit(execution)

    def _kernel_restart(self, channel: int, request: dict[str, Any]) -> None:
        self._context(request).restart()
        self.close_channel(channel, {"ok": True})

    def _kernel_delete(self, channel: int, request: dict[str, Any]) -> None:
        self._context(request).delete()
        self.close_channel(channel, {"ok": True})

    def _kernel_list(self, channel: int, request: dict[str, Any]) -> None:
        self.close_channel(channel, {"ok": True, "contexts": [item.describe() for item in self.contexts.values()]})

    def _kernel_interrupt(self, channel: int, request: dict[str, Any]) -> None:
        context = self._context(request)
        busy = context.current is not None
        context.interrupt(None)
        self.close_channel(channel, {"ok": True, "interrupted": busy})

    def _file_watch(self, channel: int, request: dict[str, Any]) -> None:
        self.channels[channel] = watch.Watch(self, channel, request)

    def _info(self, channel: int, request: dict[str, Any]) -> None:
        self.close_channel(channel, {
            "ok": True, "pid": os.getpid(), "python": sys.version.split()[0], "template": self.boot.get("template"),
            "single_uid": self.credentials.single_uid, "kernel": bool(self.boot.get("kernel", True)),
            "users": sorted(self.credentials.users), "uptime": round(time.monotonic() - self._started, 3),
            "commands": len(self.commands), "contexts": len(self.contexts), "channels": len(self.channels),
            "reaped": self.reaped, "failures": self.failures, "features": list(FEATURES),
        })  # fmt: skip

    def _shutdown(self, channel: int, request: dict[str, Any]) -> None:
        self.close_channel(channel, {"ok": True})
        self._leaving = True


def serve(stream: socket.socket, boot: dict[str, Any]) -> NoReturn:
    """Be pid 1 of a sandbox that is already confined: speak the guest protocol on `stream` until it ends.

    `boot` is described in the engine's boot message: users, default_user, single_uid, job_gids, env, cwd,
    rlimits (already in force), template, kernel, prefork (True: the kernel of the default context is
    forked at once, before anyone asks for it), oom_score_adj. Never returns; exits with 0 when the stream ends, 3 when the host breaks the
    protocol.
    """
    gc.disable()
    prctl(PR_SET_DUMPABLE, 0)
    _take_signals()
    Agent(stream, boot).run()


def _take_signals() -> None:
    # The kernel drops signals for which pid 1 has no handler; so it must have none, whatever was set before.
    faulthandler.disable()
    for number in range(1, 32):
        if number not in (9, 19):
            _signal.signal(number, 1 if number in _IGNORED else 0)
    # Children reset the mask, so only the agent reads its signals from a descriptor; what comes before is kept.
    _signal.pthread_sigmask(_SET_MASK, (_SIGCHLD,))
