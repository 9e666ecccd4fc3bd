"""Unpack wheels that nobody trusts, as files and nothing but files, below one new directory.

Guards against what a hostile wheel can do to the machine that unpacks it: entries that lead outside (`..`, absolute
names, links), special files, names that a terminal or a file system reads otherwise, archives that grow without
end, a file that replaces the environment's own interpreter, a content other than its RECORD says. No byte of a
wheel is executed or imported here: `.pth` files and scripts are only written, and first run inside a sandbox.

A wheel is refused as a whole, with its name and the entry. Layout: wheel format 1.0 (PEP 427, PEP 491), RECORD
(PEP 376, PEP 627).
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import os
import re
import stat
import zipfile
from typing import IO, NamedTuple

from ringfence.errors import EngineError
from ringfence.node.distributions import normalise

MOST_ENTRIES = 200_000
LARGEST_WHEEL = 24 << 30
"""Bytes that one wheel may unpack to; the largest on the public index are below 10 GiB."""
LARGEST_METADATA = 64 << 20
_PIECE = 1 << 20
_RESERVED = re.compile(r"(python|pip)[0-9.]*\Z|activate", re.IGNORECASE)
_ENTRY_POINT = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?\Z")


class Unpacked(NamedTuple):
    """One wheel that was unpacked: its project, the bytes it takes, what its entries were that run at start-up."""

    name: str
    version: str
    size: int
    path_files: tuple[str, ...]


def sha256_of(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: str, expected: str, tree: str, site_packages: str, inside: str, requested: bool) -> Unpacked:
    """Unpack the file `wheel`, whose SHA-256 must be `expected`, into the new environment `tree`.

    `site_packages` is relative to it; `inside` is where the tree will be mounted, for the first line of scripts.

    Raises:
        EngineError: the file is not the expected one, is no wheel, or is not to be trusted with a file system.
    """
    label = os.path.basename(wheel)
    found = sha256_of(wheel)
    if found != expected:
        raise EngineError(
            f"{label} is not the file that was locked: sha256 {found}, expected {expected}",
            hint="the index or the directory changed it, or somebody tampered with it; `--update` locks anew",
        )
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _Wheel(archive, label, tree, site_packages, inside).write(requested)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise _refused(label, f"it cannot be read: {error}") from None


def _refused(label: str, why: str) -> EngineError:
    return EngineError(f"the wheel {label} is refused: {why}", hint="nothing of it was executed; report it to its index")


class _Wheel:
    def __init__(self, archive: zipfile.ZipFile, label: str, tree: str, site_packages: str, inside: str) -> None:
        self.archive, self.label, self.tree, self.site, self.inside = archive, label, tree, site_packages, inside
        self.entries = archive.infolist()
        self.written: list[tuple[str, str, int]] = []  # path from site-packages, hash, size
        self.size = 0

    def fail(self, why: str) -> EngineError:
        return _refused(self.label, why)

    def write(self, requested: bool) -> Unpacked:
        self._check_names()
        metadata = self._metadata_directory()
        record = self._record(metadata)
        name, version = metadata[: -len(".dist-info")].split("-", 1)
        if os.path.lexists(os.path.join(self.tree, self.site, metadata)):
            raise self.fail("another wheel brought the same metadata")
        path_files = []
        for entry in self.entries:
            if entry.is_dir():
                continue
            target = self._target(entry.filename, metadata)
            if target is None:
                continue
            if target.endswith(".pth"):
                path_files.append(target)
            self._write_entry(entry, target, record.get(entry.filename, ""))
        self._write_scripts(metadata)
        self._write_text(f"{self.site}/{metadata}/INSTALLER", "ringfence\n")
        if requested:
            self._write_text(f"{self.site}/{metadata}/REQUESTED", "")
        self._write_record(metadata)
        return Unpacked(normalise(name), version, self.size, tuple(path_files))

    def _check_names(self) -> None:
        if len(self.entries) > MOST_ENTRIES:
            raise self.fail(f"it has more than {MOST_ENTRIES} entries")
        if sum(entry.file_size for entry in self.entries) > LARGEST_WHEEL:
            raise self.fail(f"it would unpack to more than {LARGEST_WHEEL >> 30} GiB")
        seen = set()
        for entry in self.entries:
            # `orig_filename`: zipfile ends a name at a NUL byte and turns the separator around.
            name = entry.orig_filename
            parts = name.rstrip("/").split("/")
            if name.startswith("/") or any(part in ("", ".", "..") for part in parts):
                raise self.fail(f"its entry {name[:200]!r} leads out of the environment")
            if not name.isprintable() or "\\" in name or len(os.fsencode(name)) > 1000 or max(map(len, parts)) > 240:
                raise self.fail(f"its entry {name[:200]!r} has a name that no package needs")
            mode = entry.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise self.fail(f"its entry {name[:200]!r} is a link or a special file")
            if name in seen:
                raise self.fail(f"it has two entries {name[:200]!r}")
            seen.add(name)

    def _metadata_directory(self) -> str:
        tops = {entry.filename.split("/", 1)[0] for entry in self.entries}
        found = [top for top in tops if top.endswith(".dist-info") and f"{top}/METADATA" in self.archive.NameToInfo]
        if len(found) != 1 or "-" not in found[0][: -len(".dist-info")]:
            raise self.fail("it has not exactly one directory of metadata")
        name = self.label.split("-")
        own = found[0][: -len(".dist-info")].split("-", 1)
        if normalise(name[0]) != normalise(own[0]):
            raise self.fail(f"its file name and its metadata ({own[0]!r}) name different projects")
        wheel = self._read(f"{found[0]}/WHEEL")
        version = re.search(r"^Wheel-Version:\s*(\d+)\.", wheel, re.MULTILINE)
        if version is None or version[1] != "1":
            raise self.fail("its format is not version 1 of the wheel format")
        return found[0]

    def _read(self, name: str) -> str:
        entry = self.archive.NameToInfo.get(name)
        if entry is None:
            raise self.fail(f"it has no {name}")
        if entry.file_size > LARGEST_METADATA:
            raise self.fail(f"{name} is too large")
        with self.archive.open(entry) as file:
            return file.read(LARGEST_METADATA).decode("utf-8", "replace")

    def _record(self, metadata: str) -> dict[str, str]:
        rows = csv.reader(self._read(f"{metadata}/RECORD").splitlines())
        return {row[0]: row[1] for row in rows if len(row) >= 2}

    def _target(self, name: str, metadata: str) -> str | None:
        """Where an entry belongs, relative to the tree; None for what is made anew or left out."""
        if name in (f"{metadata}/RECORD", f"{metadata}/INSTALLER", f"{metadata}/REQUESTED", f"{metadata}/direct_url.json"):
            return None
        if "/__pycache__/" in f"/{name}":
            return None  # byte code is made here, from the source that is seen
        first, _, rest = name.partition("/")
        if not first.endswith(".data") or first[:-5] + ".dist-info" != metadata:
            return f"{self.site}/{name}"
        scheme, _, rest = rest.partition("/")
        if not rest:
            raise self.fail(f"its entry {name!r} belongs nowhere")
        if scheme in ("purelib", "platlib"):
            return f"{self.site}/{rest}"
        if scheme == "headers":
            return None
        if scheme == "scripts":
            if "/" in rest or _RESERVED.match(rest):
                raise self.fail(f"its script {rest[:200]!r} would replace a program of the environment")
            return f"bin/{rest}"
        if scheme == "data":
            top = rest.split("/", 1)[0]
            if top not in ("share", "etc", "include", "lib") or re.match(r"lib/python|lib/?\Z", rest):
                raise self.fail(f"its data {rest[:200]!r} would lie outside of what packages may write")
            return rest
        raise self.fail(f"its entry {name[:200]!r} is of an unknown kind")

    def _write_entry(self, entry: zipfile.ZipInfo, target: str, claimed: str) -> None:
        path = os.path.join(self.tree, target)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.isdir(path):
                raise FileExistsError
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            if os.path.isfile(path) and not os.path.islink(path):
                return  # two packages own one file (namespace packages, licences): the first is as good
            raise self.fail(f"its entry {entry.filename[:200]!r} is a file where another wheel has a directory") from None
        except NotADirectoryError:
            raise self.fail(f"its entry {entry.filename[:200]!r} lies below a file") from None
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as file, self.archive.open(entry) as source:
            size = self._copy(entry, source, file, digest, target.startswith("bin/"))
        algorithm, _, value = claimed.partition("=")
        own = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
        if algorithm == "sha256" and value.rstrip("=") != own:
            raise self.fail(f"{entry.filename[:200]!r} is not what its RECORD says")
        if target.startswith("bin/") or entry.external_attr >> 16 & 0o100:
            os.chmod(path, 0o755)
        self.size += size
        hash_now = "" if target.startswith("bin/") else f"sha256={own}"
        self.written.append((os.path.relpath(target, self.site), hash_now, size))

    def _copy(self, entry: zipfile.ZipInfo, source: IO[bytes], file: IO[bytes], digest: hashlib._Hash, script: bool) -> int:
        size = 0
        while piece := source.read(_PIECE):
            digest.update(piece)
            if script and size == 0 and piece.startswith(b"#!python"):
                rest = piece.partition(b"\n")[2]
                file.write(f"#!{self.inside}/bin/python3\n".encode() + rest)
            else:
                file.write(piece)
            size += len(piece)
            if size > entry.file_size:
                raise self.fail(f"{entry.filename[:200]!r} is larger than it says")
        return size

    def _write_scripts(self, metadata: str) -> None:
        if f"{metadata}/entry_points.txt" not in self.archive.NameToInfo:
            return
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read_string(self._read(f"{metadata}/entry_points.txt"))
        except configparser.Error as error:
            raise self.fail(f"its entry points cannot be read: {error}") from None
        for section in ("console_scripts", "gui_scripts"):
            for name, value in parser.items(section) if parser.has_section(section) else ():
                point = value.partition("[")[0].strip().replace(" ", "")
                module, _, function = point.partition(":")
                if not _ENTRY_POINT.match(point) or not function or not re.match(r"[\w.+-]+\Z", name):
                    continue
                if name in (".", "..") or _RESERVED.match(name):
                    continue  # a package may be called so; its program stays the environment's
                self._write_text(
                    f"bin/{name}",
                    f"#!{self.inside}/bin/python3\nimport sys\nfrom {module} import {function.partition('.')[0]}\n"
                    f"sys.exit({function}())\n",
                    0o755,
                )

    def _write_text(self, target: str, text: str, mode: int = 0o644) -> None:
        path = os.path.join(self.tree, target)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        except FileExistsError:
            return
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        self.written.append((os.path.relpath(target, self.site), "", len(text.encode())))

    def _write_record(self, metadata: str) -> None:
        rows = [*self.written, (f"{metadata}/RECORD", "", 0)]
        path = os.path.join(self.tree, self.site, metadata, "RECORD")
        with open(path, "x", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                (name, digest, size if digest else "") for name, digest, size in rows
            )
