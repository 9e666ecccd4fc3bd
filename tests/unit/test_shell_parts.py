"""The parts of the interactive shell: keys, modes, frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli import frames
from ringfence.cli.shell import Keys, Modes


def typed(data: bytes) -> tuple[bytes, list[str]]:
    found = Keys().feed(data)
    return b"".join(piece for kind, piece in found if kind == "type"), [kind for kind, _ in found if kind != "type"]


@pytest.mark.parametrize(("data", "passed", "acts"), [
    (b"ls\r", b"ls\r", []), (b"a~.", b"a~.", []), (b"~~.", b"~.", []), (b"\r~.", b"\r", ["leave"]), (b"~?x", b"x", ["help"]),
    (b"cd ~/x\r", b"cd ~/x\r", []), (b"~x~.", b"~x~.", []), (b"x\n~?~.", b"x\n", ["help", "leave"]),
])  # fmt: skip
def test_escapes_count_at_the_beginning_of_a_line_only(data: bytes, passed: bytes, acts: list[str]) -> None:
    assert typed(data) == (passed, acts)


@given(st.lists(st.sampled_from([b"~", b".", b"?", b"\r", b"x", b"\xff"]), max_size=12))
def test_where_typing_is_cut_makes_no_difference(keys: list[bytes]) -> None:
    once = Keys()
    found = [item for key in keys for item in once.feed(key)]
    assert (b"".join(piece for kind, piece in found if kind == "type"), [kind for kind, _ in found if kind != "type"]) == typed(b"".join(keys))


def test_modes_that_were_left_on_are_switched_off() -> None:
    modes = Modes()
    for piece in (b"\x1b[?1049h\x1b[?25", b"l\x1b[?1000;1006h text ", b"\x1b[?1000l", b"\x1b[?2004h\x1b[?2004l\x1b[?7h"):
        modes.see(piece)
    assert modes.undo() == b"\x1b[?1006l\x1b[?1049l\x1b[?25h\x1b[0m"
    assert Modes().undo() == b"\x1b[0m"


@given(st.lists(st.tuples(st.sampled_from([frames.INPUT, frames.OUTPUT]), st.binary(max_size=50)), max_size=5), st.integers(1, 9))
def test_frames_come_whole_however_they_are_cut(sent: list[tuple[bytes, bytes]], step: int) -> None:
    raw = b"".join(frames.pack(kind, data) for kind, data in sent)
    heard = frames.Frames()
    assert [each for start in range(0, len(raw), step) for each in heard.feed(raw[start : start + step])] == sent


def test_a_frame_too_large_or_a_size_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError):
        frames.Frames().feed(b"o\xff\xff\xff\xff")
    with pytest.raises(ValueError):
        frames.unpack_size(b"123")
    assert frames.unpack_size(frames.pack_size(0, 999_999)[5:]) == (1, 65535)
