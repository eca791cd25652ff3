"""The tensors of one training step at a given shape, made up from a seed, and the matrix products such a step needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.bench.shapes import StepShape
from dflash.drafter.masks import AnchorSet, document_ids, sample_anchors
from dflash.drafter.model import DFlashDrafter


@dataclass(frozen=True)
class StepInputs:
    """Arguments of the drafter; mask, lengths and anchors stay on the host, where the data loader has them."""

    all_hidden_states: Tensor
    verifier_last_hidden: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    position_ids: Tensor
    anchors: AnchorSet

    @property
    def arguments(self) -> dict:
        return dict(vars(self))


def document_lengths(total: int, mean: int, generator: torch.Generator) -> Tensor:
    """Lengths from 0.75 to 1.25 times the mean that sum to `total`, [documents] int64."""
    lengths: list[int] = []
    while sum(lengths) < total:
        size = int(mean * (0.75 + 0.5 * torch.rand((), generator=generator)))
        lengths.append(max(1, min(size, total - sum(lengths))))
    return torch.tensor(lengths)


def make_inputs(shape: StepShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> StepInputs:
    """Random features (unit variance), random tokens, anchors drawn as in training."""
    host = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    lengths = document_lengths(shape.tokens, shape.document, host)
    loss_mask = torch.rand(shape.tokens, generator=host) < shape.supervised
    starts = torch.cumsum(lengths, 0) - lengths
    positions = torch.arange(shape.tokens) - starts[document_ids(lengths, shape.tokens)]

    def features(width: int) -> Tensor:
        return torch.randn(1, shape.tokens, width, generator=generator, device=device, dtype=dtype)

    return StepInputs(
        features(shape.captured * shape.hidden),
        features(shape.hidden),
        torch.randint(0, shape.vocab - 1, (1, shape.tokens), generator=host).to(device),
        loss_mask[None],
        lengths,
        positions[None].to(device),
        sample_anchors(loss_mask, lengths, shape.block, shape.anchors, host),
    )


def make_head(shape: StepShape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding and head of a target, [V, H] each, with logits of a spread like a trained model's."""
    generator = torch.Generator(device).manual_seed(1)
    return tuple(
        torch.randn(shape.vocab, shape.hidden, generator=generator, device=device, dtype=dtype).mul_(0.02) for _ in range(2)
    )


def make_drafter(
    shape: StepShape, head: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype, **options
) -> DFlashDrafter:
    """A drafter with random weights and this head."""
    with torch.device(device):
        drafter = DFlashDrafter(
            shape.config, list(range(shape.captured)), shape.block, shape.anchors, shape.vocab - 1, **options
        ).to(dtype)
    drafter.load_target_head(*head)
    return drafter


def matmul_flops(shape: StepShape, soft: bool) -> float:
    """FLOPs of the matrix products of one forward and backward pass over every slot, attention left out.

    A product costs twice in backward, except where its input is the frozen features (fc: weight gradient only) or its
    weight is frozen (head: input gradient only). The teacher's head runs forward only.
    """
    rows, h = shape.anchors * shape.block, shape.hidden
    kv, q = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    fc = 2 * shape.tokens * shape.captured * h * h * 2
    context = 2 * shape.tokens * h * 2 * kv * 3 * shape.layers
    layers = 2 * rows * h * (2 * q + 2 * kv + 3 * shape.intermediate) * 3 * shape.layers
    head = 2 * rows * h * shape.vocab * (3 if soft else 2)
    return float(fc + context + layers + head)
