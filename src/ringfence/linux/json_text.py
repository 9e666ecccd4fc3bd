"""`json.loads` and `json.dumps` by the C half of the json module alone.

Guards against the price of a start: the package `json` compiles regular expressions that its C half has no need of,
and `re` brings `enum` and `functools`. Text is what `json` writes and reads, with one difference: bytes must be
UTF-8. Where an interpreter has no C half, `json` does it. Standard library only.
"""

from __future__ import annotations

try:
    import _json
except ImportError:  # an interpreter without the C half
    _json = None

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_BLANKS = " \t\n\r"


class _Reading:
    """What the C scanner asks of a decoder object."""

    strict, object_hook, object_pairs_hook, parse_int = True, None, None, int

    def __init__(self, parse_float: Callable[[str], Any], parse_constant: Callable[[str], Any]):
        self.parse_float, self.parse_constant = parse_float, parse_constant


def scanner(
    parse_float: Callable[[str], Any] = float, parse_constant: Callable[[str], Any] = _CONSTANTS.__getitem__
) -> Callable[[str, int], tuple[Any, int]]:
    """A function of (text, start) that returns (value, end). It raises ValueError, StopIteration or RecursionError."""
    if _json is None:
        from json import JSONDecoder

        return JSONDecoder(parse_float=parse_float, parse_constant=parse_constant).scan_once  # type: ignore[attr-defined]
    reading: Any = _Reading(parse_float, parse_constant)
    return _json.make_scanner(reading)


def encoder(item: str = ", ", key: str = ": ", *, allow_nan: bool = True) -> Callable[[Any], str]:
    """A function from a value to its text, in ASCII, with these separators. It raises TypeError for what is not
    JSON, ValueError for numbers that are not finite without `allow_nan`, and RecursionError."""
    if _json is None:
        from json import JSONEncoder

        return JSONEncoder(separators=(item, key), allow_nan=allow_nan).encode
    encode = _json.make_encoder(
        None, _refuse, _json.encode_basestring_ascii, None, key, item, False, False, allow_nan
    )
    return lambda value: "".join(encode(value, 0))


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not JSON")


_scan = scanner()

dumps = encoder()
"""As `json.dumps(value)`."""

dumps_compactly = encoder(",", ":")
"""As `json.dumps(value, separators=(",", ":"))`."""


def loads(data: str | bytes | bytearray) -> Any:
    """As `json.loads`. Raises ValueError for what is not JSON in UTF-8, RecursionError where it is nested too deep."""
    text = data if isinstance(data, str) else str(data, "utf-8")
    try:
        value, end = _scan(text, len(text) - len(text.lstrip(_BLANKS)))
    except StopIteration:
        raise ValueError("not JSON") from None
    if text[end:].strip(_BLANKS):
        raise ValueError("bytes after the JSON")
    return value
