"""What a rank of torchrun does: a drafter's engine, joining the others, and leaving together."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from dflash.distributed.accounting import Ledger
from dflash.distributed.cluster import Cluster, LifeLine
from dflash.distributed.inbox import LocalInbox, Received
from dflash.distributed.processes import ProcessEngine
from dflash.distributed.schedule import Schedule, handshake, steps_ahead
from dflash.distributed.sharding import ShardedEngine, ShardedReplica
from dflash.runs.record import MetricsWriter
from dflash.target.features import FeatureSource
from dflash.train.plan import Planner
from dflash.train.step import Replica
from dflash.train.topology import Topology


def make_engine(
    cluster: Cluster,
    replica: Replica,
    planner: Planner,
    first_step: int,
    last_step: int,
    *,
    queue_depth: int,
    source: FeatureSource | None = None,
    metrics: MetricsWriter | None = None,
) -> ProcessEngine:
    """A drafter rank's engine. `source`: its own target, where every rank has one; None receives from target ranks."""
    ahead = steps_ahead(queue_depth, planner.packs_per_step, cluster.roles.replicas)
    if source is None:
        handshake(cluster)
        inbox = Received(cluster, Schedule(planner, cluster, first_step, last_step), queue_depth)
    else:
        inbox = LocalInbox(source, cluster.tell_lost)
    kind = ShardedEngine if isinstance(replica, ShardedReplica) else ProcessEngine
    return kind(cluster, replica, planner, inbox, ahead, last_step, Ledger(cluster.name, cluster.device, metrics))


OnFailure = Callable[[Cluster, dict, BaseException | None], None]


def run_rank(
    topology: Topology,
    work: Callable[[Cluster, LifeLine], None],
    timeout: float,
    on_failure: OnFailure = lambda cluster, failure, error: None,
    store: dist.Store | None = None,
) -> int:
    """Join the other ranks, do `work`, leave together.

    Args:
        on_failure: called once on every rank when some rank has failed: with what the first one left behind, and with
            this rank's own exception where it is that one.
        store: what `open_store` gave, if it was already called.

    Returns the exit code. A rank that fails ends its process at once, without waiting for transfers that will never
    come; all others follow within seconds.
    """
    cluster = Cluster(topology, timeout, store)
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
