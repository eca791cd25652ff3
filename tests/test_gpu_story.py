"""tools/gpu_story.py: what it reads from a record, and the story's topology, five targets and three drafters, on the CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "gpu_story.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("gpu_story", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tell(tmp_path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    import os

    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--warm", "2", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert (tmp_path / "story.json").is_file(), done.stdout + done.stderr
    return done, json.loads((tmp_path / "story.json").read_text())


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def step(number: int, t: float, seconds: float, **more) -> dict:
    return {
        "kind": "step",
        "t": t,
        "step": number,
        "tokens": 100,
        "step_seconds": seconds,
        "loss": 5.0 - number,
        "skipped": False,
        **more,
    }


def device(t: float, reserved: int | None, load: int | None) -> dict:
    return {
        "kind": "device",
        "t": t,
        "device": "cuda:0",
        "allocated": 1,
        "reserved": reserved,
        "peak": 300,
        "used": 7,
        "utilization": load,
    }


def stage(name: str, t: float, tokens: int, busy: float, wait: float) -> dict:
    return {"kind": "stage", "t": t, "name": name, "tokens": tokens, "busy_seconds": busy, "wait_seconds": wait}


def test_numbers_come_from_after_the_warmup(tool, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        lines(
            {"kind": "run_start", "t": 10.0},
            {"kind": "log", "t": 11.0, "message": "random:x: captured layers 1, 2"},
            device(12, 50, 0),
            step(1, 20, 9.0),
            step(2, 21, 1.0),
            stage("target[0]", 20.5, 9999, 9.0, 9.0),
            device(21.5, 200, 40),
            stage("target[0]", 23, 100, 1.0, 0.0),
            stage("target[1]", 23, 300, 2.0, 1.0),
            stage("drafter[0]", 23, 400, 1.0, 3.0),
            step(3, 23, 2.0),
            device(24, 203, 60),
            step(4, 27, 3.0, skipped=True),
            device(30, 999, 0),
            {"kind": "fault", "t": 31, "worker": "target[1]"},
            {"kind": "run_end", "t": 32, "status": "failed"},
        )
    )
    found = tool.measure(tmp_path, warm=2)
    assert (found["steps"], found["skipped"], found["faults"], found["status"]) == (2, 1, 1, "failed")
    assert found["tokens_per_second"] == pytest.approx(200 / 5) and found["step_seconds"] == 2.5
    assert found["startup_seconds"] == 10 and found["losses"] == [4.0, 1.0] and found["target"].startswith("random:x")
    assert found["sides"]["target"] == {"workers": 2, "tokens_per_second": 250.0, "one": 125.0, "busy": 0.75}
    assert found["sides"]["drafter"] == {"workers": 1, "tokens_per_second": 400.0, "one": 400.0, "busy": 0.25}
    memory = found["devices"]["cuda:0"]
    assert memory["moved"] == pytest.approx(0.015) and memory["utilization"] == 50 and memory["judged"]
    assert memory["course"] == [[0.5, 200], [3.0, 203]] or memory["course"] == [(0.5, 200), (3.0, 203)]


def test_a_run_without_a_step_is_no_success(tool, tmp_path):
    found = tool.measure(tmp_path, warm=2)
    assert found["steps"] == 0 and found["tokens_per_second"] is None and found["status"] == "no end on record"


def test_machine_paths_leave_the_notebook(tool, tmp_path):
    notebook = tmp_path / "n.ipynb"
    notebook.write_text(
        json.dumps(
            [
                f"{ROOT}/dflash/x.py",
                f"{tmp_path}/runs/r",
                f"{sys.prefix}/bin",
                "/home/someone/data.bin",
                "see https://a.example/tmp/x",
                "1/2",
                {"image/png": "/tmp/abc"},
            ]
        )
    )
    found = tool.tidy(notebook, tmp_path)
    assert json.loads(notebook.read_text()) == [
        "./dflash/x.py",
        "out/runs/r",
        "(environment)/bin",
        "(elsewhere)/data.bin",
        "see https://a.example/tmp/x",
        "1/2",
        {"image/png": "/tmp/abc"},
    ]
    assert found["paths"] == ["/home/someone/data.bin"] and found["bytes"] == notebook.stat().st_size


def test_notebooks_print_no_place_of_the_interpreter():
    from dflash.diagnose.tables import environment_line
    from dflash.runs.environment import interpreter

    assert interpreter().startswith("python 3.") and "/" not in interpreter() and "/" not in environment_line()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert "sys.executable" not in notebook.read_text(), notebook.name


def test_the_storys_sizes(tool):
    args = argparse.Namespace(tiny=False, gpus="5,6,7", labels="soft", steps=100, warm=10, set=[["queue_depth", "3"]])
    given = tool.parameters(args, "threads")
    assert given["target"] == "random:qwen3.6-27b" and given["steps"] == 110 and given["gpus"] == "5,6,7"
    assert given["queue_depth"] == "3" and given["launcher"] == "threads"
    assert [
        given[name] for name in ("pack_length", "max_anchors", "block_size", "num_captured", "drafter_layers", "gamma")
    ] == [40000, 1024, 32, 5, 5, 10.0]


def test_scaling_and_table(tool, tmp_path):
    one, many = (
        {"launcher": "threads", "tokens_per_second": speed, "sides": {"target": {"workers": t}, "drafter": {"workers": d}}}
        for speed, t, d in ((10.0, 1, 1), (45.0, 5, 3))
    )
    assert tool.scaling([one], [many]) == "threads: 5 + 3 is 4.50 times 1 + 1"


def test_five_targets_and_three_drafters_by_papermill(tmp_path):
    done, [story] = tell(tmp_path, "--launchers", "threads", "--steps", "4", "--seconds", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert story["ok"] and story["engine"] == "papermill" and story["enough_steps"] and story["steps"] == 4
    assert [story["sides"][side]["workers"] for side in ("target", "drafter")] == [5, 3]
    config = yaml.safe_load((tmp_path / "runs" / "story-threads" / "config.yaml").read_text())
    assert config["target"]["target"] == "random:tiny-hybrid" and config["train"]["features"] == "online"
    text = (tmp_path / "story-threads.ipynb").read_text()
    assert "a random target has nothing to decode" in text and "say nothing of quality" in text and len(text) < 1e6
    assert "image/png" in text and str(tmp_path) not in text and sys.prefix not in text
    assert "threads: ok, completed" in done.stdout and "5 x" in done.stdout


@pytest.mark.slow
def test_threads_and_torchrun_tell_the_same_story(tmp_path):
    done, stories = tell(
        tmp_path,
        "--steps",
        "4",
        "--seconds",
        "270",
        "--engine",
        "run_notebook",
        "--labels",
        "hard",
        "--set",
        "dtype",
        "float32",
        "--set",
        "target_dtype",
        "float32",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [story["launcher"] for story in stories] == ["threads", "torchrun"] and all(story["ok"] for story in stories)
    assert stories[1]["losses"] == pytest.approx(stories[0]["losses"], abs=1e-5) and stories[0]["losses"][0] > 5
    assert [stories[1]["sides"][side]["workers"] for side in ("target", "drafter")] == [5, 3]
    assert "image/png" in (tmp_path / "story-threads.ipynb").read_text()


def test_a_run_that_would_take_too_long_is_stopped_in_good_order(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "LEAVING", 190.0)  # asked to stop after ten seconds, or at its first step
    args = argparse.Namespace(tiny=True, gpus="", labels="soft", steps=100_000, warm=0, set=[])
    story = tool.tell("threads", "run_notebook", tool.parameters(args, "threads"), 200.0, args, tmp_path)
    assert story["status"] == "interrupted" and story["exit_code"] == 0 and story["wall_seconds"] < 150
    assert story["ok"] and not story["enough_steps"] and 0 < story["steps"] < 100_000
    assert "the time held no more" in tool.table(story)
