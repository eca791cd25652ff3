"""Speculative decoding: the drafter writes a block, the target checks it in one call.

One round, with the last verified token as the block's anchor (slot 0):

    propose   drafter logits for slots 1..S-1, from the features of the tokens before the anchor; with a candidate selector,
              its walk over each slot's best tokens (`drafter.selector`)
    verify    one target call over [anchor, draft tokens] gives the target's own choice after each of them
    accept    the longest run of agreeing drafts, and then the target's next token (the bonus token)

The drafter's context grows by the features of verified tokens only, so it never needs to be cut. Greedy text equals
plain greedy text token for token in float32; sampling follows the target's distribution exactly (rejection sampling,
Leviathan et al. 2023, "Fast inference from transformers via speculative decoding").
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash.drafter.model import DFlashDrafter
from dflash.drafter.selector import Candidates
from dflash.errors import ConfigError
from dflash.target.capture import Target
from dflash.target.session import TargetSession


@dataclass(frozen=True)
class Decoding:
    """How texts are decoded.

    temperature: 0 is greedy. seed: of sampling; text i draws from seed + i. eos_token_ids: tokens that end a text, kept as
        its last token; None takes all of the target's. max_draft: see `speculative_generate`.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    max_draft: int | None = None
    eos_token_ids: list[int] | None = None


@dataclass
class DecodeResult:
    """Text and what it cost.

    `chunks[0]` is the token that the prompt's own pass gives; each further chunk is what one verifying target call
    gave: accepted drafts, then the bonus token. `accepted[i]` counts the drafts kept in call i. `forwards` counts
    every target pass, the prompt's and those that rebuild a recurrent state included.
    """

    tokens: list[int]
    chunks: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    forwards: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finish_reason: str = "length"

    @property
    def target_calls(self) -> int:
        """Verifying calls; the pass over the prompt is not one."""
        return len(self.accepted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens gained per target call, the bonus token included; None when there was no call."""
        return (len(self.tokens) - 1) / self.target_calls if self.accepted else None


def greedy_drafts(drafter: DFlashDrafter, proposal: Tensor | Candidates) -> list[int]:
    """The tokens that a drafter writes at temperature 0."""
    if isinstance(proposal, Candidates):
        return proposal.best().tolist()
    return drafter.draft_token_ids[proposal.argmax(-1)].tolist()


class GreedyRule:
    """Take the most likely token. Exact: a draft stands where the target would have written the same."""

    def choose(self, logits: Tensor) -> int:
        return int(logits.argmax(-1))

    def draft(self, drafter: DFlashDrafter, proposal: Tensor | Candidates) -> list[int]:
        return greedy_drafts(drafter, proposal)

    def verify(self, drafts: list[int], logits: Tensor) -> tuple[int, int]:
        """How many drafts stand, and the token after them; logits [len(drafts) + 1, V]."""
        wanted = logits.argmax(-1).tolist()
        count = matching_run(drafts, wanted)
        return count, wanted[count]


class SampledRule:
    """Rejection sampling at a temperature: what is written is distributed as the target alone would write it."""

    def __init__(self, temperature: float, generator: torch.Generator | None = None):
        if not temperature > 0:
            raise ConfigError(f"temperature must be above 0 to sample, got {temperature}; 0 means greedy")
        self.temperature, self.generator = temperature, generator
        self._proposal: Tensor | None = None  # [slots, V] of the block in flight

    def _uniform(self, count: int, device: torch.device) -> Tensor:
        where = self.generator.device if self.generator is not None else "cpu"
        return torch.rand(count, generator=self.generator, device=where, dtype=torch.float64).to(device)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.double() / self.temperature, -1)

    def _draw(self, weights: Tensor) -> Tensor:
        """One index per row of non-negative weights [n, V], [n]."""
        total = weights.cumsum(-1)
        at = self._uniform(weights.shape[0], weights.device)[:, None] * total[:, -1:]
        index = torch.searchsorted(total, at, right=True)[:, 0]
        # rounding may put a draw on the last sum itself: take the last token with weight instead
        last = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)
        return torch.minimum(index, last)

    def choose(self, logits: Tensor) -> int:
        return int(self._draw(self._probabilities(logits)[None]))

    def draft(self, drafter: DFlashDrafter, proposal: Tensor | Candidates) -> list[int]:
        """Sample each slot from the drafter, and keep its distribution over the target's vocabulary."""
        if isinstance(proposal, Candidates):
            return self._walk(drafter, proposal)
        own = self._probabilities(proposal)  # [slots, Vd]
        self._proposal = own.new_zeros(own.shape[0], drafter.config.vocab_size)
        self._proposal[:, drafter.draft_token_ids] = own
        return drafter.draft_token_ids[self._draw(own)].tolist()

    def _walk(self, drafter: DFlashDrafter, candidates: Candidates) -> list[int]:
        """The same along the selector's walk, where a slot's distribution is over its candidates, given the draw before."""
        kept = torch.zeros(len(candidates), drafter.config.vocab_size, dtype=torch.float64, device=candidates.ids.device)

        def pick(slot: int, scores: Tensor) -> Tensor:
            own = self._probabilities(scores)  # [K]
            kept[slot, candidates.ids[slot]] = own
            return self._draw(own[None])

        path = candidates.walk(pick).tolist()
        self._proposal = kept
        return path

    def verify(self, drafts: list[int], logits: Tensor) -> tuple[int, int]:
        target = self._probabilities(logits)  # [drafts + 1, V]
        count = len(drafts)
        if drafts:
            proposal = self._proposal[:count].to(target.device)
            if proposal.shape[1] != target.shape[1]:
                proposal = torch.nn.functional.pad(proposal, (0, target.shape[1] - proposal.shape[1]))
            at = torch.tensor(drafts, device=target.device)[:, None]
            ratio = (target[:count].gather(1, at) / proposal.gather(1, at))[:, 0]
            refused = (self._uniform(count, target.device) >= ratio).tolist()
            count = next((slot for slot, bad in enumerate(refused) if bad), count)
        weights = target[count]
        if count < len(drafts):
            left = (weights - proposal[count]).clamp_min(0)
            weights = left if bool(left.any()) else weights  # nothing left only by rounding
        return count, int(self._draw(weights[None]))


class ForcedRule:
    """Follow a given text whatever the target would write; for comparing decoding with training (`parity`)."""

    def __init__(self, text: list[int]):
        self.text, self.at = text, 0

    def choose(self, logits: Tensor) -> int:
        self.at = 1
        return self.text[0]

    def draft(self, drafter: DFlashDrafter, proposal: Tensor | Candidates) -> list[int]:
        return greedy_drafts(drafter, proposal)

    def verify(self, drafts: list[int], logits: Tensor) -> tuple[int, int]:
        rest = self.text[self.at :]
        count = min(matching_run(drafts, rest), len(rest) - 1)
        self.at += count + 1
        return count, rest[count]


def matching_run(drafts: list[int], wanted: list[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for draft, want in zip(drafts, wanted, strict=False):
        if draft != want:
            break
        count += 1
    return count


def speculative_generate(
    target: Target,
    drafter: DFlashDrafter,
    prompt_ids: list[int] | Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos_token_ids: list[int] | None = None,
    *,
    max_draft: int | None = None,
) -> DecodeResult:
    """Continue a prompt with a drafter.

    Args:
        prompt_ids: at least one token. max_new_tokens: exact upper bound, at least 1.
        temperature: 0 is greedy. generator: makes sampling repeatable.
        eos_token_ids: tokens that end the text, kept as its last token; None takes all of the target's.
        max_draft: verify only this many drafts of each block (None: all S-1). Late slots seldom stand; leaving them out
            makes a target call cheaper where it is not bound by memory.

    Raises: ConfigError when the drafter reads other layers than the target captures, for an empty prompt, or a
        max_new_tokens below 1.
    """
    prompt, stops = checked(target, prompt_ids, max_new_tokens, eos_token_ids)
    rule = SampledRule(temperature, generator) if temperature else GreedyRule()
    return decode(target, drafter, prompt, max_new_tokens, rule, stops, max_draft)


def decode(
    target: Target,
    drafter: DFlashDrafter,
    prompt: list[int],
    max_new_tokens: int,
    rule: GreedyRule | SampledRule | ForcedRule,
    stops: frozenset[int] = frozenset(),
    max_draft: int | None = None,
) -> DecodeResult:
    """`speculative_generate` by a rule that says how drafts are drawn and judged."""
    refuse_other_layers(target, drafter)
    most = drafter.block_size - 1 if max_draft is None else max(0, max_draft)
    where = drafter.fc.weight.device
    session, context = TargetSession(target, 2 * drafter.block_size), drafter.new_context()
    start = _now(target)
    features, logits = session.prefill(prompt)
    drafter.extend(context, features.to(where))
    result = DecodeResult([], prefill_seconds=_now(target) - start)
    _take(result, [rule.choose(logits)], stops, max_new_tokens)
    while result.finish_reason == "":
        anchor, left = result.tokens[-1], max_new_tokens - len(result.tokens)
        # The whole block is drafted even when less is needed: a shorter one would be another input than in training.
        drafts = rule.draft(drafter, drafter.propose(context, anchor))[:most][: left - 1]
        features, logits = session.advance([anchor, *drafts])
        count, bonus = rule.verify(drafts, logits)
        session.keep(count + 1)
        drafter.extend(context, features[:, : count + 1].to(where))
        kept = _take(result, [*drafts[:count], bonus], stops, max_new_tokens)
        result.accepted.append(min(count, kept))
    result.seconds, result.forwards = _now(target) - start, session.calls
    return result


def refuse_other_layers(target: Target, drafter: DFlashDrafter) -> None:
    """ConfigError where the drafter reads other layers than the target captures."""
    if list(target.layer_ids) != list(drafter.target_layer_ids):
        raise ConfigError(
            f"the target captures layers {list(target.layer_ids)}, the drafter reads {drafter.target_layer_ids}; load "
            f"the target with layer_ids={drafter.target_layer_ids}"
        )


def plain_generate(
    target: Target,
    prompt_ids: list[int] | Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos_token_ids: list[int] | None = None,
) -> DecodeResult:
    """Continue a prompt one token per target call, on the same cache and timing as `speculative_generate`."""
    prompt, stops = checked(target, prompt_ids, max_new_tokens, eos_token_ids)
    rule = SampledRule(temperature, generator) if temperature else GreedyRule()
    session = TargetSession(target)
    start = _now(target)
    _, logits = session.prefill(prompt)
    result = DecodeResult([], prefill_seconds=_now(target) - start)
    _take(result, [rule.choose(logits)], stops, max_new_tokens)
    while result.finish_reason == "":
        _, logits = session.advance([result.tokens[-1]])
        session.keep(1)
        _take(result, [rule.choose(logits[0])], stops, max_new_tokens)
        result.accepted.append(0)
    result.seconds, result.forwards = _now(target) - start, session.calls
    return result


def _take(result: DecodeResult, new: list[int], stops: frozenset[int], limit: int) -> int:
    """Append a chunk up to the first end token in it or the limit; how many tokens of it were kept."""
    kept = new[: limit - len(result.tokens)]
    end = next((place for place, token in enumerate(kept) if token in stops), None)
    if end is not None:
        kept = kept[: end + 1]
    result.tokens.extend(kept)
    result.chunks.append(kept)
    full = len(result.tokens) >= limit
    result.finish_reason = "stop" if end is not None else "length" if full else ""
    return len(kept)


def checked(
    target: Target, prompt_ids: list[int] | Tensor, max_new_tokens: int, eos_token_ids: list[int] | None
) -> tuple[list[int], frozenset[int]]:
    """The prompt as a list, and the tokens that end its text. Raises ConfigError, see `speculative_generate`."""
    prompt = [int(token) for token in torch.as_tensor(prompt_ids).flatten().tolist()]
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    return prompt, frozenset(target.end_ids if eos_token_ids is None else eos_token_ids)


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
