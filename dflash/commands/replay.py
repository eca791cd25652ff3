"""`dflash replay`: one step of a run again, slowly and with every question asked."""

from __future__ import annotations

import argparse
from typing import Any

from dflash.commands import command


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "replay",
        "run one step of a run again in float32 with anomaly detection",
        "dflash replay --run runs/night --step 120",
    )
    parser.add_argument("--run", dest="run_folder", required=True, help="a run folder, or its id under runs/")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto: a GPU where there is one")
    parser.add_argument(
        "--no-walk",
        action="store_true",
        help="from the checkpoint's weights as they are, without the steps in between (quick, not exact)",
    )
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Print the table; 1 when something was not finite."""
    from dflash.devices import default_device
    from dflash.runs.record import run_folder
    from dflash.train.replay import replay

    device = default_device() if args.device == "auto" else args.device
    result = replay(run_folder(args.run_folder), args.step, device, lambda line: print(line, flush=True), not args.no_walk)
    print(result.table())
    return 0 if result.finite else 1
