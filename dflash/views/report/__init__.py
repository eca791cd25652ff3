"""An executed notebook, or a run folder, as one `report.html` that opens offline.

dflash report runs/<id>/report.ipynb -o runs/<id>/report.html
dflash report runs/<id>
"""

from __future__ import annotations

import time
from pathlib import Path

from dflash.errors import RunError

__all__ = ["build_report"]


def build_report(
    source: str | Path, out: str | Path | None = None, run: str | Path | None = None, static: bool = False
) -> Path:
    """Write the report of an executed notebook or of a run folder; returns its path (default: beside the source).

    The run that a notebook shows is found by itself; `run` names it where that fails. `static` keeps only
    images (a tenth of the size). RunError when there is neither a notebook nor a run.
    """
    import nbformat

    from dflash.runs.record import holds_run
    from dflash.views.dashboard.series import RunSeries
    from dflash.views.report.notebook_part import cells_html, heading, repeat_commands, run_shown, verdict
    from dflash.views.report.page import Material, page
    from dflash.views.report.story import SILENT_AFTER

    source = Path(source)
    notebook_path = source / "report.ipynb" if source.is_dir() else source
    folder = Path(run) if run else (source if source.is_dir() else None)
    if source.is_dir() and not (notebook_path.exists() or holds_run(source)):
        raise RunError(f"{source} holds neither report.ipynb nor a run; give an executed notebook or a run folder")
    if not source.exists():
        raise RunError(f"{source} does not exist; give an executed notebook or a run folder")
    material = Material(title="", static=static)
    if notebook_path.is_file():
        try:
            notebook = nbformat.read(notebook_path, as_version=4)
        except Exception as error:  # nbformat raises many kinds
            raise RunError(f"{notebook_path} is not a notebook; give an executed notebook or a run folder") from error
        material.verdict = verdict(notebook, fresh=time.time() - notebook_path.stat().st_mtime < SILENT_AFTER)
        material.commands = repeat_commands(notebook, notebook_path)
        folder = folder or run_shown(notebook, notebook_path)
        material.notebook_html = cells_html(notebook, static, shown=folder is not None)
    if folder is not None:
        if not holds_run(folder):
            raise RunError(f"{folder} holds no run (metrics.jsonl is missing); check --run")
        material.series = RunSeries(folder)
        material.series.follow()
    material.title = f"Run {folder.resolve().name}" if folder is not None else heading(notebook, notebook_path.stem)
    out = Path(out) if out else (source / "report.html" if source.is_dir() else source.with_suffix(".html"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(material), encoding="utf-8")
    return out
