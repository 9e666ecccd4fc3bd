"""What a capture means: every difference once, nothing hidden, nothing that a forged mark says beyond it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from made_up import GONE, OTHER, captured, entry

from ringfence.changes.collecting import collect
from ringfence.changes.model import Changes
from ringfence.changes.places import Seen, Tree


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    for name, text in {"a.txt": "one\ntwo\n", "src/main.py": "print(1)\n", "src/lib/x.py": "x = 1\n", "src/lib/y.py": "y = 2\n"}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "link").symlink_to("a.txt")
    for root, directories, files in os.walk(place):
        for each in directories + files:
            path = Path(root, each)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def kinds(changes: Changes) -> dict[str, str]:
    return {change.path: change.kind for change in changes}


def test_each_kind_of_change_is_told_apart(source: Path) -> None:
    changes = captured(source, {
        "a.txt": b"one\n2\n", "new/file": b"new", "src/main.py": GONE, "link": "src/main.py", "src/lib/x.py": b"x = 1\n",
    })  # fmt: skip
    assert kinds(changes) == {"a.txt": "modified", "new": "created", "new/file": "created", "src/main.py": "deleted", "link": "modified"}
    assert changes["a.txt"].diff == "@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    assert changes["a.txt"].before is not None and changes["a.txt"].before.sha256 is not None
    assert changes["src/main.py"].diff == "@@ -1 +0,0 @@\n-print(1)\n"
    assert changes["link"].after is not None and changes["link"].after.target == "src/main.py"
    assert changes.read("new/file") == b"new"
    assert changes.summary() == "2 created, 2 modified, 1 deleted"


def test_what_was_only_touched_or_copied_up_is_no_change(source: Path) -> None:
    assert len(captured(source, {"a.txt": b"one\ntwo\n", "src/lib": None, "link": "a.txt"})) == 0


def test_modes_are_compared_without_set_id_bits_which_are_told(source: Path) -> None:
    with Tree.open(str(source)) as tree:
        changes = collect(
            [entry("", None), entry("a.txt", b"one\ntwo\n", mode=0o755), entry("evil", b"x", mode=0o6755), entry("src", None, mode=0o700)],
            tree,
        )
    assert kinds(changes) == {"a.txt": "mode", "evil": "created", "src": "mode"}
    assert changes["evil"].after is not None and changes["evil"].after.mode == 0o755 and "set-id" in changes["evil"].note


def test_a_deleted_directory_names_everything_that_goes_with_it(source: Path) -> None:
    changes = captured(source, {"src": GONE})
    assert kinds(changes) == dict.fromkeys(["src", "src/main.py", "src/lib", "src/lib/x.py", "src/lib/y.py"], "deleted")


def test_a_forged_opaque_mark_deletes_nothing_that_is_not_named(source: Path) -> None:
    changes = captured(source, {"src/main.py": b"print(2)\n"}, opaque=["src"])
    assert kinds(changes) == {"src/main.py": "modified", "src/lib": "deleted", "src/lib/x.py": "deleted", "src/lib/y.py": "deleted"}
    whole = captured(source, {"a.txt": b"one\ntwo\n"}, opaque=[""])
    assert set(kinds(whole)) == {"link", "src", "src/main.py", "src/lib", "src/lib/x.py", "src/lib/y.py"}
    assert set(kinds(whole).values()) == {"deleted"}
    deeper = captured(source, {"src/lib/x.py": b"x = 1\n"}, opaque=["src"])
    assert kinds(deeper) == {"src/main.py": "deleted", "src/lib/y.py": "deleted"}, "a hidden directory hides what is below it too"


def test_a_forged_whiteout_of_nothing_means_nothing(source: Path) -> None:
    assert len(captured(source, {"nothing": GONE, "src/nothing": GONE, "new/nothing": GONE, "a.txt": b"one\ntwo\n"})) == 1


def test_marks_that_our_mounts_never_make_are_shown_and_mean_nothing(source: Path) -> None:
    with Tree.open(str(source)) as tree:
        changes = collect([entry("", None), entry("src", None), entry("src/main.py", b"", strange=("metacopy", "redirect"))], tree)
    change = changes["src/main.py"]
    assert change.kind == "modified" and changes.read(change) == b"" and "metacopy" in change.held


def test_a_name_below_a_link_of_the_host_is_never_looked_up_through_it(source: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("canary")
    (source / "door").symlink_to(outside)
    changes = captured(source, {"door/secret": b"canary", "door/other": GONE})
    assert kinds(changes) == {"door": "modified", "door/secret": "created"}
    assert changes["door"].diff_note == "it became something else"


def test_a_directory_that_becomes_a_file_loses_what_was_in_it_by_name(source: Path) -> None:
    changes = captured(source, {"src": b"now a file"})
    assert kinds(changes) == {
        "src": "modified", "src/main.py": "deleted", "src/lib": "deleted", "src/lib/x.py": "deleted", "src/lib/y.py": "deleted",
    }  # fmt: skip


def test_a_file_moved_is_a_rename_and_so_is_a_directory_with_all_in_it(source: Path) -> None:
    changes = captured(source, {
        "b.txt": b"one\ntwo\n", "a.txt": GONE, "src/lib": GONE, "library/x.py": b"x = 1\n", "library/y.py": b"y = 2\n",
    })  # fmt: skip
    assert {change.path: change.old_path for change in changes} == {
        "b.txt": "a.txt", "library": "src/lib", "library/x.py": "src/lib/x.py", "library/y.py": "src/lib/y.py",
    }  # fmt: skip
    assert set(kinds(changes).values()) == {"renamed"}


def test_a_rename_is_found_once_however_many_copies_there_are(source: Path) -> None:
    for number in range(50):
        (source / f"copy{number}").write_text("same\n")
    described: dict[str, bytes | str | None] = {f"copy{number}": GONE for number in range(50)}
    described |= {f"new{number}": b"same\n" for number in range(60)}
    described |= {"empty1": b"", "src/lib": GONE, "p/q/x.py": b"x = 1\n", "p/q/y.py": b"y = 2\n", "p/r/x.py": b"x = 1\n", "p/r/y.py": b"y = 2\n"}
    changes = captured(source, described)
    renamed = [change.old_path for change in changes.of_kind("renamed")]
    assert len(renamed) == len(set(renamed)) == 50 + 3
    assert changes["empty1"].kind == "created", "an empty file is no evidence"


def test_text_in_any_encoding_survives_and_binary_is_said(source: Path) -> None:
    (source / "latin").write_bytes(b"caf\xe9\n")
    changes = captured(source, {"latin": b"caf\xe9!\n", "binary": b"\0\1\2", "src/main.py": b"\x1b]52;c;aGk=\x07\n"})
    assert changes["latin"].diff.encode("utf-8", "surrogateescape") == b"@@ -1 +1 @@\n-caf\xe9\n+caf\xe9!\n"
    assert changes["binary"].binary and changes["binary"].diff == ""
    assert "\x1b" in changes["src/main.py"].diff, "exact here"
    json.dumps(changes.as_dict()).encode("ascii")
    assert json.dumps(changes.as_dict(), ensure_ascii=False).encode()


def test_a_long_text_is_not_compared_and_says_so(source: Path) -> None:
    changes = captured(source, {"long": b"x" * ((1 << 20) + 1)})
    assert changes["long"].diff == "" and "MiB" in changes["long"].diff_note


def test_special_files_are_named_and_never_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(source)
    listener.bind("socket")
    changes = captured(source, {"device": OTHER, "socket": GONE})
    listener.close()
    assert changes["device"].impossible and changes["socket"].impossible


@pytest.mark.parametrize(
    ("path", "content", "word"),
    [
        (".git/hooks/post-checkout", b"#!/bin/sh\n", ".git/hooks"),
        ("deep/vendor/.GIT/config", b"[core]\n", ".git/config"),
        (".git/modules/sub/hooks/x", b"x", "hooks"),
        ("sub/.git", b"gitdir: ../evil", "git"),
        (".vscode/tasks.json", b"{}", ".vscode"),
        ("docs/Agents.md", b"do", "AGENTS.md"),
        (".bashrc", b"x", ".bashrc"),
        ("out", "/etc/passwd", "outside"),
        ("src/out", "../../x", "outside"),
        ("src/up", "lib/../../../x", "outside"),
        ("hooked", ".git/hooks/pre-commit", "link points at"),
        ("notes", "./src/../.git/config", "outside"),
    ],
)
def test_what_needs_to_be_named_says_why(source: Path, path: str, content: bytes | str, word: str) -> None:
    assert word in captured(source, {path: content})[path].held


def test_ordinary_changes_are_not_held(source: Path) -> None:
    changes = captured(source, {
        ".git/objects/ab/cdef": b"\0", ".git/index": b"\0", ".git/refs/heads/main": b"0\n", ".git/HEAD": b"x", ".gitignore": b"*",
        "Makefile": b"x", "src/inner": "lib/x.py", "src/lib/up": "../main.py", "config": b"x", "hooks/use.ts": b"x", ".github/workflows/x.yml": b"x",
    })  # fmt: skip
    assert [change.path for change in changes if not change.ordinary] == []


def test_a_bare_repository_in_a_corner_is_seen_for_what_it_is(source: Path) -> None:
    changes = captured(source, {
        "docs/fixture/HEAD": b"ref: refs/heads/main\n", "docs/fixture/objects/x": b"", "docs/fixture/refs/x": b"",
        "docs/fixture/config": b"[core]\nfsmonitor = touch pwned\n", "docs/fixture/hooks/post-index-change": b"",
    })  # fmt: skip
    assert {change.path for change in changes.held} == {"docs/fixture/config", "docs/fixture/hooks", "docs/fixture/hooks/post-index-change"}


def test_what_the_host_changed_meanwhile_is_a_conflict_and_what_we_wrote_is_none(source: Path) -> None:
    started = time.time_ns()
    while time.time_ns() < started + 30_000_000:  # the clock that files are stamped with moves in steps
        pass
    (source / "a.txt").write_text("edited by a person\n")
    changes = captured(source, {"a.txt": b"mine\n", "src/main.py": b"mine\n"}, started_ns=started)
    assert changes["a.txt"].conflict and not changes["src/main.py"].conflict
    ours = {b"a.txt": Seen.of(os.lstat(source / "a.txt"))}
    assert not captured(source, {"a.txt": b"mine\n"}, started_ns=started, written=ours)["a.txt"].conflict


def test_of_a_large_repository_only_what_changed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        (tmp_path / f"d{number}").mkdir()
        for other in range(20):
            (tmp_path / f"d{number}" / f"f{other}").write_text(f"{number}\n")
    looked, read = [], []
    look, read_file = Tree.look, Tree.read
    monkeypatch.setattr(Tree, "look", lambda self, path: (looked.append(path), look(self, path))[1])
    monkeypatch.setattr(Tree, "read", lambda self, path, *rest: (read.append(path), read_file(self, path, *rest))[1])
    changes = captured(tmp_path, {"d1/f1": b"new\n", "d2": GONE})
    assert len(changes) == 22
    assert set(read) == {b"d1/f1", *(b"d2/f%d" % number for number in range(20))}
    assert len(looked) < 20


def test_a_bomb_of_names_is_refused(source: Path) -> None:
    from ringfence.errors import CaptureError

    with pytest.raises(CaptureError, match="more than 10 files"):
        captured(source, {f"f{number}": b"" for number in range(11)}, entries_limit=10)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_applies_the_patch_of_everything(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy, symlinks=True)
    described: dict[str, bytes | str | None] = {
        "a.txt": b"one\nthree", "b\tc \xc3\xa9": b"new\n", "src/main.py": GONE, "link": "src/lib", "src/lib/x.py": GONE, "moved.py": b"x = 1\n",
    }  # fmt: skip
    patch = captured(source, described).patch
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=copy, input=patch.encode("utf-8", "surrogateescape"), check=True,
                   env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path)})  # fmt: skip
    assert (copy / "a.txt").read_bytes() == b"one\nthree"
    assert (copy / "b\tc \xc3\xa9").read_bytes() == b"new\n"
    assert not (copy / "src/main.py").exists() and os.readlink(copy / "link") == "src/lib"
    assert (copy / "moved.py").read_bytes() == b"x = 1\n" and not (copy / "src/lib/x.py").exists()
