"""The rounds of a served text beside our own: one end rule for all, and logit gaps for drafts that differ.

A round is one target call: drafts are checked from an anchor on, the first `run` of them stand, and the target's next
token (the bonus token) follows. A server counts drafts that stand behind the end of the text too; `trimmed` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash.drafter.model import DFlashDrafter
from dflash.drafter.selector import Candidates
from dflash.errors import RunError
from dflash.evaluate.acceptance import Walk, document_runs, summarize, walk
from dflash.target.capture import Target


def trimmed(tokens: int, accepted: Sequence[int], stopped: bool) -> Walk:
    """Rounds inside a text of `tokens` tokens, from the number of drafts that stood in each.

    The first token is the prompt's own. The end token may be an accepted draft; at the length limit the last token is
    counted as the bonus token, since our decoding drafts no further. Anchors count from the text's first token.

    Raises: RunError where the rounds do not make up the text.
    """
    result, at = Walk(), 0
    for count in accepted:
        left = tokens - 1 - at
        if left <= 0:
            break
        gain = min(count + 1, left)
        last = gain == left
        result.anchors.append(at)
        result.runs.append(min(count, gain if last and stopped else gain - 1))
        result.gains.append(gain)
        at += gain
    if at < tokens - 1:
        raise RunError(
            f"the server's {len(accepted)} rounds make {at + 1} of {tokens} tokens; some calls had no drafts. Give it "
            "more room behind the longest text (--max-model-len), or ask for fewer requests at a time"
        )
    return result


@dataclass(frozen=True)
class Differing:
    """A round in which our drafter and the served one kept different numbers of drafts.

    `gap`: by how much our logits prefer our draft at the first slot that differs: over the token of the text, where the
    server drafted that, else over our second choice. Rounding explains a small one.
    """

    prompt: int
    anchor: int
    slot: int
    ours: int
    server: int
    gap: float


class Ours:
    """Our drafter on one written text, fed with training's features.

    Args:
        most: drafts checked in a round.
    """

    def __init__(self, target: Target, drafter: DFlashDrafter, prompt: Sequence[int], text: Sequence[int], most: int):
        self.drafter, self.start = drafter, len(prompt)
        self.ids = torch.tensor([*prompt, *text])
        self.end = len(self.ids)
        with torch.no_grad():
            self.features = target.capture(self.ids[None]).all_hidden_states.to(drafter.fc.weight.device)
        spans = [(self.start, self.end)] if len(text) > 1 else []
        found = document_runs(drafter, self.features, self.ids, spans)[0] if spans else torch.zeros(0, dtype=torch.int64)
        self.runs = found.clamp(max=most).tolist()  # of every position

    def walk(self, stopped: bool) -> Walk:
        """What held-out evaluation of a run finds on this text."""
        return trimmed(self.end - self.start, walk(self.runs, self.start, self.end).runs, stopped)

    def compare(self, number: int, served: Walk) -> tuple[list[int], list[Differing]]:
        """Drafts that stand at the server's own anchors, and the rounds where the server kept another number."""
        runs, differing = [], []
        for anchor, kept, gain in zip(served.anchors, served.runs, served.gains, strict=True):
            at = self.start + anchor
            left = self.end - 1 - at
            ends_by_length = gain == left and kept < gain  # then the text's last token counts as the bonus token
            run = min(self.runs[at], left - 1 if ends_by_length else left)
            runs.append(run)
            if run != kept:
                gap = self._gap(at, min(run, kept), kept > run)
                differing.append(Differing(number, anchor, min(run, kept) + 1, run, kept, gap))
        return runs, differing

    @torch.no_grad()
    def _gap(self, at: int, slot: int, served: bool) -> float:
        """Of the block anchored at `at`, in its draft `slot` (0-based); `served`: the server drafted the text's token."""
        context = self.drafter.new_context()
        self.drafter.extend(context, self.features[:, :at])
        proposal = self.drafter.propose(context, int(self.ids[at]))
        if isinstance(proposal, Candidates):
            scores, ids = (
                proposal.scores(slot, self.ids[at + slot : at + slot + 1].to(proposal.ids.device)),
                proposal.ids[slot],
            )
        else:
            scores, ids = proposal[slot], self.drafter.draft_token_ids
        best = scores.float().flatten().topk(2).values
        if not served:
            return float(best[0] - best[1])
        place = (ids.cpu() == int(self.ids[at + slot + 1])).nonzero()
        return float(best[0] - scores.float().flatten()[place[0, 0]]) if len(place) else float("inf")


def figures(walks: Sequence[Walk], block_size: int) -> dict[str, Any]:
    """`acceptance.summarize` of many texts."""
    return summarize([run for w in walks for run in w.runs], [gain for w in walks for gain in w.gains], block_size)


def same_rounds(ours: Sequence[Ours], served: Sequence[Walk], block_size: int) -> dict[str, Any]:
    """Both sides at the server's own anchors: lengths, shares by slot, and every round that differs with its gap."""
    runs, differing = [], []
    for number, (own, theirs) in enumerate(zip(ours, served, strict=True)):
        mine, different = own.compare(number, theirs)
        runs += mine
        differing += different
    kept = [run for w in served for run in w.runs]
    count = max(1, len(kept))
    slots = range(1, block_size)
    share = {
        name: [sum(run >= slot for run in values) / count for slot in slots]
        for name, values in (("ours", runs), ("server", kept))
    }
    return {
        "rounds": len(kept),
        "length_ours": 1 + sum(runs) / count,
        "length_server": 1 + sum(kept) / count,
        "by_slot_ours": share["ours"],
        "by_slot_server": share["server"],
        "differing": [asdict(item) for item in differing],
        "largest_gap": max((item.gap for item in differing), default=0.0),
    }
