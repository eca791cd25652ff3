"""What the groups of `gpu_step.py` share: the harness, device and shapes, one timed version of our step."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_harness import Harness

HARNESS = Harness(str(Path(__file__).resolve().parents[1] / "gpu_step.py"), key="group", starts=3)
TINY = os.environ.get("GPU_STEP_TINY") == "1"  # a dry run of the script itself, on a CPU


def setup():
    """Device, dtype, shapes."""
    import torch

    from dflash.bench.workload import StepShape

    device = torch.device("cpu" if TINY else "cuda")
    if TINY:
        tiny = dict(captured=2, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=300)
        return device, torch.float32, StepShape(64, 8, 4, document=24, **tiny), StepShape(64, 4, 2, document=24, **tiny)
    return device, torch.bfloat16, StepShape(), StepShape(anchors=512, block=8)


def extra_backends() -> list[str]:
    """Attention backends beside flex that exist here and are meant for a GPU."""
    from dflash.drafter import kernels
    from dflash.drafter.attention import BACKENDS

    return [name for name in BACKENDS if name == "triton" and kernels.usable("cuda")]


def measured(
    shape, soft, ceiling, group, name, seconds=30, backend=None, repeats=5, optimizer=False, chunk=None, **options
) -> None:
    """One version of our step."""
    import torch

    from dflash.bench import step
    from dflash.bench.timing import free_memory
    from dflash.bench.workload import make_drafter, make_head, make_inputs

    device, dtype, *_ = setup()

    def call() -> dict:
        torch.manual_seed(0)  # the same weights in every version: their losses must agree
        drafter = make_drafter(
            shape,
            make_head(shape, device, dtype),
            device,
            dtype,
            attention_backend=backend,
            loss_chunk_rows=chunk,
            **options,
        )
        adam = step.make_optimizer(drafter) if optimizer else None
        function = step.step_call(drafter, make_inputs(shape, device, dtype), soft, adam)
        return step.report(name, shape, soft, function, device, ceiling, 2, repeats)

    def clean() -> dict:
        try:
            fields = call()
        finally:
            free_memory(device)
        return {k: v for k, v in fields.items() if k != "name"}

    HARNESS.attempt(group, name, seconds, clean)
    free_memory(device)


def ceiling_of(group: str) -> float:
    from dflash.bench.timing import matmul_ceiling

    device, dtype, *_ = setup()
    value = matmul_ceiling(device, dtype)
    HARNESS.record(group, "matmul ceiling", tflops=value / 1e12)
    return value


def best_backend(group: str) -> str | None:
    """The attention backend of the fastest soft-label step so far."""
    rows = [r for r in HARNESS.results() if r["group"] == group and r["name"].startswith("fast ") and "seconds_median" in r]
    rows = [r for r in rows if r["name"] in ("fast flex", "fast triton")]
    if not rows:  # the group was not asked for
        return next(iter(extra_backends()), None)
    name = min(rows, key=lambda r: r["seconds_median"])["name"].split()[1]
    return None if name == "flex" else name
