"""Find and remove what earlier lives left behind.

A launcher removes everything it made, and the kernel ends its sandboxes when it is killed; what can be left is
control groups of owners that are gone, and half-built trees in the cache. Guards against the sweep itself
doing harm: only groups whose owner is certainly dead (same pid namespace, other start time) are touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringfence.linux import cgroups


@dataclass(frozen=True)
class Sweep:
    """What was found (or, with `dry_run`, would be removed): paths of groups and of cached trees."""

    groups: list[str] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)


def sweep(*, dry_run: bool = False, stale_trees: bool = False) -> Sweep:
    """Remove leftovers of dead owners; with `stale_trees` also cached environments that nothing uses.

    Idempotent. Raises EngineError when the cache cannot be read.
    """
    hierarchy = cgroups.detect()
    if dry_run:
        return Sweep(groups=[str(path) for path in cgroups.leftovers(hierarchy, everywhere=True)])
    groups = [str(path) for path in cgroups.sweep(hierarchy, everywhere=True)]
    trees: list[str] = []
    if stale_trees:
        from ringfence.node import cache

        trees = cache.prune()
    return Sweep(groups=groups, trees=trees)
