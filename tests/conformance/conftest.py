"""Sandboxes for the laws, and the last law: a whole session of tests leaves nothing on the machine.

Guards against a suite that dirties the machine it runs on, and against one test's dead sandbox failing the next.
Nothing here is faked: every sandbox is started through the public facade on the real engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from leftovers import Traces, command_of, descendants, groups_of, launcher_pid

from ringfence import EnforcementError, Sandbox


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """At the end: no process, control group, mount or file of ours."""
    try:
        Sandbox().kill()
    except EnforcementError as refusal:
        pytest.skip(f"this machine holds no sandbox: {refusal}")
    before = Traces.of(launcher_pid())
    own = descendants(os.getpid()) - set(before.processes)
    launchers = {before.launcher}
    yield
    from ringfence.node.node import Node

    launchers.add(launcher_pid())
    after = Traces.of(launcher_pid())
    Node.current().close()
    after.files, after.mounts = before.files, before.mounts
    after.gone(5.0)
    left = {pid: command_of(pid) for pid in descendants(os.getpid()) - own}
    # multiprocessing keeps helpers of its own for as long as a process lives.
    left = {pid: command for pid, command in left.items() if command not in ("?", "") and "multiprocessing" not in command}
    assert not left, f"processes of the tests are left: {left}"
    assert not [group for launcher in launchers for group in groups_of(launcher)]


_shared: dict[str, Sandbox] = {}


def _share(name: str, template: str, **options: Any) -> Sandbox:
    sandbox = _shared.get(name)
    if sandbox is None or not sandbox.is_running():
        sandbox = _shared[name] = Sandbox(template, **options)
    return sandbox


@pytest.fixture(scope="module", autouse=True)
def _end_shared() -> Iterator[None]:
    yield
    while _shared:
        _shared.popitem()[1].kill()


@pytest.fixture
def sandbox() -> Sandbox:
    """A sandbox of the base template with the default policy; a module's tests share it while it lives."""
    return _share("base", "base")


@pytest.fixture
def data_sandbox() -> Sandbox:
    """The same of the data template."""
    return _share("data", "data")


@pytest.fixture
def make() -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes that end with the test."""
    made: list[Sandbox] = []

    def start(template: str = "base", **options: Any) -> Sandbox:
        made.append(Sandbox(template, **options))
        return made[-1]

    yield start
    for sandbox in made:
        sandbox.kill()


@pytest.fixture(scope="session")
def strength(nothing_is_left: None) -> dict[str, str]:
    """What is in force on this machine under this identity: primitive -> hard, watched or none."""
    with Sandbox("plain") as sandbox:
        return {row.primitive: row.strength for row in sandbox.info().enforcement}
