"""Shared by the survival tests: tiny checkpoints, the processes of a run, and a tiny run that is killed again and again in
forked processes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from runner_jobs import first_replica, options, serial_engine
from tiny_models import random_drafter, tiny_target

from dflash.runs.control import RunControl
from dflash.runs.record import Run, read_metrics
from dflash.train.checkpoint import checkpoints, save_checkpoint
from dflash.train.loop import Trainer
from dflash.train.resume import load_training, save_training
from dflash.train.settings import RunConfig

STEPS = 60


def save(root, step, state=None, **keywords):
    """A checkpoint of a tiny random drafter; its folder."""
    return save_checkpoint(root, step, random_drafter(tiny_target()), "tiny", state or {"optimizer": {}}, **keywords)


def processes_of(config: Path) -> list[int]:
    """Processes that train this config."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(config).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def train_here(root: Path, run_id: str, before_save=lambda step: None) -> None:
    """Train `root`/`run_id` to the end with a checkpoint a step, from its newest one where there is any."""
    settings = options(steps=STEPS, packs_per_step=1, checkpoint_every=1)
    target, replica = first_replica(settings)
    fresh = not (root / run_id).exists()
    run = Run.create(root, {}, run_id) if fresh else Run.open(root / run_id)
    engine, config = (
        serial_engine(target, replica, settings),
        replace(RunConfig.from_parameters(recipe="cpu"), train=settings),
    )
    state = load_training(run) if checkpoints(run.path) else None
    if state is not None:
        engine.load_optimizer(state["optimizer"])

    def save(step):
        before_save(step)
        return save_training(run, config, engine, trainer, step)

    trainer = Trainer(engine, settings, run, RunControl(run.path, run.metrics), evaluate=None, save=save)
    if state is not None:
        trainer.load_state_dict(state["trainer"])
    trainer.train(1 if state is None else state["step"] + 1)
    run.end("completed")


def kill_in_saves(root: Path, times: int, seed: int = 0) -> dict[str, object]:
    """SIGKILL a run at `times` random moments of its saves; what is there after each, and after the last went through."""
    draw, seen = random.Random(seed), {"killed": 0, "inside": 0, "backwards": 0, "lost": 0, "twice": 0}
    took = _time_of_a_save(root)
    newest = 0
    while seen["killed"] < times or (seen["inside"] < times // 4 and seen["killed"] < 4 * times):
        at, delay = newest + draw.randint(1, 2), draw.uniform(0, took)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            train_here(root, "killed", lambda step, at=at, tell=tell: os.write(tell, b".") if step == at else None)
            os._exit(0)
        os.close(tell)
        os.read(told, 1)  # the save has begun
        os.close(told)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        seen["killed"] += os.WIFSIGNALED(status)
        folder = root / "killed" / "checkpoints"
        seen["inside"] += any(p.name.startswith(".") for p in folder.glob(".*")) if folder.exists() else 0
        complete = checkpoints(root / "killed")
        now = complete[-1][0] if complete else 0
        seen["backwards"] += now < newest
        steps = [r["step"] for r in read_metrics(root / "killed")[0] if r["kind"] == "step"]
        seen["lost"] += len(set(range(1, now + 1)) - set(steps))
        seen["twice"] += len(steps) - len(set(steps))
        newest = now
    train_here(root, "killed")
    return seen


def _time_of_a_save(root: Path) -> float:
    target, replica = first_replica(options())
    state = {"optimizer": replica.optimizer.state_dict()}
    save_checkpoint(root / "timing", 1, replica.drafter, "tiny", state)
    seconds = []
    for step in (2, 3, 4):
        began = time.perf_counter()
        save_checkpoint(root / "timing", step, replica.drafter, "tiny", state)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train_here(folder, "whole")
    print(json.dumps(kill_in_saves(folder, int(sys.argv[2]))))
