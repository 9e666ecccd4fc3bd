"""The laws of `root: true`: what package managers and people with sudo expect works, on files that are the sandbox's own.

Guards against a root that is root in name only, and against one that weakens what holds without it (that is in
tests/attacks/test_root_attacks.py). Packages are built here, so that no server is asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import EnforcementError, InvalidArgumentError, Policy, PolicyError, PtySize, Sandbox

_boxes: list[Sandbox] = []
LIMITS = {"memory": "512MiB", "disk": "200MiB", "timeout": "120s"}


@pytest.fixture(scope="module", autouse=True)
def _one_box() -> Iterator[None]:
    yield
    while _boxes:
        _boxes.pop().kill()


@pytest.fixture
def box() -> Sandbox:
    """A sandbox with root, which this module's tests share."""
    if not _boxes or not _boxes[0].is_running():
        _boxes[:] = [with_root()]
    return _boxes[0]


def with_root(template: str = "base", **options) -> Sandbox:
    """A sandbox with root; where this user has a single id, the refusal is the law."""
    try:
        return Sandbox(template, root=True, limits=LIMITS, **options)
    except EnforcementError as refusal:
        assert "uidmap" in refusal.hint and "/etc/subuid" in refusal.hint
        pytest.skip("this user has one id: root inside is refused, and the refusal names `uidmap`")


def out(sandbox, command, **options):
    result = sandbox.commands.run(command, **options)
    assert result.exit_code == 0, f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


def needs(*programs):
    missing = [name for name in programs if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)} below /usr")


@pytest.fixture
def package(tmp_path: Path) -> bytes:
    """A .deb with a dependency, a configuration file, set-id files of a user it makes, and scripts."""
    needs("dpkg-deb", "apt-get")
    return build_package(tmp_path, "1.0")


def build_package(place: Path, version: str, extra: dict[str, str] | None = None) -> bytes:
    tree = place / f"ring-greeter-{version}"
    for name, text, mode in (
        ("DEBIAN/control", (f"Package: ring-greeter\nVersion: {version}\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\n"
         "Depends: dpkg, coreutils\nDescription: greets\n"), 0o644),
        ("DEBIAN/conffiles", "/etc/ring-greeter.conf\n", 0o644),
        ("DEBIAN/postinst", ("#!/bin/sh\nset -e\nid ring-greeter >/dev/null 2>&1 || useradd --system --no-create-home ring-greeter\n"
         "chown ring-greeter:mail /usr/lib/ring-greeter/mailer\nchmod 2755 /usr/lib/ring-greeter/mailer\n"), 0o755),
        ("etc/ring-greeter.conf", "greeting=hello\n", 0o644),
        ("usr/bin/ring-greeter", f"#!/bin/sh\necho hello {version}\n", 0o4755),
        ("usr/lib/ring-greeter/mailer", "#!/bin/sh\n", 0o755),
        *((name, text, 0o755) for name, text in (extra or {}).items()),
    ):  # fmt: skip
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    target = place / "package.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tree, target], check=True, stdout=subprocess.DEVNULL)
    return target.read_bytes()


# -- who root is


def test_root_has_the_seven_capabilities_and_user_none(box):
    assert out(box, "id -u; grep -E 'Cap(Eff|Bnd|Prm)' /proc/self/status | cut -f2", user="root").split() == ["0"] + ["00000000000000fb"] * 3
    assert out(box, "id -u; grep -E 'Cap(Eff|Bnd|Prm)' /proc/self/status | cut -f2").split() == ["1000"] + ["0000000000000000"] * 3
    assert box.run_code("import os; os.getuid()").text == "1000"


def test_without_root_in_the_policy_there_is_neither_root_nor_sudo(make):
    sandbox = make("plain")
    with pytest.raises(InvalidArgumentError, match="no user 'root'"):
        sandbox.commands.run("id", user="root")
    assert sandbox.commands.run("sudo id").exit_code != 0
    assert not any(row.primitive == "root inside" for row in sandbox.info().enforcement)


def test_the_policy_and_the_option_mean_the_same(box):
    with_root("plain").kill()
    sandbox = Sandbox("plain", policy=Policy(root=True))
    try:
        assert out(sandbox, "whoami", user="root") == "root\n"
        rows = {row.primitive: row for row in sandbox.info().enforcement}
        assert rows["root inside"].strength == "hard" and rows["capabilities"].strength == "hard"
    finally:
        sandbox.kill()
    with Sandbox("plain", policy=Policy(root=True), root=False) as sandbox, pytest.raises(InvalidArgumentError):
        sandbox.commands.run("id", user="root")


def test_root_excludes_a_workspace_that_is_written_through(tmp_path):
    workspace = {"filesystem": {"workspace": {"source": str(tmp_path), "mode": "rw"}}}
    with pytest.raises(PolicyError, match="exclude each other"):
        Sandbox(policy={**workspace, "root": True})
    with pytest.raises(PolicyError, match="exclude each other"):
        Sandbox(policy=workspace, root=True)


def test_files_of_root_are_written_and_read_by_root_alone(box):
    box.files.write("/root/secret", "for root", user="root")
    assert box.files.read("/root/secret", user="root") == "for root"
    with pytest.raises(Exception, match="(?i)permission"):
        box.files.read("/root/secret")
    assert box.files.get_info("/etc/shadow", user="root").owner == "root"


def test_code_can_run_as_root_in_a_context_of_its_own(box):
    context = box.create_code_context(user="root")
    assert box.run_code("import os; open('/etc/by-root', 'w').write('x'); os.getuid()", context=context).text == "0"
    assert out(box, "stat -c %U /etc/by-root") == "root\n"
    box.remove_code_context(context)


# -- sudo


def test_sudo_hands_over_directory_streams_environment_and_exit_code(box):
    assert out(box, "cd /usr/share && sudo pwd") == "/usr/share\n"
    assert out(box, "echo through | sudo cat") == "through\n"
    result = box.commands.run("sudo sh -c 'echo out; echo err >&2; exit 7'")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert out(box, "SECRET=1 sudo sh -c 'echo $USER $HOME $SUDO_USER [$SECRET]'") == "root /root user []\n"
    assert out(box, "SECRET=1 sudo -E sh -c 'echo [$SECRET]'") == "[1]\n"
    assert out(box, "sudo FOO=bar sh -c 'echo $FOO'") == "bar\n"
    assert out(box, "printf 'a\\0\\377b' | sudo cat | od -An -tx1") == " 61 00 ff 62\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("sudo -n true && sudo -v && sudo -k && sudo -H id -u", "0\n"),
        ("sudo -u www-data id -un", "www-data\n"),
        ("sudo -u '#33' -g mail id -gn", "mail\n"),
        ("sudo -i pwd", "/root\n"),
        ("sudo -s whoami", "root\n"),
        ("sudo -- echo -u", "-u\n"),
        ("sudo -l | tail -1", "    (ALL : ALL) NOPASSWD: ALL\n"),
        ("sudo -D /usr/lib pwd", "/usr/lib\n"),
        ("sudo sudo -u user id -un", "user\n"),
        ("sudo -iu user sh -c 'echo $HOME $PWD'", "/home/user /home/user\n"),
    ],
)
def test_the_usual_options_of_sudo_work(box, command, expected):
    assert out(box, command) == expected


@pytest.mark.parametrize(
    ("command", "said", "code"),
    [
        ("sudo nosuchprogram", "command not found", 1),
        ("sudo -u nobodyhere id", "unknown user", 1),
        ("sudo -D /nowhere id", "can't be entered", 1),
        ("sudo --bogus id", "unknown option", 1),
        ("sudo", "usage", 1),
    ],
)
def test_sudo_says_what_is_wrong(box, command, said, code):
    result = box.commands.run(command)
    assert result.exit_code == code and said in result.stderr


def test_signals_reach_the_command_and_its_death_is_told(box):
    script = "trap 'echo got it; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    result = box.commands.run(
        f'sudo sh -c "{script}" > o & pid=$!; until grep -q ready o; do sleep 0.05; done; kill -TERM $pid; wait $pid; echo $?; cat o', timeout=60
    )
    assert result.stdout == "3\nready\ngot it\n"
    assert box.commands.run("sudo sh -c 'kill -KILL $$'; echo $?").stdout == "137\n"


def test_sudo_in_a_terminal_gives_root_one_with_job_control(box):
    result = box.commands.run("sudo bash -ic 'tty; stty size; set -m; sleep 0 & wait; echo done' 2>&1", pty=PtySize(30, 90), timeout=60)
    assert "/dev/pts/" in result.stdout and "30 90" in result.stdout and "done" in result.stdout
    assert "job control" not in result.stdout


def test_what_sudo_started_ends_with_the_command_that_asked(box):
    code = (
        "import os, subprocess, sys, time\n"
        # Without its groups, in a session of its own, its parent gone: only the keeper still knows whose it is.
        "os.setgroups([])\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "open('/run/escaped', 'w').write(str(os.getpid())); time.sleep(600)\n"
    )
    handle = box.commands.run(["sh", "-c", 'sudo python3 -c "$0"; sleep 600', code], background=True)
    out(box, "until test -s /run/escaped; do sleep 0.05; done", timeout=60)
    pid = out(box, "cat /run/escaped").strip()
    assert out(box, f"ps -o user= -p {pid} || cat /proc/{pid}/status | grep ^Uid").split()
    handle.kill()
    out(box, f"while test -d /proc/{pid} && ! grep -q '^State.*[ZX]' /proc/{pid}/status; do sleep 0.05; done", timeout=60)


def test_a_killed_sudo_takes_its_command_along(box):
    out(
        box, "sudo sleep 86397 & pid=$!; until pgrep -f '^sleep 86397' >/dev/null; do sleep 0.05; done; "
        "kill -KILL $pid; while pgrep -f '^sleep 86397' >/dev/null; do sleep 0.05; done", timeout=60
    )  # fmt: skip


def test_a_timeout_kills_a_tree_of_roots(box):
    from ringfence import TimeoutExceededError

    with pytest.raises(TimeoutExceededError):
        box.commands.run("setsid sh -c 'sleep 86396 & wait' & sleep 86395", user="root", timeout=1)
    out(box, "while pgrep -f '^sleep 8639[56]' >/dev/null; do sleep 0.05; done", timeout=60)


def test_users_that_are_neither_user_nor_root_may_not_use_sudo(box):
    result = box.commands.run("sudo -u www-data sudo id")
    assert result.exit_code == 1 and "only `user` and `root`" in result.stderr


# -- package managers and account tools


def test_apt_get_installs_upgrades_and_removes_a_local_package(box, package, tmp_path):
    box.files.write("/home/user/one.deb", package)
    out(box, "sudo apt-get install -y ./one.deb", timeout=120)
    assert out(box, "ring-greeter; dpkg-query -W -f '${Status}' ring-greeter; cat /etc/ring-greeter.conf") == (
        "hello 1.0\ninstall ok installedgreeting=hello\n"
    )
    assert out(box, "stat -c '%U:%G %a' /usr/bin/ring-greeter /usr/lib/ring-greeter/mailer") == "root:root 4755\nring-greeter:mail 2755\n"
    box.files.write("/home/user/two.deb", build_package(tmp_path / "next", "2.0"))
    out(box, "sudo dpkg -i two.deb", timeout=120)
    assert out(box, "ring-greeter") == "hello 2.0\n"
    out(box, "sudo apt-get purge -y ring-greeter && test ! -e /usr/bin/ring-greeter && test ! -e /etc/ring-greeter.conf", timeout=120)
    assert out(box, "sudo dpkg --audit; sudo apt-get check >/dev/null") == ""
    assert shutil.which("ring-greeter") is None


def test_dependencies_are_resolved_against_what_the_machine_has(box, tmp_path):
    needs("dpkg-deb", "apt-get")
    tree = tmp_path / "needy" / "DEBIAN"
    tree.mkdir(parents=True)
    (tree / "control").write_text("Package: ring-needy\nVersion: 1\nArchitecture: all\nMaintainer: N <n@example.org>\nDepends: ring-not-there\nDescription: x\n")
    subprocess.run(["dpkg-deb", "-b", tree.parent, tmp_path / "needy.deb"], check=True, stdout=subprocess.DEVNULL)
    box.files.write("/home/user/needy.deb", (tmp_path / "needy.deb").read_bytes())
    result = box.commands.run("sudo apt-get install -y ./needy.deb", timeout=120)
    assert result.exit_code != 0 and "ring-not-there" in result.stdout + result.stderr


def test_a_package_may_replace_files_of_the_machine_in_the_sandbox_alone(box, tmp_path):
    needs("dpkg-deb")
    path = os.path.realpath("/usr/bin/tac")
    before = Path(path).read_bytes()
    data = build_package(tmp_path, "3.0", {"usr/bin/tac": "#!/bin/sh\necho replaced\n"})
    box.files.write("/home/user/three.deb", data)
    out(box, "sudo dpkg -i --force-overwrite three.deb", timeout=120)
    assert out(box, "tac; stat -c %U /usr/bin/tac") == "replaced\nroot\n"
    assert Path(path).read_bytes() == before
    with Sandbox("plain") as other:
        assert other.commands.run("echo a | tac").stdout == "a\n"
    out(box, "sudo dpkg -r ring-greeter", timeout=120)


def test_accounts_can_be_made_become_and_removed(box):
    needs("useradd", "su", "passwd")
    out(box, "sudo groupadd crew && sudo useradd -m -G crew bob && sudo passwd -d bob")
    assert out(box, "sudo su bob -c 'id -un; id -Gn; echo $HOME; touch ~/mine'") == "bob\nbob crew\n/home/bob\n"
    assert out(box, "stat -c %U /home/bob/mine; sudo -u bob whoami") == "bob\nbob\n"
    out(box, "sudo userdel -r bob 2>/dev/null && sudo groupdel crew")


def test_make_install_install_tar_ldconfig_and_alternatives_work(box):
    needs("make", "tar", "ldconfig", "update-alternatives")
    box.files.write("/home/user/build/Makefile", "install:\n\tinstall -D -o root -g staff -m 755 tool $(DESTDIR)/usr/local/bin/ring-tool\n")
    box.files.write("/home/user/build/tool", "#!/bin/sh\necho made\n")
    out(box, "cd build && sudo make install")
    assert out(box, "ring-tool; stat -c '%U:%G' /usr/local/bin/ring-tool") == "made\nroot:staff\n"
    out(box, "sudo update-alternatives --install /usr/bin/ring-alternative ring-alternative /usr/local/bin/ring-tool 10 && sudo ldconfig")
    assert out(box, "ring-alternative") == "made\n"
    out(box, "mkdir -p t && touch t/f && sudo chown www-data:mail t/f && sudo tar -cf t.tar t && sudo rm -r t && sudo tar --same-owner -xf t.tar")
    assert out(box, "stat -c '%U:%G' t/f") == "www-data:mail\n"


def test_pip_installs_a_local_wheel_where_the_code_finds_it(box, tmp_path):
    wheel = tmp_path / "ringwheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ringwheel.py", "VALUE = 'from a wheel'\n")
        archive.writestr("ringwheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ringwheel\nVersion: 1.0\n")
        archive.writestr("ringwheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("ringwheel-1.0.dist-info/RECORD", "")
    box.files.write(f"/home/user/{wheel.name}", wheel.read_bytes())
    out(box, f"sudo pip install --no-index --break-system-packages ./{wheel.name}", timeout=120)
    assert out(box, ["python3", "-c", "import ringwheel; print(ringwheel.VALUE, ringwheel.__file__[:9])"]) == "from a wheel /opt/env/\n"
    assert box.run_code("import ringwheel; ringwheel.VALUE").text == "from a wheel"
    with Sandbox() as other:
        assert other.run_code("import importlib.util; importlib.util.find_spec('ringwheel') is None").text == "True"


def test_files_of_the_machine_can_be_replaced_and_removed_but_not_changed_in_place(box):
    assert box.commands.run("chmod 700 /usr/bin/env", user="root").exit_code != 0
    out(box, "rm /usr/bin/factor && cp /usr/bin/env /usr/bin/factor && chown user /usr/bin/factor", user="root")
    assert os.stat("/usr/bin/env").st_mode & 0o777 != 0o700 and os.path.exists("/usr/bin/factor")


def test_what_root_writes_is_bounded_like_what_the_user_writes(make):
    sandbox = with_root("plain", disk="16MiB")
    try:
        for place in ("/usr/local/big", "/var/lib/dpkg/big", "/root/big"):
            result = sandbox.commands.run(f"dd if=/dev/zero of={place} bs=1M count=64 2>&1; stat -c %s {place}; rm {place}", user="root")
            assert "No space left" in result.stdout and int(result.stdout.split()[-1]) <= 16 << 20
    finally:
        sandbox.kill()
