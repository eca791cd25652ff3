"""Run a piece of this package in a fresh process with a time limit, so that a hang is a result."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

RESULT = "RESULT "  # the child's last line that starts so carries its JSON
TAIL = 4000


@dataclass(frozen=True)
class IsolatedResult:
    """`value` is the child's JSON; None where it hung, crashed or printed nothing."""

    value: dict | None
    hung: bool
    exit_code: int | None
    seconds: float
    output: str  # tail of stdout and stderr
    fatal: str | None = None  # one line, where the interpreter itself died: of what, and in which Python functions

    @property
    def death(self) -> str:
        """What ended a child that printed no result, in one line."""
        if self.exit_code is not None and self.exit_code < 0:
            how = f"killed by {signal.Signals(-self.exit_code).name}"
        else:
            how = f"exit code {self.exit_code}"
        last = self.output.strip().splitlines() or ["no output"]
        return f"{how}: {self.fatal or last[-1]}"


def run_isolated(
    module: str, arguments: list[str], limit: float, cache: Path | None = None, env: dict[str, str] | None = None
) -> IsolatedResult:
    """`python -m module arguments` with an empty compile cache, killed with all its children after `limit` seconds.

    Args:
        cache: compile cache to use instead of a fresh one that is deleted afterwards.
        env: variables to set on top of the present ones.
    """
    folder = cache or Path(tempfile.mkdtemp(prefix="dflash-cache-"))
    root = Path(__file__).resolve().parents[2]
    variables = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")])),
        "PYTHONFAULTHANDLER": "1",
        **(env or {}),
    }
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryFile("w+") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
                text=True,
            )
            try:
                code, hung = process.wait(limit), False
            except subprocess.TimeoutExpired:
                code, hung = None, True
            finally:
                _kill_group(process)
            sink.seek(0)
            text = sink.read()
    finally:
        if cache is None:
            shutil.rmtree(folder, ignore_errors=True)
    return IsolatedResult(_result(text), hung, code, time.perf_counter() - begin, text[-TAIL:], _fatal(text))


def report(value: dict) -> None:
    """What the child calls to hand its result over."""
    print(RESULT + json.dumps(value), flush=True)


def _kill_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _fatal(text: str, frames: int = 4) -> str | None:
    """What faulthandler wrote of a fatal error: its name, and the innermost functions of the thread that it happened in."""
    before, found, rest = text.rpartition("Fatal Python error: ")
    if not found:
        return None
    name, _, stacks = rest.partition("\n")
    _, current, stack = stacks.partition("Current thread ")
    where = [
        f"{function} ({Path(file).name}:{line})"
        for file, line, function in re.findall(
            r'  File "(.+)", line (\d+) in (.+)', (stack if current else stacks).split("\n\n")[0]
        )
    ]
    late = ", after the stacks of all threads had been printed" if "Timeout (" in before else ""
    return f"{name.strip()}{late}" + (f", in {' < '.join(where[:frames])}" if where else "")


def _result(text: str) -> dict | None:
    lines = [line for line in text.splitlines() if line.startswith(RESULT)]
    try:
        return json.loads(lines[-1].removeprefix(RESULT)) if lines else None
    except json.JSONDecodeError:
        return None
