"""Package environments of the user's own: made from wheels once, locked by hash, mounted read-only at `/opt/packages`.

Guards against three things. *Code that runs on the host*: pip only resolves and downloads (see `resolver`), wheels
are only unpacked (see `wheels`), and byte code is compiled, which executes nothing. *Contents that change*: a lock
names each wheel's SHA-256, a record the digest of the whole tree; what differs is refused. *Half environments*: the
record is written last, under a lock for the name, so a second process waits, and one that was killed leaves nothing
that anybody would use.

    CACHE/packages/KEY/                  a tree; two environments with the same wheels share it
    CACHE/named/NAME/environment.json    what was asked, the lock, the key of the tree, its digests
    CACHE/named/NAME/pylock.toml         the lock alone, for other machines and other tools (PEP 751)

Names beginning `auto-` belong to `Sandbox(packages=[...])`: they follow from what was asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ringfence.errors import EngineError, InvalidArgumentError, NotFoundError
from ringfence.node import cache, environments

INSIDE = "/opt/packages"
KIND = "packages"
CURRENT = "current-env"
RESERVED = ("plain", "base", "data", CURRENT)
AUTOMATIC = "auto-"
FORMAT = 1
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """One wheel of an environment: what it is, where it came from, what it takes unpacked (bytes), its `.pth` files."""

    name: str
    version: str
    sha256: str
    filename: str
    url: str
    requested: bool
    size: int = 0
    path_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """One environment's record."""

    name: str
    requirements: list[str]
    python: str
    created: float
    warm: list[str]
    packages: list[Package]
    key: str
    size: int
    quick: str
    contents: str
    index_url: str | None = None
    find_links: list[str] = field(default_factory=list)
    offline: bool = False
    format: int = FORMAT

    @property
    def tree(self) -> str:
        """The directory that sandboxes mount."""
        return os.path.join(cache.cache_directory(), KIND, self.key)

    @property
    def last_used(self) -> float | None:
        """When a program last started a sandbox of it (seconds since 1970), or None."""
        try:
            return os.stat(os.path.join(_place(self.name), "used")).st_mtime
        except OSError:
            return None

    def lock(self) -> str:
        """The lock file (PEP 751)."""
        lines = [
            "# Made by ringfence: wheels alone, each by its SHA-256.", 'lock-version = "1.0"',
            'created-by = "ringfence"', f'requires-python = "=={_minor(self.python)}.*"',
        ]  # fmt: skip
        for each in self.packages:
            lines += [
                "", "[[packages]]", f"name = {_quoted(each.name)}", f"version = {_quoted(each.version)}",
                "", "[[packages.wheels]]", f"name = {_quoted(each.filename)}", f"url = {_quoted(each.url)}",
                f'hashes = {{sha256 = "{each.sha256}"}}',
            ]  # fmt: skip
        return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML basic string


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


# Names -------------------------------------------------------------------------------------------------------


def check_name(name: str, automatic: bool = False) -> str:
    """A name that may be created. Raises InvalidArgumentError."""
    if not isinstance(name, str) or len(name) > 40 or not _NAME.match(name):
        raise InvalidArgumentError(
            f"{name!r} cannot name an environment",
            hint="lower-case letters, digits and single hyphens, a letter first, at most 40",
        )
    if name in RESERVED or (name.startswith(AUTOMATIC) and not automatic):
        raise InvalidArgumentError(f"the name {name!r} is taken by Ringfence itself", hint="choose another name")
    return name


def automatic_name(requirements: Sequence[str]) -> str:
    """The name of the environment that `Sandbox(packages=requirements)` uses."""
    text = "\n".join(sorted({re.sub(r"\s+", "", each) for each in requirements}))
    return AUTOMATIC + hashlib.sha256(f"{environments.PYTHON_VERSION}\n{text}".encode()).hexdigest()[:16]


def exists(name: str) -> bool:
    """Whether a template of that name could be started. Never raises."""
    if name == CURRENT:
        return True
    return len(name) <= 40 and _NAME.match(name) is not None and os.path.isfile(os.path.join(_place(name), "environment.json"))


def names() -> list[str]:
    """All environments there are, sorted."""
    directory = os.path.join(cache.cache_directory(), "named")
    try:
        found = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(name for name in found if exists(name))


def _place(name: str) -> str:
    return os.path.join(cache.cache_directory(), "named", name)


def load(name: str) -> Environment:
    """The record of an environment.

    Raises:
        NotFoundError: there is none of that name.
        EngineError: its record is damaged.
    """
    try:
        with open(os.path.join(_place(check_name(name, automatic=True)), "environment.json"), encoding="utf-8") as file:
            values = json.load(file)
        if values["format"] != FORMAT:
            raise ValueError("another format")
        packages = [Package(**{**each, "path_files": tuple(each["path_files"])}) for each in values.pop("packages")]
        environment = Environment(**values, packages=packages)
        if environment.name != name or not re.match(r"[0-9a-f]{32}\Z", environment.key):
            raise ValueError("it belongs to another")
        return environment
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no environment {name!r}",
            hint=f"make it with `ringfence env create {name} PACKAGES…`; `ringfence env ls` shows those there are",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineError(
            f"the record of the environment {name!r} is damaged ({error})",
            hint=f"remove it with `ringfence env rm {name}` and create it again",
        ) from None


# Making ------------------------------------------------------------------------------------------------------


def create(
    name: str, requirements: Sequence[str] = (), *, source: Any = None, warm: Sequence[str] = (), update: bool = False,
    progress: Progress | None = None, automatic: bool = False,
) -> Environment:  # fmt: skip
    """Make an environment, or make it again.

    Without `requirements` an existing one is built again from its lock, byte for byte; with `update` what it was made
    from is resolved anew. `source` is a `resolver.Source`; None: what pip is configured for, or what it was made with.
    `warm`: modules that its zygote imports ahead.

    Raises:
        InvalidArgumentError: a name or requirement that cannot be, or an environment that exists and differs.
        NotFoundError: nothing to build again.
        EngineError: no wheel, no network, a wheel that is refused, a full disk.
    """
    from ringfence.node import requirements as reading
    from ringfence.node import resolver

    check_name(name, automatic)
    for module in warm:
        if not _MODULE.match(module) or len(warm) > 100:
            raise InvalidArgumentError(f"{module!r} is no module to warm", hint="--warm polars")
    with _locked(name, progress):
        previous = load(name) if exists(name) else None
        if not requirements:
            if previous is None:
                load(name)  # says that there is none
            assert previous is not None
            source = source or resolver.Source(previous.index_url, tuple(previous.find_links), previous.offline)
            if not update:
                return _make(name, previous.requirements, previous.packages, source, warm or previous.warm, progress)
            requirements = previous.requirements
            warm = warm or previous.warm
        elif previous is not None and not update:
            raise InvalidArgumentError(
                f"there is an environment {name!r} already",
                hint=f"--update replaces it; without packages it is built again from its lock; or `ringfence env rm {name}`",
            )
        asked = [*dict.fromkeys(requirements)]
        for line in asked:
            reading.check(" ".join(word for word in line.split() if not word.startswith("--hash=sha256:")))
        return _make(name, asked, None, source or resolver.Source(), warm, progress)


def prepare(name: str, requirements: Sequence[str] = (), progress: Progress | None = None) -> tuple[str, list[str]]:
    """The tree of an environment and the modules to warm; built when it is not there (or gone, then from its lock).

    `requirements` are those of an automatic name. Raises as `create`, and EngineError when the tree was changed.
    """
    if name == CURRENT:
        from ringfence.node import lent

        return lent.current_environment(progress), []
    if not exists(name) and requirements:
        with _locked(name, progress):
            if not exists(name):
                from ringfence.node import resolver

                _make(name, list(requirements), None, resolver.Source(), (), progress)
    environment = load(name)
    if _minor(environment.python) != environments.PYTHON_VERSION:
        raise EngineError(
            f"the environment {name!r} was made for Python {environment.python}, and this is {environments.PYTHON_VERSION}",
            hint=f"ringfence env create {name} --update",
        )
    if environment.key != _key(environment.packages) or not os.path.isdir(environment.tree):
        environment = create(name, progress=progress, automatic=True)  # another interpreter, or a cleaned cache
    if _quick(environment.tree) != environment.quick:
        raise EngineError(
            f"the environment {name!r} was changed since it was made",
            hint=f"`ringfence env inspect {name}` says more; `ringfence env create {name}` builds it again from its lock",
        )
    _touch(os.path.join(_place(name), "used"))
    return environment.tree, environment.warm


def _make(
    name: str, requirements: Sequence[str], locked: Sequence[Package] | None, source: Any, warm: Sequence[str],
    progress: Progress | None,
) -> Environment:  # fmt: skip
    """Resolve unless `locked`, fetch, verify, unpack, publish, and write the record last. Under the name's lock."""
    from ringfence.node import resolver

    work = os.path.join(_place(name), "making")
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed
    os.makedirs(work, mode=0o700)
    try:
        if locked is None:
            _say(progress, f"resolving {', '.join(each.split(' --hash')[0] for each in requirements[:5])}"
                 + (f" and {len(requirements) - 5} more" if len(requirements) > 5 else ""))  # fmt: skip
            wheels = resolver.resolve(requirements, source, work, progress)
        else:
            wheels = [resolver.Locked(each.name, each.version, each.sha256, each.filename, each.url, each.requested)
                      for each in locked]  # fmt: skip
        if locked is not None and _damaged(name):
            _discard(os.path.join(cache.cache_directory(), KIND, _key(locked)))
        packages, key = _build(wheels, source, work, progress)
        tree = os.path.join(cache.cache_directory(), KIND, key)
        environment = Environment(
            name=name, requirements=list(requirements), python=".".join(map(str, sys.version_info[:3])),
            created=time.time(), warm=list(warm), packages=packages, key=key, size=_size(tree), quick=_quick(tree),
            contents=_contents(tree), index_url=resolver.without_secrets(source.index_url) if source.index_url else None,
            find_links=[each if "://" not in each else resolver.without_secrets(each) for each in
                        (os.path.abspath(link) if "://" not in link else link for link in source.find_links)],
            offline=source.offline,
        )  # fmt: skip
        _write(os.path.join(_place(name), "pylock.toml"), environment.lock())
        _write(os.path.join(_place(name), "environment.json"), json.dumps(asdict(environment), indent=1))
        record = os.path.join(_place(name), "environment.json")
        cache.remember(KIND, name, key, cache.fingerprints([record]))  # so that a sweep knows that it is used
        return environment
    except OSError as error:
        raise EngineError(
            f"cannot make the environment {name!r}: {error.strerror or error}",
            hint="a full disk is the usual cause; RINGFENCE_CACHE names another place",
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build(wheels: Sequence[Any], source: Any, work: str, progress: Progress | None) -> tuple[list[Package], str]:
    from ringfence.node import resolver
    from ringfence.node.wheels import sha256_of, unpack

    fetched = resolver.fetch(wheels, source, work, progress)
    # Where the index told no hash, the file that came is what is locked.
    wheels = [each if each.sha256 else each._replace(sha256=sha256_of(fetched[each.name])) for each in wheels]
    key = _key(wheels)
    unpacked: dict[str, Any] = {}
    python = environments.interpreter()

    def build(directory: str) -> None:
        site_packages = environments.SITE_PACKAGES
        environments.start_environment(directory, python)
        for number, each in enumerate(wheels, 1):
            _say(progress, f"unpacking {each.name} {each.version} ({number}/{len(wheels)})")
            unpacked[each.name] = unpack(fetched[each.name], each.sha256, directory, site_packages, INSIDE, each.requested)
        if "pip" not in unpacked:
            _lend_pip(directory)
        _lend_fonts(os.path.join(directory, site_packages))
        _say(progress, "compiling")
        environments._compile(directory, INSIDE, python.executable_outside, {})
        with open(os.path.join(directory, ".wheels.json"), "w", encoding="utf-8") as file:
            json.dump({name: [each.size, list(each.path_files)] for name, each in unpacked.items()}, file)

    tree = cache.publish(KIND, key, build, progress)
    with open(os.path.join(tree, ".wheels.json"), encoding="utf-8") as file:
        sizes = json.load(file)
    packages = [
        Package(each.name, each.version, each.sha256, each.filename, each.url, each.requested, sizes[each.name][0],
                tuple(sizes[each.name][1]))
        for each in wheels
    ]  # fmt: skip
    return packages, key


def _key(wheels: Sequence[Any]) -> str:
    """What a tree is called: it follows from the wheels, the interpreter and the way trees are built."""
    python = environments.interpreter()
    digest = hashlib.sha256(f"{FORMAT}\t{environments.FORMAT}\t{sys.version}\t{python.executable_inside}".encode())
    for each in sorted(wheels, key=lambda one: (one.name, one.version, one.sha256)):
        digest.update(f"\0{each.name}\0{each.version}\0{each.sha256}".encode())
    return digest.hexdigest()[:32]


def _lend_pip(directory: str) -> None:
    """The kernel's environment has a pip; this one gets a link to it, and a program that installs for this one."""
    link = os.path.join(directory, environments.SITE_PACKAGES, "pip")
    if os.path.lexists(link):
        return
    os.symlink(f"{environments.ENVIRONMENT_INSIDE}/{environments.SITE_PACKAGES}/pip", link)
    for name in ("pip", "pip3"):
        environments._write_script(os.path.join(directory, "bin", name), "pip._internal.cli.main:main", INSIDE)


def _lend_fonts(site_packages: str) -> None:
    from ringfence.node import fonts

    try:
        fonts.lend(site_packages)
    except (OSError, UnicodeDecodeError):
        pass  # a matplotlib that is laid out otherwise: charts are then as it draws them by itself


# Looking, removing -------------------------------------------------------------------------------------------


def users(tree: str) -> list[int]:
    """The processes that hold a tree, as far as /proc/locks tells (proc(5)): 0 stands for one of another namespace."""
    try:
        state = os.stat(tree)
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    place = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    return sorted({int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == place})


def in_use(tree: str) -> bool:
    """Whether any process holds a tree."""
    import fcntl

    try:
        descriptor = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def verify(environment: Environment) -> str:
    """`whole`, `missing`, or `changed` when any byte of the tree differs from what was unpacked."""
    if not os.path.isdir(environment.tree):
        return "missing"
    return "whole" if _contents(environment.tree) == environment.contents else "changed"


def remove(name: str) -> int:
    """Remove an environment; returns the bytes that this freed.

    Raises:
        NotFoundError: there is none.
        EngineError: a program that runs uses it.
    """
    check_name(name, automatic=True)
    with _locked(name, None):
        if not exists(name):
            load(name)
        try:
            environment = load(name)
        except EngineError:
            environment = None  # a damaged record: what it named is left to `ringfence sweep --stale-trees`
        freed = 0
        if environment is not None and in_use(environment.tree):
            holders = ", ".join(map(str, users(environment.tree))) or "another"
            raise EngineError(f"the environment {name!r} is in use (process {holders})", hint="end what uses it, then try again")
        if environment is not None and not any(
            load(other).key == environment.key for other in names() if other != name and _readable(other)
        ):
            freed = environment.size
            _discard(environment.tree)
        for entry in os.listdir(_place(name)):
            path = os.path.join(_place(name), entry)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        os.rmdir(_place(name))
        return freed


def _readable(name: str) -> bool:
    try:
        load(name)
    except (EngineError, NotFoundError):
        return False
    return True


def _damaged(name: str) -> bool:
    try:
        return verify(load(name)) == "changed"
    except (EngineError, NotFoundError):
        return False


def _discard(tree: str) -> None:
    """Take a tree away. Raises EngineError while somebody holds it."""
    directory = os.path.dirname(tree)
    if not os.path.isdir(tree):
        return
    with cache._Lock(directory, None):
        if in_use(tree):
            raise EngineError("the environment's tree is in use", hint="end the programs that use it, then try again")
        doomed = os.path.join(directory, cache.REMOVING + os.path.basename(tree))
        os.rename(tree, doomed)
        cache._remove_tree(doomed)


class _locked:
    """An exclusive lock on one name, across threads and processes."""

    def __init__(self, name: str, progress: Progress | None) -> None:
        directory = os.path.join(cache.cache_directory(), "named")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self._lock = cache._Lock(directory, progress, f".lock-{name}")

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._lock.__exit__(*exception)


# Digests -----------------------------------------------------------------------------------------------------


def _entries(tree: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every file and link below a tree, sorted: relative path and state."""
    for folder, directories, files in os.walk(tree):
        directories.sort()
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*files, *links]):
            path = os.path.join(folder, name)
            yield path, os.lstat(path)


def _quick(tree: str) -> str:
    """A digest of names, sizes, modes and times: finds a change that was not hidden, in some ten milliseconds."""
    digest = hashlib.sha256()
    for path, state in _entries(tree):
        digest.update(f"{path[len(tree):]}\0{state.st_size}\0{state.st_mode}\0{state.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _contents(tree: str) -> str:
    """A digest of names, modes and every byte."""
    import stat

    digest = hashlib.sha256()
    for path, state in _entries(tree):
        digest.update(f"{path[len(tree):]}\0{state.st_mode}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(state.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        else:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _size(tree: str) -> int:
    return sum(state.st_blocks * 512 for _, state in _entries(tree))


def _write(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _touch(path: str) -> None:
    try:
        with open(path, "a", encoding="ascii"):
            os.utime(path)
    except OSError:
        pass  # when it was last used is for people to read; a full disk must not end a start


def _say(progress: Progress | None, message: str) -> None:
    if progress is not None:
        progress(message)
