"""Transfers between local files and the sandbox: single files of any size, and whole directories.

Guards the local side (see `trees`): what comes out of a sandbox is hostile, so a download decides every name,
kind, mode and bound itself and asks the guest only for names and bytes. Memory stays constant.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from itertools import chain
from typing import Any

from ringfence.errors import (
    FileConflictError,
    FileOperationError,
    GuestError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    PermissionDeniedError,
    RingfenceError,
    SandboxDeadError,
    SandboxError,
    TransferError,
)
from ringfence.stream.checks import check_count, check_path
from ringfence.stream.exchange import Patience
from ringfence.stream.files import CHUNK, SMALL, FileOperations, Timeout, transfer_patience
from ringfence.stream.results import EntryInfo, FileType, SkippedEntry, TransferReport, WriteInfo
from ringfence.stream.trees import LocalEntry, TreeWriter, WriteTarget, name_is_safe, open_regular, walk_tree

__all__ = ["Transfers"]

MAXIMUM_ENTRIES = 100_000
MAXIMUM_DEPTH = 64
_SKIPPABLE = (PermissionDeniedError, FileConflictError, FileOperationError)
"""Refusals that concern one entry; the transfer goes on and reports it."""


class Transfers:
    """`upload`, `download`, `upload_dir`, `download_dir` of one sandbox."""

    def __init__(self, files: FileOperations) -> None:
        self._files = files

    # -- single files

    async def upload(
        self,
        local: Any,
        remote: Any,
        mode: int | None = None,
        timeout: Timeout = None,
        no_progress: float | None = None,
    ) -> WriteInfo:
        """See `Files.upload`."""
        source, path = _local(local), check_path(remote, "remote")
        descriptor = open_regular(source)
        try:
            return await self._files.write(
                path, _pieces(descriptor), mode, timeout=timeout, no_progress=no_progress
            )
        finally:
            os.close(descriptor)

    async def download(
        self,
        remote: Any,
        local: Any,
        overwrite: bool = True,
        timeout: Timeout = None,
        no_progress: float | None = None,
    ) -> int:
        """See `Files.download`."""
        path, destination = check_path(remote, "remote"), _local(local)
        patience = transfer_patience(self._files.session, timeout, no_progress)
        folder, name = os.path.split(os.path.abspath(destination))
        if os.path.isdir(destination):
            raise InvalidArgumentError(
                f"{destination!r} is a directory", hint="give the name of the file too"
            )
        with TreeWriter(folder, overwrite) as writer:
            parent = writer.open_directory(())
            try:
                target = writer.open_file((name,), parent)
                if target is None:
                    raise FileConflictError(f"{destination!r}: {writer.report.skipped[-1].reason}")
                return await self._receive(path, target, None, False, patience)
            finally:
                os.close(parent)

    async def _receive(
        self, path: str, target: WriteTarget, bound: int | None, executable: bool, patience: Patience
    ) -> int:
        """Read `path` into `target`, which is committed only when size and hash were right."""
        try:
            stream = self._files.open_read(path, collect=False, bound=bound, timeout=patience)
            try:
                while (piece := await stream.next_piece()) is not None:
                    target.write(piece)
            except BaseException:
                stream.close()
                raise
        except BaseException:
            target.discard()
            raise
        target.commit(executable)
        return stream.size

    # -- directories

    async def upload_dir(
        self, local: Any, remote: Any, timeout: Timeout = None, no_progress: float | None = None
    ) -> TransferReport:
        """See `Files.upload_dir`."""
        source, root = _local(local), check_path(remote, "remote").rstrip("/") or "/"
        files, report = self._files, TransferReport()
        patience = transfer_patience(self._files.session, timeout, no_progress)
        await files.make_dir(root, timeout=patience)
        entries = walk_tree(source, report)
        try:
            for entry in entries:
                path = posixpath.join(root, *entry.parts)
                if entry.kind == "file":
                    await self._send(path, entry, report, patience)
                    continue
                try:
                    if entry.kind == "dir":
                        await files.make_dir(path, (entry.mode & 0o777) | 0o700, patience)
                        report.directories += 1
                    else:
                        await files.symlink(entry.target, path, patience)
                        report.symlinks += 1
                except _SKIPPABLE as error:
                    _skip(report, entry.parts, error)
        finally:
            entries.close()
        return report

    async def _send(self, path: str, entry: LocalEntry, report: TransferReport, patience: Patience) -> None:
        try:
            written = await self._files.write(
                path, _content(entry.descriptor), entry.mode & 0o777, timeout=patience
            )
        except _SKIPPABLE as error:
            _skip(report, entry.parts, error)
        except OSError as error:
            if isinstance(error, SandboxError):
                raise
            report.skipped.append(SkippedEntry("/".join(entry.parts), f"cannot be read: {error.strerror}"))
        else:
            report.files += 1
            report.bytes += written.size
        finally:
            os.close(entry.descriptor)

    async def download_dir(
        self,
        remote: Any,
        local: Any,
        overwrite: bool = False,
        max_bytes: int | None = None,
        max_entries: int = MAXIMUM_ENTRIES,
        max_depth: int = MAXIMUM_DEPTH,
        timeout: Timeout = None,
        no_progress: float | None = None,
    ) -> TransferReport:
        """See `Files.download_dir`."""
        root, destination = check_path(remote, "remote").rstrip("/") or "/", _local(local)
        patience = transfer_patience(self._files.session, timeout, no_progress)
        limits = self._files.session.limits
        bound = limits.disk + limits.tmp if max_bytes is None else check_count(max_bytes, "max_bytes")
        check_count(max_entries, "max_entries")
        check_count(max_depth, "max_depth", lowest=1, highest=1000)
        with TreeWriter(destination, overwrite) as writer:
            waiting: list[tuple[str, ...]] = [()]
            seen = 0
            while waiting:
                parts = waiting.pop()
                try:
                    entries = await self._files.list(posixpath.join(root, *parts), timeout=patience)
                except (
                    PermissionDeniedError,
                    NotFoundError,
                    FileOperationError,
                    InvalidArgumentError,
                    GuestError,
                ) as error:
                    if not parts or (isinstance(error, GuestError) and error.code == "malformed"):
                        raise
                    _skip(writer.report, parts, error)
                    continue
                seen += len(entries)
                if seen > max_entries:
                    raise _too_much("max_entries", max_entries, writer.report)
                below: list[tuple[str, ...]] = []
                plain: list[tuple[tuple[str, ...], EntryInfo]] = []
                for entry in sorted(entries, key=lambda entry: entry.name):
                    there = (*parts, entry.name)
                    if not name_is_safe(entry.name):
                        writer.skip(there, "its name is not a legal file name")
                    elif entry.type is FileType.DIR:
                        if len(there) > max_depth:
                            raise _too_much("max_depth", max_depth, writer.report)
                        if writer.add_directory(there):
                            below.append(there)
                    elif entry.unreadable:
                        writer.skip(there, f"cannot be read: {entry.unreadable}")
                    elif entry.type is FileType.SYMLINK:
                        writer.add_symlink(there, entry.symlink_target)
                    elif entry.type is FileType.FILE:
                        plain.append((there, entry))
                    else:
                        writer.skip(there, "a special file")
                waiting.extend(reversed(below))
                await self._download_files(root, parts, plain, writer, bound, patience)
        return writer.report

    async def _download_files(
        self,
        root: str,
        folder: tuple[str, ...],
        plain: list[tuple[tuple[str, ...], EntryInfo]],
        writer: TreeWriter,
        bound: int,
        patience: Patience,
    ) -> None:
        report = writer.report
        if not plain:
            return
        parent = writer.open_directory(folder)

        async def receive(parts: tuple[str, ...], entry: EntryInfo) -> None:
            # Counted from what really arrives, never from the size that the guest claims.
            left = bound - report.bytes
            target = writer.open_file(parts, parent)
            if target is None:
                return
            try:
                size = await self._receive(
                    posixpath.join(root, *parts), target, left, bool(entry.mode & stat.S_IXUSR), patience
                )
            except LimitExceededError:
                raise _too_much("max_bytes", bound, report) from None
            except SandboxDeadError:
                raise
            except (
                PermissionDeniedError,
                NotFoundError,
                FileConflictError,
                FileOperationError,
                InvalidArgumentError,
                TransferError,
            ) as error:
                _skip(report, parts, error)
                return
            report.files += 1
            report.bytes += size
            if report.bytes > bound:
                raise _too_much("max_bytes", bound, report)

        try:
            for parts, entry in plain:
                await receive(parts, entry)
        finally:
            os.close(parent)


def _local(path: Any) -> str:
    return check_path(path, "local")


def _content(descriptor: int) -> bytes | Iterator[bytes]:
    """What is in a file: at once when it is small, else piece by piece."""
    first = b""
    while len(first) <= SMALL:
        piece = os.read(descriptor, CHUNK)
        if not piece:
            return first
        first += piece
    return chain((first,), _pieces(descriptor))


def _pieces(descriptor: int) -> Iterator[bytes]:
    while piece := os.read(descriptor, CHUNK):
        yield piece


def _skip(report: TransferReport, parts: tuple[str, ...], error: RingfenceError) -> None:
    report.skipped.append(SkippedEntry("/".join(parts), error.message))


def _too_much(name: str, value: int, report: TransferReport) -> LimitExceededError:
    error = LimitExceededError(
        f"the directory goes beyond {name}={value}; {report.files} files were written",
        hint=f"pass a larger {name}, or download a part of it",
        limit=name,
        value=value,
    )
    return error
