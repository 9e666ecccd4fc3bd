"""Text that a sandbox had a hand in, made safe to print: escape sequences, control characters, hidden characters.

Guards a person's terminal and eyes. A file name or a line of a diff can hold sequences that set the clipboard, clear
the screen or answer for the keyboard (OSC 52, CSI, DCS, 8-bit C1), a newline that forges a row of a table, or
directional and invisible characters that make code look like other code. All of them are shown as escapes. Bytes that
are no UTF-8 (lone surrogates, as `os.fsdecode` makes them) are shown as `\\xNN`. A leaf: standard library only.
"""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]

# Cc: C0, DEL and C1; Cf: bidirectional controls, zero-width characters, tags; Cs: bytes that were no UTF-8; Zl, Zp:
# line ends that terminals and editors do not agree about; Co, Cn: whatever the font makes of them.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"))


def printable(text: str, *, lines: bool = False) -> str:
    """`text` with everything that is not plainly visible as an escape; with `lines`, `\\n` and `\\t` stay."""
    if text.isprintable() and text.isascii():
        return text
    return "".join(_shown(character, lines) for character in text)


def _shown(character: str, lines: bool) -> str:
    if " " <= character <= "~" or (lines and character in "\n\t"):
        return character
    if unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if named is not None:
        return named
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
