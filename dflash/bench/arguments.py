"""Numbers of a bench's command line, refused with what was wanted before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(least: int = 1) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`; argparse adds the option's name and ends with code 2."""
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"wanted a whole number of at least {least}, got {text!r}")
        return value

    return number


def share(text: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"wanted a number above 0 and at most 1, got {text!r}")
    return value


def add_timing_arguments(parser: argparse.ArgumentParser, warmup: int, repeats: int) -> None:
    """`--warmup` and `--repeats`, with these defaults."""
    parser.add_argument("--warmup", type=whole(0), default=warmup, help="calls before the timed ones")
    parser.add_argument("--repeats", type=whole(), default=repeats, help="timed calls")
