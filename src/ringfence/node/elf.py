"""What an ELF program needs from the dynamic loader, and a copy of it that looks in another place.

Guards against an interpreter that starts only while LD_LIBRARY_PATH is set. A Python built with a shared library
carries the absolute path of that library's directory (RUNPATH); at another mount point it is wrong, and a user's
`subprocess.run([sys.executable, ...], env={})` would fail. The copy's RUNPATH is overwritten in place, which needs
no tool and changes no offset.

Reads 64-bit little-endian files only (x86-64, aarch64, riscv64); anything else answers None. Structures: elf(5).
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from mmap import mmap
    from typing import NamedTuple
else:
    from ringfence.linux.records import NamedTuple

_PT_LOAD, _PT_DYNAMIC, _SHT_DYNSYM = 1, 2, 11
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29


class Dynamic(NamedTuple):
    """The loader's view of a program. `run_path_at` is the file offset of the RUNPATH text, -1 if there is none."""

    needed: tuple[str, ...]
    run_path: str
    run_path_at: int
    shared_tail: bool


def read_dynamic(content: bytes | mmap) -> Dynamic | None:
    """The dynamic section of an ELF file's bytes (or of its map: statically built ones are large); None if it has none or is of another kind."""
    try:
        return _read_dynamic(content)
    except (struct.error, ValueError, IndexError, OverflowError, StopIteration):
        return None


def _read_dynamic(content: bytes | mmap) -> Dynamic | None:
    if content[:6] != b"\x7fELF\x02\x01":
        return None
    program_at, section_at = struct.unpack_from("<QQ", content, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", content, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic_at = dynamic_size = 0
    for index in range(program_count):
        kind, _, offset, address, _, size = struct.unpack_from(
            "<IIQQQQ", content, program_at + index * program_size
        )
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic_at, dynamic_size = offset, size
    entries = [
        struct.unpack_from("<qQ", content, position)
        for position in range(dynamic_at, dynamic_at + dynamic_size, 16)
    ]
    address = next((value for tag, value in entries if tag == _DT_STRTAB), None)
    if address is None:
        return None
    strings_at = next(
        offset + address - start for start, offset, size in loads if start <= address < start + size
    )

    def text(offset: int) -> str:
        start = strings_at + offset
        return content[start : content.find(b"\0", start)].decode("utf-8", "surrogateescape")

    needed = tuple(text(value) for tag, value in entries if tag == _DT_NEEDED)
    places = [value for tag, value in entries if tag in (_DT_RUNPATH, _DT_RPATH)]
    if len(places) != 1:
        return Dynamic(needed, "", -1, False)
    run_path = text(places[0])
    # A linker lets one string be the tail of another; then the path's bytes are not its own.
    inside = range(places[0] + 1, places[0] + len(run_path.encode("utf-8", "surrogateescape")) + 1)
    names = [value for tag, value in entries if tag in (_DT_NEEDED, _DT_SONAME)]
    for index in range(section_count):
        header = struct.unpack_from("<IIQQQQIIQQ", content, section_at + index * section_size)
        if header[1] == _SHT_DYNSYM and header[9]:
            for position in range(header[4], header[4] + header[5], header[9]):
                names.append(struct.unpack_from("<I", content, position)[0])
    return Dynamic(needed, run_path, strings_at + places[0], any(name in inside for name in names))


def with_run_path(content: bytes, run_path: str) -> bytes | None:
    """The file's bytes with another RUNPATH; None where the old one is absent, shorter, or shared."""
    dynamic = read_dynamic(content)
    if dynamic is None or dynamic.run_path_at < 0 or dynamic.shared_tail:
        return None
    old, new = dynamic.run_path.encode("utf-8", "surrogateescape"), run_path.encode()
    if len(new) > len(old):
        return None
    start = dynamic.run_path_at
    return content[:start] + new + b"\0" * (len(old) - len(new)) + content[start + len(old) :]
