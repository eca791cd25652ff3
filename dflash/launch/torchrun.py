"""Start a run's ranks with torchrun from a notebook or a terminal, follow its record, and steer it by its control file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash.distributed.cluster import CONTROL, KILLED, LAUNCHER, launcher_mark, workers
from dflash.errors import RunError
from dflash.launch.signals import SIGNALS
from dflash.runs.control import RunControl
from dflash.runs.record import Run, read_metrics
from dflash.train.loop import Outcome
from dflash.train.topology import Topology

_LOOK = 0.3  # seconds between two looks at the record
_PATIENCE = 20.0  # seconds that ranks get to leave by themselves after a SIGTERM


def torchrun_command(processes: int, arguments: Sequence[str]) -> list[str]:
    """A single-node torchrun whose rendezvous stays on the loopback interface."""
    return [sys.executable, "-m", "dflash.launch.agent", "--nproc-per-node", str(processes), *arguments]


def child_environment() -> dict[str, str]:
    """The caller's environment, with this package importable and one CPU thread a rank unless said otherwise."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def launch_ranks(
    run: Run, topology: Topology, control: RunControl, resume: bool = False, say: Callable[[str], None] | None = None
) -> Outcome:
    """Train a run, which is resolved, in ranks of this machine; returns when it has ended.

    The ranks write the run's record, so live plots follow as they do for a run in this process. Ctrl-C, or a `stop`
    from anyone, ends it after the current step with a checkpoint.

    Raises: RunError with the failing rank's message and traceback.
    """
    command = torchrun_command(
        workers(topology),
        ["-m", "dflash", "train", "--config", str(Path(run.path) / "config.yaml"), *(["--resume"] if resume else [])],
    )
    _, offset = read_metrics(run.path)
    log_path = Path(run.path) / "torchrun.log"
    with open(log_path, "ab") as log:
        log_start = log.tell()
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **child_environment(),
                LAUNCHER: launcher_mark(),  # ranks end when we are killed
                CONTROL: json.dumps(control.handled()),
            },  # a stop while they start is theirs
            start_new_session=True,
        )  # a terminal's Ctrl-C reaches us, and we ask rank 0
        try:
            records = _follow(child, run, control, offset, say)
        finally:
            _end(child)
    ends = [r for r in records if r["kind"] == "run_end"]
    faults = [r for r in records if r["kind"] == "fault"]
    signalled = child.returncode in [128 + number for number in SIGNALS]  # torchrun too, after its ranks had left in order
    ended_well = ends and ends[-1]["status"] != "failed" and (not child.returncode or signalled)
    if faults or not ended_well:
        fault = _fault(run, child.returncode, faults, ends, log_path, log_start)
        raise RunError(
            f"{fault['worker']}: {fault['type']}: {fault['message']}\n{fault.get('traceback') or ''}"
            f"the ranks' output is in {log_path}"
        )
    end = ends[-1]
    return Outcome(end["status"], end.get("step") or 0, end.get("skipped_steps") or 0, end.get("acceptance_length"))


def _fault(run: Run, code: int | None, faults: list[dict], ends: list[dict], log_path: Path, log_start: int) -> dict:
    """What ended the ranks: the signal that killed one (the others only see it vanish), else what the first failing one
    recorded, else the end of their output. What no rank could record is recorded here."""
    killed = [
        line.removeprefix(KILLED)
        for line in log_path.read_bytes()[log_start:].decode(errors="replace").splitlines()
        if line.startswith(KILLED)
    ]
    if not killed and faults:
        return faults[0]
    if killed:
        rank, _, number = killed[0].partition(" by ")
        worker, message = rank, f"killed by {number}; where nobody did it, the system may have run out of memory (see dmesg)"
        message += "".join(f"; then {f['worker']}: {f['message']}" for f in faults[:1])
    else:
        worker, message = "torchrun", f"the ranks ended with exit code {code}"
    error = RunError(message)
    run.fault(error, worker=worker)
    if not ends:
        run.end("failed", message=f"{worker}: {message}")
    return {"worker": worker, "type": "RunError", "message": message, "traceback": _tail(log_path)}


def _follow(
    child: subprocess.Popen, run: Run, control: RunControl, offset: int, say: Callable[[str], None] | None
) -> list[dict]:
    """Pass the log on until the child has ended; returns the records that decide how it ended."""
    kept, stopping = [], False
    while True:
        try:
            running = child.poll() is None
            records, offset = read_metrics(run.path, offset)
            for record in records:
                if record["kind"] in ("run_end", "fault"):
                    kept.append(record)
                if say is not None and record["kind"] == "log":
                    say(record["message"])
            if not running:
                return kept
            time.sleep(_LOOK)
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            control.stop()


def _end(child: subprocess.Popen) -> None:
    """Make sure that nothing of the child is left."""
    for number, patience in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, 5.0)):
        if child.poll() is not None:
            return
        try:
            os.killpg(child.pid, number)
            child.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) + "\n"
