"""What is in force in a running sandbox, read from the kernel and not from our own intentions.

Guards against protection that was configured, loaded and not in force: each line is taken from the files that
the kernel keeps about the sandbox's first process (proc(5)), on the host's side. A primitive that cannot be
read counts as not in force. Standard library only.
"""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import Any

_NS_GET_PARENT = 0xB702
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


def gather(
    pid: int, limits: dict[str, Any], report: dict[str, Any], ids: str, facts: dict[str, Any],
    lent: list[dict[str, Any]], root_inside: bool = False,
) -> list[list[str]]:
    """Rows of [primitive, strength, detail] for the sandbox whose first process is `pid` on the host.

    `root_inside`: there is a uid 0 inside, and so one row more says what holds it.
    """
    rows: list[list[str]] = []
    status = _status(pid)
    separate = [name for name in _NAMESPACES if _differs(pid, name)]
    for name in _NAMESPACES:
        rows.append([f"namespace {name}", "hard" if name in separate else "none", "own" if name in separate else "shared with the host"])
    uid_map = _read(f"/proc/{pid}/uid_map").split()
    rows.append(["user ids", "hard" if uid_map and ids != "single" else "none", _IDS.get(ids, ids)])
    bounding, permitted = status.get("CapBnd", "?"), status.get("CapPrm", "?")
    rows.append(["capabilities", "hard" if bounding.strip("0") == "" else "none", f"bounding {bounding}; the agent keeps {permitted} over its own ids, user code none"])
    if root_inside:
        below = _namespace_below(pid)
        rows.append(["root inside", "hard" if below else "none",
                     (f"uid 0 and user code live in a user namespace of their own ({below or 'not found'}), below the agent's, "
                     "with seven capabilities over its processes and files")])  # fmt: skip
    rows.append(["no_new_privs", "hard" if status.get("NoNewPrivs") == "1" else "none", "set-id programs give nothing"])
    rows.append(["seccomp", "hard" if status.get("Seccomp") == "2" else "none", f"allow-list filter, {status.get('Seccomp_filters', '?')} in force"])
    abi = int(facts.get("landlock", 0))
    rows.append(["landlock scopes", "hard" if abi >= 6 else "none", f"abstract sockets and signals stay inside (ABI {abi})"])
    mountinfo = _read(f"/proc/{pid}/mountinfo").splitlines()
    root = next((line for line in mountinfo if line.split()[4:5] == ["/"]), "")
    rows.append(["root file system", "hard" if " overlay " in root else "none", "allow-list root, overlay on a sized tmpfs"])
    system = next((line for line in mountinfo if line.split()[4:5] == ["/usr"]), "")
    quiet = " - overlay " in system
    rows.append(["system directories", "hard" if quiet else "none", "/usr is read-only; sockets and FIFOs of the host below it are dead" if quiet else "/usr is read-only, but sockets and FIFOs of the host below it are live"])
    sized = [line.split()[4] for line in mountinfo if " tmpfs " in line and "size=" in line]
    rows.append(["disk", "hard" if " overlay " in root else "none", f"{limits['disk']} bytes"])
    rows.append(["tmp", "hard" if "/tmp" in sized else "none", f"{limits['tmp']} bytes, noexec"])
    if lent:
        places = _places(mountinfo)
        rows += [_lent(each, places) for each in lent]
        rows += [_protected(each["protected"], places) for each in lent if each["mode"] == "rw"]
    rlimits = _read(f"/proc/{pid}/limits")
    for name, key in (("memory", "memory"), ("cpus", "cpus"), ("pids", "pids")):
        strength, why = report[key][0], report[key][1]
        detail = f"{limits[name]}: {why}"
        if name == "memory" and strength == "hard":
            files = limits["disk"] + limits["tmp"]
            detail += f"; the group holds {limits['memory'] + files} bytes, since files (disk and tmp) are charged to it too"
        if name == "memory" and strength == "watched":
            detail += f"; each process at most {_hard(rlimits, 'Max data size')} bytes of its own, what its template had included"
        rows.append([f"limit {name}", strength, detail])
    for name, label in (("open_files", "Max open files"), ("file_size", "Max file size")):
        line = next((line for line in rlimits.splitlines() if line.startswith(label)), "")
        soft, hard = (line.split()[-3:-1] + ["?", "?"])[:2]
        held = hard.isdigit() and int(hard) <= limits[name]
        rows.append([f"limit {name}", "hard" if held else "none", f"{soft}, and {hard} at most"])
    rows.append(["limit max_age", "hard", f"{limits['max_age']} s, kept by the launcher"])
    return rows


_MODES = {
    "ro": "read only; sockets and FIFOs of the host below it are dead",
    "overlay": "changes are held back in an upper layer of its own, and counted to `disk`; the host's files stay as they are",
    "rw": "writes go to the host at once, and sockets below it are live",
}


def _places(mountinfo: list[str]) -> dict[str, list[str]]:
    """Mount point -> the fields of its uppermost mount (proc(5); octal escapes for odd bytes)."""
    places: dict[str, list[str]] = {}
    for line in mountinfo:
        fields = line.split(" ")
        place = fields[4]
        for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            place = place.replace(octal, character)
        places[place] = fields
    return places


def _protected(paths: list[str], places: dict[str, list[str]]) -> list[str]:
    """The row of what stays read-only in a workspace that is written: a mount each, which the host can undo by a
    rename over it (rename(2) detaches it), so they are looked for now."""
    lost = [path for path in paths if "ro" not in places.get(f"/workspace/{path}", ["", "", "", "", "", ""])[5].split(",")]
    detail = (
        f"{len(paths) - len(lost)} files and directories that the host acts on by itself are read-only; names that did not "
        "exist at the start can be created (accept_new_protected)"
    )
    if lost:
        return ["protected names", "none", f"{lost[0]} is no longer held, since the host replaced it; " + detail]
    return ["protected names", "watched", detail]


def _lent(each: dict[str, Any], places: dict[str, list[str]]) -> list[str]:
    """The row of one host directory: the mode that the kernel shows, which must be the one that was asked for."""
    fields = places.get(each["place"], [])
    found = "none"
    if fields:
        options, kind, layers = fields[5].split(","), fields[fields.index("-") + 1], fields[-1]
        if kind != "overlay":
            found = "rw" if "rw" in options else "bound read-only"
        else:
            found = "overlay" if "rw" in options and "upperdir=" in layers else "ro"
        if not {"nosuid", "nodev"} <= set(options):
            found += " without nosuid and nodev"
    name = "workspace" if each["place"] == "/workspace" else f"read-only directory {each['place']}"
    held = found == each["mode"]
    detail = f"{each['mode']}, from {each['source']}: " + (_MODES[each["mode"]] if held else f"but the kernel shows {found}")
    return [name, "hard" if held else "none", detail]


def _hard(rlimits: str, label: str) -> str:
    """A hard limit as /proc/PID/limits shows it."""
    line = next((line for line in rlimits.splitlines() if line.startswith(label)), "")
    return (line.removeprefix(label).split() + ["?", "?"])[1]


_IDS = {
    "ranges": "an id range of its own on this machine",
    "subids": "a slot of the user's subordinate ids",
    "single": "one id, the caller's: agent and user code share it (install `uidmap` for ranges)",
}


def _status(pid: int) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":" in line)
    return {name: value.strip() for name, value in pairs}


def _namespace_below(pid: int) -> str:
    """The user namespace that process `pid` holds and whose parent is its own (ioctl_nsfs(2)); "" if there is none."""
    try:
        own = os.stat(f"/proc/{pid}/ns/user")
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return ""
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            link = os.readlink(path)
            if not link.startswith("user:["):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                parent = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            finally:
                os.close(descriptor)
            above = os.fstat(parent)
            os.close(parent)
        except OSError:
            continue
        if (above.st_dev, above.st_ino) == (own.st_dev, own.st_ino):
            return link
    return ""


def _differs(pid: int, name: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return False


def _read(path: str) -> str:
    try:
        with open(path, errors="surrogateescape") as file:  # a mount point is named by any bytes
            return file.read()
    except OSError:
        return ""
