"""Run the sandbox's laws as an ordinary user, on a machine where we are root.

    python tools/as_user.py [--subordinate-ids] [--uid N] -- [PYTEST ARGUMENTS]
    python tools/as_user.py [--subordinate-ids] [--uid N] --run -- python demo/demo.py

A sandbox is held differently without root, so passing as root proves half. This makes a user that exists nowhere:
a uid without an account, a copy of the sources and a virtual environment of its own (root's interpreter and
checkout are usually in places that nobody else may enter), and runs the tests marked `user_too`, or what the
arguments name, under that uid.

With `--subordinate-ids` the user gets what `useradd` and the package `uidmap` give everyone on Debian and Ubuntu: a
line in /etc/passwd, /etc/subuid and /etc/subgid. They are bind mounts in a mount namespace of this process's
children alone; the machine's files are not touched. Without it, the user has one single uid.

What it leaves: the environment in `build/as-user` when that is reachable for others (`make clean` removes it), else
nothing. The exit code is pytest's; 0 with a line that says so where it cannot run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "scripts", "tests", "demo", "tools", "docs", "README.md", "SPECIFICATION.md", "CHANGELOG.md",
          "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml")  # fmt: skip
UID = 64321
"""Above the uids of people and services, below 65534; checked to be free before use."""
SUBORDINATE = (2_000_000_000, 65536)
"""Above what distributions hand out, below the range that ringfence uses as root (0x80000000)."""
VERSIONS = ("python3", "python3.11", "python3.12", "python3.13", "python3.14")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument("--subordinate-ids", action="store_true")
    parser.add_argument("--uid", type=int, default=UID)
    parser.add_argument("--run", action="store_true", help="the arguments are a command, not pytest's")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if os.geteuid() != 0:
        return skip("this is not root: `make test` has already run everything as an ordinary user")
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        return skip("setpriv and unshare are missing (package util-linux)")
    if options.subordinate_ids and shutil.which("newuidmap") is None:
        return skip("newuidmap is missing (package uidmap)")
    python = reachable_python()
    if python is None:
        return skip("no Python of at least 3.11 that other users may run (package python3-venv)")
    if processes_of(options.uid):
        return skip(f"uid {options.uid} is in use; choose another with --uid")
    place = build_place()
    try:
        environment = prepare(place, python, options.uid)
        return run(place, environment, options)
    finally:
        end_processes(options.uid)
        clean(place, options.uid)


def skip(why: str) -> int:
    print(f"as an ordinary user: SKIPPED: {why}", flush=True)
    return 0


def reachable_by_others(path: Path) -> bool:
    """Whether any user may read `path` and enter everything above it."""
    path = path.resolve()
    if path.stat().st_mode & 0o005 != 0o005:
        return False
    return all(parent.stat().st_mode & 0o001 for parent in path.parents)


def reachable_python() -> str | None:
    """A Python that any user may run and that can make virtual environments."""
    names = [sys.executable, *(shutil.which(name) for name in VERSIONS), *(f"/usr/bin/{name}" for name in VERSIONS)]
    test = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for name in names:
        if not name or not os.path.exists(name) or not reachable_by_others(Path(name)):
            continue
        done = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", name, "-I", "-c", test], check=False,
                              stderr=subprocess.DEVNULL, cwd="/")  # fmt: skip
        if done.returncode == 0:
            return os.path.realpath(name)
    return None


def build_place() -> Path:
    place = ROOT / "build" / "as-user"
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    if reachable_by_others(place):
        return place
    shutil.rmtree(place)
    place = Path(tempfile.mkdtemp(prefix="ringfence-as-user-", dir="/var/tmp"))
    place.chmod(0o755)
    return place


def prepare(place: Path, python: str, uid: int) -> Path:
    """Copy the sources, and make the environment when its requirements changed. Returns its directory."""
    sources = place / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, sources / name)
    subprocess.run(["chmod", "-R", "a+rX", str(sources)], check=True)
    # Tests write byte code, caches and outputs beside the sources.
    subprocess.run(["chown", "-R", str(uid), str(sources)], check=True)
    home = place / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    os.chown(home, uid, uid)
    environment = place / "environment"
    wanted = python + "\n" + (ROOT / "pyproject.toml").read_text()
    stamp = environment / ".installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        print("as an ordinary user: installing into an environment of its own ...", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        os.umask(0o022)
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        subprocess.run(
            [str(environment / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check",
             "-e", f"{sources}[data,demo,dev]"],
            check=True,
        )  # fmt: skip
        stamp.write_text(wanted)
    return environment


def run(place: Path, environment: Path, options: argparse.Namespace) -> int:
    uid = options.uid
    arguments = options.arguments or ["-m", "user_too"]
    command = [str(environment / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    if options.run:
        command = arguments
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--bounding-set=+all"]
    variables = {
        "HOME": str(place / "home"),
        "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LANG": "C.UTF-8",
        "RINGFENCE_TEST_IDENTITY": "subids" if options.subordinate_ids else "single",
        **{name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "CI", "PYTEST_ADDOPTS") if name in os.environ},
    }
    with tempfile.TemporaryDirectory(prefix="ringfence-as-user-files-") as files:
        os.chmod(files, 0o755)
        mounts = []
        for name, line in account_files(uid, str(place / "home"), options.subordinate_ids).items():
            path = Path(files) / name
            path.write_text(line)
            path.chmod(0o644)
            if not Path("/etc", name).exists():
                return skip(f"/etc/{name} does not exist, so nothing can be mounted over it (package uidmap)")
            mounts.append(f"mount --bind {path} /etc/{name}")
        # A /tmp of its own as well: what the tests leave there goes with the namespace.
        script = " && ".join([*mounts, "mount -t tmpfs -o mode=1777,size=2g tmpfs /tmp", 'exec "$@"'])
        what = "with subordinate ids" if options.subordinate_ids else "with a single uid"
        print(f"as an ordinary user {what}: {' '.join(command)}", flush=True)
        done = subprocess.run(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *become, *command],
            env=variables, cwd=place / "sources", check=False,
        )  # fmt: skip
    if done.returncode == 5:  # pytest: nothing was collected
        print("as an ordinary user: no test is marked for it", flush=True)
        return 0
    return done.returncode


def account_files(uid: int, home: str, subordinate: bool) -> dict[str, str]:
    """What the user's children see instead of these files below /etc."""
    account = {"passwd": Path("/etc/passwd").read_text() + f"ringfence-test:x:{uid}:{uid}::{home}:/bin/sh\n"}
    if subordinate:
        line = f"{uid}:{SUBORDINATE[0]}:{SUBORDINATE[1]}\nringfence-test:{SUBORDINATE[0]}:{SUBORDINATE[1]}\n"
        account.update({"subuid": line, "subgid": line})
    return account


def processes_of(uid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found.append(int(name))
            except FileNotFoundError:
                pass
    return found


def end_processes(uid: int) -> None:
    """A test that was interrupted may leave some; after a moment they are killed, and named."""
    until = time.monotonic() + 3
    while (left := processes_of(uid)) and time.monotonic() < until:
        time.sleep(0.05)
    for process in left:
        print(f"as an ordinary user: killing what is left: process {process}", flush=True)
        os.kill(process, signal.SIGKILL)


def clean(place: Path, uid: int) -> None:
    shutil.rmtree(place / "home", ignore_errors=True)
    if place.parent == Path("/var/tmp"):
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
