"""Files: everything resolves inside the guest, under the user's rights; the host sends and receives bytes.

Guards against transfers that are not what they seem: every read and write is hashed on both sides and compared,
memory stays constant however large a file is, a read into memory and a listing are bounded, and a transfer that
makes no progress ends.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from ringfence.errors import (
    GuestError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    TimeoutExceededError,
    TransferError,
)
from ringfence.stream.checks import check_count, check_mode, check_path, check_seconds, check_text
from ringfence.stream.exchange import OPERATION_SECONDS, Exchange, Patience, Session, deliver
from ringfence.stream.results import (
    EntryInfo,
    FilesystemEvent,
    FilesystemEventType,
    WriteInfo,
    clean_text,
)
from ringfence.stream.waiting import interruptible

__all__ = ["CHUNK", "FileOperations", "ReadStream", "Timeout", "Watch", "patience_of", "transfer_patience"]

CHUNK = 256 * 1024
"""Bytes that a transfer handles at a time."""
SMALL = 48 * 1024
"""Bytes of a file that is sent as one message."""
_FILE = 5
_LISTING_LIMIT = 64 << 20
_WATCH_LIMIT = 10_000
Timeout = float | Patience | None
"""Seconds as the caller gave them, or what is left of the patience of a larger operation."""


def patience_of(session: Session, timeout: Timeout, default: float | None = OPERATION_SECONDS) -> Patience:
    """For an operation that is over at once: `timeout` seconds in all (None: the default, 0: none)."""
    if isinstance(timeout, Patience):
        return timeout
    seconds = check_seconds(timeout, "timeout")
    return Patience(default if seconds is None else seconds, clock=session.clock)


def transfer_patience(session: Session, timeout: Timeout, no_progress: float | None) -> Patience:
    """For one that may be long: no limit in all by default, and one on the time without progress (None: 60 s)."""
    if isinstance(timeout, Patience):
        return timeout
    silence = check_seconds(no_progress, "no_progress_timeout")
    limit = check_seconds(timeout, "timeout")
    return Patience(limit, OPERATION_SECONDS if silence is None else silence, session.clock)


class ReadStream(Exchange):
    """One file being read. Without `collect`, credit is granted only as pieces are taken."""

    __slots__ = (
        "_digest",
        "_patience",
        "_pieces",
        "_size",
        "bound",
        "collect",
        "entry",
        "overrun",
        "path",
        "session",
    )

    def __init__(
        self, session: Session, path: str, patience: Patience, collect: bool, bound: int | None
    ) -> None:
        import hashlib

        super().__init__()
        self.session = session
        self.path = path
        self.collect = collect
        self.bound = bound
        self.overrun = False
        self.entry: dict[str, Any] | None = None
        self._patience = patience
        self._size = 0
        self._digest = hashlib.sha256()
        self._pieces: deque[bytes] = deque()

    def on_data(self, stream: int, data: memoryview) -> int | None:
        size = len(data)
        if stream != _FILE:
            return size
        self._size += size
        if self.bound is not None and self._size > self.bound:
            self.overrun = True
            self.wake()
            return None  # No more credit: the guest cannot send on.
        self._pieces.append(bytes(data))
        self.wake()
        return size if self.collect else None

    def take_event(self, event: dict[str, Any]) -> None:
        entry = event.get("entry")
        if isinstance(entry, dict):
            self.entry = entry

    async def next_piece(self) -> bytes | None:
        """The next bytes, or None at the end, when size and hash have been found right.

        Raises TransferError when they are not, and what the guest answered.
        """
        while True:
            seen = self.version
            if self.overrun:
                self.close()
                raise LimitExceededError(
                    f"{self.path!r} is larger than {self.bound} bytes",
                    hint="pass a larger limit, use format='stream' or download()",
                    limit="limit",
                    value=self.bound,
                )
            until = self._patience.until
            if until is not None and not self.done and self.clock.now() >= until:
                raise await self.session.stop(self, f"files.read of {self.path!r}", self._patience)
            if self._pieces:
                piece = self._pieces.popleft()
                self._digest.update(piece)
                if not self.collect and not self.done and self.channel is not None:
                    self.channel.grant(len(piece))
                return piece
            if self.done:
                break
            if not await self.changed(self._patience.deadline(), seen):
                raise await self.session.stop(self, f"files.read of {self.path!r}", self._patience)
        reply = await self.session.reply(self, f"files.read of {self.path!r}")
        if reply.get("size") != self._size or reply.get("sha256") != self._digest.hexdigest():
            raise TransferError(
                f"what arrived of {self.path!r} is not what the guest read",
                hint="was the file being written? read it again",
            )
        return None

    @property
    def size(self) -> int:
        """Bytes received so far."""
        return self._size

    def close(self) -> None:
        """Stop reading early. A guest that does not confirm that it stopped loses the sandbox: an operation that
        never ends would keep the sandbox from ever being idle."""
        self._pieces.clear()
        self.session.abandon(self)

    def drop(self) -> None:
        """`close` for finalizers: takes no lock."""
        if not self.done and self.channel is not None:
            self.channel.abandon("dropped")


class _Listing(Exchange):
    __slots__ = ("lines", "overrun")

    def __init__(self) -> None:
        super().__init__()
        self.lines = bytearray()
        self.overrun = False

    def on_data(self, stream: int, data: memoryview) -> int | None:
        if len(self.lines) + len(data) > _LISTING_LIMIT:
            self.overrun = True
            self.wake()
            return None
        self.lines += data
        self.wake()
        return len(data)


class Watch(Exchange):
    """One watched directory; at most 10,000 events wait, then an OVERFLOW says that some are lost."""

    __slots__ = ("_events", "_overflowed", "session")

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._events: deque[FilesystemEvent] = deque()
        self._overflowed = False

    def on_event(self, event: dict[str, Any]) -> None:
        # Unlike other exchanges a watch may live long: what waits is bounded, not what ever came.
        self.take_event(event)

    def take_event(self, event: dict[str, Any]) -> None:
        self.events += 1
        if "started" in event:
            self.wake()
            return
        try:
            kind = FilesystemEventType(event.get("type"))
        except ValueError:
            return
        name, target = event.get("path", ""), event.get("target")
        if not isinstance(name, str) or not (target is None or isinstance(target, str)):
            return
        if len(self._events) >= _WATCH_LIMIT:
            if not self._overflowed:
                self._overflowed = True
                self._events.append(FilesystemEvent("", FilesystemEventType.OVERFLOW))
            return
        self._events.append(FilesystemEvent(name, kind, target))
        self.wake()

    def drain(self) -> list[FilesystemEvent]:
        """The events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        self._overflowed = False
        return events

    async def new_events(self) -> list[FilesystemEvent]:
        """See `WatchHandle.get_new_events`."""
        events = self.drain()
        if not events and self.done and self.reply is None:
            raise await self.session.fail(self, "watch_dir")
        if not events and self.done:
            await self.session.reply(self, "watch_dir")
        return events

    async def next_event(self, timeout: float | None = None) -> FilesystemEvent | None:
        """The next event, waiting for it; None when the watch has ended or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            seen = self.version
            if self._events:
                return self._events.popleft()
            if self.done:
                if self.reply is None:
                    raise await self.session.fail(self, "watch_dir")
                return None
            left = None if deadline is None else deadline - time.monotonic()
            if not await self.news(left, seen):
                return None

    async def follow(self, callback: Any) -> None:
        """Call back with each event until the watch ends."""
        while (event := await self.next_event()) is not None:
            await deliver(callback, event)

    async def stop(self) -> None:
        """End the watch."""
        if not self.done and self.channel is not None:
            self.channel.close("stopped")
            if not await self.finished(self.clock.now() + OPERATION_SECONDS):
                raise await self.session.stop(self, "watch_dir stop", OPERATION_SECONDS)


class FileOperations:
    """`sandbox.files` of one sandbox, with the rights of `user` (None: the sandbox's own)."""

    def __init__(self, session: Session, user: str | None = None) -> None:
        self.session = session
        self._owner = {} if user is None else {"user": check_text(user, "user", empty=False)}

    async def _entry(self, request: dict[str, Any], what: str, timeout: Timeout) -> EntryInfo:
        reply = await self.session.call(request, what, patience=patience_of(self.session, timeout))
        return EntryInfo.from_guest(reply.get("entry"))

    async def info(self, path: Any, timeout: Timeout = None) -> EntryInfo:
        """See `Files.get_info`."""
        path = check_path(path)
        return await self._entry({**self._owner, "op": "file.stat", "path": path}, f"files.get_info of {path!r}", timeout)

    async def exists(self, path: Any, timeout: Timeout = None) -> bool:
        """See `Files.exists`."""
        try:
            await self.info(path, timeout)
        except NotFoundError:
            return False
        return True

    async def list(self, path: Any, depth: int = 1, timeout: Timeout = None) -> list[EntryInfo]:
        """See `Files.list`."""
        path = check_path(path)
        depth = check_count(depth, "depth", lowest=1, highest=1000)
        what = f"files.list of {path!r}"
        patience = patience_of(self.session, timeout)
        listing = _Listing()
        session = self.session
        session.open({**self._owner, "op": "file.list", "path": path, "depth": depth}, listing)
        try:
            while not listing.done and not listing.overrun:
                if not await listing.changed(patience.deadline(), listing.version):
                    raise await session.stop(listing, what, patience)
        except TimeoutExceededError:
            raise
        except BaseException:
            session.abandon(listing)
            raise
        if listing.overrun:
            session.abandon(listing)
            raise LimitExceededError(
                f"{what}: the listing is larger than {_LISTING_LIMIT >> 20} MiB",
                hint="list with a smaller depth",
            )
        reply = await session.reply(listing, what)
        entries = reply.get("entries")
        if entries is None:
            try:
                entries = json.loads(b"[" + b",".join(bytes(listing.lines).split(b"\n")).strip(b",") + b"]")
            except (ValueError, RecursionError):
                raise GuestError(f"{what}: the guest gave a malformed answer", code="malformed") from None
        if not isinstance(entries, list):
            raise GuestError(f"{what}: the guest gave a malformed answer", code="malformed")
        found, closed = [], {}
        for entry in entries:
            if isinstance(entry, dict) and "unreadable" in entry:
                closed[entry["unreadable"] if isinstance(entry["unreadable"], str) else ""] = entry.get(
                    "error"
                )
            else:
                found.append(EntryInfo.from_guest(entry))
        if closed:
            for info in found:
                if (why := closed.pop(info.path, None)) is not None:
                    info.unreadable = clean_text(str(why)[:200]) or "it could not be read"
            if closed:
                raise GuestError(f"{what}: the guest gave a malformed answer", code="malformed")
        return found

    async def make_dir(self, path: Any, mode: int = 0o755, timeout: Timeout = None) -> bool:
        """See `Files.make_dir`."""
        path, mode = check_path(path), check_mode(mode)
        reply = await self.session.call(
            {**self._owner, "op": "file.mkdir", "path": path, "parents": True, "mode": mode},
            f"files.make_dir of {path!r}",
            patience=patience_of(self.session, timeout),
        )
        return reply.get("created") is True

    async def rename(self, old: Any, new: Any, timeout: Timeout = None) -> EntryInfo:
        """See `Files.rename`."""
        source, target = check_path(old, "old_path"), check_path(new, "new_path")
        return await self._entry(
            {**self._owner, "op": "file.move", "source": source, "target": target}, f"files.rename of {source!r}", timeout
        )

    async def remove(self, path: Any, missing_ok: bool = False, timeout: Timeout = None) -> None:
        """See `Files.remove`."""
        path = check_path(path)
        try:
            await self.session.call(
                {**self._owner, "op": "file.remove", "path": path, "recursive": True},
                f"files.remove of {path!r}",
                patience=patience_of(self.session, timeout),
            )
        except NotFoundError:
            if not missing_ok:
                raise

    async def chmod(self, path: Any, mode: int, timeout: Timeout = None) -> EntryInfo:
        """See `Files.chmod`."""
        path, mode = check_path(path), check_mode(mode)
        return await self._entry(
            {**self._owner, "op": "file.chmod", "path": path, "mode": mode}, f"files.chmod of {path!r}", timeout
        )

    async def symlink(self, target: Any, path: Any, timeout: Timeout = None) -> EntryInfo:
        """See `Files.symlink`."""
        target, path = check_path(target, "target"), check_path(path)
        return await self._entry(
            {**self._owner, "op": "file.symlink", "target": target, "path": path}, f"files.symlink of {path!r}", timeout
        )

    async def metadata(
        self, path: Any, changes: dict[str, str] | None = None, timeout: Timeout = None
    ) -> dict[str, str]:
        """See `Files.get_metadata` and `Files.set_metadata`."""
        path = check_path(path)
        entry = await self._entry(
            {
                **self._owner, "op": "file.metadata",
                "path": path,
                "set": check_metadata(changes) if changes is not None else None,
            },
            f"files.metadata of {path!r}",
            timeout,
        )
        return entry.metadata

    # -- reading

    def open_read(
        self,
        path: Any,
        *,
        collect: bool,
        bound: int | None = None,
        offset: int = 0,
        length: int | None = None,
        timeout: Timeout = None,
        no_progress: float | None = None,
    ) -> ReadStream:
        """Begin to read a file."""
        path = check_path(path)
        request: dict[str, Any] = {
            **self._owner, "op": "file.read",
            "path": path,
            "offset": check_count(offset, "offset"),
            "length": None if length is None else check_count(length, "length"),
        }
        stream = ReadStream(self.session, path, transfer_patience(self.session, timeout, no_progress), collect, bound)
        self.session.open(request, stream)
        return stream

    async def read(
        self,
        path: Any,
        limit: int | None = None,
        offset: int = 0,
        length: int | None = None,
        timeout: Timeout = None,
        no_progress: float | None = None,
    ) -> bytes:
        """All of a file. Without `limit`, no more than a sandbox could hold at all is taken into memory."""
        if limit is None:
            limits = self.session.limits
            limit = limits.memory + limits.disk + limits.tmp
        stream = self.open_read(
            path,
            collect=True,
            bound=limit,
            offset=offset,
            length=length,
            timeout=timeout,
            no_progress=no_progress,
        )
        pieces = []
        try:
            while (piece := await stream.next_piece()) is not None:
                pieces.append(piece)
        except BaseException:
            stream.close()
            raise
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # -- writing

    async def write(
        self,
        path: Any,
        data: Any,
        mode: int | None = None,
        metadata: dict[str, str] | None = None,
        append: bool = False,
        timeout: Timeout = None,
        no_progress: float | None = None,
    ) -> WriteInfo:
        """Write `data` (see `pieces_of`; or a sync or async iterator of bytes) and compare size and hash."""
        import hashlib

        path = check_path(path)
        session = self.session
        request: dict[str, Any] = {
            **self._owner, "op": "file.write",
            "path": path,
            "mode": None if mode is None else check_mode(mode),
            "append": append,
            "parents": True,
            "metadata": check_metadata(metadata or {}),
        }
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogateescape")
        if isinstance(data, (bytes, bytearray)) and len(data) <= SMALL:
            request["small"] = True  # the guest then waits for the end, and writes it in one go
        pieces = pieces_of(data)
        patience = transfer_patience(self.session, timeout, no_progress)
        what = f"files.write of {path!r}"
        digest, size = hashlib.sha256(), 0
        exchange = Exchange()
        session.open(request, exchange)
        channel = exchange.channel
        assert channel is not None
        try:
            while True:
                try:
                    piece = (
                        await anext(pieces)
                        if hasattr(pieces, "__anext__")
                        else interruptible(next, pieces, None)
                    )
                except StopAsyncIteration:
                    piece = None
                if piece is None:
                    break
                piece = _bytes_of(piece)
                if not piece:
                    continue
                size += len(piece)
                # The kernel takes the bytes before the hash is done, so that both ends work at the same time.
                pending = channel.send_data(_FILE, piece)
                digest.update(piece)
                if not await session.settle(pending, patience.deadline()):
                    await exchange.finished(session.clock.now() + 1.0)
                    if exchange.done:
                        break
                    raise await session.stop(exchange, what, patience)
                if exchange.done:
                    break
            channel.send_eof(_FILE)
            if not await exchange.finished(patience.deadline()):
                raise await session.stop(exchange, what, patience)
        except TimeoutExceededError:
            raise
        except BaseException:
            session.abandon(exchange)
            raise
        reply = await session.reply(exchange, what)
        if reply.get("size") != size or reply.get("sha256") != digest.hexdigest():
            raise TransferError(
                f"what the guest wrote to {path!r} is not what was sent",
                hint="the file inside must not be used; write it again",
            )
        entry = EntryInfo.from_guest(reply.get("entry"))
        return WriteInfo(entry.name, entry.path, entry.type, entry.metadata, size, digest.hexdigest())

    async def write_files(
        self, files: Any, timeout: Timeout = None, no_progress: float | None = None
    ) -> list[WriteInfo]:
        """See `Files.write_files`."""
        entries = []
        if isinstance(files, (str, bytes, dict)) or not isinstance(files, Iterable):
            raise InvalidArgumentError(
                "files must be a list of {'path': ..., 'data': ...}", hint="for a single file use files.write"
            )
        for entry in files:
            if not isinstance(entry, dict) or "path" not in entry or "data" not in entry:
                raise InvalidArgumentError("each of files must be a dict with 'path' and 'data'")
            check_path(entry["path"])
            unknown = set(entry) - {"path", "data", "mode", "metadata"}
            if unknown:
                raise InvalidArgumentError(f"unknown keys in files: {sorted(map(str, unknown))}")
            entries.append(entry)
        patience = transfer_patience(self.session, timeout, no_progress)
        # One after the other: side by side the guest forks more workers, which costs more than it gains.
        return [
            await self.write(
                entry["path"], entry["data"], entry.get("mode"), entry.get("metadata"), timeout=patience
            )
            for entry in entries
        ]

    # -- watching

    async def watch(self, path: Any, recursive: bool = False, timeout: Timeout = None) -> Watch:
        """See `Files.watch_dir`."""
        path = check_path(path)
        patience = patience_of(self.session, timeout)
        watch = Watch(self.session)
        self.session.open({**self._owner, "op": "file.watch", "path": path, "recursive": bool(recursive)}, watch)
        # A change made right after this call must be seen, so the guest's word that it watches is awaited.
        while not watch.done and not watch.events:
            if not await watch.changed(patience.deadline(), watch.version):
                raise await self.session.stop(watch, f"files.watch_dir of {path!r}", patience)
        if watch.done:
            await self.session.reply(watch, f"files.watch_dir of {path!r}")
        return watch


def check_metadata(value: Any) -> dict[str, str]:
    """Metadata of a file: names of letters, digits, `.`, `_` and `-`, values of text."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"metadata must be a dict, not {type(value).__name__}")
    for name, text in value.items():
        check_text(name, "the name of a metadata entry", empty=False)
        if len(name) > 200 or not all(letter.isalnum() or letter in "._-" for letter in name):
            raise InvalidArgumentError(
                f"the name of a metadata entry must be letters, digits, . _ -: {name!r}"
            )
        check_text(text, f"metadata {name!r}")
    return dict(value)


def pieces_of(data: Any) -> Any:
    """An iterator over what is to be written: of str, bytes, an open file (binary or text), or an iterable.

    Raises InvalidArgumentError for anything else.
    """
    if isinstance(data, str):
        return iter([data.encode("utf-8", "surrogateescape")])
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = data if isinstance(data, bytes) else bytes(data)
        if len(view) <= CHUNK:
            return iter([view])
        whole = memoryview(view)
        return (whole[start : start + CHUNK] for start in range(0, len(whole), CHUNK))
    read = getattr(data, "read", None)
    if callable(read):
        return iter(lambda: read(CHUNK) or None, None)
    if hasattr(data, "__aiter__"):
        return data.__aiter__()
    if isinstance(data, Iterable) and not isinstance(data, dict):
        return iter(data)
    raise InvalidArgumentError(
        f"data must be str, bytes, an open file or an iterable of bytes, not {type(data).__name__}"
    )


def _bytes_of(piece: Any) -> bytes | memoryview:
    if isinstance(piece, str):
        return piece.encode("utf-8", "surrogateescape")
    if isinstance(piece, (bytes, memoryview)):
        return piece
    if isinstance(piece, bytearray):
        return bytes(piece)
    raise InvalidArgumentError(f"data must consist of str or bytes, not {type(piece).__name__}")
