"""What untrusted text may do to a terminal: be read, and be coloured.

Guards the person at the terminal. Bytes from a sandbox (what a program prints, names, error messages) can set the
clipboard (OSC 52), retitle windows, answer device queries into the shell's input, repaint lines that are long
gone, or show words in another order than they have. Here everything of the kind becomes visible text, `\\x1b]52;…`:
C0 and C1 controls (also as single bytes from 0x80), DEL, lone surrogates, bidirectional controls, invisible
characters and Unicode tags. Bytes that are not UTF-8 appear as `\\xff`.

What stays: printable text, newlines and tabs, and from streams also the carriage return, which progress bars need
and which reaches no further back than the line being written, and colours: SGR sequences whose every parameter is
in a short list (no conceal, no blink). Colours end with the stream.

`line` is for one field of a table or message, `text` for several lines of ours, `Sanitiser` for a stream in
pieces. Only for terminals: what goes to a pipe, a file or the API keeps its exact bytes. Standard library only, no
`re`: the command line's fast path uses this.
"""

from __future__ import annotations

import codecs

__all__ = ["Sanitiser", "line", "text"]

_HIDDEN = (
    (0x00, 0x1F), (0x7F, 0x9F),  # C0, DEL, C1
    (0xAD, 0xAD),  # soft hyphen
    (0x61C, 0x61C),  # Arabic letter mark
    (0x115F, 0x1160), (0x3164, 0x3164), (0xFFA0, 0xFFA0),  # Hangul fillers: letters without ink
    (0x180E, 0x180E),
    (0x200B, 0x200B), (0x200E, 0x200F),  # zero width space, marks of direction; the joiners are needed to write
    (0x2028, 0x202E),  # line and paragraph separators, embeddings and overrides of direction
    (0x2060, 0x206F),  # word joiner, invisible operators, isolates of direction
    (0xD800, 0xDFFF),  # lone surrogates: bytes of names that are not UTF-8
    (0xFEFF, 0xFEFF), (0xFFF0, 0xFFFB),
    (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0x13430, 0x1345F),  # format controls of notations
    (0xE0000, 0xE0FFF),  # tags and further variation selectors: whole messages that nobody sees
)  # fmt: skip

_ESCAPE = "\x1b"
_RESET = b"\x1b[0m"
_PLAIN_SGR = frozenset(
    [0, 1, 2, 3, 4, 7, 9, 21, 22, 23, 24, 27, 29, 39, 49, *range(30, 38), *range(40, 48), *range(90, 98), *range(100, 108)]
)
_LONGEST_SGR = 64  # characters of one colour sequence; a longer one is not a colour


class _Table(dict[int, "str | None"]):
    """For `str.translate`: every character as itself, or as the escape that shows it. Filled as characters come."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self._kept = kept

    def __missing__(self, code: int) -> str:
        shown = chr(code)
        if shown not in self._kept and any(low <= code <= high for low, high in _HIDDEN):
            shown = _visible(code)
        if len(self) < 4096:  # what a stream may make us remember
            self[code] = shown
        return shown


def _visible(code: int) -> str:
    named = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}.get(code)
    if named is not None:
        return named
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_LINE, _TEXT, _STREAM = _Table(""), _Table("\n\t"), _Table("\n\t\r")


def line(value: object) -> str:
    """`str(value)` as one line: everything that moves, hides or reorders is shown as an escape, newlines too."""
    return str(value).translate(_LINE)


def text(value: object) -> str:
    """`str(value)` with its newlines and tabs; all else as `line` does."""
    return str(value).translate(_TEXT)


class Sanitiser:
    """Makes a stream of bytes fit for a terminal, piece by piece; what is cut in two waits for the next piece."""

    __slots__ = ("_coloured", "_decoder", "_held")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""  # the beginning of what may become a colour
        self._coloured = False

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """What to write for the next piece of the stream."""
        return self._clean(self._held + self._decoder.decode(bytes(data)), final=False)

    def finish(self) -> bytes:
        """What to write at the end: the rest, and the end of colours that were left on."""
        rest = self._clean(self._held + self._decoder.decode(b"", True), final=True)
        if self._coloured:
            self._coloured = False
            rest += _RESET
        return rest

    def _clean(self, piece: str, final: bool) -> bytes:
        self._held = ""
        if _ESCAPE not in piece:
            return piece.translate(_STREAM).encode()
        first, *rest = piece.split(_ESCAPE)
        done = [first.translate(_STREAM)]
        for number, part in enumerate(rest):
            last = number == len(rest) - 1
            length = _colour(part)
            if length > 0:
                self._coloured = part[1 : length - 1].strip("0;") != ""
                done.append(_ESCAPE + part[:length] + part[length:].translate(_STREAM))
            elif length == 0 and last and not final:
                self._held = _ESCAPE + part
            else:
                done.append("\\x1b" + part.translate(_STREAM))
        return "".join(done).encode()


def _colour(part: str) -> int:
    """How many characters after an ESC are a permitted colour; 0: it may become one; -1: it is none."""
    if not part:
        return 0
    if part[0] != "[":
        return -1
    for position in range(1, min(len(part), _LONGEST_SGR)):
        character = part[position]
        if character == "m":
            return position + 1 if _permitted(part[1:position]) else -1
        if character not in "0123456789;":
            return -1
    return 0 if len(part) < _LONGEST_SGR else -1


def _permitted(parameters: str) -> bool:
    """True when every parameter of an SGR sequence is on the list (ECMA-48, and 38/48 as xterm takes them)."""
    numbers = iter([int(word[:4] or 0) for word in parameters.split(";")])
    for number in numbers:
        if number in (38, 48):
            count = {5: 1, 2: 3}.get(next(numbers, -1))
            if count is None or not all(0 <= next(numbers, -1) <= 255 for _ in range(count)):
                return False
        elif number not in _PLAIN_SGR:
            return False
    return True
