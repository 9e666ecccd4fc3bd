"""The log of a sandbox: bounded whatever is printed, and only news for who has read before."""

from __future__ import annotations

from ringfence.stream.log import KEPT, KEPT_STREAM, Log
from ringfence.stream.output import OutputRing


def test_what_has_ended_stays_within_a_fixed_size() -> None:
    log = Log()
    for number in range(200):
        out, err = OutputRing(1 << 20), OutputRing(1 << 20)
        entry = log.begin("code", "x" * 10_000, out, err)
        out.write(bytes([number % 256]) * (300 << 10))
        err.write(b"e" * 100)
        log.end(entry)
        log.end(entry)
    entries = log.since({})
    assert sum(len(each["stdout"]["data"]) + len(each["stderr"]["data"]) for each in entries) <= KEPT
    assert entries[-1]["number"] == 200 and len(entries[-1]["name"]) == 200
    assert entries[-1]["stdout"]["data"] == bytes([199]) * KEPT_STREAM and entries[-1]["stdout"]["total"] == 300 << 10
    assert len(log._entries) <= 64 and log._held <= KEPT


def test_a_reader_gets_each_byte_once_also_when_it_was_late() -> None:
    log, out = Log(), OutputRing(10)
    entry = log.begin("command", "c", out, OutputRing(10))
    out.write(b"abc")
    seen: dict[int, tuple[int, int]] = {}
    got = b""
    for more in (b"def", b"", b"0123456789ABCDEF"):
        for each in log.since(seen):
            got += each["stdout"]["data"]
            seen[each["number"]] = (each["stdout"]["total"], each["stderr"]["total"])
        out.write(more)
    assert got == b"abcdef"
    assert log.since(seen)[0]["stdout"]["data"] == b"6789ABCDEF"  # what is left of it
    seen[entry.number] = (out.total, 0)
    assert log.since(seen) == []
    log.end(entry)
    assert log.since(seen)[0]["ended"] is not None


def test_the_tail_of_a_ring_counts_what_was_before_it() -> None:
    ring = OutputRing(100)
    ring.write(b"0123456789")
    assert ring.newest(3) == (10, b"789") and ring.newest(50) == (10, b"0123456789") and ring.newest(0) == (10, b"")
    tail = ring.tail(4)
    assert (tail.total, tail.held, tail.bytes(), tail.truncated) == (10, 4, b"6789", True)
