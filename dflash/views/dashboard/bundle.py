"""The static form: plotly JSON for a trusted notebook, a PNG for everything else, one line of text for a terminal.

A notebook saved with this bundle shows its plots untrusted, on a code host and in the offline report; no
browser is needed to make it (kaleido would want one).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from dflash.views import style
from dflash.views.dashboard.panels import BONUS, Panel
from dflash.views.dashboard.series import RunSeries

PLOTLY_MIME = "application/vnd.plotly.v1+json"


def bundle(panels: Sequence[Panel], text: str, columns: int = 2) -> dict[str, Any]:
    """MIME bundle of the panels in one figure."""
    from dflash.views.dashboard.image_form import png
    from dflash.views.dashboard.plotly_form import grid_figure

    figure = json.loads(grid_figure(panels, columns).to_json())
    figure["config"] = {"responsive": True, "displaylogo": False}
    return {PLOTLY_MIME: figure, "image/png": base64.b64encode(png(panels, columns)).decode("ascii"), "text/plain": text}


def one_line(run: RunSeries) -> str:
    """The state of a run in one line."""
    if run.start_time is None:
        return f"{run.path.name}: no records yet"
    end = run.run_end or {}
    parts = [f"{run.path.name}: {end.get('status') or run.control or 'running'}"]
    step = run.last_step.get("step")
    if step is not None:
        parts.append(f"step {step}" + (f" of {run.total_steps}" if run.total_steps else ""))
    elif run.doing:
        parts.append(run.doing)
    if run.smooth_loss.last is not None:
        parts.append(f"loss {run.smooth_loss.last:.3f}")
    acceptance = run.last_eval.get("acceptance_length")
    if acceptance is not None:
        parts.append(f"held-out acceptance length {acceptance:.3f} ({BONUS})")
    if run.step_rate.last:
        parts.append(f"{style.number(run.step_rate.last, 0)} tokens/s")
    if run.faults:
        parts.append(f"{len(run.faults)} fault{'s' if len(run.faults) > 1 else ''}")
    parts.append(style.duration(run.seconds))
    if run.run_end is None and run.seconds_left is not None:
        parts.append(f"about {style.duration(run.seconds_left)} left")
    return " · ".join(parts)
