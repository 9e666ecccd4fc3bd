"""The owner's end of a guest's stream, against guests that behave, stall, flood, lie and die."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringfence.errors import SandboxDeadError, WrongProcessError
from ringfence.guest.protocol import (
    CLOSE,
    CREDIT,
    DATA,
    EOF,
    EVENT,
    FILE,
    HEADER,
    INITIAL_WINDOW,
    OPEN,
    STDIN,
    STDOUT,
    Mux,
)
from ringfence.stream import connection as connection_module
from ringfence.stream.connection import Channel, ChannelSink, Connection, Reactor, socket_pair
from ringfence.stream.waiting import Pending, gather, run_async, run_sync, wait_for

PATIENCE = 20.0


class Guest:
    """A guest in a thread. `answer(mux, event)` reacts to each event; `None` makes it deaf."""

    def __init__(self, answer: Callable[[Mux, Any], None]) -> None:
        self.ours, self.sock = socket_pair()
        self.mux = Mux("guest")
        self.answer = answer
        self.raw = b""
        self.failure: BaseException | None = None
        self.reading = threading.Event()
        self.reading.set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                while buffers := self.mux.pending():
                    self.mux.consumed(self.sock.sendmsg(buffers))
                self.reading.wait()
                data = self.sock.recv(1 << 16)
                if not data:
                    return
                for event in self.mux.receive(data):
                    self.answer(self.mux, event)
        except OSError:
            pass
        except BaseException as error:  # noqa: BLE001 (looked at by the fixture)
            self.failure = error
        finally:
            self.sock.close()


def echo(mux: Mux, event: Any) -> None:
    """Sends STDIN back as STDOUT, and ends with its length; answers {"op": "ask"} at once."""
    kind, channel, _, payload = event
    if kind == OPEN and payload["op"] == "ask":
        mux.send_close(channel, {"ok": True, "question": payload.get("question")})
    elif kind == DATA:
        mux.send_data(channel, STDOUT, payload[: mux.data_room(channel)])
        mux.grant(channel, len(payload))
    elif kind == EVENT:
        mux.send_event(channel, payload)
    elif kind == EOF or kind == CLOSE:
        mux.send_close(channel, {"ok": True, "cancelled": kind == CLOSE})


class Heard(ChannelSink):
    def __init__(self, grant: bool = True) -> None:
        self.data = bytearray()
        self.events: list[dict[str, Any]] = []
        self.eofs: list[int] = []
        self.end: Pending[dict[str, Any]] = Pending()
        self.ends = 0
        self.grant = grant

    def on_data(self, stream: int, data: memoryview) -> int | None:
        self.data += data
        return len(data) if self.grant else None

    def on_event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def on_eof(self, stream: int) -> None:
        self.eofs.append(stream)

    def on_close(self, result: dict[str, Any]) -> None:
        self.ends += 1
        self.end.set_result(result)

    def on_dead(self, error: BaseException) -> None:
        self.ends += 1
        self.end.set_exception(error)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("test-io")
    yield reactor
    for connection in list(reactor._connections.values()):
        connection.close()
    reactor.stop()


@pytest.fixture
def connect(reactor: Reactor) -> Iterator[Callable[..., tuple[Connection, Guest]]]:
    guests: list[Guest] = []

    def connect(answer: Callable[[Mux, Any], None] = echo, **options: Any) -> tuple[Connection, Guest]:
        guest = Guest(answer)
        guests.append(guest)
        return Connection(guest.ours, reactor, **options), guest

    yield connect
    for connection in list(reactor._connections.values()):
        connection.close()
    for guest in guests:
        guest.reading.set()
        guest.thread.join(PATIENCE)
        assert not guest.thread.is_alive()
        assert guest.failure is None


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


Connect = Callable[..., tuple[Connection, Guest]]


def ask(connection: Connection, question: Any = None) -> Any:
    sink = Heard()
    connection.open({"op": "ask", "question": question}, sink)
    return sink.end.wait(PATIENCE)["question"]


def test_a_conversation(connect: Connect) -> None:
    connection, _ = connect()
    sink = Heard()
    channel = connection.open({"op": "cat"}, sink)
    channel.send_event({"resize": 1})
    channel.send_data(STDIN, b"hello ").wait(PATIENCE)
    channel.send_data(STDIN, bytearray(b"world")).wait(PATIENCE)
    channel.send_eof(STDIN)
    assert sink.end.wait(PATIENCE) == {"ok": True, "cancelled": False}
    assert sink.data == b"hello world" and sink.events == [{"resize": 1}] and sink.ends == 1
    assert connection.ready.wait(PATIENCE)["role"] == "guest"
    assert connection.ping().wait(PATIENCE) >= 0
    assert connection.open_channels == 0


def test_what_is_sent_after_the_end_is_refused_or_dropped(connect: Connect) -> None:
    connection, _ = connect()
    sink = Heard()
    channel = connection.open({"op": "ask"}, sink)
    sink.end.wait(PATIENCE)
    with pytest.raises(BrokenPipeError):
        channel.send_data(STDIN, b"x").wait(PATIENCE)
    channel.send_event({})
    channel.send_eof(STDIN)
    channel.grant(5)
    channel.close()
    assert ask(connection, 1) == 1


def test_many_threads_do_not_mix_what_they_hear(connect: Connect) -> None:
    connection, _ = connect()
    failures: list[object] = []

    def talk(number: int) -> None:
        numbers = random.Random(number)
        for _ in range(3):
            sink = Heard()
            channel = connection.open({"op": "cat"}, sink)
            sent = b"".join(bytes([number]) * numbers.randint(1, 30_000) for _ in range(5))
            for start in range(0, len(sent), 10_000):
                channel.send_data(STDIN, sent[start : start + 10_000]).wait(PATIENCE)
            channel.send_eof(STDIN)
            run_sync(wait_for(sink.end, PATIENCE), pump=connection if number % 2 else None)
            if sink.data != sent:
                failures.append(number)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not failures


def test_a_large_transfer_through_a_tiny_socket_buffer_arrives_whole(connect: Connect) -> None:
    received = bytearray()

    def store(mux: Mux, event: Any) -> None:
        if event.kind == DATA:
            received.extend(event.payload)
            mux.grant(event.channel, len(event.payload))
        elif event.kind == EOF:
            mux.send_close(event.channel, {"ok": True})

    connection, _ = connect(store)
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sink = Heard()
    channel = connection.open({"op": "file.write"}, sink)
    sent = random.Random(3).randbytes(3_000_001)
    pending = channel.send_data(FILE, memoryview(sent))
    channel.send_eof(FILE)
    sink.end.wait(PATIENCE)
    assert pending.done() and received == sent


def test_data_waits_for_credit_and_what_is_queued_stays_bounded(connect: Connect) -> None:
    heard: list[int] = []

    def hoard(mux: Mux, event: Any) -> None:
        if event.kind == DATA:
            heard.append(len(event.payload))
        elif event.kind == EVENT and "read" in event.payload:
            mux.grant(event.channel, sum(heard))
        elif event.kind == EOF:
            mux.send_close(event.channel, {"ok": True})

    connection, _ = connect(hoard)
    sink = Heard()
    channel = connection.open({"op": "cat"}, sink)
    pending = channel.send_data(STDIN, b"x" * (2 * INITIAL_WINDOW - 200_000))
    until(lambda: sum(heard) == INITIAL_WINDOW - (64 << 10))
    assert not pending.done()
    assert connection._mux.queued == 0
    channel.send_event({"read": True})  # what the data left free lets a signal through
    pending.wait(PATIENCE)
    channel.send_eof(STDIN)
    sink.end.wait(PATIENCE)


def test_a_channel_without_credit_does_not_hold_up_the_others(connect: Connect) -> None:
    connection, _ = connect(lambda mux, event: echo(mux, event) if event.kind != DATA else None)
    stuck = connection.open({"op": "cat"}, Heard())
    pending = stuck.send_data(STDIN, b"x" * (8 << 20))
    for number in range(20):
        assert ask(connection, number) == number
    assert not pending.done()
    stuck.close()
    with pytest.raises(BrokenPipeError):
        pending.wait(PATIENCE)


def test_a_guest_that_stops_reading_holds_up_no_caller_and_no_other_guest(connect: Connect) -> None:
    deaf, guest = connect()
    assert ask(deaf, 0) == 0
    guest.reading.clear()
    other, _ = connect()
    sinks = [Heard() for _ in range(50)]
    pendings = [deaf.open({"op": "cat"}, sink).send_data(STDIN, b"x" * 300_000) for sink in sinks]
    for number in range(20):
        assert ask(other, number) == number
    assert not all(pending.done() for pending in pendings)
    assert deaf._mux.queued < 2 << 20
    guest.reading.set()
    for pending in pendings:
        pending.wait(PATIENCE)
    assert ask(deaf, 1) == 1


def test_a_flood_of_tiny_events_is_taken_in_small_bites_so_that_other_guests_get_their_turn(
    reactor: Reactor,
) -> None:
    ours, theirs = socket_pair()
    connection = Connection(ours, reactor)
    bites: list[int] = []

    class Counting(Heard):
        def on_event(self, event: dict[str, Any]) -> None:
            bites.append(connection._appetite)

    channel = connection.open({"op": "watch"}, Counting())
    theirs.sendall(b"".join(Mux("guest").pending()))
    connection.ready.wait(PATIENCE)
    for received in (8_000, 16_000):
        with reactor._dispatching:  # so that all of it is there when the I/O thread looks
            theirs.sendall((HEADER.pack(2, channel.number, EVENT, 0, 0) + b"{}") * 8_000)
        until(lambda received=received: len(bites) == received)
    assert bites[0] < connection_module.READ_SIZE
    assert connection_module._MIN_READ <= min(bites) <= 2 * connection_module._MIN_READ
    connection.close()
    theirs.close()


def test_a_sink_that_grants_nothing_stops_the_guest_at_the_window(connect: Connect) -> None:
    def pour(mux: Mux, event: Any) -> None:
        if event.kind in (OPEN, CREDIT):
            mux.send_data(event.channel, STDOUT, b"x" * mux.data_room(event.channel))
        elif event.kind == CLOSE:
            mux.send_close(event.channel, {"ok": True})

    connection, _ = connect(pour)
    sink = Heard(grant=False)
    channel = connection.open({"op": "yes"}, sink)
    until(lambda: len(sink.data) == INITIAL_WINDOW)
    assert ask_after_pouring(connection)
    assert len(sink.data) == INITIAL_WINDOW
    channel.grant(INITIAL_WINDOW)
    until(lambda: len(sink.data) == 2 * INITIAL_WINDOW)
    channel.close()
    assert sink.end.wait(PATIENCE) == {"ok": True}


def ask_after_pouring(connection: Connection) -> bool:
    return connection.ping().wait(PATIENCE) >= 0


def test_closing_a_channel_silences_it_until_the_guest_confirms(connect: Connect) -> None:
    connection, _ = connect()
    sink = Heard()
    channel = connection.open({"op": "cat"}, sink)
    channel.close("enough")
    channel.close("enough")
    with pytest.raises(BrokenPipeError):
        channel.send_data(STDIN, b"x").wait(PATIENCE)
    assert sink.end.wait(PATIENCE) == {"ok": True, "cancelled": True}
    assert sink.ends == 1


def test_a_sinks_view_is_dead_after_the_call(connect: Connect) -> None:
    views: list[memoryview] = []

    class Keeps(Heard):
        def on_data(self, stream: int, data: memoryview) -> int | None:
            views.append(data)
            return super().on_data(stream, data)

    connection, _ = connect()
    sink = Keeps()
    channel = connection.open({"op": "cat"}, sink)
    channel.send_data(STDIN, b"x")
    channel.send_eof(STDIN)
    sink.end.wait(PATIENCE)
    with pytest.raises(ValueError):
        bytes(views[0])


def test_a_sink_that_fails_loses_its_channel_and_nothing_else(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Heard):
        def on_data(self, stream: int, data: memoryview) -> int | None:
            raise KeyError("bug")

    connection, _ = connect()
    sink = Broken()
    channel = connection.open({"op": "cat"}, sink)
    channel.send_data(STDIN, b"x")
    assert sink.end.wait(PATIENCE)["cancelled"]
    assert "bug" in caplog.text
    assert ask(connection, 1) == 1


# ------------------------------------------------------------------ the end


def test_when_the_guest_dies_every_channel_hears_it_once(connect: Connect) -> None:
    ends: list[BaseException] = []
    connection, guest = connect(on_dead=ends.append)
    sinks = [Heard() for _ in range(5)]
    for sink in sinks:
        connection.open({"op": "cat"}, sink)
    connection.ready.wait(PATIENCE)
    guest.sock.shutdown(socket.SHUT_RDWR)
    for sink in sinks:
        with pytest.raises(SandboxDeadError) as caught:
            sink.end.wait(PATIENCE)
        assert caught.value.reason == "crashed"
    with pytest.raises(SandboxDeadError):
        connection.open({"op": "ask"}, Heard())
    connection.close()
    assert len(ends) == 1 and [sink.ends for sink in sinks] == [1] * 5
    assert connection._socket.fileno() == -1


def test_the_owner_may_say_what_a_death_was(connect: Connect) -> None:
    connection, guest = connect(on_dead=lambda error: SandboxDeadError(reason="oom"))
    sink = Heard()
    connection.open({"op": "cat"}, sink)
    guest.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(SandboxDeadError) as caught:
        sink.end.wait(PATIENCE)
    assert caught.value.reason == "oom" and connection.dead is caught.value


@pytest.mark.parametrize(
    "bytes_of_guest",
    [b"HTTP/1.1 200 OK\r\n\r\n", HEADER.pack(2**32 - 1, 1, DATA, STDOUT, 0), bytes(100), b"\xff" * 100_000],
)
def test_a_guest_that_breaks_the_protocol_is_dead(reactor: Reactor, bytes_of_guest: bytes) -> None:
    ours, theirs = socket_pair()
    connection = Connection(ours, reactor)
    sink = Heard()
    connection.open({"op": "cat"}, sink)
    theirs.sendall(bytes_of_guest)
    with pytest.raises(SandboxDeadError) as caught:
        sink.end.wait(PATIENCE)
    assert caught.value.reason == "protocol" and caught.value.hint
    theirs.close()


@pytest.mark.parametrize("pump", [False, True])
def test_closing_wakes_every_waiting_thread(connect: Connect, pump: bool) -> None:
    connection, _ = connect()
    failures: list[BaseException] = []

    def wait() -> None:
        sink = Heard()
        connection.open({"op": "cat"}, sink)
        try:
            run_sync(wait_for(sink.end, PATIENCE), pump=connection if pump else None)
        except SandboxDeadError as error:
            failures.append(error)

    threads = [threading.Thread(target=wait) for _ in range(10)]
    for thread in threads:
        thread.start()
    until(lambda: connection.open_channels == 10)
    connection.close()
    until(lambda: connection._socket.fileno() == -1)  # by whoever was reading or writing just then
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(failures) == 10


def test_what_waits_to_be_sent_fails_with_the_connection(connect: Connect) -> None:
    connection, guest = connect()
    guest.reading.clear()
    pending = connection.open({"op": "cat"}, Heard()).send_data(STDIN, b"x" * (8 << 20))
    ping = connection.ping()
    connection.close()
    for waiting in (pending, ping):
        with pytest.raises(SandboxDeadError):
            waiting.wait(PATIENCE)


def test_opening_and_closing_from_many_threads_at_once_is_clean(connect: Connect) -> None:
    for _ in range(10):
        connection, _ = connect()

        def hammer(connection: Connection = connection) -> None:
            try:
                while True:
                    ask(connection, 1)
            except SandboxDeadError:
                pass

        threads = [threading.Thread(target=hammer) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        connection.close()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_finalizers_may_abandon_what_they_hold(connect: Connect) -> None:
    connection, _ = connect()
    sink = Heard()

    class Handle:
        def __init__(self, channel: Channel) -> None:
            self.channel = channel

        def __del__(self) -> None:
            self.channel.abandon()

    Handle(connection.open({"op": "cat"}, sink))
    gc.collect()
    assert sink.end.wait(PATIENCE)["cancelled"]
    with connection._lock:  # as when the collector runs in the middle of a call
        connection.abandon()
    until(lambda: connection.dead)


def test_connections_leave_no_descriptor_behind(connect: Connect) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    first, _ = connect()
    ask(first)
    before = descriptors()
    for _ in range(20):
        connection, guest = connect()
        ask(connection)
        connection.close()
        guest.thread.join(PATIENCE)
    until(lambda: descriptors() <= before)


# ------------------------------------------------------------------ waiting threads that read themselves


def test_a_waiting_thread_reads_its_connection_itself(connect: Connect) -> None:
    connection, _ = connect()
    connection.ready.wait(PATIENCE)
    threads: set[int] = set()

    class Where(Heard):
        def on_close(self, result: dict[str, Any]) -> None:
            threads.add(threading.get_ident())
            super().on_close(result)

    async def talk() -> None:
        sink = Where()
        channel = connection.open({"op": "cat"}, sink)
        assert connection._leading is False
        threading.Timer(0.05, channel.send_eof, (STDIN,)).start()
        await sink.end

    run_sync(talk(), pump=connection)
    assert threads == {threading.get_ident()}
    assert ask(connection, 1) == 1  # and gives it back


def test_a_leading_thread_serves_the_others_and_can_be_released_by_them(connect: Connect) -> None:
    connection, _ = connect()
    connection.ready.wait(PATIENCE)
    released: Pending[int] = Pending()
    answers: list[int] = []

    def others() -> None:
        until(lambda: connection._leading)
        for number in range(20):
            answers.append(ask(connection, number))
        assert connection._leading
        released.set_result(7)

    thread = threading.Thread(target=others)
    thread.start()
    assert run_sync(wait_for(released, PATIENCE), pump=connection) == 7
    thread.join(PATIENCE)
    assert answers == list(range(20)) and not connection._leading


def test_a_leading_thread_keeps_its_deadline_and_hears_ctrl_c(connect: Connect) -> None:
    connection, _ = connect()
    never: Pending[int] = Pending()
    with pytest.raises(TimeoutError):
        run_sync(wait_for(never, 0.02), pump=connection)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_sync(wait_for(never, PATIENCE), pump=connection)
    assert ask(connection, 1) == 1


def test_a_leading_thread_hears_the_guest_die(connect: Connect) -> None:
    connection, guest = connect()
    sink = Heard()
    connection.open({"op": "cat"}, sink)
    threading.Timer(0.05, guest.sock.shutdown, (socket.SHUT_RDWR,)).start()
    with pytest.raises(SandboxDeadError):
        run_sync(wait_for(sink.end, PATIENCE), pump=connection)


def test_answers_reach_coroutines_under_both_drivers(connect: Connect) -> None:
    import asyncio

    connection, _ = connect()

    async def one(number: int) -> int:
        sink = Heard()
        connection.open({"op": "ask", "question": number}, sink)
        return (await wait_for(sink.end, PATIENCE))["question"]

    async def main() -> tuple[int, ...]:
        return await gather(*map(one, range(50)))

    assert run_sync(main(), pump=connection) == tuple(range(50))
    assert run_sync(main()) == tuple(range(50))
    assert asyncio.run(run_async(main())) == tuple(range(50))


# ------------------------------------------------------------------ other processes


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child: 0 when `work` returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_and_the_parent_goes_on(connect: Connect) -> None:
    connection, _ = connect()
    sink = Heard()
    channel = connection.open({"op": "cat"}, sink)

    def child() -> None:
        for call in (
            lambda: connection.open({"op": "ask"}, Heard()),
            lambda: channel.send_data(STDIN, b"x").wait(1),
            lambda: channel.send_event({}),
            lambda: connection.ping().wait(1),
            lambda: sink.end.wait(1),
        ):
            with pytest.raises(WrongProcessError):
                call()
        channel.close()
        channel.send_eof(STDIN)
        connection.close()
        connection.abandon()
        # A sandbox of the child's own works.
        ours, theirs = socket_pair()
        assert Reactor.shared() is not connection._reactor
        own = Connection(ours, Reactor.shared())
        own_sink = Heard()
        own.open({"op": "ask"}, own_sink)
        theirs.close()
        with pytest.raises(SandboxDeadError):
            own_sink.end.wait(PATIENCE)

    assert in_child(child) == 0
    assert ask(connection, 1) == 1
    channel.send_eof(STDIN)
    assert sink.end.wait(PATIENCE) == {"ok": True, "cancelled": False}


def test_a_forked_child_that_lives_on_does_not_hold_the_stream_open(connect: Connect) -> None:
    connection, guest = connect()
    ask(connection)
    theirs = guest.sock.fileno()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    connection.close()
    guest.thread.join(PATIENCE)
    alive = guest.thread.is_alive()
    os.close(release)
    os.waitpid(child, 0)
    assert not alive, "the guest did not see the end of its stream"


def test_forks_while_messages_arrive_leave_parent_and_child_usable(connect: Connect) -> None:
    connection, _ = connect()
    stop = threading.Event()
    failures: list[BaseException] = []

    def chatter() -> None:
        try:
            while not stop.is_set():
                ask(connection, 1)
        except BaseException as error:  # noqa: BLE001 (looked at below)
            failures.append(error)

    threads = [threading.Thread(target=chatter) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert in_child(lambda: pytest.raises(WrongProcessError, connection.open, {}, Heard())) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not failures


def test_a_program_may_end_with_connections_open_and_threads_waiting() -> None:
    code = """
import threading
from ringfence.stream.connection import *
from ringfence.stream.waiting import *
ours, theirs = socket_pair()
connection = Connection(ours, Reactor.shared())
connection.open({"op": "cat"}, ChannelSink())
never = Pending()
for pump in (None, connection):
    wait = lambda pump=pump: run_sync(wait_for(never, 60), pump=pump)
    threading.Thread(target=wait, daemon=True).start()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == "done\n" and done.stderr == ""


def test_the_io_thread_blocks_signals_so_that_ctrl_c_reaches_the_main_thread(connect: Connect) -> None:
    connection, _ = connect()
    ask(connection)
    thread = connection._reactor._thread
    assert thread is not None
    with open(f"/proc/self/task/{thread.native_id}/status") as status:
        blocked = next(line for line in status if line.startswith("SigBlk:"))
    assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1


def test_descriptors_that_a_guest_sends_are_not_taken(connect: Connect) -> None:
    connection, guest = connect()
    connection.ready.wait(PATIENCE)
    reading, writing = os.pipe()
    event = b'{"x":1}'
    sink = Heard()
    channel = connection.open({"op": "cat"}, sink)
    ask(connection)
    frame = HEADER.pack(len(event), channel.number, EVENT, 0, 0) + event
    socket.send_fds(guest.sock, [frame], [writing])
    os.close(writing)
    until(lambda: sink.events)
    assert select.select([reading], [], [], PATIENCE)[0]  # nobody holds the other end
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_the_shared_reactor_is_one() -> None:
    assert Reactor.shared() is Reactor.shared()
    assert connection_module.READ_SIZE <= 1 << 20
