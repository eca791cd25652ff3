"""The head of a target alone, for an export that stores rows of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dflash.target.loading import find_embedding_weights, resolve_source
from dflash.target.random_weights import random_head


def target_head(name: str) -> Tensor:
    """The target's head [V, H], read from its files where they can be read without building the model."""
    source = resolve_source(name)
    if source.random:
        return random_head(name, torch.device("cpu"), torch.bfloat16).head_weight
    if source.gguf_file is None and Path(source.location).is_dir():
        return find_embedding_weights(source.location)[1]
    from dflash.target.capture import load_target

    return load_target(name, "cpu", self_test=False).head_weight
