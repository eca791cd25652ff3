"""Triton kernels of the drafter's training step. Each is tested against its plain torch counterpart.

  head_loss   softmax, KL or cross entropy, argmax and gradient over the logits of a chunk of rows, in place
  pointwise   RMSNorm with its residual, q/k norm with rotary, SwiGLU
  attention   block-diffusion attention, context and own block, without a mask tensor

They are launched eagerly: nothing here is traced or compiled by torch, so none of torch.compile's hazards apply.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


@cache
def triton_installed() -> bool:
    """True when Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device | str) -> bool:
    """True when the kernels run on `device`: Triton is there and the device is CUDA (or Triton's interpreter is on)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return triton_installed() and (torch.device(device).type == "cuda" or interpreted)
