"""Landlock scopes close abstract sockets and signals; ordinary use goes on; missing pieces are named."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from forked import in_child

from ringfence.linux import capabilities, landlock

needs_scopes = pytest.mark.skipif(
    landlock.abi() < landlock.SCOPES_ABI, reason="this kernel's Landlock ABI has no scopes (needs Linux 6.12)"
)
needs_landlock = pytest.mark.skipif(landlock.abi() < 1, reason="this kernel has no Landlock")


def confine() -> None:
    capabilities.set_no_new_privileges()
    ruleset = landlock.scopes_ruleset()
    landlock.restrict_self(ruleset)
    os.close(ruleset)


def test_no_right_is_asked_of_a_kernel_that_does_not_know_it() -> None:
    assert landlock.file_rights(0) == 0
    assert landlock.file_rights(1) == (1 << 13) - 1
    assert landlock.file_rights(2) & landlock.FILE_REFER
    assert not landlock.file_rights(2) & landlock.FILE_TRUNCATE
    assert landlock.file_rights(5) & landlock.DEVICE_IOCTL
    assert landlock.file_rights(99) == landlock.file_rights(5)


@needs_landlock
def test_a_right_the_kernel_does_not_know_is_an_error() -> None:
    with pytest.raises(OSError):
        landlock.create_ruleset(files=1 << 40)


@needs_scopes
def test_an_abstract_socket_made_outside_is_out_of_reach() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = b"\0ringfence-test-%d" % os.getpid()
        listener.bind(name)
        listener.listen()

        def connect() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(name)
            return "connected"

        def confined() -> str:
            confine()
            return connect()

        assert in_child(connect) == "connected"  # positive control
        assert in_child(confined) == "EPERM"


@needs_scopes
def test_an_abstract_socket_made_inside_works() -> None:
    def act() -> str:
        confine()
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(b"\0ringfence-inner-%d" % os.getpid())
            listener.listen()
            client.connect(listener.getsockname())
        return "connected"

    assert in_child(act) == "connected"


@needs_scopes
def test_processes_outside_cannot_be_signalled_and_those_inside_can() -> None:
    outside = os.fork()
    if outside == 0:
        time.sleep(30)
        os._exit(0)
    try:

        def send() -> str:
            os.kill(outside, 0)
            return "sent"

        def confined() -> str:
            confine()
            inner = os.fork()
            if inner == 0:
                time.sleep(30)
                os._exit(0)
            os.kill(inner, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) == -signal.SIGKILL
            return send()

        assert in_child(send) == "sent"  # positive control
        assert in_child(confined) == "EPERM"
    finally:
        os.kill(outside, signal.SIGKILL)
        os.waitpid(outside, 0)


@needs_scopes
def test_a_ruleset_is_closed_on_exec() -> None:
    ruleset = landlock.scopes_ruleset()
    try:
        assert not os.get_inheritable(ruleset)
    finally:
        os.close(ruleset)


@needs_landlock
def test_file_rules_allow_what_they_name_and_nothing_else(tmp_path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "file").write_text("yes")
    (tmp_path / "single").write_text("alone")
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut" / "file").write_text("no")

    def read(*names: str) -> str:
        seen = []
        for name in names:
            try:
                seen.append((tmp_path / name).read_text())
            except PermissionError:
                seen.append("denied")
        return " ".join(seen)

    def confined() -> str:
        capabilities.set_no_new_privileges()
        ruleset = landlock.create_ruleset(files=landlock.file_rights(landlock.abi()))
        landlock.allow_beneath(ruleset, str(tmp_path / "open"), landlock.READ_AND_EXECUTE)
        landlock.allow_beneath(ruleset, str(tmp_path / "single"), landlock.READ_AND_EXECUTE)
        landlock.restrict_self(ruleset)
        try:
            (tmp_path / "open" / "file").write_text("changed")
            return "wrote"
        except PermissionError:
            return read("open/file", "single", "shut/file")

    everything = ("open/file", "single", "shut/file")
    assert read(*everything) == "yes alone no"  # positive control
    assert in_child(confined) == "yes alone denied"


@needs_landlock
def test_a_path_that_is_not_there_is_an_error(tmp_path) -> None:
    ruleset = landlock.create_ruleset(files=landlock.FILE_READ)
    try:
        with pytest.raises(FileNotFoundError):
            landlock.allow_beneath(ruleset, str(tmp_path / "missing"), landlock.FILE_READ)
    finally:
        os.close(ruleset)
