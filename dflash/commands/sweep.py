"""`dflash sweep`: run a notebook over a grid of parameters and compare the runs."""

from __future__ import annotations

import sys
from typing import Any

from dflash.commands import command
from dflash.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "sweep",
        "run a notebook over a grid of parameters and compare the runs",
        "dflash sweep notebooks/05_train.ipynb runs/gamma -g gamma 2,4 -p max_minutes 2",
    )
    parser.add_argument("notebook")
    parser.add_argument("folder", help="one folder a point is made here, and comparison.html")
    parser.add_argument("-g", "--grid", nargs=2, action="append", default=[], metavar=("NAME", "V1,V2,.."))
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("-y", "--yaml", action="append", default=[], metavar="'NAME: VALUE'", help="axes may be lists here")
    parser.set_defaults(run=main)


def main(arguments: Any) -> int:
    """Run the grid; the worst exit code of its points."""
    from dflash.workbook.run_notebook import OK, parameters_from
    from dflash.workbook.sweep import sweep

    axes: dict[str, list[Any]] = {
        name: [value for value in values.split(",") if value.strip()] for name, values in arguments.grid
    }
    fixed = parameters_from(arguments.parameter, [])
    for name, value in parameters_from([], arguments.yaml).items():
        (axes if isinstance(value, list) else fixed)[name] = value
    if not axes:
        raise ConfigError("nothing to sweep; name at least one axis, for example -g block_size 4,8,16")
    codes = sweep(arguments.notebook, arguments.folder, axes, fixed)
    failed = [name for name, code in codes.items() if code != OK]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return max(codes.values(), default=OK)
