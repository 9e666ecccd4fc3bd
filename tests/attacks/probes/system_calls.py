"""Each refused system call, with arguments that do no harm: a bad descriptor, pointer 1, a process that is not there.

The kernel's own EFAULT, EBADF, ESRCH or EINVAL means that the call got through; EPERM or ENOSYS that it was stopped.
A new call is one line more in NUMBERS. The numbers of x86-64 and aarch64 are the same from 424 on.
"""
# ruff: noqa: UP031

import ctypes
import os
import platform
import sys

from report import libc, say, system_call

X86 = platform.machine() == "x86_64"
NUMBERS = {
    # name: (x86-64, aarch64, arguments)
    "mount": (165, 40, (1, 1, 1, 0, 1)), "umount2": (166, 39, (1, 0)), "pivot_root": (155, 41, (1, 1)),
    "setns": (308, 268, (-1, 0)), "unshare": (272, 97, (0x02000000 | 0x1,)), "fsopen": (430, 430, (1, 0)),
    "fsconfig": (431, 431, (-1, 0, 1, 1, 0)), "fsmount": (432, 432, (-1, 0, 0)), "fspick": (433, 433, (-1, 1, 0)),
    "open_tree": (428, 428, (-1, 1, 0)), "move_mount": (429, 429, (-1, 1, -1, 1, 0)),
    "mount_setattr": (442, 442, (-1, 1, 0, 1, 32)), "bpf": (321, 280, (0, 1, 64)),
    "perf_event_open": (298, 241, (1, 0, -1, -1, 0)), "userfaultfd": (323, 282, (-1,)),
    "ptrace": (101, 117, (16, 0x3FFFFFFF, 0, 0)), "process_vm_readv": (310, 270, (0x3FFFFFFF, 1, 1, 1, 1, 0)),
    "process_vm_writev": (311, 271, (0x3FFFFFFF, 1, 1, 1, 1, 0)), "pidfd_getfd": (438, 438, (-1, 0, 0)),
    "kcmp": (312, 272, (0x3FFFFFFF, 0x3FFFFFFF, 0, 0, 0)), "add_key": (248, 217, (1, 1, 1, 1, 0)),
    "request_key": (249, 218, (1, 1, 1, 0)), "keyctl": (250, 219, (11, 0x3FFFFFFF, 1, 1)),
    "open_by_handle_at": (304, 265, (-1, 1, 0)), "name_to_handle_at": (303, 264, (-1, 1, 1, 1, 0)),
    "fanotify_init": (300, 262, (0xFFFFFF, 0)), "init_module": (175, 105, (1, 1, 1)),
    "finit_module": (313, 273, (-1, 1, 0)), "delete_module": (176, 106, (1, 0)),
    "kexec_load": (246, 104, (0, 0xFFFF, 1, 0)), "reboot": (169, 142, (0, 0, 0, 0)), "swapon": (167, 224, (1, 0)),
    "swapoff": (168, 225, (1,)), "acct": (163, 89, (1,)), "syslog": (103, 116, (3, 0, -1)),
    "settimeofday": (164, 170, (1, 0)), "clock_settime": (227, 112, (0, 1)), "adjtimex": (159, 171, (1,)),
    "quotactl": (179, 60, (0x800000, 1, 0, 1)), "lookup_dcookie": (212, 18, (1, 1, 1)),
    "seccomp": (317, 277, (1, 0, 1)), "clone3": (435, 435, (1, 1)), "openat2": (437, 437, (-1, 1, 1, 24)),
    "io_uring_setup": (425, 425, (0, 1)), "io_uring_enter": (426, 426, (-1, 1, 1, 0, 0, 0)),
    "io_uring_register": (427, 427, (-1, 0, 0, 0)), "process_madvise": (440, 440, (-1, 1, 1, 0, 0)),
    "memfd_secret": (447, 447, (0xFF,)), "move_pages": (279, 239, (0x3FFFFFFF, 1, 1, 1, 1, 0)),
    "chroot": (161, 51, (1,)), "sethostname": (170, 161, (1, 1)), "vmsplice": (278, 75, (-1, 1, 1, 0)),
    "statmount": (457, 457, (1, 1, 1, 0)), "mbind": (237, 235, (1, 1, 1, 1, 1, 1)),
    "set_mempolicy": (238, 237, (99, 1, 1)), "migrate_pages": (256, 238, (0x3FFFFFFF, 1, 1, 1)),
}  # fmt: skip
if X86:
    NUMBERS.update({"iopl": (172, 0, (9,)), "ioperm": (173, 0, (1 << 20, 1, 1)), "modify_ldt": (154, 0, (1, 1, 1)),
                    "kexec_file_load": (320, 0, (-1, -1, 0, 1, 0))})  # fmt: skip


def main():
    if "--own-namespace" in sys.argv:
        # The weaker place of an ordinary user: root of a user namespace of its own, without any filter.
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(ctypes.c_int(0x10000000)) == 0:
            for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % user), ("gid_map", "0 %d 1" % group)):
                with open("/proc/self/" + name, "w") as file:
                    file.write(text)
    for name, (first, second, arguments) in NUMBERS.items():
        say(name, system_call(first if X86 else second, *arguments))
    if X86:
        for name in ("mount", "ptrace", "setns", "bpf", "io_uring_setup", "keyctl"):
            number, _, arguments = NUMBERS[name]
            say("x32 " + name, system_call(number | 0x40000000, *arguments))
            say("high half " + name, system_call(number | 1 << 32, *arguments))


main()
