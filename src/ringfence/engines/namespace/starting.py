"""Start a launcher process, from nothing but an interpreter and one socket.

Guards against a launcher that inherits what it must not: a built environment, three descriptors on /dev/null and the
socket at 3, the standard library and ringfence to import from. By exec (posix_spawn, safe in a threaded program), or,
for a command line that is still alone and clean, by fork: see docs/decisions/0011. Imports next to nothing, so that a
program that runs once can start its launcher first and import the rest while that comes up.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What the owner's environment may lend a launcher and its zygotes: settings that work around processor bugs.
PASSED_ENVIRONMENT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "RINGFENCE_DEBUG")


def start_launcher(executable: str, descriptor: int) -> int:
    """Execute the launcher with `descriptor` as its end of the owner's socket. Returns its pid. Raises OSError."""
    package_parent = _package_parent()
    # posix_spawn cannot change directory; the launcher does it first thing.
    code = (
        f"import gc; gc.disable(); import os; os.chdir('/'); import sys; sys.path.append({package_parent!r}); "
        "from ringfence.engines.namespace.launcher import main; main(3)"
    )
    environment = _environment()
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


def fork_launcher(descriptor: int) -> int:
    """The same by fork: 12 ms less. Returns the launcher's pid, or 0 where this process is none to fork.

    Precondition: nothing here is worth keeping in the child, which never returns. Raises OSError.
    """
    stdlib = _standard_library()
    if not stdlib or len(os.listdir("/proc/self/task")) != 1:
        return 0
    debug = "RINGFENCE_DEBUG" in os.environ and _is_open(2)
    pid = os.fork()
    if pid:
        return pid
    try:
        isolate(stdlib)
        environment = _environment()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir("/")
        os.dup2(descriptor, 3, inheritable=False)
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1) if debug else (0, 1, 2):
            os.dup2(null, number)
        os.closerange(4, _highest_descriptor() + 1)
        import _signal  # pyright: ignore[reportMissingImports]

        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        from ringfence.engines.namespace.launcher import main

        main(3)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nothing may unwind into the command line
        if debug:
            import traceback

            traceback.print_exc()
    finally:
        os._exit(70)


def _standard_library() -> list[str]:
    """Where `python -I -S` would import from; [] where this process has imported one of its modules from elsewhere."""
    home = os.path.dirname(os.__file__)
    places = [each for each in sys.path if each in (home, home + "/lib-dynload")]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in sys.stdlib_module_names and not file.startswith(home + "/"):
            return []
    return places if home in places else []


def isolate(stdlib: list[str]) -> None:
    """Leave this process nothing to call or to import from but the standard library and ringfence."""
    ours = "ringfence", "__main__"
    for name in list(sys.modules):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ours:
            del sys.modules[name]
    sys.path[:] = [*stdlib, _package_parent()]
    # The finders and hooks that the interpreter itself began with.
    sys.meta_path[:] = [each for each in sys.meta_path if _module_of(each).startswith("_frozen_importlib")]
    sys.path_hooks[:] = [each for each in sys.path_hooks if _module_of(each).startswith(("_frozen_importlib", "zipimport"))]
    sys.path_importer_cache.clear()


def _module_of(item: Any) -> str:
    return str(getattr(item, "__module__", ""))


def _package_parent() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _environment() -> dict[str, str]:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    for name in (*PASSED_ENVIRONMENT, "XDG_RUNTIME_DIR"):
        if os.environ.get(name) is not None:
            environment[name] = os.environ[name]
    return environment


def _highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False
