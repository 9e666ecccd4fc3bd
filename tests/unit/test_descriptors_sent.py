"""linux/channels.py: descriptors travel beside the bytes."""

from __future__ import annotations

import os
import socket

from ringfence.linux.channels import receive_descriptors, send_descriptors


def test_descriptors_arrive_in_order_and_close_on_exec() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, writing = os.pipe()
    with ours, theirs:
        send_descriptors(ours, b"two", [reading, writing])
        send_descriptors(ours, b"none", [])
        data, found = receive_descriptors(theirs, 100, 4)
        assert data == b"two" and len(found) == 2 and not any(os.get_inheritable(each) for each in found)
        os.write(found[1], b"x")
        assert os.read(found[0], 1) == b"x"
        assert receive_descriptors(theirs, 100, 4) == (b"none", [])
        for each in (*found, reading, writing):
            os.close(each)


def test_more_descriptors_than_expected_are_not_kept() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send_descriptors(ours, b"many", [0] * 20)
        before = len(os.listdir("/proc/self/fd"))
        _, found = receive_descriptors(theirs, 100, 1)
        assert len(os.listdir("/proc/self/fd")) == before + len(found) and len(found) <= 2
        for each in found:
            os.close(each)
