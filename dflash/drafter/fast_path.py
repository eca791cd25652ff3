"""The drafter's training forward on a GPU, over `kernels`: the same numbers as the plain modules, up to rounding.

What it leaves out, beside the memory traffic that the kernels save:
  * the first layer's norm and projections of mask tokens: 31 of 32 slots hold the same row, so A + 1 rows do (under a
    convolution of K taps the first K + 1 slots of each block);
  * the last layer's output projection and MLP, and the head, for slots that weigh nothing (under a convolution the head
    alone);
  * five context projections: one product makes the keys and values of all layers, and no concatenated copy of the
    context exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.drafter import kernels

if TYPE_CHECKING:
    from dflash.drafter.attention import PackMask
    from dflash.drafter.blocks import Blocks, PackContext
    from dflash.drafter.layers import Rotary
    from dflash.drafter.model import DFlashDrafter

CHUNK_ROWS = 3328  # 26 x 20 output tiles of the gradient's product: 3.94 waves of 132 multiprocessors
MIN_HEAD_DIM = 16


def fits(device: torch.device, head_dim: int) -> bool:
    """True when the kernels run on `device` and take heads of this size."""
    return kernels.usable(device) and head_dim >= MIN_HEAD_DIM and head_dim & (head_dim - 1) == 0


def applies(drafter: DFlashDrafter) -> bool:
    """True when the kernels run where the drafter lives and take its shape and dtype."""
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    return (
        fits(device, drafter.config.head_dim)
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


def draft_rows(drafter: DFlashDrafter, blocks: Blocks, context: PackContext, mask: PackMask, rows: Tensor) -> Tensor:
    """Final-normed hidden states of the draft slots `rows` alone: [R, H]; see `DFlashDrafter.draft`."""
    from dflash.drafter.kernels.blocks import Leave, Mlp, Projection, ProjectQKV, TakeRows
    from dflash.drafter.kernels.pointwise import AddNorm

    slots = drafter.block_size
    distinct, row_map, lead = _distinct_rows(drafter, blocks)
    seen = _context_keys_values(drafter, context.features[0].to(drafter.fc.weight.dtype))
    rotaries = _half(drafter._rotary(context.positions)), _half(drafter._rotary(blocks.slot_positions(slots)))

    x, delta = distinct.index_select(0, row_map), None
    for i, (layer, window) in enumerate(zip(drafter.layers, drafter.windows, strict=True)):
        a, norm, last = layer.self_attn, layer.input_layernorm, i == len(drafter.layers) - 1
        entering, leaving_base = _around(layer.attention_conv)
        weights = (norm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.q_norm.weight, a.k_norm.weight)
        tensors = (*seen[2 * i : 2 * i + 2], *weights, *entering)
        if i == 0:
            how = Projection(*rotaries, norm.eps, slots, row_map, lead)
            _, q, k, v, leaving = ProjectQKV.apply(how, distinct, None, *tensors)
        else:
            x, q, k, v, leaving = ProjectQKV.apply(Projection(*rotaries, norm.eps, slots), x, delta, *tensors)
        out = mask.over(q, k, v, window)  # [1, Nq, Q, D]
        out = out[0].transpose(0, 1).reshape(out.shape[2], -1)  # [Q, Nq * D]
        if last and not entering:  # a convolution looks at the slots between, too
            x, out = TakeRows.apply(x, rows), TakeRows.apply(out, rows)
        wo, mlp, norm = a.o_proj.weight, layer.mlp, layer.post_attention_layernorm
        out = Leave.apply(out, wo, *leaving_base, leaving, slots) if entering else F.linear(out, wo)
        entering, leaving_base = _around(layer.mlp_conv)
        weights = (norm.weight, *(mlp[name].weight for name in ("gate_proj", "up_proj", "down_proj")))
        x, delta = Mlp.apply(x, out, norm.eps, slots, *weights, *entering, *leaving_base)
        if last and entering:
            x, delta = TakeRows.apply(x, rows), TakeRows.apply(delta, rows)
    return AddNorm.apply(x, delta, drafter.norm.weight, drafter.norm.eps)[1]


def _around(convolution: nn.Module) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights of a convolution's entering side and the base of its leaving side; nothing for a layer without one."""
    if not hasattr(convolution, "base_kernel"):
        return (), ()
    entering, leaving = convolution.base_kernel.unbind()
    return (entering, convolution.kernel_projection.weight), (leaving,)


def _distinct_rows(drafter: DFlashDrafter, blocks: Blocks) -> tuple[Tensor, Tensor, int]:
    """What the first layer has to work on, see `kernels.blocks.Projection`: the embedded rows that differ, the row of each
    slot [Q], and how many of a block's slots they are."""
    slots, count, taps = drafter.block_size, blocks.tokens.shape[0], drafter.config.conv_kernel_size
    at = torch.arange(count * slots, device=blocks.tokens.device)
    block, slot = at // slots, at % slots
    if drafter.config.has_convolution:
        lead = min(slots, taps + 1)
        tokens, row_map = blocks.slot_tokens(lead, drafter.mask_token_id), block * lead + slot.clamp(max=lead - 1)
    else:
        lead, row_map = 1, torch.where(slot == 0, block, count)
        tokens = torch.cat([blocks.tokens, torch.full_like(blocks.tokens[:1], drafter.mask_token_id)])
    return F.embedding(tokens, drafter.embed_tokens), row_map, lead
