"""From settings to everything a run needs: data, target, features, drafter, plan.

Cheap checks come first: settings, files, conversations and the mask token are refused before any weight is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from dflash.devices import compute_dtype
from dflash.drafter.attention import DEFAULT_MAX_DENSE_BYTES
from dflash.drafter.config import create_drafter_config
from dflash.drafter.export import drafter_layout, open_drafter
from dflash.drafter.losses import describe_decay
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.warm_start import WarmStartError, warm_start
from dflash.errors import ConfigError, DataError
from dflash.target.capture import (
    Target,
    choose_mask_token_id,
    default_layer_ids,
    load_target,
    validate_layer_ids,
    validate_mask_token_id,
)
from dflash.target.features import CachedFeatures, FeatureSource, make_source
from dflash.target.loading import declared_end_ids, load_config, load_tokenizer, resolve_source
from dflash.target.random_weights import RandomHead, is_random
from dflash.target.speed import preflight
from dflash.train.plan import Planner
from dflash.train.settings import RunConfig, TargetOptions

Say = Callable[[str], None]
_DRAWN_ON_CPU = 500_000_000  # weights; about five seconds


@dataclass
class Data:
    """Training and held-out text of a run, before any model is loaded."""

    conversations: list[Conversation]
    held_out: list[Conversation]
    train_packs: list[Pack]
    held_out_packs: list[Pack]
    report: DataReport
    layer_ids: list[int]
    mask_token_id: int


@dataclass
class Job:
    """A run, ready to train."""

    config: RunConfig
    data: Data
    target: Target
    drafter: DFlashDrafter
    planner: Planner
    source: FeatureSource


def prepare_data(config: RunConfig) -> Data:
    """Read and pack the conversations, and settle the captured layers and the mask token.

    Raises: DataError, ConfigError or TargetError, before any weight is read.
    """
    options = config.data
    source = resolve_source(config.target.target)
    model_config = load_config(source)
    refuse_for_random(config)
    tokenizer = load_tokenizer(source, model_config)
    layers = model_config.num_hidden_layers
    config = like_its_start(config)
    wanted = config.target.target_layers
    layer_ids = (
        default_layer_ids(layers, captured_count(config.target.num_captured, layers))
        if wanted is None
        else validate_layer_ids(wanted, layers)
    )
    end_ids = declared_end_ids(source, model_config, tokenizer)
    if config.train.soft_labels and getattr(model_config, "final_logit_softcapping", None) is not None:
        raise ConfigError(
            f"soft_labels compares with the plain logits of a head, and '{config.target.target}' caps its logits; use "
            "soft_labels=False"
        )
    if config.drafter.warm_start is True and config.drafter.drafter_layers > layers:
        raise ConfigError(
            f"warm_start copies the target's last layers, and the target has {layers}, fewer than "
            f"drafter_layers = {config.drafter.drafter_layers}; make the drafter smaller or switch "
            "warm_start off"
        )
    asked, size = config.drafter.mask_token_id, model_config.vocab_size
    if asked is not None:
        validate_mask_token_id(asked, tokenizer, size, end_ids)

    count = random_packs(options.data)
    if count is not None:
        mask_token_id = choose_mask_token_id(tokenizer, size, end_ids) if asked is None else asked
        conversations, report = random_conversations(
            count, options.pack_length, model_config.vocab_size, (mask_token_id, *end_ids), config.train.seed
        )
        packs = make_packs(conversations, options.pack_length, order="in_order")
        return Data(conversations, [], packs, [], report, layer_ids, mask_token_id)
    read = {
        "max_length": options.pack_length,
        "block_size": config.drafter.block_size,
        "vocab_size": model_config.vocab_size,
        "max_skipped": options.max_skipped,
    }
    conversations, report = load_conversations(options.data, tokenizer, **read)
    if is_random(config.target.target):
        train, held_out = conversations, []
    elif options.held_out_data is None:
        train, held_out = _part(conversations, options.held_out)
    else:
        others, _ = load_conversations(options.held_out_data, tokenizer, **read)
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
    mask_token_id = choose_mask_token_id(tokenizer, size, end_ids, held) if asked is None else asked
    if held[mask_token_id]:
        report.warnings.append(
            f"mask_token_id {mask_token_id} is a token of the data: {held[mask_token_id]:,} of {held.total():,} tokens. A "
            "slot that holds it cannot be told from a masked one; leave mask_token_id empty to have an unused one chosen"
        )
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    return Data(
        train,
        held_out,
        make_packs(train, options.pack_length, seed=config.train.seed, pad_token_id=pad),
        make_packs(held_out, options.pack_length, pad_token_id=pad) if held_out else [],
        report,
        layer_ids,
        mask_token_id,
    )


def captured_count(asked: int, layers: int) -> int:
    """How many layers of a target are captured: `asked`. The default is made to fit a smaller target, another number that
    does not fit is a ConfigError."""
    if asked > layers and asked != TargetOptions.num_captured:
        raise ConfigError(
            f"num_captured is {asked}, and the target has {layers} layers; capture at most {layers}, or name "
            "them with target_layers"
        )
    return min(asked, layers)


def refuse_for_random(config: RunConfig) -> None:
    """Raises ConfigError where a random target is asked for what it cannot give."""
    if not is_random(config.target.target):
        return
    name = config.target.target
    if config.drafter.warm_start is True and config.drafter.start_from is None:
        raise ConfigError(f"warm_start copies layers of the target, and those of '{name}' are noise; pass warm_start=False")
    if config.runtime.gpus_per_target > 1:
        raise ConfigError(
            f"'{name}' is made on one device and cannot be spread over gpus_per_target="
            f"{config.runtime.gpus_per_target}; use 1, or fewer layers ({name.split('@')[0]}@8)"
        )


def like_its_start(config: RunConfig) -> RunConfig:
    """`config` with the captured layers and the mask token of the drafter that training starts from.

    Raises: ConfigError when a setting says otherwise than that drafter.
    """
    folder = config.drafter.start_from
    if folder is None:
        return config
    layout = drafter_layout(folder)
    for name, asked, found in (
        ("block_size", config.drafter.block_size, layout["block_size"]),
        ("target_layers", config.target.target_layers, tuple(layout["target_layer_ids"])),
        ("mask_token_id", config.drafter.mask_token_id, layout["mask_token_id"]),
    ):
        if asked is not None and asked != found:
            raise ConfigError(
                f"{name} is {asked}, the drafter in {folder} was made with {found}; pass {name}={found}, or "
                "leave start_from empty"
            )
    return replace(
        config,
        target=replace(config.target, target_layers=tuple(layout["target_layer_ids"])),
        drafter=replace(config.drafter, mask_token_id=layout["mask_token_id"]),
    )


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
    config: RunConfig,
    *,
    drafter_device: torch.device | str = "cpu",
    target_device: torch.device | str | None = None,
    say: Say = lambda line: None,
    data: Data | None = None,
) -> Job:
    """Load the target, make the drafter and get the features ready.

    Args:
        drafter_device, target_device: where they live; the target's default is the drafter's.
        say: gets one line of progress at a time.
        data: what `prepare_data` gave, if it was already called.
    """
    data = data or prepare_data(config)
    say(f"{len(data.conversations)} conversations in {len(data.train_packs)} packs, {len(data.held_out)} held out")
    for warning in data.report.warnings:
        say(f"warning: {warning}")
    if data.report.skipped:
        say(f"rows left out of {config.data.data}:\n{data.report.reasons()}")
    target_device = drafter_device if target_device is None else target_device
    target = load_target(
        config.target.target,
        device=target_device,
        layer_ids=data.layer_ids,
        dtype=compute_dtype(config.target.target_dtype, target_device),
        attention=config.target.target_attention,
        fast=config.target.fast_capture,
    )
    say(target.describe())
    say_random(config, say)
    if target.is_hybrid:
        say(preflight(target).message or "hybrid target with fast linear-attention kernels")
    drafter = make_drafter(config, target, data, drafter_device, say)
    planner = make_planner(config, data, drafter)
    say(describe_decay(config.drafter.block_size, config.train.gamma))
    train = config.train
    source = make_source(
        target,
        data.train_packs,
        mode=train.features,
        max_bytes=int(train.cache_gib * 2**30),
        directory=train.cache_dir,
        keep_last_hidden=train.soft_labels,
        dtype=torch.bfloat16,
        device=drafter_device,
    )
    return Job(config, data, target, drafter, planner, source)


def say_random(config: RunConfig, say: Say) -> None:
    """Where a run's numbers measure speed and memory alone, say so in its record."""
    if is_random(config.target.target):
        say(f"{config.target.target} has random weights: losses and acceptance say nothing of quality")


def capture_features(job: Job, say: Say) -> None:
    """Fill an offline feature cache, saying how far it is about every five seconds. Online sources need nothing."""
    if not isinstance(job.source, CachedFeatures):
        return
    packs = job.data.held_out_packs + job.data.train_packs
    every = max(1, len(packs) // 10)

    def progress(done: int, total: int, rate: float) -> None:
        if done % every == 0 or done == total:
            say(f"captured {done} of {total} packs at {rate:,.0f} tokens/s")

    job.source.prepare(packs, progress)


def make_drafter(
    config: RunConfig, target: Target | RandomHead, data: Data, device: torch.device | str, say: Say = lambda line: None
) -> DFlashDrafter:
    """A drafter for this target, with the start that the settings ask for. Seeded, and the same on every device; one too
    large to be drawn on the CPU in seconds is drawn where it will be, the same on all GPUs of one kind."""
    options = config.drafter
    dtype = compute_dtype(config.train.dtype, device)
    running = {
        "attention_backend": None if options.attention == "auto" else options.attention,
        "max_dense_bytes": int(options.max_dense_gib * 2**30) if options.max_dense_gib else DEFAULT_MAX_DENSE_BYTES,
        "head_precision": options.head_precision,
    }
    if options.start_from is not None:
        drafter = open_drafter(options.start_from, target, dtype, device=device, **running)
        drafter.max_anchors = options.max_anchors
        return drafter
    ids = draft_vocabulary(data.conversations, options.draft_vocab, target.end_ids)
    shape = create_drafter_config(
        target.config, options.drafter_layers, draft_vocab_size=None if ids is None else ids.numel()
    )
    warm = options.warm_start and not is_random(config.target.target)  # a random target's layers are noise
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []

    def draw(where: torch.device | str) -> DFlashDrafter:
        with torch.random.fork_rng(devices), torch.device(where):
            torch.manual_seed(config.train.seed)
            return DFlashDrafter(
                shape, data.layer_ids, options.block_size, options.max_anchors, data.mask_token_id, **running
            )

    large = shape.parameter_count(len(data.layer_ids)) > _DRAWN_ON_CPU
    drafter = None
    if warm:
        try:
            drafter = draw("cpu")
            say(warm_start(drafter, target.decoder))
        except WarmStartError as reason:
            if options.warm_start is True:
                raise
            drafter = None
            say(f"no warm start, the drafter starts from random weights: {reason}")
    drafter = drafter or draw(device if large else "cpu")
    drafter.to(device, dtype)
    drafter.load_target_head(target.embed_weight, target.head_weight, ids)
    return drafter


def draft_vocabulary(conversations: list[Conversation], size: int | None, always: list[int]) -> Tensor | None:
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


def make_planner(config: RunConfig, data: Data, drafter: DFlashDrafter) -> Planner:
    """The plan of the run's steps, a pure function of its settings and data."""
    train = config.train
    full = drafter.config.draft_vocab_size is None
    return Planner(
        data.train_packs,
        seed=train.seed,
        packs_per_step=train.packs_per_step,
        block_size=drafter.block_size,
        max_anchors=drafter.max_anchors,
        gamma=train.gamma,
        reduction=train.reduction,
        draft_index=None if full else drafter.draft_index,
        soft_labels=train.soft_labels,
    )
