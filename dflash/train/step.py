"""How a step is computed: a replica of the drafter, the sums it reports, and the serial engine that is the reference.

`distributed.threads` and `distributed.processes` spread the same items over many devices; `loop` drives any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.compile_safety import WarmupJob
from dflash.drafter.attention import default_backend
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objective import Objective
from dflash.drafter.pack_plan import PackPlan
from dflash.errors import ServerLostError
from dflash.train.holding import of_drafter, of_target
from dflash.train.optimizer import MasterAdamW
from dflash.train.plan import StepPlan, WorkItem
from dflash.train.settings import TrainOptions
from dflash.train.step_graph import StepGraph, capture

if TYPE_CHECKING:
    from dflash.data import Pack
    from dflash.target.capture import Features
    from dflash.target.features import FeatureSource
    from dflash.train.plan import Planner


class Replica:
    """One drafter with its optimizer on one device."""

    def __init__(self, drafter: DFlashDrafter, options: TrainOptions):
        self.drafter = drafter
        self.options = options
        self.optimizer = self._make_optimizer()
        self.padded = options.step_graph is True  # as resolved
        self.graph: StepGraph | None = None  # once `step_graph.capture` has made one

    def _make_optimizer(self) -> MasterAdamW:
        options = self.options
        return MasterAdamW(
            self.drafter.parameters(),
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            muon=self.drafter.hidden_matrices() if options.optimizer == "muon" else (),
        )

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    def accumulate(self, item: WorkItem, features: Features, denominator: float) -> Tensor:
        """Forward and backward of one item; its gradient joins the float32 ones. Returns the metric sums, see
        `metric_sums`."""
        if not self.padded:
            loss, metrics = self.loss(item, features, denominator)
            loss.backward()
            self.optimizer.accumulate()
            return metric_sums(metrics)
        plan, features = self.padded_plan(item), features.to(self.device, non_blocking=True)
        if self.graph is not None:
            return self.graph.run(plan, features, denominator)
        return self.padded_pass(plan.to(self.device), features, torch.full((), denominator, device=self.device))

    def padded_plan(self, item: WorkItem) -> PackPlan:
        """The item's plan with the sizes that every pack has."""
        pack = item.pack
        return self.drafter.plan(pack.input_ids, pack.loss_mask, pack.lengths, pack.position_ids, item.anchors, padded=True)

    def padded_pass(self, plan: PackPlan, features: Features, denominator: Tensor) -> Tensor:
        """`accumulate` of a padded plan on the device, without anything that a CUDA graph could not hold."""
        wanted = Objective(**self._objective, denominator=denominator)
        hidden, last = features.all_hidden_states, features.verifier_last_hidden
        loss, metrics = self.drafter.planned_loss(hidden, last, plan, wanted)
        loss.backward()
        self.optimizer.accumulate()
        return metric_sums(metrics)

    @property
    def _objective(self) -> dict:
        options = self.options
        return {
            "use_soft_labels": options.soft_labels,
            "loss_fn": options.loss_fn,
            "position_weights": options.position_weights,
            "gamma": options.gamma,
            "reduction": options.reduction,
            "selector_alpha": options.selector_alpha,
            "selector_missing": options.selector_missing,
        }

    def loss(self, item: WorkItem, features: Features, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward pass of one item: the loss and the drafter's metrics."""
        pack, device = item.pack, self.device
        last = features.verifier_last_hidden
        return self.drafter(
            all_hidden_states=features.all_hidden_states.to(device, non_blocking=True),
            verifier_last_hidden=None if last is None else last.to(device, non_blocking=True),
            input_ids=pack.input_ids[None],  # these stay on the host, where the rows for the head are chosen
            loss_mask=pack.loss_mask[None],
            lengths=pack.lengths,
            position_ids=pack.position_ids[None],
            anchors=item.anchors,
            denominator=denominator,
            **self._objective,
        )

    def rehearse(self, item: WorkItem, features: Features) -> float:
        """Forward and backward of a real item, whose gradients are dropped: what warmup compiles."""
        loss = self.loss(item, features, item.weight or 1.0)[0]
        loss.backward()
        return float(loss.detach())

    def apply(self, lr: float, plan: StepPlan) -> Tensor:
        """Optimizer step; none where the plan supervises nothing. Returns [gradient norm, 1.0 if every weight is
        finite], on the device."""
        if plan.denominator <= 0:
            return torch.tensor([0.0, 1.0], dtype=torch.float64, device=self.device)
        return self.update(lr) if self.graph is None or self.graph.update is None else self.graph.run_update(lr)

    def update(self, lr: float | Tensor) -> Tensor:
        """The optimizer's step, see `apply`."""
        norm = self.optimizer.step(lr)
        return torch.stack([norm.double(), self.optimizer.all_finite().double()])


SCALARS = ("loss", "weight", "supervised_slots", "blocks", "accepted", "selector_loss")
SELECTOR = ("argmax_accepted_by_slot", "recalled_by_slot", "oracle_accepted_by_slot")  # zero without a selector
PER_SLOT = ("correct_by_slot", "supervised_by_slot", "accepted_by_slot", *SELECTOR)


def metric_sums(metrics: dict[str, Tensor]) -> Tensor:
    """The drafter's metrics as one float64 vector, so that items and replicas are added and read at once."""
    slots = torch.zeros_like(metrics["correct_by_slot"], dtype=torch.float64)
    scalars = [metrics[n].double() if n in metrics else slots.sum() for n in SCALARS]
    return torch.cat([torch.stack(scalars), *(metrics[n].double() if n in metrics else slots for n in PER_SLOT)])


def read_sums(values: list[float]) -> dict[str, float | list[float]]:
    """Inverse of `metric_sums`, with the ratios that people read."""
    sums: dict = dict(zip(SCALARS, values, strict=False))
    slots = (len(values) - len(SCALARS)) // len(PER_SLOT)
    for i, name in enumerate(PER_SLOT):
        start = len(SCALARS) + i * slots
        sums[name] = values[start : start + slots]
    blocks, supervised = sums["blocks"], sums["supervised_by_slot"]
    more = {}
    if sums["selector_loss"]:
        more = {
            "selector_loss": sums["selector_loss"],
            "argmax_length": 1 + sum(sums["argmax_accepted_by_slot"]) / blocks,
            "oracle_length": 1 + sum(sums["oracle_accepted_by_slot"]) / blocks,
            "oracle_by_slot": [a / blocks for a in sums["oracle_accepted_by_slot"]],
            "recall_by_slot": [r / n if n else None for r, n in zip(sums["recalled_by_slot"], supervised, strict=True)],
        }
    return more | {
        "loss": sums["loss"],
        "supervised_slots": int(sums["supervised_slots"]),
        "blocks": int(blocks),
        "acceptance_length": 1 + sums["accepted"] / blocks if blocks else None,
        "accuracy": [c / n if n else None for c, n in zip(sums["correct_by_slot"], supervised, strict=True)],
        "acceptance_by_slot": [a / blocks if blocks else None for a in sums["accepted_by_slot"]],
    }


def zero_sums(block_size: int, device: torch.device) -> Tensor:
    """The `metric_sums` of no item."""
    return torch.zeros(len(SCALARS) + len(PER_SLOT) * (block_size - 1), dtype=torch.float64, device=device)


def refuse_lost(result: Tensor, lost: ServerLostError | None) -> None:
    """Raises what ended the target's server where that spoilt the step with this result: no weight has changed."""
    if lost is not None and not math.isfinite(float(result[-2])):
        raise lost


class Engine:
    """Computes steps. What is here does nothing, for an engine that has nothing to do at that point.

    `replica` is the one whose weights are evaluated and saved, `planner` says what each step is made of. Where `leads` is
    False another process plans, records, evaluates and saves, and this one follows.
    """

    replica: Replica
    planner: Planner
    leads = True

    def warmup_jobs(self, plan: StepPlan) -> list[WarmupJob]:
        """What has to be compiled before the first step: one job for each replica, on the plan's real shapes."""
        return []

    def load_optimizer(self, state: dict, folder: Path | None = None) -> None:
        """Put every replica's weights and moments back to a checkpoint's. `folder`: the checkpoint, for its shards."""

    def held_out_source(self, packs: list[Pack]) -> FeatureSource:
        """Where the leading process finds the features of the held-out packs."""
        raise NotImplementedError

    def capture(self, plan: StepPlan) -> list[str]:
        """After the warmup: make the CUDA graphs of a run that has them. Returns what came of it, a sentence each."""
        return []

    def start(self, first_step: int) -> None:
        """Start workers; steps will be asked for in order from `first_step` on."""

    def step(self, plan: StepPlan, lr: float) -> Tensor:
        """Run one step. Returns `metric_sums` of all items followed by what `Replica.apply` gives, on any device."""
        raise NotImplementedError

    def follow(self, beat: Callable[[], None] = lambda: None) -> None:
        """Of a process that does not lead, after `start`: work until the leading one has ended. `beat` after each step."""
        raise NotImplementedError

    @contextmanager
    def whole(self) -> Iterator[DFlashDrafter]:
        """The drafter with all of its weights, for as long as the block lasts where it has to be gathered."""
        yield self.replica.drafter

    def write_shards(self, folder: Path) -> None:
        """Write what of the weights and moments is not in the optimizer's state into a new folder. Raises RunError."""

    def named_tensors(self) -> Iterator[tuple[str, Iterable[Tensor]]]:
        """What this process holds between two steps, by name (`holding`)."""
        yield from of_drafter(self.replica.drafter, self.replica.optimizer)

    def on_hang(self, reason: str) -> None:
        """For a watchdog: end the step that is waited for."""

    def finish(self) -> None:
        """The last step is done: release all who work along."""

    def close(self) -> None:
        """Stop workers and free what the engine made; called on every way out."""


def warmup_jobs(replicas: list[Replica], example: Callable[[], tuple[WorkItem, Features]]) -> list[WarmupJob]:
    """One warmup job for each replica whose attention is compiled; none on a device that runs nothing compiled."""
    return [
        WarmupJob(
            device=replica.device,
            step=lambda r=replica: r.rehearse(*example()),
            modules=[replica.drafter],
            generators=[replica.drafter.anchor_generator],
            name=f"drafter[{i}]",
        )
        for i, replica in enumerate(replicas)
        if (replica.drafter.attention_backend or default_backend(replica.device)) == "flex"
    ]


class SerialEngine(Engine):
    """All items of a step one after another on one device. The reference for every other engine."""

    def __init__(self, replica: Replica, source: FeatureSource, planner: Planner):
        self.replica, self.source, self.planner = replica, source, planner

    def warmup_jobs(self, plan: StepPlan) -> list[WarmupJob]:
        item = plan.items[0]
        return warmup_jobs([self.replica], lambda: (item, self.source.get(item.pack)))

    def capture(self, plan: StepPlan) -> list[str]:
        if not self.replica.padded:
            return []
        item = plan.items[0]
        return [capture(self.replica, item, self.source.get(item.pack))]

    def load_optimizer(self, state: dict, folder: Path | None = None) -> None:
        self.replica.optimizer.load_state_dict(state)
        self.replica.graph = None  # which knows the moments from before

    def held_out_source(self, packs: list[Pack]) -> FeatureSource:
        return self.source

    def named_tensors(self) -> Iterator[tuple[str, Iterable[Tensor]]]:
        yield from of_target(self.source)
        yield from super().named_tensors()

    def step(self, plan: StepPlan, lr: float) -> Tensor:
        sums = [self.replica.accumulate(item, self.source.get(item.pack), plan.denominator) for item in plan.items]
        return torch.cat([torch.stack(sums).sum(0), self.replica.apply(lr, plan)])
