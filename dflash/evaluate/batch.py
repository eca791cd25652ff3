"""Greedy decoding of many prompts side by side, each text at its own pace.

A round is the one of `decoding`, in tensors: propose, verify in one target call, keep the drafts that stand and the bonus
token. All that it reads and writes has one place and one shape, and it asks the host nothing, so on a GPU a round is a
CUDA graph; plain decoding is the same round without drafts. Texts that are finished stand still until the last one is;
on a CPU, where a round costs what its rows cost, they leave.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash.drafter.model import DFlashDrafter
from dflash.drafter.rows import RowContext, places_for
from dflash.evaluate.decoding import (
    DecodeResult,
    Decoding,
    checked,
    plain_generate,
    refuse_other_layers,
    speculative_generate,
)
from dflash.target.capture import Target
from dflash.target.rows import RowSession, why_one_by_one

ROWS = {"cpu": 8, "cuda": 64}
_EAGER_ROUNDS = 2  # of each graph: they set up what a capture must find ready
_CACHE_BYTES = 2 << 30  # on a CPU; on a GPU a third of what is free

Progress = Callable[[int], None]  # tokens written so far; a text that ended early counts as full


def generate(
    target: Target,
    drafter: DFlashDrafter | None,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    progress: Progress = lambda tokens: None,
) -> list[DecodeResult]:
    """Continue prompts with a drafter or (None) plainly; greedily and side by side where the target can.

    Returns one result a prompt; its seconds are those of the batch that it was in. Raises what `speculative_generate` does.
    """
    texts = [checked(target, prompt, how.max_new_tokens, how.eos_token_ids)[0] for prompt in prompts]
    results: list[DecodeResult | None] = [None] * len(texts)
    if how.temperature or not side_by_side(target, drafter):
        for index, text in enumerate(texts):
            results[index] = generate_one(target, drafter, text, how, index)
            progress(how.max_new_tokens * (index + 1))
        return results
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))  # a batch takes room for its longest
    room = max(map(len, texts), default=0) + how.max_new_tokens
    size = min(len(texts), rows_that_fit(target, room))
    decoder = RowDecoder(target, drafter, size, room, how)
    for start in range(0, len(order), size or 1):
        some, before = order[start : start + size], start * how.max_new_tokens
        found = decoder.run([texts[index] for index in some], lambda n, before=before: progress(before + n))
        for index, result in zip(some, found, strict=True):
            results[index] = result
    return results


def generate_one(
    target: Target, drafter: DFlashDrafter | None, prompt: list[int], how: Decoding, index: int = 0
) -> DecodeResult:
    """One text, the `index`-th, by itself."""
    draw = torch.Generator().manual_seed(how.seed + index)
    rest = (how.max_new_tokens, how.temperature, draw, how.eos_token_ids)
    if drafter is None:
        return plain_generate(target, prompt, *rest)
    return speculative_generate(target, drafter, prompt, *rest, max_draft=how.max_draft)


def side_by_side(target: Target, drafter: DFlashDrafter | None) -> bool:
    """Whether `RowDecoder` takes this pair."""
    return (drafter is None or drafter.fc.weight.device == target.device) and not why_one_by_one(target)


def rows_that_fit(target: Target, tokens: int) -> int:
    """Texts of so many tokens that are decoded at once."""
    device, config = target.device, target.config
    budget = torch.cuda.mem_get_info(device)[0] // 3 if device.type == "cuda" else _CACHE_BYTES
    wide = config.num_key_value_heads * (
        getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    )
    row = 2 * target.num_layers * wide * target.embed_weight.element_size() * places_for(tokens)
    return max(1, min(ROWS["cuda" if device.type == "cuda" else "cpu"], budget // row))


def standing(drafts: Tensor, wanted: Tensor, room: Tensor) -> Tensor:
    """How many drafts [R, m] of each row stand, at most `room` [R]: the run that equals the target's choice [R, m + 1]."""
    agree = (drafts == wanted[:, : drafts.shape[1]]).long().cumprod(1).sum(1)
    return torch.minimum(agree, room)


class RowDecoder:
    """Rounds over up to `rows` texts.

    Args:
        drafter: None writes one token a round. room: tokens of the longest text, prompt and answer.
        how: its temperature and seed are not read. graphs: on a GPU, capture the round; said once where that fails, and the
            same round goes on kernel by kernel.
    Raises: ConfigError as `speculative_generate` does.
    """

    def __init__(
        self, target: Target, drafter: DFlashDrafter | None, rows: int, room: int, how: Decoding, graphs: bool = True
    ):
        self.target, self.drafter, self.rows, self.how = target, drafter, rows, how
        block = 1 if drafter is None else drafter.block_size
        self.most = block - 1 if how.max_draft is None else max(0, min(how.max_draft, block - 1))
        if drafter is not None:
            refuse_other_layers(target, drafter)
        self.places = places_for(room + block)
        self.stops = set(target.end_ids if how.eos_token_ids is None else how.eos_token_ids)
        self._stops = torch.tensor(sorted(self.stops) or [-1], device=target.device)
        self._graphs = graphs and target.device.type == "cuda"
        self._allocated = 0

    def warm(self, prompt: list[int]) -> None:
        """First calls are slow: make them, and the graph."""
        self.run([prompt], max_new_tokens=2)
        while self._graphs and self._graph is None:
            self._turn()  # its row is done: nothing is written

    def run(
        self, prompts: list[list[int]], progress: Progress = lambda tokens: None, max_new_tokens: int | None = None
    ) -> list[DecodeResult]:
        """Continue at most `rows` prompts to their ends, by at most `how.max_new_tokens`."""
        max_new_tokens = max_new_tokens or self.how.max_new_tokens
        begun = time.perf_counter()
        self._start(prompts, max_new_tokens)
        prefill = time.perf_counter() - begun
        found: dict[int, DecodeResult] = {}
        rows = list(range(len(prompts)))  # the prompt in each row
        while True:
            finished, written = self._status()
            progress(written + max_new_tokens * len(found))
            if finished == self._allocated:
                break
            if not self._graphs and 2 * finished >= self._allocated:
                rows = self._drop(rows, found)
            self._turn()
        found |= self._collect(rows)
        seconds = time.perf_counter() - begun
        for result in found.values():
            result.seconds, result.prefill_seconds = seconds, prefill
        return [found[index] for index in range(len(prompts))]

    # -- state -----------------------------------------------------------------------------------------------------

    def _allocate(self, rows: int) -> None:
        device = self.target.device
        self._allocated, self._graph, self._turns = rows, None, 0
        self.session = RowSession(self.target, rows, self.places)
        self.context = None if self.drafter is None else RowContext(self.drafter, rows, self.places)
        self.text = torch.zeros(rows, self.places, dtype=torch.int64, device=device)
        self.begin, self.count, self.limit = (torch.ones(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.gains, self.kept = (torch.zeros(self.places, rows, dtype=torch.int64, device=device) for _ in range(2))
        self.round_number = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def _start(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Every prompt in its row, with its first token; rows without one are done."""
        rows = self.rows if self._graphs else len(prompts)
        if rows != self._allocated:
            self._allocate(rows)
        device, used = self.target.device, len(prompts)
        padded = [prompt + [0] * (self.places - len(prompt)) for prompt in prompts]
        self.text[:used] = torch.tensor(padded, device=device)
        self.begin[:used] = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.gains.zero_(), self.kept.zero_(), self.round_number.zero_()
        for rows, features, last in self.session.prefill(prompts):
            if self.context is not None:
                self.context.extend(features, torch.zeros_like(rows), rows)
            self.text[rows, self.begin[rows]] = self.target.logits(last).argmax(-1)
        self.count.copy_(self.begin + 1)
        self.limit.copy_(self.begin + max_new_tokens)
        self.done.copy_(self._is_stop(self._anchors()) | (self.count >= self.limit))
        self.done[used:], self.limit[used:] = True, self.begin[used:]

    def _anchors(self) -> Tensor:
        """The last token of each text."""
        return self.text.gather(1, self.count[:, None] - 1)[:, 0]

    def _is_stop(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self._stops).any(-1)

    def _status(self) -> tuple[int, int]:
        """Rows that are done, and tokens written; a row that is done counts as full."""
        written = torch.where(self.done, self.limit, self.count) - self.begin
        finished, total = torch.stack([self.done.sum(), written.sum()]).tolist()
        return finished, total

    def _drop(self, rows: list[int], found: dict[int, DecodeResult]) -> list[int]:
        """Read the finished texts out and forget their rows; the prompts that are left."""
        done = self.done.tolist()
        found |= {index: result for index, result in self._collect(rows).items() if done[rows.index(index)]}
        left = (~self.done).nonzero()[:, 0]
        self._allocated = left.shape[0]
        self.session.keep(left)
        if self.context is not None:
            self.context.keep(left)
        for name in ("text", "begin", "count", "limit", "done"):
            setattr(self, name, getattr(self, name)[left])
        self.gains, self.kept = self.gains[:, left], self.kept[:, left]
        return [index for index, finished in zip(rows, done, strict=False) if not finished]  # empty rows stand behind

    def _collect(self, rows: list[int]) -> dict[int, DecodeResult]:
        """The texts of `rows`, by prompt."""
        texts, begins, counts = self.text.tolist(), self.begin.tolist(), self.count.tolist()
        gains, kept = self.gains.T.tolist(), self.kept.T.tolist()
        found = {}
        for row, index in enumerate(rows):
            tokens = texts[row][begins[row] : counts[row]]
            steps = [gain for gain in gains[row] if gain]  # a finished text gains nothing
            ends = [1]
            for gain in steps:
                ends.append(ends[-1] + gain)
            chunks = [tokens[:1], *(tokens[start:end] for start, end in zip(ends, ends[1:], strict=False))]
            reason = "stop" if tokens[-1] in self.stops else "length"
            found[index] = DecodeResult(tokens, chunks, kept[row][: len(steps)], len(steps) + 1, finish_reason=reason)
        return found

    # -- a round ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One round, from the graph where there is one."""
        if self._graphs and self._graph is None and self._turns >= _EAGER_ROUNDS:
            self._capture()
        self._turns += 1
        self.round() if self._graph is None else self._graph.replay()

    def _capture(self) -> None:
        graph, device = torch.cuda.CUDAGraph(), self.target.device
        try:
            torch.cuda.synchronize(device)
            with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.round()
        except Exception as error:  # what a model's own code may not do while it is captured is the model's affair
            self._graphs = False
            warnings.warn(f"decoding runs without a CUDA graph: {type(error).__name__}: {error}", stacklevel=2)
        else:
            self._graph = graph

    @torch.no_grad()
    def round(self) -> None:
        """Draft, verify, accept, for all rows."""
        starts, anchors = self.count - 1, self._anchors()
        drafts = anchors.new_zeros(anchors.shape[0], 0)
        if self.context is not None:  # the whole block, even when less is verified: as in training
            drafts = self.context.propose(anchors, starts)[:, : self.most]
        features, states = self.session.advance(torch.cat([anchors[:, None], drafts], 1), starts)
        wanted = self.target.logits(states).argmax(-1)  # [R, m + 1]
        run = standing(drafts, wanted, self.limit - self.count - 1)
        slots = torch.arange(wanted.shape[1], device=wanted.device)
        end = torch.where(self._is_stop(wanted), slots, slots.shape[0]).amin(1)  # of the first end token
        gain = torch.minimum(run, end).add(1).masked_fill(self.done, 0)
        if self.context is not None:
            self.context.extend(features, starts)
        self.text.scatter_(1, self.count[:, None] + slots, wanted)  # what is too much is overwritten by the next
        self.gains.index_copy_(0, self.round_number, gain[None])
        self.kept.index_copy_(0, self.round_number, torch.minimum(run, gain)[None])
        self.count += gain
        self.round_number += 1
        self.done |= (end <= run) | (self.count >= self.limit)
