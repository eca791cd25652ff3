"""The command line: `dflash COMMAND`, or `python -m dflash COMMAND` where the package is not installed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable

from dflash.errors import DFlashError

COMMANDS = tuple("train run report evaluate export serve-check regenerate sweep replay control doctor bench".split())


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code. Ctrl-C is 130, from the first import on."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def build_parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line, with these commands. No command's own imports happen here, so help is there at once."""
    parser = argparse.ArgumentParser(
        prog="dflash",
        description="Train a DFlash drafter, and find out why a run fails.\n"
        'Commands are completed on TAB after: eval "$(register-python-argcomplete dflash)"',
        epilog="example:\n  dflash train --recipe cpu --set max_minutes=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in names:
        importlib.import_module(f"dflash.commands.{name.replace('-', '_')}").add_parser(commands)
    return parser


def _main(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser([argv[0]] if argv and argv[0] in COMMANDS else COMMANDS)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could follow
        import argcomplete

        argcomplete.autocomplete(parser)
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
