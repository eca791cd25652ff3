"""One shot on two GPUs: does the pipeline keep every element, the serial losses and flat memory, and how fast is it?

    python tools/gpu_runner.py [--seconds 470] [--only stamps,full]      results under $OUT (default ./out)
    GPU_RUNNER_TINY=1 python tools/gpu_runner.py --seconds 250           a dry run on CPU workers

Each part runs in a process of its own with a time limit; one that fails leaves its traceback and the next one runs.
Lines go to results.jsonl at once; the table is printed last. Two topologies: one target on GPU 0 with one drafter on
GPU 1, and a target and a drafter together on each. The part `full` has a random target of the Qwen3.6-27B shape on
GPU 0 and the full-size drafter on GPU 1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpu_harness import OUT, Harness, command_line

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
HARNESS = Harness(__file__)
TINY = os.environ.get("GPU_RUNNER_TINY") == "1"  # a dry run of the script itself, on CPU workers
PARTS = [  # in this order; seconds each may take; `full` goes on to its next size until one fits
    ("stamps", 60),
    ("equal", 120),
    ("full:0", 260),
    ("full:1", 150),
    ("full:2", 120),
    ("failure", 110),
    ("memory", 220),
    ("throughput", 240),
    ("ranks", 110),
    ("torchrun", 200),
    ("linear", 300),
    ("linear_without", 90),
    ("sharded", 200),
    ("fsdp", 200),
]
FULL_SIZES = [(40000, 1024), (40000, 768), (32768, 512)]


def attempt(part: str, name: str, seconds: int, call: Callable[[], dict]) -> None:
    """One measurement, and its memory given back."""
    HARNESS.attempt(part, name, seconds, call)
    release()


def release() -> None:
    import gc

    import torch

    gc.collect()
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            torch.cuda.empty_cache()


def topologies() -> dict:
    """The two that fit two GPUs."""
    from dflash.train.settings import RuntimeOptions
    from dflash.train.topology import available_gpus, decide

    if TINY:
        return {
            "1+1": decide(RuntimeOptions(gpus="cpu:1", target_gpus="cpu:1"), 0),
            "2 shared": decide(RuntimeOptions(gpus="cpu:2"), 0),
        }
    count = available_gpus()
    return {
        "1+1": decide(RuntimeOptions(gpus="1", target_gpus="0"), count),
        "2 shared": decide(RuntimeOptions(gpus="0,1", target_gpus="0,1"), count),
    }


def case(name: str, drafters: int = 1, **changes):
    """A job of one of the bench's sizes."""
    import torch

    from dflash.bench.pipeline import SHAPES
    from dflash.bench.pipeline_case import TINY as TINY_SHAPE
    from dflash.bench.pipeline_case import Case

    values = dict(packs=4 * drafters, packs_per_step=drafters, dtype=torch.float32 if TINY else torch.bfloat16)
    return Case(TINY_SHAPE if TINY else SHAPES[name], **values | changes)


# -- parts ----------------------------------------------------------------------------------------------------------


def part_stamps() -> None:
    from dflash.bench.pipeline_checks import check_stamps

    sizes = (32, 24) if TINY else (1024, 768)
    for label, topology in topologies().items():
        for depth in (1, 8):
            attempt("stamps", f"{label}, depth {depth}", 30, lambda t=topology, d=depth: check_stamps(t, 1000, d, *sizes))


def part_equal() -> None:
    from dflash.bench.pipeline_checks import check_equal

    for label, topology in topologies().items():
        attempt("equal", label, 80, lambda t=topology: check_equal(case("small", 2), t, 20))


def part_memory() -> None:
    from dflash.bench.pipeline_checks import check_memory

    for label, topology in topologies().items():
        attempt(
            "memory",
            label,
            110,
            lambda t=topology: check_memory(case("medium", len(t.drafters), target_layers=4), t, 60 if TINY else 200),
        )


def part_throughput() -> None:
    """A target about as fast as its drafter, a slower one, and both on both GPUs; there also with a full-size drafter, whose
    kernels are long enough for one interpreter to keep two GPUs busy."""
    from dflash.bench.pipeline import measure_pipeline

    for label, size, layers, key, steps in (
        ("1+1, 8 layers", "medium", 8, "1+1", 40),
        ("1+1, 32 layers", "medium", 32, "1+1", 40),
        ("2 shared, 8 layers", "medium", 8, "2 shared", 40),
        ("2 shared, full drafter", "full", 8, "2 shared", 16),
    ):
        topology = topologies()[key]

        def call(t=topology, n=layers, s=size, k=steps) -> dict:
            result = measure_pipeline(case(s, len(t.drafters), target_layers=n), t, k, repeats=10 if s == "medium" else 3)
            return {"ok": result["of_slower_side"] >= 0.95 and result["pipeline"]["finite"], **result}

        attempt("throughput", label, 90, call)


def part_failure() -> None:
    from dflash.bench.pipeline_checks import check_failure

    for label, topology in topologies().items():
        attempt("failure", label, 60, lambda t=topology: check_failure(case("small", len(t.drafters)), t))


def part_full(size: int) -> None:
    """The story's sizes, one target and one drafter."""
    from dflash.bench.pipeline import measure_pipeline, table
    from dflash.distributed.accounting import Rates, advice

    tokens, anchors = FULL_SIZES[size]
    job = case("full", 1, target_layers=4 if TINY else 64, hybrid=not TINY, packs=3)
    if not TINY:
        job = replace(job, shape=replace(job.shape, tokens=tokens, anchors=anchors))

    def call() -> dict:
        result = measure_pipeline(job, topologies()["1+1"], 8 if TINY else 10, step_timeout=150, repeats=2)
        rates = Rates(**result["rates"])
        print(table(result), advice(8, rates, (5, 3)), sep="\n", flush=True)
        return {
            "ok": result["of_slower_side"] >= 0.95 and result["pipeline"]["finite"],
            "tokens": tokens,
            "anchors": anchors,
            "advice": advice(8, rates, (5, 3)),
            **result,
        }

    attempt("full", f"27B shape, T {tokens}, {anchors}x{job.shape.block}", 250, call)


def part_linear(hide: bool = False) -> None:
    """8 of 64 layers of the hybrid target at T 40000, scaled: plain and fast capture; and without the fast kernels."""
    if hide:
        sys.modules["fla"] = None  # what a machine without flash-linear-attention has
    import torch

    from dflash.bench import target as bench
    from dflash.bench.timing import matmul_ceiling
    from dflash.target import fast_capture as fast_target

    device = torch.device("cpu" if TINY else "cuda:0")
    shape = (
        bench.TargetShape(
            tokens=96,
            document=30,
            layers=4,
            depth=8,
            captured=2,
            hidden=64,
            intermediate=96,
            heads=4,
            kv_heads=2,
            head_dim=16,
            linear_key_heads=2,
            linear_value_heads=4,
            linear_head_dim=16,
            vocab=300,
        )
        if TINY
        else bench.TargetShape(tokens=40000)
    )
    target = bench.make_target(shape, device, torch.float32 if TINY else torch.bfloat16)
    ceiling = matmul_ceiling(device, target.dtype)
    part = "linear_without" if hide else "linear"
    attempt(part, "plain capture", 200, lambda: {"ok": True, **bench.report("plain", target, shape, ceiling, 1, 3)})
    if not hide:
        attempt(
            part,
            "fast capture",
            200,
            lambda: {"ok": fast_target.attach(target, required=True), **bench.report("fast", target, shape, ceiling, 1, 3)},
        )


def part_linear_without() -> None:
    part_linear(hide=True)


def part_torchrun() -> None:
    """The same job by torchrun, one process a GPU, against the serial reference."""
    from dflash.bench.pipeline_checks import check_torchrun

    job = case("small", 2)
    for label, topology in topologies().items():
        attempt("torchrun", label, 100, lambda t=topology: check_torchrun(job, t, 20))


def part_ranks() -> None:
    """Throughput with a process a GPU, beside what `throughput` measured for one side alone."""
    from dflash.bench.pipeline_checks import run_torchrun

    for label, key in (("2 shared, 8 layers", "2 shared"), ("1+1, 8 layers", "1+1")):
        job = case("medium", len(topologies()[key].drafters), target_layers=8)

        def call(j=job, k=key, name=label) -> dict:
            ran = run_torchrun(j, topologies()[k], 45, stop_after=40)
            if ran["result"] is None:
                return {"ok": False, "error": ran["output"][-1500:]}
            rate = j.packs_per_step * j.shape.tokens / ran["result"]["step_seconds"]
            alone = next((r["slower_side"] for r in HARNESS.results() if r["name"] == name and "slower_side" in r), None)
            return {
                "ok": alone is None or rate >= 0.95 * alone,
                "tokens_per_second": rate,
                "slower_side": alone,
                "of_slower_side": alone and rate / alone,
                "seconds": ran["seconds"],
            }

        attempt("ranks", label + ", torchrun", 100, call)


def part_sharded() -> None:
    """One target over both GPUs, the drafter on the second: features and losses are those of a target in one piece."""
    from dflash.bench.pipeline_checks import check_spread
    from dflash.train.settings import RuntimeOptions
    from dflash.train.topology import available_gpus, decide

    if TINY:
        topology = topologies()["1+1"]
        topology = replace(topology, targets=(topology.targets[0] * 2,))
    else:
        topology = decide(RuntimeOptions(gpus="1", target_gpus="0,1", gpus_per_target=2), available_gpus())
    job = case("small", target_layers=8, packs_per_step=2)
    attempt("sharded", "dense, 8 layers", 100, lambda: check_spread(job, topology))
    if not TINY:
        hybrid = replace(job, hybrid=True, fast_capture=False)
        attempt("sharded", "hybrid, 8 layers", 100, lambda: check_spread(hybrid, topology))


def part_fsdp() -> None:
    """One drafter in shards over both GPUs (FSDP2 over NCCL), a target on each, against the serial reference; and what each
    rank keeps of it."""
    from dflash.bench.pipeline_checks import check_torchrun

    attempt(
        "fsdp",
        "2 shared, one drafter",
        180,
        lambda: check_torchrun(case("small", 2), topologies()["2 shared"], 20, sharded=True),
    )


# -- the parent -----------------------------------------------------------------------------------------------------


def show(r: dict) -> str:
    """One line of the table."""
    head = f"{r['part'][:14]:14} {r['name'][:30]:30} {'ok ' if r.get('ok') else 'BAD'}"
    if "error" in r:
        return f"{head} {r['error'][:170]}"
    if "pipeline" in r:
        p = r["pipeline"]
        peaks = ", ".join(f"{d} {m['peak'] / 2**30:.1f}" for d, m in p["memory"].items() if m["peak"])
        return (
            f"{head} target {r['target']['tokens_per_second']:,.0f} (mfu {r['target']['mfu']:.2f}), drafter "
            f"{r['drafter']['tokens_per_second']:,.0f} (mfu {r['drafter']['mfu']:.2f}), pipeline "
            f"{p['tokens_per_second']:,.0f} tokens/s = {r['of_slower_side']:.3f} of its slower side; peak GiB {peaks}; "
            f"loss {p['losses'][0]:.3f} -> {p['losses'][-1]:.3f}"
        )
    skip = ("part", "name", "ok", "wall", "workers", "traceback", "frames")
    return f"{head} " + json.dumps({k: v for k, v in r.items() if k not in skip})[:330]


def main() -> int:
    names = list(dict.fromkeys(part.partition(":")[0] for part, _ in PARTS))
    args = command_line(__doc__, 470, names)
    if args.part:
        HARNESS.work(args, {name: globals()[f"part_{name}"] for name in names})
        return 0
    HARNESS.clear()
    end = time.time() + args.seconds
    with open(OUT / "log.txt", "w") as log:
        for part, seconds in PARTS:
            name = part.partition(":")[0]
            done = name == "full" and any(r["part"] == "full" and "pipeline" in r for r in HARNESS.results())
            left = end - time.time()
            if done or (args.only and name not in args.only) or left < 20:
                continue
            extra = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if name == "full" else {}
            HARNESS.run_process(part, min(seconds, left - 5), log, **extra)
    tail = (OUT / "log.txt").read_text().splitlines()[-40:]
    rows = HARNESS.results()
    if any("error" in r for r in rows):
        print(*tail, sep="\n")
    for r in rows:
        if "advice" in r:
            print(r["advice"])
    print(*map(show, rows), sep="\n")
    (OUT / "results.json").write_text(json.dumps(rows, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
