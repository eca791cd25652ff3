"""`python -m dflash bench <what>`: measurements that print a table and write JSON. Nothing here is a test.

Each bench is a module with `add_parser(subparsers)`; add a line to `BENCHES` to register one.
"""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "step": "dflash.bench.step",
    "attention": "dflash.bench.attention",
    "target": "dflash.bench.target",
    "pipeline": "dflash.bench.pipeline",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench` and, under it, every bench whose module exists."""
    parser = subparsers.add_parser("bench", help="measure a drafter step, the attention, a target's feature capture")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="what")
    for module in BENCHES.values():
        try:
            importlib.import_module(module).add_parser(benches)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
