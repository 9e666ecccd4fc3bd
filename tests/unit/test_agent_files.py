"""Laws of file operations in the guest agent: names, contents, atomicity, workers that die, watches."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest
from agent_client import AgentProcess, can_isolate

from ringfence.guest.protocol import FILE

NO_ISOLATION = can_isolate()
pytestmark = pytest.mark.skipif(bool(NO_ISOLATION), reason=NO_ISOLATION)
MODES = ["single", pytest.param("many", marks=pytest.mark.skipif(os.geteuid() != 0, reason="many ids need root here"))]
BIG = os.urandom(1 << 20) * 5 + b"tail"


@pytest.fixture(params=MODES)
def host(request):
    with AgentProcess(single=request.param == "single") as client:
        yield client


def write(host, path, data, end=True, **more):
    channel = host.open("file.write", path=path, **more)
    host.send(channel, data, FILE)
    if end:
        host.mux.send_eof(channel.number, FILE)
        host.wait(channel)
    return channel


def read(host, path, **more):
    channel = host.open("file.read", path=path, **more)
    host.wait(channel)
    return channel


def names(host, path=".", depth=1):
    return sorted(item["path"] for item in host.call("file.list", path=path, depth=depth)["entries"])


@pytest.mark.parametrize("size", [0, 1, 60 << 10, (60 << 10) + 1, 200_000, len(BIG)])
def test_what_is_written_is_read_back_with_its_hash(host, size):
    data = BIG[:size]
    answer = write(host, "f.bin", data).result
    assert answer["ok"], answer
    assert answer["size"] == size and answer["sha256"] == hashlib.sha256(data).hexdigest()
    assert answer["entry"]["size"] == size and answer["entry"]["path"] == "/mnt/home/f.bin" and answer["entry"]["mode"] == 0o644
    assert answer["entry"]["owner"] == "user" and answer["entry"]["type"] == "file"
    got = read(host, "~/f.bin")
    assert got.text(FILE) == data and got.result["size"] == size
    assert got.result["sha256"] == answer["sha256"] and got.event("entry")["name"] == "f.bin"
    assert names(host) == ["/mnt/home/f.bin"]


def test_a_range_of_a_file(host):
    write(host, "f", BIG)
    assert read(host, "f", offset=len(BIG) - 4).text(FILE) == b"tail"
    assert read(host, "f", offset=10, length=100_000).text(FILE) == BIG[10:100_010]
    assert read(host, "f", offset=len(BIG) + 5).text(FILE) == b""
    write(host, "g", b"0123456789")
    assert read(host, "g", offset=3, length=4).text(FILE) == b"3456"
    assert read(host, "g", offset=-1).result["error"]["code"] == "invalid"


@pytest.mark.parametrize("name", ["a\nb", "\udcff\udcfe", "x" * 255, " ", "-rf", "*", "ü", "\x01\x1b[31m"])
def test_any_legal_name(host, name):
    assert write(host, name, b"1").result["ok"]
    assert write(host, name, b"2").result["ok"]
    assert write(host, name, BIG).result["ok"]
    assert read(host, name).text(FILE) == BIG
    [entry] = host.call("file.list", path=".")["entries"]
    assert entry["name"] == name
    assert host.call("file.remove", path=name)["ok"]
    assert names(host) == []


def test_parents_are_made_and_modes_kept(host):
    assert write(host, "a/b/c.txt", b"1", mode=0o750).result["entry"]["mode"] == 0o750
    assert write(host, "a/b/c.txt", b"2").result["entry"]["mode"] == 0o750
    assert write(host, "z/c.txt", b"1", parents=False).result["error"]["code"] == "not_found"
    assert write(host, "a/b/c.txt", BIG, mode=0o4755).result["error"]["code"] == "invalid"
    assert host.call("file.chmod", path="a/b/c.txt", mode=0o6755)["error"]["code"] == "invalid"
    assert host.call("file.chmod", path="a/b/c.txt", mode=0o600)["entry"]["mode"] == 0o600


@pytest.mark.parametrize("data", [b"more", BIG])
def test_append(host, data):
    write(host, "log", b"start ")
    assert write(host, "log", data, append=True).result["entry"]["size"] == 6 + len(data)
    assert read(host, "log").text(FILE) == b"start " + data
    assert names(host) == ["/mnt/home/log"]
    assert write(host, "new", data, append=True).result["ok"]


def test_the_target_changes_only_when_all_has_arrived(host):
    write(host, "f", b"old")
    channel = write(host, "f", BIG[:3_000_000], end=False)
    host.until(lambda: host.mux.queued == 0)
    assert read(host, "f").text(FILE) == b"old"
    host.mux.send_close(channel.number, {"reason": "test"})
    host.wait(channel)
    assert read(host, "f").text(FILE) == b"old"
    assert names(host) == ["/mnt/home/f"]
    assert host.shell("ls -A").text() == b"f\n"


def test_an_upload_goes_through_a_symlink(host):
    write(host, "d/real", b"old")
    assert host.call("file.symlink", target="d/real", path="link")["entry"]["target"] == "d/real"
    write(host, "link", b"new")
    assert read(host, "d/real").text(FILE) == b"new"
    assert host.call("file.stat", path="link")["entry"]["type"] == "symlink"


@pytest.mark.parametrize("kind", ["fifo", "dir", "socket"])
def test_special_files_are_refused_without_waiting(host, kind):
    host.shell({
        "fifo": "mkfifo x", "dir": "mkdir x",
        "socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"x\")'",
    }[kind])  # fmt: skip
    code = "is_a_directory" if kind == "dir" else "invalid"
    assert read(host, "x").result["error"]["code"] == code
    assert write(host, "x", b"1").result["error"]["code"] == code
    assert write(host, "x", BIG).result["error"]["code"] == code
    assert host.call("file.stat", path="x")["entry"]["type"] == kind


def test_files_of_proc_are_read(host):
    assert b"Linux" in read(host, "/proc/version").text(FILE)


def test_errors_have_codes(host):
    assert read(host, "none").result["error"]["code"] == "not_found"
    assert host.call("file.stat", path="")["error"]["code"] == "invalid"
    assert host.call("file.stat", path="a\0b")["error"]["code"] == "invalid"
    assert host.call("file.stat", path=7)["error"]["code"] == "invalid"
    assert host.call("file.stat", path="x" * 256)["error"]["code"] == "invalid"
    assert host.call("file.stat", path="/" + "x/" * 3000)["error"]["code"] == "not_found"  # longer than PATH_MAX
    assert write(host, "/etc/x", b"1").result["error"]["code"] == "permission"
    assert write(host, "/etc/x", BIG).result["error"]["code"] == "permission"
    assert read(host, "/etc/shadow").result["error"]["code"] == "permission"
    write(host, "file", b"")
    assert host.call("file.stat", path="file/x")["error"]["code"] == "not_a_directory"
    assert host.call("file.list", path="file")["error"]["code"] == "not_a_directory"
    assert host.call("file.mkdir", path="file", parents=False)["error"]["code"] == "exists"
    assert write(host, "d/", b"1").result["error"]["code"] == "is_a_directory"


def test_directories(host):
    assert host.call("file.mkdir", path="a/b/c", parents=True)["created"] is True
    assert host.call("file.mkdir", path="a/b/c", parents=True)["created"] is False
    write(host, "a/1", b"")
    write(host, "a/b/2", b"")
    assert names(host, "a") == ["/mnt/home/a/1", "/mnt/home/a/b"]
    assert names(host, "a", 2) == ["/mnt/home/a/1", "/mnt/home/a/b", "/mnt/home/a/b/2", "/mnt/home/a/b/c"]
    assert host.call("file.remove", path="a", recursive=False)["error"]["code"] == "exists"
    assert host.call("file.move", source="a/b", target="moved")["entry"]["type"] == "dir"
    assert host.call("file.remove", path="a")["ok"] and names(host) == ["/mnt/home/moved"]


def test_a_long_list_is_streamed(host):
    host.shell("mkdir d; cd d; for i in $(seq 3000); do echo > file$i; done")
    channel = host.open("file.list", path="d")
    result = host.wait(channel)
    entries = [json.loads(line) for line in channel.text(FILE).splitlines()]
    assert result["streamed"] and result["count"] == len(entries) == 3000
    assert {item["name"] for item in entries} == {f"file{n}" for n in range(1, 3001)}


def test_a_move_between_file_systems(host):
    write(host, "tree/f", b"1")
    place = f"/dev/shm/ringfence-test-{os.getpid()}"
    try:
        answer = host.call("file.move", source="tree", target=place)
        assert answer["ok"], answer
        assert read(host, place + "/f").text(FILE) == b"1" and names(host) == []
        assert host.call("file.move", source=place + "/f", target="back")["ok"]
        assert read(host, "back").text(FILE) == b"1"
    finally:
        host.call("file.remove", path=place)


def test_a_tree_deeper_than_any_path_is_removed(host):
    run = host.run("/usr/bin/python3", "-c", "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\nopen('end', 'w')")
    assert run.result["exit_code"] == 0, run.text(2)
    answer = host.call("file.remove", path="d")
    assert answer["ok"], answer
    assert names(host) == []


def test_removing_follows_no_symlink(host):
    write(host, "keep/f", b"1")
    host.shell("mkdir gone; ln -s ../keep gone/link; ln -s keep top")
    assert host.call("file.remove", path="gone")["ok"] and host.call("file.remove", path="top")["ok"]
    assert read(host, "keep/f").text(FILE) == b"1"


def test_metadata(host):
    answer = write(host, "f", b"1", metadata={"origin": "test"}).result
    if not answer["ok"] and answer["error"]["code"] == "unsupported":
        pytest.skip("no user xattrs on tmpfs before Linux 6.6")
    assert answer["entry"]["metadata"] == {"origin": "test"}
    answer = host.call("file.metadata", path="f", set={"origin": None, "b": "ü"})
    assert answer["entry"]["metadata"] == {"b": "ü"}
    assert host.call("file.metadata", path="f", set={"x": "y" * 5000})["error"]["code"] == "limit"


def test_a_full_disk_is_said_and_leaves_nothing(host):
    if os.geteuid():
        pytest.skip("a small file system needs root here")
    import ctypes

    assert host.shell("mkdir small; df --output=avail /mnt").result["ok"]
    # The whole tmpfs of this agent is shrunk from outside, through its mount namespace.
    pid = os.fork()
    if pid == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/proc/{host.process.init}/ns/mnt", os.O_RDONLY)
        ok = libc.setns(fd, 0) == 0 and libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0x20, b"size=2m") == 0
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert write(host, "big", BIG).result["error"]["code"] == "no_space"
    assert names(host) == ["/mnt/home/small"]
    assert write(host, "small/ok", b"1").result["ok"]


def test_a_worker_that_is_killed_is_answered_and_replaced(host):
    host.call("file.stat", path=".")
    slow = host.open("file.hash", path="zeros")
    host.wait(slow)
    host.shell("truncate -s 20G zeros")
    slow = host.open("file.hash", path="zeros")
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        host.step(0.02)
    if os.geteuid() == 0:
        workers = [int(n) for n in os.listdir("/proc") if n.isdigit() and _is_worker(int(n), host)]
        assert workers
    host.shell("kill -9 -1")
    assert host.wait(slow)["error"]["code"] == "worker_died"
    assert host.call("file.stat", path=".")["ok"]


def _is_worker(pid, host):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == host.process.init
    except OSError:
        return False


def test_a_slow_operation_does_not_hold_up_others(host):
    host.shell("truncate -s 30G zeros")
    slow = [host.open("file.hash", path="zeros") for _ in range(2)]
    started = time.monotonic()
    for _ in range(20):
        assert host.call("file.stat", path="zeros")["ok"]
    assert write(host, "f", BIG).result["ok"]
    assert all(item.result is None for item in slow) and time.monotonic() - started < 10
    for item in slow:
        host.mux.send_close(item.number, {"reason": "enough"})
    host.wait(*slow)


def test_many_operations_at_once(host):
    channels = []
    for n in range(100):
        channel = host.open("file.write", path=f"f{n}")
        host.mux.send_data(channel.number, FILE, f"content {n}".encode())
        host.mux.send_eof(channel.number, FILE)
        channels.append(channel)
    host.wait(*channels)
    assert all(item.result["ok"] for item in channels)
    channels = [host.open("file.read", path=f"f{n}") for n in range(100)]
    host.wait(*channels)
    assert [item.text(FILE) for item in channels] == [f"content {n}".encode() for n in range(100)]


def test_several_large_transfers_at_once(host):
    channels = []
    for n in range(4):
        channels.append(host.open("file.write", path=f"f{n}"))
    for start in range(0, len(BIG), 1 << 18):
        for channel in channels:
            host.send(channel, BIG[start : start + (1 << 18)], FILE)
    for channel in channels:
        host.mux.send_eof(channel.number, FILE)
    host.wait(*channels)
    assert {item.result["sha256"] for item in channels} == {hashlib.sha256(BIG).hexdigest()}
    channels = [host.open("file.read", path=f"f{n}") for n in range(4)]
    host.wait(*channels)
    assert all(item.text(FILE) == BIG for item in channels)


def test_a_cancelled_download_ends(host):
    host.shell("truncate -s 5G zeros")
    channel = host.open("file.read", path="zeros")
    channel.hold = True
    host.until(lambda: channel.received > 900_000)
    host.mux.send_close(channel.number, {"reason": "test"})
    host.wait(channel)
    assert host.call("info")["failures"] == 0


def test_the_agent_keeps_no_descriptor(host):
    if os.geteuid():
        pytest.skip("the agent's descriptors are readable by root only")
    write(host, "f", BIG)
    read(host, "f")

    def descriptors():
        return len(os.listdir(f"/proc/{host.process.init}/fd"))

    before = descriptors()
    for _ in range(5):
        write(host, "f", BIG)
        read(host, "f")
        write(host, "/etc/nope", BIG)
        channel = write(host, "f", BIG[:2_000_000], end=False)
        host.mux.send_close(channel.number, {"reason": "test"})
        host.wait(channel)
    assert descriptors() == before


# ------------------------------------------------------------------------ watches


def watch(host, path=".", recursive=False):
    channel = host.open("file.watch", path=path, recursive=recursive)
    host.until(lambda: channel.event("started") or channel.result)
    return channel


def seen(channel):
    return [(item["type"], item["path"], item.get("target")) for item in channel.events if "type" in item]


def test_a_watch_reports_each_kind_of_change(host):
    channel = watch(host)
    host.shell("echo 1 > f; chmod 600 f; mv f g; rm g; mkdir d; touch d/inner")
    host.until(lambda: ("create", "d", None) in seen(channel))
    events = seen(channel)
    for wanted in (("create", "f", None), ("write", "f", None), ("chmod", "f", None), ("rename", "f", "g"), ("remove", "g", None)):
        assert wanted in events
    assert not any(path.startswith("d/") for _, path, _ in events)
    host.mux.send_close(channel.number, {"reason": "done"})
    assert host.wait(channel)["ok"]


def test_a_recursive_watch_follows_new_and_renamed_directories(host):
    host.shell("mkdir -p old/deep")
    channel = watch(host, recursive=True)
    host.shell("mkdir -p new/er; echo > new/er/f; echo > old/deep/f; mv old renamed; sleep 0.2; echo > renamed/deep/g")
    host.until(lambda: ("create", "renamed/deep/g", None) in seen(channel))
    events = seen(channel)
    assert ("create", "new/er/f", None) in events and ("create", "old/deep/f", None) in events and ("rename", "old", "renamed") in events


def test_an_upload_is_seen_as_create_and_write_and_its_temporary_name_is_not(host):
    channel = watch(host)
    write(host, "f", b"1")
    write(host, "f", BIG)
    write(host, "last", b"")
    host.until(lambda: ("create", "last", None) in seen(channel))
    events = seen(channel)
    assert events[0] == ("create", "f", None) and events.count(("write", "f", None)) == 2
    assert not any(".ringfence" in path for _, path, _ in events)


def test_a_watch_of_what_cannot_be_watched_is_refused(host):
    write(host, "f", b"")
    assert watch(host, "none").result["error"]["code"] == "not_found"
    assert watch(host, "f").result["error"]["code"] == "not_a_directory"


def test_a_killed_watcher_is_said(host):
    channel = watch(host)
    host.shell("kill -9 -1")
    assert host.wait(channel)["error"]["code"] == "worker_died"


def test_a_write_announced_as_small_waits_for_its_end_and_one_that_is_not_small_goes_on(host):
    for size in (0, 5, 60 << 10, 200_000):
        channel = host.open("file.write", path="f", small=True)
        host.call("file.stat", path="~")  # the agent has seen the request, and no end
        host.send(channel, BIG[:size], FILE)
        host.call("file.stat", path="~")
        host.mux.send_eof(channel.number, FILE)
        host.wait(channel)
        assert channel.result["ok"] and channel.result["size"] == size
        assert read(host, "f").text(FILE) == BIG[:size]
    assert names(host) == ["/mnt/home/f"]
