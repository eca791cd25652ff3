"""Decode prompts with and without the drafter, and say what it gained and whether the text is the target's own."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from dflash.drafter.model import DFlashDrafter
from dflash.evaluate.acceptance import summarize
from dflash.evaluate.batch import RowDecoder, generate, generate_one, side_by_side
from dflash.evaluate.decoding import DecodeResult, Decoding
from dflash.target.capture import Target
from dflash.target.session import TargetSession
from dflash.views.progress import Work

SPEED_SECONDS = 15.0  # for the comparison of speeds
_SPEED_TOKENS = 32  # of each text in it on a CPU, so that the seconds are enough for some prompts

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
    """One prompt, decoded. `chunks`: what each target call gave, the first is the prompt's own token."""

    prompt: str
    chunks: list[dict[str, Any]]
    acceptance_length: float | None
    tokens: int
    target_calls: int
    exact: bool | None  # None where nothing was compared (sampling)
    finish_reason: str
    difference: NearTie | None = None
    seconds: float | None = None  # decoded by itself; None where that was not measured
    plain_seconds: float | None = None
    gains: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def evaluate_prompts(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Prompt],
    how: Decoding,
    compare: bool = True,
    speed_seconds: float = SPEED_SECONDS,
    work: Callable[..., Work] = Work,
) -> list[PromptResult]:
    """Decode every prompt with the drafter, side by side where the target can.

    Args:
        compare: decode greedy texts plainly too, and measure the speed of both (`measure_speed`, `speed_seconds`).
        work: shows progress.
    """
    was_training = drafter.training
    drafter.eval()
    ids = [list(prompt.ids) for prompt in prompts]
    total, greedy = how.max_new_tokens * len(ids), how.temperature == 0
    with work("decoding with the drafter", total, "tokens") as line:
        decoded = generate(target, drafter, ids, how, line.to)
    plain: list[DecodeResult | None] = [None] * len(ids)
    if compare and greedy:
        with work("decoding plainly", total, "tokens") as line:
            plain = generate(target, None, ids, how, line.to)
    speeds: list[tuple[float, float]] = []
    if compare:
        with work("speed, one prompt at a time", len(ids), "prompts") as line:
            speeds = measure_speed(target, drafter, ids, how, speed_seconds, line.to)
    results = [_result(target, drafter, *each) for each in zip(prompts, decoded, plain, strict=True)]
    for result, (seconds, plain_seconds) in zip(results, speeds, strict=False):
        result.seconds, result.plain_seconds = seconds, plain_seconds
    drafter.train(was_training)
    return results


def measure_speed(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[list[int]],
    how: Decoding,
    limit: float,
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, float]]:
    """Seconds of each prompt decoded by itself, with the drafter and plainly: the same rounds on the same cache, on a GPU
    both as CUDA graphs, on a CPU the texts' first tokens. Stops after `limit` seconds: the first prompts are measured."""
    if target.device.type == "cpu":
        how = replace(how, max_new_tokens=min(how.max_new_tokens, _SPEED_TOKENS))
    together = how.temperature == 0 and side_by_side(target, drafter)
    room = max(map(len, prompts)) + how.max_new_tokens
    pair: list[Callable[[int], DecodeResult]] = []
    for model in (drafter, None):
        if together:
            decoder = RowDecoder(target, model, 1, room, how)
            decoder.warm(prompts[0])
            pair.append(lambda index, decoder=decoder: decoder.run([prompts[index]])[0])
        else:
            generate_one(target, model, prompts[0], replace(how, max_new_tokens=min(4, how.max_new_tokens)), 0)
            pair.append(lambda index, model=model: generate_one(target, model, prompts[index], how, index))
    found, start = [], time.perf_counter()
    for index in range(len(prompts)):
        if index and time.perf_counter() - start > limit:
            break
        # which one goes first alternates: a busy moment of the machine meets both alike
        seconds = {turn: pair[turn](index).seconds for turn in ((0, 1), (1, 0))[index % 2]}
        found.append((seconds[0], seconds[1]))
        progress(index + 1)
    return found


def _result(
    target: Target, drafter: DFlashDrafter, prompt: Prompt, decoded: DecodeResult, plain: DecodeResult | None
) -> PromptResult:
    exact, difference = None if plain is None else decoded.tokens == plain.tokens, None
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
        exact,
        decoded.finish_reason,
        difference,
        gains=[len(chunk) for chunk in decoded.chunks[1:]],
        accepted=decoded.accepted,
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
        "speedup_prompts": len(speeds),
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
