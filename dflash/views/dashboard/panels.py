"""What each panel shows. `plotly_form.py` and `image_form.py` draw the same `Panel`.

A panel names its axes with units, and a panel without data says what it waits for, so that an empty plot is
never mistaken for a broken one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from dflash.views import style
from dflash.views.dashboard.series import RunSeries, Series

BONUS = "bonus token included"
FIRST_STEP = "waits for the first training step"
LEGEND_ROW = 4  # more names than this stand in a column beside the plot, not in a row above it


@dataclass(frozen=True)
class Line:
    """One curve. `hover` is the number format of y."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    dash: str = "solid"
    width: float = 1.8
    opacity: float = 1.0
    markers: bool = False
    hover: str = ".4g"
    area: bool = False  # the outline of an area, which is filled


@dataclass(frozen=True)
class Heat:
    """z [rows, columns] over x [columns] and y [rows]."""

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    label: str
    scale: bool = True  # show the colour scale

    @property
    def top(self) -> float:
        """End of the colour scale: the largest value, never below 5%."""
        return max(0.05, float(np.nanmax(self.z))) if np.isfinite(self.z).any() else 1.0


@dataclass(frozen=True)
class Spans:
    """Rectangles of one name (one colour): lane of each, start and length on the x axis."""

    name: str
    lanes: list[str]
    starts: np.ndarray
    lengths: np.ndarray
    colour: str


@dataclass(frozen=True)
class Panel:
    """One plot: title, axis titles with units, what to draw."""

    key: str
    title: str
    x_title: str
    y_title: str
    lines: list[Line] = field(default_factory=list)
    heat: Heat | None = None
    spans: list[Spans] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    y_range: tuple[float | None, float | None] = (None, None)
    log: bool = False  # y axis
    note: str = ""

    @property
    def empty(self) -> bool:
        return not (self.lines or self.spans or self.heat is not None)

    @property
    def legend_column(self) -> bool:
        return len(self.lines) + len(self.spans) > LEGEND_ROW


def loss_panel(run: RunSeries) -> Panel:
    lines = []
    if len(run.loss):
        lines.append(Line("each step", *run.loss.envelope(), style.GREY, width=1.0, opacity=0.45))
        lines.append(Line("smoothed", *run.smooth_loss.mean(), style.BLUE))
    if len(run.eval_loss):
        lines.append(Line("held-out", *run.eval_loss.mean(), style.VERMILLION, markers=True))
    return Panel("loss", "Loss", "step", "loss (nats per weighted slot)", lines, note=FIRST_STEP)


def acceptance_panel(run: RunSeries) -> Panel:
    lines = []
    if run.expected and len(run.eval_acceptance):
        steps, low, high = (np.array(run.expected[name], dtype=float) for name in ("steps", "low", "high"))
        end = min(steps[-1], run.total_steps or steps[-1])
        shown = np.append(steps[steps < end], end)
        low, high, steps = np.interp(shown, steps, low), np.interp(shown, steps, high), shown
        outline = np.concatenate([steps, steps[::-1]]), np.concatenate([high, low[::-1]])
        lines.append(Line("expected of this recipe", *outline, style.GREEN, width=0, opacity=0.2, area=True))
    if len(run.train_acceptance):
        lines.append(Line("training (smoothed)", *run.train_acceptance.mean(), style.SKY, hover=".3f", width=1.4))
    if len(run.eval_acceptance):
        lines.append(Line("held-out", *run.eval_acceptance.mean(), style.VERMILLION, markers=True, hover=".3f", width=2.2))
    title = f"Acceptance length ({BONUS})"
    return Panel("acceptance", title, "step", "tokens per target call", lines, y_range=(1.0, None), note=FIRST_STEP)


def slots_panel(run: RunSeries) -> Panel:
    """Held-out acceptance by slot once there are three evaluations, training accuracy by slot before."""
    held_out = len(run.eval_slots.rows) >= 3
    rows = run.eval_slots if held_out else run.train_slots
    title = "Held-out: share of blocks accepted up to slot" if held_out else "Training: accuracy by slot"
    heat = None
    if rows.rows:
        z = rows.matrix()
        heat = Heat(np.array(rows.x), np.arange(1, z.shape[0] + 1), z, "share of blocks" if held_out else "accuracy")
    return Panel("slots", title, "step", "slot in the block", heat=heat, note=FIRST_STEP)


def optimizer_panel(run: RunSeries) -> Panel:
    lines = []
    if len(run.grad_norm):
        lines.append(Line("gradient norm", *run.grad_norm.mean(), style.BLUE, width=1.2))
    if len(run.lr):
        lines.append(Line("learning rate", *run.lr.mean(), style.ORANGE))
    return Panel("optimizer", "Gradient norm and learning rate", "step", "both, log scale", lines, log=True, note=FIRST_STEP)


def rate_panel(run: RunSeries) -> Panel:
    scale, since = _time_scale(run)
    lines = _over_time(run.rate, run)
    if not lines and len(run.step_rate):
        x, y = run.step_rate.mean()
        lines = [Line("training", x / scale, y, style.BLUE)]
    title = "Throughput by stage" if len(lines) > 1 else "Throughput"
    means = [float(np.mean(line.y)) for line in lines]
    log = len(means) > 1 and min(means) > 0 and max(means) > 20 * min(means)  # or the slower ones would lie on the axis
    low = None if log else 0.0
    return Panel("rate", title, since, "tokens/s", lines, y_range=(low, None), log=log, note="waits for the first timing")


def queue_panel(run: RunSeries) -> Panel:
    title, note = "Queue between target and drafter", "no queue in this run so far\n(cached features, or a single stage)"
    lines = _over_time(run.queue, run)
    lines = [
        replace(line, width=1.6 + 1.5 * (len(lines) - 1 - i)) for i, line in enumerate(lines)
    ]  # equal ones stay visible
    return Panel("queue", title, _time_scale(run)[1], "packs waiting", lines, y_range=(0.0, None), note=note)


def memory_panel(run: RunSeries) -> Panel:
    lines, note = _over_time(run.memory, run, style.GIB), "waits for the first device sample"
    return Panel("memory", "Memory in use by device", _time_scale(run)[1], "GiB", lines, y_range=(0.0, None), note=note)


REST = "activations, gradients"


def holdings_panel(run: RunSeries) -> Panel:
    """What was in memory when most was, by name, under what had been estimated."""
    lanes: dict[str, dict[str, float]] = {}
    for device in sorted(run.held, reverse=True):
        parts, peak = dict(run.held[device]), run.memory_peak.get(device)
        rest = REST if device != "cpu" else f"{REST}, Python"
        if peak and peak > sum(parts.values()):
            parts[rest] = peak - sum(parts.values())
        lanes[f"{device} at step {run.peak_step.get(device, 0)}" if peak else device] = parts
        if device in run.estimated:
            names = {"activations": rest, "capture": rest, "queue": "features in flight"}
            estimated: dict[str, float] = {}
            for name, count in run.estimated[device].items():
                name = names.get(name, name)
                estimated[name] = estimated.get(name, 0.0) + count
            lanes[f"{device} estimated"] = estimated
    names = dict.fromkeys(name for parts in lanes.values() for name, count in parts.items() if count >= 2**20)
    spans, ends = [], dict.fromkeys(lanes, 0.0)
    for index, name in enumerate(names):
        lengths = [parts.get(name, 0.0) / style.GIB for parts in lanes.values()]
        colour = style.SPAN_COLOURS["wait"] if name.startswith(REST) else style.series_style(index)[0]
        spans.append(Spans(name, list(lanes), np.array(list(ends.values())), np.array(lengths), colour))
        ends = {lane: end + length for (lane, end), length in zip(ends.items(), lengths, strict=True)}
    title, note = "What is in memory at its peak", "waits for the second training step"
    return Panel("holdings", title, "GiB", "", spans=spans, lanes=list(lanes), note=note)


def utilization_panel(run: RunSeries) -> Panel:
    lines, note = _over_time(run.utilization, run), "waits for the second device sample"
    title, since = "Utilisation by device", _time_scale(run)[1]
    return Panel("utilization", title, since, "busy (%)", lines, y_range=(0.0, 102.0), note=note)


def phases_panel(run: RunSeries) -> Panel:
    """Where each worker's time went, over the whole run, in percent."""
    shares = {worker: phases for worker, phases in sorted(run.phases.items(), reverse=True) if sum(phases.values())}
    ends, spans = dict.fromkeys(shares, 0.0), []
    for phase in _in_order({phase for phases in shares.values() for phase in phases}):
        parts = {worker: 100 * phases.get(phase, 0.0) / sum(phases.values()) for worker, phases in shares.items()}
        starts, lengths = np.array([ends[worker] for worker in parts]), np.array(list(parts.values()))
        spans.append(Spans(phase, list(parts), starts, lengths, style.span_colour(phase)))
        ends = {worker: ends[worker] + part for worker, part in parts.items()}
    title, note = "Where each worker's time went", "no workers with timings in this run so far"
    return Panel("phases", title, "share of the whole run (%)", "", spans=spans, lanes=list(shares), note=note)


def timeline_panel(run: RunSeries, per_worker: int = 40, window: float = 120.0) -> Panel:
    """The newest spans of what each worker did: about `per_worker` each, from at most `window` seconds."""
    spans = list(run.spans)
    end = max((span["start"] + span["seconds"] for span in spans), default=0.0)
    workers = len({span.get("worker") for span in spans})
    newest = spans[-per_worker * workers :]
    window = min(window, end - min((span["start"] for span in newest), default=end))
    spans = [span for span in spans if span["start"] + span["seconds"] > end - window]
    lanes = sorted({str(span.get("worker", "main")) for span in spans}, reverse=True)
    groups: dict[str, list[dict]] = {}
    for span in spans:
        groups.setdefault(str(span.get("name", "work")), []).append(span)
    items = [
        Spans(
            name,
            [str(span.get("worker", "main")) for span in groups[name]],
            np.array([span["start"] - end for span in groups[name]]),
            np.array([span["seconds"] for span in groups[name]]),
            style.span_colour(name),
        )
        for name in _in_order(groups)
    ]
    title, axis = "What each worker did last", "seconds before the newest record"
    return Panel("timeline", title, axis, "", spans=items, lanes=lanes, note="this run writes no spans")


def _in_order(names: Iterable[str]) -> list[str]:
    """Work first, by name; then idling and waiting, which are grey."""
    return sorted(names, key=lambda name: (name in ("wait", "idle"), name))


PANELS: dict[str, Callable[[RunSeries], Panel]] = {
    "loss": loss_panel,
    "acceptance": acceptance_panel,
    "slots": slots_panel,
    "optimizer": optimizer_panel,
    "rate": rate_panel,
    "memory": memory_panel,
    "holdings": holdings_panel,
    "utilization": utilization_panel,
    "queue": queue_panel,
    "phases": phases_panel,
    "timeline": timeline_panel,
}


def build_panels(run: RunSeries, drop_empty: bool = False) -> list[Panel]:
    """All panels in reading order."""
    with run.lock:
        panels = [make(run) for make in PANELS.values()]
    return [panel for panel in panels if not (drop_empty and panel.empty)]


def _time_scale(run: RunSeries) -> tuple[float, str]:
    """(seconds per unit, axis title)."""
    if run.seconds > 3 * 3600:
        return 3600.0, "time since start (h)"
    if run.seconds > 300:
        return 60.0, "time since start (min)"
    return 1.0, "time since start (s)"


def _over_time(series: dict[str, Series], run: RunSeries, unit: float = 1.0) -> list[Line]:
    scale, _ = _time_scale(run)
    lines = []
    for index, (name, values) in enumerate(sorted(series.items())):
        if len(values):
            x, y = values.mean()
            lines.append(Line(name, x / scale, y / unit, *style.series_style(index), width=1.6, markers=len(x) < 3))
    return lines
