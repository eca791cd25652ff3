"""Command line: python -m dflash <command>. Each room registers its own command."""

from __future__ import annotations

import argparse
import importlib
import sys

from dflash.errors import DFlashError

# command -> module with add_parser(subparsers); imported only when the command is asked for, or for --help
COMMANDS = {
    "train": "dflash.commands.train",
    "doctor": "dflash.diagnose.doctor",
    "evaluate": "dflash.evaluate.whole",
    "export": "dflash.drafter.export",
    "regenerate": "dflash.data.generate.answers",
    "bench": "dflash.bench",
    "run": "dflash.workbook.run_notebook",
    "report": "dflash.views.report",
    "sweep": "dflash.workbook.sweep",
    "control": "dflash.runs.control",
    "replay": "dflash.train.replay",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code. Ctrl-C is 130, from the first import on."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m dflash", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    asked = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    for name in asked:
        try:
            importlib.import_module(COMMANDS[name]).add_parser(commands)
        except ModuleNotFoundError as error:
            if error.name != COMMANDS[name]:
                raise
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except DFlashError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{type(error).__name__}: {error.strerror}: {error.filename}", file=sys.stderr)  # a path the user gave
        return 2


if __name__ == "__main__":
    sys.exit(main())
