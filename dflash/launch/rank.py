"""A run in one rank of torchrun: `dflash train --config runs/<id>/config.yaml` with RANK set."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import yaml
from torch.distributed import Store

from dflash.distributed.accounting import Ledger
from dflash.distributed.cluster import CONTROL, LAUNCHER, Cluster, LifeLine, open_store, refusing, roles_of, word
from dflash.distributed.feeding import TargetEngine
from dflash.distributed.ranks import make_engine, run_rank
from dflash.distributed.sharding import ShardedReplica
from dflash.errors import ConfigError
from dflash.launch.course import Course, Say
from dflash.launch.signals import graceful
from dflash.runs.control import RunControl
from dflash.runs.lock import locked
from dflash.runs.record import Run
from dflash.target.capture import Target
from dflash.target.random_weights import RandomHead, random_head
from dflash.target.served import ServedTarget
from dflash.target.server import LOADING
from dflash.target.spread import shard_target
from dflash.train.checkpoint import checkpoint_folder, load_trainer_state
from dflash.train.memory_help import explained
from dflash.train.prepare import Data, load_run_target, make_drafter, make_planner, make_run_source, open_run_server
from dflash.train.resolve import settle_run
from dflash.train.resolved import ResolvedRun, read_resolved
from dflash.train.resume import load_training, refuse_resume
from dflash.train.settings import RunConfig
from dflash.train.step import Engine, Replica
from dflash.train.topology import CPU, available_gpus

_LOST = ("connection closed by peer", "connection reset by peer", "connection was likely closed", "remote process exited")


def train_rank(folder: str | Path, config: RunConfig, resume: bool = False) -> int:
    """This process's part of the run in `folder`; returns the exit code."""
    run = Run.open(folder)
    handled = os.environ.get(CONTROL)
    control = RunControl(run.path, run.metrics, handled=json.loads(handled) if handled else None)
    store = open_store(config.runtime.watchdog_seconds)
    with ExitStack() as held, refusing(store):
        if os.environ["RANK"] == "0":
            held.enter_context(locked(run.path))
        if resume:
            refuse_resume(run.path, config)
        resolved = _resolved(run, config, store)
        hold = held.pop_all()
    began, whole = time.perf_counter(), resolved.config.runtime.drafter_parallel == "replicate"

    def failed(cluster: Cluster, failure: dict, error: BaseException | None) -> None:
        if error is not None:
            run.fault(error, worker=cluster.name)
        elif cluster.rank == 0 and failure["rank"] < 0 or "no sign of life" in failure["message"]:
            run.metrics.write("fault", **{k: failure.get(k) for k in ("worker", "type", "message", "traceback")}, step=None)
        if cluster.rank == 0:
            run.end("failed", message=told(failure), seconds=time.perf_counter() - began)

    def work(cluster: Cluster, life: LifeLine) -> None:
        def say(line: str) -> None:
            run.metrics.write("log", worker=cluster.name, level="info", message=line)

        # rank 0 decides when to stop; a terminal's Ctrl-C reaches everyone
        leads = cluster.rank == 0
        with graceful(control if leads else None, announce=False, insist=leads):
            try:
                Course(run, resolved, control, Rank(run, cluster, whole), say).take(resume)
            except torch.OutOfMemoryError as error:
                raise explained(error, resolved, cluster.name) from error

    with hold:
        return run_rank(resolved.topology, work, config.runtime.watchdog_seconds, failed, store)


def _resolved(run: Run, config: RunConfig, store: Store) -> ResolvedRun:
    """The run as rank 0 has it: from the process that launched the ranks, or settled here. All ranks get its very words;
    its packs are counted over all nodes."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if os.environ["RANK"] == "0":
        found = read_resolved(run.path) if LAUNCHER in os.environ else None
        found = found or settle_run(run.path, config, nodes=max(1, world // local), ask_gpus=False)
        store.set("resolved", yaml.safe_dump(found.to_dict()))
    resolved = ResolvedRun.from_dict(yaml.safe_load(word(store, "resolved", config.runtime.watchdog_seconds)))
    roles_of(resolved.topology, world, local)
    missing = [device for device in resolved.topology.devices if (device.index or 0) >= max(1, available_gpus())]
    if missing:
        raise ConfigError(
            f"the run uses {', '.join(map(str, missing))}, and this machine has {available_gpus()} GPUs; every node needs "
            "the same gpus and target_gpus"
        )
    return resolved


def told(failure: dict) -> str:
    """What ended the run, as the first rank that noticed says it. Who finds a connection closed is not the cause."""
    lost = any(sign in failure["message"].casefold() for sign in _LOST)
    return f"{failure['worker']}: {'lost another rank: ' if lost else ''}{failure['message']}"


class Rank:
    """`Place` of a rank: a drafter, a target, or both on one device.

    Args:
        whole: each drafter rank has a whole drafter, no shard.
    """

    def __init__(self, run: Run, cluster: Cluster, whole: bool):
        self.run, self.cluster, self.whole = run, cluster, whole
        self.leads = cluster.rank == 0
        self._metrics = run.metrics if cluster.node == 0 else None
        self._served: ServedTarget | None = None

    def close(self) -> None:
        if self._served is not None:
            self._served.close()

    def sampled(self, resolved: ResolvedRun) -> list[str]:
        mine = self.cluster.node == 0 and (self.cluster.device.type == "cuda" or self.leads)
        return [str(self.cluster.device)] if mine else []

    def load_state(self, say: Say) -> dict:
        """Rank 0 chooses the checkpoint and puts the record back to it."""
        cluster = self.cluster
        whole = cluster.drafts and self.whole
        if self.leads:
            state = load_training(self.run, say, whole)
            cluster.store.set("resumed", str(state["step"]))
            return state
        cluster.store.wait(["resumed"])
        return load_trainer_state(checkpoint_folder(self.run.path, int(cluster.store.get("resumed"))), whole)

    def prepare(self, resolved: ResolvedRun, data: Data, first_step: int, say: Say) -> Engine:
        if resolved.target.served:
            self._served = self._meet_server(resolved, say)
        make = self._drafter if self.cluster.drafts else self._target
        return make(resolved, data, first_step, say)

    def _meet_server(self, resolved: ResolvedRun, say: Say) -> ServedTarget:
        """The target in its server, one on each node: the node's first rank starts it, the others ask it."""
        cluster, key = self.cluster, f"server/{self.cluster.node}"
        if cluster.local == 0:
            served = open_run_server(resolved, say, self.run.path / "logs")
            cluster.store.set(key, served.url)
            return served
        cluster.store.wait([key], timedelta(seconds=LOADING))
        return open_run_server(resolved, logs=self.run.path / "logs", url=cluster.store.get(key).decode())

    def _target(self, resolved: ResolvedRun, data: Data, first_step: int, say: Say) -> TargetEngine:
        devices = resolved.topology.targets[self.cluster.index]
        spread = len(devices) > 1
        target = self._served or load_run_target(resolved, CPU if spread else devices[0], say, self_test=not spread)
        if spread:
            say(shard_target(target, devices).describe())
        train = resolved.config.train
        return TargetEngine(
            self.cluster,
            make_run_source(resolved, target, data),
            make_planner(resolved, data),
            train.steps,
            train.soft_labels,
            held_out=data.held_out_packs,
            ledger=Ledger(self.cluster.name, self.cluster.device, self._metrics),
        )

    def _drafter(self, resolved: ResolvedRun, data: Data, first_step: int, say: Say) -> Engine:
        """A drafter and its optimizer; the target is read for its head and its warm start, and kept only where it runs."""
        config, cluster = resolved.config, self.cluster
        target = self._what_a_drafter_needs(resolved)
        drafter = make_drafter(resolved, target, data, cluster.device, say)
        planner = make_planner(resolved, data, drafter)
        source = make_run_source(resolved, target, data) if cluster.roles.paired else None
        del target
        return make_engine(
            cluster,
            Replica(drafter, config.train) if self.whole else ShardedReplica(drafter, config.train, cluster),
            planner,
            first_step,
            config.train.steps,
            queue_depth=config.runtime.queue_depth,
            source=source,
            metrics=self._metrics,
        )

    def _what_a_drafter_needs(self, resolved: ResolvedRun) -> Target | ServedTarget | RandomHead:
        """The rank's own target; or one on the CPU to read from, of which random weights leave all but the head out."""
        if self._served is not None:
            return self._served
        if self.cluster.roles.paired:
            return load_run_target(resolved, self.cluster.device)
        if resolved.target.random:
            return random_head(resolved.target.name, self.cluster.device, resolved.target_dtype)
        return load_run_target(resolved, CPU, self_test=False)
