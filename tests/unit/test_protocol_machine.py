"""Two ends wired together, driven at random, against a plain model: nothing is lost, reordered or leaked.

The wires hold bytes; hypothesis decides what is sent, how it is cut, when it arrives and when channels end.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringfence.guest.protocol import (
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    EVENT,
    HELLO,
    INITIAL_WINDOW,
    OPEN,
    PONG,
    STDIN,
    STDOUT,
    Mux,
)

_SIZES = st.one_of(st.integers(1, 50), st.integers(1, 1 << 20))
_CUTS = st.one_of(st.integers(1, 40), st.integers(1, 1 << 20))


class Talk:
    """What the model knows of one channel."""

    def __init__(self) -> None:
        self.sent = {"host": bytearray(), "guest": bytearray()}
        self.heard = {"host": bytearray(), "guest": bytearray()}
        self.events_sent: dict[str, list[int]] = {"host": [], "guest": []}
        self.events_heard: dict[str, list[int]] = {"host": [], "guest": []}
        self.eof_sent: set[str] = set()
        self.eof_heard: set[str] = set()
        self.opened = False
        self.cancelled_by_host = False
        self.cancel_heard = False
        self.closed_by_guest = False
        self.close_heard = False


class TwoEnds(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ends = {"host": Mux("host"), "guest": Mux("guest")}
        self.wires = {"host": bytearray(), "guest": bytearray()}  # by sender
        self.talks: dict[int, Talk] = {}
        self.pings_sent: list[bytes] = []
        self.pongs_heard: list[bytes] = []
        self.counter = 0

    def _stream(self, end: str) -> int:
        return STDIN if end == "host" else STDOUT

    def _sendable(self, end: str, number: int) -> bool:
        talk = self.talks[number]
        if end == "host":
            return not talk.cancelled_by_host and not talk.close_heard
        return talk.opened and not talk.closed_by_guest and not talk.cancel_heard

    @rule()
    def open(self) -> None:
        number = self.ends["host"].open({"op": "x", "number": len(self.talks)})
        assert number not in self.talks
        self.talks[number] = Talk()

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), end=st.sampled_from(["host", "guest"]), size=_SIZES)
    def send_data(self, data: st.DataObject, end: str, size: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.talks)))
        talk = self.talks[number]
        if not self._sendable(end, number) or end in talk.eof_sent:
            return
        mux = self.ends[end]
        size = min(size, mux.data_room(number))
        self.counter += 1
        payload = self.counter.to_bytes(4, "big") * (size // 4 + 1)
        mux.send_data(number, self._stream(end), payload[:size])
        talk.sent[end] += payload[:size]

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), end=st.sampled_from(["host", "guest"]))
    def send_event(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.talks)))
        if not self._sendable(end, number) or self.ends[end].data_room(number) < 100:
            return
        self.counter += 1
        self.ends[end].send_event(number, {"number": self.counter})
        self.talks[number].events_sent[end].append(self.counter)

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), end=st.sampled_from(["host", "guest"]))
    def send_eof(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.talks)))
        if self._sendable(end, number):
            self.ends[end].send_eof(number, self._stream(end))
            self.talks[number].eof_sent.add(end)

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), end=st.sampled_from(["host", "guest"]))
    def close(self, data: st.DataObject, end: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.talks)))
        talk = self.talks[number]
        if end == "host":
            if not talk.close_heard:
                talk.cancelled_by_host = True
            self.ends["host"].send_close(number, {"reason": "cancelled"})
        elif talk.opened:
            talk.closed_by_guest = True
            self.ends["guest"].send_close(number, {"ok": True})

    @rule(payload=st.binary(max_size=64))
    def ping(self, payload: bytes) -> None:
        if self.ends["host"].ping(payload):
            self.pings_sent.append(payload)

    @rule(end=st.sampled_from(["host", "guest"]), size=_CUTS)
    def write(self, end: str, size: int) -> None:
        mux = self.ends[end]
        data = b"".join(mux.pending())[:size]
        mux.consumed(len(data))
        self.wires[end] += data

    @rule(sender=st.sampled_from(["host", "guest"]), size=_CUTS)
    def read(self, sender: str, size: int) -> None:
        wire = self.wires[sender]
        data = bytes(wire[:size])
        del wire[:size]
        receiver = "guest" if sender == "host" else "host"
        mux = self.ends[receiver]
        for kind, number, stream, payload in mux.receive(memoryview(data)):
            if kind == HELLO:
                continue
            if kind == PONG:
                self.pongs_heard.append(payload)
                continue
            talk = self.talks[number]
            if kind == OPEN:
                assert receiver == "guest" and not talk.opened
                talk.opened = True
                continue
            assert not (receiver == "host" and talk.close_heard), "heard after the end"
            if kind == DATA:
                assert stream == self._stream(sender)
                assert sender not in talk.eof_heard
                talk.heard[sender] += payload
                mux.grant(number, len(payload))
            elif kind == EVENT:
                talk.events_heard[sender].append(payload["number"])
            elif kind == EOF:
                talk.eof_heard.add(sender)
            elif kind == CLOSE:
                if receiver == "host":
                    talk.close_heard = True
                else:
                    assert talk.cancelled_by_host
                    talk.cancel_heard = True
            else:
                assert kind == CREDIT

    @invariant()
    def what_is_heard_is_a_prefix_of_what_was_sent(self) -> None:
        for talk in self.talks.values():
            for end in ("host", "guest"):
                assert talk.sent[end].startswith(talk.heard[end])
                assert talk.events_sent[end][: len(talk.events_heard[end])] == talk.events_heard[end]
        assert self.pings_sent[: len(self.pongs_heard)] == self.pongs_heard

    @invariant()
    def what_is_queued_is_bounded_by_credit(self) -> None:
        for mux in self.ends.values():
            frames = 4000 + 200 * self.counter
            assert mux.queued <= frames + 2 * INITIAL_WINDOW * (len(self.talks) + 1)
            assert len(mux._partial) <= 1 << 17

    def teardown(self) -> None:
        for _ in range(1000):
            for end in ("host", "guest"):
                self.write(end, 1 << 24)
                self.read(end, 1 << 24)
            if not any(self.wires.values()) and not any(mux.queued for mux in self.ends.values()):
                break
        assert self.pongs_heard == self.pings_sent
        for number, talk in self.talks.items():
            assert talk.opened
            if not talk.cancelled_by_host:
                assert talk.heard["guest"] == talk.sent["guest"]
                assert talk.events_heard["guest"] == talk.events_sent["guest"]
                assert talk.eof_sent & {"guest"} == talk.eof_heard & {"guest"}
            if not talk.closed_by_guest:
                assert talk.heard["host"] == talk.sent["host"]
                assert talk.events_heard["host"] == talk.events_sent["host"]
            assert talk.close_heard == talk.closed_by_guest
            assert self.ends["host"].is_open(number) == (not talk.closed_by_guest)
            self.ends["guest"].send_close(number, {"ok": True})
        self.write("guest", 1 << 24)
        self.read("guest", 1 << 24)
        for mux in self.ends.values():
            assert mux.open_channels == 0


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
