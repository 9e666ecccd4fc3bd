"""The assembler says what its table says: every number, every argument, both halves, both architectures."""

from __future__ import annotations

import errno
import os
import random
import struct

import pytest
from forked import in_child

from ringfence.linux import capabilities, numbers, seccomp
from ringfence.linux.seccomp import (
    ALLOW,
    Rule,
    any_bit,
    at_least,
    errno_verdict,
    is_zero_64,
    none_of,
    one_of,
    when,
)

DENY = errno_verdict(errno.EPERM)
ABSENT = errno_verdict(errno.ENOSYS)
ARCHES = sorted(numbers.TABLES)


def program(arch: str, verdicts: dict[int, seccomp.Verdict]) -> bytes:
    return seccomp.assemble(arch, verdicts, default=ABSENT, foreign=seccomp.KILL_PROCESS)


def judge(rule: Rule, *arguments: int) -> int:
    return seccomp.evaluate(program("x86_64", {5: rule}), "x86_64", 5, arguments)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_number_gets_the_verdict_of_the_table(arch: str) -> None:
    source = random.Random(1)
    for _ in range(20):
        verdicts: dict[int, seccomp.Verdict] = {
            number: source.choice([ALLOW, DENY, ABSENT, seccomp.LOG])
            for number in range(470)
            if source.random() < 0.9
        }
        code = program(arch, verdicts)
        for number in [*range(-2, 480), 0x40000000, 0x40000001, 0x7FFFFFFF, 0xFFFFFFFF]:
            assert seccomp.evaluate(code, arch, number) == verdicts.get(number, ABSENT), number


def test_an_empty_table_answers_the_default() -> None:
    code = program("x86_64", {})
    assert seccomp.evaluate(code, "x86_64", 0) == ABSENT


def test_neighbouring_rules_of_different_shape_do_not_run_into_each_other() -> None:
    source = random.Random(2)
    verdicts: dict[int, seccomp.Verdict] = {}
    for number in range(300):
        verdicts[number] = Rule((when(DENY, one_of(number % 6, number)),), ALLOW)
    code = program("x86_64", verdicts)
    for number in source.sample(range(300), 60):
        arguments = [0xFFFF] * 6
        assert seccomp.evaluate(code, "x86_64", number, tuple(arguments)) == ALLOW
        arguments[number % 6] = number
        assert seccomp.evaluate(code, "x86_64", number, tuple(arguments)) == DENY


@pytest.mark.parametrize("arch", ARCHES)
def test_calls_through_another_architecture_never_reach_the_table(arch: str) -> None:
    code = program(arch, dict.fromkeys(range(500), ALLOW))
    other = next(name for name in ARCHES if name != arch)
    assert seccomp.evaluate(code, other, 1) == seccomp.KILL_PROCESS
    assert seccomp.evaluate(code, "0x40000003", 1) == seccomp.KILL_PROCESS  # i386
    assert seccomp.evaluate(code, "0x40000028", 1) == seccomp.KILL_PROCESS  # arm


def test_one_of_compares_the_half_that_the_kernel_reads() -> None:
    rule = Rule((when(DENY, one_of(1, 0x5412)),), ALLOW)
    assert judge(rule, 0, 0x5412) == DENY
    assert judge(rule, 0, 0xDEAD_0000_5412) == DENY  # the kernel drops the upper half as well
    assert judge(rule, 0, 0x5413) == ALLOW
    assert judge(rule, 0x5412, 0) == ALLOW


def test_negative_numbers_are_compared_as_the_kernel_sees_them() -> None:
    rule = Rule((when(DENY, one_of(0, -1)),), ALLOW)
    assert judge(rule, -1) == DENY
    assert judge(rule, 0xFFFFFFFF) == DENY
    assert judge(rule, 1) == ALLOW


def test_none_of_holds_for_every_other_value_only() -> None:
    rule = Rule((when(DENY, none_of(0, 3, 5, 9)),), ALLOW)
    assert [judge(rule, value) for value in (3, 5, 9)] == [ALLOW] * 3
    assert [judge(rule, value) for value in (0, 4, 6, 10, 0xFFFFFFFF)] == [DENY] * 5


def test_masks_apply_before_the_comparison() -> None:
    rule = Rule((when(ALLOW, one_of(0, 1, 2, mask=0xF)),), DENY)
    assert judge(rule, 0x80801) == ALLOW
    assert judge(rule, 0x80803) == DENY


def test_a_masked_value_is_not_taken_for_the_unmasked_one() -> None:
    rule = Rule((when(DENY, one_of(0, 1, mask=0xF)), when(DENY, one_of(0, 0x20))), ALLOW)
    assert judge(rule, 0x20) == DENY
    assert judge(rule, 0x30) == ALLOW


def test_all_tests_of_a_line_must_hold() -> None:
    rule = Rule((when(DENY, any_bit(1, 0o100), any_bit(2, 0o6000)),), ALLOW)
    assert judge(rule, 0, 0o101, 0o4755) == DENY
    assert judge(rule, 0, 0o001, 0o4755) == ALLOW
    assert judge(rule, 0, 0o101, 0o755) == ALLOW


def test_the_first_line_that_holds_decides() -> None:
    rule = Rule((when(ALLOW, one_of(0, 7)), when(DENY, at_least(0, 5)), when(ABSENT, one_of(0, 1))), ALLOW)
    assert judge(rule, 7) == ALLOW
    assert judge(rule, 8) == DENY
    assert judge(rule, 0xFFFFFFFF) == DENY
    assert judge(rule, 1) == ABSENT
    assert judge(rule, 2) == ALLOW


def test_zero_of_64_bits_means_both_halves() -> None:
    rule = Rule((when(DENY, *is_zero_64(1)),), ALLOW)
    assert judge(rule, 0, 0) == DENY
    assert judge(rule, 0, 1) == ALLOW
    assert judge(rule, 0, 1 << 32) == ALLOW


def test_equal_rules_share_their_code() -> None:
    rule = Rule((when(DENY, one_of(0, 1)),), ALLOW)
    one = program("x86_64", {5: rule, 6: ALLOW, 7: ALLOW, 8: ALLOW})
    two = program("x86_64", {5: rule, 6: ALLOW, 7: rule, 8: ALLOW})
    assert len(two) - len(one) < 3 * len(rule.lines) * 8 + 16


def test_a_line_too_long_for_its_jumps_is_an_error_not_a_wrong_program() -> None:
    rule = Rule((when(ALLOW, none_of(0, *range(300))),), DENY)
    with pytest.raises(ValueError, match="too long"):
        program("x86_64", {5: rule})


def test_a_program_longer_than_the_kernel_takes_is_an_error() -> None:
    rule = Rule(tuple(when(DENY, one_of(0, value)) for value in range(2200)), ALLOW)
    with pytest.raises(ValueError, match="4096"):
        program("x86_64", {5: rule})


def test_the_interpreter_refuses_what_the_kernel_would_refuse() -> None:
    with pytest.raises(ValueError, match="end"):
        seccomp.evaluate(struct.pack("=HBBI", 0x20, 0, 0, 0), "x86_64", 0)
    with pytest.raises(ValueError, match="offset"):
        seccomp.evaluate(struct.pack("=HBBI", 0x20, 0, 0, 64), "x86_64", 0)
    with pytest.raises(ValueError, match="unknown"):
        seccomp.evaluate(struct.pack("=HBBI", 0x07, 0, 0, 0), "x86_64", 0)


def test_verdicts_are_put_in_words() -> None:
    assert seccomp.describe(ALLOW) == "allow"
    assert seccomp.describe(DENY) == "refuse with EPERM"
    assert "kill" in seccomp.describe(seccomp.KILL_PROCESS)


def test_the_kernel_runs_an_installed_program() -> None:
    arch = numbers.architecture()
    number = numbers.table(arch)["getpriority"]
    verdicts: dict[int, seccomp.Verdict] = {value: ALLOW for value in numbers.table(arch).values()}
    verdicts[number] = errno_verdict(errno.EDOM)
    code = seccomp.assemble(arch, verdicts, default=ABSENT, foreign=ABSENT)

    def act() -> str:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        capabilities.set_no_new_privileges()
        seccomp.install(code)
        try:
            os.getpriority(os.PRIO_PROCESS, 0)
        except OSError as problem:
            return f"{before is not None} {errno.errorcode[problem.errno or 0]}"
        return "still works"

    assert in_child(act) == "True EDOM"


def test_a_malformed_program_is_an_error_and_installs_nothing() -> None:
    def act() -> int:
        capabilities.set_no_new_privileges()
        try:
            seccomp.install(b"\0" * 8)
        except OSError as problem:
            assert problem.errno == errno.EINVAL
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert in_child(act).lstrip("-").isdigit()
