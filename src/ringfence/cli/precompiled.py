"""The default policy and environment as plain values, for the command line's fast path.

Guards against importing `dataclasses` (and what it pulls in) to learn twelve numbers. A test holds that these are
exactly what `Policy().compile()` and the namespace engine say.
"""

from __future__ import annotations

LIMITS = {
    "memory": 512 << 20,
    "cpus": 1.0,
    "pids": 100,
    "disk": 200 << 20,
    "tmp": 100 << 20,
    "file_size": 100 << 20,
    "open_files": 1024,
    "max_age": 3600.0,
    "required": "any",
}
"""What the launcher is told; bytes and seconds."""

TIMEOUT = 30.0
"""limits.timeout, in seconds: kept by the caller's own clock."""

OUTPUT = 1 << 20
"""limits.output, in bytes: how much of each stream `--json` keeps, the newest. Output that passes through has no bound."""

ENVIRONMENT = {
    "PATH": "/opt/env/bin:/opt/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games",
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
    "OPENBLAS_NUM_THREADS": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
