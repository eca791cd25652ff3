"""`dflash doctor`: what this machine is, and whether a threaded run is safe on it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dflash.commands import command


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers, "doctor", "say what this machine is, and whether a threaded run is safe on it", "dflash doctor --quick"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="probe without generating kernels (faster, same races)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Print the page; 1 where a threaded run is not safe."""
    from dflash.diagnose import doctor

    page = doctor.examine(quick=args.quick)
    print(json.dumps(page, indent=2) if args.json else doctor.render(page))
    return 0 if page["safe"] else 1
