"""The file worker: a fork of the agent, as the user and without any capability, that does what touches paths.

The agent itself never resolves a path that user code can shape: a wedged file system, a FIFO or a tree of a
million files costs one worker, not the sandbox. The worker's rights are the caller's, so the kernel judges
every path. It may be killed by user code at any time and holds nothing that outlives a request. Guards
against: special files (only regular ones are read and written), set-id bits, half-written uploads (a
nameless file, or a temporary name beside the target, is moved into place when all has arrived), and trees
deeper than PATH_MAX.

Messages are packets: [!I length][JSON][blob] in; b"J" + JSON (the answer), b"E" + JSON (an entry ahead of the
data), b"D" + bytes and b"W" + [!I length][JSON][bytes] (entry, content and end of a small file) out. Descriptors travel beside them.
"""

# ruff: noqa: BLE001  (every failure of a request becomes its answer)

from __future__ import annotations

import errno
import os
import stat
import struct

from ringfence.guest.credentials import decode, encode
from ringfence.linux.channels import descriptors_in, send_descriptors
from ringfence.linux.json_text import dumps, loads

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any
else:
    import _socket as socket

PACKET = 128 << 10
INLINE = 60 << 10
"""Bytes of content that travel in a packet; larger files travel as descriptors."""

MAX_METADATA = 2048
"""Bytes of names and values of the metadata of one file."""

_LENGTH = struct.Struct("!I")
_LIST_INLINE = 40 << 10
_TEMPORARY = b".ringfence-"
_XATTR = "user.ringfence."
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)

_CODES = {
    errno.ENOENT: "not_found", errno.EACCES: "permission", errno.EPERM: "permission", errno.EROFS: "permission",
    errno.EEXIST: "exists", errno.ENOTEMPTY: "exists", errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory", errno.ENOSPC: "no_space", errno.EDQUOT: "no_space", errno.EFBIG: "limit",
    errno.EMFILE: "limit", errno.ENFILE: "limit", errno.ENOMEM: "limit", errno.EMLINK: "limit",
    errno.EINVAL: "invalid", errno.ENAMETOOLONG: "invalid", errno.ELOOP: "invalid", errno.EXDEV: "invalid",
    errno.EBUSY: "busy", errno.ETXTBSY: "busy", errno.EAGAIN: "busy", errno.EOPNOTSUPP: "unsupported",
    errno.ENOSYS: "unsupported",
}  # fmt: skip
_READING = ("file.stat", "file.list", "file.hash", "file.read")
_HINTS = {
    "no_space": "delete files, or give the sandbox a larger disk or tmp limit",
    "permission": "the operation runs as the sandbox's user; choose a path it may write, such as its home",
    "exists": "remove it first, or choose another name",
}


class FileError(Exception):
    """A refusal that no errno expresses."""

    def __init__(self, code: str, message: str, hint: str = ""):
        super().__init__(message)
        self.code = code
        self.hint = hint


MAX_LEVELS = 2048  # a path has at most 4096 bytes
_REACH = 3900
"""Bytes of a path that is given to the kernel in one piece (PATH_MAX is 4096)."""


class reachable:
    """`path`, or where it is longer than the kernel takes, a short name of the same: deep trees are reached by way
    of descriptors of the directories above. Valid inside the `with` only."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: bytes) -> None:
        self._path, self._descriptor = path, -1

    def __enter__(self) -> bytes:
        if len(self._path) <= _REACH:
            return self._path
        path = self._path.rstrip(b"/")
        self._descriptor = open_directory(os.path.dirname(path))
        return b"/proc/self/fd/%d/%s" % (self._descriptor, os.path.basename(path))

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def open_directory(path: bytes, flags: int = os.O_PATH) -> int:
    """A descriptor of a directory, whatever the length of its path."""
    flags |= os.O_DIRECTORY | os.O_CLOEXEC
    if len(path) <= _REACH:
        return os.open(path, flags)
    base = -1
    try:
        while True:
            end = len(path) if len(path) <= _REACH else path.rfind(b"/", 1, _REACH)
            if end < 1:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:_REACH])
            last = end == len(path)
            below = os.open(
                path[:end],
                flags if last else os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC,
                dir_fd=None if base < 0 else base,
            )
            if base >= 0:
                os.close(base)
            base = below
            if last:
                return base
            path = path[end:].lstrip(b"/")
    except BaseException:
        if base >= 0:
            os.close(base)
        raise


def resolve(path: bytes, home: bytes) -> bytes:
    """`path` made absolute: relative ones and `~` belong to the home directory. Symlinks stay for the kernel."""
    if path == b"~" or path.startswith(b"~/"):
        path = home + path[1:]
    elif not path.startswith(b"/"):
        path = home + b"/" + path
    # Only what changes nothing is tidied: "a/../b" is not "b" where a is a symlink.
    while b"/./" in path:
        path = path.replace(b"/./", b"/")
    if path.endswith(b"/."):
        path = path[:-1]
    while b"//" in path:
        path = path.replace(b"//", b"/")
    return path


def describe_error(error: Exception, operation: str = "") -> dict[str, Any]:
    """The error object of a CLOSE. Names that only this module knows (".", descriptors) are left out."""
    if isinstance(error, FileError):
        code, message, hint = error.code, str(error), error.hint
    elif isinstance(error, OSError):
        code = _CODES.get(error.errno or 0, "internal")
        name = error.filename
        where = decode(name) if isinstance(name, bytes) else name if isinstance(name, str) else ""
        if where == "." or where.startswith(("/proc/self/fd/", os.fsdecode(_TEMPORARY))):
            where = ""
        message = f"{where[:2048]}: {error.strerror}" if where else str(error.strerror)
        hint = _HINTS.get(code, "")
        if code == "permission" and operation in _READING:
            hint = "the operation runs as the sandbox's user, who may not read this"
    else:
        code, message, hint = "internal", repr(error)[:500], ""
    answer = {"code": code, "message": message}
    if hint:
        answer["hint"] = hint
    return answer


def kind_of(mode: int) -> str:
    for test, name in (
        (stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "symlink"), (stat.S_ISFIFO, "fifo"),
        (stat.S_ISSOCK, "socket"),
    ):  # fmt: skip
        if test(mode):
            return name
    return "device"


def _name_only(path: bytes, name: bytes, entry: os.DirEntry[str], why: str) -> dict[str, Any]:
    """An entry of a directory that may be listed but not entered: its kind is what the directory says."""
    kind = "device"
    for test, word in ((entry.is_symlink, "symlink"), (lambda: entry.is_dir(follow_symlinks=False), "dir"),
                       (lambda: entry.is_file(follow_symlinks=False), "file")):  # fmt: skip
        try:
            if test():
                kind = word
                break
        except OSError:
            pass
    return {"path": decode(path), "name": decode(name), "type": kind, "error": why}


class Worker:
    """Serves requests on `channel` one after another until it ends."""

    def __init__(self, channel: socket.socket, home: bytes, names: dict[int, str], groups: dict[int, str]):
        self._channel = channel
        self._home = home
        self._names = names
        self._groups = groups
        self._process_device = os.stat("/proc").st_dev
        self._descriptors: list[int] = []
        self._operations = {
            "file.stat": self._stat, "file.list": self._list, "file.mkdir": self._mkdir, "file.move": self._move,
            "file.remove": self._remove, "file.chmod": self._chmod, "file.symlink": self._symlink,
            "file.metadata": self._metadata, "file.hash": self._hash, "file.read": self._read,
            "put": self._put, "begin": self._begin, "commit": self._commit, "discard": self._discard,
        }  # fmt: skip

    def run(self) -> None:
        while True:
            packet, ancillary, _, _ = self._channel.recvmsg(PACKET + 4096, socket.CMSG_SPACE(16))
            if not packet:
                return
            self._descriptors = descriptors_in(ancillary)
            operation = ""
            try:
                length = _LENGTH.unpack_from(packet)[0]
                request = loads(packet[4 : 4 + length])
                operation = request["op"]
                answer = self._operations[operation](request, packet[4 + length :])
            except Exception as error:
                answer = {"error": describe_error(error, operation)}
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors = []
            if answer is not None:
                self._channel.send(b"J" + dumps(answer).encode("ascii"))

    def _path(self, request: dict[str, Any], key: str = "path") -> bytes:
        return resolve(encode(request[key]), self._home)

    # ---------------------------------------------------------------- entries

    def entry(self, path: bytes, short: bytes = b"", metadata: bool = True) -> dict[str, Any]:
        """What lstat(2) says of `path`, which is reached under the name `short`. Raises OSError."""
        short = short or path
        status = os.lstat(short)
        stripped = path.rstrip(b"/") or b"/"
        kind = kind_of(status.st_mode)
        target = None
        if kind == "symlink":
            try:
                target = decode(os.readlink(short))
            except OSError:
                pass
        return {
            "path": decode(stripped), "name": decode(os.path.basename(stripped) or b"/"), "type": kind,
            "size": status.st_size, "mode": stat.S_IMODE(status.st_mode), "uid": status.st_uid, "gid": status.st_gid,
            "owner": self._names.get(status.st_uid, str(status.st_uid)),
            "group": self._groups.get(status.st_gid, str(status.st_gid)), "modified": status.st_mtime,
            "target": target, "metadata": read_metadata(short) if metadata and kind in ("file", "dir") else {},
        }  # fmt: skip

    def _stat(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        path = self._path(request)
        with reachable(path) as short:
            return {"entry": self.entry(path, short)}

    def _list(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        depth = request.get("depth", 1)
        if type(depth) is not int or depth < 1:
            raise FileError("invalid", "depth must be a whole number from 1")
        found = bytearray()
        count = 0
        streamed = False
        for item in self._walk(self._path(request), depth):
            found += dumps(item).encode("ascii")
            found += b"\n"
            count += 1
            if len(found) > _LIST_INLINE:
                # Cut anywhere: one line alone may be longer than a packet, when the tree is deep.
                streamed = True
                for start in range(0, len(found), INLINE):
                    self._channel.send(b"D" + found[start : start + INLINE])
                found.clear()
        if streamed:
            if found:
                self._channel.send(b"D" + found)
            return {"count": count, "streamed": True}
        return {"entries": [loads(line) for line in found.splitlines()], "count": count}

    def _walk(self, top: bytes, depth: int) -> Iterator[dict[str, Any]]:
        """Entries below `top`, each directory before its content, names sorted.

        Nothing is left out in silence: an entry of which only the name can be read has an "error", and after a
        directory that cannot be read comes {"unreadable": its path, "error": why}. What went away meanwhile was
        not there.
        """
        top = top.rstrip(b"/") or b"/"
        stack = [(top, 1)]
        first = True
        while stack:
            directory, level = stack.pop()
            try:
                descriptor = open_directory(directory, os.O_RDONLY)
            except OSError as error:
                if first:
                    raise
                if error.errno != errno.ENOENT:
                    yield {"unreadable": decode(directory), "error": str(error.strerror)}
                continue
            first = False
            below = []
            try:
                with os.scandir(descriptor) as scan:
                    entries = sorted((os.fsencode(entry.name), entry) for entry in scan)
                prefix = directory if directory != b"/" else b""
                try:
                    # Names are reached from inside the directory, not by a path that may be too long.
                    os.fchdir(descriptor)
                    closed = ""
                except OSError as error:
                    closed = str(error.strerror)
                for name, entry in entries:
                    path = prefix + b"/" + name
                    if closed:
                        item = _name_only(path, name, entry, closed)
                    else:
                        try:
                            item = self.entry(path, name)
                        except FileNotFoundError:
                            continue
                        except OSError as error:
                            item = _name_only(path, name, entry, str(error.strerror))
                    yield item
                    if item["type"] == "dir" and level < depth:
                        below.append((path, level + 1))
            except OSError as error:
                if directory == top:
                    raise
                yield {"unreadable": decode(directory), "error": str(error.strerror)}
            finally:
                os.chdir(b"/")
                os.close(descriptor)
            stack.extend(reversed(below))

    # ----------------------------------------------------------- changing names

    def _mkdir(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        path = self._path(request)
        mode = permission_bits(request.get("mode"), 0o777)
        created = True
        if request.get("parents", True):
            created = not os.path.isdir(path)
            make_directories(path)
        else:
            os.mkdir(path)
        if created and request.get("mode") is not None:
            os.chmod(path, mode)
        return {"entry": self.entry(path), "created": created}

    def _move(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        source, target = self._path(request, "source"), self._path(request, "target")
        if request.get("parents"):
            make_directories(os.path.dirname(target.rstrip(b"/")))
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _move_across(source, target.rstrip(b"/"))
        return {"entry": self.entry(target)}

    def _remove(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        path = self._path(request)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
        elif request.get("recursive", True):
            remove_tree(path)
        else:
            os.rmdir(path)
        return {}

    def _chmod(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        path = self._path(request)
        os.chmod(path, permission_bits(request.get("mode"), None))
        return {"entry": self.entry(path)}

    def _symlink(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        path = self._path(request)
        os.symlink(encode(request["target"]), path)
        return {"entry": self.entry(path)}

    def _metadata(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        path = self._path(request)
        changes = request.get("set")
        if changes is not None:
            write_metadata(path, changes)
        return {"entry": self.entry(path)}

    # ---------------------------------------------------------------- content

    def _open_regular(self, path: bytes) -> tuple[int, os.stat_result]:
        # Looked at before it is opened: opening a device or a FIFO can already have an effect.
        refuse_special(os.stat(path), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        status = os.fstat(descriptor)
        try:
            refuse_special(status, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status

    def _hash(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        with reachable(self._path(request)) as short:
            descriptor, _ = self._open_regular(short)
        import hashlib  # OpenSSL costs 3 ms: a sandbox that moves no file does not pay

        digest = hashlib.sha256()
        size = 0
        try:
            while True:
                data = os.read(descriptor, 1 << 20)
                if not data:
                    break
                digest.update(data)
                size += len(data)
        finally:
            os.close(descriptor)
        return {"size": size, "sha256": digest.hexdigest()}

    def _read(self, request: dict[str, Any], blob: bytes) -> dict[str, Any] | None:
        path = self._path(request)
        with reachable(path) as short:
            descriptor, status = self._open_regular(short)
            try:
                entry = self.entry(os.path.realpath(path)) if os.path.islink(short) else self.entry(path, short)
            except BaseException:
                os.close(descriptor)
                raise
        try:
            head = b"E" + dumps({"entry": entry}).encode("ascii")
            if status.st_dev != self._process_device and status.st_size > INLINE:
                send_descriptors(self._channel, head, [descriptor])
                return None
            if status.st_dev != self._process_device and len(head) < INLINE:
                # All of a small file in one packet: half the time of a transfer of many is the agent's waking up.
                length = request.get("length")
                data = os.pread(descriptor, INLINE + 1 if length is None else min(INLINE + 1, length),
                                request.get("offset") or 0)  # fmt: skip
                if len(data) <= INLINE:
                    self._channel.send(b"W" + _LENGTH.pack(len(head) - 1) + head[1:] + data)
                    return None
            # Small, or a file of /proc, whose size says nothing and whose reads may block: here and now.
            self._channel.send(head)
            offset = request.get("offset") or 0
            left = request.get("length")
            while left is None or left > 0:
                data = os.pread(descriptor, INLINE if left is None else min(INLINE, left), offset)
                if not data:
                    break
                self._channel.send(b"D" + data)
                offset += len(data)
                if left is not None:
                    left -= len(data)
            return {}
        finally:
            os.close(descriptor)

    def _place(self, request: dict[str, Any]) -> tuple[int, bytes]:
        """(descriptor of the directory, name) of the file to write, through symlinks. Raises for what is no file."""
        path = self._path(request)
        if path.endswith(b"/"):
            raise FileError("is_a_directory", f"{decode(path)}: a file's name can't end in a slash")
        path = os.path.realpath(path)
        directory, name = os.path.split(path)
        if request.get("parents", True):
            make_directories(directory)
        try:
            refuse_special(os.lstat(path), path)
        except FileNotFoundError:
            pass
        return os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), name

    def _begin(self, request: dict[str, Any], blob: bytes) -> None:
        directory, name = self._place(request)
        try:
            descriptor, temporary = new_file(directory)
            try:
                answer = {"name": decode(name), "temporary": decode(temporary)}
                send_descriptors(self._channel, b"J" + dumps(answer).encode("ascii"), [descriptor, directory])
            finally:
                os.close(descriptor)
        finally:
            os.close(directory)

    def _put(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        """A small upload in one go."""
        directory, name = self._place(request)
        try:
            descriptor, temporary = new_file(directory)
            try:
                view = memoryview(blob)
                while view:
                    view = view[os.write(descriptor, view) :]
                self._install(request, descriptor, directory, name, temporary)
            except BaseException:
                remove_quietly(temporary, directory)
                raise
            finally:
                os.close(descriptor)
        finally:
            os.close(directory)
        return {"entry": self.entry(os.path.realpath(self._path(request)))}

    def _commit(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        descriptor, directory = self._descriptors
        temporary = encode(request["temporary"])
        try:
            self._install(request, descriptor, directory, encode(request["name"]), temporary)
        except BaseException:
            remove_quietly(temporary, directory)
            raise
        return {"entry": self.entry(os.path.realpath(self._path(request)))}

    def _discard(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        remove_quietly(encode(request["temporary"]), self._descriptors[0])
        return {}

    def _install(self, request: dict[str, Any], descriptor: int, directory: int, name: bytes, temporary: bytes) -> None:
        """Everything has arrived: give the file its mode, metadata and name."""
        if request.get("append"):
            append(descriptor, directory, name)
            remove_quietly(temporary, directory)
            return
        try:
            old = os.lstat(name, dir_fd=directory)
        except FileNotFoundError:
            old = None
        default = 0o644 if old is None else stat.S_IMODE(old.st_mode) & 0o777
        os.fchmod(descriptor, permission_bits(request.get("mode"), default))
        if request.get("metadata"):
            write_metadata(descriptor, request["metadata"])
        if not temporary:
            link = b"/proc/self/fd/%d" % descriptor
            if old is None:
                try:
                    os.link(link, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
                    return
                except FileExistsError:
                    pass
            temporary = temporary_name()
            os.link(link, temporary, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
        try:
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            remove_quietly(temporary, directory)
            raise


def temporary_name() -> bytes:
    return _TEMPORARY + os.urandom(8).hex().encode()


def is_temporary(name: bytes) -> bool:
    """Whether `name` is one of the worker's own, which watchers don't report."""
    return name.startswith(_TEMPORARY)


def new_file(directory: int) -> tuple[int, bytes]:
    """A file to write into: nameless where the file system can (it then vanishes with its descriptor)."""
    try:
        return os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory), b""
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name = temporary_name()
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory), name


def append(source: int, directory: int, name: bytes) -> None:
    """Add the whole of `source` to the end of a regular file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
    target = os.open(name, flags, 0o644, dir_fd=directory)
    try:
        refuse_special(os.fstat(target), name)
        before = os.fstat(target).st_size
        offset = 0
        try:
            while True:
                view = memoryview(os.pread(source, 1 << 20, offset))
                if not view:
                    return
                offset += len(view)
                while view:
                    view = view[os.write(target, view) :]
        except OSError:
            os.ftruncate(target, before)  # all of it or nothing
            raise
    finally:
        os.close(target)


def refuse_special(status: os.stat_result, path: bytes) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise FileError("is_a_directory", f"{decode(path)}: is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise FileError("invalid", f"{decode(path)}: is a {kind_of(status.st_mode)}, not a regular file",
                        "read or write it with a command instead")  # fmt: skip


def permission_bits(mode: Any, default: int | None) -> int:
    if mode is None:
        if default is None:
            raise FileError("invalid", "mode is missing")
        return default
    if type(mode) is not int or not 0 <= mode <= 0o7777:
        raise FileError("invalid", "mode must be a number from 0 to 0o1777")
    if mode & 0o6000:
        raise FileError("invalid", "set-user-id and set-group-id bits are refused in a sandbox", "leave out 0o6000")
    return mode


def read_metadata(path: bytes) -> dict[str, str]:
    """The user.ringfence.* attributes (xattr(7)); empty where the file system has none."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return {}
    found = {}
    size = 0
    for name in names[:256]:
        if name.startswith(_XATTR):
            try:
                value = decode(os.getxattr(path, name, follow_symlinks=False))
            except OSError:
                continue
            size += len(name) + len(value)
            if size > MAX_METADATA:
                break  # more than write_metadata stores: user code made it, and an entry has to fit a message
            found[name[len(_XATTR) :]] = value
    return found


def write_metadata(target: Any, changes: Any) -> None:
    if not isinstance(changes, dict):
        raise FileError("invalid", "metadata must map names to texts")
    if sum(len(str(key)) + len(str(value)) + len(_XATTR) for key, value in changes.items()) > MAX_METADATA:
        raise FileError("limit", f"metadata of one file may have {MAX_METADATA} bytes", "keep it in a file instead")
    for key, value in changes.items():
        if not isinstance(value, (str, type(None))) or not key or len(key) > 200 or "\0" in key:
            raise FileError("invalid", f"the metadata {key[:50]!r} can't be stored")
        try:
            if value is None:
                os.removexattr(target, _XATTR + key)
            else:
                os.setxattr(target, _XATTR + key, encode(value))
        except OSError as error:
            if value is None and error.errno == errno.ENODATA:
                continue
            raise


def make_directories(path: bytes) -> None:
    """Make a directory and those above it that are missing; one that is there is fine.

    os.makedirs calls itself for each level, and a path that the kernel takes can have two thousand.
    """
    missing = [path]
    while missing:
        try:
            os.mkdir(missing[-1], 0o777)
        except FileExistsError:
            if not os.path.isdir(missing[-1]):
                raise
        except FileNotFoundError:
            above = os.path.dirname(missing[-1].rstrip(b"/"))
            if above in (b"", missing[-1]) or len(missing) > MAX_LEVELS:
                raise
            missing.append(above)
            continue
        missing.pop()


def remove_quietly(name: bytes, directory: int) -> None:
    if name:
        try:
            os.unlink(name, dir_fd=directory)
        except OSError:
            pass


def remove_tree(path: bytes) -> None:
    """rm -r that follows no symlink and works at any depth: it walks with one descriptor and "..".

    Raises OSError for the first thing that can't be removed, and when someone moves the tree meanwhile.
    """
    parent = os.open(os.path.dirname(path.rstrip(b"/")) or b"/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    name = os.path.basename(path.rstrip(b"/"))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    current = parent
    trail: list[tuple[bytes, int, int]] = []  # name of each level, and the identity of its parent
    pending: list[list[bytes]] = [[name]]
    try:
        while pending:
            if not pending[-1]:
                pending.pop()
                if not trail:
                    return
                below, device, inode = trail.pop()
                up = os.open(b"..", flags, dir_fd=current)
                os.close(current)
                current = up
                status = os.fstat(current)
                if (status.st_dev, status.st_ino) != (device, inode):
                    raise FileError("busy", f"{decode(path)}: was moved while it was being removed", "try again")
                os.rmdir(below, dir_fd=current)
                continue
            item = pending[-1].pop()
            try:
                os.unlink(item, dir_fd=current)
                continue
            except FileNotFoundError:
                continue
            except (IsADirectoryError, PermissionError):
                try:
                    status = os.lstat(item, dir_fd=current)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    raise
            here = os.fstat(current)
            down = os.open(item, flags, dir_fd=current)
            trail.append((item, here.st_dev, here.st_ino))
            os.close(current)
            current = down
            pending.append([os.fsencode(entry) for entry in os.listdir(current)])
    finally:
        os.close(current)


def _move_across(source: bytes, target: bytes) -> None:
    """rename(2) between file systems: copy beside the target, rename, remove the source."""
    import shutil  # which loads three compression libraries

    directory = os.path.dirname(target) or b"/"
    temporary = directory + b"/" + temporary_name()
    status = os.lstat(source)
    try:
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source), temporary)
        elif stat.S_ISDIR(status.st_mode):
            shutil.copytree(os.fsdecode(source), os.fsdecode(temporary), symlinks=True)
        else:
            refuse_special(status, source)
            shutil.copy2(source, temporary, follow_symlinks=False)
        os.rename(temporary, target)
    except BaseException as error:
        if os.path.isdir(temporary) and not os.path.islink(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        elif os.path.lexists(temporary):
            os.unlink(temporary)
        if isinstance(error, shutil.Error):
            raise FileError("invalid", f"{decode(source)}: holds something that can't be copied: {str(error)[:500]}") from None
        raise
    if stat.S_ISDIR(status.st_mode):
        remove_tree(source)
    else:
        os.unlink(source)
