"""What all tests share: the identity they run under, and the promise to leave nothing behind.

`make test` runs everything once. As root it then runs the tests marked `user_too` twice more as an ordinary user,
with and without subordinate ids (tools/as_user.py); as an ordinary user nothing is left to be repeated.
"""

from __future__ import annotations

import os
import shutil
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts `make test` in the background has it ignored, and every child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup does the same with this one


def identity() -> str:
    """`root`, `subids` (a user with subordinate ids) or `single` (a user with nothing but one uid)."""
    if os.geteuid() == 0:
        return "root"
    return os.environ.get("RINGFENCE_TEST_IDENTITY") or ("subids" if shutil.which("newuidmap") else "single")


def pytest_report_header() -> str:
    return f"identity: {identity()} (uid {os.geteuid()})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The laws of sandboxes hold for every user: all of tests/conformance and tests/attacks is marked so."""
    for item in items:
        if {"conformance", "attacks"} & set(item.path.parts):
            item.add_marker(pytest.mark.user_too)
        if "attacks" in item.path.parts:
            item.add_marker(pytest.mark.flaky(reruns=0))  # a breach that works every other time is a breach
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
