"""Class D, network none: no byte leaves, by any family, address, side door, or socket file."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from arena import Sink, assert_ordinary, canary, inside, outside


def test_nothing_is_delivered_to_the_hosts_listeners(box, sink):
    token = canary()
    found = inside(box, "reach", token, *sink.network, *sink.paths)
    assert sink.saw(token) == 0 and sink.received == b""
    assert all(answer for name, answer in found.items() if name.startswith("quick "))
    assert "done" not in [answer for name, answer in found.items() if not name.startswith(("quick", "interfaces"))]
    assert found["interfaces"] == ["lo"]
    outside("reach", token, *sink.network, *sink.paths)
    assert sink.saw(token) >= 5  # the control reached all five
    assert_ordinary(box)


ADDRESSES = [
    "tcp:169.254.169.254:80", "tcp:169.254.170.2:80", "tcp:100.100.100.200:80", "tcp:1.1.1.1:443", "udp:1.1.1.1:53",
    "udp:8.8.8.8:53", "tcp:10.0.2.2:22", "tcp:172.17.0.1:2375", "tcp:192.168.65.7:2375", "tcp:fd00:ec2::254:80",
    "tcp:2606:4700::1111:443", "udp:255.255.255.255:9", "udp:224.0.0.251:5353",
]  # fmt: skip


def test_no_address_is_reachable_and_the_error_comes_at_once(box):
    found = inside(box, "reach", canary(), *ADDRESSES)
    assert all(found["quick " + address] for address in ADDRESSES)
    assert {found[address] for address in ADDRESSES} <= {"ENETUNREACH", "EHOSTUNREACH", "EACCES", "EADDRNOTAVAIL", "EPERM"}


def test_names_do_not_resolve_and_do_not_hang(box):
    code = "import socket, time\nstart = time.time()\ntry: socket.getaddrinfo('example.org', 80); print('resolved')\nexcept OSError: print('no', time.time() - start < 5)\nprint(socket.getaddrinfo('localhost', 80)[0][4][0])"
    assert box.commands.run(["python3", "-c", code]).stdout.startswith("no True\n")


def test_sockets_and_fifos_below_usr_are_dead(make):
    """/usr is lent to every sandbox; through a bind mount its sockets and FIFOs were live, read-only or not."""
    directory = Path("/usr/local/share/ringfence-attack")
    try:
        directory.mkdir()
    except OSError:
        pytest.skip("only root can place a socket below /usr to be attacked")
    directory.chmod(0o755)
    sink = None
    try:
        sink = Sink(directory)
        box, token = make(), canary()
        assert box.files.exists(sink.path)
        found = inside(box, "reach", token, *sink.paths)
        assert sink.saw(token) == 0 and [found[path] for path in sink.paths] == ["ECONNREFUSED", "ENXIO"]
        outside("reach", token, *sink.paths)
        assert sink.saw(token) == 2
    finally:
        if sink is not None:
            sink.close()
        directory.rmdir()


def test_known_service_sockets_are_not_there(box):
    names = "/var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock /run/podman/podman.sock /run/dbus/system_bus_socket /tmp/.X11-unix /run/user /run/systemd"
    assert box.commands.run(f"ls -d {names} 2>/dev/null").stdout == ""
    assert box.commands.run("find / -xdev -type s -o -type p 2>/dev/null | grep -v ^/home/user; env | grep -i 'sock\\|display\\|agent\\|dbus'").stdout == ""


def test_the_network_cannot_be_configured(box):
    code = (
        "import fcntl, socket, struct\ns = socket.socket(2, 2)\nanswers = []\n"
        "for command in (0x8914, 0x8916, 0x890B, 0x8922, 0x8924, 0x89A0, 0x8943, 0x89F0):\n"
        "    try: fcntl.ioctl(s, command, struct.pack('16sH22x', b'lo', 0)); answers.append('done')\n"
        "    except OSError as problem: answers.append(problem.errno)\n"
        "n = socket.socket(16, 3, 0)\n"
        "n.send(struct.pack('IHHII', 32, 16, 5, 1, 0) + struct.pack('BxHiII', 0, 1, 1, 0, 1))\n"
        "answers.append(struct.unpack_from('i', n.recv(4096), 16)[0])\nprint('done' in answers, answers[-1])"
    )
    assert box.commands.run(["python3", "-c", code]).stdout == "False -1\n"


def test_no_address_of_the_host_shows(box):
    shown = box.commands.run("cat /proc/net/* /proc/self/net/dev /etc/resolv.conf /etc/hosts 2>/dev/null").stdout
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        except OSError:
            address = ""
    assert not address or address not in shown
    assert os.uname().nodename not in shown or len(os.uname().nodename) < 4
