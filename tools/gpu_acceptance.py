"""Do the faster versions of a step train as well? The same short SmolLM2 run with each of them, held-out acceptance last.

    python tools/gpu_acceptance.py --steps 300 --seeds 0,1           results under $OUT (default ./out)
    python tools/gpu_acceptance.py --tiny                            a dry run on a CPU

Variants: plain (the modules, plain loss), fast (fused kernels), fp8 (fast, with logits through the float8 head), all
with flex attention: SmolLM2's nine heads are none that the Triton attention takes. Runs go side by side, each in a process
of its own with a time limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from gpu_harness import OUT, end_child, start_child

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
VARIANTS = ("plain", "fast", "fp8")
SETTINGS = dict(
    data="data/smollm2_greedy.parquet",
    held_out_data="data/smollm2_conversations.jsonl",
    held_out=64,
    pack_length=4096,
    max_anchors=512,
    block_size=8,
    drafter_layers=4,
    num_captured=5,
    gamma=4.0,
    lr=1e-3,
    warmup_steps=20,
    eval_every=100,
    checkpoint_every=0,
    gpus="0",
    max_conversations=6000,
)
TINY = dict(
    data="data/smollm2_conversations.jsonl",
    held_out_data=None,
    held_out=4,
    max_conversations=24,
    pack_length=256,
    max_anchors=8,
    drafter_layers=1,
    num_captured=2,
    eval_every=2,
    gpus="cpu",
    attention="sdpa_chunked",
    draft_vocab=0,
)


def one(name: str, labels: str, seed: int, steps: int, tiny: bool) -> int:
    """One run, in this process."""
    from dflash.drafter import fast_path
    from dflash.launch.run import train_run
    from dflash.runs.record import Run
    from dflash.train.settings import RunConfig

    settings = SETTINGS | dict(attention="flex") | (TINY if tiny else {})
    config = RunConfig.from_parameters(
        **settings, steps=steps, seed=seed, soft_labels=labels == "soft", head_precision="fp8" if name == "fp8" else "same"
    )
    if name == "plain":
        fast_path.applies = lambda drafter: False
    run = Run.create(OUT / "acceptance", config.to_dict(), f"{name}-{labels}-{seed}")
    return 0 if train_run(run, config).status == "completed" else 1


def read(folder: Path) -> dict:
    """Held-out acceptance by step, the mean loss of the last 50 steps, and tokens/s after the first 20 of one run."""
    from dflash.runs.record import read_metrics

    records = read_metrics(folder)[0]
    steps = [r for r in records if r["kind"] == "step"]
    late = steps[20:] or steps
    return {
        "acceptance": {r["step"]: round(r["acceptance_length"], 4) for r in records if r["kind"] == "eval"},
        "steps": len(steps),
        "loss": sum(r["loss"] for r in steps[-50:]) / max(1, len(steps[-50:])),
        "tokens_per_second": sum(r["tokens"] for r in late) / max(1e-9, sum(r["step_seconds"] for r in late)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--labels", default="soft,hard")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one run")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, labels, seed = args.one.split("-")
        return one(name, labels, int(seed), args.steps, args.tiny)
    (OUT / "acceptance").mkdir(parents=True, exist_ok=True)
    waiting = [
        f"{name}-{labels}-{seed}"
        for seed in args.seeds.split(",")
        for labels in args.labels.split(",")
        for name in args.variants.split(",")
    ]
    rows, running = [], {}
    while waiting or running:
        while waiting and len(running) < args.jobs:
            key = waiting.pop(0)
            with open(OUT / f"{key}.log", "w") as log:
                command = [__file__, "--one", key, "--steps", str(args.steps), *["--tiny"] * args.tiny]
                running[key] = start_child(command, log), time.monotonic()
        time.sleep(0.5)
        for key, (process, began) in list(running.items()):
            if process.poll() is None and time.monotonic() - began > args.limit:
                end_child(process)
            if process.poll() is not None:
                del running[key]
                folder = OUT / "acceptance" / key
                rows.append(
                    {"run": key, "exit": process.returncode, "seconds": round(time.monotonic() - began)}
                    | (read(folder) if (folder / "metrics.jsonl").exists() else {})
                )
                print(json.dumps(rows[-1]), flush=True)
    print(f"{'run':16} {'exit':>4} {'steps':>5} {'tokens/s':>9} {'last loss':>9}  held-out acceptance length by step")
    for r in sorted(rows, key=lambda row: row["run"]):
        print(
            f"{r['run']:16} {r['exit']:>4} {r.get('steps', 0):>5} {r.get('tokens_per_second', 0):>9,.0f} "
            f"{r.get('loss', 0):>9.4f}  {r.get('acceptance', {})}"
        )
    (OUT / "acceptance.json").write_text(json.dumps(rows, indent=1))
    return int(any(r["exit"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
