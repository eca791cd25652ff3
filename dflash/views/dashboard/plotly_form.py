"""Panels as plotly figures: one figure a panel in the report, all in one in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dflash.views import style
from dflash.views.dashboard.panels import Heat, Line, Panel, Spans

PANEL_HEIGHT = 300


def traces(panel: Panel) -> list[dict[str, Any]]:
    """The panel's traces as plotly dicts, without axis references."""
    found = [_line(line) for line in panel.lines]
    if panel.heat is not None:
        found.append(_heat(panel.heat))
    found += [_spans(spans) for spans in panel.spans]
    return found


def shape_of(panel: Panel) -> tuple:
    """What must stay equal for new data to fit the traces that are already drawn."""
    return (
        panel.title,
        panel.x_title,
        panel.empty,
        tuple((line.name, line.colour, line.dash) for line in panel.lines),
        panel.heat is not None,
        tuple(spans.name for spans in panel.spans),
        tuple(panel.lanes),
    )


def grid_figure(panels: Sequence[Panel], columns: int = 2, titles: bool = True) -> go.Figure:
    """All panels in one figure of `columns` columns, as wide as the page; each has a legend of its own."""
    rows = -(-len(panels) // columns)
    head = 50 if titles else 26  # pixels above a plot: its title and a legend of one line
    total = (PANEL_HEIGHT - 50 + head) * rows
    layout: dict[str, Any] = {
        "template": {},
        "height": total,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": style.FONT, "size": 12, "color": style.INK},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "hoverlabel": {"font": {"family": style.FONT, "size": 12}},
        "barmode": "overlay",
        "showlegend": True,  # plotly would leave out the name of a lone curve
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": style.INK,
            "activecolor": style.BLUE,
            "remove": ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
        },
        "annotations": [],
    }
    data = []
    for index, panel in enumerate(panels):
        box = _box(index, columns, (rows, total, head), panel)
        suffix = "" if index == 0 else str(index + 1)
        _add_axes(layout, panel, suffix, box, alone=columns == 1)
        _add_words(layout, panel, suffix, box, total, titles)
        for trace in traces(panel):
            trace.update(xaxis=f"x{suffix}", yaxis=f"y{suffix}")
            if trace["type"] == "heatmap":
                middle = (box["y"][0] + box["y"][1]) / 2
                trace["colorbar"].update(x=box["x"][1] + 0.005, y=middle, len=box["y"][1] - box["y"][0])
            else:
                trace["legend"] = f"legend{suffix}"
            data.append(trace)
    return go.Figure(data=data, layout=layout, skip_invalid=False)


def _box(index: int, columns: int, height: tuple[int, int, int], panel: Panel) -> dict[str, tuple[float, float]]:
    """Plot area of the index-th panel in paper coordinates, with room for title, legend and axis titles. `height`: rows,
    pixels in all, pixels above each plot."""
    rows, total, head = height
    row, column = divmod(index, columns)
    width, tall = 1 / columns, 1 / rows
    longest = max(map(len, panel.lanes), default=0)  # of the names to the left of the plot
    left, right = max(0.068, 0.0085 * longest), 0.15 if panel.legend_column else 0.085 if panel.heat is not None else 0.048
    if columns == 1:  # plotly makes the room itself (`automargin`), however narrow the page
        left, right = 0.0, 0.0
    top = 1 - row * tall
    return {"x": (column * width + left, (column + 1) * width - right), "y": (top - tall + 52 / total, top - head / total)}


def _add_axes(layout: dict, panel: Panel, suffix: str, box: dict, alone: bool) -> None:
    common = {"gridcolor": style.GRID, "zeroline": False, "linecolor": style.GRID, "automargin": alone}
    x_axis = {"domain": list(box["x"]), "anchor": f"y{suffix}", "title": {"text": panel.x_title, "standoff": 6}}
    y_axis = {"domain": list(box["y"]), "anchor": f"x{suffix}", "title": {"text": panel.y_title, "standoff": 6}}
    low, high = panel.y_range
    if high is not None:
        y_axis["range"] = [low, high]
    elif low is not None:
        y_axis["autorangeoptions"] = {"minallowed": low, "include": low}
    if panel.log:
        y_axis.update(type="log", exponentformat="power", dtick=1)
    if panel.lanes:
        size = 12 if len(panel.lanes) <= 10 else 9
        y_axis.update(type="category", categoryorder="array", categoryarray=panel.lanes, tickfont={"size": size})
    if panel.heat is not None:
        y_axis["dtick"] = max(1, len(panel.heat.y) // 8)
    for axis in (x_axis, y_axis):  # in full each time: a live figure keeps what a new layout leaves out
        axis["showticklabels"] = not panel.empty
        axis["showgrid"] = not panel.empty and panel.heat is None
        if panel.empty:
            axis["title"] = {"text": ""}
    layout[f"xaxis{suffix}"] = {**common, **x_axis}
    layout[f"yaxis{suffix}"] = {**common, **y_axis}


def _add_words(layout: dict, panel: Panel, suffix: str, box: dict, total: int, title: bool) -> None:
    """Legend, title, and what an empty panel waits for."""
    (left, right), (bottom, top) = box["x"], box["y"]
    legend = {"font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)", "itemsizing": "constant", "itemwidth": 30, "xanchor": "left"}
    if panel.legend_column:
        legend.update(orientation="v", x=right + 0.005, y=top, yanchor="top")
    else:
        legend.update(orientation="h", x=left, y=top + 2 / total, yanchor="bottom")
    layout[f"legend{suffix}"] = legend
    paper = {"xref": "paper", "yref": "paper", "showarrow": False}
    if title:
        place = {"x": left, "y": top + 25 / total, "xanchor": "left", "yanchor": "bottom", "font": {"size": 14}}
        layout["annotations"].append({"text": f"<b>{panel.title}</b>", **paper, **place})
    if panel.empty and panel.note:
        place = {"x": (left + right) / 2, "y": (bottom + top) / 2, "xanchor": "center", "yanchor": "middle"}
        layout["annotations"].append({"text": panel.note.replace("\n", "<br>"), **paper, **place})


def _line(line: Line) -> dict[str, Any]:
    if line.area:
        fill = {"mode": "lines", "fill": "toself", "fillcolor": line.colour, "line": {"width": 0, "color": line.colour}}
        place = {"x": _short(line.x), "y": _short(line.y), "opacity": line.opacity, "hoverinfo": "skip"}
        return {"type": "scatter", "name": line.name, **place, **fill}
    return {
        "type": "scatter",
        "name": line.name,
        "x": _short(line.x),
        "y": _short(line.y),
        "mode": "lines+markers" if line.markers else "lines",
        "opacity": line.opacity,
        "line": {"color": line.colour, "width": line.width, "dash": line.dash},
        "marker": {"size": 5},
        "hovertemplate": f"%{{x:.6~g}}: %{{y:{line.hover}}}<extra>{line.name}</extra>",
    }


def _heat(heat: Heat) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "x": _short(heat.x),
        "y": heat.y,
        "z": _short(heat.z),
        "colorscale": style.SEQUENTIAL,
        "zmin": 0.0,
        "zmax": heat.top,
        "showscale": heat.scale,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickformat": ".0%"},
        "hovertemplate": f"%{{x}}, %{{y}}: %{{z:.1%}}<extra>{heat.label}</extra>",
    }


def _spans(spans: Spans) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": spans.name,
        "y": spans.lanes,
        "base": _short(spans.starts),
        "x": _short(spans.lengths),
        "marker": {"color": spans.colour, "line": {"width": 0}},
        "width": 0.7,
        "hovertemplate": f"%{{x:.3f}} s<extra>{spans.name}</extra>",
    }


def _short(values: np.ndarray) -> np.ndarray:
    """Half the bytes on the wire; 7 digits are more than a screen shows."""
    return np.asarray(values, dtype=np.float32)
