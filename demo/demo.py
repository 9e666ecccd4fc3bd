"""`make demo`: analyse a real data set in one sandbox, then let hostile code try its luck in others.

    python demo/demo.py [--json]

Ends with exit code 0 when the analysis worked and every attack was held, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

OUTPUT = Path("demo-output")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--details", action="store_true", help="show what each hostile script printed")
    options = parser.parse_args()

    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 150)
    begun = time.monotonic()
    from analysis import analyse
    from host import Witness

    from attacks import ATTACKS, run_all
    from ringfence import RingfenceError

    def progress(prefix: str):
        return lambda text: console.print(f"  [dim]{time.monotonic() - begun:5.1f} s[/dim] {prefix}{text}")

    who = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    console.print(f"[bold]Ringfence demo[/bold] on Linux {os.uname().release}, as {who}\n")
    console.print("[bold]1. A data-analysis agent's session[/bold]")
    try:
        analysis = analyse(OUTPUT, progress(""))
    except RingfenceError as error:
        console.print(f"\n[red]{type(error).__name__}[/red]: {error}\nrun `ringfence doctor` to see what this machine lacks")
        return 1
    table = Table("cell", "ms", "result", title=None, show_lines=True)
    for cell in analysis["cells"]:
        text = cell["text"] or "(" + ", ".join(cell["formats"]) + ")"
        table.add_row(cell["cell"], f"{cell['ms']:.0f}", text)
    console.print(table)
    console.print(f"Finding: by [bold]{analysis['crossing']}[/bold] the world had more people over 65 than children under 5.")
    for path, size in analysis["saved"].items():
        console.print(f"Saved {path} ({size:,} bytes)")

    console.print(f"\n[bold]2. {len(ATTACKS)} attacks, each in a sandbox of its own[/bold]")
    witness = Witness()
    try:
        judgements = list(run_all(witness, progress("")))
    finally:
        witness.close()
    colours = {"HELD": "green", "BREACH": "bold red", "BROKEN": "yellow"}
    table = Table("attack", "verdict", "what held it", "evidence from the host's side", "start", show_lines=True)
    for each in judgements:
        colour = colours[each.verdict]
        table.add_row(each.attack, f"[{colour}]{each.verdict}[/{colour}]", each.held_by, each.evidence, f"{each.start_ms:.0f} ms")
    console.print(table)
    if options.details:
        for each in judgements:
            console.rule(each.attack)
            console.print(each.facts.get("output", ""), markup=False)

    limits = {row.primitive: row.strength for row in judgements[0].facts.get("enforcement", ()) if row.primitive.startswith("limit ")}
    console.print("Limits here: " + ", ".join(f"{name.removeprefix('limit ')} {strength}" for name, strength in limits.items()))
    held = sum(each.verdict == "HELD" for each in judgements)
    seconds = time.monotonic() - begun
    console.print(f"[bold]{held} of {len(judgements)} held[/bold] in {seconds:.0f} s.")
    if options.json:
        document = {
            "analysis": analysis,
            "attacks": [
                {"attack": each.attack, "verdict": each.verdict, "held_by": each.held_by, "evidence": each.evidence,
                 "start_ms": round(each.start_ms, 2), "seconds": round(each.seconds, 2)}
                for each in judgements
            ],
            "limits": limits, "held": held, "seconds": round(seconds, 1),
        }  # fmt: skip
        print(json.dumps(document, indent=2))
    return 0 if held == len(judgements) else 1


if __name__ == "__main__":
    sys.exit(main())
