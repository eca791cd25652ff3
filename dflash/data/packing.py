"""Fixed-length packs of whole conversations, and the split into training and held-out prompts."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.errors import DataError


@dataclass
class Conversation:
    """Token ids of one chat and the mask of what the target should learn to foresee (DESIGN.md section 4)."""

    input_ids: list[int]
    loss_mask: list[bool]
    source_index: int = 0
    finish_reason: str | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_key(self) -> str:
        """Stable hash of the ids before the first supervised token: same prompt, same key."""
        first = self.loss_mask.index(True) if True in self.loss_mask else len(self.input_ids)
        return hashlib.sha256(repr(list(self.input_ids[:first])).encode()).hexdigest()


@dataclass
class Pack:
    """One training row of T tokens. Documents lie one after another; the tail is padding.

    `input_ids [T]` int64, `loss_mask [T]` bool, `position_ids [T]` int64 (0 at each document's start, and at
    the padding's), `lengths [num_documents]` int64. `sources` names the conversation of each document.
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    lengths: Tensor
    pack_id: int
    sources: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding left out."""
        return int(self.lengths.sum())


def split_held_out(
    conversations: list[Conversation], share: float = 0.1, seed: int = 0
) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations, parted by prompt: no prompt is in both.

    Each prompt is placed by its own hash, so more data moves none of the old prompts. With two prompts or
    more, neither side is left empty when `share` is above 0.
    """
    if not 0 <= share < 1:
        raise DataError(f"held-out share is {share}; wanted 0 or more and below 1")
    if share == 0:
        return list(conversations), []

    def place(key: str) -> float:
        return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16) / 16**15

    keys = [conversation.prompt_key for conversation in conversations]
    places = {key: place(key) for key in set(keys)}
    if len(places) < 2:
        raise DataError(
            f"{len(places)} distinct prompts cannot be split into training and held-out; "
            "wanted at least 2, or a held-out share of 0"
        )
    held = {key for key, value in places.items() if value < share}
    if not held:
        held = {min(places, key=places.get)}
    if len(held) == len(places):
        held.discard(max(places, key=places.get))
    train = [item for item, key in zip(conversations, keys, strict=True) if key not in held]
    return train, [item for item, key in zip(conversations, keys, strict=True) if key in held]


def make_packs(
    conversations: list[Conversation],
    pack_length: int,
    seed: int | None = None,
    pad_token_id: int = 0,
    order: str = "best_fit",
) -> list[Pack]:
    """Lay conversations into packs of `pack_length` tokens; the same input gives the same packs.

    No conversation is spread over two packs; one longer than a pack is cut to it, and left out if that leaves
    nothing supervised.

    Args:
        seed: shuffles the conversations first (in_order) or the finished packs (best_fit); None keeps order.
        order: "best_fit" (fullest packs: longest first, each into the tightest gap) or "in_order".
    """
    if pack_length < 2:
        raise DataError(f"pack_length is {pack_length}; wanted at least 2")
    if order not in ("best_fit", "in_order"):
        raise DataError(f"packing order '{order}' is unknown; wanted best_fit or in_order")
    items = [_cut(item, pack_length) for item in conversations]
    items = [item for item in items if any(item.loss_mask)]
    shuffle = random.Random(seed).shuffle if seed is not None else None
    if order == "in_order":
        if shuffle:
            shuffle(items)
        groups = list(_in_order(items, pack_length))
    else:
        groups = _best_fit(items, pack_length)
        if shuffle:
            shuffle(groups)
    if not groups:
        raise DataError("no conversation with a supervised token is left to pack")
    return [_pack(group, pack_length, pad_token_id, number) for number, group in enumerate(groups)]


def _cut(item: Conversation, length: int) -> Conversation:
    if len(item) <= length:
        return item
    return Conversation(item.input_ids[:length], item.loss_mask[:length], item.source_index, "length")


def _in_order(items: list[Conversation], length: int) -> Iterator[list[Conversation]]:
    group, used = [], 0
    for item in items:
        if group and used + len(item) > length:
            yield group
            group, used = [], 0
        group.append(item)
        used += len(item)
    if group:
        yield group


def _best_fit(items: list[Conversation], length: int) -> list[list[Conversation]]:
    """Best fit decreasing; `room` holds (free tokens, group number) in order, so a gap is found by
    bisection."""
    groups: list[list[Conversation]] = []
    room: list[tuple[int, int]] = []
    for item in sorted(items, key=lambda item: -len(item)):
        at = bisect.bisect_left(room, (len(item), -1))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = length, len(groups)
            groups.append([])
        groups[number].append(item)
        bisect.insort(room, (free - len(item), number))
    return groups


def _pack(group: list[Conversation], length: int, pad_token_id: int, number: int) -> Pack:
    ids = torch.full((length,), pad_token_id, dtype=torch.int64)
    mask = torch.zeros(length, dtype=torch.bool)
    positions = torch.zeros(length, dtype=torch.int64)
    at = 0
    for item in group:
        here = slice(at, at + len(item))
        ids[here] = torch.tensor(item.input_ids, dtype=torch.int64)
        mask[here] = torch.tensor(item.loss_mask, dtype=torch.bool)
        positions[here] = torch.arange(len(item))
        at += len(item)
    positions[at:] = torch.arange(length - at)
    lengths = torch.tensor([len(item) for item in group], dtype=torch.int64)
    return Pack(ids, mask, positions, lengths, number, [item.source_index for item in group])
