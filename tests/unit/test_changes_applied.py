"""Apply writes exactly the captured bytes, all of them or none, whoever interferes and whenever the process dies."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import GONE, captured

from ringfence.changes import applying, journal
from ringfence.changes.model import Applied, Changes
from ringfence.changes.places import Seen, Tree
from ringfence.errors import ApplyConflictError, ApplyRefusedError, InvalidArgumentError
from ringfence.linux import renames

Described = dict[str, bytes | str | None]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: thousands of syncs of a busy disk would take minutes. Extended attributes and swaps work there too."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir="/dev/shm"))
    yield place
    shutil.rmtree(place)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "state"
    monkeypatch.setenv("RINGFENCE_STATE", str(place))
    yield place
    left = [each for each in place.rglob("*.json*")] if place.exists() else []
    assert not left, "a journal is left"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    make(place)
    return place


def make(place: Path) -> None:
    for name, text in {
        "a.txt": "one\ntwo\n", "src/main.py": "print(1)\n", "src/lib/x.py": "x = 1\n", "src/lib/y.py": "y = 2\n",
        "old/1": "1\n", "old/deep/2": "2\n", "tree/inner/file": "f\n", "plain": "plain\n", "run.sh": "true\n",
    }.items():  # fmt: skip
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "link").symlink_to("a.txt")
    for root, directories, files in os.walk(place):
        for each in directories + files:
            if not (path := Path(root, each)).is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)


EVERYTHING: Described = {
    "a.txt": b"one\n2\n", "new/deep/file": b"new\n", "src/main.py": GONE, "link": "src/lib", "old": GONE, "tree": b"now a file\n",
    "plain/inside": b"now a directory\n", "src/lib": GONE, "library/x.py": b"x = 1\n", "library/y.py": b"y = 2\n", "run.sh": b"true\n",
}  # fmt: skip


def everything(source: Path, **options: Any) -> Changes:
    """A change of every kind at once."""
    changes = captured(source, EVERYTHING, **options)
    return changes


def apply(source: Path, changes: Changes, paths: Any = None, written: Any = None) -> Applied:
    with Tree.open(str(source)) as tree:
        return applying.apply(changes, tree, paths, written)


def picture(place: Path) -> dict[str, tuple[str, int, bytes]]:
    """Every name below with its kind, mode and content."""
    found = {}
    for root, directories, files in os.walk(place):
        for each in directories + files:
            path = Path(root, each)
            state = path.lstat()
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
            found[str(path.relative_to(place))] = (oct(state.st_mode), 0, content)
    return found


def after_everything(tmp_path: Path) -> dict[str, tuple[str, int, bytes]]:
    place = tmp_path / "expected"
    make(place)
    (place / "a.txt").write_text("one\n2\n")
    (place / "new/deep").mkdir(parents=True)
    (place / "new/deep/file").write_text("new\n")
    (place / "src/main.py").unlink()
    (place / "link").unlink()
    (place / "link").symlink_to("src/lib")
    for each in ("old", "tree"):
        shutil.rmtree(place / each)
    (place / "tree").write_text("now a file\n")
    (place / "plain").unlink()
    (place / "plain").mkdir()
    (place / "plain/inside").write_text("now a directory\n")
    (place / "src/lib").rename(place / "library")
    for name in ("a.txt", "new/deep/file", "tree", "plain/inside"):
        (place / name).chmod(0o644)
    for name in ("new", "new/deep", "plain", "library"):
        (place / name).chmod(0o755)
    result = picture(place)
    shutil.rmtree(place)
    return result


def test_every_kind_of_change_is_written_and_nothing_else(source: Path, tmp_path: Path) -> None:
    changes = everything(source)
    done = apply(source, changes)
    assert picture(source) == after_everything(tmp_path)
    assert len(done.changes) == len(changes) and not done.kept and done.bytes_written == 49


def test_the_same_again_where_the_file_system_cannot_swap(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(renames, "_rename", refuse)
    apply(source, everything(source))
    assert picture(source) == after_everything(tmp_path)


def test_a_second_capture_finds_nothing_left_to_apply(source: Path) -> None:
    import time

    started = time.time_ns()
    written: dict[bytes, Seen] = {}
    apply(source, everything(source, started_ns=started), None, written)
    again = captured(source, {**EVERYTHING, "a.txt": b"three\n"}, started_ns=started, written=written)
    assert [str(change) for change in again] == ["M a.txt"] and again["a.txt"].ordinary
    apply(source, again, None, written)
    assert (source / "a.txt").read_text() == "three\n"


def test_some_paths_take_what_they_need_with_them_and_no_more(source: Path) -> None:
    before = picture(source)
    done = apply(source, everything(source), ["new/deep/file", b"a.txt"])
    assert sorted(change.path for change in done.changes) == ["a.txt", "new/deep/file"]
    after = picture(source)
    assert {path for path in {*before, *after} if before.get(path) != after.get(path)} == {"a.txt", "new", "new/deep", "new/deep/file"}
    apply(source, captured(source, EVERYTHING), ["library", "./src/main.py"])
    assert not (source / "src/lib").exists() and (source / "library/y.py").exists() and not (source / "src/main.py").exists()


def test_a_directory_is_not_deleted_around_what_was_not_chosen(source: Path) -> None:
    changes = captured(source, {"old": GONE})
    before = picture(source)
    with pytest.raises(ApplyConflictError, match="would be deleted"):
        apply(source, changes, [changes["old"]])
    (source / "old/theirs").write_text("came later")
    with pytest.raises(ApplyConflictError, match="theirs"):
        apply(source, changes)
    (source / "old/theirs").unlink()
    assert picture(source) == before


def test_what_must_be_named_is_refused_until_it_is_named_exactly(source: Path) -> None:
    (source / ".git/hooks").mkdir(parents=True)
    changes = captured(source, {".git/hooks/post-checkout": b"#!/bin/sh\n", ".vscode/tasks.json": b"{}", "out": "/etc/passwd", "fine": b"fine\n"})
    before = picture(source)
    for paths in (None, ["."], [".git"], [".vscode/"], ["fine", ".git/hooks"]):
        with pytest.raises(ApplyRefusedError, match="must be named") as refused:
            apply(source, changes, paths)
        assert refused.value.hint and refused.value.paths
    assert picture(source) == before
    apply(source, changes, changes.ordinary)
    assert {path for path in picture(source) if path not in before} == {"fine"}
    apply(source, captured(source, {".vscode/tasks.json": b"{}", "out": "/etc/passwd"}), [".vscode/tasks.json", "out"])
    assert (source / ".vscode/tasks.json").read_text() == "{}" and os.readlink(source / "out") == "/etc/passwd"


@pytest.mark.parametrize("paths", [["nowhere"], ["/etc/passwd"], ["../x"], "a.txt", b"a.txt", [".."]])
def test_paths_that_make_no_sense_are_told(source: Path, paths: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        apply(source, everything(source), paths)


CONFLICTS: dict[str, Callable[[Path], object]] = {
    "edited": lambda place: (place / "a.txt").write_text("one\nTWO\n"),
    "edited in place, same size": lambda place: (place / "a.txt").write_text("one\ntwO\n"),
    "deleted": lambda place: (place / "a.txt").unlink(),
    "became a link": lambda place: ((place / "a.txt").unlink(), (place / "a.txt").symlink_to("/etc/passwd")),
    "became a directory": lambda place: ((place / "a.txt").unlink(), (place / "a.txt").mkdir()),
    "made executable": lambda place: (place / "a.txt").chmod(0o755),
    "a new file is in the way": lambda place: (place / "new").write_text("mine"),
    "a directory became a link": lambda place: ((place / "src").rename(place / "moved"), (place / "src").symlink_to("moved")),
    "a deleted file was edited": lambda place: (place / "old/deep/2").write_text("edited"),
    "a link points elsewhere": lambda place: ((place / "link").unlink(), (place / "link").symlink_to("plain")),
}


@pytest.mark.parametrize("what", CONFLICTS)
def test_what_changed_on_the_host_meanwhile_is_refused_and_nothing_is_written(source: Path, what: str) -> None:
    changes = everything(source)
    CONFLICTS[what](source)
    before = picture(source)
    with pytest.raises(ApplyConflictError) as refused:
        apply(source, changes)
    assert refused.value.hint
    assert picture(source) == before


def test_what_was_only_touched_is_no_conflict(source: Path) -> None:
    changes = everything(source)
    os.utime(source / "a.txt")
    (source / "old/1").rename(source / "x")
    (source / "x").rename(source / "old/1")
    apply(source, changes)
    assert (source / "a.txt").read_text() == "one\n2\n"


def test_another_directory_under_the_same_name_is_refused(source: Path, tmp_path: Path) -> None:
    changes = everything(source)
    source.rename(tmp_path / "elsewhere")
    make(source)
    with pytest.raises(ApplyConflictError, match="not the directory"):
        apply(source, changes)


def test_no_link_is_followed_whenever_it_appears(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory becomes a link to a place outside between the check and the write."""
    outside = tmp_path / "outside"
    make(outside)
    before = picture(outside)
    changes = captured(source, {"src/lib/x.py": b"evil\n", "src/lib/z.py": b"evil\n", "src/main.py": GONE})
    check = applying._Plan.check

    def swap_after_check(self: Any) -> None:
        check(self)
        (source / "src").rename(source / "src-real")
        (source / "src").symlink_to(outside / "src")

    monkeypatch.setattr(applying._Plan, "check", swap_after_check)
    with pytest.raises(ApplyRefusedError):
        apply(source, changes)
    assert picture(outside) == before
    (source / "src").unlink()
    (source / "src-real").rename(source / "src")
    monkeypatch.setattr(applying._Plan, "check", check)
    apply(source, changes)
    assert (source / "src/lib/x.py").read_text() == "evil\n", "the control: without the swap it is written"


def test_an_edit_of_the_last_instant_is_not_lost(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = renames.exchange
    changes = everything(source)
    before = picture(source)

    def edit_first(new: bytes, staging: int, name: bytes, directory: int) -> None:
        if name == b"a.txt" and (source / "a.txt").read_text() == "one\ntwo\n":
            (source / "a.txt").write_text("an edit of the last instant\n")
        exchange(new, staging, name, directory)

    monkeypatch.setattr(renames, "exchange", edit_first)
    with pytest.raises(ApplyConflictError, match="this moment"):
        apply(source, changes)
    after = picture(source)
    assert after.pop("a.txt")[2] == b"an edit of the last instant\n"
    before.pop("a.txt")
    assert after == before


def test_a_step_that_fails_undoes_those_before_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = picture(source)
    changes = everything(source)
    count = 0
    while True:
        count += 1
        calls, real = 0, renames._rename

        def fail(*arguments: Any, real: Any = real, count: int = count) -> None:
            nonlocal calls
            calls += 1
            if calls == count:
                raise OSError(28, "No space left on device")
            real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(renames, "_rename", fail)
            try:
                apply(source, changes)
                break
            except ApplyRefusedError as refused:
                assert "No space" in refused.message and refused.hint
        assert picture(source) == before, count
    assert count > 10


def test_set_id_bits_and_attributes_are_left_behind(source: Path) -> None:
    from made_up import entry

    from ringfence.changes.collecting import collect

    with Tree.open(str(source)) as tree:
        changes = collect([entry("", None), entry("bin", None, mode=0o7777), entry("bin/su", b"x", mode=0o6755)], tree, str(source))
    apply(source, changes)
    assert stat.S_IMODE((source / "bin/su").lstat().st_mode) == 0o755
    assert stat.S_IMODE((source / "bin").lstat().st_mode) == 0o777
    assert os.listxattr(source / "bin/su") == []


def test_a_directory_that_its_owner_may_not_write_is_filled_first(source: Path) -> None:
    from made_up import entry

    from ringfence.changes.collecting import collect

    with Tree.open(str(source)) as tree:
        changes = collect(
            [entry("", None), entry("ro", None, mode=0o555), entry("ro/in", None, mode=0o500), entry("ro/in/file", b"x")], tree, str(source)
        )
    apply(source, changes)
    assert (source / "ro/in/file").read_bytes() == b"x" and stat.S_IMODE((source / "ro").stat().st_mode) == 0o555
    (source / "ro").chmod(0o755)
    (source / "ro/in").chmod(0o755)


@pytest.mark.root
def test_root_writes_for_the_directorys_owner(source: Path) -> None:
    os.chown(source, 12345, 12345)
    os.chown(source / "a.txt", 23456, 23456)
    apply(source, captured(source, {"a.txt": b"x\n", "n/m": b"y\n", "l": "a.txt"}))
    assert {name: (source / name).lstat().st_uid for name in ("a.txt", "n", "n/m", "l")} == {"a.txt": 23456, "n": 12345, "n/m": 12345, "l": 12345}


def test_damaged_contents_are_never_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = everything(source)
    before = picture(source)
    os.pwrite(changes._contents.fileno(), b"X", changes["a.txt"].offset)
    with pytest.raises(ApplyRefusedError, match="damaged"):
        apply(source, changes)
    assert picture(source) == before
    changes.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        apply(source, changes)


# Killed at every step ---------------------------------------------------------------------------------------

ACTS = {"open", "write", "mkdir", "rename", "replace", "unlink", "rmdir", "symlink", "fchmod", "chmod", "chown", "fsync", "link"}


def killed_at(number: int, act: Callable[[], object]) -> bool:
    """Run `act` in a child that is killed at the `number`th call that touches a disk, before it or after it."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def watch(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            if event in ("c_call", "c_return") and getattr(argument, "__module__", None) == "posix":
                hit = argument.__name__ in ACTS
            else:
                hit = event in ("call", "return") and frame.f_code.co_name in ("_rename", "sync")
            if hit:
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.setprofile(watch)
            act()
            sys.setprofile(None)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


def test_killed_at_any_step_it_is_all_or_nothing_after_a_recovery(source: Path, tmp_path: Path, state: Path) -> None:
    make(tmp_path / "pristine")
    before, after = picture(source), after_everything(tmp_path)
    outcomes = {"rolled back": 0, "completed": 0}
    number = 0
    while True:
        number += 1
        changes = everything(source)
        killed = killed_at(number, lambda changes=changes: apply(source, changes))
        recovered = journal.recover()
        now = picture(source)
        assert now in (before, after), f"killed at {number}: neither the one nor the other"
        for each in recovered:
            outcomes[each.outcome] += 1
            assert now == (after if each.outcome == "completed" else before) and not each.kept
        assert not list(state.rglob("*.json"))
        if not killed:
            break
        if now == after:
            shutil.rmtree(source)
            make(source)
    assert number > 80 and outcomes["rolled back"] > 40 and outcomes["completed"] > 3, (number, outcomes)


def test_a_recovery_killed_at_any_step_is_recovered_too(source: Path, tmp_path: Path) -> None:
    before, after = picture(source), after_everything(tmp_path)
    tried = 0
    number = 5
    changes = everything(source)
    while killed_at(number, lambda changes=changes: apply(source, changes)):
        second = 0
        while killed_at(second := second + 3, journal.recover):
            told = journal.recover()
            tried += 1
            now = picture(source)
            assert now in (before, after), f"killed at {number}, and the recovery at {second}: {told}"
            if now == after:
                shutil.rmtree(source)
                make(source)
            changes = everything(source)
            killed_at(number, lambda changes=changes: apply(source, changes))
        if picture(source) == after:
            shutil.rmtree(source)
            make(source)
        changes = everything(source)
        number += 17
    assert tried > 100


def test_the_next_apply_recovers_by_itself(source: Path, tmp_path: Path) -> None:
    changes = everything(source)
    number = 60
    while killed_at(number, lambda: apply(source, changes)) and not journal.leftovers():
        number += 1
    assert journal.leftovers() == [str(source)]
    with pytest.raises(ApplyConflictError):
        # What was captured is still what was there, but for the times that the undoing left.
        (source / "a.txt").write_text("edited since\n")
        apply(source, changes)
    assert not journal.leftovers()


def test_an_edit_made_after_a_crash_is_not_undone_and_is_told(source: Path) -> None:
    changes = captured(source, {"a.txt": b"from the sandbox\n", "b.txt": b"b\n"})

    def crash() -> None:
        carry_out = applying._Writer.carry_out

        def die(self: Any, step: Any) -> None:
            if step.path == "b.txt":
                os.kill(os.getpid(), signal.SIGKILL)
            carry_out(self, step)

        applying._Writer.carry_out = die  # type: ignore[method-assign]
        apply(source, changes)

    assert killed_at(10_000, crash)
    assert (source / "a.txt").read_text() == "from the sandbox\n", "the control: it was cut short half way"
    (source / "a.txt").write_text("a person went on from there\n")
    (recovered,) = journal.recover()
    assert (source / "a.txt").read_text() == "a person went on from there\n"
    (told,) = recovered.kept
    place = source / told.rpartition(" ")[2]
    assert place.read_text() == "one\ntwo\n"
    shutil.rmtree(place.parent)


def test_a_workspace_that_is_gone_is_left_alone_and_told(source: Path, tmp_path: Path, state: Path) -> None:
    changes = everything(source)
    number = 60
    while killed_at(number, lambda: apply(source, changes)) and not journal.leftovers():
        number += 1
    source.rename(tmp_path / "away")
    assert "left alone" in journal.recover()[0].outcome
    make(source)
    assert "left alone" in journal.recover()[0].outcome, "another directory in its place is none of ours"
    shutil.rmtree(source)
    (tmp_path / "away").rename(source)
    assert journal.recover()[0].outcome == "rolled back"


def test_a_planted_journal_or_staging_directory_means_nothing(source: Path) -> None:
    planted = source / ".ringfence-apply-0000"
    planted.mkdir()
    (planted / "n0").write_text("evil")
    (source / "applies").mkdir()
    assert journal.recover() == []
    apply(source, captured(source, {"a.txt": b"x\n"}))
    assert (planted / "n0").read_text() == "evil"


def test_many_changes_are_not_compared_with_each_other(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringfence.changes.model import Change

    changes = captured(source, {f"many/{number}": b"x" for number in range(500)})
    compared, same = [], Change.__eq__
    monkeypatch.setattr(Change, "__eq__", lambda self, other: (compared.append(1), same(self, other))[1])
    apply(source, changes, list(changes))
    assert len(compared) < 5 * len(changes)
