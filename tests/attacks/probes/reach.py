"""Tries to deliver a token to each address given: tcp:HOST:PORT, udp:HOST:PORT, unix:PATH, abstract:NAME, fifo:PATH."""
# ruff: noqa: B023 (the lambdas are called at once)

import os
import socket
import sys
import time

from report import attempt, say

token = sys.argv[1].encode()


def deliver(address):
    kind, _, rest = address.partition(":")
    if kind == "fifo":
        descriptor = os.open(rest, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, token)
        finally:
            os.close(descriptor)
        return
    if kind in ("tcp", "udp"):
        host, _, port = rest.rpartition(":")
        place = (host, int(port))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
    else:
        place, family = ("\0" + rest if kind == "abstract" else rest), socket.AF_UNIX
    with socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as door:
        door.settimeout(3)
        door.connect(place)
        door.sendall(token)
        if kind == "udp":
            time.sleep(0.05)
            door.sendall(token)  # a refusal of the first one shows now


for address in sys.argv[2:]:
    started = time.monotonic()
    attempt(address, lambda: deliver(address))
    say("quick " + address, time.monotonic() - started < 3)
say("interfaces", [name for _, name in socket.if_nameindex()])
