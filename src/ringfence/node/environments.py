"""The read-only directories that sandboxes mount: which Python runs inside, with which packages, and our guest.

Guards against lending a sandbox the user's own world. Nothing of a home, a virtual environment or an editable
install is mounted: what a sandbox imports is a copy, made once, at neutral paths (`/opt/env`, `/opt/ringfence`),
byte-compiled for those paths, readable by any uid, writable by none. Interpreters under `/usr` are used where
they are; others appear at `/opt/python`, with their own site-packages named in `Interpreter.masks`, so that the
engine can cover what somebody installed there.

    guest_library()              /opt/ringfence   package `ringfence`: a stub, `linux/` and `guest/`
    interpreter()                /opt/python      the Python that runs ringfence, without its packages
    python_environment("data")   /opt/env         a virtual environment (PEP 405) with copies of packages

Each has a twin that answers a plain string (`guest_library_directory`, ...), because importing `pathlib` costs a
one-shot command line more than the whole look-up does.
"""

from __future__ import annotations

import os
import sys

from ringfence.node import cache

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import NamedTuple

    from ringfence.node.distributions import Installed

    Progress = Callable[[str], None]
else:
    from ringfence.linux.records import NamedTuple

ENVIRONMENT_INSIDE = "/opt/env"
LIBRARY_INSIDE = "/opt/ringfence"
PYTHON_INSIDE = "/opt/python"

PYTHON_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE_PACKAGES = f"lib/python{PYTHON_VERSION}/site-packages"
FONT_CACHE = "share/matplotlib"
"""Below an environment: matplotlib's font list (`fontlist-v*.json`), ready to be copied or bound into
`~/.cache/matplotlib` of a sandbox. It cannot be used in place: matplotlib ignores a read-only MPLCONFIGDIR."""

FORMAT = "4"
"""Part of every key: raise it when the way trees are built changes."""


class _Recipe(NamedTuple):
    packages: tuple[str, ...]
    when_installed: tuple[str, ...]
    hint: str


RECIPES = {
    "base": _Recipe(("ipython",), ("pip",), "pip install --force-reinstall ringfence"),
    "data": _Recipe(
        ("ipython", "numpy", "pandas", "matplotlib", "e2b-charts"),
        ("pip", "bokeh-sampledata", "noto-cjk-sans-jp-regular", "manimgx-fonts"),  # fonts: see `fonts`
        "pip install 'ringfence[data]'",
    ),
}
"""What each environment holds, besides what these need. `e2b-charts` needs numpy and matplotlib, so `base`,
which must stay small, does without it."""


class Interpreter(NamedTuple):
    """The Python that runs inside a sandbox.

    `executable_inside`: its path inside. `executable_outside`: the same file on the host. `prefix_outside`: the
    directory to mount read-only at `/opt/python`, or None when `/usr` already brings it. `library_path`: what
    LD_LIBRARY_PATH must be inside so that a shared libpython is found, or None. `masks`: directories inside that
    hold packages somebody installed for that interpreter; cover them with an empty directory.
    """

    executable_inside: str
    executable_outside: str
    prefix_outside: str | None
    library_path: str | None
    masks: tuple[str, ...]


_interpreter: Interpreter | None = None


def interpreter() -> Interpreter:
    """The Python that runs ringfence, as sandboxes see it.

    Raises:
        EngineError: its files lie in a way that cannot be mounted.
    """
    global _interpreter
    if _interpreter is None:
        _interpreter = _describe_interpreter(sys.base_prefix, _base_executable())
    return _interpreter


def _base_executable() -> str:
    """The real interpreter behind a virtual environment's links."""
    prefix = os.path.realpath(sys.base_prefix)
    names = (f"python{PYTHON_VERSION}{sys.abiflags}", f"python{PYTHON_VERSION}", "python3")
    candidates = [getattr(sys, "_base_executable", None) or sys.executable]
    candidates += [os.path.join(prefix, "bin", name) for name in names]
    for candidate in candidates:
        path = os.path.realpath(candidate) if candidate else ""
        if path.startswith(prefix.rstrip("/") + "/") and os.access(path, os.X_OK):
            return path
    raise cache._engine_error(
        f"cannot find the Python executable below {prefix}",
        "run ringfence with an ordinary Python installation (a distribution's, uv's, pyenv's or conda's)",
    )


def _describe_interpreter(base_prefix: str, executable: str) -> Interpreter:
    prefix = os.path.realpath(base_prefix)
    if prefix == "/":
        raise cache._engine_error(
            "this Python's prefix is the root directory, which cannot be mounted",
            "run ringfence with a Python that is installed in a directory of its own",
        )
    in_usr = prefix == "/usr" or prefix.startswith("/usr/")
    inside = prefix if in_usr else PYTHON_INSIDE

    def translate(path: str) -> str:
        return inside + path[len(prefix) :]

    library_path = None
    if prefix != "/usr" and _needs_library(prefix, executable):
        library_path = translate(os.path.join(prefix, "lib"))
    masks = []
    for library in ("lib", "lib64"):
        for name in ("site-packages", "dist-packages"):
            path = os.path.join(prefix, library, f"python{PYTHON_VERSION}", name)
            if os.path.isdir(path) and not os.path.islink(os.path.join(prefix, library)):
                masks.append(translate(path))
    if in_usr:
        # Distributions keep packages for every program of theirs here; no environment of ours looks at them.
        masks = [path for path in masks if not path.startswith("/usr/lib")]
    return Interpreter(
        translate(executable), executable, None if in_usr else prefix, library_path, tuple(masks)
    )


def _needs_library(prefix: str, executable: str) -> bool:
    """Whether the loader must be told of `prefix`/lib for this interpreter at another place.

    True for a shared libpython that is found by an absolute path, and for conda, whose packages find libraries by
    a path relative to their own, which a copy breaks.
    """
    from ringfence.node.elf import read_dynamic

    if os.path.isdir(os.path.join(prefix, "conda-meta")):
        return True
    import mmap

    with open(executable, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        dynamic = read_dynamic(content)
    return (
        dynamic is not None
        and any(name.startswith("libpython") for name in dynamic.needed)
        and not dynamic.run_path.startswith("$ORIGIN")
    )


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def guest_library(progress: Progress | None = None) -> Path:
    """The directory for `/opt/ringfence`; built when the guest's source files are not the ones it was built from.

    Raises:
        EngineError: the cache is unusable.
    """
    from pathlib import Path

    return Path(guest_library_directory(progress))


def guest_library_directory(progress: Progress | None = None) -> str:
    """As `guest_library`, as a string."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    identity = f"{FORMAT}\t{sys.implementation.cache_tag}\t{sys.version}\t{package}"
    if found := cache.recall("guest", identity):
        return found
    import hashlib

    from ringfence import __version__

    watched: list[str] = []
    sources: list[str] = []
    for part in ("linux", "guest"):
        for folder, directories, files in os.walk(os.path.join(package, part)):
            directories[:] = sorted(name for name in directories if name != "__pycache__")
            watched.append(folder)
            for name in sorted(files):
                if name.endswith(".py") or os.path.basename(folder) == "drivers":
                    path = os.path.join(folder, name)
                    watched.append(path)
                    sources.append(path)
    fingerprints = cache.fingerprints(watched)
    contents = {os.path.relpath(path, package): _content(path) for path in sources}
    contents["__init__.py"] = (
        '"""The part of Ringfence that runs inside a sandbox; the whole package is on the host only."""\n\n'
        f'__version__ = "{__version__}"\n'
    ).encode()
    digest = hashlib.sha256(identity.rsplit("\t", 1)[0].encode())
    for path in sorted(contents):
        digest.update(f"{path}\0{len(contents[path])}\0".encode() + contents[path])

    def build(directory: str) -> None:
        _say(progress, "preparing the guest library")
        for path, content in contents.items():
            target = os.path.join(directory, "ringfence", path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.write(content)
        _compile(directory, LIBRARY_INSIDE, interpreter().executable_outside, {})

    key = digest.hexdigest()[:32]
    tree = cache.publish("guest", key, build, progress)
    cache.remember("guest", identity, key, fingerprints)
    return tree


def python_environment(name: str = "base", progress: Progress | None = None) -> Path:
    """The directory for `/opt/env`: a virtual environment with copies of the packages that `name` holds.

    `base` holds IPython and pip; `data` adds numpy, pandas, matplotlib and e2b_charts. The first build copies and
    compiles (`data`: about 200 MB, some ten seconds); later calls compare the installed packages' RECORD files by
    `stat` and are immediate.

    Raises:
        EngineError: a package is missing or cannot be copied, or the cache is unusable; the hint says what to do.
        InvalidArgumentError: there is no such environment.
    """
    from pathlib import Path

    return Path(python_environment_directory(name, progress))


def python_environment_directory(name: str = "base", progress: Progress | None = None) -> str:
    """As `python_environment`, as a string."""
    recipe = RECIPES.get(name)
    if recipe is None:
        from ringfence.errors import InvalidArgumentError

        raise InvalidArgumentError(
            f"there is no package environment {name!r}", hint=f"choose one of: {', '.join(sorted(RECIPES))}"
        )
    python = interpreter()
    paths = _search_paths()
    identity = "\t".join(
        (FORMAT, name, sys.implementation.cache_tag or "", sys.version, python.executable_inside, *paths)
    )
    if found := cache.recall("environments", identity):
        return found
    import hashlib

    from ringfence.node import distributions

    fingerprints = cache.fingerprints(paths)
    extra = [package for package in recipe.when_installed if distributions.find(package, paths)]
    chosen = distributions.closure((*recipe.packages, *extra), paths, recipe.hint)
    fingerprints += cache.fingerprints(
        os.path.join(installed.root, _record_path(installed)) for installed in chosen
    )
    bundled_pip = None if "pip" in extra else _bundled_pip()
    digest = hashlib.sha256(
        "\t".join(
            (FORMAT, sys.implementation.cache_tag or "", sys.version, python.executable_inside)
        ).encode()
    )
    for installed in chosen:
        digest.update(f"{installed.name}\0{installed.version}\0{installed.record}\0".encode())
    digest.update((bundled_pip or "").encode())

    def build(directory: str) -> None:
        _build_environment(directory, python, chosen, bundled_pip, progress)

    key = f"{name}-{digest.hexdigest()[:32]}"
    tree = cache.publish("environments", key, build, progress)
    cache.remember("environments", identity, key, fingerprints)
    return tree


def _search_paths() -> list[str]:
    """Where installed packages are looked for: this interpreter's package directories, in order.

    Not all of `sys.path`: the directory of a script or the current directory is not a place where packages are
    installed, and whoever can write there must not choose what a sandbox imports.
    """
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [
        path
        for path in sys.path
        if os.path.isabs(path)
        and os.path.basename(path) in ("site-packages", "dist-packages")
        and os.path.isdir(path)
    ]
    return paths if own in paths else [*paths, own]  # `own` matters for `pip install --target`


def _record_path(installed: Installed) -> str:
    return os.path.join(installed.metadata_directory, "RECORD")


def _build_environment(
    directory: str,
    python: Interpreter,
    chosen: list[Installed],
    bundled_pip: str | None,
    progress: Progress | None,
) -> None:
    site_packages = start_environment(directory, python)
    sources: dict[str, str] = {}
    for number, installed in enumerate(chosen, 1):
        _say(progress, f"copying packages ({number}/{len(chosen)}): {installed.name} {installed.version}")
        _copy_distribution(directory, installed, sources)
    if bundled_pip:
        _unpack_pip(directory, bundled_pip)
    _say(progress, "compiling packages")
    _compile(directory, ENVIRONMENT_INSIDE, python.executable_outside, sources)
    if any(installed.name == "matplotlib" for installed in chosen):
        from ringfence.node import fonts

        _say(progress, "listing fonts")
        fonts.lend(site_packages)
        fonts.write_list(
            os.path.join(directory, FONT_CACHE), directory, site_packages, python.executable_outside, _run
        )


def start_environment(directory: str, python: Interpreter) -> str:
    """A virtual environment (PEP 405) without packages; returns its directory for them."""
    site_packages = os.path.join(directory, SITE_PACKAGES)
    os.makedirs(site_packages)
    os.makedirs(os.path.join(directory, "bin"))
    os.symlink("lib", os.path.join(directory, "lib64"))
    _place_interpreter(os.path.join(directory, "bin"), python)
    with open(os.path.join(directory, "pyvenv.cfg"), "w", encoding="utf-8") as file:
        file.write(
            f"home = {os.path.dirname(python.executable_inside)}\n"
            "include-system-site-packages = false\n"
            f"version = {'.'.join(map(str, sys.version_info[:3]))}\n"
            f"executable = {python.executable_inside}\n"
        )
    return site_packages


def _place_interpreter(directory: str, python: Interpreter) -> None:
    """`python3.X` in the environment's `bin`: a link, or a copy that finds its shared library by itself."""
    versioned = f"python{PYTHON_VERSION}"
    target = os.path.join(directory, versioned)
    moved = None
    if python.prefix_outside and python.library_path:
        from ringfence.node.elf import with_run_path

        moved = with_run_path(_content(python.executable_outside), python.library_path)
    if moved is None:
        os.symlink(python.executable_inside, target)
    else:
        with open(target, "wb") as file:
            file.write(moved)
        os.chmod(target, 0o755)
    for name in ("python", "python3"):
        os.symlink(versioned, os.path.join(directory, name))


def _copy_distribution(
    directory: str,
    installed: Installed,
    sources: dict[str, str],
    inside: str = ENVIRONMENT_INSIDE,
    admitted: Callable[[str], bool] | None = None,
    tests: bool = False,
) -> None:
    """Copy one package into a tree for `inside`; `sources` learns where each file came from.

    `admitted` says of a file whether it may be copied (default: all); `tests` keeps packages' own test suites.
    """
    import shutil

    from ringfence.node import distributions

    scripts = {
        entry.name: entry.value
        for entry in installed.distribution.entry_points
        if entry.group in ("console_scripts", "gui_scripts")
    }
    copied: set[str] = set()
    made: set[str] = set()
    for file in distributions.files_to_copy(installed, SITE_PACKAGES):
        if "/tests/" in file.destination and not tests:
            continue  # packages' own test suites: a third of the files, of no use inside
        if admitted is not None and not admitted(file.source):
            continue
        folder, name = os.path.split(file.destination)
        if folder == "bin" and name in scripts:
            copied.add(file.record_path)
            continue
        target = os.path.join(directory, file.destination)
        if folder not in made:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            made.add(folder)
        if os.path.lexists(target):
            continue  # two distributions own one file (namespace packages, docs): the first is as good
        shutil.copyfile(file.source, target)
        if os.access(file.source, os.X_OK):
            os.chmod(target, 0o755)
        sources[file.destination] = file.source
        if folder == "bin":
            _neutral_shebang(target, inside)
        copied.add(file.record_path)
    for name, value in scripts.items():
        if os.path.basename(name) == name:
            _write_script(os.path.join(directory, "bin", name), value, inside)
    _write_record(directory, installed, copied)


def _write_record(directory: str, installed: Installed, copied: set[str]) -> None:
    """RECORD again, of what is really here; scripts were rewritten, so their hashes are left open (PEP 376)."""
    import csv

    rows = []
    for row in csv.reader(installed.record.splitlines()):
        if row and row[0] in copied:
            rows.append([row[0], "", ""] if "/bin/" in row[0] else row)
    rows.append([_record_path(installed), "", ""])
    target = os.path.join(directory, SITE_PACKAGES, _record_path(installed))
    with open(target, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _write_script(path: str, entry_point: str, inside: str = ENVIRONMENT_INSIDE) -> None:
    module, _, rest = entry_point.partition(":")
    function = rest.partition("[")[0].strip()
    if not module.replace(".", "").isidentifier() or not function.replace(".", "").isidentifier():
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f"#!{inside}/bin/python3\n"
            "import sys\n"
            f"from {module.strip()} import {function.partition('.')[0]}\n"
            f"sys.exit({function}())\n"
        )
    os.chmod(path, 0o755)


def _neutral_shebang(path: str, inside: str) -> None:
    """Scripts that are no entry points start with the host's interpreter; give them ours."""
    with open(path, "rb") as file:
        content = file.read()
    first, _, rest = content.partition(b"\n")
    if first.startswith(b"#!") and b"python" in first:
        with open(path, "wb") as file:
            file.write(b"#!" + inside.encode() + b"/bin/python3\n" + rest)


def _bundled_pip() -> str | None:
    """The pip wheel that this Python brings for `ensurepip`, if it brings one.

    Upstream keeps it in the package, distributions in a directory of wheels that `ensurepip` names.
    """
    try:
        import ensurepip
    except ImportError:
        return None
    places = [
        os.path.join(os.path.dirname(ensurepip.__file__), "_bundled"),
        getattr(ensurepip, "_WHEEL_PKG_DIR", None) or "",
        "/usr/share/python-wheels",
    ]
    for place in places:
        names = sorted(name for name in _listing(place) if name.startswith("pip-") and name.endswith(".whl"))
        if names:
            return os.path.join(place, names[-1])
    return None


def _unpack_pip(directory: str, wheel: str) -> None:
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(os.path.join(directory, SITE_PACKAGES))  # zipfile refuses paths that lead outside
    for name in ("pip", "pip3", f"pip{PYTHON_VERSION}"):
        _write_script(os.path.join(directory, "bin", name), "pip._internal.cli.main:main")


def _compile(directory: str, inside: str, executable: str, sources: dict[str, str]) -> None:
    """Byte-compile for the paths inside, in a process of its own: see `bytecode`.

    `sources`: the installed file that each file of the tree was copied from, whose byte code may be taken.
    """
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bytecode.py")
    pairs = b"".join(
        os.fsencode(text) + b"\0" for pair in sources.items() if pair[0].endswith(".py") for text in pair
    )
    _run(executable, [script, directory, inside], (0,), pairs=pairs)


def _run(
    executable: str,
    arguments: list[str],
    expected: tuple[int, ...] | None,
    environment: dict[str, str] | None = None,
    pairs: bytes = b"",
) -> None:
    """Run the interpreter by itself: isolated, without packages, from the root directory, with a built environment."""
    import subprocess

    library = os.path.join(os.path.dirname(os.path.dirname(executable)), "lib")
    done = subprocess.run(
        [executable, "-I", "-S", *arguments],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": library, **(environment or {})},
        input=pairs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if expected is not None and done.returncode not in expected:
        detail = done.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
        raise cache._engine_error(
            f"building a package environment failed (exit code {done.returncode}): {detail}",
            "look at the message; a full disk and a broken Python installation are the usual causes",
        )


def _listing(directory: str) -> Iterable[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return ()


def _say(progress: Progress | None, message: str) -> None:
    if progress:
        progress(message)
