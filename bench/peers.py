"""What we are measured against: the kernel's floor in C, bubblewrap, plain subprocesses, runc and docker.

A peer that is not here is skipped and the reason is shown; nothing is installed. Guards against an unfair peer:
the real interpreter binary is run (no version manager's wrapper), byte code is compiled before the first
measurement, and the trees are bound read-only as a user of bubblewrap would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SYSTEM_PYTHON = "/usr/bin/python3"
IMPORT_PANDAS = "import numpy, pandas"


class Missing(Exception):
    """A peer that cannot be measured here; `str()` says why."""


def quiet(arguments: list[str]) -> None:
    """Run a program, its output caught, its success checked."""
    subprocess.run(arguments, check=True, stdin=subprocess.DEVNULL, capture_output=True)


class Floor:
    """floor.c, compiled for this run. Calling it gives the milliseconds it measured itself."""

    def __init__(self) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise Missing("no C compiler (cc, gcc or clang) is installed")
        self._directory = tempfile.TemporaryDirectory(prefix="ringfence-bench-")
        self.program = os.path.join(self._directory.name, "floor")
        built = subprocess.run(
            [compiler, "-O2", "-o", self.program, str(HERE / "floor.c")],
            check=False, capture_output=True, text=True,
        )
        if built.returncode:
            raise Missing(f"floor.c does not compile: {built.stderr.strip().splitlines()[-1:]}")
        tried = subprocess.run([self.program], check=False, capture_output=True, text=True)
        if tried.returncode:
            raise Missing(f"the floor does not run here: {tried.stderr.strip()}")

    def __call__(self) -> float:
        return float(subprocess.run([self.program], capture_output=True, check=True).stdout) / 1e3

    def close(self) -> None:
        self._directory.cleanup()


def bubblewrap(python: str, code: str, bound: list[str] | None = None) -> list[str]:
    """The command line for `python -c code` under bubblewrap with every namespace. Raises Missing."""
    program = shutil.which("bwrap")
    if program is None:
        raise Missing("bubblewrap (bwrap) is not installed")
    command = [program, "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):
        if os.path.islink("/" + name):
            command += ["--symlink", os.readlink("/" + name), "/" + name]
        elif os.path.isdir("/" + name):
            command += ["--ro-bind", "/" + name, "/" + name]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in bound or []:
        command += ["--ro-bind", path, path]
    return [*command, "--chdir", "/", python, "-c", code]


def plain_python() -> list[str]:
    """(b): bubblewrap around the system's `python3 -c 'print(1)'`. Raises Missing."""
    if not os.path.exists(SYSTEM_PYTHON):
        raise Missing(f"there is no {SYSTEM_PYTHON}")
    command = bubblewrap(SYSTEM_PYTHON, "print(1)")
    _try(command)
    return command


def bubblewrap_overlay(source: str) -> list[str]:
    """(b) with `source` at /workspace under an overlay whose upper is a tmpfs (bubblewrap 0.11). Raises Missing."""
    command = bubblewrap(SYSTEM_PYTHON, "print(1)")
    helped = subprocess.run([command[0], "--help"], check=False, capture_output=True, text=True)
    if "--overlay-src" not in helped.stdout + helped.stderr:
        version = subprocess.run([command[0], "--version"], check=False, capture_output=True, text=True).stdout.strip()
        raise Missing(f"{version or 'this bubblewrap'} has no --overlay-src (0.11 has)")
    place = command.index("--chdir")
    command[place:place] = ["--overlay-src", source, "--tmp-overlay", "/workspace"]
    _try(command)
    return command


def data_python() -> list[str]:
    """(b) with pandas: this environment's Python, bound read-only at its own place. Raises Missing."""
    # The environment's python is a link to the real binary; a version manager's shim never appears here.
    bound = list(dict.fromkeys([sys.base_prefix, sys.prefix]))
    bound = [path for path in bound if path not in ("/usr", "/")]
    subprocess.run([sys.executable, "-c", IMPORT_PANDAS], check=False, capture_output=True)  # compiles byte code where it is missing
    command = bubblewrap(sys.executable, IMPORT_PANDAS, bound)
    _try(command)
    return command


def _try(command: list[str]) -> None:
    tried = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if tried.returncode:
        raise Missing(f"it does not run here: {tried.stderr.strip()[-300:]}")


def usage_of(command: list[str], times: int) -> tuple[float, float]:
    """(processor milliseconds, page faults) per run of `command`, everything it starts included."""
    script = (
        "import ctypes, json, os, resource, subprocess, sys\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # subreaper: what outlives its parent is counted too
        "def all_gone():\n"
        "    try:\n"
        "        while True: os.waitpid(-1, 0)\n"
        "    except ChildProcessError: pass\n"
        "times, command = int(sys.argv[1]), sys.argv[2:]\n"
        "null = open(os.devnull, 'r+')\n"
        "for turn in range(times + 1):\n"
        "    if turn == 1: before = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    subprocess.run(command, stdin=null, stdout=null, stderr=null, check=True)\n"
        "    all_gone()\n"
        "after = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "used = [getattr(after, n) - getattr(before, n) for n in ('ru_utime', 'ru_stime', 'ru_minflt')]\n"
        "print(json.dumps([(used[0] + used[1]) * 1e3 / times, used[2] / times]))\n"
    )
    output = subprocess.run([sys.executable, "-c", script, str(times), *command], check=True, capture_output=True).stdout
    milliseconds, faults = json.loads(output)
    return milliseconds, faults


def containers() -> dict[str, list[str] | str]:
    """Other peers: a command line each, or the reason why there is none."""
    found: dict[str, list[str] | str] = {}
    docker = shutil.which("docker")
    if docker is None:
        found["docker run --network none"] = "docker is not installed"
    else:
        answered = subprocess.run(
            [docker, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"],
            check=False, capture_output=True, text=True, timeout=20,
        )
        images = [line for line in answered.stdout.split() if line.startswith("python:")]
        if answered.returncode:
            found["docker run --network none"] = "the docker daemon does not answer"
        elif not images:
            found["docker run --network none"] = "docker has no python image here, and nothing is downloaded"
        else:
            found["docker run --network none"] = [
                docker, "run", "--rm", "--network", "none", images[0], "python3", "-c", "print(1)"
            ]  # fmt: skip
    found["runc run"] = "runc is not installed" if shutil.which("runc") is None else "needs a bundle, which we do not build"
    return found
