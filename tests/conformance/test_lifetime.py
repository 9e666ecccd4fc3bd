"""The laws of endings: whatever happens to the owner, the launcher or a zygote, nothing is left after two seconds.

Guards against leftovers, the way people meet them: a crash, a kill, a forked worker that lives on. Owners are other
processes (`leftovers.Owner`); what they had on the machine is recorded from outside while they live.
"""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
from leftovers import LAW_SECONDS, Owner, Traces, groups_of, launcher_pid, run_owner, start_time, zygote_pids

from ringfence import NotFoundError, Sandbox, SandboxDeadError

_BUSY = """
sandbox = Sandbox()
sandbox.run_code("x = 1")
sandbox.files.write("/tmp/f", b"x" * 1_000_000)
handle = sandbox.commands.run("trap '' TERM INT HUP; (setsid sleep 600 &); while :; do sleep 1; done", background=True)
ready()
"""

_ENDS = {
    "falls off its end": "",
    "sys.exit": "sys.exit(3)",
    "an exception": "raise RuntimeError('crash')",
    "os._exit": "os._exit(4)",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "abort": "os.abort()",
    "exec": "os.execv('/bin/true', ['true'])",
    "SIGTERM to itself": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
}


@pytest.mark.parametrize("end", _ENDS)
def test_an_owner_that_ends_leaves_nothing(end):
    with Owner(_BUSY + "sys.stdin.readline()\n" + _ENDS[end]) as owner:
        traces = owner.traces()
        owner.go_on()
        owner.process.wait(20)
        traces.gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_owner_that_is_killed_leaves_nothing(number):
    with Owner(_BUSY + "time.sleep(60)") as owner:
        traces = owner.traces()
        owner.kill(number)
        owner.process.wait(20)
        traces.gone()


def test_an_owner_that_is_killed_while_it_starts_sandboxes_leaves_nothing():
    with Owner(
        "ready(); Sandbox('plain'); ready()\n"
        "def start():\n    while True:\n        Sandbox('plain')\n"
        "threading.Thread(target=start, daemon=True).start()\ntime.sleep(60)"
    ) as owner:
        owner.line()
        traces = owner.traces()
        time.sleep(0.3)
        traces = Traces.of(traces.launcher)
        owner.kill()
        owner.process.wait(20)
        traces.gone()


_WORKERS = {
    "os.fork": "worker = os.fork()\nif worker == 0:\n    time.sleep(60)\n    os._exit(0)",
    # Neither hooks nor close-on-exec: the worker holds a copy of every socket of its parent.
    "a fork without hooks": (
        "import ctypes\nworker = ctypes.PyDLL(None).fork()\nif worker == 0:\n    ctypes.PyDLL(None).sleep(60)\n    os._exit(0)"
    ),
    "multiprocessing": (
        "import multiprocessing\nprocess = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "process.start()\nworker = process.pid"
    ),
}


@pytest.mark.parametrize("kind", _WORKERS)
@pytest.mark.parametrize("end", ["SIGKILL", "os._exit"])
def test_nothing_is_left_when_a_forked_worker_of_the_owner_lives_on(kind, end):
    code = _BUSY.replace("ready()", "") + _WORKERS[kind] + "\nready(worker=worker)\nsys.stdin.readline()\nos._exit(0)"
    with Owner(code) as owner:
        told = owner.line()
        traces = Traces.of(told["launcher"])
        try:
            if end == "SIGKILL":
                owner.kill()
            else:
                owner.go_on()
            owner.process.wait(20)
            assert start_time(told["worker"]) is not None, "the worker was to live on"
            traces.gone()
            assert start_time(told["worker"]) is not None
        finally:
            os.kill(told["worker"], signal.SIGKILL)


def test_a_forked_worker_that_ends_leaves_its_parents_sandbox_alone():
    run_owner("""
sandbox = Sandbox()
sandbox.run_code("x = 7")
for end in (lambda: os._exit(0), lambda: sys.exit(0), lambda: os.kill(os.getpid(), 9)):
    pid = os.fork()
    if pid == 0:
        end()
    os.waitpid(pid, 0)
    assert sandbox.run_code("x").text == "7"
""")


def test_a_killed_launcher_takes_every_process_with_it_and_the_next_sandbox_starts():
    with Owner("""
sandbox = Sandbox()
handle = sandbox.commands.run("sleep 600", background=True)
ready()
sys.stdin.readline()
try:
    handle.wait()
except SandboxDeadError as error:
    assert not sandbox.is_running()
else:
    raise AssertionError("the death was not told")
with Sandbox() as second:
    assert second.run_code("1 + 1").text == "2"
""") as owner:
        traces = owner.traces()
        os.kill(traces.launcher, signal.SIGKILL)
        deadline = time.monotonic() + LAW_SECONDS
        while left := [pid for pid, begun in traces.processes.items() if start_time(pid) == begun]:
            assert time.monotonic() < deadline, f"processes are left: {left}"
            time.sleep(0.02)
        owner.go_on()
        owner.finish()
    # Control groups outlive a launcher that had no time: the next one, or `ringfence sweep`, removes them.
    from ringfence.node.sweep import sweep

    sweep()
    assert groups_of(traces.launcher) == []


def test_a_sweep_finds_leftovers_of_other_lives_and_spares_the_living():
    with Owner(_BUSY + "time.sleep(60)") as owner:
        traces = owner.traces()
        os.kill(traces.launcher, signal.SIGKILL)
        owner.kill()
        owner.process.wait(20)
    from ringfence.node.sweep import sweep

    with Sandbox("plain") as sandbox:
        if groups_of(traces.launcher):  # unless another node's launcher was faster
            sweep()
        assert groups_of(traces.launcher) == [] and sandbox.commands.run("echo alive").stdout == "alive\n"
        assert sweep(dry_run=True).groups == []


def test_a_killed_zygote_ends_its_sandboxes_and_the_next_one_starts():
    sandbox, launcher = Sandbox("plain"), launcher_pid()
    traces = Traces.of(launcher)
    zygotes = zygote_pids()
    for pid in zygotes:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxDeadError):
        sandbox.commands.run("sleep 20")
    with Sandbox("plain") as second:
        assert second.commands.run("echo there").stdout == "there\n"
        assert launcher_pid() == launcher
    for pid in zygotes:
        assert start_time(pid) != traces.processes[pid]


def test_a_killed_first_process_ends_the_sandbox_alone():
    first, second = Sandbox("plain"), Sandbox("plain")
    pid = next(pid for pid in _agents() if f"{pid}" in _pids_of(first))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxDeadError) as caught:
        first.commands.run("sleep 20")
    assert caught.value.reason == "crashed"
    assert second.commands.run("echo there").stdout == "there\n"
    second.kill()


def _agents():
    table = Traces.of(launcher_pid()).processes
    return [pid for pid in table if pid not in zygote_pids()]


def _pids_of(sandbox):
    """Host pids of a sandbox's processes: those in its pid namespace, found by a marked command."""
    handle = sandbox.commands.run("sleep 97531", background=True)
    found = set()
    for pid in Traces.of(launcher_pid()).processes:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line:
                if b"97531" in line.read():
                    found.add(os.stat(f"/proc/{pid}/ns/pid").st_ino if os.geteuid() == 0 else _parent(pid))
        except OSError:
            continue
    handle.kill()
    if os.geteuid() == 0:
        return {str(pid) for pid in Traces.of(launcher_pid()).processes if _namespace(pid) in found}
    return {str(pid) for pid in found}


def _namespace(pid):
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


def _parent(pid):
    from leftovers import parents

    return parents()[pid]


# -- the ordinary ways


def test_kill_returns_when_the_last_process_is_gone():
    sandbox = Sandbox()
    sandbox.run_code("x = 1")
    before = Traces.of(launcher_pid())
    others = Sandbox.list()
    sandbox.commands.run("(setsid sleep 600 &); trap '' TERM; true")
    during = Traces.of(launcher_pid())
    sandbox.kill()
    gone = [pid for pid, begun in during.processes.items() if start_time(pid) == begun]
    assert len(gone) <= len(before.processes) and len(Sandbox.list()) == len(others) - 1
    new = set(during.processes) - set(before.processes)
    assert not [pid for pid in new if start_time(pid) is not None]


def test_leaving_a_with_block_kills_also_when_its_body_raises():
    with pytest.raises(RuntimeError, match="body"), Sandbox("plain") as sandbox:
        raise RuntimeError("body")
    assert not sandbox.is_running()
    with Sandbox("plain") as second:
        second.kill()
    assert not second.is_running()


def test_a_sandbox_whose_object_is_gone_is_found_and_killed_by_its_id():
    sandbox = Sandbox("plain", metadata={"law": "dropped"})
    identifier = sandbox.id
    del sandbox
    gc.collect()
    assert identifier in [info.id for info in Sandbox.list()]
    again = Sandbox.connect(identifier)
    assert again.commands.run("echo found").stdout == "found\n" and again.info().metadata == {"law": "dropped"}
    again.kill()
    assert identifier not in [info.id for info in Sandbox.list()]
    with pytest.raises(NotFoundError):
        Sandbox.connect(identifier)


def test_sandboxes_in_a_reference_cycle_leave_nothing_when_the_owner_ends():
    with Owner("class Holder: pass\nholder = Holder()\nholder.me = holder\nholder.sandbox = Sandbox()\ndel holder\n"
               "import gc; gc.collect()\nready()\nsys.stdin.readline()") as owner:  # fmt: skip
        traces = owner.traces()
        owner.go_on()
        owner.process.wait(20)
        traces.gone()


def test_ctrl_c_during_a_cell_is_a_keyboard_interrupt_and_the_session_goes_on():
    out = run_owner("""
sandbox = Sandbox()
sandbox.run_code("kept = 5")
threading.Timer(0.7, os.kill, [os.getpid(), signal.SIGINT]).start()
begun = time.monotonic()
try:
    sandbox.run_code("import time\\ntime.sleep(25)")
except KeyboardInterrupt:
    print("interrupted")
assert time.monotonic() - begun < 15
assert sandbox.run_code("kept").text == "5"
threading.Timer(0.7, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    sandbox.commands.run("sleep 25")
except KeyboardInterrupt:
    print("interrupted")
assert sandbox.commands.run("echo on").stdout == "on\\n"
sandbox.kill()
""")
    assert out == "interrupted\ninterrupted\n"


def test_ctrl_c_on_a_terminal_reaches_the_owner_and_not_the_launcher():
    code = """
sandbox = Sandbox()
ready()
try:
    sandbox.commands.run("sleep 25")
except KeyboardInterrupt:
    assert sandbox.commands.run("echo on").stdout == "on\\n"
    print("on")
"""
    with Owner(code, group=True) as owner:
        traces = owner.traces()
        time.sleep(0.5)
        os.killpg(owner.process.pid, signal.SIGINT)
        assert owner.finish() == "on\n"
        traces.gone()


def test_ctrl_c_while_a_sandbox_starts_leaves_none_half_started():
    with Owner("""
Sandbox("plain").kill()
ready()
count = 0
while count < 6:
    try:
        threading.Timer(0.001 * (1 + 3 * count), os.kill, [os.getpid(), signal.SIGINT]).start()
        Sandbox("plain")
        time.sleep(1)
    except KeyboardInterrupt:
        count += 1
for info in Sandbox.list():
    try:
        Sandbox.connect(info.id).kill()
    except NotFoundError:
        pass  # it was just ending
time.sleep(0.3)
ready()
sys.stdin.readline()
""") as owner:
        from leftovers import descendants

        launcher = owner.line()["launcher"]
        owner.line()
        table = Traces.of(launcher)
        agents = [pid for pid in table.processes if pid != launcher and _parent(pid) != launcher]
        assert agents == [], f"half-started sandboxes: {agents} of {descendants(launcher)}"
        owner.go_on()
        owner.finish()


# -- odd owners

_ODD = {
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "every signal blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "a umask of 777": "os.umask(0o777)",
    "a working directory that is gone": "import tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "no standard descriptors": "out = os.dup(1); os.closerange(0, 3)",
    "an empty environment": "os.environ.clear()",
    "poisoned Python variables": "os.environ.update(PYTHONHOME='/nowhere', PYTHONPATH='/nowhere', PYTHONSTARTUP='/nowhere', LD_PRELOAD='')",
    "a low priority": "os.nice(5)",
    "many open files": "import resource; files = [open('/dev/null') for _ in range(900)]",
    "its own child subreaper": "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)",
}  # fmt: skip


@pytest.mark.parametrize("oddity", _ODD)
def test_an_odd_owner_uses_sandboxes_all_the_same_and_leaves_nothing(oddity):
    code = (
        "out = 1\n" + _ODD[oddity] + "\nsandbox = Sandbox()\nassert sandbox.run_code('1 + 1').text == '2'\n"
        "assert sandbox.commands.run('echo x; exit 3').exit_code == 3\n"
        "assert sandbox.files.write('f', 'y').size == 1\n"
        "os.write(out, json.dumps({'launcher': Node.current().launcher().pid}).encode() + b'\\n')\n"
        "time.sleep(1)\nsandbox.kill()\nos._exit(0)"
    )
    with Owner(code) as owner:
        traces = owner.traces(least=1)
        owner.finish()
        traces.gone()


def test_an_owner_that_ends_while_a_daemon_thread_waits_for_a_sandbox_ends_at_once():
    with Owner("""
sandbox = Sandbox()
threading.Thread(target=sandbox.commands.run, args=("sleep 60",), daemon=True).start()
threading.Thread(target=sandbox.run_code, args=("import time; time.sleep(60)",), daemon=True).start()
time.sleep(0.3)
ready()
sys.stdin.readline()
""") as owner:
        traces = owner.traces()
        owner.go_on()
        owner.finish(20)
        traces.gone()


def test_a_closed_node_leaves_nothing_and_the_next_sandbox_gets_a_new_one():
    with Owner("""
sandbox = Sandbox()
ready()
sys.stdin.readline()
Node.current().close()
try:
    sandbox.run_code("1")
except SandboxDeadError:
    pass
else:
    raise AssertionError("it answered")
ready()
sys.stdin.readline()
assert Sandbox().run_code("1 + 1").text == "2"
""") as owner:
        traces = owner.traces()
        owner.go_on()
        assert owner.line()["launcher"] != traces.launcher
        traces.gone()
        owner.go_on()
        owner.finish()


def test_an_owner_that_ends_at_once_after_starting_leaves_nothing():
    """Killed at many moments of its start, as far as a test can choose them."""
    launchers = []
    for step in range(6):
        with Owner("print(json.dumps({'launcher': Node.current().launcher().pid}), flush=True)\nSandbox('plain')") as owner:
            launcher = owner.line()["launcher"]
            time.sleep(0.04 * step)
            traces = Traces.of(launcher)
            owner.kill()
            owner.process.wait(20)
            traces.gone()
            launchers.append(launcher)
    assert not [launcher for launcher in launchers if groups_of(launcher)]
