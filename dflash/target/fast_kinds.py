"""Which targets `fast_target` can compute: kinds of layers, told by their parts, and what would be computed wrongly.

  linear   gated delta rule of Qwen3.5 and 3.6: `linear_attn` with its projections, short convolution and gated norm
  gated    their full attention: the query's projection is twice as wide and holds an output gate; q/k norms
  dense    Llama, Qwen2, Qwen3: plain causal attention over the whole document, q/k norms or none, biases or none

A hybrid target is made of the first two, a dense one of the third alone. Dense models have many relatives that differ in
what no short check shows (a window, positions that scale attention far out), so theirs must be of a known type, and every
part of their layers must be a known one: an unknown part may be one that the fast forward would leave out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from dflash.target.capture import Target

NORMS = ("input_layernorm", "post_attention_layernorm")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
LINEAR_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # `model_type` of the config


def obstacle(target: Target) -> str | None:
    """Why the fast capture cannot compute this target, in words; None when it can."""
    layers = target.decoder.layers
    if not hasattr(target.decoder, "rotary_emb"):
        return "it has no rotary embedding of its decoder"
    for index, layer in enumerate(layers):
        if not _has(layer, *NORMS, "mlp") or not _has(layer.mlp, *MLP_PARTS):
            return f"layer {index} has not the norms and the gated MLP of a Llama or Qwen"
    if any(hasattr(layer, "linear_attn") for layer in layers):
        return next(
            (
                f"layer {index} is neither gated attention nor a gated delta rule"
                for index, layer in enumerate(layers)
                if not (
                    _has(getattr(layer, "linear_attn", None), *LINEAR_PARTS)
                    or _has(getattr(layer, "self_attn", None), *ATTENTION_PARTS, *HEAD_NORMS)
                )
            ),
            None,
        )
    return _dense_obstacle(target)


def _has(module: nn.Module | None, *parts: str) -> bool:
    return all(hasattr(module, part) for part in parts)


def _parts(module: nn.Module) -> set[str]:
    """Names of what a module is made of: submodules and its own weights."""
    return {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}


def _dense_obstacle(target: Target) -> str | None:
    config, decoder = target.config, target.decoder
    if config.model_type not in DENSE_TYPES:
        return f"its model type is {config.model_type}; known are {', '.join(DENSE_TYPES)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its MLP's activation is {config.hidden_act}"
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) != {"full_attention"}:
        return f"its layers are of the types {', '.join(sorted(set(kinds)))}"
    if not kinds and getattr(config, "sliding_window", None) is not None:
        return f"its attention has a window of {config.sliding_window} tokens"
    rope = getattr(decoder.rotary_emb, "rope_type", "default")
    if not isinstance(rope, str) or "dynamic" in rope or rope == "longrope":
        return f"its rotary embedding ({rope}) depends on the length of the row"
    if type(target.model.get_input_embeddings()).forward is not nn.Embedding.forward:
        return "its embedding is more than a table"
    allowed = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if not _parts(decoder) <= allowed:
        return f"its decoder has {', '.join(sorted(_parts(decoder) - allowed))}"
    for index, layer in enumerate(decoder.layers):
        reason = _layer_obstacle(layer, config.num_attention_heads, config.num_key_value_heads)
        if reason:
            return f"layer {index} {reason}"
    return None


def _layer_obstacle(layer: nn.Module, heads: int, kv_heads: int) -> str | None:
    attention = getattr(layer, "self_attn", None)
    if not _has(attention, *ATTENTION_PARTS, "head_dim", "scaling"):
        return "has no attention with q_proj, k_proj, v_proj and o_proj"
    allowed = {*NORMS, "mlp", "self_attn", *MLP_PARTS, "act_fn", *ATTENTION_PARTS, *HEAD_NORMS, "rotary_emb"}
    extra = (_parts(layer) | _parts(layer.mlp) | _parts(attention)) - allowed
    if extra:
        return f"has {', '.join(sorted(extra))}"
    d = attention.head_dim
    widths = tuple(getattr(getattr(attention, part), "out_features", None) for part in ATTENTION_PARTS[:3])
    if widths != (heads * d, kv_heads * d, kv_heads * d):
        return f"projects to {widths} features; wanted {heads} heads and {kv_heads} key heads of {d}"
    if d & (d - 1):
        return f"has heads of {d} features, which is no power of two"
    if hasattr(attention, "q_norm") != hasattr(attention, "k_norm") or any(
        tuple(w.shape) != (d,)
        for name in HEAD_NORMS
        if hasattr(attention, name)
        for w in getattr(attention, name).parameters()
    ):
        return "has q/k norms over other than a head's features"
    return None
