"""One side of DFlash 2's local convolution (`drafter.convolution`) and its gradients, each one pass over its tensors.

    out[t, c] = sum over taps k of (base[k, c] + delta[t, k, c // g]) * z[t - k, c]      taps in front of the block are zero

A program works on a tile of groups, [G, g] (groups, channels of a group), so that the gradient of delta is a sum over one
axis, and goes through its blocks slot by slot: the neighbouring rows that the taps want are in the cache. Arithmetic in
float32. The gradient of base is summed per program first and over programs by torch: deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 1024  # of a tile, about
PROGRAMS = 264  # of the backward pass for each tile, two per multiprocessor of a Hopper card


@triton.jit
def _tile(groups, size, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """This program's groups, whether they exist, and the same for their channels."""
    group, channel = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, SIZE)[None, :]
    at, some = group[:, None] * size + channel, group < groups
    return group, some, at, some[:, None] & (channel < size)


# The number of rows changes with the data and must not make a new variant of the kernel.
@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    z_ptr, base_ptr, delta_ptr, out_ptr, blocks, delta_stride, groups, size,
    S: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * S
    width = groups * size
    group, some, at, keep = _tile(groups, size, GROUPS, SIZE)
    for slot in range(S):
        row = first + slot
        out = tl.zeros((GROUPS, SIZE), tl.float32)
        for tap in tl.static_range(K):
            z = tl.load(z_ptr + (row - tap) * width + at, mask=keep & (slot >= tap), other=0.0).to(tl.float32)
            base = tl.load(base_ptr + tap * width + at, mask=keep, other=0.0).to(tl.float32)
            delta = tl.load(delta_ptr + row * delta_stride + tap * groups + group, mask=some, other=0.0).to(tl.float32)
            out += (base + delta[:, None]) * z
        tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _tap_backward(
    dout, base, z_ptr, delta_ptr, dout_ptr, ddelta_ptr, row, slot, delta_stride, ddelta_stride, groups, width,
    group, some, at, keep, S: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """One tap at one row: dbase's summand, which also fills ddelta, and dz's summand. dout: of `row`."""
    z = tl.load(z_ptr + (row - TAP) * width + at, mask=keep & (slot >= TAP), other=0.0).to(tl.float32)
    product = dout * z  # the row as one that reads `TAP` rows back
    ddelta = tl.sum(product, 1).to(ddelta_ptr.dtype.element_ty)
    tl.store(ddelta_ptr + row * ddelta_stride + TAP * groups + group, ddelta, mask=some)
    read = slot + TAP < S  # the row as one that is read by the row `TAP` further on
    later = dout if TAP == 0 else tl.load(dout_ptr + (row + TAP) * width + at, mask=keep & read, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + (row + TAP) * delta_stride + TAP * groups + group, mask=some & read, other=0.0)
    return product, later * (base + delta.to(tl.float32)[:, None])


@triton.jit(do_not_specialize=["blocks"])
def _backward_kernel(
    z_ptr, base_ptr, delta_ptr, dout_ptr, dz_ptr, ddelta_ptr, dbase_ptr, blocks, delta_stride, ddelta_stride, groups, size,
    S: tl.constexpr, K: tl.constexpr, TAP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What the taps TAP and TAP + 1 give: ddelta and dbase of their own, and their share of dz."""
    width = groups * size
    group, some, at, keep = _tile(groups, size, GROUPS, SIZE)
    base = tl.load(base_ptr + TAP * width + at, mask=keep, other=0.0).to(tl.float32)
    dbase = tl.zeros((GROUPS, SIZE), tl.float32)
    if TAP + 1 < K:
        next_base = tl.load(base_ptr + (TAP + 1) * width + at, mask=keep, other=0.0).to(tl.float32)
        next_dbase = tl.zeros((GROUPS, SIZE), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        for slot in range(S):
            row = tl.full((), S, tl.int64) * block + slot  # rows * width may pass 2**31
            dout = tl.load(dout_ptr + row * width + at, mask=keep, other=0.0).to(tl.float32)
            product, dz = _tap_backward(
                dout, base, z_ptr, delta_ptr, dout_ptr, ddelta_ptr, row, slot, delta_stride, ddelta_stride, groups, width,
                group, some, at, keep, S, TAP,
            )  # fmt: skip
            dbase += product
            if TAP + 1 < K:
                product, more = _tap_backward(
                    dout, next_base, z_ptr, delta_ptr, dout_ptr, ddelta_ptr, row, slot, delta_stride, ddelta_stride, groups,
                    width, group, some, at, keep, S, TAP + 1,
                )  # fmt: skip
                next_dbase += product
                dz += more
            if TAP > 0:
                dz += tl.load(dz_ptr + row * width + at, mask=keep, other=0.0).to(tl.float32)
            tl.store(dz_ptr + row * width + at, dz.to(dz_ptr.dtype.element_ty), mask=keep)
    partial = (tl.program_id(0).to(tl.int64) * K + TAP) * width + at
    tl.store(dbase_ptr + partial, dbase, mask=keep)
    if TAP + 1 < K:
        tl.store(dbase_ptr + partial + width, next_dbase, mask=keep)


def _shape(z: Tensor, delta: Tensor, base: Tensor) -> tuple[int, dict]:
    """Tiles of a row, and the sizes that the kernels are compiled for."""
    groups = delta.shape[1] // base.shape[0]
    size = z.shape[1] // groups
    channels = triton.next_power_of_2(size)
    tile = min(triton.next_power_of_2(groups), max(1, CHANNELS // channels))
    return triton.cdiv(groups, tile), {"groups": groups, "size": size, "GROUPS": tile, "SIZE": channels, "num_warps": 4}


def convolve(z: Tensor, base: Tensor, delta: Tensor, block_size: int) -> Tensor:
    """z [Q, H] contiguous, Q whole blocks, base [K, H] contiguous, delta [Q, K * G] (row stride free) -> [Q, H]."""
    out, blocks = torch.empty_like(z), z.shape[0] // block_size
    tiles, shape = _shape(z, delta, base)
    _forward_kernel[(blocks, tiles)](
        z, base, delta, out, blocks, delta.stride(0), S=block_size, K=base.shape[0], **shape
    )  # fmt: skip
    return out


def convolve_backward(
    z: Tensor, base: Tensor, delta: Tensor, dout: Tensor, ddelta: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """(dz [Q, H], dbase [K, H]) of `convolve` from dout [Q, H] contiguous; fills ddelta [Q, K * G] (row stride free)."""
    (taps, width), blocks, dz = base.shape, z.shape[0] // block_size, torch.empty_like(z)
    programs = min(PROGRAMS, blocks)
    partial = torch.empty(programs, taps, width, dtype=torch.float32, device=z.device)
    tiles, shape = _shape(z, delta, base)
    for tap in range(0, taps, 2):
        _backward_kernel[(programs, tiles)](
            z, base, delta, dout, dz, ddelta, partial, blocks, delta.stride(0), ddelta.stride(0),
            S=block_size, K=taps, TAP=tap, **shape,
        )  # fmt: skip
    return dz, partial.sum(0).to(base.dtype)
