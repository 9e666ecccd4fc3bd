"""`ringfence run` and `exec` as a shell sees them: real processes, real sandboxes.

Every test starts at least one process of the console script; none looks at a clock.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from ringfence.cli.entry import main; main()"]

pytestmark = pytest.mark.user_too


def ringfence(*words: str, input: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *words], input=input, capture_output=True, timeout=60, check=False, cwd=cwd)


@pytest.fixture(scope="module", autouse=True)
def _works_here() -> None:
    done = ringfence("run", "-c", "print(1)")
    if done.returncode == 125 and b"namespace" in done.stderr:
        pytest.skip(f"no sandbox starts here: {done.stderr.decode()}")
    assert (done.stdout, done.stderr, done.returncode) == (b"1\n", b"", 0)


def test_bytes_pass_through_both_ways() -> None:
    data = bytes(range(256)) * 8192
    done = ringfence("exec", "--", "cat", input=data)
    assert done.returncode == 0
    assert done.stdout == data
    done = ringfence("run", "-c", "import sys; sys.stderr.buffer.write(sys.stdin.buffer.read()[::-1])", input=b"\xff\x00\n")
    assert done.stderr == b"\n\x00\xff"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "-c", "import sys; sys.exit(7)"], 7),
        (["run", "-c", "1/0"], 1),
        (["exec", "--", "sh", "-c", "kill -9 $$"], 137),
        (["exec", "--", "sh", "-c", "kill -15 $$"], 143),
        (["exec", "--", "no-such-command-anywhere"], 127),
        (["exec", "--", "/etc/passwd"], 126),
        (["run", "--timeout", "0.3", "-c", "while True: pass"], 124),
        (["run", "no-such-file.py"], 125),
        (["run", "--policy", "no-such-policy.yaml", "-c", "1"], 125),
        (["run", "--memory", "1 potato", "-c", "1"], 2),
        (["run", "--memory", "1", "-c", "1"], 2),
        (["run", "--memory", "20TiB", "-c", "1"], 2),
        (["exec", "--pids", "1", "--", "true"], 2),
        (["run", "--timeout", "abc", "-c", "1"], 2),
        (["run", "--timeout", "0", "-c", "1"], 2),
        (["run", "--timeout", "100000h", "-c", "1"], 2),
        (["run", "--timeout", "1", "--json", "--cpus", "many", "-c", "1"], 2),
        (["run", "--nonsense"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_codes_mean_what_the_page_says(words: list[str], code: int) -> None:
    done = ringfence(*words)
    assert done.returncode == code, done.stderr.decode()
    if code in (124, 125, 2) and "--json" not in words:
        assert done.stderr.startswith(b"ringfence: ")


def test_the_output_before_a_timeout_is_there() -> None:
    done = ringfence("run", "--timeout", "1", "-c", "print('before', flush=True)\nwhile True: pass")
    assert done.stdout == b"before\n"


def test_a_script_gets_its_name_and_arguments(tmp_path: Path) -> None:
    script = tmp_path / "näme with space.py"
    script.write_text("import sys; print(sys.argv[1:], __file__.rpartition('/')[2], __name__)")
    done = ringfence("run", str(script), "a b", "--json")
    assert done.stdout.decode() == "['a b', '--json'] näme with space.py __main__\n"


def test_a_scripts_directory_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("secret = 1")
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.listdir('.'))\nimport neighbour")
    done = ringfence("run", str(script), cwd=tmp_path)
    assert done.stdout == b"['script.py']\n"
    assert b"No module named 'neighbour'" in done.stderr
    assert done.returncode == 1


def test_a_large_script_arrives_whole(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text("x = 0\n" + "# filler\n" * 400_000 + "print('end')\n")
    assert ringfence("run", str(script)).stdout == b"end\n"


def test_code_comes_from_standard_input() -> None:
    assert ringfence("run", input=b"print('from stdin')").stdout == b"from stdin\n"


_LANGUAGES = {
    "bash": ("sh", 'echo "$1 $(cat)"; exit 3'),
    "node": ("js", "console.log(process.argv[2], require('fs').readFileSync(0, 'utf8')); process.exit(3)"),
    "Rscript": ("R", "cat(commandArgs(TRUE), readLines(file('stdin')), '\\n'); quit(status = 3)"),
}


@pytest.mark.parametrize("program", _LANGUAGES)
def test_a_files_suffix_is_its_language(tmp_path: Path, program: str) -> None:
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"this machine has no {program} below /usr")
    suffix, text = _LANGUAGES[program]
    (tmp_path / f"law.{suffix}").write_text(text)
    done = ringfence("run", str(tmp_path / f"law.{suffix}"), "word", input=b"input")
    assert (done.stdout.split(), done.returncode) == ([b"word", b"input"], 3), done.stderr


def test_a_language_can_be_named_for_code_and_for_standard_input() -> None:
    done = ringfence("run", "--language", "sh", "-c", "echo ${BASH_VERSION:+bash} $1", "word")
    assert (done.stdout, done.returncode) == (b"bash word\n", 0), done.stderr
    done = ringfence("run", "--language=bash", "-", "word", input=b"echo ${BASH_VERSION:+bash} $1\n")
    assert (done.stdout, done.returncode) == (b"bash word\n", 0), done.stderr
    done = ringfence("run", "--language", "cobol", "-c", "1")
    assert done.returncode == 2 and b"javascript" in done.stderr


def test_the_callers_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    done = ringfence("run", "--env", "GIVEN=1", "-c", "import os; print(os.environ.get('SECRET_TOKEN'), os.environ['GIVEN'])")
    assert done.stdout == b"None 1\n"


def test_limits_of_the_options_hold() -> None:
    done = ringfence("run", "--disk", "8MiB", "-c", "open('x', 'wb').write(bytes(64 << 20))")
    assert b"No space left on device" in done.stderr
    done = ringfence("run", "--memory", "64MiB", "--disk", "1MiB", "-c", "x = b'x' * (900 << 20)")
    assert done.returncode in (1, 137)
    assert b"MemoryError" in done.stderr or b"limits.memory" in done.stderr


def test_json_is_one_document_with_everything() -> None:
    done = ringfence("run", "--json", "--timeout", "20", "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    document = json.loads(done.stdout)
    assert (document["exit_code"], document["ended_by"], document["stdout"], document["stderr"]) == (3, "exit", "out\n", "err\n")
    assert document["limits"]["timeout"] == 20
    assert done.returncode == 3
    document = json.loads(ringfence("run", "--json", "no-such-file.py").stdout)
    assert document["error"]["hint"]


def test_json_keeps_the_newest_output_and_says_what_is_missing() -> None:
    done = ringfence("run", "--json", "-c", "for n in range(600_000): print('%07d' % n)")
    document = json.loads(done.stdout)
    assert document["truncated"] is True
    assert document["stdout"].endswith("0599999\n")
    assert len(document["stdout"]) == 1 << 20


def test_closed_standard_descriptors_do_no_harm() -> None:
    done = subprocess.run(["bash", "-c", '"$@" <&- 2>&-', "bash", *COMMAND, "run", "-c", "import sys; print(sys.stdin.read(), 'end')"],
                          capture_output=True, timeout=60, check=False)  # fmt: skip
    assert (done.stdout, done.returncode) == (b" end\n", 0)


def test_a_reader_that_goes_away_ends_the_program() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -c 4; echo " ${PIPESTATUS[0]}"', "bash", *COMMAND, "exec", "--", "yes"],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == b"y\ny\n 141\n"


def test_an_interrupt_reaches_the_program() -> None:
    code = "import sys, time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('caught'); sys.exit(9)"
    process = subprocess.Popen([*COMMAND, "run", "--timeout", "50", "-c", code], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == b"caught\n"
    assert process.wait(30) == 9


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found |= {int(name), *_descendants(int(name))}
    return found


@pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "ordinary"])
def test_nothing_is_left_behind(end: signal.Signals | None) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(300)\nprint('ready', flush=True)" + ("\ntime.sleep(300)" if end else "")
    process = subprocess.Popen([*COMMAND, "run", "--timeout", "100", "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    started = _descendants(process.pid)
    if end is not None:
        assert len(started) >= 4  # launcher, zygote, agent, the program
        process.send_signal(end)
    process.wait(30)
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def test_a_workspace_is_where_the_program_starts_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("from the host\n")
    (tmp_path / "show.py").write_text("print(open('data').read(), end='')\nopen('data', 'w').write('changed')\n")
    for words in (["show.py"], ["-c", "import os; print(os.popen('cat data; echo x > data').read(), end='')"],
                  ["--", "sh", "-c", "cat data; echo x > data; echo y > new"]):  # fmt: skip
        done = ringfence("run", "--workspace", ".", *words, cwd=tmp_path)
        assert (done.stdout, done.returncode) == (b"from the host\n", 0), done.stderr
    assert ringfence("exec", "--workspace", ".", "--mode", "ro", "--", "touch", "new", cwd=tmp_path).returncode == 1
    assert sorted(os.listdir(tmp_path)) == ["data", "show.py"] and (tmp_path / "data").read_text() == "from the host\n"


def test_a_workspace_that_cannot_be_lent_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for source, why in (("/", b"far more than one project"), (str(tmp_path / "missing"), b"No such file")):
        done = ringfence("run", "--workspace", source, "-c", "print(1)")
        assert (done.returncode, done.stdout) == (125, b"") and why in done.stderr and done.stderr.count(b"\n") == 2


def test_the_directories_of_a_policy_are_lent(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a").write_text("a\n")
    policy = tmp_path / "policy.yaml"
    policy.write_text("filesystem: {workspace: {source: work, mode: ro}}\n")
    done = ringfence("exec", "--policy", str(policy), "--", "sh", "-c", "pwd; cat a; touch b")
    assert (done.stdout, done.returncode) == (b"/workspace\na\n", 1)


def test_a_policy_with_root_holds_on_the_command_line(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("root: true\n")
    result = ringfence("exec", "--policy", str(policy), "--", "sudo", "id", "-u")
    if result.returncode == 125 and b"uidmap" in result.stderr:
        pytest.skip("this user has one id: root inside is refused")
    assert (result.returncode, result.stdout) == (0, b"0\n")
