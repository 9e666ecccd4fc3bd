"""The laws of the inside: what a sandbox is made of, as its user meets it, and what of the host is not there.

Guards the promises of "The namespace engine" and "The guest" that attacks do not look at: that ordinary things work.
"""

from __future__ import annotations

import os
import time

import pytest

from ringfence import Sandbox, TimeoutExceededError


def out(sandbox, command, **options):
    return sandbox.commands.run(command, check=True, **options).stdout


def python(sandbox, code):
    return out(sandbox, ["python3", "-c", code])


# -- files


def test_the_root_is_an_allow_list(sandbox):
    assert set(out(sandbox, "ls -A /").split()) <= {
        "bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "opt", "proc", "run", "sbin", "tmp", "usr", "var",
        "workspace", "root", "sys", "mnt", "srv",
    }  # fmt: skip
    assert out(sandbox, "ls -A /home /root /run /mnt /srv 2>/dev/null | grep -v -e : -e '^$' -e '^user$' || true") == ""


def test_system_directories_are_read_only(sandbox):
    for place in ("/usr", "/usr/lib", "/opt", "/opt/env", "/proc/sys/kernel"):
        assert not sandbox.commands.run(["touch", f"{place}/law"]).ok


def test_home_is_writable_and_runs_programs_and_tmp_only_holds_data(sandbox):
    script = "#!/bin/sh\necho ran\n"
    sandbox.files.write("/home/user/run", script, mode=0o755)
    sandbox.files.write("/tmp/run", script, mode=0o755)
    assert out(sandbox, ["/home/user/run"]) == "ran\n"
    assert sandbox.commands.run(["/tmp/run"]).exit_code == 126


def test_set_id_bits_cannot_be_made(sandbox):
    sandbox.files.write("f", "")
    assert not sandbox.commands.run("chmod u+s f").ok and not sandbox.commands.run("chmod g+s f").ok
    assert out(sandbox, "find / -xdev -perm /6000 -newer /proc/1 2>/dev/null || true") == ""


def test_each_sandbox_has_files_and_processes_of_its_own(make):
    first, second = make("plain"), make("plain")
    first.files.write("/tmp/mine", "1")
    handle = first.commands.run("sleep 86420", background=True)
    assert not second.files.exists("/tmp/mine")
    code = (
        "import os\nfor n in os.listdir('/proc'):\n    if n.isdigit() and int(n) != os.getpid():\n"
        "        print(open(f'/proc/{n}/cmdline').read().replace('\\0', ' '))"
    )
    assert "86420" in python(first, code) and "86420" not in python(second, code)
    handle.kill()


def test_nothing_of_the_owners_environment_or_files_is_inside(make, tmp_path, monkeypatch):
    monkeypatch.setenv("RF_SECRET", "do-not-lend-7733")
    (tmp_path / "secret").write_text("do-not-lend-7733")
    sandbox = make("base")
    found = sandbox.run_code("import os\nprint(dict(os.environ))\n!cat /proc/1/environ /proc/self/environ 2>/dev/null")
    assert found.error is None and "7733" not in "".join(found.logs.stdout)
    assert "7733" not in out(sandbox, "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true")
    for path in (tmp_path, os.path.expanduser("~") + "/.bashrc", __file__):
        assert not sandbox.files.exists(str(path))


# -- network


def test_the_loopback_works_and_is_the_only_interface(sandbox):
    code = (
        "import socket, threading\n"
        "for family, address in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET, '127.9.9.9')):\n"
        "    server = socket.socket(family); server.bind((address, 0)); server.listen()\n"
        "    client = socket.create_connection(server.getsockname()); peer, _ = server.accept()\n"
        "    client.sendall(b'hi'); assert peer.recv(2) == b'hi'\n"
        "print(socket.gethostbyname('localhost'), [name for _, name in socket.if_nameindex()])"
    )
    assert python(sandbox, code) == "127.0.0.1 ['lo']\n"


def test_there_is_no_way_out(sandbox):
    code = (
        "import socket\n"
        "for address in (('1.1.1.1', 53), ('169.254.169.254', 80), ('10.0.0.1', 22)):\n"
        "    try:\n        socket.create_connection(address, 3); print('out', address)\n"
        "    except OSError as error:\n        print(error.errno)\n"
    )
    assert python(sandbox, code).split() == ["101"] * 3  # ENETUNREACH, at once


def test_a_server_and_a_client_of_two_commands_meet_on_the_loopback(sandbox):
    server = sandbox.commands.run("cd /tmp && echo page > index.html && exec python3 -m http.server 8123 --bind 127.0.0.1", background=True)
    fetch = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8123/index.html', timeout=5).read().decode())"
    deadline = time.monotonic() + 20
    while (result := sandbox.commands.run(["python3", "-c", fetch])).exit_code:
        assert time.monotonic() < deadline, result.stderr
        time.sleep(0.1)
    assert result.stdout == "page\n\n"
    server.kill()


# -- processes


def test_the_first_process_reaps_orphans(sandbox):
    sandbox.commands.run("for i in 1 2 3 4 5 6 7 8; do (setsid sleep 0.05 &); done")
    deadline = time.monotonic() + 20
    while "Z" in out(sandbox, "grep -h '^State' /proc/[0-9]*/status 2>/dev/null | cut -f2 | cut -c1 | tr -d '\\n'; true"):
        assert time.monotonic() < deadline, "zombies stay"
        time.sleep(0.05)


@pytest.mark.parametrize("number", ["KILL", "STOP", "TERM", "SEGV", "INT", "HUP"])
def test_the_first_process_survives_every_signal_from_inside(sandbox, number):
    sandbox.run_code("1")
    sandbox.commands.run(f"kill -{number} 1; kill -{number} -1")
    assert out(sandbox, "echo alive") == "alive\n"
    try:
        sandbox.run_code("1", timeout=1)  # its kernel, the user's own process, may have died of it or stand still
    except TimeoutExceededError as error:
        assert number == "STOP" and error.outcome == "restarted"
    assert sandbox.run_code("1 + 1").text == "2"


def test_a_storm_of_stops_and_kills_stops_no_command_that_follows(sandbox):
    storm = sandbox.commands.run(["python3", "-c", "import os\nwhile True:\n    try:\n        os.kill(-1, 19)\n    except OSError:\n        pass"], background=True)
    for _ in range(3):
        try:
            sandbox.commands.run(["true"], timeout=1)
        except TimeoutError:
            pass
    storm.kill()
    assert out(sandbox, "echo alive") == "alive\n"


def test_clocks_names_and_users_are_as_on_any_machine(sandbox):
    assert abs(float(out(sandbox, "date +%s.%N")) - time.time()) < 30
    assert out(sandbox, "hostname; whoami; getent passwd user | cut -d: -f6,7") == "sandbox\nuser\n/home/user:/bin/bash\n"


def test_locale_and_terminal_are_plain_utf8(sandbox):
    assert python(sandbox, "import sys, locale; print(sys.stdout.encoding, 'ä€')") == "utf-8 ä€\n"


def test_the_interpreter_of_commands_has_the_packages_of_the_template(data_sandbox):
    code = "import numpy, pandas, matplotlib, sys; print(numpy.arange(3).sum(), sys.prefix)"
    assert python(data_sandbox, code) == "3 /opt/env\n"


def test_ordinary_programs_work(sandbox):
    code = (
        "import sqlite3, tempfile, threading, subprocess, multiprocessing, mmap, ssl, ctypes, zlib, concurrent.futures as f\n"
        "database = sqlite3.connect('/home/user/law.db'); database.execute('create table t(x)'); database.commit()\n"
        "m = mmap.mmap(-1, 4096); m[:2] = b'ok'\n"
        "with f.ThreadPoolExecutor(4) as pool: print(sum(pool.map(len, ['a'] * 9)))\n"
        "with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))\n"
        "print(subprocess.check_output('echo shell | tr a-z A-Z', shell=True, text=True).strip())\n"
    )
    assert python(sandbox, code) == "9\n[1, 2]\nSHELL\n"


def test_the_plain_template_has_no_kernel_and_says_so():
    with Sandbox("plain") as sandbox, pytest.raises(Exception, match=r"(?i)template|kernel") as caught:
        sandbox.run_code("1")
    assert type(caught.value).__module__ == "ringfence.errors"
