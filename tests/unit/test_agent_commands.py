"""Laws of commands in the guest agent: the process contract, for many ids and for a single uid."""

from __future__ import annotations

import os
import signal
import time

import pytest
from agent_client import STDERR, AgentProcess, can_isolate

from ringfence.guest.protocol import PTY

NO_ISOLATION = can_isolate()
pytestmark = pytest.mark.skipif(bool(NO_ISOLATION), reason=NO_ISOLATION)
MODES = ["single", pytest.param("many", marks=pytest.mark.skipif(os.geteuid() != 0, reason="many ids need root here"))]


@pytest.fixture(params=MODES)
def host(request):
    with AgentProcess(single=request.param == "single") as client:
        yield client


def test_an_exit_code_is_a_result(host):
    run = host.shell("echo out; echo err >&2; exit 3")
    assert (run.result["exit_code"], run.result["signal"]) == (3, None)
    assert run.text() == b"out\n" and run.text(STDERR) == b"err\n"


def test_a_missing_program_is_127(host):
    run = host.run("no-such-program", "x")
    assert run.result["ok"] and run.result["exit_code"] == 127
    assert run.event("failed")["errno"] == "ENOENT" and b"no-such-program: command not found" in run.text(STDERR)
    run = host.run("/no/such/program")
    assert run.result["exit_code"] == 127


def test_a_file_that_is_not_executable_is_126(host):
    run = host.run("/etc/passwd")
    assert run.result["exit_code"] == 126 and run.event("failed")["errno"] == "EACCES"


def test_a_bad_directory_is_told_apart_from_a_missing_program(host):
    run = host.run("true", cwd="/no/such/place")
    assert run.event("failed") == {"errno": "ENOENT", "message": "/no/such/place: No such file or directory", "what": "cwd"}
    assert run.result["exit_code"] == 126


def test_a_script_without_interpreter_line_runs_in_sh(host):
    assert host.shell("printf 'echo from $0\\n' > s; chmod +x s").result["exit_code"] == 0
    assert host.run("./s").text() == b"from ./s\n"


def test_death_by_signal_is_told_apart(host):
    run = host.shell("kill -SEGV $$")
    assert (run.result["exit_code"], run.result["signal"]) == (None, signal.SIGSEGV)
    assert host.shell("exit 139").result["exit_code"] == 139


def test_a_command_runs_as_the_user_without_capabilities(host):
    text = host.shell("id -u; id -g; grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status; pwd; echo $HOME $USER").text().decode()
    assert text.split("\n")[:2] == ["1000", "1000"]
    assert [line.split()[1] for line in text.split("\n") if line.startswith("Cap")] == ["0" * 16] * 4
    assert "/mnt/home\n/mnt/home user\n" in text


def test_no_descriptor_of_the_agent_reaches_a_command(host):
    assert host.shell("ls /proc/self/fd").text().split() == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself


def test_signals_and_mask_are_the_defaults(host):
    text = host.shell("grep -E '^Sig(Blk|Ign)' /proc/self/status").text()
    blocked, ignored = (int(line.split()[1], 16) for line in text.strip().split(b"\n"))
    assert blocked == 0 and ignored & 0x7FFFFFFF == 0


def test_environment_is_merged_over_the_base(host):
    run = host.run("/bin/sh", "-c", "echo $A-$LANG-${PATH:-none}", env={"A": "1", "LANG": None})
    assert run.text() == b"1--/usr/local/bin:/usr/bin:/bin\n"


@pytest.mark.parametrize("env", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0"}, [1]])
def test_an_impossible_environment_is_refused(host, env):
    answer = host.call("exec", argv=["true"], env=env)
    assert answer["error"]["code"] == "invalid"


@pytest.mark.parametrize("argv", [[], [""], ["a\0b"], [1], "true", None])
def test_impossible_arguments_are_refused(host, argv):
    assert host.call("exec", argv=argv)["error"]["code"] == "invalid"


def test_an_unknown_user_is_refused(host):
    assert host.call("exec", argv=["true"], user="root")["error"]["code"] == "invalid"


def test_arguments_of_any_bytes_arrive(host):
    raw = bytes(range(1, 256))
    assert host.run("printf", "%s", raw.decode("utf-8", "surrogateescape")).text() == raw
    assert host.run("printf", "%s", {"b64": "/wo="}).text() == b"\xff\n"
    assert host.run("--inadvisable").result["exit_code"] == 127


def test_stdin_takes_bytes_and_ends(host):
    channel = host.open("exec", argv=["sha256sum"], stdin=True)
    data = os.urandom(3_000_000)
    host.send(channel, data)
    host.mux.send_eof(channel.number, 0)
    host.wait(channel)
    import hashlib

    assert channel.text().split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_a_command_that_does_not_read_gets_no_credit(host):
    channel = host.open("exec", argv=["sleep", "60"], stdin=True)
    host.started(channel)
    host.mux.send_data(channel.number, 0, b"x" * (1 << 20))
    host.until(lambda: host.mux.queued == 0)
    assert host.call("info")["ok"]
    assert host.mux.data_room(channel.number) < 1 << 19
    host.mux.send_close(channel.number, {"reason": "enough"})
    host.wait(channel)


def test_a_command_may_close_its_stdin(host):
    channel = host.open("exec", argv=["/bin/sh", "-c", "exec <&-; sleep 0.2; echo done"], stdin=True)
    host.send(channel, b"x" * 2_000_000)
    host.wait(channel)
    assert channel.text() == b"done\n"


def test_without_stdin_it_reads_nothing(host):
    assert host.run("cat").result["exit_code"] == 0


def test_output_is_exact_and_unlimited(host):
    channel = host.open("exec", argv=["head", "-c", "50000000", "/dev/zero"])
    channel.discard = True
    host.wait(channel)
    assert channel.received == 50_000_000


def test_a_channel_without_credit_stops_its_command_alone(host):
    flood = host.open("exec", argv=["yes"])
    flood.hold = True
    host.until(lambda: flood.received > (1 << 20) - 4096)
    assert host.run("echo", "alive").text() == b"alive\n"
    assert flood.received <= 1 << 20
    host.mux.send_event(flood.number, {"kill": True})
    flood.hold = False
    host.mux.grant(flood.number, 1 << 20)
    assert host.wait(flood)["signal"] == signal.SIGKILL


def test_output_held_open_by_a_background_child_does_not_delay_the_end(host):
    started = time.monotonic()
    run = host.shell("sleep 60 & echo started")
    assert run.text() == b"started\n" and run.result["background"] is True
    assert time.monotonic() - started < 20


def test_a_flood_from_a_background_child_does_not_delay_the_end(host):
    run = host.shell("yes & sleep 0.1; exit 5")
    assert run.result["exit_code"] == 5 and run.result["background"]


@pytest.mark.parametrize("script", [
    "sleep 60",
    "setsid sleep 60 & wait",
    "(setsid sh -c 'sleep 60 & sleep 60' &) ; sleep 60",
    "trap '' TERM INT HUP; sleep 60",
    "sleep 60 & kill -STOP $!; kill -STOP $$",
    "for i in 1 2 3 4 5 6 7 8; do (sh -c 'sleep 60 & setsid sleep 60' &) ; done; sleep 60",
    "f() { sleep 0.01; f & f & }; f; sleep 60",
], ids=["plain", "setsid", "double fork", "ignored signals", "stopped", "many", "fork bomb"])  # fmt: skip
def test_a_kill_reaches_the_whole_tree(script):
    # "many ids" where possible: the mark finds what no descent could.
    with AgentProcess(single=os.geteuid() != 0) as host:
        before = host.pids()
        channel = host.open("exec", argv=["/bin/bash", "-c", "ulimit -u 150; " + script])
        host.started(channel)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            host.step(0.05)
        host.mux.send_event(channel.number, {"kill": True})
        result = host.wait(channel)
        assert result["ok"] and result["signal"] == signal.SIGKILL and result["killed"]
        host.call("info")
        assert host.pids() <= before + 1  # the guardian


def test_a_kill_reaches_daemons_with_a_single_uid():
    with AgentProcess(single=True) as host:
        before = host.pids()
        channel = host.open("exec", argv=["/bin/bash", "-c", "(setsid sh -c 'setsid sleep 60 & sleep 60' &) ; trap '' TERM; sleep 60"])
        host.started(channel)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            host.step(0.05)
        assert host.pids() > before + 2
        host.mux.send_event(channel.number, {"kill": True})
        assert host.wait(channel)["signal"] == signal.SIGKILL
        host.call("info")
        assert host.pids() == before


def test_a_cancelled_command_is_gone(host):
    before = host.pids()
    channel = host.open("exec", argv=["/bin/bash", "-c", "setsid sleep 60 & yes"])
    channel.hold = True
    host.until(lambda: channel.received > 0)
    host.mux.send_close(channel.number, {"reason": "test"})
    host.wait(channel)
    host.call("info")
    assert host.pids() <= before + 1


def test_a_signal_goes_to_the_command_or_its_tree(host):
    channel = host.open("exec", argv=["/bin/bash", "-c", "trap 'echo got; exit 7' USR1; echo ready; while :; do sleep 0.05; done"])
    host.until(lambda: b"ready" in channel.text())
    host.mux.send_event(channel.number, {"signal": signal.SIGUSR1, "tree": False})
    assert host.wait(channel)["exit_code"] == 7 and b"got" in channel.text()


def test_commands_are_listed_and_signalled_by_pid(host):
    channel = host.open("exec", argv=["sleep", "60"])
    pid = host.started(channel)
    listed = host.call("process.list")["processes"]
    assert [(item["pid"], item["argv"]) for item in listed] == [(pid, ["sleep", "60"])]
    assert host.call("process.signal", pid=pid, signal=int(signal.SIGTERM))["ok"]
    assert host.wait(channel)["signal"] == signal.SIGTERM
    assert host.call("process.list")["processes"] == []
    assert host.call("process.signal", pid=pid, signal=9)["error"]["code"] == "not_found"
    assert host.call("process.signal", pid=1, signal=9)["error"]["code"] == "not_found"


def test_fifty_commands_in_parallel_do_not_mix(host):
    channels = [
        host.open("exec", argv=["/bin/sh", "-c", f"for i in 1 2 3 4 5 6 7 8 9 10; do echo out{n}; echo err{n} >&2; done; exit {n}"])
        for n in range(50)
    ]
    host.wait(*channels, seconds=30)
    for n, channel in enumerate(channels):
        assert channel.result["exit_code"] == n
        assert channel.text() == f"out{n}\n".encode() * 10
        assert channel.text(STDERR) == f"err{n}\n".encode() * 10


def test_a_terminal_has_size_control_and_resize(host):
    script = "tty; stty size; trap 'stty size' WINCH; echo ready; until read -t 0.05 line; do :; done; echo \"got $line\"; exit 4"
    channel = host.open("exec", argv=["/bin/bash", "-c", script], pty={"rows": 30, "cols": 100})
    host.until(lambda: b"ready" in channel.text(PTY))
    assert b"/dev/pts/" in channel.text(PTY) and b"30 100" in channel.text(PTY)
    host.mux.send_event(channel.number, {"resize": {"rows": 41, "cols": 77}})
    host.until(lambda: b"41 77" in channel.text(PTY))
    host.send(channel, b"hello\n", PTY)
    assert host.wait(channel)["exit_code"] == 4
    assert b"got hello" in channel.text(PTY)


def test_a_terminal_delivers_ctrl_c_and_end_of_file(host):
    channel = host.open("exec", argv=["cat"], pty={"rows": 24, "cols": 80})
    host.started(channel)
    host.send(channel, b"one\n", PTY)
    host.until(lambda: channel.text(PTY).count(b"one") == 2)
    host.mux.send_eof(channel.number, PTY)
    assert host.wait(channel)["exit_code"] == 0
    channel = host.open("exec", argv=["/bin/sh", "-c", "echo up; exec sleep 60"], pty={"rows": 24, "cols": 80})
    host.until(lambda: b"up" in channel.text(PTY))
    host.send(channel, b"\x03", PTY)
    assert host.wait(channel)["signal"] == signal.SIGINT


def test_all_terminal_output_arrives(host):
    channel = host.open("exec", argv=["seq", "1", "20000"], pty={"rows": 24, "cols": 80})
    host.wait(channel)
    assert channel.text(PTY).replace(b"\r", b"").split() == [str(n).encode() for n in range(1, 20001)]


def test_orphans_are_reaped(host):
    host.shell("for i in $(seq 300); do (true &) ; done")
    host.until(lambda: host.call("info")["channels"] == 0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        run = host.shell("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
        if run.text().strip() == b"0":
            return
    raise AssertionError("zombies stay")


def test_the_agent_survives_what_user_code_sends_it(host):
    before = host.pids()
    host.shell("kill -9 1; kill -STOP 1; kill -TERM 1; for s in $(seq 1 31); do kill -$s 1; done; kill -9 -1")
    assert host.call("info")["ok"] and host.run("echo", "on").text() == b"on\n"
    assert host.pids() <= before + 1


def test_marks_return_and_their_end_is_a_limit():
    if os.geteuid():
        pytest.skip("job marks need many ids, which need root here")
    with AgentProcess(marks=3) as host:
        for _ in range(10):
            assert host.run("true").result["exit_code"] == 0
        sleepers = [host.open("exec", argv=["sleep", "60"]) for _ in range(3)]
        for item in sleepers:
            host.started(item)
        assert host.call("exec", argv=["true"])["error"]["code"] == "limit"
        host.mux.send_event(sleepers[0].number, {"kill": True})
        host.wait(sleepers[0])
        assert host.run("true").result["exit_code"] == 0
        # A background process keeps its mark, can be killed as a tree, and then gives it back.
        run = host.shell("setsid sleep 60 & echo $!")
        assert run.result["background"]
        assert host.call("exec", argv=["true"])["error"]["code"] == "limit"
        pid = run.event("started")["pid"]
        assert host.call("process.signal", pid=pid, signal=9, tree=True)["ok"]
        host.until(lambda: "error" not in host.call("exec", argv=["true"]))


def test_the_agent_keeps_descriptors_for_itself(request):
    with AgentProcess(single=os.geteuid() != 0, files=80) as host:
        channels = [host.open("exec", argv=["sleep", "60"]) for _ in range(40)]
        host.until(lambda: all(item.result or item.event("started") for item in channels))
        refused = [item for item in channels if item.result is not None]
        assert refused and all(item.result["error"]["code"] == "limit" for item in refused)
        for item in channels:
            if item.result is None:
                host.mux.send_event(item.number, {"kill": True})
        host.wait(*channels)
        assert host.run("true").result.get("exit_code") == 0, host.run("true").result


def test_a_child_stopped_before_its_exec_does_not_hold_the_agent():
    if os.geteuid():
        pytest.skip("with a single uid the agent forks and never waits for an exec")
    with AgentProcess() as host:
        storm = host.open("exec", argv=["/usr/bin/python3", "-c", """
import os, signal
signal.signal(signal.SIGCONT, signal.SIG_IGN)
while True:
    try:
        for pid in range(os.getpid() + 1, os.getpid() + 400):
            try: os.kill(pid, signal.SIGSTOP)
            except OSError: pass
    except Exception: pass
"""])  # fmt: skip
        host.started(storm)
        for _ in range(40):
            channel = host.open("exec", argv=["true"])
            host.until(lambda channel=channel: channel.events or channel.result, seconds=20)
            host.mux.send_event(channel.number, {"kill": True})
            host.wait(channel, seconds=20)
        host.mux.send_event(storm.number, {"kill": True})
        host.wait(storm)


def test_an_unknown_operation_is_unsupported(host):
    assert host.call("no.such")["error"]["code"] == "unsupported"
    assert host.call("file.format")["error"]["code"] == "unsupported"


def test_the_agent_ends_when_its_stream_ends():
    process = AgentProcess(single=os.geteuid() != 0)
    with process as host:
        host.started(host.open("exec", argv=["setsid", "sleep", "60"]))
    assert process.status == 0


def test_shutdown_answers_and_ends(host):
    channel = host.open("shutdown")
    while not host.eof:
        host.step(1.0)
    assert channel.result == {"ok": True}
