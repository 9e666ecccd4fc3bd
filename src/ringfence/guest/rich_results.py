"""From Python objects to the JSON payloads of RESULT and ERROR messages.

Guards against values that are not what they claim: bytes where text belongs, NaN, circular or enormous structures,
numpy scalars, lone surrogates, objects whose methods raise. Encoding uses the C encoder taken at import, so that a cell
that patches `json` changes nothing here. Imports neither pandas nor matplotlib: it looks at what user code has loaded.

MIME types: those of Jupyter, and
  application/vnd.ringfence.data+json    {column: [values]} of a DataFrame
  application/vnd.ringfence.chart+json   what `e2b_charts` reads out of a matplotlib figure
"""


# ruff: noqa: BLE001, S110, S112  (objects of user code raise anything)
from __future__ import annotations

import builtins
import sys
import warnings
from binascii import b2a_base64
from collections.abc import Iterable
from json import encoder as _json_encoder
from typing import Any

# See kernel.py: a cell that deletes builtins must not reach these functions.
__builtins__ = dict(vars(builtins))

DATA_MIME = "application/vnd.ringfence.data+json"
CHART_MIME = "application/vnd.ringfence.chart+json"

DATA_CELLS = 100_000
"""Cells (rows x columns) of a DataFrame that go into the data MIME type; of a larger frame the first rows go, and the
metadata says {"rows": all, "shown": n}."""

JSON_NODES = 100_000
"""A list or dict with more members than this (counted through all levels) gets no application/json."""

_JSON_DEPTH = 64


def safe_text(value: Any, limit: int = 65536) -> str:
    """`str(value)`, or a sentence when that raises. Characters beyond `limit` are cut."""
    try:
        text = str(value)
        text = text if type(text) is str else str.__str__(text)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<{type(value).__name__} object: str() raised {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + f"... ({len(text) - limit} characters more)"


_make_encoder: Any = getattr(_json_encoder, "c_make_encoder", None)
_quote = _json_encoder.encode_basestring
_python_encode = _json_encoder.JSONEncoder(default=safe_text, ensure_ascii=False).encode  # where there is no C encoder


def _default(value: Any) -> Any:
    """JSON for what JSON has no word for: numpy scalars and arrays by their own conversion, the rest as text."""
    for name in ("item", "tolist"):
        convert = getattr(value, name, None)
        if convert is not None and getattr(type(value), "__module__", "").partition(".")[0] in ("numpy", "pandas"):
            try:
                converted = convert()
            except Exception:
                continue
            if type(converted) is not type(value):
                return converted
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    isoformat = getattr(value, "isoformat", None)
    if isoformat is not None:
        try:
            return str(isoformat())
        except Exception:
            pass
    return safe_text(value)


def encode(value: Any, cuts: list[str] | None = None) -> bytes:
    """UTF-8 JSON of `value`, whatever it is: NaN becomes null, unknown objects become text, circles are cut.

    `cuts` gets a sentence when something was cut.
    """
    try:
        if _make_encoder is None:
            raise ValueError
        parts = _make_encoder({}, _default, _quote, None, ": ", ", ", False, True, False)(value, 0)
    except (ValueError, TypeError, OverflowError, RecursionError):
        value = _clean(value, 0, [] if cuts is None else cuts)
        if _make_encoder is None:
            parts = [_python_encode(value)]
        else:
            parts = _make_encoder({}, _default, _quote, None, ": ", ", ", False, True, False)(value, 0)
    return "".join(parts).encode("utf-8", "replace")


def _clean(value: Any, depth: int, cuts: list[str]) -> Any:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)   # the value of a str enumeration, not its name
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value) if value - value == 0 else None
    if depth > _JSON_DEPTH:
        if not cuts:
            cuts.append(f"JSON of a result was shortened: what is nested deeper than {_JSON_DEPTH} levels became '...'")
        return "..."
    if isinstance(value, dict):
        return {str(key): _clean(item, depth + 1, cuts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item, depth + 1, cuts) for item in value]
    return _clean(_default(value), depth + 1, cuts)


def cut(text: str, limit: int) -> str:
    """The beginning and the end of a long text, with a line between that says what is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _is_binary(mime: str) -> bool:
    return mime == "application/pdf" or (mime.startswith(("image/", "audio/", "video/")) and mime != "image/svg+xml")


def result_payload(bundle: dict[str, Any], metadata: dict[str, Any] | None, main: bool, limit: int,
                   extra: dict[str, Any] | None = None) -> tuple[bytes, list[str]]:
    """Payload of a RESULT message, and notes for the user about parts that were too large.

    Binary values become base64 text as in Jupyter. When the whole is larger than `limit` bytes the largest parts go
    first; text that had to go is replaced by a sentence saying so.
    """
    data: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for mime, value in bundle.items():
        mime = str(mime)
        if isinstance(value, (bytes, bytearray, memoryview)):
            if len(value) > limit:
                sizes[mime] = len(value)
                continue
            if _is_binary(mime):
                value = b2a_base64(value, newline=False).decode("ascii")
            else:
                value = bytes(value).decode("utf-8", "replace")
        elif isinstance(value, str):
            if len(value) > limit:
                sizes[mime] = len(value)
                continue
        elif not (mime.endswith("json") or isinstance(value, (dict, list, tuple, int, float))):
            value = safe_text(value)
        data[mime] = value
    message = {"data": data, "main": main, "metadata": metadata if isinstance(metadata, dict) else {}}
    if extra:
        message.update(extra)
    cuts: list[str] = []
    payload = encode(message, cuts) if not sizes else None
    while payload is None or len(payload) > limit:
        if payload is not None:
            if not data:
                message["metadata"] = {}
                payload = encode(message)
                break
            weights = {mime: len(value) if isinstance(value, str) else len(encode(value, cuts))
                       for mime, value in data.items()}
            largest = max(weights, key=lambda mime: weights[mime])
            sizes[largest] = weights[largest]
            del data[largest]
        if "text/plain" in sizes or not data:
            data["text/plain"] = (
                f"<result left out: {max(sizes.values())} bytes are more than the limit of {limit} bytes>")
            if limit < 512:
                payload = encode(message, cuts)
                break
        payload = encode(message, cuts)
    notes = cuts[:1]
    if sizes:
        parts = ", ".join(f"{mime[:100]} of {size} bytes" for mime, size in list(sizes.items())[:20])
        notes.append(f"a result was too large (limit {limit} bytes): {parts} left out; print or save a part instead")
    if notes:
        # The host puts them into Execution.notes; a limit too small for them has its sentence in the text.
        message["notes"] = notes
        noted = encode(message)
        payload = noted if len(noted) <= limit or len(payload) > limit else payload
    return payload, notes


# ---------------------------------------------------------------------------------------------------------------------
# What user code has loaded
# ---------------------------------------------------------------------------------------------------------------------

def _is_a(value: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_figure(value: Any) -> bool:
    return _is_a(value, "matplotlib.figure", "Figure")


def is_data_frame(value: Any) -> bool:
    return _is_a(value, "pandas", "DataFrame")


def data_of_frame(frame: Any) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """({column: values}, metadata) of a DataFrame: dates as ISO text, missing values as None."""
    rows, columns = frame.shape
    shown = rows if rows * max(columns, 1) <= DATA_CELLS else DATA_CELLS // max(columns, 1)
    result: dict[str, list[Any]] = {}
    for position in range(min(columns, DATA_CELLS)):
        name = base = safe_text(frame.columns[position], 1024)
        copy = 1
        while name in result:
            name, copy = f"{base}.{copy}", copy + 1
        series = frame.iloc[:shown, position]
        values = series.tolist()
        missing = series.isna()
        if missing.any():
            values = [None if absent else value for value, absent in zip(values, missing.tolist())]
        result[name] = [_plain(value) for value in values]
    return result, ({} if shown == rows else {"rows": rows, "shown": shown})


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, bool):
        return value
    if type(value) is float:
        return value if value - value == 0 else None
    return _default(value)


def chart_of_figure(figure: Any) -> dict[str, Any] | None:
    """Chart data by `e2b_charts`, or None: not installed, nothing drawn, or a kind of figure it cannot read."""
    try:
        from e2b_charts import chart_figure_to_dict

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # about masked values: not the user's code, not the user's concern
            return chart_figure_to_dict(figure) or None
    except Exception:
        return None


def json_of_collection(value: Any) -> Any | None:
    """`value` if it is a list or dict that JSON can say exactly (plain types, str keys) and not huge, else None."""
    budget = [JSON_NODES]

    def plain(item: Any, depth: int) -> bool:
        kind = type(item)
        if kind in (str, int, bool, type(None)):
            return True
        if kind is float:
            return item - item == 0
        if depth > _JSON_DEPTH:
            return False
        members: Iterable[Any]
        if kind is dict:
            if not all(type(key) is str for key in item):
                return False
            members = item.values()
        elif kind is list or kind is tuple:
            members = item
        else:
            return False
        budget[0] -= len(item)
        return budget[0] >= 0 and all(plain(member, depth + 1) for member in members)

    return value if type(value) in (list, dict) and plain(value, 0) else None
