"""Losses of rows over a frozen lm_head, without ever holding the whole [Q, V] logits, and the weights of a block's slots.

The head is frozen, so only the gradient with respect to the hidden states is needed: it is computed chunk by chunk
in the forward pass, while the chunk's logits exist, and scaled in the backward pass, row by row: so a row's weight may
depend on the losses. One product with the head for the logits, one for the gradient, one more for the teacher with soft
labels: the least there is.

With t the target's distribution and p the drafter's, and a = sum of min(p, t) the share of drafted tokens that sampling
accepts, `loss_fn` is
    kl         KL(t || p); with hard labels cross entropy
    tv         total variation, 1 - a
    lk         -log a: the gradient of tv, larger where little is accepted (LK losses, arXiv 2602.23881)
    lk_hybrid  exp(-3 a) KL + (1 - exp(-3 a)) tv with that weight held fixed: kl first, tv once much is accepted (the same)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter import kernels
from dflash.drafter.fp8_head import Fp8Head
from dflash.errors import ConfigError

DEFAULT_CHUNK_ROWS = 1024
GROUP = 128  # columns of logits that `top_of_rows` takes together
REDUCTIONS = ("weight_mean", "token_mean")
LOSSES = ("kl", "tv", "lk", "lk_hybrid")
HYBRID_RATE = 3.0
LEAST_ACCEPTED = 1e-20  # keeps -log a finite
POSITION_WEIGHTS = ("decay", "acceptance")
CONFIDENCE_FLOOR = 0.5  # of `acceptance_weights`; the paper's alpha


def decay_weights(block_size: int, gamma: float | None, device: torch.device | str = "cpu") -> Tensor:
    """Weight of each slot of a block, [S] float32: 0 for slot 0, then exp(-(k - 1) / gamma).

    `gamma` None is uniform. `gamma` 0 is the limit: slot 1 alone has weight 1.

    Raises: ConfigError for a negative or non-finite gamma.
    """
    slots = torch.arange(block_size, device=device, dtype=torch.float32)
    if gamma is None:
        weights = torch.ones_like(slots)
    elif not 0 <= gamma < float("inf"):
        raise ConfigError(f"gamma must be a finite number >= 0, or None for uniform weights; got {gamma!r}")
    elif gamma == 0:
        weights = (slots == 1).float()
    else:
        weights = torch.exp(-(slots - 1) / gamma)
    return torch.where(slots > 0, weights, 0.0)


def describe_weights(block_size: int, position_weights: str, gamma: float | None) -> str:
    """The slot weights in words, so that a log says which a run had."""
    if position_weights == "acceptance":
        return "slot weights follow the acceptance of each block"
    if gamma is None:
        return f"slots 1 to {block_size - 1} weigh the same (gamma empty)"
    if gamma == 0:
        return "only slot 1 weighs (gamma 0)"
    last = float(decay_weights(block_size, gamma)[-1])
    return f"slot weights fall from 1 at slot 1 to {last:.2g} at slot {block_size - 1} (gamma {gamma:g})"


def acceptance_weights(row_loss: Tensor, loss_fn: str, slot: Tensor, supervised: Tensor) -> Tensor:
    """Weights [R] of rows by how far their block is likely to be accepted (D-PACE, arXiv 2605.18810).

    A row's confidence is what its loss says of its acceptance; c = floor + (1 - floor) * confidence. A slot weighs the sum,
    over itself and the slots behind it, of the product of all c up to there: what the block's expected length owes to it.
    An unsupervised slot adds nothing and counts as certain. Nothing is remembered from step to step.

    Args:
        row_loss: [R], taken as it is (no gradient). slot: [R] index of each row in the flattened slots.
        supervised: [A, S-1] bool.
    """
    loss = row_loss.detach()
    confidence = 1 - loss if loss_fn == "tv" else torch.exp(-loss)
    likely = torch.ones(supervised.shape, dtype=torch.float32, device=loss.device).flatten()
    likely[slot] = CONFIDENCE_FLOOR + (1 - CONFIDENCE_FLOOR) * confidence
    reached = likely.view(supervised.shape).cumprod(1) * supervised
    behind = torch.ones(supervised.shape[1], supervised.shape[1], device=loss.device).tril()
    return (reached @ behind).flatten()[slot]  # a product, since sums along a row may differ from run to run on a GPU


@dataclass(frozen=True)
class HeadPass:
    """How rows go through the head, which changes nothing of the loss beyond rounding.

    chunk_rows: rows whose logits exist at once. `peak_bytes` says what that costs.
    teacher_spans: per chunk, the range of teacher rows it uses (`head_plan.teacher_spans`); needed with teacher_rows on
        the fused path.
    fused: use the Triton kernels; None: where they run.
    head_fp8: the same head quantized; the logits go through it, the gradient's product through the head itself.
    top_k: also keep each row's K best tokens and their logits; 0: none.
    """

    chunk_rows: int = DEFAULT_CHUNK_ROWS
    teacher_spans: Sequence[tuple[int, int]] | None = None
    fused: bool | None = None
    head_fp8: Fp8Head | None = None
    top_k: int = 0


@dataclass(frozen=True)
class HeadLoss:
    """What one pass over the head gives, per row: `row_loss` [R] float32, which carries a gradient, and `prediction`
    (argmax) [R]; with `HeadPass.top_k` its best tokens `ids` [R, K], their logits `unary` [R, K], which carry a gradient,
    and whether the wanted token was among them by itself, `recalled` [R]."""

    row_loss: Tensor
    prediction: Tensor
    ids: Tensor | None = None
    unary: Tensor | None = None
    recalled: Tensor | None = None


def top_of_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [n, V] and their columns, without sorting the row: they lie in the k groups of columns
    whose largest elements are largest, and in the columns that fill no group."""
    groups = logits.shape[1] // GROUP
    if groups < 4 * k:
        return logits.topk(k)
    whole = logits[:, : groups * GROUP].unflatten(1, (groups, GROUP))
    best = whole.amax(-1).topk(k).indices  # [n, k]
    some = whole.gather(1, best[..., None].expand(-1, -1, GROUP)).flatten(1)  # [n, k * GROUP]
    columns = (best[..., None] * GROUP + torch.arange(GROUP, device=logits.device)).flatten(1)
    if groups * GROUP < logits.shape[1]:
        rest = torch.arange(groups * GROUP, logits.shape[1], device=logits.device)
        some = torch.cat([some, logits[:, groups * GROUP :]], 1)
        columns = torch.cat([columns, rest.expand(len(logits), -1)], 1)
    values, at = some.topk(k)
    return values, columns.gather(1, at)


class _Kept:
    """The candidates that a pass keeps: ids and logits [R, K] of every row."""

    def __init__(self, hidden: Tensor, wanted: Tensor | None, top_k: int):
        self.wanted, self.top_k = wanted, top_k
        self.ids = torch.empty(hidden.shape[0], top_k, dtype=torch.int64, device=hidden.device)
        self.unary = torch.empty(hidden.shape[0], top_k, dtype=hidden.dtype, device=hidden.device)
        self.recalled = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)

    def keep(self, part: slice, logits: Tensor) -> None:
        """Of the rows `part`; a wanted token that is not among a row's best takes the weakest's place."""
        if not self.top_k:
            return
        values, ids = top_of_rows(logits, self.top_k)
        if self.wanted is not None:
            wanted = self.wanted[part, None]
            recalled = (ids == wanted).any(1, keepdim=True)
            ids[:, -1:] = torch.where(recalled | (wanted < 0), ids[:, -1:], wanted)
            values[:, -1:] = logits.gather(1, ids[:, -1:])
            self.recalled[part] = recalled[:, 0]
        self.ids[part], self.unary[part] = ids, values


def _logits(hidden: Tensor, head: Tensor, head_fp8: Fp8Head | None, out: Tensor | None = None) -> Tensor:
    """hidden [n, H] times the head: [n, V], written into `out` [n, V (16's multiple above it in float8)]."""
    if head_fp8 is not None:
        return head_fp8.logits(hidden, out)
    return hidden @ head.T if out is None else torch.mm(hidden, head.T, out=out)


def _finish(ctx, grad: Tensor | None, head: Tensor, kept: _Kept, row_loss: Tensor, prediction: Tensor):
    """A pass's outputs, in `HeadLoss`'s order."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad, *((kept.ids, head) if kept.top_k else ()))
    ctx.mark_non_differentiable(prediction, kept.ids, kept.recalled)
    return row_loss, prediction, kept.ids, kept.unary, kept.recalled


def _hidden_gradient(ctx, scale: Tensor | None, _prediction, _ids, dunary: Tensor | None, _) -> Tensor | None:
    """Gradient of the hidden states [R, H]: what the pass made ready, times what each row's loss counts, [R]; and what came
    back through the candidates."""
    grad, *candidates = ctx.saved_tensors
    found = None if scale is None else torch.mul(grad, scale[:, None], out=torch.empty_like(grad))  # rounded once
    if dunary is None or not candidates:
        return found
    ids, head = candidates
    through = F.embedding_bag(ids, head, mode="sum", per_sample_weights=dunary.to(head.dtype))
    return through if found is None else found + through


def _soft_rows(log_p: Tensor, log_t: Tensor, loss_fn: str) -> tuple[Tensor, Tensor]:
    """Losses [n] of rows with the log probabilities log_p and the teacher's log_t, both [n, V] and used up, and the gradient
    for the rows' logits, [n, V]."""
    teacher = log_t.exp()
    divergence = (teacher * log_t.sub_(log_p)).sum(-1)
    del log_t
    draft = log_p.exp_()
    if loss_fn == "kl":
        return divergence, draft.sub_(teacher)
    accepted = torch.minimum(draft, teacher).sum(-1).clamp(min=LEAST_ACCEPTED)
    below = draft < teacher
    raised = (draft * below).sum(-1)  # the drafter's mass where it is below the teacher
    kl = torch.exp(-HYBRID_RATE * accepted) if loss_fn == "lk_hybrid" else torch.zeros_like(accepted)
    tv = 1 / accepted if loss_fn == "lk" else 1 - kl
    loss = -accepted.log() if loss_fn == "lk" else kl * divergence + tv * (1 - accepted)
    # The slope is kl (p - t) + tv p (raised - [p < t]).
    factor = torch.where(below, (kl + tv * (raised - 1))[:, None], (kl + tv * raised)[:, None])
    return loss, draft.mul_(factor).sub_(teacher.mul_(kl[:, None]))


class _ChunkedHeadLoss(torch.autograd.Function):
    """Per row CE(labels) or a loss between teacher and drafter; gradient for `hidden` only."""

    @staticmethod
    def forward(ctx, hidden, head, labels, teacher_hidden, wanted, loss_fn, how):
        kept = _Kept(hidden, wanted, how.top_k)
        rows, chunk_rows, head_fp8 = hidden.shape[0], how.chunk_rows, how.head_fp8
        row_loss = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        prediction = torch.empty(rows, dtype=torch.int64, device=hidden.device)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, rows, chunk_rows):
            part = slice(start, min(start + chunk_rows, rows))
            logits = _logits(hidden[part], head, head_fp8)  # [c, V]
            kept.keep(part, logits)
            logits = logits.float()
            log_p = torch.log_softmax(logits, -1)
            del logits
            prediction[part] = log_p.argmax(-1)
            if teacher_hidden is None:
                picked = labels[part, None]
                row_loss[part] = -log_p.gather(-1, picked).squeeze(-1)
                difference = log_p.exp_()
                difference.scatter_add_(-1, picked, torch.full_like(row_loss[part, None], -1.0))
            else:
                row_loss[part], difference = _soft_rows(
                    log_p, torch.log_softmax(_logits(teacher_hidden[part], head, head_fp8).float(), -1), loss_fn
                )
            if grad is not None:
                grad[part] = difference.to(head.dtype) @ head
            log_p = difference = None  # neither lives on into the next chunk
        return _finish(ctx, grad, head, kept, row_loss, prediction)

    @staticmethod
    def backward(ctx, *grads):
        return _hidden_gradient(ctx, *grads), *[None] * 6


class _FusedHeadLoss(torch.autograd.Function):
    """The same by Triton kernels that work in place on a chunk's logits, so that nothing else of their size exists.

    The products write into two buffers that live for the call: [chunk, V] and, with a teacher, [longest span, V].
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, teacher, wanted, loss_fn, how):
        from dflash.drafter.kernels.head_loss import hard_loss_, soft_loss_

        kept, (teacher_hidden, teacher_rows) = _Kept(hidden, wanted, how.top_k), teacher
        chunk_rows, head_fp8, teacher_spans = how.chunk_rows, how.head_fp8, how.teacher_spans
        rows, size = hidden.shape[0], head.shape[0] if head_fp8 is None else head_fp8.width
        row_loss = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        prediction = torch.empty(rows, dtype=torch.int64, device=hidden.device)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        logits = head.new_empty(min(chunk_rows, rows), size)
        if teacher_hidden is not None:
            teacher_logits = head.new_empty(max((end - start for start, end in teacher_spans), default=0), size)
        for chunk, start in enumerate(range(0, rows, chunk_rows)):
            part = slice(start, min(start + chunk_rows, rows))
            x = _logits(hidden[part], head, head_fp8, logits[: part.stop - start])  # [c, V]
            kept.keep(part, x)
            outputs = (row_loss[part], prediction[part])
            if teacher_hidden is None:
                hard_loss_(x, labels[part], *outputs, with_grad=grad is not None)
            else:
                first, last = teacher_spans[chunk]
                y = _logits(teacher_hidden[first:last], head, head_fp8, teacher_logits[: last - first])
                how_soft = {"loss_fn": loss_fn, "first_teacher": first, "with_grad": grad is not None}
                soft_loss_(x, y, teacher_rows[part], *outputs, **how_soft)
            if grad is not None:
                torch.mm(x, head, out=grad[part])
        return _finish(ctx, grad, head, kept, row_loss, prediction)

    @staticmethod
    def backward(ctx, *grads):
        return _hidden_gradient(ctx, *grads), *[None] * 6


def chunked_head_loss(
    hidden: Tensor,
    head: Tensor,
    *,
    labels: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
    teacher_rows: Tensor | None = None,
    wanted: Tensor | None = None,
    loss_fn: str = "kl",
    **how: Any,
) -> HeadLoss:
    """Losses of draft hidden states through a frozen head.

    Args:
        hidden: [R, H] after the drafter's final norm; head: [V, H], frozen.
        labels: [R] int64, hard labels. Or teacher_hidden: [R, H], the target's final-normed states whose
            distribution through the same head is the soft label.
        teacher_rows: [R] int; row r's teacher is teacher_hidden[teacher_rows[r]] (then [U, H]), so that blocks that
            overlap share the teacher's logits. None: one teacher row per row.
        wanted: [R] int64, a token that has to be among each row's `HeadPass.top_k` candidates; -1: none.
        loss_fn: one of `LOSSES`, with soft labels; hard ones have cross entropy.
        how: fields of `HeadPass`.

    Raises: ConfigError when not exactly one of labels and teacher_hidden is given.
    """
    if (labels is None) == (teacher_hidden is None):
        raise ConfigError("give exactly one of labels (hard) and teacher_hidden (soft)")
    way, rows = HeadPass(**how), hidden.shape[0]
    if kernels.usable(hidden.device) if way.fused is None else way.fused:
        if teacher_hidden is not None and teacher_rows is None:
            teacher_rows = torch.arange(rows, dtype=torch.int32, device=hidden.device)
            starts = range(0, rows, way.chunk_rows)
            way = replace(way, teacher_spans=[(start, min(start + way.chunk_rows, rows)) for start in starts])
        outputs = _FusedHeadLoss.apply(hidden, head, labels, (teacher_hidden, teacher_rows), wanted, loss_fn, way)
    else:
        if teacher_rows is not None:
            teacher_hidden = teacher_hidden[teacher_rows]
        outputs = _ChunkedHeadLoss.apply(hidden, head, labels, teacher_hidden, wanted, loss_fn, way)
    return HeadLoss(*outputs)


def peak_bytes(rows: int, vocab: int, chunk_rows: int, element_size: int, teachers: int, fused: bool) -> int:
    """Bytes of logits and what is made from them that live at once inside `chunked_head_loss`, the most there can be.

    Fused: the chunk's logits and those of its `teachers` (rows; 0: hard labels). Plain: two float32 tensors of the chunk's
    rows, with a teacher four.
    """
    chunk = min(rows, chunk_rows)
    if fused:
        return (chunk + teachers) * vocab * element_size
    return chunk * vocab * 4 * (4 if teachers else 2)


def loss_scale(weights: Tensor, reduction: str, total: float | Tensor | None = None) -> Tensor:
    """Turn slot weights [R] into what each row's loss counts: w / sum(w), or w / number of weighted slots.

    `total` replaces that denominator, for a pack that is one of several in a step. No weighted slot gives all zeros,
    so the loss is exactly 0.
    """
    if isinstance(total, Tensor):  # on the device: where it is zero, so are all weights
        return weights / total.clamp(min=torch.finfo(weights.dtype).tiny)
    if total is not None:
        return weights / total if total > 0 else torch.zeros_like(weights)
    if reduction == "weight_mean":
        denominator = weights.sum()
    elif reduction == "token_mean":
        denominator = (weights > 0).sum().to(weights.dtype)
    else:
        raise ConfigError(f"unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")
    return torch.where(denominator > 0, weights / denominator.clamp(min=torch.finfo(weights.dtype).tiny), 0.0)


def block_metrics(correct: Tensor, supervised: Tensor) -> dict[str, Tensor]:
    """Counts over the blocks of a pack; sums, so that steps and replicas can be added up.

    Args:
        correct: [A, S-1] bool, draft equals the text at slots 1..S-1; supervised: [A, S-1] bool.

    Returns a dict of float64-safe tensors on the same device:
        correct_by_slot [S-1], supervised_by_slot [S-1];
        accepted_by_slot [S-1]: blocks whose slots 1..k are all supervised and correct (a run, not a product of means);
        blocks: blocks with at least one supervised slot; accepted: drafted tokens accepted, summed over blocks.
    The acceptance length, bonus token included, is 1 + accepted / blocks.
    """
    hit = correct & supervised
    run = torch.cumprod(hit.to(torch.int32), dim=-1)
    return {
        "correct_by_slot": hit.sum(0),
        "supervised_by_slot": supervised.sum(0),
        "accepted_by_slot": run.sum(0),
        "blocks": supervised.any(-1).sum(),
        "accepted": run.sum(),
    }
