"""One side of DFlash 2's local convolution (`drafter.convolution`) and its gradients, each one pass over its tensors.

    out[t, c] = sum over taps k of (base[k, c] + delta[t, k, c // g]) * z[t - k, c]      taps in front of the block are zero

A program holds a whole row as [G, g] (groups, channels of a group), so that the gradient of delta is a sum over one axis.
Arithmetic in float32. The gradient of base is summed per program first and over programs by torch: deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # of the backward pass, four per multiprocessor of a Hopper card


@triton.jit
def _tile(groups, size, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    group, channel = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    return group * size + channel, (group < groups) & (channel < size)


# The number of rows changes with the data and must not make a new variant of the kernel.
@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    z_ptr, base_ptr, delta_ptr, out_ptr, rows, delta_stride, groups, size,
    S: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    width = groups * size
    at, keep = _tile(groups, size, GROUPS, SIZE)
    group = tl.arange(0, GROUPS)
    out = tl.zeros((GROUPS, SIZE), tl.float32)
    for tap in tl.static_range(K):
        if row % S >= tap:
            z = tl.load(z_ptr + (row - tap) * width + at, mask=keep, other=0.0).to(tl.float32)
            base = tl.load(base_ptr + tap * width + at, mask=keep, other=0.0).to(tl.float32)
            delta = tl.load(delta_ptr + row * delta_stride + tap * groups + group, mask=group < groups, other=0.0)
            out += (base + delta.to(tl.float32)[:, None]) * z
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    z_ptr, base_ptr, delta_ptr, dout_ptr, dz_ptr, ddelta_ptr, dbase_ptr, rows, delta_stride, ddelta_stride, groups, size,
    S: tl.constexpr, TAP: tl.constexpr, FIRST: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What tap TAP gives: ddelta and dbase of its own, and its share of dz (set by the first tap, added to by others)."""
    program = tl.program_id(0)
    width = groups * size
    at, keep = _tile(groups, size, GROUPS, SIZE)
    group = tl.arange(0, GROUPS)
    some = group < groups
    base = tl.load(base_ptr + TAP * width + at, mask=keep, other=0.0).to(tl.float32)
    dbase = tl.zeros((GROUPS, SIZE), tl.float32)
    wide = tl.full((), 1, tl.int64)  # rows * width may pass 2**31
    for index in range(program, rows, tl.num_programs(0)):
        row = index * wide
        slot = index % S
        # the row as one that reads `TAP` rows back
        dout = tl.load(dout_ptr + row * width + at, mask=keep & (slot >= TAP), other=0.0).to(tl.float32)
        z = tl.load(z_ptr + (row - TAP) * width + at, mask=keep & (slot >= TAP), other=0.0).to(tl.float32)
        product = dout * z
        dbase += product
        ddelta = tl.sum(product, 1)
        tl.store(ddelta_ptr + row * ddelta_stride + TAP * groups + group, ddelta.to(ddelta_ptr.dtype.element_ty), mask=some)
        # the row as one that is read by the row `TAP` further on
        read = slot + TAP < S
        later = tl.load(dout_ptr + (row + TAP) * width + at, mask=keep & read, other=0.0).to(tl.float32)
        delta = tl.load(delta_ptr + (row + TAP) * delta_stride + TAP * groups + group, mask=some & read, other=0.0)
        dz = later * (base + delta.to(tl.float32)[:, None])
        if not FIRST:
            dz += tl.load(dz_ptr + row * width + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(dz_ptr + row * width + at, dz.to(dz_ptr.dtype.element_ty), mask=keep)
    tl.store(dbase_ptr + program.to(tl.int64) * width + at, dbase, mask=keep)


def _shape(z: Tensor, delta: Tensor, taps: int) -> dict:
    groups = delta.shape[1] // taps
    size = z.shape[1] // groups
    blocks = {"GROUPS": triton.next_power_of_2(groups), "SIZE": triton.next_power_of_2(size)}
    return {"groups": groups, "size": size, **blocks, "num_warps": 8}


def convolve(z: Tensor, base: Tensor, delta: Tensor, block_size: int) -> Tensor:
    """z [Q, H] contiguous, base [K, H] contiguous, delta [Q, K * G] (row stride free) -> [Q, H]."""
    out = torch.empty_like(z)
    shape = _shape(z, delta, base.shape[0])
    _forward_kernel[(z.shape[0],)](
        z, base, delta, out, z.shape[0], delta.stride(0), S=block_size, K=base.shape[0], **shape
    )  # fmt: skip
    return out


def convolve_backward(
    z: Tensor, base: Tensor, delta: Tensor, dout: Tensor, ddelta: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """(dz [Q, H], dbase [K, H]) of `convolve` from dout [Q, H] contiguous; fills ddelta [Q, K * G] (row stride free)."""
    taps, rows = base.shape[0], z.shape[0]
    programs, dz = min(PROGRAMS, rows), torch.empty_like(z)
    partial = torch.empty(taps, programs, z.shape[1], dtype=torch.float32, device=z.device)
    shape = _shape(z, delta, taps)
    for tap in range(taps):
        _backward_kernel[(programs,)](
            z, base, delta, dout, dz, ddelta, partial[tap], rows, delta.stride(0), ddelta.stride(0),
            S=block_size, TAP=tap, FIRST=tap == 0, **shape,
        )  # fmt: skip
    return dz, partial.sum(1).to(base.dtype)
