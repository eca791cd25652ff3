"""Decode prompts with and without the drafter, and say what it gained and whether the text is the target's own."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dflash.drafter.model import DFlashDrafter
from dflash.evaluate.acceptance import summarize
from dflash.evaluate.decoding import DecodeResult, plain_generate, speculative_generate
from dflash.target.capture import Target
from dflash.target.session import TargetSession

THINKING, CLOSED, PLAIN = "thinking", "thinking switched off", "no thinking marks"


@dataclass(frozen=True)
class Prompt:
    """What the target is given: `ids`, and the same as `text`, rendered."""

    ids: tuple[int, ...]
    text: str


@dataclass
class NearTie:
    """The first token at which speculative and plain greedy text differ.

    `margin`: the plain token's logit over the other's, by one token per call. `noise`: how much that margin moves
    when the target alone computes it in other batch shapes. A margin within the noise is rounding, not a fault.
    """

    index: int
    plain_token: int
    speculative_token: int
    margin: float
    noise: float
    wide: bool


@dataclass
class PromptResult:
    """One prompt, decoded both ways. `chunks`: what each target call gave, the first is the prompt's own token."""

    prompt: str
    chunks: list[dict[str, Any]]
    acceptance_length: float | None
    tokens: int
    target_calls: int
    seconds: float
    plain_seconds: float | None
    exact: bool | None  # None where nothing was compared (sampling)
    finish_reason: str
    difference: NearTie | None = None
    gains: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def evaluate_prompts(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    compare: bool = True,
    max_draft: int | None = None,
) -> Iterator[PromptResult]:
    """Decode every prompt with the drafter and, with `compare`, plainly too, on the same cache and clock; one result after
    the other. `max_draft`: see `speculative_generate`."""
    was_training = drafter.training
    drafter.eval()
    warm = list(prompts[0].ids)  # first calls are slow: not timed
    speculative_generate(target, drafter, warm, 4, temperature, _generator(seed), max_draft=max_draft)
    if compare:
        plain_generate(target, warm, 2, temperature, _generator(seed))
    for index, prompt in enumerate(prompts):
        ids = list(prompt.ids)
        rest, plain = (max_new_tokens, temperature), None
        if compare and index % 2:  # which one goes first alternates: a busy moment of the machine meets both alike
            plain = plain_generate(target, ids, *rest, _generator(seed + index))
        decoded = speculative_generate(target, drafter, ids, *rest, _generator(seed + index), max_draft=max_draft)
        if compare and plain is None:
            plain = plain_generate(target, ids, *rest, _generator(seed + index))
        yield _result(target, drafter, prompt, decoded, plain, temperature == 0)
    drafter.train(was_training)


def _result(
    target: Target, drafter: DFlashDrafter, prompt: Prompt, decoded: DecodeResult, plain: DecodeResult | None, greedy: bool
) -> PromptResult:
    exact = decoded.tokens == plain.tokens if plain is not None and greedy else None
    difference = None
    if exact is False:
        difference = first_difference(target, list(prompt.ids), decoded.tokens, plain.tokens, drafter.block_size)
    texts = chunk_texts(target.tokenizer, decoded.chunks)
    chunks = [
        {"text": text, "accepted": count, "tokens": len(chunk)}
        for text, count, chunk in zip(texts, [0, *decoded.accepted], decoded.chunks, strict=True)
    ]
    return PromptResult(
        prompt.text,
        chunks,
        decoded.acceptance_length,
        len(decoded.tokens),
        decoded.target_calls,
        decoded.seconds,
        plain.seconds if plain is not None else None,
        exact,
        decoded.finish_reason,
        difference,
        [len(chunk) for chunk in decoded.chunks[1:]],
        decoded.accepted,
    )


@torch.no_grad()
def first_difference(
    target: Target, prompt: list[int], speculative: list[int], plain: list[int], block_size: int
) -> NearTie:
    """Judge the first difference of two greedy texts by the target alone, in three batch shapes."""
    index = next(
        (i for i, (a, b) in enumerate(zip(speculative, plain, strict=False)) if a != b), min(len(speculative), len(plain))
    )
    if index >= min(len(speculative), len(plain)):  # one text goes on where the other ends
        tokens = (plain[index] if index < len(plain) else -1, speculative[index] if index < len(speculative) else -1)
        return NearTie(index, *tokens, float("inf"), 0.0, True)
    a, b = plain[index], speculative[index]
    prefix = prompt + plain[:index]
    rows = [_logits_after(target, prefix, width) for width in (1, min(block_size, len(prefix) - 1), 0) if width >= 0]
    margins = [float(row[a] - row[b]) for row in rows]
    rounding = 2 * torch.finfo(rows[0].dtype).eps * float(rows[0][a].abs())
    noise = max(margins) - min(margins) + rounding
    return NearTie(index, a, b, margins[0], noise, abs(margins[0]) > 2 * noise)


def _logits_after(target: Target, ids: list[int], width: int) -> torch.Tensor:
    """The target's logits [V] after `ids`, the last `width` tokens fed in one cached call (0: no cache at all)."""
    if width == 0 or len(ids) <= width:
        last = target.capture(torch.tensor([ids])).verifier_last_hidden[0, -1]
        return F.linear(last, target.head_weight)
    session = TargetSession(target)
    session.prefill(ids[:-width])
    return session.advance(ids[-width:])[1][-1]


def chunk_texts(tokenizer: Any, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Text that each chunk adds; a character split over two chunks goes to the one that completes it."""
    if tokenizer is None:
        return [" ".join(map(str, chunk)) for chunk in chunks]
    ids: list[int] = []
    texts, done = [], ""
    for number, chunk in enumerate(chunks, 1):
        ids.extend(chunk)
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if whole.endswith("\ufffd") and number < len(chunks):
            whole = whole.rstrip("\ufffd")
        new = whole[len(done) :] if whole.startswith(done) else ""
        texts.append(new)
        done += new
    return texts


def bootstrap_interval(
    pairs: Sequence[tuple[int, int]], level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Interval of sum(gained) / sum(calls) when prompts are drawn anew; `pairs` of one prompt each."""
    pairs = [pair for pair in pairs if pair[1]]
    if len(pairs) < 2:
        return None
    random_state = random.Random(seed)
    ratios = []
    for _ in range(draws):
        sample = random_state.choices(pairs, k=len(pairs))
        ratios.append(sum(gained for gained, _ in sample) / sum(calls for _, calls in sample))
    ratios.sort()
    tail = (1 - level) / 2
    return ratios[int(tail * draws)], ratios[min(draws - 1, int((1 - tail) * draws))]


def summarize_prompts(results: Iterable[PromptResult], block_size: int) -> dict[str, Any]:
    """Figures over all prompts: `acceptance.summarize`, a 95% interval over prompts, speed-up (the median over prompts, with
    the smallest and the largest), exactness."""
    results = list(results)
    runs = [run for result in results for run in result.accepted]
    gains = [gain for result in results for gain in result.gains]
    interval = bootstrap_interval([(sum(result.gains), len(result.gains)) for result in results])
    speeds = [result.plain_seconds / result.seconds for result in results if result.plain_seconds and result.seconds]
    compared = [result for result in results if result.exact is not None]
    return summarize(runs, gains, block_size) | {
        "acceptance_interval": list(interval) if interval else None,
        "speedup": statistics.median(speeds) if speeds else None,
        "speedup_spread": [min(speeds), max(speeds)] if speeds else None,
        "exact": sum(bool(result.exact) for result in compared) if compared else None,
        "compared": len(compared),
        "lossless": not any(result.difference and result.difference.wide for result in compared) if compared else None,
        "prompts": [asdict(result) for result in results],
    }


# -- thinking mode ------------------------------------------------------------------------------------------------


def thinking_mode(prompt: str, answer: str = "") -> str:
    """In which mode a reasoning model was asked: by the marks at the prompt's end and the answer's beginning."""
    tail = prompt.rstrip()
    if tail.endswith("</think>"):
        return CLOSED
    if tail.endswith("<think>") or answer.lstrip().startswith("<think>"):
        return THINKING
    return PLAIN


def compare_modes(evaluated: Sequence[str], trained: Counter[str]) -> str | None:
    """A warning when prompts are rendered in another thinking mode than the training text (z-lab/dflash#133: 25%
    acceptance beside 60%); None when they agree or nothing is known."""
    total = sum(trained.values())
    if not total or not evaluated:
        return None
    mode, count = Counter(evaluated).most_common(1)[0]
    share = trained[mode] / total
    if share >= 0.5:
        return None
    common, often = trained.most_common(1)[0]
    return (
        f"{count} of {len(evaluated)} evaluation prompts are in mode '{mode}', but {100 * often / total:.0f}% of the "
        f"training text is in mode '{common}': acceptance will look worse than it is. Render the prompts as in "
        f"training (--thinking {'on' if common == THINKING else 'off'}), or train on that mode"
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
