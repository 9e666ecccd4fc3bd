"""Control groups: the kernel's own counters for memory, processes and processor time, held per sandbox.

Guards against a sandbox that eats the machine: memory of every kind (heap, tmpfs, shared maps, kernel
memory), processes and threads, processor time; and gives the host two verbs nothing inside can dodge,
freeze and kill. Facts: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/*.rst.

Where groups go, and why:

* **Below the group this process is in**, so that a limit an administrator put on us (or on the service,
  session or container we run in) still binds everything we start. On v1 that always works when the
  directory is writable.
* **On v2 a group with processes cannot hand out controllers** ("no internal processes"). If our own group
  was delegated to us and only processes we were told we may move are in it (``may_move``), they go to a leaf,
  ``ringfence-host``, and sandboxes become its siblings. Otherwise the closest ancestor we may write is used
  (a delegated parent, or, as root, a sibling of our own group), and the limits of the groups stepped over are
  copied onto our owner's group, so that they bind the sandboxes too.
* Nothing of anyone else's is moved, changed or removed, except that controllers may be switched on in the
  chosen parent's ``cgroup.subtree_control``. An ordinary user on a systemd machine gets a delegated group
  with ``systemd-run --user --scope -p Delegate=yes``: that is said in the hint and never run silently.
* On a hybrid machine (v1 controllers plus a v2 tree without any) the v2 tree is joined only where no v1 freezer
  can be used, because joining a v2 group is slow (next paragraph).

How a process gets in, and why it matters: writing a ``cgroup.procs`` file takes a kernel-wide lock that waits
for an RCU grace period when nobody took it lately (5 ms measured, against 0.1 ms). Two ways avoid it. On v1 a
process that is still single-threaded writes "0" to ``tasks`` (`attach`, with `Group.procs_fds`); on v2 it is
born inside, by clone3 with CLONE_INTO_CGROUP (`Group.clone_fd`; `Group.permit` and `GroupPool.zygote_group`
give an unprivileged zygote the right to do so). Writing the v2 descriptor works too, slowly. A cgroup namespace
must be unshared after joining: its root is the group its maker is in at that moment.

Names: ``<parent>/ringfence/owner-<pid>-<start time>-<pid namespace>/<number>``. The middle one tells a later
life whether the owner is gone (`sweep`). Groups are single-use: a counter, an OOM record or a straggler of
one sandbox can never be seen by the next.

`detect` only looks; `GroupPool` makes. Errors are `CgroupError`, with a hint.
"""

from __future__ import annotations

import errno
import os
import select
import time

CONTROLLERS = ("memory", "pids", "cpu")
HOST_LEAF = "ringfence-host"
CPU_PERIOD = 100_000  # microseconds; the kernel's default
CPU_QUOTA_MINIMUM = 1_000  # microseconds; the kernel refuses less
SIGKILL = 9  # the signal module costs an enum import at every launcher start

_SYSTEMD_SUFFIXES = (".slice", ".service", ".scope", ".mount", ".socket", ".swap")
_UNLIMITED_V1 = 1 << 62  # v1 shows "no limit" as the largest page-aligned long

SYSTEMD_REMEDY = (
    "start the program in a delegated group of its own: "
    "`systemd-run --user --scope -p Delegate=yes -- PROGRAM`, or run it as root"
)
HYBRID_REMEDY = (
    "run it as root, or boot with cgroup v2 alone (kernel parameter `systemd.unified_cgroup_hierarchy=1`): "
    "beside v1 controllers, systemd delegates none to users"
)
CPU_DELEGATION_REMEDY = (
    "let systemd delegate it: `sudo systemctl edit user@.service`, add "
    "`[Service]` and `Delegate=cpu cpuset io memory pids`, then log in again"
)


class CgroupError(OSError):
    """A control group could not be made, limited or removed. `hint` says what to do; `errno` is the kernel's."""

    def __init__(self, message: str, hint: str = "", number: int = 0):
        super().__init__(number, message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message + (" (" + self.hint + ")" if self.hint else "")


# -- files -----------------------------------------------------------------------------------------------------


def _mkdir(path: str) -> None:
    os.mkdir(path, 0o755)


def _rmdir(path: str) -> None:
    os.rmdir(path)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while True:
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return b"".join(chunks).decode("utf-8", "surrogateescape")
            chunks.append(chunk)
    finally:
        os.close(descriptor)


def _read_or_empty(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _number(path: str):
    """The integer in a one-value file; None when the file is absent or says "max"."""
    text = _read_or_empty(path).strip()
    try:
        return int(text)
    except ValueError:
        return None


def _table(path: str) -> dict:
    """A flat-keyed file ("name value" lines) as a dict of integers."""
    table = {}
    for line in _read_or_empty(path).splitlines():
        name, _, value = line.partition(" ")
        try:
            table[name] = int(value)
        except ValueError:
            continue
    return table


def _pids(directory: str) -> set:
    """Process ids in one group. A 0 (a process outside our pid namespace) is kept: the group is not empty."""
    return {int(word) for word in _read_or_empty(directory + "/cgroup.procs").split()}


def _words(path: str) -> set:
    return set(_read_or_empty(path).split())


# -- what this machine offers -------------------------------------------------------------------------------------


class Tree:
    """One hierarchy that a sandbox joins: where our folder goes and what it limits there."""

    __slots__ = ("controllers", "mount", "move", "parent", "stepped_over", "version")

    def __init__(self, version, mount, parent, controllers=(), move=(), stepped_over=()):
        self.version = version  # 1 or 2
        self.mount = mount  # mount point
        self.parent = parent  # the directory that will hold the `ringfence` folder
        self.controllers = tuple(controllers)  # those of memory, pids, cpu, cpuacct, freezer that it brings
        self.move = tuple(move)  # pids that must go to the host leaf first (v2, delegated)
        self.stepped_over = tuple(stepped_over)  # groups of ours whose limits do not bind `parent`'s children

    def describe(self) -> dict:
        return {
            "version": self.version,
            "parent": self.parent,
            "controllers": list(self.controllers),
            "moves_processes": bool(self.move),
            "limits_copied_from": list(self.stepped_over),
        }


class Place:
    """Where one controller lives and whether it can be used."""

    __slots__ = ("controller", "hint", "reason", "tree")

    def __init__(self, controller, tree, reason="", hint=""):
        self.controller = controller
        self.tree = tree
        self.reason = reason
        self.hint = hint

    @property
    def usable(self) -> bool:
        return self.tree is not None

    def describe(self) -> dict:
        return {
            "controller": self.controller,
            "usable": self.usable,
            "version": self.tree.version if self.tree else None,
            "parent": self.tree.parent if self.tree else None,
            "reason": self.reason,
            "hint": self.hint,
        }


class Hierarchy:
    """What `detect` found. `kind` is "v2", "v1", "hybrid" or "none"; `trees` are what a sandbox joins."""

    __slots__ = ("kind", "mounts", "places", "trees", "uid")

    def __init__(self, kind, places, trees, mounts, uid):
        self.kind = kind
        self.places = places  # {"memory" | "pids" | "cpu" | "freezer": Place}
        self.trees = trees
        self.mounts = mounts  # every cgroup mount, for the sweep
        self.uid = uid

    def usable(self, controller: str) -> bool:
        return self.places[controller].usable

    @property
    def missing(self) -> list:
        """Controllers of memory, pids, cpu, freezer that cannot be used here."""
        return [name for name, place in self.places.items() if not place.usable]

    def describe(self) -> dict:
        """JSON-able, for `doctor`."""
        return {
            "kind": self.kind,
            "controllers": {name: place.describe() for name, place in self.places.items()},
            "trees": [tree.describe() for tree in self.trees],
        }


class _Mount:
    __slots__ = ("options", "point", "read_only", "root", "version")

    def __init__(self, version, point, root, options, read_only):
        self.version, self.point, self.root = version, point, root
        self.options, self.read_only = options, read_only

    def directory(self, path):
        """The directory of a group named as in /proc/self/cgroup; None when it is outside this mount."""
        if path is None or "/../" in path + "/":
            return None
        root = self.root.rstrip("/")
        if path.rstrip("/") == root:
            return self.point
        if path.startswith(root + "/"):
            return self.point.rstrip("/") + path[len(root) :].rstrip("/")
        return None


def _unescape(word: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        word = word.replace(code, char)
    return word


def _cgroup_mounts(proc: str, root: str) -> list:
    """Every cgroup mount, those below `root` first (others may be an image's or a container's view)."""
    mounts = []
    for line in _read_or_empty(proc + "/self/mountinfo").splitlines():
        fields = line.split(" ")
        try:
            dash = fields.index("-", 6)
            kind, super_options = fields[dash + 1], fields[dash + 3].split(",")
        except (ValueError, IndexError):
            continue
        if kind not in ("cgroup", "cgroup2"):
            continue
        flags = set(fields[5].split(",")) | set(super_options)
        version = 2 if kind == "cgroup2" else 1
        point = _unescape(fields[4])
        mounts.append(_Mount(version, point, _unescape(fields[3]), set(super_options), "ro" in flags))
    inside = root.rstrip("/") + "/"
    mounts.sort(key=lambda mount: (not (mount.point + "/").startswith(inside), mount.read_only))
    return mounts


def _own_groups(proc: str) -> dict:
    """{controller or "" (v2): path of this process's group}."""
    own = {}
    for line in _read_or_empty(proc + "/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            own[""] = path
        for name in names.split(","):
            if name:
                own[name] = path
    return own


def detect(proc="/proc", root="/sys/fs/cgroup", uid=None, may_move=None, access=os.access) -> Hierarchy:
    """Look at this machine's control groups; change nothing.

    `may_move`: pids that may be moved into a leaf of our own delegated v2 group (default: this process alone;
    a launcher adds its owner). Processes not named there are never moved: then the group is not used.
    Never raises: what is missing is in `places[...]` with reason and hint.
    """
    uid = os.geteuid() if uid is None else uid
    may_move = {os.getpid()} if may_move is None else set(may_move)
    mounts = _cgroup_mounts(proc, root)
    own = _own_groups(proc)
    v2_mount = next((mount for mount in mounts if mount.version == 2), None)

    places, v1_trees = {}, {}
    on_v1 = {}
    for name in CONTROLLERS + ("freezer", "cpuacct"):
        for mount in mounts:
            if mount.version == 1 and name in mount.options:
                on_v1[name] = mount
                break
    for name in CONTROLLERS:
        if name in on_v1:
            places[name] = _v1_place(name, on_v1[name], own.get(name), uid, v1_trees, access)

    wanted = [name for name in CONTROLLERS if name not in on_v1]
    unified, reasons = None, {}
    if v2_mount is not None:
        unified, reasons = _choose_v2(v2_mount, own.get(""), uid, wanted, may_move, access)
    for name in wanted:
        if unified is not None and name in unified.controllers:
            places[name] = Place(name, unified, "cgroup v2 group below " + unified.parent)
        else:
            reason, hint = reasons.get(name, reasons.get("", ("", "")))
            if v2_mount is None:
                reason = "no cgroup file system with the " + name + " controller is mounted"
                hint = "mount cgroup v2: `mount -t cgroup2 none /sys/fs/cgroup` (any systemd machine has it)"
            elif on_v1 and hint == SYSTEMD_REMEDY:
                hint = HYBRID_REMEDY
            places[name] = Place(name, None, reason, hint)

    v1_freezer = None
    if "freezer" in on_v1 and not wanted:
        v1_freezer = _v1_place("freezer", on_v1["freezer"], own.get("freezer"), uid, v1_trees, access)
    if v1_freezer is not None and (v1_freezer.usable or unified is None):
        places["freezer"], unified = v1_freezer, None
    elif unified is not None:
        places["freezer"] = Place("freezer", unified, "cgroup.freeze and cgroup.kill below " + unified.parent)
    else:
        reason, hint = reasons.get("", ("no freezer controller is mounted", "mount cgroup v2"))
        places["freezer"] = Place("freezer", None, reason, HYBRID_REMEDY if on_v1 and hint == SYSTEMD_REMEDY else hint)
    if unified is None and "cpuacct" in on_v1 and places["cpu"].usable:
        _v1_place("cpuacct", on_v1["cpuacct"], own.get("cpuacct"), uid, v1_trees, access)

    trees = list(v1_trees.values()) + ([unified] if unified is not None else [])
    has_v1 = any(name in on_v1 for name in CONTROLLERS)
    kind = "none"
    if has_v1:
        kind = "hybrid" if v2_mount is not None else "v1"
    elif v2_mount is not None:
        kind = "v2"
    return Hierarchy(kind, places, trees, [(mount.version, mount.point) for mount in mounts], uid)


def _v1_place(name, mount, path, uid, trees, access) -> Place:
    directory = mount.directory(path)
    if directory is None:
        return Place(
            name,
            None,
            f"this process's {name} group ({path}) is outside what is mounted at {mount.point}",
            "run outside the container, or give the container its own cgroup namespace",
        )
    if mount.read_only or not access(directory, os.W_OK | os.X_OK):
        return Place(
            name,
            None,
            f"no group can be made in {directory} " + ("(read-only)" if mount.read_only else f"as uid {uid}"),
            "run as root, or have an administrator start the program in a v1 group that belongs to this user",
        )
    tree = trees.get(mount.point)
    if tree is None:
        tree = trees[mount.point] = Tree(1, mount.point, directory)
    tree.controllers += (name,)
    return Place(name, tree, "cgroup v1 group below " + directory)


def _systemd_delegated(directory: str) -> bool:
    """systemd marks a delegated unit's group with an extended attribute (systemd.resource-control(5))."""
    for attribute in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(directory, attribute) == b"1":
                return True
        except OSError:
            continue
    return False


def _systemd_managed(directory: str) -> bool:
    """True for a group that systemd writes to itself: a unit's without the mark, or one holding a manager.

    systemd is the single writer of its tree (https://systemd.io/CGROUP_DELEGATION/), so a user's program
    keeps out of such groups even where the file modes would let it in.
    """
    if os.path.isdir(directory + "/init.scope"):
        return True
    return directory.endswith(_SYSTEMD_SUFFIXES) and not _systemd_delegated(directory)


def _is_v2_root(directory: str) -> bool:
    return not os.path.exists(directory + "/cgroup.events")


def _choose_v2(mount, path, uid, wanted, may_move, access):
    """(Tree or None, {controller or "": (reason, hint)}) for the v2 hierarchy. See the module's first words."""
    own = mount.directory(path)
    if own is None:
        why = "this process's group (" + str(path) + ") is outside what is mounted at " + mount.point
        return None, {"": (why, "give the container its own cgroup namespace")}
    if mount.read_only:
        hint = "in a container: mount it writable (`--cgroupns=private` with a writable /sys/fs/cgroup)"
        return None, {"": (mount.point + " is mounted read-only", hint)}

    def writable(directory):
        return (
            access(directory, os.W_OK | os.X_OK)
            and access(directory + "/cgroup.procs", os.W_OK)
            and access(directory + "/cgroup.subtree_control", os.W_OK)
        )

    present = _words(mount.point + "/cgroup.controllers")
    existing = [name for name in wanted if name in present]
    reasons = {}
    for name in wanted:
        if name not in present:
            reasons[name] = (
                "the kernel offers no " + name + " controller at " + mount.point,
                "enable it at boot (`cgroup_enable=" + name + "`), or in the container's cgroup settings",
            )

    candidates = []  # (number of wanted controllers, -order, Tree)
    blocked = ""

    def consider(directory, move, stepped_over):
        offered = [name for name in existing if name in _words(directory + "/cgroup.controllers")]
        tree = Tree(2, mount.point, directory, offered, move, stepped_over)
        candidates.append((len(offered), -len(candidates), tree))

    if existing:
        own_is_open = writable(own)
        if own_is_open and _is_v2_root(own):
            consider(own, (), ())
        elif own_is_open and not _systemd_managed(own):
            members = _pids(own)
            strangers = members - may_move
            if strangers:
                shown = ", ".join(str(pid) for pid in sorted(strangers)[:5])
                blocked = (
                    f"other processes are in {own} ({shown}); a v2 group with processes shares nothing out"
                )
            else:
                consider(own, sorted(members), ())
        elif not own_is_open:
            blocked = own + " is not delegated to uid " + str(uid)
        else:
            blocked = own + " belongs to systemd"
        stepped_over, directory = [], own
        while directory != mount.point and directory.startswith(mount.point.rstrip("/") + "/"):
            if os.path.basename(directory) != HOST_LEAF:
                stepped_over.append(directory)
            directory = os.path.dirname(directory)
            if not writable(directory) or (uid != 0 and _systemd_managed(directory)):
                continue
            if _is_v2_root(directory) or not _pids(directory):
                consider(directory, (), tuple(stepped_over))
        usable = [candidate for candidate in candidates if candidate[0] > 0]
        if usable:
            tree = max(usable, key=lambda candidate: candidate[:2])[2]
            for name in existing:
                if name not in tree.controllers:
                    why = f"the {name} controller is not handed down to {tree.parent}"
                    reasons[name] = (why, CPU_DELEGATION_REMEDY)
            return tree, reasons
        for name in existing:
            reasons[name] = (blocked or f"no group above {own} can be written by uid {uid}", SYSTEMD_REMEDY)

    # No controller to hand out: a plain child of our own group still freezes, kills and counts processor time.
    if access(own, os.W_OK | os.X_OK) and access(own + "/cgroup.procs", os.W_OK):
        return Tree(2, mount.point, own), reasons
    reasons[""] = ("no group can be made in " + own + " as uid " + str(uid), SYSTEMD_REMEDY)
    return None, reasons


# -- owners ----------------------------------------------------------------------------------------------------


def _start_time(pid: int):
    """Start time of a process in clock ticks since boot, None when it is gone or a zombie (proc(5), field 22)."""
    text = _read_or_empty("/proc/" + str(pid) + "/stat")
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def owner_tag(pid=None) -> str:
    """The folder name of an owner: pid, start time and pid namespace, so that a reused pid is not taken for it."""
    pid = os.getpid() if pid is None else pid
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return "owner-" + str(pid) + "-" + str(_start_time(pid)) + "-" + str(namespace)


def parse_tag(tag: str):
    """(pid, start time, pid namespace), or None for a name that is not an owner's."""
    words = tag.split("-")
    numbers = words[1:]
    if (
        words[0] != "owner"
        or len(numbers) != 3
        or not all(word.isascii() and word.isdigit() for word in numbers)
    ):
        return None
    return int(words[1]), int(words[2]), int(words[3])


def owner_alive(tag: str) -> bool:
    """False only when the owner is certainly gone: same pid namespace and no such process (or another one)."""
    parsed = parse_tag(tag)
    if parsed is None or parsed[2] != os.stat("/proc/self/ns/pid").st_ino:
        return True
    return _start_time(parsed[0]) == parsed[1]


# -- groups ----------------------------------------------------------------------------------------------------


def attach(descriptors) -> None:
    """Move the calling process into a group through its `procs_fds`. For the forked child, before any thread.

    A thread started earlier would stay behind on v1. The kernel checks the credentials of whoever opened the
    files, so the child needs no privilege; on v1 the opener must be root or have the child's (real or saved) uid
    at this moment, so without root attach before changing uid.
    """
    for descriptor in descriptors:
        os.write(descriptor, b"0")


class Group:
    """The control groups of one sandbox, one directory per hierarchy. Single-use; made by `GroupPool`."""

    def __init__(self, trees, directories, on_removed=None):
        self._parts = list(zip(trees, directories))
        self._descriptors = []  # (version, descriptor)
        self._clone_descriptor = None
        self._limits = (None, None, None)
        self._on_removed = on_removed
        self._directory = {}
        for tree, directory in self._parts:
            for name in tree.controllers:
                self._directory[name] = (tree.version, directory)
            if tree.version == 2:
                self._directory["core"] = (2, directory)

    @property
    def directories(self) -> list:
        return [directory for _, directory in self._parts]

    def procs_fds(self, v2=True) -> list:
        """Open write descriptors for `attach` (close-on-exec; owned and closed by this object).

        `v2=False` leaves out the v2 one, for a child that is born inside through `clone_fd`.
        """
        if not self._descriptors:
            for tree, directory in self._parts:
                name = "/tasks" if tree.version == 1 else "/cgroup.procs"
                descriptor = os.open(directory + name, os.O_WRONLY | os.O_CLOEXEC)
                self._descriptors.append((tree.version, descriptor))
        return [descriptor for version, descriptor in self._descriptors if v2 or version == 1]

    def clone_fd(self):
        """Descriptor of the v2 directory for clone3's CLONE_INTO_CGROUP (owned by this object); None without v2."""
        if "core" not in self._directory:
            return None
        if self._clone_descriptor is None:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            self._clone_descriptor = os.open(self._directory["core"][1], flags)
        return self._clone_descriptor

    def permit(self, uid: int) -> None:
        """Let host user `uid` (an unprivileged zygote, itself in `GroupPool.zygote_group`) clone into the v2 part."""
        if "core" in self._directory:
            os.chown(self._directory["core"][1] + "/cgroup.procs", uid, -1)

    def add(self, pid: int) -> None:
        """Move a whole process in from outside."""
        for directory in self.directories:
            _write(directory + "/cgroup.procs", str(pid))

    def close_fds(self) -> None:
        descriptors, self._descriptors = [descriptor for _, descriptor in self._descriptors], []
        if self._clone_descriptor is not None:
            descriptors.append(self._clone_descriptor)
            self._clone_descriptor = None
        for descriptor in descriptors:
            os.close(descriptor)

    # limits

    def set(self, memory=None, pids=None, cpus=None) -> None:
        """Set limits: `memory` bytes (swap included), `pids` tasks, `cpus` processors (fractions allowed).

        None leaves a limit as it is. Each value is read back, so a limit that did not take is an error, never a
        promise. Raises CgroupError, also when the controller is not available here.
        """
        wanted = (memory, pids, cpus)
        if wanted == self._limits:
            return
        setters = (self._set_memory, self._set_pids, self._set_cpus)
        for name, value, setter in zip(CONTROLLERS, wanted, setters):
            if value is None:
                continue
            if name not in self._directory:
                raise CgroupError("no " + name + " controller is available to limit it", SYSTEMD_REMEDY)
            version, directory = self._directory[name]
            try:
                setter(version, directory, value)
            except CgroupError:
                raise
            except OSError as error:
                message = f"the kernel refused the {name} limit {value}: {error.strerror}"
                busy = error.errno == errno.EBUSY
                hint = "a running sandbox cannot be limited below what it already uses" if busy else ""
                raise CgroupError(message, hint, error.errno or 0) from error
        self._limits = tuple(new if new is not None else old for new, old in zip(wanted, self._limits))

    def _set_memory(self, version, directory, value):
        value = int(value)
        if version == 2:
            # Swap first: otherwise a group could push its excess out between the two writes.
            for name, text in (("memory.swap.max", "0"), ("memory.oom.group", "0")):
                try:
                    _write(directory + "/" + name, text)
                except FileNotFoundError:
                    if name == "memory.swap.max" and _swap_in_use():
                        raise _no_swap_accounting() from None
            _write(directory + "/memory.max", str(value))
            self._confirm(directory + "/memory.max", value, 65536)
            return
        limit, with_swap = directory + "/memory.limit_in_bytes", directory + "/memory.memsw.limit_in_bytes"
        # The kernel wants limit <= limit with swap at every moment, so the order depends on the direction.
        order = [limit, with_swap]
        if os.path.exists(with_swap):
            if value > (_number(with_swap) or 0):
                order.reverse()
        else:
            order = [limit]
        for path in order:
            _write(path, str(value))
        try:
            # 0 means "never swap this group out", which holds even where swap is not accounted.
            _write(directory + "/memory.swappiness", "0")
        except OSError:
            if len(order) == 1 and _swap_in_use():
                raise _no_swap_accounting() from None
        self._confirm(limit, value, 65536)
        self._set_socket_memory(directory, value)

    @staticmethod
    def _set_socket_memory(directory, value):
        """v1 bills the buffers of internet sockets to nobody until this file was written (v2 always counts them).

        Despite its name it holds UDP too. Without it 8 processes under 64 MiB filled 2 GiB of UDP buffers, half of
        what the machine grants to all namespaces together (net.ipv4.udp_mem). Past it packets are dropped.
        """
        try:
            _write(directory + "/memory.kmem.tcp.limit_in_bytes", str(max(4 << 20, value // 8) // 4096 * 4096))
        except FileNotFoundError:
            pass  # a kernel without it (booted with cgroup.memory=nosocket)

    def _set_pids(self, version, directory, value):
        _write(directory + "/pids.max", str(int(value)))
        self._confirm(directory + "/pids.max", int(value), 0)

    def _set_cpus(self, version, directory, value):
        quota = max(CPU_QUOTA_MINIMUM, round(value * CPU_PERIOD))
        if version == 2:
            _write(directory + "/cpu.max", str(quota) + " " + str(CPU_PERIOD))
            if _read(directory + "/cpu.max").split() != [str(quota), str(CPU_PERIOD)]:
                raise CgroupError("the cpu limit did not take in " + directory)
            return
        _write(directory + "/cpu.cfs_period_us", str(CPU_PERIOD))
        try:
            _write(directory + "/cpu.cfs_quota_us", str(quota))
        except OSError as error:
            # v1 refuses a child more than its parent has. The parent's smaller quota binds us anyway.
            if error.errno != errno.EINVAL or not _v1_outer_quota_below(directory, quota / CPU_PERIOD):
                raise
            _write(directory + "/cpu.cfs_quota_us", "-1")
            return
        self._confirm(directory + "/cpu.cfs_quota_us", quota, 0)

    def _confirm(self, path, value, slack):
        found = _number(path)
        if found is None or not value - slack <= found <= value:
            raise CgroupError("the limit " + str(value) + " did not take: " + path + " says " + str(found))

    def resize(self, memory=None, pids=None, cpus=None) -> None:
        """`set` for a group that is in use: all of it or nothing, and never by killing what does not fit.

        Raises CgroupError (EBUSY where more memory is in use than `memory`). v1 refuses that by itself; v2 would
        kill, so the use is looked at first: freeze the group around the call, that it cannot grow meanwhile.
        """
        if memory is not None and self._directory.get("memory", (1,))[0] == 2:
            used = self.unreclaimable()
            if used is None or used > memory:
                message = f"{used} bytes are in use, more than the memory limit {memory}"
                raise CgroupError(message, "a running sandbox cannot be limited below what it already uses", errno.EBUSY)
        before = self._limits
        try:
            self.set(memory, pids, cpus)
        except CgroupError:
            self._limits = (None, None, None)
            self.set(*before)
            raise

    def limits(self) -> dict:
        """{memory, pids, cpus} as they were set; None for those that were not."""
        return dict(zip(("memory", "pids", "cpus"), self._limits))

    def unreclaimable(self):
        """Bytes that the kernel cannot take back by dropping cached file pages; None when it cannot be known."""
        version, directory = self._directory.get("memory", (0, ""))
        if not version:
            return None
        stat = _table(directory + "/memory.stat")
        used = _number(directory + ("/memory.current" if version == 2 else "/memory.usage_in_bytes"))
        prefix = "" if version == 2 else "total_"
        return None if used is None else used - stat.get(prefix + "active_file", 0) - stat.get(prefix + "inactive_file", 0)

    def anonymous(self):
        """Bytes that processes hold themselves: no file's, no kernel's. None when it cannot be known."""
        version, directory = self._directory.get("memory", (0, ""))
        if not version:
            return None
        return _table(directory + "/memory.stat").get("anon" if version == 2 else "total_rss")

    def bound_above(self, limit: str):
        """The smallest `limit` (memory, pids, cpus) of the groups this one lies in; None when none has one."""
        version, directory = self._directory.get("cpu" if limit == "cpus" else limit, (0, ""))
        bounds = []
        while version:
            directory = os.path.dirname(directory)
            if not _is_group(directory):
                break
            if limit != "cpus":
                name = "/pids.max" if limit == "pids" else "/memory.max" if version == 2 else "/memory.limit_in_bytes"
                value = _number(directory + name)
                if value is not None and value < _UNLIMITED_V1:
                    bounds.append(value)
            elif version == 2:
                words = _read_or_empty(directory + "/cpu.max").split()
                if len(words) == 2 and words[0].isdigit():
                    bounds.append(int(words[0]) / int(words[1]))
            else:
                quota, period = _number(directory + "/cpu.cfs_quota_us"), _number(directory + "/cpu.cfs_period_us")
                if quota is not None and quota > 0 and period:
                    bounds.append(quota / period)
        return min(bounds, default=None)

    # what is going on

    def counters(self) -> dict:
        """Files whose reading is cheap enough to do for every execution, for linux/counters.py: {name: path}."""
        found = {}
        if "core" in self._directory:
            found["cpu"] = self._directory["core"][1] + "/cpu.stat"
        elif "cpuacct" in self._directory:
            found["cpu"] = self._directory["cpuacct"][1] + "/cpuacct.usage"
        if "memory" in self._directory:
            version, directory = self._directory["memory"]
            found["peak"] = directory + ("/memory.peak" if version == 2 else "/memory.max_usage_in_bytes")
        return found

    def stats(self) -> dict:
        """memory and memory_peak (bytes), cpu_seconds, pids, oom_kills, throttled (seconds); None = unknown here."""
        result: dict = dict.fromkeys(
            ("memory", "memory_peak", "cpu_seconds", "pids", "oom_kills", "throttled")
        )
        result["oom_kills"] = self.oom_kills()
        if "memory" in self._directory:
            version, directory = self._directory["memory"]
            current, peak = "memory.current", "memory.peak"
            if version == 1:
                current, peak = "memory.usage_in_bytes", "memory.max_usage_in_bytes"
            result["memory"] = _number(directory + "/" + current)
            result["memory_peak"] = _number(directory + "/" + peak)
        if "pids" in self._directory:
            result["pids"] = _number(self._directory["pids"][1] + "/pids.current")
        if "cpu" in self._directory:
            version, directory = self._directory["cpu"]
            table = _table(directory + "/cpu.stat")
            if "throttled_usec" in table:
                result["throttled"] = table["throttled_usec"] / 1e6
            elif "throttled_time" in table:
                result["throttled"] = table["throttled_time"] / 1e9
        if "core" in self._directory:
            usage = _table(self._directory["core"][1] + "/cpu.stat").get("usage_usec")
            result["cpu_seconds"] = None if usage is None else usage / 1e6
        elif "cpuacct" in self._directory:
            usage = _number(self._directory["cpuacct"][1] + "/cpuacct.usage")
            result["cpu_seconds"] = None if usage is None else usage / 1e9
        return result

    def oom_kills(self):
        """How many processes the kernel killed for memory in this group; None when it cannot be known."""
        if "memory" not in self._directory:
            return None
        version, directory = self._directory["memory"]
        name = "/memory.events" if version == 2 else "/memory.oom_control"
        return _table(directory + name).get("oom_kill")

    def pids(self) -> set:
        """Every process id in any of the directories (0: one that our pid namespace cannot see)."""
        found = set()
        for directory in self.directories:
            found |= _pids(directory)
        return found

    def first_pids(self) -> set:
        """The processes as one of the directories shows them, for a caller who only wants to hurry them."""
        return _pids(self._parts[0][1]) - {0} if self._parts else set()

    def empty(self) -> bool:
        """True when no live process is left (zombies do not count: they hold nothing)."""
        if "core" in self._directory:
            populated = _table(self._directory["core"][1] + "/cgroup.events").get("populated")
            if populated:
                return False
        return not any(_pids(directory) for directory in self.directories)

    # verbs

    def freeze(self, timeout=1.0) -> bool:
        """Stop every task; True once all stand still, False when `timeout` seconds passed first.

        After False the request stays in force (a task in an uninterruptible wait stops when it leaves it);
        `thaw` takes it back. Raises CgroupError where no freezer is available.
        """
        return self._set_frozen(True, timeout)

    def thaw(self, timeout=1.0) -> bool:
        """Let the tasks run again; True once they do."""
        return self._set_frozen(False, timeout)

    def frozen(self) -> bool:
        kind, directory = self._freezer()
        if kind == 2:
            return _table(directory + "/cgroup.events").get("frozen") == 1
        return _read_or_empty(directory + "/freezer.state").strip() == "FROZEN"

    def _freezer(self):
        if "core" in self._directory:
            return self._directory["core"]
        if "freezer" in self._directory:
            return self._directory["freezer"]
        raise CgroupError("no cgroup freezer is available to pause with", SYSTEMD_REMEDY)

    def _set_frozen(self, wanted, timeout):
        kind, directory = self._freezer()
        deadline = time.monotonic() + timeout
        if kind == 1:
            text = "FROZEN" if wanted else "THAWED"
            _write(directory + "/freezer.state", text)
            pause = 0.0001
            while _read(directory + "/freezer.state").strip() != text:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, 0.005)
            return True
        events = os.open(directory + "/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _write(directory + "/cgroup.freeze", "1" if wanted else "0")
            poller = select.poll()
            poller.register(events, select.POLLPRI)
            line = b"frozen 1" if wanted else b"frozen 0"
            while line not in os.pread(events, 4096, 0):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                # Looks again now and then, so that a missed wake-up costs 50 ms and not the whole time.
                poller.poll(min(left, 0.05) * 1000)
            return True
        finally:
            os.close(events)

    def kill(self) -> None:
        """SIGKILL everything in the group, now, frozen or not. Returns at once; `empty` tells when it is over.

        A paused sandbox must be killed through this: a task frozen by v1 dies only when it is thawed.
        """
        core = self._directory.get("core")
        if core is not None:
            try:
                _write(core[1] + "/cgroup.kill", "1")
            except OSError:
                pass  # before Linux 5.14
            else:
                if len(self._parts) > 1:
                    self._signal_all()  # whoever is in a v1 part only: a child that died half-way through `attach`
                return
        # Frozen first: a stopped group can neither fork past us nor exit and have its pids reused under us. Only
        # briefly: a throttled group stops late, and what was missed is met again by `wait_empty`.
        try:
            self.freeze(0.005)
        except OSError:
            pass
        self._signal_all()
        try:
            self.thaw(0)
        except OSError:
            pass

    def _signal_all(self):
        myself = os.getpid()
        for pid in self.pids():
            if pid > 1 and pid != myself:
                try:
                    os.kill(pid, SIGKILL)
                except OSError:
                    pass

    def wait_empty(self, timeout=2.0, kill=True) -> bool:
        """Kill until nothing is left or `timeout` seconds passed; True when the group is empty."""
        deadline = time.monotonic() + timeout
        pause = 0.0005
        while not self.empty():
            if kill:
                self.kill()
            if time.monotonic() >= deadline:
                return self.empty()
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        return True

    def remove(self, timeout=0.0) -> bool:
        """Remove the directories. False when the kernel still holds one (a process is not quite gone): call again.

        `timeout` seconds are spent retrying; 0 never blocks, for an event loop. Safe to call after True.
        """
        self.close_fds()
        deadline = time.monotonic() + timeout
        while True:
            self._parts = [part for part in self._parts if not _remove_directory(part[1])]
            if not self._parts:
                if self._on_removed is not None:
                    self._on_removed(self)
                    self._on_removed = None
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)


def _is_group(directory: str) -> bool:
    return os.path.exists(directory + "/cgroup.procs")


def _remove_directory(directory: str) -> bool:
    try:
        _rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY, errno.EAGAIN):
            return False
        raise CgroupError(f"cannot remove {directory}: {error.strerror}", "", error.errno or 0) from error
    return True


def _swap_in_use() -> bool:
    return len(_read_or_empty("/proc/swaps").splitlines()) > 1


def _no_swap_accounting() -> CgroupError:
    message = (
        "the memory limit would not hold: this machine swaps, and its kernel does not count swap by group"
    )
    return CgroupError(message, "boot with `swapaccount=1`, or turn swap off")


def _v1_outer_quota_below(directory: str, cpus: float) -> bool:
    """True when a group above already allows less than `cpus` processors."""
    parent = os.path.dirname(directory)
    while os.path.exists(parent + "/cpu.cfs_quota_us"):
        quota, period = _number(parent + "/cpu.cfs_quota_us"), _number(parent + "/cpu.cfs_period_us")
        if quota is not None and quota > 0 and period and quota / period < cpus:
            return True
        parent = os.path.dirname(parent)
    return False


class GroupPool:
    """Makes the groups of one owner (one pool per `owner_name`) ahead of need: creating one costs about 0.4 ms, joining one 0.05 ms.

    `owner_name` (default `owner_tag()`) is the folder name; `size` groups are kept ready by `refill`, which the
    launcher calls when idle. `memory`, `pids`, `cpus` are the limits put on ready groups, so that `take` with
    the same ones writes nothing. Raises CgroupError when the folders cannot be made.
    """

    def __init__(
        self, hierarchy, prefix="ringfence", owner_name=None, size=8, memory=None, pids=None, cpus=None
    ):
        self.hierarchy = hierarchy
        self.prefix = prefix
        self.owner_name = owner_name or owner_tag()
        self.size = size
        self.limits = (memory, pids, cpus)
        self._next = 1
        self._ready = []
        self._live = set()
        self._bases = []  # (tree, <parent>/<prefix>, <parent>/<prefix>/<owner>)
        try:
            for tree in hierarchy.trees:
                self._prepare(tree)
        except OSError as error:
            self._remove_folders()
            if isinstance(error, CgroupError):
                raise
            message = "cannot make control groups: " + str(error.strerror) + ": " + str(error.filename)
            raise CgroupError(message, SYSTEMD_REMEDY, error.errno or 0) from error

    def _prepare(self, tree):
        base = tree.parent.rstrip("/") + "/" + self.prefix
        owner = base + "/" + self.owner_name
        if tree.move:
            self._move_to_leaf(tree)
        if tree.version == 2:
            _enable(tree.parent, tree.controllers)
        self._bases.append((tree, base, owner))
        for _ in range(20):  # another owner's clean-up may take the shared folder away between our two steps
            try:
                _mkdir(base)
            except FileExistsError:
                pass
            if tree.version == 1 and _number(base + "/memory.use_hierarchy") == 0:
                try:
                    _write(base + "/memory.use_hierarchy", "1")  # before 5.11: limits above must bind below
                except OSError:
                    pass
            try:
                if tree.version == 2:
                    _enable(base, tree.controllers)
                _mkdir(owner)
            except FileExistsError:
                break
            except FileNotFoundError:
                continue
            break
        if tree.version == 2:
            self._copy_limits(tree, owner)
            _enable(owner, tree.controllers)

    def _move_to_leaf(self, tree):
        leaf = tree.parent + "/" + HOST_LEAF
        try:
            _mkdir(leaf)
        except FileExistsError:
            pass
        for pid in tree.move:
            try:
                _write(leaf + "/cgroup.procs", str(pid))
            except ProcessLookupError:
                pass

    def _copy_limits(self, tree, owner):
        """Limits of the groups between us and the parent would not bind its other children: repeat the smallest."""
        for name in ("memory.max", "memory.high", "memory.swap.max", "pids.max"):
            if name.partition(".")[0] not in tree.controllers:
                continue
            values = [_number(directory + "/" + name) for directory in tree.stepped_over]
            values = [value for value in values if value is not None]
            if values:
                _write(owner + "/" + name, str(min(values)))
        if "cpu" in tree.controllers:
            shares = []
            for directory in tree.stepped_over:
                words = _read_or_empty(directory + "/cpu.max").split()
                if len(words) == 2 and words[0].isdigit():
                    shares.append((int(words[0]) / int(words[1]), words))
            if shares:
                _write(owner + "/cpu.max", " ".join(min(shares)[1]))

    def _create(self, prefix="", versions=(1, 2)) -> Group:
        number, self._next = prefix + str(self._next), self._next + 1
        trees, directories = [], []
        try:
            for tree, _, owner in self._bases:
                if tree.version not in versions:
                    continue
                directory = owner + "/" + number
                _mkdir(directory)
                trees.append(tree)
                directories.append(directory)
            group = Group(trees, directories, self._live.discard)
            group.procs_fds()
        except OSError as error:
            for directory in directories:
                try:
                    _rmdir(directory)
                except OSError:
                    pass
            raise CgroupError(
                "cannot make a control group: " + str(error.strerror) + ": " + str(error.filename),
                "`ringfence sweep` removes what earlier lives left" if error.errno == errno.ENOSPC else "",
                error.errno or 0,
            ) from error
        self._live.add(group)
        return group

    def take(self, memory=None, pids=None, cpus=None) -> Group:
        """A fresh group with these limits in force (`Group.set`). From the pool, or made now. Raises CgroupError."""
        group = self._ready.pop() if self._ready else self._create()
        try:
            group.set(memory, pids, cpus)
        except BaseException:
            group.remove()
            raise
        return group

    def zygote_group(self, uid=None):
        """A v2 group without limits for a zygote to live in; None where no v2 tree is used.

        With `uid` (host user id of a zygote that is not us) it may then clone into any group that was `permit`ted
        to it: the kernel wants write access to the target's cgroup.procs and to that of the closest common
        ancestor, our owner folder. Opening that one to all gives nothing to processes outside of it, because
        for them the common ancestor is further up.
        """
        owners = [owner for tree, _, owner in self._bases if tree.version == 2]
        if not owners:
            return None
        group = self._create("zygote-", (2,))
        if uid is not None:
            group.permit(uid)
            os.chmod(owners[0] + "/cgroup.procs", 0o666)
        return group

    def refill(self, at_most=None) -> int:
        """Make groups until `size` are ready (at most `at_most` of them now); returns how many were made."""
        made = 0
        while len(self._ready) < self.size and (at_most is None or made < at_most):
            group = self._create()
            try:
                group.set(*self.limits)
            except BaseException:
                group.remove()
                raise
            self._ready.append(group)
            made += 1
        return made

    @property
    def ready(self) -> int:
        return len(self._ready)

    def close(self, timeout=2.0) -> bool:
        """Kill what is left in every group, remove all and the owner's folders; True when nothing remains."""
        self._ready = []
        deadline = time.monotonic() + timeout
        groups = list(self._live)
        for group in groups:
            group.kill()
        for group in groups:
            group.wait_empty(max(0.0, deadline - time.monotonic()))
            group.remove(max(0.0, deadline - time.monotonic()))
        return self._remove_folders() and not self._live

    def _remove_folders(self) -> bool:
        gone = True
        for _, base, owner in self._bases:
            for directory in (owner, base):
                try:
                    removed = _remove_directory(directory)
                except CgroupError:
                    removed = False
                gone = gone and (removed or directory == base)  # the base may be shared with other owners
        return gone

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _enable(directory: str, controllers) -> None:
    """Hand controllers down to the children of a v2 group; those already on are not touched."""
    path = directory + "/cgroup.subtree_control"
    for name in controllers:
        if name in _words(path):
            continue
        try:
            _write(path, "+" + name)
        except FileNotFoundError:
            raise
        except OSError as error:
            hint = "a process is inside " + directory if error.errno == errno.EBUSY else SYSTEMD_REMEDY
            message = f"cannot hand the {name} controller down from {directory}: {error.strerror}"
            raise CgroupError(message, hint, error.errno or 0) from error


# -- what is in force ------------------------------------------------------------------------------------------


def _kernel_version() -> tuple:
    numbers = []
    for word in os.uname().release.replace("-", ".").split(".")[:2]:
        if not word.isdigit():
            break
        numbers.append(int(word))
    return tuple(numbers)


def report(hierarchy, memory=None, pids=None, cpus=None, kernel=None) -> dict:
    """{limit: (level, reason, hint)} for the limits that are asked for (not None); level hard, watched or none.

    "hard": the kernel refuses or kills. "watched": the launcher measures and kills (memory_watch). `kernel` is
    (major, minor), default the running one.
    """
    kernel = _kernel_version() if kernel is None else kernel
    result = {}
    for name, key, value in (("memory", "memory", memory), ("pids", "pids", pids), ("cpus", "cpu", cpus)):
        if value is None:
            continue
        place = hierarchy.places[key]
        if place.usable:
            result[name] = ("hard", place.reason, "")
        elif name == "memory":
            how = "measured every 50 ms and killed when over, RLIMIT_DATA per process; no cgroup: "
            result[name] = ("watched", how + place.reason, place.hint)
        elif name == "pids" and kernel >= (5, 14):
            # Since 5.14 RLIMIT_NPROC is counted per user namespace, so sandboxes of one uid do not share it.
            reason = "RLIMIT_NPROC counted in the sandbox's own user namespace; no cgroup: " + place.reason
            result[name] = ("hard", reason, "")
        else:
            result[name] = ("none", place.reason, place.hint)
    return result


# -- leftovers -------------------------------------------------------------------------------------------------

_SWEEP_DIRECTORIES = 50_000  # bound on a walk of somebody else's tree


def leftovers(hierarchy, prefix="ringfence", alive=owner_alive, everywhere=False) -> list:
    """Owner folders whose owner is gone: directories, sorted. Only those this user made, named as ours are.

    `everywhere` walks all cgroup mounts (groups lie below the group their owner was in, which need not be ours);
    otherwise only the places `hierarchy` would use now are looked at.
    """
    found = []
    for base in _bases(hierarchy, prefix, everywhere):
        for name in _children(base):
            path = base + "/" + name
            try:
                mine = os.stat(path).st_uid == hierarchy.uid
            except OSError:
                continue
            if mine and parse_tag(name) is not None and not alive(name):
                found.append(path)
    return sorted(found)


def sweep(hierarchy, prefix="ringfence", alive=owner_alive, everywhere=False, timeout=2.0) -> list:
    """Kill what lives in the groups of dead owners and remove these groups; returns the removed owner folders.

    What could not be removed within `timeout` seconds is still listed by `leftovers` afterwards. Processes
    outside such groups are never touched.
    """
    removed = []
    deadline = time.monotonic() + timeout
    found = leftovers(hierarchy, prefix, alive, everywhere)
    # Where the v1 freezer is, first: what is frozen there does not die through any other tree.
    found.sort(key=lambda path: not os.path.exists(path + "/freezer.state"))
    for path in found:
        version = 1 if os.path.exists(path + "/notify_on_release") else 2
        names = ("freezer",) if os.path.exists(path + "/freezer.state") else ()
        for directory, _, _ in os.walk(path, topdown=False):
            group = Group([Tree(version, "", "", names)], [directory])
            group.wait_empty(max(0.05, deadline - time.monotonic()))
            try:
                gone = group.remove(max(0.05, deadline - time.monotonic()))
            except CgroupError:
                gone = False
            if gone and directory == path:
                removed.append(path)
        try:
            _rmdir(os.path.dirname(path))
        except OSError:
            pass  # other owners are still in it
    return removed


def _bases(hierarchy, prefix, everywhere):
    bases = {tree.parent.rstrip("/") + "/" + prefix for tree in hierarchy.trees}
    if everywhere:
        budget = _SWEEP_DIRECTORIES
        for _, point in hierarchy.mounts:
            for directory, names, _ in os.walk(point):
                budget -= 1
                if budget <= 0:
                    return bases
                if prefix in names:
                    bases.add(directory.rstrip("/") + "/" + prefix)
                    names.remove(prefix)
    return bases


def _children(directory: str) -> list:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
