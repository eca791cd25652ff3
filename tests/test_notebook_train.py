"""05_train through papermill: a real small run leaves its record, plots and checkpoint; bad parameters stop it early."""

from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from dflash.runs.record import read_metrics
from dflash.train.checkpoint import checkpoints
from dflash.train.settings import RunConfig, setting_names
from dflash.views.report import build_report
from dflash.workbook.parameters import declared_parameters

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "05_train.ipynb"
SMALL = dict(
    max_conversations=6,
    held_out=2,
    pack_length=256,
    max_anchors=16,
    steps=3,
    eval_every=3,
    drafter_layers=1,
    num_captured=2,
    decode_prompts=1,
)


def execute(tmp_path, **parameters):
    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(
        str(NOTEBOOK),
        str(out),
        parameters=dict(runs_dir=str(tmp_path / "runs"), run_id="r", **SMALL | parameters),
        cwd=str(ROOT),
        progress_bar=False,
    )
    return nbformat.read(out, as_version=4)


@pytest.mark.slow
def test_a_small_run_leaves_plots_record_checkpoint_and_report(tmp_path):
    # the acceptance claim of so short a run may not hold, so its start is taken as its threshold only
    notebook = execute(tmp_path, min_acceptance=0.0, lr=1e-5, recipe="cpu", weight_decay=0.02, gamma=None)
    run = tmp_path / "runs" / "r"
    records, _ = read_metrics(run)
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3]
    assert records[-1]["kind"] == "run_end" and records[-1]["status"] == "completed"
    assert checkpoints(run)[-1][0] == 3 and (run / "evaluation.json").is_file()
    config = RunConfig.load(run / "config.yaml")
    assert (config.recipe, config.drafter.block_size, config.train.steps) == (records[0]["config"]["recipe"], 4, 3)
    assert config.train.weight_decay == 0.02 and config.train.gamma is None, "passed, though not in the cell; passed as None"
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"image/png", "application/vnd.plotly.v1+json", "text/html"} <= kinds
    assert not notebook.metadata.get("widgets"), "no widget state in an executed copy"
    report = build_report(tmp_path / "out.ipynb", tmp_path / "report.html")
    page = Path(report or tmp_path / "report.html").read_text()
    assert "http://" not in page.split("</style>")[0] and len(page) < 5_000_000
    assert "acceptance length" in page


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"gpus": "5,6,7"}, r"ConfigError: gpus.*5.*0 GPUs"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"blok_size": 8}, r"no parameter 'blok_size'; did you mean block_size\?"),
        pytest.param({"data": "absent.jsonl"}, "absent.jsonl does not exist", marks=pytest.mark.slow),
        ({"nosuch": 3}, "no parameter 'nosuch'"),
        ({"min_acceptance": "abc"}, "min_acceptance must be float, got 'abc'"),
        ({"decode_prompts": -3}, "decode_prompts must be at least 0, got -3"),
        ({"live": "maybe"}, "live has 'maybe'; wanted auto"),
    ],
)
def test_what_cannot_work_stops_in_one_sentence(tmp_path, parameters, message):
    import torch

    if "gpus" in parameters and torch.cuda.device_count() > 5:
        pytest.skip("this machine has those GPUs")
    with pytest.raises(PapermillExecutionError, match=message):
        execute(tmp_path, **parameters)
    assert not (tmp_path / "runs").exists()


def test_the_parameters_cell_holds_what_people_turn_and_leaves_the_rest_to_the_recipe():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    parameters = declared_parameters(notebook)
    assert len(parameters) == len(cell.source.splitlines()) <= 18, "papermill sees every line, so it warns of none"
    assert all(p.inferred_type_name != "None" and p.help for p in parameters.values())
    assert parameters["gamma"].inferred_type_name == parameters["max_minutes"].inferred_type_name == "Optional[float]"
    own = {"run_id", "runs_dir", "live", "background", "decode_prompts", "min_acceptance"}
    assert own < parameters.keys() <= own | set(setting_names())
    given = {n: p.default for n, p in parameters.items() if n not in own | {"recipe", "seed"}}
    assert set(given.values()) == {"None"}, "no second place for a recipe's values"
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
