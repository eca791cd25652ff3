"""Does the drafter do in decoding what it did in training?

The same responses go both ways. Training: the pack's features, one forward with blocks at the decoder's own anchors,
the trainer's metrics. Decoding: the target with its cache, block after block along the text, rollbacks included.
On equal weights the two must draft the same tokens. Where they do not, the first tensor that differs is named:
target features, context keys or values, draft logits (sgl-project/SpecForge#533, z-lab/dflash#41: 98% accuracy in
training beside 10% acceptance, cause never found).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dflash.drafter.blocks import DraftContext
from dflash.drafter.masks import AnchorSet
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.selector import Candidates
from dflash.evaluate.acceptance import Span, response_spans
from dflash.evaluate.decoding import ForcedRule, decode, greedy_drafts, matching_run
from dflash.target.capture import Target

_ANCHORS = 64  # blocks of one training forward; every forward has this many, so that a compiled kernel sees one shape
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of a tensor's standard deviation; other dtypes: 5%


@dataclass
class Difference:
    """The first block in which training and decoding draft different tokens."""

    pack_id: int
    anchor: int  # position in the document
    slot: int
    training_token: int
    decoding_token: int
    tensor: str  # "target features", "context keys", "context values", "draft logits", "none"
    size: float  # largest difference over the tensor's standard deviation
    place: str


@dataclass
class Parity:
    """Per slot (1..S-1): share of drafts that equal the text, and share of blocks whose slots 1..k all do."""

    agrees: bool
    anchors: int
    accuracy_training: list[float | None] = field(default_factory=list)
    accuracy_decoding: list[float | None] = field(default_factory=list)
    acceptance_training: list[float] = field(default_factory=list)
    acceptance_decoding: list[float] = field(default_factory=list)
    largest_gap: float = 0.0  # over slots, of the shares above
    different_blocks: int = 0
    difference: Difference | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def message(self) -> str:
        """One sentence for people."""
        gap = f"largest gap {100 * self.largest_gap:.2f} points"
        head = f"training and decoding compared at {self.anchors} anchors: {gap}"
        if self.difference is None:
            return f"{head}, every draft equal"
        d = self.difference
        return (
            f"{head}, {self.different_blocks} blocks differ; first at pack {d.pack_id}, anchor {d.anchor}, "
            f"slot {d.slot} (training {d.training_token}, decoding {d.decoding_token}): they part in the {d.tensor} "
            f"({d.size:.2g} standard deviations{', ' + d.place if d.place else ''})"
        )


class Recorder:
    """A drafter that notes what decoding feeds it and what it answers."""

    def __init__(self, drafter: DFlashDrafter):
        self.drafter = drafter
        self.features: list[Tensor] = []
        self.blocks: list[tuple[int, Tensor | Candidates]] = []  # anchor position, what was proposed
        self.context: DraftContext | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def extend(self, context: DraftContext, features: Tensor) -> None:
        self.context = context
        self.features.append(features)
        self.drafter.extend(context, features)

    def propose(self, context: DraftContext, anchor_token: int) -> Tensor | Candidates:
        proposal = self.drafter.propose(context, anchor_token)
        self.blocks.append((context.length, proposal))
        return proposal


class _Tally:
    """Counts of one side, per slot."""

    def __init__(self, slots: int):
        self.correct, self.supervised, self.accepted = ([0] * slots for _ in range(3))
        self.blocks = 0

    def add(self, drafts: list[int], text: list[int]) -> None:
        self.blocks += 1
        run = matching_run(drafts, text)
        for slot, (draft, token) in enumerate(zip(drafts, text, strict=False)):
            self.supervised[slot] += 1
            self.correct[slot] += draft == token
            self.accepted[slot] += slot < run

    def accuracy(self) -> list[float | None]:
        return [c / n if n else None for c, n in zip(self.correct, self.supervised, strict=True)]

    def acceptance(self) -> list[float]:
        return [a / max(1, self.blocks) for a in self.accepted]


@torch.no_grad()
def parity_check(
    target: Target,
    drafter: DFlashDrafter,
    source,
    packs: Iterable,
    max_responses: int = 8,
    points: float = 1.0,
    max_tokens: int | None = None,
) -> Parity:
    """Compare training and decoding on held-out responses.

    Args:
        source: `source.get(pack)` gives training's features of a pack. packs: hold text written by the target.
        max_responses: how many responses to replay. max_tokens: how much of each; None: all.
        points: allowed gap of any per-slot share, in percentage points.
    """
    was_training = drafter.training
    drafter.eval()
    slots = drafter.block_size - 1
    trained, decoded = _Tally(slots), _Tally(slots)
    metrics = {"correct_by_slot": 0, "supervised_by_slot": 0, "accepted_by_slot": 0, "blocks": 0}
    result, left = Parity(True, 0), max_responses
    for pack in packs:
        if left <= 0:
            break
        spans = response_spans(pack.loss_mask, pack.lengths)[:left]
        if max_tokens is not None:
            spans = [replace(span, end=min(span.end, span.start + max_tokens)) for span in spans]
        if not spans:
            continue
        left -= len(spans)
        features = source.get(pack)
        replays = [_replay(target, drafter, pack, span) for span in spans]
        places = [span.document + at for span, replay in zip(spans, replays, strict=True) for at, _ in replay.blocks]
        for name, value in _trainer_metrics(drafter, pack, features, places).items():
            metrics[name] = metrics[name] + value.cpu()
        hidden = _training_states(drafter, pack, features, places)  # [anchors, S, H]
        row = 0
        for span, replay in zip(spans, replays, strict=True):
            for at, theirs in replay.blocks:
                ours = drafter.proposal(hidden[row, 1:], int(pack.input_ids[span.document + at]))
                text = pack.input_ids[span.document + at + 1 : span.end].tolist()[:slots]
                one, two = greedy_drafts(drafter, ours), greedy_drafts(drafter, theirs)
                trained.add(one, text)
                decoded.add(two, text)
                if one != two:
                    result.different_blocks += 1
                if one != two and result.difference is None:
                    slot = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
                    before = features.all_hidden_states[:, span.document : span.document + at]
                    parted = _locate(drafter, before, replay, _logits(ours), _logits(theirs))
                    result.difference = Difference(pack.pack_id, at, slot + 1, one[slot], two[slot], *parted)
                row += 1
    drafter.train(was_training)
    result.anchors = trained.blocks
    result.accuracy_training = _shares(metrics["correct_by_slot"], metrics["supervised_by_slot"], slots)
    if drafter.config.has_selector:  # the trainer's is teacher forced; past a run's end the walk has other predecessors
        result.accuracy_training = trained.accuracy()
    accepted = _shares(metrics["accepted_by_slot"], metrics["blocks"], slots)
    result.acceptance_training = [value or 0.0 for value in accepted]
    result.accuracy_decoding, result.acceptance_decoding = decoded.accuracy(), decoded.acceptance()
    pairs = [
        *zip(result.accuracy_training, result.accuracy_decoding, strict=True),
        *zip(result.acceptance_training, result.acceptance_decoding, strict=True),
    ]
    result.largest_gap = max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
    result.agrees = result.anchors > 0 and result.largest_gap <= points / 100
    return result


def _replay(target: Target, drafter: DFlashDrafter, pack, span: Span) -> Recorder:
    """Decode along one response of the pack."""
    recorder = Recorder(drafter)
    prompt = pack.input_ids[span.document : span.start].tolist()
    text = pack.input_ids[span.start : span.end].tolist()
    if prompt:
        decode(target, recorder, prompt, len(text), ForcedRule(text))
    return recorder


def _anchor_sets(places: list[int]) -> Iterable[AnchorSet]:
    for start in range(0, len(places), _ANCHORS):
        some = places[start : start + _ANCHORS]
        padding = _ANCHORS - len(some)
        yield AnchorSet(torch.tensor(some + [0] * padding), torch.tensor([True] * len(some) + [False] * padding))


def _trainer_metrics(drafter: DFlashDrafter, pack, features, places: list[int]) -> dict[str, Tensor]:
    device = drafter.fc.weight.device
    total: dict[str, Tensor] = {}
    for anchors in _anchor_sets(places):
        _, metrics = drafter(
            all_hidden_states=features.all_hidden_states.to(device),
            verifier_last_hidden=features.verifier_last_hidden.to(device),
            input_ids=pack.input_ids[None].to(device),
            loss_mask=pack.loss_mask[None].to(device),
            lengths=pack.lengths,
            position_ids=pack.position_ids[None].to(device),
            anchors=anchors,
        )
        for name in ("correct_by_slot", "supervised_by_slot", "accepted_by_slot", "blocks"):
            total[name] = total.get(name, 0) + metrics[name]
    return total


def _training_states(drafter: DFlashDrafter, pack, features, places: list[int]) -> Tensor:
    device = drafter.fc.weight.device
    tensors = (features.all_hidden_states.to(device), pack.input_ids.to(device), pack.position_ids.to(device))
    parts = []
    for anchors in _anchor_sets(places):
        hidden = drafter.draft(*drafter.pack_inputs(*tensors, anchors, pack.lengths))
        parts.append(hidden[: int(anchors.valid.sum())])
    return torch.cat(parts) if parts else torch.zeros(0, drafter.block_size, drafter.config.hidden_size)


def _locate(
    drafter: DFlashDrafter, trained: Tensor, replay: Recorder, ours: Tensor, theirs: Tensor
) -> tuple[str, float, str]:
    """Follow the tensors in the order of computation to the first that differs: its name, the gap in standard deviations,
    and the place.

    Args:
        trained: training's features of the tokens before the anchor. ours, theirs: draft logits of training and decoding.
    """
    device, at, largest = drafter.fc.weight.device, trained.shape[1], 0.0
    trained = trained.to(device)
    decoded = torch.cat(replay.features, 1)[:, :at].to(device)
    hidden, ids = drafter.config.hidden_size, drafter.target_layer_ids
    context = drafter.new_context()
    DFlashDrafter.extend(drafter, context, trained)
    steps = [
        (
            f"target features of layer {ids[i]}",
            trained[..., i * hidden : (i + 1) * hidden],
            decoded[..., i * hidden : (i + 1) * hidden],
        )
        for i in range(len(ids))
    ]
    for layer, ((k1, v1), (k2, v2)) in enumerate(zip(context.layers, replay.context.layers, strict=True)):
        steps.append((f"context keys of drafter layer {layer}", k1, k2[:, :, :at]))
        steps.append((f"context values of drafter layer {layer}", v1, v2[:, :, :at]))
    steps.append(("draft logits", ours[None], theirs[None]))
    coarse = trained.dtype not in _TOLERANCE or drafter.fc.weight.dtype not in _TOLERANCE
    limit = 0.05 if coarse or trained.dtype != decoded.dtype else _TOLERANCE[trained.dtype]
    for name, a, b in steps:
        gap = (a.float() - b.float()).abs()
        size = float(gap.max() / a.float().std().clamp_min(1e-12)) if gap.numel() else 0.0
        if not size <= limit:
            rows = gap.amax(-1).flatten(0, -2).amax(0)  # per position or slot
            first = int((rows > limit * a.float().std()).int().argmax())
            place = f"slot {first + 1}" if name == "draft logits" else f"position {first}"
            return name, size, f"first at {place}"
        largest = max(largest, size)
    return "order of near-equal logits", largest, "every tensor agrees within rounding"


def _logits(proposal: Tensor | Candidates) -> Tensor:
    return proposal.logits if isinstance(proposal, Candidates) else proposal


def _shares(counts: Any, of: Any, slots: int) -> list[float | None]:
    counts = torch.as_tensor(counts).double() * torch.ones(slots, dtype=torch.float64)
    of = torch.as_tensor(of).double() * torch.ones(slots, dtype=torch.float64)
    return [float(c / n) if n else None for c, n in zip(counts, of, strict=True)]
