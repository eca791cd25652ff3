"""One training run from settings to final checkpoint, with its record, its protection and its way out.

config = RunConfig.from_parameters(...)
run = start_run(config)                 # refuses what cannot work; makes runs/<id>/
outcome = train_run(run, config)        # the same from a notebook cell, a terminal or a test
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from dflash.devices import on
from dflash.distributed.threads import threads_engine
from dflash.errors import RunError, worker_of
from dflash.launch.course import Course, Say
from dflash.launch.torchrun import launch_ranks
from dflash.runs.control import RunControl
from dflash.runs.environment import environment_summary
from dflash.runs.lock import locked, refuse_running
from dflash.runs.record import ENVIRONMENT_NAME, Run, metrics_path, read_metrics
from dflash.target.capture import Target
from dflash.target.served import ServedTarget
from dflash.train.checkpoint import latest_checkpoint
from dflash.train.loop import Outcome
from dflash.train.memory_help import explained
from dflash.train.prepare import Data, capture_features, prepare, prepare_data
from dflash.train.resolve import resolve, settle_run
from dflash.train.resolved import ResolvedRun
from dflash.train.resume import load_training, refuse_resume, rewind_record
from dflash.train.settings import RunConfig
from dflash.train.step import Engine, Replica, SerialEngine


def start_run(
    config: RunConfig, root: str | Path = "runs", run_id: str | None = None, sinks=(), data: Data | None = None
) -> Run:
    """Make the run folder after the cheap checks: devices exist and have the memory, the data can be read.

    Args:
        data: what `prepare_data(resolve(config))` gave, so that a large file is read once; give it to `train_run` too.

    Raises: ConfigError, DataError, TargetError or RunError, before anything is loaded or written.
    """
    resolved = resolve(config)
    if data is None:
        prepare_data(resolved)
    run = Run.create(root, config.to_dict(), run_id, sinks)
    resolved.save(run.path)
    return run


def train_run(
    run: Run,
    config: RunConfig,
    control: RunControl | None = None,
    *,
    resume: bool = False,
    say: Say | None = None,
    data: Data | None = None,
) -> Outcome:
    """Train to the end, a stop, or an error, in this process or in ranks of torchrun; the run's record ends with what
    happened.

    Args:
        control: pause, stop, checkpoint and evaluate requests; None makes one on the run's folder.
        resume: go on from the run's newest complete checkpoint.
        say: also gets each line of progress (the run's log always does).
        data: what `prepare_data` gave, if it was already called.

    Ctrl-C ends the run after its step, with a checkpoint. Any other error is recorded and raised.

    Raises: RunError where another process trains this run; ConfigError, TargetError or ResumeError where it cannot go on
    with these settings. Of these nothing is recorded.
    """
    control = control or RunControl(run.path, run.metrics)
    ranks = config.runtime.launcher == "torchrun"
    with locked(run.path):
        if resume:
            refuse_resume(run.path, config)
        # a process that only starts ranks does not ask GPUs: it would keep a context on each
        resolved = settle_run(run.path, config, ask_gpus=not ranks or torch.cuda.is_initialized())
        if not ranks:
            return _train_here(run, resolved, control, resume, say, data)
        if resume:
            rewind_record(run, latest_checkpoint(run.path))  # before anyone follows the record
    return launch_ranks(run, resolved.topology, control, resume, say)  # rank 0 holds the lock from here on


def _train_here(
    run: Run, resolved: ResolvedRun, control: RunControl, resume: bool, say: Say | None, data: Data | None
) -> Outcome:
    """`train_run` in this process, which holds the run."""
    began = time.perf_counter()

    def log(line: str) -> None:
        run.metrics.write("log", worker="main", level="info", message=line)
        if say is not None:
            say(line)

    try:
        with on(resolved.topology.drafters[0]):
            return Course(run, resolved, control, InThisProcess(run), log, data).take(resume)
    except BaseException as error:
        told = explained(error, resolved)
        run.fault(told, worker=worker_of(told), step=None)
        run.end("failed", message=f"{type(told).__name__}: {told}", seconds=time.perf_counter() - began)
        if told is error:
            raise
        raise told from error


class InThisProcess:
    """`Place` of a process that does all of a run: the serial engine where one device does everything, else workers on
    their own devices."""

    leads = True

    def __init__(self, run: Run):
        self.run = run
        self._target: Target | ServedTarget | None = None

    def close(self) -> None:
        if self._target is not None:
            self._target.close()

    def sampled(self, resolved: ResolvedRun) -> list[str]:
        return [str(device) for device in resolved.topology.devices]

    def load_state(self, say: Say) -> dict:
        return load_training(self.run, say)

    def prepare(self, resolved: ResolvedRun, data: Data, first_step: int, say: Say) -> Engine:
        prepared = prepare(resolved, say, data, self.run.path / "logs")
        self._target = prepared.target
        capture_features(prepared.source, data, say)
        if resolved.topology.serial:
            return SerialEngine(Replica(prepared.drafter, resolved.config.train), prepared.source, prepared.planner)
        return threads_engine(prepared, self.run)


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
