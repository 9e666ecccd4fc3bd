"""The program `ringfence`: the fast path for `run` and `exec`, everything else by typer.

Guards against paying for a command line library where the answer takes less time than its import. For `run` and
`exec` the launcher is started first of all, and comes up while this process imports what it needs to talk to it.
Standard library only; `app` is imported when a command needs it.
"""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Entry point of the console script. Never returns."""
    words = sys.argv[1:]
    if words and words[0] in ("run", "exec"):
        gc.disable()  # collections while modules load find nothing; both processes turn them on again
        from ringfence.cli.arguments import UsageError, parse

        try:
            request = parse(words[0], words[1:])
        except UsageError as error:
            sys.stderr.write(f"ringfence: {error}\n")
            sys.exit(2)
        if not request.help:
            try:
                _open_standard_descriptors()
                early = _start_launcher()
                if request.review:
                    from ringfence.cli import review

                    code = review.main(request, early)
                else:
                    from ringfence.cli import once

                    code = once.main(request, early)
            except KeyboardInterrupt:
                code = 130  # before there was a program to interrupt; the launcher ends with us
            # Nothing is left to flush or to close: the interpreter's own end would only cost time.
            os._exit(code)
        sys.argv = [sys.argv[0], words[0], "--help"]
    gc.enable()
    from ringfence.cli.app import run

    run()


def _open_standard_descriptors() -> None:
    """Where the caller closed 0, 1 or 2, the next socket would become the program's input or output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open("/dev/null", os.O_RDWR)  # takes the lowest free number, which is this one


def _start_launcher() -> tuple[int, int] | None:
    """Start a launcher before anything else: (its pid, our descriptor). None where that takes a closer look."""
    import _socket  # the C part alone: `socket` comes with `enum` and `selectors`

    # Both processes need these.
    from ringfence.engines.namespace.starting import fork_launcher, start_launcher
    from ringfence.linux import channels, json_text  # noqa: F401

    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    try:
        pid = fork_launcher(theirs.fileno())
        if not pid:
            base = getattr(sys, "_base_executable", "") or ""
            executable = os.path.realpath(base) if base else ""
            # As node.environments judges it: the interpreter that lies below the prefix which sandboxes mount.
            if not executable.startswith(os.path.realpath(sys.base_prefix).rstrip("/") + "/"):
                return None
            pid = start_launcher(executable, theirs.fileno())
        return pid, ours.detach()
    except OSError:
        return None  # the ordinary way says why
    finally:
        theirs.close()
