"""One thin file for each command line: options, an example, and a call into a room."""

from __future__ import annotations

import argparse
from typing import Any


def command(subparsers: Any, name: str, help: str, example: str, text: str = "") -> argparse.ArgumentParser:
    """A command's parser, with an example under its options. `text` may say more than `help`, which is one line."""
    return subparsers.add_parser(
        name,
        help=help,
        description=text or help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
