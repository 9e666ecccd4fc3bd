"""A bash context: an interactive shell without a terminal, whose input are the lines that this file composes.

Interactive, because such a shell comes back to its next line after an interrupt, `${x:?}`, an unset variable under
`set -u` or a failed expansion, with all its variables; a shell that reads a script would end. Guards against code that
touches the shell's own channels: while it runs fd 0 is /dev/null, and the shell's own descriptors are moved and
close-on-exec, so that programs which the code starts have three descriptors. It has no results beside its output;
an exit status other than 0 is its error. `exit`, and a failure under `set -e`, end the shell, as in a terminal.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from typing import Any

from ringfence.guest.interpreter import Broken, Interpreter

# The shell's own, by numbers that scripts hardly use: the agent's two pipes, and the messages.
OUTPUT, ERRORS, MESSAGES = 61, 62, 63
_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431  # ioctl_tty(2)
_CHECK_SECONDS = 5.0


def quoted(text: bytes) -> bytes:
    """`text` as one word on one line of bash (ANSI-C quoting)."""
    return b"$'" + text.replace(b"\\", b"\\\\").replace(b"'", b"\\'").replace(b"\n", b"\\n").replace(b"\r", b"\\r") + b"'"


class Bash(Interpreter):
    """What differs from other interpreters: where requests go, how they are worded, what an exit status means."""

    status = 0  # of the code before

    def descriptors(self, paths: list[str]) -> list[tuple[Any, ...]]:
        # Its first words, that there is no job control, are for nobody; and an interactive shell resets the terminal
        # of its stderr when a child dies of a signal, complaining where there is none: it gets one that nobody reads.
        terminal = _terminal() or "/dev/null"
        return [
            (os.POSIX_SPAWN_DUP2, 1, OUTPUT),
            (os.POSIX_SPAWN_DUP2, 2, ERRORS),
            (os.POSIX_SPAWN_OPEN, MESSAGES, paths[1], os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 0, paths[0], os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, terminal, os.O_RDWR | os.O_NOCTTY, 0),
        ]

    def request(self, code: bytes, variables: list[tuple[bytes, bytes | None]]) -> bytes:
        # One line, so that an interrupt never meets a half-read command. `begin` comes from that line itself.
        setting = b"".join(
            b"__ringfence_set %s%s; " % (quoted(name), b"" if value is None else b" " + quoted(value))
            for name, value in variables
        )
        # The status is kept inside `eval`, which then always succeeds: under `set -e` its own failure would end the
        # shell after a last line such as `[ -f x ] && y`. The empty line ends one that a backslash continues.
        code += b"\n\n__ringfence_status=$?"
        # `begin` returns the status of the code before, for `$?`; as a condition, so that neither `set -e` nor an ERR
        # trap takes notice of it.
        return b"%s__ringfence_begin %s %d %s builtin eval -- %s </dev/null >&%d 2>&%d %d>&- %d>&- %d>&-\n__ringfence_end $?\n" % (
            setting, self.nonce, self.status, b"||" if self.status else b"&&", quoted(code),
            OUTPUT, ERRORS, OUTPUT, ERRORS, MESSAGES,
        )  # fmt: skip

    def conclude(self, status: str) -> str:
        if not status.isdecimal() or int(status) > 255:
            raise Broken(f"unknown status {status[:100]!r}")
        self.status = number = int(status)
        if number == 0:
            return "ok"
        if number == 128 + signal.SIGINT and self.interrupted:
            return "interrupted"
        problem = self._syntax_problem() if number == 2 else ""
        if problem:
            self.report("SyntaxError", problem.partition("\n")[0], problem)
        else:
            value = f"exit status {number}{_signal_of(number)}"
            self.report("ExitStatusError", value, value)
        return "error"

    def _syntax_problem(self) -> str:
        """What bash says of the code's syntax; empty when nothing, or when it takes too long to say."""
        import subprocess

        try:
            check = subprocess.run(
                ["bash", "-O", "extglob", "-n"], executable=self.config["program"], input=self.code, capture_output=True,
                env={"LC_ALL": "C.UTF-8"}, timeout=_CHECK_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return ""
        return check.stderr.decode("utf-8", "replace").replace("bash: ", "").strip() if check.returncode else ""


def _signal_of(status: int) -> str:
    try:
        return f" ({signal.Signals(status - 128).name})" if status > 128 else ""
    except ValueError:
        return ""


def _terminal() -> str:
    """A pseudo-terminal's path; its other end stays open, unread, in this process. Empty where there is none."""
    try:
        master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("I", fcntl.ioctl(master, _TIOCGPTN, b"\0\0\0\0"))[0]
        return f"/dev/pts/{number}"
    except OSError:
        return ""
