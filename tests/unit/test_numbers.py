"""The system call tables are complete and equal to the kernel's own headers where this machine has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence.linux import numbers

X86_HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm/unistd_64.h"),
)
GENERIC_HEADER = Path("/usr/include/asm-generic/unistd.h")


def header_numbers(path: Path) -> dict[str, int]:
    """Names and numbers a header defines, with names that stand for others resolved (64-bit reading)."""
    defined = dict(re.findall(r"^\s*#define\s+(__NR\w*)\s+(\w+)", path.read_text(), re.MULTILINE))
    found = {}
    for name, value in defined.items():
        while value in defined:
            value = defined[value]
        if name.startswith("__NR_") and value.isdigit():
            found[name[len("__NR_") :]] = int(value)
    return found


def test_x86_64_numbers_are_those_of_the_kernel_headers() -> None:
    header = next((path for path in X86_HEADERS if path.exists()), None)
    if header is None:
        pytest.skip("no asm/unistd_64.h on this machine")
    theirs = header_numbers(header)
    known = {name: number for name, number in numbers.X86_64.items() if number <= max(theirs.values())}
    newer = {"uretprobe", "uprobe"}  # given to old gaps by 6.11 and 6.18
    assert {name: number for name, number in known.items() if name not in newer} == {
        name: number for name, number in theirs.items() if name not in newer
    }


def test_aarch64_numbers_are_those_of_the_generic_header() -> None:
    if not GENERIC_HEADER.exists():
        pytest.skip("no asm-generic/unistd.h on this machine")
    theirs = header_numbers(GENERIC_HEADER)
    last = max(number for name, number in theirs.items() if name != "syscalls")
    ours = {name: number for name, number in numbers.AARCH64.items() if number <= last}
    assert ours.items() <= theirs.items()
    # The header also has second names for some numbers, 244 for "the first of an architecture's own" and
    # 403 to 423 for 32-bit architectures.
    missing = set(theirs.values()) - set(ours.values()) - {244, theirs["syscalls"]} - set(range(403, 424))
    assert not missing


@pytest.mark.parametrize("arch", sorted(numbers.TABLES))
def test_every_number_is_used_once(arch: str) -> None:
    table = numbers.table(arch)
    assert len(set(table.values())) == len(table)


@pytest.mark.parametrize("arch", sorted(numbers.TABLES))
def test_the_newest_calls_are_known(arch: str) -> None:
    """Anchors from both ends of each list: a word lost in the middle would shift them."""
    table = numbers.table(arch)
    assert table["pidfd_send_signal"] == 424
    assert table["clone3"] == 435
    assert table["set_mempolicy_home_node"] == 450
    assert table["mseal"] == 462
    assert table["file_setattr"] == 469 == max(table.values())


def test_the_two_tables_share_the_numbers_from_424_on() -> None:
    shared = {name: number for name, number in numbers.X86_64.items() if number >= 424}
    assert shared == {name: number for name, number in numbers.AARCH64.items() if number >= 424}


def test_an_unknown_architecture_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        numbers.table("riscv64")


def test_a_machine_without_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        numbers.architecture()


def test_spellings_of_one_machine_are_one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_machine", lambda: "arm64")
    assert numbers.architecture() == "aarch64"
