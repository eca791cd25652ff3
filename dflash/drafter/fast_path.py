"""The drafter's training forward on a GPU, over `kernels`: the same numbers as the plain modules, up to rounding.

What it leaves out, beside the memory traffic that the kernels save:
  * the first layer's norm and projections of mask tokens: 31 of 32 slots hold the same row, so A + 1 rows do;
  * the last layer's output projection and MLP, and the head, for slots that weigh nothing;
  * five context projections: one product makes the keys and values of all layers, and no concatenated copy of the
    context exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter import kernels
from dflash.drafter.attention import attention

if TYPE_CHECKING:
    from dflash.drafter.attention import AttentionMask
    from dflash.drafter.layers import Rotary
    from dflash.drafter.model import DFlashDrafter

CHUNK_ROWS = 3328  # 26 x 20 output tiles of the gradient's product: 3.94 waves of 132 multiprocessors
MIN_HEAD_DIM = 16


def applies(drafter: DFlashDrafter) -> bool:
    """True when the kernels run where the drafter lives and take its shape and dtype."""
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    d = drafter.config.head_dim
    return (
        kernels.usable(device)
        and d >= MIN_HEAD_DIM
        and d & (d - 1) == 0
        and not torch.is_autocast_enabled(device.type)
        and all(p.dtype == dtype and p.device == device for p in drafter.parameters())
    )


def _half(rotary: Rotary) -> Rotary:
    """Both halves of a rotary table are equal; the kernels read one."""
    return tuple(table[:, : table.shape[1] // 2].contiguous() for table in rotary)


def _context_keys_values(drafter: DFlashDrafter, features: Tensor) -> tuple[Tensor, ...]:
    """Raw K and V of the context for all layers: 2 L tensors [T, Nkv * D], layer 0's K and V, layer 1's, and so on."""
    from dflash.drafter.kernels.pointwise import Norm

    context = Norm.apply(F.linear(features, drafter.fc.weight), drafter.hidden_norm.weight, drafter.hidden_norm.eps)
    projections = [p.weight for layer in drafter.layers for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    return F.linear(context, torch.cat(projections)).split(projections[0].shape[0], 1)


def denoise_rows(
    drafter: DFlashDrafter,
    features: Tensor,
    tokens: Tensor,
    context_positions: Tensor,
    draft_positions: Tensor,
    masks: list[AttentionMask],
    backend: str,
    rows: Tensor,
) -> Tensor:
    """Final-normed hidden states of the draft slots `rows`.

    Args:
        features: [T, N*H]. tokens: [A + 1], the anchors' tokens and the mask token. context_positions [T] and
            draft_positions [Q]: for the rotary. masks: one per layer. rows: [R] distinct indices of draft slots.

    Returns: [R, H].
    """
    from dflash.drafter.kernels.blocks import Mlp, ProjectQKV, TakeRows
    from dflash.drafter.kernels.pointwise import AddNorm

    slots = drafter.block_size
    at = torch.arange(draft_positions.shape[0], device=tokens.device)
    row_map = torch.where(at % slots == 0, at // slots, tokens.shape[0] - 1)  # [Q] -> row of `distinct`
    distinct = F.embedding(tokens, drafter.embed_tokens)  # [A + 1, H]
    context = _context_keys_values(drafter, features)
    context_rotary, rotary = _half(drafter._rotary(context_positions)), _half(drafter._rotary(draft_positions))

    x, delta = distinct.index_select(0, row_map), None
    for i, (layer, mask) in enumerate(zip(drafter.layers, masks, strict=True)):
        a, norm = layer.self_attn, layer.input_layernorm
        weights = (norm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.q_norm.weight, a.k_norm.weight)
        rest = (context[2 * i], context[2 * i + 1], context_rotary, rotary, norm.eps)
        if i == 0:
            _, q, k, v = ProjectQKV.apply(distinct, None, *weights, *rest, row_map, slots)
        else:
            x, q, k, v = ProjectQKV.apply(x, delta, *weights, *rest, None, slots)
        out = attention(q, k, v, mask, backend, drafter.max_dense_bytes)  # [1, Nq, Q, D]
        out = out[0].transpose(0, 1).reshape(out.shape[2], -1)  # [Q, Nq * D]
        if i == len(drafter.layers) - 1:
            x, out = TakeRows.apply(x, rows), TakeRows.apply(out, rows)
        mlp, norm = layer.mlp, layer.post_attention_layernorm
        x, delta = Mlp.apply(
            x,
            F.linear(out, a.o_proj.weight),
            norm.weight,
            mlp["gate_proj"].weight,
            mlp["up_proj"].weight,
            mlp["down_proj"].weight,
            norm.eps,
        )
    return AddNorm.apply(x, delta, drafter.norm.weight, drafter.norm.eps)[1]
