"""Ask pip which wheels satisfy requirements, and fetch exactly those.

Guards against running what was fetched: wheels only, and pip itself runs under an audit hook that lets it start no
program, so a source distribution, a checkout or a keyring helper that slipped in ends in an error, not in a build
(PEP 578; a hook cannot be removed by the code it watches). pip runs isolated from the Python path and from the
user's site-packages, in an own directory, and never installs anything: it resolves, and it downloads by hash.

Which index is asked is pip's own business: its configuration files and `PIP_*` variables hold, except offline.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from ringfence.errors import EngineError, InvalidArgumentError
from ringfence.node.distributions import normalise

Progress = Callable[[str], None]

LARGEST_REPORT = 256 << 20
_REFUSED = "ringfence: pip may start no program here"

_BOOTSTRAP = f"REFUSED = {_REFUSED!r}" + """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with whoever asked
if os.getppid() != int(sys.argv[1]):
    sys.exit("the program that asked has ended")
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
def watch(event, arguments):
    if event in STARTS:
        raise PermissionError(REFUSED + f" ({event}: {str(arguments[:2])[:200]})")
if sys.argv[2]:
    sys.path.insert(0, sys.argv[2])
sys.argv[:] = ["pip", *sys.argv[3:]]
sys.addaudithook(watch)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


class Source(NamedTuple):
    """Where wheels come from. `index_url`: instead of pip's configured one; `find_links`: directories or pages besides;
    `offline`: only `find_links`, nothing that pip is configured with."""

    index_url: str | None = None
    find_links: tuple[str, ...] = ()
    offline: bool = False

    def options(self) -> list[str]:
        """pip's options for it. Raises InvalidArgumentError."""
        if self.offline and not self.find_links:
            raise InvalidArgumentError(
                "offline needs a directory of wheels", hint="--offline --find-links DIRECTORY; fill it with `pip download`"
            )
        if self.offline and self.index_url:
            raise InvalidArgumentError("offline and an index exclude each other", hint="leave one of them out")
        for text in (self.index_url, *self.find_links):
            if text is not None and (not text or text.startswith("-") or not text.isprintable()):
                raise InvalidArgumentError(f"{text!r} is no address", hint="pass a URL or a directory")
        words = ["--no-index"] if self.offline else []
        if self.index_url is not None:
            words += ["--index-url", self.index_url]
        for link in self.find_links:
            remote = "://" in link
            if remote and self.offline:
                raise InvalidArgumentError(f"offline, {without_secrets(link)} cannot be reached", hint="pass a directory")
            if not remote and not os.path.isdir(link):
                raise InvalidArgumentError(f"--find-links: there is no directory {link}")
            words += ["--find-links", link if remote else os.path.abspath(link)]
        return words


class Locked(NamedTuple):
    """One wheel, as a lock names it."""

    name: str
    version: str
    sha256: str
    filename: str
    url: str
    requested: bool

    def line(self) -> str:
        """As a line of a requirements file with pip's hash checking."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def without_secrets(url: str) -> str:
    """A URL without a user, a password and a query, which may be a token."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.port:
        host += f":{parts.port}"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def resolve(requirements: Sequence[str], source: Source, work: str, progress: Progress | None) -> list[Locked]:
    """The wheels that satisfy `requirements`, dependencies included, sorted by name. Downloads no more than it must.

    Raises:
        EngineError: a package is unknown, has no wheel for this Python and machine, contradicts another, or no
            index answers.
    """
    wanted = os.path.join(work, "requirements.txt")
    _write_lines(wanted, requirements)
    report = os.path.join(work, "report.json")
    arguments = ["install", "--dry-run", "--ignore-installed", "--no-user", "--report", report, "-r", wanted]
    code, output = _pip(arguments, source, work, progress)
    if code != 0:
        raise _explain(output, arguments, source, work)
    if os.path.getsize(report) > LARGEST_REPORT:
        raise EngineError("pip's report is too large", hint="name fewer packages")
    with open(report, encoding="utf-8") as file:
        document = json.load(file)
    return sorted(_locked(each) for each in document["install"])


def _locked(entry: dict[str, Any]) -> Locked:
    name, version = entry["metadata"]["name"], entry["metadata"]["version"]
    url = entry["download_info"]["url"]
    archive = entry["download_info"].get("archive_info")
    filename = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
    if archive is None or not filename.endswith(".whl"):
        raise EngineError(
            f"{name} {version} comes as something other than a wheel ({without_secrets(url)})",
            hint="ask its authors for wheels, or build one yourself and pass its directory as --find-links",
        )
    sha256 = (archive.get("hashes") or {}).get("sha256", "")
    if not sha256 and str(archive.get("hash", "")).startswith("sha256="):
        sha256 = archive["hash"][len("sha256=") :]
    return Locked(normalise(name), version, sha256, filename, without_secrets(url), bool(entry.get("requested")))


def fetch(locked: Sequence[Locked], source: Source, work: str, progress: Progress | None) -> dict[str, str]:
    """Download the wheels; returns project -> path. pip checks the hashes that are known; the caller checks again.

    Raises:
        EngineError: an index does not answer, or has another file under that name and version.
    """
    target = os.path.join(work, "wheels")
    os.mkdir(target, 0o700)
    wanted = os.path.join(work, "lock.txt")
    distant = [each for each in locked if not _copied(each, target)]
    if distant:
        complete = all(each.sha256 for each in distant)
        _write_lines(wanted, [each.line() if complete else f"{each.name}=={each.version}" for each in distant])
        arguments = ["download", "--no-deps", "--dest", target, "-r", wanted, *(["--require-hashes"] if complete else [])]
        code, output = _pip(arguments, source, work, progress)
        if code != 0:
            raise _explain(output, arguments, source, work)
    found: dict[str, str] = {}
    for name in os.listdir(target):
        if name.endswith(".whl"):
            found[normalise(name.split("-", 1)[0])] = os.path.join(target, name)
    for each in locked:
        if each.name not in found:
            raise EngineError(f"pip fetched no wheel of {each.name} {each.version}", hint="`--update` locks anew")
    return found


def _copied(each: Locked, target: str) -> bool:
    """Whether the wheel lies in a local directory, unchanged; then it is copied and pip need not be asked."""
    import shutil

    from ringfence.node.wheels import sha256_of

    parts = urlsplit(each.url)
    if parts.scheme != "file" or parts.netloc or not each.sha256:
        return False
    copy = os.path.join(target, os.path.basename(each.filename))
    try:
        shutil.copyfile(unquote(parts.path), copy)
    except OSError:
        return False
    if sha256_of(copy) == each.sha256:
        return True
    os.unlink(copy)
    return False


def _write_lines(path: str, lines: Sequence[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def _pip(
    arguments: list[str], source: Source, work: str, progress: Progress | None, verbose: bool = False
) -> tuple[int, str]:
    """Run pip; returns its exit code and the end of what it said."""
    scratch = os.path.join(work, "tmp")
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    environment = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "LD_")) and not (source.offline and name.startswith("PIP_"))
    }  # fmt: skip
    environment |= {
        "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_NO_COLOR": "1",
        "PIP_PROGRESS_BAR": "off", "TMPDIR": scratch, "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    if source.offline:
        environment["PIP_CONFIG_FILE"] = os.devnull
    command = [sys.executable, "-I", "-c", _BOOTSTRAP, str(os.getpid()), _pip_wheel(), *arguments,
               "--only-binary", ":all:", *source.options(), *(["-vv"] if verbose else [])]  # fmt: skip
    with subprocess.Popen(
        command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        kept: list[str] = []
        try:
            for line in process.stdout:
                kept.append(line[:4000])
                if len(kept) > 20_000:
                    del kept[:10_000]
                said = re.match(r"\s*(Collecting|Downloading|Saved) (\S+)", line)
                if said is not None and progress is not None and said[1] != "Saved":
                    what = without_secrets(said[2]).rsplit("/", 1)[-1] if "/" in said[2] else said[2]
                    progress(f"{said[1].lower()} {what}")
        except BaseException:
            process.kill()
            raise
    return process.returncode, "".join(kept)


def _pip_wheel() -> str:
    """What must be put on the path so that pip can be imported: nothing, or the wheel that Python brings."""
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return ""
    from ringfence.node.environments import _bundled_pip

    wheel = _bundled_pip()
    if wheel is None:
        raise EngineError("this Python has no pip", hint="install it: python -m ensurepip, or your distribution's python3-pip")
    return wheel


_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ConnectionError|Name or service not known|"
    r"Temporary failure in name resolution|Network is unreachable|Max retries exceeded|"
    r"ProxyError|SSLError|Connection refused"
)


def _explain(output: str, arguments: list[str], source: Source, work: str) -> EngineError:
    """The error behind pip's words."""
    if _REFUSED in output:
        return EngineError(
            "a package here is no wheel: using it would run its build, or another program, on this machine: "
            + output[output.index(_REFUSED) :].split("\n", 1)[0][len("ringfence: ") : 300],
            hint="ask for a version that has wheels, or build the wheel yourself and pass its directory as --find-links",
        )
    if "DO NOT MATCH THE HASHES" in output:
        which = re.findall(r"^\s+(\S+==\S+|\S+\.whl)", output.split("DO NOT MATCH THE HASHES", 1)[1], re.MULTILINE)
        return EngineError(
            f"a wheel is not the one that was locked{': ' + which[0] if which else ''}: its sha256 differs",
            hint="the index changed it, or somebody tampered with it; `--update` locks anew",
        )
    missing = re.search(r"No matching distribution found for (.+)", output)
    if missing is not None or "(from versions: none)" in output:
        name = missing[1].split(" (")[0].strip() if missing else "a package"
        return _explain_missing(name, output, arguments, source, work)
    if "ResolutionImpossible" in output or "conflicting dependencies" in output:
        reasons = re.findall(r"^(?:    )(.+(?:depends on|requested).+)$", output, re.MULTILINE)
        return EngineError(
            "these packages contradict each other: " + "; ".join(reasons[:6]), hint="loosen a version, or leave one out"
        )
    if _UNREACHABLE.search(output):
        return _no_network()
    last = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.strip().splitlines()[-1:]
    return EngineError(f"pip failed: {' '.join(last)[:600]}", hint="the same with `pip download` may say more")


def _no_network() -> EngineError:
    return EngineError(
        "no package index could be reached",
        hint="look at the network and pip's configuration (`pip config list`); without a network: --offline --find-links DIRECTORY",
    )


def _explain_missing(name: str, output: str, arguments: list[str], source: Source, work: str) -> EngineError:
    """No version fits: only a source distribution, wheels for others, nothing at all, or nobody to ask?"""
    if _UNREACHABLE.search(output):
        return _no_network()
    _, words = _pip(arguments, source, work, None, verbose=True)
    project = normalise(re.split(r"[^A-Za-z0-9._-]", name, maxsplit=1)[0])
    links = [line for line in words.splitlines() if "Skipping link" in line and project in normalise(line)]
    if any("No sources permitted" in line for line in links) and not any("wheel's tags" in line for line in links):
        return EngineError(
            f"{name} has no wheel, only a source distribution, and building that would run its code on this machine",
            hint="ask for another version, or build the wheel yourself (`pip wheel`) and pass its directory as --find-links",
        )
    if any("wheel's tags" in line or "none of the wheel" in line for line in links):
        return EngineError(
            f"{name} has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]} on this machine",
            hint="ask for another version, or run ringfence with another Python",
        )
    if _UNREACHABLE.search(words):
        return _no_network()
    where = "in the directories named" if source.offline else "on the index that pip is configured for"
    return EngineError(f"there is no package {name} {where}", hint="look at its name and version")
