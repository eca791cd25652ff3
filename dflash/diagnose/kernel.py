"""The attention kernel alone: is it right, how fast is it, and what would dense attention have taken?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.bench.timing import measure
from dflash.compile_safety import GIB, dense_bytes, installed
from dflash.devices import synchronize
from dflash.drafter.flex import build_block_mask, compiled_flex_attention
from dflash.drafter.masks import AnchorSet, MaskMod, document_ids, sample_anchors, visibility

REFERENCE_ROWS = 64


@dataclass(frozen=True)
class KernelCase:
    """One call: Q queries against K keys under a rule (`causal`, `anchors` or `unsorted anchors`)."""

    name: str
    rule: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int = 16
    document: int = 2000

    @property
    def dense_gib(self) -> float:
        return dense_bytes(1, self.heads, self.queries, self.keys) / GIB


def kernel_cases(device: torch.device) -> list[KernelCase]:
    """The field log's shapes on a GPU; the same rules, small, on a CPU."""
    if device.type == "cuda":
        q, k, h, kv, d, block = 32768, 72768, 32, 8, 128, 32
    else:
        q, k, h, kv, d, block = 512, 2560, 4, 2, 32, 16
    return [
        KernelCase("causal", "causal", q, k, h, h, d, block),
        KernelCase("causal, GQA", "causal", q, k, h, kv, d, block),
        KernelCase("anchor mask, sorted", "anchors", q, k, h, kv, d, block),
        KernelCase("anchor mask, unsorted", "unsorted anchors", q, k, h, kv, d, block),
    ]


def case_rule(case: KernelCase, device: torch.device, seed: int = 0) -> MaskMod:
    """The mask_mod of a case; the anchor rules use the package's own `visibility`."""
    if case.rule == "causal":
        return lambda batch, head, query, key: key <= query
    total = case.keys - case.queries
    host = torch.Generator().manual_seed(seed)
    document = min(case.document, total // 2)
    lengths = torch.full((total // document,), document)
    anchors = sample_anchors(torch.ones(total, dtype=torch.bool), lengths, case.block, case.queries // case.block, host)
    if case.rule == "unsorted anchors":
        order = torch.randperm(len(anchors.positions), generator=host)
        anchors = AnchorSet(anchors.positions[order], anchors.valid[order])
    return visibility(anchors.to(device), document_ids(lengths, total).to(device), case.block)


def run_kernel_case(case: KernelCase, device: torch.device, dtype: torch.dtype, repeats: int = 5) -> dict:
    """Compile, check a sample of rows against a float64 reference, time forward (and backward on CUDA).

    Returns a row: case, shape, ms, TFLOP/s of the tiles visited, tiles, peak GiB, dense GiB, error.
    """
    q, k, v = _inputs(case, device, dtype)
    rule = case_rule(case, device)
    with installed():
        mask = build_block_mask(rule, case.queries, case.keys, device)
        out = compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=case.kv_heads != case.heads)
        error = reference_error(q, k, v, rule, out)

        def forward() -> Tensor:
            return compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=case.kv_heads != case.heads)

        with torch.no_grad():
            forward_timing = measure(forward, device, warmup=2, repeats=repeats)
        both = _backward_timing(forward, (q, k, v), device, repeats)
    tiles = int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
    rows, columns = mask.BLOCK_SIZE
    work = 4 * tiles * rows * columns * case.heads * case.head_dim
    return {
        "case": case.name,
        "output": list(out.shape),
        "forward ms": forward_timing.median * 1e3,
        "forward+backward ms": both,
        "TFLOP/s (visited tiles)": work / forward_timing.median / 1e12,
        "tiles": tiles,
        "peak GiB": forward_timing.peak_bytes / GIB if forward_timing.peak_bytes else None,
        "dense GiB avoided": case.dense_gib,
        "max error": error,
    }


def _backward_timing(forward: Callable[[], Tensor], inputs: tuple, device: torch.device, repeats: int) -> float | None:
    """Milliseconds of forward with backward; None where the kernel has no backward (CPU)."""
    if device.type != "cuda":
        return None
    upstream = torch.randn_like(forward().detach())
    return measure(lambda: torch.autograd.grad(forward(), inputs, upstream), device, 2, repeats).median * 1e3


def _inputs(case: KernelCase, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        x = torch.randn(1, heads, length, case.head_dim, generator=generator, device=device, dtype=dtype)
        return x.requires_grad_(device.type == "cuda")

    return draw(case.heads, case.queries), draw(case.kv_heads, case.keys), draw(case.kv_heads, case.keys)


def reference_error(q: Tensor, k: Tensor, v: Tensor, rule: MaskMod, out: Tensor, rows: int = REFERENCE_ROWS) -> float:
    """Largest difference over a sample of query rows from plain attention in float32 (float64 on CPU)."""
    precise = torch.float32 if q.device.type == "cuda" else torch.float64
    generator = torch.Generator().manual_seed(1)
    index = torch.randperm(q.shape[2], generator=generator)[:rows].to(q.device)
    keys = torch.arange(k.shape[2], device=q.device)
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    allowed = rule(zero, zero, index[:, None], keys[None, :])  # [rows, K]
    group = q.shape[1] // k.shape[1]
    worst = 0.0
    with torch.no_grad():
        for head in range(q.shape[1]):
            scores = q[0, head, index].to(precise) @ k[0, head // group].to(precise).T / math.sqrt(q.shape[-1])
            want = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[0, head // group].to(precise)
            worst = max(worst, (out[0, head, index].to(precise) - want).abs().max().item())
    synchronize(q.device)
    return worst


def tolerance(dtype: torch.dtype) -> float:
    """What rounding may move an output of unit-variance values: two units in the last place of bf16, or float32's."""
    return 3e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
