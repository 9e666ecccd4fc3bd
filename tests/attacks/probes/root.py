"""What uid 0 of a sandbox tries against the agent, the kernel's entry points and its own bounds. Prints one answer a line.

Argument 1: the pid of the process that must survive (1 inside; the control's own victim outside).
"""

# ruff: noqa: B023, SIM115  (each attempt runs at once, and the process is short)

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
victim = int(sys.argv[1])
NUMBERS = {"x86_64": {"setns": 308, "prlimit64": 302, "process_vm_readv": 310}, "aarch64": {"setns": 268, "prlimit64": 261, "process_vm_readv": 270}}
number = NUMBERS[os.uname().machine]


def tell(name, answer):
    print(json.dumps([name, answer]), flush=True)


def tried(name, action):
    try:
        answer = action()
        tell(name, "done" if answer is None else answer)
    except ValueError as error:
        tell(name, str(error))
    except OSError as error:
        tell(name, errno.errorcode.get(error.errno, str(error.errno)))


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def become(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def written(path, text):
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def in_child(action):
    """In a child, so that what works (in the control) changes nothing for the next attempts."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except ValueError:  # what Python makes of setrlimit's EPERM
            os._exit(errno.EPERM)
        except OSError as error:
            os._exit(error.errno)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise OSError(status, "refused")


def copy_of(path, mode):
    with open("/proc/self/exe" if path is None else path, "rb") as source, open("/var/tmp/set-id", "wb") as target:
        target.write(source.read())
    os.chmod("/var/tmp/set-id", mode)


# The agent: memory, files of /proc, limits, priorities, kill order; signals come last, since the control's victim dies of them.
for name in ("mem", "environ", "maps", "stack", "syscall", "auxv", "io", "fd/0", "cwd/.", "root/.", "exe", "map_files", "fdinfo/0"):
    tried(f"open {name}", lambda: os.close(os.open(f"/proc/{victim}/{name}", os.O_RDONLY)))
for name, text in (("oom_score_adj", b"1000"), ("coredump_filter", b"0"), ("uid_map", b"0 0 1"), ("gid_map", b"0 0 1"), ("setgroups", b"deny"), ("clear_refs", b"1"), ("timerslack_ns", b"1"), ("comm", b"x")):
    tried(f"write {name}", lambda: written(f"/proc/{victim}/{name}", text))
tried("prlimit", lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)) and None)
tried("priority", lambda: os.setpriority(os.PRIO_PROCESS, victim, 19))
tried("affinity", lambda: os.sched_setaffinity(victim, {0}))
tried("read memory", lambda: checked(libc.syscall(number["process_vm_readv"], victim, None, 0, None, 0, 0)))
tried("ptrace", lambda: checked(libc.ptrace(16, victim, 0, 0)))

# Its ids, and the marks of jobs.
for uid in (65533, 70000, 70001, 1900, 2000, 65535, 100000, 0x80000000 - 1):
    tried(f"become {uid}", lambda: in_child(lambda: become(uid)))
    tried(f"chown to {uid}", lambda: (open("/var/tmp/owned", "w").close(), os.chown("/var/tmp/owned", uid, uid))[-1])
for gid in (65533, 70000, 70119):
    tried(f"group {gid}", lambda: os.setgroups([gid]))

# Its bounds: hard limits, kill order, capabilities, namespaces.
for name in ("NPROC", "NOFILE", "FSIZE", "MEMLOCK", "NICE", "RTPRIO", "SIGPENDING", "MSGQUEUE", "CORE"):
    what = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(what)[1]
    tried(f"raise {name}", lambda: in_child(lambda: resource.setrlimit(what, (0, hard + 1))))
tried("lower kill order", lambda: written("/proc/self/oom_score_adj", b"-1"))
tried("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -1))
tried("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
tried("bounding set", lambda: checked(libc.prctl(23, 21, 0, 0, 0) - 1))
tried("clear no_new_privs", lambda: checked(libc.prctl(38, 0, 0, 0, 0)))

header = struct.pack("=Ii", 0x20080522, 0)
tried("take all capabilities", lambda: checked(libc.capset(header, struct.pack("=6I", *[0xFFFFFFFF] * 6))))
tried("ambient", lambda: checked(libc.prctl(47, 2, 21, 0, 0)))
tried("open namespace", lambda: os.close(os.open(f"/proc/{victim}/ns/user", os.O_RDONLY)))
own = os.open("/proc/self/ns/user", os.O_RDONLY)
tried("enter own namespace", lambda: checked(libc.syscall(number["setns"], own, 0x10000000)))
pidfd = os.pidfd_open(os.getpid())
tried("enter by pidfd", lambda: checked(libc.syscall(number["setns"], pidfd, 0x10000000)))
for name, flag in (("mount", 0x20000), ("network", 0x40000000), ("pid", 0x20000000), ("uts", 0x4000000), ("ipc", 0x8000000)):
    kind = {"mount": "mnt", "network": "net", "pid": "pid", "uts": "uts", "ipc": "ipc"}[name]
    descriptor = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
    tried(f"enter {name}", lambda: checked(libc.syscall(number["setns"], descriptor, flag)))
    tried(f"new {name}", lambda: in_child(lambda: checked(libc.unshare(flag))))
    os.close(descriptor)
tried("new user", lambda: in_child(lambda: checked(libc.unshare(0x10000000))))
tried("mount tmpfs", lambda: checked(libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None)))
tried("remount proc", lambda: checked(libc.mount(None, b"/proc/sys", None, 0x1020, None)))
tried("umount", lambda: checked(libc.umount2(b"/proc/sys", 2)))
tried("chroot", lambda: in_child(lambda: os.chroot("/home")))
tried("host name", lambda: socket.sethostname("evil"))
tried("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
tried("packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close())
for kind, device in (("mem", os.makedev(1, 1)), ("whiteout", 0), ("loop", os.makedev(7, 0))):
    tried(f"mknod {kind}", lambda: (os.mknod(f"/var/tmp/{kind}", 0o600 | 0o020000, device), os.unlink(f"/var/tmp/{kind}"))[0])
capability = struct.pack("=IIIII", 0x02000001, 1 << 13, 0, 0, 0)
tried("file capability", lambda: os.setxattr("/var/tmp/owned", "security.capability", capability))
for name in ("trusted.overlay.opaque", "trusted.x", "security.x"):
    tried(f"xattr {name}", lambda: os.setxattr("/var/tmp/owned", name, b"y"))

# What it may write below /proc and /sys: nothing of the kernel's.
opened = []
for top in ("/proc/sys", "/proc/irq", "/proc/fs", "/proc/bus", "/sys") if victim == 1 else ():  # the machine's are left alone
    for directory, _, names in os.walk(top):
        for name in names:
            try:
                os.close(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_NONBLOCK))
                opened.append(f"{directory}/{name}")
            except OSError:
                pass
tell("kernel files opened for writing", opened[:5])

# A set-id file may exist with root, and gives nothing to who executes it.
copy_of("/usr/bin/id", 0o6755)
tell("mode", oct(os.stat("/var/tmp/set-id").st_mode & 0o7777))
pid = os.fork()
if pid == 0:
    become(1000)
    os.dup2(os.open("/var/tmp/who", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666) if os.access("/var/tmp", os.W_OK) else 1, 1)
    os.execv("/var/tmp/set-id", ["id", "-u"])
os.waitpid(pid, 0)
tell("set-id gave", open("/var/tmp/who").read().strip())
for path in ("/var/tmp/set-id", "/var/tmp/who", "/var/tmp/owned"):
    os.unlink(path)
# Signals to the agent, by number and by descriptor.
for sent in (signal.SIGUSR1, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    tried(f"kill {sent.name}", lambda: os.kill(victim, sent))
    try:
        pidfd = os.open(f"/proc/{victim}", os.O_RDONLY | os.O_DIRECTORY)
        tried(f"pidfd {sent.name}", lambda: signal.pidfd_send_signal(pidfd, sent))
        os.close(pidfd)
    except OSError:
        pass
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
tell("status", {name: status[name] for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")})
