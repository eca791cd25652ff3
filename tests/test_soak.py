"""`make soak`: a long run of a tiny model on the CPU with a fault every hundred steps, compared with an unbroken one.

Kills end the worker, and another one is started. All other faults happen in one process, whose memory, open files and
threads must stay where they were. At the end the weights must be those of the unbroken run bit for bit, and every step
must be on record once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_tokenizer import chat_tokenizer, save_material
from safetensors.torch import load_file
from soak_worker import fault_plan
from survival_lab import processes_of
from tiny_models import tiny_target

from dflash.runs.record import read_metrics
from dflash.train.checkpoint import best_checkpoint, checkpoint_facts, latest_checkpoint

STEPS, EVERY = 2000, 100


def make_material(folder: Path) -> None:
    """A random target, conversations, and the settings of the run."""
    tokenizer = chat_tokenizer()
    save_material(folder, tiny_target(vocab_size=len(tokenizer)).model, tokenizer)
    settings = dict(
        target=str(folder / "target"),
        data=str(folder / "data.jsonl"),
        pack_length=96,
        held_out=4,
        num_captured=2,
        drafter_layers=1,
        block_size=4,
        max_anchors=16,
        steps=STEPS,
        packs_per_step=2,
        dtype="float32",
        target_dtype="float32",
        lr=1e-3,
        features="online",
        soft_labels=True,
        gpus="cpu:2",
        target_gpus="cpu:2",
        checkpoint_every=EVERY // 5,
        eval_every=2 * EVERY // 5,
        watchdog_seconds=2.0,
    )
    (folder / "settings.json").write_text(json.dumps(settings))


def run_worker(folder: Path, name: str) -> int:
    """Start workers until one ends by itself. Returns how many were killed."""
    killed = 0
    while True:
        with open(folder / "worker.log", "ab") as log:
            code = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("soak_worker.py")), str(folder), str(STEPS), str(EVERY), name],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            ).returncode
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, (folder / "worker.log").read_text()[-3000:]
        killed += 1


def steps_of(run: Path) -> list[dict]:
    return [r for r in read_metrics(run)[0] if r["kind"] == "step"]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_2000_steps_with_a_fault_every_hundred_are_those_of_an_unbroken_run(tmp_path):
    make_material(tmp_path)
    run_worker(tmp_path, "whole")
    killed = run_worker(tmp_path, "soak")
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/soak"
    plan = fault_plan(STEPS, EVERY)
    fired = dict(line.strip().split(" ", 1) for line in (tmp_path / "faults.txt").open())
    assert {int(at): kind for at, kind in fired.items()} == plan and killed == sum("kill" in kind for kind in plan.values())
    assert [(r["step"], r["loss"]) for r in steps_of(run)] == [(r["step"], r["loss"]) for r in steps_of(whole)]
    assert steps_of(run)[-1]["step"] == STEPS
    mine, theirs = (load_file(latest_checkpoint(r) / "drafter.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)
    records = read_metrics(run)[0]
    lengths = {r["step"]: r["acceptance_length"] for r in records if r["kind"] == "eval"}
    saved = [r["step"] for r in records if r["kind"] == "checkpoint" and r["step"] in lengths]
    assert checkpoint_facts(best_checkpoint(run))["acceptance_length"] == max(lengths[s] for s in saved)

    sessions = [json.loads(line) for line in (tmp_path / "sessions-soak.jsonl").open()]
    last = [s for s in sessions if s["pid"] == sessions[-1]["pid"]]
    settled = last[min(2, len(last) - 1)]  # pools and caches are filled
    assert abs(last[-1]["memory"] / settled["memory"] - 1) <= 0.02, (settled, last[-1])
    assert last[-1]["files"] <= settled["files"] and last[-1]["threads"] <= settled["threads"], (settled, last[-1])
    assert not processes_of(tmp_path), "orphans"
    print(f"{len(plan)} faults, {killed} workers killed, {len(sessions)} sessions, {len(last)} of them in one process")
