"""The template root: the file system that every sandbox of one template starts from.

It is an allow-list built on an empty tmpfs, never the host's root with holes: `/usr` read-only, a synthetic
`/etc`, a minimal `/dev`, and the interpreter, the package environment and the guest library at neutral paths
below `/opt`. Nothing of anyone's home is in it. `/usr` and the trees below `/opt` are overlays of two read-only
lowers named by relative paths, for three reasons: sockets and FIFOs of the host are dead in them (through a bind
mount they are live, read-only or not), inotify and flock act on the overlay's inodes and not on those the host
uses, and `/proc/self/mountinfo` does not show where they come from (a bind mount's fourth field does).

Runs in a child of the launcher, before the zygote is executed. Standard library and ringfence.linux only.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.engines.namespace.identifiers import FIRST_JOB_GROUP, JOB_GROUPS
from ringfence.linux import mounts

GUARDED = mounts.READ_ONLY | mounts.NO_SET_ID | mounts.NO_DEVICES
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

# Copied by value into the synthetic /etc where the host has them: look-up tables that programs below /usr
# need and that name no user and no secret. The first ones are there before the zygote starts, which reads them.
_COPIED_FIRST = ("ld.so.cache", "localtime")
_COPIED = (
    "alternatives", "ld.so.conf", "ld.so.conf.d", "mime.types", "services",
    "protocols", "os-release", "debian_version", "fonts", "magic", "terminfo", "inputrc", "java-17-openjdk",
    "java-21-openjdk", "ssl/openssl.cnf", "ssl/certs/ca-certificates.crt", "gai.conf", "ethertypes", "rpc",
    "networks", "login.defs", "skel", "R", "ca-certificates.conf", "python3", "python3.11",
)  # fmt: skip
_COPY_LIMIT = 4 << 20  # bytes of one copied file; anything larger is no look-up table



class TemplateRoot:
    """Builds the tree in three steps: trees that need the host's view, then the skeleton with all mounts, then what
    lies in /etc, while the zygote comes up already."""

    def __init__(self, sources: dict[str, str], masks: list[str], python: str = "", root: bool = False):
        self.sources = sources  # name below /opt -> host directory
        self.masks = masks  # directories inside that somebody's packages lie in: covered by an empty one
        if root:
            # Only here: a start without root has no use for it.
            from ringfence.engines.namespace import system_files

            self.system_files = system_files
        self.python = python  # path inside of the interpreter that programs of ours run with
        self.root = root  # sandboxes have a root, who may change the trees (guest/writable.py)
        self.lent: dict[str, int] = {}  # for that: the trees as they are, where only the zygote sees them
        self.trees: dict[str, int] = {}
        self.below: list[tuple[str, int]] = []  # mounts below the host's trees: (path, descriptor)

    def open_sources(self) -> None:
        """Open every host tree by descriptor (as root: before the outer user namespace is entered)."""
        empty = mounts.new_filesystem("tmpfs", size="4k", mode="555")
        self._host_tree("usr", empty)
        for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin"):
            if os.path.isdir("/" + name) and not os.path.islink("/" + name):
                self._host_tree(name, empty)
        for name in DEVICES:
            # These are the host's own nodes: read-only keeps their times, and does not hinder writing to a device.
            node = mounts.clone_tree("/dev/" + name, recursive=False)
            mounts.set_attributes(node, add=mounts.READ_ONLY | mounts.NO_SET_ID | mounts.NO_EXECUTION)
            self.trees["dev/" + name] = node
        for name, source in self.sources.items():
            self.trees["opt/" + name] = self._quiet_tree(source, empty)
        if self.root:
            self._lend()
        os.close(empty)

    def _lend(self) -> None:
        """The trees that become layers of a sandbox's own overlays."""
        for name in [name for name in self.trees if "/" not in name]:
            self.lent[name] = self._bound("/" + name)
        for name in ("env", "packages"):
            if name in self.sources:
                self.lent["opt/" + name] = self._bound(self.sources[name])
        database = self.system_files.DATABASE
        if os.path.isdir("/" + database):
            self.lent[database] = self._bound("/" + database)

    def _host_tree(self, name: str, empty: int) -> None:
        """A system directory of the host, and what is mounted below it (drivers in a container, a separate /usr/local).

        An ordinary user inside a container may not take a directory apart from the mounts below it
        (mount_namespaces(7), locked mounts): there the tree is bound as it is, and evidence.py says so.
        """
        path = "/" + name
        try:
            self.trees[name] = self._overlay(path, empty)
        except OSError:
            self.trees[name] = self._bound(path)
            return
        for place in _mounted_below(path):
            try:
                state = os.stat(place)
                if stat.S_ISDIR(state.st_mode):
                    self.below.append((place, self._overlay(place, empty)))
                elif stat.S_ISREG(state.st_mode):
                    self.below.append((place, self._bound(place)))
            except OSError:
                continue  # one that cannot be looked into: the sandbox goes without it

    @staticmethod
    def _bound(path: str) -> int:
        tree = mounts.clone_tree(path)
        mounts.set_attributes(tree, add=GUARDED)
        return tree

    def _quiet_tree(self, source: str, empty: int) -> int:
        state = os.stat(source)
        if state.st_uid not in (0, os.getuid()) or state.st_mode & 0o002:
            raise PermissionError(errno.EPERM, "belongs to someone else or may be written by anyone", source)
        return self._overlay(source, empty, (state.st_dev, state.st_ino))

    @staticmethod
    def _overlay(source: str, empty: int, expected: tuple[int, int] | None = None) -> int:
        previous = os.open(".", os.O_PATH | os.O_CLOEXEC)
        directory = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            state = os.fstat(directory)
            if expected not in (None, (state.st_dev, state.st_ino)):
                raise PermissionError(errno.EPERM, "was exchanged while it was opened", source)
            os.fchdir(directory)
            return mounts.new_filesystem("overlay", GUARDED, lowerdir=f".:/proc/self/fd/{empty}")
        finally:
            os.fchdir(previous)
            os.close(previous)
            os.close(directory)

    def build(self) -> str:
        """Build the skeleton and attach everything; returns the path where the new root is mounted.

        Preconditions: a private mount namespace owned by the caller's user namespace.
        """
        place = next(path for path in ("/mnt", "/media", "/tmp", "/run") if os.path.isdir(path))
        tables = self.system_files.dpkg() if self.root else {}
        mounts.attach(mounts.new_filesystem("tmpfs", mounts.NO_SET_ID | mounts.NO_DEVICES, size="16m", mode="755"), place)
        os.umask(0)
        for name in ("usr", "opt", "etc", "proc", "dev", "home", "mnt", "srv", "var", "run", "root", "workspace"):
            os.mkdir(f"{place}/{name}", 0o755)
        os.mkdir(f"{place}/tmp", 0o1777)
        for name in ("var/log", "var/lib", "var/cache", "home/user"):
            os.mkdir(f"{place}/{name}", 0o755)
        os.mkdir(f"{place}/var/tmp", 0o1777)
        os.symlink("/run", f"{place}/var/run")
        for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin"):
            if os.path.islink("/" + name):
                os.symlink(os.readlink("/" + name), f"{place}/{name}")
            elif name in self.trees:
                os.mkdir(f"{place}/{name}", 0o755)
        for name in _COPIED_FIRST:
            _copy("/etc/" + name, f"{place}/etc/{name}")
        if self.root:
            os.umask(0o022)
            self._prepare_for_root(place, tables)
            os.umask(0)
        self._attach("usr", place)
        for name in list(self.trees):
            if "/" not in name:
                self._attach(name, place)
        for path, descriptor in self.below:
            mounts.attach(descriptor, place + path)
        self._build_opt(f"{place}/opt")
        for path in self.masks:
            if os.path.isdir(place + path):
                mounts.attach(mounts.new_filesystem("tmpfs", GUARDED, size="4k", mode="555", nr_inodes="2"), place + path)
        self._build_dev(f"{place}/dev")
        return place

    def _prepare_for_root(self, place: str, tables: dict[str, bytes | None]) -> None:
        """Before anything is attached: what lies on the template's own file system is root's inside."""
        os.chmod(f"{place}/root", 0o700)
        for name in self.system_files.DIRECTORIES:
            os.makedirs(f"{place}/{name}", exist_ok=True)
        for name, table in tables.items():
            if table is None:
                os.mknod(f"{place}/{name}", stat.S_IFCHR, 0)  # overlayfs's mark for what is not there
            else:
                _write(f"{place}/{name}", table)
        for name, content in self.system_files.programs(self.python).items():
            _write(f"{place}/{name}", content)
            os.chmod(f"{place}/{name}", 0o755)
        mounts.attach(mounts.new_filesystem("tmpfs", mounts.NO_SET_ID | mounts.NO_DEVICES, size="64k", mode="700"), f"{place}/run")
        for name, descriptor in self.lent.items():
            path = f"{place}/run/" + name.replace("/", "%")
            os.mkdir(path)
            mounts.attach(descriptor, path)

    def _attach(self, name: str, place: str) -> None:
        descriptor = self.trees.pop(name, None)
        if descriptor is not None:
            mounts.attach(descriptor, f"{place}/{name}")

    def _build_opt(self, opt: str) -> None:
        mounts.attach(mounts.new_filesystem("tmpfs", mounts.NO_SET_ID | mounts.NO_DEVICES, size="64k", mode="755"), opt)
        for name in [key[4:] for key in self.trees if key.startswith("opt/")]:
            os.mkdir(f"{opt}/{name}", 0o755)
            mounts.attach(self.trees.pop("opt/" + name), f"{opt}/{name}")
        _seal(opt)

    def _build_dev(self, dev: str) -> None:
        attributes = mounts.NO_SET_ID | mounts.NO_EXECUTION
        mounts.attach(mounts.new_filesystem("tmpfs", attributes, size="64k", mode="755"), dev)
        for name in DEVICES:
            os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            mounts.attach(self.trees.pop("dev/" + name), f"{dev}/{name}")
        for name in ("shm", "pts"):
            os.mkdir(f"{dev}/{name}", 0o755)
        for name, target in (
            ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx"),
        ):  # fmt: skip
            os.symlink(target, f"{dev}/{name}")
        _seal(dev)

    def fill_etc(self, place: str, host_name: str) -> None:
        """Write the synthetic /etc below `place`. The caller still sees the host's."""
        etc = place + "/etc"
        for name in ("ssl", "ssl/certs"):
            os.mkdir(f"{etc}/{name}", 0o755)
        for name in _COPIED:
            _copy("/etc/" + name, f"{etc}/{name}")
        jobs = "".join(f"job{number}:x:{FIRST_JOB_GROUP + number}:\n" for number in range(JOB_GROUPS))
        written = {
            "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
            "ringfence:x:65533:65533:ringfence agent:/nonexistent:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
            "group": "root:x:0:\nuser:x:1000:\nringfence:x:65533:\nnogroup:x:65534:\n" + jobs,
            "hosts": f"127.0.0.1 localhost {host_name}\n::1 localhost ip6-localhost ip6-loopback\n",
            "hostname": host_name + "\n",
            "resolv.conf": "# no resolver: this sandbox has no network\noptions timeout:1 attempts:1\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\n"
            "protocols: files\nnetworks: files\n",
            "shells": "/bin/sh\n/bin/bash\n",
            "profile": 'export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}"\nexport PS1="\\u@\\h:\\w\\$ "\n',
            "bash.bashrc": 'PS1="\\u@\\h:\\w\\$ "\n',
            "machine-id": "",
        }
        for name, text in written.items():
            _write(f"{etc}/{name}", text.encode())
        for name, file in (self.system_files.etc() if self.root else {}).items():
            path = f"{etc}/{name}"
            _write(path, file.content)
            os.chown(path, 0, file.group)
            os.chmod(path, file.mode)
        if not os.path.lexists(f"{etc}/mtab"):
            os.symlink("/proc/self/mounts", f"{etc}/mtab")


def _mounted_below(path: str) -> list[str]:
    """Mount points strictly below `path`, outer ones first (proc(5), mountinfo; octal escapes for odd bytes)."""
    found = []
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            raw = line.split()[4]
            if raw.startswith(os.fsencode(path) + b"/"):
                # The kernel escapes blanks and backslashes as three octal digits, and nothing else looks like that.
                first, *rest = raw.split(b"\\")
                found.append(os.fsdecode(first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)))
    return sorted(set(found))


def _seal(path: str) -> None:
    """Make the one mount at `path` read-only (not those below it, which carry their own attributes)."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mounts.set_attributes(descriptor, add=mounts.READ_ONLY, recursive=False)
    finally:
        os.close(descriptor)


def _write(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def _copy(path: str, target: str) -> None:
    """Copy a look-up table of the host's /etc, or a directory of them. What cannot be read is left out."""
    try:
        try:
            link = os.readlink(path)  # most of what lies there are links: this spares a look at each
        except OSError:
            link = ""
        # A link that stays within what the sandbox has travels as a link; others are read.
        if link.startswith(("/usr/", "/etc/alternatives/", "../usr/")) or link and path.startswith("/etc/alternatives/"):
            os.symlink(link, target)
        elif not link and os.path.isdir(path):
            os.mkdir(target, 0o755)
            for entry in sorted(os.listdir(path))[:2000]:
                _copy(f"{path}/{entry}", f"{target}/{entry}")
        else:
            _copy_file(path, target)
    except OSError:
        return


def _copy_file(path: str, target: str) -> None:
    # A FIFO must not be waited for, and a device not be opened.
    state = os.stat(path)
    if stat.S_ISREG(state.st_mode) and state.st_size <= _COPY_LIMIT and state.st_mode & 0o004:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _write(target, os.read(descriptor, _COPY_LIMIT))
        finally:
            os.close(descriptor)
