"""`python -m bench`: run the groups, write RESULTS.md and results.json, show the verdicts."""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> int:
    from bench import groups, profile, report
    from bench.measure import say

    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the repetitions; for a first look")
    parser.add_argument("--only", action="append", choices=sorted(groups.GROUPS), metavar="GROUP",
                        help=f"one group, may be repeated; nothing is written: {', '.join(groups.GROUPS)}")  # fmt: skip
    parser.add_argument("--profile", choices=profile.NAMES, metavar="CASE",
                        help=f"show what a case is made of, and nothing else: {', '.join(profile.NAMES)}")  # fmt: skip
    arguments = parser.parse_args()
    # An installer compiles byte code. Where this variable is set, a checkout would compile its sources at every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if arguments.profile:
        profile.main(arguments.profile)
        return 0
    begun = time.monotonic()
    done = []
    try:
        for name, function in groups.GROUPS.items():
            if arguments.only and name not in arguments.only:
                continue
            say(name)
            done.append(function(arguments.quick))
    finally:
        from ringfence.node.node import Node

        Node.current().close()
    if not arguments.only:
        report.write(done, arguments.quick, time.monotonic() - begun)
    report.show(done)
    say(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(line.verdict == "MISSED" for group in done for line in group.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
