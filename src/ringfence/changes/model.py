"""What users get: `Changes`, each `Change` with the two states it lies between, and `Applied`.

Guards the distance between what a person saw and what is written: a `Change` holds its captured bytes (in a file
without a name, which goes with the process that holds it) and the state of the host it was compared with, and neither
can be changed through it. Names and texts are the sandbox's: they are exact here and made safe where they are shown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, Any, Literal, Self, overload

from ringfence.changes.places import Seen
from ringfence.errors import InvalidArgumentError, NotFoundError
from ringfence.terminal import line

__all__ = ["Applied", "Change", "Changes", "FileState", "name_of", "quoted", "shown"]

_MARKS = {"created": "A", "modified": "M", "deleted": "D", "renamed": "R", "mode": "m"}


@dataclass(frozen=True)
class FileState:
    """One side of a change: what there was, or what there is now.

    `kind` is `file`, `directory`, `link` or `other` (a device, socket or FIFO). `mode` are the permission bits,
    without set-id and sticky. `size` is in bytes and 0 for what is no file. `sha256` is None for what is no file, and
    for a deleted file that nothing made it necessary to read. `target` is where a link points.
    """

    kind: Literal["file", "directory", "link", "other"]
    mode: int
    size: int = 0
    sha256: str | None = None
    target: str = ""


@dataclass(frozen=True)
class Change:
    """One change. Paths are relative to the workspace; bytes that are no UTF-8 are kept (`surrogateescape`).

    `kind` is `created`, `modified` (its content, its target, or what it is), `deleted`, `renamed` (found by content)
    or `mode` (permission bits alone). `diff` holds the hunks of a unified diff; where it is empty, `diff_note` says
    why. `held` says why `apply` writes it only where it is named; `impossible` why it never does; `conflict` what the
    host did to the same name since the sandbox started. All three are empty for an ordinary change.
    """

    kind: Literal["created", "modified", "deleted", "renamed", "mode"]
    path: str
    before: FileState | None = None
    after: FileState | None = None
    old_path: str | None = None
    diff: str = ""
    diff_note: str = ""
    held: str = ""
    impossible: str = ""
    conflict: str = ""
    note: str = ""
    seen: Seen | None = field(default=None, repr=False)
    """What the host had at `path` (of a rename: at `old_path`) when the change was captured."""
    offset: int = field(default=-1, repr=False)
    """Where its bytes begin in the file of captured contents."""

    def __str__(self) -> str:
        return f"{_MARKS[self.kind]} {self.label}"

    @property
    def label(self) -> str:
        """Its path, or both of a rename, safe to print on one line."""
        return shown(self.path) if self.old_path is None else f"{shown(self.old_path)} -> {shown(self.path)}"

    @property
    def ordinary(self) -> bool:
        """True where `apply` writes it without being asked twice."""
        return not (self.held or self.impossible or self.conflict)

    @property
    def binary(self) -> bool:
        """True where a side is a file with NUL bytes, which has no diff."""
        return self.diff_note == "binary"

    @property
    def raw_path(self) -> bytes:
        """`path` as the bytes that the file system has."""
        return os.fsencode(self.path)

    @property
    def patch(self) -> str:
        """The change as `git apply` reads it, as far as it has a diff; names are quoted, the content is exact."""
        return _patch(self)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints of it. Bytes that are no UTF-8 are shown as `\\\\xNN`."""
        document: dict[str, Any] = {"kind": self.kind, "path": name_of(self.path)}
        if self.old_path is not None:
            document["old_path"] = name_of(self.old_path)
        for side, state in (("before", self.before), ("after", self.after)):
            document[side] = None if state is None else {
                "kind": state.kind, "mode": f"{state.mode:04o}", "size": state.size, "sha256": state.sha256,
                "target": name_of(state.target) if state.kind == "link" else None,
            }  # fmt: skip
        document["diff"] = name_of(self.diff)
        for name in ("diff_note", "held", "impossible", "conflict", "note"):
            document[name] = getattr(self, name)
        return document


class Changes(Sequence[Change]):
    """All changes of an overlay workspace at one moment, in order of their paths.

    A sequence of `Change`; `changes["src/main.py"]` finds one by its path. `frozen` is False where what ran in the
    sandbox could not be stopped while it was captured; then a file may be half of one version and half of another.
    Close it, or use it in a `with`, to drop the captured contents early.
    """

    def __init__(
        self, changes: Sequence[Change], contents: IO[bytes], source: str, *, frozen: bool = True, device: int = 0,
        inode: int = 0,
    ) -> None:  # fmt: skip
        self._changes = tuple(changes)
        self._contents = contents
        self._by_path = {change.path: change for change in self._changes}
        self.source = source
        """The host's directory."""
        self.frozen = frozen
        self.captured_at = datetime.now(UTC)
        self.identity = (device, inode)
        """Device and inode of the host's directory, so that they are applied to no other one."""

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes)

    @overload
    def __getitem__(self, key: int | str) -> Change: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Change]: ...
    def __getitem__(self, key: int | str | slice) -> Change | Sequence[Change]:
        if not isinstance(key, str):
            return self._changes[key]
        change = self._by_path.get(key)
        if change is None:
            raise NotFoundError(f"nothing changed at {shown(key)!r}", hint="paths are relative to the workspace")
        return change

    def __contains__(self, key: object) -> bool:
        return self._by_path.get(key.path) == key if isinstance(key, Change) else key in self._by_path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Changes {self.summary()}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self._changes))

    def close(self) -> None:
        """Drop the captured contents; the changes can be looked at still, and no longer be applied. Idempotent."""
        self._contents.close()

    @property
    def closed(self) -> bool:
        """True once the contents are dropped."""
        return self._contents.closed

    def of_kind(self, kind: str) -> tuple[Change, ...]:
        """The changes of one kind."""
        return tuple(change for change in self._changes if change.kind == kind)

    @property
    def ordinary(self) -> tuple[Change, ...]:
        """The changes that need no name: `sandbox.apply(changes, paths=changes.ordinary)` leaves out the rest."""
        return tuple(change for change in self._changes if change.ordinary)

    @property
    def held(self) -> tuple[Change, ...]:
        """The changes that are written only where they are named, or never, or not any more."""
        return tuple(change for change in self._changes if not change.ordinary)

    @property
    def patch(self) -> str:
        """All of it as one patch, for `git apply`; binary files and those beyond the bounds are named in it only."""
        return "".join(change.patch for change in self._changes)

    def summary(self) -> str:
        """One line: how many of each kind."""
        counts = [(len(self.of_kind(kind)), kind) for kind in _MARKS]
        words = [f"{count} {'mode changed' if kind == 'mode' else kind}" for count, kind in counts if count]
        return ", ".join(words) or "nothing changed"

    def read(self, change: Change | str) -> bytes:
        """The captured bytes of a file. Raises InvalidArgumentError for what has none."""
        return b"".join(self.pieces(self[change] if isinstance(change, str) else change))

    def pieces(self, change: Change) -> Iterator[bytes]:
        """The captured bytes of a file, piece by piece."""
        after = change.after
        if after is None or after.kind != "file" or change.offset < 0:
            raise InvalidArgumentError(f"{change} has no content", hint="only files that are there after it have one")
        if self.closed:
            raise InvalidArgumentError("these changes are closed", hint="capture them again with sandbox.changes()")
        position, end = change.offset, change.offset + after.size
        while position < end:
            piece = os.pread(self._contents.fileno(), min(1 << 20, end - position), position)
            if not piece:
                raise InvalidArgumentError("the captured contents are cut short", hint="capture the changes again")
            yield piece
            position += len(piece)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "source": name_of(self.source), "frozen": self.frozen, "captured_at": self.captured_at.isoformat(),
            "summary": {kind: len(self.of_kind(kind)) for kind in _MARKS},
            "changes": [change.as_dict() for change in self._changes],
        }  # fmt: skip


@dataclass(frozen=True)
class Applied:
    """What `apply` did. `bytes_written` counts the contents of files; `kept` names deleted directories that stay,
    because something else had come into them by then."""

    changes: tuple[Change, ...]
    bytes_written: int = 0
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = len(self.changes)
        text = f"{count} change{'s' * (count != 1)} applied, {self.bytes_written} bytes written"
        return text + (f"; not empty, so they stay: {', '.join(map(shown, self.kept))}" if self.kept else "")


def name_of(text: str) -> str:
    """`text` with bytes that are no UTF-8 as `\\\\xNN`, so that any encoder takes it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shown(text: str) -> str:
    """`text` on one line, with nothing in it that acts on a terminal or hides."""
    return line(name_of(text))


def quoted(path: str) -> str:
    """A path as git writes it in a patch: in quotes and with octal escapes where it is not plain ASCII."""
    raw = os.fsencode(path)
    if all(0x20 < byte < 0x7F and byte not in b'"\\' for byte in raw.replace(b" ", b"_")):
        return path
    escapes = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
    return '"' + "".join(
        escapes.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}") for byte in raw
    ) + '"'  # fmt: skip


def _patch(change: Change) -> str:
    before, after = change.before, change.after
    if (before or after) is None or any(state is not None and state.kind in ("directory", "other") for state in (before, after)):
        return ""  # a patch has no directories
    old, new = f"a/{change.old_path or change.path}", f"b/{change.path}"
    lines = [f"diff --git {quoted(old)} {quoted(new)}"]
    if before is None and after is not None:
        lines.append(f"new file mode {_git_mode(after)}")
    elif after is None and before is not None:
        lines.append(f"deleted file mode {_git_mode(before)}")
    elif before is not None and after is not None:
        if _git_mode(before) != _git_mode(after):
            lines += [f"old mode {_git_mode(before)}", f"new mode {_git_mode(after)}"]
        if change.old_path is not None:
            lines += ["similarity index 100%", f"rename from {quoted(change.old_path)}", f"rename to {quoted(change.path)}"]
    if change.diff:
        lines.append(f"--- {quoted(old) if before is not None else '/dev/null'}")
        lines.append(f"+++ {quoted(new) if after is not None else '/dev/null'}")
    elif change.diff_note == "binary":
        lines.append(f"Binary files {quoted(old)} and {quoted(new)} differ")
    return "\n".join(lines) + "\n" + change.diff


def _git_mode(state: FileState) -> str:
    if state.kind == "link":
        return "120000"
    return "100755" if state.mode & 0o100 else "100644"
