"""Who a process of the sandbox is: its ids, its job mark, its capabilities.

The agent has a uid that user code never has. For a command it takes the user's ids for the length of one
spawn and then its own again; what it forks (kernels, file workers) sheds everything for good. Guards against:
user code that signals, renices or reads the agent (the saved uid stays the agent's, which ptrace(2) and
prlimit(2) check too), a child with a capability, and a process that leaves its job (the mark is a
supplementary group, and only CAP_SETGID could shed it).

Facts: credentials(7), capabilities(7) "effect of user ID changes", kernel/cred.c commit_creds().
"""

from __future__ import annotations

import ctypes
import os

from ringfence.linux.syscalls import NUMBER, call, libc, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import signal
    from typing import Any, NamedTuple
else:
    import _signal as signal

    from ringfence.linux.records import NamedTuple

PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
# One type each for all calls: making an array type copies dozens of a forked child's pages.
_Header, _Data = ctypes.c_uint32 * 2, ctypes.c_uint32 * 6

# The agent ignores these; a child gets the defaults back, also those the interpreter ignores (SIGPIPE, SIGXFSZ).
IGNORED_SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ,
    signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


class User(NamedTuple):
    """One user of the sandbox, as the boot message names it."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


class UnknownUser(ValueError):
    """The request names a user that this sandbox does not have."""


def encode(text: str) -> bytes:
    """Text from the host as the bytes it stands for: any byte of a path or argument survives."""
    return text.encode("utf-8", "surrogateescape")


def decode(raw: bytes) -> str:
    """The reverse of `encode`."""
    return raw.decode("utf-8", "surrogateescape")


class Credentials:
    """Takes a user's ids for a spawn, gives them back, or sheds the agent's for good in a forked child.

    `single_uid`: this sandbox has one uid, so there is nothing to switch; jobs are then found by descent.
    """

    def __init__(self, boot: dict[str, Any]):
        self.single_uid = bool(boot.get("single_uid"))
        self.users = {
            name: User(name, int(item["uid"]), int(item["gid"]), item["home"], item.get("shell") or "/bin/sh")
            for name, item in boot["users"].items()
        }
        self.default_user = boot["default_user"]
        # Where there is a root, user code lives in a user namespace below the agent's (guest/inner.py).
        self.inner: int | None = boot.get("inner")
        self.agent_uid = os.geteuid()
        self.agent_gid = os.getegid()
        # A change of uid sets the dumpable flag to this sysctl (proc(5)); 1 would make the agent's memory readable.
        self._renew_dumpable = _read_number("/proc/sys/fs/suid_dumpable") not in (0, 2)

    def user(self, name: Any) -> User:
        """The user called `name`, or the default one for None. Raises UnknownUser."""
        if name is None:
            return self.users[self.default_user]
        user = self.users.get(name) if isinstance(name, str) else None
        if user is None:
            raise UnknownUser(f"there is no user {name!r} in this sandbox")
        return user

    def assume(self, user: User, mark: int | None) -> None:
        """Act as `user`, marked with group `mark`, until `resume()`. Nothing in between may run user code here."""
        if not self.single_uid:
            os.setgroups([user.gid] if mark is None else [user.gid, mark])
            os.setresgid(user.gid, user.gid, self.agent_gid)
            os.setresuid(user.uid, user.uid, self.agent_uid)

    def resume(self) -> None:
        """Be the agent again."""
        if not self.single_uid:
            os.setresuid(self.agent_uid, self.agent_uid, self.agent_uid)
            os.setresgid(self.agent_gid, self.agent_gid, self.agent_gid)
            if self._renew_dumpable:
                prctl(PR_SET_DUMPABLE, 0)

    @property
    def needed(self) -> list[int]:
        """Descriptors that a forked child has to keep until it has shed."""
        return [] if self.inner is None else [self.inner]

    def shed(self, user: User, mark: int | None, dumpable: bool, groups: list[int] | None = None) -> None:
        """In a forked child: become `user` for good, without any capability of the agent. Raises OSError.

        The caller must then leave: a child that could not shed must not go on.
        """
        if self.inner is not None:
            from ringfence.guest import inner  # loaded already, by a zygote whose sandboxes have a root

            # The mark first: its group is not mapped where the child goes.
            groups = [user.gid] if groups is None else groups
            os.setgroups(groups if mark is None else [*groups, mark])
            inner.enter(self.inner)
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
            inner.keep_capabilities(root=user.uid == 0)
            prctl(PR_SET_DUMPABLE, 1 if dumpable else 0)
            return
        if not self.single_uid:
            os.setgroups([user.gid] if mark is None else [user.gid, mark])
            os.setresgid(user.gid, user.gid, user.gid)
            os.setresuid(user.uid, user.uid, user.uid)
        prctl(PR_SET_KEEPCAPS, 0)
        # The ambient set first: some kernels refuse to keep what is no longer permitted.
        libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))  # fmt: skip
        drop_capabilities()
        prctl(PR_SET_DUMPABLE, 1 if dumpable else 0)
        if dumpable and self.single_uid:
            prctl(PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """capset(2) to nothing: effective, permitted and inheritable."""
    header, data = _Header(_CAPABILITY_VERSION_3, 0), _Data()
    call(NUMBER["capset"], ctypes.byref(header), ctypes.byref(data), what="capset")


def raise_kill_order(pid: str | int, value: int) -> None:
    """Make the kernel's out-of-memory killer prefer `pid` (oom_score_adj, proc(5)) to the agent. Best effort."""
    try:
        descriptor = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, b"%d" % value)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _read_number(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a text file's layers copy a hundred pages
        try:
            return int(os.read(descriptor, 64))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return -1
