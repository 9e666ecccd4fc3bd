"""The fuzz target's laws, held on a few hundred inputs: random bytes, and valid frames that are then
damaged."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.guest import protocol
from ringfence.guest.protocol import HEADER

_path = Path(__file__).parents[1] / "fuzz" / "fuzz_protocol.py"
_spec = importlib.util.spec_from_file_location("fuzz_protocol", _path)
assert _spec is not None and _spec.loader is not None
_target = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_target)


def _frame(kind: int, channel: int, stream: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), channel, kind, stream, 0) + payload


_objects = st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=4), max_size=3)
_payloads = {
    protocol.DATA: st.binary(min_size=1, max_size=64),
    protocol.EVENT: _objects.map(lambda value: json.dumps(value).encode()),
    protocol.CLOSE: _objects.map(lambda value: json.dumps(value).encode()),
    protocol.CREDIT: st.integers(0, 2**32 - 1).map(lambda value: value.to_bytes(4, "big")),
    protocol.EOF: st.just(b""),
    protocol.PING: st.binary(max_size=64),
    protocol.PONG: st.just(b"ping") | st.binary(max_size=4),
}


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(sorted(_payloads)))
    channel = 0 if kind >= protocol.PING else draw(st.integers(1, 5))
    stream = draw(st.integers(0, 6)) if kind in (protocol.DATA, protocol.EOF) else 0
    return _frame(kind, channel, stream, draw(_payloads[kind]))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_violation(data: bytes) -> None:
    _target.TestOneInput(data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 127), st.lists(_frames(), max_size=12))
def test_valid_looking_frames_mean_the_same_however_they_are_cut(cut: int, frames: list[bytes]) -> None:
    _target.TestOneInput(bytes([cut << 1 | 1]) + b"".join(frames))


def test_damaged_conversations_raise_only_protocol_violation() -> None:
    numbers = random.Random(1)
    conversation = b"".join(
        [
            _target._HELLO_FRAME,
            _frame(protocol.EVENT, 1, 0, b'{"started":{"pid":2}}'),
            _frame(protocol.DATA, 1, protocol.STDOUT, b"hello\n" * 20),
            _frame(protocol.CREDIT, 1, 0, b"\0\0\1\0"),
            _frame(protocol.EOF, 1, protocol.STDOUT, b""),
            _frame(protocol.PING, 0, 0, b"?"),
            _frame(protocol.CLOSE, 3, 0, b'{"ok":true}'),
            _frame(protocol.CLOSE, 1, 0, b'{"ok":true,"exit_code":0}'),
        ]
    )
    _target.TestOneInput(b"\0" + conversation)
    for _ in range(2000):
        damaged = bytearray(conversation)
        for _ in range(numbers.randint(1, 3)):
            damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
        _target.TestOneInput(bytes([numbers.randrange(128) << 1]) + damaged)
