"""`AsyncSandbox` and what hangs on it. The source of both facades: `tools/generate_sync.py` writes the sync twin.

Guards against twins that drift apart: every method is a thin shell over one core coroutine, which `run_async`
drives here and `run_sync` drives there. Nothing is decided in this file.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, Self, TypedDict, TypeVar, Unpack, overload

from ringfence._sandbox_core import SandboxCore, SandboxInfo, SandboxOptions
from ringfence.errors import InvalidArgumentError, WrongProcessError
from ringfence.stream.commands import Command, CommandRunner
from ringfence.stream.files import FileOperations, ReadStream, Watch
from ringfence.stream.results import (
    CommandResult,
    Context,
    EntryInfo,
    Execution,
    ExecutionError,
    FilesystemEvent,
    OutputMessage,
    ProcessInfo,
    PtySize,
    Result,
    SandboxMetrics,
    TransferReport,
    WriteInfo,
)
from ringfence.stream.waiting import run_async

if TYPE_CHECKING:
    from ringfence.changes.model import Applied, Change, Changes
    from ringfence.stream.transfers import Transfers

__all__ = ["AsyncCommandHandle", "AsyncFileStream", "AsyncSandbox", "AsyncWatchHandle"]

T = TypeVar("T")
Path = str | bytes | os.PathLike[str]
Data = str | bytes | bytearray | memoryview | IO[Any] | Iterable[Any] | AsyncIterable[Any]


class WriteEntry(TypedDict, total=False):
    """One file of `write_files`: `path` and `data`, and if wanted `mode` and `metadata`."""

    path: Path
    data: Data
    mode: int | None
    metadata: dict[str, str] | None


class AsyncCommandHandle:
    """A command that runs in the background, or a PTY.

    Iterating yields `(stdout, stderr, pty)` triples with one of them set, as the output comes; the program waits
    while nobody takes the next one. Output that nobody iterates over is kept up to `limits.output` bytes per
    stream (`read_output`). One consumer at a time: a loop, or `wait` with callbacks.
    """

    __slots__ = ("_command",)

    def __init__(self, command: Command) -> None:
        self._command = command

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._command.session.connection)

    def __repr__(self) -> str:
        state = "ended" if self._command.done else "running"
        return f"AsyncCommandHandle(pid={self.pid}, {state}, {self._command.name!r})"

    @property
    def pid(self) -> int:
        """The process id inside the sandbox; 0 when the program could not be started."""
        return self._command.pid or 0

    @property
    def done(self) -> bool:
        """True when it has ended."""
        return self._command.done

    @property
    def stdout(self) -> str:
        """The newest output so far, as text."""
        return self._command.stdout.text()

    @property
    def stderr(self) -> str:
        """The newest error output so far, as text."""
        return self._command.stderr.text()

    @property
    def stdout_total(self) -> int:
        """Bytes of output so far, those no longer kept included."""
        return self._command.stdout.total

    @property
    def stderr_total(self) -> int:
        """Bytes of error output so far, those no longer kept included."""
        return self._command.stderr.total

    async def wait(
        self,
        on_pty: Callable[[bytes], Any] | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Wait for the end; callbacks get what is kept so far and then what comes.

        `timeout` in seconds bounds this wait only; the command goes on after it.
        Raises TimeoutExceededError, CommandExitError if it was started with `check=True`, SandboxDeadError.
        """
        return await self._run(self._command.wait(on_stdout, on_stderr, on_pty, timeout))

    async def kill(self) -> bool:
        """Kill the command and everything it started; False when it had ended."""
        return await self._run(self._command.kill())

    async def send_signal(self, number: int, tree: bool = False) -> bool:
        """Send a signal to the main process, or with `tree` to all it started; False when it had ended."""
        return await self._run(self._command.signal(number, tree))

    async def send_stdin(self, data: str | bytes, timeout: float | None = None) -> None:
        """Write to its input (needs `stdin=True` or a PTY). Waits, at most `timeout` seconds, while it does not read:
        by default the command's own timeout, or `limits.timeout` where it has none; 0: for ever.

        Raises NotFoundError when it has ended, TimeoutExceededError.
        """
        await self._run(self._command.send_stdin(data, timeout))

    async def close_stdin(self) -> None:
        """End its input."""
        await self._run(self._command.close_stdin())

    async def resize(self, size: PtySize) -> None:
        """Change the size of its PTY."""
        await self._run(self._command.resize(size))

    def read_output(
        self, offset: int = 0, stream: Literal["stdout", "stderr"] = "stdout", size: int | None = None
    ) -> bytes:
        """Kept output from absolute byte `offset`, at most `size` bytes, without waiting.

        Raises OutputGoneError, whose `oldest` is the first offset still kept, when that is further on.
        """
        if stream not in ("stdout", "stderr"):
            raise InvalidArgumentError(f"stream must be 'stdout' or 'stderr', not {stream!r}")
        ring = self._command.stdout if stream == "stdout" else self._command.stderr
        return ring.read(offset, size)

    def disconnect(self) -> None:
        """Stop consuming; the command goes on and can be found again with `commands.connect(pid)`."""
        self._command.detach()

    async def __aiter__(self) -> AsyncIterator[tuple[str | None, str | None, bytes | None]]:
        command = self._command
        command.attach()
        try:
            while (piece := await self._run(command.next_piece())) is not None:
                stream, data = piece
                if stream == 3:
                    yield None, None, data
                elif text := command.decode(stream, data):
                    yield (None, text, None) if stream == 2 else (text, None, None)
            for stream in (1, 2):
                if text := command.decode(stream, b"", True):
                    yield (None, text, None) if stream == 2 else (text, None, None)
        finally:
            command.detach()


class AsyncCommands:
    """`sandbox.commands`: run programs."""

    __slots__ = ("_core",)

    def __init__(self, core: SandboxCore) -> None:
        self._core = core

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._core.pump)

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] | None = None,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Path | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        stdin: bool | str | bytes | None = None,
        timeout: float | None = None,
        *,
        on_pty: Callable[[bytes], Any] | None = None,
        pty: PtySize | None = None,
        no_output_timeout: float | None = None,
        check: bool = False,
        output_limit: int | None = None,
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[True],
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Path | None = None,
        on_stdout: None = None,
        on_stderr: None = None,
        stdin: bool | str | bytes | None = None,
        timeout: float | None = None,
        *,
        on_pty: None = None,
        pty: PtySize | None = None,
        no_output_timeout: float | None = None,
        check: bool = False,
        output_limit: int | None = None,
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        background: bool | None = None,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Path | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        stdin: bool | str | bytes | None = None,
        timeout: float | None = None,
        *,
        on_pty: Callable[[bytes], Any] | None = None,
        pty: PtySize | None = None,
        no_output_timeout: float | None = None,
        check: bool = False,
        output_limit: int | None = None,
    ) -> CommandResult | AsyncCommandHandle:
        """Run a command: a str goes to `bash -c`, a list is the argument vector itself.

        A non-zero exit is a result, not an error (unless `check`); a missing program is exit code 127. With
        `background` a handle is returned as soon as the program runs; give callbacks to its `wait` then.

        `envs` add to the sandbox's; `cwd` defaults to the home directory; `user` to `user`.
        `stdin`: None or False for no input, str or bytes for that input and its end, True to `send_stdin` later.
        `pty` runs it on a terminal of that size, whose output goes to `on_pty` and `stdout`.
        `on_stdout`, `on_stderr` get text as it comes, and the program waits while they work; what they raise
        kills the command and comes out here.
        `timeout` in seconds (default `limits.timeout`, none in the background; 0: none) and `no_output_timeout`
        (default none) end the whole tree of processes.
        `output_limit` is how many bytes of each stream are kept (default `limits.output`).

        Raises TimeoutExceededError with the output so far in `.partial`, CommandExitError with `check`,
        InvalidArgumentError, SandboxDeadError.
        """
        runner = self._core.commands
        command, request, text = runner.prepare(
            cmd,
            background=bool(background),
            envs=envs,
            user=user,
            cwd=cwd,
            stdin=stdin,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            pty=pty,
            check=check,
            output_limit=output_limit,
        )
        if background:
            if on_stdout is not None or on_stderr is not None or on_pty is not None:
                raise InvalidArgumentError(
                    "a command in the background takes no callbacks", hint="pass them to handle.wait()"
                )
            return AsyncCommandHandle(await self._run(runner.start(command, request, text)))
        return await self._run(runner.run(command, request, text, on_stdout, on_stderr, on_pty))

    async def list(self) -> builtins.list[ProcessInfo]:
        """The commands that run now."""
        return await self._run(self._core.commands.list())

    async def connect(self, pid: int) -> AsyncCommandHandle:
        """The handle of a command by its pid; until 30 s after its end when it ran in the background.

        Raises NotFoundError.
        """
        return AsyncCommandHandle(self._core.commands.find(pid))

    async def kill(self, pid: int) -> bool:
        """Kill a command and everything it started; False when there is none with that pid."""
        return await self._run(self._core.commands.kill(pid))

    async def send_stdin(self, pid: int, data: str | bytes, timeout: float | None = None) -> None:
        """Write to the input of a command, as `AsyncCommandHandle.send_stdin`. Raises NotFoundError."""
        await self._run(self._core.commands.find(pid).send_stdin(data, timeout))

    async def close_stdin(self, pid: int) -> None:
        """End the input of a command. Raises NotFoundError."""
        await self._run(self._core.commands.find(pid).close_stdin())


class AsyncPty:
    """`sandbox.pty`: interactive terminals."""

    __slots__ = ("_core",)

    def __init__(self, core: SandboxCore) -> None:
        self._core = core

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._core.pump)

    async def create(
        self,
        size: PtySize,
        user: str | None = None,
        cwd: Path | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncCommandHandle:
        """Start an interactive login shell on a terminal. `timeout` in seconds ends it (default: never)."""
        runner: CommandRunner = self._core.commands
        command, request, text = runner.prepare(
            ["/bin/bash", "-i", "-l"],
            background=True,
            envs={"TERM": "xterm-256color", "LANG": "C.UTF-8", **(envs or {})},
            user=user,
            cwd=cwd,
            stdin=True,
            timeout=timeout,
            no_output_timeout=None,
            pty=size,
            check=False,
            output_limit=None,
        )
        return AsyncCommandHandle(await self._run(runner.start(command, request, text)))

    async def connect(self, pid: int) -> AsyncCommandHandle:
        """The handle of a terminal by its pid. Raises NotFoundError."""
        return AsyncCommandHandle(self._core.commands.find(pid))

    async def kill(self, pid: int) -> bool:
        """Kill a terminal with everything on it; False when there is none with that pid."""
        return await self._run(self._core.commands.kill(pid))

    async def send_stdin(self, pid: int, data: str | bytes, timeout: float | None = None) -> None:
        """Type on a terminal, as `AsyncCommandHandle.send_stdin`. Raises NotFoundError."""
        await self._run(self._core.commands.find(pid).send_stdin(data, timeout))

    async def resize(self, pid: int, size: PtySize) -> None:
        """Change the size of a terminal. Raises NotFoundError."""
        await self._run(self._core.commands.find(pid).resize(size))


class AsyncFileStream:
    """A file being read piece by piece: iterate over it, or use it in a `with`. Size and hash are compared at the
    end, where TransferError is raised if they differ."""

    __slots__ = ("_stream",)

    def __init__(self, stream: ReadStream) -> None:
        self._stream = stream

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._stream.session.connection)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        piece = await self._run(self._stream.next_piece())
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stream.drop()

    def close(self) -> None:
        """Stop reading."""
        self._stream.close()


class AsyncWatchHandle:
    """A watched directory: poll with `get_new_events`, iterate, or give `watch_dir` a callback."""

    __slots__ = ("_task", "_watch")

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._task: Any = None

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._watch.session.connection)

    async def get_new_events(self) -> list[FilesystemEvent]:
        """What happened since the last call, at most 10,000 events; an OVERFLOW event says that some are lost."""
        return await self._run(self._watch.new_events())

    async def next_event(self, timeout: float | None = None) -> FilesystemEvent | None:
        """The next event; None when `timeout` seconds passed, or the watch has ended."""
        return await self._run(self._watch.next_event(timeout))

    async def stop(self) -> None:
        """End the watch."""
        await self._run(self._watch.stop())

    async def __aiter__(self) -> AsyncIterator[FilesystemEvent]:
        while (event := await self._run(self._watch.next_event())) is not None:
            yield event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _follow(self, callback: Callable[[FilesystemEvent], Any]) -> None:
        import asyncio  # async only

        self._task = asyncio.ensure_future(run_async(self._watch.follow(callback)))  # async only
        # sync only: import threading
        # sync only:
        # sync only: self._task = threading.Thread(
        # sync only:     target=lambda: run_sync(self._watch.follow(callback)), name="ringfence-watch", daemon=True
        # sync only: )
        # sync only: self._task.start()


class AsyncFiles:
    """`sandbox.files`: files inside the sandbox, with the rights of its user, or of `user="root"` where the policy has
    `root: true`; `~` is then that user's home.

    Relative paths and `~` count from the home directory. Names hold any bytes (surrogate escapes, as `os.fsdecode`
    makes them). Every transfer is complete and hash-checked, or raises.

    `timeout` is in seconds and for the whole call (0: none). Calls that are over at once have 60 s by default. Those
    that move content (read, write, upload, download) have no limit in all by default, but end after
    `no_progress_timeout` seconds (default 60; 0: none) in which nothing moved. Both raise TimeoutExceededError.
    """

    __slots__ = ("_core",)

    def __init__(self, core: SandboxCore) -> None:
        self._core = core

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._core.pump)

    def _as(self, user: str | None) -> FileOperations:
        return self._core.files if user is None else FileOperations(self._core.session, user)

    @property
    def _transfers(self) -> Transfers:
        return self._core.transfers

    @overload
    async def read(
        self,
        path: Path,
        format: Literal["text"] = "text",
        *,
        limit: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> str: ...
    @overload
    async def read(
        self,
        path: Path,
        format: Literal["bytes"],
        *,
        limit: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> bytes: ...
    @overload
    async def read(
        self,
        path: Path,
        format: Literal["stream"],
        *,
        limit: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> AsyncFileStream: ...
    async def read(
        self,
        path: Path,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        limit: int | None = None,
        user: str | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> str | bytes | AsyncFileStream:
        """Read a file: as text (UTF-8, undecodable bytes replaced), bytes, or a stream of any size.

        `limit` in bytes bounds what is taken into memory (default: all that a sandbox can hold).
        Raises NotFoundError, PermissionDeniedError, FileOperationError, LimitExceededError, TransferError.
        """
        if format in ("text", "bytes"):
            data = await self._run(
                self._as(user).read(path, limit, timeout=timeout, no_progress=no_progress_timeout)
            )
            return data.decode("utf-8", "replace") if format == "text" else data
        if format == "stream":
            return AsyncFileStream(
                self._as(user).open_read(
                    path, collect=False, bound=limit, timeout=timeout, no_progress=no_progress_timeout
                )
            )
        raise InvalidArgumentError(f"format must be 'text', 'bytes' or 'stream', not {format!r}")

    async def write(
        self,
        path: Path,
        data: Data,
        *,
        mode: int | None = None,
        metadata: dict[str, str] | None = None,
        append: bool = False,
        user: str | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> WriteInfo:
        """Write a file from str, bytes, an open file or an iterable of bytes; missing directories are made.

        The file appears under its name all at once. `mode` are its permission bits (default 0644).
        Raises PermissionDeniedError, NotEnoughSpaceError, FileOperationError, TransferError.
        """
        return await self._run(
            self._as(user).write(path, data, mode, metadata, append, timeout, no_progress_timeout)
        )

    async def write_files(
        self,
        files: Sequence[WriteEntry],
        *,
        user: str | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> builtins.list[WriteInfo]:
        """Write several files, one after the other; results in the same order. The first failure is raised."""
        return await self._run(self._as(user).write_files(files, timeout, no_progress_timeout))

    async def list(
        self, path: Path = ".", depth: int = 1, *, user: str | None = None, timeout: float | None = None
    ) -> builtins.list[EntryInfo]:
        """What is in a directory, down to `depth` levels; links are not followed.

        An entry, or a directory below, that cannot be looked at says why in `unreadable`. Raises NotFoundError.
        """
        return await self._run(self._as(user).list(path, depth, timeout))

    async def exists(self, path: Path, *, user: str | None = None, timeout: float | None = None) -> bool:
        """True when there is something with that name, a dangling link included."""
        return await self._run(self._as(user).exists(path, timeout))

    async def get_info(self, path: Path, *, user: str | None = None, timeout: float | None = None) -> EntryInfo:
        """What is known about one entry; a link is not followed. Raises NotFoundError."""
        return await self._run(self._as(user).info(path, timeout))

    async def make_dir(self, path: Path, mode: int = 0o755, *, user: str | None = None, timeout: float | None = None) -> bool:
        """Make a directory and those above it; False when it exists. Raises FileConflictError for another kind."""
        return await self._run(self._as(user).make_dir(path, mode, timeout))

    async def rename(self, old_path: Path, new_path: Path, *, user: str | None = None, timeout: float | None = None) -> EntryInfo:
        """Rename or move; an existing file is replaced. Raises NotFoundError."""
        return await self._run(self._as(user).rename(old_path, new_path, timeout))

    async def remove(self, path: Path, missing_ok: bool = False, *, user: str | None = None, timeout: float | None = None) -> None:
        """Remove a file, or a directory with all that is in it. Raises NotFoundError unless `missing_ok`."""
        await self._run(self._as(user).remove(path, missing_ok, timeout))

    async def chmod(self, path: Path, mode: int, *, user: str | None = None, timeout: float | None = None) -> EntryInfo:
        """Set permission bits; set-id bits are refused."""
        return await self._run(self._as(user).chmod(path, mode, timeout))

    async def symlink(self, target: Path, path: Path, *, user: str | None = None, timeout: float | None = None) -> EntryInfo:
        """Make a symbolic link at `path` that says `target`. Raises FileConflictError."""
        return await self._run(self._as(user).symlink(target, path, timeout))

    async def get_metadata(self, path: Path, *, user: str | None = None, timeout: float | None = None) -> dict[str, str]:
        """The metadata of a file (its `user.ringfence.*` extended attributes)."""
        return await self._run(self._as(user).metadata(path, None, timeout))

    async def set_metadata(
        self, path: Path, metadata: dict[str, str], *, user: str | None = None, timeout: float | None = None
    ) -> dict[str, str]:
        """Set entries of a file's metadata; returns all of it."""
        return await self._run(self._as(user).metadata(path, metadata, timeout))

    async def watch_dir(
        self,
        path: Path,
        on_event: Callable[[FilesystemEvent], Any] | None = None,
        recursive: bool = False,
        *,
        user: str | None = None,
        timeout: float | None = None,
    ) -> AsyncWatchHandle:
        """Watch a directory from now on. `on_event` is called with each change, in the background.

        `timeout` bounds the start of the watch, not the watch itself.
        """
        handle = AsyncWatchHandle(await self._run(self._as(user).watch(path, recursive, timeout)))
        if on_event is not None:
            handle._follow(on_event)
        return handle

    async def upload(
        self,
        local: Path,
        remote: Path,
        *,
        mode: int | None = None,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> WriteInfo:
        """Send a local regular file of any size. Raises InvalidArgumentError for devices and FIFOs, OSError."""
        return await self._run(self._transfers.upload(local, remote, mode, timeout, no_progress_timeout))

    async def download(
        self,
        remote: Path,
        local: Path,
        *,
        overwrite: bool = True,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> int:
        """Fetch a file of any size; returns its bytes. It appears under its name only when complete and checked.

        Raises NotFoundError, FileConflictError, TransferError, OSError.
        """
        return await self._run(
            self._transfers.download(remote, local, overwrite, timeout, no_progress_timeout)
        )

    async def upload_dir(
        self,
        local: Path,
        remote: Path,
        *,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> TransferReport:
        """Send a directory. Links are sent as links when they stay inside; links that point outside, special files
        and what cannot be read are in `report.skipped`."""
        return await self._run(self._transfers.upload_dir(local, remote, timeout, no_progress_timeout))

    async def download_dir(
        self,
        remote: Path,
        local: Path,
        *,
        overwrite: bool = False,
        max_bytes: int | None = None,
        max_entries: int = 100_000,
        max_depth: int = 64,
        timeout: float | None = None,
        no_progress_timeout: float | None = None,
    ) -> TransferReport:
        """Fetch a directory, treating all that is in it as hostile.

        Only regular files, directories, and relative links that stay inside are made, below `local` and nowhere
        else, without set-id bits; the rest is in `report.skipped`. Files that exist stay unless `overwrite`.
        `max_bytes` defaults to what the sandbox's disks can hold.
        Raises LimitExceededError beyond the bounds, NotFoundError, OSError.
        """
        return await self._run(
            self._transfers.download_dir(
                remote, local, overwrite, max_bytes, max_entries, max_depth, timeout, no_progress_timeout
            )
        )


class AsyncSandbox:
    """One isolated place, with its processes and files, for code that nobody trusts.

        async with AsyncSandbox() as sandbox:
            execution = await sandbox.run_code("x = 21; x * 2")
            print(execution.text)

    `template` is what it starts from: `plain` (a Python without packages), `base` (IPython), `data` (numpy, pandas,
    matplotlib), `current-env` (the packages of the Python that runs this) or an environment that `ringfence env
    create` made; `packages=["polars"]` makes one as needed. Further options are keywords, see `SandboxOptions`. Without a policy it has no network and
    no file of the host.

    Raises InvalidArgumentError, PolicyError, EnforcementError when the policy cannot be held here in full (then
    nothing runs), EngineError when the engine failed.
    """

    def __init__(self, template: str = "base", **options: Unpack[SandboxOptions]) -> None:
        self._core = SandboxCore(template, options)
        # sync only: run_sync(self._core.start())

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await run_async(coroutine)  # async only
        # sync only: return run_sync(coroutine, None, self._core.pump)

    @classmethod
    async def create(cls, template: str | None = None, **options: Unpack[SandboxOptions]) -> Self:
        """Start a sandbox. The same as the constructor, under the name that E2B's users know."""
        sandbox = cls(template or "base", **options)
        await run_async(sandbox._core.start())  # async only
        return sandbox

    @classmethod
    async def connect(cls, sandbox_id: str) -> Self:
        """Another object for a sandbox that runs in this process. Raises NotFoundError."""
        return cls._of(SandboxCore.find(sandbox_id))

    @classmethod
    async def list(cls) -> builtins.list[SandboxInfo]:
        """The sandboxes that run in this process, oldest first."""
        return [core.info() for core in SandboxCore.all()]

    @classmethod
    def prewarm(cls, count: int, template: str = "base", **options: Unpack[SandboxOptions]) -> Any:
        """Keep `count` sandboxes of this kind ready, for later starts with the same options; 0 ends that."""
        return SandboxCore.prewarm(template, options, count)

    @classmethod
    def _of(cls, core: SandboxCore) -> Self:
        sandbox = cls.__new__(cls)
        sandbox._core = core
        return sandbox

    async def __aenter__(self) -> Self:
        await self._run(self._core.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run(self._core.leave())

    def __repr__(self) -> str:
        if not self._core.started:
            return "<AsyncSandbox, not started>"
        return f"<AsyncSandbox {self.id} {self._core.state}>"

    def __reduce__(self) -> NoReturn:
        raise WrongProcessError(
            "a sandbox cannot be pickled",
            hint="start it in the process that uses it, or pass results instead",
        )

    @property
    def id(self) -> str:
        """The sandbox's unique name."""
        return self._core.session.handle.id

    @property
    def sandbox_id(self) -> str:
        """The same as `id` (E2B's name)."""
        return self.id

    @property
    def commands(self) -> AsyncCommands:
        """Run programs."""
        return AsyncCommands(self._core)

    @property
    def files(self) -> AsyncFiles:
        """Files inside."""
        return AsyncFiles(self._core)

    @property
    def pty(self) -> AsyncPty:
        """Interactive terminals."""
        return AsyncPty(self._core)

    async def kill(self) -> bool:
        """Kill it with all that runs inside; returns when the host has seen the last process gone.

        False when it was gone already. Raises WrongProcessError in a forked child.
        """
        return await self._run(self._core.kill())

    async def is_running(self) -> bool:
        """True while it lives."""
        return self._core.running

    async def info(self) -> SandboxInfo:
        """What it is, its limits, its times, and what is in force, read from the kernel now."""
        return await self._run(self._core.inspect())

    async def get_info(self) -> SandboxInfo:
        """The same as `info` (E2B's name)."""
        return await self.info()

    async def stats(self) -> dict[str, Any]:
        """What it uses, as the host counts it: `memory` in bytes, `pids`, `oom_kills`, ..."""
        return await self._run(self._core.stats())

    async def changes(self) -> Changes:
        """Capture what was changed in an overlay workspace: paths, kinds, modes, hashes, diffs, and the bytes.

        The sandbox stands still meanwhile; `changes.frozen` says whether all of it did. Only what it changed is read, and
        of the host the same names. Nothing is written: see `apply`.

        Raises InvalidArgumentError without an overlay workspace or after `discard`, CaptureError beyond the bounds,
        SandboxDeadError, ApplyConflictError when the directory was replaced.
        """
        return await self._run(self._core.changes())

    async def apply(self, changes: Changes, paths: Iterable[Path | Change] | None = None) -> Applied:
        """Write exactly the captured bytes to the host's directory: all that was asked for, or nothing.

        `paths` narrows it to some: a directory stands for the ordinary changes in it. What needs to be named (files that
        the host would act on by itself, links that lead outside) is refused unless its own path is in `paths`, or the
        change itself is; `paths=changes.ordinary` leaves such changes out. Works after the sandbox has ended, too.

        Raises ApplyRefusedError, ApplyConflictError where the host changed the same files meanwhile,
        InvalidArgumentError for a path where nothing changed. Cut short by a crash, it is undone by the next `apply` or
        by `ringfence sweep`.
        """
        return await self._run(self._core.apply(changes, paths))

    async def discard(self) -> None:
        """Give up what was changed in the workspace: nothing of it can be captured or applied any more.

        What runs in the sandbox keeps seeing its own files; they go with it.
        """
        self._core.review.discard()

    async def metrics(self) -> SandboxMetrics:
        """What it uses now: processor time, memory, processes, files, bytes through this API; by the host's counters."""
        return await self._run(self._core.metrics())

    async def get_metrics(self) -> builtins.list[SandboxMetrics]:
        """`metrics` in a list of one (E2B's name; nothing keeps a history)."""
        return [await self.metrics()]

    async def resize(
        self, memory: int | str | None = None, cpus: float | None = None, pids: int | None = None
    ) -> SandboxInfo:
        """Change limits while it runs: bytes or a text such as `"1GiB"`, processors, processes and threads.

        All that is asked for takes effect or nothing does. Returns what is in force afterwards. A smaller limit
        kills nothing: below what is in use it is refused. Without a control group `memory` changes the watch; each
        process keeps its own, smaller bound where that cannot be raised, and `enforcement` says so.
        It is the caller who decides: limits beyond those of the policy it was made with are put in force.

        Raises EnforcementError, with `.primitive` and a hint, for what is in use, what this machine does not have
        and what is not limited here; PolicyError for what no policy may ask for; SandboxDeadError.
        """
        return await self._run(self._core.resize(memory, cpus, pids))

    async def pause(self) -> bool:
        """Stop every process in it, by the control group's freezer; False when it was paused already.

        It keeps its memory and files and takes no processor time. While it is paused, time limits of what runs in it
        and `limits.idle` stand still; `limits.max_age` goes on. Calls that need its guest raise SandboxPausedError;
        `kill`, `info`, `metrics`, `resize` and `set_timeout` work.
        Raises EnforcementError where there is no freezer, or a process could not be stopped.
        """
        return await self._run(self._core.pause())

    async def resume(self) -> bool:
        """Let a paused sandbox go on where it stood; False when it was not paused."""
        return await self._run(self._core.resume())

    async def set_timeout(self, timeout: float | str) -> None:
        """Let it end `timeout` (seconds, or a text such as `10min`) from now.

        Raises InvalidArgumentError beyond `limits.max_age` after its start."""
        self._core.set_timeout(timeout)

    async def run_code(
        self,
        code: str,
        language: str | None = None,
        context: Context | str | None = None,
        on_stdout: Callable[[OutputMessage], Any] | None = None,
        on_stderr: Callable[[OutputMessage], Any] | None = None,
        on_result: Callable[[Result], Any] | None = None,
        on_error: Callable[[ExecutionError], Any] | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Execution:
        """Run a cell; variables stay for the next one in the same `context` (None: the default one).

        An exception of the code is `execution.error`, not an error here; so is the end of its kernel (`os._exit`,
        a crash, the memory limit), after which the next cell gets a fresh one.
        Callbacks get output, results and the error as they come, and the code waits while they work.
        `envs` hold for this cell. `timeout` is in seconds (default `limits.timeout`; 0: none): at its end the code
        gets a KeyboardInterrupt, 2 s later its kernel is replaced; `error.outcome` says which.

        Raises TimeoutExceededError with the execution so far in `.partial`, InvalidArgumentError,
        NotFoundError for an unknown context, SandboxDeadError.
        """
        return await self._run(
            self._core.code.run(
                code, language, context, timeout, envs, on_stdout, on_stderr, on_result, on_error
            )
        )

    async def create_code_context(
        self,
        cwd: Path | None = None,
        language: str | None = None,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Context:
        """A further session with variables, working directory and environment of its own.

        `user` is whose rights it has: `user`, or `root` where the policy has `root: true`.
        """
        return await self._run(self._core.code.create_context(cwd, language, envs, user))

    async def list_code_contexts(self) -> builtins.list[Context]:
        """The sessions, the default one included once it was used."""
        return await self._run(self._core.code.list_contexts())

    async def restart_code_context(self, context: Context | str) -> None:
        """Give a session a fresh kernel: its variables are gone. Raises NotFoundError."""
        await self._run(self._core.code.restart_context(context))

    async def remove_code_context(self, context: Context | str) -> bool:
        """End a session; False when there is none with that id."""
        return await self._run(self._core.code.remove_context(context))

    async def interrupt_code_context(self, context: Context | str) -> None:
        """Send a KeyboardInterrupt to what runs in a session."""
        await self._run(self._core.code.interrupt_context(context))
