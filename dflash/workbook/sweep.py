"""`dflash sweep NOTEBOOK FOLDER -g block_size 4,8 -g gamma 4,10`: one execution a grid point.

Each point runs through `launch.run_notebook` into `FOLDER/<point>/report.ipynb`, with its own report; at the end
`FOLDER/comparison.html` compares them. A point that is already complete is not run again, so an interrupted sweep
goes on where it stopped. A failing point is noted and the others still run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from dflash.errors import ConfigError
from dflash.views.report.comparison import build_comparison
from dflash.views.report.notebook_part import verdict
from dflash.workbook.parameters import check_parameters, declared_types, extra_settings, read_notebook
from dflash.workbook.run_notebook import INTERRUPTED, OK, run_notebook


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last axis fastest. ConfigError for an axis without values."""
    for name, values in axes.items():
        if not values:
            raise ConfigError(f"the axis {name} has no values; give it as -g {name} 4,8,16")
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def point_name(point: Mapping[str, Any]) -> str:
    """A folder name: `block_size=8_gamma=4.0`."""
    text = "_".join(f"{name}={value}" for name, value in point.items())
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in text)


def sweep(
    notebook: str | Path, folder: str | Path, axes: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Run the grid; exit codes by point. All parameters of all points are checked before the first one runs."""
    source = read_notebook(notebook)
    declared, settings = declared_types(source), extra_settings(source)
    points = [{**(fixed or {}), **point} for point in grid(axes)]
    for point in points:
        check_parameters(declared, point, settings)
    folder, codes = Path(folder), {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, point in enumerate(points, 1):
        name = point_name({key: point[key] for key in axes})
        out = folder / name / "report.ipynb"
        if out.exists() and verdict(nbformat.read(out, as_version=4)).good:
            print(f"{number} of {len(points)}: {name} is done already")
            codes[name] = OK
            continue
        print(f"{number} of {len(points)}: {name}")
        _clear(out.parent)
        launched = run_notebook(notebook, out, point)
        codes[name] = launched.code
        if launched.code == INTERRUPTED:
            break
        if launched.code != OK:
            print(f"{name} failed ({launched.verdict.error or launched.verdict.status}); going on with the next")
    record = {"notebook": str(notebook), "axes": {k: list(v) for k, v in axes.items()}, "fixed": dict(fixed or {})}
    (folder / "sweep.json").write_text(json.dumps({**record, "codes": codes}, indent=1, default=str))
    print(f"comparison: {build_comparison(folder, list(axes))}")
    return codes


def _clear(folder: Path) -> None:
    """Put a failed attempt's record aside, so that the point can be run again in the same folder."""
    if (folder / "metrics.jsonl").exists():
        attempt = 1
        while (aside := folder.parent / f".{folder.name}.failed-{attempt}").exists():
            attempt += 1
        folder.rename(aside)
