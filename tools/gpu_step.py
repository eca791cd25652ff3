"""One shot on a GPU: is the drafter's step right there, how fast is each version of it, and how fast is the peer?

    python tools/gpu_step.py [--seconds 330] [--only check,step]      results under $OUT (default ./out)

Groups run one after another, most valuable first; each variant has a time limit of its own, and a variant
that fails leaves its traceback and the next one runs. Lines go to results.jsonl at once; the table is printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
OUT = Path(os.environ.get("OUT", "out"))
# Processes in this order, each a list of groups and the seconds it may take. A process that dies is started again for
# what it has not done; the peer gets one of its own because it needs nearly the whole card.
PROCESSES = [
    ("check,attention,step", 300), ("peer", 120), ("small", 60), ("peer_small", 120), ("target", 320), ("loss,levers", 180),
]
STARTS = 3
TINY = os.environ.get("GPU_STEP_TINY") == "1"  # a dry run of the script itself, on a CPU
# Of the fp8 head against float32, relative: (loss, worst gradient). Rounding both operands to e4m3 costs each product 4%
# (rms), logits of spread 2 so 0.07; a hard label's gradient feels it through the softmax alone, a soft one's is a
# difference of two such.
FP8_LIMITS = {"hard": (1e-2, 6e-2), "soft": (1e-2, 0.15)}


class TooSlow(Exception):
    """A variant ran into its time limit."""


def _alarm(signum, frame):
    raise TooSlow


def record(**fields) -> None:
    """Append one line to the results."""
    with open(OUT / "results.jsonl", "a") as file:
        file.write(json.dumps(fields) + "\n")


def attempt(group: str, name: str, seconds: int, call: Callable[[], dict]) -> None:
    """Run one variant; record what it returns, or how it failed."""
    if any(r["group"] == group and r["name"] == name for r in results()):
        return
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(seconds)
    begin = time.time()
    try:
        fields = call()
    except BaseException as error:  # one variant's failure must not cost the others
        text = traceback.format_exc()
        print(f"[{group}] {name} FAILED\n{text}", flush=True)
        fields = {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": text[-3000:]}
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        signal.alarm(0)
    record(group=group, name=name, wall=round(time.time() - begin, 1), **fields)
    print(f"[{group}] {name}: {time.time() - begin:.1f} s", flush=True)
    if "CUDA error" in fields.get("error", "") or "AcceleratorError" in fields.get("error", ""):
        sys.exit(3)  # the context is lost; a new process does the rest


# -- groups ---------------------------------------------------------------------------------------------------------


def setup():
    """Device, dtype, shapes."""
    import torch

    from dflash.bench.workload import StepShape

    device = torch.device("cpu" if TINY else "cuda")
    if TINY:
        tiny = dict(captured=2, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300)
        return device, torch.float32, StepShape(64, 8, 4, document=24, **tiny), StepShape(64, 4, 2, document=24, **tiny)
    return device, torch.bfloat16, StepShape(), StepShape(anchors=512, block=8)


def relative(a, b) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def group_check() -> None:
    """Loss, gradients and metrics of the fast path against the plain modules: fresh random inputs, poisoned memory."""
    import torch

    from dflash.bench.workload import StepShape, make_drafter, make_head, make_inputs

    device = setup()[0]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    base = dict(captured=3, hidden=256, layers=2, heads=8, kv_heads=2, head_dim=128, intermediate=640, vocab=5003)
    seed = int(time.time())

    def one(shape, dtype, soft, attention, fast, precision="same"):
        torch.manual_seed(seed)
        drafter = make_drafter(shape, make_head(shape, device, torch.float32, seed), device, torch.float32,
                               fast_path=fast, attention_backend=attention, loss_chunk_rows=384 if fast else 1024)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            drafter.lm_head.mul_(6)
        drafter.to(dtype)
        drafter.head_precision = precision
        drafter.load_target_head(drafter.embed_tokens, drafter.lm_head)  # quantizes it as it is now
        inputs = make_inputs(shape, device, torch.float32, seed).arguments
        for name in ("all_hidden_states", "verifier_last_hidden"):
            inputs[name] = inputs[name].to(dtype)
        loss, metrics = drafter(**inputs, use_soft_labels=soft, gamma=10.0)
        loss.backward()
        return loss.detach(), metrics, {n: p.grad for n, p in drafter.named_parameters()}

    def compare(shape, soft, attention, exact, fp8=False):
        reference = one(shape, torch.float32, soft, "sdpa", False)
        result = {"seed": seed}
        rows = [("plain bf16", torch.bfloat16, "sdpa", False), ("fast bf16", torch.bfloat16, attention, True)]
        if exact:
            rows.append(("fast fp32", torch.float32, "triton" if attention == "triton" else "sdpa", True))
        if fp8:
            rows.append(("fp8 head", torch.float32 if TINY else torch.bfloat16, attention, not TINY, "fp8"))
        for label, *version in rows:
            loss, metrics, grads = one(shape, version[0], soft, *version[1:])
            worst = max((relative(grads[n], g), n) for n, g in reference[2].items())
            same = all(torch.equal(metrics[k], reference[1][k]) for k in ("supervised_by_slot", "blocks"))
            hits = int((metrics["correct_by_slot"] - reference[1]["correct_by_slot"]).abs().sum())
            result[label] = [relative(loss, reference[0]), worst[0], worst[1], same, hits]
        limits = {"fast fp32": (1e-5, 2e-4), "fast bf16": (1e-2, max(2 * result["plain bf16"][1], 2e-2)),
                  "fp8 head": FP8_LIMITS["soft" if soft else "hard"]}
        result["ok"] = all(
            result[k][0] <= a and result[k][1] <= b and result[k][3] for k, (a, b) in limits.items() if k in result
        )  # NaN fails both
        return result

    shape = StepShape(tokens=700, anchors=24, block=32, document=150, supervised=0.8, **base)
    short = StepShape(tokens=300, anchors=40, block=8, document=90, supervised=0.6, **base)
    cases = [("hard 40x8 sdpa", short, False, "sdpa", True)]
    if not TINY:
        cases += [("soft 24x32 triton", shape, True, "triton", True), ("hard 40x8 triton", short, False, "triton", False),
                  ("soft 24x32 flex", shape, True, "flex", False)]
    cases += [("hard 40x8 fp8 head", short, False, "sdpa", False, True),
              ("soft 24x32 fp8 head", shape, True, "sdpa", False, True)]
    for name, *case in cases:
        attempt("check", name, 150, lambda c=tuple(case): compare(*c))
    torch.use_deterministic_algorithms(False)


def extra_backends() -> list[str]:
    """Attention backends beside flex that exist here and are meant for a GPU."""
    from dflash import kernels
    from dflash.attention import BACKENDS

    return [name for name in BACKENDS if name == "triton" and kernels.usable("cuda")]


def measured(shape, soft, ceiling, group, name, seconds=30, backend=None, repeats=5, optimizer=False, chunk=None,
             **options) -> None:
    """One version of our step."""
    import torch

    from dflash.bench import step
    from dflash.bench.timing import free_memory
    from dflash.bench.workload import make_drafter, make_head, make_inputs

    device, dtype, *_ = setup()

    def call() -> dict:
        torch.manual_seed(0)  # the same weights in every version: their losses must agree
        drafter = make_drafter(shape, make_head(shape, device, dtype), device, dtype, attention_backend=backend,
                               loss_chunk_rows=chunk, **options)
        adam = step.make_optimizer(drafter) if optimizer else None
        function = step.step_call(drafter, make_inputs(shape, device, dtype), soft, adam)
        return step.report(name, shape, soft, function, device, ceiling, 2, repeats) | {"group": group}

    def clean() -> dict:
        try:
            fields = call()
        finally:
            free_memory(device)
        return {k: v for k, v in fields.items() if k not in ("name", "group")}

    attempt(group, name, seconds, clean)
    free_memory(device)


def ceiling_of(group: str) -> float:
    from dflash.bench.timing import matmul_ceiling

    device, dtype, *_ = setup()
    value = matmul_ceiling(device, dtype)
    record(group=group, name="matmul ceiling", tflops=value / 1e12)
    return value


def group_step() -> None:
    """The versions that decide: the best one, the plain one, hard labels, and where the best one's time goes."""
    _, _, large, _ = setup()
    ceiling = ceiling_of("step")
    for backend in (*extra_backends(), None):
        measured(large, True, ceiling, "step", f"fast {backend or 'flex'}", 60, backend)
    best = best_backend("step")
    measured(large, False, ceiling, "step", "fast hard", 40, best)
    measured(large, False, ceiling, "step", "fast hard fp8", 40, best, head_precision="fp8")
    attempt("step", "profile", 30, lambda: profile(large, best))
    with card_of(96e9):
        measured(large, True, ceiling, "step", "96 GB card, optimizer", 40, best, optimizer=True)
    measured(large, True, ceiling, "step", "plain", 60, repeats=3, fast_path=False)


@contextlib.contextmanager
def card_of(size: float):
    """As if the card had this many bytes; one GB of them is the context's."""
    import torch

    if TINY:
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((size - 1e9) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def best_backend(group: str) -> str | None:
    """The attention backend of the fastest soft-label step so far."""
    rows = [r for r in results() if r["group"] == group and r["name"].startswith("fast ") and "seconds_median" in r]
    rows = [r for r in rows if r["name"] in ("fast flex", "fast triton")]
    if not rows:  # the group was not asked for
        return next(iter(extra_backends()), None)
    name = min(rows, key=lambda r: r["seconds_median"])["name"].split()[1]
    return None if name == "flex" else name


def profile(shape, backend) -> dict:
    """Seconds per kernel of one step, the largest first."""
    import torch
    from torch.profiler import ProfilerActivity

    from dflash.bench import step
    from dflash.bench.workload import make_drafter, make_head, make_inputs

    device, dtype, *_ = setup()
    drafter = make_drafter(shape, make_head(shape, device, dtype), device, dtype, attention_backend=backend)
    call = step.step_call(drafter, make_inputs(shape, device, dtype), True)
    call()
    call()
    activity = ProfilerActivity.CPU if TINY else ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as trace:
        call()
        if not TINY:
            torch.cuda.synchronize()
    rows = [(e.self_cpu_time_total if TINY else e.self_device_time_total, e) for e in trace.key_averages()]
    rows.sort(key=lambda row: -row[0])
    lines = [f"{us / 1e3:9.2f} ms {e.count:5d} x  {e.key[:150]}" for us, e in rows]
    (OUT / "profile.txt").write_text("\n".join(lines) + "\n")
    return {"kernels": lines[:24]}


def group_small() -> None:
    """512 anchors of 8 slots."""
    small = setup()[3]
    ceiling = ceiling_of("small")
    best = best_backend("step")
    measured(small, True, ceiling, "small", "fast 512x8", 40, best, repeats=10)
    measured(small, False, ceiling, "small", "fast 512x8 hard", 20, best, repeats=10)


def group_levers() -> None:
    """One change at a time from the best version."""
    import functools

    import torch

    import dflash.model
    from dflash import kernels
    from dflash.head_plan import HeadPlan

    large = setup()[2]
    ceiling = ceiling_of("levers")
    best = best_backend("step")
    for rows in (7, 9) if TINY else (1664, 4992, 8320):
        measured(large, True, ceiling, "levers", f"chunk {rows}", 20, best, repeats=3, chunk=rows)
    measured(large, True, ceiling, "levers", "soft fp8 head", 30, best, repeats=3, head_precision="fp8")
    wide = 11 if TINY else 8448  # 66 x 20 tiles of 128 x 256: ten full waves of 132, in either orientation of the tile
    measured(large, False, ceiling, "levers", f"hard chunk {wide}", 20, best, repeats=3, chunk=wide)
    measured(large, False, ceiling, "levers", f"hard fp8 chunk {wide}", 20, best, repeats=3, chunk=wide,
             head_precision="fp8")

    if kernels.usable(setup()[0]):
        from dflash.kernels import blocks

        blocks.JOINT_QKV = True
        measured(large, False, ceiling, "levers", "hard, q k v joint", 20, best, repeats=5)
        blocks.JOINT_QKV = False
    make = HeadPlan.make.__func__

    def unshared(cls, *args):
        plan = make(cls, *args)
        rows = torch.arange(plan.label_at.numel())
        return HeadPlan(plan.supervised, plan.slot, plan.query, plan.label_at, plan.label_at - 1, rows)

    HeadPlan.make = classmethod(unshared)
    measured(large, True, ceiling, "levers", "teacher rows not shared", 20, best, repeats=3)
    HeadPlan.make = classmethod(make)
    plain = dflash.model.chunked_head_loss

    def swapped(*args, **kwargs):
        return plain(*args, **{**kwargs, "fused": not kwargs["fused"]})

    dflash.model.chunked_head_loss = functools.wraps(plain)(swapped)
    if not TINY:
        measured(large, True, ceiling, "levers", "plain layers, fused loss", 60, repeats=3, fast_path=False)
        measured(large, True, ceiling, "levers", "fast layers, plain loss", 25, best, repeats=3, chunk=1024)
    dflash.model.chunked_head_loss = plain


def group_loss() -> None:
    """The loss over the head alone, on the rows of a step with nothing to skip: tile settings, chunks, liger-kernel."""
    import torch

    from dflash import kernels
    from dflash.bench.timing import free_memory, measure
    from dflash.fp8_head import Fp8Head
    from dflash.losses import chunked_head_loss

    device, dtype, large, _ = setup()
    rows = large.anchors * (large.block - 1)
    generator = torch.Generator(device).manual_seed(0)

    def states() -> torch.Tensor:
        return torch.randn(rows, large.hidden, generator=generator, device=device, dtype=dtype)

    hidden, teacher = states().requires_grad_(), states()
    head = torch.randn(large.vocab, large.hidden, generator=generator, device=device, dtype=dtype).mul_(0.02)
    labels = torch.randint(0, large.vocab, (rows,), generator=generator, device=device)
    scale = torch.full((rows,), 1.0 / rows, device=device)
    soft, hard = {"teacher_hidden": teacher}, {"labels": labels}

    def timed(name: str, call: Callable, products: int) -> None:
        def run() -> dict:
            loss = float(call().detach())
            timing = measure(lambda: torch.autograd.grad(call(), hidden), device, 1, 3)
            flops = products * 2 * rows * large.hidden * large.vocab
            return {"ms": timing.median * 1e3, "tflops": flops / timing.median / 1e12, "loss": loss,
                    "peak_gb": ((timing.peak_bytes or 0) - (timing.base_bytes or 0)) / 1e9}

        attempt("loss", name, 20, run)
        free_memory(device)

    def ours(kind: dict, chunk: int, fused: bool = True, quantized: Fp8Head | None = None) -> Callable:
        return lambda: chunked_head_loss(hidden, head, scale=scale, chunk_rows=chunk, fused=fused, head_fp8=quantized,
                                         **kind).loss

    chunk = 7 if TINY else 3328
    timed("soft", ours(soft, chunk), 3)
    timed("hard", ours(hard, chunk), 2)
    quantized: list = []  # made in a variant of its own, so that a refusal costs the others nothing

    def quantize() -> dict:
        quantized.append(Fp8Head.of(head))
        return {"gb": (quantized[0].codes.nbytes + quantized[0].scales.nbytes) / 1e9}

    attempt("loss", "quantize the head", 20, quantize)
    if quantized:
        timed("hard, fp8 logits", ours(hard, chunk, quantized=quantized[0]), 2)
        timed("soft, fp8 logits", ours(soft, chunk, quantized=quantized[0]), 3)
    timed("hard, liger", liger_loss(hidden, head, labels), 2)
    timed("soft, plain 1024", ours(soft, 1024, False), 3)
    if not kernels.usable(device):
        return
    from dflash.kernels import head_loss

    for block, warps in ((8192, 16), (2048, 4), (4096, 4), (8192, 8)):
        head_loss.BLOCK, head_loss.WARPS = block, warps
        timed(f"soft, tile {block} warps {warps}", ours(soft, chunk), 3)
    for block, warps in ((8192, 16), (16384, 32)):  # fewer rows at once: the second pass may find them in the L2 cache
        head_loss.BLOCK, head_loss.WARPS = block, warps
        timed(f"hard, tile {block} warps {warps}", ours(hard, chunk), 2)
    head_loss.BLOCK, head_loss.WARPS = 4096, 8


def liger_loss(hidden, head, labels) -> Callable:
    """liger-kernel's fused linear cross entropy; its KL wants the teacher's probabilities of all rows, 16 GB here."""

    def call():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        out = LigerFusedLinearCrossEntropyFunction.apply(hidden, head, labels)
        return out[0] if isinstance(out, tuple) else out

    return call


def _peer(group: str, shape, soft: bool, name: str, losses: str = "eager") -> None:
    from dflash.bench import step
    from dflash.bench.peer import peer_call
    from dflash.bench.workload import make_head, make_inputs

    device, dtype, *_ = setup()
    ceiling = ceiling_of(group)

    def call() -> dict:
        function = peer_call(shape, make_inputs(shape, device, dtype), make_head(shape, device, dtype), device, dtype,
                             soft, losses)
        return {k: v for k, v in step.report(name, shape, soft, function, device, ceiling, 2, 5).items() if k != "name"}

    attempt(group, name, 110, call)


def group_peer() -> None:
    _peer("peer", setup()[2], True, "speculators")


def group_peer_small() -> None:
    _peer("peer_small", setup()[3], True, "speculators 512x8")


def group_attention() -> None:
    """Attention alone, each backend, forward and backward."""
    from dflash.bench import attention

    device, dtype, large, small = setup()

    def short(backend, shape) -> dict:
        full = attention.measure_backend(backend, shape, device, dtype)
        parts = {k: full[k] for k in ("mask", "forward", "both")}
        return {f"{k}_ms": round(v["seconds_median"] * 1e3, 3) for k, v in parts.items()} | {
            f"{k}_tflops": round(v["flops_per_second"] / 1e12, 1) for k, v in parts.items() if k != "mask"
        } | {f"{k}_gb": (v["peak_bytes"] or 0) / 1e9 for k, v in parts.items()}

    attempt("attention", "flex 1024x32", 60, lambda: short("sdpa" if TINY else "flex", large))
    if not extra_backends():
        return
    attempt("attention", "triton 1024x32", 40, lambda: short("triton", large))
    attempt("attention", "triton 512x8", 30, lambda: short("triton", small))
    attempt("attention", "config", 60, lambda: sweep(lambda: short("triton", large)))


OPTIONS = {
    "forward": [(64, 8, 2), (128, 8, 2)],
    "dkv": [(64, 4, 2, 64), (64, 4, 3, 32), (128, 8, 3, 32)],
    "dq": [(64, 8, 3), (128, 8, 1)],
}


def sweep(call: Callable[[], dict]) -> dict:
    """The tile settings of the Triton attention, one kernel after another; the best stays set."""
    from dflash.kernels.attention import CONFIG

    tried, best = [], call()["both_ms"]
    try:
        for kernel, options in OPTIONS.items():
            for option in options[:1] if TINY else options:
                before, CONFIG[kernel] = CONFIG[kernel], option
                try:
                    ms = call()["both_ms"]
                except TooSlow:
                    raise
                except Exception as error:
                    ms = float("inf")
                    print(f"{kernel} {option}: {error}")
                tried.append([kernel, *option, ms])
                if ms < best:
                    best = ms
                else:
                    CONFIG[kernel] = before
    except TooSlow:
        CONFIG[kernel] = before
    return {"best": best, "chosen": CONFIG, "tried": tried}


def use_swept_config() -> None:
    """Set what `sweep` found, in this process too."""
    from dflash.kernels.attention import CONFIG

    for row in results():
        if row["name"] == "config" and "chosen" in row:
            CONFIG.update({k: tuple(v) for k, v in row["chosen"].items()})


def group_target() -> None:
    """Feature capture of a hybrid target, before and after."""
    device, dtype, *_ = setup()
    try:
        from dflash.bench import target
    except ImportError as error:
        record(group="target", name="-", error=str(error))
        return
    for name, call in target.variants(device, dtype, TINY):
        attempt("target", name, 230, call)  # autotuning takes most of it


# -- the parent -----------------------------------------------------------------------------------------------------


def results() -> list[dict]:
    path = OUT / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table() -> None:
    """What a reader wants first."""
    rows = results()
    peers = {f"{r['anchors']}x{r['block']}": r["tokens_per_second"] for r in rows
             if r["group"].startswith("peer") and "tokens_per_second" in r}
    for r in rows:
        if r["name"] == "profile" and "kernels" in r:
            print("one step, by kernel:", *r["kernels"], sep="\n  ")
    print(f"{'group':10} {'variant':28} {'shape':>8} {'lab':>4} {'ms':>8} {'tok/s':>8} {'peak':>6} {'TF/s':>5} "
          f"{'mfu':>5} {'loss':>8} {'xpeer':>6}")
    for r in rows:
        head = f"{r['group']:10} {r['name'][:28]:28}"
        if "error" in r:
            print(f"{head} ERROR {r['error'][:160]}")
        elif "seconds_median" in r and "tokens_per_second" in r:
            shape = f"{r.get('anchors', '')}x{r.get('block', '')}"
            ratio = r["tokens_per_second"] / peers[shape] if shape in peers else float("nan")
            print(f"{head} {shape:>8} {r.get('labels', ''):>4} {r['seconds_median'] * 1e3:>8.1f} "
                  f"{r['tokens_per_second']:>8.0f} {(r['peak_bytes'] or 0) / 1e9:>6.1f} "
                  f"{r['matmul_flops_per_second'] / 1e12:>5.0f} {r['mfu']:>5.2f} {r.get('loss', 0):>8.4f} "
                  f"{ratio:>6.3f}")
        elif r["name"] != "profile":
            print(head, json.dumps({k: v for k, v in r.items() if k not in ("group", "name")})[:400])


def run_process(groups: str, seconds: float, log) -> None:
    """One process for some groups, started again when it dies before its work is done."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    end = time.time() + seconds
    for start in range(STARTS):
        left = end - time.time()
        if left < 15:
            record(group=groups, name="-", error="no time left")
            return
        command = [sys.executable, __file__, "--groups", groups, "--seconds", str(int(left))]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            code = child.wait(timeout=left + 5)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        print(f"{groups}: {seconds - (end - time.time()):.0f} s, exit {code}", flush=True)
        if code == 0:
            return
        record(group=groups, name=f"start {start + 1}", error=f"the process ended with {code}; see log.txt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=330, help="for everything together")
    parser.add_argument("--only", help="groups, comma-separated: " + " ".join(groups for groups, _ in PROCESSES))
    parser.add_argument("--groups", help=argparse.SUPPRESS)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if args.groups:
        faulthandler.dump_traceback_later(args.seconds, exit=True)
        for group in args.groups.split(","):
            if extra_backends():
                use_swept_config()
            globals()[f"group_{group}"]()
        return 0
    (OUT / "results.jsonl").unlink(missing_ok=True)
    end = time.time() + args.seconds
    wanted = args.only.split(",") if args.only else None
    with open(OUT / "log.txt", "w") as log:
        for groups, seconds in PROCESSES:
            chosen = ",".join(g for g in groups.split(",") if wanted is None or g in wanted)
            if chosen:
                run_process(chosen, min(seconds, end - time.time()), log)
    table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
