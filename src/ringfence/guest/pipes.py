"""The agent's ends of pipes and terminals: bytes out of a child, bytes into it, under the channel's credit.

Guards against a child that floods (a source is not read while its channel has no credit or the host stream is
congested: the pipe fills and the child waits), against one that does not read its stdin (credit is granted
only for what the pipe took), and against output held open by a background child (`finish` takes what is in the
pipe now and ends). Nothing here blocks and nothing is buffered without bound.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from ringfence.guest.loop import READ, WRITE

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from typing import Any

    from ringfence.guest.agent import Agent
else:
    from _collections import deque

CHUNK = 64 << 10
_FINISH_TERMINAL = 1 << 20
_TERMINAL_REST = 0.05
_INT = struct.Struct("i")


def bytes_waiting(descriptor: int) -> int:
    """FIONREAD: what a pipe or socket holds now; 0 where it can't be asked."""
    try:
        return _INT.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:
        return 0


def new_pipe() -> tuple[int, int]:
    """(read, write), close-on-exec; the read end, which the agent keeps, does not block."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    # The pipe is the agent's file: without this, `tee /dev/stderr` and `> /dev/stdout` are refused to the user.
    os.fchmod(write, 0o622)
    return read, write


class Source:
    """A descriptor whose bytes go to one stream of one channel.

    `channel` None discards and counts them in `discarded`. `ended()` is called once, when the descriptor hit
    its end or `finish()` has taken what was there; the descriptor is closed by then.
    """

    __slots__ = ("_agent", "_drained", "_ended", "_finishing", "_left", "_watched", "channel", "descriptor", "discarded", "stream", "terminal")

    def __init__(self, agent: Agent, descriptor: int, channel: int | None, stream: int, ended: Callable[[], Any],
                 terminal: bool = False):  # fmt: skip
        self._agent = agent
        self.descriptor = descriptor
        self.channel = channel
        self.stream = stream
        self.terminal = terminal
        self.discarded = 0
        self._ended = ended
        self._drained: Callable[[], Any] | None = None
        self._finishing = False
        self._left = 0
        self._watched = True
        agent.loop.watch(descriptor, self.ready)

    @property
    def open(self) -> bool:
        return self.descriptor >= 0

    def ready(self, events: int = 0) -> bool:
        """Move one chunk. True while more may follow at once."""
        if self.descriptor < 0:
            return False
        size = CHUNK
        if self.channel is not None:
            room = self._agent.mux.data_room(self.channel)
            if room <= 0 or self._agent.congested:
                self._stall()
                return False
            size = min(size, room)
        if self._finishing:
            size = min(size, self._left)
            if size <= 0:
                self._finished()
                return False
        try:
            data = os.read(self.descriptor, size)
        except BlockingIOError:
            if self._finishing:
                self._finished()
            return False
        except OSError:  # EIO: no process has the terminal open now
            if self.terminal and not self._finishing:
                # One may open it again; and closing the master here would hang up on a leader that is about to exit.
                self._rest()
                return False
            data = b""
        if not data:
            self.close()
            return False
        if self.channel is None:
            self.discarded += len(data)
        else:
            self._agent.mux.send_data(self.channel, self.stream, data)
        if self._finishing:
            self._left -= len(data)
            if self._left <= 0:
                self._finished()
                return False
        return True

    def _rest(self) -> None:
        if self._watched:
            self._agent.loop.forget(self.descriptor)
            self._watched = False
            self._agent.loop.after(_TERMINAL_REST, self.resume)

    def _stall(self) -> None:
        if self._watched:
            self._agent.loop.forget(self.descriptor)
            self._watched = False
        self._agent.stalled.add(self)

    def resume(self) -> None:
        """Credit has come, or the host stream is free again."""
        if self.descriptor < 0:
            return
        if self._finishing:
            self._pump()
        elif not self._watched:
            self._agent.loop.watch(self.descriptor, self.ready)
            self._watched = True

    def finish(self) -> None:
        """Take what is there now, as credit allows, then end: later writers are not waited for."""
        if self.descriptor < 0 or self._finishing:
            return
        self._finishing = True
        # A terminal can't tell how much it holds; it reports EAGAIN only once everything written has arrived.
        self._left = _FINISH_TERMINAL if self.terminal else bytes_waiting(self.descriptor)
        if self._watched:
            self._agent.loop.forget(self.descriptor)
            self._watched = False
        self._pump()

    def drain(self, drained: Callable[[], Any]) -> None:
        """Take what is there now, as credit allows, then discard and call `drained()`; the descriptor stays open."""
        if self.descriptor < 0:
            drained()
            return
        self._drained = drained
        self.finish()

    def _finished(self) -> None:
        drained = self._drained
        if drained is None:
            self.close()
            return
        self._drained = None
        self._finishing = False
        self.channel = None
        self.resume()
        drained()

    def _pump(self) -> None:
        while self.ready():
            pass

    def drop_waiting(self) -> None:
        """Discard what is there now: it belongs to nobody."""
        left = bytes_waiting(self.descriptor) if self.descriptor >= 0 else 0
        while left > 0:
            try:
                data = os.read(self.descriptor, min(left, CHUNK))
            except OSError:
                return
            if not data:
                return
            left -= len(data)
            self.discarded += len(data)

    def close(self) -> None:
        """End now, whatever is left in it."""
        if self.descriptor < 0:
            return
        self._agent.loop.forget(self.descriptor)
        self._agent.stalled.discard(self)
        os.close(self.descriptor)
        self.descriptor = -1
        self._ended()
        drained, self._drained = self._drained, None
        if drained is not None:
            drained()


class Sink:
    """A descriptor that takes the bytes of a channel's STDIN or PTY stream; credit returns as it does.

    `end_bytes` are written at the end, before the descriptor is closed (a terminal wants its end-of-file key).
    """

    __slots__ = ("_agent", "_end", "_end_bytes", "_queue", "_waiting", "broken", "channel", "descriptor")

    def __init__(self, agent: Agent, descriptor: int, channel: int, end_bytes: bytes = b""):
        self._agent = agent
        self.descriptor = descriptor
        self.channel = channel
        self._end_bytes = end_bytes
        self._queue: deque[Any] = deque()
        self._end = False
        self._waiting = False
        self.broken = False

    def write(self, data: Any) -> None:
        """Take a piece; `data` may be a view that is only valid now."""
        if self.broken or self._end or self.descriptor < 0:
            self._agent.mux.grant(self.channel, len(data))
            return
        if not self._queue:
            written = self._write(data)
            self._agent.mux.grant(self.channel, written)
            if written >= len(data):
                return
            data = data[written:]
        if not self.broken:
            self._queue.append(bytes(data))
            self._wait()
        else:
            self._agent.mux.grant(self.channel, len(data))

    def _write(self, data: Any) -> int:
        try:
            return os.write(self.descriptor, data)
        except BlockingIOError:
            return 0
        except OSError:  # EPIPE: the child closed its stdin; that is its right
            self._break()
            return len(data)

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._agent.loop.watch(self.descriptor, self._writable, WRITE)

    def _writable(self, events: int) -> None:
        queue = self._queue
        while queue:
            data = queue[0]
            written = self._write(data)
            if self.broken:  # which has granted the whole queue
                return
            self._agent.mux.grant(self.channel, written)
            if written < len(data):
                queue[0] = data[written:]
                return
            queue.popleft()
        self._agent.loop.forget(self.descriptor)
        self._waiting = False
        if self._end:
            self._finish()

    def _break(self) -> None:
        self.broken = True
        self._agent.mux.grant(self.channel, sum(len(item) for item in self._queue))
        self._queue.clear()
        self.close()

    def end(self) -> None:
        """The host sent EOF: pass it on once everything before it is written."""
        if self._end:
            return
        self._end = True
        if not self._queue:
            self._finish()

    def _finish(self) -> None:
        if self._end_bytes and not self.broken:
            self._write(self._end_bytes)
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            self._agent.loop.forget(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


__all__ = ["CHUNK", "READ", "WRITE", "Sink", "Source", "bytes_waiting", "new_pipe"]
