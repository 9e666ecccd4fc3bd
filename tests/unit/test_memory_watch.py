"""Memory by measurement: shared pages are billed once, single looks do not kill, gone processes count nothing."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal

import pytest

from ringfence.linux import memory_watch

MIB = 1024 * 1024


@contextlib.contextmanager
def child(prepare):
    """A process that has run `prepare` and waits."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = prepare()
            os.write(tell, b"x")
            while kept is not pid:
                signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(tell)
        os.read(ready, 1)
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def filled(size):
    data = bytearray(size)
    for offset in range(0, size, 4096):
        data[offset] = 1
    return data


def test_memory_a_process_touched_is_seen_cheaply_and_exactly():
    with child(lambda: filled(40 * MIB)) as pid, child(lambda: None) as idle:
        for threshold in (1 << 62, 0):
            more = memory_watch.measure("/proc", [pid], threshold).bytes
            less = memory_watch.measure("/proc", [idle], threshold).bytes
            assert 38 * MIB < more - less < 60 * MIB


def test_pages_shared_by_fork_are_billed_once_when_looked_at_exactly():
    shared = filled(40 * MIB)
    with child(lambda: shared) as first, child(lambda: shared) as second:
        pids = [os.getpid(), first, second]
        cheap = memory_watch.measure("/proc", pids, 1 << 62)
        exact = memory_watch.measure("/proc", pids, 0)
    assert not cheap.exact and exact.exact
    assert cheap.bytes - exact.bytes > 70 * MIB


def test_shared_anonymous_maps_are_memory_too():
    def prepare():
        area = mmap.mmap(-1, 24 * MIB)
        for offset in range(0, 24 * MIB, 4096):
            area[offset] = 1
        return area

    with child(prepare) as pid, child(lambda: None) as idle:
        for threshold in (1 << 62, 0):
            more = memory_watch.measure("/proc", [pid], threshold).bytes
            assert more - memory_watch.measure("/proc", [idle], threshold).bytes > 22 * MIB


def test_page_tables_are_memory_even_when_only_the_zero_page_was_read():
    """Reading one byte in every 2 MiB costs a page table each and no resident page at all."""

    def prepare():
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        area = mmap.mmap(-1, 8 << 30, flags=flags, prot=mmap.PROT_READ)
        for offset in range(0, 8 << 30, 2 * MIB):
            area[offset]
        return area

    with child(prepare) as pid, child(lambda: None) as idle:
        more = memory_watch.measure("/proc", [pid], 1 << 62).bytes
        less = memory_watch.measure("/proc", [idle], 1 << 62).bytes
    if more - less < 1 * MIB:
        pytest.skip("this kernel maps the huge zero page, which needs no page tables")
    assert more - less > 10 * MIB


def test_the_exact_pass_runs_only_above_the_threshold():
    with child(lambda: filled(8 * MIB)) as pid:
        assert not memory_watch.measure("/proc", [pid], 1 << 40).exact
        assert memory_watch.measure("/proc", [pid], 1 * MIB).exact


def test_the_baseline_is_not_billed_and_never_below_zero():
    with child(lambda: None) as pid:
        full = memory_watch.measure("/proc", [pid], 1 << 62).bytes
        assert memory_watch.measure("/proc", [pid], 1 << 62, baseline=4096).bytes == full - 4096
        assert memory_watch.measure("/proc", [pid], 1 << 62, baseline=1 << 40).bytes == 0


def test_a_process_that_is_gone_counts_nothing():
    with child(lambda: None) as pid:
        pass
    assert memory_watch.measure("/proc", [pid], 0).processes == 0


def fake_process(directory, pid, anonymous, share=None):
    """A /proc/PID as plain files; `share` None leaves smaps_rollup out of reach."""
    folder = directory / str(pid)
    folder.mkdir(exist_ok=True)
    sizes = f"RssAnon:\t{anonymous // 1024} kB\nRssShmem:\t0 kB\n"
    status = "Name:\tpython3\nVmPTE:\t0 kB\nVmSwap:\t0 kB\n" + sizes
    (folder / "status").write_text(status)
    if share is not None:
        text = "0-1 ---p 00000000 00:00 0 [rollup]\nPss_Anon: %d kB\nPss_Shmem: 0 kB\nSwapPss: 0 kB\n"
        (folder / "smaps_rollup").write_text(text % (share // 1024))


def watch(directory, limit, **options):
    return memory_watch.MemoryWatch(os.open(str(directory), os.O_RDONLY | os.O_DIRECTORY), limit, **options)


def test_other_entries_of_proc_are_not_processes(tmp_path):
    fake_process(tmp_path, 7, MIB, MIB)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("")
    assert memory_watch.measure(str(tmp_path)).processes == 1


def test_one_look_over_the_limit_does_not_kill_and_two_do(tmp_path):
    fake_process(tmp_path, 1, 10 * MIB, 10 * MIB)
    watcher = watch(tmp_path, 5 * MIB)
    try:
        assert watcher.over() is False
        assert watcher.suspicious
        assert watcher.over() is True
    finally:
        watcher.close()


def test_a_look_below_the_limit_forgets_the_one_above(tmp_path):
    fake_process(tmp_path, 1, 10 * MIB, 10 * MIB)
    watcher = watch(tmp_path, 5 * MIB)
    try:
        assert watcher.over() is False
        fake_process(tmp_path, 1, 1 * MIB, 1 * MIB)
        assert watcher.over() is False
        fake_process(tmp_path, 1, 10 * MIB, 10 * MIB)
        assert watcher.over() is False
        assert watcher.peak == 10 * MIB
    finally:
        watcher.close()


def test_sharing_with_the_zygote_alone_is_no_reason_to_kill(tmp_path):
    for pid in range(1, 11):
        fake_process(tmp_path, pid, 10 * MIB, MIB)
    watcher = watch(tmp_path, 20 * MIB)
    try:
        assert [watcher.over() for _ in range(5)] == [False] * 5
        assert watcher.last.bytes == 10 * MIB
    finally:
        watcher.close()


def test_growth_between_two_exact_looks_is_added(tmp_path):
    fake_process(tmp_path, 1, 30 * MIB, 10 * MIB)
    watcher = watch(tmp_path, 20 * MIB)
    try:
        watcher.over()
        watcher._not_before = float("inf")  # no exact look is due
        fake_process(tmp_path, 1, 35 * MIB, 10 * MIB)
        assert watcher.over() is False
        assert watcher.last.bytes == 15 * MIB and not watcher.last.exact
        fake_process(tmp_path, 1, 60 * MIB, 40 * MIB)
        assert watcher.over() is False
        assert watcher.last.bytes == 40 * MIB and watcher.last.exact
        assert watcher.over() is True
    finally:
        watcher.close()


def test_an_unreadable_rollup_is_billed_too_high_rather_than_not(tmp_path):
    fake_process(tmp_path, 1, 10 * MIB, 2 * MIB)
    fake_process(tmp_path, 2, 10 * MIB)
    (tmp_path / "2" / "smaps_rollup").mkdir()  # reading fails with EISDIR, as EACCES would
    result = memory_watch.measure(str(tmp_path))
    assert result.bytes == 12 * MIB and not result.exact


def test_a_vanished_proc_means_nothing_is_left_and_an_unreadable_one_is_an_error(tmp_path, monkeypatch):
    watcher = watch(tmp_path, 0)

    def gone(*_):
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(memory_watch.os, "listdir", gone)
        assert watcher.over() is False
    os.close(watcher.proc)
    with pytest.raises(OSError):
        watcher.over()
    watcher.proc = -1
    watcher.close()


def test_a_machine_short_of_memory_is_seen(tmp_path):
    meminfo = tmp_path / "meminfo"
    for total, available, short in (
        (16 << 20, 15 << 20, False), (16 << 20, 900 << 10, False), (16 << 20, 700 << 10, True),
        (1 << 20, 200 << 10, False), (1 << 20, 100 << 10, True),
    ):  # fmt: skip
        meminfo.write_text(f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nBuffers: 1 kB\n")
        assert memory_watch.machine_is_short(str(meminfo)) is short, (total, available)
    meminfo.write_text("MemTotal: 1000 kB\n")  # a kernel that does not say is not short
    assert not memory_watch.machine_is_short(str(meminfo))
