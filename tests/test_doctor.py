"""Probes in processes of their own, the time limit that makes a hang a result, the doctor's page and verdict."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import pytest
import torch
from patience import PATIENCE

from dflash.commands import doctor as doctor_command
from dflash.diagnose import coldrun, doctor, probes
from dflash.diagnose.isolated import IsolatedResult, run_isolated
from dflash.diagnose.probe_bodies import run_body
from dflash.diagnose.probes import ProbeResult, probe_rows, run_probe


def result(name: str, protected: bool, verdict: str) -> ProbeResult:
    return ProbeResult(name, protected, verdict, f"detail of {name}", 1.0)


def page(**changes) -> dict:
    base = {
        "python": "3.11",
        "executable": "python",
        "platform": "linux",
        "cpu_cores": 2,
        "packages": {"torch": "2.13.0"},
        "cuda_build": None,
        "gpus": [],
        "compile_cache": {"path": "/c", "state": "empty", "files": 0, "bytes": 0, "writable": True},
        "environment": dict.fromkeys(doctor.VARIABLES),
        "probes": [],
        "flex": {"cpu": {"ok": True, "detail": "fine"}},
        "overhead_us": 4.0,
        "linear_attention": {"flash-linear-attention": False, "causal-conv1d": False},
        "safe": True,
        "advice": [],
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    "name", [pytest.param("recompile_limit_goes_dense", marks=pytest.mark.slow), "foreign_trace_breaks_modules"]
)
def test_a_probe_shows_the_fault_and_the_cure(name):
    """Two of them, the faults that every torch shows; the doctor runs the rest."""
    off = run_probe(name, protect=False, backend="eager", device="cpu", limit=PATIENCE)
    on = run_probe(name, protect=True, backend="eager", device="cpu", limit=PATIENCE)
    assert (off.verdict, on.verdict) == ("fault", "clean"), (off, on)


def test_the_deadlock_probe_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU; the GPU tests run this probe")
    assert run_body("lazy_backward_deadlock", True, "eager", "auto")[0] == "skipped"


def test_an_unknown_probe_is_refused():
    with pytest.raises(ValueError, match="fx_flag_race"):
        run_probe("fx_flag", True)


def test_a_hang_is_a_result(tmp_path):
    (tmp_path / "stuck.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    done = run_isolated("stuck", [], limit=3.0, env={"PYTHONPATH": str(tmp_path)})
    assert done.hung and done.value is None and "begun" in done.output


def test_a_crash_keeps_its_output(tmp_path):
    (tmp_path / "crash.py").write_text("import sys\nprint('RESULT not json')\nsys.exit(3)\n")
    done = run_isolated("crash", [], limit=PATIENCE, env={"PYTHONPATH": str(tmp_path)})
    assert (done.hung, done.exit_code, done.value) == (False, 3, None) and "not json" in done.output
    assert done.death == "exit code 3: RESULT not json"


def test_a_child_that_died_says_of_what_and_where(tmp_path):
    (tmp_path / "dead.py").write_text(
        "import ctypes, threading\ndef deadly():\n    ctypes.string_at(0)\n"
        "thread = threading.Thread(target=deadly)\nthread.start()\nthread.join()\n"
    )
    done = run_isolated("dead", [], limit=PATIENCE, env={"PYTHONPATH": str(tmp_path)})
    assert done.death.startswith("killed by SIGSEGV: Segmentation fault, in string_at")
    assert "deadly (dead.py:3)" in done.death and str(tmp_path) not in done.death


def test_each_run_has_an_empty_compile_cache(tmp_path):
    (tmp_path / "where.py").write_text(
        "import json, os\nfolder = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
        "print('RESULT ' + json.dumps({'folder': folder, 'there': os.path.exists(folder)}))\n"
    )
    values = [run_isolated("where", [], PATIENCE, env={"PYTHONPATH": str(tmp_path)}).value for _ in range(2)]
    assert values[0]["folder"] != values[1]["folder"] and not values[0]["there"]


def test_the_verdict_is_unsafe_when_protection_does_not_help():
    good = [
        result("fx_flag_race", False, "fault"),
        result("fx_flag_race", True, "clean"),
        result("lazy_backward_deadlock", True, "skipped"),
    ]
    assert doctor.judge(page(), good)[0]
    for verdict in ("fault", "hang", "error"):
        safe, advice = doctor.judge(page(), [*good, result("warm_cache_still_races", True, verdict)])
        assert not safe and f"warm_cache_still_races still shows a {verdict}" in advice[0]
    safe, advice = doctor.judge(page(flex={"cuda:0": {"ok": False, "detail": "no kernel"}}), good)
    assert not safe and "cuda:0: no kernel" in advice[0]


def test_advice_names_what_to_change():
    environment = {**dict.fromkeys(doctor.VARIABLES), "TORCH_COMPILE_DISABLE": "1"}
    gpu = {"device": "cuda:0", "name": "H200", "capability": "9.0", "total_bytes": 1, "free_bytes": 1, "driver": "1"}
    cache = {"path": "/c", "state": "empty", "files": 0, "bytes": 0, "writable": False}
    shown = page(environment=environment, gpus=[gpu], compile_cache=cache)
    advice = " ".join(doctor.judge(shown, [result("fx_flag_race", False, "fault")])[1])
    for expected in (
        "unset TORCH_COMPILE_DISABLE",
        "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR",
        "flash-linear-attention",
        "never start drafter threads unprotected",
    ):
        assert expected in advice


def test_the_page_shows_everything(monkeypatch, capsys):
    shown = [
        result(name, protected, "fault" if not protected else "clean")
        for name in probes.PROBES
        for protected in (False, True)
    ]
    monkeypatch.setattr(doctor, "run_probes", lambda **kwargs: shown)
    monkeypatch.setattr(doctor, "flex_compiles", lambda: {"cpu": {"ok": True, "detail": "forward"}})
    overhead = IsolatedResult({"overhead_us": 4.2}, False, 0, 1.0, "")
    monkeypatch.setattr(doctor, "run_isolated", lambda *arguments: overhead)
    assert doctor_command.main(argparse.Namespace(json=False, quick=True)) == 0
    text = capsys.readouterr().out
    for expected in (
        "torch  ",
        "compile cache:",
        "fx_flag_race",
        "foreign_trace_breaks_modules",
        "4.2 us",
        "verdict: a protected run is safe here",
        "unset: ",
        "flex_attention compiled on cpu: yes",
    ):
        assert expected in text
    shown[1] = result(probes.PROBES[0], True, "hang")
    assert doctor_command.main(argparse.Namespace(json=True, quick=True)) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["safe"] is False and value["probes"][1] == asdict(shown[1])


def test_the_command_is_registered():
    parser = argparse.ArgumentParser()
    doctor_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", "--json", "--quick"])
    assert args.run is doctor_command.main and args.json and args.quick


def test_the_table_has_one_line_for_each_probe():
    rows = probe_rows([result("fx_flag_race", False, "fault"), result("fx_flag_race", True, "clean")])
    assert len(rows) == 1 and list(rows[0].values())[:3] == ["fx_flag_race", "fault", "clean"]


@pytest.mark.parametrize(
    "value, hung, outcome",
    [
        ({"errors": [], "mismatches": [], "timeline": []}, False, "ok"),
        ({"errors": ["thread 0: RuntimeError"], "mismatches": [], "timeline": []}, False, "error"),
        ({"errors": [], "mismatches": ["thread 1: outputs differ"], "timeline": []}, False, "mismatch"),
        (None, True, "hang"),
        (None, False, "crash"),
    ],
)
def test_a_cold_launch_counts_each_outcome(monkeypatch, value, hung, outcome):
    run = IsolatedResult(value, hung, None if hung else 0, 1.0, "output")
    monkeypatch.setattr(coldrun, "run_isolated", lambda *args, **kwargs: run)
    report = coldrun.run_cold(2, protect=True, devices=["cpu"])
    assert report.outcomes == {outcome: 2} and report.faults == (0 if outcome == "ok" else 2)
    assert f"2 {outcome}" in str(report) and "3 threads on cpu" in str(report)
