"""One drafter in shards over the drafter ranks (FSDP2): for a drafter whose float32 weights and moments one GPU cannot hold.

Each rank keeps 1/N of every float32 weight, of its gradient and of both moments, and gathers one layer at a time, in
the compute dtype, while that layer runs. The losses and the final weights are those of whole replicas up to the order of
float additions. The Triton path reads all layers' weights at once, so the plain modules are used instead.

A gather takes everyone: all ranks run the same number of passes a step, and rank 0 calls the others when it evaluates
(it gets a whole drafter for that time) or saves (each writes its shards).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dflash.compile_safety import WarmupJob
from dflash.distributed.cluster import Cluster
from dflash.distributed.processes import ProcessEngine
from dflash.distributed.replicas import refuse_unequal
from dflash.drafter.masks import AnchorSet
from dflash.drafter.model import DFlashDrafter
from dflash.errors import RunError
from dflash.target.capture import Features
from dflash.train import shards
from dflash.train.optimizer import MasterAdamW, finite_each
from dflash.train.plan import StepPlan, WorkItem
from dflash.train.settings import TrainOptions
from dflash.train.step import Replica

GATHER, SAVE = 2.0, 3.0  # orders beside those of `processes`
_SHARDS_AT = "shards"  # key of the store: where they are to be written


class ShardedAdamW(MasterAdamW):
    """AdamW over this rank's shards. FSDP has summed the gradients over the ranks when a backward pass ends, and keeps
    them in `grad`; norms and finiteness are those of the whole drafter.

    Args:
        named: names and float32 DTensors, split on their first axis. mesh: the ranks they are split over.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh, **options):
        named = list(named)
        self.names = [name for name, _ in named]
        self.sharded: list[DTensor] = [p for _, p in named]
        self.mesh = mesh
        self._finite: Tensor | None = None  # [parameters], of the last `all_finite`
        super().__init__([nn.Parameter(p.detach().to_local()) for p in self.sharded], **options)

    def accumulate(self) -> None:
        """Nothing: FSDP has added this pass's gradients to the others."""

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        self.gradients, self._own = [p.grad.to_local() for p in self.sharded], True
        norm = super().step(lr)
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        for p in self.sharded:
            p.grad = None

    def _norm(self) -> Tensor:
        squares = super()._norm().double().square()
        dist.all_reduce(squares, group=self.mesh.get_group())
        return squares.sqrt().float()

    @torch.no_grad()
    def all_finite(self) -> Tensor:
        self._finite = finite_each(self.masters).float()
        dist.all_reduce(self._finite, dist.ReduceOp.MIN, group=self.mesh.get_group())
        return self._finite.all()

    def first_non_finite(self, names: Iterable[str]) -> str | None:
        bad = [] if self._finite is None else (self._finite == 0).nonzero().flatten().tolist()
        return self.names[bad[0]] if bad else None

    # -- on disk ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What goes beside the shards: names, settings and Adam's step, no tensors."""
        return {
            "sharded": True,
            "names": self.names,
            "adam_step": self._adam_step(),
            "param_groups": self.adamw.state_dict()["param_groups"],
        }

    def _adam_step(self) -> float:
        state = self.adamw.state.get(self.masters[0])
        return float(state["step"]) if state else 0.0

    def tensors(self) -> dict[str, DTensor]:
        """Weights and, once there are any, moments, by the keys of `shards`; they share the optimizer's memory."""
        found = {}
        for name, p, master in zip(self.names, self.sharded, self.masters, strict=True):
            parts = {shards.WEIGHTS: master.detach()} | {
                kind: self.adamw.state[master][kind] for kind in shards.MOMENTS if self.adamw.state.get(master)
            }
            for kind, local in parts.items():
                found[shards.key(kind, name)] = DTensor.from_local(
                    local, self.mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
                )
        return found

    @torch.no_grad()
    def load_shards(self, folder: Path, about: dict[str, Any]) -> None:
        """Go on from shards, by however many ranks they were written; all ranks together."""
        if about["adam_step"]:
            for master in self.masters:
                self.adamw.state[master] = {
                    "step": torch.tensor(about["adam_step"], device=master.device),
                    **{kind: torch.zeros_like(master) for kind in shards.MOMENTS},
                }
        shards.read(folder, self.tensors(), self.mesh.get_group())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a whole optimizer's state: take this rank's part of every tensor."""
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()

        def mine(whole: Tensor) -> Tensor:
            parts = whole.chunk(ranks)
            return parts[rank] if rank < len(parts) else whole[:0]

        moments = {
            index: {
                kind: mine(value).clone() if torch.is_tensor(value) and value.dim() else value for kind, value in of.items()
            }
            for index, of in state["adamw"]["state"].items()
        }
        for master, whole in zip(self.masters, state["masters"], strict=True):
            master.copy_(mine(whole))
        self.adamw.load_state_dict({**state["adamw"], "state": moments})


class ShardedReplica(Replica):
    """This rank's shard of a drafter that all drafter ranks hold together.

    Args:
        drafter: whole, on the rank's device, with equal weights on every rank. It is taken apart layer by layer, so that its
            float32 weights never lie there as a whole; its tables stay the target's.

    Raises: ReplicasDivergedError where the ranks did not start from equal weights.
    """

    def __init__(self, drafter: DFlashDrafter, options: TrainOptions, cluster: Cluster):
        self.dtype = drafter.fc.weight.dtype  # of the passes
        self.mesh = DeviceMesh.from_group(cluster.drafter_group, cluster.device.type)
        refuse_unequal(list(drafter.parameters()), cluster.drafter_group)
        policy = MixedPrecisionPolicy(
            param_dtype=None if self.dtype == torch.float32 else self.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )  # rotary tables stay float32
        for part in (*drafter.layers, drafter):
            for parameter in part.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.float()
            fully_shard(part, mesh=self.mesh, mp_policy=policy)
            part.set_gradient_divide_factor(1.0)  # a step's gradients add up, see `plan`
            part.set_force_sum_reduction_for_comms(True)
        drafter.fast_path = False
        super().__init__(drafter, options)

    def _make_optimizer(self) -> ShardedAdamW:
        options = self.options
        return ShardedAdamW(
            self.drafter.named_parameters(),
            self.mesh,
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        )

    def rehearse(self, item: WorkItem, features: Features) -> float:
        loss = super().rehearse(item, features)
        self.optimizer.drop_gradients()
        return loss

    def join(self, plan: StepPlan) -> None:
        """A pass without supervised slots, for a rank that has no item left while others have: its gradient is zero."""
        item, nothing = plan.items[0], torch.zeros(1, 1, 1, device=self.device, dtype=self.dtype)
        anchors = AnchorSet(item.anchors.positions, torch.zeros_like(item.anchors.valid))
        tokens, width, hidden = len(item.pack.input_ids), self.drafter.fc.in_features, self.drafter.config.hidden_size
        last = nothing.expand(1, tokens, hidden) if self.options.soft_labels else None
        features = Features(nothing.expand(1, tokens, width), last)
        self.accumulate(replace(item, anchors=anchors), features, plan.denominator)

    @torch.no_grad()
    def gather(self, keep: bool) -> DFlashDrafter | None:
        """The whole drafter in the compute dtype; all ranks together, returned on those that `keep` it."""
        whole = _empty_like(self.drafter, self.dtype, self.device) if keep else None
        for name, parameter in self.drafter.named_parameters():
            full = parameter.detach().full_tensor()
            if whole is not None:
                whole.get_parameter(name).copy_(full)
        return whole


def _empty_like(drafter: DFlashDrafter, dtype: torch.dtype, device: torch.device) -> DFlashDrafter:
    """A plain drafter of the same shape and settings, weights not set, sharing the target's tables."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        whole = DFlashDrafter(
            drafter.config,
            drafter.target_layer_ids,
            drafter.block_size,
            drafter.max_anchors,
            drafter.mask_token_id,
            attention_backend=drafter.attention_backend,
            max_dense_bytes=drafter.max_dense_bytes,
            loss_chunk_rows=drafter.loss_chunk_rows,
            head_precision=drafter.head_precision,
        )
    whole = whole.to(dtype).to_empty(device=device)
    for name, buffer in drafter.named_buffers():
        setattr(whole, name, buffer)
    return whole


class ShardedEngine(ProcessEngine):
    """`ProcessEngine` of a rank that holds a `ShardedReplica`."""

    replica: ShardedReplica

    def _gradient_buffer(self) -> None:
        return None

    def warmup_jobs(self, plan: StepPlan) -> list[WarmupJob]:
        return [replace(job, modules=()) for job in super().warmup_jobs(plan)]  # a rehearsal changes gradients alone

    def verify(self) -> None:
        """Nothing to compare: each weight is held once. That all ranks start from equal ones was checked before."""

    def load_optimizer(self, state: dict, folder: Path | None = None) -> None:
        if state.get("sharded"):
            self.replica.optimizer.load_shards(folder / shards.FOLDER, state)
        else:
            super().load_optimizer(state)

    @contextmanager
    def whole(self) -> Iterator[DFlashDrafter]:
        """Rank 0: the whole drafter, for an evaluation or a checkpoint; freed afterwards."""
        self._order(GATHER)
        yield self.replica.gather(keep=True)

    def write_shards(self, folder: Path) -> None:
        """Rank 0: have all ranks write their shards into a folder that all of them see. Raises RunError."""
        self.cluster.store.set(_SHARDS_AT, str(folder))
        self._order(SAVE)
        self._write(folder)

    def _write(self, folder: Path) -> None:
        shards.write(folder, self.replica.optimizer.tensors(), self.cluster.drafter_group)

    def _obey(self, what: float) -> None:
        if what == GATHER:
            self.replica.gather(keep=False)
            return
        try:
            self._write(Path(self.cluster.store.get(_SHARDS_AT).decode()))
        except RunError:
            pass  # rank 0 has the same error, and decides what to do

    def _fill(self, plan: StepPlan, done: int) -> None:
        for _ in range(-(-len(plan.items) // self.cluster.roles.replicas) - done):
            self.replica.join(plan)

    def _reduce(self, sums: Tensor) -> list[dist.Work]:
        return [dist.all_reduce(sums, group=self.cluster.drafter_group, async_op=True)]
