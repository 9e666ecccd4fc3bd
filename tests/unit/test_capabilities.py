"""Capability sets are read right, written whole, and empty when they are said to be."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from forked import in_child

from ringfence.linux import capabilities

HEADER = Path("/usr/include/linux/capability.h")
needs_setpcap = pytest.mark.skipif(
    not capabilities.read().effective & capabilities.mask("CAP_SETPCAP"),
    reason="needs CAP_SETPCAP: run as root to prove that sets can be emptied",
)


STATUS = """Name:\tbash
CapInh:\t0000000000000000
CapPrm:\t00000000000000e0
CapEff:\t0000000000000020
CapBnd:\t000001ffffffffff
CapAmb:\t0000000000000000
NoNewPrivs:\t1
"""


def test_names_and_numbers_are_the_kernels() -> None:
    if not HEADER.exists():
        pytest.skip("no linux/capability.h on this machine")
    theirs = {}
    for line in HEADER.read_text().splitlines():
        words = line.split()
        if len(words) >= 3 and words[0] == "#define" and words[1].startswith("CAP_") and words[2].isdigit():
            theirs[words[1]] = int(words[2])
    theirs.pop("CAP_LAST_CAP", None)
    for name, number in theirs.items():
        assert capabilities.NUMBER[name] == number


def test_status_is_parsed_into_the_five_sets() -> None:
    sets = capabilities.parse_status(STATUS)
    assert capabilities.names(sets.effective) == ("CAP_KILL",)
    assert capabilities.names(sets.permitted) == ("CAP_KILL", "CAP_SETGID", "CAP_SETUID")
    assert sets.bounding == (1 << 41) - 1
    assert not sets.empty


def test_a_status_without_sets_is_an_error_not_an_empty_set() -> None:
    with pytest.raises(ValueError, match="capability sets"):
        capabilities.parse_status("Name:\tbash\nCapEff:\t0\n")


def test_masks_and_names_are_inverse() -> None:
    assert capabilities.names(capabilities.mask(*capabilities.NAMES)) == tuple(capabilities.NAMES)
    assert capabilities.names(1 << 55) == ("CAP_55",)
    with pytest.raises(ValueError, match="CAP_WHATEVER"):
        capabilities.mask("CAP_WHATEVER")


def test_the_last_capability_is_what_the_kernel_says() -> None:
    told = Path("/proc/sys/kernel/cap_last_cap")
    if not told.exists():
        pytest.skip("no /proc/sys/kernel/cap_last_cap here")
    assert capabilities.last_capability() == int(told.read_text())


def test_sets_can_be_given_up_and_not_be_taken_back() -> None:
    def act() -> str:
        before = capabilities.read()
        capabilities.set_capabilities()
        after = capabilities.read()
        assert after.effective == after.permitted == after.inheritable == 0, after
        try:
            capabilities.set_capabilities(effective=before.effective | 1, permitted=before.permitted | 1)
        except PermissionError:
            return "gone for good"
        return "came back"

    assert in_child(act) == "gone for good"


@needs_setpcap
def test_both_halves_of_a_set_are_written() -> None:
    wanted = capabilities.mask("CAP_KILL", "CAP_AUDIT_READ", "CAP_CHECKPOINT_RESTORE")

    def act() -> str:
        wanted_here = wanted & capabilities.read().permitted
        capabilities.set_capabilities(effective=wanted_here, permitted=wanted_here)
        sets = capabilities.read()
        return str(sets.effective == sets.permitted == wanted_here and wanted_here >> 32 != 0)

    assert in_child(act) == "True"


@needs_setpcap
def test_drop_all_leaves_nothing_in_any_set() -> None:
    def act() -> str:
        capabilities.drop_all()
        return str(capabilities.read().empty)

    assert in_child(act) == "True"


@needs_setpcap
def test_the_bounding_set_keeps_only_what_was_asked() -> None:
    keep = capabilities.mask("CAP_CHOWN")

    def act() -> str:
        capabilities.drop_bounding_set(keep)
        return capabilities.names(capabilities.read().bounding).__repr__()

    assert in_child(act) == "('CAP_CHOWN',)"


@needs_setpcap
def test_securebits_are_set_and_locked() -> None:
    def act() -> str:
        capabilities.set_securebits(capabilities.SECUREBITS_NO_ROOT)
        assert capabilities.securebits() == capabilities.SECUREBITS_NO_ROOT
        capabilities.set_securebits(0)
        return "unlocked"

    assert in_child(act) == "EPERM"


def test_no_new_privileges_can_be_set_and_never_cleared() -> None:
    def act() -> str:
        capabilities.set_no_new_privileges()
        assert capabilities.no_new_privileges()
        try:
            capabilities.syscalls.prctl(capabilities.PR_SET_NO_NEW_PRIVS, 0)
        except OSError as problem:
            return f"{errno.errorcode[problem.errno or 0]} {capabilities.no_new_privileges()}"
        return "cleared"

    assert in_child(act) == "EINVAL True"


def test_keep_capabilities_is_a_switch() -> None:
    def act() -> str:
        capabilities.set_keep_capabilities(True)
        kept = capabilities.syscalls.prctl(capabilities.PR_GET_KEEPCAPS)
        capabilities.set_keep_capabilities(False)
        return f"{kept} {capabilities.syscalls.prctl(capabilities.PR_GET_KEEPCAPS)}"

    assert in_child(act) == "1 0"


def test_an_empty_ambient_set_can_be_cleared_by_anyone() -> None:
    def act() -> str:
        capabilities.clear_ambient()
        return str(capabilities.read().ambient)

    assert in_child(act) == "0"
