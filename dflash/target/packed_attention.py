"""Causal attention of documents that lie in one row, as the fast capture runs it: no padding and no mask tensor.

torch's variable-length attention takes all documents in one launch. Where it is missing (older torch, other dtypes, a
CPU) `scaled_dot_product_attention` takes one after another, with the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.devices import to_device

VarlenCall = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


class Documents(NamedTuple):
    """Documents of a packed row that starts with the first: `borders` and `positions` on the row's device."""

    sizes: list[int]
    positions: Tensor  # [T] int64, of each token in its document
    borders: Tensor  # [documents + 1] int64
    borders_host: Tensor
    borders_int32: Tensor

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> Documents:
        borders = torch.tensor([0, *accumulate(sizes)])
        there = to_device(borders, device)
        return cls(sizes, to_device(document_positions(sizes), device), there, borders, there.int())


def document_positions(sizes: list[int]) -> Tensor:
    """Position of every token in its own document, [sum(sizes)] int64 on the CPU."""
    counts = torch.tensor(sizes, dtype=torch.int64)
    return torch.arange(sum(sizes)) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def varlen_call(device: torch.device, dtype: torch.dtype) -> VarlenCall | None:
    """torch's variable-length attention, or None where this torch, device or dtype has none."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return adapt(varlen_attn)


def adapt(function: Callable) -> VarlenCall | None:
    """`call(q, k, v, borders, longest, scale)` over a `varlen_attn` of any signature that torch gave it so far.

    q [T, heads, D], k and v [T, KV heads, D], borders [documents + 1] int32. None for a signature that is not known.
    Causal is `is_causal=True` in torch 2.10 and a window of (-1, 0) later; heads that share keys are allowed silently or
    by `enable_gqa`; where there is no `scale`, 1 / sqrt(D) is built in and other scales go into q.
    """
    known = inspect.signature(function).parameters
    if "window_size" in known:
        causal = {"window_size": (-1, 0)}
    elif "is_causal" in known:
        causal = {"is_causal": True}
    else:
        return None

    def call(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float) -> Tensor:
        options = dict(causal)
        if "enable_gqa" in known:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        if "scale" in known:
            options["scale"] = scale
        elif abs(scale * q.shape[-1] ** 0.5 - 1) > 1e-6:
            q = q * (scale * q.shape[-1] ** 0.5)
        return function(q, k, v, borders, borders, longest, longest, **options)

    return call


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, varlen: VarlenCall | None
) -> Tensor:
    """Each document attends to itself, causally. q [T, heads, D], k and v [T, KV heads, D]; returns [T, heads, D]."""
    if varlen is not None:
        return varlen(q, k, v, documents.borders_int32, max(documents.sizes), scale)
    sizes, outputs = documents.sizes, []
    for parts in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        heads = [part.transpose(0, 1)[None] for part in parts]  # [1, heads, length, D]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
