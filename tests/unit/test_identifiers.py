"""Two sandboxes never share an id of the machine."""

from __future__ import annotations

import os

import pytest

from ringfence.engines.namespace import identifiers
from ringfence.engines.namespace.identifiers import FIRST_SLOT, RANGE, SLOT, Identifiers, IdPlan, slot_maps


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setattr(identifiers, "state_directory", lambda: str(tmp_path))
    return tmp_path


def outside(maps) -> set[int]:
    return {host + offset for _, host, count in maps for offset in range(count)}


PLAN = IdPlan("ranges", ((0, 1 << 31, RANGE),), ((0, 1 << 31, RANGE),), (RANGE - FIRST_SLOT) // SLOT)


def test_neighbouring_slots_share_no_id():
    first, second = slot_maps(PLAN, 0), slot_maps(PLAN, 1)
    assert not outside(first[0]) & outside(second[0])
    assert not outside(first[1]) & outside(second[1])


def test_no_slot_contains_the_zygotes_own_id():
    assert all(0 not in outside(maps) for maps in slot_maps(PLAN, 0)[:2])


def test_the_last_slot_lies_within_the_range():
    assert max(outside(slot_maps(PLAN, PLAN.slots - 1)[1])) < RANGE


def test_a_single_id_maps_the_user_alone():
    plan = IdPlan("single", ((0, 1000, 1),), ((0, 1000, 1),), 1)
    assert slot_maps(plan, 5) == ([(1000, 0, 1)], [(1000, 0, 1)], (0, 0))


@pytest.mark.skipif(os.geteuid() != 0, reason="ranges are root's; an ordinary user has slots or a single id")
def test_a_range_held_by_another_process_is_not_handed_out(state):
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        plan = Identifiers().plan()
        os.write(ready[1], str(plan.uid_map[0][1]).encode())
        os.read(go[0], 1)
        os._exit(0)
    try:
        theirs = int(os.read(ready[0], 20))
        holder = Identifiers()
        assert holder.plan().uid_map[0][1] != theirs
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
    # The kernel dropped the lock with its holder: the range can be used again.
    assert Identifiers().plan().uid_map[0][1] == theirs
    for descriptor in (*ready, *go):
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another id")
def test_a_range_with_a_living_process_in_it_is_left_alone(state):
    ready, go = os.pipe(), os.pipe()
    low = identifiers.FIRST_RANGE
    used = {uid for uid in identifiers.live_ids() if uid >= low}
    number = next(n for n in range(100) if not any(low + n * RANGE <= uid < low + (n + 1) * RANGE for uid in used))
    pid = os.fork()
    if pid == 0:
        os.setresuid(*([low + number * RANGE + 5] * 3))
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        holder = Identifiers()
        taken = {holder.plan().uid_map[0][1] for _ in range(number + 2)}
        assert low + number * RANGE not in taken
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        for descriptor in (*ready, *go):
            os.close(descriptor)


def test_slots_come_back_and_are_not_given_twice(state):
    holder = Identifiers()
    free: list[int] = []
    used: set[int] = set()
    slots = [holder.take_slot(PLAN, free, used) for _ in range(5)]
    assert len(set(slots)) == 5
    holder.give_slot(PLAN, slots[2], free)
    assert holder.take_slot(PLAN, free, used) == slots[2]


@pytest.mark.parametrize(
    "text, expected",
    [("NAME:100000:65536\n", (100000, 65536)), ("UID:5:700\n", (5, 700)), ("other:1:65536\n", None),
     ("NAME:1:10\n", None), ("NAME:x:y\n", None), ("", None), (":1:65536\n", None)],
)  # fmt: skip
def test_subordinate_ranges_are_read_from_the_users_own_lines(tmp_path, text, expected):
    import pwd

    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = str(os.geteuid())
    table = tmp_path / "subuid"
    table.write_text(text.replace("NAME", name).replace("UID", str(os.geteuid())))
    assert identifiers.subordinate_range(str(table)) == expected


def test_a_state_directory_that_others_may_write_is_refused(tmp_path, monkeypatch):
    directory = tmp_path / "ringfence"
    directory.mkdir()
    directory.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(identifiers.os, "geteuid", lambda: os.getuid() or 12345)
    if os.getuid() == 0:
        pytest.skip("root keeps its state in /run/ringfence")
    with pytest.raises(PermissionError):
        identifiers.state_directory()
