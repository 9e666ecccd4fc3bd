"""What a user of Jupyter expects of a Python context, and what comes out as results."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from kernel_driver import Kernel, Zygote

pytest.importorskip("IPython")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    warmed = Zygote(home="/tmp")
    yield warmed
    warmed.close()


@pytest.fixture
def kernel(zygote: Zygote) -> Iterator[Kernel]:
    one = zygote.kernel()
    yield one
    one.close()


# --- language --------------------------------------------------------------------------------------------------------

def test_state_is_kept_and_underscore_in_and_out_work(kernel: Kernel) -> None:
    kernel.run("x = 20")
    assert kernel.run("x + 1").text == "21"
    assert kernel.run("_ * 2").text == "42"
    assert kernel.run("_2, Out[3], In[1]").text == "(21, 42, 'x = 20')"


@pytest.mark.parametrize(("code", "text"), [
    ("1 + 1", "2"), ("'a'", "'a'"), ("None", None), ("1;", None), ("x = 3", None), ("3.5", "3.5"), ("True", "True"),
    ("b'x'", "b'x'"), ("[1, (2,)]", "[1, (2,)]"), ("def f(): return 7\nf()", "7"), ("if True:\n    5", None),
    ("# only a comment", None), ("", None), ("   ", None), ("1 % 2", "1"), ("f'{1!r}'", "'1'"), ("1 if 2 else 3", "1"),
    ("  4", "4"), ("\n\n6", "6"), (">>> 1 + 1", "2"), ("'''\n/ x\n'''", "'\\n/ x\\n'"), ("...", "Ellipsis"),
    ("10**5000 > 0", "True"), ("é = 1\né", "1"),
])
def test_the_last_expression_is_the_main_result(kernel: Kernel, code: str, text: str | None) -> None:
    run = kernel.run(code)
    assert run.status == "ok" and run.text == text and run.error is None, run


def test_magics_and_shell_escapes(kernel: Kernel) -> None:
    assert "per loop" in kernel.run("%timeit -n1 -r1 1").stdout
    assert kernel.run("%%bash\necho $((6*7)); echo e >&2").stdout == "42\n"
    assert kernel.run("!echo direct").stdout == "direct\n"
    assert kernel.run("y = !echo a; echo b\ny").text == "['a', 'b']"
    assert kernel.run("name = 'z'\n!echo {name} $name").stdout == "z z\n"
    assert kernel.run("!exit 3").status == "ok" and kernel.run("_exit_code").text == "3"
    assert kernel.run("%cd /").stdout == "/\n" and kernel.run("%pwd").text == "'/'"
    assert kernel.run("pwd").text == "'/'", "automagic"
    assert kernel.run("%%time\nx = 5").status == "ok" and kernel.run("x").text == "5"
    assert kernel.run("%env RF=1").status == "ok"
    assert kernel.run("%who").status == "ok"
    run = kernel.run("%nosuch")
    assert run.error is not None and run.error["name"] == "UsageError"
    assert "Return the number of items" in kernel.run("len?").displays[0]["text/plain"]
    assert kernel.run("%%bash --out captured\necho hidden").stdout == ""
    assert kernel.run("captured").text == "'hidden\\n'"


def test_captured_output_stays_captured(kernel: Kernel) -> None:
    run = kernel.run("%%capture c\nprint('hidden')\n!echo sub\n%sx true\ndisplay(4)")
    assert run.stdout == "" and run.results == []
    assert kernel.run("c.stdout").text == "'hidden\\nsub\\n'"
    assert kernel.run("import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    !echo inside\n"
                      "b.getvalue()").text == "'inside\\n'"


def test_await_tasks_and_asyncio_run(kernel: Kernel) -> None:
    assert kernel.run("import asyncio\nasync def five(): return 5\nawait five()").text == "5"
    assert kernel.run("asyncio.run(five())").text == "5"
    assert kernel.run("async def numbers():\n    yield 1\n[i async for i in numbers()]").text == "[1]"
    run = kernel.run("await asyncio.sleep(0); asyncio.run(five())")
    assert run.error is not None and "cannot be called from a running event loop" in run.error["value"]
    run = kernel.run("await five()\n1/0")
    assert run.error is not None and run.error["name"] == "ZeroDivisionError"


def test_main_is_the_user_module(kernel: Kernel) -> None:
    assert kernel.run("__name__, '__file__' in globals(), __import__('__main__').__dict__ is globals()"
                      ).text == "('__main__', False, True)"
    assert kernel.run("import pickle\nclass P:\n    x = 1\npickle.loads(pickle.dumps(P())).x").text == "1"


@pytest.mark.parametrize("code", ["input('? ')", "import getpass; getpass.getpass()", "breakpoint()",
                                  "import pdb; pdb.set_trace()\nx = 1"])
def test_asking_a_person_is_a_clear_error(kernel: Kernel, code: str) -> None:
    run = kernel.run(code)
    assert run.error is not None and run.error["name"] == "StdinNotImplementedError"
    assert "not available here" in run.error["value"]


def test_reading_stdin_is_the_end_of_file(kernel: Kernel) -> None:
    assert kernel.run("import sys\nsys.stdin.read()").text == "''"


def test_warnings_and_logging_go_to_stderr(kernel: Kernel) -> None:
    run = kernel.run("import logging, warnings\nlogging.warning('w1')\nwarnings.warn('w2')")
    assert "w1" in run.stderr and "w2" in run.stderr and run.stdout == ""


def test_quiet_runs_without_results_or_count(kernel: Kernel) -> None:
    run = kernel.run("x = 1\ndisplay(2)\nprint(3)\n4", quiet=True)
    assert run.results == [] and run.stdout == "3\n" and run.status == "ok"
    assert kernel.run("x").execution_count == 1


# --- errors ----------------------------------------------------------------------------------------------------------

def test_a_traceback_is_rich_plain_and_about_the_users_code(kernel: Kernel) -> None:
    kernel.run("def inner():\n    return 1 / 0")
    run = kernel.run("x = 1\ninner()")
    error = run.error
    assert error is not None and error["name"] == "ZeroDivisionError" and error["value"] == "division by zero"
    assert "----> 2 inner()" in error["traceback"] and "return 1 / 0" in error["traceback"]
    assert "\x1b" not in error["traceback"] and "ringfence" not in error["traceback"]
    assert run.stderr == "" and run.stdout == ""


@pytest.mark.parametrize(("code", "name"), [
    ("def f(:", "SyntaxError"), ("  x = 1\n y = 2", "IndentationError"), ("return 5", "SyntaxError"),
    ("import json; json.loads('{')", "JSONDecodeError"), ("import no_such_module", "ModuleNotFoundError"),
    ("raise BaseException('b')", "BaseException"), ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("def f(): return f()\nf()", "RecursionError"), ("raise GeneratorExit", "GeneratorExit"),
    ("raise StopIteration", "StopIteration"), ("int('x')", "ValueError"), ("eval('1+')", "SyntaxError"),
    ("try:\n    1/0\nexcept Exception as e:\n    raise ValueError('second') from e", "ValueError"),
])
def test_errors_have_their_names(kernel: Kernel, code: str, name: str) -> None:
    run = kernel.run(code)
    assert run.status == "error" and run.error is not None and run.error["name"] == name
    assert name in run.error["traceback"]
    assert kernel.run("1").text == "1"


def test_exception_groups_are_shown_with_their_members(kernel: Kernel) -> None:
    if kernel.run("ExceptionGroup").status == "error":
        pytest.skip("exception groups came with Python 3.11")
    run = kernel.run("raise ExceptionGroup('many', [ValueError(1), TypeError(2)])")
    assert run.error is not None and "TypeError: 2" in run.error["traceback"] and run.stderr == ""


def test_exceptions_that_cannot_be_shown_are_shown_anyway(kernel: Kernel) -> None:
    run = kernel.run("class E(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise E")
    assert run.error is not None and run.error["name"] == "E" and "str() raised ValueError" in run.error["value"]
    run = kernel.run("class E(Exception):\n    def __str__(self):\n        print('go')\n        while True: pass\nraise E",
                     interrupt_on="go")
    assert run.error is not None and run.error["name"] == "E"
    run = kernel.run("raise ValueError('x' * 10**7)")
    assert run.error is not None and len(run.error["value"]) < 100_000 and len(run.error["traceback"]) < 400_000


def test_a_shown_traceback_is_output_not_the_cells_error(kernel: Kernel) -> None:
    run = kernel.run("try:\n    1/0\nexcept Exception:\n    get_ipython().showtraceback()\n7")
    assert run.status == "ok" and run.text == "7" and "ZeroDivisionError" in run.stderr
    run = kernel.run("get_ipython().run_cell('1/0')\n8")
    assert run.status == "ok" and run.text == "8" and "ZeroDivisionError" in run.stderr


# --- results ---------------------------------------------------------------------------------------------------------

def test_display_is_not_main_and_keeps_its_mime_types(kernel: Kernel) -> None:
    run = kernel.run("from IPython.display import *\n"
                     "display(HTML('<b>'), Markdown('#'), Latex('$x$'), JSON({'a': 1}), Javascript('1'),\n"
                     "        SVG('<svg/>'), Image(data=b'\\x89PNG\\r\\n\\x1a\\n', format='png'))\n'main'")
    kinds = [set(d) - {"text/plain"} for d in run.displays]
    assert kinds == [{"text/html"}, {"text/markdown"}, {"text/latex"}, {"application/json"},
                     {"application/javascript"}, {"image/svg+xml"}, {"image/png"}]
    assert base64.b64decode(run.displays[-1]["image/png"]).startswith(b"\x89PNG")
    assert run.text == "'main'"


def test_lists_and_dicts_carry_json_when_json_can_say_them(kernel: Kernel) -> None:
    def main(code: str) -> dict:
        found = kernel.run(code).main
        assert found is not None
        return found

    assert main("{'a': [1, 2.5, None, True, 'x']}")["application/json"] == {"a": [1, 2.5, None, True, "x"]}
    assert "application/json" not in main("[1, {2}]")
    assert "application/json" not in main("[float('nan')]")
    assert "application/json" not in main("{1: 2}")
    assert "application/json" not in main("l = []\nl.append(l)\nl")
    assert "application/json" not in main("list(range(200000))")


def test_representations_that_raise_lose_only_themselves(kernel: Kernel) -> None:
    run = kernel.run("class H:\n    def _repr_html_(self): raise ValueError('html')\n    def __repr__(self): return 'plain'\n"
                     "H()")
    assert run.status == "ok" and run.main == {"text/plain": "plain"} and "ValueError: html" in run.stderr
    run = kernel.run("class R:\n    def __repr__(self): raise ValueError('repr')\nR()")
    assert run.status == "ok" and run.text is not None and "R object" in run.text and "ValueError" in run.text


def test_a_bundle_of_odd_values_is_still_json(kernel: Kernel) -> None:
    run = kernel.run("class B:\n    def _repr_mimebundle_(self, **k):\n"
                     "        return {'text/plain': b'bytes', 'application/json': {'n': float('nan'), 's': {1}, 'o': object,"
                     " 'b': b'x'}, 'image/png': b'\\x00\\xff', 'text/html': 'a\\ud83d', 5: 6}\nB()")
    assert run.main is not None and run.main["text/plain"] == "bytes" and run.main["image/png"] == "AP8="
    assert run.main["application/json"]["n"] is None and run.main["text/html"] == "a?"


def test_updates_name_the_display_they_replace_and_clear_output_is_silent(kernel: Kernel) -> None:
    run = kernel.run("from IPython.display import clear_output\nh = display('a', display_id='d')\nh.update('b')\n"
                     "clear_output(wait=True)\nclear_output()")
    assert [(r.get("display_id"), r.get("update")) for r in run.results] == [("d", None), ("d", True)]
    assert run.stdout == run.stderr == ""


# --- figures and frames ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def data_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    for module in ("numpy", "pandas", "matplotlib", "e2b_charts"):
        pytest.importorskip(module)
    cache = os.environ.get("RINGFENCE_TEST_MPLCONFIGDIR") or str(tmp_path_factory.getbasetemp().parent / "mpl-cache")
    os.makedirs(cache, exist_ok=True)
    home = str(tmp_path_factory.mktemp("home"))
    warmed = Zygote(["numpy", "pandas", "matplotlib.pyplot", "e2b_charts"], home=home, env={"MPLCONFIGDIR": cache})
    yield warmed
    warmed.close()
    assert os.listdir(home) == []


@pytest.fixture
def data(data_zygote: Zygote) -> Iterator[Kernel]:
    one = data_zygote.kernel(env={"HOME": data_zygote.home, "PATH": os.environ["PATH"]})
    one.run("import matplotlib.pyplot as plt, pandas as pd, numpy as np")
    yield one
    one.close()


CHART = "application/vnd.ringfence.chart+json"
DATA = "application/vnd.ringfence.data+json"


def test_a_data_zygote_is_as_clean_as_a_plain_one(data_zygote: Zygote) -> None:
    report = data_zygote.report
    assert report["problems"] == [] and len(report["threads"]) == 1
    assert set(report["descriptors"]) - {report["wire"]} <= {0, 1, 2, 3}


@pytest.mark.parametrize("code", [
    "plt.plot([1, 2], [3, 4]);",
    "plt.plot([1, 2], [3, 4])\nplt.show()",
    "fig, ax = plt.subplots()\nax.plot([1, 2], [3, 4])\ndisplay(fig)",
    "fig, ax = plt.subplots()\nax.plot([1, 2], [3, 4])\ndisplay(fig)\nplt.show()",
    "fig, ax = plt.subplots()\nax.plot([1, 2], [3, 4])\nfig.show()",
    "import matplotlib; matplotlib.use('Agg')\nplt.plot([1, 2], [3, 4])\nplt.show()",
    "%matplotlib inline\nplt.plot([1, 2], [3, 4]);",
    "plt.ioff()\nplt.plot([1, 2], [3, 4]);",
    "fig, ax = plt.subplots()\nax.plot([1, 2], [3, 4])\nfig",
    "plt.plot([1, 2], [3, 4])\n1/0",
])
def test_every_figure_comes_out_exactly_once_with_its_chart(data: Kernel, code: str) -> None:
    run = data.run(code, timeout=60)
    figures = [r for r in run.results if "image/png" in r["data"]]
    assert len(figures) == 1, run
    assert base64.b64decode(figures[0]["data"]["image/png"]).startswith(b"\x89PNG")
    chart = figures[0]["data"][CHART]
    assert chart["type"] == "line" and chart["elements"][0]["points"] == [[1.0, 3.0], [2.0, 4.0]]
    assert figures[0]["main"] == code.endswith("\nfig")
    assert data.run("plt.get_fignums()").text == "[]", "closed afterwards"


def test_shown_figures_come_in_order_and_closed_ones_not_at_all(data: Kernel) -> None:
    run = data.run("for i in range(2):\n    plt.plot([i]); plt.show()\nplt.plot([5]); plt.close()", timeout=60)
    assert [d[CHART]["elements"][0]["points"] for d in run.displays] == [[[0.0, 0.0]], [[0.0, 1.0]]]


def test_a_figure_from_an_earlier_cell_can_be_shown_again(data: Kernel) -> None:
    data.run("fig, ax = plt.subplots(); ax.bar(['a'], [3]);", timeout=60)
    run = data.run("fig", timeout=60)
    assert run.main is not None and run.main[CHART]["type"] == "bar" and len(run.results) == 1


def test_a_data_frame_has_text_html_and_data(data: Kernel) -> None:
    run = data.run("pd.DataFrame({'a': [1, 2], 'b': ['x', None], 'c': pd.to_datetime(['2020-01-01', None]),"
                   " 'd': [1.5, float('nan')], 'e': [{1}, 2j]})")
    assert run.main is not None and "<table" in run.main["text/html"] and "2020-01-01" in run.main["text/plain"]
    assert run.main[DATA] == {"a": [1, 2], "b": ["x", None], "c": ["2020-01-01T00:00:00", None], "d": [1.5, None],
                              "e": [[1], "2j"]}
    run = data.run("pd.DataFrame(np.zeros((200000, 2)), columns=['a', 'a'])")
    assert run.main is not None and list(run.main[DATA]) == ["a", "a.1"]
    assert run.results[0]["metadata"][DATA] == {"rows": 200000, "shown": 50000}


def test_numpy_differs_between_siblings(data_zygote: Zygote) -> None:
    texts = set()
    for _ in range(2):
        one = data_zygote.kernel()
        texts.add(one.run("import numpy\nnumpy.random.rand(), numpy.random.default_rng().random()").text)
        one.close()
    assert len(texts) == 2
