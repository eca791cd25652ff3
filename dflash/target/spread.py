"""A target spread over several devices, layer after layer (`gpus_per_target`), for one that a single GPU cannot hold.

The embedding and the first layers lie on the first device, each next span of layers on the next, the final norm and the
head on the last (a head that is the embedding stays with it). accelerate moves states from device to device as they pass;
what is captured comes together on the first device, where a target that is not spread has it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dflash.devices import on
from dflash.errors import ConfigError
from dflash.target.capture import Target

_ROOM = 0.9  # share of a device's free memory that weights may take


def device_map(target: Target, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Module or parameter name -> device, complete and without overlaps; each device gets about as many bytes.

    Raises: ConfigError where there are more devices than layers.
    """
    decoder, layers = target.decoder, target.decoder.layers
    if len(devices) > len(layers):
        raise ConfigError(
            f"gpus_per_target={len(devices)} spreads the target over more devices than its {len(layers)} "
            f"layers; use gpus_per_target={len(layers)} or less"
        )
    head, embedding = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    last = [decoder.norm] if hasattr(decoder, "norm") else []
    last += [head] if head is not None and not tied else []
    places: dict[str, torch.device] = {}

    def place(module: nn.Module, name: str) -> None:
        if module is layers:
            return  # spread below
        if any(part is layers for part in module.modules()):
            prefix = f"{name}." if name else ""
            for child, part in module.named_children():
                place(part, prefix + child)
            for own, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                places[prefix + own] = devices[0]
        else:
            places[name] = devices[-1] if any(module is part for part in last) else devices[0]

    place(target.model, "")
    after = sum(map(_bytes, last))
    before = _bytes_on(target.model, places, devices[0]) - (after if len(set(devices)) == 1 else 0)
    name = next(name for name, module in target.model.named_modules() if module is layers)
    for index, device in enumerate(_spans([_bytes(layer) for layer in layers], before, after, devices)):
        places[f"{name}.{index}"] = device
    return places


def _spans(sizes: Sequence[int], before: int, after: int, devices: Sequence[torch.device]) -> list[torch.device]:
    """A device for each layer, in order, no device without one: a layer goes where its middle falls in the total."""
    total, count, found, at = before + sum(sizes) + after, len(devices), [], before
    for index, size in enumerate(sizes):
        share = int((at + size / 2) / total * count)
        latest, earliest = (found[-1] + 1 if found else 0), count - (len(sizes) - index)
        found.append(max(min(share, latest, count - 1), earliest, found[-1] if found else 0))
        at += size
    return [devices[place] for place in found]


def shard_target(target: Target, devices: Sequence[torch.device]) -> Target:
    """Spread a target, which lies on the CPU, over devices in place, and check it there.

    Raises: ConfigError before anything is moved, where a device has no room for its part; TargetError from the self-test.
    """
    from accelerate import dispatch_model

    plan = device_map(target, devices)
    for device in dict.fromkeys(devices):
        if device.type != "cuda":
            continue
        need, free = _bytes_on(target.model, plan, device), torch.cuda.mem_get_info(device)[0]
        if need > _ROOM * free:
            raise ConfigError(
                f"{device} has {free / 2**30:.1f} GiB free, its part of the target takes {need / 2**30:.1f}; "
                f"spread the target over more GPUs (gpus_per_target, now {len(devices)}), or keep drafters "
                "off them (gpus, target_gpus)"
            )
    target.fast = None  # it reads the layers where the embedding lies
    target.why_plain = "the target is spread over devices"
    names = {device: device.index if device.type == "cuda" else "cpu" for device in devices}
    dispatch_model(
        target.model, {part: names[device] for part, device in plan.items()}, main_device=names[devices[0]], force_hooks=True
    )
    with on(devices[0]):
        target.self_test()
    return target


def _is_tensor(model: nn.Module, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in {**model.get_submodule(parent)._parameters, **model.get_submodule(parent)._buffers}


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _bytes_on(model: nn.Module, plan: dict[str, torch.device], device: torch.device) -> int:
    """Bytes of the parts of a plan that lie on a device, each tensor once."""
    seen: dict[int, int] = {}
    for name, place in plan.items():
        if place != device:
            continue
        if _is_tensor(model, name):
            parent, _, leaf = name.rpartition(".")
            tensors = [getattr(model.get_submodule(parent), leaf)]
        else:
            part = model.get_submodule(name)
            tensors = [*part.parameters(), *part.buffers()]
        seen |= {id(tensor): tensor.nbytes for tensor in tensors}
    return sum(seen.values())
