"""Which files of a workspace with `mode: rw` must stay as they are: those that the host acts on without being asked.

Guards against an escape by waiting (see policy/protected.py). What exists is found here, by the owner, below the one
descriptor that is lent, and made read-only by the kernel inside (guest/lent.py). The kernel can hold a name only
where something is: whoever chooses `rw` has to say that he knows (`accept_new_protected`). A link, or a file that has
a second name, cannot be held by a mount, so it is refused here unless it is named as writable.
"""

from __future__ import annotations

import os
import stat

from ringfence.errors import EnforcementError
from ringfence.policy.protected import protection

MOST = 200  # protected names of one workspace: each is a mount
_DEEPEST = 200


def protected_paths(descriptor: int, writable: tuple[str, ...] = ()) -> list[str]:
    """The protected names below the directory, parents before children, each a path relative to it.

    `writable` are paths that the user named: they, and what lies below them, are left out. Reads every directory, so
    it takes time in proportion to the tree. Raises EnforcementError where one cannot be held.
    """
    found: list[str] = []
    named = [path.strip("/") for path in writable]
    waiting = [("", os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor))]
    try:
        while waiting:
            path, current = waiting.pop()
            try:
                with os.scandir(current) as entries:
                    listed = sorted(entries, key=lambda entry: entry.name)
                for entry in listed:
                    below = f"{path}/{entry.name}" if path else entry.name
                    if any(below == each or below.startswith(each + "/") for each in named):
                        continue
                    state = entry.stat(follow_symlinks=False)
                    row = protection(below, _kind(state.st_mode))
                    if row is not None:
                        _check(below, state, row.reason)
                        if any(each.startswith(below + "/") for each in named):
                            raise EnforcementError(
                                f"{below} is held as a whole, and something below it is named as writable",
                                hint=f"name {below} itself", primitive="protected names",
                            )  # fmt: skip
                        found.append(below)
                    elif stat.S_ISDIR(state.st_mode) and below.count("/") < _DEEPEST:
                        waiting.append((below, _enter(entry.name, current)))
            finally:
                os.close(current)
    except OSError as error:
        raise EnforcementError(
            f"a directory of the workspace cannot be read, and what is protected in it not be held: {error}",
            hint="use `mode: overlay`, or make every directory readable", primitive="protected names",
        ) from None  # fmt: skip
    finally:
        for _, current in waiting:
            os.close(current)
    if len(found) > MOST:
        raise EnforcementError(
            f"{len(found)} protected files and directories lie in the workspace; {MOST} can be held",
            hint="use `mode: overlay`, or lend a directory with fewer repositories in it", primitive="protected names",
        )  # fmt: skip
    return sorted(found)


def _enter(name: str, parent: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def _kind(mode: int) -> str:
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "other"


def _check(path: str, state: os.stat_result, reason: str) -> None:
    why = ""
    if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
        why = "is a link or something special, over which nothing can be mounted"
    elif stat.S_ISREG(state.st_mode) and state.st_nlink > 1:
        why = "has a second name, by which it could be written"
    if why:
        raise EnforcementError(
            f"{path} is protected ({reason}) and {why}",
            hint="use `mode: overlay`, or name it in `writable` of the workspace", primitive="protected names",
        )  # fmt: skip
