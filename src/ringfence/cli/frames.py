"""What the two ends of an interactive shell say to each other: one kind, one length, the bytes.

Guards both ends against the other one: a frame is bounded, and a length or kind that makes no sense ends the
connection. Both are ours, but one of them carries what a sandbox wrote.
"""

from __future__ import annotations

import struct

INPUT, SIZE = b"i", b"s"
"""From the terminal: bytes that were typed; rows and columns. It leaves by closing the connection."""
READY, OUTPUT, EXIT, FAILURE, TAKEN = b"r", b"o", b"x", b"e", b"t"
"""From the holder: a JSON object about the shell; bytes for the terminal; the exit code; a JSON object with `message`
and `hint`; another terminal has taken over."""

LARGEST = 1 << 20  # bytes of one frame
_HEAD = struct.Struct("!cI")
_SIZE = struct.Struct("!HH")


def pack(kind: bytes, data: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(data)) + data


def pack_size(rows: int, columns: int) -> bytes:
    """The frame that says how large the terminal is."""
    return pack(SIZE, _SIZE.pack(min(max(rows, 1), 65535), min(max(columns, 1), 65535)))


def unpack_size(data: bytes) -> tuple[int, int]:
    """(rows, columns). Raises ValueError."""
    if len(data) != _SIZE.size:
        raise ValueError("a size has four bytes")
    rows, columns = _SIZE.unpack(data)
    return max(rows, 1), max(columns, 1)


class Frames:
    """Takes bytes as they come and gives whole frames."""

    def __init__(self) -> None:
        self._heard = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The frames that are whole now. Raises ValueError for one that is too large."""
        self._heard += data
        found: list[tuple[bytes, bytes]] = []
        while len(self._heard) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._heard)
            if length > LARGEST:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEAD.size + length
            if len(self._heard) < end:
                break
            found.append((kind, bytes(self._heard[_HEAD.size : end])))
            del self._heard[:end]
        return found
