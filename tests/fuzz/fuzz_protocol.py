"""Fuzz target: the host's parser, fed by a hostile guest.

    python tests/fuzz/fuzz_protocol.py [atheris options]      (needs `pip install atheris`)

The laws: only ProtocolViolation is ever raised, whatever the bytes; what the Mux holds stays bounded; and how
the bytes are cut does not change what they mean. `tests/unit/test_protocol_fuzz.py` runs the same function in
CI.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ringfence.guest import protocol
from ringfence.guest.protocol import HEADER, Mux, ProtocolViolation

_HELLO = b'{"version":1,"minimum":1,"role":"guest","features":[]}'
_HELLO_FRAME = HEADER.pack(len(_HELLO), 0, protocol.HELLO, 0, 0) + _HELLO
_MAX_HELD = protocol.HEADER.size + protocol.MAX_JSON


def _host(greeted: bool) -> Mux:
    mux = Mux("host")
    for number in range(4):
        mux.open({"op": "exec", "argv": [str(number)]})
    mux.send_data(1, protocol.STDIN, b"x" * 1000)
    mux.send_close(3, {"reason": "cancelled"})
    mux.ping(b"ping")
    mux.consumed(mux.queued)
    if greeted:
        mux.receive(_HELLO_FRAME)
    return mux


def _feed(mux: Mux, data: bytes, cut: int) -> tuple[list[tuple[int, int, int, object]], str | None]:
    """What arrives when `data` comes in pieces of `cut` bytes, DATA joined; and the violation it ended
    with."""
    heard: list[tuple[int, int, int, object]] = []
    try:
        for start in range(0, len(data), cut):
            for event in mux.receive(memoryview(data)[start : start + cut]):
                kind, channel, stream, payload = event
                if kind == protocol.DATA:
                    payload = bytes(payload)
                    assert payload, "an empty piece of DATA"
                    if heard and heard[-1][:3] == (kind, channel, stream):
                        payload = heard.pop()[3] + payload  # type: ignore[operator]
                heard.append((kind, channel, stream, payload))
            assert len(mux._partial) <= _MAX_HELD
            assert mux.queued <= 17 * (protocol.HEADER.size + protocol.MAX_PING) + 5 * 16
    except ProtocolViolation as violation:
        try:
            mux.receive(b"")
        except ProtocolViolation:
            pass
        else:
            raise AssertionError("a violated Mux went on") from None
        return heard, str(violation)
    return heard, None


def TestOneInput(data: bytes) -> None:
    """The first byte chooses whether HELLO has been heard, and how the second copy of the rest is cut."""
    if not data:
        return
    greeted, cut = bool(data[0] & 1), (data[0] >> 1) + 1
    data = data[1:]
    whole, violation = _feed(_host(greeted), data, max(1, len(data)))
    pieces, violation_of_pieces = _feed(_host(greeted), data, cut)
    assert violation == violation_of_pieces
    if violation is None:
        assert whole == pieces


def main() -> None:
    atheris: Any = importlib.import_module("atheris")

    atheris.instrument_all()
    atheris.Setup(sys.argv, TestOneInput)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
