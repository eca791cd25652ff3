"""Loss and gradient of a chunk of logits in place: two passes over the logits, nothing else of their size.

Pass 1 reads a row once and keeps an online softmax: maximum, sum of exponentials, argmax and, with a teacher,
sum exp(y - max y) (y - x), from which KL(teacher || draft) follows. The last pass overwrites the draft logits by the
gradient of the row's loss. Per row of V bf16 logits that is 2V (hard) or 4V (soft) elements read and V written; one row is
half a megabyte at V 248320, so it cannot stay on the chip between the passes. Losses made of the acceptance (`losses`) need
the softmax's sums first, and read both rows once more in between.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash.drafter.losses import HYBRID_RATE, LEAST_ACCEPTED

BLOCK = 4096
WARPS = 8


@triton.jit
def _load(pointer, offsets, size, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < size, other=float("-inf")).to(tl.float32)
    return tl.load(pointer + offsets).to(tl.float32)


@triton.jit
def _absorb_draft(x, start, peak, best_start, total):
    """Online softmax of one tile: running maximum, the tile it is in (the first, on ties), lane-wise sums."""
    tile_peak = tl.max(x, 0)
    best_start = tl.where(tile_peak > peak, start, best_start)
    new_peak = tl.maximum(peak, tile_peak)
    total = total * tl.exp(peak - new_peak) + tl.exp(x - new_peak)
    return new_peak, best_start, total


@triton.jit
def _absorb_teacher(x, y, offsets, size, peak, total, cross, MASKED: tl.constexpr):
    new_peak = tl.maximum(peak, tl.max(y, 0))
    shrink = tl.exp(peak - new_peak)
    mass = tl.exp(y - new_peak)
    gap = y - x
    if MASKED:
        gap = tl.where(offsets < size, gap, 0.0)
    return new_peak, total * shrink + mass, cross * shrink + mass * gap


@triton.jit
def _first_index(row, start, size, peak, BLOCK: tl.constexpr):
    offsets = start + tl.arange(0, BLOCK)
    x = _load(row, offsets, size, True)
    return tl.min(tl.where(x == peak, offsets, size), 0)


# first_teacher changes with every chunk and must not make a new variant of the kernel.
@triton.jit(do_not_specialize=["first_teacher"])
def _soft_kernel(
    x_ptr,
    y_ptr,
    teacher_row_ptr,
    loss_ptr,
    argmax_ptr,
    size,
    x_stride,
    y_stride,
    first_teacher,
    LOSS_FN: tl.constexpr,
    RATE: tl.constexpr,
    LEAST: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    y_row = y_ptr + (tl.load(teacher_row_ptr + row).to(tl.int64) - first_teacher) * y_stride
    lanes = tl.arange(0, BLOCK)
    full = (size // BLOCK) * BLOCK

    x_peak = tl.full((), float("-inf"), tl.float32)
    y_peak = tl.full((), float("-inf"), tl.float32)
    best_start = tl.full((), 0, tl.int32)
    x_total = tl.zeros((BLOCK,), tl.float32)
    y_total = tl.zeros((BLOCK,), tl.float32)
    cross = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, full, BLOCK):
        x = _load(x_row, start + lanes, size, False)
        y = _load(y_row, start + lanes, size, False)
        x_peak, best_start, x_total = _absorb_draft(x, start, x_peak, best_start, x_total)
        y_peak, y_total, cross = _absorb_teacher(x, y, start + lanes, size, y_peak, y_total, cross, False)
    if full < size:
        x = _load(x_row, full + lanes, size, True)
        y = _load(y_row, full + lanes, size, True)
        x_peak, best_start, x_total = _absorb_draft(x, full, x_peak, best_start, x_total)
        y_peak, y_total, cross = _absorb_teacher(x, y, full + lanes, size, y_peak, y_total, cross, True)
    y_sum = tl.sum(y_total, 0)
    x_log = x_peak + tl.log(tl.sum(x_total, 0))
    y_log = y_peak + tl.log(y_sum)
    loss = tl.sum(cross, 0) / y_sum - y_log + x_log
    of_kl, of_tv, raised = 1.0, 0.0, 0.0  # the slope is of_kl (p - t) + of_tv p (raised - [p < t])
    if LOSS_FN != "kl":
        lower = tl.zeros((BLOCK,), tl.float32)
        below = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            p = tl.exp(_load(x_row, start + lanes, size, True) - x_log)
            t = tl.exp(_load(y_row, start + lanes, size, True) - y_log)
            lower += tl.minimum(p, t)
            below += tl.where(p < t, p, 0.0)
        accepted = tl.maximum(tl.sum(lower, 0), LEAST)
        raised = tl.sum(below, 0)
        if LOSS_FN == "tv":
            loss, of_kl, of_tv = 1.0 - accepted, 0.0, 1.0
        elif LOSS_FN == "lk":
            loss, of_kl, of_tv = -tl.log(accepted), 0.0, 1.0 / accepted
        else:
            of_kl = tl.exp(-RATE * accepted)
            of_tv = 1.0 - of_kl
            loss = of_kl * loss + of_tv * (1.0 - accepted)
    tl.store(loss_ptr + row, loss)
    tl.store(argmax_ptr + row, _first_index(x_row, best_start, size, x_peak, BLOCK).to(tl.int64))

    if WITH_GRAD:
        # From the end backwards: the last tiles of pass 1 may still be in the L2 cache.
        for step in range(0, tl.cdiv(size, BLOCK)):
            offsets = (tl.cdiv(size, BLOCK) - 1 - step) * BLOCK + lanes
            x = _load(x_row, offsets, size, True)
            y = _load(y_row, offsets, size, True)
            p = tl.exp(x - x_log)
            t = tl.exp(y - y_log)
            if LOSS_FN == "kl":
                grad = p - t
            else:
                grad = of_kl * (p - t) + of_tv * p * (raised - tl.where(p < t, 1.0, 0.0))
            tl.store(x_row + offsets, grad.to(x_ptr.dtype.element_ty), mask=offsets < size)


@triton.jit
def _hard_kernel(x_ptr, label_ptr, loss_ptr, argmax_ptr, size, x_stride, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    label = tl.load(label_ptr + row).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    full = (size // BLOCK) * BLOCK

    peak = tl.full((), float("-inf"), tl.float32)
    best_start = tl.full((), 0, tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, full, BLOCK):
        x = _load(x_row, start + lanes, size, False)
        peak, best_start, total = _absorb_draft(x, start, peak, best_start, total)
    if full < size:
        x = _load(x_row, full + lanes, size, True)
        peak, best_start, total = _absorb_draft(x, full, peak, best_start, total)
    log = peak + tl.log(tl.sum(total, 0))
    tl.store(loss_ptr + row, log - tl.load(x_row + label).to(tl.float32))
    tl.store(argmax_ptr + row, _first_index(x_row, best_start, size, peak, BLOCK).to(tl.int64))

    if WITH_GRAD:
        # The label's logit was read above and its tile is overwritten below, by other threads: keep them apart.
        tl.debug_barrier()
        for step in range(0, tl.cdiv(size, BLOCK)):
            offsets = (tl.cdiv(size, BLOCK) - 1 - step) * BLOCK + lanes
            x = _load(x_row, offsets, size, True)
            grad = tl.exp(x - log) - tl.where(offsets == label, 1.0, 0.0)
            tl.store(x_row + offsets, grad.to(x_ptr.dtype.element_ty), mask=offsets < size)


def soft_loss_(
    logits: Tensor,
    teacher_logits: Tensor,
    teacher_rows: Tensor,
    row_loss: Tensor,
    argmax: Tensor,
    *,
    loss_fn: str = "kl",
    first_teacher: int = 0,
    with_grad: bool = True,
) -> None:
    """The loss between teacher and draft of each row; `logits` becomes the gradient of its row's loss.

    Args:
        logits: [R, V], overwritten when `with_grad`. teacher_logits: [U, V], read only.
        teacher_rows: [R] int, row r's teacher is teacher_logits[teacher_rows[r] - first_teacher].
        row_loss [R] float32, argmax [R] int64: outputs; ties give the first index. loss_fn: one of `losses.LOSSES`.
    """
    rows, size = logits.shape
    if rows:
        _soft_kernel[(rows,)](
            logits,
            teacher_logits,
            teacher_rows,
            row_loss,
            argmax,
            size,
            logits.stride(0),
            teacher_logits.stride(0),
            first_teacher,
            LOSS_FN=loss_fn,
            RATE=HYBRID_RATE,
            LEAST=LEAST_ACCEPTED,
            WITH_GRAD=with_grad,
            BLOCK=_block(size),
            num_warps=WARPS,
        )


def hard_loss_(logits: Tensor, labels: Tensor, row_loss: Tensor, argmax: Tensor, *, with_grad: bool = True) -> None:
    """Cross entropy of each row to labels [R] int64; otherwise as `soft_loss_`."""
    rows, size = logits.shape
    if rows:
        _hard_kernel[(rows,)](
            logits,
            labels,
            row_loss,
            argmax,
            size,
            logits.stride(0),
            WITH_GRAD=with_grad,
            BLOCK=_block(size),
            num_warps=WARPS,
        )


def _block(size: int) -> int:
    return min(BLOCK, max(64, triton.next_power_of_2(size)))
