"""The laws of files: what is written is there exactly, every legal name works, and rights are the user's.

Guards the section "Files" of the specification (single files, names, watches) on the real engine.
"""

from __future__ import annotations

import hashlib
import io
import os
import time

import pytest

from ringfence import (
    FileConflictError,
    FilesystemEventType,
    FileType,
    LimitExceededError,
    NotFoundError,
    PermissionDeniedError,
    RingfenceError,
    SandboxError,
)


@pytest.fixture
def place(sandbox, request):
    """A fresh directory inside."""
    path = f"/home/user/t{abs(hash(request.node.nodeid))}"
    sandbox.files.make_dir(path)
    yield path
    if sandbox.is_running():
        sandbox.files.remove(path, missing_ok=True)


# -- contents


@pytest.mark.parametrize("data", [b"", b"\x00\xff\n\r\n", bytes(range(256)) * 5000, os.urandom(3_000_001)], ids=len)
def test_bytes_come_back_as_they_were_written(sandbox, place, data):
    info = sandbox.files.write(f"{place}/data", data)
    assert (info.size, info.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert sandbox.files.read(f"{place}/data", "bytes") == data


def test_text_comes_back_as_it_was_written(sandbox, place):
    sandbox.files.write(f"{place}/text", "zwölf €\n\r\n")
    assert sandbox.files.read(f"{place}/text") == "zwölf €\n\r\n"
    sandbox.files.write(f"{place}/broken", b"a\xffb")
    assert sandbox.files.read(f"{place}/broken") == "a\ufffdb"


def test_files_are_written_from_open_files_and_iterables(sandbox, place):
    for number, data in enumerate((io.BytesIO(b"x" * 600_000), io.StringIO("y"), (b"z" * size for size in (1, 0, 500_000)))):
        sandbox.files.write(f"{place}/{number}", data)
    assert [sandbox.files.get_info(f"{place}/{number}").size for number in range(3)] == [600_000, 1, 500_001]


def test_a_file_is_read_as_a_stream(sandbox, place):
    data = os.urandom(5_000_000)
    sandbox.files.write(f"{place}/big", data)
    with sandbox.files.read(f"{place}/big", "stream") as stream:
        assert b"".join(stream) == data


def test_a_stream_can_be_left_early(sandbox, place):
    sandbox.files.write(f"{place}/big", b"q" * 20_000_000)
    with sandbox.files.read(f"{place}/big", "stream") as stream:
        assert next(stream).startswith(b"q")
    assert sandbox.files.get_info(f"{place}/big").size == 20_000_000


def test_a_read_into_memory_is_bounded(sandbox, place):
    sandbox.files.write(f"{place}/big", b"q" * 100_000)
    with pytest.raises(LimitExceededError):
        sandbox.files.read(f"{place}/big", "bytes", limit=99_999)


def test_a_batch_writes_all_files_in_order(sandbox, place):
    names = [f"{place}/batch/{number % 7}/{number}" for number in range(60)]
    written = sandbox.files.write_files([{"path": name, "data": name * 9} for name in names])
    assert [info.path for info in written] == names
    assert [sandbox.files.read(name) for name in names[::17]] == [name * 9 for name in names[::17]]


def test_a_file_is_replaced_all_at_once_and_appended_to(sandbox, place):
    sandbox.files.write(f"{place}/f", "first", mode=0o600)
    sandbox.files.write(f"{place}/f", "second")
    sandbox.files.write(f"{place}/f", "+", append=True)
    assert sandbox.files.read(f"{place}/f") == "second+"
    assert [entry.name for entry in sandbox.files.list(place)] == ["f"]


def test_a_failed_write_leaves_the_old_file(sandbox, place):
    sandbox.files.write(f"{place}/f", "old")

    def broken():
        yield b"new"
        raise RuntimeError("source failed")

    with pytest.raises(RuntimeError, match="source failed"):
        sandbox.files.write(f"{place}/f", broken())
    assert sandbox.files.read(f"{place}/f") == "old"
    deadline = time.monotonic() + 10
    while [entry.name for entry in sandbox.files.list(place)] != ["f"]:
        assert time.monotonic() < deadline, "a temporary file stayed"


def test_writing_through_a_link_keeps_the_link(sandbox, place):
    sandbox.files.write(f"{place}/real", "1")
    sandbox.files.symlink("real", f"{place}/link")
    sandbox.files.write(f"{place}/link", "2")
    assert sandbox.files.read(f"{place}/link") == "2"


# -- entries


def test_an_entry_tells_what_it_is(sandbox, place):
    sandbox.files.write(f"{place}/f", "12345", mode=0o640)
    info = sandbox.files.get_info(f"{place}/f")
    assert (info.name, info.path, info.type, info.size, info.mode) == ("f", f"{place}/f", FileType.FILE, 5, 0o640)
    assert (info.permissions, info.owner, info.group, info.uid) == ("-rw-r-----", "user", "user", 1000)
    assert abs(info.modified_time.timestamp() - time.time()) < 3600


def test_every_kind_of_entry_is_told_apart(sandbox, place):
    sandbox.commands.run(
        "mkdir d; mkfifo p; ln -s d l; touch f; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'", cwd=place, check=True
    )
    kinds = {entry.name: entry.type.value for entry in sandbox.files.list(place)}
    assert kinds == {"d": "dir", "p": "fifo", "l": "symlink", "f": "file", "s": "socket"}
    assert sandbox.files.get_info("/dev/null").type is FileType.DEVICE
    assert sandbox.files.get_info(f"{place}/l").symlink_target == "d"


@pytest.mark.parametrize("kind", ["p", "d", "s"])
def test_reading_what_is_no_file_fails_at_once(sandbox, place, kind):
    sandbox.commands.run(
        "mkdir d; mkfifo p; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'", cwd=place, check=True
    )
    with pytest.raises(RingfenceError) as caught:
        sandbox.files.read(f"{place}/{kind}")
    assert not isinstance(caught.value, TimeoutError)


def test_a_listing_goes_as_deep_as_asked_and_follows_no_link(sandbox, place):
    sandbox.commands.run("mkdir -p a/b/c; touch a/b/c/f; ln -s / a/root", cwd=place, check=True)
    assert [entry.name for entry in sandbox.files.list(place)] == ["a"]
    assert {entry.name for entry in sandbox.files.list(place, depth=2)} == {"a", "b", "root"}
    assert {entry.path for entry in sandbox.files.list(place, depth=9)} == {
        f"{place}/{name}" for name in ("a", "a/b", "a/root", "a/b/c", "a/b/c/f")
    }


def test_a_listing_of_many_entries_is_complete(sandbox, place):
    sandbox.commands.run(["python3", "-c", "for n in range(3000): open(f'entry-with-a-long-name-{n}', 'w')"], cwd=place, check=True)
    assert len(sandbox.files.list(place)) == 3000


def test_exists_is_true_for_a_dangling_link(sandbox, place):
    sandbox.files.symlink("nowhere", f"{place}/dangling")
    assert sandbox.files.exists(f"{place}/dangling") and not sandbox.files.exists(f"{place}/nothing")


def test_moving_replaces_files(sandbox, place):
    sandbox.files.write_files([{"path": f"{place}/a", "data": "a"}, {"path": f"{place}/b", "data": "b"}])
    assert sandbox.files.rename(f"{place}/a", f"{place}/b").path == f"{place}/b"
    assert sandbox.files.read(f"{place}/b") == "a" and not sandbox.files.exists(f"{place}/a")


def test_moving_works_between_file_systems(sandbox, place):
    sandbox.files.write("/tmp/rf-move", "over")
    sandbox.files.rename("/tmp/rf-move", f"{place}/here")
    assert sandbox.files.read(f"{place}/here") == "over" and not sandbox.files.exists("/tmp/rf-move")


def test_removing_takes_trees_and_no_target_of_links(sandbox, place):
    sandbox.commands.run("mkdir -p keep d/e; touch keep/f d/e/g; ln -s ../keep d/link", cwd=place, check=True)
    sandbox.files.remove(f"{place}/d")
    assert {entry.name for entry in sandbox.files.list(place, depth=3)} == {"keep", "f"}
    with pytest.raises(NotFoundError):
        sandbox.files.remove(f"{place}/d")
    sandbox.files.remove(f"{place}/d", missing_ok=True)


def test_making_a_directory_tells_whether_it_was_new(sandbox, place):
    assert sandbox.files.make_dir(f"{place}/x/y") is True
    assert sandbox.files.make_dir(f"{place}/x/y") is False
    sandbox.files.write(f"{place}/f", "")
    with pytest.raises(FileConflictError):
        sandbox.files.make_dir(f"{place}/f")


def test_permission_bits_are_set_and_set_id_bits_refused(sandbox, place):
    sandbox.files.write(f"{place}/f", "")
    assert sandbox.files.chmod(f"{place}/f", 0o751).permissions == "-rwxr-x--x"
    for mode in (0o4755, 0o2755):
        with pytest.raises((SandboxError, ValueError)):
            sandbox.files.chmod(f"{place}/f", mode)
    assert sandbox.files.get_info(f"{place}/f").mode == 0o751


def test_links_say_what_they_were_told(sandbox, place):
    assert sandbox.files.symlink("../a b/€", f"{place}/l").symlink_target == "../a b/€"
    with pytest.raises(FileConflictError):
        sandbox.files.symlink("x", f"{place}/l")


def test_metadata_stays_with_the_file(sandbox, place):
    info = sandbox.files.write(f"{place}/f", "", metadata={"origin": "law ä"})
    assert info.metadata == {"origin": "law ä"}
    assert sandbox.files.set_metadata(f"{place}/f", {"more": "2"}) == {"origin": "law ä", "more": "2"}
    sandbox.files.rename(f"{place}/f", f"{place}/g")
    assert sandbox.files.get_metadata(f"{place}/g") == {"origin": "law ä", "more": "2"}
    assert sandbox.files.get_info(f"{place}/g").metadata == {"origin": "law ä", "more": "2"}


# -- names


_NAMES = {
    "newline": b"a\nb",
    "control characters": bytes(range(1, 32)),
    "not utf-8": b"\xff\xfe\x80",
    "255 bytes": b"n" * 255,
    "255 bytes of utf-8": "ä".encode() * 127 + b"x",
    "spaces": b"  ",
    "dash": b"-rf",
    "quotes": b"'\"`$(reboot)\\",
    "dots": b"...",
    "surrogate look-alike": "\U0001f600\u202e".encode(),
    "every byte": bytes(byte for byte in range(1, 256) if byte != 0x2F)[:254],
}


@pytest.mark.parametrize("name", _NAMES.values(), ids=_NAMES)
def test_any_legal_name_works_everywhere(sandbox, place, name):
    text = os.fsdecode(name)
    path, files = f"{place}/{text}", sandbox.files
    files.write(path, b"content")
    assert files.read(path, "bytes") == b"content" and files.exists(path)
    assert files.read(os.fsencode(place) + b"/" + name, "bytes") == b"content"
    assert [os.fsencode(entry.name) for entry in files.list(place)] == [name]
    files.rename(path, f"{place}/other")
    files.rename(f"{place}/other", path)
    assert files.chmod(path, 0o600).name == text
    assert sandbox.commands.run(["cat", "--", path]).stdout == "content"
    files.remove(path)
    files.make_dir(path)
    files.write(f"{path}/below", "x")
    assert os.fsencode(files.get_info(f"{path}/below").path) == os.fsencode(place) + b"/" + name + b"/below"
    assert sandbox.commands.run(["ls"], cwd=path).stdout == "below\n"


def test_a_name_of_256_bytes_is_an_error_and_not_cut(sandbox, place):
    with pytest.raises((SandboxError, ValueError)):
        sandbox.files.write(f"{place}/{'n' * 256}", "x")
    assert sandbox.files.list(place) == []


def test_a_path_of_a_thousand_directories_and_more_works(sandbox, place):
    path = place + "/d" * 1200
    sandbox.files.write(path + "/f", "deep")
    assert sandbox.files.read(path + "/f") == "deep"


def test_a_nul_byte_in_a_name_is_refused(sandbox, place):
    with pytest.raises(ValueError, match="NUL"):
        sandbox.files.write(f"{place}/a\0b", "x")


def test_relative_paths_and_the_tilde_count_from_the_home_directory(sandbox, place):
    sandbox.files.write("relative-law", "home")
    assert sandbox.files.read("/home/user/relative-law") == sandbox.files.read("~/relative-law") == "home"
    sandbox.files.remove("relative-law")


# -- rights


def test_everything_happens_with_the_rights_of_the_user(sandbox):
    operations = [
        lambda: sandbox.files.write("/usr/law", "x"),
        lambda: sandbox.files.remove("/usr/bin/env"),
        lambda: sandbox.files.make_dir("/opt/env/law"),
    ]
    # With a single id of the host everything inside is the user's; `info()` says so.
    if sandbox.files.get_info("/etc").uid != 1000:
        operations += [lambda: sandbox.files.write("/etc/passwd", "x"), lambda: sandbox.files.chmod("/etc/passwd", 0o777)]
    else:
        assert "one id" in next(row.detail for row in sandbox.info().enforcement if row.primitive == "user ids")
    for operation in operations:
        with pytest.raises(SandboxError) as caught:
            operation()
        assert not isinstance(caught.value, NotFoundError)


def test_a_path_leads_through_links_inside_the_guest_only(sandbox, place):
    """The host has the file that the link names; the sandbox does not."""
    sandbox.files.symlink(os.path.abspath(__file__), f"{place}/out")
    with pytest.raises(NotFoundError):
        sandbox.files.read(f"{place}/out")
    sandbox.files.symlink("/proc/self/root/../../../..", f"{place}/up")
    assert {entry.name for entry in sandbox.files.list(f"{place}/up/home")} == {"user"}


def test_files_of_the_kernel_without_a_size_are_read_whole(sandbox):
    assert sandbox.files.read("/proc/self/status").startswith("Name:")


# -- watches


def _events(watch, wanted, seconds=20):
    """Events until all of `wanted` came."""
    seen = []
    deadline = time.monotonic() + seconds
    while not wanted <= {(event.type.value, event.name) for event in seen}:
        assert time.monotonic() < deadline, f"{wanted} did not come, but {seen}"
        event = watch.next_event(timeout=0.5)
        if event is not None:
            seen.append(event)
    return seen


def test_a_watch_sees_create_write_chmod_rename_and_remove(sandbox, place):
    with sandbox.files.watch_dir(place) as watch:
        sandbox.commands.run("echo 1 > f; chmod 600 f; mv f g; rm g", cwd=place, check=True)
        seen = _events(watch, {("create", "f"), ("write", "f"), ("chmod", "f"), ("rename", "f"), ("remove", "g")})
    renamed = next(event for event in seen if event.type is FilesystemEventType.RENAME)
    assert renamed.target == "g"


def test_a_watch_is_recursive_when_asked_for_and_follows_new_directories(sandbox, place):
    sandbox.files.make_dir(f"{place}/old")
    with sandbox.files.watch_dir(place, recursive=True) as deep, sandbox.files.watch_dir(place) as flat:
        sandbox.commands.run("touch old/f; mkdir -p new/er; touch new/er/g", cwd=place, check=True)
        _events(deep, {("create", "old/f"), ("create", "new"), ("create", "new/er"), ("create", "new/er/g")})
        time.sleep(0.2)
        assert {event.name for event in flat.get_new_events()} == {"new"}


def test_an_upload_is_one_write_to_a_watch(sandbox, place):
    with sandbox.files.watch_dir(place) as watch:
        sandbox.files.write(f"{place}/f", "x" * 1_000_000)
        _events(watch, {("write", "f")})
        time.sleep(0.2)
        assert {event.name for event in watch.get_new_events()} <= {"f"}


def test_a_watch_calls_back(sandbox, place):
    seen = []
    watch = sandbox.files.watch_dir(place, on_event=lambda event: seen.append(event.name))
    sandbox.files.write(f"{place}/called", "")
    deadline = time.monotonic() + 20
    while "called" not in seen:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    watch.stop()


def test_a_missing_directory_cannot_be_watched(sandbox, place):
    with pytest.raises(NotFoundError):
        sandbox.files.watch_dir(f"{place}/missing")


# -- nothing is hidden

DEEP = """
import os
os.chdir({place!r})
for level in range({levels}):
    os.mkdir("d" * {width}); os.chdir("d" * {width})
with open("hidden", "w") as file:
    file.write("payload")
"""


def _deep(sandbox, place, levels=60, width=100):
    made = sandbox.commands.run(["python3", "-c", DEEP.format(place=place, levels=levels, width=width)])
    assert made.ok, made.stderr


def test_a_tree_deeper_than_a_path_is_listed_whole(sandbox, place):
    _deep(sandbox, place)
    entries = sandbox.files.list(place, depth=1000)
    assert len(entries) == 61
    assert entries[-1].path == place + ("/" + "d" * 100) * 60 + "/hidden"
    assert not any(entry.unreadable for entry in entries)
    assert sandbox.files.read(entries[-1].path) == "payload"
    assert sandbox.files.get_info(entries[-1].path).size == 7


def test_entries_longer_than_a_packet_are_listed(sandbox, place):
    _deep(sandbox, place, 250, 250)
    entries = sandbox.files.list(place, depth=1000)
    assert len(entries) == 251 and entries[-1].name == "hidden"


def test_what_a_listing_cannot_read_says_so(sandbox, place):
    made = sandbox.commands.run("mkdir -p a/b c; touch a/b/f c/g; chmod 0 a/b; chmod 444 c", cwd=place)
    assert made.ok
    entries = {entry.name: entry for entry in sandbox.files.list(place, depth=5)}
    sandbox.commands.run("chmod 755 a/b c", cwd=place)
    assert set(entries) == {"a", "b", "c", "g"}
    assert entries["a"].unreadable is None
    assert entries["b"].unreadable == entries["g"].unreadable == "Permission denied"
    assert entries["g"].type.value == "file"


def test_refusals_say_what_concerns_the_caller(sandbox, place):
    with pytest.raises(PermissionDeniedError, match=r"'/usr/x': Read-only file system \(hint: .*choose a path it may write"):
        sandbox.files.write("/usr/x", "")
    sandbox.commands.run("touch shut; chmod 0 shut", cwd=place)
    with pytest.raises(PermissionDeniedError, match="who may not read this"):
        sandbox.files.read(f"{place}/shut")
