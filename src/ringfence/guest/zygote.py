"""The zygote: a warmed interpreter whose forks are sandboxes.

It runs inside the template root, as the root of an outer user namespace and as pid 1 of a pid namespace of
its own: when it dies, the kernel kills every sandbox it ever forked. It has no privilege in the machine's own
namespaces; the launcher hands it descriptors (streams, cgroup files) and nothing else. It holds one thread,
no event loop and no secret, because every sandbox inherits its memory: what must not be in a sandbox must
not be here.

Messages from the launcher are JSON over a sequenced-packet socket (descriptor 3); the guest's stream only
passes through as a descriptor and is never read here.
"""

from __future__ import annotations

import _socket
import ctypes
import gc
import os
import select
import sys

from ringfence.guest import agent, confine
from ringfence.linux import filters, landlock, namespaces, seccomp
from ringfence.linux.channels import receive_descriptors, send_descriptors
from ringfence.linux.json_text import dumps, loads
from ringfence.linux.syscalls import libc, prctl

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    import socket
    from typing import Any
else:
    import _socket as socket

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MADV_COLLAPSE = 25  # Linux 6.1
_HUGE = 2 << 20
MAXIMUM_LENT = 33  # host directories of one sandbox; engines.namespace.grammar bounds the same
_SANDBOX_NAMESPACES = (
    namespaces.CLONE_NEWNS | namespaces.CLONE_NEWPID | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWUTS
)


class Zygote:
    """The loop between the launcher's requests, the children's mapping requests and their deaths."""

    def __init__(self, control: socket.socket, settings: dict, problems: list[str]):
        self.problems = problems
        self.control = control
        self.settings = settings
        self.poll = select.epoll()
        self.networks: list[int] = []
        self.own_network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.mapping: dict[int, tuple[socket.socket, int, dict]] = {}
        self.children: dict[int, int] = {}
        self.captures: dict[int, str] = {}  # a capturer's pidfd -> whose workspace it reads
        self.prepared = self._prepare()

    def _prepare(self) -> confine.Prepared:
        ruleset = -1
        if landlock.abi() >= 6:
            ruleset = landlock.scopes_ruleset()
        root, trees = self.settings["root"], None
        if root:
            from ringfence.guest import elevation, inner, keepers, writable  # noqa: F401 - for the sandboxes

            trees = writable.WritableTrees()
        program = filters.guest_filter(
            single_uid=self.settings["single"], root=root, watched_memory=self.settings["watched_memory"]
        )
        return confine.Prepared(seccomp.installer(program), ruleset, confine.Masks(), trees)

    def serve(self) -> None:
        """Answer the launcher until it goes away."""
        self.poll.register(self.control.fileno(), select.EPOLLIN)
        version = sys.version.split()[0]
        self._say({"ready": True, "landlock": landlock.abi(), "python": version, "problems": self.problems[:20]})
        while True:
            # Not while a child waits for its id map: one network namespace takes most of a millisecond.
            wanted = 0 if self.mapping else self.settings["networks"] - len(self.networks)
            events = self.poll.poll(0.002 if wanted > 0 else -1)
            if not events and wanted > 0:
                self._add_network()
            for descriptor, _ in events:
                if descriptor == self.control.fileno():
                    self._request()
                elif descriptor in self.mapping:
                    self._map(descriptor)
                elif descriptor in self.children:
                    self._reap(descriptor)

    def _add_network(self) -> None:
        """Create one network namespace ahead of need: single-use, since TIME_WAIT state remains in one."""
        try:
            namespaces.unshare(namespaces.CLONE_NEWNET)
            namespaces.raise_loopback()
            self.networks.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.settings["networks"] = 0
        namespaces.enter(self.own_network, namespaces.CLONE_NEWNET)

    def _request(self) -> None:
        message, descriptors = receive_descriptors(self.control, 1 << 18, 16 + MAXIMUM_LENT)
        if not message:
            os._exit(0)
        request = loads(message)
        if "capture" in request:
            self._capture(request, descriptors)
        else:
            self._create(request, descriptors)

    def _capture(self, request: dict, descriptors: list[int]) -> None:
        """Fork a process that writes down what was changed in a workspace: see guest/capture.py."""
        pid, pidfd = namespaces.fork_into(0, hooks=False)
        if pid == 0:
            code = 70
            try:
                from ringfence.guest import capture

                code = capture.main(*descriptors)
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
        self.children[pidfd] = pid
        self.captures[pidfd] = request["capture"]
        self.poll.register(pidfd, select.EPOLLIN)

    def _create(self, request: dict, descriptors: list[int]) -> None:
        pair: Any = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        ours, theirs = pair
        born = descriptors.pop(1) if request["born"] else -1
        network = self.networks.pop() if self.networks else -1
        try:
            if self.prepared.writable is not None:
                self.prepared.writable.maps(request)  # made here, where other namespaces can be entered and left
            pid, pidfd = namespaces.fork_into(_SANDBOX_NAMESPACES, born, hooks=False)
        except OSError as error:
            self._say({"failed": request["id"], "step": "clone3", "message": str(error)})
            ours.close()
            theirs.close()
            pidfd = -1
        else:
            if pid == 0:
                self._child(request, descriptors, network, theirs)
            theirs.close()
            self.mapping[ours.fileno()] = (ours, pid, request)
            self.poll.register(ours.fileno(), select.EPOLLIN)
            self.children[pidfd] = pid
            self.poll.register(pidfd, select.EPOLLIN)
            self._say({"started": request["id"]}, [pidfd])
        for descriptor in (*descriptors, network, born):
            if descriptor >= 0:
                os.close(descriptor)

    def _child(self, request: dict, descriptors: list[int], network: int, mapping: socket.socket) -> None:
        """In the new process: confine it, then be the agent. Never returns."""
        try:
            # The C socket: that of `socket` turns numbers into enumerations, and copies dozens of pages for it.
            stream: Any = _socket.socket(fileno=descriptors[0])
            try:
                split = len(descriptors) - len(request["lent"])
                confine.confine(
                    request, descriptors[1:split], descriptors[split:], network, stream, mapping, self.prepared
                )
            except confine.ConfinementError as error:
                mapping.send(b"e" + dumps({"step": error.step, "message": str(error.error)}).encode())
                os._exit(70)
            agent.serve(stream, request["boot"])
        except BaseException as error:  # noqa: BLE001 - nothing may unwind into the zygote's loop
            try:
                if os.environ.get("RINGFENCE_DEBUG"):
                    import traceback

                    traceback.print_exc()
                mapping.send(b"e" + dumps({"step": "agent", "message": repr(error)[:500]}).encode())
            except OSError:
                pass
        finally:
            os._exit(71)

    def _map(self, descriptor: int) -> None:
        ours, pid, request = self.mapping[descriptor]
        upper: list[int] = []
        try:
            message, upper = receive_descriptors(ours, 4096, 1)
        except OSError:
            message = b""
        if message == b"u":
            if upper:
                self._say({"upper": request["id"]}, upper)
                os.close(upper[0])
            try:
                confine.write_maps(pid, request)
                ours.send(b"m")
            except OSError as error:
                self._say({"failed": request["id"], "step": "id map", "message": str(error)})
                ours.send(b"x")
            return
        if message[:1] == b"e":
            problem = loads(message[1:])
            self._say({"failed": request["id"], **problem})
        self.poll.unregister(descriptor)
        del self.mapping[descriptor]
        ours.close()

    def _reap(self, descriptor: int) -> None:
        self.poll.unregister(descriptor)
        pid = self.children.pop(descriptor)
        os.close(descriptor)
        status = 0xFF00
        try:
            status = os.waitpid(pid, 0)[1]
        except ChildProcessError:
            pass
        captured = self.captures.pop(descriptor, None)
        if captured is not None:
            self._say({"captured": captured, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        raw = dumps(message).encode()
        send_descriptors(self.control, raw, descriptors or [])


def collapse_heap() -> int:
    """Back the writable heap with huge pages where the kernel can: a fork then copies far fewer entries.

    Returns the number of areas collapsed. Pure speed: failure changes nothing (madvise(2), MADV_COLLAPSE).
    """
    collapsed = 0
    try:
        with open("/proc/self/maps") as maps:
            lines = maps.readlines()
    except OSError:
        return 0
    for line in lines:
        fields = line.split()
        if not fields[1].startswith("rw") or (len(fields) > 5 and fields[5] != "[heap]"):
            continue
        first, last = (int(part, 16) for part in fields[0].split("-"))
        first, last = (first + _HUGE - 1) & ~(_HUGE - 1), last & ~(_HUGE - 1)
        if last > first and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE) == 0:
            collapsed += 1
    return collapsed


_FONT_LIST, _FONT_PLACE = "/opt/env/share/matplotlib", "/tmp/matplotlib"


def _lend_font_list() -> None:
    """Give matplotlib its font list, made with the environment, where it accepts one: in a writable directory."""
    if os.path.isdir(_FONT_LIST):
        os.mkdir(_FONT_PLACE)
        for name in os.listdir(_FONT_LIST):
            with open(f"{_FONT_LIST}/{name}", "rb") as source, open(f"{_FONT_PLACE}/{name}", "wb") as target:
                target.write(source.read())
        os.environ["MPLCONFIGDIR"] = _FONT_PLACE


def _take_back_font_list() -> None:
    """Sandboxes have directories of their own; matplotlib looks for them when it is asked again."""
    if os.environ.pop("MPLCONFIGDIR", "") != _FONT_PLACE:
        return
    for name in os.listdir(_FONT_PLACE):
        os.unlink(f"{_FONT_PLACE}/{name}")
    os.rmdir(_FONT_PLACE)
    matplotlib = sys.modules.get("matplotlib")
    for function in ("get_configdir", "get_cachedir"):
        clear = getattr(getattr(matplotlib, function, None), "cache_clear", None)
        if clear is not None:
            clear()


def main(control_descriptor: int) -> None:
    """Entry of the executed zygote: warm up, then serve."""
    prctl(PR_SET_PDEATHSIG, 9)
    control = socket.socket(fileno=control_descriptor)
    os.set_inheritable(control_descriptor, False)
    settings = loads(control.recv(1 << 16))
    problems: list[str] = []
    if settings["modules"] is not None:
        gc.enable()
        from ringfence.guest import packages, python_kernel

        if settings["modules"]:
            packages.activate()  # somebody named modules to be imported ahead: those may be of theirs
        _lend_font_list()
        problems = python_kernel.warm(settings["modules"])
        _take_back_font_list()
    libc.prctl(PR_SET_NAME, b"ringfence-zygot", 0, 0, 0)
    zygote = Zygote(control, settings, problems)
    if settings["networks"]:  # else this zygote is for one sandbox, and what would be made ahead is not worth it
        _make_ready(settings)
    zygote.serve()


def _make_ready(settings: dict) -> None:
    """What makes forks cheaper. A failure only costs speed."""
    from ringfence.guest import lent, rehearsal  # noqa: F401 - a fork that needs `lent` finds it loaded

    try:
        rehearsal.rehearse(settings["single"], settings["modules"] is not None)
    except Exception:
        if os.environ.get("RINGFENCE_DEBUG"):
            raise
    gc.collect()
    gc.disable()
    gc.freeze()
    collapse_heap()
