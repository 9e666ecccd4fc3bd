"""The facades: twins by generation, typed options, and clear words where a sandbox cannot be used."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_guest import Conversation, FakeHandle

import ringfence
from ringfence import (
    AsyncSandbox,
    InvalidArgumentError,
    NotFoundError,
    PtySize,
    Sandbox,
    SandboxDeadError,
    SandboxError,
    WrongProcessError,
    _sandbox_async,
    _sandbox_core,
    _sandbox_sync,
)
from ringfence._sandbox_core import build_spec
from ringfence.guest import protocol

ROOT = Path(__file__).resolve().parent.parent.parent
STDOUT = protocol.STDOUT


def cell(conversation: Conversation, request: dict[str, Any]) -> None:
    conversation.data(STDOUT, request["code"].encode())
    conversation.close(status="ok", execution_count=1)


def program(conversation: Conversation, request: dict[str, Any]) -> None:
    conversation.event(started={"pid": 9})
    conversation.data(STDOUT, b"one\n")
    if request["stdin"]:
        conversation.data(STDOUT, conversation.body(protocol.STDIN))
    conversation.close(exit_code=0)


class FakeNode:
    """What the facade uses of a node."""

    def __init__(self) -> None:
        self.started: list[FakeHandle] = []

    async def start(self, spec: Any, progress: Any = None) -> FakeHandle:
        handle = FakeHandle({"kernel.execute": cell, "exec": program}, spec.limits)
        handle.spec = spec
        handle.template = spec.template
        self.started.append(handle)
        return handle

    def find(self, identifier: str) -> FakeHandle | None:
        return next((handle for handle in self.started if handle.id == identifier), None)

    def handles(self) -> list[FakeHandle]:
        return [handle for handle in self.started if not handle._gone.done()]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    import ringfence.node.node as real

    fake = FakeNode()
    monkeypatch.setattr(real.Node, "current", classmethod(lambda cls: fake))
    yield fake
    for handle in fake.started:
        handle.die("killed")


def test_the_sync_twin_is_what_the_generator_writes() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import generate_sync
    finally:
        sys.path.pop(0)
    assert generate_sync.TARGET.read_text() == generate_sync.generate(generate_sync.SOURCE.read_text())


def test_both_facades_have_the_same_names_and_parameters() -> None:
    for name in ("Sandbox", "Commands", "Files", "Pty", "CommandHandle", "WatchHandle", "FileStream"):
        one, other = getattr(_sandbox_async, f"Async{name}"), getattr(_sandbox_sync, name)
        public = {key for key in vars(one) if not key.startswith("_")}
        assert public == {key for key in vars(other) if not key.startswith("_")}
        for key in public:
            method = inspect.getattr_static(one, key)
            if inspect.isfunction(method):
                twin = inspect.getattr_static(other, key)
                assert list(inspect.signature(method).parameters) == list(inspect.signature(twin).parameters)
                assert not inspect.iscoroutinefunction(twin)


def test_every_public_method_is_documented() -> None:
    for name in dir(_sandbox_async):
        value = getattr(_sandbox_async, name)
        if inspect.isclass(value) and name.startswith("Async"):
            for key, member in vars(value).items():
                if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    assert inspect.getdoc(member), f"{name}.{key}"


def test_a_with_block_starts_and_kills(node: FakeNode) -> None:
    with Sandbox(envs={"A": "1"}, metadata={"who": "me"}, timeout=60) as sandbox:
        assert sandbox.is_running()
        assert sandbox.run_code("hello").logs.stdout == ["hello"]
        info = sandbox.info()
        assert (info.id, info.metadata, info.template, info.state) == (
            sandbox.id,
            {"who": "me"},
            "base",
            "running",
        )
        assert (info.expires_at - info.started_at).total_seconds() == pytest.approx(60)
        assert [item.id for item in Sandbox.list()] == [sandbox.id]
        assert Sandbox.connect(sandbox.id).id == sandbox.id
    assert node.started[0].kills == ["killed"]
    assert node.started[0].spec.envs == {"A": "1"}
    assert not sandbox.is_running()
    assert sandbox.kill() is False
    with pytest.raises(SandboxDeadError):
        sandbox.run_code("x")
    with pytest.raises(NotFoundError):
        Sandbox.connect("nope")


def test_create_is_the_constructor(node: FakeNode) -> None:
    assert Sandbox.create("data", pids=50).info().template == "data"
    assert node.started[0].spec.limits.pids == 50


def test_the_async_facade_does_the_same_under_asyncio(node: FakeNode) -> None:
    async def main() -> None:
        async with AsyncSandbox() as sandbox:
            executions = await asyncio.gather(*(sandbox.run_code(str(number)) for number in range(20)))
            assert [execution.logs.stdout for execution in executions] == [
                [str(number)] for number in range(20)
            ]
            assert (await sandbox.commands.run("x", stdin="two")).stdout == "one\ntwo"
            handle = await sandbox.commands.run("x", background=True)
            assert [piece async for piece in handle] == [("one\n", None, None)]
        other = await AsyncSandbox.create()
        assert await other.kill()

    asyncio.run(main())
    assert all(handle.kills for handle in node.started)


def test_an_async_sandbox_that_was_not_started_says_so() -> None:
    with pytest.raises(SandboxError) as caught:
        asyncio.run(AsyncSandbox().run_code("1"))
    assert "create" in caught.value.hint


def test_the_sync_facade_works_inside_a_running_event_loop(node: FakeNode) -> None:
    async def main() -> str:
        with Sandbox() as sandbox:
            return sandbox.run_code("inside").logs.stdout[0]

    assert asyncio.run(main()) == "inside"


def test_threads_share_a_sandbox(node: FakeNode) -> None:
    with Sandbox() as sandbox:
        seen: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: seen.extend(sandbox.run_code(str(n)).logs.stdout))
            for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(int, seen)) == list(range(20))


def test_background_commands_take_no_callbacks_but_their_wait_does(node: FakeNode) -> None:
    with Sandbox() as sandbox:
        with pytest.raises(InvalidArgumentError):
            sandbox.commands.run("x", background=True, on_stdout=print)  # type: ignore[call-overload]
        handle = sandbox.commands.run("x", background=True)
        seen: list[str] = []
        assert handle.wait(on_stdout=seen.append).exit_code == 0
        assert seen == ["one\n"]
        assert handle.read_output(1, size=2) == b"ne"
        assert sandbox.commands.connect(handle.pid).stdout == "one\n"
        with pytest.raises(InvalidArgumentError):
            handle.resize(PtySize())


def test_a_forked_child_neither_uses_nor_kills_its_parents_sandbox(node: FakeNode) -> None:
    sandbox = Sandbox()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        words = []
        for use in (lambda: sandbox.run_code("1"), sandbox.kill, lambda: sandbox.files.read("/f")):
            try:
                use()
                words.append("used")
            except WrongProcessError:
                words.append("refused")
            except BaseException as error:  # noqa: BLE001 (told to the parent)
                words.append(repr(error))
        sandbox.__exit__(None, None, None)
        os.write(writer, " ".join(words).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 1000) == b"refused refused refused"
    os.close(reader)
    assert sandbox.run_code("still").logs.stdout == ["still"]
    sandbox.kill()


def test_a_sandbox_cannot_be_pickled_and_says_why(node: FakeNode) -> None:
    with Sandbox() as sandbox, pytest.raises(WrongProcessError):
        pickle.dumps(sandbox)


def test_options_reach_the_specification() -> None:
    spec, timeout = build_spec(
        "plain",
        {
            "memory": "256MiB",
            "cpus": 2,
            "limits": {"timeout": "2min", "memory": 5},
            "max_age": "2h",
            "timeout": "1h",
        },
    )
    assert (spec.template, spec.limits.memory, spec.limits.cpus) == ("plain", 256 << 20, 2)
    assert (spec.limits.timeout, spec.limits.max_age, timeout) == (120, 7200, 3600)
    spec, _ = build_spec("base", {"policy": {"limits": {"pids": 77}}, "output": "2MiB"})
    assert (spec.limits.pids, spec.limits.output) == (77, 2 << 20)


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("", {}),
        ("base", {"colour": 1}),
        ("base", {"engine": "none such"}),
        ("base", {"timeout": -1}),
        ("base", {"timeout": 0}),
        ("base", {"timeout": 99999}),
        ("base", {"memory": "much"}),
        ("base", {"envs": {"a=b": "c"}}),
        ("base", {"metadata": {"a": 5}}),
        ("base", {"limits": 5}),
        ("base", {"limits": {"nope": 5}}),
    ],
)
def test_options_that_cannot_be_meant_are_refused(template: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        build_spec(template, options)


def test_nothing_of_ended_sandboxes_is_kept(node: FakeNode) -> None:
    with Sandbox() as sandbox:
        assert sandbox.id in _sandbox_core._known
    assert sandbox.id not in _sandbox_core._known


def test_the_reason_of_the_end_is_told(node: FakeNode) -> None:
    sandbox = Sandbox()
    node.started[0].die("idle")
    with pytest.raises(SandboxDeadError) as caught:
        sandbox.files.read("/f")
    assert caught.value.reason == "idle"
    assert "limits.idle" in str(caught.value)
    assert ringfence.SandboxDeadError is SandboxDeadError
