"""`bench step`: one training step of the drafter, forward and backward, with or without its optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace

import torch

from dflash.bench.shapes import StepShape
from dflash.bench.timing import environment, free_memory, matmul_ceiling, measure, refuse_hours, timing_fields, write_json
from dflash.bench.workload import StepInputs, make_drafter, make_head, make_inputs, matmul_flops
from dflash.devices import device_named, dtype_named
from dflash.drafter import fast_path, kernels
from dflash.drafter.fp8_head import refuse
from dflash.drafter.model import DFlashDrafter
from dflash.errors import ConfigError
from dflash.runs.tables import Table
from dflash.train.optimizer import MasterAdamW

GAMMA = 10.0
SMALLER = (
    "--tokens 512 --anchors 64 --block 4 --hidden 576 --layers 2 --heads 9 --kv-heads 3 --head-dim 64 "
    "--intermediate 1536 --vocab 49152"
)  # a step of a second on a CPU


def step_call(
    drafter: DFlashDrafter, inputs: StepInputs, soft: bool, optimizer: MasterAdamW | None = None
) -> Callable[[], float]:
    """A function that runs one step and returns its loss as a tensor."""
    parameters = [p for p in drafter.parameters() if p.requires_grad]

    def call():
        for parameter in parameters:
            parameter.grad = None
        loss, _ = drafter(**inputs.arguments, use_soft_labels=soft, gamma=GAMMA)
        loss.backward()
        if optimizer is not None:
            optimizer.accumulate()
            optimizer.step(1e-4)
        return loss.detach()

    return call


def make_optimizer(drafter: DFlashDrafter) -> MasterAdamW:
    return MasterAdamW(drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=1.0)


def report(
    name: str, shape: StepShape, soft: bool, call: Callable, device: torch.device, ceiling: float, warmup: int, repeats: int
) -> dict:
    """Measure one version of the step."""
    loss = float(call())
    timing = measure(call, device, warmup, repeats)
    flops = matmul_flops(shape, soft)
    return {
        "name": name,
        "anchors": shape.anchors,
        "block": shape.block,
        "labels": "soft" if soft else "hard",
        "loss": loss,
        "tokens_per_second": shape.tokens / timing.median,
        **timing_fields(timing),
        "matmul_flops": flops,
        "matmul_flops_per_second": flops / timing.median,
        "mfu": flops / timing.median / ceiling,
    }


def run(args: argparse.Namespace) -> int:
    device, dtype = device_named(args.device), dtype_named(args.dtype)
    shape = shape_asked(args)
    soft = args.labels == "soft"
    if args.path in ("fast", "both") and not kernels.usable(device):
        raise ConfigError(f"the fast path's Triton kernels do not run on {device}; give --path plain or auto")
    if args.head_precision == "fp8":
        refuse(device, dtype, shape.hidden)
    ceiling = matmul_ceiling(device, dtype)
    calls = 1 + args.warmup + args.repeats
    refuse_hours(lambda: calls * matmul_flops(shape, soft) / ceiling, device, SMALLER)
    inputs = make_inputs(shape, device, dtype, args.seed)
    head = make_head(shape, device, dtype)
    results = []
    common = (device, ceiling, args.warmup, args.repeats)

    def ours(name: str, kind: str, **options) -> None:
        name += f" {kind}" * (kind != "dflash")
        drafter = make_drafter(
            replace(shape, kind=kind),
            head,
            device,
            dtype,
            attention_backend=args.attention,
            loss_chunk_rows=args.chunk_rows,
            head_precision=args.head_precision,
            **options,
        )
        optimizer = make_optimizer(drafter) if args.optimizer else None
        name += " fp8 head" * (args.head_precision == "fp8")
        results.append(report(name, shape, soft, step_call(drafter, inputs, soft, optimizer), *common))

    for kind in args.kinds:
        if args.path in ("plain", "both"):
            ours("plain", kind, fast_path=False)
            free_memory(device)
        if args.path in ("fast", "both") or args.path == "auto":
            probe = make_drafter(shape, head, device, dtype) if args.path == "auto" else None
            chosen = probe is None or fast_path.applies(probe)
            del probe
            ours("fast" if chosen else "plain", kind, fast_path=chosen)
            free_memory(device)
    if args.peer:
        from dflash.bench.peer import peer_call

        results.append(
            report(f"peer {args.peer}", shape, soft, peer_call(shape, inputs, head, device, dtype, soft), *common)
        )
        for result in results[:-1]:
            result["ratio_to_peer"] = result["tokens_per_second"] / results[-1]["tokens_per_second"]
    print_table(results, ceiling)
    write_json(
        args.json,
        bench="step",
        shape=vars(shape),
        dtype=args.dtype,
        optimizer=args.optimizer,
        head_precision=args.head_precision,
        matmul_ceiling=ceiling,
        environment=environment(device),
        results=results,
    )
    return 0


def print_table(results: list[dict], ceiling: float) -> None:
    print(f"matmul ceiling {ceiling / 1e12:.3g} TFLOP/s")
    rows = [
        {
            "version": r["name"],
            "shape": f"{r['anchors']}x{r['block']}",
            "labels": r["labels"],
            "ms": r["seconds_median"] * 1e3,
            "tokens/s": round(r["tokens_per_second"]),
            "peak GB": None if r["peak_bytes"] is None else r["peak_bytes"] / 1e9,
            "TFLOP/s": r["matmul_flops_per_second"] / 1e12,
            "MFU": r["mfu"],
            "loss": f"{r['loss']:.4f}",
            "x peer": r.get("ratio_to_peer"),
        }
        for r in results
    ]
    print(Table(rows))


def shape_asked(args: argparse.Namespace) -> StepShape:
    """The shape of the options. Raises ConfigError where no drafter has it."""
    shape = StepShape(**{f.name: getattr(args, f.name) for f in fields(StepShape) if f.name != "kind"})
    _ = shape.config  # refuses sizes that do not fit together
    return shape
