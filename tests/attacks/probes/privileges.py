"""Every way up: set-id files, file capabilities, devices, namespaces, ids, and what the kernel says we hold."""
# ruff: noqa: B023 (the lambdas are called at once)

import ctypes
import os
import shutil
import stat
import sys

from report import attempt, libc, say

with open("/proc/self/status") as status:
    fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
say("status", {name: fields.get(name) for name in ("NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Uid")})

place = sys.argv[1]
tool = os.path.join(place, "tool")
shutil.copy("/usr/bin/id", tool)
attempt("chmod set-uid", lambda: os.chmod(tool, 0o4755))
say("mode after chmod", oct(stat.S_IMODE(os.stat(tool).st_mode)))
attempt("open set-uid", lambda: os.close(os.open(os.path.join(place, "made"), os.O_CREAT | os.O_WRONLY, 0o4755)))
attempt("mkdir set-gid", lambda: os.mkdir(os.path.join(place, "directory"), 0o2777))
attempt("mknod set-uid", lambda: os.mknod(os.path.join(place, "node"), 0o104755))
for name, kind, numbers in (("mem", stat.S_IFCHR, (1, 1)), ("kmsg", stat.S_IFCHR, (1, 11)), ("loop", stat.S_IFBLK, (7, 0)), ("disk", stat.S_IFBLK, (8, 0)), ("kvm", stat.S_IFCHR, (10, 232)), ("whiteout", stat.S_IFCHR, (0, 0))):
    attempt("mknod " + name, lambda: os.mknod(os.path.join(place, name), kind | 0o666, os.makedev(*numbers)))
capability = b"\x01\x00\x00\x02" + b"\xff\xff\xff\xff" * 4
attempt("file capability", lambda: os.setxattr(tool, "security.capability", capability))
attempt("trusted xattr", lambda: os.setxattr(tool, "trusted.overlay.opaque", b"y"))
attempt("chown to 0", lambda: os.chown(tool, 0, 0))
for name, change in (
    ("setuid 0", lambda: os.setuid(0)), ("setgroups", lambda: os.setgroups([0])),
    ("setresuid 65533", lambda: os.setresuid(65533, 65533, 65533)),
):  # fmt: skip
    child = os.fork()
    if child == 0:
        attempt(name, change)
        os._exit(0)
    os.waitpid(child, 0)
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("network", 0x40000000), ("ipc", 0x8000000)):
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(ctypes.c_int(flag)) == 0 else 1)
    say("unshare " + name, "done" if os.waitpid(child, 0)[1] == 0 else "refused")
libc.clone.restype = ctypes.c_int
stack = ctypes.create_string_buffer(1 << 16)
entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
result = libc.clone(entry, ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64), ctypes.c_int(0x10000000 | 17), None)
say("clone user", "done" if result > 0 else "refused")
if result > 0:
    os.waitpid(result, 0)
say("clear no_new_privs", libc.prctl(38, 0, 0, 0, 0))
for path in ("/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern"):
    attempt("write " + path, lambda: os.close(os.open(path, os.O_WRONLY)))
