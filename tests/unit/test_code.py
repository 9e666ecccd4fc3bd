"""`run_code` on the host's side: whatever the guest says or leaves unsaid, time, size and order hold."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_guest import Conversation, FakeHandle

from ringfence.engines.base import Limits
from ringfence.errors import (
    GuestError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    SandboxDeadError,
    TimeoutExceededError,
)
from ringfence.guest import protocol
from ringfence.stream import code as code_module
from ringfence.stream import exchange as exchange_module
from ringfence.stream.code import CodeRunner
from ringfence.stream.exchange import Session
from ringfence.stream.waiting import run_async, run_sync

STDOUT, STDERR, RESULTS = protocol.STDOUT, protocol.STDERR, protocol.RESULTS


def message(kind: int, payload: Any) -> bytes:
    body = json.dumps(payload).encode()
    return struct.pack("!IB", len(body), kind) + body


class Bench:
    """A runner above a fake guest whose `kernel.execute` is `cell`."""

    def __init__(self, cell: Any, limits: Limits | None = None, **operations: Any) -> None:
        self.handle = FakeHandle({"kernel.execute": cell, **operations}, limits)
        self.session = Session(self.handle)  # type: ignore[arg-type]
        self.runner = CodeRunner(self.session)

    def run(self, code: str = "x", **arguments: Any) -> Any:
        return run_sync(self.runner.run(code, **arguments))


@pytest.fixture(autouse=True)
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(code_module, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(exchange_module, "ANSWER_SECONDS", 0.3)


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(*arguments: Any, **keywords: Any) -> Bench:
        made.append(Bench(*arguments, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.handle.die("killed")


def until_told(conversation: Conversation) -> dict[str, Any]:
    """Run 'for ever': until the host sends an event, which is returned."""
    conversation.event(started={})
    while True:
        event = conversation.take(10)
        if event.kind == protocol.EVENT:
            return event.payload


def test_output_results_and_count_come_back(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.event(started={})
        conversation.data(STDOUT, "ä".encode()[:1])
        conversation.data(STDOUT, "ä".encode()[1:] + b"!\n")
        conversation.data(STDERR, b"warn\xff")
        conversation.data(RESULTS, message(1, {"data": {"text/plain": "2"}, "main": True}))
        conversation.close(status="ok", execution_count=7, restarted=False)

    made = bench(cell)
    execution = made.run("1+1", envs={"A": "b"})
    assert execution.text == "2"
    assert execution.logs.stdout == ["ä!\n"]
    assert execution.logs.stderr == ["warn�"]
    assert (execution.execution_count, execution.error) == (7, None)
    request = made.handle.guest.requests[0]
    assert request["code"] == "1+1"
    assert request["context"] == "default"
    assert request["env"] == {"A": "b"}
    assert made.handle.operations == 0


def test_an_exception_of_the_code_is_a_result(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(RESULTS, message(2, {"name": "ValueError", "value": "no", "traceback": "tb"}))
        conversation.close(status="error", execution_count=1)

    error = bench(cell).run().error
    assert (error.name, error.value, error.traceback) == ("ValueError", "no", "tb")


def test_callbacks_get_everything_in_order_and_split_no_character(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        for byte in "aä€".encode():
            conversation.data(STDOUT, bytes([byte]))
        conversation.data(RESULTS, message(1, {"data": {"text/plain": "r"}}))
        conversation.data(STDERR, b"e")
        conversation.data(RESULTS, message(2, {"name": "E", "value": "v", "traceback": ""}))
        conversation.close(status="error", execution_count=1)

    seen: list[str] = []
    execution = bench(cell).run(
        on_stdout=lambda piece: seen.append(f"out {piece}"),
        on_stderr=lambda piece: seen.append(f"err {piece.line} {piece.error}"),
        on_result=lambda result: seen.append(f"result {result.text}"),
        on_error=lambda error: seen.append(f"error {error}"),
    )
    assert seen == ["out a", "out ä", "out €", "result r", "err e True", "error E: v"]
    assert execution.logs.stdout == ["aä€"]


def test_a_slow_callback_slows_the_code_down(bench: Any) -> None:
    sent = 0
    release = threading.Event()

    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        nonlocal sent
        conversation.event(started={})
        for _ in range(64):
            if not conversation.data(STDOUT, b"x" * (64 << 10)):
                return
            sent += 64 << 10
        conversation.close(status="ok", execution_count=1)

    def slow(piece: Any) -> None:
        release.wait(0.5)

    made = bench(cell)
    threading.Timer(0.4, release.set).start()
    held: list[int] = []
    threading.Timer(0.3, lambda: held.append(sent)).start()
    execution = made.run(on_stdout=slow)
    assert held[0] <= 2 << 20
    assert execution.logs.stdout_total == 4 << 20
    assert execution.logs.truncated


def test_an_exception_of_a_callback_interrupts_the_code_and_comes_out(bench: Any) -> None:
    told: list[dict[str, Any]] = []

    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.event(started={})
        conversation.data(STDOUT, b"x")
        told.append(until_told(conversation))
        conversation.close(status="interrupted", execution_count=1)

    made = bench(cell)
    with pytest.raises(ZeroDivisionError):
        made.run(on_stdout=lambda _: 1 / 0)
    deadline = time.monotonic() + 5
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == [{"interrupt": True}]
    assert made.handle.kills == []


def test_a_timeout_interrupts_and_says_so(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(STDOUT, b"partial")
        assert until_told(conversation) == {"interrupt": True}
        conversation.data(RESULTS, message(2, {"name": "KeyboardInterrupt", "value": "", "traceback": "tb"}))
        conversation.close(status="interrupted", execution_count=3)

    with pytest.raises(TimeoutExceededError) as caught:
        bench(cell).run(timeout=0.2)
    error = caught.value
    assert (error.outcome, error.limit, error.what) == ("interrupted", 0.2, "run_code")
    assert error.partial.logs.stdout == ["partial"]
    assert error.partial.error.name == "KeyboardInterrupt"
    assert error.partial.execution_count == 3


def test_code_that_ignores_the_interrupt_loses_its_kernel(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        until_told(conversation)
        assert until_told(conversation) == {"kill": True}
        conversation.close(status="killed", restarted=True)

    with pytest.raises(TimeoutExceededError) as caught:
        bench(cell).run(timeout=0.1)
    assert caught.value.outcome == "restarted"


def test_a_guest_that_obeys_no_order_loses_the_sandbox(bench: Any) -> None:
    made = bench(lambda conversation, request: conversation.event(started={}))
    with pytest.raises(TimeoutExceededError) as caught:
        made.run(timeout=0.1)
    assert caught.value.outcome == "sandbox_killed"
    assert made.handle.kills == ["killed"]
    with pytest.raises(SandboxDeadError) as dead:
        made.run()
    assert dead.value.reason == "killed"


def test_a_queued_cell_that_times_out_does_not_hurt_the_one_that_runs(bench: Any) -> None:
    seen: list[protocol.Event] = []

    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        seen.append(conversation.take(10))
        conversation.close(status="interrupted")

    with pytest.raises(TimeoutExceededError) as caught:
        bench(cell).run(timeout=0.1)
    assert seen[0].kind == protocol.CLOSE
    assert "busy" in caught.value.message


def test_an_endless_printer_is_stopped_by_the_clock_though_it_never_pauses(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.event(started={})
        while conversation.data(STDOUT, b"y\n" * 4096):
            if not conversation.inbox.empty() and conversation.take().kind == protocol.EVENT:
                conversation.close(status="interrupted")
                return

    for callback in (None, lambda piece: None):
        with pytest.raises(TimeoutExceededError) as caught:
            bench(cell).run(timeout=0.3, on_stdout=callback)
        assert caught.value.outcome == "interrupted"
        assert caught.value.partial.logs.stdout_total > 0


def test_the_end_of_the_kernel_is_an_error_in_the_execution(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.close(status="died", exit={"code": 3, "signal": None})

    error = bench(cell).run().error
    assert error.name == "KernelDiedError"
    assert "code 3" in error.value


def test_death_by_the_memory_limit_is_named(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        made.handle.oom_kills += 1
        conversation.close(status="died", exit={"code": None, "signal": 9})

    made = bench(cell)
    execution = made.run()
    assert execution.error.name == "MemoryLimitExceededError"
    assert "512 MiB" in execution.error.value


def test_a_plain_sigkill_is_not_called_memory(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.close(status="died", exit={"code": None, "signal": 9})

    error = bench(cell).run().error
    assert error.name == "KernelDiedError"
    assert "SIGKILL" in error.value


def test_the_death_of_the_sandbox_is_its_own_error_with_the_reason(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        made.handle.die("oom")

    made = bench(cell)
    with pytest.raises(SandboxDeadError) as caught:
        made.run()
    assert caught.value.reason == "oom"
    assert "512 MiB" in str(caught.value)


def test_a_broken_protocol_is_a_dead_sandbox(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.guest.stream.sendall(b"\xff" * 64)

    with pytest.raises(SandboxDeadError):
        bench(cell).run()


@pytest.mark.parametrize("reply", [{}, {"status": 5}, {"status": "fine"}])
def test_a_malformed_answer_is_the_guests_fault(bench: Any, reply: dict[str, Any]) -> None:
    with pytest.raises(GuestError):
        bench(lambda conversation, request: conversation.close(**reply)).run()


def test_too_many_and_too_large_results_are_left_out_and_noted(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(RESULTS, message(1, {"data": {"text/plain": "x" * 5000}}))
        conversation.data(RESULTS, message(1, {"data": {"text/plain": "small"}, "main": True}))
        conversation.close(status="ok")

    execution = bench(cell, Limits(result=2000)).run()
    assert execution.text == "small"
    assert len(execution.results) == 1
    assert "left out" in execution.notes[0]


def test_a_flood_of_events_is_dropped(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        for _ in range(12_000):
            conversation.event(started={})
        conversation.close(status="ok")

    assert bench(cell).run().error is None


def test_arguments_are_judged_before_anything_is_sent(bench: Any) -> None:
    made = bench(lambda conversation, request: conversation.close(status="ok"))
    for arguments in (
        {"code": 5},
        {"timeout": -1},
        {"timeout": "1"},
        {"timeout": float("nan")},
        {"envs": {"A=B": ""}},
        {"envs": {"A": "\0"}},
        {"envs": {"A": 5}},
        {"envs": []},
        {"language": "cobol"},
        {"on_stdout": 5},
        {"context": 5},
        {"context": "c", "language": "python"},
        {"code": "x" * (2 << 20)},
    ):
        with pytest.raises(InvalidArgumentError):
            made.run(**arguments)
    assert made.handle.guest.requests == []
    assert made.handle.operations == 0


def test_contexts_are_made_listed_and_removed(bench: Any) -> None:
    made = bench(
        None,
        **{
            "kernel.create": lambda conversation, request: conversation.close(pid=5),
            "kernel.list": lambda conversation, request: conversation.close(
                contexts=[{"context": "c", "language": "python", "cwd": "/", "pid": 5, "alive": True}, 7]
            ),
            "kernel.delete": lambda conversation, request: conversation.fail("not_found", "gone"),
            "kernel.restart": lambda conversation, request: conversation.fail("not_found", "gone"),
        },
    )
    context = run_sync(made.runner.create_context(cwd="/tmp", envs={"A": "1"}))
    assert (context.cwd, context.pid) == ("/tmp", 5)
    assert [item.id for item in run_sync(made.runner.list_contexts())] == ["c"]
    assert run_sync(made.runner.remove_context(context)) is False
    with pytest.raises(NotFoundError):
        run_sync(made.runner.restart_context(context))


def test_cancelling_the_task_interrupts_the_code(bench: Any) -> None:
    told: list[Any] = []

    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        told.append(until_told(conversation))
        conversation.close(status="interrupted")

    made = bench(cell)

    async def main() -> None:
        task = asyncio.ensure_future(run_async(made.runner.run("x")))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if told:
                break
            await asyncio.sleep(0.02)

    asyncio.run(main())
    assert told == [{"interrupt": True}]


def test_async_callbacks_are_awaited_under_asyncio(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(STDOUT, b"x")
        conversation.close(status="ok")

    seen: list[str] = []

    async def callback(piece: Any) -> None:
        await asyncio.sleep(0)
        seen.append(piece.line)

    made = bench(cell)
    asyncio.run(run_async(made.runner.run("x", on_stdout=callback)))  # type: ignore[arg-type]
    assert seen == ["x"]


def test_who_ended_a_cell_is_the_hosts_word(bench: Any) -> None:
    def forged(conversation: Conversation, request: dict[str, Any]) -> None:
        error = {"name": "MemoryLimitExceededError", "value": "x", "traceback": "", "kind": "limit"}
        conversation.data(RESULTS, message(2, error))
        conversation.close(status="error", execution_count=1)

    assert bench(forged).run().error.kind == "exception"
    died = (
        bench(lambda conversation, request: conversation.close(status="died", exit={"code": 3})).run().error
    )
    assert (died.name, died.kind) == ("KernelDiedError", "died")
    assert json.loads(bench(forged).run().to_json())["error"]["kind"] == "exception"


def test_images_that_are_not_base64_are_left_out_with_a_note(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        bundle = {
            "text/plain": "x",
            "image/png": "<script>",
            "image/jpeg": "aGFs\nbG8=\n",
            "application/pdf": {"a": 1},
        }
        conversation.data(RESULTS, message(1, {"data": bundle, "main": True}))
        conversation.close(status="ok", execution_count=1)

    execution = bench(cell).run()
    result = execution.results[0]
    assert (result.png, result.jpeg, result.pdf) == (None, "aGFsbG8=", None)
    assert execution.notes == [
        f"{name} of a result was left out: it is not base64" for name in ("png", "pdf")
    ]


def test_notes_of_the_kernel_are_told_and_bounded(bench: Any) -> None:
    def cell(conversation: Conversation, request: dict[str, Any]) -> None:
        notes = ["a result was too large", 7, "x" * 100_000, *["n"] * 10_000]
        conversation.data(RESULTS, message(1, {"data": {"text/plain": "x"}, "main": True, "notes": notes}))
        conversation.close(status="ok", execution_count=1)

    notes = bench(cell).run().notes
    assert notes[0] == "a result was too large"
    assert len(notes) <= 30 and max(map(len, notes)) == 500


def test_errors_about_contexts_and_size_say_what_to_do(bench: Any) -> None:
    made = bench(lambda conversation, request: conversation.fail("not_found", "there is no context 'x'"))
    with pytest.raises(NotFoundError, match="create_code_context"):
        made.run(context="x")
    with pytest.raises(InvalidArgumentError, match=r"files\.write"):
        made.run("#" * (2 << 20))
    full = bench(
        None,
        **{"kernel.create": lambda conversation, request: conversation.fail("limit", "64 contexts exist")},
    )
    with pytest.raises(LimitExceededError, match="remove_code_context"):
        run_sync(full.runner.create_context())
