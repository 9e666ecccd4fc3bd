"""What the command line asks of the nodes that run: which sandboxes they hold, to end one, what it printed last.

Guards against believing: a node answers for its own sandboxes only, each answer is bounded and its fields are
checked, and what runs is what /proc says runs (running.py); a node adds names and numbers to that. A node that does
not answer (it is stopped, or another version) takes nothing away: its sandboxes are listed without a name.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from ringfence.cli import running as running_module
from ringfence.cli.running import Running, running
from ringfence.errors import InvalidArgumentError, NotFoundError, RingfenceError
from ringfence.node import presence

_ANSWER = 16 << 20  # bytes
PATIENCE = 5.0  # seconds a node may take to answer
MARK = b"\n"


class Owner:
    """A node that answers."""

    def __init__(self, entry: presence.Entry) -> None:
        self.pid = entry.pid
        self._entry = entry

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One question. Raises OSError when it does not answer, NotFoundError when it says that it cannot."""
        with self.open(request) as connection:
            heard = b""
            while not heard.endswith(MARK):
                piece = connection.recv(1 << 18)
                if not piece or len(heard) > _ANSWER:
                    raise ConnectionError("the node ended its answer too early")
                heard += piece
        try:
            answer = json.loads(heard)
        except ValueError:
            raise ConnectionError("the node's answer makes no sense") from None
        if not isinstance(answer, dict):
            raise ConnectionError("the node's answer makes no sense")
        if "error" in answer:
            raise NotFoundError(str(answer["error"]), hint="`ringfence ls` shows what runs")
        return answer

    def open(self, request: dict[str, Any]) -> socket.socket:
        """A connection on which the question has been asked."""
        connection = presence.connect(self._entry, PATIENCE)
        try:
            connection.sendall(json.dumps(request).encode() + MARK)
        except OSError:
            connection.close()
            raise
        return connection


def sandboxes() -> list[tuple[Running, Owner | None]]:
    """All sandboxes whose processes this user may see, oldest first, with the node that answered for each."""
    told: dict[int, tuple[dict[str, Any], Owner]] = {}
    for entry in presence.entries():
        owner = Owner(entry)
        try:
            rows = owner.ask({"do": "list"}).get("sandboxes")
        except (OSError, RingfenceError):
            continue
        for row in rows if isinstance(rows, list) else []:
            usage = row.get("usage") if isinstance(row, dict) else None
            if isinstance(usage, dict) and isinstance(usage.get("pid"), int):
                told[usage["pid"]] = (row, owner)
    found: list[tuple[Running, Owner | None]] = []
    for each in running():
        row, owner = told.get(each.pid, ({}, None))
        if owner is not None and owner.pid == each.owner:
            _complete(each, row)
            found.append((each, owner))
        else:
            found.append((each, None))
    return found


def _complete(each: Running, row: dict[str, Any]) -> None:
    """Take over from a node's row what has the right type."""
    for name in ("id", "template", "policy", "state"):
        if isinstance(row.get(name), str):
            setattr(each, name, row[name])
    each.shell = row.get("shell") is True
    metadata = row.get("metadata")
    if isinstance(metadata, dict):
        each.metadata = {str(name): str(text) for name, text in metadata.items()}
    usage = row["usage"]
    seconds = usage.get("cpu_seconds")
    each.cpu_seconds = float(seconds) if isinstance(seconds, (int, float)) else None
    if isinstance(usage.get("memory"), int):
        each.memory = usage["memory"]
    limits = row.get("limits")
    if isinstance(limits, dict) and isinstance(limits.get("memory"), int):
        each.memory_limit = limits["memory"]


def kill(each: Running, owner: Owner | None) -> bool:
    """End a sandbox: its owner does, or else a signal to its first process. False when it was not there or stayed."""
    if owner is not None:
        try:
            owner.ask({"do": "kill", "id": each.id})
            return True
        except (OSError, RingfenceError):
            pass  # the owner is stuck or gone: what runs is killed all the same
    return running_module.kill(each.pid)


def find(name: str) -> tuple[Running, Owner | None]:
    """The sandbox with that pid, id, beginning of an id, or `name` in its metadata.

    Raises NotFoundError, InvalidArgumentError when there are several.
    """
    known = sandboxes()
    for matches in (
        [each for each in known if str(each[0].pid) == name],
        [each for each in known if each[0].id == name or (each[0].metadata.get("name") == name)],
        [each for each in known if len(name) >= 4 and each[0].id.startswith(name)],
    ):
        if len(matches) > 1:
            raise InvalidArgumentError(f"{name!r} means {len(matches)} sandboxes", hint="name one by its whole id")
        if matches:
            return matches[0]
    raise NotFoundError(f"no sandbox {name!r} runs here", hint="`ringfence ls` shows those that do")
