"""What a person sees of a sandbox's changes, and how they are asked: `ringfence run --workspace . --review`.

Guards the question. What is asked about was shown first, most dangerous first; what does not fit is said to be left
out; nothing that the sandbox wrote acts on the terminal or hides there; what was typed before the question is no
answer to it; without a terminal there is no answer, which means no. A plain `y` applies what is ordinary; each file
that the host would act on by itself is asked for alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ringfence import terminal
from ringfence.changes.model import Change, Changes, FileState, name_of, shown
from ringfence.errors import EngineError, InvalidArgumentError, RingfenceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ringfence.changes.reviewing import Review
    from ringfence.cli.arguments import Request

__all__ = ["LEFT_OUT", "ask", "can_ask", "main", "named", "show"]

LEFT_OUT = 123
"""Exit code where a change was not applied, whatever the reason."""
ROWS = 200  # of the table
LINES = 2000  # of all diffs together
LINES_OF_ONE = 400
WIDTH = 400  # characters of one line

_WORDS = {
    "created": ("new", "green"), "modified": ("changed", "yellow"), "deleted": ("deleted", "red"),
    "renamed": ("renamed", "cyan"), "mode": ("mode", "magenta"),
}  # fmt: skip


def show(changes: Changes, console: Console, only: Iterable[Change] | None = None, *, bounded: bool = True) -> None:
    """Print the table of changes, and the diffs; what stands out first. `only` narrows it to some."""
    listed = sorted(changes if only is None else only, key=lambda change: (change.ordinary, change.raw_path))
    table = _table(changes, listed, bounded)
    if console.is_terminal:
        console.print(table)
    else:  # a file or a pipe: without the blanks that fill up the last column
        with console.capture() as drawn:
            console.print(table)
        console.out("\n".join(line.rstrip() for line in drawn.get().split("\n")), end="", highlight=False)
    lines, hidden = 0, 0
    for change in listed:
        if not change.diff:
            continue
        diff = _diff(change)
        room = min(LINES_OF_ONE, LINES - lines) if bounded else len(diff)
        if room <= 0:
            hidden += 1
            continue
        console.print()
        for line in diff[: room + 1]:
            console.print(line, soft_wrap=True)
        if len(diff) > room + 1:
            console.print(f"… {len(diff) - room - 1} more lines of {shown(change.path)} are not shown", style="dim", markup=False)
        lines += min(len(diff), room)
    if hidden:
        console.print(f"\n… the diffs of {hidden} more files are not shown; `s` shows each, `--json` has all", style="dim")
    if not changes.frozen:
        console.print("\nWhat ran in the sandbox could not be stopped while this was captured.", style="yellow")


def _table(changes: Changes, listed: Sequence[Change], bounded: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    rows, folded = _fold(listed)
    table = Table("", "path", "size", "mode", "remarks", box=None, pad_edge=False, title=None)
    for change in rows[:ROWS] if bounded else rows:
        word, colour = _WORDS[change.kind]
        remark = "; ".join(filter(None, (change.impossible, change.conflict, change.held, change.note, change.diff_note)))
        label = change.label + ("/" if (change.after or change.before or _NOTHING).kind == "directory" else "")
        if change.path in folded:
            label += f" ({folded[change.path]} names in it)"
        if change.after is not None and change.after.kind == "link":
            label += f" -> {shown(change.after.target)}"
        style = "" if change.ordinary else "bold red"
        table.add_row(Text(word, colour), Text(label, style), _size(change), _mode(change), Text(terminal.line(name_of(remark)), style))
    table.caption = changes.summary()
    if len(rows) > ROWS and bounded:
        table.caption = f"{len(rows) - ROWS} more rows are not shown. {table.caption}"
    table.caption_justify = "left"
    return table


_NOTHING = FileState("file", 0)


def _fold(changes: Sequence[Change]) -> tuple[list[Change], dict[str, int]]:
    """Without the names that a deleted or renamed directory says already, as far as they are ordinary; their counts."""
    whole: dict[tuple[str, str], Change] = {}
    for change in changes:
        state = change.before if change.kind in ("deleted", "renamed") else None
        if state is not None and state.kind == "directory":
            whole[change.kind, change.path] = change
    rows: list[Change] = []
    counts: dict[str, int] = {}
    for change in changes:
        top, parent = "", change.path
        while parent := parent.rpartition("/")[0]:
            above = whole.get((change.kind, parent))
            if above is not None and _says(above, change):
                top = parent
        if top and change.ordinary and change.before is not None and (change.after is None or change.after.mode == change.before.mode):
            counts[top] = counts.get(top, 0) + 1
        else:
            rows.append(change)
    return rows, counts


def _says(above: Change, change: Change) -> bool:
    if above.old_path is None:
        return change.old_path is None
    return change.old_path == above.old_path + change.path[len(above.path) :]


def _size(change: Change) -> str:
    before, after = change.before, change.after
    if after is not None and after.kind == "file":
        return f"{before.size} → {after.size}" if before is not None and before.kind == "file" and before.size != after.size else str(after.size)
    return str(before.size) if after is None and before is not None and before.kind == "file" else ""


def _mode(change: Change) -> str:
    before, after = change.before, change.after
    modes = [f"{state.mode:03o}" for state in (before, after) if state is not None and state.kind in ("file", "directory")]
    return " → ".join(dict.fromkeys(modes)) if change.kind in ("mode", "renamed", "modified") and len(set(modes)) > 1 else ""


def _diff(change: Change) -> list[Text]:
    from rich.text import Text

    colours = {"+": "green", "-": "red", "@": "cyan", "\\": "dim"}
    lines = [Text(change.label, "bold" if change.ordinary else "bold red")]
    for raw in change.diff.rstrip("\n").split("\n"):
        line = terminal.text(name_of(raw))
        if len(line) > WIDTH:
            line = f"{line[:WIDTH]}… ({len(line) - WIDTH} more characters)"
        lines.append(Text(line, colours.get(line[:1], "")))
    return lines


# The question -----------------------------------------------------------------------------------------------


def can_ask() -> bool:
    """Whether there is a person: standard input and output are terminals."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def ask(changes: Changes, console: Console, answer: Callable[[str], str] | None = None) -> list[Change]:
    """The changes that the person wants applied. What cannot be applied any more, or never, is not asked for."""
    answer = answer or _typed
    held = [change for change in changes if change.held and not (change.impossible or change.conflict)]
    ordinary = list(changes.ordinary)
    where = shown(changes.source)
    if ordinary:
        count = f"{len(ordinary)} change{'s' if len(ordinary) > 1 else ''}"
        rest = f" ({len(held)} more {'are' if len(held) > 1 else 'is'} asked for one by one)" if held else ""
        reply = answer(f"Apply {count} to {where}{rest}? [y]es, [n]o, [s]elect: ")
        if reply.startswith("s"):
            return _select(changes, [*ordinary, *held], console, answer)
        if not reply.startswith("y"):
            return []
    return [*ordinary, *(change for change in held if _wanted(change, answer))]


def _select(changes: Changes, candidates: list[Change], console: Console, answer: Callable[[str], str]) -> list[Change]:
    chosen: list[Change] = []
    for change in candidates:
        if change.diff:
            show(changes, console, [change], bounded=False)
        reply = "" if change.held else answer(f"Apply {change}? [y]es, [n]o, [q]uit without applying anything: ")
        if reply.startswith("q"):
            return []
        if reply.startswith("y") or (change.held and _wanted(change, answer)):
            chosen.append(change)
    return chosen


def _wanted(change: Change, answer: Callable[[str], str]) -> bool:
    return answer(f"{change}: {terminal.line(name_of(change.held))}. Apply it all the same? [y]es, [n]o: ").startswith("y")


def _typed(question: str) -> str:
    import termios

    with suppress(termios.error):
        # Typed, or sent by the terminal itself in answer to an escape sequence, before there was a question.
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    sys.stdout.write(question)
    sys.stdout.flush()
    try:
        return sys.stdin.readline().strip().lower()
    except (OSError, UnicodeDecodeError):
        return ""


# The program ------------------------------------------------------------------------------------------------


def main(request: Request, early: tuple[int, int] | None) -> int:
    """Run the program, show what it changed, ask, apply. Returns the exit code; see `ringfence run --help`."""
    import signal
    import time

    from ringfence.changes.reviewing import Review
    from ringfence.cli import once

    source = os.path.abspath(os.path.expanduser(request.options["workspace"]))
    held: dict[str, Any] = {}
    review: Review | None = None
    if os.path.isdir(source):  # else the sandbox's start says what is wrong with it
        review = Review(source, time.time(), 1 << 40)

    def capture(run: Any) -> None:
        assert review is not None, "it started, so the directory is there"
        try:
            held["changes"] = _capture(run, review)
        except RingfenceError as error:
            held["error"] = error

    run, (code, ended, message, hint) = once.perform(request, early, capture)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    document = once.document(run, code, ended, message, hint) if request.json else {}
    if message and not request.json:
        once.say(message, hint)
    changes: Changes | None = held.get("changes")
    try:
        if "error" in held:
            raise held["error"]
        if changes is None or review is None:
            if not request.json and code != once.MISUSED:
                once.say("there are no changes to review: the sandbox was gone before they could be read")
            return _end(document, code)
        chosen = _choose(changes, request)
        applied = review.write(changes, chosen) if chosen else None
    except (KeyboardInterrupt, EOFError):
        once.say("nothing was applied")
        return 130
    except RingfenceError as error:
        if request.json:
            document["error"] = {"message": error.message, "hint": error.hint}
        else:
            once.say(error.message, error.hint)
        return _end({**document, "changes": None if changes is None else changes.as_dict()} if document else {}, once.FAILED)
    left = len(changes) - len(chosen)
    if request.json:
        done = {"changes": changes.as_dict(), "applied": [name_of(change.path) for change in chosen]}
        return _end({**document, **done}, code or (LEFT_OUT if left else 0))
    if applied is not None:
        _say(f"{applied}" + (f"; {left} left out" if left else ""))
    elif changes and can_ask():
        _say("nothing was applied")
    return code or (LEFT_OUT if left else 0)


def _capture(run: Any, review: Review) -> Changes:
    from ringfence.changes import reviewing
    from ringfence.cli.once import IDENTIFIER
    from ringfence.engines.namespace.client import refusal

    receive, send = os.pipe2(os.O_CLOEXEC)
    reading = reviewing.on_thread(lambda: review.read(receive), daemon=True)
    try:
        answer = run.ask_and_wait({"do": "capture", "id": IDENTIFIER}, reviewing.PATIENCE, [send])
    finally:
        os.close(send)
    if not answer.get("ok"):
        raise refusal(answer) if answer else EngineError("the sandbox was gone before its changes could be read")
    changes = reading.wait(reviewing.PATIENCE)
    changes.frozen = bool(answer.get("frozen"))
    return changes


def _choose(changes: Changes, request: Request) -> list[Change]:
    from rich.console import Console

    if request.json:
        return named(changes, request.apply, request.yes)
    # The program's own output may go into a pipe, which the review is no part of.
    console = Console(highlight=False, stderr=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 120)
    if not changes:
        console.print("Nothing was changed in the workspace.")
        return []
    show(changes, console)
    console.print()
    if request.yes or request.apply:
        return named(changes, request.apply, request.yes)
    if can_ask():
        return ask(changes, console)
    console.print("There is no terminal to ask on, so nothing is applied: --yes or --apply PATH say what to apply.")
    return []


def _say(text: str) -> None:
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(text, file=stream, flush=True)


def _end(document: dict[str, Any], code: int) -> int:
    if document:
        import json

        document["exit_code"] = document.get("exit_code", code)
        os.write(1, json.dumps(document).encode() + b"\n")
    sys.stdout.flush()
    return code


def named(changes: Changes, paths: Sequence[str], everything: bool) -> list[Change]:
    """The changes that `--yes` and `--apply PATH` stand for: with `everything` the ordinary ones, and those at `paths`.

    Raises InvalidArgumentError for a path where nothing changed.
    """
    chosen = {change.path: change for change in changes.ordinary} if everything else {}
    for path in paths:
        below = path.rstrip("/")
        found = [change for change in changes if change.path == below or (change.ordinary and change.path.startswith(below + "/"))]
        if not found:
            raise InvalidArgumentError(f"--apply {shown(path)}: nothing changed there", hint="paths are relative to the workspace")
        chosen.update((change.path, change) for change in found)
    return list(chosen.values())
