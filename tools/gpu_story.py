"""The training notebook at the field story's sizes: in threads, then under torchrun, and what came of it as one table.

    python tools/gpu_story.py --gpus 5,6,7 --steps 100 --seconds 560       targets on all other GPUs
    python tools/gpu_story.py --gpus 1 --seconds 560                       the rehearsal on two GPUs
    python tools/gpu_story.py --gpus 5,6,7 --launchers torchrun --before out/story.json     one launcher; scaling
    python tools/gpu_story.py --tiny                                       five targets and three drafters on the CPU

`papermill notebooks/05_train.ipynb` (tools/run_notebook.py where papermill is not installed) with a target of random
weights of the Qwen3.6-27B shape and the full-size drafter: packs of 40,000 tokens, 1024 anchors x 32, gamma 10, five
captured layers. A launcher whose steps would take too long is asked to stop after the step at hand, so that the notebook
ends in good order and the table says how many steps the time held. All numbers are read from the runs' metrics.jsonl. $OUT
(default ./out) gets story.json, the executed notebooks and the runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NOTEBOOK = Path("notebooks/05_train.ipynb")
STORY = dict(
    target="random:qwen3.6-27b",
    data="random:24",
    pack_length=40000,
    num_captured=5,
    drafter_layers=5,
    block_size=32,
    max_anchors=1024,
    gamma=10.0,
    draft_vocab="",
    warm_start=False,
    lr=1e-4,
    eval_every=0,
    checkpoint_every=0,
    features="online",
    max_minutes="",
)
TINY = STORY | dict(
    target="random:tiny-hybrid",
    data="random:6",
    pack_length=96,
    drafter_layers=2,
    block_size=4,
    max_anchors=8,
    gpus="cpu:3",
    target_gpus="cpu:5",
)
STARTUP = 60.0  # seconds that a launcher needs at least before its first step
LEAVING = 30.0  # seconds that a run may take to end after its last step
FIRST_SHARE = 0.6  # of the time, for the first of two launchers
TOLERANCE = 0.02  # memory of a device may move by this after warmup
_PATHS = re.compile(r"(?<![\w.:/<>])/(?:home|root|tmp|usr|opt|mnt|srv|var|work\w*|Users)/[\w./-]*")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="5,6,7", help="GPUs that draft; the target runs on all others")
    parser.add_argument("--steps", type=int, default=100, help="steps after warmup")
    parser.add_argument("--warm", type=int, default=10, help="first steps that are not measured")
    parser.add_argument("--seconds", type=float, default=560.0, help="for everything together")
    parser.add_argument("--launchers", default="threads,torchrun")
    parser.add_argument("--labels", choices=("soft", "hard"), default="soft")
    parser.add_argument("--engine", choices=("papermill", "run_notebook"), help="default: papermill where it is installed")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="any other setting")
    parser.add_argument("--before", type=Path, help="a story.json to compare with")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in half a minute")
    args = parser.parse_args()
    out = Path(os.environ.get("OUT", "out")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    engine = args.engine or (
        "papermill" if all(map(importlib.util.find_spec, ("papermill", "ipykernel"))) else "run_notebook"
    )
    names, end, stories = args.launchers.split(","), time.monotonic() + args.seconds, []
    for number, launcher in enumerate(names):
        left = end - time.monotonic()
        limit = left * FIRST_SHARE if number < len(names) - 1 else left
        if limit < (20 if args.tiny else STARTUP + LEAVING):
            print(f"{launcher}: {left:.0f} s are left, too few to start", flush=True)
            continue
        story = tell(launcher, engine, parameters(args, launcher), limit, args, out)
        stories.append(story)
        (out / "story.json").write_text(json.dumps(stories, indent=1))
    print("\n".join(table(story) for story in stories))
    if args.before:
        print(scaling(json.loads(args.before.read_text()), stories))
    return 0 if len(stories) == len(names) and all(story["ok"] for story in stories) else 1


def parameters(args: argparse.Namespace, launcher: str) -> dict[str, Any]:
    """The notebook's parameters."""
    chosen = TINY if args.tiny else STORY | dict(gpus=args.gpus)
    return chosen | dict(
        launcher=launcher, soft_labels=args.labels == "soft", steps=args.warm + args.steps, **dict(args.set)
    )


def tell(
    launcher: str, engine: str, given: dict[str, Any], limit: float, args: argparse.Namespace, out: Path
) -> dict[str, Any]:
    """Execute the notebook once and measure its run."""
    run_id = f"story-{launcher}"
    folder, notebook = out / "runs" / run_id, out / f"{run_id}.ipynb"
    shutil.rmtree(folder, ignore_errors=True)
    notebook.unlink(missing_ok=True)
    where = dict(run_id=run_id, runs_dir=os.path.relpath(out / "runs", ROOT))
    code, seconds = execute(engine, given | where, os.path.relpath(notebook, ROOT), folder, limit, out / f"{run_id}.log")
    story = {
        "launcher": launcher,
        "engine": engine,
        "parameters": given,
        "exit_code": code,
        "wall_seconds": round(seconds, 1),
        "wanted_steps": args.steps,
        **measure(folder, args.warm),
        "notebook": tidy(notebook, out),
    }
    flat = [d["moved"] for d in story["devices"].values() if d["judged"]]
    story["memory_moved"] = max(flat, default=None)
    story["enough_steps"] = story["steps"] >= args.steps
    story["ok"] = (
        code == 0
        and story["faults"] == 0
        and story["skipped"] == 0
        and story["steps"] > 0
        and max(flat, default=0.0) <= TOLERANCE
    )
    return story


def execute(engine: str, given: dict[str, Any], notebook: str, folder: Path, limit: float, log: Path) -> tuple[int, float]:
    """Run the notebook in a process of its own; near the limit the run is asked to stop, past it the process is ended."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "--autosave-cell-every", "10"]
    command = command if engine == "papermill" else [sys.executable, "tools/run_notebook.py"]
    command += [str(NOTEBOOK), notebook, *(word for name, value in given.items() for word in ("-p", name, str(value)))]
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }  # no NVLink multicast: a share of a machine may not have it
    began = said = time.monotonic()
    print(f"{given['launcher']}: at most {limit:.0f} s", flush=True)
    with open(log, "w") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            stopped = False
            while child.poll() is None and time.monotonic() - began < limit:
                time.sleep(0.3)
                if not stopped and time.monotonic() - began > limit - LEAVING:
                    stopped = ask_to_stop(folder)
                if time.monotonic() - said > 20:
                    said = time.monotonic()
                    print(f"  {said - began:4.0f} s  {news(folder)}", flush=True)
        finally:
            end_group(child)
    if child.returncode:
        print(*log.read_text(errors="replace").splitlines()[-40:], sep="\n", flush=True)
    return child.returncode, time.monotonic() - began


def ask_to_stop(folder: Path) -> bool:
    """Have the run end after its current step; False where it has not come that far."""
    from dflash.runs.control import RunControl

    stepping = any(r["kind"] == "step" for r in read(folder))
    if stepping:
        RunControl(folder).stop()
    return stepping


def end_group(child: subprocess.Popen) -> None:
    """End what this tool started, should it still be there; it leads a process group of its own."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        if child.poll() is None:
            os.killpg(child.pid, number)
            try:
                child.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def news(folder: Path) -> str:
    """Where a run stands."""
    records = read(folder)
    steps = [r for r in records if r["kind"] == "step"]
    if steps:
        return f"step {steps[-1]['step']}, {steps[-1]['tokens_per_second']:,.0f} tokens/s, loss {steps[-1]['loss']}"
    logs = [r["message"] for r in records if r["kind"] == "log"]
    return logs[-1][:120] if logs else "starting"


def read(folder: Path) -> list[dict[str, Any]]:
    from dflash.runs.record import read_metrics

    return read_metrics(folder)[0]


# -- what a run's record says --------------------------------------------------------------------------------------------


def measure(folder: Path, warm: int) -> dict[str, Any]:
    """Speed, memory, utilisation and faults after the first `warm` steps of a run, from its record alone."""
    records = read(folder)
    steps = [r for r in records if r["kind"] == "step"]
    after = [r for r in steps if r["step"] > warm]
    begin = next((r["t"] for r in steps if r["step"] == warm), steps[0]["t"] if steps else 0.0)
    end = steps[-1]["t"] if steps else 0.0
    seconds, starts = sum(r["step_seconds"] for r in after), [r["t"] for r in records if r["kind"] == "run_start"]
    ends = [r for r in records if r["kind"] == "run_end"]
    logs = [r["message"] for r in records if r["kind"] == "log"]
    return {
        "status": ends[-1]["status"] if ends else "no end on record",
        "steps": len(after),
        "skipped": sum(bool(r["skipped"]) for r in steps),
        "faults": sum(r["kind"] == "fault" for r in records),
        "tokens_per_second": sum(r["tokens"] for r in after) / seconds if seconds else None,
        "step_seconds": statistics.median(r["step_seconds"] for r in after) if after else None,
        "losses": [steps[0]["loss"], steps[-1]["loss"]] if steps else [],
        "startup_seconds": round(steps[0]["t"] - starts[0], 1) if steps and starts else None,
        "target": next((line for line in logs if "captured layers" in line), None),
        "sides": {side: stage_rates(records, side, begin) for side in ("target", "drafter")},
        "devices": {
            name: memory_of(records, name, begin, end)
            for name in sorted({r["device"] for r in records if r["kind"] == "device"})
        },
    }


def stage_rates(records: list[dict], side: str, begin: float) -> dict[str, Any]:
    """Tokens per second of a side's workers while they were busy, added up, and the share of time they were busy."""
    workers: dict[str, list[float]] = {}
    for r in records:
        if r["kind"] == "stage" and r["name"].startswith(side) and r["t"] > begin:
            sums = workers.setdefault(r["name"], [0.0, 0.0, 0.0])
            for i, name in enumerate(("tokens", "busy_seconds", "wait_seconds")):
                sums[i] += r[name] or 0.0
    rates = [tokens / busy for tokens, busy, _ in workers.values() if busy > 0]
    busy, wait = (sum(s[i] for s in workers.values()) for i in (1, 2))
    return {
        "workers": len(workers),
        "tokens_per_second": sum(rates) if rates else None,
        "one": sum(rates) / len(rates) if rates else None,
        "busy": busy / (busy + wait) if busy + wait else None,
    }


def memory_of(records: list[dict], name: str, begin: float, end: float) -> dict[str, Any]:
    """A device's memory from `begin` to `end`: how far it moved, relative to its least, and some of its course.

    On a GPU it is what the allocator holds; a process on the CPU has no such bound and is not judged.
    """
    here = [r for r in records if r["kind"] == "device" and r["device"] == name and begin <= r["t"] <= end]
    kind = "reserved" if any(r["reserved"] for r in here) else "used"
    course = [(round(r["t"] - begin, 1), r[kind]) for r in here if r[kind]]
    values = [value for _, value in course]
    load = [r["utilization"] for r in here if r["utilization"] is not None]
    every = max(1, len(course) // 40)
    return {
        "what": kind,
        "samples": len(values),
        "bytes": max(values, default=None),
        "peak": max((r["peak"] for r in here if r["peak"]), default=None),
        "moved": max(values) / min(values) - 1 if values else 0.0,
        "judged": kind == "reserved",
        "utilization": statistics.mean(load) if load else None,
        "course": course[::every],
    }


# -- people's part --------------------------------------------------------------------------------------------------------


def table(story: dict[str, Any]) -> str:
    """One run in a few lines."""

    def number(value: float | None, form: str = ",.0f") -> str:
        return "-" if value is None else format(value, form)

    few = "" if story["enough_steps"] else f" (of {story['wanted_steps']} wanted: the time held no more)"
    lines = [
        f"\n{story['launcher']}: {'ok' if story['ok'] else 'NOT OK'}, {story['status']}, exit {story['exit_code']}, "
        f"{story['steps']} steps after warmup{few}, {story['skipped']} skipped, {story['faults']} faults; "
        f"{story['wall_seconds']:.0f} s, first step after {number(story['startup_seconds'])} s",
        f"target: {story['target']}",
        f"pipeline {number(story['tokens_per_second'])} tokens/s, a step {number(story['step_seconds'], '.2f')} s, "
        f"loss {' -> '.join(number(loss, '.3f') for loss in story['losses'])}",
    ]
    for side, r in story["sides"].items():
        lines.append(
            f"{side + 's':9} {r['workers']} x {number(r['one'])} = {number(r['tokens_per_second'])} tokens/s, "
            f"busy {number(r['busy'], '.0%')}"
        )
    lines.append(f"{'device':8} {'GiB':>7} {'peak':>7} {'moved':>7} {'utilisation':>11}  samples")
    for name, d in story["devices"].items():
        gib = [number(v and v / 2**30, ".1f") for v in (d["bytes"], d["peak"])]
        bad = "  more than 2%" if d["judged"] and d["moved"] > TOLERANCE else "" if d["judged"] else "  not judged"
        lines.append(
            f"{name:8} {gib[0]:>7} {gib[1]:>7} {d['moved']:>7.2%} {number(d['utilization'], '.0f'):>10}%  "
            f"{d['samples']:>7}{bad}"
        )
    note = story["notebook"]
    lines.append(
        f"notebook {note['file']}: {number(note['bytes'] and note['bytes'] / 1e3)} kB"
        + (f", paths taken out: {note['paths']}" if note["paths"] else "")
    )
    return "\n".join(lines)


def scaling(before: list[dict], now: list[dict]) -> str:
    """Pipeline speed against an earlier run, launcher by launcher."""
    old = {story["launcher"]: story for story in before}
    lines = []
    for story in now:
        base = old.get(story["launcher"], {})
        if base.get("tokens_per_second") and story["tokens_per_second"]:
            split = ["{0[target][workers]} + {0[drafter][workers]}".format(s["sides"]) for s in (base, story)]
            lines.append(
                f"{story['launcher']}: {split[1]} is {story['tokens_per_second'] / base['tokens_per_second']:.2f} "
                f"times {split[0]}"
            )
    return "\n".join(lines)


def tidy(notebook: Path, out: Path) -> dict[str, Any]:
    """Take this machine's paths out of an executed notebook, and say how large it is and which were of no known place."""
    if not notebook.exists():
        return {"file": notebook.name, "bytes": None, "paths": []}
    places = {str(out): "out", str(ROOT): ".", sys.prefix: "(environment)", sys.base_prefix: "(python)"}
    ordered, unknown = sorted(places, key=len, reverse=True), set()

    def cleaned(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: cleaned(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [cleaned(item, key) for item in value]
        if not isinstance(value, str) or key in ("image/png", "bdata"):  # base64
            return value
        for place in ordered:
            value = re.sub(re.escape(place) + r"(?![\w-])", places[place], value)
        unknown.update(_PATHS.findall(value))
        return _PATHS.sub(lambda found: "(elsewhere)/" + found[0].rsplit("/", 1)[-1], value)

    text = json.dumps(cleaned(json.loads(notebook.read_text())), indent=1)
    notebook.write_text(text)
    return {"file": notebook.name, "bytes": len(text.encode()), "paths": sorted(unknown)[:5]}


if __name__ == "__main__":
    sys.exit(main())
