"""The laws of commands: how they start, stream, take input, end, and are stopped with everything they started.

Guards the section "Commands" of the specification, sentence by sentence, on the real engine.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ringfence import (
    CommandExitError,
    NotFoundError,
    OutputGoneError,
    PtySize,
    SandboxDeadError,
    SandboxError,
    TimeoutExceededError,
)

DEADLINE = 25  # seconds that a step may take on a busy machine


def eventually(condition, seconds=DEADLINE):
    """Wait until `condition()` is true; returns its value."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
    return found


_FIND = """
import os, sys
found = 0
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        try:
            line = open(f"/proc/{name}/cmdline", "rb").read()
            state = open(f"/proc/{name}/stat").read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        found += sys.argv[1].encode() in line and state not in "ZX"
print(found)
"""


def running(sandbox, marker):
    """How many processes inside have `marker` in their arguments."""
    return int(sandbox.commands.run(["python3", "-I", "-S", "-c", _FIND, marker]).stdout)


# -- starting


def test_a_string_goes_to_bash(sandbox):
    assert sandbox.commands.run("echo $((6 * 7)) | tr 4 5; [[ -n $BASH_VERSION ]] && echo bash").stdout == "52\nbash\n"


def test_a_list_is_the_argument_vector_itself(sandbox):
    result = sandbox.commands.run(["printf", "<%s>", "a b", "$HOME", "*", ""])
    assert result.stdout == "<a b><$HOME><*><>"


def test_commands_run_as_the_user_in_the_home_directory(sandbox):
    assert sandbox.commands.run("id -u; id -un; pwd; echo $HOME").stdout == "1000\nuser\n/home/user\n/home/user\n"
    assert sandbox.commands.run("id -un", user="user").stdout == "user\n"


def test_a_user_that_there_is_not_is_refused(sandbox):
    with pytest.raises((SandboxError, ValueError), match="nobody-of-that-name"):
        sandbox.commands.run("id", user="nobody-of-that-name")


def test_the_working_directory_can_be_chosen(sandbox):
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"


def test_a_missing_working_directory_is_told(sandbox):
    result = sandbox.commands.run("pwd", cwd="/no/such/place")
    assert result.exit_code in (126, 127) and "/no/such/place" in result.stderr + (result.error or "")


def test_environment_variables_are_added_to_the_sandboxs_own(make):
    sandbox = make(envs={"RF_ALL": "all", "RF_BOTH": "first"})
    result = sandbox.commands.run("echo $RF_ALL $RF_BOTH $RF_ONE; test -n $PATH", envs={"RF_ONE": "one", "RF_BOTH": "second"})
    assert result.stdout == "all second one\n"
    assert sandbox.commands.run("echo $RF_ONE$RF_BOTH").stdout == "first\n"


# -- ends


def test_a_non_zero_exit_is_a_result(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr, result.signal) == (3, "out\n", "err\n", None)
    assert result.error == "exit status 3" and not result.ok


def test_check_raises_for_a_non_zero_exit_and_holds_the_result(sandbox):
    with pytest.raises(CommandExitError) as caught:
        sandbox.commands.run("echo said; exit 4", check=True)
    assert caught.value.exit_code == 4 and caught.value.stdout == "said\n"


@pytest.mark.parametrize("command", [["no-such-program"], "no-such-program", ["/no/such/program"]])
def test_a_missing_program_is_127(sandbox, command):
    result = sandbox.commands.run(command)
    assert result.exit_code == 127 and "no" in result.stderr


def test_a_program_that_may_not_run_is_126(sandbox):
    sandbox.files.write("text.sh", "echo no")
    assert sandbox.commands.run(["/home/user/text.sh"]).exit_code == 126
    assert sandbox.commands.run(["/tmp"]).exit_code == 126


def test_death_by_signal_is_told_apart_from_an_exit_code(sandbox):
    killed, exited = sandbox.commands.run("kill -KILL $$"), sandbox.commands.run("exit 137")
    assert (killed.exit_code, killed.signal, killed.error) == (137, 9, "killed by SIGKILL")
    assert (exited.exit_code, exited.signal, exited.error) == (137, None, "exit status 137")
    assert sandbox.commands.run("kill -SEGV $$").signal == signal.SIGSEGV


# -- timeouts


_STUBBORN = {
    "a child": "sleep {0} & sleep {0}",
    "a session of its own": "setsid sleep {0} & sleep {0}",
    "a double fork": "(setsid bash -c 'sleep {0} & disown; exit' &) ; sleep {0}",
    "stopped": "sleep {0} & kill -STOP $!; kill -STOP $$; sleep {0}",
    "deaf": "trap '' TERM INT HUP QUIT PIPE; bash -c 'trap \"\" TERM INT HUP; while :; do sleep {0}; done' & while :; do sleep {0}; done",
    "orphans with closed descriptors": "setsid sleep {0} <&- >&- 2>&- & setsid sleep {0} <&- >&- 2>&- & sleep {0}",
}  # fmt: skip


@pytest.mark.parametrize("manner", _STUBBORN)
def test_a_timeout_kills_the_whole_tree(sandbox, manner):
    marker = f"98{list(_STUBBORN).index(manner):03d}"
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.commands.run("echo begun;" + _STUBBORN[manner].format(marker), timeout=1)
    assert caught.value.outcome == "killed" and caught.value.partial.stdout == "begun\n"
    assert running(sandbox, marker) == 0 and sandbox.is_running()


def test_the_partial_output_comes_with_the_error(sandbox):
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.commands.run("echo one; echo two >&2; sleep 60", timeout=0.5)
    error = caught.value
    assert (error.partial.stdout, error.partial.stderr, error.limit) == ("one\n", "two\n", 0.5)


def test_a_command_that_says_nothing_for_too_long_is_killed(sandbox):
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.commands.run("for i in 1 2 3; do echo $i; sleep 0.3; done; sleep 60", no_output_timeout=1.5)
    assert caught.value.partial.stdout == "1\n2\n3\n" and "nothing" in str(caught.value)


def test_the_timeout_of_the_policy_is_the_default(make):
    with pytest.raises(TimeoutExceededError) as caught:
        make("plain", limits={"timeout": 0.5}).commands.run("sleep 60")
    assert caught.value.limit == 0.5


def test_a_timeout_of_zero_is_none(make):
    sandbox = make("plain", limits={"timeout": 0.3})
    assert sandbox.commands.run("sleep 0.8; echo there", timeout=0).stdout == "there\n"


def test_the_timeout_of_a_background_command_holds_while_nobody_waits(sandbox):
    handle = sandbox.commands.run("sleep 91919", background=True, timeout=0.5)
    eventually(lambda: handle.done)
    with pytest.raises(TimeoutExceededError):
        handle.wait()
    assert running(sandbox, "91919") == 0


# -- output


def test_output_held_open_by_a_background_child_does_not_delay_the_return(sandbox):
    begun = time.monotonic()
    result = sandbox.commands.run("sleep 20.5 & echo done")
    assert result.stdout == "done\n" and time.monotonic() - begun < 15
    assert result.background and running(sandbox, "20.5") == 1
    sandbox.commands.run("pkill -f '^sleep 20.5'")


def test_the_newest_output_stays_and_the_rest_is_counted(make):
    sandbox = make("plain", output="64KiB")
    result = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x; echo end; echo err >&2")
    assert result.truncated and result.stdout_total == 3_000_004 and result.stderr_total == 4
    assert len(result.stdout_bytes) == 64 << 10 and result.stdout.endswith("xxend\n") and result.stderr == "err\n"


def test_output_is_read_by_absolute_offset_and_what_is_gone_raises(make):
    sandbox = make("plain", output="64KiB")
    handle = sandbox.commands.run(
        "for i in {1..20000}; do printf '%07d\\n' $i; done; cat", background=True, stdin=True
    )
    eventually(lambda: handle.stdout_total == 160_000)
    with pytest.raises(OutputGoneError) as caught:
        handle.read_output(0)
    oldest = caught.value.oldest
    assert oldest == 160_000 - (64 << 10)
    assert handle.read_output(8 * 15_000, size=8) == b"0015001\n"
    assert handle.read_output(160_000) == b"" and len(handle.read_output(oldest)) == 64 << 10
    handle.send_stdin("more\n")
    eventually(lambda: handle.stdout_total == 160_005)
    assert handle.read_output(160_000) == b"more\n"
    handle.close_stdin()
    assert handle.wait().truncated


def test_a_hundred_mebibytes_are_drained_in_bounded_memory(sandbox):
    result = sandbox.commands.run("head -c 100000000 /dev/zero")
    assert result.stdout_total == 100_000_000 and len(result.stdout_bytes) == 1 << 20


def test_undecodable_bytes_are_replaced_in_text_and_exact_in_bytes(sandbox):
    result = sandbox.commands.run(r"printf 'a\xff\xfeb\x00c'")
    assert result.stdout == "a\ufffd\ufffdb\0c" and result.stdout_bytes == b"a\xff\xfeb\0c"


def test_text_is_decoded_incrementally(sandbox):
    pieces: list[str] = []
    sandbox.commands.run(
        r"printf 'x\xe2'; sleep 0.3; printf '\x82'; sleep 0.3; printf '\xacy'; sleep 0.1; printf '\xe2\x82'", on_stdout=pieces.append
    )
    assert "".join(pieces) == "x€y\ufffd" and "\ufffd" not in "".join(pieces[:-1])


def test_output_streams_while_the_command_runs(sandbox):
    times = []

    def take(text):
        times.append((time.monotonic(), text))

    sandbox.commands.run("echo early; sleep 1; echo late >&2", on_stdout=take, on_stderr=take)
    assert [text for _, text in times] == ["early\n", "late\n"] and times[1][0] - times[0][0] > 0.5


def test_what_a_callback_raises_kills_the_command_and_comes_out(sandbox):
    def refuse(text):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        sandbox.commands.run("echo x; sleep 92929", on_stdout=refuse)
    eventually(lambda: running(sandbox, "92929") == 0)


def test_fifty_commands_in_parallel_do_not_mix(sandbox):
    results = {}

    def run(number):
        script = f"for i in 1 2 3 4 5 6 7 8; do echo {number}-$i; echo e{number}-$i >&2; done; exit {number}"
        results[number] = sandbox.commands.run(script, envs={"RF": str(number)})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 50
    for number, result in results.items():
        assert result.exit_code == number
        assert result.stdout == "".join(f"{number}-{i}\n" for i in range(1, 9))
        assert result.stderr == "".join(f"e{number}-{i}\n" for i in range(1, 9))


# -- input


@pytest.mark.parametrize("data", ["text ä\n", b"bytes \xff\x00", "", b"x" * 3_000_000])
def test_input_is_text_or_bytes_and_ends(sandbox, data):
    result = sandbox.commands.run(["sha256sum"], stdin=data)
    import hashlib

    assert result.stdout.split()[0] == hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def test_without_input_a_program_reads_its_end(sandbox):
    assert sandbox.commands.run("cat; echo $?").stdout == "0\n"


def test_a_program_that_does_not_read_its_input_ends_all_the_same(sandbox):
    assert sandbox.commands.run("exit 5", stdin=b"x" * 3_000_000).exit_code == 5


# -- background


def test_a_background_command_takes_input_and_is_waited_for(sandbox):
    handle = sandbox.commands.run("while read line; do echo got:$line; done; exit 6", background=True, stdin=True)
    handle.send_stdin("one\n")
    eventually(lambda: handle.stdout == "got:one\n")
    handle.send_stdin(b"two\n")
    handle.close_stdin()
    result = handle.wait()
    assert (result.exit_code, result.stdout) == (6, "got:one\ngot:two\n")
    with pytest.raises(NotFoundError):
        handle.send_stdin("three\n")


def test_a_background_command_is_killed_with_its_tree(sandbox):
    handle = sandbox.commands.run("setsid sleep 93939 & sleep 93939", background=True)
    eventually(lambda: running(sandbox, "93939") == 3)  # bash's own argument names it too
    assert handle.kill() is True and handle.kill() is False
    assert handle.wait().signal == 9 and running(sandbox, "93939") == 0


def test_waiting_with_a_timeout_ends_the_waiting_only(sandbox):
    handle = sandbox.commands.run("echo first; sleep 1; echo second", background=True)
    with pytest.raises(TimeoutExceededError) as caught:
        handle.wait(timeout=0.2)
    assert caught.value.outcome == "running"
    assert handle.wait().stdout == "first\nsecond\n"


def test_signals_reach_the_command(sandbox):
    handle = sandbox.commands.run("trap 'echo usr1; exit 7' USR1; echo set; while :; do sleep 0.05; done", background=True)
    eventually(lambda: handle.stdout == "set\n")
    handle.send_signal(signal.SIGUSR1)
    result = handle.wait()
    assert (result.exit_code, result.stdout) == (7, "set\nusr1\n")


def test_commands_are_listed_and_reconnected_by_pid(sandbox):
    handle = sandbox.commands.run(["bash", "-c", "echo hello; cat"], background=True, stdin=True)
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert listed[handle.pid].cmd == "bash" and listed[handle.pid].args[-1] == "echo hello; cat"
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    again.send_stdin("more\n")
    again.close_stdin()
    assert again.wait().stdout == "hello\nmore\n"
    with pytest.raises(NotFoundError):
        sandbox.commands.connect(4_000_000)


def test_iterating_over_a_handle_gives_the_output_as_it_comes(sandbox):
    handle = sandbox.commands.run("echo a; sleep 0.2; echo b >&2; sleep 0.2; echo c", background=True)
    assert [piece[:2] for piece in handle] == [("a\n", None), (None, "b\n"), ("c\n", None)]


def test_commands_are_killed_by_pid(sandbox):
    handle = sandbox.commands.run("sleep 94949", background=True)
    assert sandbox.commands.kill(handle.pid) is True and sandbox.commands.kill(handle.pid) is False


# -- terminals


def test_a_pty_is_a_terminal_of_the_size_that_was_asked_for(sandbox):
    result = sandbox.commands.run("test -t 0 && test -t 1 && stty size", pty=PtySize(rows=33, cols=101))
    assert result.stdout.replace("\r", "") == "33 101\n"


def test_a_pty_takes_input_and_is_resized(sandbox):
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), envs={"PS1": "$ "})
    terminal.send_stdin("stty size; echo mark-$((1+1))\n")
    eventually(lambda: "mark-2" in terminal.stdout and "24 80" in terminal.stdout)
    terminal.resize(PtySize(rows=50, cols=132))
    terminal.send_stdin("stty size; echo mark-$((1+2))\n")
    eventually(lambda: "mark-3" in terminal.stdout and "50 132" in terminal.stdout)
    terminal.send_stdin("exit 8\n")
    assert terminal.wait().exit_code == 8


def test_ctrl_c_on_a_pty_interrupts_the_foreground_program(sandbox):
    terminal = sandbox.pty.create(PtySize())
    terminal.send_stdin("sleep 95959\n")
    eventually(lambda: running(sandbox, "95959") == 1)
    terminal.send_stdin(b"\x03")
    eventually(lambda: running(sandbox, "95959") == 0)
    terminal.kill()


# -- a sandbox that is dead


def test_a_dead_sandbox_is_an_error_of_its_own_for_running_and_for_later_commands(make):
    sandbox = make("plain")
    handle = sandbox.commands.run("echo before; sleep 60", background=True)
    eventually(lambda: handle.stdout == "before\n")
    assert sandbox.kill() is True and sandbox.kill() is False
    for operation in (handle.wait, lambda: sandbox.commands.run("true"), lambda: sandbox.files.read("x")):
        with pytest.raises(SandboxDeadError) as caught:
            operation()
        assert caught.value.reason == "killed"
    assert not sandbox.is_running()
