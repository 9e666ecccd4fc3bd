"""The laws of owners: threads, event loops, notebooks, worker processes and forks use sandboxes, or are told why not.

Guards the sentence "Sandbox works in a `with`, in Jupyter, in threads, in a running asyncio loop, under multiprocessing
and after fork, or says clearly why not".
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time

import pytest
from leftovers import Owner, run_owner

from ringfence import AsyncSandbox, Sandbox, SandboxDeadError, TimeoutExceededError, WrongProcessError


def in_threads(count, function):
    """Run `function(number)` in threads at once; returns the results, raises the first error."""
    results, errors = {}, []

    def work(number):
        try:
            results[number] = function(number)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(count)]


# -- threads


def test_many_threads_start_and_end_sandboxes_at_once():
    def cycle(number):
        with Sandbox() as sandbox:
            return sandbox.id, sandbox.run_code(f"{number} * 2").text, sandbox.commands.run(f"echo {number}").stdout

    found = in_threads(8, cycle)
    assert [(text, out) for _, text, out in found] == [(str(n * 2), f"{n}\n") for n in range(8)]
    assert len({identifier for identifier, _, _ in found}) == 8


def test_many_threads_share_one_sandbox(sandbox):
    def use(number):
        context = sandbox.create_code_context()
        path = f"/home/user/shared-{number}"
        sandbox.files.write(path, str(number))
        found = (
            sandbox.run_code(f"{number}", context=context).text,
            sandbox.commands.run(["cat", path]).stdout,
            sandbox.files.read(path),
        )
        sandbox.remove_code_context(context)
        return found

    assert in_threads(8, use) == [(str(n), str(n), str(n)) for n in range(8)]


def test_cells_of_one_context_from_many_threads_run_one_after_the_other(sandbox):
    sandbox.run_code("log = []")
    in_threads(6, lambda n: sandbox.run_code(f"import time\nlog.append(({n}, 'begin'))\ntime.sleep(0.02)\nlog.append(({n}, 'end'))"))
    log = eval(sandbox.run_code("log").text)
    assert len(log) == 12 and all(log[at][0] == log[at + 1][0] for at in range(0, 12, 2))


def test_another_thread_can_kill_what_one_waits_for():
    sandbox = Sandbox("plain")
    threading.Timer(0.5, sandbox.kill).start()
    with pytest.raises(SandboxDeadError) as caught:
        sandbox.commands.run("sleep 25")
    assert caught.value.reason == "killed"


# -- event loops


def test_the_sync_facade_works_inside_a_running_loop():
    async def main():
        with Sandbox() as sandbox:
            return sandbox.run_code("1 + 1").text, sandbox.commands.run("echo in").stdout

    assert asyncio.run(main()) == ("2", "in\n")


def test_the_async_facade_has_the_same_names_and_answers():
    async def main():
        async with AsyncSandbox() as sandbox:
            await sandbox.run_code("x = 20")
            await sandbox.files.write("f", "content")
            handle = await sandbox.commands.run("cat; exit 2", background=True, stdin=True)
            await handle.send_stdin("piped")
            await handle.close_stdin()
            result = await handle.wait()
            stream = [piece async for piece in await sandbox.files.read("f", "stream")]
            names = [entry.name for entry in await sandbox.files.list()]
            return (await sandbox.run_code("x + 1")).text, result.stdout, result.exit_code, b"".join(stream), names

    assert asyncio.run(main()) == ("21", "piped", 2, b"content", ["f"])


def test_every_name_of_the_sync_facade_is_in_the_async_one_too():
    from ringfence import _sandbox_async as there
    from ringfence import _sandbox_sync as here

    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(here.Sandbox) == public(there.AsyncSandbox)
    for ours, theirs in ((here.Commands, there.AsyncCommands), (here.Files, there.AsyncFiles), (here.Pty, there.AsyncPty)):
        assert public(ours) == public(theirs)


def test_many_async_sandboxes_work_at_once_and_leave_the_loop_free():
    async def main():
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        async def use(number):
            async with AsyncSandbox("plain") as sandbox:
                return (await sandbox.commands.run(f"sleep 0.5; echo {number}")).stdout

        heart = asyncio.ensure_future(beat())
        found = await asyncio.gather(*(use(number) for number in range(6)))
        heart.cancel()
        return found, beats

    found, beats = asyncio.run(main())
    assert found == [f"{number}\n" for number in range(6)] and beats > 10


def test_a_cancelled_task_stops_its_command_and_the_sandbox_goes_on():
    async def main():
        async with AsyncSandbox("plain") as sandbox:
            task = asyncio.ensure_future(sandbox.commands.run("sleep 96969"))
            await asyncio.sleep(0.4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(500):
                if (await sandbox.commands.run("pgrep -f '^sleep 96969' || echo none")).stdout == "none\n":
                    return True
                await asyncio.sleep(0.02)

    assert asyncio.run(main())


def test_asyncio_timeouts_end_a_cell_and_keep_the_variables():
    async def main():
        async with AsyncSandbox() as sandbox:
            await sandbox.run_code("kept = 3")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox.run_code("import time\ntime.sleep(25)"), 0.5)
            return (await sandbox.run_code("kept")).text

    assert asyncio.run(main()) == "3"


def test_async_callbacks_are_awaited():
    async def main():
        seen = []

        async def take(text):
            await asyncio.sleep(0)
            seen.append(text)

        async with AsyncSandbox("plain") as sandbox:
            await sandbox.commands.run("echo a", on_stdout=take)
        return seen

    assert asyncio.run(main()) == ["a\n"]


def test_one_sandbox_serves_one_loop_after_another():
    sandbox = AsyncSandbox("plain")

    async def start():
        await sandbox.__aenter__()

    async def use():
        return (await sandbox.commands.run("echo x")).stdout

    asyncio.run(start())
    assert [asyncio.run(use()) for _ in range(2)] == ["x\n", "x\n"]
    asyncio.run(sandbox.kill())


def test_a_timeout_in_the_async_facade_is_the_same_error():
    async def main():
        async with AsyncSandbox("plain") as sandbox:
            await sandbox.commands.run("echo part; sleep 60", timeout=0.5)

    with pytest.raises(TimeoutExceededError) as caught:
        asyncio.run(main())
    assert caught.value.partial.stdout == "part\n"


# -- notebooks


def test_cells_of_an_ipython_session_within_a_running_loop_use_sandboxes():
    """As ipykernel does it: an InteractiveShell whose cells run while an event loop runs."""
    out = run_owner("""
import asyncio
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
async def main():
    for cell in (
        "from ringfence import Sandbox, AsyncSandbox\\nsandbox = Sandbox()\\nsandbox.run_code('x = 4')",
        "print(sandbox.run_code('x + 1').text)",
        "async with AsyncSandbox() as other:\\n    print((await other.run_code('6')).text)",
        "sandbox.run_code('x')",
        "sandbox.kill()",
    ):
        outcome = await shell.run_cell_async(cell, transformed_cell=shell.transform_cell(cell))
        outcome.raise_error()
asyncio.run(main())
""")
    assert "5\n" in out and "6\n" in out


# -- processes


def test_a_forked_child_is_told_that_the_sandbox_is_its_parents_and_can_start_its_own():
    run_owner("""
sandbox = Sandbox()
sandbox.run_code("x = 1")
pid = os.fork()
if pid == 0:
    code = 1
    try:
        for operation in (lambda: sandbox.run_code("1"), lambda: sandbox.commands.run("true"), lambda: sandbox.kill(),
                          lambda: sandbox.files.read("x"), lambda: sandbox.info(), lambda: sandbox.stats(),
                      lambda: sandbox.set_timeout(9), lambda: sandbox.create_code_context()):
            try:
                operation()
            except WrongProcessError as error:
                assert error.hint, error
            else:
                raise AssertionError("it was not refused")
        assert Sandbox.list() == []
        with Sandbox() as own:
            assert own.run_code("1 + 1").text == "2"
        code = 0
    finally:
        Node.current().close()
        os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
assert sandbox.run_code("x").text == "1"
sandbox.kill()
""")


def test_a_child_that_leaves_the_parents_with_block_does_not_kill_its_sandbox():
    run_owner("""
with Sandbox("plain") as sandbox:
    pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
with Sandbox("plain") as sandbox:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        assert sandbox.commands.run("echo still").stdout == "still\\n"
if pid == 0:
    os._exit(0)
""")


_WORK = """
import multiprocessing
import concurrent.futures

def work(number):
    with Sandbox() as sandbox:
        return sandbox.run_code(f"{number} * 10").text

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    with Sandbox() as sandbox:
        with context.Pool(2) as pool:
            assert pool.map(work, range(4)) == ["0", "10", "20", "30"]
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            assert list(pool.map(work, range(2))) == ["0", "10"]
        assert sandbox.run_code("5").text == "5"
    ready()
    sys.stdin.readline()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_start_sandboxes_of_their_own(tmp_path, method):
    with Owner(_WORK.replace("METHOD", repr(method)), file=tmp_path / "work.py") as owner:
        owner.line()
        owner.go_on()
        owner.finish()


def test_a_sandbox_is_not_pickled_and_says_why(sandbox):
    with pytest.raises(WrongProcessError, match="pickled"):
        pickle.dumps(sandbox)


def test_errors_survive_the_way_between_processes(sandbox):
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.commands.run("echo x; sleep 20", timeout=0.3)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.partial.stdout == "x\n" and again.limit == 0.3


def test_a_subprocess_of_the_owner_inherits_no_descriptor_of_a_sandbox():
    import os
    import subprocess

    with Sandbox("plain"):
        listing = subprocess.run(
            ["python3", "-c", "import os; print(*[os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if int(n) > 2 and os.path.exists(f'/proc/self/fd/{n}')])"],
            capture_output=True, text=True, check=True, close_fds=False,
        ).stdout  # fmt: skip
    assert "socket:" not in listing and "pidfd" not in listing, listing
    assert os.getpid()


# -- pools


def test_pooled_sandboxes_are_used_once_and_are_fresh():
    pool = Sandbox.prewarm(2, "base", metadata={"pool": "law"})
    try:
        pool.wait_full()
        waiting = {handle.id for handle in pool.waiting()}
        assert len(waiting) == 2 and not waiting & {info.id for info in Sandbox.list()}
        probe = (
            "import os, random, secrets, tempfile, uuid\n"
            "open('left', 'x').close()\n"
            "print(secrets.token_hex(8), random.random(), uuid.uuid4(), uuid.uuid1().node, tempfile.mktemp(), os.urandom(8).hex(), sep='\\n')"
        )
        seen, identifiers = [], []
        for _ in range(4):
            before = time.time()
            with Sandbox("base", metadata={"pool": "law"}) as sandbox:
                info = sandbox.info()
                assert info.started_at.timestamp() >= before - 0.001 and info.metadata == {"pool": "law"}
                assert info.expires_at.timestamp() - before == pytest.approx(info.limits.max_age, abs=5)
                identifiers.append(sandbox.id)
                execution = sandbox.run_code(probe)
                assert execution.error is None, execution.error
                seen.append("".join(execution.logs.stdout).split())
                assert sandbox.commands.run("pgrep -c python || true").stderr == ""
            pool.wait_full()
        assert len(set(identifiers)) == 4 and waiting <= set(identifiers)
        for values in zip(*seen, strict=True):
            assert len(set(values)) == 4, f"repeated between sandboxes: {values}"
    finally:
        Sandbox.prewarm(0, "base", metadata={"pool": "law"})


def test_sandboxes_without_a_pool_have_randomness_of_their_own_too():
    probe = "import random, secrets, uuid, tempfile\nprint(random.random(), secrets.token_hex(8), uuid.uuid4(), tempfile.mktemp())"
    seen = []
    for _ in range(3):
        with Sandbox() as sandbox:
            seen.append("".join(sandbox.run_code(probe).logs.stdout).split())
    assert all(len(set(values)) == 3 for values in zip(*seen, strict=True))


def test_contexts_of_one_sandbox_have_randomness_of_their_own(data_sandbox):
    probe = "import random, secrets, numpy\nprint(random.random(), secrets.token_hex(8), numpy.random.rand())"
    seen = []
    for _ in range(3):
        context = data_sandbox.create_code_context()
        seen.append("".join(data_sandbox.run_code(probe, context=context).logs.stdout).split())
        data_sandbox.remove_code_context(context)
    assert all(len(set(values)) == 3 for values in zip(*seen, strict=True))


def test_the_times_of_a_pooled_sandbox_begin_when_it_is_handed_out():
    options = {"max_age": 4.0, "idle": 1.0, "limits": {"timeout": 2}}
    pool = Sandbox.prewarm(1, "plain", **options)
    try:
        pool.wait_full()
        time.sleep(2.5)
        waiting = [handle.id for handle in pool.waiting()]
        assert len(waiting) == 1, "waiting is not being idle"
        sandbox = Sandbox("plain", **options)
        assert sandbox.id in waiting
        handle = sandbox.commands.run("sleep 2.5; echo lived", background=True)
        assert handle.wait().stdout == "lived\n"
        sandbox.kill()
    finally:
        Sandbox.prewarm(0, "plain", **options)


def test_an_emptied_pool_leaves_no_sandbox():
    from leftovers import descendants, launcher_pid, zygote_pids

    Sandbox("plain").kill()
    before, zygotes = descendants(launcher_pid()), set(zygote_pids())
    pool = Sandbox.prewarm(3, "plain", envs={"RF_POOL": "x"})
    pool.wait_full()
    assert len(descendants(launcher_pid()) - before - zygotes) >= 3
    with Sandbox("plain", envs={"RF_POOL": "x"}) as sandbox:
        assert sandbox.commands.run("echo $RF_POOL").stdout == "x\n"
    Sandbox.prewarm(0, "plain", envs={"RF_POOL": "x"})
    deadline = time.monotonic() + 10
    while pool.waiting() or descendants(launcher_pid()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
