"""Sizes and durations: what people write is read in one way only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import InvalidArgumentError
from ringfence.policy.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (1024, 1024),
        ("1024", 1024),
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("1.5GiB", 3 << 29),
        (" 200 MB ", 200_000_000),
        ("64Ki", 64 << 10),
        ("3b", 3),
        (2.0, 2),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "-1",
        "-1MiB",
        "1 XB",
        "1MiB2",
        "0.3B",
        True,
        None,
        float("nan"),
        1.5,
        1 << 63,
        "٣MiB",
        "1e3",
        [1],
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidArgumentError):
        parse_size(text)


@pytest.mark.parametrize("text", ["1M", "1g", "3K"])
def test_a_unit_with_two_meanings_is_refused_and_both_are_named(text):
    with pytest.raises(InvalidArgumentError) as problem:
        parse_size(text)
    assert "iB" in problem.value.hint
    assert "1000" in problem.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 30),
        ("30", 30),
        ("30s", 30),
        ("10min", 600),
        ("10m", 600),
        ("1h30min", 5400),
        ("500ms", 0.5),
        ("2 days", 172800),
    ],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", -1, True, None, float("inf"), "1x", "1h30", "30 s s", "1:30"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(InvalidArgumentError):
        parse_duration(text)


@given(st.integers(0, (1 << 63) - 1))
def test_a_formatted_size_reads_back_the_same(size):
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**9))
def test_a_formatted_duration_reads_back_the_same(seconds):
    assert parse_duration(format_duration(seconds)) == seconds
