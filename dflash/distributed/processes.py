"""One process a device under torchrun: features go rank to rank, gradients are summed in the drafters' group.

A target may capture items of the steps that the drafters have opened; that, and receives that are posted only for free
slots, is the backpressure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.compile_safety import WarmupJob
from dflash.distributed.accounting import Ledger
from dflash.distributed.cluster import Cluster
from dflash.distributed.inbox import Inbox
from dflash.distributed.replicas import flatten_gradients, refuse_unequal
from dflash.target.features import FeatureSource
from dflash.train.plan import Planner, StepPlan
from dflash.train.step import Engine, Replica, refuse_lost, warmup_jobs, zero_sums
from dflash.train.step_graph import capture

if TYPE_CHECKING:
    from dflash.data import Pack

STEP, END = 1.0, 0.0


class ProcessEngine(Engine):
    """`Engine` of one drafter rank. Rank 0 is driven by the trainer and leads; the others `follow`."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        planner: Planner,
        inbox: Inbox,
        ahead: int,
        last_step: int,
        ledger: Ledger | None = None,
    ):
        self.cluster, self.replica, self.planner, self.inbox = cluster, replica, planner, inbox
        self.ahead, self.last_step = ahead, last_step
        self.ledger = ledger or Ledger(cluster.name, cluster.device)
        self.flat = self._gradient_buffer()
        self._opened = 0
        self._closed = False

    def _gradient_buffer(self) -> Tensor | None:
        return flatten_gradients(self.replica) if self.cluster.roles.replicas > 1 else None

    @property
    def leads(self) -> bool:
        return self.cluster.replica == 0

    def warmup_jobs(self, plan: StepPlan) -> list[WarmupJob]:
        """On the shapes of the run; features are zeros where they come from another rank."""
        item = plan.items[0]
        return warmup_jobs([self.replica], lambda: (item, self.inbox.example(item)))

    def capture(self, plan: StepPlan) -> list[str]:
        item = plan.items[0]
        return [capture(self.replica, item, self.inbox.example(item))] if self.replica.padded else []

    def load_optimizer(self, state: dict, folder: Path | None = None) -> None:
        self.replica.optimizer.load_state_dict(state)

    def held_out_source(self, packs: list[Pack]) -> FeatureSource:
        return self.inbox.held_out(packs)

    def start(self, first_step: int) -> None:
        """Let the targets begin."""
        self.verify()
        self._open(first_step)

    def step(self, plan: StepPlan, lr: float) -> Tensor:
        """Rank 0: have every drafter run this step, and run this rank's share."""
        self._order(STEP, plan.step, lr)
        result = self._run(plan, lr)
        refuse_lost(result, self.cluster.lost())
        return result

    def follow(self, beat: Callable[[], None] = lambda: None) -> None:
        """The other drafters: do what rank 0 orders, until it ends."""
        while True:
            what, step, lr = self._order()
            beat()
            if what == END:
                break
            if what == STEP:
                self._run(self.planner.step(int(step)), lr)
            else:
                self._obey(what)
            beat()
        self._drain(int(step))

    def _obey(self, what: float) -> None:
        """An order that is neither a step nor the end; whole drafters know no other."""
        raise AssertionError(f"unknown order {what}")

    def finish(self) -> None:
        """Rank 0: release all other ranks. A run that failed ends its processes instead."""
        self.cluster.store.set("closed", "1")
        self._order(END, self._opened, 0.0)
        self._drain(self._opened)

    def verify(self) -> None:
        """Raises ReplicasDivergedError on every drafter where weights are not bit-equal."""
        refuse_unequal(self.replica.optimizer.masters, self.cluster.drafter_group)

    def _order(self, what: float = END, step: int = 0, lr: float = 0.0) -> tuple[float, float, float]:
        """Rank 0's word to all drafters."""
        order = torch.tensor([what, float(step), lr], dtype=torch.float64)
        dist.broadcast(order, self.cluster.roles.drafter_rank(0), group=self.cluster.drafter_group)
        return tuple(order.tolist())

    def _open(self, step: int) -> None:
        """Steps up to `step + ahead` may be captured."""
        self._opened = min(step + self.ahead, self.last_step)
        if self.leads:
            self.cluster.store.set("opened", str(self._opened))
        self.inbox.open(self._opened)

    def _run(self, plan: StepPlan, lr: float) -> Tensor:
        self._open(plan.step)
        ledger, items = self.ledger, plan.share(self.cluster.replica, self.cluster.roles.replicas)
        sums = zero_sums(self.replica.drafter.block_size, self.cluster.device)
        self.inbox.expect(items)
        ledger.enter("wait", plan.step)
        for item in items:
            features = self.inbox.take(item.index)
            ledger.enter("forward+backward", plan.step)
            sums = sums + self.replica.accumulate(item, features, plan.denominator)
            ledger.enter("wait", plan.step)
            ledger.add_tokens(int(item.pack.lengths.sum()))
            self.inbox.done(features)
        self._fill(plan, len(items))
        ledger.enter("reduce", plan.step)
        pending = self._reduce(sums)
        self._capture_next(plan)  # while gradients travel, and the slowest rank is waited for
        for work in pending:
            work.wait()
        ledger.enter("optimizer", plan.step)
        applied = self.replica.apply(lr, plan)
        ledger.enter("idle")
        ledger.report(self.inbox.depth, force=plan.step == self.last_step)
        return torch.cat([sums, applied])

    def _fill(self, plan: StepPlan, done: int) -> None:
        """What a drafter with fewer items than others does meanwhile: nothing, where its gradient is added as it is."""

    def _capture_next(self, plan: StepPlan) -> None:
        """The first item of this rank's next step, where there is one."""
        if plan.step < self.last_step:
            items = self.planner.step(plan.step + 1).share(self.cluster.replica, self.cluster.roles.replicas)
            if items:
                self.inbox.capture(items[0])

    def _reduce(self, sums: Tensor) -> list[dist.Work]:
        """Gradients and metric sums become those of all drafters, once what is returned has been waited for."""
        group, tensors = self.cluster.drafter_group, () if self.flat is None else (self.flat, sums)
        return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]

    def _drain(self, opened: int) -> None:
        if not self._closed:
            self.inbox.open(opened)
            self.inbox.drain()
        self._closed = True
        self.verify()
        self.ledger.finish()
