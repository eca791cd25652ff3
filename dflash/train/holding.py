"""What lies in memory between two steps, named: measured from the tensors themselves, beside the estimate of `memory`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dflash.drafter.model import DFlashDrafter
from dflash.target.capture import Target

Named = Iterable[tuple[str, Iterable[Tensor]]]


def bytes_by_device(named: Named) -> dict[str, dict[str, int]]:
    """{device: {name: bytes}}; memory that two names share counts for the first."""
    found: dict[str, dict[str, int]] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensors in named:
        for tensor in tensors:
            storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            place = (tensor.device, storage.data_ptr())
            if place not in seen:
                seen.add(place)
                of_device = found.setdefault(str(tensor.device), {})
                of_device[name] = of_device.get(name, 0) + storage.nbytes()
    return found


def of_target(source: Any) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """A feature source: its target, and the features that it keeps in memory."""
    target = getattr(source, "target", None)
    if isinstance(target, Target):
        yield "target", [*target.model.parameters(), *target.model.buffers()]
    yield "kept features", list(getattr(source, "_memory", {}).values())


def of_drafter(drafter: DFlashDrafter, optimizer: Any) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """A drafter with its float32 masters and gradients, the moments, and what it has of the target's tables."""
    trained = [p for p in drafter.parameters() if p.requires_grad]
    yield "drafter", [*trained, *optimizer.masters, *optimizer.gradients]
    moments = [value for state in optimizer.adamw.state.values() for value in state.values() if torch.is_tensor(value)]
    yield "optimizer", [*moments, *(optimizer.muon.momenta if optimizer.muon else ())]
    yield "target's head", [*drafter.parameters(), *drafter.buffers()]
