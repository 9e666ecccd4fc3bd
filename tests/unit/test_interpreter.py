"""Laws of the process that keeps an interpreter (`guest/interpreter.py`), with a driver made up for each test.

The driver is a few lines of Python in a language that exists for these tests alone; what it says, right or wrong, is
what user code could say in its place. No sandbox is needed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kernel_driver import Kernel

from ringfence.guest import interpreter, languages

SPEAK = """
import os, signal, sys, time
requests, messages = open(sys.argv[1], "rb", buffering=0), open(sys.argv[2], "wb", buffering=0)
def line():
    text = b""
    while not text.endswith(b"\\n"):
        text += requests.read(1)
    return text[:-1].decode()
def exactly(size):
    data = b""
    while len(data) < size:
        data += requests.read(size - len(data))
    return data
def request():
    word, nonce, size, variables = line().split()
    code = exactly(int(size)).decode()
    found = {}
    for _ in range(int(variables)):
        name, value = map(int, line().split())
        key = exactly(name).decode()
        found[key] = exactly(value).decode() if value >= 0 else None
    return nonce, code, found
def say(text, content=b""):
    messages.write(text.encode() + b"\\n" + content)
say("ready")
"""
ECHO = "while True:\n    nonce, code, variables = request()\n    say('begin ' + nonce)\n    exec(code)\n    say(f'done {nonce} ok')\n"


@pytest.fixture
def start(tmp_path, monkeypatch):
    kernels, interpreters = [], []

    def begin(driver: str = ECHO, program: str = sys.executable, **config) -> Kernel:
        script = tmp_path / f"driver{len(kernels)}"
        script.write_text(SPEAK + driver if program == sys.executable else driver)
        options = ("-IS",) if program == sys.executable else ()
        fake = languages.Language("python3", str(script), (*options, "{driver}", "{requests}", "{messages}"), "python3")
        monkeypatch.setitem(languages.LANGUAGES, "fake", fake)
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        secret = os.urandom(32)
        config = {"language": "fake", "program": program, "env": dict(os.environ), "secret": secret.hex(), **config}
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                os.setsid()
                os.dup2(out[1], 1)
                os.dup2(err[1], 2)
                interpreter.run(theirs, config)
            finally:
                os._exit(99)
        for descriptor in (out[1], err[1]):
            os.close(descriptor)
        theirs.close()
        kernels.append(Kernel(pid, ours, out[0], err[0], secret))
        interpreters.extend(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        return kernels[-1]

    yield begin
    for pid in interpreters:  # in a sandbox the agent ends a kernel with all it started
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for kernel in kernels:
        kernel.control.close()
        os.waitpid(kernel.pid, 0)
        for descriptor in (kernel.out, kernel.err):
            os.close(descriptor)


def ended(kernel: Kernel) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        info = os.waitid(os.P_PID, kernel.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is not None:
            return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        time.sleep(0.01)
    raise TimeoutError("it lives")


def test_parts_become_one_result_and_an_error_has_its_three_texts(start):
    run = start().run(
        "say(f'part {nonce} text/plain 2', b'42'); say(f'part {nonce} image/png 3', b'\\x00\\n\\xff')\n"
        "say(f'part {nonce} application/json 9', b'{\"a\": [1]}'[:9] if 0 else b'{\"a\":[1]}'); say(f'show {nonce} main')\n"
        "say(f'part {nonce} name 1', b'N'); say(f'part {nonce} value 1', b'V'); say(f'part {nonce} traceback 1', b'T'); say(f'error {nonce}')\n"
        "say(f'done {nonce} error')"
    )
    assert run.main == {"text/plain": "42", "image/png": "AAr/", "application/json": {"a": [1]}}
    assert run.error == {"name": "N", "value": "V", "traceback": "T"} and (run.status, run.execution_count) == ("error", 1)


def test_only_the_nonce_of_the_running_execution_is_heard(start):
    kernel = start()
    show = "for _ in (1,):\n    say(f'part {%s} text/plain 1', b'x'); say(f'show {%s} main')\n"
    control = kernel.run("global old, other; old, other = nonce, '0' * 32\n" + show % ("nonce", "nonce"))
    assert control.text == "x"
    forged = kernel.run((show % ("old", "old")) + "say(f'error {old}'); say(f'done {old} ok'); time.sleep(0.1)\n" + (show % ("other", "other")))
    assert forged.results == [] and forged.status == "ok"
    assert kernel.run("pass").execution_count == 3


def test_what_comes_after_the_end_is_nobodys(start):
    kernel = start("while True:\n    nonce, code, variables = request()\n    say('begin ' + nonce)\n    exec(code)\n")
    first = kernel.run("say(f'done {nonce} ok'); say(f'part {nonce} text/plain 1', b'x'); say(f'show {nonce} main'); say(f'done {nonce} error')")
    assert first.status == "ok" and first.results == []
    second = kernel.run("say(f'done {nonce} ok')")
    assert second.status == "ok" and second.results == []


@pytest.mark.parametrize(
    "words",
    ["nonsense", "part", "part x y z", "part x y -1", "part x y 99999999999999999999", "done", "x" * 10000 + "' + 'y", "done {nonce} perhaps"],
)
def test_words_that_make_no_sense_end_the_kernel_and_say_so(start, words):
    kernel = start()
    run = kernel.run(f"say(f'{words}'); messages.flush(); time.sleep(30)")
    assert run.died and "broke this context's own channel" in run.stderr
    assert ended(kernel) == 70


def test_an_interpreter_that_ends_takes_its_kernel_along_in_the_same_way(start):
    kernel = start()
    assert kernel.run("say(f'part {nonce} text/plain 1', b'x'); say(f'show {nonce} main'); os._exit(7)").text == "x"
    assert ended(kernel) == 7
    kernel = start()
    assert kernel.run("os.kill(os.getpid(), signal.SIGKILL)").died
    assert ended(kernel) == -signal.SIGKILL


def test_an_interrupt_reaches_code_alone(start):
    kernel = start(
        "signal.signal(signal.SIGINT, lambda *a: os.write(1, b'hit '))\n"
        "while True:\n    nonce, code, variables = request()\n    time.sleep(0.5)\n    os.write(1, b'begin ')\n    say('begin ' + nonce)\n"
        "    time.sleep(0.5)\n    say(f'done {nonce} interrupted')\n"
    )
    os.kill(kernel.pid, signal.SIGINT)  # nothing runs: lost
    token = kernel.start("")
    time.sleep(0.2)
    os.kill(kernel.pid, signal.SIGINT)  # before its code: kept until then
    run = kernel.collect(token)
    assert run.stdout == "begin hit " and run.status == "interrupted" and run.error["name"] == "KeyboardInterrupt"


def test_a_large_request_and_a_large_result_pass_whole(start):
    run = start().run("#" + "x" * 3_000_000 + "\nsay(f'part {nonce} text/plain 2000000', b'y' * 2000000); say(f'show {nonce} main')")
    assert run.text == "y" * 2_000_000


def test_a_result_beyond_the_limit_is_left_out_and_said(start):
    run = start(result_limit=1000).run("say(f'part {nonce} text/plain 5000', b'y' * 5000); say(f'show {nonce} main')")
    assert "left out" in run.text and "too large" in run.stderr


def test_variables_come_with_their_request(start):
    run = start().run("os.write(1, repr(sorted(variables.items())).encode())", env={"A": "1\n ü", "B": None})
    assert run.stdout == "[('A', '1\\n ü'), ('B', None)]"


def test_nothing_of_the_channel_has_a_path_once_the_driver_is_ready(start):
    kernel = start()
    run = kernel.run("os.write(1, repr(sorted(os.listdir(os.path.dirname(sys.argv[1]))) if os.path.isdir(os.path.dirname(sys.argv[1])) else 'gone').encode())")
    assert run.stdout == "'gone'"


def test_every_language_has_a_driver_and_a_package(start):
    for name, language in languages.LANGUAGES.items():
        assert os.path.isfile(os.path.join(languages.DRIVERS, language.driver)), name
        assert language.package and language.program


def test_the_driver_of_the_guide_works_as_printed(start):
    perl = shutil.which("perl")
    if perl is None:
        pytest.skip("this machine has no perl")
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/add-a-language.md").read_text("utf-8")
    kernel = start(guide.partition("```perl\n")[2].partition("```")[0], perl)
    assert kernel.run("our $kept = 21; print \"out\\n\"; $kept * 2").text == "42"
    run = kernel.run("print $kept, $ENV{A}; die \"broken\"", env={"A": "b"})
    assert run.stdout == "21b" and run.status == "error" and "broken" in run.error["value"]
    assert kernel.run("sleep 30", interrupt_after=1.0).status == "interrupted"
    assert kernel.run("$ENV{A} // $kept").text == "21"
