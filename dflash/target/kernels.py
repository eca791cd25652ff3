"""Memory-bound parts of a target's layers over a packed row, each one pass: the short causal convolution that stops at
document borders, the gated norm after the recurrence, and head norm with rotary, each optional in part. Forward only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TIME = 32
CHANNELS = 128


# Lengths change with the data and must not make new variants of the kernels.
@triton.jit(do_not_specialize=["length"])
def _conv_silu(
    x_ptr,
    weight_ptr,
    position_ptr,
    out_ptr,
    length,
    x_row,
    out_row,
    WIDTH: tl.constexpr,
    TIME: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    time = tl.program_id(0) * TIME + tl.arange(0, TIME)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = time < length
    position = tl.load(position_ptr + time, mask=exists, other=0)
    total = tl.zeros((TIME, CHANNELS), tl.float32)
    for back in tl.static_range(WIDTH):
        tap = tl.load(weight_ptr + channel * WIDTH + (WIDTH - 1 - back)).to(tl.float32)
        inside = exists & (position >= back)
        source = x_ptr + (time - back).to(tl.int64)[:, None] * x_row + channel[None, :]
        total += tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32) * tap[None, :]
    dtype = out_ptr.dtype.element_ty
    total = total.to(dtype).to(tl.float32)
    target = out_ptr + time.to(tl.int64)[:, None] * out_row + channel[None, :]
    tl.store(target, (total / (1.0 + tl.exp(-total))).to(dtype), mask=exists[:, None])


def conv_silu(x: Tensor, weight: Tensor, positions: Tensor, out: Tensor) -> None:
    """silu of the depthwise causal convolution of x [T, C] (row stride free) into out [T, C].

    weight: [C, W]. positions: [T] int, of each token in its document: nothing before its start is read. C is a multiple
    of 128, or smaller than that and a power of two.
    """
    length, channels = out.shape
    block = min(CHANNELS, channels)
    _conv_silu[(triton.cdiv(length, TIME), channels // block)](
        x,
        weight,
        positions,
        out,
        length,
        x.stride(0),
        out.stride(0),
        WIDTH=weight.shape[1],
        TIME=TIME,
        CHANNELS=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(x_ptr, gate_ptr, weight_ptr, out_ptr, rows, eps, ROWS: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    keep = (row < rows)[:, None]
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    x = (x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]).to(dtype).to(tl.float32)
    x = (weight[None, :] * x).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (x * gate / (1.0 + tl.exp(-gate))).to(dtype), mask=keep)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * RMSNorm(x) * silu(gate) over the last axis of contiguous tensors [.., D]."""
    out = torch.empty_like(gate)
    rows = x.numel() // x.shape[-1]
    _gated_norm[(triton.cdiv(rows, 32),)](x, gate, weight, out, rows, eps, ROWS=32, D=x.shape[-1], num_warps=4)
    return out


@triton.jit(do_not_specialize=["length"])
def _norm_partial_rotary(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    length,
    x_row,
    x_head,
    out_row,
    out_head,
    eps,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    keep = (row < length)[:, None]
    lanes, half = tl.arange(0, D), tl.arange(0, ROTARY // 2)
    dtype = out_ptr.dtype.element_ty
    source = x_ptr + row.to(tl.int64)[:, None] * x_row + head * x_head
    target = out_ptr + row.to(tl.int64)[:, None] * out_row + head * out_head
    first = tl.load(source + half[None, :], mask=keep, other=0.0).to(tl.float32)
    second = tl.load(source + ROTARY // 2 + half[None, :], mask=keep, other=0.0).to(tl.float32)
    if NORM or ROTARY < D:
        x = tl.load(source + lanes[None, :], mask=keep, other=0.0).to(tl.float32)
        if NORM:
            rstd = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
            x = x * rstd * tl.load(weight_ptr + lanes)[None, :]
            first = (first * rstd * tl.load(weight_ptr + half)[None, :]).to(dtype).to(tl.float32)
            second = (second * rstd * tl.load(weight_ptr + ROTARY // 2 + half)[None, :]).to(dtype).to(tl.float32)
        tl.store(target + lanes[None, :], x.to(dtype), mask=keep & (lanes >= ROTARY)[None, :])
    table = row[:, None] * (ROTARY // 2) + half[None, :]
    cos = tl.load(cos_ptr + table, mask=keep, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=keep, other=0.0).to(tl.float32)
    tl.store(target + half[None, :], (first * cos - second * sin).to(dtype), mask=keep)
    tl.store(target + ROTARY // 2 + half[None, :], (second * cos + first * sin).to(dtype), mask=keep)


def norm_partial_rotary(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Head norm of x [T, heads, D] (strides free, last one 1), then rotary on its first R features. weight [D] float32, or
    None for rotary alone; cos, sin [T, R / 2] contiguous; D and R powers of two. Returns [T, heads, D]."""
    length, heads, d = x.shape
    out = torch.empty(length, heads, d, dtype=x.dtype, device=x.device)
    _norm_partial_rotary[(triton.cdiv(length, 16), heads)](
        x,
        x if weight is None else weight,
        cos,
        sin,
        out,
        length,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        eps,
        NORM=weight is not None,
        ROWS=16,
        D=d,
        ROTARY=2 * cos.shape[1],
        num_warps=4,
    )
    return out
