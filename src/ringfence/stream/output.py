"""What is kept of a program's output: the newest bytes of a stream, addressed by absolute offset.

Guards the host's memory against a program that prints without end (or in one-byte pieces), and the reader
against silent loss: totals go on counting, and a read of what is gone is an error that names the oldest byte left.
"""

from __future__ import annotations

import codecs
from collections import deque

from ringfence.errors import InvalidArgumentError, OutputGoneError

__all__ = ["OutputRing", "TextDecoder", "decode_kept"]

# Small pieces are merged up to this size: a guest that sends one byte per frame must not make the host
# hold one object per byte.
_MERGE = 64 * 1024

TextDecoder = codecs.getincrementaldecoder("utf-8")
"""Incremental UTF-8 decoder; made with `errors="replace"` it never raises and never splits a character."""


class OutputRing:
    """The newest `limit` bytes of one stream. Not locked: one writer; readers see a consistent snapshot of it.

    `total` counts every byte ever written; `oldest` is the absolute offset of the first byte still kept.
    """

    __slots__ = ("_chunks", "_held", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held = 0
        self._chunks: deque[bytearray] = deque()

    def write(self, data: bytes | memoryview) -> None:
        """Take `data` (copied), dropping the oldest bytes beyond the limit."""
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

    def bytes(self) -> bytes:
        """Everything kept."""
        return b"".join(self._chunks)

    def text(self) -> str:
        """Everything kept, as text; see `decode_kept`."""
        return decode_kept(self.bytes(), self.truncated)

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Bytes from absolute `offset`, at most `size` of them; empty when nothing newer was written.

        Raises OutputGoneError when `offset` lies before what is kept, InvalidArgumentError when it lies
        beyond what was written.
        """
        if offset < 0 or offset > self.total:
            raise InvalidArgumentError(
                f"offset {offset} is outside of the {self.total} bytes written so far",
                hint="offsets are absolute and count from 0",
            )
        oldest = self.oldest
        if offset < oldest:
            raise OutputGoneError(
                f"output before byte {oldest} is gone: only the newest {self.limit} bytes are kept",
                hint="read from error.oldest, raise limits.output, or pass on_stdout",
                oldest=oldest,
            )
        kept = self.bytes()[offset - oldest :]
        return kept if size is None else kept[:size]


def decode_kept(kept: bytes, cut: bool) -> str:
    """Text of `kept`, undecodable bytes replaced. Where the front was `cut`, a half character there is left out."""
    if cut:
        start = 0
        # At most three continuation bytes can be the rest of a character whose head is gone.
        while start < 3 and start < len(kept) and kept[start] & 0xC0 == 0x80:
            start += 1
        kept = kept[start:]
    return kept.decode("utf-8", "replace")
