"""The public names: sorted, all there, and loaded only when used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ringfence
import ringfence.sandbox

SOURCE = str(Path(ringfence.__file__).parent.parent)


def test_exported_names_are_sorted_and_exist() -> None:
    assert ringfence.__all__ == sorted(ringfence.__all__)
    for name in ringfence.__all__:
        assert getattr(ringfence, name) is not None


def test_every_lazy_name_is_exported_and_the_other_way_round() -> None:
    lazy = {name for names in ringfence._HOMES.values() for name in names}
    assert lazy == set(ringfence.__all__)
    assert ringfence.sandbox.__all__ == sorted(ringfence.sandbox.__all__)


def loaded_after(code: str) -> set[str]:
    program = f"import sys; sys.path.insert(0, {SOURCE!r}); {code}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-I", "-c", program], text=True).split())


def test_importing_the_package_loads_no_other_module_of_it() -> None:
    loaded = loaded_after("import ringfence")
    assert {name for name in loaded if name.startswith("ringfence")} == {"ringfence"}


def test_the_sync_facade_loads_neither_models_nor_event_loops() -> None:
    loaded = loaded_after("from ringfence import Sandbox; import ringfence.node.node")
    assert not loaded & {
        "pydantic",
        "anyio",
        "asyncio",
        "typer",
        "rich",
        "yaml",
        "IPython",
        "ringfence._sandbox_async",
    }


def test_the_default_specification_needs_no_model_library() -> None:
    loaded = loaded_after(
        "from ringfence._sandbox_core import build_spec; build_spec('base', {'timeout': 60})"
    )
    assert not loaded & {"pydantic", "yaml", "asyncio"}
