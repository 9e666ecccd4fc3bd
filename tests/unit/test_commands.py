"""Commands on the host's side: the process contract holds whatever the guest does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_guest import Conversation, FakeHandle

from ringfence.engines.base import Limits
from ringfence.errors import (
    CommandExitError,
    GuestError,
    InvalidArgumentError,
    NotFoundError,
    OutputGoneError,
    SandboxDeadError,
    TimeoutExceededError,
)
from ringfence.guest import protocol
from ringfence.stream import commands as commands_module
from ringfence.stream import exchange as exchange_module
from ringfence.stream.commands import Command, CommandRunner
from ringfence.stream.exchange import Session
from ringfence.stream.results import PtySize
from ringfence.stream.waiting import run_async, run_sync

STDIN, STDOUT, STDERR, PTY = protocol.STDIN, protocol.STDOUT, protocol.STDERR, protocol.PTY


class Bench:
    def __init__(self, program: Any, limits: Limits | None = None, **operations: Any) -> None:
        self.handle = FakeHandle({"exec": program, **operations}, limits)
        self.session = Session(self.handle)  # type: ignore[arg-type]
        self.runner = CommandRunner(self.session)

    def prepare(self, cmd: Any = "cmd", background: bool = False, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "envs": None,
            "user": None,
            "cwd": None,
            "stdin": None,
            "timeout": None,
            "no_output_timeout": None,
            "pty": None,
            "check": False,
            "output_limit": None,
        }
        return self.runner.prepare(cmd, background=background, **{**defaults, **options})

    def run(self, cmd: Any = "cmd", callbacks: tuple[Any, ...] = (), **options: Any) -> Any:
        return run_sync(self.runner.run(*self.prepare(cmd, **options), *callbacks))

    def start(self, cmd: Any = "cmd", **options: Any) -> Command:
        return run_sync(self.runner.start(*self.prepare(cmd, True, **options)))


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (commands_module, exchange_module):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(commands_module, "KILL_SECONDS", 0.5)


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(*arguments: Any, **keywords: Any) -> Bench:
        made.append(Bench(*arguments, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.handle.die("killed")


def started(conversation: Conversation, pid: int = 42) -> None:
    conversation.event(started={"pid": pid})


def until_killed(conversation: Conversation) -> None:
    """Run until the host orders the end of the tree, then end as a killed program does."""
    while True:
        event = conversation.take(10)
        if event.kind == protocol.EVENT and event.payload.get("kill"):
            conversation.close(exit_code=None, signal=9)
            return
        if event.kind == protocol.CLOSE:
            conversation.close(exit_code=None, signal=9)
            return


def simple(conversation: Conversation, request: dict[str, Any]) -> None:
    started(conversation)
    conversation.data(STDOUT, b"out\xff")
    conversation.data(STDERR, b"err")
    conversation.close(exit_code=3, signal=None, cpu_seconds=0.5, max_rss=4096, background=True)


def test_a_nonzero_exit_is_a_result(bench: Any) -> None:
    result = bench(simple).run()
    assert (result.exit_code, result.signal, result.error) == (3, None, "exit status 3")
    assert (result.stdout, result.stdout_bytes, result.stderr) == ("out�", b"out\xff", "err")
    assert (result.pid, result.cpu_seconds, result.max_rss, result.background) == (42, 0.5, 4096, True)
    assert (result.stdout_total, result.truncated) == (4, False)


def test_check_raises_with_the_whole_result(bench: Any) -> None:
    with pytest.raises(CommandExitError) as caught:
        bench(simple).run(check=True)
    assert caught.value.exit_code == 3
    assert caught.value.result.stderr == "err"


def test_a_string_goes_to_bash_and_a_list_is_the_argument_vector(bench: Any) -> None:
    made = bench(simple)
    made.run("a | b", envs={"A": "1"}, cwd="/tmp", user="user")
    made.run(["a", "b c", b"\xff"])
    first, second = made.handle.guest.requests
    assert first["argv"] == ["/bin/bash", "-c", "--", "a | b"]
    assert (first["env"], first["cwd"], first["user"], first["stdin"], first["pty"]) == (
        {"A": "1"},
        "/tmp",
        "user",
        False,
        None,
    )
    assert second["argv"] == ["a", "b c", "\udcff"]


def test_a_missing_program_is_127_with_the_reason(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.event(failed={"errno": "ENOENT", "message": "nope: not found"})
        conversation.close(exit_code=127)

    made = bench(program)
    result = made.run("nope")
    assert (result.exit_code, result.error) == (127, "nope: not found")
    handle = made.start("nope")
    assert run_sync(handle.wait()).exit_code == 127


def test_death_by_signal_is_told_apart_from_an_exit(bench: Any) -> None:
    result = bench(lambda c, r: c.close(exit_code=None, signal=15)).run()
    assert (result.exit_code, result.signal, result.error) == (143, 15, "killed by SIGTERM")
    result = bench(lambda c, r: c.close(exit_code=143, signal=None)).run()
    assert (result.exit_code, result.signal, result.error) == (143, None, "exit status 143")


@pytest.mark.parametrize("end", [{"exit_code": None, "signal": 9}, {"exit_code": 137, "signal": None}])
def test_the_out_of_memory_killer_is_named_with_its_limit(bench: Any, end: dict[str, Any]) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        made.handle.oom_kills += 1
        conversation.close(**end)

    made = bench(program)
    result = made.run()
    assert result.oom
    assert "512 MiB" in result.error
    made.handle.guest.operations["exec"] = lambda c, r: c.close(**end)
    assert not made.run().oom


def test_a_timeout_kills_the_tree_and_keeps_the_output(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        conversation.data(STDOUT, b"partial")
        until_killed(conversation)

    made = bench(program)
    with pytest.raises(TimeoutExceededError) as caught:
        made.run(timeout=0.2)
    error = caught.value
    assert (error.outcome, error.limit, error.partial.stdout, error.partial.signal) == (
        "killed",
        0.2,
        "partial",
        9,
    )
    assert made.handle.kills == []


def test_a_guest_that_does_not_kill_loses_the_sandbox(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        conversation.data(STDOUT, b"partial")

    made = bench(program)
    with pytest.raises(TimeoutExceededError) as caught:
        made.run(timeout=0.2)
    assert caught.value.outcome == "sandbox_killed"
    assert caught.value.partial.stdout == "partial"
    assert made.handle.kills == ["killed"]


def test_the_default_timeout_is_the_policys(bench: Any) -> None:
    with pytest.raises(TimeoutExceededError) as caught:
        bench(lambda c, r: until_killed(c), Limits(timeout=0.2)).run()
    assert caught.value.limit == 0.2


def test_silence_is_a_timeout_of_its_own(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        for _ in range(5):
            conversation.data(STDOUT, b".")
            time.sleep(0.1)
        until_killed(conversation)

    with pytest.raises(TimeoutExceededError) as caught:
        bench(program).run(no_output_timeout=0.3, timeout=10)
    assert caught.value.partial.stdout == "....."
    assert "wrote nothing" in caught.value.message


def test_output_beyond_the_limit_is_counted_and_the_newest_kept(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        for number in range(100):
            conversation.data(STDOUT, b"%09d\n" % number * 1000)
        conversation.close(exit_code=0)

    result = bench(program).run(output_limit=1000)
    assert (len(result.stdout_bytes), result.stdout_total, result.truncated) == (1000, 1_000_000, True)
    assert result.stdout.endswith("000000099\n")


def test_callbacks_get_text_in_order_and_whole_characters(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        for byte in "ä".encode() + b"\xff":
            conversation.data(STDOUT, bytes([byte]))
        conversation.data(STDERR, b"e")
        conversation.close(exit_code=0)

    seen: list[tuple[str, str]] = []
    bench(program).run(callbacks=(lambda t: seen.append(("o", t)), lambda t: seen.append(("e", t))))
    assert seen == [("o", "ä"), ("o", "�"), ("e", "e")]


def test_a_slow_callback_holds_the_program_back(bench: Any) -> None:
    sent = 0
    release = threading.Event()

    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        nonlocal sent
        for _ in range(64):
            conversation.data(STDOUT, b"x" * (64 << 10))
            sent += 64 << 10
        conversation.close(exit_code=0)

    total = 0

    def slow(text: str) -> None:
        nonlocal total
        release.wait(0.5)
        total += len(text)

    held: list[int] = []
    threading.Timer(0.3, lambda: held.append(sent)).start()
    threading.Timer(0.4, release.set).start()
    result = bench(program).run(callbacks=(slow,))
    assert held[0] <= 2 << 20
    assert total == result.stdout_total == 4 << 20


def test_what_a_callback_raises_kills_the_command_and_comes_out(bench: Any) -> None:
    ended = threading.Event()

    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(STDOUT, b"x")
        until_killed(conversation)
        ended.set()

    made = bench(program)
    with pytest.raises(ZeroDivisionError):
        made.run(callbacks=(lambda _: 1 / 0,))
    assert ended.wait(5)


def test_input_is_sent_with_its_end_however_large(bench: Any) -> None:
    received: list[bytes] = []

    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        received.append(conversation.body(STDIN))
        conversation.close(exit_code=0)

    made = bench(program)
    for data in (b"", "ä", b"z" * (5 << 20)):
        made.run(stdin=data)
        assert received.pop() == (data.encode() if isinstance(data, str) else data)
    assert all(request["stdin"] for request in made.handle.guest.requests)


def test_a_program_that_does_not_read_its_input_is_no_error(bench: Any) -> None:
    assert bench(lambda c, r: c.close(exit_code=0)).run(stdin=b"z" * (5 << 20)).exit_code == 0


def test_a_background_command_is_waited_for_later_and_found_by_its_pid(bench: Any) -> None:
    go = threading.Event()

    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation, 77)
        conversation.data(STDOUT, b"hello")
        go.wait(5)
        conversation.close(exit_code=0)

    made = bench(program)
    command = made.start()
    assert command.pid == 77
    assert made.runner.find(77) is command
    with pytest.raises(TimeoutExceededError) as caught:
        run_sync(command.wait(timeout=0.05))
    assert caught.value.outcome == "running"
    go.set()
    assert run_sync(command.wait()).stdout == "hello"
    assert made.runner.find(77) is command
    with pytest.raises(NotFoundError):
        made.runner.find(78)
    assert made.handle.operations == 0


def test_a_background_command_with_a_timeout_is_stopped_though_nobody_waits(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        until_killed(conversation)

    command = bench(program).start(timeout=0.2)
    deadline = time.monotonic() + 5
    while not command.done and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(TimeoutExceededError):
        run_sync(command.wait())


def test_iterating_gives_what_was_kept_and_then_what_comes(bench: Any) -> None:
    go = threading.Event()

    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        conversation.data(STDOUT, b"first ")
        go.wait(5)
        conversation.data(STDOUT, b"second")
        conversation.close(exit_code=0)

    command = bench(program).start()
    while not command.stdout.total:
        time.sleep(0.01)
    command.attach()
    go.set()
    pieces = []
    while (piece := run_sync(command.next_piece())) is not None:
        pieces.append(piece[1])
    assert b"".join(pieces) == b"first second"
    with pytest.raises(InvalidArgumentError):
        command.attach()


def test_old_output_is_gone_and_the_error_says_from_where_it_is_left(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        conversation.data(STDOUT, bytes(range(100)))
        conversation.close(exit_code=0)

    command = bench(program).start(output_limit=10)
    run_sync(command.wait())
    with pytest.raises(OutputGoneError) as caught:
        command.stdout.read(0)
    assert command.stdout.read(caught.value.oldest) == bytes(range(90, 100))


def test_a_pty_has_a_size_input_and_output(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        typed = conversation.take()
        assert (typed.kind, typed.stream) == (protocol.DATA, PTY)
        conversation.data(PTY, b"echo " + typed.payload)
        resize = conversation.take().payload
        conversation.data(PTY, repr(resize["resize"]).encode())
        conversation.close(exit_code=0)

    made = bench(program)
    command = made.start(pty=PtySize(30, 100), stdin=True)
    run_sync(command.send_stdin("x"))
    run_sync(command.resize(PtySize(5, 6)))
    seen: list[bytes] = []
    result = run_sync(command.wait(on_pty=seen.append))
    assert made.handle.guest.requests[0]["pty"] == {"rows": 30, "cols": 100}
    assert b"".join(seen) == result.stdout_bytes == b"echo x{'rows': 5, 'cols': 6}"


def test_the_end_of_the_sandbox_is_no_failure_of_the_command(bench: Any) -> None:
    made = bench(lambda c, r: made.handle.die("max_age"))
    with pytest.raises(SandboxDeadError) as caught:
        made.run()
    assert caught.value.reason == "max_age"


@pytest.mark.parametrize(
    "reply", [{}, {"exit_code": "0"}, {"exit_code": 256}, {"exit_code": -1}, {"signal": 500}]
)
def test_a_malformed_end_is_the_guests_fault(bench: Any, reply: dict[str, Any]) -> None:
    with pytest.raises(GuestError):
        bench(lambda c, r: c.close(**reply)).run()


def test_fifty_commands_at_once_do_not_mix(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        number = request["argv"][0].encode()
        for _ in range(50):
            conversation.data(STDOUT, number * 100)
        conversation.close(exit_code=int(number))

    made = bench(program)
    results: dict[int, Any] = {}

    def one(number: int) -> None:
        results[number] = made.run([str(number)])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, 51)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in results.items():
        assert result.exit_code == number
        assert result.stdout == str(number) * 5000
    assert len(results) == 50


def test_arguments_are_judged_before_anything_is_sent(bench: Any) -> None:
    made = bench(simple)
    for cmd, options in (
        (5, {}),
        (b"ls", {}),
        ([], {}),
        ([""], {}),
        (["a", 5], {}),
        ("a\0b", {}),
        ("a", {"cwd": ""}),
        ("a", {"envs": {"": "x"}}),
        ("a", {"timeout": -1}),
        ("a", {"stdin": 5}),
        ("a", {"pty": PtySize(0, 5)}),
        ("a", {"user": ""}),
        ("a", {"output_limit": -1}),
    ):
        with pytest.raises(InvalidArgumentError):
            made.run(cmd, **options)
    assert made.handle.guest.requests == []


def test_kill_by_pid_says_whether_there_was_something_to_kill(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation, 7)
        until_killed(conversation)

    made = bench(program, **{"process.signal": lambda c, r: c.fail("not_found")})
    made.start()
    assert run_sync(made.runner.kill(7)) is True
    assert run_sync(made.runner.kill(8)) is False


def test_cancelling_the_task_kills_the_command(bench: Any) -> None:
    ended = threading.Event()

    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        until_killed(conversation)
        ended.set()

    made = bench(program)

    async def main() -> None:
        task = asyncio.ensure_future(run_async(made.runner.run(*made.prepare())))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.wait(5)


def test_an_input_that_nobody_reads_ends_with_the_time_of_the_command(bench: Any) -> None:
    def program(conversation: Conversation, request: dict[str, Any]) -> None:
        started(conversation)
        time.sleep(3)
        conversation.close(exit_code=0)

    made = bench(program, limits=Limits(timeout=0.3))
    begun = time.monotonic()
    command = made.start(stdin=True)
    with pytest.raises(TimeoutExceededError, match=r"0\.3 s"):
        run_sync(command.send_stdin(b"x" * (16 << 20)))
    assert time.monotonic() - begun < 2
    with pytest.raises(InvalidArgumentError):
        run_sync(command.send_stdin("x", timeout=-1))


def test_an_empty_command_says_what_to_pass(bench: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="first item is the program"):
        bench(lambda conversation, request: None).start([])
