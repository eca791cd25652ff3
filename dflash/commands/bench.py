"""`dflash bench`: measure a drafter step, the attention, a target's capture, the pipeline."""

from __future__ import annotations

import importlib
from typing import Any

from dflash.commands import command


def add_parser(subparsers: Any) -> None:
    """Register `bench` and, under it, every bench."""
    from dflash.bench import BENCHES

    parser = command(
        subparsers,
        "bench",
        "measure a drafter step, the attention, a target's capture, the pipeline",
        "dflash bench step --tokens 1024 --anchors 64 --block-size 8",
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="what")
    for module in BENCHES.values():
        importlib.import_module(module).add_parser(benches)
