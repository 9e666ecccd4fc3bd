"""What a sandbox says becomes objects only after its size, number and types were judged."""

from __future__ import annotations

import json
import struct

import pytest

from ringfence.errors import GuestError, InvalidArgumentError, OutputGoneError
from ringfence.stream.output import OutputRing, TextDecoder, decode_kept
from ringfence.stream.results import (
    MAXIMUM_EVENTS,
    Chart,
    CommandResult,
    EntryInfo,
    Execution,
    FileType,
    Logs,
    Result,
    ResultParser,
)


def message(kind: int, payload: object) -> bytes:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return struct.pack("!IB", len(body), kind) + body


def test_the_ring_keeps_the_newest_bytes_and_counts_all() -> None:
    ring = OutputRing(10)
    for piece in (b"0123", b"4567", b"89ab", b"c"):
        ring.write(piece)
    assert ring.bytes() == b"3456789abc"
    assert (ring.total, ring.oldest, ring.truncated) == (13, 3, True)
    ring.write(b"x" * 50)
    assert ring.bytes() == b"x" * 10
    assert ring.oldest == 53


def test_the_ring_reads_by_absolute_offset() -> None:
    ring = OutputRing(4)
    ring.write(b"abcdef")
    assert ring.read(2) == b"cdef"
    assert ring.read(3, 2) == b"de"
    assert ring.read(6) == b""
    with pytest.raises(OutputGoneError) as caught:
        ring.read(1)
    assert caught.value.oldest == 2
    with pytest.raises(InvalidArgumentError):
        ring.read(7)


def test_one_byte_pieces_do_not_cost_an_object_each() -> None:
    ring = OutputRing(1 << 20)
    for _ in range(100_000):
        ring.write(b"x")
    assert len(ring._chunks) < 10


@pytest.mark.parametrize("limit", [0, 1, 7, 64 * 1024, 200_000])
def test_the_ring_equals_the_tail_of_everything_for_any_limit(limit: int) -> None:
    ring, whole = OutputRing(limit), b""
    for size in (1, 2, 3, 70_000, 5, 64 * 1024, 1, 199_999, 8):
        piece = bytes(index % 251 for index in range(size))
        ring.write(memoryview(piece))
        whole += piece
        assert ring.bytes() == (whole[-limit:] if limit else b"")
        assert ring.total == len(whole)


def test_text_of_cut_output_begins_with_a_whole_character() -> None:
    assert decode_kept("aä€😀".encode()[-5:], cut=True) == "😀"
    assert decode_kept(b"\xff\xfeok", cut=False) == "��ok"


def test_decoding_across_pieces_splits_no_character() -> None:
    decoder = TextDecoder("replace")
    pieces = [bytes([byte]) for byte in "ä€😀".encode() + b"\xf0\x9f"]
    text = "".join(decoder.decode(piece) for piece in pieces) + decoder.decode(b"", True)
    assert text == "ä€😀�"


def test_messages_cut_anywhere_are_put_together() -> None:
    stream = (
        message(1, {"data": {"text/plain": "1"}, "main": True}) + message(2, {"name": "E"}) + message(1, {})
    )
    parser = ResultParser(1000)
    found = [item for byte in stream for item in parser.feed(bytes([byte]))]
    assert [kind for kind, _ in found] == [1, 2, 1]
    assert parser.decode(found[1][1]) == {"name": "E"}
    assert parser.dropped == 0


def test_a_result_beyond_the_limit_is_dropped_and_noted_alone() -> None:
    parser = ResultParser(100)
    stream = message(1, b"x" * 90 + b"x" * 50) + message(1, b'{"a":1}')
    found = [item for start in range(0, len(stream), 7) for item in parser.feed(stream[start : start + 7])]
    assert [bytes(body) for _, body in found] == [b'{"a":1}']
    assert parser.dropped == 1
    assert "limits.result" in parser.notes[0]


def test_a_flood_of_empty_messages_ends_at_the_bound() -> None:
    parser = ResultParser(1 << 20)
    flood = message(1, b"") * 20_000
    assert len(parser.feed(flood)) == MAXIMUM_EVENTS
    assert parser.feed(flood) == []
    assert parser.dropped == 1


@pytest.mark.parametrize(
    "body",
    [b"[]", b"{", b"\xff", b"[" * 100_000, b"null", b'{"a":' * 5000, b'{"a":[' + b"[]," * 1_000_001 + b"0]}"],
)
def test_malformed_or_costly_messages_are_dropped(body: bytes) -> None:
    parser = ResultParser(1 << 30)
    assert parser.decode(body) is None
    assert parser.dropped == 1


def test_an_unfinished_message_is_noted() -> None:
    parser = ResultParser(1000)
    parser.feed(message(1, {"a": 1})[:-1])
    parser.finish()
    assert parser.dropped == 1


def test_a_bundle_becomes_named_formats() -> None:
    result = Result.from_bundle(
        {
            "text/plain": "'hello'",
            "text/html": "<b>",
            "image/png": "aGk=",
            "application/json": [1],
            "application/vnd.ringfence.data+json": {"a": [1]},
            "application/vnd.ringfence.chart+json": {"type": "line", "title": "T", "elements": [1]},
            "application/x-other": "o",
            "text/markdown": 5,
        },
        True,
    )
    assert result.text == "hello"
    assert result.formats() == ["text", "html", "png", "json", "data", "chart", "application/x-other"]
    assert result.png_bytes() == b"hi"
    assert isinstance(result.chart, Chart)
    assert (result.chart.type, result.chart.title, result.chart.elements) == ("line", "T", [1])
    assert result.markdown is None
    assert result["html"] == result._repr_html_() == "<b>"
    assert result["application/x-other"] == "o"


def test_lone_surrogates_in_results_can_be_printed() -> None:
    result = Result.from_bundle({"text/plain": "\ud800x"})
    assert (result.text or "").encode()


def test_the_text_of_an_execution_is_its_main_result() -> None:
    execution = Execution([Result(text="shown"), Result(text="4", is_main_result=True)], Logs(["out"], []))
    assert execution.text == "4"
    assert json.loads(execution.to_json())["results"][1] == {"text": "4", "is_main_result": True}


def test_command_results_give_text_and_exact_bytes() -> None:
    result = CommandResult(exit_code=1, stdout_bytes=b"\xffok", stdout_total=10)
    assert result.stdout == "�ok"
    assert result.truncated
    assert not result.ok


def test_entries_are_judged_field_by_field() -> None:
    entry = {"name": "a", "path": "/a", "type": "dir", "size": 1, "mode": 0o100755, "modified": 1.5}
    info = EntryInfo.from_guest(entry)
    assert (info.type, info.permissions, info.mode) == (FileType.DIR, "drwxr-xr-x", 0o755)
    bad: list[object] = [None, [], {**entry, "type": "x"}, {**entry, "size": -1}, {**entry, "size": True}]
    bad += [
        {**entry, "name": 1},
        {**entry, "target": 1},
        {**entry, "metadata": [1]},
        {**entry, "modified": "x"},
    ]
    for wrong in bad:
        with pytest.raises(GuestError):
            EntryInfo.from_guest(wrong)
    assert EntryInfo.from_guest({**entry, "modified": 1e300}).modified_time.year == 1970
