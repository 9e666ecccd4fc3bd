"""A sandbox that runs is resized, measured and paused: what the host's side then says and holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ringfence import EnforcementError, InvalidArgumentError, PolicyError, Sandbox, SandboxPausedError

MIB = 1 << 20
EAT = "import ctypes\nheld = bytearray({0} << 20)\nfor at in range(0, len(held), 4096): held[at] = 1\nprint('held')"
FORK = """
import os, time
made = []
try:
    for _ in range({0}):
        pid = os.fork()
        if pid == 0:
            time.sleep(300); os._exit(0)
        made.append(pid)
except OSError:
    pass
for pid in made:
    os.kill(pid, 9); os.waitpid(pid, 0)
print(len(made))
"""


def strength(sandbox: Sandbox, limit: str) -> str:
    return next(row.strength for row in sandbox.info().enforcement if row.primitive == f"limit {limit}")


def pausable(sandbox: Sandbox) -> None:
    """Skip where nothing can stop a sandbox; that it is refused there by name is a law too."""
    try:
        sandbox.pause()
    except EnforcementError as refusal:
        assert refusal.primitive == "cgroup freezer" and refusal.hint
        assert sandbox.commands.run("echo on").stdout == "on\n"  # nothing changed
        pytest.skip(f"no freezer: {refusal}")
    sandbox.resume()


# Resize --------------------------------------------------------------------------------------------------------


def test_more_memory_is_there_at_once_and_less_is_held(make: Callable[..., Sandbox]) -> None:
    sandbox = make(memory="128MiB", disk="1MiB", tmp="1MiB")
    assert sandbox.run_code(EAT.format(200)).error is not None
    if strength(sandbox, "memory") == "hard":
        info = sandbox.resize(memory="400MiB")
        assert info.limits.memory == 400 * MIB == sandbox.info().limits.memory
        assert sandbox.run_code(EAT.format(200)).error is None
        sandbox.restart_code_context("default")
        patience = time.monotonic() + 60
        while (sandbox.metrics().memory or 0) > 48 * MIB and time.monotonic() < patience:
            time.sleep(0.02)  # the old kernel is still being put away
    info = sandbox.resize(memory="64MiB")
    assert info.limits.memory == 64 * MIB == sandbox.metrics().memory_limit
    assert any(str(64 * MIB) in row.detail for row in info.enforcement if row.primitive == "limit memory")
    ended = sandbox.run_code(EAT.format(100))  # the control: 128 MiB held this
    assert ended.error is not None and "held" not in "".join(ended.logs.stdout)


def test_a_watch_follows_and_what_each_process_may_is_told(make: Callable[..., Sandbox]) -> None:
    sandbox = make(memory="128MiB")
    if strength(sandbox, "memory") == "hard":
        pytest.skip("memory is held by a control group here")
    row = next(row for row in sandbox.resize(memory="256MiB").enforcement if row.primitive == "limit memory")
    assert row.strength == "watched" and str(256 * MIB) in row.detail and "each process at most" in row.detail
    # Two processes that each stay below the old limit and are together above it.
    two = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'b = b\"x\" * (90 << 20); import time; time.sleep(1)'])\nprint('alive')"
    execution = sandbox.run_code("held = b'x' * (90 << 20)\n" + two)
    assert execution.error is None and "alive" in "".join(execution.logs.stdout)


def test_memory_below_what_is_in_use_is_refused_and_nothing_changes(make: Callable[..., Sandbox]) -> None:
    sandbox = make(memory="256MiB")
    assert sandbox.run_code(EAT.format(120)).error is None
    until = time.monotonic() + 60  # where memory is watched, the watch has to see it first
    while (sandbox.metrics().memory or 0) < 120 * MIB and time.monotonic() < until:
        time.sleep(0.02)
    before = sandbox.info()
    with pytest.raises(EnforcementError, match="processes hold") as refusal:
        sandbox.resize(memory="64MiB", pids=40)
    assert refusal.value.primitive == "limit memory" and refusal.value.hint
    after = sandbox.info()
    assert after.limits == before.limits and after.enforcement == before.enforcement
    assert sandbox.run_code("len(held)").text == str(120 * MIB)


def test_fewer_and_more_processes(make: Callable[..., Sandbox]) -> None:
    sandbox = make("plain", pids=60)
    count = lambda: int(sandbox.commands.run(["python3", "-c", FORK.format(80)], check=True).stdout)
    before = count()
    assert 40 < before <= 64
    sandbox.resize(pids=20)
    assert sandbox.info().limits.pids == 20
    assert count() <= 24
    try:
        sandbox.resize(pids=70)
    except EnforcementError as refusal:
        assert "CAP_SYS_RESOURCE" in refusal.message and refusal.hint
        assert sandbox.info().limits.pids == 20 and count() <= 24
    else:
        assert count() > before


def test_processors_follow_or_are_refused_by_name(make: Callable[..., Sandbox]) -> None:
    sandbox = make("plain", cpus=1)
    if strength(sandbox, "cpus") == "none":
        with pytest.raises(EnforcementError) as refusal:
            sandbox.resize(cpus=0.5)
        assert refusal.value.primitive == "limit cpus" and refusal.value.hint
        return
    burn = ["python3", "-c", "import time\nwhile time.process_time() < 0.4: pass"]
    sandbox.commands.run(burn, check=True)
    before = sandbox.stats()["throttled"]
    sandbox.resize(cpus=0.1)
    sandbox.commands.run(burn, check=True)
    assert sandbox.stats()["throttled"] > before and sandbox.info().limits.cpus == 0.1


@pytest.mark.parametrize("asked", [{}, {"memory": "1KiB"}, {"pids": 1}, {"cpus": 0}, {"memory": "1000TiB"}])
def test_what_no_policy_may_ask_for_is_refused(sandbox: Sandbox, asked: dict[str, Any]) -> None:
    with pytest.raises((PolicyError, InvalidArgumentError)):
        sandbox.resize(**asked)


def test_what_this_machine_does_not_have_is_refused(sandbox: Sandbox) -> None:
    before = sandbox.info().limits
    with pytest.raises(EnforcementError, match="this machine lends") as refusal:
        sandbox.resize(memory="1TiB")
    assert refusal.value.primitive == "limit memory" and sandbox.info().limits == before


# Metrics -------------------------------------------------------------------------------------------------------


def test_metrics_count_what_was_done(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    sandbox.run_code("1")
    before = sandbox.metrics()
    sandbox.files.write("/home/user/ten", bytes(10 * MIB))
    sandbox.files.write("/tmp/five", bytes(5 * MIB))
    assert len(sandbox.files.read("/home/user/ten", format="bytes")) == 10 * MIB
    sandbox.run_code("import time\nwhile time.process_time() < 0.5: pass")
    after = sandbox.metrics()
    assert before.disk is not None and after.disk is not None and 10 * MIB <= after.disk - before.disk < 12 * MIB
    assert before.tmp is not None and after.tmp is not None and 5 * MIB <= after.tmp - before.tmp < 6 * MIB
    assert 15 * MIB <= after.bytes_in - before.bytes_in < 16 * MIB
    assert 10 * MIB <= after.bytes_out - before.bytes_out < 11 * MIB
    if strength(sandbox, "cpus") == "none":
        # No control group: what the last look at the processes found, if there was one yet.
        assert after.cpu_seconds is None or after.cpu_seconds > 0
    else:
        assert before.cpu_seconds is not None and after.cpu_seconds is not None
        assert after.cpu_seconds - before.cpu_seconds > 0.2
        assert after.pids and after.pids >= 2
    assert after.uptime > before.uptime
    assert after.memory_peak is not None and after.memory is not None and after.memory_peak >= after.memory > 0
    assert (after.disk_limit, after.memory_limit, after.paused) == (200 * MIB, 512 * MIB, False)
    assert sandbox.get_metrics()[0].disk_used == after.disk


def test_an_execution_is_billed_by_the_host(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    first = sandbox.run_code("1").usage
    if strength(sandbox, "cpus") == "none":
        assert first is None  # no control group, no counter, no guess
        return
    # A grandchild that nobody waits for: the kernel's own account of the cell's process does not have it.
    hidden = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        begun = time.process_time()
        while time.process_time() - begun < 0.5: pass
        open('/tmp/done', 'w').close()
    os._exit(0)
os.wait()
while not os.path.exists('/tmp/done'): time.sleep(0.01)
print(sum(os.times()[:4]))
"""
    execution = sandbox.run_code(hidden)
    assert execution.error is None and execution.usage is not None and execution.usage.cpu_seconds is not None
    assert execution.usage.cpu_seconds >= 0.45 and not execution.usage.shared
    assert first is not None and first.cpu_seconds is not None and first.cpu_seconds < execution.usage.cpu_seconds
    eaten = sandbox.run_code(EAT.format(80)).usage
    assert eaten is not None and eaten.memory_peak is not None and eaten.memory_peak >= 80 * MIB
    assert sandbox.commands.run("head -c 30000000 /dev/zero | sha256sum").usage.cpu_seconds > 0  # type: ignore[union-attr]


def test_an_execution_that_was_not_alone_says_so(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    if sandbox.run_code("1").usage is None:
        pytest.skip("nothing counts here: no control group")
    background = sandbox.commands.run("sleep 300", background=True)
    shared = sandbox.run_code("1").usage
    assert shared is not None and shared.shared
    background.kill()
    alone = sandbox.run_code("1").usage
    assert alone is not None and not alone.shared
    usage = background.wait().usage
    assert usage is not None and usage.shared


# Pause ---------------------------------------------------------------------------------------------------------


def test_a_paused_sandbox_takes_no_processor_time_and_goes_on_where_it_was(make: Callable[..., Sandbox]) -> None:
    sandbox = make("plain")
    pausable(sandbox)
    count = sandbox.commands.run(["python3", "-uc", "n = 0\nwhile True:\n    n += 1\n    if n % 100000 == 0: print(n)"], background=True)
    while not count.stdout_total:
        time.sleep(0.01)
    assert sandbox.pause() and not sandbox.pause()
    assert sandbox.info().state == "paused" and sandbox.metrics().paused
    before, printed = sandbox.metrics().cpu_seconds, count.stdout_total
    time.sleep(0.5)
    assert sandbox.metrics().cpu_seconds == before and count.stdout_total == printed
    assert sandbox.resume() and not sandbox.resume()
    assert sandbox.info().state == "running"
    while count.stdout_total == printed:  # the control: it runs again
        time.sleep(0.01)


def test_time_limits_stand_still_while_paused(make: Callable[..., Sandbox]) -> None:
    sandbox = make(idle=1.0)
    sandbox.run_code("1")
    pausable(sandbox)
    outcomes: list[Any] = []
    script = "import sys, time\nprint('begun', flush=True)\nfor _ in range(10): time.sleep(0.05)\nprint('whole')"

    def cell() -> None:
        outcomes.append("".join(sandbox.run_code(script, timeout=3).logs.stdout))

    command = sandbox.commands.run(["python3", "-c", script], background=True, timeout=3, no_output_timeout=3)
    while not command.stdout_total:
        time.sleep(0.01)
    thread = threading.Thread(target=cell)
    thread.start()
    sandbox.pause()
    time.sleep(4)  # longer than any of the limits, idle included
    sandbox.resume()
    thread.join(60)
    assert outcomes == ["begun\nwhole\n"]
    assert command.wait().stdout == "begun\nwhole\n"
    assert sandbox.is_running()


def test_calls_on_a_paused_sandbox_say_so_at_once(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    pausable(sandbox)
    command = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.pause()
    for call in (
        lambda: sandbox.run_code("1"), lambda: sandbox.commands.run("true"), lambda: sandbox.files.read("/etc/passwd"),
        lambda: command.kill(), lambda: command.send_stdin("x"), lambda: command.send_signal(2),
    ):  # fmt: skip
        with pytest.raises(SandboxPausedError) as refusal:
            call()
        assert "resume" in refusal.value.hint
    sandbox.set_timeout(600)
    sandbox.resume()
    command.send_stdin("alive")
    command.close_stdin()
    assert command.wait().stdout == "alive"


def test_limits_change_while_it_is_paused_and_it_stays_paused(make: Callable[..., Sandbox]) -> None:
    sandbox = make()
    pausable(sandbox)
    sandbox.pause()
    assert sandbox.resize(memory="300MiB", pids=50).state == "paused"
    with pytest.raises(SandboxPausedError):
        sandbox.run_code("1")
    sandbox.resume()
    assert sandbox.run_code("1").text == "1"


def test_a_paused_sandbox_dies_at_once_and_runs_nothing_more(make: Callable[..., Sandbox]) -> None:
    sandbox = make("plain")
    pausable(sandbox)
    sandbox.commands.run(["python3", "-c", "while True: pass"], background=True)
    sandbox.pause()
    assert sandbox.kill() and not sandbox.is_running()


def test_a_paused_sandbox_still_ends_at_its_maximum_age(make: Callable[..., Sandbox]) -> None:
    sandbox = make("plain", max_age=3)
    pausable(sandbox)
    sandbox.pause()
    until = time.monotonic() + 60
    while sandbox.is_running() and time.monotonic() < until:
        time.sleep(0.02)
    assert not sandbox.is_running()
