"""Every way to write what lies below a workspace past its mode; the current directory is the one under attack.

Outside, in a directory of its own, most of them work: that is the control.
"""

import ctypes
import mmap
import os
import stat

from report import attempt, libc, name_of, say

RENAME_EXCHANGE = 2


def write(path, data=b"attacked", flags=os.O_WRONLY):
    descriptor = os.open(path, flags, 0o644)
    os.write(descriptor, data)
    os.close(descriptor)


def through_descriptor():
    """A read-only descriptor opened again for writing by its name in /proc."""
    descriptor = os.open("file", os.O_RDONLY)
    write("/proc/self/fd/%d" % descriptor)  # noqa: UP031


def through_directory():
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    write("/proc/self/fd/%d/file" % directory)  # noqa: UP031


def through_map():
    with open("file", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[0:1] = b"X"
        view.flush()


def through_hard_link():
    os.link("file", "second")
    write("second")


def exchange():
    if libc.syscall(ctypes.c_long(316 if os.uname().machine == "x86_64" else 276), -100, b"file", -100, b"other", RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def upwards():
    """From a descriptor of a directory up, as far as there is a parent."""
    current = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(40):
        current = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=current)
    say("upwards names", sorted(os.listdir(current)))


ATTEMPTS = (
    ("write", lambda: write("file")),
    ("append", lambda: write("file", flags=os.O_WRONLY | os.O_APPEND)),
    ("truncate", lambda: os.truncate("file", 0)),
    ("descriptor again", through_descriptor),
    ("directory again", through_directory),
    ("shared map", through_map),
    ("hard link", through_hard_link),
    ("chmod", lambda: os.chmod("file", 0o600)),
    ("times", lambda: os.utime("file", (0, 0))),
    ("attribute", lambda: os.setxattr("file", "user.attack", b"x")),
    ("exchange", exchange),
    ("rename directory", lambda: os.rename("directory", "renamed")),
    ("unlink", lambda: os.unlink("directory/inside" if os.path.exists("directory/inside") else "renamed/inside")),
    ("set-id", lambda: os.chmod("other", 0o4755)),
    ("set-id file", lambda: os.close(os.open("setid", os.O_CREAT | os.O_WRONLY, 0o4755))),
    ("device", lambda: os.mknod("device", 0o666 | stat.S_IFCHR, os.makedev(1, 5))),
    ("whiteout", lambda: os.mknod("whiteout", 0o666 | stat.S_IFCHR, os.makedev(0, 0))),
)
FORGED = ("opaque", "redirect", "metacopy", "origin", "upper", "whiteout", "xwhiteouts", "overlay.redirect")

for name, action in ATTEMPTS:
    attempt(name, action)
attempt("upwards", upwards)
for kind in ("user", "trusted"):
    for name in FORGED:
        for path in (".", "file"):
            value = b"/../../../../etc" if name.endswith("redirect") else b"y"
            attempt(
                "forge %s.overlay.%s on %s" % (kind, name, path),  # noqa: UP031
                lambda path=path, kind=kind, name=name, value=value: os.setxattr(path, kind + ".overlay." + name, value),
            )
for place in ("/mnt/x", "/mnt/y", "/mnt/l0", "/mnt/u", "/mnt/r"):
    attempt("enter " + place, lambda place=place: os.chdir(place))
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
here = os.fsencode(os.getcwd())
for name, call in (
    ("unmount", lambda: libc.umount2(here, 2)),
    ("remount", lambda: libc.mount(None, here, None, 32 | 4096, None)),
    ("bind", lambda: libc.mount(here + b"/directory", here, None, 4096, None)),
):
    ctypes.set_errno(0)
    say(name, name_of(ctypes.get_errno()) if call() else "done")
