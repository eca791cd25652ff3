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

    def parameter_count(self, num_captured_layers: int) -> int:
        """Trainable parameters, the shared embedding and head not counted."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.num_attention_heads + 2 * self.num_key_value_heads) + 2 * d
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        return self.num_hidden_layers * layer + num_captured_layers * h * h + 2 * h


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
