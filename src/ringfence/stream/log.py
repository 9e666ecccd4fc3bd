"""The newest output of a sandbox's executions and commands, kept for `ringfence logs`.

Guards the owner's memory and its hot path: what runs is only pointed at, what has ended keeps its last bytes, and
all of it together stays within a fixed size, whatever a program prints. Nothing is copied while output comes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import Any

from ringfence.stream.output import OutputRing

__all__ = ["Entry", "Log"]

KEPT_STREAM = 64 << 10
"""Bytes that are kept of each stream of an execution that has ended."""
KEPT = 1 << 20
"""Bytes that are kept of all executions that have ended, together."""
_ENTRIES = 64
_ANSWER_STREAM = 256 << 10  # bytes of one stream in one answer


class Entry:
    """One execution: `kind` is `code` or `command`, `name` its beginning; `ended` is None while it runs."""

    __slots__ = ("began", "ended", "kind", "name", "number", "stderr", "stdout")

    def __init__(self, number: int, kind: str, name: str, stdout: OutputRing, stderr: OutputRing) -> None:
        self.number = number
        self.kind = kind
        self.name = name[:200]
        self.began = time.time()
        self.ended: float | None = None
        self.stdout = stdout
        self.stderr = stderr

    @property
    def held(self) -> int:
        """Bytes that it keeps."""
        return self.stdout.held + self.stderr.held


class Log:
    """The executions of one sandbox, oldest first. Usable from any thread."""

    __slots__ = ("_entries", "_held", "_lock", "_numbers")

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._numbers = itertools.count(1)
        self._held = 0
        self._lock = threading.Lock()

    def begin(self, kind: str, name: str, stdout: OutputRing, stderr: OutputRing) -> Entry:
        """An execution begins, whose output goes to these rings."""
        entry = Entry(next(self._numbers), kind, name, stdout, stderr)
        with self._lock:
            self._entries.append(entry)
            if len(self._entries) > _ENTRIES:
                self._forget(self._entries[0])
        return entry

    def end(self, entry: Entry) -> None:
        """It has ended; its rings get no more."""
        with self._lock:
            if entry.ended is not None or entry not in self._entries:
                return
            if entry.stdout.held > KEPT_STREAM:
                entry.stdout = entry.stdout.tail(KEPT_STREAM)
            if entry.stderr.held > KEPT_STREAM:
                entry.stderr = entry.stderr.tail(KEPT_STREAM)
            entry.ended = time.time()
            self._held += entry.held
            while self._held > KEPT:
                self._forget(next(each for each in self._entries if each.ended is not None))

    def _forget(self, entry: Entry) -> None:
        self._entries.remove(entry)
        if entry.ended is not None:
            self._held -= entry.held

    def since(self, seen: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
        """What is news to a reader who has `seen` so many bytes of stdout and stderr of each entry (by number).

        Each: number, kind, name, began, ended (seconds since 1970), and of each stream `total` and the `data` after
        what was seen, at most the newest 256 KiB of it.
        """
        with self._lock:
            entries = list(self._entries)
        news: list[dict[str, Any]] = []
        for entry in entries:
            known, ended = seen.get(entry.number), entry.ended
            out, err = (_part(ring, offset) for ring, offset in zip((entry.stdout, entry.stderr), known or (0, 0), strict=True))
            if known is None or ended is not None or out["data"] or err["data"]:
                news.append(
                    {"number": entry.number, "kind": entry.kind, "name": entry.name, "began": entry.began,
                     "ended": ended, "stdout": out, "stderr": err}
                )  # fmt: skip
        return news


def _part(ring: OutputRing, offset: int) -> dict[str, Any]:
    total, data = ring.newest(_ANSWER_STREAM)
    return {"total": total, "data": data[max(0, len(data) - max(0, total - offset)) :]}
