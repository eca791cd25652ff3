"""One shot on a GPU: is the drafter's step right there, how fast is each version of it, and how fast is the peer?

    python tools/gpu_step.py [--seconds 330] [--only check,step]      results under $OUT (default ./out)
    GPU_STEP_TINY=1 python tools/gpu_step.py                          a dry run on a CPU

Groups (`step_groups`) run one after another, most valuable first; each variant has a time limit of its own, and a variant
that fails leaves its traceback and the next one runs. Lines go to results.jsonl at once; the table is printed last.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from gpu_harness import OUT, command_line
from step_groups import GROUPS
from step_groups.common import HARNESS, extra_backends
from step_groups.pieces import use_swept_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Processes in this order, each a list of groups and the seconds it may take. A process that dies is started again for
# what it has not done; the peer gets one of its own because it needs nearly the whole card.
PROCESSES = [
    ("check,attention,step", 300),
    ("peer", 120),
    ("small", 60),
    ("peer_small", 120),
    ("target", 320),
    ("loss,levers", 180),
]


def take_best_tiles() -> None:
    """What an earlier group found the fastest tile settings, in this process too."""
    if extra_backends():
        use_swept_config()


def table() -> None:
    """What a reader wants first."""
    rows = HARNESS.results()
    peers = {
        f"{r['anchors']}x{r['block']}": r["tokens_per_second"]
        for r in rows
        if r["group"].startswith("peer") and "tokens_per_second" in r
    }
    for r in rows:
        if r["name"] == "profile" and "kernels" in r:
            print("one step, by kernel:", *r["kernels"], sep="\n  ")
    print(
        f"{'group':10} {'variant':28} {'shape':>8} {'lab':>4} {'ms':>8} {'tok/s':>8} {'peak':>6} {'TF/s':>5} "
        f"{'mfu':>5} {'loss':>8} {'xpeer':>6}"
    )
    for r in rows:
        head = f"{r['group']:10} {r['name'][:28]:28}"
        if "error" in r:
            print(f"{head} ERROR {r['error'][:160]}")
        elif "seconds_median" in r and "tokens_per_second" in r:
            shape = f"{r.get('anchors', '')}x{r.get('block', '')}"
            ratio = r["tokens_per_second"] / peers[shape] if shape in peers else float("nan")
            print(
                f"{head} {shape:>8} {r.get('labels', ''):>4} {r['seconds_median'] * 1e3:>8.1f} "
                f"{r['tokens_per_second']:>8.0f} {(r['peak_bytes'] or 0) / 1e9:>6.1f} "
                f"{r['matmul_flops_per_second'] / 1e12:>5.0f} {r['mfu']:>5.2f} {r.get('loss', 0):>8.4f} "
                f"{ratio:>6.3f}"
            )
        elif r["name"] != "profile":
            print(head, json.dumps({k: v for k, v in r.items() if k not in ("group", "name")})[:400])


def main() -> int:
    args = command_line(__doc__, 330, [name for names, _ in PROCESSES for name in names.split(",")])
    if args.part:
        HARNESS.work(args, GROUPS, take_best_tiles)
        return 0
    HARNESS.clear()
    end = time.time() + args.seconds
    with open(OUT / "log.txt", "w") as log:
        for names, seconds in PROCESSES:
            chosen = ",".join(name for name in names.split(",") if args.only is None or name in args.only)
            if chosen:
                HARNESS.run_process(
                    chosen, min(seconds, end - time.time()), log, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
                )
    table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
