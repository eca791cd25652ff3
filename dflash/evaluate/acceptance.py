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
from dflash.drafter.losses import top_of_rows
from dflash.drafter.selector import pair_scores

if TYPE_CHECKING:
    from dflash.data import Pack
    from dflash.drafter.model import DFlashDrafter

KINDS = ("path", "argmax", "oracle")  # what is drafted; the head's best tokens; as if the selector were always right
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


@torch.no_grad()
def judge(drafter: DFlashDrafter, hidden: Tensor, before: Tensor, text: Tensor) -> Tensor:
    """Which drafts of states [n, H] equal the text [n], by row of `KINDS`: [1 or 3, n]. `before` [n]: the tokens in front,
    as the text has them (where all slots before stood, the walk has them too)."""
    if not drafter.config.has_selector:
        return (predict(drafter, hidden) == text)[None]
    rows = []
    for part, previous, right in zip(hidden.split(1024), before.split(1024), text.split(1024), strict=True):
        unary, ids = top_of_rows(part @ drafter.lm_head.T, drafter.config.selector_top_k)
        ids, embed, selector = drafter.draft_token_ids[ids], drafter.embed_tokens, drafter.candidate_selector
        successors = selector.successors(ids.flatten(), embed).unflatten(0, ids.shape)
        best = pair_scores(unary, selector.contexts(part, previous, embed), successors).argmax(1, keepdim=True)
        hit = ids == right[:, None]
        rows.append(torch.stack([hit.gather(1, best)[:, 0], hit[:, 0], hit.any(1)]))
    return torch.cat(rows, 1)


def matching_runs(drafter: DFlashDrafter, hidden: Tensor, ids: Tensor, anchors: Tensor, ends: Tensor) -> Tensor:
    """How many drafts of each block equal the text before its `ends`, by row of `KINDS`: [1 or 3, C]; a slot is only scored
    where the slots before it stood, so the head sees few rows."""
    kinds = len(KINDS) if drafter.config.has_selector else 1
    runs = torch.zeros(kinds, *anchors.shape, dtype=anchors.dtype, device=anchors.device)
    stands = torch.ones_like(runs, dtype=torch.bool)
    for slot in range(1, hidden.shape[1]):
        stands &= anchors + slot < ends
        alive = stands.any(0).nonzero()[:, 0]
        if not alive.numel():
            break
        at = anchors[alive] + slot
        stands[:, alive] &= judge(drafter, hidden[alive, slot], ids[at - 1], ids[at])
        runs[stands] = slot
    return runs


@torch.no_grad()
def document_runs(drafter: DFlashDrafter, features: Tensor, ids: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """`matching_runs` of every position of a document that may anchor a block, [1 or 3, n]; -1 elsewhere.

    Args:
        features: [1, n, N*H]. ids: [n]. spans: (start, end) of the responses.
    """
    device = drafter.fc.weight.device
    ids = ids.to(device)
    kinds = len(KINDS) if drafter.config.has_selector else 1
    result = torch.full((kinds, ids.shape[0]), -1, dtype=torch.int64)
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
        result[:, some] = matching_runs(drafter, hidden, ids, on_device, some_ends.to(device)).cpu()
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
    """(pack id, walk) of every response in the packs, in order; see `walk_kinds`."""
    return [(pack_id, walks[0]) for pack_id, walks in walk_kinds(drafter, source, packs, max_positions)]


def walk_kinds(
    drafter: DFlashDrafter, source, packs: Iterable[Pack], max_positions: int | None = None
) -> list[tuple[int, list[Walk]]]:
    """(pack id, a walk for each row of `KINDS`) of every response in the packs, in order; a plain drafter has the first.

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
                replays = [walk(row, start, stop) for row in runs]
                for replay in replays:
                    replay.anchors = [begin + anchor for anchor in replay.anchors]
                walks.append((pack.pack_id, replays))
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
    """`summarize` over the responses of `packs`; what an `eval` record of a run holds. With a candidate selector also the
    lengths of the plain argmax and of a perfect selector, `argmax_length` and `oracle_length`, and `oracle_by_slot`."""
    walks = [found for _, found in walk_kinds(drafter, source, packs, max_positions)]
    kinds = []
    for found in zip(*walks, strict=True):
        runs, gains = ([x for replay in found for x in getattr(replay, name)] for name in ("runs", "gains"))
        kinds.append(summarize(runs, gains, drafter.block_size))
    if not kinds:
        return summarize([], [], drafter.block_size)
    path, *others = kinds
    if others:
        argmax, oracle = others
        path |= {
            "argmax_length": argmax["acceptance_length"],
            "oracle_length": oracle["acceptance_length"],
            "oracle_by_slot": oracle["acceptance_by_slot"],
        }
    return path
