"""Start a drafter from its target's last layers instead of random weights.

The drafter's context is the output of the last captured layer. With the layers that follow it copied, the drafter's
keys and values over the context start as those the target itself would compute there. Norm weights are folded into
the projections, since one `hidden_norm` serves all layers; the scale that the target's unnormed queries and keys have
becomes the weight of the drafter's q/k norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash.drafter.model import DFlashDrafter
from dflash.errors import ConfigError


@torch.no_grad()
def warm_start(drafter: DFlashDrafter, target_layers: nn.ModuleList, final_norm: nn.Module) -> list[int]:
    """Copy the last L layers of a dense Llama- or Qwen3-style target into the drafter's L layers.

    Args:
        target_layers: the target's decoder layers. final_norm: its final norm. Norms are read by what they do, so
            those that scale by (1 + weight) are copied as well.

    Returns: the ids of the copied layers.

    Raises: ConfigError when the target has fewer layers, or layers whose shapes are not the drafter's.
    """
    count = len(drafter.layers)
    if len(target_layers) < count:
        raise ConfigError(f"warm start needs {count} target layers, the target has {len(target_layers)}")
    chosen = list(range(len(target_layers) - count, len(target_layers)))
    for layer, index in zip(drafter.layers, chosen, strict=True):
        _copy_layer(layer, target_layers[index], index)
    drafter.norm.weight.copy_(_scale(final_norm, drafter.config.hidden_size))
    drafter.hidden_norm.weight.fill_(1.0)
    h = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    last = drafter.target_layer_ids.index(max(drafter.target_layer_ids))
    drafter.fc.weight[:, last * h : (last + 1) * h].copy_(torch.eye(h))
    return chosen


def _copy_layer(layer: nn.Module, source: nn.Module, index: int) -> None:
    attention = getattr(source, "self_attn", None)
    if attention is None or not hasattr(source, "mlp") or not hasattr(source.mlp, "gate_proj"):
        raise ConfigError(
            f"target layer {index} ({type(source).__name__}) is not a dense attention layer; use warm_start=False"
        )
    ours = layer.self_attn
    size = layer.input_layernorm.weight.numel()
    entry = _scale(source.input_layernorm, size)  # folded into q, k and v
    layer.input_layernorm.weight.fill_(1.0)
    layer.post_attention_layernorm.weight.copy_(_scale(source.post_attention_layernorm, size))
    for name in ("q_proj", "k_proj", "v_proj"):
        _assign(getattr(ours, name).weight, getattr(attention, name).weight.float() * entry, f"layer {index} {name}")
    _assign(ours.o_proj.weight, attention.o_proj.weight, f"layer {index} o_proj")
    for name, projection in (("q_norm", ours.q_proj), ("k_norm", ours.k_proj)):
        theirs = getattr(attention, name, None)
        norm = getattr(ours, name)
        if theirs is not None:
            norm.weight.copy_(_scale(theirs, ours.config.head_dim))
        else:  # root mean square of a projection of a unit-variance input
            norm.weight.fill_(projection.weight.float().square().sum(-1).mean().sqrt())
    for name in ("gate_proj", "up_proj", "down_proj"):
        _assign(layer.mlp[name].weight, getattr(source.mlp, name).weight, f"layer {index} {name}")


def _scale(norm: nn.Module, size: int) -> Tensor:
    """What an RMS norm multiplies each feature by, [size] float32: its output for a constant input."""
    weight = next(norm.parameters())
    return norm(torch.full((1, size), 100.0, device=weight.device, dtype=weight.dtype))[0].float()


def _assign(ours: Tensor, theirs: Tensor, name: str) -> None:
    if ours.shape != theirs.shape:
        raise ConfigError(
            f"warm start: {name} of the target is {list(theirs.shape)}, the drafter's is {list(ours.shape)}; derive the "
            "drafter's config with create_drafter_config(target_config), or use warm_start=False"
        )
    ours.copy_(theirs)
