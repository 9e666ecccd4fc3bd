"""`ringfence logs`: the newest output that a sandbox's owner keeps.

Guards the terminal (output is sanitised there, a pipe gets the exact bytes) and the owner (a reader says what it has
seen, so an answer brings news only).
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any

from ringfence import terminal
from ringfence.cli import owners
from ringfence.errors import EngineError, RingfenceError

_PAUSE = 0.25  # seconds between two looks with --follow


class _Printer:
    """What goes to one descriptor."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._sanitiser = terminal.Sanitiser() if os.isatty(number) else None

    def write(self, data: bytes) -> None:
        view = memoryview(data if self._sanitiser is None else self._sanitiser.feed(data))
        while view:
            view = view[os.write(self._number, view) :]

    def finish(self) -> None:
        if self._sanitiser is not None:
            os.write(self._number, self._sanitiser.finish())


def show(name: str, follow: bool, as_json: bool) -> None:
    """Print the log of a sandbox; with `follow` until it ends. Raises NotFoundError, EngineError."""
    sandbox, owner = owners.find(name)
    if owner is None:
        raise EngineError(
            f"nobody keeps the output of sandbox {name}",
            hint="`ringfence run` and `exec` print theirs themselves; a program's sandboxes have an ID in `ringfence ls`",
        )
    out, err = _Printer(1), _Printer(2)
    seen: dict[str, list[int]] = {}
    shown_end: set[int] = set()
    on_terminal = sys.stdout.isatty() and not as_json
    while True:
        try:
            entries = owner.ask({"do": "logs", "id": sandbox.id, "seen": seen}).get("entries")
        except (OSError, RingfenceError):
            if seen or follow:
                break  # it has ended
            raise
        for entry in entries if isinstance(entries, list) else []:
            number = int(entry["number"])
            data = {stream: base64.b64decode(entry[stream]["data"]) for stream in ("stdout", "stderr")}
            if as_json:
                _print_json(entry, data, str(number) not in seen, number in shown_end)
            else:
                if on_terminal and str(number) not in seen:
                    began = time.strftime("%H:%M:%S", time.localtime(entry["began"]))
                    out.write(f"── {began} {entry['kind']} {terminal.line(entry['name'].splitlines()[0] if entry['name'] else '')}\n".encode())
                out.write(data["stdout"])
                err.write(data["stderr"])
            seen[str(number)] = [int(entry["stdout"]["total"]), int(entry["stderr"]["total"])]
            if entry["ended"] is not None:
                shown_end.add(number)
        if not follow:
            break
        time.sleep(_PAUSE)
    out.finish()
    err.finish()


def _print_json(entry: dict[str, Any], data: dict[str, bytes], new: bool, ended_before: bool) -> None:
    if new or any(data.values()) or (entry["ended"] is not None and not ended_before):
        document = {name: entry[name] for name in ("number", "kind", "name", "began", "ended")}
        document |= {stream: piece.decode("utf-8", "replace") for stream, piece in data.items()}
        print(json.dumps(document), flush=True)
