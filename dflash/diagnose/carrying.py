"""What a warmup carries over to the run: one changed dimension at a time, counted in compiled graphs."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from dflash.compile_safety import CompiledFunction, installed
from dflash.diagnose.isolated import report, run_isolated
from dflash.drafter.flex import build_block_mask
from dflash.drafter.masks import document_ids, sample_anchors, visibility

BASE_TOKENS, OTHER_TOKENS, BLOCK, ANCHORS = 256, 384, 16, 16


def hypotheses(device: torch.device, backend: str = "inductor") -> list[dict[str, Any]]:
    """The field log's open questions, each settled by one changed dimension after the same warmup.

    The warmup is: causal mask, 256 tokens, no_grad, one compiled callable, one device. A row says how many graphs
    the changed call compiled, so whether the warmup carried over, and how many kernels came from inductor's cache.
    """
    cuda = device.type == "cuda"
    second = torch.device("cuda:1") if cuda and torch.cuda.device_count() > 1 else None
    changed: list[tuple[str, str, dict[str, Any] | None]] = [
        ("nothing", "a second call, equal", {}),
        ("new pack", "causal mask made anew, same shape", {}),
        ("no_grad -> grad", "inputs that need gradients", {"grad": True} if cuda else None),
        ("tokens", f"{BASE_TOKENS} -> {OTHER_TOKENS} tokens", {"tokens": OTHER_TOKENS}),
        ("mask", "causal -> anchor mask", {"anchor": True}),
        ("callable", "one compiled callable -> one of its own", {"own_callable": True}),
        ("device", "cuda:0 -> cuda:1", {"device": second} if second else None),
    ]
    return [_row(dimension, change, arguments, device, backend) for dimension, change, arguments in changed]


def _row(dimension: str, change: str, arguments: dict | None, device: torch.device, backend: str) -> dict[str, Any]:
    if arguments is None:
        needs = "needs two GPUs" if dimension == "device" else "needs a GPU: flex_attention has no backward on CPU"
        return {
            "changed": dimension,
            "how": change,
            "graphs compiled": None,
            "kernels from cache": None,
            "carries over": needs,
        }
    torch._dynamo.reset()
    call = CompiledFunction(flex_attention, "attention", backend=backend)
    with installed():
        _run(call, _inputs(device))
        other = CompiledFunction(flex_attention, "attention", backend=backend) if arguments.get("own_callable") else call
        changed = _inputs(
            arguments.get("device", device),
            arguments.get("tokens", BASE_TOKENS),
            arguments.get("anchor", False),
            arguments.get("grad", False),
        )
        counters.clear()  # the mask of the changed call is built by now: only attention is counted
        _run(other, changed)
    graphs = counters["stats"]["unique_graphs"]
    return {
        "changed": dimension,
        "how": change,
        "graphs compiled": graphs,
        "kernels from cache": counters["inductor"]["fxgraph_cache_hit"],
        "carries over": graphs == 0,
    }


def _inputs(device: torch.device, tokens: int = BASE_TOKENS, anchor: bool = False, grad: bool = False) -> tuple:
    """q, k, v and the block mask of one call."""
    rows = ANCHORS * BLOCK
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, 32, generator=generator).to(device).requires_grad_(grad)
        for heads, length in ((4, rows), (2, tokens + rows), (2, tokens + rows))
    )
    rule = _anchor_rule(tokens, device) if anchor else lambda batch, head, query, key: key <= query
    return q, k, v, build_block_mask(rule, rows, tokens + rows, device)


def _run(call: Callable, inputs: tuple) -> torch.Tensor:
    q, k, v, mask = inputs
    grad = q.requires_grad
    with torch.set_grad_enabled(grad):
        out = call(q, k, v, block_mask=mask, enable_gqa=True)
    if grad:
        out.sum().backward()
    return out.detach()


def _anchor_rule(tokens: int, device: torch.device):
    lengths = torch.tensor([tokens // 2, tokens - tokens // 2])
    anchors = sample_anchors(torch.ones(tokens, dtype=torch.bool), lengths, BLOCK, ANCHORS, torch.Generator().manual_seed(0))
    return visibility(anchors.to(device), document_ids(lengths, tokens).to(device), BLOCK)


# -- the compile cache between processes ------------------------------------------------------------------------------


def cache_rounds(device: str, backend: str = "inductor", limit: float = 300.0) -> list[dict[str, Any]]:
    """The same first call in fresh processes: empty cache, filled cache, deleted cache."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-cache-"))
    rows = []
    try:
        for name in ("empty cache", "filled cache", "cache deleted"):
            if name == "cache deleted":
                shutil.rmtree(folder)
                folder.mkdir()
            result = run_isolated(__name__, ["--device", device, "--backend", backend], limit, cache=folder)
            if result.value is None:
                raise RuntimeError(f"first call with {name}: {'hung' if result.hung else result.death}")
            rows.append({"round": name, **result.value})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _first_call(device: str, backend: str) -> dict[str, Any]:
    call = CompiledFunction(flex_attention, "attention", backend=backend)
    where = torch.device(device)
    with installed():
        inputs = _inputs(where, anchor=True, grad=where.type == "cuda")
        begin = time.perf_counter()
        out = _run(call, inputs)
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        _run(call, inputs)
        warm = time.perf_counter() - begin
    return {
        "first call s": first,
        "second call s": warm,
        "kernels from cache": counters["inductor"]["fxgraph_cache_hit"],
        "checksum": out.double().sum().item(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    report(_first_call(arguments.device, arguments.backend))
    sys.exit(0)
