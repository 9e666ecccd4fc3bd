"""Tiny wheels and source distributions, honest and hostile, made in a moment for the tests of package environments."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

Entry = str | bytes


def wheel(
    directory: Path, name: str, version: str = "1.0", files: Mapping[str, Entry] | None = None, *,
    requires: Sequence[str] = (), modes: Mapping[str, int] | None = None, forged: Mapping[str, Entry] | None = None,
    tag: str = "py3-none-any", twice: Sequence[str] = (), metadata: bool = True,
) -> Path:  # fmt: skip
    """Write a wheel. `modes`: Unix modes of entries; `forged`: contents that RECORD tells otherwise; `twice`: entries
    written a second time."""
    directory.mkdir(parents=True, exist_ok=True)
    base = f"{name.replace('-', '_')}-{version}"
    contents: dict[str, Entry] = dict(files if files is not None else {f"{name.replace('-', '_')}.py": f"VERSION = {version!r}\n"})
    if metadata:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
        contents[f"{base}.dist-info/METADATA"] = "\n".join(lines) + "\n"
        contents[f"{base}.dist-info/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    record = ""
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(_bytes(content)).digest()).rstrip(b"=").decode()
        record += f'"{path}",sha256={digest},{len(_bytes(content))}\n'
    if metadata:
        record += f"{base}.dist-info/RECORD,,\n"
        contents[f"{base}.dist-info/RECORD"] = record
    target = directory / f"{base}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in [*contents.items(), *((path, contents[path]) for path in twice)]:
            entry = zipfile.ZipInfo(path)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (modes or {}).get(path, 0o100644) << 16
            archive.writestr(entry, (forged or {}).get(path, content))
    return target


def _bytes(content: Entry) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def source_distribution(directory: Path, name: str, canary: Path, version: str = "1.0") -> Path:
    """A source distribution whose build leaves a file at `canary`: what must never happen on the host."""
    directory.mkdir(parents=True, exist_ok=True)
    base = f"{name}-{version}"
    backend = f"open({str(canary)!r}, 'w').write('built')\ndef build_wheel(*a, **k): raise SystemExit(1)\n"
    project = '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n'
    target = directory / f"{base}.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        for path, text in (
            ("pyproject.toml", project), ("evil.py", backend),
            ("PKG-INFO", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"),
        ):  # fmt: skip
            entry = tarfile.TarInfo(f"{base}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return target
