"""engines/namespace/starting.py: what a launcher inherits, forked or executed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = str(Path(__file__).resolve().parents[2] / "src")

REPORT = """
import os, sys
from ringfence.engines.namespace import launcher, starting

def report(descriptor):
    import _signal
    print = lambda *words: os.write(descriptor, (" ".join(map(str, words)) + chr(10)).encode())
    print("descriptors", *sorted(os.listdir("/proc/self/fd"), key=int)[:-1])
    print("places", *{os.readlink(f"/proc/self/fd/{number}") for number in range(3)}, os.getcwd())
    print("environment", *sorted(os.environ))
    print("path", *sys.path)
    print("finders", *[each.__module__ for each in sys.meta_path])
    print("modules", *{name.partition(".")[0] for name in sys.modules})
    print("blocked", *_signal.pthread_sigmask(_signal.SIG_BLOCK, ()))

launcher.main = report
reading, writing = os.pipe()
"""


def run(code: str, place: Path, **options: object) -> str:
    (place / "sitecustomize.py").write_text(
        "import sys, intruder, signal\n"
        "class Finder:\n    def find_spec(*_): return None\n"
        "sys.meta_path.insert(0, Finder())\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    )
    (place / "intruder.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{place}:{SOURCES}", "KEY": "secret"}
    program = [sys.executable, "-c", REPORT + code]
    return subprocess.run(program, env=environment, check=True, capture_output=True, text=True, timeout=60, **options).stdout  # type: ignore[call-overload]


FORK = """
pid = starting.fork_launcher(writing)
os.close(writing)
while data := os.read(reading, 1 << 16): sys.stdout.write(data.decode())
assert pid and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_forked_launcher_keeps_nothing_that_an_executed_one_would_not_have(tmp_path: Path) -> None:
    with open("/etc/passwd") as kept:
        shown = run(FORK, tmp_path, pass_fds=[kept.fileno()])
        control = run("report(1)", tmp_path, pass_fds=[kept.fileno()])
    found = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert found["descriptors"] == ["0", "1", "2", "3"]
    assert found["places"] == ["/dev/null", "/"]
    assert set(found["environment"]) <= {"PATH", "LANG", "XDG_RUNTIME_DIR", "RINGFENCE_DEBUG", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
    assert found["path"][-1] == SOURCES and str(tmp_path) not in found["path"]
    assert not any("site-packages" in each or each in ("", ".") for each in found["path"])
    assert set(found["finders"]) <= {"_frozen_importlib", "_frozen_importlib_external"} and len(found["finders"]) == 3
    assert set(found["modules"]) <= {*sys.stdlib_module_names, "ringfence", "__main__"}
    assert found["blocked"] == []
    # The control: without the fork's cleaning all of it is there.
    assert "KEY" in control and str(tmp_path) in control and "intruder" in control and "blocked" in control
    assert str(signal.SIGUSR1.value) in control.splitlines()[-1] or "SIGUSR1" in control.splitlines()[-1]


@pytest.mark.parametrize(
    "obstacle",
    [
        "import threading; threading.Thread(target=os.read, args=(reading, 1), daemon=True).start()",
        "import json; json.__file__ = '/elsewhere/json.py'",
        "sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.__file__)]",
    ],
    ids=["a thread", "a foreign module of a standard name", "no standard library"],
)
def test_a_program_that_is_not_alone_or_not_clean_is_not_forked(obstacle: str, tmp_path: Path) -> None:
    shown = run(f"{obstacle}\nprint(starting.fork_launcher(writing)); sys.stdout.flush(); os._exit(0)", tmp_path)
    assert shown == "0\n"
