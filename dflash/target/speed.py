"""How fast a target runs here, and whether a hybrid one runs without its fast kernels.

A hybrid target without `flash-linear-attention` takes transformers' reference path: right, but much slower, and
only a log line says so. The preflight measures it and reports once what to change.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass

import torch

from dflash.devices import synchronize
from dflash.target.capture import Target


@dataclass(frozen=True)
class TargetSpeed:
    """Measured capture speed. `fast_kernels` is None for a target that has no use for them."""

    tokens_per_second: float
    tokens: int
    fast_kernels: bool | None
    message: str | None


def has_fast_kernels() -> bool:
    """Whether the package with the linear-attention kernels is installed (they need a GPU)."""
    return importlib.util.find_spec("fla") is not None


def preflight(target: Target, tokens: int = 1024, repeats: int = 2) -> TargetSpeed:
    """Time `capture` on one document of `tokens` random ids, after one warm-up.

    `message` is None unless the target is hybrid and runs on the reference path.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.embed_weight.shape[0], (1, tokens), generator=generator)
    rate = 0.0
    for attempt in range(repeats + 1):
        synchronize(target.device)
        start = time.perf_counter()
        target.capture(ids)
        synchronize(target.device)
        if attempt:
            rate = max(rate, tokens / (time.perf_counter() - start))
    if not target.is_hybrid:
        return TargetSpeed(rate, tokens, None, None)
    fast = has_fast_kernels() and target.device.type == "cuda"
    kinds = target.config.layer_types
    linear = sum(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds)
    cure = (
        "install it for the fast kernels: pip install flash-linear-attention"
        if target.device.type == "cuda"
        else "its kernels need a GPU"
    )
    message = (
        f"target '{target.source}' is hybrid ({linear} of {len(kinds)} layers keep a recurrent state) and runs "
        f"without flash-linear-attention at {rate:,.0f} tokens/s on {target.device}; {cure}. Features are the "
        "same either way"
    )
    return TargetSpeed(rate, tokens, fast, None if fast else message)
