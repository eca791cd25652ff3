"""tools/run_notebook.py: cells run without Jupyter, parameters are checked, a failing cell is saved and counted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "tools" / "run_notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(*sources: str) -> dict:
    cells = [{"cell_type": "code", "source": source, "metadata": {}, "outputs": []} for source in sources]
    return {"cells": [{"cell_type": "markdown", "source": "# x", "metadata": {}}, *cells]}


def test_parameters_take_their_declared_type(tool):
    source = 'steps: int = 5  # of training\nname: str = "a"  # of the run'
    changed = tool.with_parameters(source, {"steps": "7", "name": "5"})
    assert changed == "steps: int = 7  # of training\nname: str = '5'  # of the run"
    with pytest.raises(SystemExit, match="unknown parameter.*known: steps, name"):
        tool.with_parameters(source, {"step": "7"})


def test_outputs_are_kept_and_a_failing_cell_ends_it(tool):
    shown: list = []
    played = notebook("x = 2", "print(x + 1)", "y = x", "1 / 0", "x")
    assert tool.run_cells(played, {}, shown) is True
    code = [cell for cell in played["cells"] if cell["cell_type"] == "code"]
    assert code[1]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "3\n"}]
    assert code[3]["outputs"][0]["ename"] == "ZeroDivisionError"
    assert "execution_count" not in code[4]
    json.dumps(played)
