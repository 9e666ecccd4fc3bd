"""Every family, type and protocol of socket(2), and every netlink protocol."""
# ruff: noqa: UP031

import socket

from report import attempt, say

FAMILIES = {"packet": 17, "vsock": 40, "alg": 38, "bluetooth": 31, "key": 15, "xdp": 44, "can": 29, "tipc": 30, "rds": 21,
            "rxrpc": 33, "x25": 9, "ax25": 3, "appletalk": 5, "nfc": 39, "caif": 37, "smc": 43, "qipcrtr": 42, "llc": 26}  # fmt: skip


def door(family, kind, protocol=0):
    return lambda: socket.socket(family, kind, protocol).close()


for name, family in FAMILIES.items():
    for kind in (1, 2, 3, 5):
        attempt("%s %d" % (name, kind), door(family, kind))
for protocol in range(24):
    attempt("netlink %d" % protocol, door(16, 3, protocol))
for name, family, kind, protocol in (
    ("raw icmp", 2, 3, 1), ("ping", 2, 2, 1), ("sctp", 2, 1, 132), ("mptcp", 2, 1, 262), ("udplite", 2, 2, 136),
    ("raw ip", 2, 3, 255), ("l2tp", 2, 2, 115), ("raw ip6", 10, 3, 255), ("dccp", 2, 6, 33),
):  # fmt: skip
    attempt(name, door(family, kind, protocol))
for name, family, kind, protocol in (("tcp", 2, 1, 6), ("udp", 2, 2, 17), ("tcp6", 10, 1, 0), ("unix", 1, 1, 0), ("route", 16, 3, 0)):
    attempt("allowed " + name, door(family, kind, protocol))
plain = socket.socket()
for name, level, option in (("iptables", 0, 64), ("ip6tables", 41, 64), ("ulp", 6, 31), ("bpf filter", 1, 26), ("bpf program", 1, 50)):
    try:
        plain.setsockopt(level, option, b"\0" * 4)
        say("option " + name, "done")
    except OSError as problem:
        say("option " + name, problem.errno)
