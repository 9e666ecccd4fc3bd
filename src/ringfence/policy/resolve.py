"""From what a caller passes as `policy=` to something that compiles, without pydantic for the default.

Guards against the price of a model library on the common path: `None`, `"default"`, `"untrusted"` and `DEFAULT`
need none. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringfence.errors import InvalidArgumentError
from ringfence.policy.default import DEFAULT, DefaultPolicy

if TYPE_CHECKING:
    from ringfence.policy.loading import Source
    from ringfence.policy.model import Policy, Workspace


def resolve(source: Source = None) -> Policy | DefaultPolicy:
    """The policy that `source` means (see `load`); `DEFAULT` itself where nothing but the default is asked for.

    Both answers have `.name` and `.compile(**fields)`.

    Raises:
        PolicyError: it cannot be read or makes no sense.
    """
    if source is None or isinstance(source, DefaultPolicy) or source in ("default", "untrusted"):
        return DEFAULT
    from ringfence.policy.loading import load

    return load(source)


def workspace_fields(workspace: Workspace | Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any] | None:
    """The workspace of a specification, from what a caller passes as `workspace=`: a directory means `overlay`.

    None where the mode is `none`. Raises InvalidArgumentError, and PolicyError for fields that make no sense.
    """
    if isinstance(workspace, str | os.PathLike):
        source = os.fspath(workspace)
        if not isinstance(source, str) or not source or "\0" in source:
            raise InvalidArgumentError(f"{source!r} cannot be a workspace", hint="pass the path of a directory, as text")
        return {"source": source, "mode": "overlay"}
    from pydantic import ValidationError

    from ringfence.policy.model import Workspace, policy_error

    if isinstance(workspace, Mapping):
        try:
            workspace = Workspace(**workspace)
        except ValidationError as problem:
            raise policy_error(problem) from None
    if not isinstance(workspace, Workspace):
        raise InvalidArgumentError(
            f"a workspace cannot be {type(workspace).__name__}", hint='pass a directory, or Workspace(source=".", mode="ro")'
        )
    return None if workspace.mode == "none" else workspace.model_dump()
