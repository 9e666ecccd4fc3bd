"""The program `ringfence`: the fast path for `run` and `exec`, everything else by typer.

Guards against paying for a command line library where the answer takes less time than its import. Standard
library only; `app` is imported when a command needs it.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the console script. Never returns."""
    words = sys.argv[1:]
    if words and words[0] in ("run", "exec"):
        from ringfence.cli.arguments import UsageError, parse

        try:
            request = parse(words[0], words[1:])
        except UsageError as error:
            sys.stderr.write(f"ringfence: {error}\n")
            sys.exit(2)
        if not request.help:
            from ringfence.cli import once

            code = once.main(request)
            # Nothing is left to flush or to close: the interpreter's own end would only cost time.
            os._exit(code)
        sys.argv = [sys.argv[0], words[0], "--help"]
    from ringfence.cli.app import run

    run()
