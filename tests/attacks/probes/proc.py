"""Walks /proc: what can be opened for writing, what tells about the machine, and other processes' insides."""
# ruff: noqa: UP031

import os
import stat
import sys

from report import name_of, say

null = os.stat("/dev/null").st_rdev
writable = []
for directory, directories, files in os.walk("/proc"):
    if directory == "/proc":
        directories[:] = [name for name in directories if not name.isdigit() and name not in ("self", "thread-self")]
    for file in files:
        path = os.path.join(directory, file)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        status = os.fstat(descriptor)
        if not (stat.S_ISCHR(status.st_mode) and status.st_rdev == null):  # a mask swallows what is written
            writable.append(path)
        os.close(descriptor)
say("writable", writable)
for name in ("kcore", "kallsyms", "keys", "timer_list", "sched_debug", "interrupts", "iomem", "kmsg", "cmdline", "modules", "config.gz"):
    try:
        with open("/proc/" + name, "rb") as file:
            say("read " + name, len(file.read(4096)))
    except OSError as problem:
        say("read " + name, name_of(problem.errno))
for path in ("/sys/class", "/sys/firmware", "/sys/fs/cgroup", "/sys/kernel/security"):
    say("exists " + path, os.path.exists(path))
with open("/proc/self/mountinfo") as file:
    say("mountinfo", file.read())
with open("/proc/self/maps") as file:
    say("maps", sorted({line.split(None, 5)[5].strip() for line in file if len(line.split(None, 5)) > 5}))
say("descriptors", sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists("/proc/self/fd/" + name)))
say("devices", sorted(os.listdir("/dev")))
say("processes", sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
for pid in sys.argv[1:]:
    for name in ("mem", "environ", "maps", "auxv", "fd/0", "cwd/.", "root/.", "exe", "pagemap", "task/%s/mem" % pid):
        path = "/proc/%s/%s" % (pid, name)
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            say(path, "done")
        except OSError as problem:
            say(path, name_of(problem.errno))
