"""The kernel loop keeps its promises whatever a cell does: interrupts, streams, forks, attribution, forgery."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from kernel_driver import Kernel, Zygote

pytest.importorskip("IPython")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    warmed = Zygote(home=str(tmp_path_factory.mktemp("home")))
    yield warmed
    warmed.close()


@pytest.fixture
def kernel(zygote: Zygote) -> Iterator[Kernel]:
    one = zygote.kernel()
    yield one
    one.close()


# --- the zygote ------------------------------------------------------------------------------------------------------

def test_a_warmed_zygote_has_one_thread_no_descriptor_no_event_loop_no_file(zygote: Zygote) -> None:
    report = zygote.report
    assert report["problems"] == []
    assert len(report["threads"]) == 1
    assert set(report["descriptors"]) - {report["wire"]} <= {0, 1, 2, 3}  # 3: the listing itself
    assert report["asyncio_loop"] == "None"
    assert os.listdir(zygote.home) == []


def test_a_fresh_kernel_shows_no_trace_of_the_warm_up(kernel: Kernel) -> None:
    run = kernel.run("In[1:], Out, [n for n in dir() if not n.startswith('_')]")
    assert run.execution_count == 1
    assert run.text is not None and "display" not in run.text
    assert eval(run.text)[0] == ["In[1:], Out, [n for n in dir() if not n.startswith('_')]"]
    assert sorted(eval(run.text)[2]) == ["In", "Out", "exit", "get_ipython", "open", "quit"]


def test_siblings_differ_in_every_source_of_randomness(zygote: Zygote) -> None:
    code = ("import random, tempfile, uuid, secrets, multiprocessing\n"
            "(random.random(), tempfile.mktemp(), uuid.uuid4(), uuid.uuid1(), secrets.token_hex(4), "
            "bytes(multiprocessing.current_process().authkey))")
    texts = []
    for _ in range(2):
        one = zygote.kernel()
        texts.append(str(one.run(code).text).splitlines())
        one.close()
    assert all(a != b for a, b in zip(*texts, strict=True))


def test_environment_and_directory_are_those_of_the_configuration(zygote: Zygote, tmp_path: object) -> None:
    one = zygote.kernel(env={"ONLY": "this", "HOME": "/tmp"}, cwd=str(tmp_path))
    run = one.run("import os\nos.environ['ONLY'], os.environ.get('LC_ALL'), os.getcwd()")
    assert run.text is not None and eval(run.text) == ("this", None, str(tmp_path))
    assert eval(str(one.run("os.environ['ONLY']", env={"ONLY": "now"}).text)) == "now"
    assert eval(str(one.run("os.environ['ONLY']").text)) == "this"
    one.close()


def test_a_missing_directory_is_a_note_not_a_failure(zygote: Zygote) -> None:
    one = zygote.kernel(cwd="/no/such/place")
    assert "cannot enter '/no/such/place'" in one.run("1").stderr
    one.close()


# --- interrupts ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [
    "import time\nprint('go')\ntime.sleep(100)",
    "print('go')\nwhile True: pass",
    "import asyncio\nprint('go')\nawait asyncio.sleep(100)",
    "import asyncio\nprint('go')\nwhile True: await asyncio.sleep(0)",
    "import asyncio\nawait asyncio.sleep(0)\nprint('go')\nwhile True: pass",
    "!echo go; sleep 100",
    "%%bash\necho go\nsleep 100",
    "print('go')\ny = !sleep 100",
    "class R:\n    def __repr__(self):\n        print('go')\n        while True: pass\ndisplay(R())",
    "import subprocess\nprint('go')\nsubprocess.run(['sleep', '100'])",
], ids=lambda code: code.splitlines()[-1])
def test_an_interrupt_ends_the_cell_and_keeps_the_variables(kernel: Kernel, code: str) -> None:
    kernel.run("kept = 41")
    run = kernel.run(code + "\nprint('after')", interrupt_on="go")
    assert run.status == "interrupted"
    assert run.error is not None and run.error["name"] == "KeyboardInterrupt"
    assert "after" not in run.stdout
    assert kernel.run("kept + 1").text == "42"


def test_an_interrupt_that_comes_just_before_a_long_call_still_ends_it(kernel: Kernel) -> None:
    # Another thread takes the signal, so the main thread's call goes on: as when it arrives between the interpreter's
    # last look for signals and the call.
    run = kernel.run(
        "import signal, threading, time\n"
        "taker = threading.Thread(target=time.sleep, args=(100,), daemon=True)\n"
        "taker.start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "try:\n"
        "    threading.Timer(0.3, print, ['go']).start()\n"
        "    time.sleep(100)\n"
        "finally:\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n",
        interrupt_on="go",
    )
    assert run.status == "interrupted"
    assert kernel.run("1 + 1").text == "2"


def test_a_cancelled_await_does_not_go_on_in_the_next_cell(kernel: Kernel) -> None:
    run = kernel.run("import asyncio\nprint('go')\nawait asyncio.sleep(0.3)\nprint('zombie')", interrupt_on="go")
    assert run.status == "interrupted"
    assert kernel.run("await asyncio.sleep(0.5)").stdout == ""


def test_interrupts_between_cells_are_ignored(kernel: Kernel) -> None:
    for _ in range(20):
        os.kill(kernel.pid, 2)
        time.sleep(0.002)
    assert kernel.run("'alive'").text == "'alive'"


def test_an_interrupt_is_possible_again_after_the_cell_took_the_handler_away(kernel: Kernel) -> None:
    kernel.run("import signal, time; _ = signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
               "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])")
    assert kernel.run("print('go'); time.sleep(60)", interrupt_on="go").status == "interrupted"


def test_a_storm_of_interrupts_during_results_leaves_the_channel_whole(kernel: Kernel) -> None:
    token = kernel.start("import os, signal, threading, time\n"
                         "caught = 0\n"
                         "print('go')\n"
                         "end = time.time() + 0.6\n"
                         "while time.time() < end:\n"
                         "    try:\n"
                         "        display('x' * 3000)\n"
                         "        os.kill(os.getpid(), signal.SIGINT)\n"
                         "        display('y' * 3000)\n"
                         "    except KeyboardInterrupt:\n"
                         "        caught += 1\n"
                         "caught > 10")
    run = kernel.collect(token)
    assert run.text == "True" and run.status == "ok"
    assert all(set(d["text/plain"]) <= set("'xy") and len(d["text/plain"]) == 3002 for d in run.displays)


def test_handlers_of_the_user_persist_and_may_raise_anywhere(kernel: Kernel) -> None:
    kernel.run("import signal, time\ndef h(*a): raise TimeoutError('alarm')\nsignal.signal(signal.SIGALRM, h);")
    kernel.run("signal.setitimer(signal.ITIMER_REAL, 0.05);")
    time.sleep(0.2)
    run = kernel.run("1")
    assert run.text == "1" and "TimeoutError: alarm" in run.stderr
    run = kernel.run("signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(5)")
    assert run.error is not None and run.error["name"] == "TimeoutError"
    run = kernel.run("for i in range(200):\n"
                     "    try:\n"
                     "        signal.setitimer(signal.ITIMER_REAL, 0.0003)\n"
                     "        for _ in range(3000): display('z' * 2000)\n"
                     "    except Exception: pass  # IPython may word it differently\n"
                     "signal.setitimer(signal.ITIMER_REAL, 0);")
    assert run.status == "ok"
    assert all(d["text/plain"] == "'" + "z" * 2000 + "'" for d in run.displays)


# --- output ----------------------------------------------------------------------------------------------------------

def test_everything_written_before_the_end_is_out_before_done(kernel: Kernel) -> None:
    run = kernel.run("import sys, ctypes, os\nsys.stdout.write('no newline')\nctypes.CDLL(None).printf(b' from C')\n"
                     "sys.stderr.write('err'); open('/dev/stderr', 'w').write('+file')\n")
    assert run.stdout == "no newline from C"
    assert "err" in run.stderr and "+file" in run.stderr


@pytest.mark.parametrize("harm", [
    "import os; os.close(1)", "import os; os.close(2); os.close(1)", "import sys; sys.stdout = None",
    "import sys; del sys.stdout", "import sys, io; sys.stdout = io.StringIO()", "import sys; sys.stdout.close()",
    "import sys; sys.stdout.detach()", "import os; os.dup2(os.open('/dev/null', 1), 1)",
    "import os; os.closerange(3, 256)",
])
def test_broken_streams_are_repaired_at_the_next_cell(kernel: Kernel, harm: str) -> None:
    kernel.run(harm)
    run = kernel.run("print('back')")
    assert run.stdout == "back\n"
    assert ("restored" in run.stderr) == ("closerange" not in harm)


def test_text_that_no_encoding_has_is_printed_escaped(kernel: Kernel) -> None:
    assert kernel.run("print('a\\ud83d')").stdout == "a\\ud83d\n"


def test_a_lot_of_output_comes_through(kernel: Kernel) -> None:
    run = kernel.run("for i in range(20000): print('y' * 50)")
    assert run.stdout == ("y" * 50 + "\n") * 20000


# --- what a cell may break -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("harm", [
    ("import json, socket, os, struct, signal, threading\njson.dumps = json.loads = socket.socket = os.write = None\n"
    "struct.pack = os.getpid = os.fstat = signal.signal = threading.get_ident = json.encoder.c_make_encoder = None\n"
    "json.JSONEncoder.encode = json.decoder.scanstring = None"),
    "import builtins; del builtins.len",
    "import builtins; builtins.isinstance = builtins.str = None",
    "import builtins; builtins.print = None",
    "import builtins; vars(builtins).clear()",
    "import sys; sys.modules.clear()",
    "import sys; sys.modules = {}",
    "import sys; del sys.modules['sys'], sys.modules['os'], sys.modules['__main__']",
    "del __builtins__",
    "globals().clear()",
    "import sys; sys.displayhook = None",
    "import gc; gc.disable()",
    "import sys; sys.settrace(lambda *a: 1/0)",
    "import sys; sys.setprofile(lambda *a: None)",
    "import sys; sys.excepthook = sys.stdin = sys.argv = sys.path_hooks = None",
    "import os; os.environ.clear(); os.chdir('/')",
    "import asyncio; asyncio.all_tasks = asyncio.current_task = None",
    "import traceback; traceback.format_exception = traceback.format_tb = None",
])
def test_the_loop_outlives_what_a_cell_breaks(kernel: Kernel, harm: str) -> None:
    kernel.run(harm)
    kernel.run("1 + 1")
    run = kernel.run("2 + 3")
    assert run.text == "5" and run.status == "ok", run


def test_a_trace_function_works_in_cells_and_never_sees_the_loop(kernel: Kernel) -> None:
    kernel.run("import sys\nseen = set()\ndef spy(frame, event, arg):\n    seen.add(frame.f_code.co_name)\n"
               "sys.setprofile(spy)")
    kernel.run("def traced(): pass\ntraced()")
    kernel.run("sys.setprofile(None)")
    names = eval(str(kernel.run("sorted(seen)").text))
    assert "traced" in names
    assert not {"finish", "requests", "set_token", "_send_end", "_pipeline"} & set(names)


@pytest.mark.parametrize(("code", "status"), [("import os; os._exit(3)", 3), ("import os; os.abort()", None)])
def test_a_dying_process_ends_the_channel(zygote: Zygote, code: str, status: int | None) -> None:
    one = zygote.kernel()
    assert one.run(code).died
    one.close()


@pytest.mark.parametrize("code", ["exit()", "exit", "quit", "quit()", "exit(3)", "import sys; sys.exit('bye')",
                                  "raise SystemExit"])
def test_exit_is_an_error_and_the_kernel_lives(kernel: Kernel, code: str) -> None:
    kernel.run("x = 1")
    run = kernel.run(code)
    assert run.status == "error" and run.error is not None and run.error["name"] == "SystemExit"
    assert kernel.run("x").text == "1"


# --- processes -------------------------------------------------------------------------------------------------------

def test_a_forked_child_ends_with_its_copy_of_the_cell(kernel: Kernel) -> None:
    run = kernel.run("import os, sys\npid = os.fork()\nif pid == 0:\n    print('child'); raise ValueError('in child')\n"
                     "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
    assert run.text == "1" and run.dropped == 0 and "in child" in run.stderr and "child" in run.stdout
    run = kernel.run("pid = os.fork()\nif pid == 0: sys.exit(4)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
    assert run.text == "4"
    run = kernel.run("pid = os.fork()\nif pid == 0:\n    display('from child'); 'result of child'\n"
                     "_ = pid and os.waitpid(pid, 0)\n'parent'")
    assert run.text == "'parent'" and run.displays == []


def test_a_child_that_python_does_not_know_of_cannot_answer(kernel: Kernel) -> None:
    run = kernel.run("import ctypes, os\npid = ctypes.CDLL(None).fork()\n"
                     "if pid: os.waitpid(pid, 0)\n'parent' if pid else 'child'")
    assert [result["data"]["text/plain"] for result in run.results] == ["'parent'"]


def test_multiprocessing_by_fork_spawn_and_forkserver(kernel: Kernel) -> None:
    kernel.run("import multiprocessing, math\ndef square(x): return x * x")
    run = kernel.run("with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(square, [1, 2, 3]))")
    assert run.stdout == "[1, 4, 9]\n"
    for method in ("spawn", "forkserver"):
        run = kernel.run(f"with multiprocessing.get_context('{method}').Pool(1) as pool:\n"
                         "    print(pool.map(math.factorial, [3]))")
        assert run.stdout == "[6]\n", run
    run = kernel.run("child = multiprocessing.get_context('spawn').Process(target=square, args=(1,))\n"
                     "child.start(); child.join(); child.exitcode")
    assert run.text == "1" and "Can't get attribute 'square'" in run.stderr


# --- results belong to one execution ---------------------------------------------------------------------------------

def test_a_thread_that_outlives_its_cell_adds_nothing_to_the_next(kernel: Kernel) -> None:
    run = kernel.run("import threading, time\n"
                     "def late():\n    gate.wait(); display('late')\n"
                     "gate = threading.Event()\n"
                     "thread = threading.Thread(target=late); thread.start()\n"
                     "quick = threading.Thread(target=lambda: display('in time')); quick.start(); quick.join()")
    assert [d["text/plain"] for d in run.displays] == ["'in time'"]
    run = kernel.run("gate.set(); thread.join()\n"
                     "new = threading.Thread(target=lambda: display('new')); new.start(); new.join()\ndisplay('own')")
    assert [d["text/plain"] for d in run.displays] == ["'new'", "'own'"]


def test_a_task_of_an_earlier_cell_runs_on_but_adds_nothing(kernel: Kernel) -> None:
    kernel.run("import asyncio\nasync def work():\n    global steps\n    for steps in range(1000):\n"
               "        await asyncio.sleep(0.01); display('task')\n"
               "task = asyncio.create_task(work())\nawait asyncio.sleep(0)")
    time.sleep(0.3)
    run = kernel.run("steps")
    assert run.text is not None and int(run.text) > 3, "tasks run between cells"
    run = kernel.run("before = steps\nawait asyncio.sleep(0.1)\ndisplay('own'); steps > before")
    assert run.text == "True" and [d["text/plain"] for d in run.displays] == ["'own'"]
    run = kernel.run("async def shout(): display('mine')\nawait asyncio.to_thread(display, 'thread')\nawait shout()")
    assert [d["text/plain"] for d in run.displays] == ["'thread'", "'mine'"]
    kernel.run("task.cancel();")


def test_a_result_that_is_too_large_is_replaced_by_a_sentence(zygote: Zygote) -> None:
    one = zygote.kernel(result_limit=10000)
    run = one.run("'x' * 20000")
    assert run.status == "ok" and run.text is not None and "limit of 10000 bytes" in run.text
    assert "too large" in run.stderr
    run = one.run("from IPython.display import HTML\nHTML('h' * 20000)")
    assert run.main is not None and "text/html" not in run.main and "HTML object" in run.main["text/plain"]
    assert one.run("'x' * 5000").text == repr("x" * 5000)
    one.close()


# --- forgery ---------------------------------------------------------------------------------------------------------

def test_bytes_written_to_found_descriptors_are_dropped(kernel: Kernel) -> None:
    run = kernel.run("import os, struct\n"
                     "for n in os.listdir('/proc/self/fd'):\n"
                     "    if int(n) > 2:\n"
                     "        for token in (bytes(16), os.urandom(16)):\n"
                     "            try: os.write(int(n), struct.pack('!IB16s', 2, 3, token) + b'{}')\n"
                     "            except OSError: pass\n"
                     "'real'")
    assert run.text == "'real'" and run.dropped >= 1


def test_an_earlier_token_is_worth_nothing_and_no_frame_shows_the_current_one(kernel: Kernel) -> None:
    """Walks frames, their locals, closures, attributes and containers from everything a cell can name, also from
    inside a profile function and with other threads' frames; not gc.get_referents (see the docstring of kernel.py)."""
    token = kernel.start('''
import sys, types, threading
def reach(roots):
    seen, todo, found = {}, list(roots), []
    while todo and len(seen) < 400000:
        thing = todo.pop()
        if id(thing) in seen: continue
        seen[id(thing)] = thing
        if isinstance(thing, (bytes, bytearray)) and len(thing) >= 16: found.append(bytes(thing))
        elif isinstance(thing, str):
            if len(thing) == 32: found.append(thing.encode())
        elif isinstance(thing, dict): todo += list(thing.keys()) + list(thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset)): todo += list(thing)
        elif isinstance(thing, types.FrameType): todo += [thing.f_back, thing.f_locals, thing.f_globals, thing.f_builtins]
        elif isinstance(thing, types.FunctionType):
            todo += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__globals__, thing.__dict__]
            todo += list(thing.__code__.co_consts)
        elif isinstance(thing, types.CellType):
            try: todo.append(thing.cell_contents)
            except ValueError: pass
        elif isinstance(thing, types.MethodType): todo += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.BuiltinMethodType): todo.append(thing.__self__)
        elif isinstance(thing, types.GeneratorType): todo += [thing.gi_frame]
        elif type(thing) is map:
            todo += list(thing.__reduce__())
        else:
            for source in ("__dict__", "__wrapped__", "func", "args", "__self__"):
                try: todo.append(object.__getattribute__(thing, source))
                except BaseException: pass
    return found
caught = []
def spy(frame, event, arg):
    if len(caught) < 300: caught.append((frame, dict(frame.f_locals), arg))
sys.setprofile(spy)
display("while traced")
sys.setprofile(None)
found = reach([sys._getframe(), sys.modules, caught, sys._current_frames(), get_ipython(), threading.enumerate()])
open(OUT, "wb").write(b"\\n".join(found))
'''.replace("OUT", repr(f"/tmp/kernel-forgery-{os.getpid()}")))
    run = kernel.collect(token)
    path = f"/tmp/kernel-forgery-{os.getpid()}"
    try:
        assert run.status == "ok", run
        with open(path, "rb") as file:
            found = file.read()
    finally:
        if os.path.exists(path):
            os.unlink(path)
    assert len(found) > 1000, "the search must have searched"
    assert token not in found and token.hex().encode() not in found
