"""The executed notebook: what happened to it, and its cells as HTML.

papermill leaves a killed kernel's notebook looking green: every cell "completed", no error, no exception. What
is missing is the kernel's reply to the cell it died in (nbclient notes each reply's time), and the execution count
of the cells after it; `verdict` looks for both.
"""

from __future__ import annotations

import copy
import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from dflash.views.dashboard.bundle import PLOTLY_MIME


@dataclass(frozen=True)
class Verdict:
    """How an executed notebook ended. `status`: ok, failed, killed, or not run."""

    status: str
    cell: int | None = None  # index of the cell that did not finish
    source: str = ""
    error: str = ""  # "ValueError: ..."
    traceback: str = ""

    @property
    def good(self) -> bool:
        return self.status == "ok"


def verdict(notebook: nbformat.NotebookNode) -> Verdict:
    """What became of each code cell, first trouble first."""
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
            return Verdict("killed", index, cell.source, "the kernel ended while this cell ran")
    return Verdict("ok")


def run_folder(notebook: nbformat.NotebookNode, path: Path) -> Path | None:
    """The run that a notebook shows: named by its dashboard's output, or the folder that the notebook lies
    in.
    """
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


def repeat_commands(notebook: nbformat.NotebookNode) -> list[str]:
    """The lines that repeat an execution, from papermill's own record of it."""
    import shlex

    record = notebook.metadata.get("papermill") or {}
    source, out = record.get("input_path"), record.get("output_path")
    if not source:
        return []
    given = []
    for name, value in (record.get("parameters") or {}).items():
        if isinstance(value, (str, int, float, bool)) or value is None:
            given += ["-p", name, str(value)]
        else:
            given += ["-y", f"{name}: {json.dumps(value)}"]
    line = shlex.join([str(source), str(out or "out.ipynb"), *given])
    return [f"python -m dflash run {line}", f"papermill {line}"]


def cells_html(notebook: nbformat.NotebookNode, static: bool) -> str:
    """The cells through nbconvert's basic template; plot bundles become `figure_html`."""
    from nbconvert import HTMLExporter

    notebook = copy.deepcopy(notebook)
    notebook.metadata.pop("widgets", None)  # megabytes of widget state that nothing here can show
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            _use_figure(output, static)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.exclude_anchor_links = True
    body, _ = exporter.from_notebook_node(notebook)
    return body


def _use_figure(output: Any, static: bool) -> None:
    data = output.get("data")
    if not data:
        return
    for mime in [m for m in data if m.startswith("application/vnd.jupyter.widget") or m.endswith("javascript")]:
        del data[mime]
    if PLOTLY_MIME in data or "image/png" in data:
        figure = None if static else data.get(PLOTLY_MIME)
        caption = "".join(data.get("text/plain", ""))
        if data.get("image/png") or figure:
            output["data"] = {"text/html": figure_html(data.get("image/png"), figure, str(caption))}


def figure_html(png: str | None, figure: dict[str, Any] | None, caption: str = "", wide: bool = True) -> str:
    """An image that a script turns into the interactive plot; without scripts the image stays."""
    alternative = html.escape(caption or "plot", quote=True)
    picture = png.replace("\n", "") if png else ""
    image = f'<img alt="{alternative}" src="data:image/png;base64,{picture}">' if png else ""
    data = ""
    if figure is not None:
        content = json.dumps(figure, separators=(",", ":")).replace("</", "<\\/")
        data = f'<script type="application/json">{content}</script>'
    drawn = ' class="drawn"' if "\n" in caption else ""  # a table, or a plot in characters: its lines stay lines
    line = f"<figcaption{drawn}>{html.escape(caption)}</figcaption>" if caption and wide else ""
    kind = "plot wide" if wide else "plot"
    return f'<figure class="{kind}"><div class="canvas">{image}</div>{data}{line}</figure>'
