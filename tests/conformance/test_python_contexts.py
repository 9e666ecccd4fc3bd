"""The laws of stateful Python: what a cell keeps, shows and survives.

Guards the section "Python contexts" of the specification, sentence by sentence, on the real engine.
"""

from __future__ import annotations

import base64
import time

import pytest

from ringfence import NotFoundError, TimeoutExceededError


def ok(execution):
    assert execution.error is None, execution.error.traceback
    return execution


def value(sandbox, code, **options):
    return ok(sandbox.run_code(code, **options)).text


def printed(execution):
    return "".join(execution.logs.stdout)


# -- sessions


def test_variables_survive_from_cell_to_cell(sandbox):
    sandbox.run_code("kept = 21")
    assert value(sandbox, "kept * 2") == "42"


def test_line_and_cell_magics_work(sandbox):
    ok(sandbox.run_code("%cd -q /tmp\n%env RF_LAW=seen"))
    assert value(sandbox, "import os; os.getcwd(), os.environ['RF_LAW']") == "('/tmp', 'seen')"
    assert "cell magic" in printed(ok(sandbox.run_code("%%bash\necho cell magic")))
    ok(sandbox.run_code("%cd -q ~"))


def test_an_exclamation_mark_runs_a_command(sandbox):
    assert "user" in printed(ok(sandbox.run_code("!whoami")))
    assert value(sandbox, "lines = !echo one; echo two\nlist(lines)") == "['one', 'two']"


def test_await_works_at_the_top_level(sandbox):
    assert value(sandbox, "import asyncio\nawait asyncio.sleep(0.01, 'awaited')") == "awaited"


def test_tracebacks_are_rich_and_show_the_failing_line(sandbox):
    error = sandbox.run_code("def divide(number):\n    return number / 0\ndivide(1)").error
    assert error is not None and (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "return number / 0" in error.traceback and "divide(1)" in error.traceback


def test_a_syntax_error_is_the_cells_error(sandbox):
    error = sandbox.run_code("def broken(:\n  pass").error
    assert error is not None and error.name == "SyntaxError"


# -- results


@pytest.mark.parametrize(
    ("show", "field", "expected"),
    [
        ("HTML('<b>h</b>')", "html", "<b>h</b>"),
        ("Markdown('**m**')", "markdown", "**m**"),
        ("SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')", "svg", "<svg xmlns"),
        ("Latex('$x$')", "latex", "$x$"),
        ("JSON({'a': [1, 2]})", "json", {"a": [1, 2]}),
        ("Javascript('let a = 1')", "javascript", "let a = 1"),
    ],
)
def test_a_result_has_the_format_it_was_shown_in(sandbox, show, field, expected):
    execution = ok(sandbox.run_code(f"from IPython.display import *\ndisplay({show})"))
    found = getattr(execution.results[0], field)
    assert found.startswith(expected) if isinstance(expected, str) else found == expected
    assert field in execution.results[0].formats() and not execution.results[0].is_main_result


@pytest.mark.parametrize(("mime", "field"), [("image/png", "png"), ("image/jpeg", "jpeg"), ("application/pdf", "pdf")])
def test_binary_results_are_base64_of_the_exact_bytes(sandbox, mime, field):
    code = f"from IPython.display import display\ndisplay({{'{mime}': bytes(range(256))}}, raw=True)"
    found = getattr(ok(sandbox.run_code(code)).results[0], field)
    assert base64.b64decode(found) == bytes(range(256))


def test_a_format_without_a_field_is_kept_in_extra(sandbox):
    code = "from IPython.display import display\ndisplay({'text/x-law': 'own', 'text/plain': 'p'}, raw=True)"
    result = ok(sandbox.run_code(code)).results[0]
    assert (result.extra, result.text) == ({"text/x-law": "own"}, "p")


def test_the_last_expression_is_the_main_result_and_only_it(sandbox):
    results = ok(sandbox.run_code("from IPython.display import display\ndisplay(1)\n2")).results
    assert [(result.text, result.is_main_result) for result in results] == [("1", False), ("2", True)]


def test_a_semicolon_and_none_give_no_result(sandbox):
    assert ok(sandbox.run_code("5;")).results == [] and ok(sandbox.run_code("None")).results == []


def test_a_figure_comes_out_without_being_asked_for(data_sandbox):
    execution = ok(data_sandbox.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3], [4, 5, 6])\nplt.title('law')"))
    pictures = [result for result in execution.results if result.png]
    assert len(pictures) == 1
    assert pictures[0].png_bytes().startswith(b"\x89PNG")
    chart = pictures[0].chart
    assert chart is not None and chart.type == "line" and chart.title == "law" and chart.elements


def test_a_figure_is_shown_once(data_sandbox):
    execution = ok(data_sandbox.run_code("plt.plot([3, 1]); plt.show()"))
    assert len([result for result in execution.results if result.png]) == 1
    assert ok(data_sandbox.run_code("1")).results[0].png is None


def test_a_data_frame_comes_out_as_html_and_data(data_sandbox):
    code = "import pandas as pd\npd.DataFrame({'city': ['Ulm', 'Bern'], 'size': [1, 2]})"
    result = ok(data_sandbox.run_code(code)).results[-1]
    assert "<table" in result.html and result.data == {"city": ["Ulm", "Bern"], "size": [1, 2]}
    assert result.is_main_result and "Ulm" in result.text


def test_what_a_thread_shows_after_its_cell_is_no_later_cells_result(sandbox):
    code = (
        "import threading, time\nfrom IPython.display import display\n"
        "def late():\n    time.sleep(0.3)\n    display('straggler')\n"
        "threading.Thread(target=late).start()"
    )
    assert ok(sandbox.run_code(code)).results == []
    assert [result.text for result in ok(sandbox.run_code("time.sleep(0.8)\n'mine'")).results] == ["mine"]


def test_a_result_beyond_the_limit_is_left_out_and_noted(make):
    execution = ok(make(result=4096).run_code("from IPython.display import HTML\nHTML('x' * 100_000)"))
    assert execution.results == [] and "limit" in " ".join(execution.notes)


# -- several contexts


def test_contexts_keep_their_variables_apart(sandbox):
    first, second = sandbox.create_code_context(), sandbox.create_code_context()
    sandbox.run_code("who = 1", context=first)
    sandbox.run_code("who = 2", context=second)
    assert (value(sandbox, "who", context=first), value(sandbox, "who", context=second)) == ("1", "2")
    sandbox.remove_code_context(first)
    sandbox.remove_code_context(second)


def test_a_context_has_a_working_directory_and_an_environment_of_its_own(sandbox):
    context = sandbox.create_code_context(cwd="/tmp", envs={"RF_OWN": "yes"})
    code = "import os; os.getcwd(), os.environ.get('RF_OWN')"
    assert value(sandbox, code, context=context) == "('/tmp', 'yes')"
    assert value(sandbox, code) == "('/home/user', None)"
    sandbox.remove_code_context(context)


def test_contexts_are_listed_restarted_and_deleted(sandbox):
    context = sandbox.create_code_context()
    sandbox.run_code("x = 1", context=context)
    assert context.id in [known.id for known in sandbox.list_code_contexts()]
    sandbox.restart_code_context(context)
    error = sandbox.run_code("x", context=context).error
    assert error is not None and error.name == "NameError"
    assert sandbox.remove_code_context(context) is True
    assert sandbox.remove_code_context(context) is False
    assert context.id not in [known.id for known in sandbox.list_code_contexts()]
    with pytest.raises(NotFoundError):
        sandbox.run_code("1", context=context)


def test_environment_variables_of_one_cell_are_gone_in_the_next(sandbox):
    code = "import os; os.environ.get('RF_ONCE')"
    assert value(sandbox, code, envs={"RF_ONCE": "1"}) == "1"
    assert sandbox.run_code(code).results == []


# -- callbacks


def test_callbacks_get_output_results_and_the_error_as_they_come(sandbox):
    seen = []
    code = (
        "import sys, time\nfrom IPython.display import display\n"
        "print('out', flush=True)\ntime.sleep(0.2)\nprint('err', file=sys.stderr, flush=True)\n"
        "display('shown')\nraise ValueError('end')"
    )
    execution = sandbox.run_code(
        code,
        on_stdout=lambda message: seen.append(("out", message.line, message.error)),
        on_stderr=lambda message: seen.append(("err", message.line, message.error)),
        on_result=lambda result: seen.append(("result", result.text)),
        on_error=lambda error: seen.append(("error", error.name)),
    )
    assert set(seen) == {("out", "out\n", False), ("err", "err\n", True), ("result", "shown"), ("error", "ValueError")}
    assert seen[0] == ("out", "out\n", False) and seen[-1] == ("error", "ValueError")
    assert execution.error.value == "end"


def test_what_a_callback_raises_comes_out_and_the_context_goes_on(sandbox):
    def refuse(message):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        sandbox.run_code("print(1, flush=True)\nimport time\ntime.sleep(20)", on_stdout=refuse)
    assert value(sandbox, "1 + 1") == "2"


# -- timeouts


def test_a_timeout_interrupts_first_and_variables_survive(make):
    sandbox = make()
    sandbox.run_code("survivor = 7")
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.run_code("print('begun', flush=True)\nwhile True:\n    pass", timeout=1)
    assert caught.value.outcome == "interrupted" and "variables survive" in str(caught.value)
    assert printed(caught.value.partial) == "begun\n"
    assert value(sandbox, "survivor") == "7"


def test_a_timeout_replaces_a_kernel_that_ignores_the_interrupt_and_says_so(make):
    sandbox = make()
    sandbox.run_code("lost = 7")
    with pytest.raises(TimeoutExceededError) as caught:
        sandbox.run_code(
            "import time\nwhile True:\n    try:\n        time.sleep(9)\n    except BaseException:\n        pass", timeout=0.5
        )
    assert caught.value.outcome == "restarted" and "variables are gone" in str(caught.value)
    error = sandbox.run_code("lost").error
    assert error is not None and error.name == "NameError"


def test_the_timeout_of_the_policy_is_the_default(make):
    with pytest.raises(TimeoutExceededError) as caught:
        make(limits={"timeout": 1}).run_code("import time\ntime.sleep(60)")
    assert caught.value.limit == 1


# -- what cells do to their kernel


def test_a_native_crash_is_told_and_the_next_cell_gets_a_fresh_kernel(sandbox):
    error = sandbox.run_code("import ctypes\nctypes.string_at(0)").error
    assert error.name == "KernelDiedError" and "SIGSEGV" in error.value
    execution = ok(sandbox.run_code("1 + 1"))
    assert execution.text == "2" and execution.restarted


def test_os_exit_is_told_with_its_code(sandbox):
    error = sandbox.run_code("import os\nos._exit(3)").error
    assert error.name == "KernelDiedError" and "code 3" in error.value
    assert value(sandbox, "2") == "2"


def test_sys_exit_ends_the_cell_and_not_the_kernel(sandbox):
    sandbox.run_code("stays = 1")
    error = sandbox.run_code("import sys\nsys.exit(4)").error
    assert error is not None and error.name == "SystemExit" and error.value == "4"
    assert value(sandbox, "stays") == "1"


@pytest.mark.parametrize(
    "code",
    ["import os\nos.close(1)", "import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1)", "import sys\nsys.stdout.close()"],
    ids=["closed", "redirected", "object closed"],
)
def test_a_closed_or_redirected_standard_output_ends_nothing(make, code):
    sandbox = make()
    sandbox.run_code(code)
    assert value(sandbox, "6 * 7") == "42"
    assert printed(ok(sandbox.run_code("print('again')"))) == "again\n"


def test_input_fails_with_a_clear_error(sandbox):
    error = sandbox.run_code("input('name? ')").error
    assert error is not None and "input" in error.value


def test_threads_outlive_their_cell(sandbox):
    ok(sandbox.run_code(
        "import threading, time\nticks = []\n"
        "def tick():\n    for number in range(5):\n        ticks.append(number)\n        time.sleep(0.05)\n"
        "thread = threading.Thread(target=tick)\nthread.start()"
    ))  # fmt: skip
    assert value(sandbox, "thread.join()\nlen(ticks)") == "5"


def test_multiprocessing_by_fork_runs_functions_of_the_cell(sandbox):
    code = (
        "import multiprocessing\ndef square(number):\n    return number * number\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n    squares = pool.map(square, range(4))\nsquares"
    )
    assert value(sandbox, code) == "[0, 1, 4, 9]"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing_by_other_methods_runs_importable_functions(sandbox, method):
    code = (
        "import math, multiprocessing\n"
        f"with multiprocessing.get_context('{method}').Pool(1) as pool:\n    roots = pool.map(math.sqrt, [4, 9])\nroots"
    )
    assert value(sandbox, code) == "[2.0, 3.0]"


def test_asyncio_tasks_run_within_a_cell(sandbox):
    code = (
        "import asyncio\nasync def job(number):\n    await asyncio.sleep(0.01)\n    return number\n"
        "await asyncio.gather(*(job(number) for number in range(3)))"
    )
    assert value(sandbox, code) == "[0, 1, 2]"


def test_asyncio_run_works_or_says_why_not(sandbox):
    execution = sandbox.run_code("import asyncio\nasync def one():\n    return 1\nasyncio.run(one())")
    assert execution.text == "1" or "event loop" in execution.error.value


def test_subprocesses_of_a_cell_write_to_its_output(sandbox):
    execution = ok(sandbox.run_code("import subprocess\nsubprocess.run(['echo', 'child']).returncode"))
    assert printed(execution) == "child\n" and execution.text == "0"


def test_signal_handlers_of_a_cell_work(sandbox):
    code = (
        "import signal, time\nrung = []\nsignal.signal(signal.SIGALRM, lambda *_: rung.append(1))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(0.3)\nrung"
    )
    assert value(sandbox, code) == "[1]"


def test_a_cell_that_signals_everything_it_can_ends_its_kernel_at_most(sandbox):
    error = sandbox.run_code("!kill -KILL -1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)").error
    assert error is not None and error.name == "KernelDiedError"
    assert value(sandbox, "3") == "3" and sandbox.is_running()


_TO_EVERY_SOCKET = """
import json, os, stat, struct
def tell(*frames):
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                for frame in frames:
                    os.write(number, frame)
        except OSError:
            pass
"""


def test_a_cell_cannot_write_its_own_end_or_anothers_result(sandbox):
    code = _TO_EVERY_SOCKET + (
        "def frame(kind, body):\n    raw = json.dumps(body).encode()\n"
        "    return struct.pack('!IB', len(raw), kind) + bytes(16) + raw\n"
        "tell(frame(1, {'data': {'text/plain': 'forged'}, 'main': True}), frame(3, {'status': 'ok', 'execution_count': 9}))\n"
        "import time\ntime.sleep(0.2)\n'real'"
    )
    execution = ok(sandbox.run_code(code))
    assert [result.text for result in execution.results] == ["real"]
    assert [result.text for result in ok(sandbox.run_code("'next'")).results] == ["next"]


def test_a_cell_that_breaks_its_own_channel_hurts_itself_alone(sandbox):
    bystander = sandbox.create_code_context()
    try:
        sandbox.run_code(_TO_EVERY_SOCKET + "tell(b'\\xff' * 40)\n1", timeout=2)
    except TimeoutExceededError as error:
        assert error.outcome == "restarted"
    assert value(sandbox, "2", context=bystander) == "2"
    assert value(sandbox, "3") == "3"
    sandbox.remove_code_context(bystander)


def test_ten_mebibytes_of_output_are_counted_and_the_newest_kept(make):
    execution = ok(make(output="64KiB").run_code("for _ in range(10 * 1024):\n    print('x' * 1023)\nprint('last')"))
    assert execution.logs.truncated and execution.logs.stdout_total == 10 * (1 << 20) + 5
    assert printed(execution).endswith("last\n") and len(printed(execution)) <= 64 << 10


def test_an_interrupt_from_outside_ends_the_cell_and_keeps_the_variables(sandbox):
    import threading

    context = sandbox.create_code_context()
    sandbox.run_code("kept = 1", context=context)
    threading.Timer(0.5, sandbox.interrupt_code_context, [context]).start()
    begun = time.monotonic()
    error = sandbox.run_code("import time\ntime.sleep(25)", context=context).error
    assert error is not None and error.name == "KeyboardInterrupt" and time.monotonic() - begun < 20
    assert value(sandbox, "kept", context=context) == "1"


# -- what is left out is told


def test_what_was_left_out_of_a_result_is_in_the_notes(sandbox):
    execution = ok(sandbox.run_code("'x' * (1 << 27)"))
    assert execution.text.startswith("<result left out")
    assert any("too large" in note for note in execution.notes), execution.notes
    nested = "x = []\nfor _ in range(100_000): x = [x]\nfrom IPython.display import publish_display_data as p\n"
    execution = ok(sandbox.run_code(nested + "p({'application/json': x, 'text/plain': 'x'})"))
    assert any("nested deeper" in note for note in execution.notes), execution.notes
    assert ok(sandbox.run_code("1")).notes == []


def test_a_class_with_the_name_of_ours_is_told_apart(sandbox):
    execution = sandbox.run_code("class MemoryLimitExceededError(Exception): pass\nraise MemoryLimitExceededError('x')")
    assert (execution.error.name, execution.error.kind) == ("MemoryLimitExceededError", "exception")
    assert sandbox.run_code("import os; os._exit(3)").error.kind == "died"


def test_a_picture_that_is_none_is_left_out_with_a_note(sandbox):
    execution = ok(sandbox.run_code("class A:\n    def _repr_png_(self): return '<script>'\nA()"))
    assert execution.results[0].png is None and "png" in execution.notes[0]
