"""The guest protocol: frames on one byte stream, many channels, credit-based flow control.

Both ends use this file; it does no I/O, so that it can be tested and fuzzed byte by byte. On the host it is a
parser of hostile input, since everything a guest sends may come from captured code. It guards the host
against frames that are too large, of unknown kind, in the wrong direction or on channels nobody opened;
against data beyond the credit that was granted; against JSON built to exhaust a parser; and against floods of
frames that cost no credit. Each of these raises `ProtocolViolation`, after which the connection is finished.
Memory held here per connection is bounded by one control frame coming in, and by the credit of the open
channels going out.

A frame is `HEADER` (payload length, channel, kind, stream, zero) and its payload:

| kind   | channel | direction     | payload                                                              |
|--------|---------|---------------|----------------------------------------------------------------------|
| HELLO  | 0       | both, first   | JSON {"version", "minimum", "role", "features"}                      |
| OPEN   | new     | host to guest | JSON {"op", ...}; channel numbers strictly rise and are never reused |
| DATA   | open    | both          | raw bytes of one stream, at least one                                |
| EVENT  | open    | both          | JSON object                                                          |
| CREDIT | open    | both          | !I, at least 1: bytes of DATA and EVENT that the receiver may send more |
| EOF    | open    | both          | empty: that stream ends, once                                        |
| CLOSE  | open    | both          | JSON object; see below                                               |
| PING   | 0       | both          | up to 64 bytes, echoed by PONG                                       |
| PONG   | 0       | both          | the bytes of the oldest PING not answered yet                        |

A channel ends with the guest's CLOSE, `{"ok": true, ...}` or `{"ok": false, "error": {...}}`. The host's
CLOSE, `{"reason": ...}`, is a request to cancel: the guest stops the work and answers with its own CLOSE.
Until that answer arrives the host drops what else comes for the channel; it is still charged to the channel's
credit, so a guest cannot go on for ever.
"""

from __future__ import annotations

import itertools
import struct

from ringfence.linux import json_text

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections import deque
    from typing import Any, NamedTuple, Union

    Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007
else:
    from _collections import deque

    from ringfence.linux.records import NamedTuple

VERSION = 1
MINIMUM_VERSION = 1

HEADER = struct.Struct("!IIBBH")
_CREDIT = struct.Struct("!I")

HELLO, OPEN, DATA, EVENT, CREDIT, EOF, CLOSE, PING, PONG = range(9)
KIND_NAMES = ("HELLO", "OPEN", "DATA", "EVENT", "CREDIT", "EOF", "CLOSE", "PING", "PONG")

STDIN, STDOUT, STDERR, PTY, RESULTS, FILE = range(6)
STREAM_NAMES = ("STDIN", "STDOUT", "STDERR", "PTY", "RESULTS", "FILE")

MAX_PAYLOAD = 1 << 20
MAX_JSON = 64 << 10
"""Bytes of the JSON in HELLO, EVENT and CLOSE. Only OPEN, which a guest never sends, may reach
MAX_PAYLOAD."""
MAX_PING = 64
INITIAL_WINDOW = 1 << 20
MAX_CREDIT = 1 << 31
MAX_CHANNELS = 4096
"""Channels open at one time, those being cancelled included."""
MAX_CHANNEL = (1 << 32) - 1

GRANT_STEP = INITIAL_WINDOW // 4
"""`Mux.grant` gathers small grants until they reach this, so that reading costs few CREDIT frames."""
_EVENT_GRANT_STEP = 16 << 10

_COPY_BELOW = 16 << 10  # joining a small payload to its header is cheaper than one more vector in sendmsg
_MAX_BUFFERS = 64
_MAX_PINGS = 16

# Frames that cost the guest no credit still cost the host time. A guest may send this many on its own
# account, and then a generous multiple of what the host has sent it, which is what gives it cause to send
# them.
_FREE_FRAMES = 1 << 16
_FREE_FRAMES_PER_FRAME = 64
_BYTES_PER_FREE_FRAME = 16

# Which streams each role may receive DATA and EOF on, as bits.
_RECEIVES = {
    "host": 1 << STDOUT | 1 << STDERR | 1 << PTY | 1 << RESULTS | 1 << FILE,
    "guest": 1 << STDIN | 1 << PTY | 1 << FILE,
}
_FREE_KINDS = 1 << CREDIT | 1 << EOF | 1 << PING | 1 << PONG

class ProtocolViolation(ValueError):
    """The peer broke the protocol. The connection cannot go on; on the host the sandbox counts as dead."""


class Event(NamedTuple):
    """One thing that arrived: `payload` is a dict (HELLO, OPEN, EVENT, CLOSE), bytes (DATA, PONG), the number
    of bytes granted (CREDIT), or b"" (EOF). A DATA frame may arrive as several DATA events."""

    kind: int
    channel: int
    stream: int
    payload: Any


class _Channel:
    """Both directions of one channel as this end sees it."""

    __slots__ = ("cancelled", "eof_received", "eof_sent", "receive_credit", "send_credit", "ungranted")

    def __init__(self) -> None:
        self.send_credit = INITIAL_WINDOW
        self.receive_credit = INITIAL_WINDOW
        self.ungranted = 0
        self.eof_sent = 0
        self.eof_received = 0
        self.cancelled = False


def _reject_constant(name: str) -> Any:
    raise ValueError(name + " is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        # Readers convert numbers to int; infinity would raise OverflowError far from here.
        raise ValueError("number out of range")
    return value


# Made once: `json.dumps` and `json.loads` set theirs up anew for every message.
_encode_json = json_text.encoder(",", ":", allow_nan=False)
_scan_json = json_text.scanner(_finite_float, _reject_constant)


def encode_object(value: dict[str, Any], limit: int) -> bytes:
    """JSON of `value` in at most `limit` bytes. Text from `surrogateescape` survives, as \\udcXX escapes.

    Raises ValueError when it is larger, not finite or not JSON."""
    try:
        data = _encode_json(value).encode("ascii")
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if len(data) > limit:
        raise ValueError(f"a control message of {len(data)} bytes; at most {limit} fit")
    return data


def decode_object(data: Buffer) -> dict[str, Any]:
    """The JSON object in `data`. Raises ProtocolViolation for all else, deep nesting and huge numbers
    included."""
    try:
        text = str(data, "utf-8")
        value, end = _scan_json(text, 0)
    except (ValueError, RecursionError, StopIteration) as error:
        raise ProtocolViolation(f"bad JSON: {type(error).__name__}") from None
    if end != len(text):
        raise ProtocolViolation("bytes after the JSON of a control message")
    if type(value) is not dict:
        raise ProtocolViolation("a control message that is not a JSON object")
    return value


class Mux:
    """One end of the protocol, without I/O and without locks: the caller serialises the calls.

    `role` is "host" or "guest". `features` go into the HELLO, which is the first thing in `pending()`.
    `ready` is True, and `peer` the peer's HELLO, once that has arrived; a host may open channels before.

    Sending to a channel that the peer has ended is not an error, since the two may cross: it is dropped.
    Sending to a channel that never was raises ValueError.
    """

    def __init__(self, role: str, features: tuple[str, ...] = ()) -> None:
        if role not in _RECEIVES:
            raise ValueError(f"role must be 'host' or 'guest', not {role!r}")
        self.role = role
        self.ready = False
        self.peer: dict[str, Any] = {}
        self.version = 0
        self.violation: str | None = None
        self.frames_received = 0
        self.dropped_frames = 0
        self.dropped_bytes = 0
        self.queued = 0
        """Bytes in `pending()`. Stop reading your sources while this is large."""
        self.total_queued = 0
        """Bytes ever queued; `total_queued - queued` of them have been written."""
        self._host = role == "host"
        self._receives = _RECEIVES[role]
        self._channels: dict[int, _Channel] = {}
        self._last_channel = 0
        self._queue: deque[Buffer] = deque()
        self._frames_sent = 0
        self._free_frames = 0
        self._pings: deque[bytes] = deque()
        self._pong_marks: deque[int] = deque()
        # The frame coming in: its header, the channel it belongs to (None: drop it), and what is still
        # missing.
        self._header: tuple[int, int, int, int, int] | None = None
        self._target: _Channel | None = None
        self._left = 0
        self._partial = bytearray()
        hello = {"version": VERSION, "minimum": MINIMUM_VERSION, "role": role, "features": list(features)}
        self._send(HELLO, 0, 0, encode_object(hello, MAX_JSON))

    # ---------------------------------------------------------------- sending

    def open(self, request: dict[str, Any]) -> int:
        """Host only: opens a channel with `request` and returns its number.

        Raises ValueError when the request exceeds MAX_PAYLOAD bytes of JSON, RuntimeError when MAX_CHANNELS
        are open or the numbers are used up."""
        if not self._host:
            raise RuntimeError("only the host opens channels")
        if len(self._channels) >= MAX_CHANNELS:
            raise RuntimeError(f"{MAX_CHANNELS} channels are open already")
        channel = self._last_channel + 1
        if channel > MAX_CHANNEL:
            raise RuntimeError("this connection has used up its channel numbers")
        payload = encode_object(request, MAX_PAYLOAD)
        self._last_channel = channel
        self._channels[channel] = _Channel()
        self._send(OPEN, channel, 0, payload)
        return channel

    def data_room(self, channel: int) -> int:
        """Bytes of DATA and EVENT that the peer takes now on this channel; 0 when the channel has ended.

        A guest whose channel was cancelled always has room: what it sends is dropped, so its sources can
        drain."""
        state = self._channels.get(channel)
        if state is None:
            return 0
        if state.cancelled:
            return INITIAL_WINDOW
        return state.send_credit

    def send_data(self, channel: int, stream: int, data: Buffer) -> None:
        """Queues bytes of one stream. Raises ValueError beyond `data_room` or after `send_eof`.

        A large `data` is not copied: leave it unchanged until `consumed` has passed it."""
        state = self._sendable(channel)
        if state is None:
            return
        if type(data) is not bytes:
            data = memoryview(data)
            if data.format != "B" or data.ndim != 1:
                data = data.cast("B")
        length = len(data)
        if length > state.send_credit:
            raise ValueError(f"{length} bytes exceed the credit of {state.send_credit}")
        if state.eof_sent >> stream & 1:
            raise ValueError(f"stream {stream} of channel {channel} has ended")
        if not length:
            return
        state.send_credit -= length
        if length <= MAX_PAYLOAD:
            self._send(DATA, channel, stream, data)
        else:
            view = memoryview(data)
            for start in range(0, length, MAX_PAYLOAD):
                self._send(DATA, channel, stream, view[start : start + MAX_PAYLOAD])

    def begin_data(self, channel: int, stream: int, length: int) -> bool:
        """Queues only the header of a DATA frame whose `length` bytes (1 to MAX_PAYLOAD, within `data_room`)
        the caller writes to the socket itself, with sendfile for instance, after all of `pending()` has been
        written and before anything else is. False when the channel has ended or was cancelled: write nothing
        then."""
        state = self._sendable(channel)
        if state is None:
            return False
        if not 0 < length <= min(state.send_credit, MAX_PAYLOAD):
            raise ValueError(f"{length} bytes do not fit the credit of {state.send_credit}")
        if state.eof_sent >> stream & 1:
            raise ValueError(f"stream {stream} of channel {channel} has ended")
        state.send_credit -= length
        self._append(HEADER.pack(length, channel, DATA, stream, 0))
        return True

    def send_event(self, channel: int, event: dict[str, Any]) -> None:
        """Queues an event. Raises ValueError when it exceeds MAX_JSON or `data_room`."""
        state = self._sendable(channel)
        if state is None:
            return
        payload = encode_object(event, MAX_JSON)
        if len(payload) > state.send_credit:
            raise ValueError(f"{len(payload)} bytes exceed the credit of {state.send_credit}")
        state.send_credit -= len(payload)
        self._send(EVENT, channel, 0, payload)

    def send_eof(self, channel: int, stream: int) -> None:
        """Ends one stream of a channel. A second time does nothing."""
        state = self._sendable(channel)
        if state is None or state.eof_sent >> stream & 1:
            return
        state.eof_sent |= 1 << stream
        self._send(EOF, channel, stream, b"")

    def send_close(self, channel: int, result: dict[str, Any]) -> None:
        """Guest: ends the channel with its result. Host: asks the guest to cancel; the guest's CLOSE still
        comes.

        Raises ValueError when `result` exceeds MAX_JSON. A channel that has ended is left alone."""
        state = self._channels.get(channel)
        if state is None:
            self._check_existed(channel)
            return
        payload = encode_object(result, MAX_JSON)
        if self._host:
            if state.cancelled:
                return
            state.cancelled = True
        else:
            del self._channels[channel]
        self._send(CLOSE, channel, 0, payload)

    def grant(self, channel: int, nbytes: int) -> None:
        """Gives the peer credit for `nbytes` of DATA (those consumed, usually), gathered up to GRANT_STEP.

        Events need no grant: their credit goes back when they are delivered."""
        state = self._channels.get(channel)
        if state is not None and not state.cancelled:
            self._grant(channel, state, nbytes, GRANT_STEP)

    def _grant(self, channel: int, state: _Channel, nbytes: int, step: int) -> None:
        nbytes += state.ungranted
        if nbytes < step:
            state.ungranted = nbytes
            return
        nbytes = min(nbytes, MAX_CREDIT - state.receive_credit)
        state.ungranted = 0
        if nbytes > 0:
            state.receive_credit += nbytes
            self._send(CREDIT, channel, 0, _CREDIT.pack(nbytes))

    def ping(self, payload: bytes = b"") -> bool:
        """Asks for a PONG with the same payload (at most MAX_PING bytes). False, and nothing sent, while
        16 are unanswered."""
        if len(payload) > MAX_PING:
            raise ValueError(f"a ping carries at most {MAX_PING} bytes")
        if len(self._pings) >= _MAX_PINGS:
            return False
        self._pings.append(bytes(payload))
        self._send(PING, 0, 0, payload)
        return True

    def is_open(self, channel: int) -> bool:
        """False once the channel has ended; for a host, the guest's CLOSE is what ends it."""
        return channel in self._channels

    def is_cancelled(self, channel: int) -> bool:
        """True when the host has asked to cancel the channel and the guest's CLOSE is still to come."""
        state = self._channels.get(channel)
        return state is not None and state.cancelled

    @property
    def open_channels(self) -> int:
        return len(self._channels)

    def pending(self) -> list[Buffer]:
        """The next buffers to write, in order; at most 64, for one sendmsg. Empty when all is written."""
        queue = self._queue
        if len(queue) <= _MAX_BUFFERS:
            return list(queue)
        return list(itertools.islice(queue, _MAX_BUFFERS))

    def consumed(self, nbytes: int) -> None:
        """Says that the first `nbytes` of `pending()` have been written."""
        if nbytes < 0 or nbytes > self.queued:
            raise ValueError(f"{nbytes} of {self.queued} queued bytes cannot have been written")
        self.queued -= nbytes
        queue = self._queue
        while nbytes:
            first = queue[0]
            size = len(first)
            if size > nbytes:
                queue[0] = memoryview(first)[nbytes:]
                return
            nbytes -= size
            queue.popleft()

    def _sendable(self, channel: int) -> _Channel | None:
        state = self._channels.get(channel)
        if state is None:
            self._check_existed(channel)
            return None
        if state.cancelled:
            return None
        return state

    def _check_existed(self, channel: int) -> None:
        if not 0 < channel <= self._last_channel:
            raise ValueError(f"channel {channel!r} was never opened")

    def _send(self, kind: int, channel: int, stream: int, payload: Buffer) -> None:
        length = len(payload)
        header = HEADER.pack(length, channel, kind, stream, 0)
        if length <= _COPY_BELOW:
            self._append(header + payload)
        else:
            self._append(header)
            self._queue.append(payload)
            self.queued += length
            self.total_queued += length
        self._frames_sent += 1

    def _append(self, data: bytes) -> None:
        self._queue.append(data)
        self.queued += len(data)
        self.total_queued += len(data)

    # -------------------------------------------------------------- receiving

    def receive(self, data: Buffer) -> list[Event]:
        """Takes the next bytes from the peer, cut anywhere, and returns what they complete.

        DATA payloads are slices of `data`: of bytes they are bytes; of a memoryview they are views, not
        copied, and last as long as the caller leaves its buffer alone. Raises ProtocolViolation, now and at
        every later call.
        """
        if self.violation is not None:
            raise ProtocolViolation(self.violation)
        try:
            return self._receive(data)
        except ProtocolViolation as violation:
            self.violation = str(violation)
            self._partial = bytearray()
            raise

    def _receive(self, data: Buffer) -> list[Event]:
        events: list[Event] = []
        position = 0
        end = len(data)
        partial = self._partial
        while True:
            header = self._header
            if header is None:
                missing = 12 - len(partial)
                if partial or end - position < 12:
                    partial += data[position : position + missing]
                    position += missing
                    if position > end:
                        return events
                    header = HEADER.unpack(partial)
                    partial.clear()
                else:
                    header = HEADER.unpack_from(data, position)
                    position += 12
                self._target = self._check(header)
                self._header = header
                self._left = header[0]
            length, channel, kind, stream, _ = header
            if kind == DATA:
                stop = position + self._left
                stop = min(stop, end)
                taken = stop - position
                if taken:
                    self._left -= taken
                    target = self._target
                    if target is None or target.cancelled:
                        self.dropped_bytes += taken
                    else:
                        events.append(Event(DATA, channel, stream, data[position:stop]))
                    position = stop
                if self._left:
                    return events
                self._header = self._target = None
                continue
            if partial or end - position < length:
                missing = length - len(partial)
                partial += data[position : position + missing]
                position += missing
                if position > end:
                    return events
                payload: Buffer = bytes(partial)
                partial.clear()
            else:
                payload = data[position : position + length]
                position += length
            target = self._target
            self._header = self._target = None
            event = self._control(kind, channel, stream, payload, target)
            if event is not None:
                events.append(event)

    def _check(self, header: tuple[int, int, int, int, int]) -> _Channel | None:
        """Judges a header before a byte of its payload is kept; returns the channel, or None: drop the
        payload."""
        length, channel, kind, stream, reserved = header
        self.frames_received += 1
        if kind > PONG or reserved:
            raise ProtocolViolation(f"a frame of unknown kind {kind}")
        if self._host and _FREE_KINDS >> kind & 1:
            self._count_free_frame()
        if not self.ready and kind != HELLO:
            raise ProtocolViolation(f"{KIND_NAMES[kind]} before HELLO")
        if kind == DATA or kind == EOF:
            if stream > FILE or not self._receives >> stream & 1:
                raise ProtocolViolation(f"{KIND_NAMES[kind]} on stream {stream}, not meant for a {self.role}")
        elif stream:
            raise ProtocolViolation(f"{KIND_NAMES[kind]} on a stream")
        if kind == HELLO or kind >= PING:
            if channel:
                raise ProtocolViolation(f"{KIND_NAMES[kind]} on channel {channel}")
            if length > (MAX_JSON if kind == HELLO else MAX_PING):
                raise ProtocolViolation(f"{KIND_NAMES[kind]} of {length} bytes")
            if kind == HELLO and self.ready:
                raise ProtocolViolation("a second HELLO")
            return None
        if kind == OPEN:
            if self._host:
                raise ProtocolViolation("OPEN from a guest")
            if channel <= self._last_channel:
                raise ProtocolViolation(f"OPEN of channel {channel} after {self._last_channel}")
            if length > MAX_PAYLOAD:
                raise ProtocolViolation(f"OPEN of {length} bytes")
            return None
        state = self._channels.get(channel)
        if state is None:
            if not 0 < channel <= self._last_channel:
                raise ProtocolViolation(f"{KIND_NAMES[kind]} on channel {channel}, which was never opened")
            if self._host:
                # The guest itself ended this channel, so nothing of it can be late.
                raise ProtocolViolation(f"{KIND_NAMES[kind]} on channel {channel} after its CLOSE")
        if kind == DATA or kind == EVENT:
            if length > (MAX_PAYLOAD if kind == DATA else MAX_JSON):
                raise ProtocolViolation(f"{KIND_NAMES[kind]} of {length} bytes")
            if not length:
                raise ProtocolViolation(f"an empty {KIND_NAMES[kind]}")
            if state is not None:
                if length > state.receive_credit:
                    credit = state.receive_credit
                    raise ProtocolViolation(f"{KIND_NAMES[kind]} of {length} bytes; the credit was {credit}")
                state.receive_credit -= length
                if kind == DATA and state.eof_received >> stream & 1:
                    raise ProtocolViolation(f"DATA after EOF of stream {stream}")
        elif kind == CREDIT:
            if length != 4:
                raise ProtocolViolation(f"CREDIT of {length} bytes")
        elif kind == EOF:
            if length:
                raise ProtocolViolation(f"EOF of {length} bytes")
        elif length > MAX_JSON:
            raise ProtocolViolation(f"CLOSE of {length} bytes")
        if state is None or (state.cancelled and kind != CLOSE):
            self.dropped_frames += 1
        return state

    def _count_free_frame(self) -> None:
        self._free_frames += 1
        if self._free_frames > _FREE_FRAMES:
            earned = (
                self._frames_sent * _FREE_FRAMES_PER_FRAME
                + (self.total_queued - self.queued) // _BYTES_PER_FREE_FRAME
            )
            if self._free_frames > _FREE_FRAMES + earned:
                raise ProtocolViolation("a flood of frames that cost no credit")

    def _control(
        self, kind: int, channel: int, stream: int, payload: Buffer, state: _Channel | None
    ) -> Event | None:
        """Acts on a whole frame that is not DATA; returns what the caller should hear of it."""
        if kind == HELLO:
            return self._hello(payload)
        if kind == OPEN:
            request = decode_object(payload)
            if len(self._channels) >= MAX_CHANNELS:
                raise ProtocolViolation(f"more than {MAX_CHANNELS} channels")
            self._last_channel = channel
            self._channels[channel] = _Channel()
            return Event(OPEN, channel, 0, request)
        if kind == PING:
            self._pong(bytes(payload))
            return None
        if kind == PONG:
            if not self._pings or self._pings[0] != payload:
                raise ProtocolViolation("PONG without its PING")
            self._pings.popleft()
            return Event(PONG, 0, 0, bytes(payload))
        if state is None:
            return None
        if kind == CLOSE:
            message = decode_object(payload)
            if self._host:
                del self._channels[channel]
            elif state.cancelled:
                raise ProtocolViolation(f"a second CLOSE of channel {channel}")
            else:
                state.cancelled = True
            return Event(CLOSE, channel, 0, message)
        if kind == CREDIT:
            granted = _CREDIT.unpack(payload)[0]
            if not granted or state.send_credit + granted > MAX_CREDIT:
                raise ProtocolViolation(f"CREDIT of {granted} on top of {state.send_credit}")
            state.send_credit += granted
            return None if state.cancelled else Event(CREDIT, channel, 0, granted)
        if kind == EOF:
            if state.eof_received >> stream & 1:
                raise ProtocolViolation(f"a second EOF of stream {stream}")
            state.eof_received |= 1 << stream
            return None if state.cancelled else Event(EOF, channel, stream, b"")
        # EVENT. One that is dropped is parsed all the same: whether it is valid must not depend on timing.
        message = decode_object(payload)
        if state.cancelled:
            return None
        self._grant(channel, state, len(payload), _EVENT_GRANT_STEP)
        return Event(EVENT, channel, 0, message)

    def _hello(self, payload: Buffer) -> Event:
        hello = decode_object(payload)
        version, minimum = hello.get("version"), hello.get("minimum")
        if type(version) is not int or type(minimum) is not int:
            raise ProtocolViolation("HELLO without a version")
        if hello.get("role") != ("guest" if self._host else "host"):
            raise ProtocolViolation("HELLO from the wrong role")
        features = hello.get("features", [])
        if type(features) is not list or not all(type(feature) is str for feature in features):
            raise ProtocolViolation("HELLO with features that are not names")
        if version < MINIMUM_VERSION or minimum > VERSION or minimum > version:
            raise ProtocolViolation(
                f"no common version: the peer's {minimum} to {version}, ours {MINIMUM_VERSION} to {VERSION}"
            )
        self.version = min(version, VERSION)
        self.peer = hello
        self.ready = True
        return Event(HELLO, 0, 0, hello)

    def _pong(self, payload: bytes) -> None:
        # A peer that pings and does not read would fill our queue with answers.
        marks = self._pong_marks
        written = self.total_queued - self.queued
        while marks and marks[0] <= written:
            marks.popleft()
        if len(marks) >= _MAX_PINGS:
            raise ProtocolViolation(f"more than {_MAX_PINGS} PINGs while their answers were not read")
        self._send(PONG, 0, 0, payload)
        marks.append(self.total_queued)
