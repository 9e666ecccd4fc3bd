"""What users get back: executions, results, command results, file entries. Names follow the E2B SDKs.

Everything here is built from what a sandbox said, so nothing is believed: types are checked field by field,
text is made encodable, sizes and numbers are bounded before they are parsed (`ResultParser`).
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import signal as signals
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ringfence.errors import GuestError
from ringfence.stream.output import decode_kept

__all__ = [
    "Chart",
    "CommandResult",
    "Context",
    "EntryInfo",
    "Execution",
    "ExecutionError",
    "FileType",
    "FilesystemEvent",
    "FilesystemEventType",
    "Logs",
    "OutputMessage",
    "ProcessInfo",
    "PtySize",
    "Result",
    "ResultParser",
    "SandboxMetrics",
    "SkippedEntry",
    "TransferReport",
    "Usage",
    "WriteInfo",
]

MAXIMUM_EVENTS = 10_000
"""Results, errors and the like that one execution may deliver; more are counted and dropped."""

# Bounds on the number of values in one JSON message. A parsed value costs up to 200 bytes of host memory
# where its text costs two or three, so the size of the text alone does not bound the memory.
_MAXIMUM_CONTAINERS = 1_000_000
_MAXIMUM_QUOTES = 4_000_000

CHART_MIME = "application/vnd.ringfence.chart+json"
DATA_MIME = "application/vnd.ringfence.data+json"

_TEXT_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/javascript": "javascript",
}
_BINARY_FIELDS = ("png", "jpeg", "pdf")
_MAXIMUM_NOTES = 30
_FORMATS = (
    "text",
    "html",
    "markdown",
    "svg",
    "png",
    "jpeg",
    "pdf",
    "latex",
    "json",
    "javascript",
    "data",
    "chart",
)


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced, so that printing or encoding it can never fail."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _base64_of(value: object) -> str | None:
    """`value` without white space when it is base64, else None."""
    if not isinstance(value, str) or not value.isascii():
        return None
    text = "".join(value.split())
    try:
        binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return None
    return text


class Chart(dict[str, Any]):
    """The data of one figure, as `e2b_charts` describes it: a dict whose top keys read as attributes too."""

    @property
    def type(self) -> str:
        """`line`, `scatter`, `bar`, `pie`, `box_and_whisker`, `superchart` or `unknown`."""
        return str(self.get("type", "unknown"))

    @property
    def title(self) -> str | None:
        """The title drawn above the figure, if any."""
        return self.get("title")

    @property
    def elements(self) -> list[Any]:
        """The data: shapes depend on `type`."""
        elements = self.get("elements")
        return elements if isinstance(elements, list) else []


@dataclass(repr=False)
class Result:
    """One displayed value, in every format that it offered. `result["png"]` and `result.png` are the same.

    `text` is the plain form (a string's one pair of surrounding quotes is removed, as E2B does); `png`, `jpeg`
    and `pdf` are base64 text; `data` is a DataFrame's columns; `chart` is a figure's data; formats without a
    field of their own are in `extra` by their MIME type. `is_main_result` marks the value of a cell's last line.
    """

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    data: dict[str, Any] | None = None
    chart: Chart | None = None
    is_main_result: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_bundle(
        cls, bundle: Mapping[str, Any], main: bool = False, notes: list[str] | None = None
    ) -> Result:
        """Build from a MIME bundle of the guest. Values of a wrong type, and images that are not base64, are left
        out, and `notes` says so."""
        result = cls(is_main_result=main)
        for mime, value in bundle.items():
            name = _TEXT_FIELDS.get(mime)
            if name is not None:
                if name in _BINARY_FIELDS:
                    setattr(result, name, encoded := _base64_of(value))
                    if encoded is None and notes is not None and len(notes) < _MAXIMUM_NOTES:
                        notes.append(f"{name} of a result was left out: it is not base64")
                elif isinstance(value, str):
                    value = clean_text(value)
                    if name == "text" and len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                        value = value[1:-1]
                    setattr(result, name, value)
            elif mime == "application/json":
                result.json = value
            elif mime == DATA_MIME:
                if isinstance(value, dict):
                    result.data = value
            elif mime == CHART_MIME:
                if isinstance(value, dict):
                    result.chart = Chart(value)
            else:
                result.extra[clean_text(mime)] = value
        return result

    def formats(self) -> list[str]:
        """Names of the formats that this result has."""
        return [name for name in _FORMATS if getattr(self, name) is not None] + list(self.extra)

    def __getitem__(self, name: str) -> Any:
        """The value in one format, by field name or MIME type; None when the result does not offer it."""
        return getattr(self, name) if name in _FORMATS else self.extra.get(name)

    def png_bytes(self) -> bytes | None:
        """The PNG image itself, or None."""
        return None if self.png is None else base64.b64decode(self.png)

    def __str__(self) -> str:
        return self.text if self.text is not None else f"Result({', '.join(self.formats())})"

    def __repr__(self) -> str:
        return f"Result({self.text!r})" if self.text is not None else f"Result(formats={self.formats()})"

    def _repr_html_(self) -> str | None:
        return self.html

    def _repr_markdown_(self) -> str | None:
        return self.markdown

    def _repr_svg_(self) -> str | None:
        return self.svg

    def _repr_png_(self) -> str | None:
        return self.png

    def _repr_jpeg_(self) -> str | None:
        return self.jpeg

    def _repr_pdf_(self) -> str | None:
        return self.pdf

    def _repr_latex_(self) -> str | None:
        return self.latex

    def _repr_json_(self) -> Any:
        return self.json

    def _repr_javascript_(self) -> str | None:
        return self.javascript


@dataclass
class ExecutionError:
    """What ended a cell early: an exception of its code, or the end of its kernel.

    `name` is the exception's class; `KernelDiedError` when the process ended (`os._exit`, a crash) and
    `MemoryLimitExceededError` when that was the out-of-memory killer's work. Code can give its own classes these
    names too; `kind`, which only the host sets, tells them apart: `exception` (raised by the code), `died` (the
    process ended), `limit` (the memory limit was reached), `killed` (the kernel was replaced from outside),
    `interrupted`, `timeout`.
    """

    name: str
    value: str
    traceback: str = ""
    kind: str = "exception"

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" if self.value else self.name


@dataclass
class Logs:
    """What a cell printed: at most one string per stream here, `"".join(...)` is the text.

    Only the newest `limits.output` bytes of each stream are kept; `truncated` says that there was more and
    `stdout_total`, `stderr_total` count all bytes.
    """

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    truncated: bool = False
    stdout_total: int = 0
    stderr_total: int = 0


@dataclass(frozen=True)
class Usage:
    """What an execution used, as the host's control group counts it for the whole sandbox.

    `shared` is True when other executions or commands ran at the same time, background ones included: then their
    use is in these numbers too. `cpu_seconds` counts all processors together. `memory_peak` is the most memory in
    bytes of everything in the sandbox, its files included, while this ran; None where the kernel cannot tell it
    (cgroup v2, when the sandbox had used more before).
    """

    cpu_seconds: float | None = None
    memory_peak: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class SandboxMetrics:
    """What a sandbox uses now, by counters of the host; None where nothing here counts it.

    Sizes are bytes. `memory` is what is charged to the sandbox, `memory_peak` the most so far; with a control group
    that includes its files and caches, else it is what its processes hold. `cpu_seconds` is the processor time of
    all that ever ran in it; without a control group, of what runs and what was waited for. `pids` counts processes
    and threads, the agent's own included. `disk` and `tmp` are what files take. `bytes_in` went to the sandbox
    through this API, `bytes_out` came from it. `uptime` is in seconds, paused times included.
    """

    timestamp: datetime
    uptime: float
    cpu_seconds: float | None
    memory: int | None
    memory_peak: int | None
    pids: int | None
    disk: int | None
    tmp: int | None
    bytes_in: int
    bytes_out: int
    memory_limit: int
    cpus_limit: float
    pids_limit: int
    disk_limit: int
    tmp_limit: int
    oom_kills: int = 0
    paused: bool = False

    @property
    def mem_used(self) -> int | None:
        """The same as `memory` (E2B's name)."""
        return self.memory

    @property
    def mem_total(self) -> int:
        """The same as `memory_limit` (E2B's name)."""
        return self.memory_limit

    @property
    def cpu_count(self) -> float:
        """The same as `cpus_limit` (E2B's name)."""
        return self.cpus_limit

    @property
    def disk_used(self) -> int | None:
        """The same as `disk` (E2B's name)."""
        return self.disk

    @property
    def disk_total(self) -> int:
        """The same as `disk_limit` (E2B's name)."""
        return self.disk_limit


@dataclass
class Execution:
    """The outcome of `run_code`.

    `notes` says in words what was left out (results or formats of them beyond `limits.result`, results beyond
    10,000 in number, JSON nested too deep, images that are not base64) and
    `restarted` is True when the kernel was fresh because the one before had died. `usage` is what it used as the
    host counts it; None without a control group.
    """

    results: list[Result] = field(default_factory=list)
    logs: Logs = field(default_factory=Logs)
    error: ExecutionError | None = None
    execution_count: int | None = None
    restarted: bool = False
    notes: list[str] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def text(self) -> str | None:
        """Text of the main result (the value of the last line), or None."""
        for result in self.results:
            if result.is_main_result:
                return result.text
        return None

    def to_json(self) -> str:
        """The whole execution as JSON text."""
        return json.dumps(
            {
                "results": [
                    {
                        **{name: result[name] for name in result.formats()},
                        "is_main_result": result.is_main_result,
                    }
                    for result in self.results
                ],
                "logs": {
                    "stdout": self.logs.stdout,
                    "stderr": self.logs.stderr,
                    "truncated": self.logs.truncated,
                },
                "error": None
                if self.error is None
                else {
                    "name": self.error.name,
                    "value": self.error.value,
                    "traceback": self.error.traceback,
                    "kind": self.error.kind,
                },
                "execution_count": self.execution_count,
                "notes": self.notes,
            }
        )


@dataclass
class OutputMessage:
    """One piece of output as `run_code` callbacks get it; `timestamp` is in nanoseconds since 1970, host clock."""

    line: str
    timestamp: int
    error: bool = False

    @classmethod
    def now(cls, line: str, error: bool) -> OutputMessage:
        """A message stamped with the present time."""
        return cls(line, time.time_ns(), error)

    def __str__(self) -> str:
        return self.line


@dataclass
class Context:
    """One stateful session of code: its id, language and working directory."""

    id: str
    language: str = "python"
    cwd: str = "/home/user"
    pid: int | None = None
    alive: bool = True
    execution_count: int = 0


class ResultParser:
    """Cuts the RESULTS stream into messages, `!I` length, `B` type, JSON; bounded in bytes and in number.

    The first bytes that fit into `limit` are kept; a message that does not fit is skipped, counted in
    `dropped` and noted, so that a huge figure costs its own result and nothing else. `feed` only cuts, since
    it runs on the I/O thread that all sandboxes share; `decode` does the work and runs on the caller's.
    """

    __slots__ = (
        "_body",
        "_budget",
        "_head",
        "_kind",
        "_missing",
        "_seen",
        "_skipping",
        "dropped",
        "limit",
        "notes",
    )

    RESULT = 1
    ERROR = 2
    _HEAD = struct.Struct("!IB")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        self.notes: list[str] = []
        self._budget = limit
        self._seen = 0
        self._head = bytearray()
        self._body = bytearray()
        self._kind = 0
        self._missing = -1  # bytes of the present message still to come; -1: reading a head
        self._skipping = False

    def feed(self, data: bytes | memoryview) -> list[tuple[int, bytearray]]:
        """Take the next bytes of the stream; returns type and body of the messages that they complete."""
        messages: list[tuple[int, bytearray]] = []
        position, end = 0, len(data)
        while position < end and self._seen <= MAXIMUM_EVENTS:
            if self._missing < 0:
                take = min(self._HEAD.size - len(self._head), end - position)
                self._head += data[position : position + take]
                position += take
                if len(self._head) < self._HEAD.size:
                    break
                self._missing, self._kind = self._HEAD.unpack(self._head)
                self._head.clear()
                self._seen += 1
                if self._seen > MAXIMUM_EVENTS:
                    # From here on nothing is even cut: a flood of empty messages must cost no time.
                    self._drop(f"an execution may deliver {MAXIMUM_EVENTS} of them")
                    self._missing = -1
                    break
                self._skipping = self._missing > self._budget
                if self._skipping:
                    self._drop(
                        f"{self._missing} bytes do not fit into limits.result ({self.limit} bytes in all)"
                    )
                else:
                    self._budget -= self._missing
            take = min(self._missing, end - position)
            if not self._skipping:
                self._body += data[position : position + take]
            position += take
            self._missing -= take
            if self._missing == 0:
                self._missing = -1
                if not self._skipping:
                    messages.append((self._kind, self._body))
                    self._body = bytearray()
        return messages

    def finish(self) -> None:
        """The stream has ended: note a message that the end cut off."""
        if self._missing > 0 and not self._skipping:
            self._drop("its end never came")

    def decode(self, body: bytes | bytearray) -> dict[str, Any] | None:
        """The object in the body of a message, or None, noted, when it is malformed or too rich in values."""
        if body.count(b"[") + body.count(b"{") > _MAXIMUM_CONTAINERS or body.count(b'"') > _MAXIMUM_QUOTES:
            self._drop("it holds too many values")
            return None
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._drop("it is not well-formed")
            return None
        return message

    def take_notes(self, notes: object) -> None:
        """What the kernel says it left out of a result. Bounded, since it is the guest's word."""
        if not isinstance(notes, list):
            return
        for note in notes[:_MAXIMUM_NOTES]:
            if isinstance(note, str) and len(self.notes) < _MAXIMUM_NOTES:
                self.notes.append(clean_text(note[:500]))

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped <= 10:
            self.notes.append(f"a result was left out: {why}")
        elif self.dropped == 11:
            self.notes.append("more results were left out")


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` where there is no name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(repr=False)
class CommandResult:
    """How a command ended and what it wrote.

    `exit_code` is the program's own, 127 for a missing program, 126 for one that may not be executed, and
    128 + n after death by signal n, which `signal` tells apart from an exit with that number.
    `stdout_bytes`, `stderr_bytes` hold the newest `limits.output` bytes of each stream exactly; `stdout`,
    `stderr` are the same as text with undecodable bytes replaced; a PTY's output is in both `pty_bytes` and
    `stdout_bytes`. `stdout_total`, `stderr_total` count all bytes written, `truncated` says that some are gone.
    `error` is None after exit 0, else a line such as `exit status 2` or `killed by SIGKILL`; `oom` is True
    when the out-of-memory killer was at work. `background` is True when children of the command still run.
    Times are in seconds, memory in bytes; the guest reports `cpu_seconds` and `max_rss`, the host `duration` (less
    what was spent paused) and, where there is a control group, `usage`.
    """

    exit_code: int = 0
    signal: int | None = None
    error: str | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    pid: int | None = None
    oom: bool = False
    background: bool = False
    duration: float = 0.0
    cpu_seconds: float | None = None
    max_rss: int | None = None
    usage: Usage | None = None

    @property
    def stdout(self) -> str:
        """Kept output as text."""
        return decode_kept(self.stdout_bytes, self.stdout_total > len(self.stdout_bytes))

    @property
    def stderr(self) -> str:
        """Kept error output as text."""
        return decode_kept(self.stderr_bytes, self.stderr_total > len(self.stderr_bytes))

    @property
    def pty_bytes(self) -> bytes:
        """Kept output of a PTY (the same as `stdout_bytes`)."""
        return self.stdout_bytes

    @property
    def truncated(self) -> bool:
        """True when output was longer than what is kept."""
        return self.stdout_total > len(self.stdout_bytes) or self.stderr_total > len(self.stderr_bytes)

    @property
    def ok(self) -> bool:
        """True after exit code 0."""
        return self.exit_code == 0

    def __repr__(self) -> str:
        end = f", signal={self.signal}" if self.signal else ""
        return (
            f"CommandResult(exit_code={self.exit_code}{end}, "
            f"stdout={_shorten(self.stdout)!r}, stderr={_shorten(self.stderr)!r})"
        )


def _shorten(text: str, width: int = 200) -> str:
    return text if len(text) <= width else text[:width] + "…"


@dataclass
class PtySize:
    """Size of a terminal in character cells."""

    rows: int = 24
    cols: int = 80


@dataclass
class ProcessInfo:
    """A command that runs in the sandbox; `argv` is as it was asked, `user` who it runs as."""

    pid: int
    argv: list[str]
    user: str = "user"

    @property
    def cmd(self) -> str:
        """The program."""
        return self.argv[0] if self.argv else ""

    @property
    def args(self) -> list[str]:
        """The program's arguments."""
        return self.argv[1:]


_EPOCH = datetime.fromtimestamp(0, UTC)


class FileType(str, enum.Enum):
    """What a directory entry is."""

    FILE = "file"
    DIR = "dir"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


@dataclass
class WriteInfo:
    """A file that was written. `size` in bytes and `sha256` were checked against what was sent."""

    name: str
    path: str
    type: FileType | None = FileType.FILE
    metadata: dict[str, str] = field(default_factory=dict)
    size: int = 0
    sha256: str = ""


@dataclass
class EntryInfo:
    """One entry of the sandbox's file system. Names hold arbitrary bytes as surrogate escapes (`os.fsencode`).

    `mode` holds the permission bits, `permissions` the same as `ls -l` shows them; `size` is in bytes;
    `modified_time` is in UTC; `symlink_target` is the link's text, unresolved. `unreadable` is None, or why this
    entry, or what is in this directory, could not be looked at: a listing is complete where none has it.
    """

    name: str
    path: str
    type: FileType
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    owner: str = ""
    group: str = ""
    modified_time: datetime = _EPOCH
    symlink_target: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    unreadable: str | None = None

    @property
    def permissions(self) -> str:
        """`drwxr-xr-x` and the like."""
        letters = "".join(
            letter if self.mode >> (8 - place) & 1 else "-" for place, letter in enumerate("rwxrwxrwx")
        )
        return {"dir": "d", "symlink": "l", "fifo": "p", "socket": "s", "device": "c"}.get(
            self.type.value, "-"
        ) + letters

    @property
    def is_dir(self) -> bool:
        """True for a directory."""
        return self.type is FileType.DIR

    @classmethod
    def from_guest(cls, entry: object) -> EntryInfo:
        """Build from the guest's word. Raises GuestError where a field has the wrong type."""
        if not isinstance(entry, dict):
            raise GuestError("an entry must be an object", code="malformed")
        seconds = _number(entry, "modified")
        try:
            modified = datetime.fromtimestamp(seconds, UTC)
        except (ValueError, OverflowError, OSError):
            modified = _EPOCH
        target = entry.get("target")
        if target is not None and not isinstance(target, str):
            raise GuestError("target must be text", code="malformed")
        metadata = entry.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise GuestError("metadata must be an object", code="malformed")
        return cls(
            name=_text(entry, "name"),
            path=_text(entry, "path"),
            type=_kind(entry),
            size=_integer(entry, "size"),
            mode=_integer(entry, "mode") & 0o7777,
            uid=_integer(entry, "uid"),
            gid=_integer(entry, "gid"),
            owner=_text(entry, "owner"),
            group=_text(entry, "group"),
            modified_time=modified,
            symlink_target=target,
            metadata={str(name): str(value) for name, value in metadata.items()} if metadata else {},
            unreadable=(clean_text(_text(entry, "error")[:200]) or None) if "error" in entry else None,
        )


_FILE_TYPES = {kind.value: kind for kind in FileType}


def _kind(entry: dict[str, Any]) -> FileType:
    value = entry.get("type")
    kind = _FILE_TYPES.get(value) if isinstance(value, str) else None
    if kind is None:
        raise GuestError("type must be the name of a file type", code="malformed")
    return kind


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name, "")
    if not isinstance(value, str):
        raise GuestError(f"{name} must be text", code="malformed")
    return value


def _integer(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name, 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise GuestError(f"{name} must be a number from 0", code="malformed")
    return value


def _number(entry: dict[str, Any], name: str) -> float:
    value = entry.get(name, 0)
    if type(value) not in (int, float):
        raise GuestError(f"{name} must be a number", code="malformed")
    return float(value) if abs(value) < 1e15 else 0.0


class FilesystemEventType(str, enum.Enum):
    """What happened to an entry. `OVERFLOW`: more happened than could be told; list the directory anew."""

    CREATE = "create"
    WRITE = "write"
    REMOVE = "remove"
    RENAME = "rename"
    CHMOD = "chmod"
    OVERFLOW = "overflow"


@dataclass
class FilesystemEvent:
    """One change below a watched directory; `name` is relative to it, `target` the new name after a rename."""

    name: str
    type: FilesystemEventType
    target: str | None = None


@dataclass
class SkippedEntry:
    """Something that a directory transfer left out, and why."""

    path: str
    reason: str


@dataclass
class TransferReport:
    """What a transfer moved: numbers, bytes, and everything that it left out with the reason."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    bytes: int = 0
    skipped: list[SkippedEntry] = field(default_factory=list)

    def __iter__(self) -> Iterator[SkippedEntry]:
        return iter(self.skipped)
