"""How fast are the pieces alone: attention and its tile settings, the loss over the head, feature capture."""

from __future__ import annotations

from collections.abc import Callable

from gpu_harness import TooSlow

from step_groups.common import HARNESS, TINY, extra_backends, setup


def group_attention() -> None:
    """Attention alone, each backend, forward and backward."""
    from dflash.bench import attention

    device, dtype, large, small = setup()

    def short(backend, shape) -> dict:
        full = attention.measure_backend(backend, shape, device, dtype)
        parts = {k: full[k] for k in ("mask", "forward", "both")}
        return (
            {f"{k}_ms": round(v["seconds_median"] * 1e3, 3) for k, v in parts.items()}
            | {f"{k}_tflops": round(v["flops_per_second"] / 1e12, 1) for k, v in parts.items() if k != "mask"}
            | {f"{k}_gb": (v["peak_bytes"] or 0) / 1e9 for k, v in parts.items()}
        )

    HARNESS.attempt("attention", "flex 1024x32", 60, lambda: short("sdpa" if TINY else "flex", large))
    if not extra_backends():
        return
    HARNESS.attempt("attention", "triton 1024x32", 40, lambda: short("triton", large))
    HARNESS.attempt("attention", "triton 512x8", 30, lambda: short("triton", small))
    HARNESS.attempt("attention", "config", 60, lambda: sweep(lambda: short("triton", large)))


OPTIONS = {
    "forward": [(64, 8, 2), (128, 8, 2)],
    "dkv": [(64, 4, 2, 64), (64, 4, 3, 32), (128, 8, 3, 32)],
    "dq": [(64, 8, 3), (128, 8, 1)],
}


def sweep(call: Callable[[], dict]) -> dict:
    """The tile settings of the Triton attention, one kernel after another; the best stays set."""
    from dflash.drafter.kernels.attention import CONFIG

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
    from dflash.drafter.kernels.attention import CONFIG

    for row in HARNESS.results():
        if row["name"] == "config" and "chosen" in row:
            CONFIG.update({k: tuple(v) for k, v in row["chosen"].items()})


def group_loss() -> None:
    """The loss over the head alone, on the rows of a step with nothing to skip: tile settings, chunks, liger-kernel."""
    import torch

    from dflash.bench.timing import free_memory, measure
    from dflash.drafter import kernels
    from dflash.drafter.fp8_head import Fp8Head
    from dflash.drafter.losses import chunked_head_loss

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
            return {
                "ms": timing.median * 1e3,
                "tflops": flops / timing.median / 1e12,
                "loss": loss,
                "peak_gb": ((timing.peak_bytes or 0) - (timing.base_bytes or 0)) / 1e9,
            }

        HARNESS.attempt("loss", name, 20, run)
        free_memory(device)

    def ours(kind: dict, chunk: int, fused: bool = True, quantized: Fp8Head | None = None) -> Callable:
        return lambda: (
            chunked_head_loss(hidden, head, scale=scale, chunk_rows=chunk, fused=fused, head_fp8=quantized, **kind).loss
        )

    chunk = 7 if TINY else 3328
    timed("soft", ours(soft, chunk), 3)
    timed("hard", ours(hard, chunk), 2)
    quantized: list = []  # made in a variant of its own, so that a refusal costs the others nothing

    def quantize() -> dict:
        quantized.append(Fp8Head.of(head))
        return {"gb": (quantized[0].codes.nbytes + quantized[0].scales.nbytes) / 1e9}

    HARNESS.attempt("loss", "quantize the head", 20, quantize)
    if quantized:
        timed("hard, fp8 logits", ours(hard, chunk, quantized=quantized[0]), 2)
        timed("soft, fp8 logits", ours(soft, chunk, quantized=quantized[0]), 3)
    timed("hard, liger", liger_loss(hidden, head, labels), 2)
    timed("soft, plain 1024", ours(soft, 1024, False), 3)
    if not kernels.usable(device):
        return
    from dflash.drafter.kernels import head_loss

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


def group_target() -> None:
    """Feature capture of a hybrid target, before and after."""
    device, dtype, *_ = setup()
    try:
        from dflash.bench import target
    except ImportError as error:
        HARNESS.record("target", "-", error=str(error))
        return
    for name, call in target.variants(device, dtype, TINY):
        HARNESS.attempt("target", name, 230, call)  # autotuning takes most of it
