"""`dflash train`: train from a terminal, or as a rank of torchrun.

    dflash train --recipe cpu --set steps=100             a new run under runs/
    dflash train --config my.yaml --set lr=3e-3           the same with settings from a file
    dflash train --config runs/<id>/config.yaml           a run whose folder is there; --resume goes on with it
    torchrun --nproc-per-node 8 -m dflash train --config runs/<id>/config.yaml

Ctrl-C and SIGTERM end the run after its current step, with a checkpoint. Exit codes: 0 done, or stopped on request; 1 an
error in training; 2 a setting that cannot work; 130 and 143 ended by a signal, with a checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.commands import command

if TYPE_CHECKING:
    from dflash.runs.record import Run
    from dflash.train.settings import RunConfig


def main(args: argparse.Namespace) -> int:
    """Train; see the module's text for the exit codes."""
    import traceback

    from dflash.distributed.cluster import under_torchrun
    from dflash.errors import ConfigError, DataError, ResumeError, TargetError
    from dflash.launch.run import open_run, start_run, train_run
    from dflash.launch.signals import graceful
    from dflash.runs.control import RunControl
    from dflash.train.settings import RunConfig

    path, changes = args.config and Path(args.config), dict(args.set)
    config = RunConfig.load(path, **changes) if path else RunConfig.from_parameters(**{"recipe": args.recipe, **changes})
    if under_torchrun():
        from dflash.launch.rank import train_rank

        if path is None or changes:
            raise ConfigError("ranks share one file; start them with --config runs/<id>/config.yaml and without --set")
        return train_rank(path.resolve().parent, config, args.resume)
    if path is None and args.resume:
        raise ConfigError("--resume goes on with a run; give its --config runs/<id>/config.yaml")
    run = open_run(path, config, args.resume, Path(args.runs)) if path else start_run(config, args.runs, args.run_id)
    before = store_changes(run, path, config) if changes and path else None
    print(f"run {run.path}", flush=True)
    control = RunControl(run.path, run.metrics)
    with graceful(control) as received:
        try:
            outcome = train_run(run, config, control, resume=args.resume, say=lambda line: print(line, flush=True))
        except (ConfigError, DataError, TargetError, ResumeError):
            if before is not None:
                path.write_text(before)
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


def store_changes(run: Run, path: Path, config: RunConfig) -> str | None:
    """Write what `--set` changed into the config.yaml of the run that goes on, where ranks and a later resume read it; what
    stood there is returned. None for a file that is no run's own."""
    import yaml

    if path.resolve().parent != run.path.resolve():
        return None
    before, run.config = path.read_text(), config.to_dict()
    path.write_text(yaml.safe_dump(run.config, sort_keys=False))
    return before


def setting(text: str) -> tuple[str, str]:
    """An argparse type: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"wanted NAME=VALUE, for example lr=3e-3, got {text!r}")
    return name.strip(), value


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "train",
        "train a run by a recipe or a config file; also under torchrun",
        "dflash train --recipe gpu --set lr=3e-3 --set steps=2000",
        __doc__,
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--recipe", default="auto", help="cpu, gpu, large, story; auto: by the devices and the target")
    start.add_argument("--config", metavar="FILE", help="a config.yaml: of a run, or of your own")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a setting to change")
    parser.add_argument("--resume", action="store_true", help="go on from the run's newest complete checkpoint")
    parser.add_argument("--runs", default="runs", help="folder for new runs")
    parser.add_argument("--run-id", metavar="ID", help="name of a new run's folder; default: the time of day")
    parser.set_defaults(run=main)
