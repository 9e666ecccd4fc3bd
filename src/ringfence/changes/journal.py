"""All or nothing, also across a crash: what `apply` is about to do, written down before it does it.

Guards a half-applied review. The journal lies in a private directory of the user's, never in the workspace, where a
sandbox could plant one. New files and those they replace wait in one staging directory in the workspace, since only
within a file system is a rename one step. Until the journal says `committed`, whoever finds it (the next apply, or
`ringfence sweep`) undoes what was done, judging by what is where; afterwards only rubbish is left to remove. Each undo
can itself be cut short and repeated. A file that somebody edited after the crash is left as it is, and said.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ringfence.changes.places import Seen, Tree, names_in
from ringfence.linux import renames
from ringfence.node import cache

__all__ = ["Journal", "Recovered", "Step", "end", "leftovers", "move", "recover", "recover_in_turn", "sync", "turn"]

STAGING = ".ringfence-apply-"
_UNFLAGGED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass
class Step:
    """One change to a name, which is done or not done, never half.

    `put`: staged entry n takes a name that is free. `swap`: it takes the place of what is there, which becomes the
    staged one. `take`: what is there becomes staged entry o. `mode`: the bits of a directory. `identity` are inode,
    size and modification time of the staged entry before it is used.
    """

    do: str
    path: str
    number: int = 0
    identity: tuple[int, int, int] = (0, 0, 0)
    old_mode: int = 0
    new_mode: int = 0

    @property
    def raw_path(self) -> bytes:
        return os.fsencode(self.path)

    @property
    def new(self) -> bytes:
        return b"n%d" % self.number

    @property
    def old(self) -> bytes:
        return b"o%d" % self.number


@dataclass
class Journal:
    """One apply: where, from which staging directory, which steps, how far."""

    workspace: str
    device: int
    inode: int
    staging: str
    state: str = "staging"
    steps: list[Step] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    """Deleted directories, which are removed when all else is done; deepest first."""

    def write(self, state: str) -> None:
        """Make this the journal on disk. Raises OSError."""
        self.state = state
        target = os.path.join(_directory(), self.staging + ".json")
        temporary = f"{target}.new"
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_directory(os.path.dirname(target))

    def forget(self) -> None:
        """Remove it from disk."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(_directory(), self.staging + ".json"))

    @classmethod
    def read(cls, path: str) -> Journal:
        """Raises OSError, ValueError, TypeError or KeyError for what is none."""
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            document: dict[str, Any] = json.load(file)
        steps = [Step(**{**step, "identity": tuple(step["identity"])}) for step in document.pop("steps")]
        return cls(**document, steps=steps)


@dataclass(frozen=True)
class Recovered:
    """What became of an apply that was cut short. `kept` says what could not be put back, and where it is."""

    workspace: str
    outcome: str
    kept: tuple[str, ...] = ()


_thread_lock = threading.RLock()


def _after_fork() -> None:
    global _thread_lock
    _thread_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def turn() -> Iterator[None]:
    """One apply or recovery at a time for each user, so that every journal on disk is one of a process that is gone.

    A POSIX lock (fcntl(2)): the kernel drops it with its process, and a forked child does not hold it.
    """
    with _thread_lock:
        descriptor = os.open(os.path.join(_directory(), "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def leftovers() -> list[str]:
    """Workspaces whose last apply was cut short, as far as this user made it."""
    found: list[str] = []
    for path in _journals():
        with suppress(OSError, ValueError, TypeError, KeyError):
            found.append(Journal.read(path).workspace)
    return found


def recover(identity: tuple[int, int] | None = None) -> list[Recovered]:
    """Undo, or finish, what was cut short: everywhere, or in the workspace with that device and inode. Idempotent."""
    with turn():
        return recover_in_turn(identity)


def recover_in_turn(identity: tuple[int, int] | None = None) -> list[Recovered]:
    """`recover` for who has the turn already: to take it twice would drop it (fcntl(2): any close does)."""
    done: list[Recovered] = []
    for name in os.listdir(_directory()):
        if name.endswith(".new"):
            os.unlink(os.path.join(_directory(), name))  # of a process that died while it wrote it
    for path in _journals():
        try:
            journal = Journal.read(path)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if identity is None or identity == (journal.device, journal.inode):
            done.append(_recover(journal))
    return done


def _recover(journal: Journal) -> Recovered:
    try:
        tree = Tree.open(journal.workspace)
    except OSError as error:
        return Recovered(journal.workspace, f"left alone: the directory cannot be opened: {error.strerror}")
    with tree:
        state = os.fstat(tree.descriptor)
        if (state.st_dev, state.st_ino) != (journal.device, journal.inode):
            return Recovered(journal.workspace, "left alone: another directory lies there now")
        return end(journal, tree)


def end(journal: Journal, tree: Tree) -> Recovered:
    """Bring a journal to its end, backward or, when it was committed, forward. Raises OSError."""
    committed = journal.state == "committed"
    kept: list[str] = []
    with _staging(journal, tree) as staging:
        if staging is not None:
            if journal.state == "prepared":
                for step in reversed(journal.steps):
                    kept += _undo(step, tree, staging, os.fsdecode(journal.staging))
                if not kept:
                    journal.write("undone")  # what is staged is rubbish from here on, and judging by it would mislead
            if not kept:
                _empty(staging)
    if committed:
        kept += _remove_directories(journal, tree)
    elif kept:
        # The steps are undone as far as they can be; what is kept must not be touched by another round.
        journal.forget()
        return Recovered(journal.workspace, "rolled back, except for what was edited since", tuple(kept))
    with suppress(FileNotFoundError):
        os.rmdir(journal.staging, dir_fd=tree.descriptor)
    sync(tree)
    journal.forget()
    return Recovered(journal.workspace, "completed" if committed else "rolled back", tuple(kept))


def _undo(step: Step, tree: Tree, staging: int, where: str) -> list[str]:
    """Put one name back; what cannot be is described in the answer."""
    path = step.raw_path
    try:
        if step.do == "mode":
            tree.set_mode(path, step.old_mode, only_from=step.new_mode)
            return []
        with tree.parent(path) as (directory, name):
            new, old, here = (_look(staging, step.new), _look(staging, step.old), _look(directory, name))
            if step.do == "put" and new is None:
                if here is None or not _is(here, step):
                    return [f"{step.path}: it was changed since, and stays"] if here is not None else []
                if here.kind == "directory":
                    os.rmdir(name, dir_fd=directory)  # fails where somebody put something into it since
                else:
                    move(name, directory, step.new, staging)
            elif step.do == "swap" and new is not None and new.inode != step.identity[0]:
                if here is None or not _is(here, step):
                    return [f"{step.path}: it was changed since, and stays; what was there is {where}/{step.new.decode()}"]
                if here.kind == "directory" and _names(directory, name):
                    return [f"{step.path}: something came into it since; what was there is {where}/{step.new.decode()}"]
                renames.exchange(step.new, staging, name, directory)
            elif step.do == "take" and old is not None:
                if here is not None:
                    return [f"{step.path}: there is a new one; what was there is {where}/{step.old.decode()}"]
                move(step.old, staging, name, directory)
    except OSError as error:
        if step.do == "mode":
            return []
        what = step.old if step.do == "take" else step.new
        if step.do == "put":
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return []  # the directory that it lay in is gone already
            return [f"{step.path}: it stays: {error.strerror}"] if _look(staging, what) is None else []
        return [f"{step.path}: {error.strerror}; see {where}/{what.decode()}"] if _look(staging, what) is not None else []
    return []


def _names(directory: int, name: bytes) -> list[bytes]:
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        return names_in(descriptor)
    finally:
        os.close(descriptor)


def _is(seen: Seen, step: Step) -> bool:
    """Whether this is what the step put there, not written to since. A directory's times change with what is in it."""
    inode, size, mtime_ns = step.identity
    return seen.inode == inode and (seen.kind == "directory" or (seen.size, seen.mtime_ns) == (size, mtime_ns))


def move(name: bytes, directory: int, target: bytes, target_directory: int) -> None:
    """Rename to a name that is free. Raises FileExistsError. Where the file system cannot do that in one step, a look
    comes before it."""
    try:
        renames.rename_new(name, directory, target, target_directory)
    except OSError as error:
        if error.errno not in _UNFLAGGED:
            raise
        if _look(target_directory, target) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(name, target, src_dir_fd=directory, dst_dir_fd=target_directory)


def _look(directory: int, name: bytes) -> Seen | None:
    try:
        return Seen.of(os.stat(name, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return None


@contextmanager
def _staging(journal: Journal, tree: Tree) -> Iterator[int | None]:
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(journal.staging, flags, dir_fd=tree.descriptor)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _empty(staging: int) -> None:
    """Remove what is staged: files, links, and directories that are empty."""
    for name in os.listdir(staging):
        state = os.stat(name, dir_fd=staging, follow_symlinks=False)
        (os.rmdir if stat.S_ISDIR(state.st_mode) else os.unlink)(name, dir_fd=staging)


def _remove_directories(journal: Journal, tree: Tree) -> list[str]:
    kept: list[str] = []
    for path in journal.emptied:
        try:
            with tree.parent(os.fsencode(path)) as (directory, name):
                os.rmdir(name, dir_fd=directory)
        except FileNotFoundError:
            continue  # an earlier recovery did it
        except OSError:
            kept.append(path)
    return kept


def sync(tree: Tree) -> None:
    """Bring the workspace's file system to disk (syncfs(2)), so that the journal's next word is true after a power cut."""
    from ringfence.linux.syscalls import libc

    libc.syncfs(tree.descriptor)


def _directory() -> str:
    path = os.path.join(cache.state_directory(), "applies")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def _journals() -> Sequence[str]:
    directory = _directory()
    return [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if name.endswith(".json")]


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
