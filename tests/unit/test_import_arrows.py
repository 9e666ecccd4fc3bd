"""Imports point one way, and `import ringfence` stays cheap.

Sources are read with `ast`, so a lazy import inside a function counts like one at the top. Imports for type
checkers alone (`if TYPE_CHECKING:`) do not run and do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence

PACKAGE = Path(ringfence.__file__).parent

ALLOWED = {
    "linux": {"linux"},
    "guest": {"guest", "linux"},
    # `engines.base` is the contract between the two: what a policy compiles to.
    "policy": {"policy", "engines.base", "linux", "errors"},
    "audit": {"audit", "linux", "errors"},
    "engines": {"engines", "gateway", "policy", "audit", "linux", "errors", "guest.protocol"},
    "gateway": {"gateway", "policy", "audit", "linux", "errors"},
    "stream": {"stream", "engines.base", "policy", "audit", "linux", "errors", "terminal", "guest.protocol"},
    "node": {
        "node", "stream", "engines", "gateway", "policy", "audit", "linux", "errors", "terminal", "guest.protocol",
    },
    "changes": {"changes", "node.capture", "node.cache", "stream.trees", "stream.waiting", "policy", "linux", "errors", "terminal"},
    "errors": set(),
    "terminal": set(),
    # The one package file may name anything: it imports lazily, which the test of cheapness below holds.
    "__init__": {"*"},
}
"""Layer -> what it may import of ringfence. `sandbox` and what stands above it may import all that is below."""

FACADE = {"sandbox", "_sandbox_core", "_sandbox_async", "_sandbox_sync"}
"""The files that make up the facade."""

UPPER = {"sandbox", "cli", "server", "integrations", "selfcheck"}
LOWER = {"sandbox", "changes", "node", "stream", "engines", "gateway", "policy", "audit", "linux", "errors", "terminal", "guest.protocol"}

# Where the standard library is all there is: guest code runs in images without our packages.
STANDARD_LIBRARY_ONLY = ("linux", "guest")
EXCEPTIONS = {
    "guest/python_kernel.py": {"IPython", "traitlets", "matplotlib", "pandas", "numpy", "e2b_charts", "pickleshare"},
    "guest/rich_results.py": {"IPython", "matplotlib", "pandas", "numpy", "e2b_charts", "PIL", "sympy"},
    "guest/kernel.py": {"numpy"},
}
"""Files that may use a package of the sandbox's environment, each only where it was loaded or in its kernel."""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of every import in `path`; of `from a import b`, both `a` and `a.b`."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    visit(other)
                continue
            if isinstance(child, ast.Import):
                found.extend((name.name, child.lineno) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports here are absolute"
                found.extend((f"{child.module}.{name.name}", child.lineno) for name in child.names)
            visit(child)

    visit(ast.parse(path.read_text("utf-8")))
    return found


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "sandbox" if first in FACADE else first


def is_below(name: str, allowed: set[str]) -> bool:
    target = name.removeprefix("ringfence.")
    return any(target == each or target.startswith(each + ".") for each in allowed)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    layer = layer_of(path)
    if layer in UPPER:
        allowed = LOWER | FACADE | {layer}
        if layer in ("cli", "server"):
            allowed |= {"selfcheck", "server"}
    else:
        assert layer in ALLOWED, f"{layer} is a new layer: add it to the design and to this test"
        allowed = ALLOWED[layer]
    for name, line in imports(path):
        if not name.startswith("ringfence.") or "*" in allowed or name == "ringfence.__version__":
            continue
        if layer in UPPER and name.removeprefix("ringfence.") in ringfence.__all__:
            continue
        # `from ringfence.guest import protocol` and `from ringfence import errors` name a module, not a member.
        assert is_below(name, allowed), f"{path}:{line}: {layer} must not import {name}"


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if layer_of(path) in STANDARD_LIBRARY_ONLY],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_linux_and_guest_need_the_standard_library_only(path: Path) -> None:
    excepted = EXCEPTIONS.get(str(path.relative_to(PACKAGE)), set())
    for name, line in imports(path):
        top = name.split(".")[0]
        if top in ("ringfence", "__future__"):
            continue
        assert top in sys.stdlib_module_names or top in excepted, f"{path}:{line}: {top} is not the standard library"


def test_ipython_is_a_leaf_that_one_file_imports() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        for name, _ in imports(path)
        if name.split(".")[0] == "IPython"
    }
    assert users <= {"guest/python_kernel.py"}, users


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_ringfence_pulls_in_nothing_heavy() -> None:
    loaded = _loaded_after("import ringfence")
    heavy = {"pydantic", "anyio", "typer", "rich", "asyncio", "IPython", "yaml", "numpy", "pandas", "click"}
    assert not loaded & heavy, loaded & heavy


def test_the_fast_path_needs_no_package_and_no_event_loop() -> None:
    """It is used to run one program, so what it imports is time its user waits."""
    loaded = _loaded_after("import ringfence.cli.entry, ringfence.cli.arguments, ringfence.cli.once")
    slow = {"pydantic", "anyio", "typer", "rich", "asyncio", "IPython", "yaml", "argparse", "subprocess",
            "dataclasses", "inspect", "logging", "pathlib", "hashlib", "concurrent.futures"}  # fmt: skip
    assert not loaded & slow, loaded & slow


@pytest.mark.parametrize("module", ["cli.once", "engines.namespace.launcher", "guest.zygote"])
def test_the_processes_of_a_single_program_load_nothing_that_costs_more_than_they_do(module: str) -> None:
    """Each of these brings several of the others, and some cost more than the whole of ringfence."""
    costly = {"typing", "collections", "enum", "re", "functools", "contextlib", "threading", "socket", "selectors", "json",
              "signal", "dataclasses", "pathlib", "subprocess", "logging", "inspect", "ringfence.guest.kernel"}  # fmt: skip
    code = f"import sys; sys.path.append({str(PACKAGE.parent)!r}); import ringfence.{module}; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True).stdout
    loaded = set(shown.split())
    assert f"ringfence.{module}" in loaded
    assert not loaded & costly, loaded & costly


def test_the_installed_program_loads_nothing_on_its_way_to_the_fast_path() -> None:
    """Scripts that older installers make of entry points import `re`, and with it five modules more."""
    script = (PACKAGE.parents[1] / "scripts" / "ringfence").read_text()
    assert script.startswith("#!python\n")  # installers write the interpreter's path here
    assert [line for line in script.splitlines() if line and not line.startswith("#")] == [
        "from ringfence.cli.entry import main", "main()",
    ]  # fmt: skip
