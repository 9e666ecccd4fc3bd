"""What is kept of a program's output: the newest bytes of a stream, addressed by absolute offset.

Guards the host's memory against a program that prints without end (or in one-byte pieces), and the reader
against silent loss: totals go on counting, and a read of what is gone is an error that names the oldest byte left.
"""

from __future__ import annotations

import codecs
import threading
from collections import deque

from ringfence.errors import InvalidArgumentError, OutputGoneError

__all__ = ["OutputRing", "TextDecoder", "decode_kept"]

# Small pieces are merged up to this size: a guest that sends one byte per frame must not make the host
# hold one object per byte.
_MERGE = 64 * 1024

TextDecoder = codecs.getincrementaldecoder("utf-8")
"""Incremental UTF-8 decoder; made with `errors="replace"` it never raises and never splits a character."""


class OutputRing:
    """The newest `limit` bytes of one stream; one thread may write while others read.

    `total` counts every byte ever written; `oldest` is the absolute offset of the first byte still kept.
    """

    __slots__ = ("_chunks", "_held", "_lock", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held = 0
        self._chunks: deque[bytearray] = deque()
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Take `data` (copied), dropping the oldest bytes beyond the limit."""
        with self._lock:
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        size = len(data)
        self.total += size
        limit = self.limit
        if size >= limit:
            self._chunks.clear()
            if limit:
                self._chunks.append(bytearray(data[size - limit :]))
            self._held = limit
            return
        chunks = self._chunks
        if chunks and len(chunks[-1]) + size <= _MERGE:
            chunks[-1] += data
        else:
            chunks.append(bytearray(data))
        self._held += size
        excess = self._held - limit
        while excess > 0:
            first = chunks[0]
            if len(first) <= excess:
                chunks.popleft()
                excess -= len(first)
                self._held -= len(first)
            else:
                del first[:excess]
                self._held -= excess
                break

    @property
    def oldest(self) -> int:
        """Absolute offset of the oldest byte kept."""
        return self.total - self._held

    @property
    def truncated(self) -> bool:
        """True when something was dropped."""
        return self.total > self._held

    @property
    def held(self) -> int:
        """How many bytes are kept."""
        return self._held

    def newest(self, size: int) -> tuple[int, bytes]:
        """`total`, and at most the newest `size` bytes, without copying what is older."""
        with self._lock:
            pieces: deque[bytearray] = deque()
            for chunk in reversed(self._chunks):
                if size <= 0:
                    break
                pieces.appendleft(chunk[max(0, len(chunk) - size) :])
                size -= len(pieces[0])
            return self.total, b"".join(pieces)

    def tail(self, size: int) -> OutputRing:
        """A ring of the newest `size` bytes, which counts what was written before them too."""
        ring = OutputRing(size)
        ring.total, kept = self.newest(size)
        if kept:
            ring._chunks.append(bytearray(kept))
            ring._held = len(kept)
        return ring

    def bytes(self) -> bytes:
        """Everything kept."""
        return self._snapshot()[1]

    def _snapshot(self) -> tuple[int, bytes]:
        with self._lock:
            return self.total, b"".join(self._chunks)

    def text(self) -> str:
        """Everything kept, as text; see `decode_kept`."""
        total, kept = self._snapshot()
        return decode_kept(kept, total > len(kept))

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Bytes from absolute `offset`, at most `size` of them; empty when nothing newer was written.

        Raises OutputGoneError when `offset` lies before what is kept, InvalidArgumentError when it lies
        beyond what was written.
        """
        total, kept = self._snapshot()
        if offset < 0 or offset > total:
            raise InvalidArgumentError(
                f"offset {offset} is outside of the {total} bytes written so far",
                hint="offsets are absolute and count from 0",
            )
        oldest = total - len(kept)
        if offset < oldest:
            raise OutputGoneError(
                f"output before byte {oldest} is gone: only the newest {self.limit} bytes are kept",
                hint="read from error.oldest, raise limits.output, or pass on_stdout",
                oldest=oldest,
            )
        start = offset - oldest
        return kept[start:] if size is None else kept[start : start + size]


def decode_kept(kept: bytes, cut: bool) -> str:
    """Text of `kept`, undecodable bytes replaced. Where the front was `cut`, a half character there is left out."""
    if cut:
        start = 0
        # At most three continuation bytes can be the rest of a character whose head is gone.
        while start < 3 and start < len(kept) and kept[start] & 0xC0 == 0x80:
            start += 1
        kept = kept[start:]
    return kept.decode("utf-8", "replace")
