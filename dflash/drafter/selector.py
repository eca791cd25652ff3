"""DFlash 2's candidate selector: which of a slot's K best tokens follows the token before it.

Per slot the K best tokens of the draft head are kept with their logits U. A pair of neighbouring candidates scores

    S_t(a, b) = U_t(b) + sum over r of A[a, r] * (W h_t)[r] * B[b, r]

a: the token in the slot before (the anchor's for slot 1); b: a candidate of slot t; h_t: the slot's final-normed state.
Drafting walks from the anchor: the best b given the chosen a, or a draw from softmax(S / temperature), whose
probabilities go into the lossless check. Training takes the predecessor from the text; where all slots before were right
this is the walk itself, so a teacher-forced run of right slots is the run that is really drafted.

The codebooks A and B hold a row for each token ("full") or are projections of the token's embedding ("low_rank"). B
starts at zero, so that the start is plain DFlash. Source: DFlash 2 (z-lab/dflash).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.drafter.config import DrafterConfig
from dflash.drafter.convolution import Projection

PREDECESSOR_STD = 0.02


class CandidateSelector(nn.Module):
    """The selector's weights. `embed` in its methods is the target's embedding [V, H], which only "low_rank" reads."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        rank, h = config.selector_rank, config.hidden_size
        self.full, self.std = config.selector_codebooks == "full", config.initializer_range
        self.hidden_projection = Projection(h, rank)
        if self.full:
            self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
            self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        else:
            self.predecessor_projection = Projection(h, rank)
            self.successor_projection = Projection(h, rank)

    def reset_parameters(self) -> None:
        """Successors at zero: no pair scores differently from any other."""
        predecessor, successor = self._tables()
        with torch.no_grad():
            nn.init.normal_(self.hidden_projection.weight, std=self.std)
            nn.init.normal_(predecessor, std=PREDECESSOR_STD)
            successor.zero_()

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self.full:
            return self.predecessor_codebook, self.successor_codebook
        return self.predecessor_projection.weight, self.successor_projection.weight

    def contexts(self, hidden: Tensor, previous: Tensor, embed: Tensor) -> Tensor:
        """A[a] * W h, [n, r], of states [n, H] and the tokens before them [n]."""
        table, _ = self._tables()
        rows = F.embedding(previous, table if self.full else embed)
        return (rows if self.full else rows @ table.T) * self.hidden_projection(hidden)

    def successors(self, tokens: Tensor, embed: Tensor) -> Tensor:
        """B [n, r] of tokens [n]."""
        _, table = self._tables()
        if self.full:
            return F.embedding(tokens, table)
        if tokens.numel() > embed.shape[0]:  # cheaper for the whole vocabulary than for each candidate
            return F.embedding(tokens, embed @ table.T)
        return F.embedding(tokens, embed) @ table.T

    def codebooks(self, embed: Tensor) -> tuple[Tensor, Tensor]:
        """A and B written out, [V, r] each, as servers want them."""
        tables = self._tables()
        return tables if self.full else tuple(embed @ table.T for table in tables)


def pair_scores(unary: Tensor, contexts: Tensor, successors: Tensor) -> Tensor:
    """S [n, K] in float32 (float64 stays) from U [n, K], A[a] * W h [n, r] and B of the candidates [n, K, r]."""
    wide = torch.promote_types(unary.dtype, torch.float32)
    return unary.to(wide) + torch.matmul(successors, contexts[..., None]).squeeze(-1).to(wide)


def best_paths(
    selector: CandidateSelector, embed: Tensor, hidden: Tensor, unary: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """`Candidates.best` of many blocks, [R, n], from states [R, n, H], candidates' logits and ids [R, n, K], anchors [R]."""
    successors = selector.successors(ids.flatten(), embed).unflatten(0, ids.shape)
    path = [anchors]
    for slot in range(ids.shape[1]):
        contexts = selector.contexts(hidden[:, slot], path[-1], embed)
        best = pair_scores(unary[:, slot], contexts, successors[:, slot]).argmax(-1, keepdim=True)
        path.append(ids[:, slot].gather(1, best)[:, 0])
    return torch.stack(path[1:], 1)


@dataclass
class Candidates:
    """What a DFlash 2 drafter proposes for slots 1..n of one block: `ids` [n, K] target ids, best first, their logits
    `unary` [n, K], the whole `logits` [n, Vd], and what the scores of pairs are made from."""

    ids: Tensor
    unary: Tensor
    logits: Tensor
    anchor: int
    hidden: Tensor  # [n, H]
    selector: CandidateSelector
    embed: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __post_init__(self) -> None:
        self._successors = self.selector.successors(self.ids.flatten(), self.embed).unflatten(0, self.ids.shape)

    def scores(self, slot: int, previous: Tensor) -> Tensor:
        """S [K] of slot `slot` (0 is the first drafted one) after the token `previous` [1]."""
        contexts = self.selector.contexts(self.hidden[slot : slot + 1], previous, self.embed)
        return pair_scores(self.unary[slot : slot + 1], contexts, self._successors[slot : slot + 1])[0]

    def walk(self, pick) -> Tensor:
        """Tokens [n]: in each slot the candidate at `pick(slot, scores [K])`, an index [1]."""
        previous, path = torch.tensor([self.anchor], device=self.ids.device), []
        for slot in range(len(self)):
            previous = self.ids[slot, pick(slot, self.scores(slot, previous))]
            path.append(previous)
        return torch.cat(path) if path else self.ids.new_zeros(0)

    def best(self) -> Tensor:
        """The greedy walk, [n]."""
        return self.walk(lambda slot, scores: scores.argmax(-1, keepdim=True))
