"""The cache of read-only directories that sandboxes mount: where it lies, who may write it, how it changes.

Guards against four things. A *planted* tree: what lies here becomes the interpreter of a sandbox's agent, so a
cache that somebody else owns or may write is refused. A *half* tree: a directory is built under a private name
and renamed when complete, so a crash leaves rubbish, never a shorter library. A *race*: builders of one kind
take turns under a lock. An *unreadable* tree: a sandbox reads it under other uids, so modes are set explicitly,
whatever the umask; the cache's own directory stays 0700 because the launcher opens trees by descriptor.

Layout: `CACHE/KIND/KEY/` is a published tree, `CACHE/KIND/.index-*` remembers which key belongs to unchanged
sources (one small file, compared by `stat` alone, so that a one-shot command line pays well under 1 ms).

Standard library only, and little of it: `hashlib`, `pathlib` and `json` cost more than a whole look-up.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BUILDING, INDEX, LOCK, REMOVING = ".building-", ".index-", ".lock", ".removing-"


def cache_directory() -> str:
    """The cache's directory, created with mode 0700 when absent.

    `$RINGFENCE_CACHE`, else `/var/cache/ringfence` for root, else `$XDG_CACHE_HOME/ringfence` or
    `~/.cache/ringfence` (XDG base directory specification: a relative value is ignored).

    Raises:
        EngineError: it cannot be made, or someone else owns it or may write it.
    """
    return _owned(_location(), "cache", "RINGFENCE_CACHE")


def state_directory() -> str:
    """The directory of what must survive a crash and a cleaned cache, created with mode 0700 when absent.

    `$RINGFENCE_STATE`, else `/var/lib/ringfence` for root, else `$XDG_STATE_HOME/ringfence` or
    `~/.local/state/ringfence`.

    Raises:
        EngineError: it cannot be made, or someone else owns it or may write it.
    """
    return _owned(_place("RINGFENCE_STATE", "/var/lib", "XDG_STATE_HOME", ".local/state"), "state", "RINGFENCE_STATE")


def _owned(path: str, what: str, variable: str) -> str:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        state = os.lstat(path)
    except OSError as problem:
        raise _engine_error(
            f"cannot create the {what} directory {path}: {problem.strerror}",
            f"set {variable} to a directory of your own",
        ) from None
    if not stat.S_ISDIR(state.st_mode):
        raise _engine_error(f"the {what} {path} is not a directory", f"set {variable} to a directory of your own")
    if state.st_uid != os.geteuid():
        raise _engine_error(
            f"the {what} {path} belongs to uid {state.st_uid}, not to you (uid {os.geteuid()})",
            f"remove it, or set {variable} to a directory of your own",
        )
    if state.st_mode & 0o022:
        raise _engine_error(
            f"the {what} {path} may be written by others (mode {stat.S_IMODE(state.st_mode):04o})",
            f"if you trust what is in it: chmod 700 {path}; else remove it",
        )
    return path


def _location() -> str:
    return _place("RINGFENCE_CACHE", "/var/cache", "XDG_CACHE_HOME", ".cache")


def _place(variable: str, of_root: str, base_variable: str, below_home: str) -> str:
    environment = os.environ
    if chosen := environment.get(variable):
        return os.path.abspath(chosen)
    if os.geteuid() == 0:
        return f"{of_root}/ringfence"
    base = environment.get(base_variable, "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise _engine_error("this user has no home directory for it", f"set {variable}")
        base = os.path.join(home, below_home)
    return os.path.join(base, "ringfence")


def recall(kind: str, identity: str) -> str | None:
    """The published tree remembered for `identity`, if every source it was built from is unchanged.

    Unchanged means: same size and modification time (ns) of each watched path. Watched directories make
    added and removed files visible.
    """
    directory = os.path.join(cache_directory(), kind)
    try:
        with open(_index_path(directory, identity), encoding="utf-8", errors="surrogateescape") as file:
            key, identity_line, *watched = file.read().split("\n")
    except (OSError, ValueError):
        return None
    if identity_line != repr(identity) or not _unchanged(watched):
        return None
    tree = os.path.join(directory, key)
    return tree if os.path.isdir(tree) else None


def fingerprints(paths: Iterable[str]) -> list[str]:
    """What `remember` stores of the sources. Take them before the sources are read, so that a change made
    meanwhile is seen at the next look."""
    return [_fingerprint(path) for path in paths]


def remember(kind: str, identity: str, key: str, watched: Iterable[str]) -> None:
    """Write the index entry that `recall` reads; `watched` are fingerprints. Call it only for a published key."""
    directory = _kind_directory(kind)
    lines = [key, repr(identity), *watched]
    if any("\n" in line for line in lines):
        return  # no index for such a path: each start takes the slow road, which is correct
    target = _index_path(directory, identity)
    temporary = f"{target}.{os.getpid()}.{_token()}"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(lines))
    os.replace(temporary, target)


def publish(
    kind: str, key: str, build: Callable[[str], None], progress: Callable[[str], None] | None = None
) -> str:
    """The tree `key`; built by `build(temporary directory)` if it does not exist yet.

    Safe against concurrent builders (threads and processes) and against a crash at any point.
    """
    directory = _kind_directory(kind)
    tree = os.path.join(directory, key)
    if os.path.isdir(tree):
        return tree
    with _Lock(directory, progress):
        if os.path.isdir(tree):
            return tree
        _remove_rubbish(directory)
        temporary = os.path.join(directory, f"{BUILDING}{os.getpid()}-{_token()}")
        os.mkdir(temporary, 0o700)
        try:
            build(temporary)
            normalise_modes(temporary)
            _flush(temporary)
            os.rename(temporary, tree)
        except BaseException:
            _remove_tree(temporary)
            raise
    return tree


def hold(tree: str) -> int:
    """A descriptor of `tree` that keeps `prune` away from it until it is closed.

    Raises:
        EngineError: the tree is gone.
    """
    import fcntl

    try:
        descriptor = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as problem:
        raise _engine_error(
            f"the cached tree {tree} is gone: {problem.strerror}", "ask for it again"
        ) from None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def prune() -> list[str]:
    """Remove trees whose sources changed or are gone, unless a holder uses them. Returns what was removed."""
    import fcntl

    cache = cache_directory()
    removed: list[str] = []
    for kind in sorted(os.listdir(cache)):
        directory = os.path.join(cache, kind)
        if not os.path.isdir(directory) or not os.path.exists(os.path.join(directory, LOCK)):
            continue
        with _Lock(directory, None):
            _remove_rubbish(directory)
            current = set()
            for name in os.listdir(directory):
                if not name.startswith(INDEX):
                    continue
                path = os.path.join(directory, name)
                with open(path, encoding="utf-8", errors="surrogateescape") as file:
                    key, _, *watched = [*file.read().split("\n"), ""]
                if _unchanged([line for line in watched if line]):
                    current.add(key)
                else:
                    os.unlink(path)
            for name in sorted(os.listdir(directory)):
                tree = os.path.join(directory, name)
                if name.startswith(".") or name in current or not os.path.isdir(tree):
                    continue
                descriptor = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # a live sandbox mounts it
                finally:
                    os.close(descriptor)
                # Renamed first, so that nobody finds a tree that is being emptied.
                doomed = os.path.join(directory, REMOVING + name)
                os.rename(tree, doomed)
                _remove_tree(doomed)
                removed.append(tree)
    return removed


def normalise_modes(tree: str) -> None:
    """Directories and programs 0755, files 0644, whatever the umask or the source said; no set-id bits.

    Raises:
        EngineError: the tree holds something that is neither file, directory nor symbolic link.
    """
    os.chmod(tree, 0o755)
    for folder, directories, files in os.walk(tree):
        for name in directories:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755)
        for name in files:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                continue
            if not stat.S_ISREG(mode):
                raise _engine_error(f"{path} is not a regular file", "reinstall the package it came from")
            os.chmod(path, 0o755 if mode & 0o100 else 0o644)


class _Lock:
    """An exclusive lock on one kind's directory, or on what `name` stands for, across threads and processes."""

    def __init__(self, directory: str, progress: Callable[[str], None] | None, name: str = LOCK) -> None:
        self.path, self.progress, self.descriptor = os.path.join(directory, name), progress, -1

    def __enter__(self) -> None:
        import fcntl

        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self.progress:
                self.progress("waiting for another process that builds the same thing")
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        import fcntl

        # Unlocked by hand: a child forked meanwhile shares this descriptor and would keep the lock.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


def _kind_directory(kind: str) -> str:
    directory = os.path.join(cache_directory(), kind)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    return directory


def _index_path(directory: str, identity: str) -> str:
    from binascii import crc32

    # Only a name: the identity itself is stored and compared in full.
    return os.path.join(directory, f"{INDEX}{crc32(identity.encode('utf-8', 'surrogateescape')):08x}")


def _fingerprint(path: str) -> str:
    state = os.stat(path)
    # A directory's size depends on the file system's mood; its modification time tells of added names.
    size = 0 if stat.S_ISDIR(state.st_mode) else state.st_size
    return f"{size} {state.st_mtime_ns} {path}"


def _unchanged(lines: Iterable[str]) -> bool:
    try:
        return all(_fingerprint(line.split(" ", 2)[2]) == line for line in lines)
    except (OSError, IndexError):
        return False


def _remove_rubbish(directory: str) -> None:
    """What crashed builders left. Call it under the lock: then nobody is building."""
    for name in os.listdir(directory):
        if name.startswith((BUILDING, REMOVING)):
            _remove_tree(os.path.join(directory, name))


def _remove_tree(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _flush(tree: str) -> None:
    """Write the tree to the disk before it gets its name: a power cut must not leave empty files behind it."""
    import ctypes

    descriptor = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    except AttributeError:  # a C library without syncfs(2)
        os.sync()
    finally:
        os.close(descriptor)


def _token() -> str:
    return os.urandom(4).hex()


def _engine_error(message: str, hint: str) -> Exception:
    from ringfence.errors import EngineError

    return EngineError(message, hint=hint)
