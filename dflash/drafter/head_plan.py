"""Which rows go through the head, decided on the host before the step: anchors, mask and lengths are all known there.

Slot 0, padding anchors and masked slots weigh nothing and are left out of the head and of the last layer's MLP. With
soft labels, blocks that overlap ask for the same target distribution; each position's is computed once per chunk.

A padded plan leaves nothing out, so that it has the same sizes for every pack, as a CUDA graph wants them. Rows that weigh
nothing then change no sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.masks import AnchorSet, block_supervision, document_ids


@dataclass(frozen=True)
class HeadPlan:
    """Rows of one pack, all int64 tensors.

    supervised: [A, S-1] bool. slot: [R] index of each row in the flattened [A, S-1] slots; query: [R] its index among
    the Q draft slots; label_at: [R] position of its label. teacher_at: [U] distinct positions whose distributions are
    soft labels, ascending; teacher_row: [R] index into them.
    """

    supervised: Tensor
    slot: Tensor
    query: Tensor
    label_at: Tensor
    teacher_at: Tensor
    teacher_row: Tensor

    @classmethod
    def make(cls, anchors: AnchorSet, loss_mask: Tensor, lengths: Tensor, block_size: int, padded: bool = False) -> HeadPlan:
        """From CPU tensors: loss_mask [T] bool, lengths [documents]."""
        documents = document_ids(lengths, loss_mask.shape[0])
        supervised = block_supervision(anchors, loss_mask, documents, block_size)[:, 1:]
        if padded:
            return cls._padded(supervised, anchors.positions, loss_mask.shape[0])
        block, slot = supervised.nonzero(as_tuple=True)
        label_at = anchors.positions[block] + slot + 1
        teacher_at, teacher_row = torch.unique(label_at - 1, sorted=True, return_inverse=True)
        return cls(
            supervised, block * (block_size - 1) + slot, block * block_size + slot + 1, label_at, teacher_at, teacher_row
        )

    @classmethod
    def _padded(cls, supervised: Tensor, anchors: Tensor, total: int) -> HeadPlan:
        """Every slot 1..S-1 of every block, each with a teacher row of its own."""
        blocks, slots = supervised.shape
        query = torch.arange(blocks * (slots + 1)).view(blocks, slots + 1)[:, 1:].flatten()
        label_at = (anchors[:, None] + torch.arange(1, slots + 1)).clamp(max=total - 1).flatten()
        every = torch.arange(blocks * slots)
        return cls(supervised, every, query, label_at, label_at - 1, every)


def teacher_spans(teacher_row: Tensor, chunk_rows: int) -> tuple[tuple[int, int], ...]:
    """Per chunk of rows, the half-open range of teacher rows it uses. teacher_row [R], on the CPU."""
    return tuple((int(part.min()), int(part.max()) + 1) for part in teacher_row.split(chunk_rows) if len(part))
