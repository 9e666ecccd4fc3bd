"""The agent's path from its start to the first result, walked in the zygote before there is a sandbox.

Pure speed. A fork shares its zygote's memory until it writes, and a first run writes a lot: the interpreter fills
its caches of attributes and adapts byte code where it runs. Done here, once, the children find it done; each page
that a child need not copy saves some four microseconds. Nothing of it stays: no descriptor, no process, no state
(the kernel's process is never forked here, its words are made up). A failure changes nothing but the speed.
"""

from __future__ import annotations

import socket
from typing import Any

from ringfence.guest import agent, contexts
from ringfence.guest.protocol import Mux

_TIMES = 12  # the interpreter adapts byte code after eight calls
_NOBODY = 1 << 30  # a pid that no process can have (the kernel's highest is 1 << 22)


def _boot(single: bool, kernel: bool) -> dict[str, Any]:
    return {
        "users": {"user": {"uid": 1000, "gid": 1000, "home": "/home/user", "shell": "/bin/bash"}},
        "default_user": "user", "single_uid": single, "agent_uid": 65533,
        "job_gids": None if single else [70000, 120], "env": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        "cwd": "/home/user", "template": "base", "python": "/usr/bin/python3", "kernel": kernel, "prefork": False,
        "oom_score_adj": 500,
    }  # fmt: skip


def rehearse(single: bool, kernel: bool) -> None:
    """Walk the path a dozen times. Precondition: called in the zygote, before it serves."""
    fork = contexts.fork_alone
    contexts.fork_alone = lambda: _NOBODY
    try:
        for _ in range(_TIMES):
            _once(_boot(single, kernel))
    finally:
        contexts.fork_alone = fork


def _once(boot: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    keeper = agent.Agent(theirs, boot)
    opened = []
    try:
        keeper.listen()
        host = Mux("host")
        if boot["kernel"]:
            channel = host.open(
                {"op": "kernel.execute", "context": "default", "code": "1+1", "env": None, "quiet": False}
            )
            host.grant(channel, 1 << 16)
        ours.sendmsg(host.pending())
        keeper._receive()
        context = keeper.contexts.get("default")
        if context is not None and context.kernel is not None:
            kernel = context.kernel
            opened = [kernel._control, *kernel.sources]
            token = context.current.token if context.current is not None else bytes(16)
            kernel._parse(_frame(contexts.READY, bytes(16), b"{}"))
            kernel._parse(
                _frame(contexts.RESULT, token, b'{"data": {"text/plain": "2"}, "main": true}')
                + _frame(contexts.DONE, token, b'{"status": "ok", "execution_count": 1}')
            )
        keeper._flush()
        host.receive(ours.recv(1 << 16))
    finally:
        for item in opened:
            item.close()
        keeper.dispose()
        ours.close()


def _frame(kind: int, token: bytes, payload: bytes) -> bytes:
    return contexts._FRAME.pack(len(payload), kind, token) + payload


