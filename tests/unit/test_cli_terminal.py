"""The command line on a real terminal (a pty): what untrusted programs print there acts on nothing."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-c", "from ringfence.cli.entry import main; main()"]
PATIENCE = 60.0
CLIPBOARD, TITLE, SINGLE = "\\033]52;c;ZXZpbA==\\007", "\\033]0;owned\\007", "\\2332J"

pytestmark = pytest.mark.user_too


def on_terminal(*words: str) -> bytes:
    """All that a command writes to the terminal that is its input, output and error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown, until = b"", time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break  # EIO: the last descriptor of the other end is closed
            if not piece:
                break
            shown += piece
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown


@pytest.fixture(scope="module", autouse=True)
def _works_here() -> None:
    done = subprocess.run([*COMMAND, "run", "-c", "print(1)"], capture_output=True, timeout=PATIENCE, check=False)
    if done.returncode == 125 and b"namespace" in done.stderr:
        pytest.skip(f"no sandbox starts here: {done.stderr.decode()}")


@pytest.mark.parametrize("stream", [1, 2])
def test_what_acts_on_a_terminal_is_shown_and_a_pipe_gets_the_bytes(stream: int) -> None:
    """S132. The control is the pipe: the same program's bytes arrive there and would act."""
    script = f"printf '{CLIPBOARD}{TITLE}{SINGLE}\\033[32mgreen\\n' >&{stream}"
    done = subprocess.run([*COMMAND, "exec", "--", "sh", "-c", script], capture_output=True, timeout=PATIENCE, check=False)
    assert (done.stdout if stream == 1 else done.stderr) == b"\x1b]52;c;ZXZpbA==\x07\x1b]0;owned\x07\x9b2J\x1b[32mgreen\n"
    shown = on_terminal("exec", "--", "sh", "-c", script)
    assert shown == b"\\x1b]52;c;ZXZpbA==\\x07\\x1b]0;owned\\x07\\x9b2J\x1b[32mgreen\r\n\x1b[0m"


def test_errors_that_quote_untrusted_names_act_on_nothing() -> None:
    """S133."""
    shown = on_terminal("exec", "--", "no-such-\x1b]0;owned\x07-program")
    assert b"no-such-" in shown and b"\x1b" not in shown and b"\x07" not in shown
