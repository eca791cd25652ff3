"""Out of memory, said in full: which device, what it holds, and which settings make it hold less."""

from __future__ import annotations

import torch

from dflash.errors import DFlashError, worker_of
from dflash.runs.tables import Table
from dflash.train.memory import GIB, DeviceMemory
from dflash.train.resolved import ResolvedRun
from dflash.train.settings import RunConfig
from dflash.train.topology import Topology

_KNOBS = (  # setting, what it does, by falling effect on a drafter's device
    ("drafter.max_anchors", "fewer blocks a pack: activations and logits shrink with it"),
    ("drafter.block_size", "fewer slots a block"),
    ("data.pack_length", "shorter packs: features, keys and values"),
    ("drafter.drafter_layers", "fewer weights, gradients, masters and moments (16 bytes each)"),
    ("drafter.draft_vocab", "a smaller head: fewer logits"),
    ("runtime.queue_depth", "fewer packs of features in flight on each drafter's device"),
    ("train.cache_gib", "less memory for kept features"),
    ("runtime.gpus_per_target", "a target spread over more GPUs"),
)


class DeviceOutOfMemory(DFlashError):
    """A device of a run had no memory left."""


def explained(error: BaseException, resolved: ResolvedRun, worker: str | None = None) -> BaseException:
    """`error`, or for an out-of-memory error of torch a DeviceOutOfMemory that tells more, with it as its cause."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    worker = worker or worker_of(error)
    device = device_of(worker, resolved.topology)
    told = DeviceOutOfMemory(
        f"{worker} on {device} is out of memory: {_first_line(error)}\n"
        f"{memory_table(device, resolved.memory.get(device))}\n{knobs(resolved.config)}"
    )
    told.dflash_worker = worker
    told.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def device_of(worker: str, topology: Topology) -> torch.device:
    """Where a worker ("drafter[1]", "target[0]", "main") works."""
    kind, _, rest = worker.partition("[")
    index = int(rest.rstrip("]")) if rest.rstrip("]").isdigit() else 0
    devices = {"drafter": topology.drafters, "target": tuple(t[0] for t in topology.targets)}.get(kind, topology.drafters)
    return devices[min(index, len(devices) - 1)]


def memory_table(device: torch.device, estimated: DeviceMemory | None) -> str:
    """What the device holds now, and what the run was estimated to need there, in GiB."""
    rows: list[tuple[str, float]] = []
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        rows += [
            ("in tensors", held),
            ("kept by torch, free inside", reserved - held),
            ("other processes and context", total - free - reserved),
            ("free", free),
            ("total", total),
            ("peak in tensors", torch.cuda.max_memory_allocated(device)),
        ]
    if estimated is not None:
        rows += [(f"estimated: {name}", count) for name, count in sorted(estimated.parts.items(), key=lambda i: -i[1])]
        rows.append(("estimated in all", estimated.need))
        if estimated.have is not None and device.type != "cuda":
            rows.append(("total", estimated.have))
    return f"memory of {device} (GiB)\n{Table([(name, f'{count / GIB:.3f}') for name, count in rows])}"


def knobs(config: RunConfig) -> str:
    """The settings that lower memory, with their values now."""
    lines = []
    for path, effect in _KNOBS:
        section, name = path.split(".")
        lines.append(f"  {name} (now {getattr(getattr(config, section), name)}): {effect}")
    return "what helps, most first:\n" + "\n".join(lines)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
