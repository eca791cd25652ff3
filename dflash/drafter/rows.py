"""Texts decoded side by side: one row of a buffer for each, with room for the longest.

A text's keys and values lie at their positions in its row. What stands behind the text is left over from rejected drafts,
or never written: no mask lets it be seen, and the next tokens overwrite it. So nothing is cut, copied or grown while
decoding, and every shape stays as it is, as a CUDA graph wants it.

Shape letters are those of the design; R rows, P places of a row, n new tokens of each row.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash.drafter.attention import Attend
from dflash.drafter.blocks import Blocks
from dflash.drafter.losses import top_of_rows
from dflash.drafter.masks import seen_context
from dflash.drafter.selector import best_paths

if TYPE_CHECKING:
    from dflash.drafter.model import DFlashDrafter

ALIGNMENT = 16  # places of a row are a multiple of it, as fused attention wants its masks


def places_for(tokens: int) -> int:
    """Places of a row that has to hold `tokens`."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def flat_places(starts: Tensor, count: int, places: int, rows: Tensor | None = None) -> Tensor:
    """Where `count` tokens from `starts` [R] on lie in a buffer [rows, P, ..] seen as [rows * P, ..]; [R * count]. The
    starts are those of all rows, or of `rows` [R]."""
    if rows is None:
        rows = torch.arange(starts.shape[0], device=starts.device)
    return ((rows * places + starts)[:, None] + torch.arange(count, device=starts.device)).flatten()


def write(buffer: Tensor, at: Tensor, new: Tensor) -> Tensor:
    """Put `new` [R, Nkv, n, D] at `flat_places` of `buffer` [R, P, Nkv, D]; returns it as [R, Nkv, P, D]."""
    buffer.flatten(0, 1).index_copy_(0, at, new.transpose(1, 2).reshape(-1, *buffer.shape[2:]))
    return buffer.transpose(1, 2)


def range_bias(low: Tensor, high: Tensor, places: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 at the places low <= p < high [R, n], minus infinity elsewhere; [R, 1, n, P]."""
    place = torch.arange(places, device=low.device)
    hidden = (place < low[..., None]) | (place >= high[..., None])
    return torch.zeros(hidden.shape, dtype=dtype, device=low.device).masked_fill_(hidden, float("-inf"))[:, None]


def fold_bias(bias: Tensor, group: int) -> Tensor:
    """A bias [R, 1, n, P] for the queries that `attend_rows` folds, `group` query heads per key head."""
    return bias if bias.shape[2] == 1 else bias.repeat(1, 1, group, 1)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None = None) -> Tensor:
    """Attention [R, Nq, n, D] of q [R, Nq, n, D] over k, v [R, Nkv, P, D] under a bias from `fold_bias`.

    Query heads of one key head stand behind each other as queries of that head: fused kernels take no mask beside grouped
    heads, and a copy of the keys for each query head would cost more than the product.
    """
    rows, heads, count, d = q.shape
    folded = q.reshape(rows, k.shape[1], -1, d)
    return scaled_dot_product_attention(folded, k, v, attn_mask=bias, scale=scale).reshape(rows, heads, count, -1)


class RowContext:
    """A drafter over R texts: the keys and values of what stands in each, per layer [R, P, Nkv, D]."""

    def __init__(self, drafter: DFlashDrafter, rows: int, places: int):
        self.drafter, self.places = drafter, places
        shape = (rows, places, drafter.config.num_key_value_heads, drafter.config.head_dim)
        empty = drafter.fc.weight.new_zeros
        self.layers = [(empty(shape), empty(shape)) for _ in drafter.layers]

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]

    @torch.no_grad()
    def extend(self, features: Tensor, starts: Tensor, rows: Tensor | None = None) -> None:
        """Write n tokens' features [R, n, N*H], which belong at `starts` [R] and behind; `rows`: in these rows alone."""
        count = features.shape[1]
        at = flat_places(starts, count, self.places, rows)
        positions = starts[:, None] + torch.arange(count, device=starts.device)
        for context, new in zip(self.layers, self.drafter.context_keys_values(features, positions), strict=True):
            for buffer, states in zip(context, new, strict=True):
                write(buffer, at, states)

    @torch.no_grad()
    def propose(self, anchors: Tensor, starts: Tensor) -> Tensor:
        """Greedy drafts [R, S-1] of the blocks that begin with the tokens `anchors` [R] at `starts` [R]."""
        drafter = self.drafter
        mask = RowMask(starts, self.places, drafter.block_size)
        hidden = drafter.draft(Blocks(anchors, starts), self, mask)[:, 1:]
        logits = hidden @ drafter.lm_head.T  # [R, S-1, Vd]
        if not drafter.config.has_selector:
            return drafter.draft_token_ids[logits.argmax(-1)]
        unary, ids = top_of_rows(logits.flatten(0, 1), drafter.config.selector_top_k)
        unary, ids = (x.unflatten(0, logits.shape[:2]) for x in (unary, drafter.draft_token_ids[ids]))
        return best_paths(drafter.candidate_selector, drafter.embed_tokens, hidden, unary, ids, anchors)


class RowMask:
    """Who sees whom where each text drafts one block: the text before the anchor, and the block's own slots. The slots'
    keys are written behind the text for the length of the forward.

    Args:
        anchors: [R] int64, where the blocks start; as many tokens of each text stand in the context.
    """

    def __init__(self, anchors: Tensor, places: int, block_size: int):
        self.anchors, self.places, self.block_size = anchors, places, block_size
        self._at = flat_places(anchors, block_size, places)
        self.attend = cache(self._attend)

    def _attend(self, sliding_window: int | None) -> Attend:
        low, high = seen_context(self.anchors, 0, sliding_window)
        biases: dict[torch.dtype, Tensor] = {}

        def attend(q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
            if q.dtype not in biases:
                biases[q.dtype] = range_bias(low[:, None], high[:, None] + self.block_size, self.places, q.dtype)
            keys, values = (write(buffer, self._at, new) for buffer, new in zip(context, (k, v), strict=True))
            return attend_rows(q, keys, values, biases[q.dtype])

        return attend
