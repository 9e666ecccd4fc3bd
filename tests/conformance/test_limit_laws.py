"""The laws of limits: each one holds, says which it was, and leaves the sandbox usable where that is possible.

Guards the section "Limits" of the specification. What holds a limit differs with the identity (a control group, or a
watch over the processes), so tests ask `info().enforcement` first and expect what it promises.
"""

from __future__ import annotations

import threading
import time

import pytest

from ringfence import (
    EnforcementError,
    InvalidArgumentError,
    LimitExceededError,
    NotEnoughSpaceError,
    PolicyError,
    RingfenceError,
    Sandbox,
    SandboxDeadError,
)

MIB = 1 << 20


def _until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def end_of(sandbox, seconds=20):
    """Wait until a sandbox ends by itself; returns the error that says why."""
    _until(lambda: not sandbox.is_running(), seconds)
    with pytest.raises(SandboxDeadError) as caught:
        sandbox.commands.run("true")
    return caught.value


def test_the_defaults_are_those_of_the_design(sandbox):
    limits = sandbox.info().limits
    assert (limits.timeout, limits.memory, limits.cpus, limits.pids) == (30, 512 * MIB, 1, 100)
    assert (limits.disk, limits.tmp, limits.output, limits.result) == (200 * MIB, 100 * MIB, MIB, 32 * MIB)
    assert (limits.file_size, limits.open_files, limits.idle, limits.max_age) == (100 * MIB, 1024, 600, 3600)


# -- memory

# The control group gets memory + disk + tmp, since tmpfs is charged to it: small ones make the memory limit sharp.
_TIGHT = {"disk": "4MiB", "tmp": "1MiB"}
_EAT = "hoard = bytearray(b'x') * (300 << 20)\nlen(hoard)"


def test_a_cell_that_eats_memory_is_stopped_and_the_limit_is_named(make, strength):
    sandbox = make(memory="128MiB", **_TIGHT)
    error = sandbox.run_code(_EAT).error
    assert error is not None
    if strength["limit memory"] == "hard":
        assert error.name == "MemoryLimitExceededError" and "limits.memory of 128 MiB" in error.value
    else:
        assert error.name in ("MemoryError", "MemoryLimitExceededError")
    assert sandbox.run_code("1 + 1").text == "2"


def test_a_command_that_eats_memory_is_stopped_and_the_limit_is_named(make, strength):
    sandbox = make("plain", memory="128MiB", **_TIGHT)
    result = sandbox.commands.run(["python3", "-c", _EAT])
    assert not result.ok
    if strength["limit memory"] == "hard":
        assert result.oom and result.error == "killed: limits.memory of 128 MiB was reached"
    else:
        assert "MemoryError" in result.stderr or result.oom
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_many_processes_together_do_not_pass_the_memory_limit(make, strength):
    sandbox = make("plain", memory="128MiB", **_TIGHT)
    handle = sandbox.commands.run(
        "for i in 1 2 3 4 5 6; do python3 -c \"import time; x = bytearray(b'x') * (50 << 20); time.sleep(20)\" & done; wait",
        background=True,
    )
    if strength["limit memory"] == "hard":
        _until(lambda: sandbox.stats()["oom_kills"])
        assert sandbox.stats()["memory"] <= (128 + 5) * MIB
        handle.kill()
        assert sandbox.commands.run("echo alive").stdout == "alive\n"
    else:
        error = end_of(sandbox)
        assert error.reason == "oom" and "memory limit of 128 MiB" in str(error)


def test_a_sandbox_that_ran_out_of_memory_says_so_when_it_is_gone(make, strength):
    if strength["limit memory"] == "hard":
        pytest.skip("the kernel ends one process here, not the sandbox; the tests above say how that is told")
    sandbox = make(memory="64MiB", **_TIGHT)
    with pytest.raises(SandboxDeadError) as caught:
        sandbox.run_code(
            "import os, time\nfor number in range(4):\n    if os.fork() == 0:\n"
            "        hoard = bytearray(b'x') * (40 << 20)\n        time.sleep(20)\ntime.sleep(20)"
        )
    assert caught.value.reason == "oom"


# -- processes, processors

_FORK = """
import os, time
children = 0
try:
    while children < 400:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    pass
print(children, flush=True)
time.sleep(60)
"""


def test_processes_are_bounded_and_the_limit_is_told(make):
    sandbox = make("plain", pids=30)
    handle = sandbox.commands.run(["python3", "-c", _FORK], background=True)
    _until(lambda: handle.stdout.endswith("\n"))
    assert 10 <= int(handle.stdout) <= 30
    with pytest.raises(LimitExceededError, match="limit of processes"):
        sandbox.commands.run("true")
    handle.kill()
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_threads_count_as_processes(make):
    sandbox = make("plain", pids=30)
    code = (
        "import threading, time\nstarted = 0\ntry:\n    while started < 400:\n"
        "        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n        started += 1\n"
        "except RuntimeError:\n    pass\nprint(started, flush=True)\nimport os\nos._exit(0)"
    )
    assert int(sandbox.commands.run(["python3", "-c", code]).stdout) <= 30


def test_a_fork_bomb_leaves_the_sandbox_usable(make):
    sandbox = make("plain", pids=40)
    with pytest.raises(RingfenceError):
        sandbox.commands.run("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=1.5)
    deadline = time.monotonic() + 20
    while True:
        try:
            if sandbox.commands.run(["echo", "alive"]).stdout == "alive\n":
                break
        except SandboxDeadError:
            raise
        except RingfenceError:
            pass  # the last of them are just ending
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processor_time_is_bounded(make, strength):
    if strength["limit cpus"] != "hard":
        pytest.skip("no cpu controller for this user, and `info()` says so")
    sandbox = make("plain", cpus=0.2)
    result = sandbox.commands.run(["timeout", "2", "bash", "-c", "while :; do :; done & while :; do :; done"])
    assert result.cpu_seconds is None or result.cpu_seconds < 0.2 * result.duration + 0.5


# -- disk

_FILL = (
    "import sys\ntotal = 0\ntry:\n    with open(sys.argv[1], 'wb', 0) as file:\n        while True:\n"
    "            total += file.write(b'x' * 65536)\nexcept OSError as error:\n    print(total, error.errno)"
)


@pytest.mark.parametrize(("path", "limit"), [("/home/user/f", 16), ("/tmp/f", 8), ("/dev/shm/f", 8)])
def test_disk_and_tmp_are_full_at_their_limit(make, path, limit):
    sandbox = make("plain", disk="16MiB", tmp="8MiB")
    total, number = map(int, sandbox.commands.run(["python3", "-c", _FILL, path]).stdout.split())
    assert 0 < total <= limit * MIB and number == 28  # ENOSPC
    sandbox.files.remove(path)
    sandbox.files.write(path, "room again")


def test_an_upload_beyond_the_disk_is_not_enough_space_and_leaves_nothing(make):
    sandbox = make("plain", disk="8MiB")
    with pytest.raises(NotEnoughSpaceError):
        sandbox.files.write("big", b"x" * (10 * MIB))
    assert sandbox.files.list() == []
    sandbox.files.write("small", "fits")


def test_empty_files_cannot_eat_the_host(make):
    sandbox = make("plain", disk="4MiB")
    code = "n = 0\ntry:\n    while n < 200_000:\n        open(f'/home/user/{n}', 'w').close(); n += 1\nexcept OSError:\n    pass\nprint(n)"
    assert int(sandbox.commands.run(["python3", "-c", code]).stdout) < 5000


def test_a_single_file_is_bounded(make):
    sandbox = make("plain", file_size="1MiB")
    total, number = map(int, sandbox.commands.run(["python3", "-c", _FILL, "/home/user/f"]).stdout.split())
    assert total <= MIB and number == 27  # EFBIG
    with pytest.raises(RingfenceError):
        sandbox.files.write("g", b"x" * (2 * MIB))
    assert not sandbox.files.exists("g")


def test_open_files_are_bounded(make):
    sandbox = make("plain", open_files=64)
    code = "import os\nn = 0\ntry:\n    while n < 5000:\n        os.open('/', os.O_RDONLY); n += 1\nexcept OSError as error:\n    print(n, error.errno)"
    count, number = map(int, sandbox.commands.run(["python3", "-c", code]).stdout.split())
    assert count <= 64 and number == 24  # EMFILE


@pytest.mark.parametrize("name", ["NOFILE", "NPROC", "FSIZE", "CORE"])
def test_limits_cannot_be_raised_from_inside(sandbox, name):
    code = (
        f"import resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_{name})\n"
        f"try:\n    resource.setrlimit(resource.RLIMIT_{name}, (hard + 1, hard + 1))\n    print('raised')\n"
        "except (ValueError, OSError):\n    print('refused', hard)"
    )
    assert sandbox.commands.run(["python3", "-c", code]).stdout.startswith("refused")


# -- time


def test_an_idle_sandbox_ends_and_says_so(make):
    error = end_of(make("plain", idle=0.5))
    assert error.reason == "idle" and "limits.idle" in str(error)


def test_a_sandbox_that_works_is_not_idle(make):
    sandbox = make("plain", idle=0.7)
    assert sandbox.commands.run("sleep 2.5; echo worked").stdout == "worked\n"
    handle = sandbox.commands.run("sleep 2.5; echo again", background=True)
    assert handle.wait().stdout == "again\n"


def test_a_sandbox_ends_at_its_maximum_age_whatever_it_does(make):
    sandbox = make("plain", max_age=1.5, limits={"timeout": 1})
    handle = sandbox.commands.run("while :; do echo x; sleep 0.1; done", background=True)
    with pytest.raises(SandboxDeadError) as caught:
        handle.wait()
    assert caught.value.reason == "max_age" and "max_age" in str(caught.value)
    assert end_of(sandbox).reason == "max_age"


def test_a_timeout_of_the_sandbox_ends_it(make):
    assert end_of(make("plain", timeout=0.8)).reason == "max_age"


def test_the_owner_can_move_the_end_but_not_beyond_the_maximum_age(make):
    sandbox = make("plain", timeout=1, max_age=20, limits={"timeout": 1})
    sandbox.set_timeout(15)
    assert sandbox.info().expires_at.timestamp() - time.time() > 10
    time.sleep(1.3)
    assert sandbox.is_running()
    with pytest.raises(InvalidArgumentError, match="maximum age"):
        sandbox.set_timeout(21)
    sandbox.set_timeout(0.2)
    assert end_of(sandbox).reason == "max_age"


def test_a_sandbox_cannot_extend_its_own_life(make):
    """The clock, the limits and the first process are the host's."""
    sandbox = make("plain", max_age=3, limits={"timeout": 2})
    result = sandbox.commands.run(
        "date -s '2001-01-01' && echo clock; kill -KILL 1 && test ! -d /proc/1 && echo killed; "
        "for i in 1 2 3; do (setsid sleep 60 &); done; echo done"
    )
    assert result.stdout == "done\n" or result.stdout.endswith("done\n") and "clock" not in result.stdout
    assert end_of(sandbox).reason == "max_age"


def test_a_timeout_longer_than_the_maximum_age_is_refused():
    with pytest.raises((InvalidArgumentError, PolicyError), match="max_age"):
        Sandbox("plain", timeout=7200)


# -- what cannot be held is refused


@pytest.mark.parametrize(
    ("policy", "primitive"),
    [
        ({"network": {"allow": ["example.org:443"]}}, "network gateway"),
        ({"commands": {"rules": [{"prefix": ["git"], "decision": "deny"}]}}, "command rules"),
        ({"isolation": {"at_least": "vm"}}, "isolation level"),
        ({"isolation": {"at_least": "kernel"}}, "isolation level"),
        ({"filesystem": {"read_only": ["/usr/share"]}}, "host directory"),
    ],
)
def test_a_policy_that_cannot_be_held_is_refused_with_the_primitive_and_nothing_starts(policy, primitive):
    from leftovers import descendants, launcher_pid

    before, sandboxes = descendants(launcher_pid()), len(Sandbox.list())
    with pytest.raises(EnforcementError) as caught:
        Sandbox("plain", policy=policy)
    assert caught.value.primitive == primitive and caught.value.hint
    assert descendants(launcher_pid()) <= before and len(Sandbox.list()) == sandboxes


def test_required_hard_limits_are_held_by_the_kernel_or_refused_naming_the_controller(strength):
    from leftovers import descendants, launcher_pid

    soft = [name for name in ("memory", "cpus", "pids") if strength[f"limit {name}"] != "hard"]
    if not soft:
        with Sandbox("plain", limits={"required": "hard"}) as sandbox:
            rows = {row.primitive: row.strength for row in sandbox.info().enforcement}
        assert {rows[f"limit {name}"] for name in ("memory", "cpus", "pids")} == {"hard"}
        return
    Sandbox("plain").kill()
    before, sandboxes = descendants(launcher_pid()), len(Sandbox.list())
    with pytest.raises(EnforcementError) as caught:
        Sandbox("plain", limits={"required": "hard"})
    assert any(name in caught.value.primitive for name in soft) and "cgroup" in caught.value.primitive
    assert caught.value.hint
    deadline = time.monotonic() + 2
    while not descendants(launcher_pid()) <= before:
        assert time.monotonic() < deadline
    assert len(Sandbox.list()) == sandboxes


def test_unknown_limits_and_impossible_values_are_refused():
    for options in ({"limits": {"memmory": 1}}, {"memory": "much"}, {"memory": 1}, {"pids": 0}, {"cpus": -1}, {"colour": 1}):
        with pytest.raises((InvalidArgumentError, PolicyError)):
            Sandbox("plain", **options)


# -- what is in force

_PRIMITIVES = (
    "namespace user", "namespace mnt", "namespace pid", "namespace net", "namespace ipc", "namespace uts",
    "namespace cgroup", "user ids", "capabilities", "no_new_privs", "seccomp", "landlock scopes", "root file system",
    "disk", "tmp", "limit memory", "limit cpus", "limit pids", "limit open_files", "limit file_size", "limit max_age",
)  # fmt: skip


def test_info_lists_every_primitive_with_its_strength_and_what_it_does(sandbox):
    rows = {row.primitive: row for row in sandbox.info().enforcement}
    assert set(_PRIMITIVES) <= set(rows)
    assert all(row.strength in ("hard", "watched", "none") and row.detail for row in rows.values())
    from ringfence.linux import landlock

    weak = {name for name, row in rows.items() if row.strength == "none"}
    single = rows["user ids"].detail.startswith("one id")  # agent and user code share it: no wall between them
    assert (rows["user ids"].strength == "none") == single
    assert weak <= {"limit cpus", *(("landlock scopes",) if landlock.abi() < 6 else ()), *(("user ids",) if single else ())}


def test_memory_is_hard_or_watched_and_processes_always_hard(strength):
    assert strength["limit memory"] in ("hard", "watched") and strength["limit pids"] == "hard"


def test_info_agrees_with_what_the_sandbox_sees_of_itself(sandbox):
    status = dict(
        line.split(":\t", 1) for line in sandbox.commands.run(["cat", "/proc/self/status"]).stdout.splitlines() if ":\t" in line
    )
    assert status["CapEff"].strip("0") == status["CapBnd"].strip("0") == status["CapPrm"].strip("0") == ""
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2" and status["Uid"].split() == ["1000"] * 4


def test_limits_of_one_sandbox_leave_another_alone(make):
    greedy, modest = make("plain", pids=20), make("plain", pids=20)
    handle = greedy.commands.run(["python3", "-c", _FORK], background=True)
    results = []
    _until(lambda: handle.stdout.endswith("\n"))
    thread = threading.Thread(target=lambda: results.append(modest.commands.run("for i in 1 2 3 4 5; do /bin/true & done; wait; echo ok")))
    thread.start()
    thread.join(30)
    handle.kill()
    assert results and results[0].stdout == "ok\n"
