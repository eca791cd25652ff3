"""tools/story.py: what it reads from a record, and the story's topology, five targets and three drafters, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE

from dflash.train.settings import RunConfig

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "story.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("story", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tell(tmp_path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    import os

    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--warm", "2", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OUT": str(tmp_path)},
        timeout=PATIENCE,
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
    assert found["startup_seconds"] == 10 and found["losses"] == [4.0, 1.0]
    assert found["sides"]["target"] == {"workers": 2, "tokens_per_second": 250.0, "busy": 0.75}
    assert found["sides"]["drafter"] == {"workers": 1, "tokens_per_second": 400.0, "busy": 0.25}
    memory = found["devices"]["cuda:0"]
    assert memory["moved"] == pytest.approx(0.015) and memory["utilization"] == 50 and memory["judged"]
    assert memory["bytes"] == 203


def test_a_run_without_a_step_is_no_success(tool, tmp_path):
    found = tool.measure(tmp_path, warm=2)
    assert found["steps"] == 0 and found["tokens_per_second"] is None and found["status"] == "no end on record"


def test_notebooks_print_no_place_of_the_interpreter():
    from dflash.diagnose.tables import environment_line

    assert environment_line().startswith("torch ") and "/" not in environment_line()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert "sys.executable" not in notebook.read_text(), notebook.name


def test_the_storys_sizes(tool):
    config = RunConfig.from_parameters(**tool.STORY, gpus="5,6,7")
    assert config.target.target == "random:qwen3.6-27b" and config.drafter.drafter_layers == 5
    assert (config.data.pack_length, config.drafter.max_anchors, config.drafter.block_size) == (40000, 1024, 32)
    assert (config.target.num_captured, config.train.gamma, config.train.features) == (5, 10.0, "online")


@pytest.mark.slow
def test_five_targets_and_three_drafters_tell_the_same_story_by_threads_and_torchrun(tmp_path):
    exact = ("-p", "soft_labels", "false", "-p", "dtype", "float32", "-p", "target_dtype", "float32")
    done, stories = tell(tmp_path, "--steps", "4", "--seconds", str(PATIENCE), *exact)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [story["parameters"]["launcher"] for story in stories] == ["threads", "torchrun"]
    for story in stories:
        assert story["ok"] and story["steps"] == story["wanted_steps"] == 4
        assert [story["sides"][side]["workers"] for side in ("target", "drafter")] == [5, 3]
    assert stories[1]["losses"] == pytest.approx(stories[0]["losses"], abs=1e-5) and stories[0]["losses"][0] > 5
    config = yaml.safe_load((tmp_path / "runs" / "story-threads" / "config.yaml").read_text())
    assert config["target"]["target"] == "random:tiny-hybrid" and config["train"]["features"] == "online"
    text = (tmp_path / "story-threads.ipynb").read_text()
    assert "a random target has nothing to decode" in text and "say nothing of quality" in text and len(text) < 1e6
    assert "image/png" in text and "threads: ok, completed" in done.stdout and "5 targets: " in done.stdout


@pytest.mark.slow
def test_a_run_that_would_take_too_long_is_stopped_in_good_order(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "LEAVING", PATIENCE)  # asked to stop at its first step
    given = tool.STORY | tool.TINY | dict(launcher="threads", steps=100_000)
    story = tool.tell(given, PATIENCE, 0, tmp_path)
    assert (story["status"], story["exit_code"], story["ok"]) == ("interrupted", 0, True)
    assert 0 < story["steps"] < 100_000 and "the time held no more" in tool.table(story)
