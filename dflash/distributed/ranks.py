"""The work of one rank, given its parts: serve as a target, or draft; leave together, or fail together."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflash.distributed.accounting import Ledger
from dflash.distributed.cluster import Cluster, LifeLine
from dflash.distributed.processes import Feeder, Inbox, LocalInbox, ProcessEngine, Schedule, handshake, steps_ahead
from dflash.distributed.sharding import ShardedEngine, ShardedReplica
from dflash.distributed.threads import SharedPlanner
from dflash.runs.record import MetricsWriter
from dflash.target.capture import Features
from dflash.train.plan import Planner
from dflash.train.step import FeatureSource, Replica
from dflash.train.topology import Topology

if TYPE_CHECKING:
    from dflash.data import Pack


def serve_target(
    cluster: Cluster,
    source: FeatureSource,
    planner: Planner,
    first_step: int,
    last_step: int,
    soft_labels: bool,
    held_out: Sequence[Pack] = (),
    metrics: MetricsWriter | None = None,
) -> None:
    """A target rank's life: say what features look like, send those of the held-out packs, feed the drafters."""
    handshake(cluster)
    schedule = Schedule(planner, cluster, first_step, last_step)
    feeder = Feeder(cluster, source, schedule, soft_labels, Ledger(cluster.name, cluster.device, metrics))
    feeder.announce(source.get(planner.step(first_step).items[0].pack))
    if cluster.node == 0 and cluster.index == 0:
        for pack in held_out:
            hidden = source.get(pack).all_hidden_states
            dist.send(hidden.to(cluster.device).contiguous(), cluster.roles.drafter_rank(0))
    feeder.run()


class HeldOutFeatures:
    """Features of the held-out packs, kept on the host of rank 0, which has no target of its own."""

    def __init__(self, cluster: Cluster, packs: Sequence[Pack], like: Features):
        self.device = cluster.device
        self._kept: dict[int, torch.Tensor] = {}
        width = like.all_hidden_states.shape[-1]
        for pack in packs:
            hidden = torch.empty(1, len(pack.input_ids), width, dtype=like.all_hidden_states.dtype, device=self.device)
            dist.recv(hidden, cluster.roles.target_rank(0, 0))
            self._kept[pack.pack_id] = hidden.cpu()
        self._hidden = like.verifier_last_hidden.shape[-1]

    def get(self, pack: Pack) -> Features:
        hidden = self._kept[pack.pack_id].to(self.device)
        return Features(hidden, hidden.new_zeros(1, 1, 1).expand(1, hidden.shape[1], self._hidden))


def make_engine(
    cluster: Cluster,
    replica: Replica,
    planner: Planner,
    first_step: int,
    last_step: int,
    *,
    queue_depth: int,
    packs_per_step: int,
    source: FeatureSource | None = None,
    metrics: MetricsWriter | None = None,
    timeout: float = 600.0,
) -> ProcessEngine:
    """A drafter rank's engine. `source`: its own target, where every rank has one; None receives from target ranks."""
    if not isinstance(planner, SharedPlanner):
        planner = SharedPlanner(planner)
    if source is None:
        handshake(cluster)
        schedule = Schedule(planner, cluster, first_step, last_step)
        inbox = Inbox(cluster, schedule, queue_depth, replica.options.soft_labels, timeout)
    else:
        inbox = LocalInbox(source)
    ahead = steps_ahead(queue_depth, packs_per_step, cluster.roles.replicas)
    kind = ShardedEngine if isinstance(replica, ShardedReplica) else ProcessEngine
    return kind(cluster, replica, planner, inbox, ahead, last_step, Ledger(cluster.name, cluster.device, metrics))


def held_out_source(cluster: Cluster, engine: ProcessEngine, packs: Sequence[Pack]) -> FeatureSource | None:
    """Where rank 0 finds the features it evaluates on; None on other ranks."""
    if not (cluster.rank == 0 and packs):
        return None
    if isinstance(engine.inbox, LocalInbox):
        return engine.inbox.source
    return HeldOutFeatures(cluster, packs, engine.inbox.free[0])


OnFailure = Callable[[Cluster, dict, BaseException | None], None]


def run_rank(
    topology: Topology,
    work: Callable[[Cluster, LifeLine], None],
    timeout: float,
    on_failure: OnFailure = lambda cluster, failure, error: None,
) -> int:
    """Join the other ranks, do `work`, leave together.

    Args:
        on_failure: called once on every rank when some rank has failed: with what the first one left behind, and with
            this rank's own exception where it is that one.

    Returns the exit code. A rank that fails ends its process at once, without waiting for transfers that will never
    come; all others follow within seconds.
    """
    cluster = Cluster(topology, timeout)
    life = LifeLine(cluster)
    life.on_failure = lambda failure: on_failure(cluster, failure, None)
    life.start()
    try:
        work(cluster, life)
        cluster.store.set(f"left/{cluster.rank}", "1")
        life.stop()
        cluster.leave()
        return 0
    except BaseException as error:
        first = life.report(error)
        own = {"worker": cluster.name, "message": str(error), "rank": cluster.rank}
        try:
            failure = life.failure() or own
        except RuntimeError:  # the store went with the process that kept it
            failure = own
        life.stop()
        on_failure(cluster, failure, error if first else None)
        if first:
            traceback.print_exc()
        else:
            print(f"{cluster.name} ends: {failure['worker']} failed: {failure['message']}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if cluster.rank == 0:
            time.sleep(2 * 1.0)  # rank 0 may keep the store: let the others read what happened
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
