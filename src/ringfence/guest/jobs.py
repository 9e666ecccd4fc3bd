"""Commands: started as the user, watched, ended with everything they started.

Guards the process contract: a missing program is 127, a signal is told apart from an exit code, output held
open by a background child does not delay the end, a kill reaches the whole tree, and 50 commands in parallel
do not mix. Where many ids are mapped a command costs no fork of the agent: it takes the user's ids, spawns,
and is the agent again. With a single uid it forks, since the child must become a subreaper.
"""

# ruff: noqa: BLE001, TRY004  (a forked child reports and leaves; wrong types are refused requests here)

from __future__ import annotations

import binascii
import errno
import fcntl
import os
import struct
import termios

from ringfence.guest import processes
from ringfence.guest.credentials import (
    IGNORED_SIGNALS,
    PR_SET_CHILD_SUBREAPER,
    User,
    decode,
    encode,
    raise_kill_order,
)
from ringfence.guest.pipes import Sink, Source, new_pipe
from ringfence.guest.protocol import PTY, STDERR, STDIN, STDOUT
from ringfence.linux.syscalls import prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from typing import Any

    from ringfence.guest.agent import Agent
else:
    import _signal as signal

_DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
_TIOCGPTN = 0x80045430  # ioctl_tty(2): the number of the terminal behind a master
_TIOCSPTLCK = 0x40045431
_LIMIT_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
MAX_ARGUMENT_BYTES = 1 << 20


class Refused(Exception):
    """A request that can't be served: becomes the error of a CLOSE. `code` is one of the protocol's codes."""

    def __init__(self, code: str, message: str, hint: str = ""):
        super().__init__(message)
        self.code = code
        self.hint = hint


class SpawnFailed(Exception):
    """The program did not start: `what` is "program" or "cwd", `number` the errno."""

    def __init__(self, what: str, name: bytes, number: int):
        super().__init__(os.strerror(number))
        self.what = what
        self.name = name
        self.number = number


def text_of(item: Any, what: str) -> bytes:
    """A string, or {"b64": ...}, as bytes without NUL. Raises Refused."""
    try:
        if isinstance(item, str):
            raw = encode(item)
        elif isinstance(item, dict) and isinstance(item.get("b64"), str):
            raw = binascii.a2b_base64(item["b64"])
            if binascii.b2a_base64(raw, newline=False).decode() != item["b64"]:
                raise ValueError
        else:
            raise ValueError
    except ValueError:
        raise Refused("invalid", f"{what} must be text or base64 bytes") from None
    if b"\0" in raw:
        raise Refused("invalid", f"{what} contains a NUL byte, which no system call can carry")
    return raw


def environment(base: dict[bytes, bytes], extra: Any) -> dict[bytes, bytes]:
    """`base` with the request's variables over it; a value of None removes one. Raises Refused."""
    if not extra:
        return base
    if not isinstance(extra, dict):
        raise Refused("invalid", "env must map names to values")
    merged = dict(base)
    for key, value in extra.items():
        name = text_of(key, "an environment name")
        if not name or b"=" in name:
            raise Refused("invalid", f"{key!r} can't be the name of an environment variable")
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = text_of(value, f"the environment variable {key}")
    return merged


def terminal_size(size: Any) -> bytes:
    """A {"rows", "cols"} object as struct winsize. Raises Refused."""
    try:
        return struct.pack("HHHH", int(size["rows"]), int(size["cols"]), 0, 0)
    except (TypeError, KeyError, ValueError, struct.error):
        raise Refused("invalid", "a terminal size needs rows and cols between 0 and 65535") from None


def find_program(name: bytes, path: bytes) -> bytes:
    """Where `name` is, as a shell finds it along `path`, under the ids of now. Raises SpawnFailed."""
    if b"/" in name:
        return name
    number = errno.ENOENT
    for directory in path.split(b":"):
        candidate = (directory or b".") + b"/" + name
        # access(2) judges by the real uid, which is the user's for the length of a spawn.
        if os.access(candidate, os.X_OK):
            if not os.path.isdir(candidate):
                return candidate
        elif number == errno.ENOENT and os.path.isfile(candidate):
            number = errno.EACCES
    raise SpawnFailed("program", name, number)


class Spawner:
    """Starts programs as a user of the sandbox."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._credentials = agent.credentials
        self._kill_order = int(agent.boot.get("oom_score_adj") or 0)

    def spawn(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, user: User, mark: int | None,
        streams: tuple[int, int, int], terminal: bytes | None,
    ) -> tuple[int, int]:
        """Start `argv`; `streams` become its 0, 1 and 2 (-1 for 0 means /dev/null).

        With `terminal`, the path of a slave, that becomes all three and the controlling terminal.
        Returns (pid, descriptor): with a single uid the descriptor reports by its end, or by an errno in it,
        how the exec went; otherwise it is -1 and the program runs. Raises SpawnFailed.
        """
        if self._credentials.single_uid:
            return self._fork(argv, env, cwd, user, streams, terminal)
        if self._credentials.inner is not None:
            return self._fork_inside(argv, env, cwd, user, mark, streams, terminal)
        if terminal is not None:
            # A session leader that opens a terminal gets it as its controlling one; setsid comes before (posix_spawn).
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, 0, 2),
            ]
        else:
            first: tuple[Any, ...] = (os.POSIX_SPAWN_DUP2, streams[0], 0)
            if streams[0] < 0:
                first = (os.POSIX_SPAWN_OPEN, 0, b"/dev/null", os.O_RDONLY, 0)
            actions = [first, (os.POSIX_SPAWN_DUP2, streams[1], 1), (os.POSIX_SPAWN_DUP2, streams[2], 2)]
        credentials = self._credentials
        guardian = self._agent.guardian
        try:
            guardian.prepare()
        except OSError as error:
            raise SpawnFailed("program", argv[0], error.errno or errno.EAGAIN) from None
        credentials.assume(user, mark)
        try:
            try:
                os.chdir(cwd)
            except OSError as error:
                raise SpawnFailed("cwd", cwd, error.errno or errno.EINVAL) from None
            program = find_program(argv[0], env.get(b"PATH", _DEFAULT_PATH))
            guardian.arm()
            try:
                pid = os.posix_spawn(
                    program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=IGNORED_SIGNALS
                )
            except OSError as error:
                if error.errno != errno.ENOEXEC:
                    raise
                # A script without a first line naming its interpreter: run as execvp(3) and shells do.
                pid = os.posix_spawn(
                    b"/bin/sh", [b"/bin/sh", program, *argv[1:]], env, file_actions=actions, setsid=True,
                    setsigmask=(), setsigdef=IGNORED_SIGNALS,
                )  # fmt: skip
            finally:
                guardian.disarm()
            if self._kill_order:
                raise_kill_order(pid, self._kill_order)
            return pid, -1
        except OSError as error:
            raise SpawnFailed("program", argv[0], error.errno or errno.EINVAL) from None
        finally:
            credentials.resume()
            os.chdir("/")

    def _fork(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, user: User, streams: tuple[int, int, int],
        terminal: bytes | None,
    ) -> tuple[int, int]:
        try:
            os.chdir(cwd)
        except OSError as error:
            raise SpawnFailed("cwd", cwd, error.errno or errno.EINVAL) from None
        try:
            program = find_program(argv[0], env.get(b"PATH", _DEFAULT_PATH))
            read, write = new_pipe()
            try:
                pid = os.fork()
            except OSError as error:
                os.close(read)
                os.close(write)
                raise SpawnFailed("program", argv[0], error.errno or errno.EAGAIN) from None
            if pid == 0:
                become(argv, env, streams, terminal, write, lambda: prctl(PR_SET_CHILD_SUBREAPER, 1), cwd, program)
        finally:
            os.chdir("/")
        os.close(write)
        return pid, read

    def _fork_inside(
        self, argv: list[bytes], env: dict[bytes, bytes], cwd: bytes, user: User, mark: int | None,
        streams: tuple[int, int, int], terminal: bytes | None,
    ) -> tuple[int, int]:
        """Where there is a root, a child has to enter the namespace of user code before it is the user's."""
        agent = self._agent
        try:
            read, write = new_pipe()
        except OSError as error:
            raise SpawnFailed("program", argv[0], error.errno or errno.EMFILE) from None
        try:
            keepers = agent.keepers_for(user)
            pid = os.fork() if keepers is None else keepers.fork(mark)
        except OSError as error:
            os.close(read)
            os.close(write)
            raise SpawnFailed("program", argv[0], error.errno or errno.EAGAIN) from None
        if pid == 0:
            become(
                argv, env, streams, terminal, write, lambda: self._credentials.shed(user, mark, dumpable=False), cwd
            )
        os.close(write)
        return pid, read

    def started(self, pid: int, user: User) -> None:
        """After a fork: the exec went well, so the program's files below /proc are the user's to write."""
        credentials = self._credentials
        if self._kill_order and credentials.single_uid:
            raise_kill_order(pid, self._kill_order)
        elif self._kill_order and credentials.inner is not None:
            credentials.assume(user, None)
            try:
                raise_kill_order(pid, self._kill_order)
            finally:
                credentials.resume()


def become(
    argv: list[bytes], env: dict[bytes, bytes], streams: Sequence[int], terminal: bytes | None, report: int,
    shed: Callable[[], object], cwd: bytes | int, program: bytes | None = None,
) -> None:
    """In a fork of the agent: become the program. Never returns.

    `shed` makes the process the user's; only then is the working directory entered and the program looked for. An
    errno goes to `report`, after the letter `d` where the working directory is what failed. The streams are above 2.
    """
    failed = b""
    try:
        os.setsid()
        shed()
        failed = b"d"
        os.fchdir(cwd) if isinstance(cwd, int) else os.chdir(cwd)
        failed = b""
        if program is None:
            program = find_program(argv[0], env.get(b"PATH", _DEFAULT_PATH))
        if terminal is not None:
            slave = os.open(terminal, os.O_RDWR)
            sources = (slave, slave, slave)
        elif streams[0] < 0:
            sources = (os.open("/dev/null", os.O_RDONLY), streams[1], streams[2])
        else:
            sources = streams
        for target, source in enumerate(sources):
            # The agent's descriptors 0 to 2 are taken, so no source can be overwritten by an earlier target.
            os.dup2(source, target, inheritable=True)
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            os.execve(program, argv, env)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execve(b"/bin/sh", [b"/bin/sh", program, *argv[1:]], env)
    except SpawnFailed as error:
        os.write(report, b"%d" % error.number)
    except OSError as error:
        os.write(report, failed + b"%d" % (error.errno or errno.EINVAL))
    except BaseException:
        os.write(report, b"%d" % errno.EINVAL)
    finally:
        os._exit(127)


class Terminal:
    """A pseudo-terminal: the master is the agent's, the slave belongs to the user who was assumed at opening."""

    def __init__(self, credentials: Any, user: User, size: bytes):
        credentials.assume(user, None)
        try:
            try:
                self.master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                self.master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Refused("limit", f"no pseudo-terminal: {error.strerror}", "close other terminals first") from None
        finally:
            credentials.resume()
        fcntl.ioctl(self.master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("I", fcntl.ioctl(self.master, _TIOCGPTN, b"\0\0\0\0"))[0]
        self.path = b"/dev/pts/%d" % number
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)


class Command:
    """One command: a channel of operation "exec"."""

    def __init__(self, agent: Agent, channel: int, request: dict[str, Any]):
        self.agent = agent
        self.channel = channel
        self.sources: list[Source] = []
        self.sink: Sink | None = None
        self.master = -1
        self.pid = 0
        self.mark: int | None = None
        self.exit: tuple[int, Any] | None = None
        self.cancelled = False
        self.killed = False
        self._report = -1
        self._failing = False
        self._background = False
        self._kill: processes.TreeKill | None = None
        self.closed = False
        argv = request.get("argv")
        if not isinstance(argv, list) or not argv:
            raise Refused("invalid", "argv must be a list with at least the program's name")
        self.argv = [text_of(item, "an argument") for item in argv]
        if not self.argv[0]:
            raise Refused("invalid", "the program's name is empty")
        self.user = agent.credentials.user(request.get("user"))
        env = environment(agent.base_environment(self.user), request.get("env"))
        if sum(map(len, self.argv)) > MAX_ARGUMENT_BYTES:
            raise Refused("invalid", "the arguments exceed 1 MiB", "write them to a file and pass its path")
        cwd = agent.directory(request.get("cwd"), self.user)
        size = request.get("pty")
        self._start(env, cwd, None if size is None else terminal_size(size), bool(request.get("stdin")))

    # ------------------------------------------------------------------ start

    def _start(self, env: dict[bytes, bytes], cwd: bytes, size: bytes | None, wants_input: bool) -> None:
        agent = self.agent
        self._cwd = cwd
        self.mark = agent.take_mark()
        ends: list[int] = []  # the agent's
        lent: list[int] = []  # the child's
        try:
            terminal = None
            streams = (-1, -1, -1)
            if size is not None:
                console = Terminal(agent.credentials, self.user, size)
                ends.append(console.master)
                ends.append(os.dup(console.master))  # the sink's: epoll tells the two apart
                terminal = console.path
            else:
                for _ in range(2):
                    read, write = new_pipe()
                    ends.append(read)
                    lent.append(write)
                if wants_input:
                    read, write = os.pipe2(os.O_CLOEXEC)
                    os.set_blocking(write, False)
                    os.fchmod(read, 0o644)  # for /dev/stdin, as in new_pipe
                    ends.append(write)
                    lent.append(read)
                streams = (lent[2] if wants_input else -1, lent[0], lent[1])
            agent.check_descriptors(max(ends))
            self.pid, self._report = agent.spawner.spawn(
                self.argv, env, cwd, self.user, self.mark, streams, terminal
            )
        except SpawnFailed as failure:
            self._abandon(ends)
            self._failed(failure.what, failure.name, failure.number)
            return
        except OSError as error:
            self._abandon(ends)
            raise Refused("limit", f"the command can't start: {error.strerror}", "close what is no longer needed") from None
        except BaseException:
            self._abandon(ends)
            raise
        finally:
            for descriptor in lent:
                os.close(descriptor)
        if size is not None:
            self.master = ends[0]
            self.sources = [Source(agent, ends[0], self.channel, PTY, self._source_ended, terminal=True)]
            self.sink = Sink(agent, ends[1], self.channel, end_bytes=b"\x04")
        else:
            self.sources = [
                Source(agent, ends[0], self.channel, STDOUT, self._source_ended),
                Source(agent, ends[1], self.channel, STDERR, self._source_ended),
            ]
            if wants_input:
                self.sink = Sink(agent, ends[2], self.channel)
        agent.children[self.pid] = self._exited
        agent.commands[self.pid] = self
        if self._report >= 0:
            agent.loop.watch(self._report, self._reported)
        else:
            agent.mux.send_event(self.channel, {"started": {"pid": self.pid}})

    def _abandon(self, ends: list[int]) -> None:
        for descriptor in ends:
            os.close(descriptor)
        if self.mark is not None:
            self.agent.marks.give_back(self.mark, checked=True)
            self.mark = None

    def _reported(self, events: int = 0) -> None:
        """After a fork: the exec went through (end of the pipe) or failed (an errno in it)."""
        descriptor, self._report = self._report, -1
        self.agent.loop.forget(descriptor)
        try:
            text = os.read(descriptor, 16)
        except OSError:
            text = b""
        os.close(descriptor)
        if text.lstrip(b"d").isdigit():
            self._failing = True
            for source in self.sources:
                source.close()
            what, name = ("cwd", self._cwd) if text[:1] == b"d" else ("program", self.argv[0])
            self._failed(what, name, int(text.lstrip(b"d")))
        elif not self.closed:
            self.agent.spawner.started(self.pid, self.user)
            self.agent.mux.send_event(self.channel, {"started": {"pid": self.pid}})

    def _failed(self, what: str, name: bytes, number: int) -> None:
        if number in _LIMIT_ERRORS:
            self._close({
                "ok": False,
                "error": {
                    "code": "limit",
                    "message": f"the command can't start: {os.strerror(number)}",
                    "hint": "the sandbox is at its limit of processes, memory or open files",
                },
            })  # fmt: skip
            return
        missing = what == "program" and number in (errno.ENOENT, errno.ENOTDIR)
        if missing and b"/" not in name:
            reason = "command not found"
        else:
            reason = os.strerror(number)
        shown = decode(name)
        mux = self.agent.mux
        mux.send_event(
            self.channel,
            {"failed": {"errno": errno.errorcode.get(number, str(number)), "message": f"{shown[:4096]}: {reason}", "what": what}},
        )
        mux.send_data(self.channel, STDERR, b"ringfence: " + (b"cd: " if what == "cwd" else b"") + name[:4096] + b": " + reason.encode() + b"\n")  # fmt: skip
        self._close({"ok": True, "exit_code": 127 if missing else 126, "signal": None, "core": False,
                     "cpu_seconds": 0.0, "max_rss": 0, "background": False})  # fmt: skip

    # ---------------------------------------------------------- from the host

    def on_data(self, stream: int, data: Any) -> None:
        if self.sink is not None and stream == (PTY if self.master >= 0 else STDIN):
            self.sink.write(data)
        else:
            self.agent.mux.grant(self.channel, len(data))

    def on_eof(self, stream: int) -> None:
        if self.sink is not None and stream == (PTY if self.master >= 0 else STDIN):
            self.sink.end()

    def on_event(self, event: dict[str, Any]) -> None:
        if event.get("kill"):
            self.kill()
        elif "resize" in event:
            if self.master >= 0 and self.sources and self.sources[0].open:
                fcntl.ioctl(self.master, termios.TIOCSWINSZ, terminal_size(event["resize"]))
        elif "signal" in event:
            self.signal(event["signal"], bool(event.get("tree")))

    def on_credit(self) -> None:
        for source in self.sources:
            source.resume()

    def cancel(self) -> None:
        """The host has closed the channel: everything the command started goes."""
        self.cancelled = True
        for source in self.sources:
            source.channel = None
            source.resume()
        self.kill()

    def fail(self, error: Exception) -> None:
        """An internal error: nothing of the command may stay."""
        self._close({"ok": False, "error": {"code": "internal", "message": f"the agent failed: {error!r}"[:500]}})
        self.kill()

    def signal(self, number: Any, tree: bool) -> None:
        if type(number) is not int or not 0 <= number < signal.NSIG:
            raise Refused("invalid", f"{number!r} is not a signal number")
        if tree:
            for pid in self.members():
                processes.send(pid, number)
        elif self.exit is None:
            processes.send(self.pid, number)

    # ------------------------------------------------------------- the ending

    def members(self) -> list[int]:
        """Live processes of this command."""
        if self.mark is not None:
            return self.agent.members(self.mark)
        return processes.descendants(self.pid)

    def kill(self) -> None:
        """End the whole tree; the channel closes when nothing of it is left."""
        if self._kill is None and self.pid and (self.mark is not None or self.agent.credentials.single_uid):
            self.killed = True
            leader = self.pid if self.agent.credentials.single_uid else None
            self._kill = processes.TreeKill(self.members, leader)
            self._kill_step()

    def _kill_step(self) -> None:
        if self._kill is None:
            return
        pause = self._kill.step()
        # The leader's death is reaped by the loop; asking again right after it ends the wait early.
        if pause is not None:
            self.agent.loop.after(pause, self._kill_step)
            return
        self._kill = None
        if self.exit is None:
            return  # its death is still to be reaped, which then finishes
        if self.closed:
            self._release()
        else:
            self._drain()

    def _exited(self, status: int, usage: Any) -> None:
        self.exit = (status, usage)
        if self._report >= 0:
            self._reported()
            if self._failing:
                return
        if self.closed:
            self._release()
        elif self._kill is None:
            self._drain()

    def _drain(self) -> None:
        # Before the pipes are closed: a child that writes to one would die of that.
        self._background = self._has_background()
        for source in list(self.sources):
            source.finish()
        self._maybe_close()

    def _source_ended(self) -> None:
        if self.exit is not None and self._kill is None and not self._failing:
            self._maybe_close()

    def _maybe_close(self) -> None:
        if self.closed or any(source.open for source in self.sources):
            return
        status, usage = self.exit if self.exit is not None else (signal.SIGKILL, None)
        self._close({
            "ok": True,
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "core": False,
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 6) if usage is not None else 0.0,
            "max_rss": usage.ru_maxrss * 1024 if usage is not None else 0,
            "background": self._background,
            "killed": self.killed,
        })  # fmt: skip

    def _has_background(self) -> bool:
        # No pid was given out since the spawn, so the command never forked: spares a scan of /proc.
        if self.agent.last_pid() == self.pid:
            return False
        return bool(self.members())

    def _close(self, result: dict[str, Any]) -> None:
        if self.closed:
            return
        self.closed = True
        self.agent.close_channel(self.channel, result)
        if self.sink is not None:
            self.sink.close()
        for source in self.sources:
            source.close()
        if self.exit is not None or not self.pid:
            self._release(result.get("background") is False)

    def _release(self, checked: bool = False) -> None:
        self.agent.commands.pop(self.pid, None)
        if self._kill is not None:
            return
        self.sources, self.sink = [], None  # the agent runs without a cycle collector
        if self.mark is not None:
            mark, self.mark = self.mark, None
            self.agent.remember_background(self.pid, mark, checked)
