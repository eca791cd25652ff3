"""Numbers and paths of a bench's command line, checked before anything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


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


def writable(text: str) -> str:
    """An argparse type: the path of a file that can be written; its folder is made. What a file holds stays until then."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            probe = path.resolve()  # a link stays
            probe.touch()
            probe.unlink()
        elif path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        elif not os.access(path, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"wanted a file that can be written, got {text!r} ({error.strerror}); name a file in a folder of yours"
        ) from None
    return text


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json`, checked before the measurement whose results it is for."""
    parser.add_argument("--json", type=writable, help="write the results here")


def add_timing_arguments(parser: argparse.ArgumentParser, warmup: int, repeats: int) -> None:
    """`--warmup` and `--repeats`, with these defaults."""
    parser.add_argument("--warmup", type=whole(0), default=warmup, help="calls before the timed ones")
    parser.add_argument("--repeats", type=whole(), default=repeats, help="timed calls")
