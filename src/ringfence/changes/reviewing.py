"""One sandbox's review: capture its workspace, apply what was captured, or give it up.

Guards three things across time: that changes go to the directory that the sandbox was started with and no other, that
what an earlier `apply` wrote is not taken for somebody else's edit, and that nothing is applied after it was
discarded. Reading and writing files happens on threads, so that an event loop goes on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ringfence.changes import applying
from ringfence.changes.collecting import collect
from ringfence.changes.model import Applied, Change, Changes, shown
from ringfence.changes.places import Seen, Tree
from ringfence.errors import ApplyConflictError, CaptureError, InvalidArgumentError
from ringfence.node.capture import Bounds, read_capture
from ringfence.stream.waiting import Pending, wait_for

__all__ = ["PATIENCE", "Review"]

PATIENCE = 620.0  # seconds one capture may take; the process that writes it gives up after 600
SLACK = 64 << 20  # bytes: what the sandbox's disk holds is counted in pages, its files in bytes
T = TypeVar("T")


class Review:
    """The changes of one sandbox with an overlay workspace. `source` is the host's directory."""

    def __init__(self, source: str, started_at: float, disk: int) -> None:
        self.source = source
        self._started_ns = int(started_at * 1e9)
        # A sparse file is larger than the disk it lies on; what is far beyond it is a bomb.
        self._bounds = Bounds(content=4 * disk + SLACK)
        self._written: dict[bytes, Seen] = {}
        self._captured: weakref.WeakSet[Changes] = weakref.WeakSet()
        self._discarded = False
        state = os.stat(source)
        self._identity = (state.st_dev, state.st_ino)

    async def capture(self, ask: Callable[[int], Pending[dict[str, Any]]]) -> Changes:
        """Capture: `ask(descriptor)` makes the engine write to a pipe, and holds `frozen`. Raises CaptureError."""
        self._check("captured")
        receive, send = os.pipe2(os.O_CLOEXEC)
        try:
            done = ask(send)
        except BaseException:
            os.close(receive)
            raise
        finally:
            os.close(send)
        reading = on_thread(lambda: self.read(receive), daemon=True)
        try:
            changes = await wait_for(reading, PATIENCE)
        except CaptureError:
            await wait_for(done, PATIENCE)  # where the engine refused, it says why; an early end does not
            raise
        changes.frozen = bool((await wait_for(done, PATIENCE)).get("frozen"))
        return changes

    def read(self, descriptor: int) -> Changes:
        """What a capture on `descriptor` says, which is closed. Blocks. Raises CaptureError, OSError."""
        with os.fdopen(descriptor, "rb") as stream, self._tree() as tree:
            changes = collect(
                read_capture(stream, self._bounds), tree, self.source, started_ns=self._started_ns, written=self._written
            )
        self._captured.add(changes)
        return changes

    async def apply(self, changes: Changes, paths: Iterable[applying.Path | Change] | None) -> Applied:
        """See `Sandbox.apply`."""
        self._check("applied")
        if not isinstance(changes, Changes):
            raise InvalidArgumentError(
                f"apply takes what sandbox.changes() returned, not {type(changes).__name__}", hint="capture them first"
            )
        # Not a daemon: a program that ends while this goes on waits for it.
        return await wait_for(on_thread(lambda: self.write(changes, paths)), None)

    def write(self, changes: Changes, paths: Iterable[applying.Path | Change] | None) -> Applied:
        """Apply, and remember what was written. Blocks."""
        with self._tree() as tree:
            return applying.apply(changes, tree, paths, self._written)

    def discard(self) -> None:
        """Give up what was changed: nothing of it can be captured or applied from now on. Idempotent."""
        self._discarded = True
        for changes in list(self._captured):
            changes.close()

    def _check(self, what: str) -> None:
        if self._discarded:
            raise InvalidArgumentError(
                f"the changes of this sandbox were discarded, so they cannot be {what}", hint="start another sandbox"
            )

    def _tree(self) -> Tree:
        try:
            tree = Tree.open(self.source)
        except OSError as error:
            raise ApplyConflictError(
                f"the workspace {shown(self.source)} cannot be opened: {error.strerror}", hint="was it moved or removed?"
            ) from None
        state = os.fstat(tree.descriptor)
        if (state.st_dev, state.st_ino) != self._identity:
            tree.close()
            raise ApplyConflictError(
                f"{shown(self.source)} is not the directory that the sandbox was started with",
                hint="it was moved or replaced meanwhile; start another sandbox on it",
            )
        return tree


def on_thread(work: Callable[[], T], *, daemon: bool = False) -> Pending[T]:
    """Run `work` on a thread of its own; the Pending holds what it returns or raises."""
    pending: Pending[T] = Pending()

    def run() -> None:
        try:
            pending.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            pending.set_exception(error)

    threading.Thread(target=run, name="ringfence-changes", daemon=daemon).start()
    return pending
