"""Several runs side by side: a table of all, what differs between two or more, their curves overlaid.

`00_runs.ipynb` and the sweep's report show these; everything comes from the run folders.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dflash.errors import RunError
from dflash.runs.record import CONFIG_NAME, holds_run
from dflash.runs.tables import Table
from dflash.views import style
from dflash.views.dashboard.bundle import bundle
from dflash.views.dashboard.panels import BONUS, Line, Panel
from dflash.views.dashboard.series import RunSeries, Series


def list_runs(root: str | os.PathLike[str]) -> list[RunSeries]:
    """Every run below `root`, newest first; empty when there is none."""
    root = Path(root)
    folders = [path for path in root.iterdir() if path.is_dir() and holds_run(path)] if root.is_dir() else []
    runs = []
    for folder in folders:
        series = RunSeries(folder)
        series.follow()
        runs.append(series)
    return sorted(runs, key=lambda run: run.start_time or 0.0, reverse=True)


def choose(runs: Sequence[RunSeries], names: str | Sequence[str] = "") -> list[RunSeries]:
    """The runs named (a list or comma-separated), the newest two by default. RunError for a name that is not there."""
    wanted = [n.strip() for n in names.split(",") if n.strip()] if isinstance(names, str) else list(names)
    if not wanted:
        return list(runs[:2])
    by_name = {run.path.name: run for run in runs}
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise RunError(f"no run called {', '.join(missing)}; there are {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in wanted]


def overview(runs: Sequence[RunSeries]) -> Table:
    """One row a run: when, how it ended, how far it came, what it reached, how fast, how much memory."""
    from dflash.views.report.story import status_of

    head = ["run", "started", "status", "steps", f"acceptance ({BONUS})", "best", "loss", "tokens/s", "peak memory", "time"]
    rows = []
    for run in runs:
        peak = max(run.memory_peak.values(), default=None)
        rows.append(
            [
                run.path.name,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(run.start_time)) if run.start_time else None,
                status_of(run),
                run.last_step.get("step"),
                _two(run.last_eval.get("acceptance_length")),
                _two(run.best_eval.get("acceptance_length")),
                _two(run.smooth_loss.last),
                median_rate(run),
                style.gib(peak) if peak else None,
                style.duration(run.seconds),
            ]
        )
    return Table(rows, head)


def median_rate(run: RunSeries) -> str | None:
    """Median context tokens/s over the steps, as text."""
    return style.number(run.step_rate.median, 0) if len(run.step_rate) else None


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def settings(run: RunSeries) -> dict[str, Any]:
    """A run's configuration by plain setting names."""
    from dflash.views.report.story import flatten

    file = run.path / CONFIG_NAME
    return flatten(run.config or (yaml.safe_load(file.read_text()) if file.exists() else {}) or {})


def differences(runs: Sequence[RunSeries]) -> Table:
    """The settings in which the runs are not all equal, one row a setting."""
    configs = [settings(run) for run in runs]
    names = list(dict.fromkeys(name for config in configs for name in config))
    rows = [
        [name, *(config.get(name, "not set") for config in configs)]
        for name in names
        if len({repr(config.get(name, "not set")) for config in configs}) > 1
    ]
    return Table(rows, ["setting", *(run.path.name for run in runs)])


def not_comparable(runs: Sequence[RunSeries]) -> list[str]:
    """Why acceptance lengths of these runs must not be compared; empty when they may be."""
    reasons = []
    for name, why in (("target", "another target"), ("data", "other data"), ("held_out", "another held-out set")):
        values = {repr(settings(run).get(name)) for run in runs}
        if len(values) > 1:
            reasons.append(f"{why} ({name}: {', '.join(sorted(values))})")
    return reasons


def comparison_panels(runs: Sequence[RunSeries]) -> list[Panel]:
    """Loss, held-out acceptance, throughput and memory, one curve a run."""
    since, loss = "time since start (s)", "loss (nats per weighted slot)"
    acceptance = f"Held-out acceptance length ({BONUS})"
    lengths = _lines(runs, lambda r: r.eval_acceptance, markers=True)
    rates, memory = _lines(runs, lambda r: r.step_rate), _lines(runs, _fullest, unit=style.GIB)
    panels = [
        Panel("loss", "Training loss, smoothed", "step", loss, _lines(runs, lambda r: r.smooth_loss)),
        Panel("acceptance", acceptance, "step", "tokens per target call", lengths, y_range=(1.0, None)),
        Panel("rate", "Throughput", since, "tokens/s", rates, y_range=(0.0, None)),
        Panel("memory", "Memory in use, fullest device", since, "GiB", memory, y_range=(0.0, None)),
    ]
    return [panel for panel in panels if not panel.empty]


def _fullest(run: RunSeries) -> Series:
    return max(run.memory.values(), key=lambda series: series.last or 0.0, default=Series())


def _lines(runs: Sequence[RunSeries], pick: Any, unit: float = 1.0, markers: bool = False) -> list[Line]:
    lines = []
    for index, run in enumerate(runs):
        series = pick(run)
        if len(series):
            x, y = series.mean()
            lines.append(Line(run.path.name, x, y / unit, *style.series_style(index), markers=markers))
    return lines


def show_comparison(runs: Sequence[RunSeries]) -> None:
    """Display the overlaid curves as a static bundle."""
    from IPython.display import display

    names = " and ".join(run.path.name for run in runs)
    display(bundle(comparison_panels(runs), f"curves of {names}"), raw=True)
