"""A page that compares runs: best first, what differs, curves overlaid, a link to each report."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

from dflash.errors import RunError
from dflash.views.dashboard.compare import (
    Table,
    comparison_panels,
    differences,
    list_runs,
    median_rate,
    not_comparable,
    settings,
)
from dflash.views.dashboard.image_form import png
from dflash.views.dashboard.panels import BONUS
from dflash.views.dashboard.plotly_form import figure
from dflash.views.dashboard.series import RunSeries
from dflash.views.report.notebook_part import figure_html
from dflash.views.report.page import Material, document
from dflash.views.report.story import status_of


def build_comparison(
    folder: str | Path, axes: list[str] | None = None, out: str | Path | None = None, static: bool = False
) -> Path:
    """Write `folder/comparison.html` about the runs in `folder`; `axes` are the settings shown in the table.

    RunError when there is no run.
    """
    folder = Path(folder)
    runs = list_runs(folder)
    if not runs:
        raise RunError(f"{folder} holds no run to compare; run the sweep first")
    runs.sort(key=lambda run: -(run.last_eval.get("acceptance_length") or 0.0))
    out = Path(out) if out else folder / "comparison.html"
    material = Material(title=f"Comparison of {len(runs)} runs in {folder.resolve().name}", static=static)
    sections = [("Summary", _summary(runs, axes or [], out)), ("Curves", _curves(runs[:21], static))]
    table = differences(runs)
    if table.rows and len(runs) <= 8:
        sections.append(("What differs", table._repr_html_()))
    out.write_text(document(material, sections, badge=""), encoding="utf-8")
    return out


def _summary(runs: list[RunSeries], axes: list[str], out: Path) -> str:
    best = runs[0]
    length = best.last_eval.get("acceptance_length")
    lead = (
        f"<p>Best: <b>{html.escape(best.path.name)}</b> with a held-out acceptance length of {length:.2f} "
        f"tokens per target call ({BONUS}).</p>"
        if length is not None
        else "<p>No run measured held-out acceptance.</p>"
    )
    warning = not_comparable(runs)
    if warning:
        lead += f'<ul class="findings"><li class="odd">Not comparable: {html.escape("; ".join(warning))}.</li></ul>'
    rows, links = [], {}
    for number, run in enumerate(runs):
        values, found = settings(run), run.last_eval.get("acceptance_length")
        rows.append(
            [
                run.path.name,
                *(values.get(name) for name in axes),
                status_of(run),
                None if found is None else f"{found:.3f}",
                run.best_eval.get("acceptance_length"),
                run.smooth_loss.last,
                median_rate(run),
                run.last_step.get("step"),
            ]
        )
        if (run.path / "report.html").exists():
            near = run.path.parent == out.parent
            links[number] = f"{run.path.name}/report.html" if near else str(run.path / "report.html")
    head = ["run", *axes, "status", "acceptance", "best", "loss", "tokens/s", "steps"]
    return lead + Table(head, rows, links)._repr_html_()


def _curves(runs: list[RunSeries], static: bool) -> str:
    parts = []
    for panel in comparison_panels(runs):
        picture = base64.b64encode(png([panel], dpi=100)).decode("ascii")
        data = None if static else json.loads(figure(panel).to_json())
        parts.append(figure_html(picture, data, panel.title, wide=False))
    return f'<div class="plots">{"".join(parts)}</div>'
