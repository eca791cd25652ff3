"""A made-up run, written through the real writer, for tests of everything that reads `metrics.jsonl`."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

from dflash.runs.record import Run


def write_run(
    root: Path,
    run_id: str = "synthetic",
    steps: int = 200,
    devices: int = 2,
    slots: int = 7,
    end: str = "completed",
    fault: bool = False,
    seed: int = 0,
    config: dict | None = None,
) -> Path:
    """A run folder with every kind of record; about one record set a step, `steps` seconds long."""
    rng = random.Random(seed)
    settings = {"steps": steps, "block_size": slots + 1, "gpus": list(range(devices)), "seed": seed, **(config or {})}
    run = Run.create(root, settings, run_id)
    write_records(run, rng, steps, devices, slots)
    if fault:
        try:
            raise RuntimeError("drafter[1]: a made-up failure for this test")
        except RuntimeError as error:
            run.fault(error, worker="drafter[1]", step=steps)
        (run.path / "stacks.txt").write_text('Thread 0x1 (most recent call first):\n  File "x.py", line 1 in f\n')
    run.end(end, step=steps, acceptance_length=1.6, seconds=float(steps), message="made up" if fault else None)
    return run.path


def write_records(run: Run, rng: random.Random, steps: int, devices: int, slots: int) -> None:
    start = time.time()
    run.metrics.write("warmup", t=start, device="cuda:0", seconds=21.5, graphs=2, peak=9 << 30)
    low = [1.0, 1.5]
    run.metrics.write("expected", t=start, steps=[0, steps], low=low, high=[1.15, 1.75], measured="a made-up machine")
    for step in range(1, steps + 1):
        write_step(run, rng, step, steps, devices, slots, start + step)
    run.metrics.write("checkpoint", t=start + steps, step=steps, path="checkpoints/last", seconds=0.4)


def write_step(run: Run, rng: random.Random, step: int, steps: int, devices: int, slots: int, t: float) -> None:
    """All records of one step at time `t`."""
    write, done, skipped = run.metrics.write, step / steps, step % 50 == 49
    accuracy = [max(0.0, (0.1 + 0.5 * done) * 0.8**k + rng.gauss(0, 0.02)) for k in range(slots)]
    write(
        "step",
        t=t,
        step=step,
        epoch=0,
        pack_ids=[step],
        accuracy=accuracy,
        tokens=2048,
        supervised_slots=640,
        loss=7.5 * math.exp(-2 * done) + 1.5 + rng.gauss(0, 0.25),
        lr=2e-3 * (1 - done),
        step_seconds=1.0,
        acceptance_length=1.05 + 0.6 * done + rng.gauss(0, 0.06),
        grad_norm=1.0 + rng.random(),
        tokens_per_second=2000 + 100 * rng.random(),
        skipped=skipped,
        reason="no supervised slot" if skipped else None,
    )
    for index in range(devices):
        if step == 2:
            held = {"target": 38 << 30, "drafter": 8 << 30, "optimizer": 7 << 30, "features in flight": 1 << 30}
            parts = {"target": 38 << 30, "drafter": 8 << 30, "optimizer": 7 << 30, "queue": 1 << 30, "activations": 6 << 30}
            write("memory", t=t, device=f"cuda:{index}", estimate=parts)
            write("memory", t=t, device=f"cuda:{index}", step=2, parts=held)
        write(
            "device",
            t=t,
            device=f"cuda:{index}",
            allocated=(40 + index) << 30,
            reserved=(50 + index) << 30,
            peak=(60 + index) << 30,
            used=int((55 + 3 * index + rng.random()) * 2**30),
            total=141 << 30,
            utilization=80 + 15 * rng.random(),
        )
    for name, rate in (("target[0]", 4300), ("drafter[1]", 21500)):
        write(
            "stage",
            t=t,
            name=name,
            tokens=2048,
            busy_seconds=0.8 if "target" in name else 0.3,
            wait_seconds=0.1 if "target" in name else 0.6,
            queue_depth=rng.randint(0, 2),
            tokens_per_second=rate * (1 + 0.05 * rng.gauss(0, 1)),
            phases={"wait": 0.6 * step, "capture" if "target" in name else "forward+backward": 0.3 * step},
        )
    lanes = {"target[0]": ("capture", "wait"), "drafter[1]": ("wait", "forward", "backward")}
    for worker, names in lanes.items():
        for place, name in enumerate(names):
            part = 1 / len(names)
            span = {"start": t + place * part, "seconds": 0.9 * part, "step": step}
            write("span", t=t, worker=worker, name=name, **span)
    if step % max(1, steps // 10) == 0:
        write(
            "eval",
            t=t,
            step=step,
            acceptance_length=1.02 + 0.6 * done,
            loss=7.3 * math.exp(-2 * done) + 1.7,
            acceptance_by_slot=[(0.1 + 0.5 * done) * 0.7**k for k in range(slots)],
            blocks=512,
            seconds=1.5,
            sample={
                "prompt": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n",
                "chunks": [
                    {"text": "Air ", "tokens": 1, "accepted": 0},
                    {"text": "scatters blue light ", "tokens": 3, "accepted": 2},
                    {"text": "more.", "tokens": 2, "accepted": 1},
                ],
                "acceptance_length": 2.5,
            },
        )
        write("log", t=t, worker="drafter[1]", level="INFO", message=f"evaluated at step {step}")
