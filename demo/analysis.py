"""The main job: what a data-analysis agent does, cell by cell, in one sandbox session.

The data: the United Nations' population figures by country, year, sex and age group, 346,332 rows, as the PyPI
package `bokeh-sampledata` ships them. The question: when did the world's old outnumber its youngest?
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence import Sandbox

CELLS = [
    (
        "load the data",
        """
import pandas as pd
from bokeh_sampledata.population import data
population = data[data.Sex.isin(["Male", "Female"])]
f"{len(data):,} rows, {data.Location.nunique()} places, {data.Year.min()} to {data.Year.max()}"
""",
    ),
    (
        "compute",
        """
old = population[population.AgeGrpStart >= 65].groupby(["Location", "Year"]).Value.sum()
young = population[population.AgeGrpStart < 5].groupby(["Location", "Year"]).Value.sum()
everyone = population.groupby(["Location", "Year"]).Value.sum()
world = pd.DataFrame({"65 and older": old["World"], "under 5": young["World"]}) / 1e6
crossing = int(world.index[world["65 and older"] > world["under 5"]].min())
crossing
""",
    ),
    (
        "rank countries (variables of the cells before are still there)",
        """
countries = population[population.LocID < 900].Location.unique()  # the others are regions
share = (old / everyone).unstack("Year").loc[countries] * 100
large = share[everyone.unstack("Year").loc[countries, 2015] > 20e6]
ageing = pd.DataFrame({"1950 %": large[1950], "2015 %": large[2015], "points": large[2015] - large[1950]})
ageing = ageing.sort_values("points", ascending=False).round(1)
ageing.head(5)
""",
    ),
    (
        "draw a chart",
        """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(9, 5))
world.plot(ax=axes, linewidth=2)
axes.axvline(crossing, color="grey", linestyle=":")
axes.set_title(f"By {crossing}, people over 65 outnumber children under 5")
axes.set_ylabel("million people"); axes.set_xlabel("")
figure.tight_layout()
figure.savefig("ageing.png", dpi=110)
ageing.to_csv("ageing.csv")
plt.show()
""",
    ),
]


def analyse(output: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the session; chart and table end in `output` on the host. Returns what happened, for the report."""
    begun = time.perf_counter()
    say("starting a sandbox with numpy, pandas and matplotlib (the first time, its packages are copied)")
    with Sandbox("data", memory="1GiB") as sandbox:
        started = time.perf_counter() - begun
        cells = []
        for title, code in CELLS:
            say(title)
            begun = time.perf_counter()
            run = sandbox.run_code(code, timeout=60)
            if run.error is not None:
                raise RuntimeError(f"the cell {title!r} failed: {run.error.name}: {run.error.value}\n{run.error.traceback}")
            formats = sorted({name for result in run.results for name in result.formats()})
            cells.append({"cell": title, "text": run.text, "formats": formats, "ms": (time.perf_counter() - begun) * 1000})
        say("saving the chart and the table on the host, through the files API")
        output.mkdir(exist_ok=True)
        saved = {}
        for name in ("ageing.png", "ageing.csv"):
            saved[str(output / name)] = sandbox.files.download(name, output / name)
        crossing = int(cells[1]["text"] or 0)
    if not (output / "ageing.png").read_bytes().startswith(b"\x89PNG"):
        raise RuntimeError("the chart that came out is not a PNG file")
    return {"start_ms": started * 1000, "cells": cells, "saved": saved, "crossing": crossing}
