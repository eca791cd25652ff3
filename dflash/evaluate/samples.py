"""One held-out answer at each evaluation, cut into what each target call would have brought."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash.evaluate.acceptance import walk_packs
from dflash.evaluate.texts import chunk_texts

if TYPE_CHECKING:
    from dflash.data import Pack
    from dflash.drafter.model import DFlashDrafter

MOST = 120  # tokens of the answer that are shown


def replayed_answer(drafter: DFlashDrafter, source: Any, pack: Pack, tokenizer: Any) -> dict[str, Any] | None:
    """The pack's first answer as `views.examples` shows one: `prompt`, `chunks`, `acceptance_length`; None without.

    Decoding is replayed over the text (see `acceptance`), so the target does not run: an answer that it wrote greedily is
    what the two would decode.
    """
    found = walk_packs(drafter, source, [pack], max_positions=1)
    if not found:
        return None
    walk, ids = found[0][1], pack.input_ids.tolist()
    start = walk.anchors[0]
    ends = pack.lengths.cumsum(0).tolist()
    begin = max((end for end in ends if end <= start), default=0)
    chunks, accepted = [[ids[start]]], [0]
    for anchor, run, gain in zip(walk.anchors, walk.runs, walk.gains, strict=True):
        if anchor - start >= MOST:
            break
        chunks.append(ids[anchor + 1 : anchor + 1 + gain])
        accepted.append(run)
    (prompt,) = chunk_texts(tokenizer, [ids[begin:start]])
    texts = zip(chunk_texts(tokenizer, chunks), chunks, accepted, strict=True)
    return {
        "prompt": prompt,
        "chunks": [{"text": text, "tokens": len(chunk), "accepted": count} for text, chunk, count in texts],
        "acceptance_length": sum(walk.gains) / len(walk.gains),
    }
