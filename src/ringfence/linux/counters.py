"""The kernel's counters of one sandbox's control group, read by its owner around every execution.

Guards the hot path: two small files and no question to the launcher. Opening one costs ten times what reading it
does, so the files stay open, of as many sandboxes as leave the process most of its descriptors; of the others they
are opened each time. The paths come from `cgroups.Group.counters`. Nothing here raises: a counter that is not there
is None. Facts: cgroup-v1/cpuacct.rst, cgroup-v1/memory.rst, cgroup-v2.rst.
"""

from __future__ import annotations

import os

_RESETTABLE = "/memory.max_usage_in_bytes"  # v2's memory.peak is reset for one descriptor at a time, since 6.12
_MOST_HELD = 128  # files; a process may have 1024 descriptors by default


class Counters:
    """Processor time and the highest memory of one group. `paths` may lack either. One thread at a time."""

    __slots__ = ("_cpu", "_held", "_peak", "resettable")

    held = 0
    """Files held open by all instances together."""

    def __init__(self, paths: dict):
        self._cpu: str = paths.get("cpu", "")
        self._peak: str = paths.get("peak", "")
        self._held: dict = {}
        self.resettable = self._peak.endswith(_RESETTABLE)

    def cpu_seconds(self):
        """Processor time of everything that ever ran in the group, in seconds."""
        text = self._read(self._cpu)
        if text.startswith(b"usage_usec "):
            return int(text[11 : text.index(b"\n")]) / 1e6
        return int(text) / 1e9 if text[:-1].isdigit() else None

    def peak(self):
        """The highest memory in bytes, since the start or the last `reset`."""
        text = self._read(self._peak)
        return int(text) if text[:-1].isdigit() else None

    def reset(self) -> bool:
        """Let `peak` begin anew from what is in use; False where the kernel has no such thing."""
        if not self.resettable:
            return False
        descriptor = self._open(self._peak)
        try:
            os.pwrite(descriptor, b"0", 0)
        except OSError:
            return False
        finally:
            self._done(self._peak, descriptor)
        return True

    def close(self) -> None:
        """Close what is held; reading opens it again."""
        held, self._held = self._held, {}
        Counters.held -= len(held)
        for descriptor in held.values():
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str) -> int:
        """A descriptor, or -1."""
        descriptor = self._held.get(path)
        if descriptor is not None:
            return descriptor
        try:
            flags = os.O_RDWR if self.resettable and path == self._peak else os.O_RDONLY
            descriptor = os.open(path, flags | os.O_CLOEXEC)
        except OSError:
            return -1
        if Counters.held < _MOST_HELD:
            Counters.held += 1
            self._held[path] = descriptor
        return descriptor

    def _done(self, path: str, descriptor: int) -> None:
        if descriptor >= 0 and path not in self._held:
            os.close(descriptor)

    def _read(self, path: str) -> bytes:
        if not path:
            return b""
        descriptor = self._open(path)
        try:
            return os.pread(descriptor, 256, 0)
        except OSError:
            return b""
        finally:
            self._done(path, descriptor)
