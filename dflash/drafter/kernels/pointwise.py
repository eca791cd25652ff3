"""The memory-bound parts of a drafter layer, each one pass over its tensors: RMSNorm (with the residual sum before it),
q/k head norm with rotary, SwiGLU. Arithmetic in float32, results rounded where the plain modules round.

Weight gradients of the norms are summed per program first and over programs by torch, so they are deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_PROGRAMS = 528  # four per multiprocessor of a Hopper card
HEAD_ROWS = 32


@triton.jit
def _norm_forward(x_ptr, delta_ptr, weight_ptr, sum_ptr, y_ptr, rstd_ptr, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    keep = lanes < size
    x = tl.load(x_ptr + row * size + lanes, mask=keep, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row * size + lanes, mask=keep, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * size + lanes, x, mask=keep)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + lanes, mask=keep, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + lanes, (x * rstd * weight).to(y_ptr.dtype.element_ty), mask=keep)
    tl.store(rstd_ptr + row, rstd)


# The number of rows changes with the data and must not make a new variant of the kernel.
@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    x_ptr, rstd_ptr, weight_ptr, dy_ptr, dsum_ptr, dx_ptr, dweight_ptr, rows, size, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    keep = lanes < size
    weight = tl.load(weight_ptr + lanes, mask=keep, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    wide = tl.full((), 1, tl.int64)  # rows * size may pass 2**31
    for index in range(program, rows, tl.num_programs(0)):
        row = index * wide
        rstd = tl.load(rstd_ptr + row)
        unit = tl.load(x_ptr + row * size + lanes, mask=keep, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + row * size + lanes, mask=keep, other=0.0).to(tl.float32)
        dweight += dy * unit
        dunit = dy * weight
        dx = (dunit - unit * (tl.sum(dunit * unit, 0) / size)) * rstd
        if ADD:
            dx += tl.load(dsum_ptr + row * size + lanes, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * size + lanes, dx.to(dx_ptr.dtype.element_ty), mask=keep)
    tl.store(dweight_ptr + program * size + lanes, dweight, mask=keep)


def norm_forward(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, RMSNorm of it, reciprocal deviation [rows] float32) of contiguous x, delta [..., H]."""
    size = x.shape[-1]
    rows = x.numel() // size
    y = torch.empty_like(x)
    total = torch.empty_like(x) if delta is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_forward[(rows,)](
        x,
        delta if delta is not None else x,
        weight,
        total,
        y,
        rstd,
        size,
        eps,
        ADD=delta is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
    )
    return total, y, rstd


def norm_backward(x: Tensor, rstd: Tensor, weight: Tensor, dy: Tensor, dtotal: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gradient of x, of the weight); `dtotal`, the residual's own gradient, is added to the first."""
    size, rows = x.shape[-1], rstd.numel()
    programs = min(NORM_PROGRAMS, rows)
    dx = torch.empty_like(x)
    dweight = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        x,
        rstd,
        weight,
        dy.contiguous(),
        x if dtotal is None else dtotal.contiguous(),
        dx,
        dweight,
        rows,
        size,
        ADD=dtotal is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=16,
    )
    return dx, dweight.sum(0).to(weight.dtype)


@triton.jit
def _norm_again(x_ptr, rstd_ptr, weight_ptr, y_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    keep = lanes < size
    x = tl.load(x_ptr + row * size + lanes, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=keep, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + lanes, (x * tl.load(rstd_ptr + row) * weight).to(y_ptr.dtype.element_ty), mask=keep)


def norm_again(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """The norm's output once more, from its saved input and reciprocal deviation."""
    y, size = torch.empty_like(x), x.shape[-1]
    _norm_again[(rstd.numel(),)](x, rstd, weight, y, size, BLOCK=triton.next_power_of_2(size), num_warps=8)
    return y


class Norm(torch.autograd.Function):
    """RMSNorm of x [..., H]; weight [H]."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        _, y, rstd = norm_forward(x, None, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dweight = norm_backward(*ctx.saved_tensors, dy, None)
        return dx, dweight, None


class AddNorm(torch.autograd.Function):
    """(x + delta, RMSNorm(x + delta)) of x, delta [..., H]; weight [H]."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps):
        total, y, rstd = norm_forward(x.contiguous(), delta.contiguous(), weight, eps)
        ctx.save_for_backward(total, rstd, weight)
        ctx.set_materialize_grads(False)  # the stack's last sum is used by nothing but its norm
        return total, y

    @staticmethod
    def backward(ctx, dtotal, dy):
        dx, dweight = norm_backward(*ctx.saved_tensors, dy, dtotal)
        return dx, dx, dweight, None


@triton.jit
def _source_rows(row_map_ptr, rows, positions, MAPPED: tl.constexpr):
    if MAPPED:
        return tl.load(row_map_ptr + rows, mask=rows < positions, other=0).to(tl.int64)
    return rows.to(tl.int64)


@triton.jit
def _head_forward(
    x_ptr,
    row_map_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    positions,
    x_stride,
    out_head,
    out_row,
    eps,
    MAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """One tile of positions of one head: RMSNorm over D, then rotate the two halves."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, D // 2)
    keep = (rows < positions)[:, None]
    source = x_ptr + _source_rows(row_map_ptr, rows, positions, MAPPED)[:, None] * x_stride + head * D + half[None, :]
    first = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=keep, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
    dtype = x_ptr.dtype.element_ty
    first = (first * rstd[:, None] * tl.load(weight_ptr + half).to(tl.float32)).to(dtype).to(tl.float32)
    second = (second * rstd[:, None] * tl.load(weight_ptr + D // 2 + half).to(tl.float32)).to(dtype).to(tl.float32)
    table = rows[:, None] * (D // 2) + half[None, :]
    cos = tl.load(cos_ptr + table, mask=keep, other=0.0)
    sin = tl.load(sin_ptr + table, mask=keep, other=0.0)
    target = out_ptr + head.to(tl.int64) * out_head + rows.to(tl.int64)[:, None] * out_row + half[None, :]
    tl.store(target, (first * cos - second * sin).to(dtype), mask=keep)
    tl.store(target + D // 2, (second * cos + first * sin).to(dtype), mask=keep)


@triton.jit
def _head_backward(
    x_ptr,
    row_map_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dout_ptr,
    dx_ptr,
    dweight_ptr,
    positions,
    x_stride,
    dout_head,
    dout_row,
    dx_stride,
    eps,
    MAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, D // 2)
    keep = (rows < positions)[:, None]
    source = x_ptr + _source_rows(row_map_ptr, rows, positions, MAPPED)[:, None] * x_stride + head * D + half[None, :]
    first = tl.load(source, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=keep, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
    first *= rstd
    second *= rstd
    table = rows[:, None] * (D // 2) + half[None, :]
    cos = tl.load(cos_ptr + table, mask=keep, other=0.0)
    sin = tl.load(sin_ptr + table, mask=keep, other=0.0)
    given = dout_ptr + head.to(tl.int64) * dout_head + rows.to(tl.int64)[:, None] * dout_row + half[None, :]
    dfirst_out = tl.load(given, mask=keep, other=0.0).to(tl.float32)
    dsecond_out = tl.load(given + D // 2, mask=keep, other=0.0).to(tl.float32)
    dfirst = dfirst_out * cos + dsecond_out * sin
    dsecond = dsecond_out * cos - dfirst_out * sin
    partial = dweight_ptr + (tl.program_id(0) * tl.num_programs(1) + head).to(tl.int64) * D + half
    tl.store(partial, tl.sum(dfirst * first, 0))
    tl.store(partial + D // 2, tl.sum(dsecond * second, 0))
    dfirst *= tl.load(weight_ptr + half).to(tl.float32)
    dsecond *= tl.load(weight_ptr + D // 2 + half).to(tl.float32)
    mean = ((tl.sum(dfirst * first, 1) + tl.sum(dsecond * second, 1)) / D)[:, None]
    target = dx_ptr + rows.to(tl.int64)[:, None] * dx_stride + head * D + half[None, :]
    dtype = dx_ptr.dtype.element_ty
    tl.store(target, ((dfirst - first * mean) * rstd).to(dtype), mask=keep)
    tl.store(target + D // 2, ((dsecond - second * mean) * rstd).to(dtype), mask=keep)


def head_norm_rotary(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, out: Tensor, row_map: Tensor | None = None
) -> None:
    """Norm and rotate x [P, heads * D] (row stride free) into out [heads, P, D] (strides free, last one 1).

    cos, sin: [P, D / 2] float32 contiguous; weight: [D]. row_map: [P] int, position p reads x[row_map[p]].
    """
    heads, positions, d = out.shape
    rows = x if row_map is None else row_map
    _head_forward[(triton.cdiv(positions, HEAD_ROWS), heads)](
        x,
        rows,
        weight,
        cos,
        sin,
        out,
        positions,
        x.stride(0),
        out.stride(0),
        out.stride(1),
        eps,
        MAPPED=row_map is not None,
        ROWS=HEAD_ROWS,
        D=d,
        num_warps=4,
    )


def head_norm_rotary_backward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, dout: Tensor, dx: Tensor, row_map: Tensor | None = None
) -> Tensor:
    """Gradient of `head_norm_rotary`: fills dx [P, heads * D] from dout [heads, P, D]; returns dweight [D] float32.

    With a row_map dx still has one row per position; the caller sums those that share a source row.
    """
    heads, positions, d = dout.shape
    tiles = triton.cdiv(positions, HEAD_ROWS)
    partial = torch.empty(tiles * heads, d, dtype=torch.float32, device=x.device)
    rows = x if row_map is None else row_map
    _head_backward[(tiles, heads)](
        x,
        rows,
        weight,
        cos,
        sin,
        dout,
        dx,
        partial,
        positions,
        x.stride(0),
        dout.stride(0),
        dout.stride(1),
        dx.stride(0),
        eps,
        MAPPED=row_map is not None,
        ROWS=HEAD_ROWS,
        D=d,
        num_warps=4,
    )
    return partial.sum(0)


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < size
    gate = tl.load(gate_ptr + at, mask=keep, other=0.0)
    up = tl.load(up_ptr + at, mask=keep, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + at, (silu * up).to(gate.dtype), mask=keep)


@triton.jit
def _swiglu_backward(gate_ptr, up_ptr, dout_ptr, size, BLOCK: tl.constexpr):
    """gate <- dgate, up <- dup, dout <- silu(gate) * up, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < size
    gate = tl.load(gate_ptr + at, mask=keep, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(up_ptr + at, mask=keep, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=keep, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    tl.store(dout_ptr + at, (silu * up).to(dtype), mask=keep)
    tl.store(gate_ptr + at, (dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype), mask=keep)
    tl.store(up_ptr + at, (dout * silu).to(dtype), mask=keep)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    _swiglu_forward[(triton.cdiv(gate.numel(), 4096),)](gate, up, out, gate.numel(), BLOCK=4096, num_warps=8)
    return out


def swiglu_backward_(gate: Tensor, up: Tensor, dout: Tensor) -> None:
    """In place: gate and up become their gradients, dout becomes the product silu(gate) * up again."""
    _swiglu_backward[(triton.cdiv(gate.numel(), 2048),)](gate, up, dout, gate.numel(), BLOCK=2048, num_warps=8)
