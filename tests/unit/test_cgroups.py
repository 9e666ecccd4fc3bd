"""Control groups: where they may be made, that limits bite, that nothing is left.

Three kinds of test: detection and v2 against a made-up cgroup file system (any user), v1 and the v2 core for real
(root, skipped with the reason elsewhere), each limit with the control that the same program lives without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import struct
import time

import pytest

from ringfence.linux import cgroups

MIB = 1024 * 1024
CONTROL_FILES = {
    "memory": {"memory.max": "max", "memory.swap.max": "max", "memory.high": "max", "memory.oom.group": "0"},
    "pids": {"pids.max": "max", "pids.current": "0"},
    "cpu": {"cpu.max": "max 100000"},
}


# -- a made-up cgroup v2 file system --------------------------------------------------------------------------


class FakeV2:
    """A directory tree that answers like cgroup v2: files appear with controllers, rules are kept.

    Kept rules: a controller is on in a group when its parent hands it down; a group with processes (the root
    excepted) cannot hand any down; a pid is in one group at a time; only empty groups can be removed.
    """

    def __init__(self, folder, controllers=("cpu", "memory", "pids")):
        self.root = str(folder / "cgroup")
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        os.mkdir(self.root)
        self.refuse = {}  # path ending -> errno
        self.writes = []
        self.delegated = set()  # directories that systemd marked
        self.put(self.root, "cgroup.procs", "")
        self.put(self.root, "cgroup.subtree_control", "")
        self.put(self.root, "cgroup.controllers", " ".join(controllers))
        self.mountinfo = f"30 20 0:26 / {self.root} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
        (self.proc / "self" / "mountinfo").write_text(self.mountinfo)
        self.own("/")

    def put(self, directory, name, text):
        with open(os.path.join(directory, name), "w") as stream:
            stream.write(text)

    def get(self, path):
        with open(self.root + path) as stream:
            return stream.read().split()

    def own(self, path):
        (self.proc / "self" / "cgroup").write_text("0::" + path + "\n")

    def group(self, path, hand_down=(), pids=()):
        """Make /a/b/c with every part; `hand_down` in the last."""
        directory = self.root
        for word in path.strip("/").split("/"):
            directory += "/" + word
            if not os.path.isdir(directory):
                self.mkdir(directory)
        for name in hand_down:
            self.write(directory + "/cgroup.subtree_control", "+" + name)
        for pid in pids:
            self.write(directory + "/cgroup.procs", str(pid))
        return directory

    def mkdir(self, path):
        os.mkdir(path)
        handed = set()
        with (
            contextlib.suppress(FileNotFoundError),
            open(os.path.dirname(path) + "/cgroup.subtree_control") as stream,
        ):
            handed = set(stream.read().split())
        self.put(path, "cgroup.procs", "")
        self.put(path, "cgroup.subtree_control", "")
        self.put(path, "cgroup.controllers", "")
        self.put(path, "cgroup.events", "populated 0\nfrozen 0\n")
        self.put(path, "cgroup.freeze", "0")
        self.put(path, "cgroup.kill", "")
        self.put(path, "cpu.stat", "usage_usec 0\n")
        self.turn_on(path, handed)

    def turn_on(self, path, names):
        with open(path + "/cgroup.controllers") as stream:
            present = set(stream.read().split())
        for name in names - present:
            for file, text in CONTROL_FILES[name].items():
                self.put(path, file, text)
        self.put(path, "cgroup.controllers", " ".join(sorted(present | names)))

    def rmdir(self, path):
        if not os.path.isdir(path):
            raise FileNotFoundError(errno.ENOENT, "no such group", path)
        with open(path + "/cgroup.procs") as stream:
            busy = stream.read().split()
        if busy or any(entry.is_dir() for entry in os.scandir(path)):
            raise OSError(errno.EBUSY, "busy", path)
        shutil.rmtree(path)

    def write(self, path, text):
        for ending, number in self.refuse.items():
            if path.endswith(ending):
                raise OSError(number, os.strerror(number), path)
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self.writes.append((path[len(self.root) :], text))
        directory, name = os.path.split(path)
        if name == "cgroup.procs":
            self.move(directory, text)
        elif name == "cgroup.subtree_control":
            self.hand_down(directory, text)
        elif name == "cgroup.freeze":
            self.put(directory, "cgroup.events", "populated 0\nfrozen " + text + "\n")
        elif name == "cgroup.kill":
            self.put(directory, "cgroup.procs", "")
        else:
            self.put(directory, name, text)

    def move(self, directory, pid):
        for folder, _, _ in os.walk(self.root):
            with open(folder + "/cgroup.procs") as stream:
                members = stream.read().split()
            if pid in members:
                members.remove(pid)
                self.put(folder, "cgroup.procs", "\n".join(members))
        with open(directory + "/cgroup.procs") as stream:
            members = stream.read().split() + [pid]
        self.put(directory, "cgroup.procs", "\n".join(members))

    def hand_down(self, directory, text):
        name = text.lstrip("+")
        with open(directory + "/cgroup.controllers") as stream:
            if name not in stream.read().split():
                raise OSError(errno.ENOENT, "not offered", directory)
        with open(directory + "/cgroup.procs") as stream:
            if stream.read().split() and directory != self.root:
                raise OSError(errno.EBUSY, "no internal processes", directory)
        with open(directory + "/cgroup.subtree_control") as stream:
            names = set(stream.read().split()) | {name}
        self.put(directory, "cgroup.subtree_control", " ".join(sorted(names)))
        for entry in os.scandir(directory):
            if entry.is_dir():
                self.turn_on(entry.path, {name})

    def detect(self, writable=None, **options):
        """`writable`: directories (from the root) that the pretended user may write; None: all."""

        def access(path, mode):
            if writable is None:
                return True
            directory = path if os.path.isdir(path) else os.path.dirname(path)
            return any(directory == self.root + allowed.rstrip("/") for allowed in writable)

        return cgroups.detect(str(self.proc), self.root, access=access, **options)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    tree = FakeV2(tmp_path)
    monkeypatch.setattr(cgroups, "_mkdir", tree.mkdir)
    monkeypatch.setattr(cgroups, "_rmdir", tree.rmdir)
    monkeypatch.setattr(cgroups, "_write", tree.write)
    monkeypatch.setattr(cgroups, "_systemd_delegated", lambda path: path in tree.delegated)
    return tree


def owner_folder(parent):
    return parent.rstrip("/") + "/ringfence/" + cgroups.owner_tag()


def test_v2_root_group_hands_controllers_down_and_limits_are_written(fake):
    hierarchy = fake.detect(uid=0)
    assert hierarchy.kind == "v2" and hierarchy.missing == []
    with cgroups.GroupPool(hierarchy) as pool:
        group = pool.take(memory=64 * MIB, pids=50, cpus=0.5)
        base = owner_folder("") + "/1"
        assert group.directories == [fake.root + base]
        assert fake.get(base + "/memory.max") == [str(64 * MIB)]
        assert fake.get(base + "/memory.swap.max") == ["0"]
        assert fake.get(base + "/memory.oom.group") == ["0"]
        assert fake.get(base + "/pids.max") == ["50"]
        assert fake.get(base + "/cpu.max") == ["50000", "100000"]
        assert len(group.procs_fds()) == 1 and group.procs_fds(v2=False) == []
        order = [path.rsplit("/", 1)[1] for path, _ in fake.writes]
        assert order.index("memory.swap.max") < order.index("memory.max")
    assert not os.path.exists(fake.root + "/ringfence")


def test_detecting_changes_nothing(fake):
    fake.group("/user.slice/session", pids=[os.getpid()])
    fake.own("/user.slice/session")
    fake.writes.clear()
    before = sorted(os.walk(fake.root))
    fake.detect(uid=0)
    assert sorted(os.walk(fake.root)) == before and fake.writes == []


def handed_down(fake, path, names=("cpu", "memory", "pids")):
    """Make every group on the way hand `names` down."""
    directory = ""
    for name in names:
        fake.write(fake.root + "/cgroup.subtree_control", "+" + name)
    for word in path.strip("/").split("/"):
        directory += "/" + word
        fake.group(directory, hand_down=names)


def test_a_delegated_scope_is_used_and_only_named_processes_move_to_the_leaf(fake):
    handed_down(fake, "/user.slice")
    scope = fake.group("/user.slice/run.scope", pids=[os.getpid(), 4242])
    fake.own("/user.slice/run.scope")
    fake.delegated.add(scope)
    hierarchy = fake.detect(uid=1000, writable=["/user.slice/run.scope"], may_move={os.getpid(), 4242})
    assert hierarchy.missing == []
    with cgroups.GroupPool(hierarchy) as pool:
        leaf = "/user.slice/run.scope/ringfence-host/cgroup.procs"
        assert sorted(fake.get(leaf)) == sorted([str(os.getpid()), "4242"])
        assert pool.take(memory=MIB).directories == [scope + owner_folder("") + "/1"]
    assert os.path.isdir(scope)  # not ours, so it stays


def test_a_stranger_in_the_scope_is_never_moved_and_the_remedy_is_named(fake):
    handed_down(fake, "/user.slice")
    scope = fake.group("/user.slice/run.scope", pids=[os.getpid(), 4242])
    fake.own("/user.slice/run.scope")
    fake.delegated.add(scope)
    hierarchy = fake.detect(uid=1000, writable=["/user.slice/run.scope"], may_move={os.getpid()})
    assert not hierarchy.usable("memory")
    assert "4242" in hierarchy.places["memory"].reason
    assert "systemd-run --user --scope -p Delegate=yes" in hierarchy.places["memory"].hint
    assert hierarchy.usable("freezer")  # a plain child still freezes and kills
    with cgroups.GroupPool(hierarchy) as pool:
        assert pool.take().freeze()
        with pytest.raises(cgroups.CgroupError):
            pool.take(memory=MIB)
    assert sorted(fake.get("/user.slice/run.scope/cgroup.procs")) == sorted([str(os.getpid()), "4242"])


def test_an_ordinary_users_session_is_refused_with_the_remedy(fake):
    handed_down(fake, "/user.slice")
    fake.group("/user.slice/session-1.scope", pids=[os.getpid()])
    fake.own("/user.slice/session-1.scope")
    hierarchy = fake.detect(uid=1000, writable=[])
    assert hierarchy.missing == ["memory", "pids", "cpu", "freezer"]
    assert hierarchy.trees == []
    assert "systemd-run" in hierarchy.places["memory"].hint
    assert "not delegated to uid 1000" in hierarchy.places["memory"].reason


def test_a_users_own_slice_is_systemds_even_where_it_is_writable(fake):
    handed_down(fake, "/user.slice/user@1000.service/app.slice")
    fake.group("/user.slice/user@1000.service/init.scope")
    fake.group("/user.slice/user@1000.service/app.slice/app.scope", pids=[os.getpid()])
    fake.own("/user.slice/user@1000.service/app.slice/app.scope")
    fake.delegated.add(fake.root + "/user.slice/user@1000.service")
    top = "/user.slice/user@1000.service"
    hierarchy = fake.detect(uid=1000, writable=[top, top + "/app.slice", top + "/app.slice/app.scope"])
    assert not hierarchy.usable("memory")


def test_a_second_owner_in_the_scope_uses_it_as_parent_of_the_leaf(fake):
    handed_down(fake, "/user.slice")
    scope = fake.group("/user.slice/run.scope", hand_down=("cpu", "memory", "pids"))
    fake.group("/user.slice/run.scope/ringfence-host", pids=[os.getpid(), 4242])
    fake.own("/user.slice/run.scope/ringfence-host")
    fake.delegated.add(scope)
    hierarchy = fake.detect(uid=1000, writable=["/user.slice/run.scope"])
    assert hierarchy.trees[0].parent == scope and hierarchy.trees[0].move == ()
    assert hierarchy.trees[0].stepped_over == ()


def test_root_in_a_service_makes_a_sibling_that_repeats_the_services_limits(fake):
    handed_down(fake, "/system.slice")
    fake.group("/system.slice/app.service", pids=[os.getpid(), 4242])
    service = fake.root + "/system.slice/app.service"
    fake.write(service + "/memory.max", str(300 * MIB))
    fake.write(service + "/pids.max", "77")
    fake.write(service + "/cpu.max", "150000 100000")
    fake.own("/system.slice/app.service")
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take(memory=MIB)
        assert group.directories == [fake.root + owner_folder("/system.slice") + "/1"]
        owner = owner_folder("/system.slice")
        assert fake.get(owner + "/memory.max") == [str(300 * MIB)]
        assert fake.get(owner + "/pids.max") == ["77"]
        assert fake.get(owner + "/cpu.max") == ["150000", "100000"]
    assert sorted(fake.get("/system.slice/app.service/cgroup.procs")) == sorted([str(os.getpid()), "4242"])


def test_root_climbs_to_where_all_controllers_are_and_says_which_limits_are_repeated(fake):
    fake.write(fake.root + "/cgroup.subtree_control", "+pids")
    fake.group("/lone/app", pids=[os.getpid()])
    fake.own("/lone/app")
    hierarchy = fake.detect(uid=0, may_move=set())
    assert hierarchy.missing == []
    assert hierarchy.trees[0].parent == fake.root
    assert hierarchy.trees[0].stepped_over == (fake.root + "/lone/app", fake.root + "/lone")


def test_a_controller_that_is_not_delegated_is_missing_alone(fake):
    handed_down(fake, "/user.slice", names=("memory", "pids"))
    scope = fake.group("/user.slice/run.scope", pids=[os.getpid()])
    fake.own("/user.slice/run.scope")
    fake.delegated.add(scope)
    hierarchy = fake.detect(uid=1000, writable=["/user.slice/run.scope"])
    assert hierarchy.missing == ["cpu"]
    assert "Delegate=cpu" in hierarchy.places["cpu"].hint
    levels = {name: row[0] for name, row in cgroups.report(hierarchy, memory=1, pids=1, cpus=1).items()}
    assert levels == {"memory": "hard", "pids": "hard", "cpus": "none"}


def test_a_read_only_mount_is_named(fake):
    (fake.proc / "self" / "mountinfo").write_text(fake.mountinfo.replace(" rw,nosuid ", " ro,nosuid "))
    hierarchy = fake.detect(uid=0)
    assert hierarchy.missing == ["memory", "pids", "cpu", "freezer"]
    assert "read-only" in hierarchy.places["memory"].reason


def test_a_group_outside_the_mount_is_named(fake):
    fake.own("/../other")
    assert "outside" in fake.detect(uid=0).places["memory"].reason


def test_no_cgroup_mount_at_all(tmp_path):
    hierarchy = cgroups.detect(str(tmp_path), str(tmp_path))
    assert hierarchy.kind == "none" and hierarchy.trees == []
    report = cgroups.report(hierarchy, memory=1, pids=1, cpus=1, kernel=(6, 1))
    assert {name: row[0] for name, row in report.items()} == {
        "memory": "watched",
        "pids": "hard",
        "cpus": "none",
    }
    assert cgroups.report(hierarchy, pids=1, kernel=(5, 13))["pids"][0] == "none"
    assert all(row[1] for row in report.values())


def test_a_limit_that_does_not_take_is_an_error(fake, monkeypatch):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:

        def deaf(path, text):
            if not path.endswith(".max"):
                fake.write(path, text)

        with monkeypatch.context() as patch:
            patch.setattr(cgroups, "_write", deaf)
            for limit in ({"memory": MIB}, {"pids": 5}, {"cpus": 1}):
                with pytest.raises(cgroups.CgroupError, match="did not take"):
                    pool.take(**limit)


def test_swap_that_is_not_accounted_is_an_error_where_the_machine_swaps(fake, monkeypatch):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take()
        os.unlink(group.directories[0] + "/memory.swap.max")
        monkeypatch.setattr(cgroups, "_swap_in_use", lambda: True)
        with pytest.raises(cgroups.CgroupError, match="swap"):
            group.set(memory=MIB)
        monkeypatch.setattr(cgroups, "_swap_in_use", lambda: False)
        group.set(memory=MIB)


def test_a_controller_that_cannot_be_handed_down_is_named_and_nothing_is_left(fake):
    hierarchy = fake.detect(uid=0)
    fake.refuse["ringfence/cgroup.subtree_control"] = errno.EINVAL
    with pytest.raises(cgroups.CgroupError, match="memory"):
        cgroups.GroupPool(hierarchy)
    assert not os.path.exists(fake.root + "/ringfence")


def test_v2_numbers_are_read(fake):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take(memory=MIB)
        folder = group.directories[0]
        fake.put(folder, "memory.current", "4096\n")
        fake.put(folder, "memory.peak", "8192\n")
        fake.put(folder, "memory.events", "low 0\nmax 9\noom 2\noom_kill 1\n")
        fake.put(folder, "pids.current", "3\n")
        fake.put(folder, "cpu.stat", "usage_usec 1500000\nthrottled_usec 250000\n")
        expected = {"memory": 4096, "memory_peak": 8192, "cpu_seconds": 1.5, "pids": 3}
        expected.update({"oom_kills": 1, "throttled": 0.25})
        assert group.stats() == expected
        os.unlink(folder + "/memory.peak")  # before Linux 5.19
        assert group.stats()["memory_peak"] is None


def limit(folder, name):
    with open(folder + "/" + name) as file:
        return file.read().strip()


def test_v2_is_not_resized_below_what_is_in_use_since_it_would_kill(fake):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take(memory=64 * MIB, pids=9)
        folder = group.directories[0]
        fake.put(folder, "memory.current", str(40 * MIB))
        fake.put(folder, "memory.stat", f"anon {20 * MIB}\nactive_file {3 * MIB}\ninactive_file {5 * MIB}\n")
        assert (group.unreclaimable(), group.anonymous()) == (32 * MIB, 20 * MIB)
        with pytest.raises(cgroups.CgroupError, match="in use") as refusal:
            group.resize(memory=31 * MIB, pids=5)
        assert refusal.value.errno == errno.EBUSY and refusal.value.hint
        assert (limit(folder, "memory.max"), limit(folder, "pids.max")) == (str(64 * MIB), "9")
        group.resize(memory=32 * MIB, pids=5)  # the caches can go
        assert (limit(folder, "memory.max"), limit(folder, "pids.max")) == (str(32 * MIB), "5")


def test_a_resize_that_fails_half_way_is_taken_back(fake, monkeypatch):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take(memory=64 * MIB, pids=9)
        folder = group.directories[0]
        fake.put(folder, "memory.current", "0")

        def refuse(self, version, directory, value):
            raise OSError(errno.EINVAL, "no")

        monkeypatch.setattr(cgroups.Group, "_set_pids", refuse)
        with pytest.raises(cgroups.CgroupError):
            group.resize(memory=128 * MIB, pids=20)
        assert (limit(folder, "memory.max"), limit(folder, "pids.max")) == (str(64 * MIB), "9")


def test_the_smallest_limit_above_a_group_is_known(fake):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take(memory=MIB)
        owner = os.path.dirname(group.directories[0])
        for folder, memory, cpus in ((owner, "900000000", "max 100000"), (os.path.dirname(owner), "max", "150000 100000")):
            fake.put(folder, "memory.max", memory)
            fake.put(folder, "cpu.max", cpus)
        assert (group.bound_above("memory"), group.bound_above("cpus")) == (900000000, 1.5)


def test_the_pool_makes_groups_ahead_and_uses_each_once(fake):
    with cgroups.GroupPool(fake.detect(uid=0), size=3, memory=MIB, pids=9, cpus=1) as pool:
        assert pool.refill(at_most=2) == 2 and pool.refill() == 1 and pool.refill() == 0
        fake.writes.clear()
        taken = [pool.take(memory=MIB, pids=9, cpus=1) for _ in range(4)]
        names = {group.directories[0] for group in taken}
        assert len(names) == 4
        assert len({path for path, _ in fake.writes if "/memory.max" in path}) == 1  # only the unpooled one
        assert all(group.remove() for group in taken)
        assert pool.take().directories[0] not in names


def test_a_busy_group_is_not_removed_until_it_is_free(fake):
    with cgroups.GroupPool(fake.detect(uid=0)) as pool:
        group = pool.take()
        group.add(4242)
        assert group.remove() is False
        fake.put(group.directories[0], "cgroup.procs", "")
        assert group.remove() is True and group.remove() is True


def test_the_sweep_takes_only_groups_of_dead_owners(fake):
    hierarchy = fake.detect(uid=os.geteuid())
    namespace = os.stat("/proc/self/ns/pid").st_ino
    dead = f"owner-{os.getpid()}-1-{namespace}"  # our pid, but not our start time
    elsewhere = f"owner-{os.getpid()}-1-17"  # another pid namespace: cannot be judged
    for tag in (dead, elsewhere, "mine-by-hand"):
        fake.group("/ringfence/" + tag + "/1")
    with cgroups.GroupPool(hierarchy) as pool:
        alive = pool.take()
        assert cgroups.leftovers(hierarchy) == [fake.root + "/ringfence/" + dead]
        assert cgroups.sweep(hierarchy) == [fake.root + "/ringfence/" + dead]
        assert cgroups.leftovers(hierarchy) == []
        assert os.path.isdir(alive.directories[0])
    assert cgroups._children(fake.root + "/ringfence") == ["mine-by-hand", elsewhere]


def test_the_sweep_finds_leftovers_below_groups_it_would_not_use_itself(fake):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    tag = f"owner-{os.getpid()}-1-{namespace}"
    fake.group("/user.slice/old-session/ringfence/" + tag)
    hierarchy = fake.detect(uid=os.geteuid())
    assert cgroups.leftovers(hierarchy) == []
    expected = fake.root + "/user.slice/old-session/ringfence/" + tag
    assert cgroups.sweep(hierarchy, everywhere=True) == [expected]
    assert os.listdir(fake.root + "/user.slice/old-session").count("ringfence") == 0


def test_owner_tags_tell_a_reused_pid():
    tag = cgroups.owner_tag()
    parsed = cgroups.parse_tag(tag)
    assert parsed is not None
    pid, start, namespace = parsed
    assert pid == os.getpid() and cgroups.owner_alive(tag)
    assert not cgroups.owner_alive(f"owner-{pid}-{start + 1}-{namespace}")


@pytest.mark.parametrize(
    "name", ["owner", "owner-1-2", "owner-1-2-x", "owner--1-2-3", "x-1-2-3", "owner-1-2-3-4", "owner-١-2-3"]
)
def test_other_names_are_not_owners(name):
    assert cgroups.parse_tag(name) is None
    assert cgroups.owner_alive(name)  # never swept


def test_the_own_group_of_a_container_view_is_found():
    mount = cgroups._Mount(1, "/sys/fs/cgroup/memory", "/docker/abc", set(), False)
    assert mount.directory("/docker/abc") == "/sys/fs/cgroup/memory"
    assert mount.directory("/docker/abc/x") == "/sys/fs/cgroup/memory/x"
    assert mount.directory("/docker/abcd") is None
    assert mount.directory("/..") is None
    root = cgroups._Mount(2, "/sys/fs/cgroup", "/", set(), False)
    assert root.directory("/") == "/sys/fs/cgroup"
    assert root.directory("/a..b/c") == "/sys/fs/cgroup/a..b/c"


# -- the real thing: v1 ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    hierarchy = cgroups.detect()
    if hierarchy.missing:
        place = hierarchy.places[hierarchy.missing[0]]
        pytest.skip("no " + place.controller + " control group can be made here: " + place.reason)
    return hierarchy


@pytest.fixture
def pool(real):
    made = cgroups.GroupPool(real, size=2)
    yield made
    assert made.close(), "a control group was left behind"


@contextlib.contextmanager
def running(function, group=None):
    """A forked child that first joins `group`; killed and reaped at the end. Yields its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            if group is not None:
                cgroups.attach(group.procs_fds())
            os._exit(function() or 0)
        finally:
            os._exit(99)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass


def result(function, group=None):
    """Exit code of the child, or minus the signal that ended it."""
    with running(function, group) as pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def spin():
    while True:
        pass


def sleep():
    time.sleep(60)


def eat_128_mib():
    kept = []
    for _ in range(128):
        kept.append(bytearray(MIB))
    return 7


def test_memory_past_the_limit_is_killed_counted_and_lives_without_the_group(pool):
    assert result(eat_128_mib) == 7
    group = pool.take(memory=64 * MIB)
    assert result(eat_128_mib, group) == -signal.SIGKILL
    assert group.stats()["oom_kills"] == 1
    assert group.stats()["memory_peak"] <= 64 * MIB


def test_the_next_group_has_not_seen_the_last_ones_kill(pool):
    first = pool.take(memory=32 * MIB)
    assert result(eat_128_mib, first) == -signal.SIGKILL
    assert pool.take(memory=32 * MIB).stats()["oom_kills"] == 0


def fork_ten():
    """How many of ten forks worked (each waits for the end)."""
    children = []
    code = 0
    for _ in range(10):
        try:
            pid = os.fork()
        except OSError as error:
            code = 100 if error.errno == errno.EAGAIN else 1
            break
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code or len(children)


def test_processes_past_the_limit_are_refused_and_not_without_the_group(pool):
    assert result(fork_ten) == 10
    assert result(fork_ten, pool.take(pids=5)) == 100


def test_processor_time_is_held_to_the_quota(pool):
    group = pool.take(cpus=0.2)
    with running(spin, group):
        wait_until(lambda: group.stats()["throttled"] > 0.05)
    numbers = group.stats()
    assert numbers["cpu_seconds"] > 0
    assert numbers["throttled"] > 0.05


def test_limits_can_change_while_it_runs_both_ways(pool):
    group = pool.take(memory=64 * MIB, pids=5, cpus=0.5)
    group.set(memory=128 * MIB, pids=10, cpus=2)
    group.set(memory=32 * MIB)
    assert result(eat_128_mib, group) == -signal.SIGKILL
    group.set(memory=256 * MIB)
    assert result(eat_128_mib, group) == 7
    assert result(fork_ten, group) == 100


def state_of(pid):
    with open(f"/proc/{pid}/stat") as stream:
        return stream.read().rsplit(")", 1)[1].split()


def test_a_frozen_group_stands_still_and_goes_on(pool):
    group = pool.take(pids=5)
    with running(spin, group) as pid:
        wait_until(lambda: not group.empty())
        assert group.freeze() and group.frozen()
        before = state_of(pid)[11]
        time.sleep(0.05)
        assert state_of(pid)[11] == before
        assert group.thaw() and not group.frozen()
        wait_until(lambda: state_of(pid)[11] != before)


def test_a_frozen_group_can_be_killed(pool):
    group = pool.take()
    with running(spin, group) as pid:
        wait_until(lambda: not group.empty())
        assert group.freeze()
        group.kill()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        wait_until(group.empty)


def test_kill_ends_every_descendant_also_those_of_other_sessions(pool):
    def family():
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                signal.pthread_sigmask(
                    signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
                )
                sleep()
        sleep()

    group = pool.take(pids=20)
    with running(family, group):
        wait_until(lambda: len(group.pids()) >= 4)
        assert group.wait_empty(5.0)
        assert group.pids() == set()
    assert group.remove(2.0)


def test_removing_waits_for_the_last_process_without_blocking(pool):
    group = pool.take()
    with running(sleep, group):
        wait_until(lambda: not group.empty())
        assert group.remove() is False
    wait_until(group.remove)
    assert not any(os.path.exists(directory) for directory in group.directories)


def test_the_descriptors_of_a_group_are_not_inherited_by_programs(pool):
    group = pool.take()
    assert group.procs_fds() and not any(os.get_inheritable(fd) for fd in group.procs_fds())


def test_a_child_without_privilege_joins_through_the_descriptors(pool):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    group = pool.take(pids=5)

    def join_as_nobody():
        descriptors = group.procs_fds()
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        cgroups.attach(descriptors)
        try:  # and from inside, with its own right, it cannot leave
            with open(os.path.dirname(group.directories[0]) + "/../cgroup.procs", "w") as stream:
                stream.write("0")
        except OSError:
            return 3
        return 4

    assert result(join_as_nobody, None) == 3


def test_a_child_in_its_own_user_namespace_joins_through_the_descriptors(pool):
    """As a sandbox does: its zygote was started in an outer user namespace."""
    group = pool.take(pids=5)

    def join_from_inside():
        descriptors = group.procs_fds()
        if ctypes.PyDLL(None).unshare(0x10000000) != 0:  # CLONE_NEWUSER
            return 77
        cgroups.attach(descriptors)
        return fork_ten()

    code = result(join_from_inside)
    if code == 77:
        pytest.skip("user namespaces cannot be made here")
    assert code == 100


def test_groups_lie_below_the_own_group_so_that_its_limits_bind_too(real):
    own = cgroups._own_groups("/proc")
    for name in cgroups.CONTROLLERS:
        tree = real.places[name].tree
        if tree.version == 1:
            assert tree.parent.rstrip("/") == (tree.mount + own[name]).rstrip("/")


def test_closing_the_pool_kills_and_removes_everything(real):
    made = cgroups.GroupPool(real, prefix="ringfence-test-close")
    group = made.take(pids=10)
    with running(sleep, group) as pid:
        wait_until(lambda: not group.empty())
        assert made.close()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    for tree in real.trees:
        assert not os.path.exists(tree.parent.rstrip("/") + "/ringfence-test-close")


def test_groups_of_a_killed_owner_are_found_and_removed(real):
    prefix = f"ringfence-test-sweep-{os.getpid()}"  # other runs on this machine have leftovers of their own
    ready, tell = os.pipe()

    def owner():
        group = cgroups.GroupPool(real, prefix=prefix).take(pids=10)
        child = os.fork()
        if child == 0:
            cgroups.attach(group.procs_fds())
            sleep()
        wait_until(lambda: not group.empty())
        group.freeze()  # a paused sandbox is the hardest leftover
        os.write(tell, b"%d frozen" % child)
        sleep()

    with running(owner):
        words = b""
        while b"frozen" not in words:
            words += os.read(ready, 40)
        orphan = int(words.split()[0])
        assert cgroups.leftovers(real, prefix) == []
    os.close(ready)
    os.close(tell)
    try:
        found = cgroups.leftovers(real, prefix)
        assert len(found) == len(real.trees)
        assert sorted(cgroups.sweep(real, prefix)) == found
        assert cgroups.leftovers(real, prefix) == []
        wait_until(lambda: not os.path.exists(f"/proc/{orphan}") or state_of(orphan)[0] == "Z")
    finally:
        cgroups.sweep(real, prefix)  # a frozen leftover would hold the terminal of a failed run for ever


# -- the real thing: v2's core -----------------------------------------------------------------------------------


@pytest.fixture
def core(real):
    """A pool on the v2 tree alone (freeze, kill, events; controllers where they are not on v1)."""
    mount = next(
        (mount for mount in cgroups._cgroup_mounts("/proc", "/sys/fs/cgroup") if mount.version == 2), None
    )
    if mount is None:
        pytest.skip("no cgroup v2 tree is mounted here")
    parent = mount.directory(cgroups._own_groups("/proc").get(""))
    if parent is None or not os.access(parent, os.W_OK):
        pytest.skip("no v2 group can be made in " + str(parent))
    tree = cgroups.Tree(2, mount.point, parent)
    places = {"freezer": cgroups.Place("freezer", tree)}
    hierarchy = cgroups.Hierarchy("v2", places, [tree], [(2, mount.point)], os.geteuid())
    made = cgroups.GroupPool(hierarchy, prefix="ringfence-test-core")
    yield made
    assert made.close()
    assert not os.path.exists(parent.rstrip("/") + "/ringfence-test-core")


def test_v2_freezes_thaws_and_kills_while_frozen(core):
    group = core.take()
    with running(spin, group) as pid:
        wait_until(lambda: not group.empty())
        assert group.freeze() and group.frozen()
        before = state_of(pid)[11]
        time.sleep(0.05)
        assert state_of(pid)[11] == before
        assert group.thaw() and not group.frozen()
        assert group.freeze()
        group.kill()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        wait_until(group.empty)
        assert group.stats()["cpu_seconds"] > 0
    assert group.remove(2.0)


CLONE_INTO_CGROUP = 0x200000000
CLONE3 = 435  # the same number on every architecture


def clone_into(descriptor, function):
    """fork, born in the group of `descriptor`; returns the pid."""
    arguments = bytearray(88)
    struct.pack_into("QQQQQ", arguments, 0, CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD)
    struct.pack_into("Q", arguments, 80, descriptor)
    buffer = (ctypes.c_char * 88).from_buffer(arguments)
    pid = ctypes.PyDLL(None, use_errno=True).syscall(CLONE3, buffer, 88)
    if pid == 0:
        os._exit(function() or 0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def test_an_unprivileged_zygote_clones_into_permitted_groups_only(core):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    allowed, other = core.take(), core.take()
    zygote = core.zygote_group(54321)
    allowed.permit(54321)

    def as_zygote():
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)

        def where():
            with open("/proc/self/cgroup") as stream:
                return 0 if os.path.basename(allowed.directories[0]) in stream.read().split("0::")[1] else 5

        pid = clone_into(allowed.clone_fd(), where)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
            return 6
        try:
            clone_into(other.clone_fd(), where)
        except OSError as error:
            return 3 if error.errno == errno.EACCES else 7
        return 8

    assert result(as_zygote, zygote) == 3
    assert zygote.remove(2.0)


def test_the_zygotes_permission_is_nothing_to_processes_outside(core):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    group = core.take()
    core.zygote_group(54321)
    group.permit(54321)

    def outside():
        os.setgroups([])
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        try:
            clone_into(group.clone_fd(), lambda: 0)
        except OSError as error:
            return 3 if error.errno == errno.EACCES else 7
        return 8

    assert result(outside) == 3
