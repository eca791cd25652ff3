"""An evaluation as plots and a table; drawn by the same code as a run's plots (`dashboard`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash.runs.tables import Table
from dflash.views import style
from dflash.views.dashboard.bundle import bundle
from dflash.views.dashboard.panels import BONUS, Line, Panel, Spans


def evaluation_panels(content: dict[str, Any]) -> list[Panel]:
    """The plots of one evaluation: by slot, by gain, by prompt, and training beside decoding."""
    panels = [_slots(content), _gains(content), _prompts(content)]
    if any(entry.get("plain_seconds") for entry in content["prompts"]):
        panels.append(_seconds(content))
    if content.get("parity"):
        panels.append(_parity(content["parity"]))
    return panels


def evaluation_bundle(content: dict[str, Any], text: str) -> dict[str, Any]:
    """The panels as one MIME bundle (plotly, PNG, text) for `display(bundle, raw=True)`."""
    return bundle(evaluation_panels(content), text)


def write_plots(content: dict[str, Any], path: str | Path) -> Path | None:
    """The panels as a PNG file; None where matplotlib is not installed."""
    try:
        from dflash.views.dashboard.image_form import png

        picture = png(evaluation_panels(content))
    except ImportError:
        return None
    path = Path(path)
    path.write_bytes(picture)
    return path


def curve(name: str, values: list[float | None], colour: str, dash: str = "solid") -> Line:
    y = np.array([np.nan if value is None else 100 * value for value in values], dtype=float)
    return Line(name, np.arange(1, len(values) + 1), y, colour, dash, markers=True, hover=".1f")


def _slots(content: dict[str, Any]) -> Panel:
    lines = [curve("these prompts", content["acceptance_by_slot"], style.BLUE)]
    if content.get("held_out"):
        lines.append(curve("held-out answers", content["held_out"]["acceptance_by_slot"], style.VERMILLION))
        if content["held_out"].get("oracle_by_slot"):
            lines.append(curve("held-out, oracle", content["held_out"]["oracle_by_slot"], style.VERMILLION, "dash"))
    return Panel("slots", "Blocks accepted up to slot k", "slot k", "% of target calls", lines, y_range=(0.0, None))


def _gains(content: dict[str, Any]) -> Panel:
    histogram = content["histogram"]
    lanes = [str(count) for count in range(1, len(histogram) + 1)]
    bars = Spans("target calls", lanes, np.zeros(len(lanes)), np.array(histogram, dtype=float), style.BLUE)
    return Panel("gains", f"Tokens that a target call gained ({BONUS})", "target calls", "tokens", spans=[bars], lanes=lanes)


def _prompts(content: dict[str, Any]) -> Panel:
    lengths = [entry["acceptance_length"] for entry in content["prompts"]]
    x = np.arange(1, len(lengths) + 1)
    y = np.array([np.nan if length is None else length for length in lengths], dtype=float)
    lines = [Line("each prompt", x, y, style.BLUE, markers=True, hover=".2f")]
    if content["acceptance_length"] is not None:
        lines.append(Line("all", x, np.full(len(x), content["acceptance_length"]), style.VERMILLION, "dash", hover=".3f"))
    return Panel(
        "prompts", f"Acceptance length by prompt ({BONUS})", "prompt", "tokens per target call", lines, y_range=(1.0, None)
    )


def _seconds(content: dict[str, Any]) -> Panel:
    x = np.arange(1, len(content["prompts"]) + 1)
    lines = [
        Line(
            name,
            x,
            np.array([entry[key] or np.nan for entry in content["prompts"]], dtype=float),
            colour,
            dash,
            markers=True,
            hover=".2f",
        )
        for name, key, colour, dash in (
            ("with the drafter", "seconds", style.BLUE, "solid"),
            ("plain", "plain_seconds", style.GREY, "dash"),
        )
    ]
    return Panel("seconds", "Wall clock of prompts by themselves", "prompt", "seconds", lines, y_range=(0.0, None))


def _parity(parity: dict[str, Any]) -> Panel:
    lines = [
        curve("training accuracy", parity["accuracy_training"], style.BLUE),
        curve("decoding accuracy", parity["accuracy_decoding"], style.VERMILLION, "dash"),
        curve("training, run up to k", parity["acceptance_training"], style.SKY),
        curve("decoding, run up to k", parity["acceptance_decoding"], style.ORANGE, "dash"),
    ]
    return Panel("parity", "Training and decoding at the same anchors", "slot k", "% of blocks", lines, y_range=(0.0, None))


def prompt_table(content: dict[str, Any]) -> Table:
    """One row a prompt."""
    rows = []
    for number, entry in enumerate(content["prompts"], 1):
        plain, seconds, length = entry.get("plain_seconds"), entry.get("seconds"), entry["acceptance_length"]
        row = {"prompt": number, "tokens": entry["tokens"], "target calls": entry["target_calls"]}
        row[f"acceptance length ({BONUS})"] = None if length is None else f"{length:.2f}"
        row.update({name: f"{value:.2f}" if value else None for name, value in (("seconds", seconds), ("plain", plain))})
        row.update({"speed-up": f"{plain / seconds:.2f}" if plain else None, "text": _text(entry)})
        rows.append(row)
    return Table(rows)


def _text(entry: dict[str, Any]) -> str:
    if entry.get("exact") is None:
        return "not compared"
    if entry["exact"]:
        return "equal to plain greedy"
    tie = entry["difference"]
    return f"differs at token {tie['index']}: " + ("wrong" if tie["wide"] else "a near tie")
