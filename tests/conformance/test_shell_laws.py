"""`ringfence shell` on real terminals: it behaves like one, gives it back as it was, and survives its end when asked."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0
COMMAND = [sys.executable, "-c", "from ringfence.cli.entry import main; main()"]


class Terminal:
    """A terminal with one program as its session's leader."""

    def __init__(self, *words: str, rows: int = 30, columns: int = 100) -> None:
        # The other end stays open here too, as the shell that started the program would have it.
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        self.settings = termios.tcgetattr(self.slave)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(self.slave, number)
            os.environ["TERM"] = "xterm-256color"
            os.execv(COMMAND[0], [*COMMAND, "shell", *words])
        self.seen = b""
        self.code: int | None = None

    def read(self, until: bytes) -> bytes:
        """All output up to and with `until`."""
        deadline = time.monotonic() + PATIENCE
        while until not in self.seen:
            assert time.monotonic() < deadline, f"{until!r} did not come: {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536)
        found, _, self.seen = self.seen.partition(until)
        return found + until

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def prompt(self) -> None:
        """Wait until the shell listens: what it prints is made by the shell, the line as typed does not have it."""
        self.type(b"echo rea''dy\r")
        self.read(b"ready\r\n")

    def ask(self, line: bytes) -> bytes:
        """What a command line prints."""
        self.type(b"echo be''gin; " + line + b"; echo en''d\r")
        self.read(b"begin\r\n")
        return self.read(b"end\r\n").removesuffix(b"end\r\n").replace(b"\r\n", b"\n").strip()

    def wait(self) -> int:
        """The exit code. Reads what comes meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while self.code is None:
            assert time.monotonic() < deadline, f"it did not end: {self.seen!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                self.seen += os.read(self.master, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536)
        return self.code

    def hang_up(self) -> None:
        """The window is closed: nobody holds the terminal any more."""
        for name in ("slave", "master"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    def close(self) -> None:
        self.hang_up()
        if self.code is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


@pytest.fixture
def sit() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*words: str, **options: Any) -> Terminal:
        made.append(Terminal(*words, **options))
        return made[-1]

    before = {row["pid"] for row in listed()}
    yield start
    for each in made:
        each.close()
    for row in listed():
        if row["pid"] not in before and row["shell"]:
            subprocess.run([*COMMAND, "kill", row["id"]], capture_output=True, timeout=PATIENCE, check=False)


def listed() -> list[dict[str, Any]]:
    return json.loads(subprocess.run([*COMMAND, "ls", "--json"], capture_output=True, timeout=PATIENCE, check=True).stdout)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_shell_is_a_terminal_that_follows_the_size_and_its_exit_code_is_ours(sit: Callable[..., Terminal]) -> None:
    terminal = sit("--env", "COLOUR=green")
    terminal.prompt()
    assert terminal.ask(b"stty size") == b"30 100"
    assert terminal.ask(b"test -t 0 && test -t 1 && echo $TERM $COLOUR $(id -un)") == b"xterm-256color green user"
    fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("4H", 50, 150, 0, 0))
    os.kill(terminal.pid, signal.SIGWINCH)
    until(lambda: terminal.ask(b"stty size") == b"50 150")
    # Said by the job itself: before it has the terminal, bash takes the key and waits for the job all the same.
    terminal.type(b"sh -c 'echo sl\"\"eeps; exec sleep 300'\r")
    terminal.read(b"sleeps\r\n")
    terminal.type(b"\x03")  # a byte for the terminal inside, not a signal for us
    terminal.read(b"$ ")
    terminal.prompt()
    terminal.type(b"exit 7\r")
    assert terminal.wait() == 7


@pytest.mark.parametrize("end", ["exit", "escape", "terminated", "holder"])
def test_the_terminal_comes_back_as_it_was(sit: Callable[..., Terminal], end: str) -> None:
    terminal = sit()
    terminal.prompt()
    assert termios.tcgetattr(terminal.slave) != terminal.settings  # the control: it is raw meanwhile
    sandbox = next(row for row in listed() if row["owner"] in children(terminal.pid))
    terminal.ask(b"printf '\\033[?1049h\\033[?1000h\\033[?25l'")
    if end == "exit":
        terminal.type(b"exit\r")
    elif end == "escape":
        terminal.type(b"\r~.")
    elif end == "terminated":
        os.kill(terminal.pid, signal.SIGTERM)
    else:
        os.kill(sandbox["owner"], signal.SIGKILL)
    assert terminal.wait() == {"exit": 0, "escape": 129, "terminated": 143, "holder": 125}[end]
    assert termios.tcgetattr(terminal.slave) == terminal.settings
    for mode in (b"\x1b[?1049l", b"\x1b[?1000l", b"\x1b[?25h", b"\x1b[0m"):
        assert mode in terminal.seen
    until(lambda: all(row["pid"] != sandbox["pid"] for row in listed()))


def children(pid: int) -> set[int]:
    return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_a_detached_shell_goes_on_and_is_come_back_to(sit: Callable[..., Terminal]) -> None:
    first = sit("--name", "long-work")
    first.prompt()
    first.ask(b"remembered=forty-two")
    first.ask(b"printf 'la''ndmark \\033]52;c;eA==\\007\\n'")
    first.type(b"\r~.")
    assert first.wait() == 0 and b"--attach" in first.seen
    row = next(row for row in listed() if row["metadata"].get("name") == "long-work")
    assert row["shell"] and row["state"] == "running"

    second = sit("--attach", "long-work", rows=40, columns=90)
    past = second.read(b"landmark") + second.read(b"\n")
    assert b"\x1b]52" not in past and b"\\x1b]52" in past  # of the past only what can be read comes back
    second.prompt()
    assert second.ask(b"echo $remembered; stty size") == b"forty-two\n40 90"

    third = sit("--attach", row["id"][:8])
    third.prompt()
    assert second.wait() == 0 and b"taken over" in second.seen
    assert termios.tcgetattr(second.slave) == second.settings
    third.type(b"exit 3\r")
    assert third.wait() == 3
    until(lambda: all(each["pid"] != row["pid"] for each in listed()))
    assert sit("--attach", "long-work").wait() == 1


@pytest.mark.parametrize("detachable", [True, False])
def test_closing_the_terminal_detaches_or_ends(sit: Callable[..., Terminal], detachable: bool) -> None:
    terminal = sit(*(["--detachable"] if detachable else []))
    terminal.prompt()
    row = next(row for row in listed() if row["owner"] in children(terminal.pid))
    terminal.hang_up()
    status = os.waitpid(terminal.pid, 0)[1]
    terminal.code = os.waitstatus_to_exitcode(status)
    assert terminal.code == 129
    if not detachable:
        until(lambda: all(each["pid"] != row["pid"] for each in listed()))
        return
    again = sit("--attach", row["id"])
    again.prompt()
    again.type(b"exit\r")
    assert again.wait() == 0


def test_a_flood_in_both_directions_does_not_stick(sit: Callable[..., Terminal]) -> None:
    terminal = sit("--template", "plain", "--", "/bin/cat")
    terminal.type(b"x" * 1000 + b"\r")
    terminal.read(b"x" * 1000)
    for number in range(200):
        terminal.type(b"%06d" % number + b"y" * 900 + b"\r")
        if number % 10 == 9:
            terminal.read(b"%06d" % number)
    terminal.type(b"\x04")
    assert terminal.wait() == 0


def test_a_workspace_is_passed_through(sit: Callable[..., Terminal], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/var/tmp") / f"ringfence-test-shell-{os.getpid()}"
        place.mkdir()
    else:
        place = tmp_path
    try:
        (place / "hello").write_text("from the host\n")
        terminal = sit("--workspace", str(place), "--", "/bin/sh", "-c", "pwd; cat hello; echo changed > hello; exit 5")
        assert terminal.wait() == 5
        assert b"/workspace\r\nfrom the host" in terminal.seen
        assert (place / "hello").read_text() == "from the host\n"
    finally:
        if os.geteuid() == 0:
            (place / "hello").unlink(missing_ok=True)
            place.rmdir()


def test_without_a_terminal_and_with_nonsense_it_says_so() -> None:
    for words, said in ((["shell"], b"needs a terminal"), (["shell", "--name", "A b"], b"is no name"),
                        (["shell", "--env", "=x"], b"NAME=VALUE"), (["shell", "--attach", "x", "--name", "y"], b"--attach")):  # fmt: skip
        done = subprocess.run([*COMMAND, *words], capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode in (1, 2) and re.search(said, done.stderr), done


def test_what_cannot_start_says_why_and_leaves_the_terminal(sit: Callable[..., Terminal]) -> None:
    terminal = sit("--memory", "1")
    assert terminal.wait() == 1 and b"ringfence: " in terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.settings
