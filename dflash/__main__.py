"""The command line: `dflash COMMAND`, or `python -m dflash COMMAND` where the package is not installed."""

from __future__ import annotations

import argparse
import importlib
import sys

from dflash.errors import DFlashError

COMMANDS = tuple("train run report evaluate export serve-check regenerate sweep replay control doctor bench".split())


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code. Ctrl-C is 130, from the first import on."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="dflash",
        description="Train a DFlash drafter, and find out why a run fails.",
        epilog="example:\n  dflash train --recipe cpu --set max_minutes=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    asked = [argv[0]] if argv and argv[0] in COMMANDS else list(COMMANDS)
    for name in asked:
        importlib.import_module(f"dflash.commands.{name.replace('-', '_')}").add_parser(commands)
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
