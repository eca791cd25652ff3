"""Panels as a PNG, drawn by matplotlib's Agg canvas: no browser, no display, no pyplot state (so, any thread)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash.views import style
from dflash.views.dashboard.panels import LEGEND_ROW, Heat, Panel, Spans

PAGE, TEXT, RULE = "#FFFFFF", "#3D3D3D", "#E3E3E3"
PANEL_SIZE, TITLE = (5.4, 2.95), 0.27  # inches
DASHES = {"solid": "-", "dash": "--", "dot": ":"}


def png(panels: Sequence[Panel], columns: int = 2, dpi: int = 86, titles: bool = True) -> bytes:
    """The panels on one white page, `columns` a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    wide, tall = PANEL_SIZE[0], PANEL_SIZE[1] - (0 if titles else TITLE)
    width, height = wide * columns, tall * rows
    page = Figure((width, height), dpi=dpi, facecolor=PAGE)
    canvas = FigureCanvasAgg(page)
    for index, panel in enumerate(panels):  # fixed margins: a constrained layout would cost more than the drawing
        row, column = divmod(index, columns)
        left, bottom = column * wide + 0.95, height - (row + 1) * tall + 0.55
        size = (wide - (2.5 if panel.legend_column else 1.45)) / width, (tall - 1.12 + (0 if titles else TITLE)) / height
        ax = page.add_axes((left / width, bottom / height, *size))
        if titles:
            ax.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=TEXT, pad=22)
        _draw(page, ax, panel)
    canvas.draw()
    return _compact(np.asarray(canvas.buffer_rgba()))


def _compact(pixels: np.ndarray) -> bytes:
    """PNG without the unused alpha channel. (A palette would be smaller still, but puts bands in the heat map.)"""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels[..., :3]).save(buffer, format="png", compress_level=7)
    return buffer.getvalue()


def _draw(page: Any, ax: Any, panel: Panel) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(RULE)
    ax.tick_params(labelsize=8.5, colors=TEXT, length=0)
    if panel.empty:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.text(0.5, 0.5, panel.note, ha="center", va="center", color=style.INK, transform=ax.transAxes, fontsize=9)
        return
    ax.set_xlabel(panel.x_title, fontsize=9, color=TEXT)
    ax.set_ylabel(panel.y_title, fontsize=9, color=TEXT)
    if panel.heat is not None:
        _draw_heat(page, ax, panel.heat)
        return
    ax.grid(True, color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    for line in panel.lines:
        if line.area:
            ax.fill(line.x, line.y, color=line.colour, alpha=line.opacity, linewidth=0, label=line.name)
            continue
        ax.plot(
            line.x,
            line.y,
            color=line.colour,
            linestyle=DASHES[line.dash],
            linewidth=line.width * 0.8,
            alpha=line.opacity,
            label=line.name,
            marker="o" if line.markers else None,
            markersize=3,
        )
    if panel.spans:
        _draw_spans(ax, panel.spans, panel.lanes)
    _limit(ax, panel)
    if panel.log:
        ax.set_yscale("log")
    column = panel.legend_column
    ax.legend(
        loc="upper left" if column else "lower left",
        bbox_to_anchor=(1.01, 1.0) if column else (-0.01, 0.99),
        ncols=1 if column else LEGEND_ROW,
        frameon=False,
        fontsize=8,
        labelcolor=TEXT,
        handlelength=1.4,
        columnspacing=1.0,
        borderaxespad=0.1,
    )


def _limit(ax: Any, panel: Panel) -> None:
    low, high = panel.y_range
    if low is not None:
        if panel.y_title == "tokens/s":
            ax.yaxis.set_major_formatter("{x:,.0f}")
        top = max((float(np.nanmax(line.y)) for line in panel.lines if len(line.y)), default=low)
        ax.set_ylim(low, high if high is not None else low + (top - low) * 1.06 if top > low else low + 1)


def _draw_heat(page: Any, ax: Any, heat: Heat) -> None:
    columns = heat.x if len(heat.x) > 1 else np.append(heat.x, heat.x + 1)
    z = heat.z if len(heat.x) > 1 else np.repeat(heat.z, 2, 1)
    mesh = ax.pcolormesh(columns, heat.y, z, cmap=style.SEQUENTIAL.lower(), vmin=0, vmax=heat.top, shading="nearest")
    ax.yaxis.get_major_locator().set_params(integer=True)
    if not heat.scale:
        return
    bar = page.colorbar(mesh, cax=ax.inset_axes((1.015, 0, 0.022, 1)), format=lambda value, _: f"{value:.0%}")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=TEXT, length=0)


def _draw_spans(ax: Any, spans: Sequence[Spans], lanes: list[str]) -> None:
    place = {lane: index for index, lane in enumerate(lanes)}
    for group in spans:
        y = [place[lane] for lane in group.lanes]
        ax.barh(y, group.lengths, left=group.starts, height=0.7, color=group.colour, linewidth=0, label=group.name)
    ax.set_yticks(range(len(lanes)), lanes, fontsize=8.5 if len(lanes) <= 10 and max(map(len, lanes)) <= 13 else 6.5)
    ax.grid(False, axis="y")
