"""The kernel process of one code context: control channel, interrupts, standard streams, attribution of results.

It guards the loop that user code runs in: whatever a cell does (patches `json`, deletes builtins, closes fd 1, leaves
an alarm, a trace function or a thread behind, forks), the loop reads the next request, and a message reaches the agent
whole or not at all. The language itself is a leaf (`python_kernel`), called through five functions.

Channel (one AF_UNIX stream socket, other end in the agent):
  in    [!I length][JSON]                  {"do": "execute", "nonce": hex32, "code": str, "quiet": bool, "env": {..}|null}
                                           {"do": "rehearse", ...}  as execute; then all of it is forgotten
                                           {"do": "exit"}
  out   [!I length][B type][16s token][payload]    1 RESULT, 2 ERROR, 3 DONE, 4 READY (zero token)
`length` counts the payload alone.

What the token holds, and what it cannot hold. A token is the keyed hash of the request's nonce (`token_of`), under a
secret that came with the fork, and the agent drops every message that carries another one. So none of these can end an
execution or add to it: bytes written to a descriptor that code found; a thread or child of an earlier cell that reads
the next request from such a descriptor before we do (it learns the nonce, and can at worst make its own kernel hang);
a child process (the channel is close-on-exec, and closed in forked children); a thread or task left over from an
earlier cell; a caller of our own functions found by walking frames, attributes, closures or a trace function (the
token, the socket and the senders of ERROR and DONE are reachable only through C objects that show none of their
members, and lie in no Python frame's locals while a cell runs).
Within one interpreter there is no wall, though: code that reads its own process memory (ctypes), or digs through
`gc.get_referents`, finds the current token, and so could end its own cell early or speak for its own context. It could
as well have replaced `sys.displayhook`. It gains nothing outside its context; contexts that must not trust each other
belong in different sandboxes, and every limit is enforced outside.
"""


# ruff: noqa: BLE001, S110, S112  (exceptions of any kind come out of user code, and end here on purpose)
from __future__ import annotations

import _blake2  # pyright: ignore[reportMissingImports]
import _signal  # pyright: ignore[reportMissingImports]
import builtins
import contextvars
import ctypes
import faulthandler
import fcntl
import importlib
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from _functools import _lru_cache_wrapper  # type: ignore[attr-defined]
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

# Functions of this module look builtins up in a private copy: `del builtins.len` in a cell must not reach the loop.
__builtins__ = dict(vars(builtins))

RESULT, ERROR, DONE, READY = 1, 2, 3, 4

DEFAULT_RESULT_LIMIT = 32 * 1024 * 1024
"""Bytes of one RESULT payload (JSON) unless config["result_limit"] says otherwise."""

DEFERRED_LIMIT = 64 * 1024
"""A main result up to this size waits for DONE and leaves in the same write: one wake-up of the agent, not two."""

MAX_REQUEST = 256 * 1024 * 1024

LEAVES = {"python": "ringfence.guest.python_kernel"}

# Held back while the loop itself runs, so that a raising handler of the user's (SIGALRM -> TimeoutError is a common
# idiom) cannot cut a message in two. Signals that user code cannot handle in Python, or faults, are not in the list.
_HELD = tuple(
    getattr(signal, name).value
    for name in ["SIGINT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGQUIT", "SIGIO", "SIGWINCH", "SIGURG", "SIGTSTP", "SIGCONT", "SIGTTIN", "SIGTTOU"]
    if hasattr(signal, name)
)

# References taken at import: a cell may patch the modules they come from.
_sigmask = _signal.pthread_sigmask
_getsignal = _signal.getsignal
_setsignal = _signal.signal
_BLOCK, _SETMASK, _SIGINT = int(signal.SIG_BLOCK), int(signal.SIG_SETMASK), int(signal.SIGINT)

NUDGE = int(signal.SIGRTMIN) + 9
"""Sent some time after SIGINT, to the kernel alone. Its handler does nothing, but whatever call the main thread waits
in comes back, and the interpreter looks for handlers that are due: a SIGINT that arrives after the interpreter's last
look and before `sleep` or `read` began would otherwise be answered when that call ends by itself."""
_getpid, _fstat, _dup2, _exit, _listdir, _stat, _write = (
    os.getpid, os.fstat, os.dup2, os._exit, os.listdir, os.stat, os.write)
_settrace, _gettrace, _setprofile, _getprofile = sys.settrace, sys.gettrace, sys.setprofile, sys.getprofile
_get_ident, _get_native_id = threading.get_ident, threading.get_native_id
_allocate_lock = threading.Lock
_monotonic = time.monotonic
_fsencode = os.fsencode
_environ = os.environ
_poll = select.poll
_POLLIN = select.POLLIN
# The C scanner: parsing runs no function that a cell could replace.
_scan_json: Any = json.JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]
_pack_length = struct.Struct("!I").pack
_unpack_length = struct.Struct("!I").unpack_from
_libc = ctypes.CDLL(None, use_errno=True)
_fflush = _libc.fflush
_fflush.argtypes = [ctypes.c_void_p]

execution_of_task: contextvars.ContextVar = contextvars.ContextVar("ringfence_execution", default=0)
"""Number of the execution in which a piece of code was started; asyncio tasks and `asyncio.to_thread` inherit it."""


def _opaque(function: Callable) -> Callable:
    """Wraps `function` in a C callable that shows no member: no attribute, closure or frame leads from it to what it
    holds (an lru_cache of size 0 without `__wrapped__`)."""
    return _lru_cache_wrapper(function, 0, False, tuple)


def token_of(secret: bytes, nonce: bytes) -> bytes:
    """The token of the execution whose request carried `nonce`, in the kernel that was given `secret`; 16 bytes."""
    return _blake2.blake2b(nonce, digest_size=16, key=secret).digest()


def encode_ascii(text: str) -> bytes:
    return text.encode("utf-8", "replace")


class Outcome(NamedTuple):
    """What a leaf says about one execution. `status` is ok, error or interrupted; `error` is the encoded payload of an
    ERROR message or None."""

    status: str
    execution_count: int
    error: bytes | None = None


class Request(NamedTuple):
    """An execution as the leaf sees it: no token in it."""

    number: int
    code: str
    quiet: bool
    env: dict[str, str] | None
    rehearsal: bool = False
    """A cell of ours, run before any of the user's so that the pages of its path are this process's own: forgotten."""


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts
# ---------------------------------------------------------------------------------------------------------------------

class _Interrupts:
    """SIGINT becomes KeyboardInterrupt only while user code (or IPython on its behalf) is on the stack.

    The handler looks at the frames it interrupted. `_zone` below it: user code, raise. `_send_shielded` first: a
    message is half written, raise when it is whole. Neither: the loop itself, or between cells; an interrupt that
    arrives after a request was read and before its code runs is kept for the start of the code, others are ignored.
    """

    def __init__(self) -> None:
        self.pending = False
        self.armed = False      # a request was read, its code has not started
        self.executing = False
        self.fired = False      # this execution was interrupted
        self.loop: Any = None
        self.redirect: Callable[[], bool] | None = None
        """Set by the leaf while an event loop runs: True when it will cancel the task instead of being raised at."""

    def handler(self, signum: int, frame: Any) -> None:
        zone, shield, idle, loop = _zone.__code__, _send_shielded.__code__, _idle.__code__, self.loop
        while frame is not None:
            code = frame.f_code
            if code is loop:        # a few instructions around the zone
                self.pending = self.armed
                return
            if code is shield:
                self.pending = True
                return
            if code is idle:
                # A background task spins between cells; without a task on the stack there is nothing to interrupt.
                if self.redirect is not None and not self.redirect():
                    raise KeyboardInterrupt
                return
            if code is zone:
                break
            frame = frame.f_back
        else:
            if not self.executing:  # with greenlets the stack does not reach down to `_zone`
                self.pending = self.armed
                return
        self.fired = True
        if self.redirect is not None and self.redirect():
            return
        raise KeyboardInterrupt

    def install(self) -> None:
        if _getsignal(_SIGINT) != self.handler:
            _setsignal(_SIGINT, self.handler)
        if _getsignal(NUDGE) is not _nothing:
            _setsignal(NUDGE, _nothing)


def _nothing(signum: int, frame: Any) -> None:
    """The handler of NUDGE."""


def _zone(interrupts: _Interrupts, run: Callable[[Request], Outcome], request: Request) -> Outcome:
    """User code runs below this frame and nowhere else; the SIGINT handler looks for its code object."""
    interrupts.armed = False
    interrupts.executing = True
    if interrupts.pending:
        interrupts.pending = False
        interrupts.fired = True
        raise KeyboardInterrupt
    return run(request)


def _idle(background: Callable[[int], None], descriptor: int) -> None:
    """The leaf's background work between cells runs below this frame."""
    background(descriptor)


def _send_shielded(send: Callable, compose: Callable, parts: tuple[bytes, bytes]) -> None:
    # The message exists on the value stack alone, never as a local: a trace function sees no token here.
    send(compose(parts))


def _hold() -> set:
    """Blocks the held signals and returns the mask before. Handlers of signals that came just before run inside this
    call; what they raise is dropped, since the cell that set them is over."""
    mask = None
    while True:
        try:
            if mask is None:
                mask = _sigmask(_BLOCK, ())
            _sigmask(_BLOCK, _HELD)
            return mask
        except BaseException:
            continue


def _hold_or_raise() -> set:
    """As `_hold`, inside a cell: what a handler raises goes to the cell, and the mask is as before."""
    mask = _sigmask(_BLOCK, ())
    try:
        _sigmask(_BLOCK, _HELD)     # the mask is set even when a handler raises at the end of the call
    except BaseException:
        _sigmask(_SETMASK, mask)
        raise
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# Which execution does a result belong to
# ---------------------------------------------------------------------------------------------------------------------

class Executions:
    """Knows which execution is running and to which one the calling thread or task belongs.

    A task (anything that copied its context) carries the number of the execution that created it. A plain thread does
    not: threads alive when an execution starts belong to an earlier one, any other thread to the current one. Thread
    ids of the kernel (tid), since Python's `ident` is reused at once.
    """

    def __init__(self) -> None:
        self.state: tuple[int, frozenset] = (0, frozenset())
        self.main = _get_native_id()

    def begin(self, number: int) -> None:
        earlier: frozenset = frozenset()
        try:
            if _stat("/proc/self/task").st_nlink != 3:
                earlier = frozenset(int(name) for name in _listdir("/proc/self/task"))
        except OSError:
            pass
        self.state = (number, earlier)

    def end(self) -> None:
        self.state = (0, frozenset())

    def mine(self) -> int:
        """Number of the running execution if the caller belongs to it, else 0."""
        number, earlier = self.state
        if not number:
            return 0
        origin = execution_of_task.get()
        if origin:
            return number if origin == number else 0
        thread = _get_native_id()
        return number if thread == self.main or thread not in earlier else 0


# ---------------------------------------------------------------------------------------------------------------------
# Standard streams
# ---------------------------------------------------------------------------------------------------------------------

def _text_stream(descriptor: int, name: str) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    raw.name = name  # type: ignore[misc]  # as the interpreter's own start-up does
    # A line leaves when it is whole, as on a terminal: a reader sees progress, and the order against output of
    # subprocesses and C code is right by lines. backslashreplace: half an emoji in scraped text must not raise.
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class Streams:
    """sys.stdout and sys.stderr over fd 1 and 2, with duplicates (high, close-on-exec) to repair them from."""

    def __init__(self) -> None:
        base = _high_descriptor()
        self.saved: dict[int, int] = {}
        self.identity: dict[int, tuple[int, int]] = {}
        for descriptor in (1, 2):
            self.saved[descriptor] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, base)
            status = _fstat(descriptor)
            self.identity[descriptor] = (status.st_dev, status.st_ino)
        self.stdout = _text_stream(1, "<stdout>")
        self.stderr = _text_stream(2, "<stderr>")
        sys.stdout = sys.__stdout__ = self.stdout  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self.stderr  # type: ignore[misc]
        try:
            sys.stdin = sys.__stdin__ = open(  # noqa: SIM115  # type: ignore[misc]
                0, "r", encoding="utf-8", errors="replace", closefd=False)
        except OSError:
            sys.stdin = sys.__stdin__ = None  # type: ignore[misc,assignment]

    def repair(self) -> list[str]:
        """Puts back what the previous cell closed or replaced; returns a note for each repair."""
        notes = []
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            if what := self._repair_descriptor(descriptor):
                notes.append(f"fd {descriptor} had been {what} by an earlier cell")
            own = getattr(self, name)
            try:
                usable = not (own.closed or own.buffer.closed or own.buffer.raw.closed)
            except ValueError:  # detached
                usable = False
            if not usable:
                own = _text_stream(descriptor, f"<{name}>")
                setattr(self, name, own)
                setattr(sys, f"__{name}__", own)
            if getattr(sys, name, None) is not own:
                setattr(sys, name, own)
                notes.append(f"sys.{name} had been replaced by an earlier cell")
        for descriptor in (1, 2):
            # The replaced object may have been a file under this very number, which its end has closed.
            self._repair_descriptor(descriptor)
        return notes

    def _repair_descriptor(self, descriptor: int) -> str:
        """Makes the descriptor ours again; says what was wrong, or ""."""
        try:
            status = _fstat(descriptor)
            if (status.st_dev, status.st_ino) == self.identity[descriptor]:
                return ""
            what = "redirected"
        except OSError:
            what = "closed"
        _dup2(self.saved[descriptor], descriptor)
        return what

    def flush(self) -> None:
        """Everything written so far reaches the pipes: the user's own stream objects, ours, and C stdio."""
        for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None), self.stdout, self.stderr):
            try:
                stream.flush()  # type: ignore[union-attr]
            except Exception:
                pass
        _fflush(None)

    def close_saved(self) -> None:
        for descriptor in self.saved.values():
            try:
                os.close(descriptor)
            except OSError:
                pass
        self.saved = {}

    def note(self, text: str) -> None:
        try:
            self.stderr.write(f"[ringfence] {text}\n")
            self.stderr.flush()
        except Exception:
            pass


def _high_descriptor() -> int:
    """Where our descriptors live: above what user code opens and what `for fd in range(3, 256): os.close(fd)` closes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 4096
    return max(3, min(soft - 16, 1000))


# ---------------------------------------------------------------------------------------------------------------------
# Identity of a fresh process
# ---------------------------------------------------------------------------------------------------------------------

def renew_identity(seed: bytes) -> None:
    """Makes a forked child differ from its siblings: every generator that was seeded in the zygote is seeded anew.

    `secrets`, `uuid.uuid4` and `numpy.random.default_rng()` read the kernel's entropy each time and need nothing. The
    seed of str hashing belongs to the interpreter and cannot be renewed after a fork.
    """
    modules: dict[str, Any] = sys.modules
    seed = bytes(seed) + os.urandom(16)
    if "random" in modules:
        modules["random"].seed(seed)
    numpy_random = modules.get("numpy.random")
    if numpy_random is not None:
        try:
            numpy_random.seed(list(struct.unpack("!8I", seed[:32].ljust(32, b"\0"))))
        except Exception:
            pass
    if "tempfile" in modules:
        modules["tempfile"]._name_sequence = None  # its generator is renewed by pid, and pids repeat between sandboxes
        modules["tempfile"].tempdir = None
    if "uuid" in modules:
        modules["uuid"]._last_timestamp = None
        modules["uuid"]._node = None
    if "ssl" in modules:
        modules["ssl"].RAND_add(seed, float(len(seed)))
    process = modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def _prepare(config: dict[str, Any], rehearsal: bool = False) -> list[str]:
    """Environment, directory, entropy. Returns notes for the user."""
    notes = []
    env = config.get("env")
    if env is not None:
        # What is equal already is left alone: each variable that is set again copies pages of the zygote.
        for name in [name for name in os.environ if name not in env]:
            del os.environ[name]
        for name, value in env.items():
            try:
                if os.environ.get(name) != value:
                    os.environ[name] = value
            except (ValueError, TypeError):
                notes.append(f"environment variable {name!r} was left out: not a legal name or value")
    if "TZ" in os.environ:
        time.tzset()
    cwd = config.get("cwd")
    if cwd:
        try:
            os.chdir(cwd)
        except OSError as error:
            notes.append(f"cannot enter {cwd!r}: {error.strerror}; working in {os.getcwd()!r}")
    if not rehearsal:
        if os.path.isdir("/opt/packages"):
            from ringfence.guest import packages

            packages.activate()
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # the fork handlers would have
    seed = config.get("random") or ""
    renew_identity(bytes.fromhex(seed) if isinstance(seed, str) else seed)
    if not config.get("dumpable", False) and not rehearsal:
        # Another context of this sandbox has the same uid; it must not open /proc/<this pid>/mem or fd/1.
        _libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------

def run(control: socket.socket, config: dict[str, Any]) -> NoReturn:
    """Serves executions on `control` until the agent closes it or asks to exit. Never returns.

    config: "context" (name), "language" ("python"), "cwd", "env" (the whole environment; None keeps the process's),
    "random" (32 bytes hex), "secret" (32 bytes hex, taken out of the dict here), "result_limit" (bytes, default
    32 MiB), "dumpable" (bool, default False).
    Precondition: single-threaded child of the zygote; fd 0 /dev/null, fd 1 and 2 pipes to the agent.
    """
    try:
        # The pieces are on this frame's value stack only. While a cell runs, the Python frames below it are this one
        # and `execute`; `finish`, which knows the token, is called by the outer map and is on none of them.
        deque(_pipeline(control, config), maxlen=0)
    except BaseException:
        try:
            import traceback

            _write(2, ("[ringfence] the kernel loop failed:\n" + traceback.format_exc()).encode("utf-8", "replace"))
        finally:
            _exit(70)
    _exit(0)


def rehearse(code: str, config: dict[str, Any]) -> None:
    """Runs one cell through the whole path of a child in this process, with output to /dev/null, and puts everything
    back: a zygote's children then find the path's pages, caches and specialised bytecode as their own."""
    import gc

    saved = {number: os.dup(number) for number in (1, 2)}
    streams = sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__
    handler, mask = _getsignal(_SIGINT), _sigmask(_BLOCK, ())
    environment, path, arguments = dict(os.environ), list(sys.path), list(sys.argv)
    here, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for number in saved:
            os.dup2(null, number)
        message = json.dumps({"do": "execute", "nonce": "00" * 16, "code": code, "quiet": False}).encode()
        here.sendall(_pack_length(len(message)) + message)
        here.shutdown(socket.SHUT_WR)
        here.settimeout(None)
        deque(_pipeline(theirs, dict(config, env=None, secret="00" * 32), rehearsal=True), maxlen=0)
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(null)
        here.close()
        sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        _setsignal(_SIGINT, signal.default_int_handler if handler is None else handler)
        _sigmask(_SETMASK, mask)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:], sys.argv[:] = path, arguments
        execution_of_task.set(0)
        gc.collect()


def _pipeline(control: socket.socket, config: dict[str, Any], rehearsal: bool = False) -> Iterator[None]:
    _hold()
    # A copy of the keyed hash yields tokens; the key itself shows nowhere. `token_of` in the steps of a C object.
    keyed_hash = _opaque(_blake2.blake2b(digest_size=16, key=bytes.fromhex(config.pop("secret"))).copy)
    signal.set_wakeup_fd(-1)
    owner = _getpid()
    interrupts = _Interrupts()
    interrupts.install()
    executions = Executions()

    descriptor = fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, _high_descriptor())
    control.close()
    channel: Any = socket.socket(fileno=descriptor)
    channel.setblocking(True)
    streams = Streams()
    notes = _prepare(config, rehearsal)
    if not rehearsal:
        faulthandler.enable(2)  # a native crash leaves a Python traceback on stderr, as in Jupyter

    # --- senders -----------------------------------------------------------------------------------------------------
    # compose_*((length, payload)) = length + type + token + payload, as the C method bytes.join of type+token.
    send = _opaque(channel.sendall)
    lock = _allocate_lock()
    holder = [0]        # ident of the thread that is sending
    composers: list[Callable | None] = [None, None, None]  # RESULT, ERROR, DONE of the running execution
    deferred: list[bytes] = []
    queued: deque = deque()

    def set_token(token: bytes | None) -> None:
        if token is None:
            composers[:] = [None, None, None]
        else:
            composers[:] = [_opaque((bytes([kind]) + token).join) for kind in (RESULT, ERROR, DONE)]

    def results_sender() -> Callable[[int, bytes, bool], bool]:
        def publish(number: int, payload: bytes, may_wait: bool = False) -> bool:
            """Sends a RESULT for execution `number`; False when that one is over (the payload is dropped)."""
            if _getpid() != owner or executions.state[0] != number:
                return False
            if may_wait and len(payload) <= DEFERRED_LIMIT:
                deferred.append(payload)
                return True
            queued.append((number, payload))
            if holder[0] == _get_ident():
                return True     # a handler that interrupted our own send: the send below us takes it along
            _drain(queued, deferred, executions, lock, holder, composer_of_results, send)
            if interrupts.pending and interrupts.executing and _get_native_id() == executions.main:
                interrupts.pending = False
                interrupts.fired = True
                raise KeyboardInterrupt
            return True

        return publish

    composer_of_results = _opaque(lambda: composers[0])

    leaf = importlib.import_module(LEAVES[config.get("language") or "python"])
    language = leaf.start(config, executions, _opaque(results_sender()), interrupts, streams)

    def close_in_child() -> None:
        nonlocal channel
        if channel is not None:
            channel.close()
            channel = None  # a grandchild must not close a number that is now another file
            streams.close_saved()

    if not rehearsal:
        os.register_at_fork(after_in_child=close_in_child)

    # --- requests ----------------------------------------------------------------------------------------------------
    def requests() -> Iterator[Request]:
        receive = channel.recv
        poller = _poll()
        poller.register(descriptor, _POLLIN)
        wait, background = poller.poll, language.background
        del poller
        open_mask: set = set()
        buffer = bytearray()
        number = 0
        while True:
            while len(buffer) < 4 or len(buffer) < 4 + _unpack_length(buffer)[0]:
                ready, failures = False, 0
                while not ready:
                    try:
                        _sigmask(_SETMASK, open_mask)
                        if failures < 10:
                            _idle(background, descriptor)
                        ready = bool(wait())
                    except BaseException as error:  # a handler or task of the user's raised between cells
                        _hold()
                        failures += 1
                        if failures <= 10:
                            language.report(error, "between cells")
                    _hold()
                piece = receive(262144)
                if not piece:
                    if rehearsal:
                        close_in_child()
                    return
                buffer += piece
                if len(buffer) >= 4 and _unpack_length(buffer)[0] > MAX_REQUEST:
                    return
            size = _unpack_length(buffer)[0]
            message = _scan_json(bytes(buffer[4:4 + size]).decode("utf-8", "surrogatepass"), 0)[0]
            del buffer[:4 + size]
            if message.get("do") == "exit":
                language.shutdown()
                streams.flush()
                return
            rehearses = message.get("do") == "rehearse" and number == 0
            if message.get("do") != "execute" and not rehearses:
                continue
            number += 1
            digest = keyed_hash()
            digest.update(bytes.fromhex(message["nonce"]))
            set_token(digest.digest())
            del digest
            interrupts.armed = True
            request = Request(number, message["code"], bool(message.get("quiet")), message.get("env"), rehearses)
            del message
            yield request

    # --- one execution -----------------------------------------------------------------------------------------------
    user_mask: set = set()
    user_trace: list[Any] = [None, None]

    def execute(request: Request) -> Outcome:
        nonlocal user_mask
        interrupts.install()
        interrupts.fired = False
        for note in streams.repair():
            streams.note(note + "; restored")
        while notes:
            streams.note(notes.pop(0))
        executions.begin(request.number)
        execution_of_task.set(request.number)
        if user_trace[1] is not None:
            _setprofile(user_trace[1])
        try:
            if user_trace[0] is not None:
                _settrace(user_trace[0])
            _sigmask(_SETMASK, user_mask)
            outcome = _zone(interrupts, language.execute, request)
            # A trace function left by the cell must not run in the loop. It is put back for the next cell.
            user_trace[:] = (_gettrace(), _getprofile())
            _settrace(None)
            _setprofile(None)
            user_mask = _hold()
        except BaseException as error:
            user_trace[:] = (_gettrace(), _getprofile())
            _settrace(None)
            _setprofile(None)
            _hold()
            outcome = language.failed(error)
        interrupts.executing = interrupts.armed = interrupts.pending = False
        user_mask.discard(_SIGINT)
        if _getpid() != owner:
            # os.fork() in a cell: the child has come out at the other end of its copy of the cell.
            language.exit_child(outcome)
        streams.flush()
        if request.rehearsal:
            language.forget()
        return outcome

    def finish(outcome: Outcome) -> None:
        payload = encode_ascii(
            f'{{"status": "{outcome.status}", "execution_count": {int(outcome.execution_count)}}}')
        try:
            _drain(queued, deferred, executions, lock, holder, composer_of_results, send, composers, outcome.error,
                   payload)
        except OSError:
            _exit(0)    # the agent is gone
        set_token(None)

    interrupts.loop = execute.__code__
    try:
        send(_pack_length(2) + bytes([READY]) + bytes(16) + b"{}")
    except OSError:
        _exit(0)
    return map(finish, map(execute, requests()))


def _drain(queued: deque, deferred: list[bytes], executions: Executions, lock: Any, holder: list[int],
           composer: Callable, send: Callable, composers: list | None = None, error: bytes | None = None,
           done: bytes | None = None) -> None:
    """Sends what is queued, under the lock and with signals held. With `done` it also ends the execution: everything
    goes out in one piece, and results that come later are dropped."""
    mask = _hold_or_raise() if done is None else _hold()
    lock.acquire()
    holder[0] = _get_ident()
    try:
        compose = composer()
        number = executions.state[0]
        held, deferred[:] = deferred[:], []
        if done is None:
            for payload in held:
                _send_shielded(send, compose, (_pack_length(len(payload)), payload))
            while queued:
                origin, payload = queued.popleft()
                if origin == number:
                    _send_shielded(send, compose, (_pack_length(len(payload)), payload))
            return
        held += [payload for origin, payload in queued if origin == number]
        queued.clear()
        executions.end()
        _send_end(send, compose, composers, held, error, done)
    finally:
        holder[0] = 0
        lock.release()
        if done is None:
            _sigmask(_SETMASK, mask)


def _send_end(send: Callable, compose: Any, composers: Any, held: list[bytes], error: bytes | None,
              done: bytes) -> None:
    send(b"".join(
        [compose((_pack_length(len(payload)), payload)) for payload in held]
        + ([composers[1]((_pack_length(len(error)), error))] if error is not None else [])
        + [composers[2]((_pack_length(len(done)), done))]
    ))
