"""The parts of the drafter's stack: rotary embedding, RMS norm, attention from draft slots to [context | slots], layer.

The stack is Qwen3's. Shape letters are those of the design: Q draft slots, H hidden, Nq / Nkv heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.drafter.attention import Attend
from dflash.drafter.config import DrafterConfig
from dflash.drafter.convolution import LocalConvolution, NoConvolution

Rotary = tuple[Tensor, Tensor]  # cos, sin, each [positions, D] float32


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Cosines and sines for integer positions [P], each [P, D] float32 (rotate-half layout)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * (theta**-exponent)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [1, heads, P, D] by the tables of its positions."""
    cos, sin = rotary
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm with a plain weight, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class DraftAttention(nn.Module):
    """Queries from the draft slots; keys and values from context and draft slots through the same projections."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(h, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        """[1, P, heads * D] -> [1, heads, P, D]."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """K and V of x [1, P, H]: each [1, Nkv, P, D], keys normed and rotated."""
        k = apply_rotary(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return k, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, context_kv: tuple[Tensor, Tensor], rotary: Rotary, attend: Attend) -> Tensor:
        q = apply_rotary(self.q_norm(self._heads(self.q_proj(x))), rotary)  # [1, Nq, Q, D]
        k, v = self.keys_values(x, rotary)
        out = attend(q, k, v, context_kv)  # [1, Nq, Q, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    """Pre-norm transformer layer over the draft slots."""

    def __init__(self, config: DrafterConfig, block_size: int):
        super().__init__()
        h, m = config.hidden_size, config.intermediate_size

        def around() -> nn.Module:
            if not config.has_convolution:
                return NoConvolution()
            return LocalConvolution(h, config.conv_kernel_size, config.conv_group_size, block_size)

        self.attention_conv, self.mlp_conv = around(), around()
        self.input_layernorm = RMSNorm(h, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(h, config.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(h, m, bias=False),
                "up_proj": nn.Linear(h, m, bias=False),
                "down_proj": nn.Linear(m, h, bias=False),
            }
        )

    def forward(self, x: Tensor, context: tuple[Tensor, Any], rotary: Rotary, attend: Attend, cached: bool) -> Tensor:
        """x: [1, Q, H]. The context is given as keys and values (`cached`), or as its states [1, T, H] with their rotary
        tables: then all that uses this layer's weights happens inside this call, when they are there if sharded."""
        context_kv = context if cached else self.self_attn.keys_values(*context)
        y, leaving = self.attention_conv.enter(self.input_layernorm(x))
        x = x + self.attention_conv.leave(self.self_attn(y, context_kv, rotary, attend), leaving)  # [1, Q, H]
        y, leaving = self.mlp_conv.enter(self.post_attention_layernorm(x))
        z = self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))
        return x + self.mlp_conv.leave(z, leaving)
