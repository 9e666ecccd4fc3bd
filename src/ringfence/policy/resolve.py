"""From what a caller passes as `policy=` to something that compiles, without pydantic for the default.

Guards against the price of a model library on the common path: `None`, `"default"`, `"untrusted"` and `DEFAULT`
need none. Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.policy.default import DEFAULT, DefaultPolicy

if TYPE_CHECKING:
    from ringfence.policy.loading import Source
    from ringfence.policy.model import Policy


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
