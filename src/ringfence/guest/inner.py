"""Where user code lives in a sandbox that has a root: a user namespace below the agent's.

uid 0 inside has capabilities, and CAP_SETUID would let it become any id that is mapped. So the agent, its keepers
and its marks have ids that are not mapped where root is: user code, root's and the user's alike, lives in a user
namespace one below. There a capability reaches what that namespace owns or maps: processes in it and files of its
ids. It reaches no process of the agent, neither by signal nor by ptrace, prlimit or /proc/PID, since those belong to
the namespace above, and no mount, interface or host name, since those belong to the zygote's.

The one table of what root may do is ROOT_CAPABILITIES; the reasons for what is not in it are in
docs/decisions. Facts: user_namespaces(7), capabilities(7).
"""

from __future__ import annotations

import os
import socket

from ringfence.linux import capabilities, namespaces
from ringfence.linux.syscalls import libc, prctl

PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
HIGHEST_ID = 1900  # ids 0 to 1899, as identifiers.SYSTEM_IDS; and nobody
USER_ID, NOBODY_ID = 1000, 65534

ROOT_CAPABILITIES = {
    "CAP_CHOWN": "packages, tar and install give files to users",
    "CAP_DAC_OVERRIDE": "root reads and writes the files of every user inside",
    "CAP_FOWNER": "chmod, utimes and sticky directories, for files of others",
    "CAP_FSETID": "keeps the (dead) set-group-id bit of files whose group root is not in, so that modes read as shipped",
    "CAP_KILL": "services are stopped by root whoever they run as; processes of the agent are not in reach",
    "CAP_SETGID": "su, apt's own user, services: change to another group",
    "CAP_SETUID": "the same for users: ids that are mapped inside, which the agent's is not",
}
"""What uid 0 inside holds, and may give to what it executes; each with its reason."""

_ROOT_MASK = capabilities.mask(*ROOT_CAPABILITIES)
_LAST = capabilities.last_capability()


def create(kept: int) -> int:
    """In process 1, before it is confined for good: make the namespace; a descriptor of it.

    Precondition: the agent's ids are in force, and so are its resource limits, which then bound all users inside
    together (RLIMIT_NPROC is counted per namespace too). `kept` are the agent's capabilities. Raises OSError.
    """
    # Root's id of this namespace is mapped again below, for which the kernel wants CAP_SETFCAP (user_namespaces(7)).
    more = kept | capabilities.mask("CAP_SETFCAP", "CAP_SETPCAP")
    capabilities.set_capabilities(effective=more, permitted=more)
    # The agent takes root's id for a moment (a terminal of root's) and its own again: without losing what it holds.
    capabilities.set_securebits(capabilities.SECBIT_NO_SETUID_FIXUP | capabilities.SECBIT_NO_SETUID_FIXUP_LOCKED)
    prctl(PR_SET_DUMPABLE, 1)  # nobody else is here yet; the maps below /proc are written through a path
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = namespaces.fork_alone()
    if pid == 0:
        try:
            namespaces.unshare(namespaces.CLONE_NEWUSER)
            prctl(PR_SET_DUMPABLE, 1)
            theirs.send(b"u")
            ours.close()
            theirs.recv(1)
        finally:
            os._exit(0)
    try:
        theirs.close()
        if not ours.recv(1):
            raise OSError(1, "the second user namespace was refused")
        # The same pieces as one namespace above: the kernel wants each within one of the parent's.
        table = [(0, 0, USER_ID), (USER_ID, USER_ID, 1), (USER_ID + 1, USER_ID + 1, HIGHEST_ID - USER_ID - 1)]
        table.append((NOBODY_ID, NOBODY_ID, 1))
        namespaces.write_id_maps(f"/proc/{pid}", table, table, keep_groups=True)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ours.close()
        os.waitpid(pid, 0)
        prctl(PR_SET_DUMPABLE, 0)


def enter(descriptor: int) -> None:
    """In a fork of the agent: go in, for good, with every capability of that namespace. Raises OSError."""
    namespaces.enter(descriptor, namespaces.CLONE_NEWUSER)
    os.close(descriptor)


def keep_capabilities(root: bool) -> None:
    """After `enter` and the change of ids: keep root's few, or none, also for what is executed later."""
    kept = _ROOT_MASK if root else 0
    for number in range(_LAST + 1):
        if not kept >> number & 1 and libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            raise OSError(1, "not dropped from the bounding set", capabilities.names(1 << number)[0])
    capabilities.clear_ambient()
    capabilities.set_capabilities(effective=kept, permitted=kept)
