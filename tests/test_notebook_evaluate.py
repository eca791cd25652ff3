"""06_evaluate on a tiny run, through papermill: its claims hold, its plots are there, and a false claim fails it."""

import json
from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError
from test_evaluate import tiny_run

from dflash.views.evaluation import evaluation_panels, prompt_table
from dflash.views.examples import examples_html

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "06_evaluate.ipynb"


def execute(out, **parameters):
    papermill.execute_notebook(str(NOTEBOOK), str(out), parameters=parameters, cwd=str(ROOT), progress_bar=False)
    return nbformat.read(out, as_version=4)


def test_runs_and_shows(tmp_path, monkeypatch):
    run, _, _ = tiny_run(tmp_path, monkeypatch)
    notebook = execute(tmp_path / "out.ipynb", run=str(run), limit=2, max_new_tokens=8, device="cpu")
    saved = json.loads((run / "evaluation.json").read_text())
    assert saved["lossless"] and len(saved["prompts"]) == 2 and saved["parity"]["agrees"]
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"image/png", "application/vnd.plotly.v1+json", "text/html"} <= kinds
    assert (tmp_path / "out.ipynb").stat().st_size < 1_000_000


def test_a_false_claim_fails_its_cell():
    cell = next(c for c in nbformat.read(NOTEBOOK, as_version=4).cells if "acceptance length is below" in c.source)
    summary = {"acceptance_length": 2.0, "acceptance_interval": [1.5, 2.5]}
    exec(cell.source, {"summary": summary, "min_acceptance": 2.0})
    with pytest.raises(AssertionError, match="acceptance length is below 9"):
        exec(cell.source, {"summary": summary, "min_acceptance": 9.0})


@pytest.mark.slow
def test_a_false_claim_fails_the_notebook(tmp_path, monkeypatch):
    run, _, _ = tiny_run(tmp_path, monkeypatch)
    with pytest.raises(PapermillExecutionError, match="acceptance length is below 9"):
        execute(tmp_path / "out.ipynb", run=str(run), limit=2, max_new_tokens=8, device="cpu", min_acceptance=9.0)


def test_source_is_clean_and_its_parameters_are_helped():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert all(": " in line and "  # " in line for line in cell.source.splitlines())
    assert max(len(cell.source.splitlines()) for cell in notebook.cells if cell.cell_type == "code") <= 25


def content(**changes):
    prompt = {
        "prompt": "<a> & b",
        "chunks": [{"text": "x", "accepted": 0, "tokens": 1}],
        "acceptance_length": 2.0,
        "tokens": 5,
        "target_calls": 2,
        "seconds": 1.0,
        "plain_seconds": 2.0,
        "exact": True,
        "difference": None,
    }
    return {
        "prompts": [prompt],
        "acceptance_length": 2.0,
        "acceptance_interval": None,
        "acceptance_by_slot": [0.5, 0.2],
        "histogram": [1, 0, 1],
        "speedup": 2.0,
        "exact": 1,
        "compared": 1,
        "warnings": [],
        "held_out": None,
        "parity": None,
    } | changes


def test_panels_and_table():
    panels = evaluation_panels(content())
    assert [panel.key for panel in panels] == ["slots", "gains", "prompts", "seconds"]
    assert panels[0].lines[0].y.tolist() == [50.0, 20.0] and panels[1].spans[0].lengths.tolist() == [1.0, 0.0, 1.0]
    assert "bonus token included" in panels[1].title and ">2.00</td>" in prompt_table(content())._repr_html_()
    parity = {
        "accuracy_training": [0.5, None],
        "accuracy_decoding": [0.5, None],
        "acceptance_training": [0.5, 0.0],
        "acceptance_decoding": [0.5, 0.0],
    }
    assert evaluation_panels(content(parity=parity))[-1].key == "parity"
    unmeasured = content(acceptance_length=None)
    unmeasured["prompts"][0] |= {
        "acceptance_length": None,
        "plain_seconds": None,
        "exact": False,
        "difference": {"index": 3, "wide": True},
    }
    assert "differs at token 3: wrong" in str(prompt_table(unmeasured))
    assert "seconds" not in [panel.key for panel in evaluation_panels(unmeasured)]
    assert "&lt;a&gt;" in examples_html(content())
