"""`bench attention`: the drafter's attention alone, forward and backward, on a pack's own mask."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from dflash.bench.shapes import StepShape
from dflash.bench.step import shape_asked
from dflash.bench.timing import environment, free_memory, measure, refuse_hours, timing_fields, write_json
from dflash.bench.workload import document_lengths
from dflash.devices import device_named, dtype_named, synchronize
from dflash.drafter.attention import AttentionMask, attention
from dflash.drafter.masks import document_ids, sample_anchors
from dflash.runs.tables import Table

MAX_DENSE_BYTES = 32 << 30
SMALLER = "--tokens 2048 --anchors 64 --block 8"


def make_mask(shape: StepShape, device: torch.device) -> AttentionMask:
    """The mask of a made-up pack."""
    host = torch.Generator().manual_seed(0)
    lengths = document_lengths(shape.tokens, shape.document, host)
    anchors = sample_anchors(
        torch.rand(shape.tokens, generator=host) < shape.supervised, lengths, shape.block, shape.anchors, host
    )
    return AttentionMask(anchors.to(device), document_ids(lengths, shape.tokens).to(device), shape.block)


def visible_pairs(mask: AttentionMask) -> int:
    """Query-key pairs that the mask lets through: what an ideal kernel would work on."""
    documents, positions = mask.doc_ids.cpu(), mask.anchors.positions.cpu()
    first = torch.searchsorted(documents.where(documents >= 0, documents.max() + 1), documents[positions])
    context = torch.where(mask.anchors.valid.cpu(), positions - first, 0)
    return int((context + mask.block_size).sum()) * mask.block_size


def measure_backend(
    backend: str, shape: StepShape, device: torch.device, dtype: torch.dtype, warmup: int = 3, repeats: int = 10
) -> dict:
    """Seconds of the mask, of forward, and of forward with backward; FLOP/s count visible pairs alone."""
    generator = torch.Generator(device).manual_seed(0)
    queries = shape.anchors * shape.block

    def heads(count: int, length: int) -> torch.Tensor:
        # In memory [positions, heads, D], as the projections leave it.
        x = torch.randn(1, length, count, shape.head_dim, generator=generator, device=device, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    q, grad = heads(shape.heads, queries), heads(shape.heads, queries).detach()
    k, v = heads(shape.kv_heads, shape.tokens + queries), heads(shape.kv_heads, shape.tokens + queries)
    mask = make_mask(shape, device)

    def forward():
        return attention(q, k, v, mask, backend, MAX_DENSE_BYTES)

    def both():
        return torch.autograd.grad(forward(), (q, k, v), grad)

    both()
    synchronize(device)

    def build():
        fresh = AttentionMask(mask.anchors, mask.doc_ids, mask.block_size)
        if backend == "flex":
            return fresh.block_sparse
        return fresh.ranges(shape.heads // shape.kv_heads) if backend == "triton" else fresh.mask_mod

    flops = 4 * visible_pairs(mask) * shape.heads * shape.head_dim
    result = {"backend": backend, "anchors": shape.anchors, "block": shape.block, "visible_flops": flops}
    for name, call, work in (("mask", build, 0), ("forward", forward, flops), ("both", both, 3.5 * flops)):
        timing = measure(call, device, warmup, repeats)
        result[name] = timing_fields(timing) | {"flops_per_second": work / timing.median}
    free_memory(device)
    return result


def least_seconds(
    backend: str, shape: StepShape, device: torch.device, dtype: torch.dtype, warmup: int, repeats: int
) -> float:
    """What `measure_backend` takes, from a few anchors of a short pack and the pairs that either mask lets through."""
    small = replace(shape, tokens=min(shape.tokens, 1024), anchors=min(shape.anchors, 8))
    if small == shape:
        return 0.0
    probe = measure_backend(backend, small, device, dtype, warmup=0, repeats=1)
    forward, both = (probe[name]["seconds_median"] for name in ("forward", "both"))
    seconds = (warmup + repeats) * (forward + both) + both
    return seconds * visible_pairs(make_mask(shape, device)) / max(1, visible_pairs(make_mask(small, device)))


def run(args: argparse.Namespace) -> int:
    device, dtype = device_named(args.device), dtype_named(args.dtype)
    shape = shape_asked(args)
    named = args.backends or ("flex" if device.type == "cuda" else "sdpa_chunked")
    backends, settings = named.split(","), (shape, device, dtype, args.warmup, args.repeats)
    refuse_hours(lambda: sum(least_seconds(b, *settings) for b in backends), device, SMALLER)
    results = [measure_backend(b, *settings) for b in backends]
    rows = []
    for r in results:
        times = (r[key]["seconds_median"] * 1e3 for key in ("mask", "forward", "both"))
        rows.append((r["backend"], *times, r["both"]["flops_per_second"] / 1e12))
    print(Table(rows, ("backend", "mask ms", "forward ms", "+backward ms", "TFLOP/s")))
    write_json(
        args.json, bench="attention", shape=vars(shape), dtype=args.dtype, environment=environment(device), results=results
    )
    return 0
