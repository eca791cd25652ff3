"""From a resolved run to everything that it needs: data, target, features, drafter, plan.

The text is read first: a file or conversations that cannot be used are refused before any weight is read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.data import (
    Conversation,
    DataReport,
    Pack,
    load_conversations,
    make_packs,
    random_conversations,
    random_packs,
    split_held_out,
)
from dflash.devices import on
from dflash.drafter.attention import DEFAULT_MAX_DENSE_BYTES
from dflash.drafter.export import open_drafter
from dflash.drafter.losses import describe_weights
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import with_parts
from dflash.drafter.warm_start import WarmStartError, warm_start
from dflash.errors import DataError
from dflash.target.capture import Target, load_target
from dflash.target.choices import choose_mask_token_id
from dflash.target.features import CachedFeatures, FeatureSource, make_source
from dflash.target.hosting import ServerOptions
from dflash.target.loading import load_config, load_tokenizer, resolve_source
from dflash.target.random_weights import RandomHead
from dflash.target.served import ServedTarget, open_served
from dflash.target.speed import preflight
from dflash.target.spread import shard_target
from dflash.train.memory import estimate, refuse_what_does_not_fit
from dflash.train.plan import Planner
from dflash.train.resolved import ResolvedRun
from dflash.train.topology import is_cpu
from dflash.views.style import duration

Say = Callable[[str], None]
_DRAWN_ON_CPU = 500_000_000  # weights; about five seconds
_FEATURES_SHARE = 0.7  # of the memory that a run leaves on its GPU, for kept features


@dataclass
class Data:
    """Training and held-out text of a run, before any model is loaded. `mask_token_id`: one that the text does not hold,
    where none was asked for. `tokenizer`: the target's, None for random ids."""

    conversations: list[Conversation]
    held_out: list[Conversation]
    train_packs: list[Pack]
    held_out_packs: list[Pack]
    report: DataReport
    mask_token_id: int
    tokenizer: Any = None


@dataclass
class Prepared:
    """A run on its first devices, ready to train."""

    resolved: ResolvedRun
    data: Data
    target: Target | ServedTarget
    drafter: DFlashDrafter
    planner: Planner
    source: FeatureSource


def prepare_data(resolved: ResolvedRun) -> Data:
    """Read and pack the conversations. Raises DataError or TargetError."""
    config, target = resolved.config, resolved.target
    options, seed, mask = config.data, config.train.seed, config.drafter.mask_token_id
    count = random_packs(options.data)
    if count is not None:
        never = (mask, *target.end_ids)
        conversations, report = random_conversations(count, options.pack_length, target.vocab_size, never, seed)
        return Data(conversations, [], make_packs(conversations, options.pack_length, order="in_order"), [], report, mask)
    source = resolve_source(target.name)
    tokenizer = load_tokenizer(source, load_config(source))
    read = {
        "max_length": options.pack_length,
        "block_size": config.drafter.block_size,
        "vocab_size": target.vocab_size,
        "max_skipped": options.max_skipped,
        "day": resolved.day,
    }
    conversations, report = load_conversations(options.data, tokenizer, **read)
    if target.random:
        train, held_out = conversations, []
    elif options.held_out_data is None:
        train, held_out = _part(conversations, options.held_out)
    else:
        others, left_out = load_conversations(options.held_out_data, tokenizer, **read)
        if left_out.skipped:
            report.warnings.append(f"rows left out of {options.held_out_data}:\n{left_out.reasons()}")
        held_out = _part(others, options.held_out)[1]
        prompts = {c.prompt_key for c in held_out}
        train = [c for c in conversations if c.prompt_key not in prompts]
    train = train[: options.max_conversations]
    if not train:
        raise DataError(
            f"{options.data} leaves no conversation for training after {len(held_out)} were held out; give "
            "more conversations or a smaller held_out"
        )
    apart = held_out if options.held_out_data else []
    held = Counter(token for c in [*conversations, *apart] for token in c.input_ids)
    if mask is None:
        mask = choose_mask_token_id(tokenizer, target.vocab_size, target.end_ids, held)
    if held[mask]:
        report.warnings.append(
            f"mask_token_id {mask} is a token of the data: {held[mask]:,} of {held.total():,} tokens. A "
            "slot that holds it cannot be told from a masked one; leave mask_token_id empty to have an unused one chosen"
        )
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    packs = make_packs(train, options.pack_length, seed=seed, pad_token_id=pad)
    held_out_packs = make_packs(held_out, options.pack_length, pad_token_id=pad) if held_out else []
    return Data(train, held_out, packs, held_out_packs, report, mask, tokenizer)


def with_vocabulary(resolved: ResolvedRun, data: Data) -> ResolvedRun:
    """The run with the memory of the draft vocabulary that its text gives (`draft_vocab=0`); until the text is read, that of
    the whole vocabulary stands there. Raises MemoryEstimateError."""
    options = resolved.config.drafter
    if options.draft_vocab != 0 or options.start_from is not None or not resolved.memory:
        return resolved
    ids = frequent_tokens(data.conversations, 0, resolved.target.end_ids)
    shape = replace(resolved.drafter, draft_vocab_size=ids.numel())
    have = {device: memory.have for device, memory in resolved.memory.items()}
    target = load_config(resolve_source(resolved.target.name))
    memory = estimate(resolved.config, shape, target, resolved.topology, have)
    refuse_what_does_not_fit(memory, resolved.config)
    return replace(resolved, memory=memory)


def _part(conversations: list[Conversation], held_out: int) -> tuple[list[Conversation], list[Conversation]]:
    """Training part and about `held_out` conversations whose prompts are in no training row."""
    if held_out == 0:
        return conversations, []
    if held_out >= len(conversations):
        raise DataError(
            f"held_out is {held_out}, but there are only {len(conversations)} usable conversations; hold out fewer, or 0"
        )
    share = min(0.9, max(1.2 * held_out / len(conversations), 0.001))
    train, kept = split_held_out(conversations, share)
    return train, kept[:held_out]


def prepare(
    resolved: ResolvedRun, say: Say = lambda line: None, data: Data | None = None, logs: Path | None = None
) -> Prepared:
    """Load the first target, make the first drafter and get the features ready.

    Args:
        say: gets one line of progress at a time.
        data: what `prepare_data` gave, if it was already called.
        logs: folder for the log of a server that runs the target.
    """
    data = data or prepare_data(resolved)
    devices, device = resolved.topology.targets[0], resolved.topology.drafters[0]
    with on(devices[0]), ExitStack() as failing:
        if resolved.target.served:
            target = open_run_server(resolved, say, logs)
            failing.callback(target.close)
        else:
            target = load_run_target(resolved, devices[0] if len(devices) == 1 else torch.device("cpu"), say)
        if target.is_hybrid:
            say(preflight(target).message or "hybrid target with fast linear-attention kernels")
        drafter = make_drafter(resolved, target, data, device, say)
        say(describe_weights(drafter.block_size, resolved.config.train.position_weights, resolved.config.train.gamma))
        source = make_run_source(resolved, target, data, device)
        if isinstance(source, CachedFeatures):
            say(f"features are captured once and kept {source.where}")
        failing.pop_all()
    if len(devices) > 1:
        say(shard_target(target, devices).describe())
    return Prepared(resolved, data, target, drafter, make_planner(resolved, data, drafter), source)


def open_run_server(
    resolved: ResolvedRun, say: Say = lambda line: None, logs: Path | None = None, url: str | None = None
) -> ServedTarget:
    """The run's target in its server, which is started where it has to be. `url`: of one that another rank has started."""
    options = resolved.config.target
    gpus = resolved.config.runtime.target_gpus
    server = ServerOptions(
        options.server_python,
        options.server_args,
        resolved.config.data.pack_length,
        tuple(map(int, gpus.split(","))) if isinstance(gpus, str) and gpus and not is_cpu(gpus) else None,
        resolved.config.runtime.gpus_per_target,
        None if logs is None else logs / "server.log",
    )
    source = resolve_source(resolved.target.name)
    target = open_served(source, resolved.layer_ids, resolved.target_dtype, server, url, say)
    say(target.describe())
    return target


def load_run_target(resolved: ResolvedRun, device: torch.device, say: Say = lambda line: None, **options) -> Target:
    """The run's target on one device; `options` are `load_target`'s. Where a run's numbers measure speed and memory alone,
    its record says that."""
    target = load_target(
        resolved.target.name,
        device=device,
        layer_ids=resolved.layer_ids,
        dtype=resolved.target_dtype,
        attention=resolved.config.target.target_attention,
        fast=resolved.config.target.fast_capture,
        **options,
    )
    say(target.describe())
    if resolved.target.random:
        say(f"{resolved.target.name} has random weights: losses and acceptance say nothing of quality")
    return target


def make_run_source(resolved: ResolvedRun, target: Target, data: Data, device: torch.device | None = None) -> FeatureSource:
    """Where the run's features come from; each target keeps its share of the cache."""
    train = resolved.config.train
    return make_source(
        target,
        data.held_out_packs + data.train_packs,
        mode=train.features,
        max_bytes=int(train.cache_gib * 2**30),
        room=_room(resolved, data, device),
        directory=train.cache_dir,
        keep_last_hidden=train.soft_labels,
        dtype=torch.bfloat16,
        device=device,
    )


def _room(resolved: ResolvedRun, data: Data, device: torch.device | None) -> int:
    """Bytes for kept features on a GPU that runs target and drafter: most of what the run leaves there, in a run that comes
    back to its packs. A random target's features are not kept: such a run measures how fast they are made."""
    train, memory = resolved.config.train, resolved.memory.get(device)
    again = train.steps * train.packs_per_step >= 2 * len(data.train_packs)
    if memory is None or device.type != "cuda" or not resolved.topology.serial or resolved.target.random or not again:
        return 0
    return int(_FEATURES_SHARE * memory.left)


def capture_features(source: FeatureSource, data: Data, say: Say) -> None:
    """Fill an offline feature cache; reports progress and time left every five seconds. Online sources need nothing."""
    if not isinstance(source, CachedFeatures):
        return
    packs = data.held_out_packs + data.train_packs
    began = said = time.perf_counter()

    def progress(done: int, total: int, rate: float) -> None:
        nonlocal said
        now = time.perf_counter()
        if done == total or now - said >= 5:
            said = now
            left = f", about {duration((now - began) / done * (total - done))} left" if done < total else ""
            say(f"captured {done} of {total} packs at {rate:,.0f} tokens/s{left}")

    source.prepare(packs, progress)


def make_drafter(
    resolved: ResolvedRun, target: Target | RandomHead, data: Data, device: torch.device, say: Say = lambda line: None
) -> DFlashDrafter:
    """A drafter for this target, with the start that the settings ask for. Seeded, and the same on every device; one too
    large to be drawn on the CPU in seconds is drawn where it will be, the same on all GPUs of one kind."""
    options, seed = resolved.config.drafter, resolved.config.train.seed
    running = {
        "attention_backend": options.attention,
        "max_dense_bytes": int(options.max_dense_gib * 2**30) if options.max_dense_gib else DEFAULT_MAX_DENSE_BYTES,
        "head_precision": options.head_precision,
        "fast_path": resolved.fused,
    }
    if options.start_from is not None:
        drafter = open_drafter(options.start_from, target, resolved.dtype, device=device, **running)
        drafter.max_anchors = options.max_anchors
        return with_parts(drafter, resolved.drafter)
    ids = frequent_tokens(data.conversations, options.draft_vocab, resolved.target.end_ids)
    shape = replace(resolved.drafter, draft_vocab_size=None if ids is None else ids.numel())
    devices = [device] if device.type == "cuda" else []

    def draw(where: torch.device | str) -> DFlashDrafter:
        with torch.random.fork_rng(devices), torch.device(where):
            torch.manual_seed(seed)
            return DFlashDrafter(
                shape, resolved.layer_ids, options.block_size, options.max_anchors, data.mask_token_id, **running
            )

    drafter = None
    if options.warm_start:
        try:
            drafter = draw("cpu")
            say(warm_start(drafter, target.decoder))
        except WarmStartError as reason:
            if options.warm_start is True:
                raise
            drafter = None
            say(f"no warm start, the drafter starts from random weights: {reason}")
    large = shape.parameter_count(len(resolved.layer_ids)) > _DRAWN_ON_CPU
    drafter = drafter or draw(device if large else "cpu")
    drafter.to(device, resolved.dtype)
    drafter.load_target_head(target.embed_weight, target.head_weight, ids)
    return drafter


def frequent_tokens(conversations: list[Conversation], size: int | None, always: Sequence[int]) -> Tensor | None:
    """Target ids that the drafter may propose, sorted: the `size` most frequent supervised tokens (0: all that occur),
    end tokens always among them. None: the whole vocabulary."""
    if size is None:
        return None
    counts: Counter[int] = Counter()
    for c in conversations:
        counts.update(token for token, kept in zip(c.input_ids, c.loss_mask, strict=True) if kept)
    ranked = [token for token, _ in counts.most_common() if token not in always]
    chosen = set(always) | set(ranked if size == 0 else ranked[: max(0, size - len(always))])
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def make_planner(resolved: ResolvedRun, data: Data, drafter: DFlashDrafter | None = None) -> Planner:
    """The plan of the run's steps, a pure function of its settings and data. Without a drafter, and so without its
    vocabulary, only the order of packs is the run's: all that a process without one asks for."""
    full = drafter is None or drafter.config.draft_vocab_size is None
    options, index = resolved.config.drafter, None if full else drafter.draft_index
    return Planner(data.train_packs, resolved.config.train, options.block_size, options.max_anchors, index)
