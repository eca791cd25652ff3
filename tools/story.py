"""The training notebook at the field story's sizes, in threads and under torchrun, and what came of it as one table.

    python tools/story.py --gpus 5,6,7 --steps 100 --seconds 560     the target on all other GPUs
    python tools/story.py --gpus 1 --launchers threads               the rehearsal on two GPUs
    python tools/story.py --tiny                                     five targets and three drafters on the CPU

`notebooks/05_train.ipynb` with a target of random weights of the Qwen3.6-27B shape and the full-size drafter: packs of
40,000 tokens, 1024 anchors x 32, gamma 10, five captured layers. Near its time limit a run is asked to stop after the
step at hand, so that the notebook ends by itself. All numbers come from the runs' metrics.jsonl. $OUT (default ./out)
gets story.json, the executed notebooks and the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STORY = dict(recipe="story")
TINY = dict(
    target="random:tiny-hybrid",
    data="random:6",
    pack_length=96,
    drafter_layers=2,
    block_size=4,
    max_anchors=8,
    gpus="cpu:3",
    target_gpus="cpu:5",
)
LEAVING = 30.0  # seconds that a run may take to end after its last step
FIRST_SHARE = 0.6  # of the time, for the first of two launchers
TOLERANCE = 0.02  # memory of a device may move by this after warmup


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="5,6,7", help="GPUs that draft; the target runs on all others")
    parser.add_argument("--steps", type=int, default=100, help="steps after warmup")
    parser.add_argument("--warm", type=int, default=10, help="first steps that are not measured")
    parser.add_argument("--seconds", type=float, default=560.0, help="for everything together")
    parser.add_argument("--launchers", default="threads,torchrun")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="any other parameter")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in half a minute")
    args = parser.parse_args()
    out = Path(os.environ.get("OUT", "out")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    names, end, stories = args.launchers.split(","), time.monotonic() + args.seconds, []
    for number, launcher in enumerate(names):
        left = end - time.monotonic()
        given = STORY | (TINY if args.tiny else dict(gpus=args.gpus)) | dict(args.p)
        given |= dict(launcher=launcher, steps=args.warm + args.steps)
        stories.append(tell(given, left * FIRST_SHARE if number < len(names) - 1 else left, args.warm, out))
        (out / "story.json").write_text(json.dumps(stories, indent=1))
    print("\n".join(table(story) for story in stories))
    return 0 if all(story["ok"] for story in stories) else 1


def tell(given: dict[str, Any], limit: float, warm: int, out: Path) -> dict[str, Any]:
    """Execute the notebook once and measure its run."""
    name = f"story-{given['launcher']}"
    folder = out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    given |= dict(run_id=name, runs_dir=str(out / "runs"))
    code, seconds = execute(given, out / f"{name}.ipynb", folder, limit)
    story = {"parameters": given, "exit_code": code, "wall_seconds": round(seconds, 1), **measure(folder, warm)}
    story["wanted_steps"] = given["steps"] - warm
    flat = all(d["moved"] <= TOLERANCE for d in story["devices"].values() if d["judged"])
    story["ok"] = code == story["faults"] == story["skipped"] == 0 < story["steps"] and flat
    return story


def execute(given: dict[str, Any], notebook: Path, folder: Path, limit: float) -> tuple[int, float]:
    """Run the notebook in a process of its own; near the limit the run is asked to stop, past it the process is ended."""
    from dflash.runs.control import RunControl

    command = [sys.executable, "-m", "dflash", "run", "notebooks/05_train.ipynb", str(notebook)]
    command += [word for name, value in given.items() for word in ("-p", name, str(value))]
    # No NVLink multicast: a share of a machine may not have it.
    environment = dict(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="1")
    began, asked = time.monotonic(), False
    print(f"{given['launcher']}: at most {limit:.0f} s", flush=True)
    with open(notebook.with_suffix(".log"), "w") as log:
        child = subprocess.Popen(command, cwd=ROOT, env=environment | os.environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None and time.monotonic() - began < limit:
                time.sleep(0.3)
                if not asked and time.monotonic() - began > limit - LEAVING and steps_of(read(folder)):
                    RunControl(folder).stop()
                    asked = True
        finally:
            child.terminate()  # ends its kernel too; nothing where it has ended
            child.wait()
    if child.returncode:
        print(*notebook.with_suffix(".log").read_text(errors="replace").splitlines()[-40:], sep="\n", flush=True)
    return child.returncode, time.monotonic() - began


def read(folder: Path) -> list[dict[str, Any]]:
    from dflash.runs.record import read_metrics

    return read_metrics(folder)[0]


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == "step"]


def measure(folder: Path, warm: int) -> dict[str, Any]:
    """Speed, memory, utilisation and faults after the first `warm` steps of a run, from its record alone."""
    records = read(folder)
    steps = steps_of(records)
    after = [r for r in steps if r["step"] > warm]
    begin = next((r["t"] for r in steps if r["step"] == warm), steps[0]["t"] if steps else 0.0)
    end, seconds = (steps[-1]["t"] if steps else 0.0), sum(r["step_seconds"] for r in after)
    starts = [r["t"] for r in records if r["kind"] == "run_start"]
    devices = sorted({r["device"] for r in records if r["kind"] == "device"})
    return {
        "status": next((r["status"] for r in reversed(records) if r["kind"] == "run_end"), "no end on record"),
        "steps": len(after),
        "skipped": sum(bool(r["skipped"]) for r in steps),
        "faults": sum(r["kind"] == "fault" for r in records),
        "tokens_per_second": sum(r["tokens"] for r in after) / seconds if seconds else None,
        "step_seconds": statistics.median(r["step_seconds"] for r in after) if after else None,
        "losses": [steps[0]["loss"], steps[-1]["loss"]] if steps else [],
        "startup_seconds": round(steps[0]["t"] - starts[0], 1) if steps and starts else None,
        "sides": {side: stage_rates(records, side, begin) for side in ("target", "drafter")},
        "devices": {name: memory_of(records, name, begin, end) for name in devices},
    }


def stage_rates(records: list[dict], side: str, begin: float) -> dict[str, Any]:
    """Tokens per second of a side's workers while they were busy, added up, and the share of time they were busy."""
    workers: dict[str, list[float]] = {}
    for r in records:
        if r["kind"] == "stage" and r["name"].startswith(side) and r["t"] > begin:
            now = (r["tokens"] or 0.0, r["busy_seconds"] or 0.0, r["wait_seconds"] or 0.0)
            workers[r["name"]] = [a + b for a, b in zip(workers.get(r["name"], (0.0, 0.0, 0.0)), now, strict=True)]
    rates = [tokens / busy for tokens, busy, _ in workers.values() if busy > 0]
    busy, wait = (sum(s[i] for s in workers.values()) for i in (1, 2))
    share = busy / (busy + wait) if busy + wait else None
    return {"workers": len(workers), "tokens_per_second": sum(rates) if rates else None, "busy": share}


def memory_of(records: list[dict], name: str, begin: float, end: float) -> dict[str, Any]:
    """A device's memory from `begin` to `end`, and how far it moved, relative to its least.

    On a GPU it is what the allocator holds; a process on the CPU has no such bound and is not judged.
    """
    here = [r for r in records if r["kind"] == "device" and r["device"] == name and begin <= r["t"] <= end]
    judged = any(r["reserved"] for r in here)
    values = [value for r in here if (value := r["reserved" if judged else "used"])]
    load = [r["utilization"] for r in here if r["utilization"] is not None]
    return {
        "bytes": max(values, default=None),
        "peak": max((r["peak"] for r in here if r["peak"]), default=None),
        "moved": max(values) / min(values) - 1 if values else 0.0,
        "judged": judged,
        "utilization": statistics.mean(load) if load else None,
    }


def table(story: dict[str, Any]) -> str:
    """One run in a few lines."""

    def number(value: float | None, form: str = ",.0f") -> str:
        return "-" if value is None else format(value, form)

    few = "" if story["steps"] >= story["wanted_steps"] else f" (of {story['wanted_steps']}: the time held no more)"
    lines = [
        f"\n{story['parameters']['launcher']}: {'ok' if story['ok'] else 'NOT OK'}, {story['status']}, "
        f"exit {story['exit_code']}, {story['steps']} steps after warmup{few}, {story['skipped']} skipped, "
        f"{story['faults']} faults; {story['wall_seconds']:.0f} s, first step after {number(story['startup_seconds'])} s",
        f"pipeline {number(story['tokens_per_second'])} tokens/s, a step {number(story['step_seconds'], '.2f')} s, "
        f"loss {' -> '.join(number(loss, '.3f') for loss in story['losses'])}",
    ]
    for side, r in story["sides"].items():
        rate, busy = number(r["tokens_per_second"]), number(r["busy"], ".0%")
        lines.append(f"{r['workers']} {side}s: {rate} tokens/s together, busy {busy}")
    for name, d in story["devices"].items():
        now, peak = (number(v and v / 2**30, ".1f") for v in (d["bytes"], d["peak"]))
        judged = "" if d["judged"] else " (not judged)"
        lines.append(f"{name}: {now} GiB, peak {peak}, moved {d['moved']:.2%}{judged}, busy {number(d['utilization'])}%")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
