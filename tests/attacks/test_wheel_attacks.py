"""Hostile wheels and source distributions: nothing of them runs on the host, and no file of theirs lies outside.

Judged by canaries on the host. The controls show that a naive unpacker, and pip by itself, would have done it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import wheelhouse
from ringfence import EngineError, InvalidArgumentError
from ringfence.node import packages, requirements, resolver, wheels

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE = f"lib/python{VERSION}/site-packages"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_CACHE", str(tmp_path / "cache"))


def unpack(path: Path, tree: Path) -> wheels.Unpacked:
    tree.mkdir(parents=True, exist_ok=True)
    return wheels.unpack(str(path), wheels.sha256_of(str(path)), str(tree), SITE, "/opt/packages", True)


def everything(place: Path) -> set[str]:
    return {str(path) for path in place.rglob("*")}


HOSTILE: dict[str, dict[str, Any]] = {
    "a name that climbs": {"files": {"../../../../outside.py": "x"}},
    "a name that climbs later": {"files": {"evil/../../../../../outside.py": "x"}},
    "an absolute name": {"files": {"/tmp/outside.py": "x"}},
    "a backslash": {"files": {"..\\outside.py": "x"}},
    "a newline": {"files": {"out\nside.py": "x"}},
    "an escape sequence": {"files": {"out\x1b[2Jside.py": "x"}},
    "a link": {"files": {"evil.py": "/etc/passwd"}, "modes": {"evil.py": 0o120777}},
    "a device": {"files": {"evil.py": ""}, "modes": {"evil.py": 0o020666}},
    "a FIFO": {"files": {"evil.py": ""}, "modes": {"evil.py": 0o010666}},
    "an entry twice": {"files": {"evil.py": "x"}, "twice": ["evil.py"]},
    "data that climbs": {"files": {"evil-1.0.data/data/../../outside": "x"}},
    "data over the interpreter's library": {"files": {f"evil-1.0.data/data/lib/python{VERSION}/os.py": "x"}},
    "data over the configuration": {"files": {"evil-1.0.data/data/pyvenv.cfg": "home = /tmp"}},
    "data over the programs": {"files": {"evil-1.0.data/data/bin/python3": "#!/bin/sh"}},
    "a script called python3": {"files": {"evil-1.0.data/scripts/python3": "#!/bin/sh"}},
    "data of an unknown kind": {"files": {"evil-1.0.data/elsewhere/x": "x"}},
    "a content that RECORD tells otherwise": {"files": {"evil.py": "good"}, "forged": {"evil.py": "evil"}},
    "no metadata": {"metadata": False},
    "a file where a directory is": {"files": {"evil": "x", "evil/x.py": "x"}},
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_wheel_is_refused_and_nothing_lies_outside(tmp_path: Path, attack: str) -> None:
    path = wheelhouse.wheel(tmp_path / "wheels", "evil", **HOSTILE[attack])
    tree = tmp_path / "place" / "tree"
    tree.mkdir(parents=True)
    before = everything(tmp_path)
    with pytest.raises(EngineError, match="is refused") as refusal:
        unpack(path, tree)
    assert "evil-1.0" in refusal.value.message and "\x1b" not in refusal.value.message and "\n" not in refusal.value.message
    outside = {each for each in everything(tmp_path) - before if not each.startswith(str(tree) + "/")}
    assert not outside and not os.path.exists("/tmp/outside.py")
    assert not [each for each in tree.rglob("*") if each.is_symlink() or not (each.is_file() or each.is_dir())]


def test_the_same_files_under_honest_names_are_unpacked(tmp_path: Path) -> None:
    """The control of the above: it is the names that are refused."""
    files = {"evil/outside.py": "x", "evil-1.0.data/scripts/tool": "#!python\n", "evil-1.0.data/data/share/x": "x"}
    assert unpack(wheelhouse.wheel(tmp_path / "wheels", "evil", files=files), tmp_path / "tree").name == "evil"
    assert (tmp_path / "tree" / "bin" / "tool").read_text() == "#!/opt/packages/bin/python3\n"


def test_a_naive_unpacker_would_have_written_outside(tmp_path: Path) -> None:
    path = wheelhouse.wheel(tmp_path / "wheels", "evil", files={"../outside.py": "x"})
    (tmp_path / "tree").mkdir()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if ".dist-info" not in entry.filename:
                (tmp_path / "tree" / entry.filename).write_bytes(archive.read(entry))
    assert (tmp_path / "outside.py").exists()


def test_an_archive_that_grows_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheelhouse.wheel(tmp_path / "wheels", "evil", files={"evil.bin": bytes(8 << 20)})
    assert path.stat().st_size < 64 << 10
    monkeypatch.setattr(wheels, "LARGEST_WHEEL", 4 << 20)
    with pytest.raises(EngineError, match="would unpack to more"):
        unpack(path, tmp_path / "tree")
    assert not [each for each in (tmp_path / "tree").rglob("*") if each.is_file()]
    monkeypatch.setattr(wheels, "LARGEST_WHEEL", 16 << 20)
    assert unpack(path, tmp_path / "tree").size > 8 << 20  # the control: the same file within the bound


def test_an_archive_that_lies_about_sizes_is_cut(tmp_path: Path) -> None:
    path = wheelhouse.wheel(tmp_path / "wheels", "evil", files={"evil.bin": bytes(1 << 20)})
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.index(signature) + offset
        data[at : at + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(EngineError, match="is refused"):
        unpack(path, tmp_path / "tree")
    assert sum(each.stat().st_size for each in (tmp_path / "tree").rglob("*") if each.is_file()) < 64 << 10


def test_garbage_is_refused_as_a_wheel(tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"PK\x03\x04", os.urandom(4096), b"PK\x05\x06" + bytes(18))):
        path = tmp_path / f"evil-{number}-py3-none-any.whl"
        path.write_bytes(content)
        with pytest.raises(EngineError, match="is refused"):
            unpack(path, tmp_path / f"tree{number}")


# Builds ------------------------------------------------------------------------------------------------------


def _plain_pip(place: Path, wanted: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index", "--find-links", str(place), wanted],
        env={**environment, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, check=False,
    )  # fmt: skip


def test_a_source_distribution_is_refused_and_its_build_never_runs(tmp_path: Path) -> None:
    canary, place = tmp_path / "built", tmp_path / "wheels"
    wheelhouse.source_distribution(place, "sourced", canary)
    with pytest.raises(EngineError, match="sourced has no wheel, only a source distribution") as refusal:
        packages.create("sourcing", ["sourced"], source=resolver.Source(find_links=(str(place),), offline=True))
    assert "pip wheel" in refusal.value.hint
    assert not canary.exists()
    _plain_pip(place, "sourced")
    assert canary.exists()  # the control: pip by itself runs it


def test_a_dependency_that_is_an_address_is_never_built(tmp_path: Path) -> None:
    """`--only-binary` does not cover direct references (PEP 508): there the audit hook holds."""
    canary, place = tmp_path / "built", tmp_path / "wheels"
    sources = wheelhouse.source_distribution(tmp_path / "sources", "sourced", canary)
    wheelhouse.wheel(place, "innocent", requires=[f"sourced @ file://{sources}"])
    with pytest.raises(EngineError, match="no wheel"):
        packages.create("innocence", ["innocent"], source=resolver.Source(find_links=(str(place),), offline=True))
    assert not canary.exists()
    _plain_pip(place, "innocent")
    assert canary.exists()


def test_a_configuration_that_demands_builds_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary, place = tmp_path / "built", tmp_path / "wheels"
    wheelhouse.source_distribution(place, "sourced", canary)
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nno-binary = :all:\nno-index = true\nfind-links = {place}\n[install]\nuser = true\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    with pytest.raises(EngineError):
        packages.create("configured", ["sourced"])
    assert not canary.exists()
    wheelhouse.wheel(place, "honest")
    assert packages.create("configured", ["honest"]).packages[0].name == "honest"


@pytest.mark.parametrize("line", [
    "-e .", "--index-url=http://evil", "-r x", "./here", "/etc", "git+https://evil/x", "x @ git+https://evil/x", "x @ file:///x",
    "https://evil/x.whl", "x; os.system('y')", "x\n--index-url http://evil", "x --hash=md5:1", "x ==", "", "a b", "x;", "x[",
])  # fmt: skip
def test_only_names_are_requirements(line: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError):
        requirements.check_all([line])
    if "\n" not in line and line and not line.startswith("-r"):
        (tmp_path / "requirements.txt").write_text(line + "\n")
        with pytest.raises(InvalidArgumentError, match="requirements.txt:1"):
            requirements.read_file(str(tmp_path / "requirements.txt"))
