"""Class C and A, outputs: floods on every channel are cut, counted and cost the host little; nothing typed is believed."""

from __future__ import annotations

import resource
import time

import pytest
from arena import assert_answers

from ringfence import RingfenceError, TimeoutExceededError

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


@pytest.mark.parametrize("where", ["stdout", "stderr", "both"])
def test_a_flood_is_cut_and_counted_and_the_host_stays_small(make, neighbour, where):
    box = make(output="256KiB")
    tail = {"stdout": "", "stderr": " >&2", "both": " | tee /dev/stderr"}[where]
    before = resident()
    with pytest.raises(TimeoutExceededError) as caught:
        box.commands.run(f"yes ringfence{tail}", timeout=2)
    partial = caught.value.partial
    assert resident() - before < 64 * MIB
    assert partial.truncated
    for text, total in ((partial.stdout, partial.stdout_total), (partial.stderr, partial.stderr_total)):
        assert len(text) <= 256 * 1024
        assert total == 0 or total > 2 * MIB
    assert neighbour.run_code("1 + 1", timeout=2).text == "2"
    assert_answers(box)


def test_a_flood_from_a_cell_is_cut(make, neighbour):
    box = make(output="256KiB")
    before = resident()
    with pytest.raises(TimeoutExceededError) as caught:
        box.run_code("import sys\nwhile True: sys.stdout.write('ringfence' * 1000)", timeout=2)
    assert sum(map(len, caught.value.partial.logs.stdout)) <= 300 * 1024
    assert caught.value.partial.logs.truncated
    assert resident() - before < 64 * MIB
    assert_answers(box)


def test_a_flood_of_results_ends_at_the_limit(make, neighbour):
    box = make(result="1MiB", memory="256MiB")
    before = resident()
    try:
        execution = box.run_code("for _ in range(3000): display('x' * 100_000)", timeout=15)
        assert sum(len(result.text or "") for result in execution.results) <= 2 * MIB
    except RingfenceError:
        pass
    assert resident() - before < 96 * MIB
    try:
        box.run_code("'y' * 50_000_000", timeout=15)
    except RingfenceError:
        pass
    assert resident() - before < 160 * MIB
    assert_answers(box)


def test_raw_bytes_on_every_descriptor_of_a_kernel_end_nothing_else(make, neighbour):
    box = make()
    code = "import os\nfor number in map(int, os.listdir('/proc/self/fd')):\n  try:\n    if number > 2: os.set_blocking(number, False); [os.write(number, os.urandom(4096)) for _ in range(200)]\n  except OSError: pass"
    try:
        box.run_code(code, timeout=3)
    except TimeoutExceededError:
        pass
    assert_answers(box)


@pytest.mark.parametrize(
    ("script", "exit_code", "number"),
    [("exit 124", 124, None), ("exit 137", 137, None), ("kill -TERM $$", 143, 15), ("kill -KILL $$", 137, 9), ("kill -SEGV $$", 139, 11), ("exit 255", 255, None)],
)
def test_an_end_is_reported_as_what_it_was(box, script, exit_code, number):
    result = box.commands.run(script, timeout=20)
    assert (result.exit_code, result.signal) == (exit_code, number)


@pytest.mark.parametrize("program", ["sleep 30", "exec 0<&-; sleep 30", "true"])
def test_input_that_nobody_reads_does_not_hang(make, program):
    box = make()
    started = time.monotonic()
    try:
        box.commands.run(program, stdin=b"x" * (32 * MIB), timeout=2)
    except RingfenceError:
        pass
    assert time.monotonic() - started < 8
    assert_answers(box)


def test_control_characters_and_bad_bytes_arrive_as_they_are(box):
    raw = bytes(range(256)) * 4
    result = box.commands.run(["python3", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4)"])
    assert result.stdout_bytes == raw and result.stdout_total == len(raw)
    assert result.stdout == raw.decode("utf-8", "replace")


def test_output_held_open_by_a_daemon_does_not_delay_the_end(box):
    started = time.monotonic()
    result = box.commands.run("setsid sleep 20 & echo over")
    assert result.stdout == "over\n" and time.monotonic() - started < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
