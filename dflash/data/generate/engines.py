"""Let the target write answers: three ways through transformers, timed against each other.

- `static`: `generate` with a static cache, which transformers compiles on a GPU (CUDA graphs). Prompts are
  left-padded to one width and the batch is kept full, so that there is one shape and one compile.
- `continuous`: transformers' continuous batching (`generate_batch`), where a finished request makes room at
once.
- `plain`: `generate` with a growing cache; no compile, the one for a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from dflash.errors import ConfigError, RunError, refuse_seed

ENGINES = ("static", "continuous", "plain")


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn. Temperature 0 is greedy; `seed` is recorded, set once per run."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; wanted 0 (greedy) or more, and finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; wanted above 0 and at most 1")
        refuse_seed(self.seed)

    def record(self) -> dict:
        """What is written beside each answer."""
        return asdict(self) if self.temperature else {"temperature": 0.0}


@dataclass(frozen=True)
class Answer:
    """Token ids written by the target, its end token included, and why it stopped ("stop" or "length")."""

    response_ids: list[int]
    finish_reason: str


class Generator:
    """Answers prompts of token ids with one engine.

    Args:
        model: a transformers causal LM. `end_ids`: ids that end an answer. `pad_id`: id for left padding.
        engine: one of `ENGINES`. batch_size: prompts per call. prompt_width: left-pad width; a longer prompt
        makes a wider, separately compiled batch.
    """

    def __init__(
        self,
        model,
        end_ids: list[int],
        pad_id: int,
        engine: str = "plain",
        batch_size: int = 16,
        max_new_tokens: int = 192,
        prompt_width: int = 64,
    ):
        if engine not in ENGINES:
            raise ConfigError(f"engine '{engine}' is unknown; wanted one of {', '.join(ENGINES)}")
        self.model, self.end_ids, self.pad_id = model, list(end_ids), pad_id
        self.engine, self.batch_size = engine, batch_size
        self.max_new_tokens, self.prompt_width = max_new_tokens, prompt_width

    def __call__(self, prompts: list[list[int]], sampling: Sampling) -> list[Answer]:
        """Answers in the order of `prompts`, at most `batch_size` of them (any number for `continuous`)."""
        if self.engine == "continuous":
            return self._continuous(prompts, sampling)
        return self._padded(prompts, sampling)

    def _config(self, sampling: Sampling, **more) -> GenerationConfig:
        draw = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=sampling.temperature > 0,
            eos_token_id=self.end_ids or None,
            pad_token_id=self.pad_id,
            **(draw if sampling.temperature > 0 else {}),
            **more,
        )

    @torch.no_grad()
    def _padded(self, prompts: list[list[int]], sampling: Sampling) -> list[Answer]:
        longest, rows, more = max(map(len, prompts)), len(prompts), {}
        if self.engine == "static":
            longest = -(-longest // self.prompt_width) * self.prompt_width
            rows = self.batch_size
            more = {"cache_implementation": "static"}
        ids = torch.full((rows, longest), self.pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row in range(rows):  # a short last batch is filled up with its first prompt: same shape, no recompile
            prompt = prompts[row] if row < len(prompts) else prompts[0]
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        device = next(self.model.parameters()).device
        output = self.model.generate(
            ids.to(device), attention_mask=mask.to(device), generation_config=self._config(sampling, **more)
        )
        return [self._answer(row) for row in output[: len(prompts), longest:].tolist()]

    def _continuous(self, prompts: list[list[int]], sampling: Sampling) -> list[Answer]:
        # Left alone it takes most of the free memory for its cache: give it the pages that these prompts need.
        pages = sum(-(-(len(prompt) + self.max_new_tokens) // 256) for prompt in prompts)
        room = ContinuousBatchingConfig(num_blocks=pages + 8, max_batch_tokens=max(256, 2 * len(prompts)))
        results = self.model.generate_batch(
            inputs=[list(prompt) for prompt in prompts],
            generation_config=self._config(sampling),
            continuous_batching_config=room,
            progress_bar=False,
        )
        if len(results) != len(prompts) or any(result.error for result in results.values()):
            raise RunError(f"continuous batching answered {len(results)} of {len(prompts)} prompts")
        return [self._answer(list(result.generated_tokens)) for result in results.values()]

    def _answer(self, ids: list[int]) -> Answer:
        for index, token in enumerate(ids):
            if token in self.end_ids:
                return Answer(ids[: index + 1], "stop")
        return Answer(ids[: self.max_new_tokens], "length")


def tokens_per_second(
    generator: Generator, prompts: list[list[int]], seconds: float, report: Callable[[str], None] = print
) -> float:
    """Time a generator on `prompts` for about `seconds`, after one warm-up call; 0.0 if it fails.

    The warm-up (compilation) is reported and left out of the number.
    """
    size = generator.batch_size
    try:
        start = time.perf_counter()
        generator(prompts[:size], Sampling())
        warmup, start, tokens, at = time.perf_counter() - start, time.perf_counter(), 0, 0
        while tokens == 0 or time.perf_counter() - start < seconds:
            batch = prompts[at : at + size] or prompts[:size]
            tokens += sum(len(answer.response_ids) for answer in generator(batch, Sampling()))
            at = (at + size) % max(1, len(prompts))
    except Exception as error:  # a trial: the other engines still run, and the report says why this one did not
        report(f"engine {generator.engine}, batch {size}: failed, {type(error).__name__}: {str(error)[:300]}")
        return 0.0
    rate = tokens / (time.perf_counter() - start)
    report(f"engine {generator.engine}, batch {size}: {rate:,.0f} tokens/s (first call {warmup:.1f} s)")
    return rate
