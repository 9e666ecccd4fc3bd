"""The laws of transfers: whole directories both ways, hostile trees, and a gibibyte in constant memory.

Guards the host's files against what comes out of a sandbox, and its memory against how large it is.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from leftovers import run_owner

from ringfence import FileConflictError, LimitExceededError, NotFoundError, RingfenceError


@pytest.fixture
def place(sandbox, request):
    path = f"/home/user/t{abs(hash(request.node.nodeid))}"
    sandbox.files.make_dir(path)
    yield path
    sandbox.files.remove(path, missing_ok=True)


def tree_of(root):
    """Everything below a local directory: relative path -> content, link text or None."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in names + files:
            path = os.path.join(directory, name)
            key = os.path.relpath(path, root)
            if os.path.islink(path):
                found[key] = "-> " + os.readlink(path)
            elif os.path.isdir(path):
                found[key] = None
            else:
                found[key] = Path(path).read_bytes()
    return found


def test_a_file_goes_up_and_comes_down(sandbox, place, tmp_path):
    (tmp_path / "up").write_bytes(data := os.urandom(3_000_000))
    assert sandbox.files.upload(tmp_path / "up", f"{place}/f").size == len(data)
    assert sandbox.files.download(f"{place}/f", tmp_path / "down") == len(data)
    assert (tmp_path / "down").read_bytes() == data
    with pytest.raises(FileConflictError):
        sandbox.files.download(f"{place}/f", tmp_path / "down", overwrite=False)


def test_a_failed_download_leaves_nothing(sandbox, place, tmp_path):
    with pytest.raises(NotFoundError):
        sandbox.files.download(f"{place}/missing", tmp_path / "down")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_goes_up_and_comes_down_the_same(sandbox, place, tmp_path):
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    for number in range(40):
        (source / "sub" / f"f{number}").write_bytes(b"%d" % number * number)
    (source / os.fsdecode(b"na\nme\xff")).write_text("odd")
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/f1")
    report = sandbox.files.upload_dir(source, f"{place}/tree")
    assert (report.files, report.symlinks, report.skipped) == (42, 1, [])
    assert sandbox.commands.run([f"{place}/tree/run.sh"]).stdout == "ran\n"
    report = sandbox.files.download_dir(f"{place}/tree", tmp_path / "back")
    assert report.files == 42 and report.skipped == []
    assert tree_of(tmp_path / "back") == tree_of(source)
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o111


def test_an_upload_leaves_out_links_that_leave_and_special_files(sandbox, place, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "secret").symlink_to("/etc/hostname")
    (source / "up").symlink_to("../other")
    os.mkfifo(source / "fifo")
    (source / "good").write_text("x")
    report = sandbox.files.upload_dir(source, place)
    assert report.files == 1 and {entry.path for entry in report.skipped} == {"secret", "up", "fifo"}
    assert [entry.name for entry in sandbox.files.list(place)] == ["good"]


def test_a_download_makes_nothing_outside_and_nothing_special(sandbox, place, tmp_path):
    sandbox.commands.run(
        "mkdir d; echo ok > d/f; ln -s /etc/passwd absolute; ln -s ../../../../../etc up; ln -s d/../../.. sly; "
        "ln -s d inside; ln -s ../d/f d/back; mkfifo fifo; ln -s fifo tofifo; "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'; ln -s loop loop", cwd=place, check=True,
    )  # fmt: skip
    report = sandbox.files.download_dir(place, tmp_path / "out")
    found = tree_of(tmp_path / "out")
    assert found["d/f"] == b"ok\n" and found["inside"] == "-> d" and found["d/back"] == "-> ../d/f"
    skipped = {entry.path for entry in report.skipped}
    assert skipped >= {"absolute", "up", "sly", "fifo", "socket"}
    for directory, names, files in os.walk(tmp_path / "out"):
        for name in names + files:
            path = os.path.join(directory, name)
            kind = os.lstat(path).st_mode
            assert stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)
            assert os.path.realpath(path).startswith(str(tmp_path / "out"))
            assert not kind & (stat.S_ISUID | stat.S_ISGID)
    assert os.listdir(tmp_path) == ["out"]


def test_a_download_does_not_write_through_links_that_are_there(sandbox, place, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f").symlink_to(outside)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "d").symlink_to(tmp_path / "elsewhere")
    sandbox.commands.run("mkdir d; echo evil > f; echo evil > d/g", cwd=place, check=True)
    sandbox.files.download_dir(place, tmp_path / "out", overwrite=True)
    assert outside.read_text() == "untouched" and list((tmp_path / "elsewhere").iterdir()) == []


def test_files_that_are_there_stay_unless_overwritten(sandbox, place, tmp_path):
    sandbox.files.write(f"{place}/f", "new")
    (tmp_path / "f").write_text("old")
    report = sandbox.files.download_dir(place, tmp_path)
    assert (tmp_path / "f").read_text() == "old" and [entry.path for entry in report.skipped] == ["f"]
    sandbox.files.download_dir(place, tmp_path, overwrite=True)
    assert (tmp_path / "f").read_text() == "new"


@pytest.mark.parametrize(
    ("bound", "make"),
    [
        ({"max_bytes": 100_000}, "head -c 100001 /dev/zero > f"),
        ({"max_entries": 20}, "touch f{1..30}"),
        ({"max_depth": 4}, "mkdir -p a/b/c/d/e/f/g; touch a/b/c/d/e/f/g/h"),
    ],
    ids=["bytes", "entries", "depth"],
)  # fmt: skip
def test_a_download_is_bounded(sandbox, place, tmp_path, bound, make):
    sandbox.commands.run(make, cwd=place, check=True)
    with pytest.raises(LimitExceededError):
        sandbox.files.download_dir(place, tmp_path / "out", **bound)


def test_a_tree_that_changes_while_it_is_downloaded_does_no_harm(sandbox, place, tmp_path):
    sandbox.commands.run("mkdir d; for i in {1..50}; do echo $i > d/f$i; done", cwd=place, check=True)
    churn = sandbox.commands.run(
        "while :; do mv d e; ln -s /etc d; rm d; mv e d; rm -f d/f7; echo 7 > d/f7; done", cwd=place, background=True
    )
    for number in range(5):
        try:
            sandbox.files.download_dir(place, tmp_path / str(number))
        except (RingfenceError, OSError):
            pass  # something vanished under it; what counts is where it wrote
    churn.kill()
    for directory, names, files in os.walk(tmp_path):
        for name in names + files:
            assert os.path.realpath(os.path.join(directory, name)).startswith(str(tmp_path))


def test_a_gibibyte_goes_up_and_comes_down_in_constant_memory(tmp_path):
    """In a process of its own, so that its peak of memory is its own."""
    told = json.loads(run_owner(f"""
import resource
from pathlib import Path
source = Path({str(tmp_path)!r}) / "sparse"
with open(source, "wb") as file:
    file.truncate(1 << 30)
sandbox = Sandbox("plain", disk="1100MiB", file_size="1025MiB", limits={{"timeout": 120}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
written = sandbox.files.upload(source, "big")
received = 0
with sandbox.files.read("big", "stream") as stream:
    for piece in stream:
        received += len(piece)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
inside = int(sandbox.commands.run("stat -c %s big").stdout)
sandbox.kill()
print(json.dumps([written.size, received, inside, grown << 10]))
""", seconds=120))  # fmt: skip
    written, received, inside, grown = told
    assert written == received == inside == 1 << 30
    assert grown < 64 << 20


def test_a_download_of_a_tree_deeper_than_a_path_is_complete_or_says_what_is_missing(sandbox, place, tmp_path):
    from test_file_laws import _deep

    _deep(sandbox, place)
    report = sandbox.files.download_dir(place, tmp_path / "all", max_depth=100)
    assert (report.directories, report.files, report.skipped) == (60, 1, [])
    sandbox.commands.run("mkdir -p a/b c; touch a/b/f c/g; chmod 0 a/b; chmod 444 c", cwd=place)
    report = sandbox.files.download_dir(place, tmp_path / "some", max_depth=100)
    sandbox.commands.run("chmod 755 a/b c", cwd=place)
    assert {entry.path for entry in report.skipped} == {"a/b", "c/g"}
    assert all("ermission denied" in entry.reason for entry in report.skipped), report.skipped
