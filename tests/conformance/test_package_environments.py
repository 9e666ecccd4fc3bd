"""Environments of the user's own: made from wheels once, the same for every sandbox, whole or not there at all.

Wheels are made here and found by `--find-links`; no network is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wheelhouse
from ringfence import InvalidArgumentError, Sandbox
from ringfence.node import lent, packages, resolver

PROGRAM = str(Path(sys.executable).with_name("ringfence"))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of these tests' own, so that names are free and nothing is left in the user's."""
    place = tmp_path_factory.mktemp("packages") / "cache"
    before = os.environ.get("RINGFENCE_CACHE")
    os.environ["RINGFENCE_CACHE"] = str(place)
    yield place
    os.environ.pop("RINGFENCE_CACHE")
    if before is not None:
        os.environ["RINGFENCE_CACHE"] = before


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


def printed(execution: Any) -> str:
    assert execution.error is None, execution.error
    return "".join(execution.logs.stdout).strip()


# Using -------------------------------------------------------------------------------------------------------


def test_packages_can_be_imported_in_cells_and_in_programs(wheels: Path, make: Any) -> None:
    wheelhouse.wheel(wheels, "greeter", files={
        "greeter/__init__.py": "WORD = 'hello'\ndef main(): print('from a script')\n",
        "greeter-1.0.dist-info/entry_points.txt": "[console_scripts]\ngreet = greeter:main\n",
        "greeter-1.0.data/data/share/greeter/text": "data\n",
    }, requires=["helper>=2"])  # fmt: skip
    wheelhouse.wheel(wheels, "helper", "2.1")
    made = packages.create("greeting", ["greeter"], source=offline(wheels))
    assert [(each.name, each.version, each.requested) for each in made.packages] == [("greeter", "1.0", True), ("helper", "2.1", False)]
    sandbox = make("greeting")
    assert printed(sandbox.run_code("import greeter, helper, sys; print(greeter.WORD, helper.VERSION, sys.prefix)")) == "hello 2.1 /opt/packages"
    done = sandbox.commands.run("greet && python -c 'import helper; print(helper.__file__)' && cat /opt/packages/share/greeter/text")
    assert done.stdout.splitlines() == [
        "from a script", f"/opt/packages/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/helper.py", "data"
    ]  # fmt: skip
    assert done.stderr == ""
    assert "greeter" in sandbox.commands.run("pip list").stdout
    one_shot = subprocess.run([PROGRAM, "run", "--template", "greeting", "-c", "import greeter; print(greeter.WORD)"],
                              capture_output=True, text=True, check=True)  # fmt: skip
    assert one_shot.stdout == "hello\n"


def test_what_one_sandbox_writes_there_no_other_sees(wheels: Path, make: Any) -> None:
    wheelhouse.wheel(wheels, "shared-thing")
    packages.create("sharing", ["shared-thing"], source=offline(wheels))
    first, second = make("sharing"), make("sharing")
    write = "import shared_thing; open(shared_thing.__file__, 'a').write('X = 1')"
    first.run_code(write)  # works or not, as the sandbox's own disk allows
    assert printed(second.run_code("import shared_thing; print('X' in open(shared_thing.__file__).read())")) == "False"
    assert packages.verify(packages.load("sharing")) == "whole"


def test_code_of_packages_first_runs_inside_the_sandbox(wheels: Path, make: Any, tmp_path: Path) -> None:
    """A `.pth` file, and a module of a name that interpreters import at start-up, tell who ran them."""
    canary = tmp_path / "ran-on-the-host"
    tell = f"import os, sys; open({str(canary)!r}, 'w') if os.path.isdir({str(tmp_path)!r}) else None"
    wheelhouse.wheel(wheels, "starter", files={
        "starter.py": tell + "\n", "sitecustomize.py": tell + "\n",
        "starter.pth": tell + "; sys.started_as = (os.getuid(), os.path.exists('/home/user'))\n",
    })  # fmt: skip
    made = packages.create("starting", ["starter"], source=offline(wheels))
    assert any(path.endswith("starter.pth") for path in made.packages[0].path_files)
    assert not canary.exists()
    # The control: these files do run where a Python starts with them.
    site = Path(made.tree) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    subprocess.run([sys.executable, "-c", f"import site; site.addsitedir({str(site)!r})"], check=True)
    assert canary.exists()
    canary.unlink()
    # Within: as the user of the sandbox, not as the zygote, which is 0 in its own namespace.
    sandbox = make("starting")
    assert printed(sandbox.run_code("import sys; print(sys.started_as)")) == "(1000, True)"
    assert sandbox.commands.run("python -c 'import sys; print(sys.started_as)'").stdout == "(1000, True)\n"
    assert not canary.exists()


def test_only_modules_that_were_named_are_imported_ahead(wheels: Path, make: Any) -> None:
    wheelhouse.wheel(wheels, "warmed", files={"warmed.py": "import os\nUID = os.getuid()\n"})
    packages.create("cold", ["warmed"], source=offline(wheels))
    packages.create("warm", ["warmed"], source=offline(wheels), warm=["warmed"])
    look = "import sys; early = 'warmed' in sys.modules; import warmed; print(early, warmed.UID)"
    assert printed(make("cold").run_code(look)) == "False 1000"
    assert printed(make("warm").run_code(look)) == "True 0"


def test_packages_of_a_sandbox_are_made_once_and_kept(wheels: Path) -> None:
    wheelhouse.wheel(wheels, "once-made")
    said: list[str] = []
    with Sandbox(packages=["once-made"], on_progress=said.append) as sandbox:
        assert printed(sandbox.run_code("import once_made; print(once_made.VERSION)")) == "1.0"
        assert sandbox.info().template == packages.automatic_name(["once-made"])
    assert any("unpacking once-made 1.0" in line for line in said)
    (wheels / "once_made-1.0-py3-none-any.whl").unlink()
    code = (
        "from ringfence import Sandbox\nsaid = []\n"
        "with Sandbox(packages=['once-made'], on_progress=said.append) as s:\n"
        "    print(s.run_code('import once_made; once_made.VERSION').text, [line for line in said if 'once' in line])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0 []\n"


def test_packages_and_a_template_exclude_each_other() -> None:
    with pytest.raises(InvalidArgumentError, match="exclude"):
        Sandbox("data", packages=["six"])
    with pytest.raises(InvalidArgumentError, match="list"):
        Sandbox(packages="six")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no template") as refusal:
        Sandbox("nobody-made-this")
    assert "ringfence env create" in refusal.value.hint


# current-env -------------------------------------------------------------------------------------------------


def test_the_current_environment_lends_packages_and_nothing_else(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site-packages with an honest package, an editable one, one without RECORD, secrets and a link that leads out."""
    site = tmp_path / "site-packages"
    secret = tmp_path / "secret"
    secret.write_text("hunter2-lent")
    _installed(site, "honest", {"honest.py": "X = 1\n", "honest_data/pip.conf": "hunter2-lent", "honest_data/.netrc": "hunter2-lent"})
    (site / "honest_data" / "leads_out").symlink_to(secret)
    (site / "honest-1.0.dist-info" / "RECORD").open("a").write("honest_data/leads_out,,\n")
    _installed(site, "edited", {"__editable__.edited-1.0.pth": "/somewhere\n"})
    _installed(site, "unlisted", {"unlisted.py": ""})
    (site / "unlisted-1.0.dist-info" / "RECORD").unlink()
    (site / "stray.py").write_text("hunter2-lent")
    (site / "pip.conf").write_text("hunter2-lent")
    (site / "run.pth").write_text("import hunter2")
    monkeypatch.setattr(lent, "_paths", lambda: [str(site)])
    tree = Path(lent.current_environment())
    assert b"hunter2" not in b"".join(path.read_bytes() for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert b"hunter2" in (site / "stray.py").read_bytes()  # the control: it was there to be lent
    assert lent.describe() == {
        "lent": [["honest", "1.0"]],
        "not_lent": [["edited", "installed in editable mode"], ["unlisted", "no list of its files (RECORD)"]],
    }
    sandbox = make("current-env")
    assert printed(sandbox.run_code("import honest; print(honest.X, honest.__file__)")).startswith("1 /opt/packages/")
    assert sandbox.run_code("import stray").error is not None


def _installed(site: Path, name: str, files: dict[str, str]) -> None:
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    record = f"{metadata.name}/METADATA,,\n{metadata.name}/RECORD,,\n"
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        record += f"{path},,\n"
    (metadata / "RECORD").write_text(record)


def test_a_start_that_waits_for_packages_keeps_an_event_loop_going(wheels: Path) -> None:
    """The environment is made on a thread of its own, and progress is told from there."""
    wheelhouse.wheel(wheels, "threaded")
    threads: set[int] = set()
    with Sandbox(packages=["threaded"], on_progress=lambda line: threads.add(threading.get_ident())):
        pass
    assert threads and threading.get_ident() not in threads
