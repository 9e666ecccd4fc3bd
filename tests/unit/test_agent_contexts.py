"""Laws of code contexts in the guest agent, with a small stand-in for the kernel that speaks its contract."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from agent_client import STDERR, AgentProcess, can_isolate, fake_kernel, results_of

NO_ISOLATION = can_isolate()
pytestmark = pytest.mark.skipif(bool(NO_ISOLATION), reason=NO_ISOLATION)
MODES = ["single", pytest.param("many", marks=pytest.mark.skipif(os.geteuid() != 0, reason="many ids need root here"))]


@pytest.fixture(params=MODES)
def host(request):
    with AgentProcess(single=request.param == "single", kernel=fake_kernel) as client:
        yield client


def execute(host, code, context="default", **more):
    channel = host.open("kernel.execute", context=context, code=code, **more)
    host.wait(channel)
    return channel


def pause(host, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        host.step(0.02)


def test_results_output_and_count_belong_to_the_execution(host):
    run = execute(host, "import sys; print('out'); print('err', file=sys.stderr); result('42')")
    assert (run.result["status"], run.result["execution_count"], run.result["restarted"]) == ("ok", 1, False)
    assert run.text() == b"out\n" and run.text(STDERR) == b"err\n" and run.event("started")
    [(kind, payload)] = results_of(run)
    assert kind == 1 and json.loads(payload)["data"]["text/plain"] == "42"
    assert execute(host, "x = 1").result["execution_count"] == 2


def test_state_stays_between_executions_and_contexts_are_apart(host):
    assert host.call("kernel.create", context="a", cwd="/tmp", env={"A": "1"})["ok"]
    assert host.call("kernel.create", context="b")["ok"]
    execute(host, "x = 5", "a")
    assert execute(host, "print(x)", "a").text() == b"5\n"
    assert execute(host, "print(x)", "b").result["status"] == "error"
    assert execute(host, "import os; print(os.getcwd(), os.environ['A'], config['context'])", "a").text() == b"/tmp 1 a\n"
    listed = {item["context"]: item for item in host.call("kernel.list")["contexts"]}
    assert set(listed) == {"a", "b"} and listed["a"]["alive"] and listed["a"]["execution_count"] == 3
    assert host.call("kernel.create", context="a")["error"]["code"] == "exists"
    assert host.call("kernel.execute", context="none", code="1")["error"]["code"] == "not_found"
    assert host.call("kernel.create", context="c", language="cobol")["error"]["code"] == "invalid"


def test_a_kernel_is_the_user_without_capabilities_or_descriptors(host):
    run = execute(host, """
import os
print(os.getresuid(), os.getresgid(), os.getsid(0) == os.getpid())
print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapInh', 'CapPrm', 'CapEff', 'CapAmb'))])
print(sorted(int(n) for n in os.listdir('/proc/self/fd') if int(n) not in (0, 1, 2, control.fileno()))[1:])
print(open('/proc/self/oom_score_adj').read())
import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), __import__('gc').isenabled())
""")  # fmt: skip
    assert run.text().decode().split("\n") == [
        "(1000, 1000, 1000) (1000, 1000, 1000) True", str(["0" * 16] * 4), "[]", "500", "", "set() True", "",
    ]  # fmt: skip


def test_executions_of_a_context_run_one_after_another(host):
    channels = [host.open("kernel.execute", context="default", code=f"import time; time.sleep(0.02); print({n})") for n in range(10)]
    host.wait(*channels)
    assert [item.text() for item in channels] == [f"{n}\n".encode() for n in range(10)]
    assert [item.result["execution_count"] for item in channels] == list(range(1, 11))


def test_contexts_run_at_the_same_time(host):
    for name in "ab":
        host.call("kernel.create", context=name)
    slow = host.open("kernel.execute", context="a", code="import time; time.sleep(60)")
    host.until(lambda: slow.event("started"))
    assert execute(host, "print(1)", "b").text() == b"1\n"


def test_large_results_and_output_pass_whole(host):
    run = execute(host, "result('y' * 5_000_000)\nprint('x' * 3_000_000)")
    [(_, payload)] = results_of(run)
    assert len(json.loads(payload)["data"]["text/plain"]) == 5_000_000
    assert len(run.text()) == 3_000_001


def test_a_forged_result_or_end_is_dropped(host):
    run = execute(host, """
old = token
message(1, bytes(16), {"data": "forged"})
message(3, bytes(16), {"status": "ok", "execution_count": 99})
message(9, token, b"?")
message(1, bytes(16), b"z" * 200_000)
import time; time.sleep(0.1); print('end')
""")  # fmt: skip
    assert run.text() == b"end\n" and results_of(run) == [] and run.result["execution_count"] == 1
    run = execute(host, "message(1, old, {'data': 'late'}); message(3, old, {'status': 'ok', 'execution_count': 9}); print('still')")
    assert run.text() == b"still\n" and results_of(run) == [] and run.result["execution_count"] == 2


def test_nonsense_on_the_control_channel_ends_one_kernel_only(host):
    channel = host.open("kernel.execute", context="default", code="control.sendall(b'\\xff' * 100000); import os, time; os.close(control.fileno()); time.sleep(60)")
    result = host.wait(channel)
    assert result["status"] == "died" and result["exit"]["signal"] == signal.SIGKILL
    run = execute(host, "print('fresh')")
    assert run.text() == b"fresh\n" and run.result["restarted"] is True


def test_output_between_executions_is_counted_not_delivered(host):
    execute(host, "import threading, time, os\nthreading.Timer(0.1, lambda: os.write(1, b'late')).start()")
    pause(host, 0.3)
    run = execute(host, "print('mine')")
    assert run.text() == b"mine\n" and run.result["late_bytes"] == 4
    assert execute(host, "1").result["late_bytes"] == 0


def test_an_interrupt_leaves_the_state(host):
    execute(host, "x = 7")
    channel = host.open("kernel.execute", context="default", code="print('in', flush=True)\nwhile True: pass")
    host.until(lambda: b"in" in channel.text())
    host.mux.send_event(channel.number, {"interrupt": True})
    assert host.wait(channel)["status"] == "interrupted"
    assert execute(host, "print(x)").text() == b"7\n"


def test_an_interrupt_reaches_what_the_kernel_waits_for(host):
    channel = host.open("kernel.execute", context="default", code="import subprocess; print('in', flush=True); print(subprocess.call(['sleep', '60']))")
    host.until(lambda: b"in" in channel.text())
    pause(host, 0.1)
    assert host.call("kernel.interrupt", context="default")["interrupted"]
    assert host.wait(channel)["status"] in ("interrupted", "ok")


def test_a_waiting_execution_that_is_interrupted_never_runs(host):
    first = host.open("kernel.execute", context="default", code="import time; time.sleep(0.3); y = 1")
    second = host.open("kernel.execute", context="default", code="y = 2")
    host.until(lambda: first.event("started"))
    host.mux.send_event(second.number, {"interrupt": True})
    assert host.wait(second)["status"] == "interrupted"
    host.wait(first)
    assert execute(host, "print(y)").text() == b"1\n"


def test_a_kill_ends_the_tree_and_starts_a_fresh_kernel(host):
    before = host.pids()
    channel = host.open("kernel.execute", context="default", code=(
        "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('partial', flush=True)\n"
        "subprocess.Popen(['setsid', 'sleep', '60']); subprocess.Popen(['sleep', '60']); print('in', flush=True); time.sleep(60)"))  # fmt: skip
    host.until(lambda: b"in" in channel.text())
    pause(host, 0.1)
    host.mux.send_event(channel.number, {"kill": True})
    result = host.wait(channel)
    assert result["status"] == "killed" and result["restarted"] and channel.text() == b"partial\nin\n"
    pause(host, 0.2)
    assert host.pids() == before + 1
    run = execute(host, "print('fresh')")
    assert run.text() == b"fresh\n" and run.result["restarted"] is False


@pytest.mark.parametrize("code, code_out, signal_out", [
    ("import os; print('last', flush=True); os._exit(5)", 5, None),
    ("import os; print('last', flush=True); os.abort()", None, signal.SIGABRT),
    ("import os, signal; print('last', flush=True); os.kill(os.getpid(), signal.SIGKILL)", None, signal.SIGKILL),
])  # fmt: skip
def test_a_kernel_that_dies_says_how_and_the_next_is_fresh(host, code, code_out, signal_out):
    execute(host, "x = 1")
    run = execute(host, code)
    assert run.result["status"] == "died" and run.result["exit"] == {"code": code_out, "signal": signal_out}
    assert run.text() == b"last\n"
    listed = host.call("kernel.list")["contexts"][0]
    assert not listed["alive"] and listed["pid"] is None
    run = execute(host, "print('x' in globals())")
    assert run.text() == b"False\n" and run.result["restarted"] is True
    assert execute(host, "1").result["restarted"] is False


def test_results_sent_before_a_death_arrive(host):
    run = execute(host, "result('a' * 2_000_000); import os; os._exit(1)")
    assert run.result["status"] == "died"
    [(_, payload)] = results_of(run)
    assert len(json.loads(payload)["data"]["text/plain"]) == 2_000_000


def test_a_kernel_killed_between_executions_is_replaced(host):
    execute(host, "x = 1")
    pid = host.call("kernel.list")["contexts"][0]["pid"]
    host.run("kill", "-9", str(pid))
    host.until(lambda: not host.call("kernel.list")["contexts"][0]["alive"])
    assert execute(host, "1").result["restarted"] is True


def test_a_closed_stdout_is_the_kernels_own_business(host):
    execute(host, "import os; os.close(1); os.close(2)")
    assert execute(host, "result('ok')").result["status"] == "ok"


def test_restart_and_delete(host):
    execute(host, "x = 1")
    running = host.open("kernel.execute", context="default", code="import time; time.sleep(60)")
    waiting = host.open("kernel.execute", context="default", code="1")
    host.until(lambda: running.event("started"))
    assert host.call("kernel.restart", context="default")["ok"]
    host.wait(running, waiting)
    assert running.result["status"] == "killed" and waiting.result["status"] == "killed"
    assert execute(host, "print('x' in globals())").text() == b"False\n"
    assert host.call("kernel.delete", context="default")["ok"]
    assert host.call("kernel.list")["contexts"] == []
    assert host.call("kernel.delete", context="default")["error"]["code"] == "not_found"


def test_a_cancelled_execution_ends(host):
    channel = host.open("kernel.execute", context="default", code="print('in', flush=True)\nimport time; time.sleep(60)")
    host.until(lambda: channel.text())
    host.mux.send_close(channel.number, {"reason": "test"})
    host.wait(channel)
    assert execute(host, "print('on')").text() == b"on\n"


def test_without_credit_only_that_execution_waits(host):
    channel = host.open("kernel.execute", context="default", code="result('y' * 3_000_000); print('x' * 3_000_000)")
    channel.hold = True
    host.until(lambda: channel.received > (1 << 20) - 70000)
    assert host.run("echo", "on").text() == b"on\n"
    assert channel.received <= 1 << 20
    channel.hold = False
    host.mux.grant(channel.number, channel.received)
    host.wait(channel)
    assert len(channel.text()) == 3_000_001


@pytest.mark.parametrize("single", MODES)
def test_the_default_contexts_kernel_can_be_made_before_anyone_asks(single):
    with AgentProcess(single=single == "single", kernel=fake_kernel, prefork=True) as host:
        host.call("info")
        assert host.pids() == 2
        assert [item["context"] for item in host.call("kernel.list")["contexts"]] == ["default"]
        run = execute(host, "import os; print(os.getuid(), os.getcwd(), os.environ['HOME'], config['context'])")
        assert run.text() == b"1000 /mnt/home /mnt/home default\n"
        assert host.pids() == 2
        assert host.call("kernel.create", context="b")["ok"]


def test_many_executions_leave_nothing_behind(host):
    execute(host, "1")
    host.run("true")  # the first command brings the guardian and its timer

    def descriptors():
        return len(os.listdir(f"/proc/{host.process.init}/fd"))

    before = descriptors() if os.geteuid() == 0 else 0
    for _ in range(20):
        execute(host, "import os; os._exit(0)")
        host.run("true")
    execute(host, "1")
    assert (descriptors() if os.geteuid() == 0 else 0) == before
    assert host.call("info")["failures"] == 0
