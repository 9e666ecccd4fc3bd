"""Descriptors over a socket (unix(7), SCM_RIGHTS), by the C half of the socket module.

Guards against the price of a start: `socket` brings `enum` and `selectors`, and turns numbers into enumerations,
which copies pages of a forking process. Received descriptors are close-on-exec. Standard library only.
"""

from __future__ import annotations

import _socket
import struct

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import socket

_SIZE = struct.calcsize("i")


def send_descriptors(channel: socket.socket | _socket.socket, data: bytes, descriptors: list[int]) -> None:
    """Send `data`, and with it copies of `descriptors`; none is as good as some. Raises OSError."""
    if not descriptors:
        channel.send(data)
        return
    packed = struct.pack(f"{len(descriptors)}i", *descriptors)
    channel.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])


def receive_descriptors(channel: socket.socket | _socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """One message of at most `size` bytes, with at most `most` descriptors: more are closed by the kernel."""
    space = _socket.CMSG_LEN(most * _SIZE)
    data, ancillary, _, _ = channel.recvmsg(size, space, _socket.MSG_CMSG_CLOEXEC)
    return data, descriptors_in(ancillary)


def receive_into(channel: socket.socket | _socket.socket, buffer: memoryview, most: int) -> tuple[bytes, list[int]]:
    """The same into a buffer that stays: one of some 100 KiB, made afresh, is mapped and unmapped for each message."""
    space = _socket.CMSG_LEN(most * _SIZE)
    count, ancillary, _, _ = channel.recvmsg_into([buffer], space, _socket.MSG_CMSG_CLOEXEC)
    return bytes(buffer[:count]), descriptors_in(ancillary)


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in what recvmsg(2) returned beside the data."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            found += struct.unpack(f"{len(data) // _SIZE}i", data[: len(data) - len(data) % _SIZE])
    return found
