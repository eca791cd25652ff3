"""Comparing runs, the 00_runs notebook, sweeps, and the TensorBoard sink."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from notebook_factory import outputs, write_notebook
from synthetic_run import write_run

from dflash.__main__ import main as command_line
from dflash.errors import ConfigError, RunError
from dflash.runs.sinks import TensorBoardSink, export_events
from dflash.views.dashboard.compare import choose, comparison_panels, differences, list_runs, not_comparable, overview
from dflash.views.report.comparison import build_comparison
from dflash.workbook.sweep import grid, point_name, sweep

ROOT = Path(__file__).parent.parent


@pytest.fixture
def two(tmp_path):
    shared = {"target": {"target": "smollm2"}, "data": {"data": "x.jsonl", "held_out": 24}}
    write_run(tmp_path, "small", steps=40, config={**shared, "drafter": {"block_size": 4}}, seed=1)
    write_run(tmp_path, "large", steps=80, config={**shared, "drafter": {"block_size": 8}}, seed=2)
    return tmp_path


def test_runs_are_listed_and_chosen_by_name(two):
    (two / "not-a-run").mkdir()
    runs = list_runs(two)
    assert {run.path.name for run in runs} == {"small", "large"}
    assert [run.path.name for run in choose(runs, "small, large")] == ["small", "large"]
    with pytest.raises(RunError, match="no run called smal; there are"):
        choose(runs, "smal")
    assert list_runs(two / "nowhere") == [] and choose([], "") == []
    text = repr(overview(runs))
    assert "bonus token included" in text and "completed" in text and "1.62" in text and "62.0 GiB" not in text


def test_only_differing_settings_are_shown(two):
    runs = choose(list_runs(two), "small,large")
    table = differences(runs)
    assert {row[0]: row[1:] for row in table.rows} == {"block_size": ["4", "8"], "steps": ["40", "80"], "seed": ["1", "2"]}
    assert not_comparable(runs) == []
    runs[0].run_start["config"]["target"]["target"] = "other"
    assert not_comparable(runs) == ["another target (target: 'other', 'smollm2')"]


def test_curves_are_overlaid_by_run(two):
    panels = {panel.key: panel for panel in comparison_panels(choose(list_runs(two), "small,large"))}
    assert set(panels) == {"loss", "acceptance", "rate", "memory"}
    assert [line.name for line in panels["acceptance"].lines] == ["small", "large"]
    assert len({line.colour for line in panels["loss"].lines}) == 2
    assert 57 < panels["memory"].lines[0].y.mean() < 60  # the fuller of the two devices, in GiB


def test_the_runs_notebook_shows_what_is_there(two):
    import papermill

    out = two / "out.ipynb"
    source = ROOT / "notebooks" / "00_runs.ipynb"
    papermill.execute_notebook(
        str(source), str(out), parameters={"runs": str(two), "compare": "small,large"}, cwd=str(ROOT), progress_bar=False
    )
    found = outputs(out)
    images = [o for _, o in found if "image/png" in (o.get("data") or {})]
    assert len(images) == 2
    text = "".join(o.get("text", "") for _, o in found)
    assert "2 runs under" in text and "comparable: same target" in text and "The target is the bottleneck" in text


def test_the_runs_notebook_survives_an_empty_folder(tmp_path):
    import papermill

    source = ROOT / "notebooks" / "00_runs.ipynb"
    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(
        str(source), str(out), parameters={"runs": str(tmp_path / "none")}, cwd=str(ROOT), progress_bar=False
    )
    assert any("no runs under" in o.get("text", "") for _, o in outputs(out))


def test_a_grid_is_every_combination():
    assert grid({"a": [1, 2], "b": ["x"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert point_name({"block_size": 8, "data": "a/b.jsonl"}) == "block_size=8_data=a-b.jsonl"
    with pytest.raises(ConfigError, match="the axis gamma has no values"):
        grid({"gamma": []})


WORK = """
import sys
sys.path[:0] = [root, root + "/tests"]
from synthetic_run import write_run
if block_size == 13:
    raise ValueError("an unlucky block size")
write_run(runs_dir, run_id, steps=20, seed=block_size, config={"block_size": block_size})
"""
PARAMETERS = "root: str = ''\nruns_dir: str = ''\nrun_id: str = ''\nblock_size: int = 8"


def test_a_sweep_runs_every_point_compares_them_and_goes_on_where_it_stopped(tmp_path, capsys):
    path = write_notebook(tmp_path / "n.ipynb", PARAMETERS, WORK)
    folder = tmp_path / "sweep"
    line = ["sweep", str(path), str(folder), "-g", "block_size", "4,13", "-p", "root", str(ROOT)]
    assert command_line(line) == 1
    record = json.loads((folder / "sweep.json").read_text())
    assert record["codes"] == {"block_size=4": 0, "block_size=13": 1}
    assert (folder / "block_size=13" / "report.html").exists()  # the failed one has its report, too
    page = (folder / "comparison.html").read_text()
    assert "Comparison of 1 runs" in page and 'href="block_size=4/report.html"' in page
    capsys.readouterr()
    assert command_line(line) == 1
    assert "block_size=4 is done already" in capsys.readouterr().out


def test_a_sweep_checks_all_points_before_the_first_runs(tmp_path):
    path = write_notebook(tmp_path / "n.ipynb", PARAMETERS, WORK)
    with pytest.raises(ConfigError, match="block_size must be int, got 'big'"):
        sweep(path, tmp_path / "s", {"block_size": ["4", "big"]})
    assert not (tmp_path / "s").exists()
    with pytest.raises(RunError, match="holds no run to compare"):
        build_comparison(tmp_path)


def test_a_comparison_page_puts_the_best_first(two):
    page = build_comparison(two, ["block_size"], static=True).read_text()
    assert "Best: <b>" in page and page.count("data:image/png") == 4
    assert "What differs" in page and "block_size" in page


def test_tensorboard_gets_the_same_numbers(two):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = export_events(two / "small")
    loaded = events.EventAccumulator(str(folder))
    loaded.Reload()
    series = choose(list_runs(two), "small")[0]
    scalars = loaded.Scalars("eval/acceptance_length")
    assert [e.step for e in scalars] == list(range(4, 41, 4))
    assert scalars[-1].value == pytest.approx(series.last_eval["acceptance_length"], rel=1e-6)
    assert {"step/loss", "device/cuda:0/used", "stage/target[0]/tokens_per_second"} <= set(loaded.Tags()["scalars"])


def test_without_tensorboard_the_sink_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoardSink(tmp_path)


def test_the_index_runs_and_shows_its_picture(tmp_path):
    import papermill

    out = tmp_path / "out.ipynb"
    source = ROOT / "notebooks" / "index.ipynb"
    papermill.execute_notebook(str(source), str(out), parameters={"seed": 3}, cwd=str(ROOT), progress_bar=False)
    found = outputs(out)
    assert sum("image/png" in (o.get("data") or {}) for _, o in found) == 1
    assert "all 24 queries see what they should" in "".join(o.get("text", "") for _, o in found)
    text = nbformat.read(source, as_version=4).cells[0].source
    linked = set(re.findall(r"\]\(([^)]+\.ipynb)\)", text))
    assert linked == {p.name for p in source.parent.glob("*.ipynb")} - {"index.ipynb"}


@pytest.mark.parametrize("name", ["00_runs.ipynb", "index.ipynb"])
def test_the_sources_of_the_notebooks_are_clean(name):
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    assert notebook.metadata.kernelspec["name"] == "python3"
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in notebook.cells if c.cell_type == "code")
