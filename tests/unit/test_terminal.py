"""S132, S133: untrusted text reaches a terminal as text."""

from __future__ import annotations

import itertools
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence import terminal

COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
NEEDED_TO_WRITE = {0x200C, 0x200D}  # the joiners, without which Persian, Hindi and many emoji fall apart

ATTACKS = {
    "clipboard": b"\x1b]52;c;cm0gLXJmIH4=\x07",
    "title": b"\x1b]0;root@host\x07",
    "link": b"\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "device attributes": b"\x1b[c",
    "cursor position query": b"\x1b[6n",
    "device control": b"\x1bP+q544e\x1b\\",
    "application programming command": b"\x1b_Gi=1\x1b\\",
    "single byte controls": b"\x9b2J\x9d52;c;eA==\x9c",
    "controls of UTF-8": "\u009b2J\u009d0;x\u009c".encode(),
    "alternate screen": b"\x1b[?1049h",
    "cursor up": b"\x1b[5A\x1b[2K",
    "reset": b"\x1bc",
    "character set": b"\x1b(0",
    "conceal": b"\x1b[8m",
    "blink behind a colour": b"\x1b[31;5m",
    "backspace": b"safe\b\b\b\bevil",
    "bell, shift out, delete": b"\x07\x0e\x7f",
    "override of direction": "\u202egnp.exe".encode(),
    "isolate of direction": "\u2066x\u2069".encode(),
    "tags": "".join(chr(0xE0000 + ord(letter)) for letter in "hidden").encode(),
    "line separator": "one\u2028two".encode(),
}


def streamed(pieces: list[bytes]) -> bytes:
    sanitiser = terminal.Sanitiser()
    return b"".join(sanitiser.feed(piece) for piece in pieces) + sanitiser.finish()


def acts(shown: str) -> list[str]:
    """The characters of what is shown that are more than ink."""
    return [
        each for each in shown
        if each not in "\n\r\t" and ord(each) not in NEEDED_TO_WRITE
        and unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp", "Cf")
        and not unicodedata.name(each, "").startswith(("ARABIC", "SYRIAC", "KAITHI"))  # these have ink
    ]  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_a_sequence_that_acts_is_shown_instead(name: str) -> None:
    shown = streamed([ATTACKS[name]])
    assert b"\x1b" not in shown and acts(ATTACKS[name].decode("latin-1")) + acts(ATTACKS[name].decode("utf-8", "replace"))
    assert not acts(shown.decode()), shown
    assert b"\\" in shown  # visible, not gone
    assert not acts(terminal.line(ATTACKS[name].decode("utf-8", "surrogateescape")))


@given(st.binary(max_size=300))
@example(b"\x1b[\x1b[31m\x9b")
def test_no_bytes_make_a_stream_act(data: bytes) -> None:
    shown = streamed([data])
    assert not acts(COLOUR.sub(b"", shown).decode()), shown


@given(st.binary(max_size=200) | st.lists(st.sampled_from([*ATTACKS.values(), b"\x1b[1;31m", "é😀".encode(), b"[", b"\x1b"])).map(b"".join),
       st.lists(st.integers(0, 200), max_size=8))  # fmt: skip
def test_where_a_stream_is_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[low:high] for low, high in itertools.pairwise(edges)]
    assert streamed(pieces) == streamed([data])


@given(st.text(max_size=100))
def test_a_line_stays_one_line_and_a_text_its_lines(value: str) -> None:
    shown = terminal.line(value)
    assert len(shown.splitlines()) <= 1 and not acts(shown) and not set("\t\r\n") & set(shown)
    several = terminal.text(value)
    assert not acts(several) and several.count("\n") == value.count("\n") and "\r" not in several
    shown.encode()


@pytest.mark.parametrize("data", [
    b"plain text\n\tindented\n", "Grüße, 世界, مرحبا, हिन्दी, 👩\u200d👧, می\u200cخواهم\n".encode(), b" 45%|####\r 90%|####\n",
    b"\x1b[31mred\x1b[0m", b"\x1b[1;38;5;208mx\x1b[m", b"\x1b[48;2;10;20;30mx\x1b[39;49mx\x1b[0m",
])  # fmt: skip
def test_text_progress_bars_and_colours_pass_unchanged(data: bytes) -> None:
    assert streamed([data]) == data


def test_colours_end_with_the_stream() -> None:
    assert streamed([b"\x1b[31", b"mred"]) == b"\x1b[31mred\x1b[0m"
    assert streamed([b"\x1b[31mred\x1b[m"]) == b"\x1b[31mred\x1b[m"


def test_what_is_held_back_for_the_next_piece_is_bounded() -> None:
    sanitiser = terminal.Sanitiser()
    shown = b"".join(sanitiser.feed(b"\x1b[" if number == 0 else b"1;" * 50) for number in range(100))
    assert len(shown) > 9_800
