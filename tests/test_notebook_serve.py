"""07_serve through papermill: it says where nothing can be served, holds its claim on a stand-in server, and fails when
the server differs."""

from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError
from stub_server import stub
from test_serve_check import TOKENS, made

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "07_serve.ipynb"


def execute(out, **parameters):
    papermill.execute_notebook(str(NOTEBOOK), str(out), parameters=parameters, cwd=str(ROOT), progress_bar=False)
    return nbformat.read(out, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_without_an_environment_it_says_so(tmp_path):
    notebook = execute(tmp_path / "out.ipynb", server_python=str(tmp_path / "none"))
    text = "".join(output.get("text", "") for output in outputs(notebook))
    assert f"skipped: there is no {tmp_path / 'none'}, so nothing was served. `make serve-env` makes one" in text


def test_claim_and_plot(tmp_path, monkeypatch):
    run, table = made(tmp_path, monkeypatch)
    with stub(table) as url:
        settings = {"run": str(run), "url": url, "max_new_tokens": TOKENS, "concurrency": "1,2"}
        notebook = execute(tmp_path / "out.ipynb", **settings)
        data = [output["data"] for output in outputs(notebook) if "data" in output]
        assert len([d for d in data if {"image/png", "application/vnd.plotly.v1+json"} <= set(d)]) == 1
        assert "vllm serve" in "".join(output.get("text", "") for output in outputs(notebook))
        next(iter(table.values()))["tokens"][3] += 1
        with pytest.raises(PapermillExecutionError, match="gives another text for 1 of 3 prompts"):
            execute(tmp_path / "out.ipynb", **settings)


def test_source_is_clean_and_its_parameters_are_helped():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert all(": " in line and "  # " in line for line in cell.source.splitlines())
    assert max(len(cell.source.splitlines()) for cell in notebook.cells if cell.cell_type == "code") <= 25
