"""Class B: no byte of the host can be read or changed, and the host's file calls meet nothing but the sandbox."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from pathlib import Path

import pytest
from arena import assert_ordinary, canary, inside, one_uid, outside, until

from ringfence import RingfenceError


def test_no_canary_of_the_host_is_found_by_walking_everything(box, planted):
    token, files = planted
    assert len(files) >= 3
    found = inside(box, "walk", token, "/", *files)
    assert found["found"] == [] and found["looked at"] > 100
    assert not any(found[str(path)] for path in files)
    control = outside("walk", token, files[-1].parent, *files)
    assert control["found"] and all(control[str(path)] for path in files)


def test_two_sandboxes_do_not_see_each_others_files(box, neighbour):
    token = canary()
    for place in ("/tmp", "/var/tmp", "/dev/shm", "/home/user", "/workspace"):
        neighbour.files.write(f"{place}/{token}", token)
    assert len(inside(neighbour, "walk", token, "/")["found"]) >= 10  # by name and by content
    assert inside(box, "walk", token, "/")["found"] == []


SHARED = ["/usr/bin/env", "/usr/lib/os-release", "/dev/null", "/dev/zero", "/opt/env/pyvenv.cfg", "/opt/ringfence/ringfence/__init__.py"]


def test_no_verb_changes_what_sandboxes_share(make, tmp_path):
    host = {path: os.stat(path) for path in SHARED if os.path.exists(path)}
    digests = {path: hashlib.sha256(Path(path).read_bytes()).digest() for path in host if path.startswith("/usr")}
    box = make()
    found = inside(box, "writes", *SHARED, "/usr", "/usr/bin", "/opt", "/opt/env", "/dev", "/proc", "/proc/sys")
    harmless = {f"{verb} {path}" for path in ("/dev/null", "/dev/zero") for verb in ("write", "append")}
    assert not {name for name, answer in found.items() if answer == "done"} - harmless, found
    control = tmp_path / "own"
    control.write_text("x")
    verbs = outside("writes", control)
    assert [name for name, answer in verbs.items() if answer == "done"][:4] == [f"{verb} {control}" for verb in ("write", "append", "truncate", "chmod")]
    for path, before in host.items():
        after = os.stat(path)
        assert (before.st_mtime_ns, before.st_mode, before.st_uid) == (after.st_mtime_ns, after.st_mode, after.st_uid), path
    assert all(hashlib.sha256(Path(path).read_bytes()).digest() == digest for path, digest in digests.items())
    assert_ordinary(box)


def test_watches_and_locks_do_not_reach_the_hosts_files(box):
    # Through a bind mount both did: which programs the host ran was seen, and its files could be locked.
    path = "/usr/lib/os-release"
    code = f"""
import ctypes, fcntl, os, time
libc = ctypes.CDLL(None)
locked = open({path!r}); fcntl.flock(locked, fcntl.LOCK_EX)
watch = libc.inotify_init1(0o4000)
assert libc.inotify_add_watch(watch, b"/usr/lib", 0xFFF) > 0
print("watching", flush=True)
time.sleep(1.0)
try: seen = os.read(watch, 65536)
except BlockingIOError: seen = b""
print("seen", b"os-release" in seen)
open({path!r}).read()
print("own", b"os-release" in os.read(watch, 65536))
"""
    handle = until(box.commands.run(["python3", "-c", code], background=True), "watching")
    with open(path) as file:
        file.read()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert handle.wait().stdout == "watching\nseen False\nown True\n"


def test_no_mount_map_or_process_file_names_the_host(box):
    found = inside(box, "proc")
    text = found["mountinfo"] + "\n".join(found["maps"]) + box.commands.run("cat /proc/self/mounts /etc/mtab /etc/passwd /etc/hosts /proc/self/cgroup; env").stdout
    names = {str(Path.home()), str(Path.cwd()), os.uname().nodename, "/root/", "ringfence/src", os.environ.get("USER", "")}
    common = {"", "/", "/root", "root", "user", "/home/user", "localhost"}
    assert not [name for name in names - common if len(name) > 3 and name in text]
    own = Path("/proc/self/mountinfo").read_text()
    assert re.search(r" - (ext4|xfs|btrfs|overlay|zfs) ", own)


def test_nothing_of_proc_can_be_written_and_masks_hide_the_machine(box):
    found, control = inside(box, "proc"), outside("proc")
    allowed = {"/proc/1/", "/proc/self", "/proc/thread-self"}
    assert [path for path in found["writable"] if not path.startswith(tuple(allowed))] == []
    if os.geteuid() == 0:
        assert len(control["writable"]) > 100
    for name in ("kcore", "kallsyms", "keys", "timer_list", "interrupts", "iomem", "kmsg", "cmdline"):
        assert found["read " + name] in (0, "EACCES", "EPERM", "ENOENT"), name
    assert control["read interrupts"] and control["read cmdline"]
    assert not any(found["exists " + path] for path in ("/sys/class", "/sys/firmware", "/sys/fs/cgroup"))
    assert set(found["devices"]) <= {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr"}


HOSTILE_PATHS = (
    "../../../../../../{token}", "/proc/self/root/{token}", "/proc/1/root/{token}", "/proc/self/cwd/../../../{token}",
    "link/{token}", "/proc/thread-self/root/../{token}", "~root/{token}", "file://{token}",
)  # fmt: skip


def test_host_paths_given_to_the_file_calls_end_inside(box, planted):
    _, files = planted
    box.commands.run("ln -sfn / link")
    for path in files:
        for shape in HOSTILE_PATHS:
            with pytest.raises(RingfenceError):
                box.files.read(shape.format(token=str(path).lstrip("/")))
        with pytest.raises(RingfenceError):
            box.files.read(path)
        assert not box.files.exists(path)


@pytest.mark.parametrize("path", ["", "\0", "a\0b", "x" * 5000, "/".join(["d" * 200] * 40)])
def test_impossible_names_are_typed_errors(box, path):
    for action in (box.files.read, box.files.list, box.files.get_info, box.files.make_dir, box.files.remove, lambda name: box.files.write(name, "x")):
        with pytest.raises(RingfenceError):
            action(path)


@pytest.mark.parametrize("name", ["a\nb", "-rf", "C:\\x", "\udcff\udcfe", "  ", "\x1b[31m", "n" * 255])
def test_any_legal_name_is_a_name(box, name):
    box.files.write(name, "kept")
    assert box.files.read(name) == "kept"
    assert name in [entry.name for entry in box.files.list(".")]
    box.files.remove(name)


def test_special_files_neither_hang_nor_feed_the_host(box):
    box.commands.run("mkdir -p special; cd special; mkfifo fifo; ln -sf fifo link; ln -sf /dev/zero zero; ln -sf loop loop; ln -sf /dev/tty tty; python3 -c \"import socket; socket.socket(1).bind('socket')\"")
    started = time.monotonic()
    for name in ("fifo", "link", "zero", "loop", "socket", "tty"):
        for action in (lambda path: box.files.read(path), lambda path: box.files.write(path, "x")):
            with pytest.raises(RingfenceError):
                action(f"special/{name}")
    assert time.monotonic() - started < 10
    assert box.commands.run("timeout 1 head -c 4 special/zero | wc -c").stdout == "4\n"  # the control: it does feed


def test_a_name_that_changes_under_the_host_is_never_followed_out(make, planted):
    token, files = planted
    box = make()
    swap = (
        "import os\nos.makedirs('swap/real'); open('swap/real/secret', 'w').write('inside')\nos.symlink(PLACE, 'swap/out')\n"
        "os.mkfifo('swap/fifo')\nos.symlink('real', 'swap/now')\nnames = ['out', 'real', 'fifo']\nn = 0\nprint('swapping', flush=True)\n"
        "while True:\n  n += 1\n  os.symlink(names[n % 3], 'swap/next'); os.rename('swap/next', 'swap/now')"
    ).replace("PLACE", repr(str(files[-1].parent)))
    handle = until(box.commands.run(["python3", "-c", swap], background=True), "swapping")
    before = sorted(path.name for path in files[-1].parent.iterdir())
    outcomes = {"inside": 0, "refused": 0}
    deadline = time.monotonic() + 3
    turn = 0
    while time.monotonic() < deadline:
        turn += 1
        try:
            if turn % 4 == 0:
                box.files.write("swap/now/written", "x")
            elif turn % 4 == 1:
                assert all(token not in entry.name for entry in box.files.list("swap/now"))
            else:
                assert box.files.read("swap/now/secret") == "inside"
                outcomes["inside"] += 1
        except RingfenceError:
            outcomes["refused"] += 1
    assert handle.kill(), handle.wait()
    assert outcomes["inside"] and outcomes["refused"], outcomes
    assert sorted(path.name for path in files[-1].parent.iterdir()) == before


def test_stopping_or_killing_file_workers_ends_the_operation_quickly(make):
    box = make()
    box.files.write("/tmp/first", "x")
    box.commands.run("kill -STOP -1")
    started = time.monotonic()
    for _ in range(3):
        try:
            box.files.write("/tmp/second", b"x" * 300_000)
            break
        except RingfenceError:
            continue
    assert box.files.read("/tmp/second", "bytes") == b"x" * 300_000
    assert time.monotonic() - started < 10


def test_hostile_start_up_files_touch_neither_agent_nor_fresh_kernels(make):
    box = make()
    box.run_code("1")
    plant = "import os\nopen('/tmp/owned-%s', 'w').write(str(os.getuid()))\n"
    for name in ("sitecustomize", "usercustomize", "random", "json", "socket", "selectors", "traceback", "struct", "signal", "IPython", "ringfence", "_blake2", "fcntl"):
        box.files.write(f"{name}.py", plant % name)
        box.files.write(f"/tmp/{name}.py", plant % name)
    if one_uid(box):
        box.commands.run("cp /home/user/*.py /")
    for name in (".bashrc", ".bash_profile", ".profile", ".bash_login"):
        box.files.write(name, f"echo x > /tmp/owned{name}\n")
    box.restart_code_context("default")
    assert box.run_code("21 * 2").text == "42"
    box.files.write("y", "y")
    box.files.list("/", depth=2)
    box.commands.run("true")
    assert [entry.name for entry in box.files.list("/tmp") if entry.name.startswith("owned")] == []
    assert box.commands.run(["python3", "-c", "import IPython"]).exit_code == 0  # the control: it does fire
    assert box.files.exists("/tmp/owned-IPython")


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "BASH_ENV", "LD_LIBRARY_PATH", "PYTHONINSPECT"])
def test_environment_given_by_the_caller_reaches_programs_only(make, variable):
    box = make(envs={variable: "/home/user/evil"})
    assert box.run_code("6 * 7").text == "42"
    box.files.write("x", "x")
    assert box.commands.run(["/usr/bin/env"]).stdout.count(f"{variable}=/home/user/evil\n") == 1
