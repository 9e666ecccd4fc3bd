"""The guest protocol: what each end may send, and what the host does with a guest that breaks the rules."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from ringfence.guest import protocol
from ringfence.guest.protocol import (
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    EVENT,
    FILE,
    HEADER,
    HELLO,
    INITIAL_WINDOW,
    MAX_CHANNELS,
    MAX_JSON,
    MAX_PAYLOAD,
    OPEN,
    PING,
    PONG,
    STDERR,
    STDIN,
    STDOUT,
    Event,
    Mux,
    ProtocolViolation,
)


def frame(kind: int, channel: int, stream: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), channel, kind, stream, 0) + payload


def hello(**changes: object) -> bytes:
    return frame(HELLO, 0, 0, json.dumps({"version": 1, "minimum": 1, "role": "guest", **changes}).encode())


def drain(mux: Mux) -> bytes:
    written = b""
    while buffers := mux.pending():
        data = b"".join(buffers)
        mux.consumed(len(data))
        written += data
    return written


def deliver(sender: Mux, receiver: Mux) -> list[Event]:
    return receiver.receive(drain(sender))


@pytest.fixture
def pair() -> tuple[Mux, Mux]:
    host, guest = Mux("host"), Mux("guest")
    deliver(host, guest)
    deliver(guest, host)
    return host, guest


@pytest.fixture
def host() -> Mux:
    """A host that has heard HELLO and opened channels 1 to 3."""
    mux = Mux("host")
    for _ in range(3):
        mux.open({"op": "exec"})
    drain(mux)
    mux.receive(hello())
    return mux


def test_hello_makes_both_ends_ready() -> None:
    host, guest = Mux("host", ("fast",)), Mux("guest")
    assert not host.ready
    (heard,) = deliver(host, guest)
    assert heard.kind == HELLO and heard.payload["features"] == ["fast"]
    deliver(guest, host)
    assert host.ready and guest.ready and host.version == 1


def test_a_conversation_arrives_whole_when_cut_into_single_bytes(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "exec", "argv": ["ls"], "name": "\udcff"})
    host.send_data(channel, STDIN, b"in")
    host.send_eof(channel, STDIN)
    data = drain(host)
    heard = [event for i in range(len(data)) for event in guest.receive(data[i : i + 1])]
    assert heard == [
        Event(OPEN, channel, 0, {"op": "exec", "argv": ["ls"], "name": "\udcff"}),
        Event(DATA, channel, STDIN, b"i"),
        Event(DATA, channel, STDIN, b"n"),
        Event(EOF, channel, STDIN, b""),
    ]
    guest.send_event(channel, {"started": {"pid": 7}})
    guest.send_data(channel, STDOUT, b"out")
    guest.send_close(channel, {"ok": True})
    assert deliver(guest, host) == [
        Event(EVENT, channel, 0, {"started": {"pid": 7}}),
        Event(DATA, channel, STDOUT, b"out"),
        Event(CLOSE, channel, 0, {"ok": True}),
    ]
    assert host.open_channels == guest.open_channels == 0


def test_large_data_is_queued_without_a_copy(pair: tuple[Mux, Mux]) -> None:
    host, _ = pair
    channel = host.open({"op": "file.write"})
    drain(host)
    data = bytearray(MAX_PAYLOAD)
    host.send_data(channel, FILE, data)
    assert any(isinstance(buffer, memoryview) and buffer.obj is data for buffer in host.pending())


def test_data_of_a_memoryview_arrives_as_views_of_it(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "file.write"})
    deliver(host, guest)
    host.send_data(channel, FILE, b"abc")
    buffer = bytearray(drain(host))
    (heard,) = guest.receive(memoryview(buffer))
    assert heard.payload.obj is buffer and heard.payload == b"abc"


def test_consumed_counts_across_buffers(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "x"})
    host.send_data(channel, FILE, b"a" * 100_000)
    host.send_data(channel, FILE, b"b" * 10)
    written = b""
    while buffers := host.pending():
        step = b"".join(buffers)[:33_333]
        written += step
        host.consumed(len(step))
    assert host.queued == 0
    heard = guest.receive(written)
    assert b"".join(event.payload for event in heard if event.kind == DATA) == b"a" * 100_000 + b"b" * 10


def test_sending_beyond_the_credit_is_refused_here_and_a_violation_there(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "x"})
    deliver(host, guest)
    assert guest.data_room(channel) == INITIAL_WINDOW
    guest.send_data(channel, STDOUT, b"x" * INITIAL_WINDOW)
    with pytest.raises(ValueError, match="credit"):
        guest.send_data(channel, STDOUT, b"x")
    deliver(guest, host)
    with pytest.raises(ProtocolViolation, match="credit"):
        host.receive(frame(DATA, channel, STDOUT, b"x"))


def test_granted_credit_can_be_spent_again(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "x"})
    deliver(host, guest)
    for _ in range(10):
        guest.send_data(channel, STDOUT, b"x" * guest.data_room(channel))
        received = sum(len(event.payload) for event in deliver(guest, host))
        host.grant(channel, received)
        assert [event.kind for event in deliver(host, guest)] == [CREDIT]
    assert guest.data_room(channel) == INITIAL_WINDOW


def test_small_grants_are_gathered_but_never_lost(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "x"})
    deliver(host, guest)
    for _ in range(protocol.GRANT_STEP - 1):
        host.grant(channel, 1)
    assert host.queued == 0
    host.grant(channel, 1)
    (heard,) = deliver(host, guest)
    assert heard == Event(CREDIT, channel, 0, protocol.GRANT_STEP)


def test_events_give_their_credit_back_by_themselves(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "file.watch"})
    deliver(host, guest)
    for number in range(200):
        guest.send_event(channel, {"path": "x" * 50_000, "number": number})
        deliver(guest, host)
        deliver(host, guest)


def test_cancelling_drops_what_is_late_until_the_guest_confirms(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "exec"})
    deliver(host, guest)
    guest.send_data(channel, STDOUT, b"late")
    guest.send_event(channel, {"late": True})
    host.send_close(channel, {"reason": "cancelled"})
    assert deliver(guest, host) == []
    assert host.dropped_bytes == 4
    assert deliver(host, guest) == [Event(CLOSE, channel, 0, {"reason": "cancelled"})]
    guest.send_data(channel, STDOUT, b"still running" * 100_000)  # nobody reads it: dropped at the source
    assert guest.queued == 0 and host.is_cancelled(channel)
    guest.send_close(channel, {"ok": True})
    assert deliver(guest, host) == [Event(CLOSE, channel, 0, {"ok": True})]
    assert not host.is_open(channel)


def test_late_data_of_a_cancelled_channel_is_still_bounded_by_its_credit(host: Mux) -> None:
    host.send_close(1, {"reason": "cancelled"})
    host.receive(frame(DATA, 1, STDOUT, b"x" * INITIAL_WINDOW))
    with pytest.raises(ProtocolViolation, match="credit"):
        host.receive(frame(DATA, 1, STDOUT, b"x"))


def test_what_crosses_the_guests_close_is_dropped_by_the_guest(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "exec"})
    deliver(host, guest)
    guest.send_close(channel, {"ok": True})
    host.send_data(channel, STDIN, b"x")
    host.send_event(channel, {"signal": 9})
    host.send_eof(channel, STDIN)
    host.send_close(channel, {"reason": "cancelled"})
    assert deliver(host, guest) == []
    assert [event.kind for event in deliver(guest, host)] == [CLOSE]
    host.send_data(channel, STDIN, b"x")
    assert host.queued == 0


def test_channels_that_never_were_cannot_be_sent_to(host: Mux) -> None:
    for call in (
        lambda: host.send_data(9, STDIN, b"x"),
        lambda: host.send_event(9, {}),
        lambda: host.send_eof(9, STDIN),
        lambda: host.send_close(9, {}),
    ):
        with pytest.raises(ValueError, match="never opened"):
            call()


def test_only_4096_channels_are_open_at_a_time_and_numbers_are_never_reused(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    numbers = [host.open({"op": "x"}) for _ in range(MAX_CHANNELS)]
    with pytest.raises(RuntimeError, match="4096"):
        host.open({"op": "x"})
    deliver(host, guest)
    for number in numbers:
        guest.send_close(number, {"ok": True})
    deliver(guest, host)
    assert host.open({"op": "x"}) == MAX_CHANNELS + 1


def test_thousands_of_channels_leave_nothing_behind(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair

    def cycle(count: int) -> None:
        for _ in range(count):
            channel = host.open({"op": "x"})
            deliver(host, guest)
            guest.send_close(channel, {"ok": True})
            deliver(guest, host)

    cycle(100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cycle(2000)
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
    cycle(3_000)
    host._last_channel = protocol.MAX_CHANNEL
    with pytest.raises(RuntimeError, match="used up"):
        host.open({"op": "x"})


def test_own_messages_beyond_the_bounds_are_refused_before_they_are_sent(host: Mux) -> None:
    with pytest.raises(ValueError, match="at most"):
        host.open({"op": "x" * MAX_PAYLOAD})
    with pytest.raises(ValueError, match="at most"):
        host.send_event(1, {"x": "x" * MAX_JSON})
    with pytest.raises(ValueError, match="JSON"):
        host.send_event(1, {"x": b"bytes"})
    with pytest.raises(ValueError):
        host.send_event(1, {"x": float("nan")})
    with pytest.raises(ValueError, match="64 bytes"):
        host.ping(b"x" * 65)
    host.send_eof(1, STDIN)
    with pytest.raises(ValueError, match="ended"):
        host.send_data(1, STDIN, b"x")
    assert drain(host) == frame(EOF, 1, STDIN)


def test_ping_is_answered_with_its_payload(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    assert host.ping(b"abc")
    assert deliver(host, guest) == []
    assert deliver(guest, host) == [Event(PONG, 0, 0, b"abc")]


def test_only_sixteen_pings_may_be_unanswered(host: Mux) -> None:
    assert [host.ping() for _ in range(17)] == [True] * 16 + [False]


_VIOLATIONS = {
    "unknown kind": frame(9, 1, 0),
    "reserved bits": HEADER.pack(0, 1, EOF, STDOUT, 1),
    "OPEN from a guest": frame(OPEN, 9, 0, b'{"op":"x"}'),
    "second HELLO": hello(),
    "HELLO on a channel": frame(HELLO, 1, 0, b"{}"),
    "channel 0": frame(DATA, 0, STDOUT, b"x"),
    "channel never opened": frame(DATA, 4, STDOUT, b"x"),
    "highest channel": frame(CLOSE, 2**32 - 1, 0, b"{}"),
    "stream of the other direction": frame(DATA, 1, STDIN, b"x"),
    "unknown stream": frame(DATA, 1, 6, b"x"),
    "EVENT on a stream": frame(EVENT, 1, 1, b"{}"),
    "empty DATA": frame(DATA, 1, STDOUT),
    "empty EVENT": frame(EVENT, 1, 0),
    "EVENT that is a list": frame(EVENT, 1, 0, b"[]"),
    "EVENT that is no JSON": frame(EVENT, 1, 0, b"{"),
    "EVENT with NaN": frame(EVENT, 1, 0, b'{"x":NaN}'),
    "EVENT with infinity": frame(EVENT, 1, 0, b'{"x":1e999}'),
    "EVENT with a huge number": frame(EVENT, 1, 0, b'{"x":' + b"9" * 60_000 + b"}"),
    "EVENT nested too deep": frame(EVENT, 1, 0, b'{"x":' + b"[" * 60_000),
    "EVENT in UTF-16": frame(EVENT, 1, 0, '{"x":1}'.encode("utf-16")),
    "EVENT with bad UTF-8": frame(EVENT, 1, 0, b'{"x":"\xff"}'),
    "oversize EVENT": HEADER.pack(MAX_JSON + 1, 1, EVENT, 0, 0),
    "oversize CLOSE": HEADER.pack(MAX_JSON + 1, 1, CLOSE, 0, 0),
    "oversize DATA": HEADER.pack(MAX_PAYLOAD + 1, 1, DATA, STDOUT, 0),
    "4 GiB of DATA": HEADER.pack(2**32 - 1, 1, DATA, STDOUT, 0),
    "oversize PING": HEADER.pack(65, 0, PING, 0, 0),
    "PING on a channel": frame(PING, 1, 0),
    "PONG without PING": frame(PONG, 0, 0, b"x"),
    "short CREDIT": frame(CREDIT, 1, 0, b"\0\0\1"),
    "CREDIT of nothing": frame(CREDIT, 1, 0, b"\0\0\0\0"),
    "CREDIT overrun": frame(CREDIT, 1, 0, b"\x80\0\0\0"),
    "EOF with payload": frame(EOF, 1, STDOUT, b"x"),
    "second EOF": frame(EOF, 1, STDOUT) * 2,
    "DATA after EOF": frame(EOF, 1, STDOUT) + frame(DATA, 1, STDOUT, b"x"),
    "DATA after CLOSE": frame(CLOSE, 1, 0, b"{}") + frame(DATA, 1, STDOUT, b"x"),
    "second CLOSE": frame(CLOSE, 1, 0, b"{}") * 2,
    "CLOSE that is no JSON": frame(CLOSE, 1, 0, b"ok"),
}


@pytest.mark.parametrize("name", _VIOLATIONS)
def test_host_refuses(host: Mux, name: str) -> None:
    with pytest.raises(ProtocolViolation):
        host.receive(_VIOLATIONS[name])
    with pytest.raises(ProtocolViolation):
        host.receive(b"")


@pytest.mark.parametrize(
    "first",
    [
        frame(DATA, 1, STDOUT, b"x"),
        frame(PING, 0, 0),
        hello(role="host"),
        hello(version=0),
        hello(version="1"),
        hello(version=True),
        hello(minimum=2, version=2),
        hello(minimum=None),
        hello(features=[1]),
        frame(HELLO, 0, 0, b"[1]"),
        HEADER.pack(MAX_JSON + 1, 0, HELLO, 0, 0),
    ],
)
def test_host_refuses_as_first_frame(first: bytes) -> None:
    mux = Mux("host")
    mux.open({"op": "x"})
    with pytest.raises(ProtocolViolation):
        mux.receive(first)
    assert not mux.ready


def test_a_newer_guest_that_still_speaks_version_1_is_accepted() -> None:
    mux = Mux("host")
    mux.receive(hello(version=7, minimum=1))
    assert mux.version == 1


def test_guest_refuses_open_with_an_old_number(pair: tuple[Mux, Mux]) -> None:
    _, guest = pair
    guest.receive(frame(OPEN, 5, 0, b"{}"))
    with pytest.raises(ProtocolViolation):
        guest.receive(frame(OPEN, 5, 0, b"{}"))


@pytest.mark.parametrize(
    "flood",
    [
        frame(PING, 0, 0, b"x" * 64),
        frame(CREDIT, 1, 0, b"\0\0\0\1"),
        frame(EOF, 1, STDOUT),
    ],
    ids=["PING", "CREDIT", "EOF"],
)
def test_a_flood_of_frames_without_cost_ends_the_connection(host: Mux, flood: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        for _ in range(100):
            host.receive(flood * 1000)
            drain(host)  # the guest even reads its answers


def test_a_flood_of_credit_for_a_cancelled_channel_ends_the_connection(host: Mux) -> None:
    host.send_close(1, {"reason": "cancelled"})
    with pytest.raises(ProtocolViolation, match="flood"):
        for _ in range(100):
            host.receive(frame(CREDIT, 1, 0, b"\0\0\0\1") * 1000)


def test_a_guest_may_grant_each_piece_it_reads_of_what_the_host_sends(host: Mux) -> None:
    for _ in range(300):
        host.send_data(1, STDIN, b"x" * MAX_PAYLOAD)
        drain(host)
        host.receive(frame(CREDIT, 1, 0, (4096).to_bytes(4, "big")) * 256)


def test_pings_whose_answers_are_not_read_do_not_pile_up(host: Mux) -> None:
    with pytest.raises(ProtocolViolation, match="PING"):
        host.receive(frame(PING, 0, 0, b"x" * 64) * 100)
    assert host.queued < 20 * (12 + 64)


def test_half_a_frame_holds_no_more_than_a_control_message(host: Mux) -> None:
    host.receive(HEADER.pack(MAX_PAYLOAD, 1, DATA, STDOUT, 0))
    tracemalloc.start()
    try:
        for _ in range(200):
            host.receive(b"x" * 1000)
        assert len(host._partial) == 0
        host.receive(b"x" * (MAX_PAYLOAD - 200_000))
        host.receive(HEADER.pack(MAX_JSON, 2, EVENT, 0, 0))
        for _ in range(MAX_JSON - 1):
            host.receive(b" ")
        assert len(host._partial) == MAX_JSON - 1
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_begin_data_lets_the_caller_write_the_payload(pair: tuple[Mux, Mux]) -> None:
    host, guest = pair
    channel = host.open({"op": "file.read"})
    deliver(host, guest)
    assert guest.begin_data(channel, FILE, 1000)
    assert guest.data_room(channel) == INITIAL_WINDOW - 1000
    heard = host.receive(drain(guest) + b"f" * 1000)
    assert b"".join(event.payload for event in heard) == b"f" * 1000
    with pytest.raises(ValueError):
        guest.begin_data(channel, FILE, 0)
    host.send_close(channel, {"reason": "cancelled"})
    deliver(host, guest)
    assert not guest.begin_data(channel, STDERR, 10)
