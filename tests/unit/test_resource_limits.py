"""Resource limits: the table's values, and that they are really set in a child."""

from __future__ import annotations

import errno
import json
import os
import resource

import pytest

from ringfence.linux import resource_limits


def in_child(function):
    """Run in a fork (limits cannot be raised again) and return its JSON answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(function()).encode())
        except Exception as error:  # noqa: BLE001 - the parent shows whatever it was
            os.write(writer, json.dumps({"raised": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def table(**changes):
    values: dict = {"pids": 100, "open_files": 64, "file_size": 4096}
    values.update(changes)
    return resource_limits.for_policy(**values)


def test_core_is_exactly_one_because_piped_handlers_ignore_zero():
    assert table()["CORE"] == [1, 1]


def test_no_limit_lets_anyone_outrank_the_host():
    assert table()["RTPRIO"] == [0, 0]
    assert table()["NICE"] == [0, 0]


def test_data_is_limited_only_where_memory_is_watched():
    assert "DATA" not in table(memory=1 << 20)
    watched = table(memory=1 << 20, memory_mode="watched", data_baseline=512)
    assert watched["DATA"] == [(1 << 20) + 512] * 2


def test_the_table_survives_json():
    assert json.loads(json.dumps(table())) == table()


def test_every_name_is_a_limit_of_this_platform():
    for name in table(memory=1, memory_mode="watched"):
        assert hasattr(resource, "RLIMIT_" + name)


def test_applied_limits_are_in_force_in_the_process():
    def probe():
        shortfalls = resource_limits.apply(table())
        got = {name: list(resource.getrlimit(getattr(resource, "RLIMIT_" + name))) for name in table()}
        return {"got": got, "short": [shortfall.name for shortfall in shortfalls]}

    answer = in_child(probe)
    for name, value in table().items():
        if name not in answer["short"]:
            assert answer["got"][name] == value


def test_a_file_cannot_grow_past_the_limit_and_could_before(tmp_path):
    path = str(tmp_path / "file")

    def grow():
        with open(path, "wb", buffering=0) as stream:
            written = 0
            try:
                for _ in range(10):
                    written += stream.write(b"x" * 1024)
            except OSError as error:
                return [written, error.errno]
        return [written, 0]

    def limited():
        resource_limits.apply(table())
        return grow()

    assert in_child(grow) == [10240, 0]
    assert in_child(limited) == [4096, errno.EFBIG]


def test_descriptors_run_out_at_the_limit():
    def probe():
        resource_limits.apply(table())
        opened = []
        try:
            while len(opened) < 200:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            return [max(opened) < 64, error.errno]
        return [False, 0]

    assert in_child(probe) == [True, errno.EMFILE]


def test_a_hard_limit_in_force_is_kept_and_reported():
    def probe():
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        shortfalls = resource_limits.apply({"NOFILE": [64, 64]})
        return [[s.name, list(s.wanted), list(s.got), s.stricter] for s in shortfalls]

    assert in_child(probe) == [["NOFILE", [64, 64], [32, 32], True]]


def test_a_core_limit_of_zero_is_a_hole_not_a_stricter_limit():
    def probe():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return [[s.name, s.stricter] for s in resource_limits.apply({"CORE": 1})]

    assert in_child(probe) == [["CORE", False]]


def test_limits_of_another_process_can_be_set():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        assert resource_limits.apply({"NOFILE": [16, 16]}, pid) == []
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (16, 16)
    finally:
        os.write(writer, b"x")
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_an_unknown_limit_is_refused():
    with pytest.raises(ValueError, match="LIFE"):
        resource_limits.apply({"LIFE": 1})
