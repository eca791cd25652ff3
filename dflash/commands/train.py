"""`python -m dflash train --config runs/<id>/config.yaml [--resume]`: train from a terminal, or as a rank of torchrun.

    python -m dflash train --config my.yaml                    a new run under runs/
    python -m dflash train --config runs/<id>/config.yaml      a run whose folder is there; --resume goes on with it
    torchrun --nproc-per-node 8 -m dflash train --config runs/<id>/config.yaml

Ctrl-C and SIGTERM end the run after its current step, with a checkpoint. Exit codes: 0 done, or stopped on request; 1 an
error in training; 2 a setting that cannot work; 130 and 143 ended by a signal, with a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import traceback
from pathlib import Path

from dflash.distributed.cluster import under_torchrun
from dflash.errors import ConfigError, DataError, ResumeError, RunError, TargetError
from dflash.launch.signals import graceful
from dflash.runs.control import RunControl
from dflash.runs.environment import environment_summary
from dflash.runs.lock import refuse_running
from dflash.runs.record import ENVIRONMENT_NAME, Run, metrics_path, read_metrics
from dflash.train.settings import RunConfig


def open_run(config_path: Path, config: RunConfig, resume: bool, root: Path) -> Run:
    """The run that a config file belongs to, or a new one for a file that lies elsewhere.

    Raises: RunError when that run has been trained already and `resume` was not asked for, or is being trained now.
    """
    from dflash.launch.run import start_run

    folder = config_path.resolve().parent
    in_a_run = folder.parent.name == root.name or metrics_path(folder).exists()
    if config_path.name != "config.yaml" or not in_a_run:
        if resume:
            raise RunError(f"--resume needs the config.yaml of a run folder, which {config_path} is not; give "
                           "runs/<id>/config.yaml")
        return start_run(config, root)
    refuse_running(folder)
    records, _ = read_metrics(metrics_path(folder))
    trained = any(record["kind"] == "step" for record in records)
    if trained and not resume:
        raise RunError(f"{folder} has been trained already; go on with --resume, or copy its config.yaml elsewhere to start "
                       "a new run from it")
    run = Run.open(folder)
    if not any(record["kind"] == "run_start" for record in records):
        environment = environment_summary()
        (folder / ENVIRONMENT_NAME).write_text(json.dumps(environment, indent=1))
        run.metrics.write("run_start", run_id=run.id, config=config.to_dict(), environment=environment)
    return run


def main(args: argparse.Namespace) -> int:
    """Train; see the module's text for the exit codes."""
    path = Path(args.config)
    config = RunConfig.load(path)
    if under_torchrun():
        from dflash.launch.rank import train_rank

        return train_rank(path.resolve().parent, config, args.resume)
    from dflash.launch.run import train_run
    from dflash.launch.torchrun import train_with_torchrun

    run = open_run(path, config, args.resume, Path(args.runs))
    print(f"run {run.path}", flush=True)
    control = RunControl(run.path, run.metrics)
    train = train_with_torchrun if config.runtime.launcher == "torchrun" else train_run
    with graceful(control) as received:
        try:
            outcome = train(run, config, control, resume=args.resume, say=lambda line: print(line, flush=True))
        except (ConfigError, DataError, TargetError, ResumeError):
            raise
        except KeyboardInterrupt:
            return 130
        except Exception:
            traceback.print_exc()
            return 1
    length = outcome.acceptance_length
    accepted = "" if length is None else f", acceptance length {length:.2f} (bonus token included)"
    print(f"{outcome.status} after step {outcome.step}{accepted}", flush=True)
    return 128 + received.number if received.number is not None else 0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("train", help="train a run from its config file; also under torchrun",
                                   description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a config.yaml")
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest complete checkpoint")
    parser.add_argument("--runs", default="runs", help="folder for new runs")
    parser.set_defaults(run=main)
