"""How package environments are made: once, whole or not at all, locked by hash; and what cannot be made is told.

Wheels are made here and found by `--find-links`; no network is used.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wheelhouse
from ringfence import EngineError, InvalidArgumentError, NotFoundError
from ringfence.node import cache, packages, requirements, resolver

PROGRAM = str(Path(sys.executable).with_name("ringfence"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels that pip is configured for, and nothing else."""
    place = tmp_path / "wheels"
    place.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    return place


def offline(place: Path) -> resolver.Source:
    return resolver.Source(find_links=(str(place),), offline=True)


# Making ------------------------------------------------------------------------------------------------------

_PREPARE = (
    "import sys; from ringfence.node import packages as p; said = []\n"
    "p.prepare(p.automatic_name([sys.argv[1]]), [sys.argv[1]], said.append)\n"
    "print(sum('unpacking' in line for line in said))"
)


def test_two_processes_that_ask_at_once_build_once(wheels: Path) -> None:
    wheelhouse.wheel(wheels, "contended")
    asking = [subprocess.Popen([sys.executable, "-c", _PREPARE, "contended"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(each.communicate(timeout=120)[0] for each in asking) == ["0\n", "1\n"]


@pytest.mark.parametrize("moment", ["collecting", "unpacking", "compiling"])
def test_a_killed_build_leaves_nothing_half_made(wheels: Path, moment: str) -> None:
    name = f"killed-{moment}"
    wheelhouse.wheel(wheels, name)
    code = (
        "import os, signal, sys; from ringfence.node import packages as p\n"
        "def say(line):\n    if sys.argv[2] in line: os.kill(os.getpid(), signal.SIGKILL)\n"
        "p.create(sys.argv[1], [sys.argv[1]], progress=say)"
    )
    done = subprocess.run([sys.executable, "-c", code, name, moment], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not packages.exists(name)
    assert name not in packages.names()
    made = packages.create(name, [name])
    assert packages.verify(made) == "whole"
    left = [entry for kind in ("packages", f"named/{name}") for entry in os.listdir(Path(cache.cache_directory(), kind))]
    assert not [entry for entry in left if entry.startswith((cache.BUILDING, cache.REMOVING)) or entry == "making"]


def test_the_lock_names_every_wheel_and_rebuilds_the_same(wheels: Path, tmp_path: Path) -> None:
    wheelhouse.wheel(wheels, "locked-one", requires=["locked-two"])
    wheelhouse.wheel(wheels, "locked-two")
    made = packages.create("locking", ["locked-one"], source=offline(wheels))
    wheelhouse.wheel(wheels, "locked-one", "9.0")
    lock = tmp_path / "pylock.toml"
    lock.write_text(made.lock())
    lines = requirements.read_file(str(lock))
    assert [line.split()[0] for line in lines] == ["locked-one==1.0", "locked-two==1.0"]
    assert all("--hash=sha256:" in line for line in lines)
    again = packages.create("locking-again", lines, source=offline(wheels))
    assert again.tree == made.tree  # one tree for the same wheels
    assert packages.create("locking").packages == made.packages
    assert packages.create("locking", update=True).packages[0].version == "9.0"


def test_a_tampered_tree_is_found_and_built_again(wheels: Path) -> None:
    wheelhouse.wheel(wheels, "tampered")
    made = packages.create("tampering", ["tampered"], source=offline(wheels))
    target = next(Path(made.tree).rglob("tampered.py"))
    state = target.stat()
    target.write_text(target.read_text().replace("1.0", "6.6"))
    with pytest.raises(EngineError, match="was changed") as refusal:
        packages.prepare("tampering")
    assert "env create tampering" in refusal.value.hint
    os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))  # hidden from the quick look, not from the long one
    assert packages.verify(packages.load("tampering")) == "changed"
    assert subprocess.run([PROGRAM, "env", "inspect", "tampering"], capture_output=True, check=False).returncode == 1
    again = packages.create("tampering")
    assert packages.verify(again) == "whole"
    assert "1.0" in target.read_text()


def test_a_wheel_that_changed_since_it_was_locked_is_refused(wheels: Path) -> None:
    wheelhouse.wheel(wheels, "swapped")
    made = packages.create("swapping", ["swapped"], source=offline(wheels))
    packages._discard(made.tree)
    wheelhouse.wheel(wheels, "swapped", files={"swapped.py": "EVIL = True\n"})
    with pytest.raises(EngineError, match="sha256 differs|not the file that was locked"):
        packages.prepare("swapping")
    assert not os.path.isdir(made.tree)


def test_an_environment_in_use_is_not_removed(wheels: Path) -> None:
    wheelhouse.wheel(wheels, "held")
    made = packages.create("holding", ["held"], source=offline(wheels))
    descriptor = cache.hold(made.tree)
    try:
        assert os.getpid() in packages.users(made.tree)
        done = subprocess.run([PROGRAM, "env", "rm", "holding"], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "in use" in done.stderr and "hint" not in done.stderr
    finally:
        os.close(descriptor)
    done = subprocess.run([PROGRAM, "env", "rm", "holding", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["removed"]["holding"] > 0
    assert not os.path.isdir(made.tree)
    with pytest.raises(NotFoundError):
        packages.load("holding")


def test_the_command_line_makes_shows_and_removes(wheels: Path, tmp_path: Path) -> None:
    wheelhouse.wheel(wheels, "from-file")
    listing = tmp_path / "requirements.txt"
    listing.write_text("# what we need\nfrom-file >= 1.0  # this\n")

    def run(*words: str) -> Any:
        done = subprocess.run([PROGRAM, "env", *words, "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    made = run("create", "by-file", "--file", str(listing), "--offline", "--find-links", str(wheels))
    assert made["name"] == "by-file" and made["packages"][0]["name"] == "from-file"
    assert "by-file" in [each["name"] for each in run("ls")]
    seen = run("inspect", "by-file")
    assert seen["state"] == "whole" and seen["used_by"] == [] and len(seen["packages"][0]["sha256"]) == 64
    assert 'name = "from-file"' in run("inspect", "by-file", "--lock")["lock"]
    run("rm", "by-file")
    assert not packages.exists("by-file")


@pytest.mark.parametrize("name", ["", "Big", "a/b", "../up", "-x", "x-", "a--b", "a" * 41, "base", "current-env", "auto-1", "a\n"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        packages.create(name, ["six"])
    assert not packages.exists(name) or name == "current-env"


def test_another_python_is_refused() -> None:
    done = subprocess.run([PROGRAM, "env", "create", "x", "six", "--python", "2.7"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Python that runs ringfence" in done.stderr


# What cannot be made -----------------------------------------------------------------------------------------


def test_what_is_not_there_conflicts_or_fits_no_machine_is_told(wheels: Path) -> None:
    wheelhouse.wheel(wheels, "one", requires=["common==1.0"])
    wheelhouse.wheel(wheels, "two", requires=["common==2.0"])
    wheelhouse.wheel(wheels, "common", "1.0")
    wheelhouse.wheel(wheels, "common", "2.0")
    wheelhouse.wheel(wheels, "foreign", tag="cp27-cp27mu-win32")
    for wanted, word in (["absent"], "no package absent"), (["one", "two"], "contradict"), (["foreign"], "no wheel for Python"):
        with pytest.raises(EngineError, match=word) as refusal:
            packages.create("impossible", wanted, source=offline(wheels))
        assert refusal.value.hint
    assert not packages.exists("impossible")


def test_no_network_is_told_with_what_to_do(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(EngineError, match="no package index could be reached") as refusal:
        packages.create("nowhere", ["six"], source=resolver.Source(index_url="http://127.0.0.1:9/simple"))
    assert "--offline --find-links" in refusal.value.hint
