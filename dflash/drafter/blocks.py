"""What one drafter forward takes: the blocks to denoise, and the context that they look at.

Training gives a pack's target features, decoding the keys and values of verified tokens; `attention.PackMask` and
`attention.DocumentMask` say who sees whom in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """A blocks: the token in slot 0 and its place in the document, each [A] int64."""

    tokens: Tensor
    positions: Tensor

    def slot_positions(self, size: int) -> Tensor:
        """Places of all slots, [A * S]."""
        return (self.positions[:, None] + torch.arange(size, device=self.positions.device)).flatten()

    def slot_tokens(self, size: int, mask_token: int) -> Tensor:
        """What stands in the slots, [A * S]: the anchor's token, then mask tokens."""
        slots = torch.arange(size, device=self.tokens.device)
        return torch.where(slots == 0, self.tokens[:, None], mask_token).flatten()


@dataclass(frozen=True)
class PackContext:
    """The context of a training pack: target features [1, T, N*H] and each token's place in its document [T]."""

    features: Tensor
    positions: Tensor


@dataclass
class DraftContext:
    """Keys and values of the accepted context, per layer, grown while decoding. Never cropped: only verified
    tokens' features enter it."""

    layers: list[tuple[Tensor, Tensor]]  # each [1, Nkv, n, D]
    length: int = 0
