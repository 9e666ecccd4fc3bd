"""Start a launcher process: by exec, from nothing but an interpreter and one socket.

Guards against a launcher that inherits what it must not: posix_spawn (safe in a threaded program), a built
environment, three descriptors on /dev/null and the socket at 3. Imports nothing but `os`, so that a program that
runs once can start its launcher first and import the rest while that comes up.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What the owner's environment may lend a launcher and its zygotes: settings that work around processor bugs.
PASSED_ENVIRONMENT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "RINGFENCE_DEBUG")


def start_launcher(executable: str, descriptor: int) -> int:
    """Execute the launcher with `descriptor` as its end of the owner's socket. Returns its pid. Raises OSError."""
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    # posix_spawn cannot change directory; the launcher does it first thing.
    code = (
        f"import os; os.chdir('/'); import sys; sys.path.append({package_parent!r}); "
        "from ringfence.engines.namespace.launcher import main; main(3)"
    )
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    environment.update({name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ})
    if os.environ.get("XDG_RUNTIME_DIR"):
        environment["XDG_RUNTIME_DIR"] = os.environ["XDG_RUNTIME_DIR"]
    debug = "RINGFENCE_DEBUG" in os.environ and _is_open(2)
    # Numbers below 4 could be overwritten by the actions before they are used.
    source, spare = descriptor, []
    try:
        while source < 4:
            source = os.dup(source)
            spare.append(source)
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 1)]
        if not debug:
            actions.append((os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_RDWR, 0))
        actions.append((os.POSIX_SPAWN_DUP2, source, 3))
        return os.posix_spawn(
            executable, [executable, "-I", "-S", "-c", code], environment,
            file_actions=actions, setsigmask=[], setsigdef=[13],
        )  # fmt: skip
    finally:
        for each in spare:
            os.close(each)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False
