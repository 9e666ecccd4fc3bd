"""Seccomp programs: a small assembler, the installer, and an interpreter to test and explain them with.

Guards against two ways in which filters go wrong: a program that does not say what its table says (so the same
bytes that the kernel runs are run here by `evaluate`, over any architecture), and an argument check that looks
at another width than the kernel does (so each `Test` names the half of the register it reads).

A filter is a mapping from system call number to a verdict: a number such as `ALLOW` or `errno_verdict(EPERM)`,
or a `Rule` that looks at arguments. `assemble` turns it into a binary tree over ranges of equal verdict: about
ten comparisons a call. Arguments that are pointers cannot be judged: the memory behind them can change after
the check (seccomp(2), "user-space notification"), so calls that take their meaning from memory are refused.

Facts: seccomp(2), Documentation/userspace-api/seccomp_filter.rst, linux/seccomp.h, linux/bpf_common.h.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from ringfence.linux import numbers, syscalls

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NamedTuple, Union
else:
    from ringfence.linux.records import NamedTuple

# What a filter can answer (linux/seccomp.h).
KILL_PROCESS = 0x80000000
KILL_THREAD = 0x00000000
TRAP = 0x00030000
ERRNO = 0x00050000
USER_NOTIF = 0x7FC00000
TRACE = 0x7FF00000
LOG = 0x7FFC0000
ALLOW = 0x7FFF0000
ACTION_MASK = 0xFFFF0000

SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_TSYNC = 1
SECCOMP_FILTER_FLAG_LOG = 2
SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
SECCOMP_FILTER_FLAG_NEW_LISTENER = 8
SECCOMP_FILTER_FLAG_TSYNC_ESRCH = 16

X32_BIT = 0x40000000
MAXIMUM_INSTRUCTIONS = 4096  # BPF_MAXINSNS

# Instruction codes (linux/bpf_common.h): class | size or operation | mode or source.
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_JUMP = 0x05  # BPF_JMP | BPF_JA
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_TO_BODY = -1  # not the kernel's: a jump to a rule's code, whose distance is not known yet

_OFFSET_NUMBER = 0  # struct seccomp_data
_OFFSET_ARCHITECTURE = 4
_OFFSET_ARGUMENTS = 16

_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter
_DATA = struct.Struct("=iIQ6Q")  # struct seccomp_data

Instruction = tuple[int, int, int, int]


def errno_verdict(number: int) -> int:
    """The verdict that refuses a call with `errno` = `number` without running it."""
    return ERRNO | (number & 0xFFFF)


# ---------------------------------------------------------------------------------------------------------
# Rules: what to look at


class Test(NamedTuple):
    """One comparison of one 32-bit half of an argument.

    `argument` counts from 0. `high` picks the upper half of the register; the default is the lower one, which
    is all that the kernel reads of an `int`, `unsigned int`, `pid_t` or `umode_t` parameter. `mask` is applied
    first. `operation` is `one_of` (equal to any of `values`), `any_bit` (any bit of values[0]) or `at_least`
    (unsigned).
    """

    argument: int
    operation: str
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    high: bool = False
    negated: bool = False


def one_of(argument: int, *values: int, mask: int = 0xFFFFFFFF) -> Test:
    """True when the lower half of the argument, masked, equals one of `values`."""
    return Test(argument, "one_of", tuple(value & 0xFFFFFFFF for value in values), mask)


def none_of(argument: int, *values: int, mask: int = 0xFFFFFFFF) -> Test:
    """True when the lower half of the argument, masked, equals none of `values`."""
    return one_of(argument, *values, mask=mask)._replace(negated=True)


def any_bit(argument: int, bits: int) -> Test:
    """True when the lower half of the argument has any of `bits`."""
    return Test(argument, "any_bit", (bits & 0xFFFFFFFF,))


def at_least(argument: int, value: int) -> Test:
    """True when the lower half of the argument, unsigned, is `value` or more."""
    return Test(argument, "at_least", (value & 0xFFFFFFFF,))


def is_zero_64(argument: int) -> tuple[Test, Test]:
    """Two tests that hold together when all 64 bits of the argument are zero."""
    low = Test(argument, "one_of", (0,))
    return low, low._replace(high=True)


class Line(NamedTuple):
    """If all of `tests` hold, the answer is `verdict`."""

    verdict: int
    tests: tuple[Test, ...]


class Rule(NamedTuple):
    """The first line that holds decides; if none does, `otherwise`."""

    lines: tuple[Line, ...]
    otherwise: int


if TYPE_CHECKING:
    Verdict = Union[int, Rule]  # noqa: UP007 - as Python 3.9 writes it


def when(verdict: int, *tests: Test) -> Line:
    """A line of a rule, read as "answer `verdict` when ..."."""
    return Line(verdict, tests)


# ---------------------------------------------------------------------------------------------------------
# Assembler


class _Next:
    """Marks a jump to the line after this one until its distance is known."""


_NEXT = _Next()


def _line_code(line: Line, loaded: Any) -> tuple[list[Instruction], Any]:
    """Instructions of one line, and what the accumulator holds when the line does not decide."""
    code: list[list[Any]] = []
    seen = set()
    for test in line.tests:
        source = (test.argument, test.high, test.mask)
        seen.add(source)
        if source != loaded:
            offset = _OFFSET_ARGUMENTS + 8 * test.argument + (4 if test.high else 0)
            code.append([_LOAD, 0, 0, offset])
            if test.mask != 0xFFFFFFFF:
                code.append([_AND, 0, 0, test.mask])
            loaded = source
        opcode = {"one_of": _JUMP_EQUAL, "any_bit": _JUMP_ANY_BIT, "at_least": _JUMP_AT_LEAST}[test.operation]
        last = len(test.values) - 1
        for index, value in enumerate(test.values):
            if test.negated:
                code.append([opcode, _NEXT, 0, value])
            elif index == last:
                code.append([opcode, 0, _NEXT, value])
            else:
                code.append([opcode, last - index, 0, value])
    code.append([_RETURN, 0, 0, line.verdict])
    for position, instruction in enumerate(code):
        distance = len(code) - position - 1
        if _NEXT in instruction[1:3] and distance > 255:
            raise ValueError("a line of a seccomp rule is too long for one jump; split it")
        for field in (1, 2):
            if instruction[field] is _NEXT:
                instruction[field] = distance
    # Only a line that looked at one thing leaves a known value behind, wherever it was left.
    return [tuple(item) for item in code], loaded if len(seen) == 1 else None  # type: ignore[misc]


def _rule_code(rule: Rule) -> tuple[Instruction, ...]:
    code: list[Instruction] = []
    loaded: Any = None
    for line in rule.lines:
        part, loaded = _line_code(line, loaded)
        code += part
    code.append((_RETURN, 0, 0, rule.otherwise))
    return tuple(code)


def assemble(arch: str, verdicts: Mapping[int, Verdict], default: int, foreign: int) -> bytes:
    """The program for `arch`: `verdicts` by number, `default` for every other number, `foreign` for calls made
    through another architecture's entry (32-bit ones).

    x32 numbers (bit 0x40000000) lie above every number of the table and so get `default`.
    Raises ValueError when the program would be longer than the kernel takes.
    """
    bodies: dict[tuple[Instruction, ...], int] = {}  # rule code -> position after the tree
    body_code: list[Instruction] = []
    starts: list[int] = [0]
    leaves: list[tuple[str, int]] = []

    def leaf(verdict: Verdict) -> tuple[str, int]:
        if isinstance(verdict, int):
            return "return", verdict
        code = _rule_code(verdict)
        if code not in bodies:
            bodies[code] = len(body_code)
            body_code.extend(code)
        return "body", bodies[code]

    # Ranges of numbers with one verdict: starts[i] <= number < starts[i + 1] gets leaves[i].
    fallback = leaf(default)
    expected = 0
    leaves.append(fallback)
    for number in sorted(verdicts):
        if number > expected and leaves[-1] != fallback:
            starts.append(expected)
            leaves.append(fallback)
        found = leaf(verdicts[number])
        if found != leaves[-1]:
            if starts[-1] == number:
                leaves[-1] = found
            else:
                starts.append(number)
                leaves.append(found)
        expected = number + 1
    if leaves[-1] != fallback:
        starts.append(expected)
        leaves.append(fallback)

    def arrive(index: int) -> Instruction:
        kind, value = leaves[index]
        return (_RETURN, 0, 0, value) if kind == "return" else (_TO_BODY, 0, 0, value)

    def width(index: int) -> int:
        return starts[index + 1] - starts[index] if index + 1 < len(starts) else 1 << 32

    def subtree(low: int, high: int) -> list[Instruction]:
        """Code for the ranges from `low` up to `high`: a few exceptions to one verdict, or two halves."""
        several = leaves[low:high]
        common = max(several, key=several.count)
        exceptions = [index for index in range(low, high) if leaves[index] != common]
        if len(exceptions) <= 3 and all(width(index) == 1 for index in exceptions):
            code: list[Instruction] = []
            for index in exceptions:
                code += [(_JUMP_EQUAL, 0, 1, starts[index]), arrive(index)]
            return [*code, arrive(low + several.index(common))]
        middle = (low + high) // 2
        left, right = subtree(low, middle), subtree(middle, high)
        if len(left) <= 255:
            return [(_JUMP_AT_LEAST, len(left), 0, starts[middle]), *left, *right]
        # Too far for a conditional jump: hop over an unconditional one, whose distance has 32 bits.
        return [(_JUMP_AT_LEAST, 0, 1, starts[middle]), (_JUMP, 0, 0, len(left)), *left, *right]

    tree = subtree(0, len(leaves))
    for position, (operation, _, _, operand) in enumerate(tree):
        if operation == _TO_BODY:
            tree[position] = (_JUMP, 0, 0, len(tree) - position - 1 + operand)
    head: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, numbers.AUDIT_ARCHITECTURE[arch]),
        (_RETURN, 0, 0, foreign),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    program = head + tree + body_code
    if len(program) > MAXIMUM_INSTRUCTIONS:
        raise ValueError(
            f"seccomp program has {len(program)} instructions; the kernel takes {MAXIMUM_INSTRUCTIONS}"
        )
    pack = _INSTRUCTION.pack
    return b"".join([pack(*instruction) for instruction in program])


# ---------------------------------------------------------------------------------------------------------
# Installer


class _Program(ctypes.Structure):  # struct sock_fprog
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def install(program: bytes, flags: int = 0) -> int:
    """Put `program` on the calling thread, for good; children and executed programs inherit it.

    Preconditions: no_new_privs is set (`capabilities.set_no_new_privileges`), or the caller has CAP_SYS_ADMIN
    in its user namespace. `flags` are SECCOMP_FILTER_FLAG_*; other threads get the filter only with
    SECCOMP_FILTER_FLAG_TSYNC. Returns 0, or the listener descriptor with NEW_LISTENER.

    Raises OSError: EACCES without no_new_privs, EINVAL for a program the kernel does not take or a kernel
    without CONFIG_SECCOMP_FILTER, ENOSYS where another filter refuses the call.
    """
    return installer(program, flags)()


def installer(program: bytes, flags: int = 0) -> Callable[[], int]:
    """A function that does what `install(program, flags)` does, with everything but the call made ready.

    For a process whose forks install the same program: each then copies one page or two, not the program.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    descriptor = _Program(len(program) // _INSTRUCTION.size, ctypes.addressof(buffer))
    number = numbers.table(numbers.architecture())["seccomp"]

    def put() -> int:
        # `buffer` is named here so that it lives as long as this function: the descriptor holds its address only.
        assert buffer
        return syscalls.call(
            number, SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(descriptor), what="seccomp(SECCOMP_SET_MODE_FILTER)"
        )

    return put


# ---------------------------------------------------------------------------------------------------------
# Interpreter


def evaluate(program: bytes, arch: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would answer: the 32-bit verdict of `program` for one call.

    `arch` is a name of `numbers.TABLES` or an AUDIT_ARCH_* number as text ("0x40000003" for i386). Arguments
    are taken as 64-bit registers; negative ones wrap, missing ones are 0. Raises ValueError for a program that
    the kernel's checker would refuse.
    """
    code = numbers.AUDIT_ARCHITECTURE[arch] if arch in numbers.AUDIT_ARCHITECTURE else int(arch, 0)
    registers = [value & 0xFFFFFFFFFFFFFFFF for value in arguments] + [0] * (6 - len(arguments))
    signed = number - (1 << 32) if number >= 1 << 31 else number
    data = _DATA.pack(signed, code, 0, *registers)
    instructions = list(_INSTRUCTION.iter_unpack(program))
    accumulator = 0
    position = 0
    while True:
        if position >= len(instructions):
            raise ValueError("seccomp program runs off its end")
        operation, if_true, if_false, operand = instructions[position]
        position += 1
        if operation == _RETURN:
            return operand
        if operation == _LOAD:
            if operand % 4 or operand > len(data) - 4:
                raise ValueError(f"seccomp program loads from offset {operand}")
            accumulator = int.from_bytes(data[operand : operand + 4], "little")
        elif operation == _AND:
            accumulator &= operand
        elif operation == _JUMP:
            position += operand
        elif operation == _JUMP_EQUAL:
            position += if_true if accumulator == operand else if_false
        elif operation == _JUMP_AT_LEAST:
            position += if_true if accumulator >= operand else if_false
        elif operation == _JUMP_ANY_BIT:
            position += if_true if accumulator & operand else if_false
        else:
            raise ValueError(f"seccomp program has an unknown instruction {operation:#x}")


def describe(verdict: int) -> str:
    """A verdict in words: `allow`, `refuse with EPERM`, `kill the process`."""
    action = verdict & ACTION_MASK
    if action == ERRNO:
        number = verdict & 0xFFFF
        return f"refuse with {errno.errorcode.get(number, number)}"
    names = {
        ALLOW: "allow",
        KILL_PROCESS: "kill the process",
        KILL_THREAD: "kill the thread",
        TRAP: "send SIGSYS",
        LOG: "allow and log",
        USER_NOTIF: "ask a listener",
        TRACE: "ask a tracer",
    }
    return names.get(action, f"unknown verdict {verdict:#x}")
