"""What every probe shares: one JSON line per attempt, on standard output, whether it runs inside or outside.

Python 3.9 and the standard library, since the probes run on whatever Python a sandbox has.
"""
# ruff: noqa: UP031

import ctypes
import errno
import json
import os
import signal
import sys

libc = ctypes.CDLL(None, use_errno=True)


def say(name, answer):
    """`answer` is an errno's name, "done", or whatever JSON holds."""
    sys.stdout.write(json.dumps([name, answer]) + "\n")
    sys.stdout.flush()


def name_of(number):
    return errno.errorcode.get(number, str(number))


def attempt(name, action):
    """Says "done" when `action()` returns, else the errno's name."""
    try:
        action()
    except OSError as problem:
        say(name, name_of(problem.errno))
        return False
    say(name, "done")
    return True


def system_call(number, *arguments):
    """The errno's name, or "done". In a child, so that a call that kills or changes the caller harms nothing."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(2)
        ctypes.set_errno(0)
        result = libc.syscall(
            ctypes.c_long(number),
            *[ctypes.c_long(item) if isinstance(item, int) else item for item in arguments],
        )
        os.write(send, (name_of(ctypes.get_errno()) if result == -1 else "done").encode())
        os._exit(0)
    os.close(send)
    answer = os.read(receive, 64).decode()
    os.close(receive)
    status = os.waitpid(child, 0)[1]
    return answer or "signal %d" % (status & 127)
