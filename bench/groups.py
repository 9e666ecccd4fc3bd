"""What is measured: one function per group of the issue's list, each returning lines of the result.

Guards against comparing what was not measured together: every ratio is between cases of one group, which took
turns. Everything a group starts ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import peers, processes
from bench.measure import Case, say, take_turns
from ringfence import Sandbox

PANDAS_CELL = "import pandas\npandas.DataFrame({'a': [1, 2]})['a'].sum()"
_PROGRAM = str(Path(sys.executable).with_name("ringfence"))


@dataclass
class Line:
    """One line of the results. `value` is a ratio, or what `unit` says; `bound` and `aim` hold in its direction."""

    group: str
    what: str
    value: float | None
    unit: str
    bound: float | None = None
    aim: float | None = None
    more_is_better: bool = False
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "skipped"
        if self.bound is None:
            return "shown"

        def holds(limit: float) -> bool:
            return self.value >= limit if self.more_is_better else self.value <= limit  # type: ignore[operator]

        if not holds(self.bound):
            return "MISSED"
        return "within the bound, aim reached" if self.aim is not None and holds(self.aim) else "within the bound"


@dataclass
class Group:
    """The outcome of one group."""

    name: str
    lines: list[Line] = field(default_factory=list)
    cases: dict[str, Case] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def line(self, what: str, value: float | None, unit: str, **rest: Any) -> None:
        self.lines.append(Line(self.name, what, value, unit, **rest))


def _ratio(of: Case, to: Case | None) -> float | None:
    return of.median / to.median if to is not None and to.samples else None


def _command(group: Group, name: str, make: Callable[[], list[str]]) -> Case | None:
    try:
        arguments = make()
    except peers.Missing as reason:
        group.notes.append(f"{name}: skipped, {reason}")
        return None
    return Case(name, lambda: peers.quiet(arguments))


class _Pooled:
    """Sandboxes made ahead: hands one out, and afterwards waits until there is another."""

    def __init__(self, template: str, code: str, size: int):
        self._template, self._code = template, code
        self.pool = Sandbox.prewarm(size, template)
        self.pool.wait_full()
        self.sandbox: Any = None
        self.first = 0.0
        self.all: list[float] = []

    def __call__(self) -> None:
        begun = time.perf_counter()
        sandbox = Sandbox(self._template)
        sandbox.run_code(self._code)
        self.first = (time.perf_counter() - begun) * 1e3
        sandbox.kill()

    def refill(self) -> None:
        self.all.append(self.first)
        self.pool.wait_full()
        time.sleep(0.03)

    def close(self) -> None:
        self.pool.resize(0)


def start(quick: bool) -> Group:
    """Bullets 1 and 2 for `base`: a whole cycle, and one from a pre-created sandbox."""
    group = Group("start")
    rounds = 6 if quick else 20
    ours = Case("ours: Sandbox(), run_code('1+1'), kill()", _fresh("base", "1+1"))
    pooled_call = _Pooled("base", "1+1", 2)
    pooled = Case("ours: the same, pre-created", pooled_call, after=pooled_call.refill)
    bwrap = _command(group, "(b) bwrap python3 -c 'print(1)'", peers.plain_python)
    cases = [ours, pooled]
    floor = None
    try:
        floor_program = peers.Floor()
        floor = Case("(a) floor in C: namespaces, root, exec true", floor_program)
        cases.append(floor)
    except peers.Missing as reason:
        floor_program = None
        group.notes.append(f"(a) the floor: skipped, {reason}")
    if bwrap is not None:
        cases.append(bwrap)
    for name, command in peers.containers().items():
        if isinstance(command, str):
            group.notes.append(f"{name}: skipped, {command}")
        else:
            cases.append(Case(name, lambda command=command: peers.quiet(command), every=10))
    try:
        group.cases = take_turns(cases, rounds, burst=3)
    finally:
        pooled_call.close()
        if floor_program is not None:
            floor_program.close()
    first = Case("ours: pre-created, to the first result", lambda: None)
    first.samples = pooled_call.all[-len(pooled.samples) :]
    group.cases[first.name] = first
    group.line("`Sandbox()` + `run_code('1+1')` + `kill()`, no pool", _ratio(ours, bwrap), "x (b)", bound=0.8, aim=0.5)
    group.line("the same, pre-created sandbox", _ratio(pooled, bwrap), "x (b)", bound=0.2, aim=0.1)
    group.line("pre-created, `Sandbox()` + `run_code('1+1')` alone", _ratio(first, bwrap), "x (b)", bound=0.2, aim=0.1)
    if floor is not None:
        group.line("`Sandbox()` + `run_code('1+1')` + `kill()`", _ratio(ours, floor), "x (a)")
    times = 10 if quick else 30
    processor, faults = processes.usage_of(_fresh("base", "1+1"), times)
    group.usage["ours, no pool"] = {"processor_ms": processor, "faults": faults}
    if bwrap is not None:
        used, touched = peers.usage_of(peers.plain_python(), times)
        group.usage["(b)"] = {"processor_ms": {"all": used}, "faults": {"all": touched}}
        group.line("processor time of a cycle, all processes", sum(processor.values()) / used, "x (b)")
    return group


def _fresh(template: str, code: str) -> Callable[[], None]:
    """A cycle that no pool serves: pools are kept by specification, and this one names an environment variable."""

    def run() -> None:
        sandbox = Sandbox(template, envs={"RINGFENCE_BENCH": "fresh"})
        execution = sandbox.run_code(code)
        sandbox.kill()
        if execution.error is not None:
            raise RuntimeError(f"the cell failed: {execution.error}")

    return run


def data(quick: bool) -> Group:
    """Bullets 1 and 2 for `data`, with pandas used."""
    group = Group("data")
    rounds = 5 if quick else 20
    ours = Case("ours: Sandbox('data'), pandas used, kill()", _fresh("data", PANDAS_CELL))
    pooled_call = _Pooled("data", PANDAS_CELL, 2)
    pooled = Case("ours: the same, pre-created", pooled_call, after=pooled_call.refill)
    bwrap = _command(group, "(b) bwrap python3 -c 'import numpy, pandas'", peers.data_python)
    cases = [ours, pooled] + ([bwrap] if bwrap else [])
    try:
        group.cases = take_turns(cases, rounds, warm=1)
    finally:
        pooled_call.close()
    ratio = _ratio(ours, bwrap)
    group.line("data template, `import pandas` used, no pool", ratio, "x (b) with pandas", bound=1 / 18, aim=1 / 30,
               detail=f"1/{1 / ratio:.0f}" if ratio else "")  # fmt: skip
    ratio = _ratio(pooled, bwrap)
    group.line("the same, pre-created sandbox", ratio, "x (b) with pandas", bound=0.2, aim=0.1)
    times = 5 if quick else 15
    processor, faults = processes.usage_of(_fresh("data", PANDAS_CELL), times)
    group.usage["ours, no pool"] = {"processor_ms": processor, "faults": faults}
    if bwrap is not None:
        used, touched = peers.usage_of(peers.data_python(), 3)
        group.usage["(b) with pandas"] = {"processor_ms": {"all": used}, "faults": {"all": touched}}
        group.line("processor time of a cycle, all processes", sum(processor.values()) / used, "x (b) with pandas")
    return group


def live(quick: bool) -> Group:
    """Bullet 3: a session that is up."""
    group = Group("live")
    rounds = 5 if quick else 20
    with Sandbox() as sandbox:
        sandbox.run_code("1+1")
        code = Case("ours: run_code('1+1')", lambda: sandbox.run_code("1+1"))
        shell = Case("ours: commands.run('true')", lambda: sandbox.commands.run("true"))
        program = Case("ours: commands.run(['true'])", lambda: sandbox.commands.run(["true"]))
        plain_shell = Case("subprocess.run(['bash', '-c', 'true'])", lambda: peers.quiet(["bash", "-c", "true"]))
        plain = Case("subprocess.run(['true'])", lambda: peers.quiet(["true"]))
        group.cases = take_turns([code, plain_shell, shell, plain, program], rounds, burst=20)
    group.line("`run_code('1+1')` in a live session, sync facade", code.median, "ms", bound=1.5, aim=0.7)
    group.line("`commands.run('true')`", _ratio(shell, plain_shell), "x subprocess bash -c true", bound=2.0)
    group.line("`commands.run(['true'])`", _ratio(program, plain), "x subprocess true", bound=2.5)
    return group


FILES, FOLDERS = 50_000, 500  # of the repository that a workspace shows


def workspace(quick: bool) -> Group:
    """A host directory of 50,000 files, shown and not copied, beside a plain copy of it."""
    group = Group("workspace")
    rounds = 8 if quick else 25
    # On a disk: what is copied from a tmpfs is copied too cheaply.
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir="/var/tmp") as directory:
        say(f"workspace: writing {FILES} files")
        tree = Path(directory) / "tree"
        for folder in range(FOLDERS):
            (tree / f"part{folder // 20}" / f"folder{folder}").mkdir(parents=True)
            for number in range(FILES // FOLDERS):
                (tree / f"part{folder // 20}" / f"folder{folder}" / f"file{number}.py").write_text(f"value = {number}\n" * 20)
        without = Case("ours: Sandbox(), commands.run(['true']), kill()", _with_workspace(None, "overlay"))
        cases = [without]
        modes = {mode: Case(f"ours: the same, workspace {mode}", _with_workspace(str(tree), mode)) for mode in ("overlay", "ro")}
        cases += modes.values()
        copy = Case(f"cp -a of the {FILES} files", lambda: peers.quiet(["cp", "-a", str(tree), f"{directory}/copy"]),
                    after=lambda: peers.quiet(["rm", "-rf", f"{directory}/copy"]), every=max(1, rounds // 3))  # fmt: skip
        cases.append(copy)
        overlay = _command(group, "bwrap --overlay", lambda: peers.bubblewrap_overlay(str(tree)))
        plain = _command(group, "(b) bwrap python3 -c 'print(1)'", peers.plain_python) if overlay else None
        cases += [case for case in (overlay, plain) if case is not None]
        docker = peers.containers()["docker run --network none"]
        if isinstance(docker, str):
            group.notes.append(f"docker run -v: skipped, {docker}")
        else:
            place = docker.index("--rm")
            command = [*docker[:place], "-v", f"{tree}:/workspace:ro", *docker[place:]]
            cases.append(Case("docker run -v", lambda: peers.quiet(command), every=10))
        group.cases = take_turns(cases, rounds, warm=1)
    for mode, case in modes.items():
        group.line(f"a start with a workspace of {FILES} files, `{mode}`: what it costs more", case.median - without.median,
                   "ms", bound=3.0, aim=1.0)  # fmt: skip
    group.line("a start with it, `overlay`, whole cycle", _ratio(modes["overlay"], copy), "x cp -a of the files")
    if overlay is not None and plain is not None:
        group.line("bwrap --overlay: what it costs more", overlay.median - plain.median, "ms")
    return group


def _with_workspace(source: str | None, mode: str) -> Callable[[], None]:
    """A cycle that shows a directory, or none."""
    options: dict[str, Any] = {} if source is None else {"workspace": {"source": source, "mode": mode}}

    def run() -> None:
        sandbox = Sandbox("plain", envs={"RINGFENCE_BENCH": "fresh"}, **options)
        done = sandbox.commands.run(["true"])
        sandbox.kill()
        if not done.ok:
            raise RuntimeError(f"the command failed: {done.stderr}")

    return run


_FIRST = (
    "import time; begun = time.perf_counter()\n"
    "from ringfence import Sandbox\n"
    "sandbox = Sandbox({template!r}); assert sandbox.run_code({code!r}).error is None\n"
    "print((time.perf_counter() - begun) * 1e3, flush=True)\n"
    "sandbox.kill()\n"
)


def whole(quick: bool) -> Group:
    """Bullet 4: processes from nothing."""
    group = Group("whole")
    rounds = 5 if quick else 20

    def first(template: str, code: str) -> Callable[[], float]:
        script = _FIRST.format(template=template, code=code)

        def run() -> float:
            output = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE).stdout
            return float(output)

        return run

    run = Case("ours: ringfence run -c 'print(1)'", lambda: peers.quiet([_PROGRAM, "run", "-c", "print(1)"]))
    base = Case("ours: import ringfence to first result, base", first("base", "1+1"), every=3)
    full = Case("ours: import ringfence to first result, data", first("data", PANDAS_CELL), every=10)
    bwrap = _command(group, "(b) bwrap python3 -c 'print(1)'", peers.plain_python)
    group.cases = take_turns([run, base, full] + ([bwrap] if bwrap else []), rounds, warm=1)
    group.line("`ringfence run -c 'print(1)'`, the whole process", _ratio(run, bwrap), "x (b)", bound=6.0)
    group.line("fresh process: `import ringfence` to the first result, base", base.median, "ms")
    group.line("fresh process: `import ringfence` to the first result, data", full.median, "ms")
    return group


def throughput(quick: bool, at_a_time: int = 8) -> Group:
    """Bullet 5: whole cycles with eight in flight, in slices that take turns."""
    group = Group("throughput")
    slices, seconds = (2, 1.5) if quick else (5, 2.5)
    ours = Case("ours: cycles per second, 8 in flight", lambda: _per_second(_fresh("base", "1+1"), at_a_time, seconds))
    try:
        command = peers.plain_python()
        theirs = Case("(b): runs per second, 8 in flight", lambda: _per_second(lambda: peers.quiet(command), at_a_time, seconds))
    except peers.Missing as reason:
        group.notes.append(f"(b): skipped, {reason}")
        theirs = None
    group.cases = take_turns([ours] + ([theirs] if theirs else []), slices, warm=0)
    ratio = ours.median / theirs.median if theirs else None
    group.line("whole cycles per second with 8 in flight", ratio, "x (b) with 8 in flight", bound=1.5, aim=4.0,
               more_is_better=True, detail=f"{ours.median:.0f} per s")  # fmt: skip
    return group


def _per_second(cycle: Callable[[], Any], at_a_time: int, seconds: float) -> float:
    counts = [0] * at_a_time
    until = time.perf_counter() + seconds
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            while time.perf_counter() < until:
                cycle()
                counts[number] += 1
        except Exception as error:  # noqa: BLE001  (any failure ends the group, in the main thread)
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(at_a_time)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(counts) / (time.perf_counter() - begun)


def memory(quick: bool) -> Group:
    """Bullet 6: many sandboxes alive, each after one cell."""
    group = Group("memory")
    for template, code, count in (("base", "1+1", 60 if quick else 300), ("data", PANDAS_CELL, 10 if quick else 40)):
        alive: list[Any] = []
        begun = time.perf_counter()
        try:
            for _ in range(count):
                sandbox = Sandbox(template)
                alive.append(sandbox)
                sandbox.run_code(code)
            took = time.perf_counter() - begun
            private, tables = processes.memory_of(processes.sandboxed())
            each = (private + tables) / count / (1 << 20)
            group.line(f"{count} sandboxes alive ({template}), after one cell: private dirty and page tables", each,
                       "MiB each", bound=6.0 if template == "base" else None, aim=3.0,
                       detail=f"{private / count / (1 << 20):.2f} + {tables / count / (1 << 20):.2f} MiB, started at {count / took:.0f} per s")  # fmt: skip
        except PermissionError:
            group.line(f"{count} sandboxes alive ({template})", None, "MiB each")
            group.notes.append("memory: skipped, an ordinary user may not look into the agent; run as root")
        finally:
            for sandbox in alive:
                sandbox.kill()
    return group


def transfer(quick: bool) -> Group:
    """Bullet 7: one GiB in and out, beside cp on the same tmpfs."""
    group = Group("transfer")
    size = (256 << 20) if quick else (1 << 30)
    place = "/dev/shm"
    status = os.statvfs(place) if os.path.isdir(place) else None
    if status is None or status.f_bavail * status.f_frsize < 3 * size:
        group.notes.append(f"transfer: skipped, {place} has not {3 * size >> 20} MiB free")
        for direction in ("upload", "download"):
            group.line(f"1 GiB {direction}", None, "x cp")
        return group
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", dir=place) as directory:
        source, copy, back = (os.path.join(directory, name) for name in ("source", "copy", "back"))
        block = os.urandom(1 << 20)
        with open(source, "wb") as file:
            file.writelines(block for _ in range(size >> 20))
        disk = f"{(size >> 20) + 64}MiB"
        rises: dict[str, list[int]] = {"upload": [], "download": []}

        def measured(name: str, action: Callable[[], Any]) -> float:
            with processes.PeakMemory() as peak:
                begun = time.perf_counter()
                action()
                took = (time.perf_counter() - begun) * 1e3
            rises[name].append(peak.rise)
            return took

        with Sandbox(disk=disk, file_size=disk) as sandbox:
            def copied() -> float:
                begun = time.perf_counter()
                peers.quiet(["cp", source, copy])
                took = (time.perf_counter() - begun) * 1e3
                os.unlink(copy)
                return took

            def upload() -> float:
                sandbox.files.remove("big", missing_ok=True)
                return measured("upload", lambda: sandbox.files.upload(source, "big"))

            def download() -> float:
                took = measured("download", lambda: sandbox.files.download("big", back))
                os.unlink(back)
                return took

            cases = [Case("cp on tmpfs", copied), Case("ours: upload", upload)]
            download_case = Case("ours: download", download)
            # Uploads come first so that there is something to download; then all take turns in this order.
            for number in range(3 if quick else 5):
                say(f"transfer {number + 1}")
                for case in [*cases, download_case]:
                    case.samples.append(case.run())  # type: ignore[arg-type]
        group.cases = {case.name: case for case in [*cases, download_case]}
        copy_time = cases[0].median
        for name, case in (("upload", cases[1]), ("download", download_case)):
            speed = size / case.median / 1e6
            group.line(f"{size >> 20} MiB {name}", copy_time / case.median, "x the speed of cp on tmpfs", bound=0.2,
                       more_is_better=True,
                       detail=f"{speed:.2f} GB/s; the owner's memory rose by {max(rises[name]) / (1 << 20):.1f} MiB at most")  # fmt: skip
    return group


_ENVIRONMENT = "bench-packages"
_PACKAGE_SCRIPT = (
    "from ringfence import Sandbox\n"
    f"with Sandbox({_ENVIRONMENT!r}) as sandbox:\n"
    "    assert sandbox.run_code('import bench_package').error is None\n"
)


def packages(quick: bool) -> Group:
    """Package environments: a process from nothing that imports a package, beside making a venv for it each time.

    The package is one tiny wheel in a local directory, so that neither a network nor its size is measured.
    """
    import shutil
    import zipfile

    from ringfence.node import packages as environments
    from ringfence.node.resolver import Source

    group = Group("packages")
    rounds = 3 if quick else 8
    place = Path(tempfile.mkdtemp(prefix="ringfence-bench-packages-"))
    with zipfile.ZipFile(place / "bench_package-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("bench_package.py", "X = 1\n")
        base = "bench_package-1.0.dist-info"
        archive.writestr(f"{base}/METADATA", "Metadata-Version: 2.1\nName: bench-package\nVersion: 1.0\n")
        archive.writestr(f"{base}/WHEEL", "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{base}/RECORD", f"bench_package.py,,\n{base}/METADATA,,\n{base}/WHEEL,,\n{base}/RECORD,,\n")
    links = ["--no-index", "--find-links", str(place)]
    venv = place / "venv"

    def install() -> None:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin/pip"), "install", "-q", *links, "bench-package"], check=True, stderr=subprocess.DEVNULL)
        subprocess.run([str(venv / "bin/python"), "-c", "import bench_package"], check=True)

    environments.create(_ENVIRONMENT, ["bench-package"], source=Source(find_links=(str(place),), offline=True), update=True)
    try:
        ours = Case("ours: a fresh process, cached environment, to the end", lambda: peers.quiet([sys.executable, "-c", _PACKAGE_SCRIPT]))
        theirs = Case("venv, pip install, python -c 'import ...'", install, after=lambda: shutil.rmtree(venv), every=2)
        bwrap = _command(group, "(b) bwrap python3 -c 'print(1)'", peers.plain_python)
        cases = [ours, theirs] + ([bwrap] if bwrap else [])
        for name, command in peers.containers().items():
            if isinstance(command, str):
                group.notes.append(f"{name}: skipped, {command}")
            else:
                cases.append(Case(name, lambda command=command: peers.quiet(command), every=2))
        group.cases = take_turns(cases, rounds, warm=1)
        group.line("a fresh process: first import of a package of a cached environment", _ratio(ours, theirs), "x venv and pip install")
        group.line("the same", _ratio(ours, bwrap), "x (b)")
    finally:
        environments.remove(_ENVIRONMENT)
        shutil.rmtree(place, ignore_errors=True)
    return group


GROUPS: dict[str, Callable[[bool], Group]] = {
    "start": start,
    "data": data,
    "live": live,
    "whole": whole,
    "throughput": throughput,
    "memory": memory,
    "transfer": transfer,
    "packages": packages,
    "workspace": workspace,
}
