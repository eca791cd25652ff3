"""What the dashboard costs: training speed with and without it, processor time, bytes, and the kernel's memory.

    python tools/bench_dashboard.py [--seconds 20] [--rounds 3]

Each measurement is a real kernel that executes a notebook: a loop of matrix products stands for training and writes
the records of a run with 8 devices, 20 steps a second. Three forms alternate, so that a busy machine disturbs them
alike: no dashboard, static plots (papermill), live widgets (JupyterLab). Then a run of 20,000 steps is followed at
once, for the cost of one update at full length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import papermill

ROOT = Path(__file__).resolve().parent.parent
CELL = f"""
import json, random, sys, threading, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
from contextlib import nullcontext
from dflash.views.dashboard import LiveDashboard
from dflash.runs.sampler import resident_bytes
from dflash.runs.record import Run
from synthetic_run import write_step
torch.set_num_threads(1)
run, rng, a = Run.create(folder, {{"steps": 100_000}}, "r"), random.Random(0), torch.randn(384, 384)
dashboard = nullcontext() if form == "none" else LiveDashboard(run.path, live=form)
done, memory = 0, []
with dashboard:
    for _ in range(40):  # first import, first plot, first widget: not what is measured
        write_step(run, rng, done := done + 1, 100_000, 8, 7, t=time.time()); time.sleep(0.05)
    time.sleep(3)
    first, spent, start = done, getattr(dashboard, "update_seconds", 0.0), time.perf_counter()
    while (wall := time.perf_counter() - start) < seconds:
        for _ in range(25):
            a @ a
        write_step(run, rng, done := done + 1, 100_000, 8, 7, t=time.time())
        if done % 20 == 0:
            memory.append(resident_bytes())
result = {{"steps_per_second": (done - first) / wall, "updates": getattr(dashboard, "updates", 0),
          "share": (getattr(dashboard, "update_seconds", 0.0) - spent) / wall,
          "memory": [memory[len(memory) // 4], memory[-1]]}}
assert getattr(dashboard, "error", None) is None, dashboard.error
print(json.dumps(result))
"""


def measure(form: str, seconds: float, folder: Path) -> dict:
    """One kernel with one form of the dashboard."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    first = nbformat.v4.new_code_cell(f"form = {form!r}\nseconds = {seconds}\nfolder = {str(folder)!r}")
    notebook.cells = [first, nbformat.v4.new_code_cell(CELL)]
    nbformat.write(notebook, folder / "n.ipynb")
    out = folder / "out.ipynb"
    papermill.execute_notebook(str(folder / "n.ipynb"), str(out), progress_bar=False)
    outputs = nbformat.read(out, as_version=4).cells[-1].outputs
    text = "".join(o.get("text", "") for o in outputs if o.output_type == "stream" and o.name == "stdout")
    return {**json.loads(text.strip().splitlines()[-1]), "notebook": out.stat().st_size}


def full_length() -> None:
    """One update after 20,000 steps on 8 devices."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from synthetic_run import write_records

    from dflash.runs.record import Run
    from dflash.runs.sampler import resident_bytes
    from dflash.views.dashboard import RunSeries, build_panels
    from dflash.views.dashboard.bundle import bundle, one_line
    from dflash.views.dashboard.plotly_form import grid_figure

    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, {"steps": 20_000}, "r")
        write_records(run, random.Random(0), 20_000, 8, 7)
        size = (run.path / "metrics.jsonl").stat().st_size
        series, before, start = RunSeries(run.path), resident_bytes(), time.perf_counter()
        series.follow()
        print(f"20,000 steps, 8 devices: {series.records:,} records, {size / 1e6:.0f} MB")
        grown = (resident_bytes() - before) / 2**20
        print(f"  read and folded in {time.perf_counter() - start:.1f} s; the process grew by {grown:.0f} MiB")
        start = time.perf_counter()
        panels = build_panels(series)
        figure = grid_figure(panels)
        points = sum(len(trace.x) for trace in figure.data if trace.x is not None)
        print(f"  {len(figure.data)} traces, {points:,} points, drawn for plotly in {time.perf_counter() - start:.3f} s")
        start = time.perf_counter()
        content = bundle(panels, one_line(series))
        print(f"  static bundle in {time.perf_counter() - start:.2f} s, {len(json.dumps(content)) / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    forms = {"none": "no dashboard", "off": "static plots", "on": "live widgets"}
    found: dict[str, list[dict]] = {form: [] for form in forms}
    for _ in range(options.rounds):
        for form in forms:
            with tempfile.TemporaryDirectory() as folder:
                found[form].append(measure(form, options.seconds, Path(folder)))
    base = statistics.median(r["steps_per_second"] for r in found["none"])
    print(f"{'form':<14}{'steps/s':>9}{'slower by':>11}{'of a core':>11}{'updates':>9}{'memory drift':>14}{'notebook':>10}")
    for form, name in forms.items():
        rounds = found[form]
        speed = statistics.median(r["steps_per_second"] for r in rounds)
        share = statistics.median(r["share"] for r in rounds)
        drift = statistics.median(r["memory"][1] - r["memory"][0] for r in rounds)
        size = max(r["notebook"] for r in rounds)
        print(
            f"{name:<14}{speed:>9.1f}{1 - speed / base:>11.1%}{share:>11.1%}{rounds[0]['updates']:>9}"
            f"{drift / 2**20:>10.1f} MiB{size / 1e6:>7.2f} MB"
        )
    full_length()


if __name__ == "__main__":
    main()
