"""One training run from settings to final checkpoint, with its record, its protection and its way out.

config = RunConfig.from_parameters(...)
run = start_run(config)                 # refuses what cannot work; makes runs/<id>/
outcome = train_run(run, config)        # the same from a notebook cell, a terminal or a test
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dflash.compile_safety import protected
from dflash.devices import one_host_thread
from dflash.distributed.sources import fit_to, on
from dflash.errors import RunError, worker_of
from dflash.evaluate.acceptance import evaluate_acceptance
from dflash.launch.torchrun import train_with_torchrun
from dflash.runs.control import RunControl
from dflash.runs.environment import environment_summary
from dflash.runs.lock import locked, refuse_running
from dflash.runs.record import ENVIRONMENT_NAME, DeviceSampler, Run, metrics_path, read_metrics
from dflash.target.spread import shard_target
from dflash.train.loop import Outcome, Trainer
from dflash.train.memory import estimate_run, refuse_what_does_not_fit
from dflash.train.memory_help import explained
from dflash.train.prepare import Data, Job, capture_features, prepare, prepare_data
from dflash.train.refusals import refuse_run
from dflash.train.resume import dtypes_before, load_training, refuse_resume, same_plan, save_training
from dflash.train.settings import RunConfig
from dflash.train.step import Engine, Replica, SerialEngine
from dflash.train.topology import Topology, decide


def start_run(
    config: RunConfig, root: str | Path = "runs", run_id: str | None = None, sinks=(), data: Data | None = None
) -> Run:
    """Make the run folder after the cheap checks: devices exist, the data can be read, the mask token is free.

    Args:
        data: what `prepare_data(config)` gave, so that a large file is read once; give it to `train_run` too.

    Raises: ConfigError, DataError, TargetError or RunError, before anything is loaded or written.
    """
    topology = decide(config.runtime)
    refuse_run(config, topology)
    if data is None:
        prepare_data(config)
    refuse_what_does_not_fit(estimate_run(config, topology), config)
    return Run.create(root, config.to_dict(), run_id, sinks)


def train_run(
    run: Run,
    config: RunConfig,
    control: RunControl | None = None,
    *,
    resume: bool = False,
    say: Callable[[str], None] | None = None,
    data: Data | None = None,
) -> Outcome:
    """Train to the end, a stop, or an error; the run's record ends with what happened.

    Args:
        control: pause, stop, checkpoint and evaluate requests; None makes one on the run's folder.
        resume: go on from the run's newest complete checkpoint.
        say: also gets each line of progress (the run's log always does).
        data: what `prepare_data(config)` gave, if it was already called.

    Ctrl-C ends the run in good order with a checkpoint. Any other error is recorded and raised.

    Raises: RunError where another process trains this run; ResumeError where it cannot go on with these settings. Of
    these two nothing is recorded.
    """
    if config.runtime.launcher == "torchrun":  # its ranks write the record
        return train_with_torchrun(run, config, control, resume=resume, say=say)
    with locked(run.path):
        if resume:
            refuse_resume(run.path, config)
        return _recorded(run, config, control, resume, say, data)


def _recorded(
    run: Run,
    config: RunConfig,
    control: RunControl | None,
    resume: bool,
    say: Callable[[str], None] | None,
    data: Data | None,
) -> Outcome:
    """`train_run` in this process, which holds the run."""
    began = time.perf_counter()
    control = control or RunControl(run.path, run.metrics)

    def log(line: str) -> None:
        run.metrics.write("log", worker="main", level="info", message=line)
        if say is not None:
            say(line)

    try:
        outcome = _train(run, config, control, resume, log, data or prepare_data(config))
    except BaseException as error:
        told = explained(error, config)
        run.fault(told, worker=worker_of(told), step=None)
        run.end("failed", message=f"{type(told).__name__}: {told}", seconds=time.perf_counter() - began)
        if told is error:
            raise
        raise told from error
    log(f"{outcome.status} after step {outcome.step}, {outcome.skipped_steps} steps skipped")
    run.end(
        outcome.status,
        step=outcome.step,
        acceptance_length=outcome.acceptance_length,
        seconds=time.perf_counter() - began,
        skipped_steps=outcome.skipped_steps,
    )
    return outcome


def _train(
    run: Run, config: RunConfig, control: RunControl, resume: bool, log: Callable[[str], None], data: Data
) -> Outcome:
    topology = decide(config.runtime)
    refuse_run(config, topology)
    memory = estimate_run(config, topology)
    for line in topology.table(memory).splitlines():
        log(line)
    config = fit_to(config, topology, log, dtypes_before(run.path) if resume else None)
    refuse_what_does_not_fit(memory, config)
    devices = [str(device) for device in topology.devices]
    first = topology.targets[0]
    with ExitStack() as stack:
        stack.enter_context(on(topology.drafters[0]))
        stack.enter_context(DeviceSampler(run.metrics, devices))
        with on(first[0]):
            job = prepare(
                config,
                drafter_device=topology.drafters[0],
                target_device=first[0] if len(first) == 1 else "cpu",
                say=log,
                data=data,
            )
        if len(first) > 1:
            log(shard_target(job.target, first).describe())
        for line in job.data.report.table().splitlines():
            log(line)
        state = load_training(run, log) if resume else None
        stack.enter_context(one_host_thread(topology.devices))
        capture_features(job, log)
        engine = build_engine(job, topology, run)
        stack.callback(engine.close)
        first_step = 1
        if state is not None:
            engine.load_optimizer(state["optimizer"])
            first_step = state["step"] + 1
            log(f"resuming after step {state['step']}")
            if (warning := same_plan(state, job.planner)) is not None:
                log(warning)
        protection = stack.enter_context(
            protected(
                engine.warmup_jobs(job.planner.step(first_step)) if config.runtime.protect else (),
                run_dir=run.path,
                step_timeout=config.runtime.watchdog_seconds,
                on_hang=getattr(engine, "on_hang", None),
            )
        )
        for done in protection.warmup.devices if protection.warmup else ():
            run.metrics.write("warmup", device=done.device, seconds=done.seconds, graphs=done.graphs, peak=done.peak_bytes)
        trainer = Trainer(
            engine,
            job.planner,
            config.train,
            run,
            control,
            beat=protection.beat,
            evaluate=(lambda: evaluate_acceptance(job.drafter, job.source, job.data.held_out_packs))
            if job.data.held_out_packs
            else None,
            save=lambda step: save_training(run, config, engine, trainer, step),
        )
        if state is not None:
            trainer.load_state_dict(state["trainer"])
        return trainer.train(first_step)


def build_engine(job: Job, topology: Topology, run: Run) -> Engine:
    """The serial engine where one device does everything, else workers on their own devices."""
    if topology.serial:
        return SerialEngine(Replica(job.drafter, job.config.train), job.source)
    from dflash.distributed.threads import ThreadsEngine

    return ThreadsEngine(job, topology, run)


def open_run(config_path: Path, config: RunConfig, resume: bool, root: Path) -> Run:
    """The run that a config file belongs to, or a new one for a file that lies elsewhere.

    Raises: RunError when that run has been trained already and `resume` was not asked for, or is being trained now.
    """
    folder = config_path.resolve().parent
    in_a_run = folder.parent.name == root.name or metrics_path(folder).exists()
    if config_path.name != "config.yaml" or not in_a_run:
        if resume:
            raise RunError(
                f"--resume needs the config.yaml of a run folder, which {config_path} is not; give runs/<id>/config.yaml"
            )
        return start_run(config, root)
    refuse_running(folder)
    records, _ = read_metrics(metrics_path(folder))
    trained = any(record["kind"] == "step" for record in records)
    if trained and not resume:
        raise RunError(
            f"{folder} has been trained already; go on with --resume, or copy its config.yaml elsewhere to start "
            "a new run from it"
        )
    run = Run.open(folder)
    if not any(record["kind"] == "run_start" for record in records):
        environment = environment_summary()
        (folder / ENVIRONMENT_NAME).write_text(json.dumps(environment, indent=1))
        run.metrics.write("run_start", run_id=run.id, config=config.to_dict(), environment=environment)
    return run
