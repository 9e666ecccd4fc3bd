"""Run by dpkg before it unpacks: files of the machine that a package is about to replace become root's own.

dpkg keeps what it replaces under a second name until it is done, by a hard link; the kernel refuses one to a file
whose owner does not exist inside, which every file of the lent system is (guest/writable.py). A copy in its place has
an owner. Only what the packages on dpkg's command line contain is looked at, and only replaced by an equal copy.

A convenience of root's inside: it runs with root's rights and decides nothing. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile

_NOBODY = 65534


def packages(arguments: list[bytes], directory: bytes) -> list[bytes]:
    """The package files that a dpkg with these arguments unpacks."""
    found = []
    for word in arguments[1:]:
        path = os.path.join(directory, word)
        if word.startswith(b"-"):
            continue
        if os.path.isdir(path):
            found += [os.path.join(each, name) for each, _, names in os.walk(path) for name in sorted(names) if name.endswith(b".deb")]
        elif os.path.isfile(path):
            found.append(path)
    return found


def files(package: bytes) -> list[str]:
    """Regular files and hard links that a package contains, as absolute paths."""
    names = []
    with subprocess.Popen([b"dpkg-deb", b"--fsys-tarfile", package], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            names = ["/" + member.name.lstrip("./") for member in archive if member.isfile() or member.islnk()]
    return names


def adopt(path: str) -> bool:
    """Put a copy of root's in the place of a file whose owner is not there. True when it did."""
    try:
        state = os.lstat(path)
    except OSError:
        return False
    if not stat.S_ISREG(state.st_mode) or state.st_uid != _NOBODY:
        return False
    copy = path + ".ringfence-copy"
    shutil.copy2(path, copy)
    os.replace(copy, path)
    return True


def main(parent: str) -> int:
    """Entry of dpkg's hook; `parent` is dpkg's pid. Never fails: dpkg says itself what it can't do."""
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")[:-1]
        for package in packages(arguments, os.readlink(f"/proc/{parent}/cwd".encode())):
            for path in files(package):
                adopt(path)
    except (OSError, tarfile.TarError) as error:
        sys.stderr.write(f"ringfence: files of the system could not be prepared for dpkg: {error}\n")
    return 0
