"""Pending and its drivers: what comes, comes once; who waits, can be interrupted; who is cancelled, cleans
up."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ringfence.errors import WrongProcessError
from ringfence.stream.waiting import (
    Cancelled,
    Pending,
    completed,
    gather,
    interruptible,
    run_async,
    run_sync,
    sleep,
    wait_for,
)

Drive = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["sync", "asyncio"])
def drive(request: pytest.FixtureRequest) -> Drive:
    if request.param == "sync":
        return run_sync
    return lambda coroutine: asyncio.run(run_async(coroutine))


def later(seconds: float, function: Callable[..., object], *arguments: object) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


async def value_of(pending: Pending[Any]) -> Any:
    return await pending


# ------------------------------------------------------------------ Pending


def test_pending_completes_once() -> None:
    pending: Pending[int] = Pending()
    assert not pending.done()
    assert pending.set_result(1)
    assert not pending.set_result(2) and not pending.set_exception(KeyError())
    assert pending.done() and pending.result() == 1 and pending.exception() is None and pending.wait() == 1


def test_pending_raises_what_it_completed_with() -> None:
    pending: Pending[int] = Pending()
    pending.set_exception(KeyError("x"))
    for call in (pending.wait, pending.result):
        with pytest.raises(KeyError):
            call()
    assert isinstance(pending.exception(), KeyError)


def test_pending_is_not_read_before_it_is_complete() -> None:
    with pytest.raises(RuntimeError):
        Pending().result()
    with pytest.raises(RuntimeError):
        Pending().exception()


def test_wait_gives_up_after_its_timeout_and_may_be_repeated() -> None:
    pending: Pending[int] = Pending()
    for timeout in (0, -1, 0.01):
        with pytest.raises(TimeoutError):
            pending.wait(timeout)
    later(0.02, pending.set_result, 5)
    assert pending.wait(10) == 5
    assert pending.wait(0) == 5


def test_every_waiting_thread_is_released() -> None:
    pending: Pending[int] = Pending()
    heard: list[int] = []
    threads = [threading.Thread(target=lambda: heard.append(pending.wait(10))) for _ in range(20)]
    for thread in threads:
        thread.start()
    pending.set_result(3)
    for thread in threads:
        thread.join(10)
    assert heard == [3] * 20


def test_waiters_that_give_up_as_the_result_arrives_do_not_close_the_gate_for_others() -> None:
    for _ in range(100):
        pending: Pending[int] = Pending()

        def impatient(pending: Pending[int] = pending) -> None:
            try:
                pending.wait(0.0005)
            except TimeoutError:
                pass

        patient = [threading.Thread(target=pending.wait, args=(10,)) for _ in range(2)]
        threads = [*patient, *(threading.Thread(target=impatient) for _ in range(2))]
        for thread in threads:
            thread.start()
        pending.set_result(1)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_callbacks_are_called_once_and_their_errors_are_contained(caplog: pytest.LogCaptureFixture) -> None:
    pending: Pending[int] = Pending()
    heard: list[object] = []
    pending.add_done_callback(lambda _: 1 / 0)
    pending.add_done_callback(heard.append)
    pending.add_done_callback(removed := (lambda _: heard.append("removed")))
    pending.remove_done_callback(removed)
    pending.set_result(1)
    pending.add_done_callback(heard.append)
    assert heard == [pending, pending]
    assert "ZeroDivisionError" in caplog.text


def test_a_forked_child_is_told_that_the_answer_is_the_parents() -> None:
    pending: Pending[int] = Pending()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pending.wait(5)
        except WrongProcessError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ------------------------------------------------------------------ both drivers


def test_a_coroutine_hears_results_and_errors(drive: Drive) -> None:
    async def main() -> int:
        assert await completed(1) == 1
        pending: Pending[int] = Pending()
        later(0.01, pending.set_result, 2)
        assert await pending == 2
        broken: Pending[int] = Pending()
        later(0.01, broken.set_exception, KeyError("x"))
        with pytest.raises(KeyError):
            await broken
        return 4

    assert drive(main()) == 4


def test_wait_for_raises_timeout_error_and_leaves_the_pending_usable(drive: Drive) -> None:
    async def main() -> None:
        pending: Pending[int] = Pending()
        with pytest.raises(TimeoutError):
            await wait_for(pending, 0.01)
        with pytest.raises(TimeoutError):
            await wait_for(pending, 0)
        assert pending._callbacks in (None, [])
        later(0.01, pending.set_result, 3)
        assert await wait_for(pending, 10) == 3
        assert await wait_for(pending, None) == 3

    drive(main())


def test_wait_for_cancels_a_coroutine_and_awaits_its_end(drive: Drive) -> None:
    ends: list[str] = []

    async def stubborn() -> None:
        try:
            await sleep(10)
        except Cancelled:
            await sleep(0.01)
            ends.append("cleaned up")
            raise

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await wait_for(stubborn(), 0.01)
        assert ends == ["cleaned up"]
        assert await wait_for(value_of(completed(7)), 1) == 7
        assert await wait_for(value_of(completed(7)), None) == 7

    drive(main())


def test_nested_wait_for_keeps_the_shorter_time(drive: Drive) -> None:
    async def main() -> None:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            await wait_for(wait_for(sleep(20), 10), 0.01)
        with pytest.raises(TimeoutError):
            await wait_for(wait_for(sleep(20), 0.01), 10)
        assert time.monotonic() - begun < 5

    drive(main())


def test_gather_runs_side_by_side_and_keeps_the_order(drive: Drive) -> None:
    async def main() -> None:
        first: Pending[int] = Pending()
        second: Pending[int] = Pending()

        async def release() -> int:
            second.set_result(2)
            await sleep(0.01)
            first.set_result(1)
            return 3

        assert await gather(value_of(first), value_of(second), release()) == (1, 2, 3)
        assert await gather() == ()
        assert await gather(gather(value_of(completed(1))), gather()) == ((1,), ())

    drive(main())


def test_gather_with_results_from_many_threads_loses_none(drive: Drive) -> None:
    async def main() -> None:
        pendings: list[Pending[int]] = [Pending() for _ in range(200)]

        def complete(start: int) -> None:
            for index in range(start, 200, 4):
                pendings[index].set_result(index)

        for start in range(4):
            threading.Thread(target=complete, args=(start,)).start()
        assert await gather(*map(value_of, pendings)) == tuple(range(200))

    drive(main())


def test_gather_ends_all_when_one_fails_and_raises_the_first_error(drive: Drive) -> None:
    ended: list[str] = []

    async def fail() -> None:
        await sleep(0.01)
        raise KeyError("first")

    async def other() -> None:
        try:
            await sleep(10)
        finally:
            await sleep(0.01)
            ended.append("other")

    async def main() -> None:
        with pytest.raises(KeyError, match="first"):
            await gather(other(), fail(), other())
        assert ended == ["other", "other"]

    drive(main())


# ------------------------------------------------------------------ the synchronous driver


def test_ctrl_c_during_a_wait_is_thrown_into_the_coroutine_which_cleans_up() -> None:
    heard: list[str] = []

    async def main() -> None:
        try:
            await sleep(10)
        except KeyboardInterrupt:
            await sleep(0.01)
            heard.append("cleaned up")
            raise

    later(0.05, os.kill, os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_sync(main())
    assert heard == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_between_waits_is_held_back_until_the_next_one() -> None:
    heard: list[str] = []

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        heard.append("undisturbed")
        try:
            await sleep(10)
        except KeyboardInterrupt:
            heard.append("interrupted")
            raise

    with pytest.raises(KeyboardInterrupt):
        run_sync(main())
    assert heard == ["undisturbed", "interrupted"]


def test_ctrl_c_that_finds_no_wait_is_raised_at_the_end() -> None:
    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_sync(main())


def test_a_second_ctrl_c_is_raised_wherever_it_hits() -> None:
    async def main() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # noqa: ASYNC251 (stands for code that neither waits nor ends)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sync(main())
    assert time.monotonic() - begun < 5


def test_ctrl_c_reaches_the_users_own_callbacks_at_once() -> None:
    async def main() -> None:
        later(0.05, os.kill, os.getpid(), signal.SIGINT)
        interruptible(time.sleep, 10)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sync(main())
    assert time.monotonic() - begun < 5


def test_an_interrupt_that_is_dealt_with_does_not_end_the_wait() -> None:
    pending: Pending[int] = Pending()

    def interrupt() -> bool:
        later(0.01, pending.set_result, 1)
        return True

    later(0.05, os.kill, os.getpid(), signal.SIGINT)
    assert run_sync(value_of(pending), interrupt) == 1


def test_a_gather_throws_ctrl_c_into_every_coroutine() -> None:
    heard: list[int] = []

    async def one(number: int) -> None:
        try:
            await sleep(10)
        finally:
            heard.append(number)

    later(0.05, os.kill, os.getpid(), signal.SIGINT)

    async def main() -> None:
        await gather(one(1), one(2))

    with pytest.raises(KeyboardInterrupt):
        run_sync(main())
    assert heard == [1, 2]


def test_run_sync_may_be_nested_and_run_in_threads() -> None:
    async def main() -> int:
        return run_sync(value_of(completed(1)))

    assert run_sync(main()) == 1
    heard: list[int] = []
    thread = threading.Thread(target=lambda: heard.append(run_sync(main())))
    thread.start()
    thread.join(10)
    assert heard == [1]


def test_run_sync_says_so_when_a_coroutine_needs_asyncio() -> None:
    class Foreign:
        def __await__(self) -> Any:
            yield object()

    async def main() -> None:
        await Foreign()

    with pytest.raises(RuntimeError, match="asyncio"):
        run_sync(main())


def test_the_synchronous_path_does_not_import_asyncio() -> None:
    code = (
        "import sys; from ringfence.stream.waiting import *; run_sync(sleep(0.001))\n"
        "raise SystemExit('asyncio' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ asyncio


def test_cancelling_the_task_is_thrown_into_the_coroutine_which_cleans_up() -> None:
    heard: list[str] = []

    async def core() -> None:
        try:
            await sleep(10)
        except asyncio.CancelledError:
            await sleep(0.01)
            heard.append("cleaned up")
            raise

    async def main() -> None:
        task = asyncio.create_task(run_async(core()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert heard == ["cleaned up"]


def test_asyncio_timeouts_apply() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_async(gather(sleep(10), sleep(10))), 0.01)

    asyncio.run(main())


def test_a_users_async_callback_may_await_what_asyncio_offers() -> None:
    async def core() -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, future.set_result, 5)
        return await future

    async def main() -> None:
        assert await run_async(core()) == 5
        assert await run_async(gather(core(), core())) == (5, 5)
        assert await run_async(wait_for(core(), 5)) == 5
        with pytest.raises(TimeoutError):
            await run_async(wait_for(asyncio_sleep(10), 0.01))

    async def asyncio_sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)

    asyncio.run(main())


def test_a_result_that_arrives_after_the_loop_is_closed_is_harmless() -> None:
    pending: Pending[int] = Pending()

    async def main() -> None:
        task = asyncio.create_task(run_async(value_of(pending)))
        await asyncio.sleep(0.01)
        del task

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    assert pending.set_result(1)


def test_waiting_leaves_no_cycle_that_keeps_a_pending_alive() -> None:
    pending: Pending[int] = Pending()
    gone = weakref.ref(pending)
    later(0.01, pending.set_result, 1)
    gc.disable()
    try:
        assert run_sync(wait_for(pending, 5)) == 1
        time.sleep(0.05)
        del pending
        deadline = time.monotonic() + 5
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the timer's thread may still be ending
        assert gone() is None
    finally:
        gc.enable()
