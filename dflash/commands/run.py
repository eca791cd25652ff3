"""`dflash run NOTEBOOK OUT -p name value`: papermill with checked parameters and a report even on failure."""

from __future__ import annotations

import sys
import time
from typing import Any

from dflash.commands import command
from dflash.errors import DFlashError

EXIT_CODES = """Exit codes: 0 every cell ran; 1 a cell raised (a cell's sys.exit(n) returns n); 2 wrong parameters, or no
such notebook or kernel, nothing ran; 130 interrupted; 138 the kernel was killed (out of memory, a crash in native code)."""


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "run",
        "run a notebook by papermill: checked parameters, a report even on failure",
        "dflash run notebooks/05_train.ipynb runs/night/report.ipynb -p gpus 5,6,7",
        f"Run a notebook by papermill; build its report whatever happens. {EXIT_CODES}",
    )
    parser.add_argument("notebook")
    parser.add_argument("out", nargs="?", help="executed copy; default: runs/<time of day>/report.ipynb")
    pair = dict(nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("-p", "--parameter", **pair, help="a parameter or setting, read by its declared type")
    parser.add_argument("-r", "--raw", **pair, help="the same, for papermill's habit")
    parser.add_argument("-y", "--yaml", action="append", default=[], metavar="'NAME: VALUE'", help="lists and null, too")
    parser.add_argument("-f", "--file", action="append", default=[], help="parameters as a YAML file")
    parser.add_argument("-k", "--kernel", help="kernel name; default: the notebook's own, else python3")
    parser.add_argument("--cell-timeout", type=int, metavar="SECONDS", help="end a cell that runs longer than this")
    parser.add_argument("--static", action="store_true", help="report with images only")
    parser.add_argument("--parameters", action="store_true", help="list the notebook's parameters and stop")
    parser.set_defaults(run=main)


def main(arguments: Any) -> int:
    """Run it; the exit code says how it ended."""
    from dflash.workbook.parameters import declared_parameters, help_text, read_notebook
    from dflash.workbook.run_notebook import INTERRUPTED, KILLED, OK, REFUSED, parameters_from, run_notebook

    if arguments.parameters:
        print(help_text(declared_parameters(read_notebook(arguments.notebook))))
        return OK
    out = arguments.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}/report.ipynb"
    try:
        given = parameters_from(arguments.parameter + arguments.raw, arguments.yaml, arguments.file)
        launched = run_notebook(arguments.notebook, out, given, arguments.kernel, arguments.cell_timeout, arguments.static)
    except DFlashError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return REFUSED
    words = {OK: "finished", KILLED: "its kernel was KILLED", INTERRUPTED: "was interrupted"}
    print(f"{launched.out} {words.get(launched.code, 'FAILED')} after {launched.seconds:.0f} s", file=sys.stderr)
    if launched.code not in (OK, INTERRUPTED) and launched.verdict.error:
        print(launched.verdict.error[:2000], file=sys.stderr)
    if launched.report is not None:
        print(f"report: {launched.report}", file=sys.stderr)
    return launched.code
