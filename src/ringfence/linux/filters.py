"""The system calls a sandbox may make: THE policy table, with the reason for each group and each rule.

Guards against kernel entry points that sandboxed code does not need: an allow-list, so that a call which no
line here names is refused, also one that a future kernel brings. Everything inside a sandbox runs under it,
the agent included: it is code that may have been captured.

How a call is refused matters to programs that mean no harm:

* `ENOSYS` for calls that are new, optional or obsolete: programs take it for an older kernel and fall back
  (glibc from clone3 to clone, libmount from statmount to mountinfo, libnuma to "no NUMA here").
* `EPERM` for calls that need privilege: what an ordinary user gets from the kernel for most of them.
* The kernel's own answer for an argument it does not know (EINVAL, ENOTTY, EPROTONOSUPPORT, ...) where a rule
  looks at arguments, so that probing code sees a kernel without the feature.

Calls made through the 32-bit entries (i386, arm) and x32 numbers get ENOSYS. Killing would say no more and
would let the guest write a line into the machine's log with each attempt.

Process 1 of a sandbox is its agent. In a sandbox with a user-id range the kernel protects it (its uid is its
own); with a single uid only the rules marked "process 1" do. They are in force in both, so there is one law.

Facts: the man page of each call, the kernel's source for the width at which it reads each argument. Sources of
the refusals: CVE numbers where given, Docker's and bubblewrap's profiles, SECURITY-CASES S003 to S018.
"""

from __future__ import annotations

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

from ringfence.linux import numbers, seccomp
from ringfence.linux.seccomp import (
    ALLOW,
    Rule,
    any_bit,
    at_least,
    errno_verdict,
    is_zero_64,
    none_of,
    one_of,
    when,
)

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import NamedTuple

    from ringfence.linux.seccomp import Verdict
else:
    from ringfence.linux.records import NamedTuple

DEFAULT = errno_verdict(ENOSYS)
FOREIGN_ARCHITECTURE = errno_verdict(ENOSYS)

AGENT = 1  # the pid of the agent, as everything in its pid namespace sees it


class Group(NamedTuple):
    """Calls allowed whatever their arguments, and why."""

    reason: str
    names: str


class Refusal(NamedTuple):
    """Calls refused whatever their arguments: with which errno, and why."""

    errno: int
    reason: str
    names: str


class ArgumentRule(NamedTuple):
    """Calls allowed for some arguments only: which are refused and why, and the rule that says so."""

    reason: str
    rule: Rule


# ---------------------------------------------------------------------------------------------------------
# Allowed

ALLOWED: tuple[Group, ...] = (
    Group(
        "reading and writing through descriptors",
        "read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 lseek sendfile splice tee "
        "copy_file_range readahead fadvise64 fallocate ftruncate truncate fsync fdatasync sync_file_range flock",
    ),
    Group(
        "descriptors, pipes and waiting for them",
        "close close_range dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 "
        "epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create "
        "timerfd_settime timerfd_gettime inotify_init inotify_init1 inotify_add_watch inotify_rm_watch",
    ),
    Group(
        "names in the file system: judged by its permissions and by which mounts exist",
        "stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 getcwd chdir fchdir "
        "getdents getdents64 readlink readlinkat link linkat symlink symlinkat unlink unlinkat rename renameat "
        "rmdir umask utime utimes futimesat utimensat",
    ),
    Group(
        "owners: ids are those of the sandbox's user namespace, and without CAP_CHOWN only one's own files",
        "chown fchown lchown fchownat",
    ),
    Group(
        "extended attributes: user.* on one's own files; others need capabilities",
        "setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr "
        "lremovexattr fremovexattr",
    ),
    Group(
        "memory of the calling process; its amount is bounded by limits",
        "brk munmap mremap mprotect msync mincore mlock mlock2 munlock mlockall munlockall "
        "pkey_alloc pkey_free pkey_mprotect mseal",
    ),
    Group(
        "processes and threads: amounts are bounded by limits; namespaces are asked for by clone's flags",
        "fork vfork execve execveat exit exit_group wait4 waitid set_tid_address set_robust_list futex rseq "
        "membarrier getpid gettid getppid restart_syscall sched_yield",
    ),
    Group(
        "process groups and sessions",
        "getpgid getpgrp getsid setsid",
    ),
    Group(
        "identities: changing them needs capabilities, which only the agent has; there is nothing to gain",
        "getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid "
        "setresgid setgroups setfsuid setfsgid capget capset",
    ),
    Group(
        "handling one's own signals",
        "rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigreturn sigaltstack pause",
    ),
    Group(
        "clocks and timers: reading the machine's, arming one's own",
        "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getitimer setitimer alarm "
        "timer_create timer_settime timer_gettime timer_getoverrun timer_delete",
    ),
    Group(
        "limits and scheduling of oneself, and reading those of others",
        "getrlimit setrlimit getrusage getpriority ioprio_get sched_getparam sched_getscheduler sched_getattr "
        "sched_getaffinity sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu",
    ),
    Group(
        "facts about the machine that /proc tells as well, and random bytes",
        "uname sysinfo getrandom",
    ),
    Group(
        "sockets once they exist: which kinds may exist is decided at socket()",
        "bind listen accept accept4 connect shutdown getsockname getpeername getsockopt recvfrom recvmsg recvmmsg",
    ),
    Group(
        "System V and POSIX IPC inside the sandbox's own IPC namespace",
        "semop semctl semtimedop msgsnd msgrcv msgctl shmat shmdt shmctl mq_unlink mq_timedsend "
        "mq_timedreceive mq_notify mq_getsetattr",
    ),
    Group(
        "Landlock: unprivileged by design, and all it can do is take rights away from the caller",
        "landlock_create_ruleset landlock_add_rule landlock_restrict_self",
    ),
)

# ---------------------------------------------------------------------------------------------------------
# Refused

REFUSED: tuple[Refusal, ...] = (
    Refusal(
        EPERM,
        "mounting, by the old and the new calls: it would lift masks and read-only views (CVE-2021-41133), and "
        "parses file-system images and options in the kernel (CVE-2022-0185, CVE-2021-3493)",
        "mount umount2 pivot_root fsopen fsconfig fsmount fspick open_tree open_tree_attr move_mount "
        "mount_setattr",
    ),
    Refusal(EPERM, "namespaces: a nested one hands out capabilities over kernel code", "unshare setns"),
    Refusal(EPERM, "a second root directory is a way out of the first", "chroot"),
    Refusal(
        ENOSYS,
        "its flags lie in memory, where a filter cannot judge them; libc falls back to clone",
        "clone3",
    ),
    Refusal(
        ENOSYS,
        "its mode lies in memory, so the set-id bits could not be judged; programs fall back to openat",
        "openat2",
    ),
    Refusal(
        ENOSYS,
        "runs other calls from memory, past every rule of this table; a long list of CVEs",
        "io_uring_setup io_uring_enter io_uring_register",
    ),
    Refusal(
        ENOSYS,
        "Linux AIO: its count of contexts is the whole machine's; databases and nginx fall back to threads",
        "io_setup io_destroy io_getevents io_pgetevents io_submit io_cancel",
    ),
    Refusal(
        EPERM,
        "reading and steering other processes",
        "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp get_robust_list",
    ),
    Refusal(
        ENOSYS,
        "advice and reaping for other processes, through descriptors",
        "process_madvise process_mrelease",
    ),
    Refusal(EPERM, "loads programs into the kernel (CVE-2021-3490 and many more)", "bpf"),
    Refusal(
        EPERM, "counts and samples the kernel and other processes; a long list of CVEs", "perf_event_open"
    ),
    Refusal(EPERM, "stops the kernel in the middle of a copy, which makes races winnable", "userfaultfd"),
    Refusal(
        EPERM,
        "kernel keyrings: kept per user of the machine, not per sandbox (CVE-2016-0728)",
        "add_key request_key keyctl",
    ),
    Refusal(
        EPERM,
        "opens files by inode number, past every directory permission (the 'shocker' escape)",
        "name_to_handle_at open_by_handle_at",
    ),
    Refusal(EPERM, "watches and stops file access of the whole mount", "fanotify_init fanotify_mark"),
    Refusal(EPERM, "kernel modules", "init_module finit_module delete_module"),
    Refusal(EPERM, "starting another kernel, or ending this one", "kexec_load kexec_file_load reboot"),
    Refusal(EPERM, "swap, accounting and quotas of the machine", "swapon swapoff acct quotactl quotactl_fd"),
    Refusal(EPERM, "the kernel's log: addresses and other tenants' doings", "syslog"),
    Refusal(EPERM, "setting the machine's clocks", "settimeofday clock_settime adjtimex clock_adjtime"),
    Refusal(EPERM, "the sandbox's host name belongs to its creator", "sethostname setdomainname"),
    Refusal(EPERM, "hangs up the terminal for everyone on it", "vhangup"),
    Refusal(EPERM, "x86 ports and segment descriptors (CVE-2015-3290 class)", "iopl ioperm modify_ldt"),
    Refusal(
        EPERM,
        "writes out every file system of the machine, at the other tenants' cost; fsync works, and sync(2) has "
        "no error a program could see",
        "sync syncfs",
    ),
    Refusal(
        ENOSYS,
        "a filter of the guest's own: ours already stands and cannot be lifted, while new ones are kernel memory, "
        "a BPF surface and, with USER_NOTIF, a way to hold other processes in a call. libseccomp, man and sshd "
        "take the answer for a kernel without seccomp",
        "seccomp",
    ),
    Refusal(
        ENOSYS,
        "lends its pages by reference: a forked child could read what its parent writes later (CVE-2020-29374), "
        "and a sandbox is a fork of a shared zygote",
        "vmsplice",
    ),
    Refusal(
        ENOSYS,
        "NUMA placement, of the caller or of others; libnuma takes the answer for a machine without NUMA",
        "get_mempolicy set_mempolicy mbind set_mempolicy_home_node",
    ),
    Refusal(EPERM, "moves pages of other processes, and tells where they lie", "migrate_pages move_pages"),
    Refusal(ENOSYS, "memory that is hidden from the kernel's own accounting tools", "memfd_secret"),
    Refusal(ENOSYS, "tells which pages of shared files are cached: what other tenants read", "cachestat"),
    Refusal(ENOSYS, "mount tables by id; programs fall back to /proc/self/mountinfo", "statmount listmount"),
    Refusal(
        ENOSYS,
        "security module attributes of the caller",
        "lsm_get_self_attr lsm_set_self_attr lsm_list_modules",
    ),
    Refusal(
        ENOSYS,
        "newer forms that nothing depends on yet: arguments in memory, young code",
        "futex_waitv futex_wake futex_wait futex_requeue setxattrat getxattrat listxattrat removexattrat "
        "file_getattr file_setattr map_shadow_stack",
    ),
    Refusal(
        ENOSYS,
        "entry points of kernel probes, called by the kernel's own trampolines only",
        "uretprobe uprobe",
    ),
    Refusal(
        ENOSYS,
        "obsolete: removed from current kernels, or without a caller",
        "uselib ustat sysfs _sysctl create_module get_kernel_syms query_module nfsservctl getpmsg putpmsg "
        "afs_syscall tuxcall security vserver lookup_dcookie epoll_ctl_old epoll_wait_old set_thread_area "
        "get_thread_area remap_file_pages",
    ),
)

# ---------------------------------------------------------------------------------------------------------
# Judged by argument. Constants carry the kernel's names; each is the value on both architectures.

_EPERM = errno_verdict(EPERM)

# clone(2): linux/sched.h
CLONE_PARENT = 0x00008000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_NEW = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

# open(2), stat(2)
O_CREAT = 0o100
O_TMPFILE_BIT = 0o20000000
S_ISUID_OR_ISGID = 0o6000
S_IFMT = 0o170000
S_IFREG, S_IFIFO, S_IFSOCK = 0o100000, 0o010000, 0o140000

# socket(2)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET = 1, 2, 3, 5
SOCK_TYPE_MASK = 0xF
IPPROTO_IP, IPPROTO_TCP, IPPROTO_UDP = 0, 6, 17
NETLINK_ROUTE = 0
MSG_OOB = 1
SOL_IP, SOL_SOCKET, SOL_TCP, SOL_UDP, SOL_IPV6 = 0, 1, 6, 17, 41

# ioctl(2). The kernel takes the command as an unsigned int, so only the lower half is compared.
TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD = 0x5412, 0x541C, 0x541D, 0x5423
TIOCSSERIAL, TIOCSRS485, TIOCVHANGUP, TIOCSLCKTRMIOS = 0x541F, 0x542F, 0x5437, 0x5457
SIOCETHTOOL = 0x8946
_SOCKET_IOCTLS = (
    *(0x8903, 0x8904, 0x8905),  # FIOGETOWN SIOCGPGRP SIOCATMARK
    *(0x8906, 0x8907, 0x80108906, 0x80108907),  # SIOCGSTAMP, SIOCGSTAMPNS, old and new
    *(0x8910, 0x8912, 0x8913, 0x8915),  # SIOCGIFNAME SIOCGIFCONF SIOCGIFFLAGS SIOCGIFADDR
    *(0x8917, 0x8919, 0x891B, 0x891D),  # SIOCGIFDSTADDR SIOCGIFBRDADDR SIOCGIFNETMASK SIOCGIFMETRIC
    *(0x8921, 0x8927, 0x8933, 0x8942, 0x8970),  # SIOCGIFMTU HWADDR INDEX TXQLEN MAP
)
_FILE_IOCTLS = (
    *(0x80086601, 0x801C581F, 0x80087601),  # FS_IOC_GETFLAGS FS_IOC_FSGETXATTR FS_IOC_GETVERSION
    *(0xC020660B, 0x40049409, 0x4020940D),  # FS_IOC_FIEMAP FICLONE FICLONERANGE
    0x80045200,  # RNDGETENTCNT
)

# fcntl(2)
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_SETDELEG = 8, 10, 15, 1024, 1040

# prctl(2): linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
_PRCTL_ALLOWED = (
    *(1, 2, 3, 4),  # SET/GET_PDEATHSIG, GET/SET_DUMPABLE: of the caller
    # KEEPCAPS, CAPBSET, SECUREBITS, CAP_AMBIENT: they can only take away, or need capabilities
    *(7, 8, 23, 24, 27, 28, 47),
    *(13, 14, 15, 16, 29, 30),  # TIMING, NAME, TIMERSLACK
    *(21, 37, 38, 39, 40),  # GET_SECCOMP, GET_CHILD_SUBREAPER, SET/GET_NO_NEW_PRIVS, GET_TID_ADDRESS
    *(41, 42),  # SET/GET_THP_DISABLE
    *(50, 51, 54, 55, 56, 60, 61, 63, 64),  # aarch64: vector length, pointer keys, tagged addresses
    *(52, 65, 66),  # GET_SPECULATION_CTRL, SET/GET_MDWE
    *(0x53564D41, 0x41555856),  # PR_SET_VMA (names of mappings), PR_GET_AUXV
)
_ARCH_PRCTL_ALLOWED = (
    *(0x1001, 0x1002, 0x1003, 0x1004, 0x1011),  # SET_GS SET_FS GET_FS GET_GS GET_CPUID
    *(0x1021, 0x1022, 0x1023, 0x1024, 0x1025),  # vector state components (AMX)
)

# personality(2)
PERSONALITY_QUERY = 0xFFFFFFFF
PER_LINUX = 0

# mmap(2), madvise(2), memfd_create(2), shmget(2), rename(2)
MAP_HUGETLB = 0x40000
MADV_MERGEABLE = 12
MFD_HUGETLB = 4
SHM_HUGETLB = 0o4000
RENAME_WHITEOUT = 4

_HUGE_PAGES = "huge pages come from a pool of the whole machine and are not charged to the memory limit"
_SET_ID = "set-id bits: a file left with them in a shared directory would run as its owner on the host"
_PROCESS_1 = "process 1: the agent is not to be signalled, slowed down or limited by what it keeps"
_URGENT = "urgent data: dead in practice, and on local sockets a way into the kernel (CVE-2025-38236)"
_WATCHED = "memory that belongs to no process escapes a limit that is watched per process"


def _not_agent(*arguments: int) -> Rule:
    """All calls but those whose pid argument (an int) is the agent's."""
    return Rule(tuple(when(_EPERM, one_of(argument, AGENT)) for argument in arguments), ALLOW)


def _mode(mode: int, flags: int | None = None) -> Rule:
    """No set-id bits in argument `mode`; where there are flags, the kernel reads it only if a file is made."""
    tests = [any_bit(mode, S_ISUID_OR_ISGID)]
    if flags is not None:
        tests.append(any_bit(flags, O_CREAT | O_TMPFILE_BIT))
    return Rule((when(_EPERM, *tests),), ALLOW)


def _not_urgent(flags: int) -> Rule:
    """No MSG_OOB in argument `flags`."""
    return Rule((when(errno_verdict(EOPNOTSUPP), any_bit(flags, MSG_OOB)),), ALLOW)


def _node(mode: int, set_id: bool = False) -> Rule:
    """Files, FIFOs and sockets, without set-id bits unless allowed; no devices (nor overlay whiteouts, which are some)."""
    kinds = when(ALLOW, one_of(mode, 0, S_IFREG, S_IFIFO, S_IFSOCK, mask=S_IFMT))
    return Rule((kinds,) if set_id else (when(_EPERM, any_bit(mode, S_ISUID_OR_ISGID)), kinds), _EPERM)


_NO_PROTOCOL = errno_verdict(EPROTONOSUPPORT)
_NO_OPTION = errno_verdict(ENOPROTOOPT)

_ARGUMENT_RULES: dict[str, ArgumentRule] = {
    "clone": ArgumentRule(
        "new namespaces hand out capabilities; CLONE_PARENT would make a child of the agent, out of its job's tree",
        # The kernel reads the lower half: `flags & 0xffffffff` (SYSCALL_DEFINE5(clone) in kernel/fork.c).
        Rule((when(_EPERM, any_bit(0, _CLONE_NEW | CLONE_PARENT)),), ALLOW),
    ),
    "socket": ArgumentRule(
        "local and internet sockets, and NETLINK_ROUTE for getifaddrs. No packet, vsock, crypto or other family "
        "(CVE-2017-7308, CVE-2020-14386), no raw sockets, no netfilter or other netlink (CVE-2022-1015, "
        "CVE-2023-32233), no SCTP, DCCP, MPTCP, L2TP",
        Rule(
            (
                when(ALLOW, one_of(0, AF_UNIX)),
                when(_NO_PROTOCOL, one_of(0, AF_NETLINK), none_of(2, NETLINK_ROUTE)),
                when(ALLOW, one_of(0, AF_NETLINK)),
                when(errno_verdict(EAFNOSUPPORT), none_of(0, AF_INET, AF_INET6)),
                when(_EPERM, none_of(1, SOCK_STREAM, SOCK_DGRAM, mask=SOCK_TYPE_MASK)),
                when(ALLOW, one_of(2, IPPROTO_IP, IPPROTO_TCP, IPPROTO_UDP)),
            ),
            _NO_PROTOCOL,
        ),
    ),
    "socketpair": ArgumentRule(
        "only local sockets come in pairs; TIPC does too (CVE-2021-43267)",
        Rule((when(ALLOW, one_of(0, AF_UNIX)),), errno_verdict(EOPNOTSUPP)),
    ),
    "setsockopt": ArgumentRule(
        "no netfilter tables (CVE-2021-22555), no IPsec policy, no BPF on sockets, no protocol layers under TCP "
        "(CVE-2023-0461) and UDP",
        Rule(
            (
                # IPT_SO_SET_*, ARPT_SO_SET_*, EBT_SO_SET_*, IP_VS_SO_SET_*
                when(_NO_OPTION, one_of(1, SOL_IP), at_least(2, 64)),
                when(_NO_OPTION, one_of(1, SOL_IP), one_of(2, 16, 17)),  # IP_IPSEC_POLICY IP_XFRM_POLICY
                when(_NO_OPTION, one_of(1, SOL_IPV6), one_of(2, 34, 35, 64, 65)),  # the same, IP6T_SO_SET_*
                # SO_ATTACH_FILTER SO_ATTACH_BPF SO_ATTACH_REUSEPORT_CBPF SO_ATTACH_REUSEPORT_EBPF
                when(_NO_OPTION, one_of(1, SOL_SOCKET), one_of(2, 26, 50, 51, 52)),
                when(_NO_OPTION, one_of(1, SOL_TCP), one_of(2, 31)),  # TCP_ULP
                when(_NO_OPTION, one_of(1, SOL_UDP), one_of(2, 100)),  # UDP_ENCAP
            ),
            ALLOW,
        ),
    ),
    "sendto": ArgumentRule(_URGENT, _not_urgent(3)),
    "sendmsg": ArgumentRule(_URGENT, _not_urgent(2)),
    "sendmmsg": ArgumentRule(_URGENT, _not_urgent(3)),
    "ioctl": ArgumentRule(
        "terminals, reading of interfaces, file facts and clones. No typing into a terminal (TIOCSTI, TIOCLINUX: "
        "CVE-2017-5226, CVE-2023-28100), no line disciplines (CVE-2017-2636), no file flags, no file-system, "
        "bridge, namespace or device commands",
        Rule(
            (
                # Masked to 16 bits: the kernel compares all 32, so this refuses a little more.
                when(
                    _EPERM,
                    one_of(
                        1,
                        *(TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD),
                        *(TIOCSSERIAL, TIOCSRS485, TIOCVHANGUP, TIOCSLCKTRMIOS),
                        mask=0xFFFF,
                    ),
                ),
                # Type 'T' up to number 0x7f: terminals, FIONREAD, FIONBIO, FIOCLEX. From 0xc8 on it is tun.
                when(ALLOW, one_of(1, 0x5400, mask=0xFF80)),
                when(ALLOW, one_of(1, *_SOCKET_IOCTLS, *_FILE_IOCTLS)),
                when(errno_verdict(EOPNOTSUPP), one_of(1, SIOCETHTOOL)),  # psutil expects this answer
            ),
            errno_verdict(ENOTTY),
        ),
    ),
    "fcntl": ArgumentRule(
        "process 1: no signals to it by way of a descriptor's owner; no leases, which hold up the host's own "
        "open of a shared file",
        Rule(
            (
                when(_EPERM, one_of(1, F_SETOWN), one_of(2, AGENT, -AGENT)),
                when(_EPERM, one_of(1, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_SETDELEG)),
            ),
            ALLOW,
        ),
    ),
    "prctl": ArgumentRule(
        "options that concern the caller only, from a list. A job's subreaper may not resign, or its orphans "
        "would leave its tree. No PR_SET_SECCOMP, PR_SET_MM, PR_SET_PTRACER, core scheduling, page merging",
        Rule(
            (
                when(ALLOW, one_of(0, *_PRCTL_ALLOWED)),
                when(_EPERM, one_of(0, PR_SET_CHILD_SUBREAPER), *is_zero_64(1)),
                when(ALLOW, one_of(0, PR_SET_CHILD_SUBREAPER)),
            ),
            errno_verdict(EINVAL),
        ),
    ),
    "arch_prctl": ArgumentRule(
        "segment bases and vector state; no vDSO remapping, address masking or CPUID faulting",
        Rule((when(ALLOW, one_of(0, *_ARCH_PRCTL_ALLOWED)),), errno_verdict(EINVAL)),
    ),
    "personality": ArgumentRule(
        "asking, and plain Linux; others switch off address randomisation or change what calls mean",
        Rule((when(ALLOW, one_of(0, PERSONALITY_QUERY, PER_LINUX)),), _EPERM),
    ),
    "mmap": ArgumentRule(_HUGE_PAGES, Rule((when(errno_verdict(ENOMEM), any_bit(3, MAP_HUGETLB)),), ALLOW)),
    "memfd_create": ArgumentRule(
        _HUGE_PAGES, Rule((when(errno_verdict(ENOMEM), any_bit(1, MFD_HUGETLB)),), ALLOW)
    ),
    "shmget": ArgumentRule(_HUGE_PAGES, Rule((when(errno_verdict(ENOMEM), any_bit(2, SHM_HUGETLB)),), ALLOW)),
    "madvise": ArgumentRule(
        "merging equal pages tells by its timing what other tenants' memory holds",
        Rule((when(errno_verdict(EINVAL), one_of(2, MADV_MERGEABLE)),), ALLOW),
    ),
    "renameat2": ArgumentRule(
        "a whiteout is a device node, and means 'deleted' to whoever reads the layer",
        Rule((when(errno_verdict(EINVAL), any_bit(4, RENAME_WHITEOUT)),), ALLOW),
    ),
    "open": ArgumentRule(_SET_ID, _mode(2, flags=1)),
    "openat": ArgumentRule(_SET_ID, _mode(3, flags=2)),
    "mq_open": ArgumentRule(_SET_ID, _mode(2, flags=1)),
    "creat": ArgumentRule(_SET_ID, _mode(1)),
    "chmod": ArgumentRule(_SET_ID, _mode(1)),
    "fchmod": ArgumentRule(_SET_ID, _mode(1)),
    "fchmodat": ArgumentRule(_SET_ID, _mode(2)),
    "fchmodat2": ArgumentRule(_SET_ID, _mode(2)),
    "mkdir": ArgumentRule(_SET_ID, _mode(1)),
    "mkdirat": ArgumentRule(_SET_ID, _mode(2)),
    "mknod": ArgumentRule("no devices; " + _SET_ID, _node(1)),
    "mknodat": ArgumentRule("no devices; " + _SET_ID, _node(2)),
    "kill": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "tkill": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "tgkill": ArgumentRule(_PROCESS_1, _not_agent(0, 1)),
    "rt_sigqueueinfo": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "rt_tgsigqueueinfo": ArgumentRule(_PROCESS_1, _not_agent(0, 1)),
    "pidfd_open": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "prlimit64": ArgumentRule(_PROCESS_1 + " (prlimit(1, RLIMIT_CPU, 1) killed it)", _not_agent(0)),
    "sched_setparam": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "sched_setscheduler": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "sched_setattr": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "sched_setaffinity": ArgumentRule(_PROCESS_1, _not_agent(0)),
    "setpgid": ArgumentRule("process 1: joining its group would let kill(0) reach it", _not_agent(1)),
    "setpriority": ArgumentRule(
        _PROCESS_1 + ", nor through its group or user",
        Rule((when(_EPERM, none_of(0, 0)), when(_EPERM, one_of(1, AGENT))), ALLOW),  # 0: PRIO_PROCESS
    ),
    "ioprio_set": ArgumentRule(
        _PROCESS_1 + ", nor through its group or user",
        Rule((when(_EPERM, none_of(0, 1)), when(_EPERM, one_of(1, AGENT))), ALLOW),  # 1: IOPRIO_WHO_PROCESS
    ),
}

# Allowed in general; what the options of `guest_filter` take away.

_ALLOWED_UNLESS_SINGLE_UID = Refusal(
    ENOSYS,
    "process 1: its descriptor can be had from /proc/1 and from a socket's peer, and cannot be told from others",
    "pidfd_send_signal",
)
_ALLOWED_UNLESS_WATCHED = Refusal(ENOSYS, _WATCHED, "memfd_create shmget semget msgget")
_OPTIONAL = "pidfd_send_signal semget msgget"  # allowed, when no option refuses them

# What a policy with `root: true` changes. Set-id bits may be set: packages ship them, and dpkg fails where they are
# refused. They are dead: every file system inside is nosuid, no_new_privs is in force, and no directory of the host
# can be written from such a sandbox (a workspace with `rw` excludes it), so none ever reaches the machine.
_DEAD_SET_ID = "set-id bits may be kept with root: packages ship them, and nosuid and no_new_privs make them dead"
_ROOT_ARGUMENT_RULES: dict[str, ArgumentRule] = {
    **{
        name: ArgumentRule(_DEAD_SET_ID, Rule((), ALLOW))
        for name in ("open", "openat", "mq_open", "creat", "chmod", "fchmod", "fchmodat", "fchmodat2", "mkdir", "mkdirat")
    },
    "mknod": ArgumentRule("no devices; " + _DEAD_SET_ID, _node(1, set_id=True)),
    "mknodat": ArgumentRule("no devices; " + _DEAD_SET_ID, _node(2, set_id=True)),
    "setns": ArgumentRule(
        "the agent's children enter the user namespace in which user code lives. The kernel wants CAP_SYS_ADMIN over "
        "the one entered, which only the agent has: from inside there is none below, and those above are out of reach",
        Rule((when(ALLOW, one_of(1, CLONE_NEWUSER)),), _EPERM),
    ),
}


class Decision(NamedTuple):
    """What the filter does with one call. `kind` is `allow`, `judge` (by arguments) or `refuse`.

    `verdict` is a seccomp verdict or a `seccomp.Rule`; `number` is the call's on the architecture asked for.
    """

    name: str
    number: int
    kind: str
    verdict: Verdict
    reason: str


def decisions(
    arch: str | None = None, *, single_uid: bool, root: bool = False, watched_memory: bool = False
) -> tuple[Decision, ...]:
    """Every call the tables know on `arch` (default: this machine's), in order of number, with its reason.

    Options as in `guest_filter`.
    """
    arch = arch or numbers.architecture()
    by_name: dict[str, tuple[str, Verdict, str]] = {}
    for reason, names in ALLOWED:
        for name in names.split():
            by_name[name] = ("allow", ALLOW, reason)
    for name in _OPTIONAL.split():
        by_name[name] = ("allow", ALLOW, "allowed, since no option refuses it")
    rules = dict(_ARGUMENT_RULES)
    for name, (reason, rule) in rules.items():
        by_name[name] = ("judge", rule, reason)
    refusals = list(REFUSED)
    if single_uid:
        refusals.append(_ALLOWED_UNLESS_SINGLE_UID)
    if watched_memory:
        refusals.append(_ALLOWED_UNLESS_WATCHED)
    for number, reason, names in refusals:
        for name in names.split():
            by_name[name] = ("refuse", errno_verdict(number), reason)
    if root:
        for name, (reason, rule) in _ROOT_ARGUMENT_RULES.items():
            by_name[name] = ("judge", rule, reason)
    found = []
    for name, number in sorted(numbers.table(arch).items(), key=lambda item: item[1]):
        kind, verdict, reason = by_name.get(name, ("refuse", DEFAULT, "not on the list"))
        found.append(Decision(name, number, kind, verdict, reason))
    return tuple(found)


_built: dict[tuple[str, bool, bool, bool], bytes] = {}


def _build(arch: str, single_uid: bool, root: bool, watched_memory: bool) -> bytes:
    verdicts = {
        decision.number: decision.verdict
        for decision in decisions(arch, single_uid=single_uid, root=root, watched_memory=watched_memory)
    }
    return seccomp.assemble(arch, verdicts, default=DEFAULT, foreign=FOREIGN_ARCHITECTURE)


def guest_filter(
    arch: str | None = None, *, single_uid: bool, root: bool = False, watched_memory: bool = False
) -> bytes:
    """The seccomp program for everything inside a sandbox, to be given to `seccomp.install`.

    `arch` is `x86_64` or `aarch64`, by default this machine's. `single_uid`: agent and user code share one uid,
    so the ways to process 1 that the filter cannot judge are closed as well. `root`: the policy says
    `root: true`. `watched_memory`: memory is counted per process, without a cgroup, so memory that belongs to
    no process is refused. Built once per combination.

    Raises OSError (ENOSYS) on a machine and ValueError for a name without a table of system calls.
    """
    key = arch or numbers.architecture(), bool(single_uid), bool(root), bool(watched_memory)
    if key not in _built:
        _built[key] = _build(*key)
    return _built[key]


def denied(
    arch: str | None = None, *, single_uid: bool, root: bool = False, watched_memory: bool = False
) -> tuple[Decision, ...]:
    """The calls that are refused whatever their arguments; `seccomp.describe` puts their verdict in words."""
    found = decisions(arch, single_uid=single_uid, root=root, watched_memory=watched_memory)
    return tuple(decision for decision in found if decision.kind == "refuse")
