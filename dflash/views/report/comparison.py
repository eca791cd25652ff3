"""A page that compares runs: best first, what differs, curves overlaid, a link to each report."""

from __future__ import annotations

from pathlib import Path

from dflash.errors import RunError
from dflash.runs.tables import Table
from dflash.views.dashboard.compare import comparison_panels, differences, list_runs, median_rate, not_comparable, settings
from dflash.views.dashboard.panels import BONUS
from dflash.views.dashboard.series import RunSeries
from dflash.views.report.page import document, plots
from dflash.views.report.story import Finding, status_of


def build_comparison(folder: str | Path, axes: list[str] | None = None, static: bool = False) -> Path:
    """Write `folder/comparison.html` about the runs in `folder`; `axes` are the settings shown in the table.

    RunError when there is no run.
    """
    folder = Path(folder)
    runs = list_runs(folder)
    if not runs:
        raise RunError(f"{folder} holds no run to compare; run the sweep first")
    runs.sort(key=lambda run: -(run.last_eval.get("acceptance_length") or 0.0))
    out = folder / "comparison.html"
    length = runs[0].last_eval.get("acceptance_length")
    odd, differs = not_comparable(runs), differences(runs)
    text = document(
        "comparison.html",
        f"Comparison of {len(runs)} runs in {folder.resolve().name}",
        static,
        bonus=BONUS,
        best=None if length is None else {"name": runs[0].path.name, "length": length},
        warning=Finding("odd", f"Not comparable: {'; '.join(odd)}.") if odd else None,
        overview=_overview(runs, axes or [], out),
        plots=plots(comparison_panels(runs[:21]), static),
        differences=differs if differs.rows and len(runs) <= 8 else None,
    )
    out.write_text(text, encoding="utf-8")
    return out


def _overview(runs: list[RunSeries], axes: list[str], out: Path) -> Table:
    rows, links = [], {}
    for number, run in enumerate(runs):
        values, found = settings(run), run.last_eval.get("acceptance_length")
        row = [
            run.path.name,
            *(values.get(name) for name in axes),
            status_of(run),
            None if found is None else f"{found:.3f}",
        ]
        rows.append(
            row + [run.best_eval.get("acceptance_length"), run.smooth_loss.last, median_rate(run), run.last_step.get("step")]
        )
        if (run.path / "report.html").exists():
            near = run.path.parent == out.parent
            links[number] = f"{run.path.name}/report.html" if near else str(run.path / "report.html")
    return Table(rows, ["run", *axes, "status", "acceptance", "best", "loss", "tokens/s", "steps"], links)
