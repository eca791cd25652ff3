"""A configured run in one rank of torchrun: `dflash train --config runs/<id>/config.yaml` with RANK set."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from dflash.compile_safety import protected
from dflash.devices import dtype_named, one_host_thread
from dflash.distributed.cluster import CONTROL, Cluster, LifeLine, refusing, roles_of
from dflash.distributed.processes import ProcessEngine
from dflash.distributed.ranks import held_out_source, make_engine, run_rank, serve_target
from dflash.distributed.sharding import ShardedReplica
from dflash.distributed.sources import fit_to
from dflash.evaluate.acceptance import evaluate_acceptance
from dflash.launch.signals import graceful
from dflash.runs.control import RunControl
from dflash.runs.lock import locked
from dflash.runs.record import DeviceSampler, MetricsWriter, Run
from dflash.target.capture import Target, load_target
from dflash.target.features import make_source
from dflash.target.random_weights import RandomHead, is_random, random_head
from dflash.target.spread import shard_target
from dflash.train import shards
from dflash.train.checkpoint import checkpoint_folder, load_trainer_state
from dflash.train.loop import Trainer
from dflash.train.memory_help import explained
from dflash.train.plan import Planner
from dflash.train.prepare import Data, make_drafter, make_planner, prepare_data, say_random
from dflash.train.refusals import refuse_run
from dflash.train.resume import dtypes_before, load_training, refuse_resume, same_plan, save_training, whole_drafter
from dflash.train.settings import RunConfig
from dflash.train.step import FeatureSource, Replica
from dflash.train.topology import Topology, decide

_LOST = ("connection closed by peer", "connection reset by peer", "connection was likely closed", "remote process exited")


def train_rank(folder: str | Path, config: RunConfig, resume: bool = False) -> int:
    """This process's part of the run in `folder`; returns the exit code."""
    run, rank_zero = Run.open(folder), os.environ["RANK"] == "0"
    handled = os.environ.get(CONTROL)
    control = RunControl(run.path, run.metrics, handled=json.loads(handled) if handled else None)
    with ExitStack() as held, refusing():
        if rank_zero:
            held.enter_context(locked(run.path))
        if resume:
            refuse_resume(run.path, config)
        topology = decide(config.runtime)
        refuse_run(config, topology)
        roles_of(topology, int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        hold = held.pop_all()
    began = time.perf_counter()

    def failed(cluster: Cluster, failure: dict, error: BaseException | None) -> None:
        if error is not None:
            run.fault(error, worker=cluster.name)
        elif cluster.rank == 0 and failure["rank"] < 0 or "no sign of life" in failure["message"]:
            run.metrics.write("fault", **{k: failure.get(k) for k in ("worker", "type", "message", "traceback")}, step=None)
        if cluster.rank == 0:
            run.end("failed", message=told(failure), seconds=time.perf_counter() - began)

    def work(cluster: Cluster, life: LifeLine) -> None:
        try:
            _work(cluster, life, run, config, topology, resume, began, control)
        except torch.OutOfMemoryError as error:
            raise explained(error, config, cluster.name) from error

    with hold:
        return run_rank(topology, work, config.runtime.watchdog_seconds, failed)


def told(failure: dict) -> str:
    """What ended the run, as the first rank that noticed says it. Who finds a connection closed is not the cause."""
    lost = any(sign in failure["message"].casefold() for sign in _LOST)
    return f"{failure['worker']}: {'lost another rank: ' if lost else ''}{failure['message']}"


def _work(
    cluster: Cluster,
    life: LifeLine,
    run: Run,
    config: RunConfig,
    topology: Topology,
    resume: bool,
    began: float,
    control: RunControl,
) -> None:
    def say(line: str) -> None:
        run.metrics.write("log", worker=cluster.name, level="info", message=line)

    with ExitStack() as stack:
        if cluster.node == 0 and (cluster.device.type == "cuda" or cluster.rank == 0):
            stack.enter_context(DeviceSampler(run.metrics, [str(cluster.device)]))
        # rank 0 decides when to stop; a terminal's Ctrl-C reaches everyone
        leads = cluster.rank == 0
        stack.enter_context(graceful(control if leads else _Ignore(), announce=False, insist=leads))
        for line in topology.table().splitlines() if leads else ():
            say(line)
        config = _fitted(cluster, config, topology, say, run if resume else None)
        data = prepare_data(config)
        state = None
        if resume:
            whole = cluster.drafts and config.runtime.drafter_parallel == "replicate"
            state = _resumed(cluster, run, say, whole)
        stack.enter_context(one_host_thread(topology.devices))
        first_step = 1 if state is None else state["step"] + 1
        soft, metrics = config.train.soft_labels, run.metrics if cluster.node == 0 else None
        if not cluster.drafts:
            target = _load_target(config, data, topology.targets[cluster.index], topology)
            say(target.describe())
            say_random(config, say)
            serve_target(
                cluster,
                _source(config, target, data, topology),
                order_planner(config, data),
                first_step,
                config.train.steps,
                soft,
                data.held_out_packs,
                metrics,
            )
            return
        engine = _drafter_engine(cluster, config, data, topology, state, first_step, run, metrics)
        source = held_out_source(cluster, engine, data.held_out_packs)
        plan = engine.planner.step(first_step)
        protection = stack.enter_context(
            protected(
                engine.warmup_jobs(plan) if config.runtime.protect else (),
                run_dir=run.path if engine.leads else None,
                step_timeout=config.runtime.watchdog_seconds,
            )
        )
        for done in protection.warmup.devices if protection.warmup else ():
            run.metrics.write("warmup", device=done.device, seconds=done.seconds, graphs=done.graphs, peak=done.peak_bytes)
        if engine.leads:
            _lead(engine, source, run, config, data, state, first_step, protection.beat, say, began, control)
        else:
            engine.start(first_step)
            engine.follow(protection.beat)


def _resumed(cluster: Cluster, run: Run, say: Callable[[str], None], whole: bool) -> dict:
    """The state that all ranks go on from: rank 0 chooses the checkpoint and puts the record back to it."""
    if cluster.rank == 0:
        state = load_training(run, say, whole)
        cluster.store.set("resumed", str(state["step"]))
        return state
    cluster.store.wait(["resumed"])
    return load_trainer_state(checkpoint_folder(run.path, int(cluster.store.get("resumed"))), whole)


def _lead(
    engine: ProcessEngine,
    source: FeatureSource | None,
    run: Run,
    config: RunConfig,
    data: Data,
    state: dict | None,
    first_step: int,
    beat: Callable[[], None],
    say: Callable[[str], None],
    began: float,
    control: RunControl,
) -> None:
    """Rank 0: the training loop, and the end of the run's record."""
    for line in data.report.table().splitlines():
        say(line)

    def evaluate() -> dict:
        with whole_drafter(engine) as drafter:
            return evaluate_acceptance(drafter, source, data.held_out_packs)

    trainer = Trainer(
        engine,
        engine.planner,
        config.train,
        run,
        control,
        beat=beat,
        evaluate=evaluate if source is not None else None,
        save=lambda step: save_training(run, config, engine, trainer, step),
    )
    if state is not None:
        trainer.load_state_dict(state["trainer"])
        say(f"resuming after step {state['step']}")
        if (warning := same_plan(state, engine.planner)) is not None:
            say(warning)
    outcome = trainer.train(first_step)
    engine.finish()
    say(f"{outcome.status} after step {outcome.step}, {outcome.skipped_steps} steps skipped")
    run.end(
        outcome.status,
        step=outcome.step,
        acceptance_length=outcome.acceptance_length,
        seconds=time.perf_counter() - began,
        skipped_steps=outcome.skipped_steps,
    )


class _Ignore:
    """What a stop asks of a rank that does not lead: nothing."""

    def stop(self) -> None:
        pass


def _fitted(
    cluster: Cluster, config: RunConfig, topology: Topology, say: Callable[[str], None], resumed: Run | None
) -> RunConfig:
    """`fit_to` as rank 0 sees it: "auto" dtypes are measured on a CPU, and all ranks must come to the same; packs are
    counted over all nodes."""
    if cluster.rank == 0:
        before = None if resumed is None else dtypes_before(resumed.path)
        everywhere = replace(topology, drafters=topology.drafters * cluster.roles.nodes)
        cluster.store.set("config", json.dumps(fit_to(config, everywhere, say, before).to_dict()))
    cluster.store.wait(["config"])
    return RunConfig.from_dict(json.loads(cluster.store.get("config")))


def _load_target(config: RunConfig, data: Data, devices: tuple[torch.device, ...], topology: Topology) -> Target:
    sharded = len(devices) > 1
    target = load_target(
        config.target.target,
        device="cpu" if sharded else devices[0],
        layer_ids=data.layer_ids,
        dtype=config.target.target_dtype,
        attention=config.target.target_attention,
        self_test=not sharded,
        fast=config.target.fast_capture and not sharded,
    )
    return shard_target(target, devices) if sharded else target


def _what_a_drafter_needs(cluster: Cluster, config: RunConfig, data: Data) -> Target | RandomHead:
    """The rank's own target; or one on the CPU to read from, of which random weights leave all but the head out."""
    name, dtype = config.target.target, config.target.target_dtype
    if cluster.roles.paired:
        return load_target(
            name,
            device=cluster.device,
            layer_ids=data.layer_ids,
            dtype=dtype,
            attention=config.target.target_attention,
            fast=config.target.fast_capture,
        )
    if is_random(name):
        return random_head(name, cluster.device, dtype_named(dtype))
    return load_target(name, device="cpu", layer_ids=data.layer_ids, dtype=dtype, self_test=False)


def _source(config: RunConfig, target: Target, data: Data, topology: Topology) -> FeatureSource:
    """As `job.prepare` makes it, so that the numbers are the same; each target keeps its share of the cache."""
    train = config.train
    return make_source(
        target,
        data.train_packs,
        mode=train.features,
        max_bytes=int(train.cache_gib * 2**30),
        directory=train.cache_dir,
        keep_last_hidden=train.soft_labels,
        dtype=torch.bfloat16,
    )


def order_planner(config: RunConfig, data: Data) -> Planner:
    """A planner for the order of packs alone; a target rank has no drafter to ask for its vocabulary."""
    train = config.train
    return Planner(
        data.train_packs,
        seed=train.seed,
        packs_per_step=train.packs_per_step,
        block_size=config.drafter.block_size,
        max_anchors=config.drafter.max_anchors,
        gamma=train.gamma,
        reduction=train.reduction,
        soft_labels=train.soft_labels,
    )


def _drafter_engine(
    cluster: Cluster,
    config: RunConfig,
    data: Data,
    topology: Topology,
    state: dict | None,
    first_step: int,
    run: Run,
    metrics: MetricsWriter | None,
) -> ProcessEngine:
    """A drafter and its optimizer; the target is read for its head and its warm start, and kept only where it runs."""
    paired = cluster.roles.paired
    target = _what_a_drafter_needs(cluster, config, data)
    sharded = config.runtime.drafter_parallel == "fsdp2"
    drafter = make_drafter(
        config,
        target,
        data,
        cluster.device,
        lambda line: run.metrics.write("log", worker=cluster.name, level="info", message=line),
    )
    planner = make_planner(config, data, drafter)
    source = _source(config, target, data, topology) if paired else None
    del target
    replica = ShardedReplica(drafter, config.train, cluster) if sharded else Replica(drafter, config.train)
    if state is not None and state["optimizer"].get("sharded"):
        replica.optimizer.load_shards(checkpoint_folder(run.path, state["step"]) / shards.FOLDER, state["optimizer"])
    elif state is not None:
        replica.optimizer.load_state_dict(state["optimizer"])
    return make_engine(
        cluster,
        replica,
        planner,
        first_step,
        config.train.steps,
        queue_depth=config.runtime.queue_depth,
        packs_per_step=config.train.packs_per_step,
        source=source,
        metrics=metrics,
        timeout=config.runtime.watchdog_seconds,
    )
