"""Every setting of a run, as it is stored in `runs/<id>/config.yaml`.

A section is a small frozen dataclass that refuses bad values when it is made. Names are unique across sections, so a
notebook can pass them flat: `RunConfig.from_parameters(block_size=8, lr="2e-3")`. A setting with a default here has it in
every run; those without one come from a recipe (`dflash/recipes/`).
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash.drafter.attention import BACKENDS
from dflash.drafter.config import CODEBOOKS, DRAFTER_KINDS, SECOND_KIND
from dflash.drafter.fp8_head import PRECISIONS
from dflash.drafter.objective import MISSING, refuse_objective
from dflash.errors import ConfigError, refuse_below, refuse_seed, refuse_unknown
from dflash.runs.sinks import sink_names
from dflash.train.optimizer import OPTIMIZERS, SCHEDULES
from dflash.train.recipes import AUTO, EXPECTED, choose_recipe, is_recipe_file, read_recipe
from dflash.train.values import coerce

MOST_PACKS_A_STEP = 4096


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which frozen model, and what is read from it."""

    target: str = "smollm2"  # "smollm2" (packaged), a folder, a .gguf file, a hub id, "random:qwen3.6-27b", "vllm:FOLDER"
    target_layers: tuple[int, ...] | None = None  # captured layer ids (id l = output of layer l); None: evenly spread
    num_captured: int  # how many layers when target_layers is None
    target_dtype: str = "auto"  # "auto", "float32" or "bfloat16"
    target_attention: str = "auto"  # transformers' name ("sdpa", "eager" ...); "auto" takes what the model supports
    fast_capture: bool = True  # on a GPU, capture by the fast kernels where they agree with the plain path
    server_python: str | None = None  # vllm:FOLDER: the Python of an environment with vLLM
    server_args: str = ""  # vllm:FOLDER: more arguments of `vllm serve`

    def __post_init__(self) -> None:
        _require(self.num_captured >= 1, f"num_captured must be at least 1, got {self.num_captured}")
        _require(
            self.target_attention in TARGET_ATTENTION,
            f"target_attention must be one of {', '.join(TARGET_ATTENTION)}; got {self.target_attention!r}",
        )
        _require(self.target_dtype in DTYPES, f"target_dtype must be one of {DTYPES}, got {self.target_dtype!r}")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which conversations, and how they are packed."""

    data: str  # conversations: JSONL, Parquet, a datasets folder, or "random:24"
    pack_length: int  # T, tokens of one pack
    max_conversations: int | None  # read at most this many; None: all
    held_out: int  # conversations kept for evaluation, chosen by prompt
    held_out_data: str | None  # take them from this file instead; None: from `data`
    max_skipped: float = 0.1  # share of a file's rows that may be unusable; more of them stops the run

    def __post_init__(self) -> None:
        _require(self.pack_length >= 16, f"pack_length must be at least 16 tokens, got {self.pack_length}")
        _require(self.held_out >= 0, f"held_out must be at least 0, got {self.held_out}")
        _require(0 <= self.max_skipped <= 1, f"max_skipped must be a share, 0 to 1, got {self.max_skipped}")
        _require(
            self.max_conversations is None or self.max_conversations >= 1,
            f"max_conversations must be at least 1 or None, got {self.max_conversations}",
        )


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Shape of the drafter and where its weights start."""

    drafter_layers: int  # L
    block_size: int  # S, slot 0 is the anchor
    max_anchors: int  # A, blocks per pack
    mask_token_id: int | None = None  # None: an unused token of the target
    draft_vocab: int | None  # propose only this many most frequent tokens; 0: those in the data; None: all
    warm_start: bool | str = "auto"  # copy the target's last layers: True, False for random weights, "auto" where exact
    start_from: str | None = None  # start from the drafter in this folder (own checkpoint, z-lab or speculators layout)
    attention: str = "auto"  # "flex", "triton", "sdpa" or "sdpa_chunked"; "auto": on a GPU triton where it takes the sizes
    max_dense_gib: float = 2.0  # bound of the dense backends
    head_precision: str = "same"  # training logits: "same" as the drafter's dtype, or "fp8" through a quantized head
    sliding_window: int | tuple[int, ...] | None = None  # context tokens a layer sees: one number, or one a layer (0: all)
    drafter_kind: str = "dflash"  # or "dflash2": with a local convolution and a candidate selector
    conv_kernel_size: int = 2  # dflash2: slots that the convolution mixes; 0: no convolution
    conv_group_size: int = 16  # channels that share its dynamic coefficients
    selector_top_k: int = 16  # dflash2: candidates of a slot; 0: no selector
    selector_rank: int = 256
    selector_codebooks: str = "full"  # "full": a row for each token; "low_rank": a projection of the embedding

    def __post_init__(self) -> None:
        _require(self.drafter_layers >= 1, f"drafter_layers must be at least 1, got {self.drafter_layers}")
        _require(self.block_size >= 2, f"block_size must be at least 2 (slot 0 is the anchor), got {self.block_size}")
        _require(self.max_anchors >= 1, f"max_anchors must be at least 1, got {self.max_anchors}")
        _require(
            self.warm_start in (True, False, "auto"), f"warm_start must be auto, true or false, got {self.warm_start!r}"
        )
        _require(
            self.attention in ("auto", *BACKENDS), f"attention must be auto, {', '.join(BACKENDS)}; got {self.attention!r}"
        )
        _require(
            self.draft_vocab is None or self.draft_vocab >= 0,
            f"draft_vocab must be at least 0 or None, got {self.draft_vocab}",
        )
        _require(
            self.head_precision in PRECISIONS,
            f"head_precision must be {' or '.join(PRECISIONS)}, got {self.head_precision!r}",
        )
        for name, known in (("drafter_kind", DRAFTER_KINDS), ("selector_codebooks", CODEBOOKS)):
            _require(getattr(self, name) in known, f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        refuse_below(0, conv_kernel_size=self.conv_kernel_size, selector_top_k=self.selector_top_k)
        refuse_below(1, conv_group_size=self.conv_group_size, selector_rank=self.selector_rank)
        _require(
            self.conv_kernel_size <= self.block_size,
            f"conv_kernel_size {self.conv_kernel_size} is more than the {self.block_size} slots of a block (block_size)",
        )
        windows = self.sliding_window if isinstance(self.sliding_window, tuple) else (self.sliding_window or 0,)
        _require(
            len(windows) in (1, self.drafter_layers) and min(windows) >= 0,
            f"sliding_window must be one number of tokens, or one for each of {self.drafter_layers} layers (0: the whole "
            f"document), got {self.sliding_window}",
        )
        _require(0 < self.max_dense_gib < math.inf, f"max_dense_gib must be positive and finite, got {self.max_dense_gib}")

    def shape(self) -> dict[str, Any]:
        """What `create_drafter_config` takes beside the target's config and the number of layers."""
        windows = self.sliding_window if isinstance(self.sliding_window, tuple) else (self.sliding_window,)
        windows = tuple(window or None for window in windows * (self.drafter_layers if len(windows) == 1 else 1))
        return {name: getattr(self, name) for name in SECOND_KIND} | {"sliding_window": windows if any(windows) else None}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Optimisation."""

    steps: int
    max_minutes: float | None  # minutes of steps (evaluations apart); fewer steps are planned as their pace asks for it
    packs_per_step: int  # packs whose gradients make one step, over all replicas
    optimizer: str = "adamw"  # or "muon": matrices by Muon with AdamW's step size, the rest by AdamW; the same lr
    lr: float
    schedule: str = "cosine"  # or "wsd": warmup, then constant, then down over the last fifth of the steps
    warmup_steps: int
    min_lr_ratio: float = 0.05  # the schedule ends at lr times this
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    position_weights: str = "decay"  # slot weights: "decay" by gamma, or by the "acceptance" of their block (D-PACE)
    gamma: float | None  # decay of slot weights; None: uniform; 0: slot 1 only
    soft_labels: bool | str = "auto"  # a loss to the target's distribution, not to the token; "auto": but for capped logits
    loss_fn: str = (
        "kl"  # that loss: "kl", "tv" (total variation), "lk" (-log of the acceptance) or "lk_hybrid" (kl, then tv)
    )
    reduction: str = "weight_mean"
    selector_alpha: float = 1.0  # dflash2: weight of the candidate selector's loss
    selector_missing: str = "replace"  # right token no candidate: it "replace"s the weakest in the loss, or "skip" the slot
    dtype: str = "auto"  # compute dtype; masters are float32
    step_graph: bool | str = "auto"  # steps as CUDA graphs: True, False, "auto" for a small drafter alone on its GPU
    features: str = "auto"  # "offline" (captured once, kept), "online", or "auto" by what fits on the GPU or in cache_gib
    cache_gib: float = 2.0  # bound of the feature cache in the host's memory
    cache_dir: str | None = None  # keep the cached features on disk here instead
    eval_every: int  # steps; 0: never
    checkpoint_every: int  # steps; 0: never, not even at the end, so there is nothing to resume or evaluate
    keep_checkpoints: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "packs_per_step", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(
            self.packs_per_step <= MOST_PACKS_A_STEP,
            f"packs_per_step must be at most {MOST_PACKS_A_STEP}, got {self.packs_per_step}",
        )
        for name in ("eval_every", "checkpoint_every"):
            _require(getattr(self, name) >= 0, f"{name} must be at least 1, or 0 for never, got {getattr(self, name)}")
        _require(0 < self.lr < math.inf, f"lr must be positive and finite, got {self.lr}")
        refuse_seed(self.seed)
        _require(self.warmup_steps >= 0, f"warmup_steps must be at least 0, got {self.warmup_steps}")
        _require(self.max_grad_norm > 0, f"max_grad_norm must be positive, got {self.max_grad_norm}")
        _require(
            self.max_minutes is None or 0 < self.max_minutes < math.inf,
            f"max_minutes must be positive and finite, or None, got {self.max_minutes}",
        )
        _require(0 <= self.min_lr_ratio <= 1, f"min_lr_ratio must be between 0 and 1, got {self.min_lr_ratio}")
        refuse_objective(self.loss_fn, self.soft_labels, self.position_weights)
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            _require(getattr(self, name) in known, f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        _require(
            self.selector_missing in MISSING,
            f"selector_missing must be {' or '.join(MISSING)}, got {self.selector_missing!r}",
        )
        for name in ("weight_decay", "cache_gib", "selector_alpha"):
            _require(0 <= getattr(self, name) < math.inf, f"{name} must be finite and at least 0, got {getattr(self, name)}")
        _require(
            self.gamma is None or (math.isfinite(self.gamma) and self.gamma >= 0),
            f"gamma must be a finite number >= 0 or None (uniform weights), got {self.gamma}",
        )
        _require(
            self.soft_labels in (True, False, "auto"), f"soft_labels must be auto, true or false, got {self.soft_labels!r}"
        )
        _require(
            self.reduction in ("weight_mean", "token_mean"),
            f"reduction must be weight_mean or token_mean, got {self.reduction!r}",
        )
        _require(self.dtype in DTYPES, f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        _require(
            self.features in ("auto", "offline", "online"),
            f"features must be auto, offline or online, got {self.features!r}",
        )
        _require(
            self.step_graph in (True, False, "auto"), f"step_graph must be auto, true or false, got {self.step_graph!r}"
        )
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"betas must be two numbers in [0, 1), got {self.betas}",
        )

    def schedule_parts(self) -> tuple[int, float, float, str]:
        """What `learning_rate` takes beside the step and the number of steps."""
        return self.warmup_steps, self.lr, self.min_lr_ratio, self.schedule


@dataclass(frozen=True)
class RuntimeOptions:
    """Which devices do what, and how the run is kept safe."""

    gpus: str | int | list | None = None  # drafter GPUs: "5,6,7", 5, [5, 6], "all", "cpu", or empty for the default
    target_gpus: str | int | list | None = None  # target GPUs; empty: all that do not draft
    gpus_per_target: int = 1  # shard one target over this many GPUs
    launcher: str = "threads"  # "threads" (this process) or "torchrun"
    drafter_parallel: str = "replicate"  # "replicate": whole drafters; "fsdp2": shards of one (torchrun only)
    queue_depth: int = 2  # packs of features in flight between targets and drafters
    protect: bool = True  # warmup, seal and thread-aware tracing around compiled attention
    watchdog_seconds: float = 600.0  # no completed step for this long ends the run with all stacks
    log_to: str | None = None  # also send the numbers to "tensorboard", "wandb", "mlflow", or several: "wandb,mlflow"

    def __post_init__(self) -> None:
        _require(self.launcher in ("threads", "torchrun"), f"launcher must be threads or torchrun, got {self.launcher!r}")
        _require(
            self.drafter_parallel in ("replicate", "fsdp2"),
            f"drafter_parallel must be replicate or fsdp2, got {self.drafter_parallel!r}",
        )
        _require(
            self.drafter_parallel == "replicate" or self.launcher == "torchrun",
            "drafter_parallel=fsdp2 shards a drafter over processes, and launcher=threads has one; use "
            "launcher=torchrun, or drafter_parallel=replicate",
        )
        _require(self.queue_depth >= 1, f"queue_depth must be at least 1, got {self.queue_depth}")
        _require(self.gpus_per_target >= 1, f"gpus_per_target must be at least 1, got {self.gpus_per_target}")
        _require(
            1 <= self.watchdog_seconds < math.inf,
            f"watchdog_seconds must be at least 1 and finite, got {self.watchdog_seconds}",
        )
        sink_names(self.log_to)


DTYPES = ("auto", "float32", "bfloat16")
TARGET_ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections. `recipe`: where settings came from that nobody named; None where all were named."""

    recipe: str | None = None
    target: TargetOptions
    data: DataOptions
    drafter: DrafterOptions
    train: TrainOptions
    runtime: RuntimeOptions

    def __post_init__(self) -> None:
        _require(
            self.drafter.block_size <= self.data.pack_length,
            f"block_size {self.drafter.block_size} does not fit into a pack of pack_length {self.data.pack_length} "
            "tokens; make the block smaller or the pack longer",
        )
        _require(
            self.train.optimizer == "adamw" or self.runtime.drafter_parallel == "replicate",
            f"optimizer={self.train.optimizer} needs whole matrices, and drafter_parallel=fsdp2 splits them; use "
            "optimizer=adamw, or drafter_parallel=replicate",
        )

    @classmethod
    def from_parameters(cls, recipe: str | None = AUTO, **parameters: Any) -> RunConfig:
        """From flat names, as a notebook or a command line has them: a recipe, and what is passed instead of its values.

        Args:
            recipe: a name, or "auto" or None: by the device and the target (`choose_recipe`).
            parameters: settings, coerced by declared type. None is a value like any other: `gamma=None` is uniform.

        Raises: ConfigError for an unknown name (with the nearest known one) or a value of the wrong type.
        """
        refuse_unknown(parameters, setting_names(), "parameter")
        given = {name: coerce(name, value, _TYPES[name]) for name, value in parameters.items()}
        if recipe in (None, "", AUTO):
            packaged = given.get("target", PACKAGED) == PACKAGED
            recipe = choose_recipe(packaged, given.get("gpus"))
        return cls._made(recipe, _flat(read_recipe(recipe)) | given)

    @classmethod
    def _made(cls, recipe: str | None, settings: Mapping[str, Any]) -> RunConfig:
        """From values of the declared types."""
        missing = [name for name in RECIPE_SETTINGS if name not in settings]
        if missing == ["data"]:
            raise ConfigError(
                f"the recipe {recipe!r} leaves `data` to you: text that this target wrote (`dflash regenerate` has it write "
                "answers), or random:24 to try speed and memory"
            )
        _require(not missing, f"the recipe {recipe!r} does not say {', '.join(missing)}")
        sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for name, value in settings.items():
            sections[_OWNERS[name]][name] = coerce(name, value, _TYPES[name])
        return cls(recipe=recipe, **{section: _SECTIONS[section](**values) for section, values in sections.items()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **changes: Any) -> RunConfig:
        """From nested plain values (`to_dict`, config.yaml), with `changes` by flat name. What they leave out comes from
        their recipe."""
        refuse_unknown(values, ["recipe", *_SECTIONS], "section")
        refuse_unknown(changes, setting_names(), "parameter")
        recipe = changes.pop("recipe", values.get("recipe"))
        given = _flat({k: v for k, v in values.items() if k != "recipe"}) | changes
        if all(name in given for name in RECIPE_SETTINGS):  # a run's own file: settled, whatever a recipe says today
            return cls._made(recipe, given)
        return cls.from_parameters(recipe, **given)

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> RunConfig:
        """Read a config.yaml, with `changes` by flat name; the file of a recipe is that recipe.

        Raises: ConfigError naming the file when it is neither."""
        if is_recipe_file(path):
            return cls.from_parameters(**{"recipe": Path(path).stem, **changes})
        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read the config file {path}: {' '.join(str(error).split())}") from None
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path} must hold sections {', '.join(_SECTIONS)}, got {type(values).__name__}")
        values = {name: value for name, value in values.items() if name != EXPECTED}  # a copy of a recipe has it
        return cls.from_dict(_as_it_was(values), **changes)

    def brief(self) -> str:
        """The recipe and the settings that matter first, in one line."""
        drafter, train = self.drafter, self.train
        minutes = "" if train.max_minutes is None else f", at most about {train.max_minutes:g} minutes"
        return (
            f"recipe {self.recipe or '-'}: {drafter.drafter_layers} layers, blocks of {drafter.block_size}, "
            f"{drafter.max_anchors} anchors, {train.packs_per_step} x {self.data.pack_length:,} tokens a step; "
            f"{train.steps:,} steps{minutes}, lr {train.lr:g}, gamma {train.gamma}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values that YAML can hold."""

        def listed(value: Any) -> Any:
            return [listed(v) for v in value] if isinstance(value, (tuple, list)) else value

        sections = {s: {k: listed(v) for k, v in dataclasses.asdict(getattr(self, s)).items()} for s in _SECTIONS}
        return {"recipe": self.recipe, **sections}


_SECTIONS: dict[str, type] = {
    "target": TargetOptions,
    "data": DataOptions,
    "drafter": DrafterOptions,
    "train": TrainOptions,
    "runtime": RuntimeOptions,
}


PACKAGED = TargetOptions.target  # the default target
_OWNERS = {f.name: section for section, options in _SECTIONS.items() for f in dataclasses.fields(options)}
_TYPES = {name: kind for options in _SECTIONS.values() for name, kind in typing.get_type_hints(options).items()}
RECIPE_SETTINGS = tuple(  # settings without a default: each recipe says them
    f.name for options in _SECTIONS.values() for f in dataclasses.fields(options) if f.default is dataclasses.MISSING
)


def _as_it_was(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a run that was made before `max_skipped` was a setting: it had no limit, and warm starts unproved. A
    run's own file has every setting of its time, which a recipe or a file by hand has not."""
    sections = [values.get(section) for section in ("data", "drafter", "train", "runtime")]
    if not all(isinstance(section, Mapping) for section in sections):
        return values
    data, drafter, train, runtime = sections
    if "max_skipped" in data or not ("betas" in train and "watchdog_seconds" in runtime):
        return values
    warm = {"warm_start": "auto"} if drafter.get("warm_start") is True else {}
    return {**values, "data": {**data, "max_skipped": 1.0}, "drafter": {**drafter, **warm}}


def setting_names() -> list[str]:
    """What a run takes: "recipe", and every setting in the order of the sections."""
    return ["recipe", *_OWNERS]


def nullable(name: str) -> bool:
    """Whether None is a value of this setting."""
    return name in _TYPES and type(None) in typing.get_args(_TYPES[name])


def setting_value(name: str, value: Any) -> Any:
    """`value` as the setting `name` has it, in plain types. ConfigError naming what was got and what was wanted."""
    value = coerce(name, value, _TYPES.get(name, str))
    return list(value) if isinstance(value, tuple) else value


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of all sections under their names. ConfigError for a section or setting that there is not."""
    flat: dict[str, Any] = {}
    for section, content in sections.items():
        if not isinstance(content, Mapping):
            raise ConfigError(f"section {section!r} must be a mapping of settings, got {content!r}")
        refuse_unknown(content, [f.name for f in dataclasses.fields(_SECTIONS[section])], f"{section} setting")
        flat |= content
    return flat
