"""Start a drafter from its target's last layers instead of random weights, where the copies are what they stand for.

The drafter's context is the output of the last captured layer. With the layers that follow it copied, the drafter's
keys and values over the context start as those the target itself would compute there. Norm weights are folded into
the projections, since one `hidden_norm` serves all layers; the scale that the target's unnormed queries and keys have
becomes the weight of the drafter's q/k norm. Biases, other norms, other activations and the like have no place in the
drafter; so each copy is run on a plain causal row beside the target's own layer, and refused where it gives another output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.drafter.layers import DraftLayer, rotary_tables
from dflash.drafter.model import DFlashDrafter
from dflash.errors import ConfigError

_ROW = 32  # tokens of the row on which a copy is proved
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of what a layer adds to its input; others: 0.03


class WarmStartError(ConfigError):
    """Layers of this target cannot be the drafter's."""


@torch.no_grad()
def warm_start(drafter: DFlashDrafter, decoder: nn.Module) -> str:
    """Copy the last L layers of a dense Llama- or Qwen3-style target into the drafter's L layers, and prove the copies.

    Args:
        decoder: the target's stack: called with `input_ids` it runs its `layers`, and its `norm` after them. Norms are
            read by what they do, so those that scale by (1 + weight) are copied as well.

    Returns: one line that says which layers were copied and how exactly.

    Raises: WarmStartError when the target has fewer layers, or layers that the drafter's cannot be; its weights are
        spoilt then.
    """
    count, layers = len(drafter.layers), decoder.layers
    if len(layers) < count:
        raise WarmStartError(f"warm start needs {count} target layers, the target has {len(layers)}")
    chosen = list(range(len(layers) - count, len(layers)))
    for layer, index in zip(drafter.layers, chosen, strict=True):
        _copy_layer(layer, layers[index], index)
    drafter.norm.weight.copy_(_scale(decoder.norm, drafter.config.hidden_size))
    drafter.hidden_norm.weight.fill_(1.0)
    h = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    last = drafter.target_layer_ids.index(max(drafter.target_layer_ids))
    drafter.fc.weight[:, last * h : (last + 1) * h].copy_(torch.eye(h))
    states = _run(decoder, chosen, drafter.config.vocab_size)
    for layer, index in zip(drafter.layers, chosen, strict=True):
        _prove(layer, layers[index], *states[index], index)
    bare = [index for index in chosen if getattr(layers[index].self_attn, "q_norm", None) is None]
    said = f"warm start: target layers {', '.join(map(str, chosen))} copied, each gives the target's own output"
    windows = {_window(layers[index].self_attn) for index in chosen} - {None}
    said += f" within its window of {min(windows):,} tokens" if windows else ""
    return said + (", up to the query and key norms, which the target's layers do not have" if bare else "")


def _window(attention: nn.Module) -> int | None:
    """Context tokens that a target's layer sees; None: all. The row that proves a copy is shorter than most windows."""
    ours = "sliding_window" in vars(attention)
    return attention.sliding_window if ours else getattr(getattr(attention, "config", None), "sliding_window", None)


def _run(decoder: nn.Module, chosen: list[int], vocab_size: int) -> dict[int, tuple[Tensor, Tensor]]:
    """What the chosen layers of the target are given on a row of tokens, and what they give, each [1, n, H]."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def hook(index: int):
        def keep(module: nn.Module, args: tuple, kwargs: dict, output) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            found[index] = (states.clone(), (output[0] if isinstance(output, tuple) else output).clone())

        return keep

    hooks = [decoder.layers[index].register_forward_hook(hook(index), with_kwargs=True) for index in chosen]
    ids = torch.arange(1, _ROW + 1, device=decoder.get_input_embeddings().weight.device) * 7919 % vocab_size
    try:
        decoder(input_ids=ids[None], use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _prove(layer: DraftLayer, source: nn.Module, given: Tensor, wanted: Tensor, index: int) -> None:
    """Run the copy on what the target's layer was given, causally; the target's q/k norms are left out where it has none."""
    ours, dtype = layer.self_attn, wanted.dtype
    device = ours.q_proj.weight.device
    x, wanted = given.to(device).float(), wanted.to(device).float()
    config = ours.config
    rotary = rotary_tables(torch.arange(x.shape[1], device=device), config.head_dim, config.rope_theta)
    norms = ours.q_norm, ours.k_norm
    if getattr(source.self_attn, "q_norm", None) is None:
        ours.q_norm = ours.k_norm = nn.Identity()
    try:
        got = layer(x, None, rotary, _causal, True)
    finally:
        ours.q_norm, ours.k_norm = norms
    added = (wanted - x).norm(dim=-1).clamp_min(1e-12)
    difference = float(((got - wanted).norm(dim=-1) / added).median())
    rounding = torch.finfo(dtype).eps * float((wanted.norm(dim=-1) / added).median())
    if not difference <= _TOLERANCE.get(dtype, 0.03) + rounding:  # also true for NaN
        raise WarmStartError(
            f"target layer {index} ({type(source).__name__}) is no Llama- or Qwen3-style layer: its copy differs from it by "
            f"{difference:.2g} of what it adds (biases, other norms, activation or attention); use warm_start=False"
        )


def _causal(q: Tensor, k: Tensor, v: Tensor, context: None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _copy_layer(layer: nn.Module, source: nn.Module, index: int) -> None:
    attention = getattr(source, "self_attn", None)
    parts = ("input_layernorm", "post_attention_layernorm")
    lacking = [name for name in parts if not hasattr(source, name)]
    lacking += [] if hasattr(attention, "q_proj") and hasattr(attention, "o_proj") else ["self_attn with q_proj"]
    lacking += [] if hasattr(getattr(source, "mlp", None), "gate_proj") else ["mlp.gate_proj"]
    if lacking:
        raise WarmStartError(
            f"target layer {index} ({type(source).__name__}) is no dense Llama- or Qwen3-style attention layer, it has no "
            f"{' and no '.join(lacking)}; use warm_start=False"
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
    weight = next(norm.parameters(), torch.empty(0))  # some norms have none
    return norm(torch.full((1, size), 100.0, device=weight.device, dtype=weight.dtype))[0].float()


def _assign(ours: Tensor, theirs: Tensor, name: str) -> None:
    if ours.shape != theirs.shape:
        raise WarmStartError(
            f"warm start: {name} of the target is {list(theirs.shape)}, the drafter's is {list(ours.shape)}; derive the "
            "drafter's config with create_drafter_config(target_config), or use warm_start=False"
        )
    ours.copy_(theirs)
