"""`bench target`: how fast a target's features are captured, by the plain path and by the fast one.

`--model` is any target that a run takes. Of a random one a few layers do (`random:qwen3.6-27b@8`, the default): tokens per
second are scaled to the whole depth, since every group of four layers costs the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from dflash.bench.timing import (
    Timing,
    environment,
    free_memory,
    matmul_ceiling,
    measure,
    refuse_hours,
    timing_fields,
    write_json,
)
from dflash.bench.workload import document_lengths
from dflash.devices import device_named, dtype_named, synchronize
from dflash.runs.tables import Table
from dflash.target import fast_capture as fast_target
from dflash.target.capture import Target, load_target
from dflash.target.loading import load_config, resolve_source
from dflash.target.random_weights import is_random, random_config

SMALLER = "--model random:tiny-hybrid, or fewer --tokens"


def layer_flops(model: nn.Module) -> float:
    """FLOPs of one token through the matrix products of a model's layers."""
    return 2.0 * sum(w.numel() for name, w in model.named_parameters() if ".layers." in name and w.dim() > 1)


def least_seconds(name: str, tokens: int, ceiling: float) -> float:
    """What one capture takes a device of `ceiling` FLOP/s; the model is built without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(resolve_source(name)))
    return layer_flops(model) * tokens / ceiling


def capture_call(target: Target, tokens: int, document: int) -> Callable[[], object]:
    """A function that captures one pack, each time with documents of other lengths, as training has them: what is done
    once for a shape (plans, tuning, caching) is paid for as there."""
    host = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.embed_weight.shape[0], (1, tokens), generator=host)
    return lambda: target.capture(ids, document_lengths(tokens, document, host))


def report(name: str, target: Target, args: argparse.Namespace, ceiling: float) -> dict:
    """Measure `target.capture`, soft labels' last state included.

    `host_seconds` is what the call took before it returned: on a GPU the time to launch it, on a CPU all of it.
    """
    call = capture_call(target, args.tokens, args.document)
    timing = measure(call, target.device, args.warmup, args.repeats)
    rate = args.tokens / timing.median
    flops = layer_flops(target.model) * rate
    return {
        "name": name,
        "tokens_per_second": rate * target.num_layers / whole_depth(args.model, target),
        **timing_fields(timing),
        "host_seconds": _host_seconds(call, target.device, timing),
        "matmul_flops_per_second": flops,
        "mfu": flops / ceiling,
    }


def whole_depth(name: str, target: Target) -> int:
    """Layers of the model that a target stands for."""
    return random_config(name.partition("@")[0]).num_hidden_layers if is_random(name) else target.num_layers


def _host_seconds(call: Callable[[], object], device: torch.device, timing: Timing) -> float:
    """Median seconds until the call returns, each into an empty stream; on a CPU the call is the work, timed already."""
    if device.type != "cuda":
        return timing.median
    seconds = []
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure_ways(target: Target, args: argparse.Namespace, ceiling: float) -> list[dict]:
    """Plain, fast, and fast with the documents' attention one after another."""
    results = [report("plain", target, args, ceiling)]
    free_memory(target.device)
    if fast_target.attach(target):
        results.append(report("fast", target, args, ceiling))
        if target.fast.varlen is not None:
            target.fast.varlen = None
            results.append(report("loop", target, args, ceiling))
    return results


def run(args: argparse.Namespace) -> int:
    device, dtype = device_named(args.device), dtype_named(args.dtype)
    ceiling = matmul_ceiling(device, dtype)
    calls = args.warmup + args.repeats
    refuse_hours(lambda: calls * least_seconds(args.model, args.tokens, ceiling), device, SMALLER)
    target = load_target(args.model, device, dtype, fast=False)
    results = measure_ways(target, args, ceiling)
    print(target.describe())
    kernels = fast_target.has_recurrence_kernels(target)
    use = "in use" if kernels else "not in use"
    print(f"{target.num_layers} of {whole_depth(args.model, target)} layers; flash-linear-attention {use}")
    print(f"ceiling {ceiling / 1e12:.3g} TFLOP/s")
    rows = [
        {
            "path": r["name"],
            "tokens/s": round(r["tokens_per_second"]),
            "ms": r["seconds_median"] * 1e3,
            "host ms": r["host_seconds"] * 1e3,
            "TFLOP/s": r["matmul_flops_per_second"] / 1e12,
            "MFU": r["mfu"],
            "peak GB": None if r["peak_bytes"] is None else r["peak_bytes"] / 1e9,
        }
        for r in results
    ]
    print(Table(rows))
    write_json(
        args.json,
        bench="target",
        model=args.model,
        tokens=args.tokens,
        document=args.document,
        layers=target.num_layers,
        dtype=args.dtype,
        matmul_ceiling=ceiling,
        flash_linear_attention=kernels,
        environment=environment(device),
        results=results,
    )
    return 0
