"""The executed notebook: what happened to it, and its cells as HTML.

papermill leaves a killed kernel's notebook looking green: every cell "completed", no error, no exception. What
is missing is the kernel's reply to the cell it died in (nbclient notes each reply's time), and the execution count
of the cells after it; `verdict` looks for both.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml
from markupsafe import Markup

from dflash.views.dashboard.bundle import PLOTLY_MIME
from dflash.views.dashboard.panels import Panel
from dflash.views.templates import render


@dataclass(frozen=True)
class Verdict:
    """How an executed notebook ended. `status`: ok, failed, killed, running, or not run."""

    status: str
    cell: int | None = None  # index of the cell that did not finish
    source: str = ""
    error: str = ""  # "ValueError: ..."
    traceback: str = ""

    @property
    def good(self) -> bool:
        return self.status == "ok"

    @property
    def interrupted(self) -> bool:
        return self.error.startswith("KeyboardInterrupt")


def verdict(notebook: nbformat.NotebookNode, fresh: bool = False) -> Verdict:
    """What became of each code cell, first trouble first. `fresh`: the file was saved just now, so where papermill has not
    noted an end, it is still at work."""
    record = notebook.metadata.get("papermill") or {}
    going_on = fresh and record.get("start_time") and not record.get("end_time")
    cells = [(i, c) for i, c in enumerate(notebook.cells) if c.cell_type == "code" and c.source.strip()]
    for index, cell in cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                trace = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.get("traceback", [])))
                return Verdict("failed", index, cell.source, f"{output.ename}: {output.evalue}", trace)
    if not any(cell.get("execution_count") for _, cell in cells):
        return Verdict("not run")
    for index, cell in cells:
        times = cell.metadata.get("execution") or {}
        unanswered = bool(times) and "shell.execute_reply" not in times
        if unanswered or cell.get("execution_count") is None:
            if going_on:
                return Verdict("running", index, cell.source)
            return Verdict("killed", index, cell.source, "the kernel ended while this cell ran")
    return Verdict("ok")


def run_shown(notebook: nbformat.NotebookNode, path: Path) -> Path | None:
    """The run that a notebook shows: named by its dashboard's output, or the folder that the notebook lies in."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            named = (output.get("metadata") or {}).get("dflash", {}).get("run")
            if named:
                for candidate in (Path(named), path.parent / named, path.parent / Path(named).name):
                    if (candidate / "metrics.jsonl").exists():
                        return candidate
    return path.parent if (path.parent / "metrics.jsonl").exists() else None


def heading(notebook: nbformat.NotebookNode, otherwise: str) -> str:
    """The notebook's first heading."""
    for cell in notebook.cells:
        found = re.search(r"^# +(.+)$", cell.source, re.M) if cell.cell_type == "markdown" else None
        if found:
            return found.group(1).strip()
    return otherwise


def repeat_commands(notebook: nbformat.NotebookNode, path: Path | None = None) -> list[str]:
    """The lines that repeat an execution under a new id, from papermill's own record of it; the old output stays.

    `path` is where the notebook lies: the new name is one that is free there.
    """
    record = notebook.metadata.get("papermill") or {}
    source, out = record.get("input_path"), Path(record.get("output_path") or "out.ipynb")
    if not source:
        return []
    whole_folder = out.name == "report.ipynb" and out.parent.name
    new = _next(out.parent if whole_folder else out)
    beside = path.resolve().parent.parent if whole_folder and path else (path.resolve().parent if path else None)
    while beside is not None and (beside / new.name).exists():
        new = _next(new)
    given = {**(record.get("parameters") or {}), **({"run_id": new.name} if whole_folder else {})}
    words = []
    for name, value in given.items():
        if isinstance(value, str) and not isinstance(yaml.safe_load(value), str):
            words += ["-y", f"{name}: {json.dumps(value)}"]  # "5" stays text
        elif isinstance(value, (str, int, float, bool)) or value is None:
            words += ["-p", name, str(value)]
        else:
            words += ["-y", f"{name}: {json.dumps(value)}"]
    out = new / out.name if whole_folder else new
    line = shlex.join([str(source), str(out), *words])
    return [f"dflash run {line}", f"mkdir -p {shlex.quote(str(out.parent))} && papermill {line}"]


def _next(path: Path) -> Path:
    """`night` -> `night-2`, `night-2` -> `night-3`, `out.ipynb` -> `out-2.ipynb`."""
    found = re.fullmatch(r"(.+)-(\d{1,3})", path.stem)
    stem, number = (found.group(1), int(found.group(2))) if found else (path.stem, 1)
    return path.with_name(f"{stem}-{number + 1}{path.suffix}")


def cells_html(notebook: nbformat.NotebookNode, static: bool, shown: bool = False) -> Markup:
    """The cells through nbconvert's basic template. Plot bundles become the page's own figures; the run's plots are left
    out where the page shows the run itself (`shown`)."""
    from nbconvert import HTMLExporter

    notebook = copy.deepcopy(notebook)
    notebook.metadata.pop("widgets", None)  # megabytes of widget state that nothing here can show
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            _use_figure(output, static, shown)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.exclude_anchor_links = True
    return Markup(exporter.from_notebook_node(notebook)[0])


def _use_figure(output: Any, static: bool, shown: bool) -> None:
    data = output.get("data")
    if not data:
        return
    for mime in [m for m in data if m.startswith("application/vnd.jupyter.widget") or m.endswith("javascript")]:
        del data[mime]
    if PLOTLY_MIME not in data and "image/png" not in data:
        return
    caption = str("".join(data.get("text/plain", "")))
    if shown and (output.get("metadata") or {}).get("dflash", {}).get("run"):
        output["data"] = {"text/plain": f"{caption}\n(The plots are above, under Curves.)"}
        return
    figure = None if static else data.get(PLOTLY_MIME)
    if data.get("image/png") or figure:
        image = (data.get("image/png") or "").replace("\n", "")
        values = {"picture": image, "data": embedded(figure) if figure else None, "caption": caption}
        output["data"] = {"text/html": str(render("figure.html", **values))}


def embedded(figure: dict[str, Any]) -> Markup:
    """A plotly figure as JSON that may stand inside a script element."""
    return Markup(json.dumps(figure, separators=(",", ":")).replace("</", "<\\/"))


def picture(panels: Sequence[Panel]) -> str:
    """The panels as a PNG without titles, in base64."""
    from dflash.views.dashboard.image_form import png

    return base64.b64encode(png(panels, dpi=100, titles=False)).decode("ascii")
