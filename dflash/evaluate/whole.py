"""dflash evaluate: what a trained drafter is worth.

Acceptance length (bonus token included) on prompts with a confidence interval, per-slot acceptance, wall-clock
speed beside plain decoding, exactness of the text, acceptance on the held-out answers, and the comparison of
training with decoding at the same anchors. Everything goes to `evaluation.json`, which `06_evaluate` shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash.data import Conversation, Pack, load_conversations, make_packs, prompt_reader
from dflash.data.generate.prompts import Questions, read_prompts
from dflash.devices import device_named, dtype_named
from dflash.drafter.export import drafter_layout, open_drafter
from dflash.errors import ConfigError, RunError, refuse_below, refuse_seed
from dflash.evaluate.acceptance import evaluate_acceptance, summarize, walk_packs
from dflash.evaluate.decoding import Decoding
from dflash.evaluate.parity import parity_check
from dflash.evaluate.texts import Prompt, compare_modes, evaluate_prompts, summarize_prompts, thinking_mode
from dflash.runs.record import plain, run_folder
from dflash.target.capture import Target, load_target
from dflash.target.features import OnlineFeatures
from dflash.target.random_weights import NOTHING_TO_DECODE, is_random
from dflash.train.checkpoint import checkpoints, latest_checkpoint
from dflash.train.prepare import prepare_data
from dflash.train.resolve import recall
from dflash.train.settings import RunConfig
from dflash.views.progress import Work, tell

_PACK_STEP = 128
_MAX_LENGTH = 4096  # tokens of a conversation that is read outside a run

__all__ = ["EvaluateOptions", "evaluate", "evaluate_acceptance", "summarize", "walk_packs"]


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate and how.

    Either `run`, a run folder or id (its newest checkpoint, target and held-out conversations), or `drafter`, a drafter
    folder in any known layout, with `target`.
    """

    run: str | None = None
    drafter: str | None = None
    target: str | None = None
    prompts: str | None = None  # file of prompts; None: the held-out conversations
    data: str | None = None  # conversations for the held-out part; None: the run's
    limit: int | None = (
        None  # prompts decoded, held-out conversations replayed; None, here and below: what the device does in seconds
    )
    max_new_tokens: int | None = None
    temperature: float = 0.0
    thinking: str = "auto"  # "on", "off": `enable_thinking` of the chat template
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    compare: bool = True  # decode plainly too, for exactness and speed
    max_draft: int | None = None  # verify only this many drafts of each block; None: all
    parity_responses: int | None = None  # held-out responses in the training-decoding comparison; 0: leave it out
    replay: bool = True  # replay decoding over the held-out text too (what `eval` records of a run hold)

    def __post_init__(self) -> None:
        if (self.run is None) == (self.drafter is None):
            raise ConfigError("give either a run folder (--run) or a drafter folder (--drafter), not both or none")
        sizes = {name: value for name in ("limit", "max_new_tokens") if (value := getattr(self, name)) is not None}
        refuse_below(1, **sizes)
        refuse_below(0, temperature=self.temperature, parity_responses=self.parity_responses or 0)
        refuse_seed(self.seed)
        if self.thinking not in ("auto", "on", "off"):
            raise ConfigError(f"thinking must be auto, on or off, got {self.thinking!r}")

    def sized(self, device: torch.device) -> EvaluateOptions:
        """With the sizes that nobody gave: seconds on a GPU, a minute or two on two cores."""
        limit, tokens, responses = (64, 160, 8) if device.type == "cuda" else (8, 64, 2)
        limit = self.limit or limit
        given = self.parity_responses
        responses = min(responses, limit) if given is None else given
        return replace(self, limit=limit, max_new_tokens=self.max_new_tokens or tokens, parity_responses=responses)


def drafter_folder(options: EvaluateOptions) -> Path:
    """Where the drafter lies: the folder named, or the newest complete checkpoint of the run."""
    return latest_checkpoint(run_folder(options.run)) if options.drafter is None else Path(options.drafter)


def newest_run(root: str | Path = "runs") -> Path:
    """The run under `root` whose complete checkpoint is the newest. Raises RunError when there is none."""
    found = [
        (path.stat().st_mtime, run.parent)
        for run in Path(root).glob("*/config.yaml")
        for _, path in checkpoints(run.parent)[-1:]
    ]
    if not found:
        raise RunError(f"no run with a finished checkpoint under {Path(root).resolve()}; train one with 05_train first")
    return max(found)[1]


def evaluate(options: EvaluateOptions, say: Callable[[str], None] = tell) -> dict[str, Any]:
    """Run the whole evaluation; see the module's words. Returns what `evaluation.json` holds."""
    config = RunConfig.load(run_folder(options.run) / "config.yaml") if options.run else None
    folder = drafter_folder(options)
    settings = drafter_layout(folder)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device, dtype = device_named(device), dtype_named(options.dtype)
    name = options.target or (config.target.target if config else None) or settings["target"]
    if name is None:
        raise ConfigError(f"{folder} does not say which target it belongs to; name it with --target")
    if is_random(name):
        raise ConfigError(f"{NOTHING_TO_DECODE} (target '{name}'); evaluate a drafter of a trained target")
    options = options.sized(device)
    questions = read_prompts(options.prompts) if options.prompts else None  # before any model is loaded
    say(f"loading target {name} and drafter {folder}, {options.dtype} on {device}")
    target = load_target(name, device, dtype, list(settings["target_layer_ids"]))
    drafter = open_drafter(folder, target, dtype)
    held_out, skipped = _held_out(options, config, target)
    prompts, left_out = _prompts(options, target, held_out, questions)
    left_out = skipped + left_out
    prompts = prompts[: options.limit]
    say(f"first of {len(prompts)} prompts, as the target sees it:\n{prompts[0].text}\n")
    work = partial(Work, say=say)
    how = Decoding(options.max_new_tokens, options.temperature, options.seed, options.max_draft)
    results = evaluate_prompts(target, drafter, prompts, how, options.compare, work=work)
    summary = summarize_prompts(results, drafter.block_size)
    answers = ["".join(chunk["text"] for chunk in result.chunks[:8]) for result in results]
    modes = [thinking_mode(prompt.text, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    trained = Counter(_mode_of(target, conversation) for conversation in held_out)
    warning = compare_modes(modes, trained)
    summary |= {
        "target": str(name),
        "drafter": str(folder),
        "device": str(device),
        "dtype": options.dtype,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "max_draft": options.max_draft,
        "block_size": drafter.block_size,
        "target_layer_ids": list(drafter.target_layer_ids),
        "rendered_prompt": prompts[0].text,
        "thinking_mode": Counter(modes).most_common(1)[0][0],
        "training_modes": dict(trained),
        "warnings": left_out + ([warning] if warning else []),
        "held_out": None,
        "parity": None,
    }
    packs, source = held_out_packs(held_out[: options.limit]), OnlineFeatures(target)
    if packs and options.replay:
        with work("replaying decoding over held-out answers", len(packs), "conversations") as line:
            summary["held_out"] = evaluate_acceptance(drafter, source, line.over(packs))
    if packs and options.parity_responses:
        count = min(options.parity_responses, len(packs))
        with work("comparing training with decoding", count, "held-out answers") as line:
            parity = parity_check(
                target, drafter, source, line.over(packs[:count]), count, max_tokens=options.max_new_tokens
            )
        summary["parity"] = parity.as_dict() | {"message": parity.message()}
        if not parity.agrees:
            summary["warnings"].append(parity.message())
    return summary


def held_out_packs(conversations: Sequence[Conversation]) -> list[Pack]:
    """One pack for each conversation, all of one length: the figures do not depend on packing, and a compiled kernel
    sees one shape."""
    length = -(-max(map(len, conversations), default=1) // _PACK_STEP) * _PACK_STEP
    return [make_packs([item], length)[0] for item in conversations]


def _held_out(options: EvaluateOptions, config: RunConfig | None, target: Target) -> tuple[list[Conversation], list[str]]:
    """The run's held-out conversations, chosen as training chose them; or those of `data`, and what was left out of it."""
    if config is None or options.data:
        if options.data is None:
            return [], []
        conversations, report = load_conversations(options.data, target.tokenizer, _MAX_LENGTH)
        told = [f"rows left out of {options.data}:\n{report.reasons()}"] if report.skipped else []
        return conversations[: options.limit], told
    if options.prompts and not Path(config.data.data).exists():
        return [], []
    return prepare_data(recall(run_folder(options.run))).held_out, []


def _prompts(
    options: EvaluateOptions, target: Target, held_out: Sequence[Conversation], questions: Questions | None
) -> tuple[list[Prompt], list[str]]:
    """What is decoded, and a warning where a prompt had to be left out."""
    told = []
    if questions is not None:
        kwargs = {} if options.thinking == "auto" else {"enable_thinking": options.thinking == "on"}
        ids = [found for _, found in questions.rendered(prompt_reader(target.tokenizer, kwargs))]
        if questions.report.skipped:
            told = [f"prompts left out of {options.prompts}:\n{questions.report.reasons()}"]
    else:
        ids = [list(item.input_ids[: item.loss_mask.index(True)]) for item in held_out]
    ids = [item for item in ids if item]
    if not ids:
        raise ConfigError("there are no prompts; give --prompts FILE (one prompt a line, or JSONL), or --data FILE")
    return [Prompt(tuple(item), _decode(target, item)) for item in ids], told


def _decode(target: Target, ids: Sequence[int]) -> str:
    if target.tokenizer is None:
        return " ".join(map(str, ids))
    return target.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def _mode_of(target: Target, conversation: Conversation) -> str:
    start = conversation.loss_mask.index(True)
    return thinking_mode(
        _decode(target, conversation.input_ids[:start]), _decode(target, conversation.input_ids[start : start + 8])
    )


def table(summary: dict[str, Any]) -> str:
    """The figures as text, the same that `evaluation.json` holds."""
    interval = summary["acceptance_interval"]
    spread = f" [{interval[0]:.3f}, {interval[1]:.3f}] (95%, over prompts)" if interval else ""
    length = "-" if summary["acceptance_length"] is None else f"{summary['acceptance_length']:.3f}"
    lines = [
        f"acceptance length   {length}{spread}, tokens per target call, bonus token included",
        "accepted up to slot "
        + "  ".join(f"{i}: {100 * share:.1f}%" for i, share in enumerate(summary["acceptance_by_slot"], 1)),
        "tokens gained       " + "  ".join(f"{i}: {count}" for i, count in enumerate(summary["histogram"], 1)),
    ]
    if summary["speedup"] is not None:
        low, high = summary["speedup_spread"]
        of = f"median of {summary['speedup_prompts']} prompts by themselves; {low:.2f} to {high:.2f}"
        lines.append(f"wall clock          {summary['speedup']:.2f} times plain decoding ({of})")
    if summary["exact"] is not None:
        lines.append(f"text                {summary['exact']} of {summary['compared']} equal to plain greedy")
    for number, result in enumerate(summary["prompts"], 1):
        tie = result["difference"]
        if tie:
            lines.append(
                f"  prompt {number}: differs at token {tie['index']}, margin {tie['margin']:.3g} against rounding of "
                f"{tie['noise']:.3g}: " + ("NOT a near tie, decoding is wrong" if tie["wide"] else "a near tie")
            )
    if summary["held_out"]:
        held = summary["held_out"]
        gained = held["acceptance_length"] or float("nan")
        lines.append(f"held-out answers    acceptance length {gained:.3f} over {held['blocks']} blocks")
        if held.get("oracle_length"):
            argmax, oracle = held["argmax_length"], held["oracle_length"]
            lines.append(f"{'':20}{argmax:.3f} by the head's best tokens, {oracle:.3f} if the selector were always right")
    if summary["parity"]:
        lines.append(f"parity              {summary['parity']['message']}")
    return "\n".join(lines + [f"WARNING: {warning}" for warning in summary["warnings"]])


def write_evaluation(summary: dict[str, Any], path: str | Path) -> Path:
    """Write `evaluation.json` as strict JSON."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(summary), indent=1, allow_nan=False) + "\n")
    return path
