"""The trees that sandboxes mount: complete, neutral, readable by any uid, built once, never half."""

from __future__ import annotations

import fcntl
import marshal
import os
import py_compile
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ringfence.errors import EngineError, InvalidArgumentError
from ringfence.node import bytecode, cache, distributions, elf, environments

TINY = environments._Recipe(("pure-eval", "stack-data"), (), "pip install tiny")
SOURCE = str(Path(environments.__file__).parents[2])


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of this test's own, and a recipe that builds in a moment."""
    monkeypatch.setenv("RINGFENCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(environments.RECIPES, "tiny", TINY)
    return tmp_path / "cache"


def files_of(tree: Path) -> list[Path]:
    return [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]


# The guest library ------------------------------------------------------------------------------------


def test_the_guest_library_holds_the_guest_and_nothing_of_the_host(own_cache):
    tree = environments.guest_library()
    package = tree / "ringfence"
    assert {path.name for path in tree.iterdir()} == {"ringfence"}
    assert {path.name for path in package.iterdir()} == {"__init__.py", "__pycache__", "linux", "guest"}
    assert "import" not in (package / "__init__.py").read_text()
    for path in files_of(tree):
        assert SOURCE.encode() not in path.read_bytes()
        assert str(own_cache).encode() not in path.read_bytes()


def test_the_guest_library_runs_without_the_package(own_cache):
    tree = environments.guest_library()
    code = f"import sys; sys.path.insert(0, {str(tree)!r}); import ringfence.guest.protocol as p; print(p.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tree))


def test_byte_code_is_unchecked_and_names_the_inside_path(own_cache):
    tree = environments.guest_library()
    compiled = tree / "ringfence" / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    content = compiled.read_bytes()
    assert int.from_bytes(content[4:8], "little") == 0b01  # PEP 552: hash-based, unchecked
    assert marshal.loads(content[16:]).co_filename == "/opt/ringfence/ringfence/__init__.py"


def test_a_second_look_finds_the_same_tree_and_imports_little(own_cache):
    first = environments.guest_library_directory()
    start = time.perf_counter()
    assert environments.guest_library_directory() == first
    print(f"fast path: {(time.perf_counter() - start) * 1000:.3f} ms")
    code = (
        "import sys; before = set(sys.modules); from ringfence.node import environments as e;"
        "e.guest_library_directory(); new = set(sys.modules) - before;"
        "assert not new & {'hashlib', 'importlib.metadata', 'json', 'shutil', 'subprocess', 'compileall'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The cache --------------------------------------------------------------------------------------------


def test_trees_are_readable_by_any_uid_under_any_umask(own_cache):
    old = os.umask(0o077)
    try:
        trees = [environments.guest_library(), environments.python_environment("tiny")]
    finally:
        os.umask(old)
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    for tree in trees:
        for path in [tree, *tree.rglob("*")]:
            if path.is_symlink():
                continue
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o755 if path.is_dir() else mode & 0o100 and 0o755 or 0o644), path


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_cache_that_others_may_write_is_refused(own_cache, mode):
    own_cache.mkdir()
    own_cache.chmod(mode)
    with pytest.raises(EngineError, match="written by others") as problem:
        environments.guest_library()
    assert "chmod 700" in problem.value.hint


def test_a_cache_that_is_a_link_or_belongs_to_someone_else_is_refused(own_cache, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    own_cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="not a directory"):
        cache.cache_directory()
    own_cache.unlink()
    own_cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(EngineError, match="belongs to uid"):
        cache.cache_directory()


def test_the_cache_lies_where_its_user_expects_it(monkeypatch, tmp_path):
    monkeypatch.delenv("RINGFENCE_CACHE", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cache._location() == "/var/cache/ringfence"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache._location() == str(tmp_path / ".cache/ringfence")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache._location() == str(tmp_path / "x/ringfence")


def test_a_crashed_build_leaves_no_tree_and_its_rubbish_goes(own_cache):
    def crash(directory: str) -> None:
        Path(directory, "half").write_text("")
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError):
        cache.publish("kind", "key", crash)
    left = own_cache / "kind" / f"{cache.BUILDING}1-dead"
    left.mkdir()

    def build(directory: str) -> None:
        Path(directory, "whole").write_text("")

    tree = cache.publish("kind", "key", build)
    assert [path.name for path in Path(tree).iterdir()] == ["whole"]
    assert not left.exists()


def test_concurrent_builders_make_one_tree(own_cache):
    built: list[str] = []
    trees: list[str] = []

    def build(directory: str) -> None:
        built.append(directory)
        time.sleep(0.05)
        Path(directory, "file").write_text("x")

    threads = [
        threading.Thread(target=lambda: trees.append(cache.publish("kind", "key", build))) for _ in range(4)
    ]
    code = "import sys; from ringfence.node import environments as e; print(e.guest_library_directory())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(set(trees)) == 1
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1
    assert all(process.returncode == 0 for process in processes)
    assert not [path for path in own_cache.rglob(f"{cache.BUILDING}*")]


def test_prune_removes_what_is_stale_and_unused(own_cache, tmp_path):
    source = tmp_path / "source"
    source.write_text("1")
    trees = []
    for key in ("one", "two"):
        trees.append(cache.publish("kind", key, lambda directory: None))
        cache.remember("kind", f"identity {key}", key, cache.fingerprints([str(source)]))
    held = cache.hold(trees[0])
    assert cache.recall("kind", "identity one") == trees[0]
    assert cache.prune() == []
    source.write_text("22")
    assert cache.recall("kind", "identity one") is None
    try:
        assert cache.prune() == [trees[1]]
    finally:
        os.close(held)
    assert cache.prune() == [trees[0]]
    with pytest.raises(EngineError, match="gone"):
        cache.hold(trees[0])


def test_a_holder_keeps_a_tree_with_a_shared_lock(own_cache):
    tree = cache.publish("kind", "key", lambda directory: None)
    first, second = cache.hold(tree), cache.hold(tree)
    other = os.open(tree, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (first, second, other):
        os.close(descriptor)


# Package environments ---------------------------------------------------------------------------------


def test_an_environment_is_a_neutral_copy(own_cache):
    messages: list[str] = []
    tree = environments.python_environment("tiny", messages.append)
    assert environments.python_environment("tiny") == tree
    assert any("stack-data" in message for message in messages)
    site_packages = tree / environments.SITE_PACKAGES
    names = {path.name for path in site_packages.iterdir()}
    assert {"pure_eval", "stack_data", "asttokens", "executing"} <= names  # the closure
    assert "pytest" not in names
    host_paths = [str(own_cache), sys.prefix, sys.base_prefix if sys.base_prefix != "/usr" else sys.prefix]
    for path in [*files_of(tree), *(path for path in tree.rglob("*") if path.is_symlink())]:
        assert path.suffix != ".pth"
        assert path.name != "direct_url.json"
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        if path.name == f"python{environments.PYTHON_VERSION}":
            continue  # the interpreter, which tells of its own build
        assert not [host for host in host_paths if host.encode() in content], path
    configuration = (tree / "pyvenv.cfg").read_text()
    assert "include-system-site-packages = false" in configuration
    assert f"home = {os.path.dirname(environments.interpreter().executable_inside)}\n" in configuration
    compiled = next((site_packages / "pure_eval" / "__pycache__").glob("core.*.pyc")).read_bytes()
    inside = f"/opt/env/{environments.SITE_PACKAGES}/pure_eval/core.py"
    assert marshal.loads(compiled[16:]).co_filename == inside


def test_byte_code_of_the_installed_file_is_taken_only_while_it_belongs_to_its_content(tmp_path):
    source = tmp_path / "module.py"
    source.write_text("def function():\n    return 1\n")
    content = source.read_bytes()
    assert bytecode.cached(str(source), content) is None
    py_compile.compile(str(source))
    code = bytecode.cached(str(source), content)
    assert code is not None
    moved = bytecode.renamed(code, "/opt/env/module.py")
    names = {
        inner.co_filename for inner in [moved, *(c for c in moved.co_consts if hasattr(c, "co_filename"))]
    }
    assert names == {"/opt/env/module.py"}
    assert bytecode.cached(str(source), content + b"#") is None
    os.utime(source, (1, 1))
    assert bytecode.cached(str(source), content) is None
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert bytecode.cached(str(source), content) is not None
    assert bytecode.cached(str(source), b"other") is None


def test_a_file_that_does_not_compile_is_left_without_byte_code(tmp_path):
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "good.py").write_text("x = 1")
    environments._compile(str(tmp_path), "/opt/env", environments.interpreter().executable_outside, {})
    assert [path.name.split(".")[0] for path in (tmp_path / "__pycache__").iterdir()] == ["good"]


def test_there_is_no_environment_of_any_name():
    with pytest.raises(InvalidArgumentError, match="no package environment"):
        environments.python_environment("nonsense")


def make_distribution(
    folder: Path, name: str, requires: str = "", files: dict[str, str] | None = None
) -> None:
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}")
    rows = [f"{name}-1.dist-info/METADATA,,", f"{name}-1.dist-info/RECORD,,"]
    for path, content in (files or {}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        rows.append(f"{path},,")
    (metadata / "RECORD").write_text("\n".join(rows) + "\n")


def test_a_missing_package_is_an_error_with_the_remedy(tmp_path):
    make_distribution(tmp_path, "top", "Requires-Dist: absent>=1\n")
    with pytest.raises(EngineError, match="absent is not installed .needed by top") as problem:
        distributions.closure(["top"], [str(tmp_path)], "pip install 'ringfence[data]'")
    assert problem.value.hint == "pip install 'ringfence[data]'"


def test_the_closure_follows_markers_and_requested_extras_only(tmp_path):
    make_distribution(
        tmp_path,
        "top",
        "Requires-Dist: Mid.One[Fast]>=1; python_version >= '3'\n"
        "Requires-Dist: windows_only; sys_platform == 'win32'\n"
        "Provides-Extra: more\nRequires-Dist: never; extra == 'more'\n",
    )
    make_distribution(tmp_path, "mid_one", "Provides-Extra: fast\nRequires-Dist: leaf; extra == 'fast'\n")
    make_distribution(tmp_path, "leaf")
    found = distributions.closure(["top"], [str(tmp_path)], "")
    assert [installed.name for installed in found] == ["leaf", "mid-one", "top"]


def test_files_that_lead_elsewhere_are_not_copied(tmp_path):
    site_packages = tmp_path / "lib" / "python3.11" / "site-packages"
    make_distribution(
        site_packages,
        "top",
        files={
            "top/__init__.py": "",
            "top.pth": "import os",
            "top-1.dist-info/direct_url.json": "{}",
            "../../../bin/tool": "#!/home/me/python\n",
            "../../../../secret": "",
            "../../other/file": "",
        },
    )
    (installed,) = distributions.closure(["top"], [str(site_packages)], "")
    found = {
        file.destination for file in distributions.files_to_copy(installed, "lib/python3.11/site-packages")
    }
    inside = "lib/python3.11/site-packages"
    assert found == {f"{inside}/top/__init__.py", f"{inside}/top-1.dist-info/METADATA", "bin/tool"}


def test_editable_installs_and_packages_without_a_record_are_refused(tmp_path):
    make_distribution(tmp_path / "a", "top", files={"__editable__.top-1.pth": "/home/me/top"})
    with pytest.raises(EngineError, match="editable"):
        distributions.find("top", [str(tmp_path / "a")])
    make_distribution(
        tmp_path / "b", "top", files={"top-1.dist-info/direct_url.json": '{"dir_info": {"editable": true}}'}
    )
    with pytest.raises(EngineError, match="editable"):
        distributions.find("top", [str(tmp_path / "b")])
    make_distribution(tmp_path / "c", "top")
    (tmp_path / "c" / "top-1.dist-info" / "RECORD").unlink()
    with pytest.raises(EngineError, match="RECORD"):
        distributions.find("top", [str(tmp_path / "c")])


MARKERS = [
    "python_version >= '3.8'",
    "python_version < '3.10'",
    "python_version == '3.*'",
    "python_version != '3.11.*'",
    "python_version ~= '3.8'",
    "python_full_version > '3.11.0rc1'",
    "python_version > '3.9' and python_version < '3.12' or sys_platform == 'win32'",
    "(os_name == 'nt' or os_name == 'posix') and 'linux' in sys_platform",
    "platform_machine not in 'arm64 armv7l'",
    "implementation_name == 'cpython' and platform_python_implementation != \"PyPy\"",
    "extra == 'Some_Extra'",
    "extra == 'other'",
    "python_version in '3.10 3.11 3.12'",
    "platform_system=='Linux'",
]


@pytest.mark.parametrize("marker", MARKERS)
def test_markers_mean_what_packaging_says(marker):
    markers = pytest.importorskip("packaging.markers")
    assert distributions.evaluate_marker(marker, "some-extra") is markers.Marker(marker).evaluate(
        {"extra": "some-extra"}
    )


@pytest.mark.parametrize(
    "marker", ["", "python_version", "python_version >", "(os_name == 'x'", "what == '1'", "os_name = 'x'"]
)
def test_what_is_no_marker_is_an_error(marker):
    with pytest.raises(EngineError, match="marker"):
        distributions.evaluate_marker(marker)


def test_requirements_are_parsed():
    parse = distributions.parse_requirement
    assert parse("Foo.Bar[B, a_c] (>=1,<2) ; os_name == 'x'") == ("foo-bar", ("a-c", "b"), "os_name == 'x'")
    assert parse("a @ file:///x;y ; os_name == 'x'") == ("a", (), "os_name == 'x'")
    assert parse("a") == ("a", (), "")


# The interpreter --------------------------------------------------------------------------------------


def test_the_interpreter_is_the_one_that_runs_ringfence():
    python = environments.interpreter()
    assert os.path.realpath(sys.executable) == python.executable_outside
    if python.prefix_outside is None:
        assert python.executable_inside.startswith("/usr/")
    else:
        assert python.executable_inside.startswith("/opt/python/bin/")
        assert os.path.exists(
            os.path.join(python.prefix_outside, "lib", f"python{environments.PYTHON_VERSION}")
        )


def test_the_systems_python_stays_where_it_is():
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("this machine has no /usr/bin/python3")
    code = f"import sys; sys.path.insert(0, {SOURCE!r}); from ringfence.node import environments as e; print(*e.interpreter()[:4])"
    done = subprocess.run(["/usr/bin/python3", "-I", "-c", code], capture_output=True, text=True, check=False)
    if "SyntaxError" in done.stderr or "ImportError" in done.stderr:
        pytest.skip("/usr/bin/python3 is older than 3.11")
    assert done.returncode == 0, done.stderr
    inside, outside, prefix, library = done.stdout.split()
    assert inside == outside == os.path.realpath("/usr/bin/python3")
    assert (prefix, library) == ("None", "None")


def test_an_interpreter_below_usr_local_is_not_mounted_again(monkeypatch):
    monkeypatch.setattr(environments, "_needs_library", lambda prefix, executable: True)
    python = environments._describe_interpreter("/usr/local", "/usr/local/bin/python3.11")
    assert python.executable_inside == "/usr/local/bin/python3.11"
    assert python.prefix_outside is None
    assert python.library_path == "/usr/local/lib"
    with pytest.raises(EngineError, match="root directory"):
        environments._describe_interpreter("/", "/bin/python3")


def test_a_program_gets_another_run_path_in_place():
    content = Path(environments.interpreter().executable_outside).read_bytes()
    dynamic = elf.read_dynamic(content)
    assert dynamic is not None
    assert any(name.startswith("libc.") for name in dynamic.needed)
    if dynamic.run_path_at < 0:
        assert elf.with_run_path(content, "/x") is None
    else:
        moved = elf.with_run_path(content, "/x/y")
        assert moved is not None
        assert len(moved) == len(content)
        assert elf.read_dynamic(moved) == dynamic._replace(run_path="/x/y")
        assert elf.with_run_path(content, "/x" * 4096) is None


@pytest.mark.parametrize(
    "content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + b"\xff" * 58, b"\x7fELF\x01\x01" + bytes(58)]
)
def test_what_is_no_program_has_no_run_path(content):
    assert elf.read_dynamic(content) is None


# Inside -----------------------------------------------------------------------------------------------

INSIDE = """
set -eu
mount --make-rprivate /
mount -t tmpfs none /opt
mkdir /opt/env /opt/python /opt/ringfence
mount --bind "$1" /opt/env
mount --bind "$2" /opt/ringfence
[ -z "$3" ] || mount --bind "$3" /opt/python
mount -t tmpfs none /root
mount -t tmpfs none /home
mount -t tmpfs none /tmp
mkdir -m 777 /tmp/home
cd /
shift 3
exec setpriv --reuid 12345 --regid 12345 --clear-groups env -i HOME=/tmp/home PATH=/opt/env/bin:/usr/bin:/bin "$@"
"""


def run_inside(tree: Path, prefix: str | None, *command: str) -> str:
    """Run a command with the environment at its place and the host's homes hidden, under a foreign uid."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces cannot be made here")
    library = environments.guest_library_directory()
    arguments = ["unshare", "-m", "sh", "-c", INSIDE, "sh", str(tree), library, prefix or "", *command]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tiny_environment_works_at_its_place(own_cache):
    tree = environments.python_environment("tiny")
    code = (
        "import sys, subprocess, stack_data, executing\n"
        "assert all(p.startswith(('/opt/env/', '/opt/python/', '/usr/lib')) for p in sys.path if p), sys.path\n"
        "assert not any('dist-packages' in p for p in sys.path), sys.path\n"
        "assert sys.prefix == '/opt/env' and sys.flags.isolated\n"
        "assert stack_data.__file__.startswith('/opt/env/lib/')\n"
        # No variable is needed to find a shared libpython.
        "print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], env={}, capture_output=True, text=True).stdout)"
    )
    assert (
        run_inside(tree, environments.interpreter().prefix_outside, "python", "-I", "-c", code).strip()
        == "42"
    )


def test_the_data_environment_works_at_its_place():
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    start = time.perf_counter()
    tree = environments.python_environment("data")  # in the user's own cache: other tests need it too
    print(f"data environment: {time.perf_counter() - start:.2f} s")
    code = (
        "import sys, numpy, pandas, IPython, e2b_charts, matplotlib; matplotlib.use('agg')\n"
        "import matplotlib.pyplot as plt\n"
        "frame = pandas.DataFrame({'x': numpy.arange(10)}); frame.plot(); plt.savefig('/tmp/home/chart.png')\n"
        "assert not any('/site-packages' in p and not p.startswith('/opt/env/') for p in sys.path), sys.path\n"
        "print(int(frame.x.sum()))"
    )
    prefix = environments.interpreter().prefix_outside
    assert run_inside(tree, prefix, "python", "-I", "-c", code).strip() == "45"
    assert "/opt/env/" in run_inside(tree, prefix, "python", "-m", "pip", "--version")
    assert run_inside(tree, prefix, "ipython", "--version").strip()
    fonts = list((tree / environments.FONT_CACHE).glob("fontlist-*.json"))
    assert len(fonts) == 1
    assert str(tree) not in fonts[0].read_text()


def test_an_environment_for_the_systems_python_works_at_its_place(own_cache):
    if f"python{environments.PYTHON_VERSION}" != os.path.basename(os.path.realpath("/usr/bin/python3")):
        pytest.skip("/usr/bin/python3 is absent or of another version")
    code = (
        f"import sys; sys.path[:0] = [{SOURCE!r}, {os.path.dirname(os.path.dirname(pytest.__file__))!r}]\n"
        "from ringfence.node import environments as e\n"
        "e.RECIPES['tiny'] = e._Recipe(('pure-eval', 'stack-data'), (), '')\n"
        "print(e.python_environment('tiny'))"
    )
    tree = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    check = "import sys, stack_data; print(sys.executable, sys.base_prefix, *[p for p in sys.path if 'packages' in p])"
    answer = run_inside(Path(tree), None, "python3", "-I", "-c", check).split()
    assert answer == ["/opt/env/bin/python3", "/usr", f"/opt/env/{environments.SITE_PACKAGES}"]
