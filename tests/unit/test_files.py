"""Files on the host's side: complete and checked, or an error; and nothing local is touched by a hostile tree."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_guest import Conversation, FakeHandle

from ringfence.engines.base import Limits
from ringfence.errors import (
    FileConflictError,
    FileOperationError,
    GuestError,
    InvalidArgumentError,
    LimitExceededError,
    NotEnoughSpaceError,
    NotFoundError,
    PermissionDeniedError,
    SandboxDeadError,
    TimeoutExceededError,
    TransferError,
)
from ringfence.guest import protocol
from ringfence.guest.files import INLINE
from ringfence.stream.exchange import Session
from ringfence.stream.files import SMALL, FileOperations
from ringfence.stream.results import FilesystemEventType, FileType, TransferReport
from ringfence.stream.transfers import Transfers
from ringfence.stream.trees import TreeWriter, link_stays_inside, walk_tree
from ringfence.stream.waiting import run_sync

FILE = protocol.FILE


def entry_of(path: str, kind: str = "file", **fields: Any) -> dict[str, Any]:
    return {"path": path, "name": path.rsplit("/", 1)[-1], "type": kind, "size": 0, "mode": 0o644, **fields}


class Tree:
    """A guest's file system in a dict: path to bytes (file), None (directory), str (link) or an entry (raw)."""

    def __init__(self, nodes: dict[str, Any] | None = None) -> None:
        self.nodes: dict[str, Any] = nodes or {}

    def entry(self, path: str) -> dict[str, Any]:
        node = self.nodes[path]
        if isinstance(node, dict):
            return node
        if node is None:
            return entry_of(path, "dir")
        if isinstance(node, str):
            return entry_of(path, "symlink", target=node)
        return entry_of(path, "file", size=len(node))

    def operations(self) -> dict[str, Any]:
        return {
            "file.list": self.list,
            "file.read": self.read,
            "file.write": self.write,
            "file.mkdir": self.mkdir,
            "file.symlink": self.symlink,
            "file.stat": self.stat,
        }

    def list(self, conversation: Conversation, request: dict[str, Any]) -> None:
        top = request["path"].rstrip("/") + "/"
        below = [path for path in self.nodes if path.startswith(top) and "/" not in path[len(top) :]]
        conversation.close(entries=[self.entry(path) for path in below])

    def read(self, conversation: Conversation, request: dict[str, Any]) -> None:
        data = self.nodes.get(request["path"])
        if not isinstance(data, bytes):
            conversation.fail("not_found", "no such file")
            return
        conversation.event(entry=entry_of(request["path"]))
        if conversation.data(FILE, data):
            conversation.close(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def write(self, conversation: Conversation, request: dict[str, Any]) -> None:
        data = conversation.body(FILE)
        self.nodes[request["path"]] = data
        conversation.close(
            entry=entry_of(request["path"]), size=len(data), sha256=hashlib.sha256(data).hexdigest()
        )

    def mkdir(self, conversation: Conversation, request: dict[str, Any]) -> None:
        created = request["path"] not in self.nodes
        self.nodes[request["path"]] = None
        conversation.close(entry=entry_of(request["path"], "dir"), created=created)

    def symlink(self, conversation: Conversation, request: dict[str, Any]) -> None:
        self.nodes[request["path"]] = request["target"]
        conversation.close(entry=self.entry(request["path"]))

    def stat(self, conversation: Conversation, request: dict[str, Any]) -> None:
        if request["path"] in self.nodes:
            conversation.close(entry=self.entry(request["path"]))
        else:
            conversation.fail("not_found", "no such file")


class Bench:
    def __init__(self, operations: dict[str, Any], limits: Limits | None = None) -> None:
        self.handle = FakeHandle(operations, limits)
        self.files = FileOperations(Session(self.handle))  # type: ignore[arg-type]
        self.transfers = Transfers(self.files)


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(*arguments: Any, **keywords: Any) -> Bench:
        made.append(Bench(*arguments, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.handle.die("killed")


@pytest.fixture
def tree(bench: Any) -> Any:
    tree = Tree()
    made = bench(tree.operations())
    return tree, made


def test_what_is_written_comes_back_from_every_kind_of_source(tree: Any, tmp_path: Path) -> None:
    nodes, made = tree
    (tmp_path / "f").write_bytes(b"disk")
    big = os.urandom(3 << 20)
    sources: list[tuple[Any, bytes]] = [
        ("té\udcff", "té".encode() + b"\xff"),
        (b"bytes", b"bytes"),
        (bytearray(b"array"), b"array"),
        (memoryview(b"view"), b"view"),
        (io.BytesIO(big), big),
        (io.StringIO("text"), b"text"),
        ((piece for piece in (b"a", "b", b"", bytearray(b"c"))), b"abc"),
        (big, big),
        (b"", b""),
    ]
    for data, wanted in sources:
        info = run_sync(made.files.write("/f", data))
        assert nodes.nodes["/f"] == wanted
        assert (info.size, info.sha256) == (len(wanted), hashlib.sha256(wanted).hexdigest())
        assert run_sync(made.files.read("/f")) == wanted


def test_a_write_that_arrived_differently_is_an_error(bench: Any) -> None:
    def write(conversation: Conversation, request: dict[str, Any]) -> None:
        data = conversation.body(FILE)
        conversation.close(entry=entry_of("/f"), **lies(data))

    for lies in (
        lambda data: {"size": len(data) + 1, "sha256": hashlib.sha256(data).hexdigest()},
        lambda data: {"size": len(data), "sha256": hashlib.sha256(data + b"x").hexdigest()},
        lambda data: {},
    ):
        with pytest.raises(TransferError):
            run_sync(bench({"file.write": write}).files.write("/f", b"data"))


def test_a_read_that_arrived_differently_is_an_error(bench: Any) -> None:
    def read(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(FILE, b"data")
        conversation.close(size=4, sha256=hashlib.sha256(b"date").hexdigest())

    with pytest.raises(TransferError):
        run_sync(bench({"file.read": read}).files.read("/f"))


def test_an_endless_file_does_not_fill_the_hosts_memory(bench: Any) -> None:
    def read(conversation: Conversation, request: dict[str, Any]) -> None:
        while conversation.data(FILE, b"x" * (1 << 18), timeout=1):
            pass
        conversation.close(size=0, sha256="")

    with pytest.raises(LimitExceededError):
        run_sync(bench({"file.read": read}).files.read("/f", limit=1 << 20))


def test_a_reader_that_stops_lets_the_guest_send_no_more_than_the_window(bench: Any) -> None:
    sent = 0

    def read(conversation: Conversation, request: dict[str, Any]) -> None:
        nonlocal sent
        while conversation.data(FILE, b"x" * (1 << 16), timeout=0.3):
            sent += 1 << 16
        conversation.close(size=0, sha256="")

    made = bench({"file.read": read})
    stream = made.files.open_read("/f", collect=False)
    run_sync(stream.next_piece())
    threading.Event().wait(0.2)
    stream.close()
    assert sent <= (1 << 20) + (1 << 18) + (1 << 16)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("not_found", NotFoundError),
        ("permission", PermissionDeniedError),
        ("exists", FileConflictError),
        ("no_space", NotEnoughSpaceError),
        ("is_a_directory", FileOperationError),
        ("limit", LimitExceededError),
        ("invalid", InvalidArgumentError),
        ("worker_died", GuestError),
        ("nonsense", GuestError),
    ],
)
def test_every_refusal_has_its_error(bench: Any, code: str, kind: type[Exception]) -> None:
    made = bench({"file.stat": lambda c, r: c.fail(code, "why \ud800")})
    with pytest.raises(kind) as caught:
        run_sync(made.files.info("/f"))
    assert str(caught.value).encode()


def test_a_guest_that_refuses_early_ends_a_large_write(bench: Any) -> None:
    made = bench({"file.write": lambda c, r: c.fail("no_space", "full")})
    with pytest.raises(NotEnoughSpaceError):
        run_sync(made.files.write("/f", (b"x" * (1 << 18) for _ in range(64))))


def test_the_end_of_the_sandbox_ends_a_write(bench: Any) -> None:
    made = bench({"file.write": lambda c, r: made.handle.die("killed")})
    with pytest.raises(SandboxDeadError):
        run_sync(made.files.write("/f", (b"x" * (1 << 18) for _ in range(64))))


@pytest.mark.parametrize(
    "reply", [{}, {"entry": 5}, {"entry": {"type": "file", "name": 5}}, {"entry": {"type": 1}}]
)
def test_malformed_entries_are_the_guests_fault(bench: Any, reply: dict[str, Any]) -> None:
    with pytest.raises(GuestError):
        run_sync(bench({"file.stat": lambda c, r: c.close(**reply)}).files.info("/f"))


def test_a_long_listing_comes_as_lines(bench: Any) -> None:
    import json

    def listing(conversation: Conversation, request: dict[str, Any]) -> None:
        lines = b"".join(json.dumps(entry_of(f"/d/{number}")).encode() + b"\n" for number in range(5000))
        conversation.data(FILE, lines)
        conversation.close(count=5000)

    assert len(run_sync(bench({"file.list": listing}).files.list("/d"))) == 5000


def test_arguments_are_judged_before_anything_is_sent(tree: Any) -> None:
    _, made = tree
    for call in (
        lambda: made.files.read(""),
        lambda: made.files.read("a\0b"),
        lambda: made.files.read(5),
        lambda: made.files.write("/f", 5),
        lambda: made.files.write("/f", {"a": 1}),
        lambda: made.files.write("/f", b"", mode=0o4755),
        lambda: made.files.write("/f", b"", metadata={"a b": "c"}),
        lambda: made.files.list("/", depth=0),
        lambda: made.files.write_files("abc"),
        lambda: made.files.write_files([{"path": "/a"}]),
        lambda: made.files.write_files([{"path": "/a", "data": b"", "other": 1}]),
        lambda: made.files.chmod("/f", 0o2755),
    ):
        with pytest.raises(InvalidArgumentError):
            run_sync(call())
    assert made.handle.guest.requests == []


def test_a_batch_writes_all_and_keeps_the_order(tree: Any) -> None:
    nodes, made = tree
    entries = [{"path": f"/{number}", "data": str(number) * 1000} for number in range(40)]
    infos = run_sync(made.files.write_files(entries))
    assert [info.path for info in infos] == [entry["path"] for entry in entries]
    assert nodes.nodes["/39"] == b"39" * 1000


def test_names_of_any_bytes_pass_through(tree: Any) -> None:
    nodes, made = tree
    for name in (b"/\xff\xfe", b"/line\nbreak", b"/" + b"n" * 255, "/ü".encode()):
        run_sync(made.files.write(name, b"x"))
        assert os.fsdecode(name) in nodes.nodes


def test_watching_starts_before_the_call_returns_and_gives_typed_events(bench: Any) -> None:
    def watch(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.event(started=True)
        conversation.event(type="create", path="a")
        conversation.event(type="rename", path="a", target="b")
        conversation.event(type="nonsense", path="a")
        conversation.event(type="overflow", path="")
        while conversation.take().kind != protocol.CLOSE:
            pass
        conversation.close()

    made = bench({"file.watch": watch})
    handle = run_sync(made.files.watch("/d", True))
    events = [run_sync(handle.next_event(5)) for _ in range(3)]
    assert [(event.type, event.name, event.target) for event in events] == [
        (FilesystemEventType.CREATE, "a", None),
        (FilesystemEventType.RENAME, "a", "b"),
        (FilesystemEventType.OVERFLOW, "", None),
    ]
    run_sync(handle.stop())
    assert run_sync(handle.next_event()) is None
    assert made.handle.operations == 0


def test_a_watch_that_cannot_start_is_an_error(bench: Any) -> None:
    with pytest.raises(NotFoundError):
        run_sync(bench({"file.watch": lambda c, r: c.fail("not_found", "no")}).files.watch("/d"))


# -- local trees


@pytest.mark.parametrize(
    ("depth", "target", "inside"),
    [
        (0, "a", True),
        (0, "a/b", True),
        (0, "./a", True),
        (1, "../a", True),
        (2, "../../a", True),
        (0, "..", False),
        (0, "../a", False),
        (1, "../../a", False),
        (0, "/etc/passwd", False),
        (0, "a/../b", False),
        (2, "a/../../../..", False),
        (0, "", False),
        (0, "a\0b", False),
    ],
)
def test_links_are_judged_without_following_them(depth: int, target: str, inside: bool) -> None:
    assert link_stays_inside(depth, target) is inside


HOSTILE = {
    "/r/good.txt": b"good",
    "/r/sub": None,
    "/r/sub/deep.txt": b"deep",
    "/r/link": "sub/deep.txt",
    "/r/up": "../outside",
    "/r/abs": "/etc/passwd",
    "/r/tricky": "sub/../../outside",
    "/r/fifo": entry_of("/r/fifo", "fifo"),
    "/r/device": entry_of("/r/device", "device"),
    "/r/setuid": b"#!/bin/sh",
    "/r/x1": {**entry_of("/r/../escape"), "name": "../escape"},
    "/r/x2": {**entry_of("/r/x2"), "name": ".."},
    "/r/x3": {**entry_of("/r/x3"), "name": "/etc/cron.d/evil"},
    "/r/x4": {**entry_of("/r/x4", "dir"), "name": "a/b"},
    "/r/x5": {**entry_of("/r/x5"), "name": "n" * 256},
    "/r/x6": {**entry_of("/r/x6"), "name": ""},
    "/r/x7": {**entry_of("/r/x7"), "name": "nul\0"},
}


def test_a_hostile_directory_lands_below_its_destination_only(bench: Any, tmp_path: Path) -> None:
    made = bench(Tree(dict(HOSTILE)).operations())
    destination = tmp_path / "inner" / "out"
    report = run_sync(made.transfers.download_dir("/r", destination))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "inner",
        "inner/out",
        "inner/out/good.txt",
        "inner/out/link",
        "inner/out/setuid",
        "inner/out/sub",
        "inner/out/sub/deep.txt",
    ]
    assert (destination / "link").read_bytes() == b"deep"
    skipped = {entry.path for entry in report.skipped}
    assert {"up", "abs", "tricky", "fifo", "device", "../escape", "..", "a/b"} <= skipped
    assert (report.files, report.directories, report.symlinks) == (3, 1, 1)


def test_set_id_and_write_bits_for_others_never_come_out(bench: Any, tmp_path: Path) -> None:
    tree = Tree({"/r/s": b"x"})
    tree.entry = lambda path: entry_of(path, size=1, mode=0o6777)  # type: ignore[method-assign]
    run_sync(bench(tree.operations()).transfers.download_dir("/r", tmp_path / "o"))
    assert stat.S_IMODE((tmp_path / "o" / "s").stat().st_mode) & ~0o755 == 0


def test_links_that_wait_at_the_destination_are_not_followed(bench: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"mine")
    destination = tmp_path / "out"
    destination.mkdir()
    (destination / "sub").symlink_to(outside)
    (destination / "good.txt").symlink_to(outside / "victim")
    nodes = {"/r/sub": None, "/r/sub/victim": b"evil", "/r/good.txt": b"evil"}
    for overwrite in (False, True):
        report = run_sync(
            bench(Tree(dict(nodes)).operations()).transfers.download_dir("/r", destination, overwrite)
        )
        assert (outside / "victim").read_bytes() == b"mine"
        assert "sub" in {entry.path for entry in report.skipped}
    assert not (destination / "good.txt").is_symlink()
    assert (destination / "good.txt").read_bytes() == b"evil"


def test_a_tree_without_end_stops_at_the_bounds(bench: Any, tmp_path: Path) -> None:
    def endless(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.close(entries=[entry_of(request["path"] + "/d", "dir")])

    with pytest.raises(LimitExceededError) as caught:
        run_sync(bench({"file.list": endless}).transfers.download_dir("/r", tmp_path / "a", max_depth=5))
    assert caught.value.limit == "max_depth"
    nodes = {f"/r/{number}": b"x" * 1000 for number in range(20)}
    with pytest.raises(LimitExceededError):
        run_sync(bench(Tree(nodes).operations()).transfers.download_dir("/r", tmp_path / "b", max_entries=10))
    with pytest.raises(LimitExceededError):
        run_sync(bench(Tree(nodes).operations()).transfers.download_dir("/r", tmp_path / "c", max_bytes=5000))
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) <= 5000


def test_a_failed_download_leaves_nothing_behind(bench: Any, tmp_path: Path) -> None:
    def read(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.data(FILE, b"half")
        conversation.close(size=9, sha256="")

    (tmp_path / "kept").write_bytes(b"old")
    made = bench({"file.read": read})
    with pytest.raises(TransferError):
        run_sync(made.transfers.download("/f", tmp_path / "kept"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"


def test_a_download_replaces_only_when_it_may(tree: Any, tmp_path: Path) -> None:
    nodes, made = tree
    nodes.nodes["/f"] = b"new"
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileConflictError):
        run_sync(made.transfers.download("/f", tmp_path / "f", overwrite=False))
    assert (tmp_path / "f").read_bytes() == b"old"
    assert run_sync(made.transfers.download("/f", tmp_path / "f")) == 3
    assert (tmp_path / "f").read_bytes() == b"new"
    with pytest.raises(InvalidArgumentError):
        run_sync(made.transfers.download("/f", tmp_path))


def test_an_upload_takes_regular_files_only_and_never_blocks(tree: Any, tmp_path: Path) -> None:
    nodes, made = tree
    (tmp_path / "f").write_bytes(b"x" * 1_000_000)
    os.mkfifo(tmp_path / "fifo")
    run_sync(made.transfers.upload(tmp_path / "f", "/f"))
    assert len(nodes.nodes["/f"]) == 1_000_000
    for special in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(InvalidArgumentError):
            run_sync(made.transfers.upload(special, "/g"))
    with pytest.raises(FileNotFoundError):
        run_sync(made.transfers.upload(tmp_path / "none", "/g"))


def test_an_uploaded_directory_leaves_out_what_cannot_or_must_not_be_sent(tree: Any, tmp_path: Path) -> None:
    nodes, made = tree
    source = tmp_path / "s"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_bytes(b"A")
    (source / "sub" / "b").write_bytes(b"B")
    (source / "sub" / "in").symlink_to("../a")
    (source / "out").symlink_to("/etc/passwd")
    os.mkfifo(source / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(source / "sock"))
    report = run_sync(made.transfers.upload_dir(source, "/d/"))
    listener.close()
    assert nodes.nodes == {"/d": None, "/d/sub": None, "/d/a": b"A", "/d/sub/b": b"B", "/d/sub/in": "../a"}
    assert {entry.path: entry.reason for entry in report.skipped} == {
        "out": "a link that points outside",
        "fifo": "a special file",
        "sock": "a special file",
    }
    assert (report.files, report.directories, report.symlinks, report.bytes) == (2, 1, 1, 2)


def test_transfers_leave_no_descriptor_open(tree: Any, tmp_path: Path) -> None:
    _nodes, made = tree
    source = tmp_path / "s"
    (source / "sub").mkdir(parents=True)
    for number in range(40):
        (source / "sub" / str(number)).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    run_sync(made.transfers.upload_dir(source, "/d"))
    run_sync(made.transfers.download_dir("/d", tmp_path / "o"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_walk_reports_a_directory_swapped_for_a_link(tmp_path: Path) -> None:
    (tmp_path / "s" / "sub").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"k")
    report = TransferReport()
    walk = walk_tree(str(tmp_path / "s"), report)
    (tmp_path / "s" / "sub").rmdir()
    first = list(walk)
    (tmp_path / "s" / "sub").symlink_to(tmp_path / "secret")
    entries = list(walk_tree(str(tmp_path / "s"), report))
    assert first == []
    assert entries == []
    assert report.skipped[-1].reason == "a link that points outside"


def test_the_writer_refuses_to_step_through_links(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "l").symlink_to(tmp_path / "d")
    with TreeWriter(str(tmp_path / "o")) as writer, pytest.raises(OSError):
        writer.open_directory(("l",))


def test_file_types_cover_what_the_guest_may_say() -> None:
    assert {kind.value for kind in FileType} == {"file", "dir", "symlink", "fifo", "socket", "device"}


def test_every_call_ends_with_its_timeout(bench: Any, tmp_path: Path) -> None:
    def silent(conversation: Conversation, request: dict[str, Any]) -> None:
        while not conversation.guest.mux.is_cancelled(conversation.channel):
            time.sleep(0.01)
        conversation.fail("invalid", "cancelled by the host")

    names = (
        "stat",
        "list",
        "mkdir",
        "move",
        "remove",
        "chmod",
        "symlink",
        "metadata",
        "watch",
        "read",
        "write",
    )
    made = bench({f"file.{name}": silent for name in names})
    (tmp_path / "f").write_text("x")
    files, transfers = made.files, made.transfers
    for call in (
        lambda: files.info("/x", timeout=0.1),
        lambda: files.exists("/x", timeout=0.1),
        lambda: files.list("/x", timeout=0.1),
        lambda: files.make_dir("/x", timeout=0.1),
        lambda: files.rename("/x", "/y", timeout=0.1),
        lambda: files.remove("/x", timeout=0.1),
        lambda: files.chmod("/x", 0o600, timeout=0.1),
        lambda: files.symlink("/x", "/y", timeout=0.1),
        lambda: files.metadata("/x", timeout=0.1),
        lambda: files.watch("/x", timeout=0.1),
        lambda: files.read("/x", timeout=0.1),
        lambda: files.write("/x", b"x", timeout=0.1),
        lambda: files.write_files([{"path": "/x", "data": b"x"}], timeout=0.1),
        lambda: transfers.upload(tmp_path / "f", "/x", timeout=0.1),
        lambda: transfers.download("/x", tmp_path / "g", timeout=0.1),
        lambda: transfers.upload_dir(tmp_path, "/x", timeout=0.1),
        lambda: transfers.download_dir("/x", tmp_path / "d", timeout=0.1),
    ):
        with pytest.raises(
            TimeoutExceededError, match=r"of '/[xy].*' took longer than 0\.1 s \(hint: pass a larger timeout"
        ):
            run_sync(call())
    for call in (
        lambda: files.read("/x", no_progress=0.1),
        lambda: files.write("/x", b"x", no_progress=0.1),
        lambda: transfers.download_dir("/x", tmp_path / "d", no_progress=0.1),
    ):
        with pytest.raises(TimeoutExceededError, match=r"made no progress for 0\.1 s .*no_progress_timeout"):
            run_sync(call())
    with pytest.raises(InvalidArgumentError):
        run_sync(files.info("/x", timeout=-1))


def test_a_file_that_trickles_in_ends_with_the_timeout_in_all(bench: Any) -> None:
    def trickle(conversation: Conversation, request: dict[str, Any]) -> None:
        conversation.event(entry=entry_of("/x"))
        while conversation.data(FILE, b"x", 1.0):
            time.sleep(0.02)
        conversation.close()

    begun = time.monotonic()
    with pytest.raises(TimeoutExceededError, match="took longer"):
        run_sync(bench({"file.read": trickle}).files.read("/x", timeout=0.3))
    assert time.monotonic() - begun < 3


def test_small_files_are_announced_and_arrive_whole(tree: Any, tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    sizes = (0, 1, 48 * 1024, 48 * 1024 + 1, 300_000)
    for size in sizes:
        (source / str(size)).write_bytes(os.urandom(size))
    nodes, made = tree
    assert run_sync(made.transfers.upload_dir(source, "/r")).files == len(sizes)
    for size in sizes:
        assert nodes.nodes[f"/r/{size}"] == (source / str(size)).read_bytes()
    small = {
        request["path"]: request.get("small")
        for request in made.handle.guest.requests
        if request["op"] == "file.write"
    }
    assert small == {f"/r/{size}": True if size <= 48 * 1024 else None for size in sizes}


def test_what_is_announced_as_small_fits_into_one_message() -> None:
    assert SMALL <= INLINE, "else what is announced as small would not fit"
