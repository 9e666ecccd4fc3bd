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

    __slots__ = ("began", "ended", "kind", "name", "number", "streams")

    def __init__(self, number: int, kind: str, name: str, stdout: OutputRing, stderr: OutputRing) -> None:
        self.number = number
        self.kind = kind
        self.name = name[:200]
        self.began = time.time()
        self.ended: float | None = None
        self.streams = (stdout, stderr)


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
                self._drop(self._entries.popleft())
        return entry

    def end(self, entry: Entry) -> None:
        """It has ended; its rings get no more."""
        kept = tuple(ring if ring.held <= KEPT_STREAM else ring.tail(KEPT_STREAM) for ring in entry.streams)
        with self._lock:
            if entry.ended is not None or entry not in self._entries:
                return
            entry.streams = kept
            entry.ended = time.time()
            self._held += sum(ring.held for ring in kept)
            while self._held > KEPT:
                oldest = next(each for each in self._entries if each.ended is not None)
                self._entries.remove(oldest)
                self._drop(oldest)

    def _drop(self, entry: Entry) -> None:
        if entry.ended is not None:
            self._held -= sum(ring.held for ring in entry.streams)

    def since(self, seen: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
        """What is news to a reader who has `seen` so many bytes of the two streams of each entry (by number).

        Each: number, kind, name, began, ended (seconds since 1970), and per stream `total` and the `data` after
        what was seen, at most the newest 256 KiB of it.
        """
        with self._lock:
            entries = list(self._entries)
        news: list[dict[str, Any]] = []
        for entry in entries:
            known = seen.get(entry.number)
            ended, streams = entry.ended, entry.streams
            parts: list[dict[str, Any]] = []
            for ring, offset in zip(streams, known or (0, 0), strict=True):
                total, data = ring.newest(_ANSWER_STREAM)
                parts.append({"total": total, "data": data[max(0, len(data) - max(0, total - offset)) :]})
            if known is None or ended is not None or any(part["data"] for part in parts):
                news.append(
                    {"number": entry.number, "kind": entry.kind, "name": entry.name, "began": entry.began,
                     "ended": ended, "stdout": parts[0], "stderr": parts[1]}
                )  # fmt: skip
        return news
