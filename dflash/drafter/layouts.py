"""How other projects write a DFlash drafter's config, and how to read it back.

Layer ids. Here, an id l is the output of target layer l.

    z-lab          `dflash_config.target_layer_ids`: the same; its loader takes hidden_states[l + 1].
    speculators    `aux_hidden_state_layer_ids`: counts the stream that enters a layer, so the output of layer l is
                   l + 1. The two exports of one drafter differ by exactly one in every id.

The rotary base stands in both transformers layouts (`rope_theta`, and `rope_parameters` since version 5), so that no
reader falls back to its default. `tie_word_embeddings` is always false: the head is the target's, whatever the target
ties (NVIDIA-NeMo/Automodel#2319).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.drafter.config import DRAFTER_KINDS, DrafterConfig, rope_theta_of
from dflash.errors import ConfigError

SPECULATORS_OFFSET = 1
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_KNOWN_INNER = {
    *("block_size", "mask_token_id", "target_layer_ids", "causal", "attention_sink_bias", "use_swa", *_SECOND),
    *("final_logit_softcapping", "output_multiplier", "input_embedding_scale", "attention_value_scale"),
}
_MAX_ANCHORS = 512  # a training setting that neither layout stores


def stack_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The drafter's transformer stack as a Qwen3 config."""
    windows = config.sliding_window or (None,) * config.num_hidden_layers
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"layers have sliding windows {sorted(sizes)}; the export layouts hold one size for all sliding layers"
        )
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "sliding_window": sizes.pop() if sizes else None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": any(window is not None for window in windows),
        "vocab_size": config.vocab_size,
    }


def zlab_config(settings: Mapping[str, Any], dtype: str, num_target_layers: int) -> dict[str, Any]:
    """`config.json` of a published `*-DFlash` drafter."""
    config = DrafterConfig.from_dict(settings["config"])
    second = config.drafter_kind == "dflash2"
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        **stack_config(config, dtype),
        "block_size": settings["block_size"],
        "dflash_config": {
            "attention_sink_bias": False,
            "block_size": settings["block_size"],
            "causal": False,
            "mask_token_id": settings["mask_token_id"],
            "target_layer_ids": list(settings["target_layer_ids"]),
            **({name: getattr(config, name) for name in _SECOND} if second else {}),
        },
        "is_causal": False,  # blocks see themselves in both directions, in sliding layers too
        "num_target_layers": num_target_layers,
    }


def speculators_config(
    settings: Mapping[str, Any], dtype: str, verifier: str | None, architectures: list[str]
) -> dict[str, Any]:
    """`config.json` of the speculators package (vLLM's format)."""
    config = DrafterConfig.from_dict(settings["config"])
    second = config.drafter_kind == "dflash2"
    kind = "dflash2" if second else "dflash"
    return ({name: getattr(config, name) for name in _SECOND} if second else {}) | {
        "architectures": ["DFlash2DraftModel" if second else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [layer + SPECULATORS_OFFSET for layer in settings["target_layer_ids"]],
        "block_size": settings["block_size"],
        "draft_vocab_size": config.vocab_size if second else config.draft_vocab_size or config.vocab_size,
        "dtype": dtype,
        "mask_token_id": settings["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": settings["block_size"] - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": stack_config(config, dtype),
    }


def settings_in_layout(config: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Layout name, `drafter.json`-like settings, and what this package's drafter cannot do as that config asks.

    Raises: ConfigError for a config of neither layout, or one that lacks something.
    """
    if "speculators_model_type" in config:
        if config["speculators_model_type"] not in DRAFTER_KINDS:
            raise ConfigError(
                f"this is a {config['speculators_model_type']!r} speculator; only 'dflash' and 'dflash2' can be imported"
            )
        return "speculators", *_from_speculators(config)
    known = {"DFlashDraftModel", "DFlash2DraftModel"} & set(config.get("architectures") or [])
    if known or "dflash_config" in config:
        return "zlab", *_from_zlab(config)
    raise ConfigError(
        f"config.json is of no known drafter layout (architectures {config.get('architectures')}); wanted a z-lab "
        "DFlashDraftModel or a speculators 'dflash' config"
    )


def _from_zlab(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    inner = config.get("dflash_config") or {}
    block_size = config.get("block_size") or inner.get("block_size")
    layers = inner.get("target_layer_ids")
    mask = inner.get("mask_token_id")
    _require(block_size=block_size, target_layer_ids=layers, mask_token_id=mask)
    stack, limits = _stack(config)
    stack |= _second_kind(inner, "DFlash2DraftModel" in (config.get("architectures") or []), "dflash_config")
    for name, value in inner.items():
        if name not in _KNOWN_INNER and value not in (None, False):
            limits.append(f"its dflash_config asks for {name} = {value}, which this package does not know")
    causal = config.get("is_causal", inner.get("causal"))
    if any(kind == "sliding_attention" for kind in config.get("layer_types") or []):
        if causal is not False:
            limits.append("its sliding layers are causal inside a block; here blocks see themselves both ways")
        limits.append("it counts the sliding window from each slot, here it is counted from the anchor")
    elif causal:
        limits.append("its blocks are causal; here they see themselves both ways")
    for name in ("final_logit_softcapping", "output_multiplier", "input_embedding_scale", "attention_value_scale"):
        value = inner.get(name, config.get(name))
        if value not in (None, 1.0):
            limits.append(f"it applies {name} = {value}")
    if inner.get("attention_sink_bias", config.get("add_swa_attention_sink_bias")):
        limits.append("its heads have attention sinks")
    if inner.get("use_swa") and not stack["sliding_window"]:
        limits.append("it forces a sliding window on every layer (use_swa)")
    if config.get("is_neox_style") is False:
        limits.append("it rotates neighbouring features in pairs (is_neox_style false)")
    more = {"num_target_layers": config.get("num_target_layers")}
    return _settings(stack, layers, block_size, mask, None) | more, limits


def _from_speculators(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    layers, mask = config.get("aux_hidden_state_layer_ids"), config.get("mask_token_id")
    inner = config.get("transformer_layer_config")
    _require(
        transformer_layer_config=inner,
        aux_hidden_state_layer_ids=layers,
        mask_token_id=mask,
        block_size=config.get("block_size"),
    )
    if min(layers) < SPECULATORS_OFFSET:
        raise ConfigError(f"aux_hidden_state_layer_ids {layers} reads the embedding (id 0), which is the output of no layer")
    stack, limits = _stack(inner)
    draft = config.get("draft_vocab_size")
    stack |= _second_kind(config, config["speculators_model_type"] == "dflash2", "config.json")
    stack["draft_vocab_size"] = None if draft in (None, stack["vocab_size"]) else draft
    if config.get("sample_from_anchor"):
        limits.append("it also drafts from slot 0 (sample_from_anchor)")
    if stack["sliding_window"] and not config.get("sliding_window_non_causal"):
        limits.append("its sliding layers are causal inside a block; here blocks see themselves both ways")
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    layers = [layer - SPECULATORS_OFFSET for layer in layers]
    return _settings(stack, layers, config["block_size"], mask, verifier), limits


def _second_kind(config: Mapping[str, Any], second: bool, where: str) -> dict[str, Any]:
    """`DrafterConfig` fields of the parts of DFlash 2."""
    given = {name: config[name] for name in _SECOND if config.get(name) is not None}
    if not second:
        if given:
            raise ConfigError(
                f"{where} has {', '.join(given)}, and the architecture is plain DFlash; wanted DFlash2DraftModel with them"
            )
        return {}
    missing = [name for name in _SECOND if name not in given]
    if missing:
        raise ConfigError(f"a DFlash 2 drafter's {where} lacks {', '.join(missing)}")
    return {"drafter_kind": "dflash2", "selector_codebooks": "full", **given}


def _settings(stack: dict, layers: list[int], block_size: int, mask: int, target: str | None) -> dict[str, Any]:
    return {
        "config": stack,
        "target_layer_ids": list(layers),
        "block_size": block_size,
        "max_anchors": _MAX_ANCHORS,
        "mask_token_id": mask,
        "target": target,
    }


def _stack(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`DrafterConfig` fields of a Qwen3 config in either transformers layout."""
    _require(
        **{
            name: config.get(name)
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        }
    )
    rope = _Attributes(config)
    parameters = rope.rope_parameters or {}
    limits = []
    kind = parameters.get("rope_type") or (config.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default":
        limits.append(f"it scales rotary positions ({kind})")
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if factor != 1.0:
        limits.append(f"it rotates only {factor} of each head")
    if config.get("attention_bias"):
        limits.append("its projections have biases")
    if config.get("hidden_act", "silu") != "silu":
        limits.append(f"its activation is {config['hidden_act']}")
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    window = config.get("sliding_window")
    sliding = [window if name == "sliding_attention" else None for name in kinds]
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta_of(rope),
        "max_position_embeddings": config.get("max_position_embeddings", 32768),
        "draft_vocab_size": None,
        "sliding_window": sliding if any(sliding) else None,
        "initializer_range": config.get("initializer_range", 0.02),
    }, limits


class _Attributes:
    """A plain config dict, read like a transformers config."""

    def __init__(self, values: Mapping[str, Any]):
        self.rope_parameters = values.get("rope_parameters")
        self.rope_theta = values.get("rope_theta")
        self.rope_scaling = values.get("rope_scaling")


def _require(**values: Any) -> None:
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ConfigError(f"config.json of the drafter lacks {', '.join(missing)}")
