"""Host id ranges: which uids and gids the processes of a sandbox have on the machine.

Guards against two sandboxes sharing an id (the kernel keeps counters, signals and file rights per id) and
against an id being used again while something of it is left. A range is held by a byte-range lock that the
kernel drops when its holder dies, so a crash frees it without a file to clean up; before use it is checked
that no process on the machine still has an id of it.

Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ringfence.linux.records import NamedTuple

SLOT = 128  # ids of one sandbox: root, user, agent, nobody, and the job groups behind them
FIRST_SLOT = 128
RANGE = 1 << 20
# Above every range that distributions hand out (subuid defaults end at 600,100,000; systemd-nspawn and
# homed end at 1,879,048,191: systemd's UIDS-GIDS page), below the signed limit's overflow id.
FIRST_RANGE = 0x80000000
RANGES = 1900
USER_ID, AGENT_ID, NOBODY_ID = 1000, 65533, 65534
FIRST_JOB_GROUP, JOB_GROUPS = 70000, SLOT - 8
# A sandbox with `root: true` takes a wide slot, sixteen in a row: inside, ids 0 to 1899 are there for system users
# and those that `useradd` makes; behind them come the agent's, nobody's and the job groups.
WIDE = 16 * SLOT
SYSTEM_IDS = 1900


class NoRangeError(Exception):
    """Every id range of this machine is taken."""


class IdPlan(NamedTuple):
    """How ids are mapped for one zygote: `kind` is `ranges` (root), `subids` or `single`.

    `slots` sandboxes have place in it, each with `width` ids: SLOT, or WIDE where there is a root inside.
    """

    kind: str
    uid_map: tuple[tuple[int, int, int], ...]
    gid_map: tuple[tuple[int, int, int], ...]
    slots: int
    width: int = SLOT

    @property
    def single(self) -> bool:
        return self.kind == "single"


def state_directory() -> str:
    """Where the locks live: /run/ringfence for root, else the user's runtime directory or cache."""
    if os.geteuid() == 0:
        path = "/run/ringfence"
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if not (runtime and os.access(runtime, os.W_OK)):
            runtime = f"/tmp/ringfence-{os.geteuid()}"
            path = runtime
        else:
            path = runtime + "/ringfence"
    os.makedirs(path, 0o700, exist_ok=True)
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise PermissionError(f"{path} is not a directory of ours alone")
    return path


class Identifiers:
    """Hands out id plans for zygotes and slots for sandboxes, and holds their locks."""

    def __init__(self) -> None:
        self._lock_file = os.open(
            state_directory() + "/ids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        self._shared: list[int] = []  # free slots of the user's one range that this launcher holds
        self._shared_wide: list[int] = []  # the same, of wide slots
        self._held: set[int] = set()

    def plan(self, wide: bool = False) -> IdPlan:
        """Take a range for a new zygote, whose sandboxes have wide slots if asked. Raises NoRangeError."""
        width = WIDE if wide else SLOT
        if os.geteuid() == 0:
            number = self._take_range()
            extent = ((0, FIRST_RANGE + number * RANGE, RANGE),)
            return IdPlan("ranges", extent, extent, (RANGE - FIRST_SLOT) // width, width)
        subuid, subgid = subordinate_range("/etc/subuid"), subordinate_range("/etc/subgid")
        uid, gid = os.geteuid(), os.getegid()
        if subuid and subgid and newidmap_works():
            count = min(subuid[1], subgid[1])
            return IdPlan(
                "subids",
                ((0, uid, 1), (1, subuid[0], count)),
                ((0, gid, 1), (1, subgid[0], count)),
                max(0, (count - FIRST_SLOT) // width),
                width,
            )
        return IdPlan("single", ((0, uid, 1),), ((0, gid, 1),), 1 << 16)

    def _take_range(self) -> int:
        used = live_ids()
        for number in range(RANGES):
            low = FIRST_RANGE + number * RANGE
            if not self._lock(number):
                continue
            if any(low <= uid < low + RANGE for uid in used):
                self._unlock(number)  # something of an earlier life is left: leave the range alone
                continue
            return number
        raise NoRangeError("all id ranges of this machine are in use")

    def release(self, plan: IdPlan) -> None:
        if plan.kind == "ranges":
            self._unlock((plan.uid_map[0][1] - FIRST_RANGE) // RANGE)

    def take_slot(self, plan: IdPlan, free: list[int], used: set[int]) -> int:
        """A slot number for one sandbox; `free` are returned ones, `used` all that were ever handed out."""
        if plan.kind == "subids":
            # The user's one range is shared by all launchers of that user, so slots are locked one by one,
            # a block at a time: the look at the machine's processes is too slow for every sandbox.
            if plan.width == WIDE:
                if not self._shared_wide:
                    self._lock_wide(plan)
                return self._shared_wide.pop(0)
            if not self._shared:
                self._lock_block(plan)
            return self._shared.pop(0)
        if free:
            return free.pop()
        slot = len(used)
        if slot >= plan.slots:
            raise NoRangeError("all ids of this template's range are in use")
        used.add(slot)
        return slot

    def _lock_block(self, plan: IdPlan, size: int = 16) -> None:
        living = live_ids()
        low = plan.uid_map[1][1] - 1  # outer id n is host id low + n
        for slot in range(plan.slots):
            first = low + FIRST_SLOT + slot * SLOT
            if slot in self._held or not self._lock(slot):
                continue
            if any(first <= uid < first + SLOT for uid in living):
                self._unlock(slot)
                continue
            self._held.add(slot)
            self._shared.append(slot)
            if len(self._shared) >= size:
                return
        if not self._shared:
            raise NoRangeError("all subordinate ids of this user are in use")

    def _lock_wide(self, plan: IdPlan) -> None:
        """Hold one wide slot, from the far end of the range: the narrow ones are taken from its beginning."""
        living = live_ids()
        low = plan.uid_map[1][1] - 1
        count = WIDE // SLOT
        for slot in range(plan.slots - 1, -1, -1):
            narrow = range(slot * count, (slot + 1) * count)
            first = low + FIRST_SLOT + slot * WIDE
            if not self._held.isdisjoint(narrow) or not self._lock(narrow[0], count):
                continue
            if any(first <= uid < first + WIDE for uid in living):
                self._unlock(narrow[0], count)
                continue
            self._held.update(narrow)
            self._shared_wide.append(slot)
            return
        raise NoRangeError("all subordinate ids of this user are in use: a sandbox with root takes 2048 of them")

    def give_slot(self, plan: IdPlan, slot: int, free: list[int]) -> None:
        if plan.kind != "subids":
            free.append(slot)
        else:
            (self._shared_wide if plan.width == WIDE else self._shared).append(slot)

    def _lock(self, number: int, count: int = 1) -> bool:
        try:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, number)
            return True
        except OSError:
            return False

    def _unlock(self, number: int, count: int = 1) -> None:
        fcntl.lockf(self._lock_file, fcntl.LOCK_UN, count, number)


def live_ids() -> set[int]:
    """The effective uids of all processes this process can see: the owners of the directories /proc/PID (proc(5)).

    These are enough: every id that a process of a sandbox has or can take is one that its user namespace maps, so
    its effective one lies in the sandbox's slot as its others do. Reading them all from /proc/PID/status took half
    of a launcher's time.
    """
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found.add(os.stat("/proc/" + name).st_uid)
            except OSError:
                continue
    return found


def subordinate_range(path: str) -> tuple[int, int] | None:
    """The first (start, count) that `path` (subuid(5)) grants this user with at least two slots, else None."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = ""
    try:
        with open(path) as table:
            for line in table:
                parts = line.strip().split(":")
                if len(parts) == 3 and parts[0] in (name, str(uid)) and parts[0]:
                    start, count = int(parts[1]), int(parts[2])
                    if count >= FIRST_SLOT + 2 * SLOT:
                        return start, count
    except (OSError, ValueError):
        return None
    return None


def newidmap_works() -> bool:
    """Whether newuidmap and newgidmap (package `uidmap`) are installed with the right to map ranges."""
    for program in ("/usr/bin/newuidmap", "/usr/bin/newgidmap"):
        try:
            state = os.stat(program)
        except OSError:
            return False
        if not state.st_mode & stat.S_ISUID and "security.capability" not in os.listxattr(program):
            return False
    return True


def slot_maps(plan: IdPlan, slot: int, lends: bool = False) -> tuple[list, list, tuple[int, int]]:
    """(uid_map, gid_map, (root, user)) of a sandbox: maps as seen from the zygote's namespace.

    A sandbox that is lent directories (`lends`) by an ordinary user has that user's own id as its `user`: files of
    the host belong to it, and only a privileged process could map them to another id (idmapped mounts).
    """
    if plan.single:
        return [(USER_ID, 0, 1)], [(USER_ID, 0, 1)], (0, 0)
    base = FIRST_SLOT + slot * plan.width
    own = lends and plan.kind == "subids"
    if plan.width == WIDE:
        behind, user = base + SYSTEM_IDS, 0 if own else base + USER_ID
        above = USER_ID + 1
        common = [
            (0, base, USER_ID), (USER_ID, user, 1), (above, base + above, SYSTEM_IDS - above),
            (AGENT_ID, behind, 1), (NOBODY_ID, behind + 1, 1),
        ]  # fmt: skip
        return common, [*common, (FIRST_JOB_GROUP, base + WIDE - JOB_GROUPS, JOB_GROUPS)], (base, user)
    user = 0 if own else base + 1
    common = [(0, base, 1), (USER_ID, user, 1), (AGENT_ID, base + 2, 1), (NOBODY_ID, base + 3, 1)]
    return common, [*common, (FIRST_JOB_GROUP, base + 8, JOB_GROUPS)], (base, user)
