"""What a training step minimises: the loss over the head, the selector's beside it, and the sums that a step reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter.head_plan import HeadPlan
from dflash.drafter.losses import (
    LOSSES,
    POSITION_WEIGHTS,
    HeadLoss,
    HeadPass,
    acceptance_weights,
    block_metrics,
    chunked_head_loss,
    decay_weights,
    loss_scale,
)
from dflash.drafter.selector import pair_scores
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.drafter.model import DFlashDrafter

MISSING = ("replace", "skip")


@dataclass(frozen=True)
class Objective:
    """What a training forward minimises.

    use_soft_labels: a loss to the target's distribution instead of cross entropy to the token.
    loss_fn: which one, see `losses`.
    position_weights: "decay" by `gamma`, or "acceptance" (`losses.acceptance_weights`), whose sum nobody knows before the
        pass: a loss is divided by the number of weighted slots then.
    gamma: decay of the slot weights; None is uniform.
    reduction: "weight_mean" or "token_mean"; with "acceptance" weights the latter.
    denominator: what the weighted sum is divided by, instead of this pack's own reduction; the total over a step's
        packs makes their losses and gradients add up. As a tensor on the device it may change under a CUDA graph.
    selector_alpha: weight of the candidate selector's cross entropy beside that loss.
    selector_missing: where the right token is not among the candidates, "replace" puts it in place of the weakest (in the
        loss alone), "skip" leaves the slot out of the selector's loss.
    """

    use_soft_labels: bool = False
    loss_fn: str = "kl"
    position_weights: str = "decay"
    gamma: float | None = 10.0
    reduction: str = "weight_mean"
    denominator: float | Tensor | None = None
    selector_alpha: float = 1.0
    selector_missing: str = "replace"

    def __post_init__(self) -> None:
        refuse_objective(self.loss_fn, self.use_soft_labels, self.position_weights)
        if self.position_weights == "acceptance":
            object.__setattr__(self, "reduction", "token_mean")
        if self.selector_missing not in MISSING:
            raise ConfigError(f"selector_missing must be {' or '.join(MISSING)}, got {self.selector_missing!r}")


def refuse_objective(loss_fn: str, soft: bool, position_weights: str) -> None:
    """Raises ConfigError for a name that there is not, and for a loss that needs the target's distribution without it."""
    for name, value, known in (("loss_fn", loss_fn, LOSSES), ("position_weights", position_weights, POSITION_WEIGHTS)):
        if value not in known:
            raise ConfigError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}")
    if loss_fn != "kl" and not soft:
        raise ConfigError(
            f"loss_fn={loss_fn} compares with the target's distribution, and soft_labels is off; turn soft_labels on, or "
            "use loss_fn=kl, which is cross entropy then"
        )


def pack_loss(
    drafter: DFlashDrafter,
    hidden: Tensor,
    last_hidden: Tensor | None,
    input_ids: Tensor,
    rows: HeadPlan,
    wanted: Objective,
    how: HeadPass,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a pack from the states [R, H] of its supervised slots; last_hidden [T, H], for soft labels
    alone; input_ids [T]."""
    tokens = input_ids[rows.label_at]  # [R]
    labels = drafter.draft_index[tokens]  # -1 outside the draft vocabulary
    soft = wanted.use_soft_labels
    result = chunked_head_loss(
        hidden,
        drafter.lm_head,
        labels=None if soft else labels.clamp(min=0),
        teacher_hidden=last_hidden[rows.teacher_at].to(hidden.dtype) if soft else None,
        teacher_rows=rows.teacher_row if soft else None,
        wanted=labels if how.top_k else None,
        loss_fn=wanted.loss_fn,
        **vars(how),
    )
    weights = slot_weights(rows, wanted, result.row_loss, None if soft else labels >= 0)
    scale = loss_scale(weights, wanted.reduction, wanted.denominator)
    loss, right, more = (result.row_loss * scale).sum(), drafter.draft_token_ids[result.prediction] == tokens, {}
    if how.top_k:
        row_loss, picked = rank_candidates(drafter, hidden, result, input_ids[rows.label_at - 1], labels)
        kept = (labels >= 0) & (result.recalled if wanted.selector_missing == "skip" else True)
        selector_loss = (row_loss * kept * scale).sum()
        loss = loss + wanted.selector_alpha * selector_loss
        more = selector_metrics(rows, right, result.recalled) | {"selector_loss": selector_loss.detach()}
        right = picked
    metrics = block_metrics(_by_slot(rows, right), rows.supervised) | more
    metrics |= {"loss": loss.detach(), "weight": weights.sum(), "supervised_slots": rows.supervised.sum()}
    return loss, metrics


def slot_weights(rows: HeadPlan, wanted: Objective, row_loss: Tensor, known: Tensor | None) -> Tensor:
    """What each row weighs, [R]; `known` [R] bool: the rows that weigh at all, None: all. A padded plan's rows that are
    not supervised weigh nothing."""
    slots, counted = rows.supervised.shape[1], rows.supervised.flatten()[rows.slot]
    if wanted.position_weights == "acceptance":
        loss = row_loss if known is None else row_loss.masked_fill(~known, float("inf"))  # nothing to accept there
        loss = loss.masked_fill(~counted, 0.0)
        weights = acceptance_weights(loss, wanted.loss_fn, rows.slot, rows.supervised)
    else:
        weights = decay_weights(slots + 1, wanted.gamma, row_loss.device)[1:][rows.slot % slots]
    return weights * (counted if known is None else counted & known)


def rank_candidates(
    drafter: DFlashDrafter, hidden: Tensor, found: HeadLoss, before: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The selector on rows [R] that follow the tokens `before`: its cross entropy to `labels`, and whether the path that is
    drafted takes them. A row with label -1 has neither."""
    selector, embed = drafter.candidate_selector, drafter.embed_tokens
    successors = selector.successors(drafter.draft_token_ids[found.ids].flatten(), embed).unflatten(0, found.ids.shape)
    scores = pair_scores(found.unary, selector.contexts(hidden, before, embed), successors)  # [R, K]
    at = (found.ids == labels[:, None]).int().argmax(1)  # the right token is there, put in or not
    return F.cross_entropy(scores, at, reduction="none"), found.recalled & (scores.argmax(1) == at)


def selector_metrics(rows: HeadPlan, plain_right: Tensor, recalled: Tensor) -> dict[str, Tensor]:
    """What tells which part works, sums over blocks [S-1]: runs of the plain argmax, slots whose candidates hold the right
    token, and runs of such slots (what a perfect selector would draft)."""
    plain = block_metrics(_by_slot(rows, plain_right), rows.supervised)
    oracle = block_metrics(_by_slot(rows, recalled), rows.supervised)
    return {
        "argmax_accepted_by_slot": plain["accepted_by_slot"],
        "recalled_by_slot": oracle["correct_by_slot"],
        "oracle_accepted_by_slot": oracle["accepted_by_slot"],
    }


def _by_slot(rows: HeadPlan, right: Tensor) -> Tensor:
    """[R] bool -> [A, S-1]."""
    found = torch.zeros_like(rows.supervised).flatten()
    found[rows.slot] = right
    return found.view_as(rows.supervised)
