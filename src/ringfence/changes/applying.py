"""Writing captured changes to the host: exactly the captured bytes, all that was chosen, or nothing.

Guards the host's directory against the sandbox and against ourselves. Only files, directories and links are made;
names are reached without following one link; modes are masked to 0777 and no extended attribute is made; what needs a
name of its own (see `policy.protected`) is refused without one; what the host has must still be what the reviewer's
diff was made against, also in the instant of the rename; and a failure at any step undoes those before it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass

from ringfence.changes import journal as journals
from ringfence.changes.journal import Journal, Step, move
from ringfence.changes.model import Applied, Change, Changes, shown
from ringfence.changes.places import Seen, Tree, names_in
from ringfence.errors import ApplyConflictError, ApplyRefusedError, InvalidArgumentError
from ringfence.linux import renames

__all__ = ["apply"]

Path = str | bytes | os.PathLike[str]
_SHOWN = 10  # paths that a refusal names


def apply(
    changes: Changes,
    tree: Tree,
    paths: Iterable[Path | Change] | None = None,
    written: MutableMapping[bytes, Seen] | None = None,
) -> Applied:
    """Write `changes`, or those at `paths`, to the directory they were captured of.

    `written` is told what every path looks like afterwards, for the next `collect`.
    Raises ApplyRefusedError, ApplyConflictError, InvalidArgumentError, and EngineError where no journal can be kept.
    """
    if changes.closed:
        raise InvalidArgumentError("these changes are closed", hint="capture them again with sandbox.changes()")
    state = os.fstat(tree.descriptor)
    if changes.identity != (state.st_dev, state.st_ino):
        raise ApplyConflictError(
            f"{shown(changes.source)} is not the directory that the sandbox was started with",
            hint="it was moved or replaced meanwhile; start another sandbox on it",
        )
    chosen, above = _choose(changes, paths)
    with journals.turn():
        _recover_first(changes, tree)
        plan = _Plan(changes, tree, chosen, above)
        plan.check()
        return _carry_out(plan, {} if written is None else written)


def _recover_first(changes: Changes, tree: Tree) -> None:
    for outcome in journals.recover_in_turn(changes.identity):
        if outcome.kept:
            raise ApplyRefusedError(
                f"an earlier apply in {shown(changes.source)} was cut short, and not all of it could be undone: "
                + "; ".join(map(shown, outcome.kept)),
                hint="look at those files, then capture the changes again",
            )


# What is to be written ---------------------------------------------------------------------------------------


def _choose(changes: Changes, paths: Iterable[Path | Change] | None) -> tuple[list[Change], list[Change]]:
    """(the changes that `paths` names, the new directories that those need). Raises ApplyRefusedError."""
    named: set[str] = set()
    wanted: dict[str, Change] = {}
    if paths is None:
        wanted = {change.path: change for change in changes}
    elif isinstance(paths, (str, bytes, os.PathLike)):
        raise InvalidArgumentError("paths must be a list of paths or of changes", hint=f"write [{paths!r}]")
    else:
        for item in paths:
            for change, exactly in _matching(changes, item):
                wanted[change.path] = change
                if exactly:
                    named.add(change.path)
    found = list(wanted.values())
    _refuse(found, "impossible", ApplyRefusedError, "can never be applied", "leave them out: name the others in `paths`")
    _refuse(found, "conflict", ApplyConflictError, "changed on the host meanwhile",
            "leave them out, or start another sandbox on the directory as it is now")  # fmt: skip
    _refuse([change for change in found if change.path not in named], "held", ApplyRefusedError, "must be named to be applied",
            "look at each, then name it exactly in `paths`; `paths=changes.ordinary` leaves them out")  # fmt: skip
    above: dict[str, Change] = {}
    for change in found:
        if change.after is None:
            continue
        for path in map(os.fsdecode, _above(change.raw_path)):
            if path in changes and path not in wanted:
                directory = changes[path]
                if directory.after is not None and directory.after.kind == "directory" and directory.kind != "mode":
                    above[path] = directory
    return found, list(above.values())


def _matching(changes: Changes, item: Path | Change) -> list[tuple[Change, bool]]:
    if isinstance(item, Change):
        if item not in changes:
            raise InvalidArgumentError(f"{item} is not one of these changes", hint="pass changes of the same capture")
        return [(item, True)]
    path = os.path.normpath(os.fsdecode(item))
    if path.startswith(("/", "../")) or path == "..":
        raise InvalidArgumentError(f"{shown(path)!r} is not a path below the workspace", hint="paths are relative to it")
    below = "" if path == "." else path + "/"
    found = [
        (change, path in (change.path, change.old_path)) for change in changes
        if path in (change.path, change.old_path) or change.path.startswith(below)
    ]  # fmt: skip
    if not found:
        raise InvalidArgumentError(f"nothing changed at {shown(path)!r}", hint="`changes` lists what did")
    return found


def _refuse(found: list[Change], reason: str, error: type[ApplyRefusedError], what: str, hint: str) -> None:
    bad = [change for change in found if getattr(change, reason)]
    if bad:
        lines = [f"{change.label} ({getattr(change, reason)})" for change in bad[:_SHOWN]]
        more = f", and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        count = f"{len(bad)} change{'s' if len(bad) > 1 else ''}"
        raise error(f"{count} {what}: {', '.join(lines)}{more}", hint=hint, paths=tuple(change.path for change in bad))


@dataclass
class _Operation:
    """What becomes of one name: `put`, `swap`, `take`, `rmdir` or `mode`."""

    do: str
    path: bytes
    change: Change
    now: Seen | None = None
    """What the last look at the host showed there."""


class _Plan:
    """The operations of the chosen changes, in an order in which each is possible."""

    def __init__(self, changes: Changes, tree: Tree, chosen: list[Change], above: list[Change]) -> None:
        self.changes = changes
        self.tree = tree
        self.chosen = chosen
        operations: list[_Operation] = []
        for change in chosen:
            operations += self._operations(change, deletes=True)
        for change in above:
            operations += self._operations(change, deletes=False)
        # Deleted directories go last of all, when nothing has to be undone any more; those that lie in one which
        # becomes a file cannot wait so long.
        swapped = {each.path for each in operations if each.do == "swap"}
        for each in operations:
            if each.do == "rmdir" and any(above in swapped for above in _above(each.path)):
                each.do = "take"
        # Deletions first and deepest first; then what is new, parents first; modes when all is in its place.
        rank = {"take": 0, "rmdir": 1, "put": 2, "swap": 2, "mode": 3}
        operations.sort(key=lambda each: (rank[each.do], -each.path.count(b"/") if rank[each.do] < 2 else 0, each.path))
        self.operations = operations
        self.gone = {each.path for each in operations if each.do in ("take", "rmdir")}
        self.directories = {each.path for each in operations if each.do in ("put", "swap") and _makes_directory(each)}

    def _operations(self, change: Change, deletes: bool) -> list[_Operation]:
        before, after, path = change.before, change.after, change.raw_path
        if change.kind == "deleted":
            assert before is not None
            return [_Operation("rmdir" if before.kind == "directory" else "take", path, change)]
        if change.kind == "renamed":
            assert before is not None and change.old_path is not None
            made = [_Operation("put", path, change)]
            if deletes:
                made.append(_Operation("rmdir" if before.kind == "directory" else "take", os.fsencode(change.old_path), change))
            return made
        if change.kind == "mode" and after is not None and after.kind == "directory":
            return [_Operation("mode", path, change)]
        return [_Operation("put" if change.kind == "created" else "swap", path, change)]

    def check(self) -> None:
        """Compare the host with what the changes were made against. Raises ApplyConflictError, ApplyRefusedError."""
        for each in self.operations:
            now = each.now = self.tree.look(each.path)
            if each.do == "put":
                if now is not None:
                    raise _conflict(each.path, "it exists on the host now")
                self._check_parent(each.path)
                continue
            if now is None:
                raise _conflict(each.path, "it is gone from the host")
            if now != each.change.seen and not self._still_the_same(each, now):
                raise _conflict(each.path, "it is not what it was when the changes were captured")
            if now.kind == "directory" and each.do != "mode":
                self._check_emptied(each.path)

    def _check_parent(self, path: bytes) -> None:
        parent = path.rpartition(b"/")[0]
        if parent in self.directories:
            return
        seen = self.tree.look(parent) if parent else None
        if parent and (seen is None or seen.kind != "directory" or seen.device != self.tree.device):
            raise _conflict(path, "the directory that it lies in is gone, or is no directory")

    def _still_the_same(self, each: _Operation, now: Seen) -> bool:
        before = each.change.before
        if before is None or now.kind != before.kind or now.device != self.tree.device:
            return False
        if now.kind == "directory":
            return each.do != "mode" or now.mode & 0o777 == before.mode
        if now.kind == "link":
            return os.fsdecode(self.tree.read_link(each.path)) == before.target
        if now.mode & 0o777 != before.mode or now.size != before.size or before.sha256 is None:
            return False
        try:
            return self.tree.read(each.path, before.size)[1] == before.sha256
        except OSError:
            return False

    def _check_emptied(self, path: bytes) -> None:
        rest = [name for name in self.tree.names(path) if path + b"/" + name not in self.gone]
        if rest:
            names = ", ".join(shown(os.fsdecode(name)) for name in rest[:_SHOWN])
            raise ApplyConflictError(
                f"{shown(os.fsdecode(path))} would be deleted, and has in it what would not: {names}",
                hint="name those too, or leave the directory out", paths=(os.fsdecode(path),),
            )  # fmt: skip


def _above(path: bytes) -> Iterator[bytes]:
    while path := path.rpartition(b"/")[0]:
        yield path


def _makes_directory(each: _Operation) -> bool:
    return each.change.after is not None and each.change.after.kind == "directory"


def _conflict(path: bytes, why: str) -> ApplyConflictError:
    text = os.fsdecode(path)
    return ApplyConflictError(
        f"{shown(text)}: {why}", hint="nothing was written; capture the changes again, or leave it out", paths=(text,)
    )


# Writing it --------------------------------------------------------------------------------------------------


def _carry_out(plan: _Plan, written: MutableMapping[bytes, Seen]) -> Applied:
    tree = plan.tree
    device, inode = plan.changes.identity
    journal = Journal(os.path.abspath(plan.changes.source), device, inode, journals.STAGING + os.urandom(16).hex())
    journal.write("staging")
    try:
        os.mkdir(journal.staging, 0o700, dir_fd=tree.descriptor)
        staging = os.open(journal.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tree.descriptor)
        try:
            writer = _Writer(plan, journal, staging)
            writer.stage()
            journals.sync(tree)
            journal.write("prepared")
            for step in journal.steps:
                writer.carry_out(step)
        finally:
            os.close(staging)
        journals.sync(tree)
        journal.write("committed")
    except BaseException as error:
        _undo(journal, tree, error)
        raise
    kept = journals.end(journal, tree).kept
    for each in plan.operations:
        seen = tree.look(each.path)
        if seen is None:
            written.pop(each.path, None)
        else:
            written[each.path] = seen
    return Applied(tuple(plan.chosen), writer.size, kept)


def _undo(journal: Journal, tree: Tree, error: BaseException) -> None:
    try:
        outcome = journals.end(journal, tree)
    except OSError as problem:
        raise ApplyRefusedError(
            f"{_why(error)}; and what was done could not be undone: {_why(problem)}",
            hint="repair the cause, then run `ringfence sweep`, which undoes the rest",
        ) from error
    if outcome.kept:
        raise ApplyRefusedError(
            f"{_why(error)}; undone, except: {'; '.join(map(shown, outcome.kept))}", hint="look at those files"
        ) from error
    if isinstance(error, OSError):
        raise ApplyRefusedError(
            f"nothing was written: {_why(error)}", hint="the host refused a step, and those before it were undone"
        ) from error


def _why(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return shown(str(error))
    name = error.filename
    where = f"{shown(os.fsdecode(name) if isinstance(name, bytes) else str(name))}: " if name else ""
    return f"{where}{error.strerror or error}"


class _Writer:
    """Stages what is new, then takes one step after the other."""

    def __init__(self, plan: _Plan, journal: Journal, staging: int) -> None:
        self.plan = plan
        self.tree = plan.tree
        self.journal = journal
        self.staging = staging
        self.flags = renames.works_in(staging)
        self.expected: dict[int, Seen | None] = {}
        self.size = 0

    def stage(self) -> None:
        """Write everything new below the staging directory, and the steps that bring it to its place."""
        modes: list[Step] = []
        for each in self.plan.operations:
            after = each.change.after
            if each.do == "rmdir":
                self.journal.emptied.append(os.fsdecode(each.path))
            elif each.do == "take":
                self._add(Step("take", os.fsdecode(each.path)), each.now)
            elif each.do == "mode":
                assert after is not None and each.now is not None
                old = each.now.mode
                modes.append(Step("mode", os.fsdecode(each.path), old_mode=old, new_mode=old & 0o7000 | after.mode))
            else:
                if each.do == "swap" and not self.flags:
                    # This file system cannot swap two names in one step: for a moment there will be none.
                    self._add(Step("take", os.fsdecode(each.path)), each.now)
                swap = each.do == "swap" and self.flags
                step = self._add(Step("swap" if swap else "put", os.fsdecode(each.path)), each.now if swap else None)
                step.identity = self._make(each, step.new)
                if _makes_directory(each):
                    assert after is not None
                    # Open to its owner until what belongs in it is there.
                    modes.append(Step("mode", os.fsdecode(each.path), old_mode=0o700, new_mode=after.mode))
        # Deepest first: a directory that loses its owner's right to search hides those below it.
        for step in sorted(modes, key=lambda step: -step.path.count("/")):
            self._add(step, None)

    def _add(self, step: Step, expected: Seen | None) -> Step:
        step.number = len(self.journal.steps)
        self.journal.steps.append(step)
        self.expected[step.number] = expected
        return step

    def _make(self, each: _Operation, name: bytes) -> tuple[int, int, int]:
        after, staging = each.change.after, self.staging
        assert after is not None
        owner = self._owner(each)
        if after.kind == "directory":
            os.mkdir(name, 0o700, dir_fd=staging)
        elif after.kind == "link":
            os.symlink(os.fsencode(after.target), name, dir_fd=staging)
        else:
            self._write(each.change, name, owner)
        if after.kind != "file":
            with suppress(PermissionError):
                os.chown(name, *owner, dir_fd=staging, follow_symlinks=False)
        state = os.stat(name, dir_fd=staging, follow_symlinks=False)
        return state.st_ino, state.st_size, state.st_mtime_ns

    def _write(self, change: Change, name: bytes, owner: tuple[int, int]) -> None:
        assert change.after is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.staging)
        try:
            digest = hashlib.sha256()
            for piece in self.plan.changes.pieces(change):
                digest.update(piece)
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
            if digest.hexdigest() != change.after.sha256:
                raise ApplyRefusedError("the captured contents are damaged", hint="capture the changes again")
            with suppress(PermissionError):
                os.chown(descriptor, *owner)
            os.fchmod(descriptor, change.after.mode & 0o777)
        finally:
            os.close(descriptor)
        self.size += change.after.size

    def _owner(self, each: _Operation) -> tuple[int, int]:
        """(uid, gid): as root those of what is replaced, or of the directory above; else only a group that is inherited."""
        seen = each.now
        path = each.path
        while seen is None:
            path = path.rpartition(b"/")[0]
            seen = self.tree.look(path) if path else Seen.of(os.fstat(self.tree.descriptor))
        if os.geteuid() == 0:
            return seen.uid, seen.gid
        return -1, seen.gid if each.do == "swap" or seen.mode & stat.S_ISGID else -1

    def carry_out(self, step: Step) -> None:
        """One step. Raises ApplyConflictError where the host was quicker, OSError where it refuses."""
        if step.do == "mode":
            self.tree.set_mode(step.raw_path, step.new_mode)
            return
        try:
            with self.tree.parent(step.raw_path) as (directory, name):
                if step.do == "put":
                    move(step.new, self.staging, name, directory)
                    return
                if step.do == "swap":
                    renames.exchange(step.new, self.staging, name, directory)
                else:
                    move(name, directory, step.old, self.staging)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise _conflict(step.raw_path, f"it changed on the host in this moment ({error.strerror})") from error
        except OSError as error:
            raise OSError(error.errno, error.strerror, step.path) from error
        # What came out must be what was looked at: nobody's work of the last instant may vanish with it.
        came = Seen.of(os.stat(step.new if step.do == "swap" else step.old, dir_fd=self.staging, follow_symlinks=False))
        expected = self.expected[step.number]
        if expected is not None and came.kind != "directory" and not came.same_content(expected):
            raise _conflict(step.raw_path, "it changed on the host in this moment")
        if came.kind == "directory":
            self._must_be_empty(step)

    def _must_be_empty(self, step: Step) -> None:
        name = step.new if step.do == "swap" else step.old
        descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.staging)
        try:
            if names_in(descriptor):
                raise _conflict(step.raw_path, "something came into it on the host in this moment")
        finally:
            os.close(descriptor)
