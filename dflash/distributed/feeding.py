"""A target rank's life: capture the items of the steps that the drafters have opened, and send them rank to rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.distributed.accounting import Ledger
from dflash.distributed.cluster import Cluster
from dflash.distributed.schedule import Schedule, handshake
from dflash.target.capture import Features
from dflash.target.features import FeatureSource, UntilLost
from dflash.train.plan import Planner
from dflash.train.step import Engine

if TYPE_CHECKING:
    from dflash.data import Pack

_POLL = 0.01  # seconds between two looks for opened steps


class TargetEngine(Engine):
    """`Engine` of a target rank, which only follows.

    Args:
        last_step: nothing is captured past it. soft_labels: send the last states too.
        held_out: packs whose features rank 0 wants before the first step.
    """

    leads = False

    def __init__(
        self,
        cluster: Cluster,
        source: FeatureSource,
        planner: Planner,
        last_step: int,
        soft_labels: bool,
        *,
        held_out: list[Pack] | None = None,
        ledger: Ledger | None = None,
    ):
        self.cluster, self.source, self.planner = cluster, source, planner
        self.last_step, self.soft, self.held_out = last_step, soft_labels, held_out or []
        self.ledger = ledger or Ledger(cluster.name, cluster.device)
        self._first_step, self._opened = 1, 0

    def start(self, first_step: int) -> None:
        """Meet the drafters, say what features look like, and send those of the held-out packs."""
        self._first_step = first_step
        handshake(self.cluster)
        self._announce(self.source.get(self.planner.step(first_step).items[0].pack))
        if self.cluster.node == 0 and self.cluster.index == 0:
            for pack in self.held_out:
                hidden = self.source.get(pack).all_hidden_states
                dist.send(hidden.to(self.cluster.device).contiguous(), self.cluster.roles.drafter_rank(0))

    def _announce(self, features: Features) -> None:
        """Tell the node's drafters what a pack's features look like."""
        if self.cluster.index == 0:
            tensors = features.tensors[: 1 + self.soft]
            kind = {"shapes": [list(t.shape) for t in tensors], "dtype": str(tensors[0].dtype).removeprefix("torch.")}
            self.cluster.store.set(f"features/{self.cluster.node}", json.dumps(kind))

    def follow(self, beat: Callable[[], None] = lambda: None) -> None:
        """Feed the drafters until they have closed the run."""
        sent: tuple[list[dist.Work], list[Tensor]] = ([], [])
        source = UntilLost(self.source, self.cluster.tell_lost)
        for route in Schedule(self.planner, self.cluster, self._first_step, self.last_step):
            if route.target != self.cluster.index:
                continue
            self.ledger.enter("wait")
            if not self._wait_until_open(route.step):
                break
            self.ledger.enter("capture", route.step)
            features = source.get(route.item.pack)
            self.ledger.enter("wait", route.step)
            self.ledger.add_tokens(int(route.item.pack.lengths.sum()))
            for work in sent[0]:  # the one before: it had this capture's time
                work.wait()
            tensors = [t.to(self.cluster.device).contiguous() for t in features.tensors[: 1 + self.soft]]
            to = self.cluster.roles.drafter_rank(route.replica)
            sent = ([dist.isend(t, to, tag=i) for i, t in enumerate(tensors)], tensors)
            if self.cluster.device.type == "cuda":  # keep the host beside the device
                torch.cuda.current_stream(self.cluster.device).synchronize()
            self.ledger.report(None)
        for work in sent[0]:
            work.wait()
        self.ledger.finish()
        self.ledger.report(None, force=True)

    def _wait_until_open(self, step: int) -> bool:
        """Wait for the drafters to open a step; False when it never will be."""
        store = self.cluster.store
        while step > self._opened:
            closed = store.check(["closed"])
            if store.check(["opened"]):
                self._opened = int(store.get("opened"))
            if step > self._opened:
                if closed:
                    return False
                time.sleep(_POLL)
        return True
