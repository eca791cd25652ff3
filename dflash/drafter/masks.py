"""Which key a draft query may see. The rule stands here once; every other form is derived from it.

DFlash (block-diffusion drafting), one pack of T packed tokens and A anchors with blocks of S slots:

    queries  Q = A * S          slot k of anchor i is query i * S + k
    keys     T + A * S          first the context positions, then the draft slots in query order

A query of the block anchored at position a sees
  * context positions p < a of the same document (at most `sliding_window` of them, where a window is set);
  * every slot of its own block, in both directions.
It sees nothing else: no later context, no other block, no other document. A padding anchor (valid False) sees only
its own block, so no row is ever fully masked.

A document is contiguous, so the context that a block sees is one range, lo <= p < hi (`seen_context`). Training masks,
kernels, decoding and acceptance all read that range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.devices import to_device

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AnchorSet:
    """Where the blocks of one pack start: `positions` [A] int64, ascending; `valid` [A] bool, False for padding."""

    positions: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> AnchorSet:
        """On `device`, copied without a sync."""
        device = torch.device(device)
        return AnchorSet(to_device(self.positions, device), to_device(self.valid, device))


def document_ids(lengths: Tensor, total: int) -> Tensor:
    """Document index of each position, [T] int64 on the device of `lengths`; -1 past the last document."""
    ends = torch.cumsum(lengths, 0)
    positions = torch.arange(total, device=lengths.device)
    ids = torch.searchsorted(ends, positions, right=True)
    return torch.where(ids < lengths.numel(), ids, -1)


def block_supervision(anchors: AnchorSet, loss_mask: Tensor, doc_ids: Tensor, block_size: int) -> Tensor:
    """Which slots are trained, [A, S] bool.

    Slot k of the block at a counts when the anchor is valid, k > 0, position a + k lies in the anchor's document and
    `loss_mask` is set there.
    """
    total = loss_mask.shape[-1]
    slots = torch.arange(block_size, device=loss_mask.device)
    index = anchors.positions[:, None] + slots  # [A, S]
    inside = index < total
    index = index.clamp(max=total - 1)
    same_document = doc_ids[index] == doc_ids[anchors.positions][:, None]
    return anchors.valid[:, None] & (slots > 0) & inside & same_document & loss_mask[index]


def eligible_anchors(loss_mask: Tensor, doc_ids: Tensor, block_size: int) -> Tensor:
    """Positions that may start a block, [T] bool: supervised, with at least one supervised slot after them.

    That is where the next supervised position lies in the block and in the same document; so T entries are looked at, not
    T blocks.
    """
    total = loss_mask.shape[-1]
    positions = torch.arange(total, device=loss_mask.device)
    from_here = torch.where(loss_mask, positions, total).flip(0).cummin(0).values.flip(0)  # first supervised one at or after
    following = torch.nn.functional.pad(from_here[1:], (0, 1), value=total)
    same_document = doc_ids[following.clamp(max=total - 1)] == doc_ids
    return loss_mask & (doc_ids >= 0) & (following < total) & (following - positions < block_size) & same_document


def sample_anchors(
    loss_mask: Tensor, lengths: Tensor, block_size: int, max_anchors: int, generator: torch.Generator | None = None
) -> AnchorSet:
    """Draw anchors uniformly without replacement over the eligible positions, sorted, padded to `max_anchors`.

    Args:
        loss_mask: [T] bool; lengths: [documents] int64, summing to at most T.
        generator: a CPU generator, so that the draw is the same on every device.

    Sorted anchors make neighbouring query tiles share context tiles: masks become several times sparser. Padding
    entries repeat position 0 and are invalid. The sampler is uniform, not strided (lightseekorg/TorchSpec#186).
    """
    device = loss_mask.device
    total = loss_mask.shape[-1]
    eligible = eligible_anchors(loss_mask, document_ids(lengths, total), block_size)
    keys = torch.rand(total, generator=generator).to(device)
    keys = torch.where(eligible, keys, -1.0)
    count = min(max_anchors, total)
    top = torch.topk(keys, count)
    drawn = top.values >= 0
    order = torch.argsort(torch.where(drawn, top.indices, total))
    positions = torch.where(drawn, top.indices, 0)[order]
    valid = drawn[order]
    if count < max_anchors:
        padding = max_anchors - count
        positions = torch.nn.functional.pad(positions, (0, padding))
        valid = torch.nn.functional.pad(valid, (0, padding))
    return AnchorSet(positions, valid)


def seen_context(anchors: Tensor, starts: Tensor | int, sliding_window: int | None = None) -> tuple[Tensor, Tensor]:
    """Context positions lo <= p < hi that the blocks at `anchors` [A] see, in documents that begin at `starts`."""
    if sliding_window is None:
        return torch.zeros_like(anchors) + starts, anchors
    return (anchors - sliding_window).clamp(min=starts), anchors


def pack_ranges(anchors: AnchorSet, doc_ids: Tensor, sliding_window: int | None = None) -> tuple[Tensor, Tensor]:
    """`seen_context` of a pack's blocks, lo and hi [A]; padding anchors see none of it."""
    ordered = torch.where(doc_ids >= 0, doc_ids, doc_ids.shape[0])
    lo, hi = seen_context(anchors.positions, torch.searchsorted(ordered, ordered[anchors.positions]), sliding_window)
    return torch.where(anchors.valid, lo, 0), torch.where(anchors.valid, hi, 0)


def visibility(anchors: AnchorSet, doc_ids: Tensor, block_size: int, sliding_window: int | None = None) -> MaskMod:
    """The rule above as a `mask_mod(batch, head, query, key) -> bool` for flex_attention.

    The tensors are captured, so a new pack with the same shapes does not recompile the kernel.
    """
    total = doc_ids.shape[0]
    lo, hi = pack_ranges(anchors, doc_ids, sliding_window)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        sees_context = (key >= lo[block]) & (key < hi[block])  # hi is at most T, so key is a context position
        own_block = (key >= total) & ((key - total) // block_size == block)
        return sees_context | own_block

    return mask_mod


def dense_mask(mask_mod: MaskMod, queries: int, keys: int, device: torch.device | str) -> Tensor:
    """`mask_mod` evaluated everywhere, [Q, K] bool, True where the query sees the key."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return mask_mod(zero, zero, torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device))
