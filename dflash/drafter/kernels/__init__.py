"""Triton kernels of the drafter's training step. Each is tested against its plain torch counterpart.

  head_loss   softmax, loss, argmax and gradient over the logits of a chunk of rows, in place
  pointwise   RMSNorm with its residual, q/k norm with rotary, SwiGLU
  attention   block-diffusion attention, context and own block, without a mask tensor

They are launched eagerly: nothing here is traced or compiled by torch, so none of torch.compile's hazards apply.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

ROWS = 128  # of an attention tile: query heads of a key head times slots of neighbouring blocks


@cache
def triton_installed() -> bool:
    """True when Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device | str) -> bool:
    """True when the kernels run on `device`: Triton is there and the device is CUDA (or Triton's interpreter is on)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return triton_installed() and (torch.device(device).type == "cuda" or interpreted)


def supported(heads: int, kv_heads: int, head_dim: int, block_size: int) -> bool:
    """True where the attention kernels' tiling works out (`kernels.attention`); needs no Triton to be asked."""
    group = heads // kv_heads
    rows = group * block_size
    own = block_size * max(1, ROWS // max(rows, 1))
    return (
        all(x & (x - 1) == 0 for x in (group, block_size, head_dim))
        and rows <= ROWS
        and own >= 16
        and (16 <= head_dim <= 128)
    )
