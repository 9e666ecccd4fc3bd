"""What package managers and account tools find in /etc and /var of a sandbox that has a root.

Nothing of the machine's own settings: accounts are those that every Debian has, apt knows no server, no proxy and no
key, and PAM asks for nothing (root may become anyone; nobody else may become anything). Of the machine come the list
of installed packages, so that dependencies are resolved against what is really below /usr, and the look-up tables
that dpkg keeps beside it. Which packages are installed the sandbox can see in /usr anyway; what their configuration
was answered with (debconf), and from where they came, it can not.

Guards against: host secrets in the copies (each file is named here, and only those that everyone may read are taken)
and file system tricks (regular files only, bounded). Standard library only.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ringfence.linux.records import NamedTuple

ADOPT = "usr/lib/ringfence/adopt"
SHADOW_GROUP = 42  # its id on every Debian (base-passwd)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMIT = 32 << 20  # bytes of one table of dpkg's
_DPKG = "/var/lib/dpkg"
_DPKG_FILES = ("status", "diversions", "statoverride", "cmethopt", "arch")
_DPKG_DIRECTORIES = ("alternatives", "triggers")
DATABASE = _DPKG[1:]  # lent as a tree, since `info` holds thousands of files, with our copies laid over it

_ACCOUNTS = """root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
sync:x:4:65534:sync:/bin:/bin/sync
games:x:5:60:games:/usr/games:/usr/sbin/nologin
man:x:6:12:man:/var/cache/man:/usr/sbin/nologin
lp:x:7:7:lp:/var/spool/lpd:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
news:x:9:9:news:/var/spool/news:/usr/sbin/nologin
uucp:x:10:10:uucp:/var/spool/uucp:/usr/sbin/nologin
proxy:x:13:13:proxy:/bin:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
backup:x:34:34:backup:/var/backups:/usr/sbin/nologin
list:x:38:38:Mailing List Manager:/var/list:/usr/sbin/nologin
irc:x:39:39:ircd:/run/ircd:/usr/sbin/nologin
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUPS = (
    "root:0 daemon:1 bin:2 sys:3 adm:4 tty:5 disk:6 lp:7 mail:8 news:9 uucp:10 man:12 proxy:13 kmem:15 dialout:20 "
    "fax:21 voice:22 cdrom:24 floppy:25 tape:26 sudo:27 audio:29 dip:30 www-data:33 backup:34 operator:37 list:38 "
    "irc:39 src:40 shadow:42 utmp:43 video:44 sasl:45 plugdev:46 staff:50 games:60 users:100 user:1000 nogroup:65534"
)  # fmt: skip

# Root may become anyone; there is no way up, so what nobody can prove is denied.
_PAM = """auth sufficient pam_rootok.so
auth required pam_deny.so
account required pam_permit.so
password required pam_unix.so yescrypt
session required pam_permit.so
"""
_PAM_LINES = {
    "common-auth": "auth sufficient pam_rootok.so\nauth required pam_deny.so\n",
    "common-account": "account required pam_permit.so\n",
    "common-password": "password required pam_unix.so yescrypt\n",
    "common-session": "session required pam_permit.so\n",
    "common-session-noninteractive": "session required pam_permit.so\n",
}

# Services would outlive the command that installed them, and there is no init: packages ask this file first
# (deb-systemd-invoke(1p), invoke-rc.d(8); 101 means "not allowed by policy").
_NO_SERVICES = b"#!/bin/sh\n# No init runs in a sandbox: packages must not start services.\nexit 101\n"


def programs(python: str) -> dict[str, bytes]:
    """Programs of ours by path below the root, run by the sandbox's interpreter or its shell."""
    begin = f"#!{python} -IS\nimport sys\nsys.path.append('/opt/ringfence')\n"
    return {
        "usr/bin/sudo": (begin + "from ringfence.guest.sudo import main\nsys.exit(main(sys.argv))\n").encode(),
        ADOPT: (begin + "from ringfence.guest.adopt import main\nsys.exit(main(sys.argv[1]))\n").encode(),
        "usr/sbin/policy-rc.d": _NO_SERVICES,
    }


class File(NamedTuple):
    """A file to write: content, permission bits, group."""

    content: bytes
    mode: int = 0o644
    group: int = 0


def etc() -> dict[str, File]:
    """Files below /etc by name, for a sandbox with root."""
    shadow = "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in _ACCOUNTS.splitlines())
    groups: dict[str, str] = {name: number for name, _, number in (item.partition(":") for item in _GROUPS.split())}
    members = {"sudo": "user"}
    files = {
        "passwd": File(_ACCOUNTS.encode()),
        "group": File("".join(f"{name}:x:{number}:{members.get(name, '')}\n" for name, number in groups.items()).encode()),
        "shadow": File(shadow.encode(), 0o640, SHADOW_GROUP),
        "gshadow": File("".join(f"{name}:*::{members.get(name, '')}\n" for name in groups).encode(), 0o640, SHADOW_GROUP),
        "environment": File(f'PATH="{PATH}"\n'.encode()),
        "dpkg/dpkg.cfg": File(
            b"# No terminal may be there to answer; files of the lent system get an owner before they are replaced.\n"
            b"force-confold\n" + f"pre-invoke=/{ADOPT} $PPID\n".encode()
        ),
        "apt/apt.conf.d/50ringfence": File(
            b'// A sandbox starts empty and is thrown away: no recommendations, no translations, no questions.\n'
            b'APT::Install-Recommends "false";\nAPT::Get::Assume-Yes "true";\nAcquire::Languages "none";\n'
            b'Dpkg::Use-Pty "0";\n'
        ),
        "apt/sources.list": File(b"# no package server: this sandbox has no network\n"),
        "default/useradd": File(b"SHELL=/bin/bash\nHOME=/home\n"),
        "pam.d/other": File(_PAM.encode()),
    }
    for name in ("su", "su-l", "runuser", "runuser-l", "passwd", "chpasswd", "chsh", "chfn", "login"):
        files["pam.d/" + name] = File(_PAM.encode())
    for name, lines in _PAM_LINES.items():
        files["pam.d/" + name] = File(lines.encode())
    return files


DIRECTORIES = (
    "etc/dpkg/dpkg.cfg.d", "etc/apt/preferences.d", "etc/apt/sources.list.d", "etc/apt/trusted.gpg.d", "etc/apt/keyrings", "etc/apt/auth.conf.d",
    "etc/pam.d", "etc/default", "etc/apt/apt.conf.d", "etc/profile.d", "etc/security", "etc/init.d", "etc/cron.d", "etc/cron.daily", "etc/systemd", "var/lib/apt/lists/partial",
    "var/cache/apt/archives/partial", "var/cache/debconf", "var/cache/ldconfig", "var/log/apt", "var/lib/dpkg/parts",
    "var/lib/dpkg/updates", "var/lib/dpkg/info", "var/lib/dpkg/triggers", "var/lib/dpkg/alternatives", "var/lib/misc",
    "var/lib/systemd", "var/spool", "var/mail", "var/backups", "var/local", "var/opt", "usr/bin", "usr/sbin", "usr/lib/ringfence",
)  # fmt: skip
"""Empty directories that package managers expect, below the template root."""


def dpkg() -> dict[str, bytes | None]:
    """dpkg's tables of this machine by path below the root; {} on one without dpkg.

    None stands for a file that is not to be seen: locks, backups and what else the machine's root alone may open.
    """
    found: dict[str, bytes | None] = {}
    if not os.path.isdir(_DPKG):
        return found
    for entry in os.scandir(_DPKG):
        if not entry.is_dir(follow_symlinks=False):
            found[entry.path[1:]] = None
    names = [f"{_DPKG}/{name}" for name in _DPKG_FILES]
    for directory in _DPKG_DIRECTORIES:
        try:
            names += [f"{_DPKG}/{directory}/{name}" for name in sorted(os.listdir(f"{_DPKG}/{directory}"))[:5000]]
        except OSError:
            continue
    for path in names:
        if os.path.lexists(path):
            found[path[1:]] = _read(path)
    overrides, status = f"{DATABASE}/statoverride", f"{DATABASE}/status"
    found[overrides] = _known_overrides(found.get(overrides) or b"")
    found[status] = found.get(status) or b""
    # A package that brings another sudo does not get the place of the one that works (dpkg-divert(1)).
    diversions = f"{DATABASE}/diversions"
    found[diversions] = (found.get(diversions) or b"") + b"/usr/bin/sudo\n/usr/bin/sudo.distrib\n:\n"
    return found


def _known_overrides(table: bytes) -> bytes:
    """The lines (owner, group, mode, path) that name accounts which exist inside: dpkg ends at any other."""
    users = {line.split(":")[0].encode() for line in _ACCOUNTS.splitlines()}
    groups = {item.split(":")[0].encode() for item in _GROUPS.split()}
    lines = [line.split() for line in table.splitlines()]
    return b"".join(b" ".join(line) + b"\n" for line in lines if len(line) == 4 and line[0] in users and line[1] in groups)


def _read(path: str) -> bytes | None:
    """A regular file that everyone may read, up to the bound; else None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > _LIMIT or not state.st_mode & 0o004:
            return None
        return file.read(_LIMIT)
