"""Run something in a fork: filters, domains and dropped capabilities stay for good, so never in the test."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable


def in_child(action: Callable[[], object]) -> str:
    """What `action` returned, as text; the name of its errno if it raised OSError; or the exception."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(action())
        except OSError as problem:
            answer = errno.errorcode.get(problem.errno or 0, "?")
        except BaseException as problem:  # noqa: BLE001 - the test judges it
            answer = repr(problem)
        os.write(writable, answer.encode())
        os._exit(0)
    os.close(writable)
    try:
        chunks = []
        while chunk := os.read(readable, 65536):
            chunks.append(chunk)
        return b"".join(chunks).decode()
    finally:
        os.close(readable)
        os.waitpid(child, 0)
