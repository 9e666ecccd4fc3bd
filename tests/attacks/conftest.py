"""Sandboxes under attack, the neighbour that must not notice, canaries and sinks on the host.

Guards against tests that prove nothing: whoever runs pytest (root or an ordinary user) is attacked, what the host
counts is the judge, and all that was planted goes again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from arena import SMALL, Sink, assert_answers, canary, equip

from ringfence import EnforcementError, Sandbox


@pytest.fixture(scope="session", autouse=True)
def arena_exists() -> Iterator[None]:
    try:
        Sandbox(template="plain").kill()
    except EnforcementError as refusal:
        pytest.skip(f"this machine holds no sandbox: {refusal}")
    yield
    from ringfence.node.node import Node

    Node.current().close()


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """The sandbox that a module's harmless probes share."""
    with Sandbox(**SMALL) as sandbox:
        yield equip(sandbox)


@pytest.fixture
def make() -> Iterator[Callable[..., Sandbox]]:
    """Makes small sandboxes with the probes in them; they end with the test."""
    made: list[Sandbox] = []

    def start(**options: Any) -> Sandbox:
        made.append(Sandbox(**{**SMALL, **options}))
        return equip(made[-1])

    yield start
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def neighbour() -> Iterator[Sandbox]:
    """A second sandbox, which still answers when the attack on the first is over."""
    with Sandbox(**SMALL) as sandbox:
        yield equip(sandbox)
        assert_answers(sandbox)


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[tuple[str, list[Path]]]:
    """A canary in files all over the host, wherever this user may write; checked and removed at the end.

    Not below /usr: that is lent to every sandbox, with whatever everyone may read in it.
    """
    token = canary()
    places = [Path(name) for name in ("/", "/home", "/root", "/tmp", "/var/tmp", "/opt", "/run", "/srv", "/mnt", "/etc", "/dev/shm")]
    places += [Path.home(), Path.cwd(), tmp_path]
    files = []
    for place in dict.fromkeys(place.resolve() for place in places):
        path = place / f"ringfence-{token}"
        try:
            path.write_text(token)
        except OSError:
            continue
        path.chmod(0o644)
        files.append(path)
    try:
        yield token, files
        assert all(path.read_text() == token for path in files), "a canary of the host was changed"
    finally:
        for path in files:
            path.unlink(missing_ok=True)


@pytest.fixture
def sink() -> Iterator[Sink]:
    """A listener of the host, with its path socket and FIFO in a directory that anyone may enter."""
    directory = Path(tempfile.mkdtemp(prefix="ringfence-sink-", dir="/var/tmp"))
    directory.chmod(0o755)
    listener = Sink(directory)
    yield listener
    listener.close()
    shutil.rmtree(directory)


@pytest.fixture
def victim() -> Iterator[tuple[int, str]]:
    """A process of this user on the host with a canary in its memory and environment: (pid, canary)."""
    token = canary()
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, time; kept = os.environ['CANARY']; print('ready', flush=True); time.sleep(600)"],
        env={**os.environ, "CANARY": token}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid, token
    assert process.poll() is None, "a process of the host was killed"
    process.kill()
    process.wait()
    process.stdout.close()
