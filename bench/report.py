"""RESULTS.md and results.json: the figures with the machine, the commit and the verdict on every line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.groups import Group

HERE = Path(__file__).resolve().parent


def facts() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _commit(),
        "kernel": platform.release(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "system": _system(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary user",
        "load": [round(value, 1) for value in os.getloadavg()],
        "packages": _packages(),
    }


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], check=False, cwd=HERE, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = [line for line in git("status", "--porcelain", "--", "../src").splitlines() if line]
    except OSError:
        return "unknown"
    return (commit or "unknown") + (" with changes" if changed else "")


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("numpy", "pandas", "ipython"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(groups: list[Group], quick: bool, seconds: float, directory: Path = HERE) -> None:
    """Write both files."""
    about = facts()
    raw = {
        "machine": about,
        "quick": quick,
        "seconds": round(seconds, 1),
        "lines": [
            {
                "group": line.group, "what": line.what, "value": line.value, "unit": line.unit, "bound": line.bound,
                "aim": line.aim, "verdict": line.verdict, "detail": line.detail,
            }
            for group in groups for line in group.lines
        ],
        "cases": {
            f"{group.name}: {case.name}": [round(value, 3) for value in case.samples]
            for group in groups for case in group.cases.values()
        },
        "usage": {group.name: group.usage for group in groups if group.usage},
        "notes": [note for group in groups for note in group.notes],
    }  # fmt: skip
    (directory / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    (directory / "RESULTS.md").write_text("\n".join(_markdown(groups, about, quick, seconds)) + "\n")


def _markdown(groups: list[Group], about: dict[str, Any], quick: bool, seconds: float) -> Iterable[str]:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    yield "# Results of the benchmark"
    yield ""
    yield f"Written by `make bench`{' (`--quick`)' if quick else ''} in {seconds:.0f} s; the raw samples are in `results.json`."
    yield ""
    yield f"* commit {about['commit']}, {about['date']}"
    yield f"* {about['processors']} processors ({about['processor']}), {about['memory_gib']} GiB, kernel {about['kernel']}, {about['system']}"
    yield f"* Python {about['python']}, {packages}; run as {about['user']}"
    yield f"* load average during the run: {', '.join(str(value) for value in about['load'])}"
    yield ""
    yield "What stands in one ratio was measured in turns, so that other load on the machine hit both sides; a turn is three"
    yield "calls in a row for starts, twenty for calls in a live session. Bounds and aims are what the project set itself"
    yield "before it was built. What a cycle is made of, and what is left to win: [PROFILE.md](PROFILE.md)."
    yield ""
    yield "(a) is `floor.c`: all namespaces, a root, and exec of `true`. (b) is"
    yield "`bwrap --unshare-all ... python3 -c 'print(1)'`, or `-c 'import numpy, pandas'` where it says so."
    yield ""
    yield "| measured | reached | bound | aim | verdict |"
    yield "|---|---|---|---|---|"
    for group in groups:
        for line in group.lines:
            sign = "≥" if line.more_is_better else "≤"
            reached = "-" if line.value is None else f"{_number(line.value)} {line.unit}"
            if line.detail:
                reached += f" ({line.detail})"
            limits = ["" if limit is None else f"{sign} {_number(limit)}" for limit in (line.bound, line.aim)]
            yield f"| {line.what} | {reached} | {limits[0]} | {limits[1]} | {line.verdict} |"
    yield ""
    yield "## Times"
    yield ""
    yield "| group | case | n | median | p95 | best |"
    yield "|---|---|---|---|---|---|"
    for group in groups:
        unit = "/s" if group.name == "throughput" else " ms"
        for case in group.cases.values():
            if case.samples:
                yield (
                    f"| {group.name} | {case.name.replace('|', '/')} | {len(case.samples)} | {_number(case.median)}{unit} "
                    f"| {_number(case.p95)}{unit} | {_number(max(case.samples) if unit == '/s' else case.best)}{unit} |"
                )
    yield ""
    yield "## Processor time and page faults of one cycle"
    yield ""
    yield "Sandboxes are counted by their control groups where there are some, from the moment they join them."
    yield ""
    yield "| group | case | processor ms | minor page faults |"
    yield "|---|---|---|---|"
    for group in groups:
        for name, used in group.usage.items():
            parts = []
            for table, digits in ((used["processor_ms"], 1), (used["faults"], 0)):
                text = f"{sum(table.values()):.{digits}f}"
                if len(table) > 1:
                    text += " (" + ", ".join(f"{role} {value:.{digits}f}" for role, value in table.items()) + ")"
                parts.append(text)
            yield f"| {group.name} | {name} | {parts[0]} | {parts[1]} |"
    notes = [note for group in groups for note in group.notes]
    if notes:
        yield ""
        yield "## Left out"
        yield ""
        for note in notes:
            yield f"* {note}"
    yield ""
    yield "Again: `make bench`. One group: `python -m bench --only start`. What a cycle is made of:"
    yield "`python -m bench --profile start`."


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def show(groups: list[Group]) -> None:
    """The verdicts on the terminal."""
    for group in groups:
        for case in group.cases.values():
            if case.samples:
                print(f"{'':32} {_number(case.median):>8} (p95 {_number(case.p95)}, best {_number(case.best)}) {case.name}")
        for name, used in group.usage.items():
            parts = ", ".join(f"{role} {value:.1f} ms" for role, value in used["processor_ms"].items())
            print(f"{'':32} {name}: {parts}; {sum(used['faults'].values()):.0f} page faults")
        for line in group.lines:
            reached = "-" if line.value is None else _number(line.value)
            print(f"{line.verdict:32} {reached:>8} {line.unit:28} {line.what}  {line.detail}")
        for note in group.notes:
            print(f"{'':32} {note}")
    missed = [line for group in groups for line in group.lines if line.verdict == "MISSED"]
    print(f"{len(missed)} missed" if missed else "every bound is held", file=sys.stderr)
