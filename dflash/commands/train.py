"""`dflash train --config runs/<id>/config.yaml [--resume]`: train from a terminal, or as a rank of torchrun.

    dflash train --config my.yaml                    a new run under runs/
    dflash train --config runs/<id>/config.yaml      a run whose folder is there; --resume goes on with it
    torchrun --nproc-per-node 8 -m dflash train --config runs/<id>/config.yaml

Ctrl-C and SIGTERM end the run after its current step, with a checkpoint. Exit codes: 0 done, or stopped on request; 1 an
error in training; 2 a setting that cannot work; 130 and 143 ended by a signal, with a checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash.commands import command


def main(args: argparse.Namespace) -> int:
    """Train; see the module's text for the exit codes."""
    import traceback

    from dflash.distributed.cluster import under_torchrun
    from dflash.errors import ConfigError, DataError, ResumeError, TargetError
    from dflash.launch.run import open_run, train_run
    from dflash.launch.signals import graceful
    from dflash.runs.control import RunControl
    from dflash.train.settings import RunConfig

    path = Path(args.config)
    config = RunConfig.load(path)
    if under_torchrun():
        from dflash.launch.rank import train_rank

        return train_rank(path.resolve().parent, config, args.resume)
    run = open_run(path, config, args.resume, Path(args.runs))
    print(f"run {run.path}", flush=True)
    control = RunControl(run.path, run.metrics)
    with graceful(control) as received:
        try:
            outcome = train_run(run, config, control, resume=args.resume, say=lambda line: print(line, flush=True))
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


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "train",
        "train a run from its config file; also under torchrun",
        "dflash train --config runs/night/config.yaml --resume",
        __doc__,
    )
    parser.add_argument("--config", required=True, help="a config.yaml")
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest complete checkpoint")
    parser.add_argument("--runs", default="runs", help="folder for new runs")
    parser.set_defaults(run=main)
