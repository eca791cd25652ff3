"""The Triton kernels of `kernels.attention`, whose text says how rows are tiled; launched from there only."""

from __future__ import annotations

import triton
import triton.language as tl


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
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    lo_ptr,
    hi_ptr,
    tile_lo_ptr,
    tile_hi_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    o_row,
    o_head,
    context,
    queries,
    blocks,
    factor,
    G: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    CHECK: tl.constexpr,
    EXACT: tl.constexpr,
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
def delta_kernel(o_ptr, do_ptr, delta_ptr, o_row, o_head, do_row, do_head, queries, ROWS: tl.constexpr, D: tl.constexpr):
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
def backward_q_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    lo_ptr,
    hi_ptr,
    tile_lo_ptr,
    tile_hi_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_row,
    do_head,
    dq_row,
    dq_head,
    dk_row,
    dk_head,
    context,
    queries,
    blocks,
    factor,
    scale,
    G: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    CHECK: tl.constexpr,
    EXACT: tl.constexpr,
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
def backward_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    lo_ptr,
    hi_ptr,
    first_ptr,
    last_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_row,
    do_head,
    dk_row,
    dk_head,
    context,
    queries,
    blocks,
    factor,
    scale,
    G: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    CHECK: tl.constexpr,
    EXACT: tl.constexpr,
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
