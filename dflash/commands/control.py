"""`dflash control`: pause, resume, stop, checkpoint or evaluate a running run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.commands import command
from dflash.errors import RunError
from dflash.runs.control import ACTIONS, RunControl


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "control",
        "pause, resume, stop, checkpoint or evaluate a running run",
        "dflash control runs/night checkpoint",
    )
    parser.add_argument("folder", help="the run folder, for example runs/20260101-120000")
    parser.add_argument("action", choices=ACTIONS)
    parser.set_defaults(run=main)


def main(arguments: Any) -> int:
    """Write the wish; the run acts on it at its next step boundary. RunError for a folder that is no run's."""
    from dflash.runs.record import holds_run

    folder = Path(arguments.folder)
    if not folder.is_dir() or not holds_run(folder):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise RunError(f"{folder} {what}; give the folder of a run, for example runs/20260101-120000")
    RunControl(folder).ask(arguments.action)
    print(f"asked {folder.name} to {arguments.action}")
    return 0
