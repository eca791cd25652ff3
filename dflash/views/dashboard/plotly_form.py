"""Panels as plotly figures: one figure a panel for the live view and the report, or all in one for a
notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dflash.views.dashboard import style
from dflash.views.dashboard.panels import Heat, Line, Panel, Spans, legend_names

PANEL_HEIGHT = 300


def traces(panel: Panel) -> list[dict[str, Any]]:
    """The panel's traces as plotly dicts, without axis references."""
    names = legend_names([line.name for line in panel.lines])
    found = [_line(line, name) for line, name in zip(panel.lines, names, strict=True)]
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


def figure(panel: Panel, height: int = PANEL_HEIGHT) -> go.Figure:
    """One panel as its own figure; its width follows the page."""
    return grid_figure([panel], columns=1, height=height)


def grid_figure(panels: Sequence[Panel], columns: int = 2, height: int = PANEL_HEIGHT) -> go.Figure:
    """All panels in one figure of `columns` columns; each has its own legend beside its title."""
    rows = -(-len(panels) // columns)
    total = height * rows
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
        box = _box(index, rows, columns, total, wide_labels=bool(panel.lanes))
        suffix = "" if index == 0 else str(index + 1)
        _add_axes(layout, panel, suffix, box, total)
        for trace in traces(panel):
            trace.update(xaxis=f"x{suffix}", yaxis=f"y{suffix}")
            if trace["type"] == "heatmap":
                middle = (box["y"][0] + box["y"][1]) / 2
                trace["colorbar"].update(x=box["x"][1] + 0.005, y=middle, len=box["y"][1] - box["y"][0])
            else:
                trace["legend"] = f"legend{suffix}"
            data.append(trace)
    return go.Figure(data=data, layout=layout, skip_invalid=False)


def _box(index: int, rows: int, columns: int, total: int, wide_labels: bool) -> dict[str, tuple]:
    """Plot area of the index-th panel in paper coordinates, with room for title, legend and axis titles."""
    row, column = divmod(index, columns)
    width, tall = 1 / columns, 1 / rows
    left, right = (0.068, 0.048) if columns > 1 else (0.15 if wide_labels else 0.095, 0.035)
    top = 1 - row * tall
    x = (column * width + left, (column + 1) * width - right)
    return {"x": x, "y": (top - tall + 52 / total, top - 50 / total)}


def _add_axes(layout: dict, panel: Panel, suffix: str, box: dict, total: int) -> None:
    common = {"gridcolor": style.GRID, "zeroline": False, "linecolor": style.GRID, "automargin": False}
    x_axis = {"domain": list(box["x"]), "anchor": f"y{suffix}", "title": {"text": panel.x_title, "standoff": 6}}
    y_axis = {"domain": list(box["y"]), "anchor": f"x{suffix}", "title": {"text": panel.y_title, "standoff": 6}}
    low, high = panel.y_range
    if high is not None:
        y_axis["range"] = [low, high]
    elif low is not None:
        y_axis["autorangeoptions"] = {"minallowed": low, "include": low}
    if panel.lanes:
        y_axis.update(type="category", categoryorder="array", categoryarray=panel.lanes)
    if panel.heat is not None:
        y_axis["dtick"] = max(1, len(panel.heat.y) // 8)
    for axis in (x_axis, y_axis):  # said in full each time: a live figure keeps what a new layout leaves out
        axis["showticklabels"] = not panel.empty
        axis["showgrid"] = not panel.empty and panel.heat is None
        if panel.empty:
            axis["title"] = {"text": ""}
    layout[f"xaxis{suffix}"] = {**common, **x_axis}
    layout[f"yaxis{suffix}"] = {**common, **y_axis}
    layout[f"legend{suffix}"] = {
        "orientation": "h",
        "x": box["x"][0],
        "xanchor": "left",
        "yanchor": "bottom",
        "y": box["y"][1] + 2 / total,
        "font": {"size": 11},
        "bgcolor": "rgba(0,0,0,0)",
        "itemsizing": "constant",
        "itemwidth": 30,
    }
    layout["annotations"].append(
        {
            "text": f"<b>{panel.title}</b>",
            "xref": "paper",
            "yref": "paper",
            "showarrow": False,
            "x": box["x"][0],
            "xanchor": "left",
            "y": box["y"][1] + 25 / total,
            "yanchor": "bottom",
            "font": {"size": 14},
        }
    )
    if panel.empty and panel.note:
        layout["annotations"].append(
            {
                "text": panel.note.replace("\n", "<br>"),
                "xref": "paper",
                "yref": "paper",
                "showarrow": False,
                "x": sum(box["x"]) / 2,
                "y": sum(box["y"]) / 2,
                "xanchor": "center",
                "yanchor": "middle",
            }
        )


def _line(line: Line, name: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
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
