"""Which packs, which anchors and which weights make step n. Pure functions of the config, so that threads, torchrun,
a resumed run and a serial reference train on exactly the same numbers.

The packs of an epoch are a seeded permutation; the stream runs on over epochs, so every step has `packs_per_step`
packs and there is no short last window. Item i of a step belongs to replica i % replicas. The denominator of the
loss is the weight of the whole step, known on the host before any forward pass: gradients of items simply add up, over
micro-batches and over replicas alike.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.drafter.losses import decay_weights
from dflash.drafter.masks import AnchorSet, block_supervision, document_ids, sample_anchors
from dflash.errors import DataError

if TYPE_CHECKING:
    from dflash.data import Pack
    from dflash.train.settings import TrainOptions

_KEPT = 64  # plans; workers are a few steps apart


@dataclass(frozen=True)
class WorkItem:
    """One pack of one step: its anchors (CPU) and what its slots weigh. `index` counts items since the start."""

    index: int
    epoch: int
    pack: Pack
    anchors: AnchorSet
    weight: float  # the reduction's denominator share of this pack
    supervised_slots: int


@dataclass(frozen=True)
class StepPlan:
    """The items of one optimizer step and the denominator they share."""

    step: int  # 1-based
    items: tuple[WorkItem, ...]
    denominator: float

    @property
    def supervised_slots(self) -> int:
        return sum(item.supervised_slots for item in self.items)

    @property
    def tokens(self) -> int:
        """Context tokens of the step."""
        return sum(int(item.pack.lengths.sum()) for item in self.items)

    def share(self, replica: int, replicas: int) -> tuple[WorkItem, ...]:
        """The items that one of several replicas works on."""
        return tuple(item for i, item in enumerate(self.items) if i % replicas == replica)


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


class Planner:
    """Makes `StepPlan`s.

    Args:
        packs: training packs. train: seed (of the order and the anchors), packs_per_step, gamma, reduction and kind of
            labels are read. block_size, max_anchors: as in the run's config.
        draft_index: [V] int64, row of each token in the draft vocabulary or -1; None when every token has one. With
            hard labels a token outside it weighs nothing; with soft ones every supervised slot weighs.

    Raises: DataError when there is no pack, or no pack with a single eligible anchor.
    """

    def __init__(
        self,
        packs: Sequence[Pack],
        train: TrainOptions,
        block_size: int,
        max_anchors: int,
        draft_index: Tensor | None = None,
    ):
        if not packs:
            raise DataError("there are no training packs; give more conversations or a smaller held_out")
        self.packs = list(packs)
        self.seed, self.packs_per_step = train.seed, train.packs_per_step
        self.block_size = block_size
        self.max_anchors = max_anchors
        self.reduction, self.soft_labels = train.reduction, train.soft_labels
        # Weights that follow acceptance are known after the pass only: the loss is a mean over slots then.
        self.decay = decay_weights(block_size, train.gamma if train.position_weights == "decay" else None)
        self.draft_index = None if draft_index is None else draft_index.cpu()
        self._order: tuple[int, list[int]] = (-1, [])
        self._making = threading.Lock()
        self._plans: dict[int, StepPlan] = {}
        if not any(self._item(0, 0, pack).supervised_slots for pack in self.packs):
            raise DataError(
                f"no pack has a supervised position with another supervised token within the next {block_size - 1}; "
                "answers are too short for any block, or the loss mask is empty"
            )

    def step(self, step: int) -> StepPlan:
        """The plan of step `step` (1-based). Several threads may ask: plans are made once, one at a time; who asks for one
        that is there never waits for one that is being made."""
        plan = self._plans.get(step)
        if plan is not None:
            return plan
        with self._making:
            plan = self._plans.get(step)
            if plan is None:
                plan = self._plans[step] = self._make(step)
                while len(self._plans) > _KEPT:
                    del self._plans[min(self._plans)]
            return plan

    def _make(self, step: int) -> StepPlan:
        first = (step - 1) * self.packs_per_step
        items = []
        for index in range(first, first + self.packs_per_step):
            epoch, position = divmod(index, len(self.packs))
            items.append(self._item(index, epoch, self.packs[self._permutation(epoch)[position]]))
        return StepPlan(step, tuple(items), sum(item.weight for item in items))

    def _permutation(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_seed(self.seed, "order", epoch))
            self._order = (epoch, torch.randperm(len(self.packs), generator=generator).tolist())
        return self._order[1]

    def _item(self, index: int, epoch: int, pack: Pack) -> WorkItem:
        generator = torch.Generator().manual_seed(_seed(self.seed, "anchors", epoch, pack.pack_id))
        anchors = sample_anchors(pack.loss_mask, pack.lengths, self.block_size, self.max_anchors, generator)
        documents = document_ids(pack.lengths, pack.input_ids.shape[0])
        supervised = block_supervision(anchors, pack.loss_mask, documents, self.block_size)  # [A, S]
        weighted = supervised
        if self.draft_index is not None and not self.soft_labels:
            at = anchors.positions[:, None] + torch.arange(self.block_size)
            tokens = pack.input_ids[at.clamp(max=pack.input_ids.shape[0] - 1)]
            weighted = supervised & (self.draft_index[tokens] >= 0)
        weights = self.decay * weighted
        weight = weights.sum() if self.reduction == "weight_mean" else (weights > 0).sum()
        return WorkItem(index, epoch, pack, anchors, float(weight), int(supervised.sum()))
