"""Unified diffs of two versions of a text, in time that the sandbox does not choose.

Guards the reviewer's machine: the textbook algorithms need quadratic time and more for texts made to provoke it, and
the texts come from a sandbox. Lines that occur once on both sides are matched first (a "patience" diff), what lies
between by a common subsequence while a budget lasts, and what is left counts as replaced: still a true diff, only a
longer one. Works on bytes, so that a text in any encoding comes out as it went in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

__all__ = ["Work", "is_text", "unified"]

CONTEXT = 3
_BLOCK = 250_000  # cells of one table of the exact algorithm
_LINES = 50_000  # lines of one side; a longer text is not compared line by line


class Work:
    """What all diffs of one review may cost together: `steps` of comparing, and `size` bytes of diff."""

    def __init__(self, steps: int = 20_000_000, size: int = 32 << 20):
        self.steps = steps
        self.size = size


def is_text(data: bytes) -> bool:
    """Whether `data` is shown as text: it has no NUL byte, as git judges."""
    return b"\0" not in data


def unified(before: bytes, after: bytes, work: Work) -> str | None:
    """The hunks of a unified diff, undecodable bytes as surrogates (`surrogateescape`); None beyond the bounds."""
    old, new = _lines(before), _lines(after)
    if len(old) > _LINES or len(new) > _LINES:
        return None
    pieces = list(_hunks(old, new, _matches(old, new, work)))
    size = sum(map(len, pieces))
    if size > work.size:
        return None
    work.size -= size
    return b"".join(pieces).decode("utf-8", "surrogateescape")


def _lines(data: bytes) -> list[bytes]:
    """Split after each newline alone: a carriage return or a form feed is part of its line, as for git and patch."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _matches(old: Sequence[bytes], new: Sequence[bytes], work: Work) -> list[tuple[int, int]]:
    """Pairs (index in `old`, index in `new`) of equal lines, both rising."""
    found: list[tuple[int, int]] = []
    waiting = [(0, len(old), 0, len(new))]
    while waiting:
        low, high, new_low, new_high = waiting.pop()
        while low < high and new_low < new_high and old[low] == new[new_low]:
            found.append((low, new_low))
            low, new_low = low + 1, new_low + 1
        while low < high and new_low < new_high and old[high - 1] == new[new_high - 1]:
            high, new_high = high - 1, new_high - 1
            found.append((high, new_high))
        count, new_count = high - low, new_high - new_low
        work.steps -= count + new_count
        if not count or not new_count or work.steps < 0:
            continue
        anchors = _anchors(old, new, low, high, new_low, new_high)
        if anchors:
            for index, new_index in anchors:
                waiting.append((low, index + 1, new_low, new_index + 1))  # ends in the anchor, which is trimmed off
                low, new_low = index + 1, new_index + 1
            waiting.append((low, high, new_low, new_high))
        elif count * new_count <= min(_BLOCK, work.steps):
            work.steps -= count * new_count
            found += _common(old, new, low, high, new_low, new_high)
    return sorted(found)


def _anchors(
    old: Sequence[bytes], new: Sequence[bytes], low: int, high: int, new_low: int, new_high: int
) -> list[tuple[int, int]]:
    """Lines that occur once on each side, as the longest list of pairs that rises on both."""
    once = _once(old, low, high)
    new_once = _once(new, new_low, new_high)
    pairs = [(index, new_once[line]) for line, index in once.items() if index >= 0 and new_once.get(line, -1) >= 0]
    pairs.sort()
    ends: list[int] = []  # patience sorting: the smallest last element of a rising list of each length
    tops: list[int] = []
    previous: list[int] = []
    for position, (_, new_index) in enumerate(pairs):
        pile = bisect_left(ends, new_index)
        previous.append(tops[pile - 1] if pile else -1)
        if pile == len(ends):
            ends.append(new_index)
            tops.append(position)
        else:
            ends[pile], tops[pile] = new_index, position
    chosen: list[tuple[int, int]] = []
    position = tops[-1] if tops else -1
    while position >= 0:
        chosen.append(pairs[position])
        position = previous[position]
    return chosen[::-1]


def _once(lines: Sequence[bytes], low: int, high: int) -> dict[bytes, int]:
    """Line -> its index, or -1 where it occurs more than once."""
    seen: dict[bytes, int] = {}
    for index in range(low, high):
        seen[lines[index]] = -1 if lines[index] in seen else index
    return seen


def _common(
    old: Sequence[bytes], new: Sequence[bytes], low: int, high: int, new_low: int, new_high: int
) -> list[tuple[int, int]]:
    """A longest common subsequence by the table of its lengths."""
    width = new_high - new_low + 1
    below = [0] * width
    table = [below]
    for index in range(high - 1, low - 1, -1):
        row = [0] * width
        line = old[index]
        for column in range(width - 2, -1, -1):
            if line == new[new_low + column]:
                row[column] = below[column + 1] + 1
            else:
                row[column] = max(below[column], row[column + 1])
        table.append(row)
        below = row
    found: list[tuple[int, int]] = []
    index, column, rest = low, 0, len(table) - 1
    while rest and column < width - 1:
        if old[index] == new[new_low + column]:
            found.append((index, new_low + column))
            index, column, rest = index + 1, column + 1, rest - 1
        elif table[rest - 1][column] >= table[rest][column + 1]:
            index, rest = index + 1, rest - 1
        else:
            column += 1
    return found


def _hunks(old: Sequence[bytes], new: Sequence[bytes], matches: list[tuple[int, int]]) -> Iterator[bytes]:
    changes: list[tuple[int, int, int, int]] = []  # gaps between matches: what was, what is
    low = new_low = 0
    for index, new_index in [*matches, (len(old), len(new))]:
        if index > low or new_index > new_low:
            changes.append((low, index, new_low, new_index))
        low, new_low = index + 1, new_index + 1
    group: list[tuple[int, int, int, int]] = []
    for change in changes:
        if group and change[0] - group[-1][1] > 2 * CONTEXT:
            yield from _hunk(old, new, group)
            group = []
        group.append(change)
    if group:
        yield from _hunk(old, new, group)


def _hunk(old: Sequence[bytes], new: Sequence[bytes], group: list[tuple[int, int, int, int]]) -> Iterator[bytes]:
    before = min(CONTEXT, group[0][0])
    after = min(CONTEXT, len(old) - group[-1][1])
    first, last = group[0][0] - before, group[-1][1] + after
    new_first, new_last = group[0][2] - before, group[-1][3] + after
    yield f"@@ -{_span(first, last)} +{_span(new_first, new_last)} @@\n".encode()
    position = first
    for low, high, new_low, new_high in group:
        yield from (_line(b" ", old[index]) for index in range(position, low))
        yield from (_line(b"-", old[index]) for index in range(low, high))
        yield from (_line(b"+", new[index]) for index in range(new_low, new_high))
        position = high
    yield from (_line(b" ", old[index]) for index in range(position, last))


def _span(first: int, last: int) -> str:
    """`start,count` as diff(1) writes it: counted from 1, an empty range by the line before it."""
    count = last - first
    if count == 1:
        return str(first + 1)
    return f"{first + 1 if count else first},{count}"


def _line(mark: bytes, line: bytes) -> bytes:
    return mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"
