"""One rank of a made-up pipeline under torchrun: python pipeline_rank.py JOB; see `pipeline_lab.run_torchrun`.

The job is a pickled dict: case, topology, steps, depth, out (where rank 0 puts its losses and final weights) and,
to see a failure through, fail: {"rank": ..., "item": ...}. `sharded` keeps one drafter in shards. `stop_after`
ends the job at an earlier step than targets plan for, so that they feed it to its end.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
from patience import PATIENCE
from pipeline_lab import weights_of

from dflash.bench.pipeline_case import make_planner, make_replica, make_target
from dflash.compile_safety import protected
from dflash.distributed.cluster import Cluster
from dflash.distributed.feeding import TargetEngine
from dflash.distributed.ranks import make_engine, run_rank
from dflash.distributed.sharding import ShardedReplica
from dflash.target.features import OnlineFeatures


def work(cluster: Cluster, job: dict) -> None:
    """This rank's part of the job."""
    case, steps, fail = job["case"], job["steps"], job.get("fail")
    planner = make_planner(case)
    target = make_target(case, cluster.device)
    source = OnlineFeatures(target)
    if fail and fail["rank"] == cluster.rank:
        source.get = _failing(source.get, fail["item"])
    if not cluster.drafts:
        engine = TargetEngine(cluster, source, planner, steps, case.soft_labels)
        engine.start(1)
        engine.follow()
        return
    replica = make_replica(case, target, cluster.device)
    if job.get("sharded"):
        replica = ShardedReplica(replica.drafter, case.options, cluster)
    engine = make_engine(
        cluster, replica, planner, 1, steps, queue_depth=job["depth"], source=source if cluster.roles.paired else None
    )
    planner = engine.planner
    with protected(engine.warmup_jobs(planner.step(1))):
        engine.start(1)
        if not engine.leads:
            engine.follow()
            return
        losses = []
        for number in range(1, job.get("stop_after", steps) + 1):
            losses.append(float(engine.step(planner.step(number), case.lr)[0]))
        with engine.whole() as drafter:
            weights = torch.cat([p.detach().float().flatten().cpu() for p in drafter.parameters()])
        engine.finish()
    masters = engine.replica.optimizer.masters
    torch.save(
        {
            "losses": losses,
            "weights": weights if job.get("sharded") else weights_of(engine.replica),
            "held": sum(m.numel() for m in masters),
        },
        job["out"],
    )


def _failing(get, item: int):
    calls = []

    def failing(pack):
        calls.append(pack)
        if len(calls) == item:
            raise OSError("a made-up failure of a rank")
        return get(pack)

    return failing


def main(path: str) -> int:
    """Run this process's rank."""
    torch.set_num_threads(1)
    job = pickle.loads(Path(path).read_bytes())
    return run_rank(job["topology"], lambda cluster, life: work(cluster, job), PATIENCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
