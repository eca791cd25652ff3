"""`dflash regenerate`: have the target write the answers that a drafter is trained on.

A drafter must predict what its target writes, so the best training text is the target's own. Token ids and
the finish reason are kept beside the text, because text does not always come back to the same ids when it is
tokenized again. The output can be continued after a kill: whole lines are kept, a torn last line is cut off,
and what is already answered is not asked again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from dflash.data.chat import Chat, Turn
from dflash.data.generate.endpoint import Endpoint
from dflash.data.generate.engines import Answer, Generator, Sampling, tokens_per_second
from dflash.data.generate.prompts import Questions, make_prompts, prompts_in, read_prompts
from dflash.data.rendering import prompt_reader
from dflash.data.report import DataReport
from dflash.errors import ConfigError, DataError, refuse_below
from dflash.target.capture import Target, load_target
from dflash.target.random_weights import NOTHING_TO_DECODE, is_random


@dataclass(frozen=True)
class Job:
    """One question: the chat before the answer, its token ids (empty for an endpoint), how to draw."""

    chat: Chat
    prompt_ids: tuple[int, ...]
    sampling: Sampling

    @property
    def key(self) -> str:
        """Same question and same way to draw: same key."""
        return _key(self.chat.messages(), list(self.chat.tools), self.sampling.record())

    def row(self, text: str, finish_reason: str | None) -> dict:
        """What is written, without token ids."""
        row = {
            "messages": [*self.chat.messages(), {"role": "assistant", "content": text}],
            "finish_reason": finish_reason,
            "sampling": self.sampling.record(),
        }
        return row | ({"tools": list(self.chat.tools)} if self.chat.tools else {})


def _key(messages: list[dict], tools: list[dict], sampling: dict) -> str:
    asked = [messages, tools] if tools else [messages]
    text = json.dumps([*asked, sampling.get("temperature", 0.0), sampling.get("top_p", 1.0)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class ConversationFile:
    """Append-only JSONL of answered conversations, safe to continue.

    `settings` (target, length, dtype ...) are kept in `<out>.meta.json`; continuing with others is refused.
    """

    def __init__(self, path: str | Path, settings: dict):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        meta = self.path.with_name(self.path.name + ".meta.json")
        if self.path.exists() and self.path.stat().st_size and meta.exists():
            before = json.loads(meta.read_text())
            changed = [name for name in settings if before.get(name) != settings[name]]
            if changed:
                raise ConfigError(
                    f"{self.path} was begun with {changed[0]}={before.get(changed[0])!r}, now it is "
                    f"{settings[changed[0]]!r}; use the same settings or another --out"
                )
        self.done = self._recover()
        meta.write_text(json.dumps(settings, indent=1) + "\n")
        self._file = open(self.path, "ab")

    def _recover(self) -> Counter:
        """Count the whole lines by key; cut off what a kill left behind them."""
        done, good = Counter(), 0
        if not self.path.exists():
            return done
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    done[_key(row["messages"][:-1], row.get("tools", []), row.get("sampling", {}))] += 1
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{self.path} line {number} is no conversation ({error}); it is not a torn "
                        "last line, so nothing was changed: repair or move the file"
                    ) from error
                good += len(line)
        if good != self.path.stat().st_size:
            os.truncate(self.path, good)
        return done

    def remaining(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs not answered yet; a question asked twice counts twice."""
        left = Counter(self.done)
        rest = []
        for job in jobs:
            if left[job.key]:
                left[job.key] -= 1
            else:
                rest.append(job)
        return rest

    def write(self, rows: list[dict]) -> None:
        """Append one batch and push it to the disk before the next one is asked."""
        text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ConversationFile:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def make_jobs(questions: Questions, target: Target | None, samplings: list[tuple[Sampling, float]]) -> list[Job]:
    """One job per question and sampling; `(sampling, share)` takes that first share of the questions."""
    rendered = questions.rendered(prompt_reader(target.tokenizer) if target is not None else lambda chat: [])
    return [
        Job(chat, tuple(ids), sampling)
        for sampling, share in samplings
        for chat, ids in rendered[: round(share * len(rendered))]
    ]


def batches(jobs: list[Job], size: int) -> list[list[Job]]:
    """Batches of one sampling each, the samplings interleaved evenly, so that a cut run still holds both."""
    groups: dict[Sampling, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.sampling, []).append(job)
    placed = []
    for group in groups.values():
        parts = [group[at : at + size] for at in range(0, len(group), size)]
        placed += [((index + 0.5) / len(parts), part) for index, part in enumerate(parts)]
    return [part for _, part in sorted(placed, key=lambda item: item[0])]


class LocalAnswers:
    """Rows written by a local target; token ids are kept."""

    def __init__(self, generator: Generator, tokenizer, dtype: str):
        self.generator, self.tokenizer, self.dtype = generator, tokenizer, dtype
        self.batch_size = generator.batch_size

    def __call__(self, batch: list[Job]) -> tuple[list[dict], int]:
        answers = self.generator([list(job.prompt_ids) for job in batch], batch[0].sampling)
        rows = [self._row(job, answer) for job, answer in zip(batch, answers, strict=True)]
        return rows, sum(len(answer.response_ids) for answer in answers)

    def _row(self, job: Job, answer: Answer) -> dict:
        body = answer.response_ids[:-1] if answer.finish_reason == "stop" else answer.response_ids
        text = self.tokenizer.decode(body, skip_special_tokens=True)
        ids = {"prompt_ids": list(job.prompt_ids), "response_ids": answer.response_ids}
        return job.row(text, answer.finish_reason) | {"dtype": self.dtype} | ids


class EndpointAnswers:
    """Rows written by a server; token ids are kept where it sends them."""

    def __init__(self, endpoint: Endpoint, batch_size: int):
        self.endpoint, self.batch_size = endpoint, batch_size

    def __call__(self, batch: list[Job]) -> tuple[list[dict], int]:
        asked = [(job.chat.messages(True), job.sampling.record(), list(job.chat.tools)) for job in batch]
        rows, tokens = [], 0
        for job, reply in zip(batch, self.endpoint.answer(asked), strict=True):
            if reply is None:  # the server refused it, or its answer is no text
                continue
            row = job.row(reply["text"], reply["finish_reason"])
            if reply["prompt_ids"] and reply["response_ids"]:
                row |= {"prompt_ids": reply["prompt_ids"], "response_ids": reply["response_ids"]}
            rows.append(row)
            tokens += reply["tokens"]
        return rows, tokens


def answer_all(
    jobs: list[Job],
    answers: LocalAnswers | EndpointAnswers,
    out: ConversationFile,
    seconds: float | None = None,
    quiet: bool = False,
) -> dict:
    """Answer `jobs` batch by batch into `out`, for at most `seconds`.

    Returns counts: conversations, unanswered (left out by a server), tokens, seconds, tokens_per_second, remaining.
    """
    start, tokens, written, unanswered = time.perf_counter(), 0, 0, 0
    before = sum(out.done.values())
    bar = tqdm(total=len(jobs), unit="answer", disable=quiet, file=sys.stderr, mininterval=1.0)
    for index, batch in enumerate(batches(jobs, answers.batch_size)):
        if seconds is not None and time.perf_counter() - start > seconds:
            break
        torch.manual_seed(batch[0].sampling.seed + before + index)  # a continued run does not draw the same again
        rows, count = answers(batch)
        out.write(rows)
        written, unanswered, tokens = written + len(rows), unanswered + len(batch) - len(rows), tokens + count
        bar.update(len(batch))
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s")
    bar.close()
    spent = time.perf_counter() - start
    return {
        "conversations": written,
        "unanswered": unanswered,
        "tokens": tokens,
        "seconds": round(spent, 2),
        "remaining": len(jobs) - written - unanswered,
        "tokens_per_second": round(tokens / max(spent, 1e-9), 1),
    }


def choose_generator(target: Target, prompts: list[list[int]], options: argparse.Namespace) -> Generator:
    """The engine asked for; `auto` times them on a GPU and takes the fastest."""
    pad = target.tokenizer.pad_token_id or next(iter(target.end_ids), 0)  # masked, so any id does

    def build(engine: str, size: int) -> Generator:
        return Generator(target.model, target.end_ids, pad, engine, size, options.max_new_tokens)

    if options.engine != "auto":
        return build(options.engine, options.batch_size)
    if target.device.type != "cuda":
        return build("plain", options.batch_size)
    # Without a flash attention package continuous batching is slow: its trial writes shorter answers.
    trials = [build("static", options.batch_size), build("continuous", options.batch_size)]
    trials[1].max_new_tokens = min(64, options.max_new_tokens)
    rates = {trial: tokens_per_second(trial, prompts, options.trial_seconds, _say) for trial in trials}
    trials[1].max_new_tokens = options.max_new_tokens
    best = max(rates, key=rates.get)
    return best if rates[best] else build("plain", options.batch_size)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _samplings(options: argparse.Namespace) -> list[tuple[Sampling, float]]:
    """How to draw, and for which first share of the questions."""
    found = [(Sampling(options.temperature, options.top_p, options.seed), 1.0)]
    if options.sampled_share:
        found.append((Sampling(options.sampled_temperature, options.top_p, options.seed), options.sampled_share))
    return found


def _refuse_numbers(options: argparse.Namespace) -> None:
    """ConfigError for a number that cannot work, before any file is read and any target loaded."""
    refuse_below(
        1,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        limit=1 if options.limit is None else options.limit,
    )
    refuse_below(0, trial_seconds=options.trial_seconds, seconds=0 if options.seconds is None else options.seconds)
    if not 0 <= options.sampled_share <= 1:
        raise ConfigError(f"sampled_share is {options.sampled_share}; wanted a share of the prompts, 0 to 1")
    _samplings(options)


def regenerate(options: argparse.Namespace) -> int:
    """Write the answers that `options` (the command's arguments) ask for; the last line on stdout is a JSON summary."""
    _refuse_numbers(options)
    known = set().union(*(prompts_in(path) for path in options.exclude)) if options.exclude else set()
    if options.prompts == "builtin":
        own = [("built in", Chat((Turn("user", text),))) for text in make_prompts(known)]
        questions = Questions(DataReport("builtin", len(own)), own)
    else:
        questions = read_prompts(options.prompts)
    left = [(place, chat) for place, chat in questions.chats if chat.last_question not in known]
    questions.chats = left[: options.limit]
    if not questions.chats:
        raise DataError(f"no prompts in {options.prompts}")
    samplings = _samplings(options)
    target, endpoint = None, None
    settings = {"target": options.target, "max_new_tokens": options.max_new_tokens}
    if options.endpoint:
        key = os.environ.get(options.api_key_env) if options.api_key_env else None
        endpoint = Endpoint(options.endpoint, options.model, options.max_new_tokens, options.batch_size, key)
        settings["target"] = f"{endpoint.model} at {endpoint.url}"
    else:
        if is_random(options.target):
            raise ConfigError(f"{NOTHING_TO_DECODE} (target '{options.target}'); name a trained target")
        target = load_target(options.target, options.device, options.dtype)
        dtype = str(target.dtype).removeprefix("torch.")
        settings |= {"dtype": dtype, "target_fingerprint": target.fingerprint()}
    with ConversationFile(options.out, settings) as out:
        jobs = out.remaining(make_jobs(questions, target, samplings))
        if questions.report.skipped:
            _say(f"left out of {options.prompts}:\n{questions.report.reasons()}")
        _say(f"{len(questions.chats)} prompts, {sum(out.done.values())} answers already there, {len(jobs)} to write")
        summary = {"conversations": 0, "tokens": 0, "remaining": 0}
        if jobs and endpoint:
            summary = answer_all(jobs, EndpointAnswers(endpoint, 4 * options.batch_size), out, options.seconds)
        elif jobs:
            generator = choose_generator(target, [list(job.prompt_ids) for job in jobs], options)
            summary = answer_all(jobs, LocalAnswers(generator, target.tokenizer, dtype), out, options.seconds)
            summary |= {"engine": generator.engine, "batch_size": generator.batch_size}
    print(json.dumps(summary | {"out": str(options.out), **settings}))
    return 0
