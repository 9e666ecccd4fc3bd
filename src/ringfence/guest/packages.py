"""Switch a Python kernel over to the sandbox's own packages, after the fork, inside the sandbox.

Guards against code of packages running before there is a sandbox around it. A zygote knows only the kernel's own
packages (`/opt/env`); what somebody asked for lies at `/opt/packages`, a virtual environment of its own, and comes
onto the path here, `.pth` files included, in a process that is already confined. Only modules that were named to be
warmed are imported earlier, in the zygote, which has no network and no file of the host either.

The kernel's packages stay on the path, behind: what a kernel has imported already it keeps.
"""

from __future__ import annotations

import os
import sys

PREFIX = "/opt/packages"


def activate(prefix: str = PREFIX) -> bool:
    """Put the environment at `prefix` first. False where there is none; a second call changes nothing."""
    if not os.path.isdir(prefix):
        return False
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    directory = f"{prefix}/lib/{version}/site-packages"
    if directory in sys.path:
        return True
    import site

    own = [path for path in sys.path if path.endswith("/site-packages")]
    sys.path[:] = [path for path in sys.path if path not in own]
    # What venv's interpreter would have: packages that ask where they are installed, and subprocesses, look here.
    sys.prefix = sys.exec_prefix = prefix
    sys.executable = f"{prefix}/bin/python3"
    site.PREFIXES[:] = [prefix]
    site.addsitedir(directory)  # runs what its .pth files say
    sys.path += own
    return True
