"""Every rule of the system call policy, judged by the interpreter on both architectures and by this kernel.

The kernel part makes each call twice in throw-away forks, with arguments that can do no harm (descriptor -1,
address 1): under the filter it must give the refusal, without it the kernel's own complaint (EFAULT, EBADF...).
Where both agree, because this kernel or this user would refuse anyway, the pair proves nothing and is skipped.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from errno import (
    EAFNOSUPPORT,
    EINVAL,
    ENOMEM,
    ENOPROTOOPT,
    ENOSYS,
    ENOTTY,
    EOPNOTSUPP,
    EPERM,
    EPROTONOSUPPORT,
)
from pathlib import Path
from typing import NamedTuple

import pytest
from forked import in_child

from ringfence.linux import capabilities, filters, numbers, seccomp, syscalls

ARCHES = sorted(numbers.TABLES)
MODES = [
    pytest.param({"single_uid": False}, id="many-uids"),
    pytest.param({"single_uid": True, "watched_memory": True}, id="single-uid-watched"),
    pytest.param({"single_uid": False, "root": True}, id="root"),
]
ADDRESS = 1  # no process can have anything mapped there
BAD = -1
TERMINATED_BY_THREAD_FLAG = 0x10000  # CLONE_THREAD without CLONE_SIGHAND: the kernel answers EINVAL


class Case(NamedTuple):
    """A call that must be refused with `refusal`; `live` is false where trying it without a filter could hurt."""

    name: str
    arguments: tuple[int, ...]
    refusal: int
    live: bool = True
    options: tuple[str, ...] = ()


def case(name: str, *arguments: int, refusal: int, live: bool = True, options: str = "") -> Case:
    return Case(name, arguments, refusal, live, tuple(options.split()))


WHOLE_CALLS = [
    case("mount", ADDRESS, ADDRESS, ADDRESS, 0, 0, refusal=EPERM),
    case("umount2", ADDRESS, 0, refusal=EPERM),
    case("pivot_root", ADDRESS, ADDRESS, refusal=EPERM),
    case("setns", BAD, 0, refusal=EPERM),
    case("unshare", 1, refusal=EPERM),
    case("unshare", 0x10000000, refusal=EPERM, live=False),
    case("chroot", ADDRESS, refusal=EPERM),
    case("fsopen", ADDRESS, 0, refusal=EPERM),
    case("fsconfig", BAD, 0, 0, 0, 0, refusal=EPERM),
    case("fsmount", BAD, 0, 0, refusal=EPERM),
    case("fspick", BAD, ADDRESS, 0, refusal=EPERM),
    case("open_tree", BAD, ADDRESS, 0, refusal=EPERM),
    case("open_tree_attr", BAD, ADDRESS, 0, ADDRESS, 32, refusal=EPERM),
    case("move_mount", BAD, ADDRESS, BAD, ADDRESS, 0, refusal=EPERM),
    case("mount_setattr", BAD, ADDRESS, 0, ADDRESS, 32, refusal=EPERM),
    case("clone3", ADDRESS, 64, refusal=ENOSYS),
    case("openat2", BAD, ADDRESS, ADDRESS, 24, refusal=ENOSYS),
    case("io_uring_setup", 4, ADDRESS, refusal=ENOSYS),
    case("io_uring_enter", BAD, 0, 0, 0, 0, 0, refusal=ENOSYS),
    case("io_uring_register", BAD, 0, 0, 0, refusal=ENOSYS),
    case("io_setup", 1, ADDRESS, refusal=ENOSYS),
    case("io_submit", 0, 1, ADDRESS, refusal=ENOSYS),
    case("bpf", 0, ADDRESS, 16, refusal=EPERM),
    case("perf_event_open", ADDRESS, 0, BAD, BAD, 0, refusal=EPERM),
    case("userfaultfd", BAD, refusal=EPERM),
    case("ptrace", 16, 0x7FFFFFFF, 0, 0, refusal=EPERM),
    case("ptrace", 0, refusal=EPERM, live=False),
    case("process_vm_readv", 0x7FFFFFFF, ADDRESS, 1, ADDRESS, 1, 0, refusal=EPERM),
    case("process_vm_writev", 0x7FFFFFFF, ADDRESS, 1, ADDRESS, 1, 0, refusal=EPERM),
    case("pidfd_getfd", BAD, 0, 0, refusal=EPERM),
    case("kcmp", 0x7FFFFFFF, 0x7FFFFFFF, 0, 0, 0, refusal=EPERM),
    case("get_robust_list", 0x7FFFFFFF, ADDRESS, ADDRESS, refusal=EPERM),
    case("process_madvise", BAD, ADDRESS, 1, 0, 0, refusal=ENOSYS),
    case("process_mrelease", BAD, 0, refusal=ENOSYS),
    case("add_key", ADDRESS, ADDRESS, 0, 0, 0, refusal=EPERM),
    case("request_key", ADDRESS, ADDRESS, ADDRESS, 0, refusal=EPERM),
    case("keyctl", BAD, refusal=EPERM),
    case("name_to_handle_at", BAD, ADDRESS, ADDRESS, ADDRESS, 0, refusal=EPERM),
    case("open_by_handle_at", BAD, ADDRESS, 0, refusal=EPERM),
    case("fanotify_init", BAD, 0, refusal=EPERM),
    case("fanotify_mark", BAD, 1, 1, BAD, ADDRESS, refusal=EPERM),
    case("init_module", ADDRESS, 1, ADDRESS, refusal=EPERM),
    case("finit_module", BAD, ADDRESS, 0, refusal=EPERM),
    case("delete_module", ADDRESS, 0, refusal=EPERM),
    case("kexec_load", 0, 99, ADDRESS, 0, refusal=EPERM),
    case("kexec_file_load", BAD, BAD, 0, ADDRESS, 0, refusal=EPERM),
    case("reboot", 0, 0, 0, 0, refusal=EPERM),
    case("swapon", ADDRESS, 0, refusal=EPERM),
    case("swapoff", ADDRESS, refusal=EPERM),
    case("acct", ADDRESS, refusal=EPERM),
    case("quotactl", 0, ADDRESS, 0, 0, refusal=EPERM),
    case("quotactl_fd", BAD, 0, 0, 0, refusal=EPERM),
    case("syslog", 99, 0, 0, refusal=EPERM),
    case("settimeofday", ADDRESS, ADDRESS, refusal=EPERM),
    case("clock_settime", 0, ADDRESS, refusal=EPERM),
    case("adjtimex", ADDRESS, refusal=EPERM),
    case("clock_adjtime", 0, ADDRESS, refusal=EPERM),
    case("sethostname", ADDRESS, BAD, refusal=EPERM),
    case("setdomainname", ADDRESS, BAD, refusal=EPERM),
    case("vhangup", refusal=EPERM, live=False),
    case("iopl", 4, refusal=EPERM),
    case("ioperm", BAD, 1, 1, refusal=EPERM),
    case("modify_ldt", 0, ADDRESS, 16, refusal=EPERM),
    case("sync", refusal=EPERM, live=False),
    case("syncfs", BAD, refusal=EPERM),
    case("seccomp", 1, 0, ADDRESS, refusal=ENOSYS),
    case("seccomp", 1, seccomp.SECCOMP_FILTER_FLAG_NEW_LISTENER, ADDRESS, refusal=ENOSYS),
    case("vmsplice", BAD, ADDRESS, 1, 0, refusal=ENOSYS),
    case("get_mempolicy", ADDRESS, 0, 0, 0, 0, refusal=ENOSYS),
    case("set_mempolicy", 99, 0, 0, refusal=ENOSYS),
    case("mbind", ADDRESS, 1, 0, 0, 0, 0, refusal=ENOSYS),
    case("set_mempolicy_home_node", ADDRESS, 1, 0, 0, refusal=ENOSYS),
    case("migrate_pages", 0x7FFFFFFF, 0, 0, 0, refusal=EPERM),
    case("move_pages", 0x7FFFFFFF, 0, 0, 0, 0, 0, refusal=EPERM),
    case("memfd_secret", BAD, refusal=ENOSYS),
    case("cachestat", BAD, ADDRESS, ADDRESS, 0, refusal=ENOSYS),
    case("statmount", ADDRESS, ADDRESS, 1, 0, refusal=ENOSYS),
    case("listmount", ADDRESS, ADDRESS, 1, 0, refusal=ENOSYS),
    case("lsm_get_self_attr", 100, ADDRESS, ADDRESS, 0, refusal=ENOSYS),
    case("lsm_list_modules", ADDRESS, ADDRESS, 0, refusal=ENOSYS),
    case("futex_waitv", ADDRESS, 0, 0, 0, 0, refusal=ENOSYS),
    case("setxattrat", BAD, ADDRESS, 0, ADDRESS, ADDRESS, 16, refusal=ENOSYS),
    case("file_setattr", BAD, ADDRESS, ADDRESS, 24, 0, refusal=ENOSYS),
    case("sysfs", 99, refusal=ENOSYS),
    case("ustat", 0, ADDRESS, refusal=ENOSYS),
    case("lookup_dcookie", 0, ADDRESS, 1, refusal=ENOSYS),
    case("remap_file_pages", ADDRESS, 1, 1, 0, 0, refusal=ENOSYS),
    case("memfd_create", ADDRESS, 0, refusal=ENOSYS, options="watched_memory"),
    case("shmget", 0, 0, 0o1000, refusal=ENOSYS, options="watched_memory"),
    case("semget", 0, BAD, 0o1000, refusal=ENOSYS, options="watched_memory"),
    case("msgget", 0x52494E47, 0, refusal=ENOSYS, options="watched_memory"),
    case("pidfd_send_signal", BAD, 0, 0, 0, refusal=ENOSYS, options="single_uid"),
]

NEW_NAMESPACES = {
    "CLONE_NEWNS": 0x00020000,
    "CLONE_NEWCGROUP": 0x02000000,
    "CLONE_NEWUTS": 0x04000000,
    "CLONE_NEWIPC": 0x08000000,
    "CLONE_NEWUSER": 0x10000000,
    "CLONE_NEWPID": 0x20000000,
    "CLONE_NEWNET": 0x40000000,
}

BY_ARGUMENT = [
    *[
        case("clone", flag | TERMINATED_BY_THREAD_FLAG, 0, 0, 0, 0, refusal=EPERM)
        for flag in NEW_NAMESPACES.values()
    ],
    case("clone", 0x8000 | TERMINATED_BY_THREAD_FLAG, 0, 0, 0, 0, refusal=EPERM),  # CLONE_PARENT
    case("clone", (0xABCD << 32) | 0x10000000 | TERMINATED_BY_THREAD_FLAG, 0, 0, 0, 0, refusal=EPERM),
    # Families: packet, key, ALG, vsock, XDP, bluetooth, SMC, TIPC, RDS, CAN, QIPCRTR.
    *[
        case("socket", family, 3, 0, refusal=EAFNOSUPPORT)
        for family in (17, 15, 38, 40, 44, 31, 43, 30, 21, 29, 42)
    ],
    case("socket", 38, 5, 0, refusal=EAFNOSUPPORT),
    case("socket", (1 << 32) | 17, 3, 0, refusal=EAFNOSUPPORT),
    *[case("socket", 16, 3, protocol, refusal=EPROTONOSUPPORT) for protocol in range(1, 23)],
    case("socket", 16, 0x80002, 12, refusal=EPROTONOSUPPORT),  # NETLINK_NETFILTER, close-on-exec
    case("socket", 2, 3, 1, refusal=EPERM),  # raw
    case("socket", 10, 0x80003, 58, refusal=EPERM),
    case("socket", 2, 5, 132, refusal=EPERM),  # SCTP one-to-many
    case("socket", 2, 6, 33, refusal=EPERM),  # DCCP
    case("socket", 2, 10, 0, refusal=EPERM),  # SOCK_PACKET
    case("socket", 2, 1, 262, refusal=EPROTONOSUPPORT),  # MPTCP
    case("socket", 2, 1, 132, refusal=EPROTONOSUPPORT),  # SCTP
    case("socket", 2, 2, 1, refusal=EPROTONOSUPPORT),  # ping
    case("socket", 2, 2, 115, refusal=EPROTONOSUPPORT),  # L2TP
    case("socketpair", 30, 1, 0, ADDRESS, refusal=EOPNOTSUPP),
    case("setsockopt", BAD, 0, 64, ADDRESS, 4, refusal=ENOPROTOOPT),  # IPT_SO_SET_REPLACE
    case("setsockopt", BAD, 0, 96, ADDRESS, 4, refusal=ENOPROTOOPT),
    case("setsockopt", BAD, 0, 128, ADDRESS, 4, refusal=ENOPROTOOPT),
    case("setsockopt", BAD, 41, 64, ADDRESS, 4, refusal=ENOPROTOOPT),
    case("setsockopt", BAD, 0, 17, ADDRESS, 4, refusal=ENOPROTOOPT),
    case("setsockopt", BAD, 41, 35, ADDRESS, 4, refusal=ENOPROTOOPT),
    *[case("setsockopt", BAD, 1, option, ADDRESS, 4, refusal=ENOPROTOOPT) for option in (26, 50, 51, 52)],
    case("setsockopt", BAD, 6, 31, ADDRESS, 4, refusal=ENOPROTOOPT),  # TCP_ULP
    case("setsockopt", BAD, 17, 100, ADDRESS, 4, refusal=ENOPROTOOPT),  # UDP_ENCAP
    case("sendto", BAD, ADDRESS, 1, 1, 0, 0, refusal=EOPNOTSUPP),  # MSG_OOB
    case("sendto", BAD, ADDRESS, 1, 0x4041, 0, 0, refusal=EOPNOTSUPP),
    case("sendmsg", BAD, ADDRESS, 1, refusal=EOPNOTSUPP),
    case("sendmmsg", BAD, ADDRESS, 1, 1, refusal=EOPNOTSUPP),
    case("ioctl", BAD, 0x5412, ADDRESS, refusal=EPERM),  # TIOCSTI
    case("ioctl", BAD, (0x1234 << 32) | 0x5412, ADDRESS, refusal=EPERM),
    *[
        case("ioctl", BAD, command, ADDRESS, refusal=EPERM)
        for command in (0x541C, 0x541D, 0x5423, 0x5437, 0x5457)
    ],
    case("ioctl", BAD, 0x8946, ADDRESS, refusal=EOPNOTSUPP),  # SIOCETHTOOL
    # Bridges and VLANs (load modules), tun, file flags, fsverity, fscrypt keys, dedupe, freeze, btrfs
    # subvolumes, namespaces, owner by ioctl, kvm, userfaultfd, fuse, loop.
    *[
        case("ioctl", BAD, command, ADDRESS, refusal=ENOTTY)
        for command in (
            *(0x8940, 0x8941, 0x8982, 0x89A0, 0x400454CA, 0x40086602, 0x40806685, 0xC0506617, 0xC0189436),
            *(0xC0045877, 0x5000940E, 0xB701, 0x8901, 0x8902, 0xAE00, 0xAA00, 0x8004E500, 0x4C00, 0xFF01, 1),
        )
    ],
    case("fcntl", BAD, 8, 1, refusal=EPERM),  # F_SETOWN
    case("fcntl", BAD, 8, -1, refusal=EPERM),
    case("fcntl", BAD, 8, 0xFFFFFFFF, refusal=EPERM),
    *[case("fcntl", BAD, command, ADDRESS, refusal=EPERM) for command in (10, 15, 1024, 1040)],
    case("prctl", 22, 2, ADDRESS, refusal=EINVAL),  # PR_SET_SECCOMP
    case("prctl", 35, 1, ADDRESS, 0, 0, refusal=EINVAL),  # PR_SET_MM
    case("prctl", 0x59616D61, 0, 0, 0, 0, refusal=EINVAL),  # PR_SET_PTRACER
    case("prctl", 62, 0, 0, 0, ADDRESS, refusal=EINVAL),  # PR_SCHED_CORE
    case("prctl", 67, 0, 0, 0, 0, refusal=EINVAL),  # PR_SET_MEMORY_MERGE
    case("prctl", 59, 0, 0, 0, 0, refusal=EINVAL),  # PR_SET_SYSCALL_USER_DISPATCH
    case("prctl", 36, 0, 0, 0, 0, refusal=EPERM),  # PR_SET_CHILD_SUBREAPER
    case("arch_prctl", 0x1012, 1, refusal=EINVAL),
    case("arch_prctl", 0x4002, 0, refusal=EINVAL),
    case("arch_prctl", 0x2001, ADDRESS, refusal=EINVAL),
    *[case("personality", value, refusal=EPERM) for value in (0x0040000, 8, 0x20000, 0x0100000)],
    case("mmap", 0, 1 << 21, 3, 0x40001, BAD, 0, refusal=ENOMEM),
    case("memfd_create", ADDRESS, 4, refusal=ENOMEM),
    case("shmget", 0, 1 << 21, 0o5000, refusal=ENOMEM, live=False),
    case("madvise", ADDRESS, 4096, 12, refusal=EINVAL),
    case("renameat2", BAD, ADDRESS, BAD, ADDRESS, 4, refusal=EINVAL),
    case("open", ADDRESS, 0o101, 0o4755, refusal=EPERM),
    case("open", ADDRESS, 0o101, 0o2755, refusal=EPERM),
    case("open", ADDRESS, 0o20200002, 0o4600, refusal=EPERM),  # O_TMPFILE
    case("openat", BAD, ADDRESS, 0o101, 0o6755, refusal=EPERM),
    case("openat", BAD, ADDRESS, 0o20200002, 0o2600, refusal=EPERM),
    case("openat", BAD, ADDRESS, 0o101, (7 << 32) | 0o4755, refusal=EPERM),
    case("mq_open", ADDRESS, 0o101, 0o4600, 0, refusal=EPERM),
    case("creat", ADDRESS, 0o4755, refusal=EPERM),
    case("chmod", ADDRESS, 0o4755, refusal=EPERM),
    case("chmod", ADDRESS, 0o2755, refusal=EPERM),
    case("fchmod", BAD, 0o4755, refusal=EPERM),
    case("fchmodat", BAD, ADDRESS, 0o4755, refusal=EPERM),
    case("fchmodat", BAD, ADDRESS, 0o12755, refusal=EPERM),
    case("fchmodat2", BAD, ADDRESS, 0o2755, 0, refusal=EPERM),
    case("mkdir", ADDRESS, 0o2755, refusal=EPERM),
    case("mkdirat", BAD, ADDRESS, 0o4755, refusal=EPERM),
    case("mknod", ADDRESS, 0o020666, 0x101, refusal=EPERM),  # a character device
    case("mknod", ADDRESS, 0o060666, 0x700, refusal=EPERM),  # a block device
    case("mknod", ADDRESS, 0o104755, 0, refusal=EPERM),
    case("mknodat", BAD, ADDRESS, 0o020666, 0x101, refusal=EPERM),
    case("mknodat", BAD, ADDRESS, 0o020000, 0, refusal=EPERM),  # a whiteout
    case("mknodat", BAD, ADDRESS, 0o060666, 0x700, refusal=EPERM),
    case("mknodat", BAD, ADDRESS, 0o102755, 0, refusal=EPERM),
    case("kill", 1, 0, refusal=EPERM),
    case("kill", 1, 9, refusal=EPERM, live=False),
    case("kill", (5 << 32) | 1, 0, refusal=EPERM),
    case("tkill", 1, 0, refusal=EPERM),
    case("tgkill", 1, 1, 0, refusal=EPERM),
    case("tgkill", 1, 0x7FFFFFFF, 0, refusal=EPERM),
    case("tgkill", 0x7FFFFFFF, 1, 0, refusal=EPERM),
    case("rt_sigqueueinfo", 1, 0, ADDRESS, refusal=EPERM),
    case("rt_tgsigqueueinfo", 1, 1, 0, ADDRESS, refusal=EPERM),
    case("pidfd_open", 1, 0, refusal=EPERM),
    case("prlimit64", 1, 0, 0, 0, refusal=EPERM),
    case("sched_setparam", 1, ADDRESS, refusal=EPERM),
    case("sched_setscheduler", 1, 0, ADDRESS, refusal=EPERM),
    case("sched_setattr", 1, ADDRESS, 0, refusal=EPERM),
    case("sched_setaffinity", 1, 8, ADDRESS, refusal=EPERM),
    case("setpgid", BAD, 1, refusal=EPERM),
    case("setpriority", 0, 1, 0, refusal=EPERM, live=False),
    case("setpriority", 1, 0x7FFFFFFF, 0, refusal=EPERM),
    case("setpriority", 2, 0x7FFFFFFF, 0, refusal=EPERM),
    case("ioprio_set", 1, 1, 0xFFFF, refusal=EPERM),
    case("ioprio_set", 2, 0x7FFFFFFF, 0, refusal=EPERM),
    case("ioprio_set", 3, 0x7FFFFFFF, 0, refusal=EPERM),
]

ALLOWED = [
    case("clone", 0x3D0F00, 0, 0, 0, 0, refusal=0),  # pthread_create
    case("clone", 0x01200011, 0, 0, 0, 0, refusal=0),  # fork
    case("clone", 0x4111, 0, 0, 0, 0, refusal=0),  # posix_spawn: CLONE_VM | CLONE_VFORK | SIGCHLD
    case("clone", 0x1011, 0, ADDRESS, 0, 0, refusal=0),  # CLONE_PIDFD
    *[
        case("socket", family, kind, 0, refusal=0)
        for family in (1, 2, 10)
        for kind in (1, 2, 0x80801, 0x80802)
    ],
    case("socket", 1, 5, 0, refusal=0),
    case("socket", 2, 1, 6, refusal=0),
    case("socket", 10, 2, 17, refusal=0),
    case("socket", 16, 3, 0, refusal=0),  # NETLINK_ROUTE
    case("socket", 16, 0x80002, 0, refusal=0),
    case("socketpair", 1, 1, 0, ADDRESS, refusal=0),
    case("sendto", BAD, ADDRESS, 1, 0x4040, 0, 0, refusal=0),  # MSG_NOSIGNAL | MSG_DONTWAIT
    case("sendmsg", BAD, ADDRESS, 0x4000, refusal=0),
    case("sendmmsg", BAD, ADDRESS, 1, 0x40, refusal=0),
    case("setsockopt", BAD, 1, 2, ADDRESS, 4, refusal=0),  # SO_REUSEADDR
    case("setsockopt", BAD, 6, 1, ADDRESS, 4, refusal=0),  # TCP_NODELAY
    case("setsockopt", BAD, 0, 35, ADDRESS, 4, refusal=0),  # IP_ADD_MEMBERSHIP
    case("setsockopt", BAD, 41, 26, ADDRESS, 4, refusal=0),  # IPV6_V6ONLY
    *[
        case("ioctl", BAD, command, ADDRESS, refusal=0)
        # TCGETS TIOCGWINSZ TIOCSWINSZ TIOCSCTTY TIOCSPGRP FIONREAD FIONBIO FIOCLEX TCGETS2 TIOCGPTN TIOCSPTLCK
        # TIOCGPTPEER SIOCGIFNAME SIOCGIFCONF SIOCGIFMTU FICLONE FS_IOC_GETFLAGS
        for command in (
            *(
                0x5401,
                0x5413,
                0x5414,
                0x540E,
                0x5410,
                0x541B,
                0x5421,
                0x5451,
                0x802C542A,
                0x80045430,
                0x40045431,
            ),
            *(0x5441, 0x8910, 0x8912, 0x8921, 0x40049409, 0x80086601),
        )
    ],
    *[
        case("fcntl", BAD, command, 0, refusal=0)
        for command in (0, 1, 2, 3, 4, 6, 7, 1030, 1031, 1032, 1033, 1034)
    ],
    case("fcntl", BAD, 8, 0, refusal=0),
    case("fcntl", BAD, 8, 4321, refusal=0),
    *[case("prctl", option, 0, 0, 0, 0, refusal=0) for option in (1, 3, 4, 15, 16, 21, 23, 24, 38, 39, 47)],
    case("prctl", 36, 1, 0, 0, 0, refusal=0),
    case("prctl", 36, 1 << 32, 0, 0, 0, refusal=0),
    case("prctl", 0x53564D41, 0, 0, 0, 0, refusal=0),
    case("arch_prctl", 0x1002, ADDRESS, refusal=0),
    case("arch_prctl", 0x1023, 18, refusal=0),
    case("personality", 0xFFFFFFFF, refusal=0),
    case("personality", 0, refusal=0),
    case("mmap", 0, 4096, 3, 0x22, BAD, 0, refusal=0),
    case("memfd_create", ADDRESS, 1, refusal=0),
    case("shmget", 0, 4096, 0o1600, refusal=0),
    case("semget", 0, 1, 0o1600, refusal=0),
    case("madvise", 0, 4096, 4, refusal=0),
    case("madvise", 0, 4096, 14, refusal=0),
    case("renameat2", BAD, ADDRESS, BAD, ADDRESS, 1, refusal=0),
    case("renameat2", BAD, ADDRESS, BAD, ADDRESS, 2, refusal=0),
    case("open", ADDRESS, 0, 0o6777, refusal=0),  # the mode is not read unless a file is made
    case("openat", BAD, ADDRESS, 0o200000, 0o7777, refusal=0),  # O_DIRECTORY is not O_TMPFILE
    case("openat", BAD, ADDRESS, 0o101, 0o666, refusal=0),
    case("openat", BAD, ADDRESS, 0o20200002, 0o600, refusal=0),
    case("chmod", ADDRESS, 0o1777, refusal=0),  # sticky
    case("fchmodat", BAD, ADDRESS, 0o755, refusal=0),
    case("mkdir", ADDRESS, 0o777, refusal=0),
    case("mkdirat", BAD, ADDRESS, 0o1777, refusal=0),
    *[case("mknodat", BAD, ADDRESS, mode, 0, refusal=0) for mode in (0o600, 0o100600, 0o010666, 0o140777)],
    case("kill", -1, 9, refusal=0),
    case("kill", 0, 15, refusal=0),
    case("kill", 2, 9, refusal=0),
    case("kill", -17, 9, refusal=0),
    case("tgkill", 20, 21, 6, refusal=0),
    case("pidfd_open", 20, 0, refusal=0),
    case("pidfd_send_signal", 5, 9, 0, 0, refusal=0),
    case("prlimit64", 0, 7, 0, ADDRESS, refusal=0),
    case("prlimit64", 44, 7, ADDRESS, 0, refusal=0),
    case("sched_setaffinity", 0, 8, ADDRESS, refusal=0),
    case("setpgid", 0, 0, refusal=0),
    case("setpriority", 0, 0, 5, refusal=0),
    case("ioprio_set", 1, 0, 0x6000, refusal=0),
    # What the agent, itself under the filter, needs.
    *[case(name, 0, 0, 0, 0, 0, 0, refusal=0) for name in ("setresuid", "setresgid", "setgroups", "capset")],
    *[
        case(name, 0, 0, 0, 0, 0, 0, refusal=0)
        for name in ("signalfd4", "epoll_create1", "sendfile", "sendmsg")
    ],
    *[
        case(name, 0, 0, 0, 0, 0, 0, refusal=0)
        for name in ("recvmsg", "inotify_init1", "fsetxattr", "fchown")
    ],
    *[case(name, 0, 0, 0, 0, 0, 0, refusal=0) for name in ("landlock_create_ruleset", "membarrier", "rseq")],
]

REFUSED_CASES = WHOLE_CALLS + BY_ARGUMENT


def case_id(value: Case) -> str:
    return value.name + "-" + "-".join(f"{argument & 0xFFFFFFFFFFFFFFFF:x}" for argument in value.arguments)


def on_each_architecture(cases: list[Case]) -> list:
    """Each case on each architecture that has its call."""
    return [
        pytest.param(value, arch, id=f"{case_id(value)}-{arch}")
        for value in cases
        for arch in ARCHES
        if value.name in numbers.table(arch)
    ]


def options_of(value: Case) -> dict[str, bool]:
    options = dict.fromkeys(value.options, True)
    options.setdefault("single_uid", False)
    return options


# ---------------------------------------------------------------------------------------------------------
# The table


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_known_call_is_decided_with_a_reason(arch: str, mode: dict) -> None:
    decisions = filters.decisions(arch, **mode)
    assert {decision.name for decision in decisions} == set(numbers.table(arch))
    for decision in decisions:
        assert decision.reason not in ("", "not on the list"), decision.name


def test_no_call_is_decided_twice_and_none_is_misspelt() -> None:
    known = set().union(*numbers.TABLES.values())
    groups = [group.names.split() for group in filters.ALLOWED]
    groups += [refusal.names.split() for refusal in filters.REFUSED]
    groups += [list(filters._ARGUMENT_RULES), filters._OPTIONAL.split()]
    seen: set[str] = set()
    for group in groups:
        for name in group:
            assert name in known, name
            assert name not in seen, name
            seen.add(name)
    assert seen == known
    assert set(filters._ALLOWED_UNLESS_SINGLE_UID.names.split()) <= known
    assert set(filters._ALLOWED_UNLESS_WATCHED.names.split()) <= known


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ARCHES)
def test_the_program_says_what_the_table_says(arch: str, mode: dict) -> None:
    program = filters.guest_filter(arch, **mode)
    by_number = {decision.number: decision for decision in filters.decisions(arch, **mode)}
    for number in range(-1, 600):
        verdict = seccomp.evaluate(program, arch, number)
        decision = by_number.get(number)
        if decision is None:
            assert verdict == filters.DEFAULT, number
        elif decision.kind != "judge":
            assert verdict == decision.verdict, decision.name


@pytest.mark.parametrize("arch", ARCHES)
def test_x32_numbers_and_foreign_architectures_do_not_exist(arch: str) -> None:
    program = filters.guest_filter(arch, single_uid=False)
    absent = seccomp.errno_verdict(ENOSYS)
    for number in range(560):
        assert seccomp.evaluate(program, arch, number | seccomp.X32_BIT) == absent
    for foreign in ("0x40000003", "0x40000028", "0xc00000f3", next(name for name in ARCHES if name != arch)):
        for number in range(0, 450, 7):
            assert seccomp.evaluate(program, foreign, number) == absent


S003 = """mount umount2 pivot_root setns unshare fsopen fsconfig fsmount fspick open_tree move_mount mount_setattr bpf
perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp add_key request_key keyctl
open_by_handle_at fanotify_init init_module finit_module delete_module kexec_load kexec_file_load reboot swapon acct
syslog settimeofday clock_settime adjtimex iopl ioperm modify_ldt quotactl lookup_dcookie seccomp io_uring_setup
io_uring_enter io_uring_register chroot clone3 openat2 name_to_handle_at"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ARCHES)
def test_the_dangerous_calls_are_refused_in_every_mode(arch: str, mode: dict) -> None:
    refused = {decision.name: decision.verdict for decision in filters.denied(arch, **mode)}
    for name in S003.split():
        if name == "setns" and mode.get("root"):
            continue  # judged by its argument there: the agent's children enter the namespace of user code
        if name in numbers.table(arch):
            assert refused[name] in (seccomp.errno_verdict(EPERM), seccomp.errno_verdict(ENOSYS)), name


@pytest.mark.parametrize(("value", "arch"), on_each_architecture(REFUSED_CASES))
def test_the_interpreter_refuses(value: Case, arch: str) -> None:
    program = filters.guest_filter(arch, **options_of(value))
    verdict = seccomp.evaluate(program, arch, numbers.table(arch)[value.name], value.arguments)
    assert verdict == seccomp.errno_verdict(value.refusal), seccomp.describe(verdict)


@pytest.mark.parametrize(("value", "arch"), on_each_architecture(ALLOWED))
def test_the_interpreter_allows(value: Case, arch: str) -> None:
    program = filters.guest_filter(arch, single_uid=False)
    assert seccomp.evaluate(program, arch, numbers.table(arch)[value.name], value.arguments) == seccomp.ALLOW


@pytest.mark.parametrize("arch", ARCHES)
def test_options_only_ever_take_away(arch: str) -> None:
    plain = {d.name: d.verdict for d in filters.decisions(arch, single_uid=False)}
    for mode in ({"single_uid": True}, {"single_uid": False, "watched_memory": True}):
        for decision in filters.decisions(arch, **mode):
            same = plain[decision.name] == decision.verdict
            assert same or decision.kind == "refuse", decision.name


def test_building_is_done_once() -> None:
    first = filters.guest_filter("x86_64", single_uid=True)
    assert filters.guest_filter("x86_64", single_uid=True) is first


# ---------------------------------------------------------------------------------------------------------
# This kernel


# Asked once: a case below changes the personality, after which uname(2) speaks of another machine.
HERE = numbers.table(numbers.architecture()) if os.uname().sysname == "Linux" else {}


def attempt(value: Case) -> str:
    """Make the call; the errno's name, or "done" when the kernel did it."""
    number = HERE[value.name]
    try:
        syscalls.call(number, *value.arguments)
    except OSError as problem:
        return errno.errorcode.get(problem.errno or 0, str(problem.errno))
    return "done"


LIVE = [
    value
    for value in REFUSED_CASES
    if value.live and os.uname().sysname == "Linux" and value.name in numbers.table(numbers.architecture())
]


def run_all(chosen: list[Case], program: bytes | None) -> list[str]:
    def act() -> str:
        if program is not None:
            capabilities.set_no_new_privileges()
            seccomp.install(program)
        return json.dumps([attempt(value) for value in chosen])

    answer = in_child(act)
    assert answer.startswith("["), answer
    return json.loads(answer)


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, tuple[str, str]]:
    """For each live case what this kernel answered (without the filter, with it)."""
    found: dict[Case, tuple[str, str]] = {}
    for options in {value.options for value in LIVE}:
        chosen = [value for value in LIVE if value.options == options]
        program = filters.guest_filter(None, **options_of(chosen[0]))
        found.update(
            zip(chosen, zip(run_all(chosen, None), run_all(chosen, program), strict=True), strict=True)
        )
    return found


@pytest.mark.parametrize("value", LIVE, ids=case_id)
def test_the_kernel_refuses(value: Case, outcomes: dict[Case, tuple[str, str]]) -> None:
    without, within = outcomes[value]
    assert within == errno.errorcode[value.refusal]
    if without == within:
        pytest.skip(f"without a filter this kernel answers {without} as well: proves nothing here")


def test_most_refusals_are_proved_by_this_kernel(outcomes: dict[Case, tuple[str, str]]) -> None:
    """Were the control to fail as a whole (every call refused anyway), the test above would prove nothing."""
    proved = sum(without != within for without, within in outcomes.values())
    assert proved > len(outcomes) // 2


def test_no_filter_of_the_guest_s_own_and_no_listener() -> None:
    program = filters.guest_filter(single_uid=False)
    everything = seccomp.assemble(numbers.architecture(), {}, default=seccomp.ALLOW, foreign=seccomp.ALLOW)

    def act(confined: bool) -> str:
        capabilities.set_no_new_privileges()
        if confined:
            seccomp.install(program)
        answers = []
        for flags in (0, seccomp.SECCOMP_FILTER_FLAG_NEW_LISTENER):
            try:
                seccomp.install(everything, flags)
                answers.append("installed")
            except OSError as problem:
                answers.append(errno.errorcode[problem.errno or 0])
        return " ".join(answers)

    assert in_child(lambda: act(confined=False)) == "installed installed"  # positive control
    assert in_child(lambda: act(confined=True)) == "ENOSYS ENOSYS"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the 32-bit entry int 0x80 is x86's")
def test_the_32_bit_entry_answers_enosys() -> None:
    import ctypes
    import mmap

    def getpid_through_int_80() -> int:
        # mov eax, 20 (getpid of i386); int 0x80; ret
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        memory.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)()

    def control() -> str:
        return str(getpid_through_int_80() == os.getpid())

    def filtered() -> str:
        capabilities.set_no_new_privileges()
        seccomp.install(filters.guest_filter(single_uid=False))
        return errno.errorcode.get(-getpid_through_int_80(), "reached the kernel")

    if in_child(control) != "True":
        pytest.skip("this kernel has no 32-bit entry")
    assert in_child(filtered) == "ENOSYS"


# ---------------------------------------------------------------------------------------------------------
# Ordinary use survives

LAUNCHER = """
import json, os, sys
from ringfence.linux import capabilities, filters, seccomp
program = filters.guest_filter(**json.loads(sys.argv[1]))
capabilities.set_no_new_privileges()
seccomp.install(program)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def run_filtered(
    command: list[str], mode: dict, cwd: Path, timeout: float = 60
) -> subprocess.CompletedProcess:
    source = Path(filters.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source), "HOME": str(cwd), "TMPDIR": str(cwd)}
    return subprocess.run(
        [sys.executable, "-c", LAUNCHER, json.dumps(mode), *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


PYTHON_USE = r"""
import asyncio, concurrent.futures, ctypes, mmap, multiprocessing, os, pty, resource, select, signal, socket
import sqlite3, subprocess, sys, tempfile, threading, time

def square(value):
    return value * value

def locked(lock, counter):
    with lock:
        counter.value += 1

def main():
    found = []
    thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
    thread.start(); thread.join()
    assert found and found[0] != os.getpid()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(square, range(5))) == [0, 1, 4, 9, 16]

    assert subprocess.run(["/bin/sh", "-c", "echo out; exit 3"], capture_output=True).stdout == b"out\n"
    assert subprocess.run(["/bin/true"], preexec_fn=os.setsid).returncode == 0
    assert subprocess.run(["/bin/true"], start_new_session=True, close_fds=False).returncode == 0
    child = subprocess.Popen(["sleep", "60"]); child.terminate(); assert child.wait() == -15

    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map(square, [2, 3]) == [4, 9], method
        lock, counter = context.Lock(), context.Value("i", 0)
        workers = [context.Process(target=locked, args=(lock, counter)) for _ in range(2)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        assert counter.value == 2, method
        queue = context.Queue(); queue.put("x"); assert queue.get(timeout=10) == "x"; queue.close(); queue.join_thread()

    async def echo():
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close(); server.close()
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "echo async", stdout=subprocess.PIPE)
        assert (await process.communicate())[0] == b"async\n"
        assert await asyncio.to_thread(square, 7) == 49
    asyncio.run(echo())

    assert any(name == "lo" for _, name in socket.if_nameindex())
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p()
    assert libc.getifaddrs(ctypes.byref(pointer)) == 0, ctypes.get_errno()
    libc.freeifaddrs(pointer)
    left, right = socket.socketpair(); left.send(b"x"); assert right.recv(1) == b"x"
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp: udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    socket.getaddrinfo("localhost", 80)

    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(os.path.join(folder, "a.db"))
        database.execute("pragma journal_mode=wal"); database.execute("create table t(x)")
        database.execute("insert into t values (1)"); database.commit(); database.close()
        path = os.path.join(folder, "f"); open(path, "w").close()
        os.chmod(path, 0o755); os.rename(path, path + "2"); os.symlink(path + "2", path); os.utime(path)
        os.mkfifo(os.path.join(folder, "fifo"))
        with open(path + "2", "wb") as file, open("/dev/zero", "rb") as source:
            os.posix_fallocate(file.fileno(), 0, 4096); os.fsync(file.fileno())
        os.fwalk(folder); [entry.stat() for entry in os.scandir(folder)]
        try:
            os.chmod(path + "2", 0o4755)
        except PermissionError:
            pass
        else:
            found.append("set-id bit")
    mmap.mmap(-1, 4096).close()
    primary, secondary = pty.openpty(); os.write(secondary, b"hi\n"); assert os.read(primary, 2) == b"hi"
    os.get_terminal_size(secondary); os.ttyname(secondary)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.getrusage(resource.RUSAGE_CHILDREN)
    os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(0); os.getloadavg(); os.getrandom(8)
    signal.signal(signal.SIGALRM, lambda *_: found.append("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05); assert "alarm" in found
    signal.raise_signal(signal.SIGALRM); signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
    pidfd = os.pidfd_open(os.getpid()); select.select([pidfd], [], [], 0); os.close(pidfd)
    print("ordinary use works" + " and set-id bits can be kept" * ("set-id bit" in found))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("mode", MODES)
def test_ordinary_python_works_under_the_filter(mode: dict, tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(PYTHON_USE)
    result = run_filtered([sys.executable, str(script)], mode, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ordinary use works" + " and set-id bits can be kept" * bool(mode.get("root")) + "\n"
    assert result.stderr == ""


PROGRAMS = {
    "bash": "x=$(printf '%s\\n' b a | sort | tr -d '\\n'); test \"$x\" = ab; (sleep 0.01 & wait); cat <<< hi",
    "git": "git init -q r; cd r; echo a > f; git add f; git -c user.name=a -c user.email=a@b commit -qm m; git gc -q",
    "tar": "mkdir d; touch d/f; chmod 755 d/f; tar czf a.tgz d; rm -r d; tar xzpf a.tgz; test -x d/f",
    "gcc": "echo 'int main(void){return 7;}' > a.c; gcc -O2 a.c -o a; ./a || test $? = 7",
    "node": "node -e \"require('dns');const {Worker}=require('worker_threads');"
    "require('os').networkInterfaces();new Worker('process.exit(0)',{eval:true}).on('exit',()=>console.log(1));"
    "require('child_process').execSync('true');require('fs').cpSync('/etc/hostname','h')\"",
    "java": "java -Xshare:auto -Xmx64m -version",
    "sqlite3": "sqlite3 a.db 'create table t(x); insert into t values(1); select x from t;' | grep -q 1",
    "curl": "echo body > b; curl -s file://$PWD/b | grep -q body; curl -s http://127.0.0.1:9/ || test $? = 7",
    "rsync": "mkdir s; touch s/a; rsync -a s/ t/; test -e t/a",
    "cp": "echo a > a; cp --reflink=auto -a a b; cmp a b; mv b c; ln -s c d; sync; du -s . > /dev/null",
    "perl": "perl -e 'use Socket; socket(S,PF_INET,SOCK_STREAM,6) or die; my $p=fork//die; exit 0 if !$p; wait'",
    "file": "file /bin/sh | grep -q link || file /bin/sh | grep -q ELF",
    "ps": "ps ax > /dev/null",
    "ip": "ip addr show lo | grep -q LOOPBACK",
    "timeout": "timeout 5 true; nice -n 5 true; setsid true; nohup true; env -i /bin/true",
}


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_ordinary_programs_work_under_the_filter(program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    mode = {"single_uid": True, "watched_memory": True}
    result = run_filtered(["/bin/bash", "-ec", PROGRAMS[program]], mode, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("arch", ARCHES)
def test_root_changes_set_id_bits_and_entering_user_namespaces_and_nothing_else(arch: str) -> None:
    without = {item.name: item for item in filters.decisions(arch, single_uid=False)}
    with_root = {item.name: item for item in filters.decisions(arch, single_uid=False, root=True)}
    changed = {name for name, item in with_root.items() if item.verdict != without[name].verdict}
    known = "open openat mq_open creat chmod fchmod fchmodat fchmodat2 mkdir mkdirat mknod mknodat setns"
    assert changed == set(known.split()) & set(numbers.table(arch))
    program = filters.guest_filter(arch, single_uid=False, root=True)
    number = numbers.table(arch)["setns"]
    for kind in (0, *(1 << bit for bit in range(32))):
        verdict = seccomp.evaluate(program, arch, number, (3, kind, 0, 0, 0, 0))
        expected = seccomp.ALLOW if kind == filters.CLONE_NEWUSER else seccomp.errno_verdict(EPERM)
        assert verdict == expected, hex(kind)
