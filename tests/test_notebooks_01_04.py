"""Notebooks 01-04 through papermill at CPU sizes: their claims hold, false ones fail them, sources are clean."""

from __future__ import annotations

import math
from pathlib import Path

import nbformat
import papermill
import pytest
import torch
from papermill.exceptions import PapermillExecutionError
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from patience import PATIENCE

from dflash.diagnose.choices import choose_compiler, choose_device, choose_devices, choose_probes
from dflash.diagnose.coldrun import ColdReport
from dflash.diagnose.kernel import KernelCase, case_rule, kernel_cases, reference_error
from dflash.diagnose.launches import launch_rows, timeline_bundle, timeline_text
from dflash.diagnose.probes import PROBES, ProbeResult, probe_rows
from dflash.errors import ConfigError, refuse_below
from dflash.runs.tables import Table

ROOT = Path(__file__).parents[1]
NAMES = ("01_standalone_kernel", "02_drafter_forward", "03_warmup", "04_threaded_launch")


def execute(name: str, out: Path, **parameters) -> nbformat.NotebookNode:
    papermill.execute_notebook(
        str(ROOT / "notebooks" / f"{name}.ipynb"), str(out), parameters=parameters, cwd=str(ROOT), progress_bar=False
    )
    return nbformat.read(out, as_version=4)


def text(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.slow
def test_01_kernel(tmp_path):
    shown = text(execute("01_standalone_kernel", tmp_path / "out.ipynb", device="cpu", repeats=1))
    assert "largest error" in shown and "dense scores alone" in shown and "unsorted" in shown


def test_02_forward(tmp_path):
    shown = text(execute("02_drafter_forward", tmp_path / "out.ipynb", device="cpu", tokens=256))
    assert "Warmup OK: loss=" in shown and "concatenated on the feature axis" in shown


@pytest.mark.slow
def test_03_warmup(tmp_path):
    shown = text(
        execute("03_warmup", tmp_path / "out.ipynb", device="cpu", backend="eager", cache_backend="eager", calls=20)
    )
    assert "warm_cache_still_races" in shown and "needs a GPU" in shown and "cache deleted" in shown


@pytest.mark.slow
def test_04_launch(tmp_path):
    notebook = execute(
        "04_threaded_launch",
        tmp_path / "out.ipynb",
        devices="cpu",
        backend="eager",
        processes=1,
        probes="recompile_limit_goes_dense",
        limit=PATIENCE,
    )
    assert "protection on" in text(notebook)
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"image/png", "application/vnd.plotly.v1+json"} <= kinds
    assert (tmp_path / "out.ipynb").stat().st_size < 1_000_000


@pytest.mark.slow
def test_a_false_claim_fails_the_notebook(tmp_path):
    with pytest.raises(PapermillExecutionError, match="no fault shown"):
        execute(
            "04_threaded_launch",
            tmp_path / "out.ipynb",
            devices="cpu",
            backend="eager",
            processes=1,
            probes="lazy_backward_deadlock",
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_sources_are_clean_and_their_parameters_are_helped(name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) <= 25
    (parameters,) = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert all(": " in line and "  # " in line for line in parameters.source.splitlines())
    assert notebook.metadata.kernelspec.name == "python3"
    assert any("assert " in cell.source for cell in code)


# -- what the notebooks show -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_device("cuda:99"), "device cuda:99 is not here, this machine has"),
        (lambda: choose_device("gpu"), "there is no device 'gpu'; give cpu, cuda or cuda:0"),
        (lambda: choose_devices("cpu,cuda:99"), "device cuda:99 is not here"),
        (lambda: choose_compiler("eagr", "cpu"), "backend has 'eagr'; wanted auto, or of inductor, eager"),
        (lambda: choose_probes("fx_flag_race,fx_flag"), "probes has 'fx_flag'; wanted all, or of fx_flag_race, "),
        (lambda: choose_probes(""), "probes has ''; wanted all"),
        (lambda: refuse_below(1, threads=3, processes=0), "processes must be at least 1, got 0"),
        (lambda: refuse_below(1, limit=math.nan), "limit must be at least 1, got nan"),
    ],
)
def test_parameters_that_name_nothing_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_what_parameters_name():
    assert choose_devices("cpu, cpu") == ["cpu", "cpu"]
    assert choose_probes("all") == PROBES and choose_probes("fx_flag_race, lazy_backward_deadlock") == (
        "fx_flag_race",
        "lazy_backward_deadlock",
    )
    assert [choose_compiler(name, "cpu") for name in ("auto", "inductor", "eager")] == ["eager", "inductor", "eager"]
    assert choose_compiler("auto", "cuda:1") == "inductor"
    refuse_below(0, jobs=0)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("01_standalone_kernel", {"repeats": 0}, "repeats must be at least 1, got 0"),
        ("02_drafter_forward", {"size": "smal"}, "size has 'smal'; wanted auto, or of full, small"),
        ("03_warmup", {"cache_backend": "eagr"}, "cache_backend has 'eagr'"),
        ("04_threaded_launch", {"probes": "fx_flag_rac"}, "probes has 'fx_flag_rac'"),
        ("01_standalone_kernel", {"nosuch": 3}, "no parameter 'nosuch'; .*Its parameters: device, repeats, seed"),
        ("02_drafter_forward", {"tokens": "many"}, "tokens must be int, got 'many'"),
        ("03_warmup", {"call": 20}, r"no parameter 'call'; did you mean calls\?"),
    ],
)
def test_notebooks_refuse_before_they_measure(monkeypatch, name, parameters, message):
    """Their cells in this process, as papermill writes them and a kernel keeps them."""
    notebook = load_notebook_node(str(ROOT / "notebooks" / f"{name}.ipynb"))
    cells = [c.source for c in parameterize_notebook(notebook, parameters).cells if c.cell_type == "code"]
    namespace = {"__name__": "__main__", "In": [""]}
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        for source in cells:
            namespace["In"].append(source)
            exec(source, namespace)
    assert namespace["In"][-2].startswith("# Parameters"), "the cell after papermill's refuses"


def test_tables():
    rows = [{"a": 1.23456789, "b": None, "c": True}, {"a": 2, "b": "x", "c": False}]
    lines = str(Table(rows)).splitlines()
    assert lines[0].split() == ["a", "b", "c"] and lines[2].split() == ["1.235", "-", "yes"]
    assert lines[3].split() == ["2", "x", "no"] and str(Table([])) == "(no rows)"


def test_the_reference_notices_a_wrong_kernel():
    case = KernelCase("small", "anchors", 64, 192, 4, 2, 16, block=8, document=64)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 16, generator=generator) for heads, length in ((4, 64), (2, 192), (2, 192)))
    rule = case_rule(case, torch.device("cpu"))
    allowed = rule(torch.tensor(0), torch.tensor(0), torch.arange(64)[:, None], torch.arange(192)[None])
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    assert reference_error(q, k, v, rule, right) < 1e-5
    assert reference_error(q, k, v, rule, torch.zeros_like(right)) > 0.1
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert reference_error(q, k, v, rule, causal) > 0.1


def test_cases_on_a_gpu_have_the_field_logs_shapes():
    cases = kernel_cases(torch.device("cuda"))
    assert {(case.queries, case.keys, case.head_dim) for case in cases} == {(32768, 72768, 128)}
    assert 276 < cases[0].dense_gib < 292


def test_launches_and_probes_as_rows_and_a_timeline():
    spans = [
        {"thread": 0, "name": "first call", "start": 0.0, "seconds": 2.0},
        {"thread": 1, "name": "warm call", "start": 2.0, "seconds": 0.5},
    ]
    off = ColdReport(False, ["cpu"], 2, {"error": 1, "hang": 1}, {"error": "x"}, [3.0, 5.0], 2, [spans])
    row = launch_rows([off])[0]
    assert (row["protection"], row["processes"], row["error"], row["hang"], row["ok"]) == ("off", 2, 1, 1, 0)
    assert row["s a process"] == 4.0 and off.faults == 2
    shown = timeline_bundle(off)
    assert "2 calls in 2 threads" in shown["text/plain"] and shown["image/png"]
    drawn = timeline_text(spans, ["a", "b"]).splitlines()
    assert drawn[1].startswith("a ") and drawn[1].count("#") > 3 * drawn[2].count("-") > 0
    assert timeline_bundle(ColdReport(True, ["cpu"], 2))["image/png"]  # no process finished a call
    probes = [ProbeResult("p", on, "clean" if on else "fault", "why\nmore", 1.0) for on in (False, True)]
    assert probe_rows(probes) == [
        {"probe": "p", "protection off": "fault", "protection on": "clean", "what was seen (off)": "why"}
    ]
