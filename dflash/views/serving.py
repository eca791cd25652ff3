"""A serve check as one plot: drafts accepted, by slot, in training, in our decoding and in the server."""

from __future__ import annotations

from typing import Any

from dflash.views import style
from dflash.views.dashboard.bundle import bundle
from dflash.views.dashboard.panels import Panel
from dflash.views.evaluation import curve


def serving_bundle(summary: dict[str, Any], text: str) -> dict[str, Any]:
    """The plot as a MIME bundle (plotly, PNG, text) for `display(bundle, raw=True)`."""
    lines = [
        curve("training's view", summary["training"]["acceptance_by_slot"], style.BLUE),
        curve("our decoding", summary["ours"]["acceptance_by_slot"], style.ORANGE, "dash"),
        curve("the server", summary["server"]["acceptance_by_slot"], style.VERMILLION, "dot"),
    ]
    title = "Drafts accepted up to slot k, on the same prompts"
    return bundle([Panel("served", title, "slot k", "% of target calls", lines, y_range=(0.0, None))], text)
