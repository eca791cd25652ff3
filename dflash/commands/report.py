"""`dflash report`: report.html from an executed notebook or a run folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from dflash.commands import command

SERVERS = Path(".venv-serve/bin")  # of `make serve-env`


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "report",
        "make report.html from an executed notebook or a run folder",
        "dflash report runs/night/report.ipynb",
    )
    parser.add_argument("source", help="executed notebook, or run folder")
    parser.add_argument("-o", "--out", help="where to write; default: beside the source")
    parser.add_argument("--run-folder", help="the run that the notebook shows, where it is not found by itself")
    parser.add_argument("--static", action="store_true", help="images only: a small file without scripts")
    parser.set_defaults(run=main)


def main(arguments: Any) -> int:
    """Write the page; say where."""
    from dflash.target.serving import next_commands
    from dflash.views.report import build_report

    out = build_report(arguments.source, arguments.out, arguments.run_folder, arguments.static)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB)")
    lines = [runnable(line) for line in next_commands(out.parent)]
    if lines:
        print("serve its drafter:", *lines, sep="\n  ")
    return 0


def runnable(line: str) -> str:
    """The line as a shell runs it here: with a path where its program is in an environment that is not active."""
    program, _, rest = line.partition(" ")
    places = [Path(sys.executable).with_name(program), SERVERS / program]
    found = next((place for place in places if place.is_file()), None)
    if found is None or shutil.which(program):
        return line
    # vLLM for CPUs would ask for nine tenths of the machine's memory: this many GiB of cache are enough
    settings = "VLLM_CPU_KVCACHE_SPACE=1 " if found.parent == SERVERS else ""
    return f"{settings}{shlex.quote(os.path.relpath(found))} {rest}"
