"""Sizes and durations as people write them: `512MiB`, `10min`. Plain numbers are bytes and seconds.

Guards against units that are read in two ways: `M` and `G` alone are refused, because half of the tools take
them as powers of 1000 and half as powers of 1024. Standard library only: a default sandbox needs no model library.
"""

from __future__ import annotations

import math
import re

from ringfence.errors import InvalidArgumentError

SIZE_UNITS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
"""Bytes per unit: IEC (KiB, MiB, ...), Kubernetes' short form (Ki, Mi, ...) and SI (kB, MB, ...)."""

DURATION_UNITS = {
    "ms": 0.001,
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "m": 60.0, "min": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
"""Seconds per unit."""

LARGEST_SIZE = (1 << 63) - 1
"""What the kernel's signed 64-bit file sizes can say."""


def parse_size(value: float | str) -> int:
    """`value` in bytes: a whole number, or a text such as `512MiB`, `1.5GiB`, `200MB`.

    Raises:
        InvalidArgumentError: it is not a size, is negative, or is not a whole number of bytes.
    """
    hint = "write a number of bytes or a text such as 512MiB, 1GiB, 200MB"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidArgumentError(f"{value!r} is not a size", hint=hint)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value, re.ASCII)
        if match is None:
            raise InvalidArgumentError(f"{value!r} is not a size", hint=hint)
        unit = match[2].lower()
        if unit in ("k", "m", "g", "t"):
            name = unit.upper()
            raise InvalidArgumentError(
                f"the unit {match[2]!r} in {value!r} has two meanings",
                hint=f"write {match[1]}{name}iB (powers of 1024) or {match[1]}{name}B (powers of 1000)",
            )
        if unit not in SIZE_UNITS:
            raise InvalidArgumentError(f"unknown unit {match[2]!r} in the size {value!r}", hint=hint)
        whole = (
            int(match[1]) * SIZE_UNITS[unit] if "." not in match[1] else float(match[1]) * SIZE_UNITS[unit]
        )
    else:
        whole = value
    if isinstance(whole, float) and (not math.isfinite(whole) or whole != int(whole)):
        raise InvalidArgumentError(f"{value!r} is not a whole number of bytes", hint=hint)
    if not 0 <= whole <= LARGEST_SIZE:
        raise InvalidArgumentError(
            f"the size {value!r} is out of range", hint="sizes go from 0 to 2^63 - 1 bytes"
        )
    return int(whole)


def parse_duration(value: float | str) -> float:
    """`value` in seconds: a number, or a text such as `30s`, `10min`, `1h30min`, `500ms`.

    Raises:
        InvalidArgumentError: it is not a duration, is negative or not finite.
    """
    hint = "write a number of seconds or a text such as 30s, 10min, 1h30min, 500ms"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidArgumentError(f"{value!r} is not a duration", hint=hint)
    if isinstance(value, str):
        text = value.strip()
        parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
        if not parts or re.fullmatch(r"(?:[0-9]+(?:\.[0-9]+)?\s*[A-Za-z]*\s*)+", text, re.ASCII) is None:
            raise InvalidArgumentError(f"{value!r} is not a duration", hint=hint)
        seconds = 0.0
        for number, unit in parts:
            if unit.lower() not in DURATION_UNITS and not (unit == "" and len(parts) == 1):
                raise InvalidArgumentError(f"unknown unit {unit!r} in the duration {value!r}", hint=hint)
            seconds += float(number) * DURATION_UNITS.get(unit.lower(), 1.0)
    else:
        seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidArgumentError(f"the duration {value!r} is out of range", hint=hint)
    return seconds


def format_size(size: int) -> str:
    """Bytes as the largest binary unit that is exact to one decimal: `512MiB`, `1.5GiB`, `1000B`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale and size * 10 % scale == 0:
            tenths = size * 10 // scale
            return f"{tenths // 10}{unit}" if tenths % 10 == 0 else f"{tenths / 10:.1f}{unit}"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """Seconds as text that `parse_duration` reads back: `30s`, `10min`, `1h30min`, `500ms`."""
    if seconds != int(seconds):
        return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"
    whole, text = int(seconds), ""
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, whole = divmod(whole, scale)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
