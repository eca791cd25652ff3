"""Acceptance length on text that the target wrote, without running the target.

On greedily written text the target's next choice is the text itself, so decoding can be replayed from cached
features: start at a response's first token, draft, count the run n of drafts that equal the text, gain n + 1 tokens
(the bonus token included; the text's last block has none when an accepted draft ends the text), jump, repeat.
Drafts of all positions are computed in a few large batches and the walk is done on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.drafter.attention import DocumentMask
from dflash.drafter.blocks import Blocks, DraftContext

if TYPE_CHECKING:
    from dflash.data import Pack
    from dflash.drafter.model import DFlashDrafter

_KV_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # copies of context keys and values alive at once, per layer
_MAX_BLOCKS = {"cpu": 32, "cuda": 512}  # on a CPU, what stays in its cache


@dataclass(frozen=True)
class Span:
    """One response inside a pack: tokens `start`..`end` (exclusive) of the document that begins at `document`."""

    document: int
    start: int
    end: int


@dataclass
class Walk:
    """What replaying one response gave. `gains[i]` tokens in block i, `runs[i]` drafts that stood."""

    anchors: list[int] = field(default_factory=list)  # positions in the pack
    runs: list[int] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)


def response_spans(loss_mask: Tensor, lengths: Tensor) -> list[Span]:
    """Runs of supervised tokens of each document, `loss_mask` [T] bool; those of one token gain nothing."""
    spans, begin = [], 0
    for size in lengths.tolist():
        flags = loss_mask[begin : begin + size].tolist()
        start = None
        for place, flag in enumerate([*flags, False]):
            if flag and start is None:
                start = place
            if not flag and start is not None:
                if place - start > 1:
                    spans.append(Span(begin, begin + start, begin + place))
                start = None
        begin += size
    return spans


@torch.no_grad()
def draft_hidden(drafter: DFlashDrafter, context: DraftContext, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Final-normed states [C, S, H] of C blocks of one document, drafted side by side.

    Args:
        context: of at least max(anchors) tokens; a block sees those before its anchor. tokens: [C] at the anchors.
        anchors: [C] positions in the document.
    """
    device = drafter.fc.weight.device
    blocks = Blocks(tokens.to(device), anchors.to(device))
    return drafter.draft(blocks, context, DocumentMask(blocks.positions, drafter.block_size))


@torch.no_grad()
def predict(drafter: DFlashDrafter, hidden: Tensor) -> Tensor:
    """Greedy draft tokens (target ids) [n] of states [n, H]."""
    parts = [(rows @ drafter.lm_head.T).argmax(-1) for rows in hidden.split(1024)]
    return drafter.draft_token_ids[torch.cat(parts)]


def matching_runs(drafter: DFlashDrafter, hidden: Tensor, ids: Tensor, anchors: Tensor, ends: Tensor) -> Tensor:
    """How many drafts of each block equal the text before its `ends`, [C]; a slot is only scored where the slots
    before it stood, so the head sees few rows."""
    runs = torch.zeros_like(anchors)
    alive = torch.arange(anchors.shape[0], device=anchors.device)
    for slot in range(1, hidden.shape[1]):
        alive = alive[anchors[alive] + slot < ends[alive]]
        if not alive.numel():
            break
        alive = alive[predict(drafter, hidden[alive, slot]) == ids[anchors[alive] + slot]]
        runs[alive] = slot
    return runs


@torch.no_grad()
def document_runs(drafter: DFlashDrafter, features: Tensor, ids: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """`matching_runs` of every position of a document that may anchor a block, [n]; -1 elsewhere.

    Args:
        features: [1, n, N*H]. ids: [n]. spans: (start, end) of the responses.
    """
    device = drafter.fc.weight.device
    ids = ids.to(device)
    result = torch.full((ids.shape[0],), -1, dtype=torch.int64)
    anchors = torch.cat([torch.arange(start, end - 1) for start, end in spans])
    ends = torch.cat([torch.full((end - 1 - start,), end) for start, end in spans])
    context = drafter.new_context()
    drafter.extend(context, features[:, : int(anchors.max())].to(device))
    config = drafter.config
    width = config.num_key_value_heads * config.head_dim * drafter.fc.weight.element_size() * 2
    kind = "cpu" if device.type == "cpu" else "cuda"
    batch = max(1, min(_MAX_BLOCKS[kind], _KV_BYTES[kind] // (width * (context.length + drafter.block_size))))
    for some, some_ends in zip(anchors.split(batch), ends.split(batch), strict=True):
        on_device = some.to(device)
        hidden = draft_hidden(drafter, context, ids[on_device], on_device)
        result[some] = matching_runs(drafter, hidden, ids, on_device, some_ends.to(device)).cpu()
    return result


def walk(runs: Sequence[int], start: int, end: int) -> Walk:
    """Replay decoding over one response from the runs of all its positions."""
    result, at = Walk(), start
    while at < end - 1:
        run = int(runs[at])
        gain = min(run + 1, end - 1 - at)
        result.anchors.append(at)
        result.runs.append(run)
        result.gains.append(gain)
        at += gain
    return result


def walk_packs(
    drafter: DFlashDrafter, source, packs: Iterable[Pack], max_positions: int | None = None
) -> list[tuple[int, Walk]]:
    """(pack id, walk) of every response in the packs, in order.

    Args:
        source: `source.get(pack)` gives the pack's features. max_positions: stop after the document in which this
            many candidate anchors have been drafted.
    """
    training = drafter.training
    drafter.eval()
    walks, drafted = [], 0
    for pack in packs:
        spans = response_spans(pack.loss_mask, pack.lengths)
        if not spans:
            continue
        features = source.get(pack).all_hidden_states
        for begin in dict.fromkeys(span.document for span in spans):
            own = [(span.start - begin, span.end - begin) for span in spans if span.document == begin]
            end = begin + own[-1][1]
            runs = document_runs(drafter, features[:, begin:end], pack.input_ids[begin:end], own).tolist()
            for start, stop in own:
                replay = walk(runs, start, stop)
                replay.anchors = [begin + anchor for anchor in replay.anchors]
                walks.append((pack.pack_id, replay))
            drafted += sum(stop - start - 1 for start, stop in own)
            if max_positions is not None and drafted >= max_positions:
                drafter.train(training)
                return walks
    drafter.train(training)
    return walks


def summarize(runs: Sequence[int], gains: Sequence[int], block_size: int) -> dict:
    """Acceptance figures of many blocks.

    Returns: `acceptance_length` (tokens gained per target call, the bonus token included), `acceptance_by_slot` [S-1]
        (share of blocks whose slots 1..k all stood), `histogram` [S] (blocks that gained 1..S tokens), `blocks`,
        `tokens`. With no block the length is None and the shares are 0.
    """
    blocks = len(gains)
    histogram = [0] * block_size
    for gain in gains:
        histogram[gain - 1] += 1
    return {
        "acceptance_length": sum(gains) / blocks if blocks else None,
        "acceptance_by_slot": [sum(run >= slot for run in runs) / max(1, blocks) for slot in range(1, block_size)],
        "histogram": histogram,
        "blocks": blocks,
        "tokens": sum(gains),
    }


def evaluate_acceptance(drafter: DFlashDrafter, source, packs: Iterable[Pack], max_positions: int | None = None) -> dict:
    """`summarize` over the responses of `packs`; what an `eval` record of a run holds."""
    walks = [found for _, found in walk_packs(drafter, source, packs, max_positions)]
    runs = [run for found in walks for run in found.runs]
    gains = [gain for found in walks for gain in found.gains]
    return summarize(runs, gains, drafter.block_size)
