"""Every verb that changes a file, tried on each path given; a directory is tried with a name below it."""
# ruff: noqa: B023 (the lambdas are called at once)

import os
import sys

from report import attempt


def opened(path, flags):
    return lambda: os.close(os.open(path, flags, 0o600))


for path in sys.argv[1:]:
    if os.path.isdir(path) and not path.endswith("/."):
        below = path + "/ringfence-attack"
        attempt("create " + path, opened(below, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        attempt("mkdir " + path, lambda: os.mkdir(below + "-d"))
        attempt("symlink " + path, lambda: os.symlink("/etc/passwd", below + "-s"))
        attempt("mkfifo " + path, lambda: os.mkfifo(below + "-f"))
        for name in ("ringfence-attack", "ringfence-attack-s", "ringfence-attack-f"):
            try:
                os.unlink(path + "/" + name)
            except OSError:
                pass
        try:
            os.rmdir(below + "-d")
        except OSError:
            pass
        continue
    attempt("write " + path, opened(path, os.O_WRONLY))
    attempt("append " + path, opened(path, os.O_WRONLY | os.O_APPEND))
    attempt("truncate " + path, lambda: os.truncate(path, os.path.getsize(path)))
    attempt("chmod " + path, lambda: os.chmod(path, os.stat(path).st_mode & 0o777))
    attempt("utime " + path, lambda: os.utime(path))
    attempt("xattr " + path, lambda: os.setxattr(path, "user.ringfence-attack", b"x"))
    attempt("rename " + path, lambda: (os.rename(path, path + ".ringfence-attack"), os.rename(path + ".ringfence-attack", path)))
    attempt("link into home " + path, lambda: (os.link(path, os.path.expanduser("~/linked")), os.unlink(os.path.expanduser("~/linked"))))
