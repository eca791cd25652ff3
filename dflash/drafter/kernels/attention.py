"""Attention of draft blocks over their document's context and over themselves, from the anchors alone: no mask tensor.

The visibility rule of `masks` in the form that a kernel wants: block b sees the context positions lo[b] <= p < hi[b],
which is a document's part before the anchor, and its own S slots. So no mask is built, the first tile of keys starts
where the visible ones start, and only a block's last tile is masked.

A program works on all G query heads of one key head at once, for as many neighbouring blocks as fill 128 rows: with
4 x 32 that is one block, whose own keys belong to it alone and get their gradient without atomics. Row r of a tile of N
blocks is block r // (G * S), head r // S % G, slot r % S. The softmax is online, in base 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dflash.compile_safety.errors import UnsupportedHeadDimError
from dflash.drafter.kernels import ROWS
from dflash.drafter.kernels.attention_tiles import backward_kv_kernel, backward_q_kernel, delta_kernel, forward_kernel

LOG2E = 1.4426950408889634
# keys per tile, warps, pipeline stages; for dkv also the rows at once
CONFIG = {"forward": (64, 8, 3), "dq": (64, 8, 3), "dkv": (64, 4, 2, 64)}  # the fastest of a sweep on an H200
# Tried in this order where a device's shared memory is too small for those; dkv's keys are fixed by `Ranges`.
SMALLER = {
    "forward": [(64, 8, 2), (32, 8, 2), (32, 8, 1)],
    "dq": [(64, 8, 2), (32, 8, 2), (32, 8, 1)],
    "dkv": [(None, 4, 1, 64), (None, 4, 1, 32), (None, 4, 1, 16)],
}


@dataclass(frozen=True)
class Ranges:
    """Context that each block sees. Tensors int32: lo, hi [tiles * N] (empty for padding anchors), tile_lo, tile_hi
    [tiles] around those of a tile's blocks; key_first, key_last [key tiles]: the block tiles that see a tile of keys.
    """

    lo: Tensor
    hi: Tensor
    tile_lo: Tensor
    tile_hi: Tensor
    key_first: Tensor
    key_last: Tensor
    blocks: int
    block_size: int
    context: int
    blocks_per_tile: int


def make_ranges(lo: Tensor, hi: Tensor, context: int, block_size: int, group: int) -> Ranges:
    """From `masks.pack_ranges` [A] over T context positions, anchors ascending and padding last; on their device."""
    blocks = lo.shape[0]
    per_tile = ROWS // (group * block_size)
    padding = -blocks % per_tile
    lo, hi = (torch.nn.functional.pad(x, (0, padding)) for x in (lo, hi))
    empty = (hi <= lo).view(-1, per_tile)
    tile_lo = torch.where(empty, context, lo.view(-1, per_tile)).amin(1)
    tile_hi = torch.where(empty, 0, hi.view(-1, per_tile)).amax(1)
    keys = CONFIG["dkv"][0]
    key_start = torch.arange(0, context, keys, device=lo.device)[:, None]
    sees = (tile_hi > key_start) & (tile_lo < key_start + keys)  # [key tiles, tiles]
    tiles = sees.shape[1]
    index = torch.arange(tiles, device=lo.device)
    first = torch.where(sees, index, tiles).amin(1)
    last = torch.where(sees, index + 1, 0).amax(1)
    return Ranges(
        *(x.to(torch.int32) for x in (lo, hi, tile_lo, tile_hi, first, last)), blocks, block_size, context, per_tile
    )


_fitting: dict[tuple, tuple[int, ...]] = {}  # what was launched -> the settings that fitted


def _launch(name: str, q: Tensor, run: Callable[[tuple[int, ...]], None]) -> None:
    """`run(settings)` with the first settings that fit the device's shared memory, remembered for the next call.

    Raises: UnsupportedHeadDimError where none fits.
    """
    first = CONFIG[name]
    key = (name, q.device, q.dtype, q.shape[-1], first)
    known = _fitting.get(key)
    if known is not None:
        return run(known)
    for settings in (first, *((keys or first[0], *rest) for keys, *rest in SMALLER[name])):
        try:
            run(settings)
        except OutOfResources:
            continue
        _fitting[key] = settings
        return
    raise UnsupportedHeadDimError(
        f"the Triton attention's {name} kernel does not fit the shared memory of {q.device} for head_dim {q.shape[-1]} in "
        f"{q.dtype}, not even with its smallest tiles; choose attention 'flex', or bfloat16"
    )


def _strides(x: Tensor) -> tuple[int, int]:
    """(row, head) strides of [1, heads, rows, D]."""
    return x.stride(2), x.stride(1)


def _like_rows(x: Tensor) -> Tensor:
    """Empty [1, heads, rows, D] that lies in memory as [rows, heads, D]."""
    _, heads, rows, d = x.shape
    return torch.empty(rows, heads, d, dtype=x.dtype, device=x.device).transpose(0, 1)[None]


class BlockAttention(torch.autograd.Function):
    """q [1, Nq, Q, D], k and v [1, Nkv, T + Q, D] (last stride 1), `Ranges`, scale -> [1, Nq, Q, D]."""

    @staticmethod
    def forward(ctx, q, k, v, ranges, scale):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        o = _like_rows(q)
        queries = q.shape[2]
        lse = torch.empty(q.shape[1], queries, dtype=torch.float32, device=q.device)
        ctx.constants = BlockAttention._constants(q, k, ranges)
        tiles = ranges.tile_lo.shape[0]

        def run(settings):
            keys, warps, stages = settings
            forward_kernel[(tiles, k.shape[1])](
                q,
                k,
                v,
                o,
                lse,
                ranges.lo,
                ranges.hi,
                ranges.tile_lo,
                ranges.tile_hi,
                *_strides(q),
                *_strides(k),
                *_strides(v),
                *_strides(o),
                ranges.context,
                queries,
                ranges.blocks,
                scale * LOG2E,
                **ctx.constants,
                KEYS=keys,
                num_warps=warps,
                num_stages=stages,
            )

        _launch("forward", q, run)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.ranges, ctx.scale = ranges, scale
        return o

    @staticmethod
    def _constants(q, k, ranges):
        return {
            "G": q.shape[1] // k.shape[1],
            "S": ranges.block_size,
            "N": ranges.blocks_per_tile,
            "D": q.shape[3],
            "CHECK": ranges.blocks % ranges.blocks_per_tile != 0,
            "EXACT": "ieee" if q.dtype == torch.float32 else "tf32",
        }

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        ranges, queries = ctx.ranges, q.shape[2]
        do = do if do.stride(-1) == 1 else do.contiguous()
        dq, dk, dv = _like_rows(q), _like_rows(k), _like_rows(v)
        delta = torch.empty_like(lse)
        delta_kernel[(triton.cdiv(queries, 64), q.shape[1])](
            o, do, delta, *_strides(o), *_strides(do), queries, ROWS=64, D=q.shape[3]
        )
        common = (*_strides(q), *_strides(k), *_strides(v), *_strides(do))
        sizes = (ranges.context, queries, ranges.blocks, ctx.scale * LOG2E, ctx.scale)

        def run_kv(settings):
            keys, warps, stages, part = settings
            backward_kv_kernel[(ranges.key_first.shape[0], k.shape[1])](
                q,
                k,
                v,
                do,
                lse,
                delta,
                dk,
                dv,
                ranges.lo,
                ranges.hi,
                ranges.key_first,
                ranges.key_last,
                *common,
                *_strides(dk),
                *sizes,
                **ctx.constants,
                KEYS=keys,
                PART=part,
                num_warps=warps,
                num_stages=stages,
            )

        def run_q(settings):
            keys, warps, stages = settings
            backward_q_kernel[(ranges.tile_lo.shape[0], k.shape[1])](
                q,
                k,
                v,
                do,
                lse,
                delta,
                dq,
                dk,
                dv,
                ranges.lo,
                ranges.hi,
                ranges.tile_lo,
                ranges.tile_hi,
                *common,
                *_strides(dq),
                *_strides(dk),
                *sizes,
                **ctx.constants,
                KEYS=keys,
                num_warps=warps,
                num_stages=stages,
            )

        _launch("dkv", q, run_kv)
        _launch("dq", q, run_q)
        return dq, dk, dv, None, None
