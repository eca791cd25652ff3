"""The drafter's shape, and how it follows from a target's config.

The default is the drafter of Qwen3.6-27B; `create_drafter_config(target_config)` derives one for any dense
Llama- or Qwen3-style target. Settings of a run live in `run_config.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash.errors import ConfigError, refuse_unknown

DRAFTER_KINDS = ("dflash", "dflash2")
CODEBOOKS = ("full", "low_rank")
SECOND_KIND = (
    "drafter_kind",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "selector_codebooks",
)  # fields of `DrafterConfig` that say which parts of DFlash 2 a drafter has


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of the drafter's transformer stack (Qwen3 style: RMSNorm, q/k norm, GQA, SwiGLU).

    Sizes are counts of features unless named otherwise. `sliding_window[i]` limits layer i to that many context
    positions before the anchor (None: the whole document). `draft_vocab_size` None means the target's vocabulary.

    Raises:
        ConfigError: a size is not positive, the heads do not divide, or a per-layer list has the wrong length.
    """

    hidden_size: int = 5120
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 17408
    vocab_size: int = 248320
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    max_position_embeddings: int = 262144
    draft_vocab_size: int | None = None
    sliding_window: tuple[int | None, ...] | None = None
    initializer_range: float = 0.02
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # kept for exports; only "default" runs
    drafter_kind: str = "dflash"  # "dflash2": with the parts below
    conv_kernel_size: int = 2  # taps of the local convolution; 0: none
    conv_group_size: int = 16  # channels that share dynamic coefficients
    selector_rank: int = 256  # of the candidate selector
    selector_top_k: int = 16  # candidates of a slot; 0: no selector
    selector_codebooks: str = "full"  # a row for each token, or "low_rank": a projection of the token's embedding

    @property
    def has_convolution(self) -> bool:
        return self.drafter_kind == "dflash2" and self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        return self.drafter_kind == "dflash2" and self.selector_top_k > 0

    def _refuse_second_kind(self) -> None:
        """Raises ConfigError where the parts of DFlash 2 do not fit the stack."""
        for name, known in (("drafter_kind", DRAFTER_KINDS), ("selector_codebooks", CODEBOOKS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        lowest = {"conv_kernel_size": 0, "conv_group_size": 1, "selector_rank": 1, "selector_top_k": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.drafter_kind == "dflash":
            return
        if not (self.has_convolution or self.has_selector):
            raise ConfigError(
                "drafter_kind is dflash2 with conv_kernel_size 0 and selector_top_k 0, which is plain DFlash; switch a part "
                "on, or use drafter_kind=dflash"
            )
        if self.has_convolution and self.hidden_size % self.conv_group_size:
            raise ConfigError(
                f"conv_group_size {self.conv_group_size} does not divide the hidden size {self.hidden_size}; use a divisor "
                "such as 16 or 8"
            )
        vocabulary = self.draft_vocab_size or self.vocab_size
        if self.has_selector and self.selector_top_k > vocabulary:
            raise ConfigError(
                f"selector_top_k {self.selector_top_k} is more than the {vocabulary} tokens that the drafter may propose; "
                f"use at most {vocabulary}"
            )

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size must lie in 1..{self.vocab_size} (the vocabulary), got {self.draft_vocab_size}"
            )
        if self.sliding_window is not None:
            object.__setattr__(self, "sliding_window", tuple(self.sliding_window))
            if len(self.sliding_window) != self.num_hidden_layers:
                raise ConfigError(
                    f"sliding_window needs one entry per layer ({self.num_hidden_layers}), got {len(self.sliding_window)}"
                )
        kind = (self.rope_scaling or {}).get("rope_type", (self.rope_scaling or {}).get("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"rope scaling {kind!r} is not supported in the drafter; pass rope_scaling=None to train with plain "
                "rotary embeddings"
            )
        self._refuse_second_kind()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a config file."""
        values = dataclasses.asdict(self)
        if self.sliding_window is not None:
            values["sliding_window"] = list(self.sliding_window)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """Inverse of `to_dict`. Raises ConfigError for an unknown key, naming the nearest known one."""
        values = {name: value for name, value in values.items() if name != "model_type"}  # in older checkpoints
        refuse_unknown(values, [f.name for f in dataclasses.fields(cls)], "drafter setting")
        return cls(**values)

    def extended(self, sliding_window: tuple[int | None, ...] | None, **second_kind: Any) -> DrafterConfig:
        """This shape with the parts of DFlash 2 that are asked for: those that it lacks are added.

        Raises: ConfigError where that would drop a part, or change one that is trained (`selector_top_k` may change).
        """
        asked = dataclasses.replace(self, **second_kind)
        if sliding_window not in (None, self.sliding_window):
            raise ConfigError(f"sliding_window asks for {sliding_window}, this drafter was made with {self.sliding_window}")
        for part, fixed in (
            ("convolution", ("conv_kernel_size", "conv_group_size")),
            ("selector", ("selector_rank", "selector_codebooks")),
        ):
            if not getattr(self, f"has_{part}"):
                continue
            known = [f"{name}={getattr(self, name)}" for name in ("drafter_kind", *fixed)]
            if not getattr(asked, f"has_{part}") or any(getattr(self, n) != getattr(asked, n) for n in fixed):
                raise ConfigError(
                    f"this drafter is of the other kind than asked for: it has a {part}, made with {', '.join(known)}; pass "
                    "these"
                )
        return asked

    def parameter_count(self, num_captured_layers: int) -> int:
        """Trainable parameters, the shared embedding and head not counted."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.num_attention_heads + 2 * self.num_key_value_heads) + 2 * d
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        if self.has_convolution:
            layer += 2 * 2 * self.conv_kernel_size * h * (1 + h // self.conv_group_size)
        return self.num_hidden_layers * layer + num_captured_layers * h * h + 2 * h + self.selector_parameters()

    def selector_parameters(self) -> int:
        """Trainable parameters of the candidate selector."""
        if not self.has_selector:
            return 0
        rows = self.vocab_size if self.selector_codebooks == "full" else self.hidden_size
        return self.selector_rank * (self.hidden_size + 2 * rows)


def text_config(config: Any) -> Any:
    """The text part of a possibly multimodal transformers config (`text_config` nested or the config itself)."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = getattr(config, name, None)
        if nested is not None:
            return nested
    return config


def rope_theta_of(config: Any, default: float = 10000.0) -> float:
    """The rotary base, read in both transformers layouts.

    Version 5 keeps it in `rope_parameters` (flat, or one entry per layer type), version 4 in `rope_theta`. Reading
    only the old place silently returns the default (vllm-project/vllm#42624).
    """
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        if "rope_theta" in parameters:
            return float(parameters["rope_theta"])
        for kind in ("full_attention", *parameters):
            nested = parameters.get(kind)
            if isinstance(nested, Mapping) and "rope_theta" in nested:
                return float(nested["rope_theta"])
    value = getattr(config, "rope_theta", None)
    if value is None and isinstance(getattr(config, "rope_scaling", None), Mapping):
        value = config.rope_scaling.get("rope_theta")
    return float(default if value is None else value)


_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


def create_drafter_config(target_config: Any = None, num_draft_layers: int = 5, **overrides: Any) -> DrafterConfig:
    """Drafter shape for a target.

    Args:
        target_config: a transformers config (dense Llama/Qwen3 style, or one that nests such a config under
            `text_config`); None gives the Qwen3.6-27B drafter. A hybrid target's few wide heads (24 of 256) are no model
            for the drafter's attention: heads wider than 128 become the Qwen3.6-27B drafter's.
        num_draft_layers: L, transformer layers of the drafter.
        **overrides: any field of `DrafterConfig`.

    Raises:
        ConfigError: an unknown override, or a target config without the sizes a drafter needs.
    """
    refuse_unknown(overrides, [f.name for f in dataclasses.fields(DrafterConfig)], "drafter setting")
    if target_config is None:
        return DrafterConfig(**{"num_hidden_layers": num_draft_layers, **overrides})
    source = text_config(target_config)
    missing = [n for n in ("hidden_size", "num_attention_heads", "vocab_size") if getattr(source, n, None) is None]
    if missing:
        raise ConfigError(
            f"{type(source).__name__} has no {', '.join(missing)}; pass the text config of a dense Llama- or "
            "Qwen3-style model"
        )
    heads = source.num_attention_heads
    hybrid = any("linear" in kind for kind in getattr(source, "layer_types", None) or ())
    if hybrid and (getattr(source, "head_dim", None) or 0) > DrafterConfig.head_dim:
        overrides = {name: getattr(DrafterConfig, name) for name in _HEADS} | overrides
    intermediate = getattr(source, "intermediate_size", None) or overrides.get("intermediate_size")
    if intermediate is None:
        raise ConfigError(f"{type(source).__name__} has no dense intermediate_size; pass intermediate_size=...")
    derived = {
        "hidden_size": source.hidden_size,
        "num_hidden_layers": num_draft_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // heads,
        "intermediate_size": intermediate,
        "vocab_size": source.vocab_size,
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-6),
        "rope_theta": rope_theta_of(source),
        "max_position_embeddings": getattr(source, "max_position_embeddings", 32768),
    }
    return DrafterConfig(**{**derived, **overrides})
