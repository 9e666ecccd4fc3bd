"""The parser of what a sandbox changed: hostile records are refused, whole ones come through."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import pytest

from ringfence.errors import CaptureError
from ringfence.node.capture import CHUNK, END, FAILED, HEADER, KINDS, Bounds, Entry, read_capture


def record(
    path: bytes, kind: str = "file", content: bytes = b"", *, mode: int = 0o644, target: bytes = b"",
    names: bytes = b"", flags: int = 0, size: int | None = None, chunks: bytes | None = None,
) -> bytes:  # fmt: skip
    size = len(content) if size is None else size
    head = HEADER.pack(KINDS.index(kind), flags, mode, len(path), len(target), len(names), size, 7)
    if chunks is None:
        chunks = CHUNK.pack(0, len(content)) + content if content else b""
    return head + path + target + names + chunks


ROOT = record(b"", "directory", mode=0o755)
LAST = HEADER.pack(END, 0, 0, 0, 0, 0, 0, 0)


def entries(*records: bytes, bounds: Bounds | None = None, read: Callable[[Entry], object] | None = None) -> list[Entry]:
    found = []
    for entry in read_capture(io.BytesIO(b"".join(records)), bounds):
        if read is not None:
            read(entry)
        found.append(entry)
    return found


def test_entries_come_through_as_they_were_written() -> None:
    contents: dict[bytes, bytes] = {}

    def keep(entry: Entry) -> None:
        if entry.content is not None:
            contents[entry.path] = b"".join(entry.content)

    found = entries(
        ROOT,
        record(b"a", content=b"one", mode=0o4755),
        record(b"d", "directory", flags=1, names=b"user.overlay.redirect\0user.overlay.metacopy"),
        record(b"d/gone", "whiteout"),
        record(b"d/link", "link", target=b"../../etc/passwd"),
        record(b"d/sparse", size=100_000, chunks=CHUNK.pack(1, 99_999) + CHUNK.pack(0, 1) + b"!"),
        record(b"e", "other"),
        LAST,
        read=keep,
    )
    assert [entry.path for entry in found] == [b"", b"a", b"d", b"d/gone", b"d/link", b"d/sparse", b"e"]
    assert found[1].mode == 0o4755 and found[1].size == 3 and found[1].mtime_ns == 7
    assert found[2].opaque and found[2].strange == ("user.overlay.redirect", "user.overlay.metacopy")
    assert found[4].target == b"../../etc/passwd"
    assert contents == {b"a": b"one", b"d/sparse": bytes(99_999) + b"!"}


def test_content_that_nobody_reads_is_skipped() -> None:
    assert [entry.path for entry in entries(ROOT, record(b"a", content=b"x" * 999), record(b"b"), LAST)][2] == b"b"


@pytest.mark.parametrize(
    "records",
    [
        [record(b"a")],
        [record(b"", "file")],
        [ROOT, ROOT],
        [ROOT, record(b"..", "directory")],
        [ROOT, record(b"d", "directory"), record(b"d/../x")],
        [ROOT, record(b"/etc/passwd")],
        [ROOT, record(b"a//b")],
        [ROOT, record(b"a\0b")],
        [ROOT, record(b"n" * 256)],
        [ROOT, record(b"d/child")],
        [ROOT, record(b"d", "link", target=b"/etc"), record(b"d/child")],
        [ROOT, record(b"d", "directory"), record(b"e"), record(b"d/child")],
        [ROOT, record(b"a"), record(b"a")],
        [ROOT, record(b"a"), record(b"a", "directory")],
        [ROOT, record(b"b"), record(b"a")],
        [ROOT, record(b"a", "link", size=5)],
        [ROOT, record(b"a", target=b"x")],
        [ROOT, record(b"a", "link", target=b"x\0y")],
        [ROOT, record(b"a", size=3, chunks=CHUNK.pack(0, 4) + b"four")],
        [ROOT, record(b"a", size=3, chunks=CHUNK.pack(1, 4))],
        [ROOT, record(b"a", size=3, chunks=CHUNK.pack(0, 0))],
        [ROOT, record(b"a", size=3, chunks=CHUNK.pack(2, 3))],
        [ROOT, record(b"a", size=9, chunks=CHUNK.pack(0, 3) + b"abc")],
        [ROOT, HEADER.pack(7, 0, 0, 0, 0, 0, 0, 0)],
        [ROOT, HEADER.pack(FAILED, 0, 0, 3, 0, 0, 0, 0) + b"why"],
    ],
)
def test_records_that_break_a_rule_are_refused(records: list[bytes]) -> None:
    with pytest.raises(CaptureError):
        entries(*records, LAST)


def test_a_capture_that_ends_early_is_refused() -> None:
    whole = b"".join([ROOT, record(b"a", content=b"some bytes"), record(b"d", "directory"), LAST])
    assert len(entries(whole)) == 3
    for cut in range(len(whole)):
        with pytest.raises(CaptureError):
            entries(whole[:cut])


def test_a_capture_is_bounded_in_entries_depth_path_and_content() -> None:
    deep = [record(b"/".join([b"d"] * depth), "directory") for depth in range(1, 12)]
    assert len(entries(ROOT, *deep, LAST)) == 12
    for bounds, records in (
        (Bounds(depth=10), deep),
        (Bounds(path=15), deep),
        (Bounds(entries=11), deep),
        (Bounds(content=1 << 40), [record(b"a", size=(1 << 40) + 1, chunks=b"")]),
        (Bounds(content=9), [record(b"a", content=b"12345"), record(b"b", content=b"12345")]),
    ):
        with pytest.raises(CaptureError):
            entries(ROOT, *records, LAST, bounds=bounds)


def test_no_bytes_make_the_parser_fail_otherwise_or_name_a_way_out() -> None:
    whole = b"".join([
        ROOT, record(b"a", content=b"some bytes"), record(b"d", "directory"), record(b"d/e", "link", target=b"x"), LAST,
    ])  # fmt: skip
    chance = random.Random(20)
    for _ in range(3000):
        mutant = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        try:
            for entry in entries(bytes(mutant), bounds=Bounds(content=1 << 20)):
                assert not {b"..", b"."} & set(entry.path.split(b"/")) and not entry.path.startswith(b"/")
        except CaptureError:
            pass
