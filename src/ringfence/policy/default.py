"""The default policy without a model library, for `Sandbox()` and the command line's fast path.

Guards against paying for what nobody asked: reading a policy takes pydantic, the default needs no reading. A test
holds that `Policy().compile()` and `DEFAULT.compile()` are equal. Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfence.engines.base import CellSpec
    from ringfence.policy.model import Policy


class DefaultPolicy:
    """`Policy()`, already compiled: no network, no host files, the default limits."""

    name = "default"

    def compile(self, **fields: Any) -> CellSpec:
        """As `Policy.compile`."""
        from ringfence.engines.base import CellSpec

        return CellSpec(**fields)

    def model(self) -> Policy:
        """The same as a `Policy`, which can be changed and explained. Imports pydantic."""
        from ringfence.policy.model import Policy

        return Policy()

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = DefaultPolicy()
