"""How much memory each device of a run will need, before anything is loaded, and the refusal where it is not there.

Weights, optimizer and buffers are exact sums; what a pass works in (activations) is a bound from the sizes of its
largest tensors, and is shown apart from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from dflash.devices import compute_dtype
from dflash.drafter.config import DrafterConfig
from dflash.drafter.fast_path import CHUNK_ROWS
from dflash.drafter.fp8_head import memory_bytes as fp8_head_bytes
from dflash.drafter.losses import DEFAULT_CHUNK_ROWS, peak_bytes
from dflash.errors import ConfigError
from dflash.runs.environment import memory_total
from dflash.target.loading import is_served
from dflash.train.settings import RunConfig
from dflash.train.topology import Topology

GIB = 2.0**30
CUDA_CONTEXT = int(0.7 * GIB)  # of a process on a device: driver, kernels, cuBLAS workspaces
_HEADROOM = 0.02  # share of a device left to the allocator's rounding


class MemoryEstimateError(ConfigError):
    """A device does not have what the run will need."""


@dataclass
class DeviceMemory:
    """Bytes by purpose, and what the device has (None: unknown)."""

    parts: dict[str, int] = field(default_factory=dict)
    have: int | None = None

    def add(self, name: str, count: float) -> None:
        self.parts[name] = self.parts.get(name, 0) + int(count)

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.have is None or self.need <= self.have * (1 - _HEADROOM)

    @property
    def left(self) -> int:
        """Bytes that nothing asks for; 0 where it is unknown what the device has."""
        return 0 if self.have is None else max(0, int(self.have * (1 - _HEADROOM)) - self.need)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {count / GIB:.1f}" for name, count in self.parts.items() if count >= 0.05 * GIB)
        of = "" if self.have is None else f" of {self.have / GIB:.1f}"
        return f"about {self.need / GIB:.1f}{of} GiB" + (f" ({shown})" if shown else "")


WHOLE_VOCABULARY = (
    "the memory is that of the whole vocabulary; with draft_vocab=0 it is less, and known once the text is read"
)


def count_parameters(target_config: Any) -> tuple[int, int]:
    """Weights of a target and those of its input embedding, by building it without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target_config)
    return sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()


def estimate(
    config: RunConfig,
    drafter_config: DrafterConfig,
    target_config: Any,
    topology: Topology,
    have: Mapping[torch.device, int | None] = MappingProxyType({}),
) -> dict[torch.device, DeviceMemory]:
    """Memory by device.

    Args:
        target_config: the target's text config. have: bytes that devices have (None: unknown); others are asked.
    """
    found = {device: DeviceMemory() for device in topology.devices}
    captured = len(config.target.target_layers or ()) or min(config.target.num_captured, target_config.num_hidden_layers)
    hidden, tokens = drafter_config.hidden_size, config.data.pack_length
    soft = bool(config.train.soft_labels)
    target_dtype = compute_dtype(config.target.target_dtype, topology.targets[0][0])
    row = (captured + soft) * hidden  # features of one token that cross
    served = is_served(config.target.target)  # then its embedding and head are all that is here
    weights = 2 * drafter_config.vocab_size * hidden if served else count_parameters(target_config)[0]
    capture = 0 if served else _capture_bytes(target_config, tokens, target_dtype.itemsize)
    whole = {devices[0] for devices in topology.targets if len(devices) == 1}  # devices that hold a target as a whole
    on_cpu = 0
    for devices in topology.targets:
        for device in devices:
            copies = device.type != "cpu" or on_cpu == 0  # targets on the CPU share their weights
            on_cpu += device.type == "cpu"
            found[device].add("target", copies * weights * target_dtype.itemsize / len(devices))
            found[device].add("capture", capture + 2 * tokens * (captured + 1) * hidden * target_dtype.itemsize)
    for device in topology.drafters:
        dtype = compute_dtype(config.train.dtype, device)
        parameters, size = drafter_config.parameter_count(captured), dtype.itemsize
        here, fused = found[device], device.type == "cuda"
        graph = config.train.step_graph is True and fused
        step = _step_bytes(config, drafter_config, captured, size, fused)
        sharded = config.runtime.drafter_parallel == "fsdp2"
        shards = len(topology.drafters) if sharded else 1
        if sharded:
            here.add("drafter", parameters * (4 + 4) / shards)  # float32 weights and gradients
            here.add("gathered", _gathered_bytes(drafter_config, parameters, captured, size))
        elif topology.serial and fused:  # gradients of one pack come when its activations go; those of several stay
            sums = 4 * parameters
            here.add(
                "drafter", parameters * (size + (0 if size == 4 else 4)) + (graph or config.train.packs_per_step > 1) * sums
            )
            step = max(step, capture + sums)
        else:
            here.add("drafter", parameters * (size + size + (0 if size == 4 else 4) + 4))  # weights, grads, masters, grads
        here.add("optimizer", 8 * parameters / shards)
        drafted = drafter_config.draft_vocab_size or drafter_config.vocab_size
        shared = device in whole and dtype == target_dtype  # then the drafter reads the target's own tables
        tables = 0 if shared else drafter_config.vocab_size + drafted
        here.add("target's head", (drafted if shared and drafter_config.draft_vocab_size else tables) * hidden * size)
        if config.drafter.head_precision == "fp8":
            here.add("float8 head", fp8_head_bytes(drafted, hidden))
        if not topology.serial:
            here.add("queue", config.runtime.queue_depth * tokens * row * target_dtype.itemsize)
        one_by_one = topology.serial and not graph  # a graph has its memory for itself, with a copy of the features
        here.add("activations", max(0, step - capture) if one_by_one else step)
        if graph:
            here.add("graph", tokens * row * size)
    for device, memory in found.items():
        if device.type == "cuda":
            memory.add("cuda", CUDA_CONTEXT)
        memory.have = have[device] if device in have else _available(device)
    return found


def refuse_what_does_not_fit(memory: Mapping[torch.device, DeviceMemory], config: RunConfig) -> None:
    """Raises MemoryEstimateError for the first device that has less than it needs."""
    for device, found in memory.items():
        if found.fits:
            continue
        largest = max(found.parts, key=found.parts.get)
        raise MemoryEstimateError(
            f"{device} needs {found}; the most is {largest}. {_KNOBS.get(largest, _KNOBS['activations'])} (now: pack_length "
            f"{config.data.pack_length}, max_anchors {config.drafter.max_anchors}, block_size {config.drafter.block_size}, "
            f"queue_depth {config.runtime.queue_depth}, gpus_per_target {config.runtime.gpus_per_target})"
        )


_KNOBS = {
    "target": "Spread a target over more GPUs (gpus_per_target), keep drafters off this device (gpus, target_gpus), or "
    "take a smaller target",
    "capture": "Use a shorter pack_length or a smaller num_captured",
    "queue": "Use a smaller queue_depth or a shorter pack_length",
    "activations": "Use fewer max_anchors, a smaller block_size or a shorter pack_length",
    "gathered": "Use fewer drafter_layers, or keep the target off this device (gpus, target_gpus)",
    **dict.fromkeys(
        ("drafter", "optimizer"),
        "Use fewer drafter_layers, shard the drafter over its GPUs (drafter_parallel=fsdp2 with "
        "launcher=torchrun), or keep the target off this device (gpus, target_gpus)",
    ),
    "float8 head": "Set head_precision=same, or use a smaller draft_vocab",
    "target's head": "Use a smaller draft_vocab, or keep the target off this device (gpus, target_gpus)",
}


def _available(device: torch.device) -> int | None:
    """Bytes that this process may still get, and has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return memory_total()


def _gathered_bytes(drafter: DrafterConfig, parameters: int, captured: int, size: int) -> int:
    """What a rank holds beside its shards: the parts outside the layers and two layers, each with its gradient and the
    float32 copy that is sent."""
    outside = captured * drafter.hidden_size**2 + drafter.selector_parameters()
    layer = (parameters - outside) // drafter.num_hidden_layers
    return (outside + min(2, drafter.num_hidden_layers) * layer) * (2 * size + 4)


def _capture_bytes(target_config: Any, tokens: int, size: int) -> int:
    """What one layer of the target works in, at the padded size of a pack's documents."""
    padded = tokens * 4 // 3
    hidden = target_config.hidden_size
    inner = getattr(target_config, "intermediate_size", None) or 4 * hidden
    return padded * (6 * hidden + 3 * inner) * size


def _step_bytes(config: RunConfig, drafter: DrafterConfig, captured: int, size: int, fused: bool) -> int:
    """Tensors kept for the backward pass of one pack, and the logits of one chunk.

    A plain layer keeps about 4 rows of H, 3 of the MLP's width and the heads' q, k, v and output for each draft slot, and
    keys and values for each context token; a fused one makes norms and products again.
    """
    slots, tokens = config.drafter.max_anchors * config.drafter.block_size, config.data.pack_length
    rows = slots - config.drafter.max_anchors  # slot 0 of a block predicts nothing
    h = drafter.hidden_size
    q, kv = drafter.num_attention_heads * drafter.head_dim, drafter.num_key_value_heads * drafter.head_dim
    inner = drafter.intermediate_size
    layer = 2 * h + 2 * inner + 4 * q + 3 * kv if fused else 4 * h + 3 * inner + 2 * q + 2 * kv
    layer = slots * layer + tokens * 4 * kv
    if drafter.has_convolution:  # two more rows of H (fused: the sublayers' outputs) and the dynamic coefficients
        taps = drafter.conv_kernel_size
        layer += slots * ((2 if fused else 6 + 4 * taps) * h + 4 * taps * h // drafter.conv_group_size)
    chunk = CHUNK_ROWS if fused else DEFAULT_CHUNK_ROWS
    teachers = tokens * -math.expm1(-rows / tokens) * min(1, chunk / max(1, rows))  # of a chunk: blocks overlap, at random
    teachers = int(teachers) * bool(config.train.soft_labels)
    head = peak_bytes(rows, drafter.draft_vocab_size or drafter.vocab_size, chunk, size, teachers, fused)
    if drafter.has_selector:  # codebook rows of the candidates, their scores and gradients
        head += rows * drafter.selector_top_k * (2 * drafter.selector_rank * size + 32)
    return size * (drafter.num_hidden_layers * layer + 2 * tokens * h + 4 * slots * h) + head
