"""rename(2) that neither replaces nor leaves a gap: renameat2(2) with its two flags (Linux 3.15).

Guards against losing a file that somebody else wrote in the instant between a look and a rename: `rename_new` fails
where the name is taken, `exchange` hands back what was there. Not every file system can (NFS cannot); `works_in` asks.
Standard library only.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ringfence.linux.syscalls import NUMBER, call

NOREPLACE, EXCHANGE = 1, 2


def rename_new(source: bytes, source_directory: int, target: bytes, target_directory: int) -> None:
    """Rename, or raise FileExistsError where the target exists. Names are relative to the descriptors."""
    _rename(source, source_directory, target, target_directory, NOREPLACE)


def exchange(source: bytes, source_directory: int, target: bytes, target_directory: int) -> None:
    """Swap two names, of whatever kind, in one step. Raises FileNotFoundError where one is missing."""
    _rename(source, source_directory, target, target_directory, EXCHANGE)


def works_in(directory: int) -> bool:
    """Whether the file system of this directory knows both flags; tried with two empty files that are removed again."""
    names = [b".flags-%d-%d" % (os.getpid(), number) for number in range(3)]
    try:
        for name in names[:2]:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory))
        exchange(names[0], directory, names[1], directory)
        rename_new(names[0], directory, names[2], directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
    return True


def _rename(source: bytes, source_directory: int, target: bytes, target_directory: int, flags: int) -> None:
    number = NUMBER.get("renameat2")
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "renameat2")
    call(number, source_directory, source, target_directory, target, flags, what="renameat2")
