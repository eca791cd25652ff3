"""Attention of draft blocks over their document's context and over themselves, from the anchors alone: no mask tensor.

The visibility rule of `masks` in the form that a kernel wants: block b sees the context positions lo[b] <= p < hi[b],
which is a document's part before the anchor, and its own S slots. So no mask is built, the first tile of keys starts
where the visible ones start, and only a block's last tile is masked.

A program works on all G query heads of one key head at once, for as many neighbouring blocks as fill 128 rows: with
4 x 32 that is one block, whose own keys belong to it alone and get their gradient without atomics. Row r of a tile of N
blocks is block r // (G * S), head r // S % G, slot r % S. The softmax is online, in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
LOG2E = 1.4426950408889634
# keys per tile, warps, pipeline stages; for dkv also the rows at once
CONFIG = {"forward": (64, 8, 3), "dq": (64, 8, 3), "dkv": (64, 4, 2, 64)}  # the fastest of a sweep on an H200


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


def supported(heads: int, kv_heads: int, head_dim: int, block_size: int) -> bool:
    """True where the tiling above works out."""
    group = heads // kv_heads
    rows = group * block_size
    own = block_size * max(1, ROWS // max(rows, 1))
    return all(x & (x - 1) == 0 for x in (group, block_size, head_dim)) and rows <= ROWS and own >= 16 and (
        16 <= head_dim <= 128
    )


def make_ranges(
    positions: Tensor, valid: Tensor, doc_ids: Tensor, block_size: int, group: int, sliding_window: int | None = None
) -> Ranges:
    """From anchors [A] (ascending, padding last) and doc_ids [T] (-1 past the last document), on their device."""
    context, blocks = doc_ids.shape[0], positions.shape[0]
    per_tile = ROWS // (group * block_size)
    ordered = torch.where(doc_ids >= 0, doc_ids, context)
    start = torch.searchsorted(ordered, ordered[positions])
    if sliding_window is not None:
        start = torch.maximum(start, positions - sliding_window)
    hi = torch.where(valid, positions, 0)
    lo = torch.where(valid, start, 0)
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
    return Ranges(*(x.to(torch.int32) for x in (lo, hi, tile_lo, tile_hi, first, last)), blocks, block_size, context,
                  per_tile)


@triton.jit
def _rows(tile, blocks, G: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """Block, head in the group and slot of each row; whether the block exists."""
    row = tl.arange(0, N * G * S)
    block = tile * N + row // (G * S)
    return block, (row // S) % G, row % S, block < blocks


@triton.jit
def _tile(pointer, rows, heads, row_stride, head_stride, exists, D: tl.constexpr, CHECK: tl.constexpr):
    """[rows, D] of a strided tensor."""
    where = pointer + (rows.to(tl.int64) * row_stride + heads * head_stride)[:, None] + tl.arange(0, D)[None, :]
    if CHECK:
        return tl.load(where, mask=exists[:, None], other=0.0)
    return tl.load(where)


@triton.jit
def _store(pointer, value, rows, heads, row_stride, head_stride, exists, D: tl.constexpr, CHECK: tl.constexpr):
    where = pointer + (rows.to(tl.int64) * row_stride + heads * head_stride)[:, None] + tl.arange(0, D)[None, :]
    value = value.to(pointer.dtype.element_ty)
    if CHECK:
        tl.store(where, value, mask=exists[:, None])
    else:
        tl.store(where, value)


@triton.jit
def _scores(q, k, factor, keep, MASKED: tl.constexpr, EXACT: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=EXACT) * factor
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    return s


@triton.jit
def _attend(acc, peak, total, q, k, v, factor, keep, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """One tile of keys of the online softmax."""
    s = _scores(q, k, factor, keep, MASKED, EXACT)
    new_peak = tl.maximum(peak, tl.max(s, 1))
    shrink = tl.exp2(peak - new_peak)
    p = tl.exp2(s - new_peak[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=EXACT)
    return acc, new_peak, total * shrink + tl.sum(p, 1)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, lo_ptr, hi_ptr, tile_lo_ptr, tile_hi_ptr, q_row, q_head, k_row, k_head, v_row,
    v_head, o_row, o_head, context, queries, blocks, factor, G: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, KEYS: tl.constexpr, CHECK: tl.constexpr, EXACT: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    block, group, slot, exists = _rows(tile, blocks, G, S, N)
    query, q_heads = block * S + slot, head * G + group
    q = _tile(q_ptr, query, q_heads, q_row, q_head, exists, D, CHECK)
    k_ptr += head * k_head
    v_ptr += head * v_head

    own = tl.arange(0, N * S)
    own_exists = tile * N * S + own < queries
    own_rows = context + tile * N * S + own
    own_k = _tile(k_ptr, own_rows, 0, k_row, 0, own_exists, D, CHECK)
    own_v = _tile(v_ptr, own_rows, 0, v_row, 0, own_exists, D, CHECK)
    same = (block - tile * N)[:, None] == (own // S)[None, :]
    peak = tl.full((N * G * S,), float("-inf"), tl.float32)
    total = tl.zeros((N * G * S,), tl.float32)
    acc = tl.zeros((N * G * S, D), tl.float32)
    acc, peak, total = _attend(acc, peak, total, q, own_k, own_v, factor, same, N > 1, EXACT)

    lo = tl.load(lo_ptr + block)
    hi = tl.load(hi_ptr + block)
    start = tl.load(tile_lo_ptr + tile)
    end = tl.load(tile_hi_ptr + tile)
    lanes = tl.arange(0, KEYS)
    if N == 1:
        inner = start + (tl.maximum(end - start, 0) // KEYS) * KEYS
        for at in range(start, inner, KEYS):
            k = _tile(k_ptr, at + lanes, 0, k_row, 0, lanes < end, D, False)
            v = _tile(v_ptr, at + lanes, 0, v_row, 0, lanes < end, D, False)
            acc, peak, total = _attend(acc, peak, total, q, k, v, factor, same, False, EXACT)
        start = inner
    for at in range(start, end, KEYS):
        key = at + lanes
        k = _tile(k_ptr, key, 0, k_row, 0, key < end, D, True)
        v = _tile(v_ptr, key, 0, v_row, 0, key < end, D, True)
        keep = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        acc, peak, total = _attend(acc, peak, total, q, k, v, factor, keep, True, EXACT)

    _store(o_ptr, acc / total[:, None], query, q_heads, o_row, o_head, exists, D, CHECK)
    tl.store(lse_ptr + q_heads * queries + query, peak + tl.log2(total), mask=exists)


@triton.jit
def _delta(o_ptr, do_ptr, delta_ptr, o_row, o_head, do_row, do_head, queries, ROWS: tl.constexpr, D: tl.constexpr):
    """sum over D of o * do, [heads, queries]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    exists = rows < queries
    o = _tile(o_ptr, rows, head, o_row, o_head, exists, D, True).to(tl.float32)
    do = _tile(do_ptr, rows, head, do_row, do_head, exists, D, True).to(tl.float32)
    tl.store(delta_ptr + head * queries + rows, tl.sum(o * do, 1), mask=exists)


@triton.jit
def _score_gradient(q, k, v, do, lse, delta, factor, keep, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """Probabilities of a tile [rows, keys] and the gradient of its scaled scores."""
    p = tl.exp2(_scores(q, k, factor, keep, MASKED, EXACT) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=EXACT)
    return p, p * (dp - delta[:, None])


@triton.jit
def _backward_q(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, lo_ptr, hi_ptr, tile_lo_ptr, tile_hi_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head, dq_row, dq_head, dk_row, dk_head, context, queries,
    blocks, factor, scale, G: tl.constexpr, S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    CHECK: tl.constexpr, EXACT: tl.constexpr,
):
    """dq, and dk, dv of the blocks' own slots."""
    tile, head = tl.program_id(0), tl.program_id(1)
    block, group, slot, exists = _rows(tile, blocks, G, S, N)
    query, q_heads = block * S + slot, head * G + group
    q = _tile(q_ptr, query, q_heads, q_row, q_head, exists, D, CHECK)
    do = _tile(do_ptr, query, q_heads, do_row, do_head, exists, D, CHECK)
    lse = tl.load(lse_ptr + q_heads * queries + query, mask=exists, other=0.0)
    delta = tl.load(delta_ptr + q_heads * queries + query, mask=exists, other=0.0)
    k_ptr += head * k_head
    v_ptr += head * v_head

    own = tl.arange(0, N * S)
    own_exists = tile * N * S + own < queries
    own_rows = context + tile * N * S + own
    own_k = _tile(k_ptr, own_rows, 0, k_row, 0, own_exists, D, CHECK)
    own_v = _tile(v_ptr, own_rows, 0, v_row, 0, own_exists, D, CHECK)
    same = (block - tile * N)[:, None] == (own // S)[None, :]
    own_p, own_wide = _score_gradient(q, own_k, own_v, do, lse, delta, factor, same, N > 1, EXACT)
    own_ds = own_wide.to(q.dtype)
    dq = tl.dot(own_ds, own_k, input_precision=EXACT)
    own_dk = tl.dot(tl.trans(own_ds), q, input_precision=EXACT) * scale
    own_dv = tl.dot(tl.trans(own_p.to(do.dtype)), do, input_precision=EXACT)
    _store(dk_ptr + head * dk_head, own_dk, own_rows, 0, dk_row, 0, own_exists, D, CHECK)
    _store(dv_ptr + head * dk_head, own_dv, own_rows, 0, dk_row, 0, own_exists, D, CHECK)

    lo = tl.load(lo_ptr + block)
    hi = tl.load(hi_ptr + block)
    start = tl.load(tile_lo_ptr + tile)
    end = tl.load(tile_hi_ptr + tile)
    lanes = tl.arange(0, KEYS)
    if N == 1:
        inner = start + (tl.maximum(end - start, 0) // KEYS) * KEYS
        for at in range(start, inner, KEYS):
            k = _tile(k_ptr, at + lanes, 0, k_row, 0, lanes < end, D, False)
            v = _tile(v_ptr, at + lanes, 0, v_row, 0, lanes < end, D, False)
            p, ds = _score_gradient(q, k, v, do, lse, delta, factor, same, False, EXACT)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=EXACT)
        start = inner
    for at in range(start, end, KEYS):
        key = at + lanes
        k = _tile(k_ptr, key, 0, k_row, 0, key < end, D, True)
        v = _tile(v_ptr, key, 0, v_row, 0, key < end, D, True)
        keep = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        p, ds = _score_gradient(q, k, v, do, lse, delta, factor, keep, True, EXACT)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=EXACT)
    _store(dq_ptr, dq * scale, query, q_heads, dq_row, dq_head, exists, D, CHECK)


@triton.jit
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, lo_ptr, hi_ptr, first_ptr, last_ptr, q_row, q_head,
    k_row, k_head, v_row, v_head, do_row, do_head, dk_row, dk_head, context, queries, blocks, factor, scale,
    G: tl.constexpr, S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
    CHECK: tl.constexpr, EXACT: tl.constexpr,
):
    """dk and dv of one tile of context positions, over the blocks that see it. Scores are transposed: [keys, rows]."""
    head = tl.program_id(1)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inside = key < context
    k = _tile(k_ptr + head * k_head, key, 0, k_row, 0, inside, D, True)
    v = _tile(v_ptr + head * v_head, key, 0, v_row, 0, inside, D, True)
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    PARTS: tl.constexpr = (N * G * S) // PART  # a whole tile of rows at once would spill registers
    first, last = tl.load(first_ptr + tl.program_id(0)), tl.load(last_ptr + tl.program_id(0))
    for step in range(first * PARTS, last * PARTS):
        tile = step // PARTS
        row = (step % PARTS) * PART + tl.arange(0, PART)
        block = tile * N + row // (G * S)
        exists = block < blocks
        query, q_heads = block * S + row % S, head * G + (row // S) % G
        q = _tile(q_ptr, query, q_heads, q_row, q_head, exists, D, CHECK)
        do = _tile(do_ptr, query, q_heads, do_row, do_head, exists, D, CHECK)
        lse = tl.load(lse_ptr + q_heads * queries + query, mask=exists, other=0.0)
        delta = tl.load(delta_ptr + q_heads * queries + query, mask=exists, other=0.0)
        if N == 1:
            lo = tl.load(lo_ptr + tile)
            hi = tl.load(hi_ptr + tile)
            keep = ((key >= lo) & (key < hi))[:, None]
        else:
            lows, highs = tl.load(lo_ptr + block), tl.load(hi_ptr + block)
            keep = (key[:, None] >= lows[None, :]) & (key[:, None] < highs[None, :])
        s = tl.dot(k, tl.trans(q), input_precision=EXACT) * factor
        p = tl.where(keep, tl.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=EXACT)
        dp = tl.dot(v, tl.trans(do), input_precision=EXACT)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=EXACT)
    _store(dk_ptr + head * dk_head, dk * scale, key, 0, dk_row, 0, inside, D, True)
    _store(dv_ptr + head * dk_head, dv, key, 0, dk_row, 0, inside, D, True)


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
        keys, warps, stages = CONFIG["forward"]
        tiles = ranges.tile_lo.shape[0]
        _forward[(tiles, k.shape[1])](
            q, k, v, o, lse, ranges.lo, ranges.hi, ranges.tile_lo, ranges.tile_hi, *_strides(q), *_strides(k),
            *_strides(v), *_strides(o), ranges.context, queries, ranges.blocks, scale * LOG2E, **ctx.constants,
            KEYS=keys, num_warps=warps, num_stages=stages,
        )
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.ranges, ctx.scale = ranges, scale
        return o

    @staticmethod
    def _constants(q, k, ranges):
        return {
            "G": q.shape[1] // k.shape[1], "S": ranges.block_size, "N": ranges.blocks_per_tile, "D": q.shape[3],
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
        _delta[(triton.cdiv(queries, 64), q.shape[1])](o, do, delta, *_strides(o), *_strides(do), queries, ROWS=64,
                                                       D=q.shape[3])
        common = (*_strides(q), *_strides(k), *_strides(v), *_strides(do))
        sizes = (ranges.context, queries, ranges.blocks, ctx.scale * LOG2E, ctx.scale)
        keys, warps, stages, part = CONFIG["dkv"]
        _backward_kv[(ranges.key_first.shape[0], k.shape[1])](
            q, k, v, do, lse, delta, dk, dv, ranges.lo, ranges.hi, ranges.key_first, ranges.key_last, *common,
            *_strides(dk), *sizes, **ctx.constants, KEYS=keys, PART=part, num_warps=warps, num_stages=stages,
        )
        keys, warps, stages = CONFIG["dq"]
        _backward_q[(ranges.tile_lo.shape[0], k.shape[1])](
            q, k, v, do, lse, delta, dq, dk, dv, ranges.lo, ranges.hi, ranges.tile_lo, ranges.tile_hi, *common,
            *_strides(dq), *_strides(dk), *sizes, **ctx.constants, KEYS=keys, num_warps=warps, num_stages=stages,
        )
        return dq, dk, dv, None, None
