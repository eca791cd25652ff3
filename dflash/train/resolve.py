"""What a config comes to on this machine: settled once, before anything is loaded, and kept in `runs/<id>/resolved.yaml`.

    resolve(config)                 # an error for what cannot work here, with the setting to change
    settle_run(run_path, config)    # the same for a run folder: read where it is there, else resolved and written
    recall(run_path)                # what a run came to, for a look at it; nothing is refused or written

Nothing after it decides a device, a dtype, a shape or a number of packs again. What only the text can say (the packs, the
mask token where none was asked for, the tokens of a draft vocabulary) is `prepare.Data`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dflash.data import random_packs
from dflash.devices import compute_dtype
from dflash.drafter import fast_path, fp8_head
from dflash.drafter.attention import automatic_backend, refuse_backend
from dflash.drafter.config import DrafterConfig, create_drafter_config
from dflash.drafter.export import drafter_layout
from dflash.errors import ConfigError
from dflash.runs.record import CONFIG_NAME, read_metrics
from dflash.runs.sinks import refuse_missing
from dflash.target.choices import choose_mask_token_id, default_layer_ids, validate_layer_ids, validate_mask_token_id
from dflash.target.hosting import check_python
from dflash.target.loading import declared_end_ids, load_config, load_tokenizer, resolve_source
from dflash.target.random_weights import is_random
from dflash.train.checkpoint import checkpoint_facts, checkpoints
from dflash.train.memory import estimate, refuse_what_does_not_fit
from dflash.train.recipes import recipe_value
from dflash.train.resolved import ResolvedRun, TargetFacts, read_resolved
from dflash.train.settings import RunConfig
from dflash.train.topology import CPU, Topology, available_gpus, decide, on_one

_GRAPHED = 300_000_000  # weights of a drafter whose steps the host may hold up


@dataclass(frozen=True)
class Before:
    """What a run that goes on was trained with; None is not on record."""

    target_dtype: str | None = None
    dtype: str | None = None
    packs_per_step: int = 0
    packs_asked: int = 0
    attention: str | None = None
    day: str | None = None


def resolve(
    config: RunConfig, before: Before | None = None, *, nodes: int = 1, ask_gpus: bool = True, gpus: int | None = None
) -> ResolvedRun:
    """Settle a config.

    Args:
        before: of a run that goes on; what "auto" came to then is kept, and a change is noted.
        ask_gpus: False does not ask GPUs for their memory, which would cost this process a context on each.
        gpus: CUDA devices there are; None counts them.

    Raises: ConfigError, TargetError or MemoryEstimateError.
    """
    _refuse_for_random(config)
    refuse_missing(config.runtime.log_to)
    count = available_gpus() if gpus is None else gpus
    resolved, shape = _settle(config, decide(config.runtime, count), before or Before(), nodes, count)
    _refuse_kernels(resolved)
    if resolve_source(config.target.target).server == "":
        check_python(config.target.server_python)
    _make_cache_folder(resolved.config.train.cache_dir)
    unknown = {} if ask_gpus else {device: None for device in resolved.topology.devices if device.type == "cuda"}
    memory = estimate(resolved.config, resolved.drafter, shape, resolved.topology, unknown)
    least = memory
    if resolved.config.drafter.draft_vocab == 0 and resolved.config.drafter.start_from is None:  # see `with_vocabulary`
        smallest = replace(resolved.drafter, draft_vocab_size=1)
        least = estimate(resolved.config, smallest, shape, resolved.topology, unknown)
    refuse_what_does_not_fit(least, resolved.config)
    return replace(resolved, memory=memory)


def settle_run(run_path: str | os.PathLike[str], config: RunConfig, *, nodes: int = 1, ask_gpus: bool = True) -> ResolvedRun:
    """A run's `resolved.yaml`, where it is of these settings and of a machine like this one; else resolved anew, going on
    from what the run was, and written."""
    found = read_resolved(run_path)
    if found and (found.asked, found.gpus, found.nodes) == (_digest(config), available_gpus(), nodes):
        return found
    before = _trained_in(run_path)
    if found is not None:
        was = found.config
        before = replace(
            before, packs_per_step=was.train.packs_per_step, packs_asked=found.packs_asked, attention=was.drafter.attention
        )
        before = replace(before, day=found.day)
    resolved = resolve(config, before, nodes=nodes, ask_gpus=ask_gpus)
    resolved.save(run_path)
    return resolved


def recall(run_path: str | os.PathLike[str]) -> ResolvedRun:
    """What a run came to. For a folder from before `resolved.yaml`: dtypes by its newest checkpoint, packs a step by its
    record, and no devices but the CPU."""
    found = read_resolved(run_path)
    if found is not None:
        return found
    config, before = RunConfig.load(Path(run_path) / CONFIG_NAME), _trained_in(run_path)
    steps = [record for record in read_metrics(run_path)[0] if record["kind"] == "step"]
    packs = len(steps[-1].get("pack_ids") or ()) if steps else 0
    before = replace(before, packs_per_step=packs, packs_asked=config.train.packs_per_step)
    return _settle(config, on_one(CPU), before, 1, 0)[0]


def _settle(config: RunConfig, topology: Topology, before: Before, nodes: int, gpus: int) -> tuple[ResolvedRun, Any]:
    """The resolved run without its memory, and the target's config."""
    asked = _digest(config)
    source = resolve_source(config.target.target)
    shape = load_config(source)
    tokenizer = load_tokenizer(source, shape)
    ends = declared_end_ids(source, shape, tokenizer)
    soft, notes = _soft_labels(config, shape)
    start = None if config.drafter.start_from is None else drafter_layout(config.drafter.start_from)
    target, options = config.target, config.drafter
    if start is not None:
        target, options = _like_its_start(config, start)
        drafter = DrafterConfig.from_dict(start["config"]).extended(**options.shape())
    else:
        drafter = _drafter_shape(config, shape)
    wanted, mask = target.target_layers, options.mask_token_id
    layers = (
        default_layer_ids(shape.num_hidden_layers, _captured_count(config, shape.num_hidden_layers))
        if wanted is None
        else validate_layer_ids(wanted, shape.num_hidden_layers)
    )
    if mask is not None:
        validate_mask_token_id(mask, tokenizer, shape.vocab_size, ends)
    elif random_packs(config.data.data) is not None:
        mask = choose_mask_token_id(tokenizer, shape.vocab_size, ends)
    warm = options.warm_start if not is_random(target.target) else False  # its layers are noise
    attention = _attention(options, drafter, topology.drafters[0], before, notes)
    first = topology.targets[0]
    target_dtype = _dtype("target_dtype", target.target_dtype, first[0], before.target_dtype, notes)
    dtype = _dtype("dtype", config.train.dtype, topology.drafters[0], before.dtype, notes)
    fused = fast_path.fits(topology.drafters[0], drafter.head_dim) and config.runtime.drafter_parallel == "replicate"
    small = drafter.parameter_count(len(layers)) <= _GRAPHED
    graph = config.train.step_graph if config.train.step_graph != "auto" else fused and topology.serial and small
    if graph and config.runtime.drafter_parallel != "replicate":
        graph = False
        notes.append("step_graph is off: the pass of a sharded drafter gathers its weights as it goes")
    packs = _packs_per_step(config.train.packs_per_step, nodes * len(topology.drafters), before, notes)
    if source.server is not None:
        topology, config = _beside_a_server(topology, config)
    settled = replace(
        config,
        target=replace(
            target,
            target_layers=tuple(layers),
            target_dtype=target_dtype,
            fast_capture=target.fast_capture and len(first) == 1,
        ),
        drafter=replace(options, mask_token_id=mask, attention=attention, warm_start=warm),
        train=replace(config.train, dtype=dtype, packs_per_step=packs, soft_labels=soft, step_graph=graph),
    )
    facts = TargetFacts(
        source.name, shape.model_type, shape.num_hidden_layers, shape.hidden_size, shape.vocab_size, tuple(ends)
    )
    resolved = ResolvedRun(
        asked=asked,
        gpus=gpus,
        nodes=nodes,
        packs_asked=config.train.packs_per_step,
        config=settled,
        topology=topology,
        target=facts,
        drafter=drafter,
        fused=fused,
        memory={},
        notes=tuple(notes),
        day=date.today().isoformat() if before.day is None else before.day,
    )
    return resolved, shape


def _beside_a_server(topology: Topology, config: RunConfig) -> tuple[Topology, RunConfig]:
    """Who runs where when a server runs the target: the GPUs that a target would have had are its, and who asks it does so
    from the host (under torchrun each drafter for itself)."""
    gpus = [device.index for target in topology.targets for device in target if device.type == "cuda"]
    if not gpus:
        return topology, config
    ranks = config.runtime.launcher == "torchrun"
    askers = tuple((device,) for device in topology.drafters) if ranks else ((CPU,), (CPU,))
    named = ",".join(map(str, dict.fromkeys(gpus)))
    reason = f"{topology.reason}; the server has GPU {named}, and what it gives crosses the host"
    return Topology(topology.drafters, askers, ranks, reason), replace(
        config, runtime=replace(config.runtime, target_gpus=named)
    )


def _digest(config: RunConfig) -> str:
    return hashlib.blake2b(repr(config).encode(), digest_size=8).hexdigest()


def _soft_labels(config: RunConfig, shape: Any) -> tuple[bool, list[str]]:
    """Whether the loss compares with the target's distribution, and a note where "auto" has to leave that out: it is made
    from the plain logits of a head. Raises ConfigError for True with a target that caps its logits."""
    asked, name = config.train.soft_labels, config.target.target
    if not asked or getattr(shape, "final_logit_softcapping", None) is None:
        return bool(asked), []
    if asked is True:
        raise ConfigError(
            f"soft_labels compares with the plain logits of a head, and '{name}' caps its logits; use "
            "soft_labels=False, or auto"
        )
    return False, [f"hard labels: soft ones compare with the plain logits of a head, and '{name}' caps its logits"]


# -- the drafter's shape -------------------------------------------------------------------------------------------


def _drafter_shape(config: RunConfig, shape: Any) -> DrafterConfig:
    options = config.drafter
    if options.warm_start is True and options.drafter_layers > shape.num_hidden_layers:
        raise ConfigError(
            f"warm_start copies the target's last layers, and the target has {shape.num_hidden_layers}, fewer than "
            f"drafter_layers = {options.drafter_layers}; make the drafter smaller or switch warm_start off"
        )
    return create_drafter_config(
        shape, options.drafter_layers, draft_vocab_size=options.draft_vocab or None, **options.shape()
    )


def _like_its_start(config: RunConfig, layout: Mapping[str, Any]) -> tuple[Any, Any]:
    """The target's and the drafter's settings with layers, mask token and number of layers of the drafter that training
    starts from.

    Raises: ConfigError when a setting says otherwise than that drafter.
    """
    folder = config.drafter.start_from
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
    return (
        replace(config.target, target_layers=tuple(layout["target_layer_ids"])),
        replace(config.drafter, mask_token_id=layout["mask_token_id"], drafter_layers=layout["config"]["num_hidden_layers"]),
    )


def _captured_count(config: RunConfig, layers: int) -> int:
    """How many layers of a target are captured. The recipe's number is made to fit a smaller target, another number that
    does not fit is a ConfigError."""
    asked = config.target.num_captured
    if asked > layers and asked != recipe_value(config.recipe, "target", "num_captured"):
        raise ConfigError(
            f"num_captured is {asked}, and the target has {layers} layers; capture at most {layers}, or name "
            "them with target_layers"
        )
    return min(asked, layers)


# -- dtypes, attention and packs ------------------------------------------------------------------------------------


def _trained_in(run_path: str | os.PathLike[str]) -> Before:
    """The dtypes of the newest checkpoint: as its mark says, else what its weights are stored in; and what "auto" attention
    on a GPU was before `resolved.yaml` had it."""
    saved = checkpoints(run_path)
    if not saved:
        return Before()
    folder = saved[-1][1]
    dtypes = checkpoint_facts(folder).get("dtypes")
    if dtypes:
        return Before(*dtypes, attention="flex")
    from safetensors import safe_open

    with safe_open(folder / "drafter.safetensors", "pt") as file:
        kind = file.get_slice("fc.weight").get_dtype()
    return Before(None, {"BF16": "bfloat16", "F32": "float32"}.get(kind), attention="flex")


def _attention(options: Any, shape: DrafterConfig, device: torch.device, before: Before, notes: list[str]) -> str:
    """The backend by name. A run that goes on on a GPU keeps its own: another one rounds differently."""
    if options.attention != "auto":
        return options.attention
    if before.attention in ("flex", "triton") and device.type == "cuda":
        return before.attention
    backend, why = automatic_backend(device, shape, options.block_size)
    notes.extend([why] if why else [])
    return backend


def _dtype(name: str, asked: str, device: torch.device, was: str | None, notes: list[str]) -> str:
    now = was if was and asked == "auto" else str(compute_dtype(asked, device)).removeprefix("torch.")
    if was and now != was:
        notes.append(
            f"{name} is {now}, and the checkpoint was trained in {was}: the run goes on, but it is not the unbroken run"
        )
    if was and asked == "auto" and device.type != "cpu" and now == "float32":
        notes.append(f"{name} stays float32, as the checkpoint was trained; {name}=bfloat16 is faster on {device}")
    return now


def _packs_per_step(asked: int, drafters: int, before: Before, notes: list[str]) -> int:
    """As many as asked, and one for each drafter, for a drafter without packs only waits. A run that was asked the same
    keeps its number, whatever drafters it goes on with."""
    if before.packs_asked == asked and before.packs_per_step >= drafters:
        return before.packs_per_step
    if asked < drafters:
        notes.append(f"packs_per_step {asked} leaves {drafters - asked} of {drafters} drafters idle; using {drafters}")
    return max(asked, drafters)


# -- what cannot work ----------------------------------------------------------------------------------------------


def _refuse_for_random(config: RunConfig) -> None:
    """Raises ConfigError where a random target is asked for what it cannot give."""
    name = config.target.target
    if not is_random(name):
        return
    if config.drafter.warm_start is True and config.drafter.start_from is None:
        raise ConfigError(f"warm_start copies layers of the target, and those of '{name}' are noise; pass warm_start=False")
    if config.runtime.gpus_per_target > 1:
        raise ConfigError(
            f"'{name}' is made on one device and cannot be spread over gpus_per_target="
            f"{config.runtime.gpus_per_target}; use 1, or fewer layers ({name.split('@')[0]}@8)"
        )


def _refuse_kernels(resolved: ResolvedRun) -> None:
    """Raises ConfigError for a head precision or an attention that cannot run on the drafters' devices."""
    options, shape = resolved.config.drafter, resolved.drafter
    for device in resolved.topology.drafters:
        if options.head_precision == "fp8":
            fp8_head.refuse(device, resolved.dtype, shape.hidden_size)
        if options.attention == "flex" and device.type == "cpu":
            raise ConfigError(
                "attention='flex' has no backward on a CPU, so it cannot train there; use "
                "attention='auto' or 'sdpa_chunked', or a GPU for drafters (gpus)"
            )
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        refuse_backend(options.attention, device, heads, kv_heads, shape.head_dim, options.block_size)


def _make_cache_folder(folder: str | None) -> None:
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache_dir {folder} cannot be made ({error.strerror}); name a folder that can be written, or leave it empty "
            "to keep features in memory"
        ) from None
