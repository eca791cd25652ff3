"""What the one-shot GPU scripts share: rows on disk, time limits, a process for each part.

A script is its own child: the parent starts `script --part a,b --seconds N` for one process, the child runs those parts
and appends rows to $OUT/results.jsonl (default ./out) as they come, so that a part that hangs or dies costs only itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

OUT = Path(os.environ.get("OUT", "out"))
LEAST_SECONDS = 15  # a process that gets less than this cannot even import torch and compile something


class TooSlow(Exception):
    """A measurement ran into its time limit."""


def threads_for(cores: int) -> int:
    """OpenMP threads of one child."""
    return max(1, cores // 8)


def child_environment(**extra: str) -> dict[str, str]:
    """This environment, unbuffered, with an eighth of the cores for OpenMP where the caller set nothing.

    Several processes share the host: with a thread for each of 32 cores in every one of them, all are several times slower.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(threads_for(cores)), **os.environ, "PYTHONUNBUFFERED": "1", **extra}


def start_child(command: list[str], log: IO, **extra: str) -> subprocess.Popen:
    """A Python process of `command` with `child_environment`, its output in `log`."""
    return subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=child_environment(**extra))


def end_child(child: subprocess.Popen) -> int:
    """Kill it; its exit code."""
    child.kill()
    return child.wait()


def command_line(doc: str, seconds: int, names: list[str]) -> argparse.Namespace:
    """`seconds`, `only` (a list, or None for all) and, in a child, `part`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=seconds, help="for everything together")
    parser.add_argument(
        "--only", type=lambda text: text.split(",") if text else None, help="parts, comma-separated: " + " ".join(names)
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def _alarm(signum, frame):
    raise TooSlow


@dataclass(frozen=True)
class Harness:
    """The rows of one script and its processes.

    script: the file to start again for a part. key: what its rows call a part. starts: how often a process that ends
    badly is started; a later start does what the earlier ones have no row for.
    """

    script: str
    key: str = "part"
    starts: int = 1

    # -- rows ---------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Make the folder; forget earlier rows."""
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "results.jsonl").unlink(missing_ok=True)

    def results(self) -> list[dict]:
        path = OUT / "results.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def record(self, part: str, name: str, **fields) -> None:
        """Append one row, at once."""
        with open(OUT / "results.jsonl", "a") as file:
            file.write(json.dumps({self.key: part, "name": name, **fields}, default=str) + "\n")

    # -- in a child -----------------------------------------------------------------------------------------------------

    def work(self, args: argparse.Namespace, functions: Mapping[str, Callable], before: Callable = lambda: None) -> None:
        """Run `args.part`: names of `functions`, each after `before()`; `name:3` passes the number on."""
        faulthandler.dump_traceback_later(args.seconds, exit=True)
        for part in args.part.split(","):
            name, _, number = part.partition(":")
            before()
            functions[name](*([int(number)] if number else []))

    def attempt(self, part: str, name: str, seconds: int, call: Callable[[], dict]) -> None:
        """Run one measurement that has no row yet; record what it returns, or how it failed.

        `seconds` are wall-clock; a failure becomes a row with ok False, error and traceback. A lost CUDA context ends the
        process with code 3.
        """
        if any(r[self.key] == part and r["name"] == name for r in self.results()):
            return
        signal.signal(signal.SIGALRM, _alarm)
        signal.alarm(seconds)
        begin = time.time()
        try:
            fields = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # one measurement's failure must not cost the others
            text = traceback.format_exc()
            print(f"[{part}] {name} FAILED\n{text}", flush=True)
            fields = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": text[-3000:]}
        finally:
            signal.alarm(0)
        wall = time.time() - begin
        self.record(**fields | {"part": part, "name": name, "wall": round(wall, 1)})
        verdict = {True: " ok", False: " NOT OK"}.get(fields.get("ok"), "")
        print(f"[{part}] {name}: {wall:.1f} s{verdict}", flush=True)
        if "CUDA error" in fields.get("error", "") or "AcceleratorError" in fields.get("error", ""):
            sys.exit(3)  # a new process does the rest

    # -- in the parent --------------------------------------------------------------------------------------------------

    def run_process(self, parts: str, seconds: float, log: IO, **extra: str) -> None:
        """One process for comma-separated parts, within `seconds`, its output in `log`."""
        end = time.time() + seconds
        for start in range(1, self.starts + 1):
            left = end - time.time()
            if left < LEAST_SECONDS:
                self.record(parts, "-", ok=False, error="no time left")
                return
            child = start_child([self.script, "--part", parts, "--seconds", str(int(left))], log, **extra)
            try:
                code = child.wait(timeout=left + 5)  # the child ends itself at `left`, with its stacks
            except subprocess.TimeoutExpired:
                code = end_child(child)
            print(f"{parts}: {seconds - (end - time.time()):.0f} s, exit {code}", flush=True)
            if code == 0:
                return
            name = f"start {start}" if self.starts > 1 else "-"
            self.record(parts, name, ok=False, error=f"the process ended with {code}; see log.txt")
