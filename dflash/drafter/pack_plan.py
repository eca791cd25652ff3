"""All that a training forward reads of a pack beside its features: made on the host, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash.drafter.head_plan import HeadPlan
from dflash.drafter.masks import AnchorSet

_ALIGN = 16  # bytes


@dataclass(frozen=True)
class PackPlan:
    """input_ids, position_ids and documents: [T] int64. anchors: where blocks start. rows: what goes through the head, in
    chunks; spans: the range of teacher rows that each chunk uses."""

    input_ids: Tensor
    position_ids: Tensor
    documents: Tensor
    anchors: AnchorSet
    rows: HeadPlan
    spans: tuple[tuple[int, int], ...]

    def to(self, device: torch.device | str) -> PackPlan:
        """On `device`, copied at once and without a sync."""
        device = torch.device(device)
        there = [t for t in _tensors(self) if t.device == device]
        if device.type != "cuda" or there:  # nothing to gain, or some of it is there already
            return _with(self, (t.to(device) for t in _tensors(self)))
        return self.views(self.bytes(pinned=True).to(device, non_blocking=True))

    def bytes(self, pinned: bool = False) -> Tensor:
        """Its CPU tensors one after another, uint8."""
        end = 0
        for t in _tensors(self):
            end += -(-t.nbytes // _ALIGN) * _ALIGN
        flat = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        for into, t in zip(_tensors(self.views(flat)), _tensors(self), strict=True):
            into.copy_(t)
        return flat

    def views(self, flat: Tensor) -> PackPlan:
        """A plan of the same sizes over the memory of `flat`, which holds what `bytes` gives."""
        parts, start = [], 0
        for t in _tensors(self):
            parts.append(flat[start : start + t.nbytes].view(t.dtype).view(t.shape))
            start += -(-t.nbytes // _ALIGN) * _ALIGN
        return _with(self, iter(parts))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors of a dataclass and of those in it, in the order of their fields."""
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            yield part
        elif is_dataclass(part):
            yield from _tensors(part)


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors in their places."""
    changed = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            changed[field.name] = next(tensors)
        elif is_dataclass(part):
            changed[field.name] = _with(part, tensors)
    return replace(value, **changed)
