"""Which directories of a host are too much to lend to a sandbox, and which places inside may not be covered.

Guards against a workspace that is a whole machine: keys, histories and the kernel's own file systems lie at places
that are known. Paths here are resolved ones; whoever asks has opened the directory and read its name back.
Standard library only.
"""

from __future__ import annotations

import re

CREDENTIAL_PATHS = (
    ".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".netrc", ".pypirc", ".npmrc", ".git-credentials",
    ".config/gcloud", ".config/gh", ".password-store",
)  # fmt: skip
WIDE_PATHS = (
    "/", "/etc", "/root", "/home", "/var", "/var/run", "/run", "/proc", "/sys", "/dev", "/boot", "/var/lib",
)  # fmt: skip
_HOMES = re.compile(r"/(home|Users)/[^/]+")
_KERNEL = ("/proc/", "/sys/", "/dev/")

COVERED = ("usr", "bin", "lib", "lib32", "lib64", "libx32", "sbin", "opt", "etc", "proc", "sys", "dev", "workspace")
"""Top directories of a sandbox in which no host directory may be placed: they are the sandbox."""
_WHOLE = ("/tmp", "/home", "/home/user", "/var", "/var/tmp", "/run", "/root", "/mnt", "/srv", "/")


def holds_credentials(path: str) -> bool:
    """Whether `path` is, or lies in, a directory where programs keep keys and tokens."""
    return any(path.endswith("/" + secret) or f"/{secret}/" in path for secret in CREDENTIAL_PATHS)


def is_wide(path: str) -> bool:
    """Whether `path` holds far more than one project: a home directory, a system directory, the root."""
    return path in WIDE_PATHS or _HOMES.fullmatch(path) is not None


def refused_source(path: str) -> tuple[str, str] | None:
    """(why, what to do) where the host directory `path` is never lent, else None."""
    if holds_credentials(path):
        return f"{path} holds credentials", "leave it out, or copy the one file that is needed in with `sandbox.files`"
    if is_wide(path):
        return f"{path} holds far more than one project", "name the directory that is needed"
    if path.startswith(_KERNEL) and not path.startswith("/dev/shm/"):
        return f"{path} is the kernel's, not files", "name a directory of files"
    return None


def refused_place(path: str) -> tuple[str, str] | None:
    """(why, what to do) where no host directory may appear at `path` inside, else None."""
    if path.split("/")[1] in COVERED:
        return f"{path} would cover a part of the sandbox itself", "lend it as the workspace, or from another path"
    if path in _WHOLE:
        return f"{path} is a directory of the sandbox's own", "name a directory below it"
    return None
