"""The owner's end of the stream to a guest: one I/O thread for all connections, and channels on them.

Guards against a guest that floods, stalls, lies or dies, and against its owner being held up by it: what
comes in passes the bounds of `guest.protocol.Mux`, what goes out waits for credit channel by channel, no
channel keeps the others from the socket, and when a connection ends every channel hears of it, once. It also
guards against the owner's own world: calls from many threads, a fork (the child closes its copies of the
sockets, so that it cannot hold a sandbox's stream open, and is refused with WrongProcessError), and objects
dropped without being closed.

Small messages are written by the calling thread itself; the I/O thread takes over when the socket would
block. It needs no waking for that, since the kernel lets one thread change what another one polls for.
Likewise a thread that waits in `run_sync` for an answer may read its connection itself (`Connection.lead`),
and the I/O thread sleeps on.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ringfence.errors import SandboxDeadError, WrongProcessError
from ringfence.guest import protocol
from ringfence.guest.protocol import CLOSE, CREDIT, DATA, EOF, EVENT, HELLO, PONG, Mux, ProtocolViolation
from ringfence.stream.waiting import Pending, completed

READ_SIZE = 256 << 10
"""Bytes taken from one connection before the next gets its turn; one buffer serves all connections."""
SOCKET_BUFFER = 1 << 20
"""Bytes asked for as socket buffer; the kernel gives what it allows (sysctl net.core.wmem_max, see
socket(7))."""

_MIN_READ = 4 << 10
_MANY_FRAMES = 512  # a read that brings more than these makes the next one of this connection smaller
_SLICE = 256 << 10  # bytes of one channel's data that go out before another channel gets its turn
_LOW_WATER = 512 << 10  # below this many bytes in the Mux, channels hand over more
_EVENT_RESERVE = protocol.MAX_JSON
"""Credit that data leaves unused: a signal must reach a command that reads nothing."""
_MAX_EVENTS_QUEUED = 1024
_CALLER_BUDGET = 1 << 20  # bytes a calling thread writes before it leaves the rest to the I/O thread
_REACTOR_BUDGET = 4 << 20

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_DONE: Pending[None] = completed(None)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected AF_UNIX stream sockets with buffers raised on both ends: the owner's, and the guest's."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for one in pair:
        raise_buffers(one)
    return pair


def raise_buffers(sock: socket.socket) -> None:
    """Raises the socket's buffers to SOCKET_BUFFER, or as far as the kernel allows."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        except OSError:
            pass  # slower, not wrong


class ChannelSink:
    """What a channel's user hears. Override what you need.

    Calls come one at a time, from the I/O thread or from one that waits in `run_sync`, and must be quick:
    they hold up every sandbox of the process.
    Exactly one of `on_close` and `on_dead` comes, last.
    """

    def on_data(self, stream: int, data: memoryview) -> int | None:
        """Bytes of one stream. `data` is only valid during the call. Return the bytes to grant again now, or
        None: `Channel.grant` will be called when they are consumed."""
        return len(data)

    def on_event(self, event: dict[str, Any]) -> None:
        """An event. What is kept of it must be bounded by the sink; its credit is granted again by itself."""

    def on_eof(self, stream: int) -> None:
        """A stream has ended."""

    def on_close(self, result: dict[str, Any]) -> None:
        """The guest has ended the channel, with its result; after `Channel.close` this is its
        confirmation."""

    def on_dead(self, error: BaseException) -> None:
        """The connection has ended (SandboxDeadError, usually)."""


class _Outgoing:
    """Data (or, with `data` None, the end) of one stream that waits for credit."""

    __slots__ = ("data", "pending", "stream")

    def __init__(self, stream: int, data: memoryview | bytes | None, pending: Pending[None]) -> None:
        self.stream = stream
        self.data = data
        self.pending = pending


class Channel:
    """One conversation with the guest. Made by `Connection.open`; usable from any thread."""

    __slots__ = (
        "__weakref__", "_connection", "_events", "_outgoing", "_scheduled", "_sink", "cancelled", "number",
    )  # fmt: skip

    def __init__(self, connection: Connection, number: int, sink: ChannelSink) -> None:
        self.number = number
        self.cancelled = False
        self._connection = connection
        self._sink = sink
        self._outgoing: deque[_Outgoing] = deque()
        self._events: deque[dict[str, Any]] = deque()
        self._scheduled = False

    def send_data(self, stream: int, data: bytes | bytearray | memoryview) -> Pending[None]:
        """Sends bytes of one stream, as the guest's credit allows.

        The Pending completes when all of `data` has left for the kernel; until then leave it unchanged, and
        send no more, so that what is queued stays bounded. It fails with BrokenPipeError when the channel
        ends first, and with what the connection died of."""
        view = data if type(data) is bytes else memoryview(data).cast("B")
        pending: Pending[None] = _DONE
        connection = self._connection
        with connection._lock:
            refusal = connection._refusal(self)
            if refusal is not None:
                pending = Pending()
                pending.set_exception(refusal)
                return pending
            mux = connection._mux
            length = len(view)
            if (
                not self._outgoing
                and length <= _SLICE
                and mux.queued < _LOW_WATER
                and length <= mux.data_room(self.number) - _EVENT_RESERVE
            ):
                mux.send_data(self.number, stream, view)
                mark = mux.total_queued
            else:
                mark = None
                pending = Pending()
                self._outgoing.append(_Outgoing(stream, view, pending))
                connection._schedule(self)
            write = connection._claim_writer()
        if write:
            connection._write(_CALLER_BUDGET)
        if mark is None:
            return pending
        with connection._lock:
            if mark <= mux.total_queued - mux.queued:
                return _DONE
            pending = Pending()
            if connection._dead is None:
                connection._mark(mark, pending)
                return pending
        pending.set_exception(connection._dead)
        return pending

    def send_event(self, event: dict[str, Any]) -> None:
        """Sends an event, ahead of data that waits for credit. Dropped when the channel has ended.

        Raises ValueError beyond 64 KiB of JSON, BlockingIOError when the guest takes no events any more, and
        what the connection died of."""
        connection = self._connection
        with connection._lock:
            refusal = connection._refusal(self)
            if refusal is not None:
                if isinstance(refusal, BrokenPipeError):
                    return
                raise refusal
            size = len(protocol.encode_object(event, protocol.MAX_JSON))
            if self._events or size > connection._mux.data_room(self.number):
                if len(self._events) >= _MAX_EVENTS_QUEUED:
                    raise BlockingIOError(f"the guest has left {_MAX_EVENTS_QUEUED} events unread")
                self._events.append(event)
            else:
                connection._mux.send_event(self.number, event)
            write = connection._claim_writer()
        if write:
            connection._write(_CALLER_BUDGET)

    def send_eof(self, stream: int) -> None:
        """Ends one stream, after the data sent before. Nothing happens when the channel has ended."""
        connection = self._connection
        with connection._lock:
            if connection._refusal(self) is not None:
                return
            if self._outgoing:
                self._outgoing.append(_Outgoing(stream, None, _DONE))
                connection._schedule(self)
            else:
                connection._mux.send_eof(self.number, stream)
            write = connection._claim_writer()
        if write:
            connection._write(_CALLER_BUDGET)

    def close(self, reason: str = "cancelled") -> None:
        """Asks the guest to stop what the channel is for. The sink hears nothing more but `on_close`, when
        the guest has done so, or `on_dead`. A second call, or one after the end, does nothing."""
        connection = self._connection
        with connection._lock:
            if connection._refusal(self) is not None:
                return
            self.cancelled = True
            dropped = self._drop_outgoing()
            connection._mux.send_close(self.number, {"reason": reason})
            write = connection._claim_writer()
        if write:
            connection._write(_CALLER_BUDGET)
        for pending in dropped:
            pending.set_exception(BrokenPipeError("the channel was cancelled"))

    def abandon(self, reason: str = "dropped") -> None:
        """`close`, for finalizers (`__del__`, weakref callbacks): takes no lock, the I/O thread does the
        rest."""
        self._connection._reactor.call_soon(self.close, reason)

    def grant(self, nbytes: int) -> None:
        """Lets the guest send `nbytes` more, after `on_data` returned None. Nothing happens after the end."""
        connection = self._connection
        with connection._lock:
            if connection._dead is not None:
                return
            connection._mux.grant(self.number, nbytes)
            write = connection._claim_writer()
        if write:
            connection._write(_CALLER_BUDGET)

    def _give(self, mux: Mux) -> bool:
        """Hands the next slice to the Mux; True when more could follow at once. The connection's lock is
        held."""
        number = self.number
        room = mux.data_room(number)
        while self._events:
            size = len(protocol.encode_object(self._events[0], protocol.MAX_JSON))
            if size > room:
                return False
            mux.send_event(number, self._events.popleft())
            room -= size
        if not self._outgoing:
            return False
        outgoing = self._outgoing[0]
        data = outgoing.data
        if data is None:
            self._outgoing.popleft()
            mux.send_eof(number, outgoing.stream)
            return bool(self._outgoing)
        room -= _EVENT_RESERVE
        length = len(data)
        take = min(room, _SLICE, length)
        if take < length:
            if take <= 0:
                return False
            data = memoryview(data)
            mux.send_data(number, outgoing.stream, data[:take])
            outgoing.data = data[take:]
            return True
        mux.send_data(number, outgoing.stream, data)
        self._outgoing.popleft()
        self._connection._mark(mux.total_queued, outgoing.pending)
        return bool(self._outgoing)

    def _drop_outgoing(self) -> list[Pending[None]]:
        dropped = [outgoing.pending for outgoing in self._outgoing if outgoing.data is not None]
        self._outgoing.clear()
        self._events.clear()
        return dropped


class Connection:
    """The owner's end of one guest's stream.

    Takes over `sock` (a connected stream socket). `on_dead(error)` is called once, on the I/O thread, when
    the connection has ended for whatever reason; if it returns an exception, the channels hear that one
    instead. It should be quick. `ready` completes with the guest's HELLO; channels may be opened before.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
        on_dead: Callable[[BaseException], BaseException | None] | None = None,
        features: tuple[str, ...] = (),
    ) -> None:
        self.ready: Pending[dict[str, Any]] = Pending()
        self.ready.pump = self
        self.last_activity = time.monotonic()
        """When something last arrived or a channel was opened (time.monotonic())."""
        self._lock = threading.Lock()
        self._mux = Mux("host", features)
        self._reactor = reactor
        self._on_dead = on_dead
        self._channels: dict[int, Channel] = {}
        self._dead: BaseException | None = None
        self._waiting: deque[Channel] = deque()
        self._marks: deque[tuple[int, Pending[None]]] = deque()
        self._pings: deque[Pending[float]] = deque()
        self._ping_times: deque[float] = deque()
        # The socket is closed by whoever is last: the closer, or a thread that was just reading or writing.
        self._reading = self._writing = False
        self._blocked = False
        self._leading = False
        self._unheard = False
        self._appetite = READ_SIZE
        self.bytes_received = 0
        """Bytes that came from the guest so far."""
        sock.setblocking(False)
        sock.set_inheritable(False)
        raise_buffers(sock)
        self._socket = sock
        self._descriptor = sock.fileno()
        reactor._add(self)
        with self._lock:
            write = self._claim_writer()
        if write:
            self._write(_CALLER_BUDGET)

    # ------------------------------------------------------------ for the owner

    def open(self, request: dict[str, Any], sink: ChannelSink) -> Channel:
        """Starts a conversation with `request` ({"op": ...}); `sink` hears the rest.

        Raises what the connection died of, ValueError when the request exceeds 1 MiB of JSON, RuntimeError
        when 4096 channels are open."""
        with self._lock:
            if self._dead is not None:
                raise self._dead
            number = self._mux.open(request)
            channel = self._channels[number] = Channel(self, number, sink)
            write = self._claim_writer()
        if write:
            self._write(_CALLER_BUDGET)
        self.last_activity = time.monotonic()
        return channel

    def ping(self) -> Pending[float]:
        """Asks for a sign of life; completes with the seconds it took. At most 16 may be under way
        (BlockingIOError)."""
        pending: Pending[float] = Pending()
        with self._lock:
            if self._dead is not None:
                pending.set_exception(self._dead)
                return pending
            if not self._mux.ping():
                raise BlockingIOError("16 pings are unanswered")
            self._pings.append(pending)
            self._ping_times.append(time.monotonic())
            write = self._claim_writer()
        if write:
            self._write(_CALLER_BUDGET)
        return pending

    def close(self, error: BaseException | None = None, known: bool = False) -> None:
        """Ends the connection. Channels still open hear `on_dead(error)`, soon after and on the I/O thread;
        `error` is SandboxDeadError with reason "killed" when not given. A second call does nothing. With `known` the
        owner need not be told, and nothing is left to do for the I/O thread when no channel is open."""
        self._die(error or SandboxDeadError("the sandbox was closed", reason="killed"), known)

    def expect_end(self) -> None:
        """The sandbox is being killed, and whoever does that will call `close`: the hang-up is no news.

        Without it the I/O thread would wake at the moment when the processors are wanted for the end itself. Nothing
        happens while channels are open, since they want to hear of it."""
        with self._lock:
            if not (self._dead or self._unheard or self._channels or self._leading or self._blocked):
                self._unheard = True
                self._reactor._epoll.unregister(self._descriptor)

    def abandon(self, error: BaseException | None = None) -> None:
        """`close`, for finalizers (`__del__`, weakref callbacks): takes no lock, the I/O thread does the
        rest."""
        self._reactor.call_soon(self.close, error)

    @property
    def dead(self) -> BaseException | None:
        """What the connection died of, or None."""
        return self._dead

    def sinks(self) -> list[ChannelSink]:
        """The sinks of the open channels."""
        with self._lock:
            return [channel._sink for channel in self._channels.values()]

    @property
    def bytes_sent(self) -> int:
        """Bytes written to the guest so far."""
        return self._mux.total_queued - self._mux.queued

    @property
    def open_channels(self) -> int:
        """Channels whose end has not been heard yet, those being cancelled included."""
        return len(self._channels)

    # ------------------------------------------------------------ under the lock

    def _refusal(self, channel: Channel) -> BaseException | None:
        """Why nothing can be sent on a channel any more, or None."""
        if self._dead is not None:
            return self._dead
        if channel.cancelled or self._channels.get(channel.number) is not channel:
            return BrokenPipeError("the channel has ended")
        return None

    def _schedule(self, channel: Channel) -> None:
        if not channel._scheduled:
            channel._scheduled = True
            self._waiting.append(channel)

    def _mark(self, position: int, pending: Pending[None]) -> None:
        """Completes `pending` when all bytes up to `position` have been written."""
        marks = self._marks
        if marks and marks[-1][0] > position:
            # A thread that noticed late that its bytes are still here; rare, so the order is restored by
            # hand.
            marks.append((position, pending))
            self._marks = deque(sorted(marks, key=lambda mark: mark[0]))
        else:
            marks.append((position, pending))

    def _claim_writer(self) -> bool:
        """True when there is something to write and the caller is the one to do it."""
        if self._writing or self._blocked or self._dead is not None:
            return False
        if not self._mux.queued and not self._waiting:
            return False
        self._writing = True
        return True

    def _refill(self) -> None:
        mux = self._mux
        waiting = self._waiting
        while waiting and mux.queued < _LOW_WATER:
            channel = waiting.popleft()
            if channel._give(mux):
                waiting.append(channel)
            else:
                channel._scheduled = False

    def _release_socket(self) -> None:
        if not self._reading and not self._writing:
            self._reactor._remove(self)
            self._socket.close()

    # ------------------------------------------------------------ writing

    def _write(self, budget: int) -> None:
        """Writes until all is gone, the socket would block or `budget` bytes are spent. One thread at a time:
        the caller got True from `_claim_writer`, or is the I/O thread and has set `_writing`."""
        lock = self._lock
        mux = self._mux
        sock = self._socket
        written: list[int] = []
        completions: list[Pending[None]] = []
        failure: BaseException | None = None
        lock.acquire()
        try:
            while self._dead is None:
                if self._waiting:
                    self._refill()
                buffers = mux.pending()
                if not buffers:
                    self._watch_writable(False)
                    break
                if budget <= 0:
                    self._watch_writable(True)
                    break
                lock.release()
                try:
                    # extend(map()) is one call into C, so that no signal handler can run, and raise, between
                    # the write and the count of what was written.
                    if len(buffers) == 1:
                        written.extend(map(sock.send, buffers))
                    else:
                        written.extend(map(sock.sendmsg, (buffers,)))
                except BlockingIOError:
                    pass
                except OSError as error:
                    failure = error
                finally:
                    lock.acquire()
                if failure is not None:
                    break
                if not written:
                    if self._dead is None:
                        self._watch_writable(True)
                    break
                count = written.pop()
                mux.consumed(count)
                budget -= count
                if self._marks:
                    done = mux.total_queued - mux.queued
                    marks = self._marks
                    while marks and marks[0][0] <= done:
                        completions.append(marks.popleft()[1])
        except BaseException as error:
            failure = error
            raise
        finally:
            self._writing = False
            if self._dead is not None:
                self._release_socket()
            lock.release()
            if failure is not None:
                self._die(_crashed(failure))
            for pending in completions:
                pending.set_result(None)

    def _watch_writable(self, wanted: bool) -> None:
        if wanted != self._blocked:
            self._blocked = wanted
            self._watch()

    def _watch(self) -> None:
        """Tells the I/O thread what to look for. The lock is held."""
        if self._unheard:
            return
        if self._leading:
            # Edge-triggered: a hang-up, which cannot be masked, is then told once and not for as long as it
            # lasts.
            mask = _OUT if self._blocked else select.EPOLLET
        else:
            mask = _IN | _OUT if self._blocked else _IN
        self._reactor._epoll.modify(self._descriptor, mask)

    # ------------------------------------------------------------ reading

    def lead(self, pending: Pending[Any], deadline: float | None, guard: Any = None) -> None:
        """Reads on the calling thread, in place of the I/O thread, until `pending` is complete or `deadline`
        (monotonic) has passed. Returns at once when another thread reads. Called by `run_sync`."""
        with self._lock:
            if self._dead is not None or self._reading or self._leading:
                return
            self._leading = True
            self._watch()
        reactor = self._reactor
        dispatching = False

        def read() -> None:
            nonlocal dispatching
            with reactor._dispatching:
                dispatching = True
                self._on_readable(reactor._view, leading=True)
                dispatching = False

        try:
            read_until(lambda: pending._done or self._dead is not None, pending, deadline, guard, self._descriptor, read)
        except BaseException as error:
            if dispatching:
                self._die(_crashed(error))  # what had been read and not yet handed out is lost
            raise
        finally:
            with self._lock:
                self._leading = False
                if self._dead is None:
                    self._watch()

    def _on_writable(self) -> None:
        with self._lock:
            if self._dead is not None or self._writing:
                return
            self._writing = True
        self._write(_REACTOR_BUDGET)

    def _on_readable(self, view: memoryview, leading: bool = False) -> None:
        with self._lock:
            if self._dead is not None or self._leading is not leading:
                return
            self._reading = True
        failure: BaseException | None = None
        events: list[protocol.Event] = []
        count = -1
        try:
            count = self._socket.recv_into(view, self._appetite)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            failure = _crashed(error)
        with self._lock:
            self._reading = False
            if self._dead is not None:
                self._release_socket()
                return
            if count > 0:
                self.bytes_received += count
                frames = self._mux.frames_received
                try:
                    events = self._mux.receive(view[:count])
                except ProtocolViolation as violation:
                    failure = SandboxDeadError(
                        f"the sandbox was stopped because its guest broke the protocol: {violation}",
                        hint="this happens when code inside has taken over the agent; create a new sandbox",
                        reason="protocol",
                    )
                # A quarter of a megabyte of tiny frames would keep the other sandboxes waiting for long.
                if self._mux.frames_received - frames > _MANY_FRAMES:
                    self._appetite = max(_MIN_READ, self._appetite // 8)
                elif self._appetite < READ_SIZE:
                    self._appetite *= 2
            elif count == 0:
                failure = _crashed(None)
        if failure is not None:
            self._die(failure)
            return
        if events:
            self.last_activity = time.monotonic()
            for event in events:
                self._dispatch(event)
            with self._lock:
                write = self._claim_writer()
            if write:
                self._write(_REACTOR_BUDGET)

    def _dispatch(self, event: protocol.Event) -> None:
        kind, number, stream, payload = event
        channel = self._channels.get(number)
        if channel is None:
            if kind == HELLO:
                self.ready.set_result(payload)
            elif kind == PONG:
                with self._lock:
                    if not self._pings:
                        return
                    pending, begun = self._pings.popleft(), self._ping_times.popleft()
                pending.set_result(time.monotonic() - begun)
            return  # or the connection ended while these events were being dispatched
        if kind == CLOSE:
            with self._lock:
                if self._dead is not None:
                    return  # `_die` has taken the channel, and its on_dead is coming
                del self._channels[number]
                dropped = channel._drop_outgoing()
            try:
                channel._sink.on_close(payload)
            except Exception:  # noqa: BLE001 (logged)
                _log_sink_failure(channel)
            for pending in dropped:
                pending.set_exception(BrokenPipeError("the guest ended the channel"))
            return
        if kind == CREDIT:
            with self._lock:
                if channel._outgoing or channel._events:
                    self._schedule(channel)
            return
        if channel.cancelled:
            return
        try:
            if kind == DATA:
                granted = channel._sink.on_data(stream, payload)
                if granted:
                    with self._lock:
                        self._mux.grant(number, granted)
                _release(payload)
            elif kind == EVENT:
                channel._sink.on_event(payload)
            elif kind == EOF:
                channel._sink.on_eof(stream)
        except Exception:  # noqa: BLE001 (logged)
            _log_sink_failure(channel)
            channel.close("the owner failed to handle what arrived")

    def _die(self, error: BaseException, known: bool = False) -> None:
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            channels = list(self._channels.values())
            self._channels.clear()
            failed: list[Pending[Any]] = [pending for _, pending in self._marks]
            self._marks.clear()
            failed.extend(self._pings)
            self._pings.clear()
            self._ping_times.clear()
            for channel in channels:
                failed.extend(channel._drop_outgoing())
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer is gone already
            self._release_socket()
        if known:
            self._on_dead = None
            if not channels and not failed:
                self.ready.set_exception(error)
                return
        self._reactor._run_soon(self._announce, channels, failed)

    def _announce(self, channels: list[Channel], failed: list[Pending[Any]]) -> None:
        error = self._dead
        assert error is not None
        if self._on_dead is not None:
            try:
                replacement = self._on_dead(error)
            except Exception:  # noqa: BLE001 (logged)
                _log("the owner of a connection failed to handle its end")
            else:
                if isinstance(replacement, BaseException):
                    error = self._dead = replacement
        self.ready.set_exception(error)
        for channel in channels:
            try:
                channel._sink.on_dead(error)
            except Exception:  # noqa: BLE001 (logged)
                _log_sink_failure(channel)
        for pending in failed:
            pending.set_exception(error)

    def _disown(self) -> None:
        """In a forked child: the stream belongs to the parent. Nothing is sent, and nothing of ours holds
        it."""
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        self._dead = WrongProcessError(
            "this sandbox belongs to the parent process",
            hint="create a sandbox in the child, or use it in the process that created it",
        )
        self._channels.clear()
        self._reading = self._writing = False
        self._socket.close()


def _crashed(error: BaseException | None) -> SandboxDeadError:
    why = f": {error}" if error else ""
    dead = SandboxDeadError("the sandbox has ended on its own" + why, reason="crashed")
    dead.__cause__ = error
    return dead


def _log(message: str, *arguments: object) -> None:
    """Logs the exception being handled. `logging` is imported only then: starting up should be quick."""
    import logging

    logging.getLogger("ringfence").exception(message, *arguments)


def _log_sink_failure(channel: Channel) -> None:
    _log("channel %d: its user failed to handle what arrived", channel.number)


def _release(data: Any) -> None:
    """A sink that keeps a view of the read buffer gets an error when it uses it, not another guest's
    bytes."""
    try:
        data.release()
    except (AttributeError, BufferError):
        pass


class _Bell(threading.local):
    """What wakes a thread that leads when another one completes what it waits for: an eventfd per thread."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.process = 0

    def poll(self, descriptor: int) -> tuple[select.poll, int]:
        if self.process != (process := os.getpid()):  # a forked child must not ring for its parent
            self.close()
            self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.process = process
        # A ring that came too late for an earlier wait wakes this one for nothing, once.
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        poll.register(descriptor, select.POLLIN)
        return poll, self.descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_bell = _Bell()


def read_until(
    over: Callable[[], bool],
    pending: Pending[Any],
    deadline: float | None,
    guard: Any,
    descriptor: int,
    read: Callable[[], None],
) -> None:
    """Calls `read()` whenever `descriptor` is readable, until `over()` or `deadline` (monotonic) has passed. The
    completion of `pending` by another thread wakes it. For a thread that reads in place of the I/O thread."""
    poll, wake = _bell.poll(descriptor)
    caller = threading.get_ident()

    def ring(_: Pending[Any]) -> None:
        if threading.get_ident() != caller:
            os.eventfd_write(wake, 1)

    try:
        pending.add_done_callback(ring)
        while not over():
            timeout = None
            if deadline is not None:
                timeout = math.ceil((deadline - time.monotonic()) * 1000)
                if timeout <= 0:
                    return
            if guard is None:
                ready = poll.poll(timeout)
            else:
                outer = guard.waiting
                guard.waiting = True
                try:
                    guard.raise_if_tripped()
                    ready = poll.poll(timeout)
                finally:
                    guard.waiting = outer
            for readable, _ in ready:
                if readable == wake:
                    os.eventfd_read(wake)
                else:
                    read()
    finally:
        pending.remove_done_callback(ring)


class Reactor:
    """The I/O thread. `Reactor.shared()` is the one of this process; it starts with its first connection.

    The thread is a daemon and blocks all signals, so that Ctrl-C reaches the main thread.
    """

    _shared: Reactor | None = None
    _shared_lock = threading.Lock()

    def __init__(self, name: str = "ringfence-io") -> None:
        self._name = name
        self._connections: dict[int, Connection] = {}
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._dispatching = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._foreign = False
        self._view = memoryview(bytearray(READ_SIZE))  # used under `_dispatching`
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, _IN)
        _reactors.add(self)

    @classmethod
    def shared(cls) -> Reactor:
        """The reactor of this process, made when first asked for. A forked child gets one of its own."""
        reactor = cls._shared
        if reactor is None:
            with cls._shared_lock:
                reactor = cls._shared
                if reactor is None:
                    reactor = cls._shared = cls()
        return reactor

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Runs a quick function on the I/O thread. Takes no lock, so finalizers may use it."""
        if self._stopped or self._foreign:
            if not self._foreign:
                function(*arguments)
            return
        self._calls.append((function, arguments))
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread and closes what it polls with; connections must have been closed before. For tests:
        the shared reactor needs no stopping."""
        with self._lock:
            if self._stopped or self._foreign:
                return
            thread = self._thread
            self._stopped = True
        os.eventfd_write(self._wake, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _run_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Runs it now when this is the I/O thread, or on it."""
        if threading.current_thread() is self._thread:
            function(*arguments)
        else:
            self.call_soon(function, *arguments)

    def _add(self, connection: Connection) -> None:
        with self._lock:
            if self._foreign:
                raise WrongProcessError(
                    "this reactor belongs to the parent process", hint="use Reactor.shared()"
                )
            if self._stopped:
                raise RuntimeError("the reactor has been stopped")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._connections[connection._descriptor] = connection
            self._epoll.register(connection._descriptor, _IN)

    def _remove(self, connection: Connection) -> None:
        if self._connections.get(connection._descriptor) is connection:
            del self._connections[connection._descriptor]
            try:
                self._epoll.unregister(connection._descriptor)
            except (OSError, ValueError):
                pass

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        view = self._view
        connections = self._connections
        poll = self._epoll.poll
        while not self._stopped:
            ready = poll()
            with self._dispatching:  # a fork waits here, see `_before_fork`
                for descriptor, mask in ready:
                    if descriptor == self._wake:
                        self._run_calls()
                        continue
                    # The number may belong to a newer connection by now. Then this is a false alarm, and
                    # harmless.
                    connection = connections.get(descriptor)
                    if connection is None:
                        continue
                    try:
                        if mask & _OUT:
                            connection._on_writable()
                        if mask & ~_OUT:
                            connection._on_readable(view)
                    except Exception as error:  # noqa: BLE001 (logged)
                        _log("a connection failed in its owner")
                        connection._die(_crashed(error))

    def _run_calls(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception:  # noqa: BLE001 (logged)
                _log("a call on the I/O thread failed")

    def _abandon(self) -> None:
        """In a forked child: closes the copies of all descriptors. The epoll set itself is shared with the
        parent, so nothing is unregistered from it."""
        self._foreign = True
        self._lock = threading.Lock()
        self._dispatching = threading.RLock()
        self._thread = None
        self._calls.clear()
        for connection in self._connections.values():
            connection._disown()
        self._connections.clear()
        if not self._stopped:
            self._epoll.close()
            os.close(self._wake)


_reactors: weakref.WeakSet[Reactor] = weakref.WeakSet()
_quiet: dict[int, list[Any]] = {}


def _before_fork() -> None:
    """Lets the I/O threads finish what they are at, so that the child finds no lock of a sink held for ever.
    A callback that hangs delays the fork by no more than a second."""
    held = _quiet.setdefault(threading.get_ident(), [])
    for reactor in list(_reactors):
        lock = reactor._dispatching
        if lock.acquire(timeout=1):
            held.append(lock)


def _after_fork_in_parent() -> None:
    for lock in _quiet.pop(threading.get_ident(), ()):
        lock.release()


def _after_fork_in_child() -> None:
    _quiet.clear()
    Reactor._shared = None
    Reactor._shared_lock = threading.Lock()
    for reactor in list(_reactors):
        if not reactor._foreign:
            reactor._abandon()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
