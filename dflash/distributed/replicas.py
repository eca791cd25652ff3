"""Copies of a drafter or a target on other devices, and gradients summed over the copies.

The float32 gradients of a replica are views of one flat buffer, so a step's reduction is one operation: an NCCL
all-reduce over the GPUs of this process where torch has it, otherwise a copy to the first device, a sum in the order
of the replicas, and a copy back. Both leave bit-identical sums everywhere, so weights stay bit-equal.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash.errors import DFlashError
from dflash.target.capture import Target
from dflash.train.step import Replica

_ALIGN = 64  # elements; every gradient starts on a 256-byte boundary, as an allocation of its own would
_NCCL_PIECE = 1 << 30  # elements of one all-reduce: torch counts them in 32 bits
_PIECE = 64 << 20  # elements copied at once where NCCL is absent: 256 MiB of staging


class ReplicasDivergedError(DFlashError):
    """Replicas that started equal and got equal gradients no longer hold equal weights."""


def copy_module(module: nn.Module, device: torch.device, share: bool = False) -> nn.Module:
    """The same module on another device, without a second copy on the first.

    Args:
        share: keep parameters and buffers that already are on `device` instead of copying them.
    """

    def move(tensor: Tensor, own: bool) -> Tensor:
        return tensor.detach() if not own and tensor.device == device else tensor.detach().to(device, copy=True)

    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(move(parameter, not share), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = move(buffer, False)
    generator = getattr(module, "anchor_generator", None)
    if generator is not None:
        memo[id(generator)] = generator
    return copy.deepcopy(module, memo)


def make_replicas(first: Replica, devices: Sequence[torch.device]) -> list[Replica]:
    """`first` and a copy of its drafter for every further device; `devices[0]` is where `first` is."""
    return [first, *(Replica(copy_module(first.drafter, device), first.options) for device in devices[1:])]


def copy_target(target: Target, device: torch.device) -> Target:
    """The same target on another device; on the same one it shares the weights."""
    model = copy_module(target.model, device, share=True)
    for module in model.modules():
        module._forward_hooks.clear()  # those of the first target
    copied = Target(model, target.tokenizer, target.layer_ids, target.source, target.max_batch_tokens, target.note)
    if target.fast is not None:
        from dflash.target import fast_capture as fast_target

        fast_target.attach(copied, required=True)
    return copied


def flatten_gradients(replica: Replica) -> Tensor:
    """Make the optimizer's gradients views of one buffer, which is returned ([elements] float32, zeros)."""
    masters = replica.optimizer.masters
    starts, end = [], 0
    for master in masters:
        starts.append(end)
        end += -(-master.numel() // _ALIGN) * _ALIGN
    replica.optimizer.gradients = []  # free the old ones first
    flat = torch.zeros(end, dtype=torch.float32, device=replica.device)
    replica.optimizer.gradients = [flat[s : s + m.numel()].view_as(m) for s, m in zip(starts, masters, strict=True)]
    return flat


class GradientSum:
    """Sums the gradients of replicas in one process, in place, on every replica.

    A worker calls `ready` after it has queued the last of its gradients, one thread calls `start`, and a worker calls
    `wait` before it queues what needs the sums. With NCCL the sum runs on side streams, between those two points: what
    else is queued on a GPU, such as its target's next capture, fills the time until the slowest replica is there,
    wherever it stands in that GPU's order. Without NCCL all of it is in the order of the default streams.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self.flats = [flatten_gradients(replica) for replica in replicas] if len(replicas) > 1 else []
        self.nccl = self._nccl_works()
        self._staging: Tensor | None = None
        self._streams = [torch.cuda.Stream(flat.device) for flat in self.flats] if self.nccl else []
        self._ready: dict[int, torch.cuda.Event] = {}
        self._summed: dict[int, torch.cuda.Event] = {}

    @property
    def how(self) -> str:
        return "one replica" if not self.flats else "nccl" if self.nccl else "copies summed on the first device"

    def _nccl_works(self) -> bool:
        devices = {flat.device for flat in self.flats}
        if len(devices) != len(self.flats) or len(devices) < 2 or any(d.type != "cuda" for d in devices):
            return False
        try:
            probes = [torch.full((4,), i + 1.0, device=flat.device) for i, flat in enumerate(self.flats)]
            if not torch.cuda.nccl.is_available(probes):
                return False
            torch.cuda.nccl.all_reduce(probes)
            wanted = len(probes) * (len(probes) + 1) / 2
            return all(bool((probe == wanted).all()) for probe in probes)
        except (RuntimeError, AttributeError):
            return False

    def ready(self, index: int) -> None:
        """All that replica `index` adds to its gradients in this step is queued on its current stream."""
        if self._streams:
            self._ready[index] = torch.cuda.current_stream(self.flats[index].device).record_event()

    def wait(self, index: int) -> None:
        """What the current stream of replica `index` is given from now on finds the sums."""
        summed = self._summed.pop(index, None)
        if summed is not None:
            torch.cuda.current_stream(self.flats[index].device).wait_event(summed)

    def start(self) -> None:
        """Sum the gradients of replicas that are all `ready`."""
        if self._streams:
            for index, stream in enumerate(self._streams):
                stream.wait_event(self._ready.pop(index))
            for begin in range(0, self.flats[0].numel(), _NCCL_PIECE):
                torch.cuda.nccl.all_reduce([flat[begin : begin + _NCCL_PIECE] for flat in self.flats], streams=self._streams)
            self._summed = {index: stream.record_event() for index, stream in enumerate(self._streams)}
        elif self.flats:
            self._sum_on_first()

    def _sum_on_first(self) -> None:
        first = self.flats[0]
        for begin in range(0, first.numel(), _PIECE):
            piece = slice(begin, begin + _PIECE)
            total = first[piece]
            for other in self.flats[1:]:
                total.add_(self._here(other[piece], total))
            for other in self.flats[1:]:
                other[piece].copy_(total)

    def _here(self, piece: Tensor, total: Tensor) -> Tensor:
        """`piece` on the first device, through a buffer that is made once."""
        if piece.device == total.device:
            return piece
        if self._staging is None:
            self._staging = torch.empty(min(_PIECE, self.flats[0].numel()), device=total.device)
        return self._staging[: piece.numel()].copy_(piece)


def fingerprint(weights: Sequence[Tensor]) -> Tensor:
    """[2] int64 that changes with any bit of any of these weights, read as float32; equal for equal ones on any device."""
    total = torch.zeros(2, dtype=torch.int64, device=weights[0].device)
    for number, weight in enumerate(weights, 1):
        bits = weight.detach().float().contiguous().view(torch.int32).flatten()
        for piece in bits.split(1 << 24):
            wide = piece.to(torch.int64)
            total[0] += number * wide.sum()
            total[1] += number * (wide * torch.arange(1, wide.numel() + 1, device=wide.device)).sum()
    return total.cpu()


def check_equal(replicas: Sequence[Replica]) -> None:
    """Raises ReplicasDivergedError where a replica's weights are not bit-equal to the first one's."""
    wanted = fingerprint(replicas[0].optimizer.masters)
    for number, replica in enumerate(replicas[1:], 1):
        if not torch.equal(fingerprint(replica.optimizer.masters), wanted):
            raise ReplicasDivergedError(
                f"drafter[{number}] on {replica.device} no longer holds the weights of drafter[0]; the reduction of "
                "gradients is at fault. Resume from the last checkpoint, with fewer drafters if it happens again"
            )


def refuse_unequal(weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Raises ReplicasDivergedError in every process of a group where these weights are not bit-equal in all."""
    mine = fingerprint(weights)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    bad = [i for i, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if bad:
        raise ReplicasDivergedError(
            f"drafters {bad} do not hold the weights of drafter 0; start all ranks from the same config, seed and checkpoint"
        )
