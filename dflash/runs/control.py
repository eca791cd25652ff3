"""Pause, resume, stop, checkpoint now, evaluate now: from a button, a terminal, or another process.

`control.json` in the run folder is the one place for requests, so the same buttons steer a thread of
this process and a torchrun child. The loop that trains asks at each step boundary:

    control = RunControl(run.path, run.metrics)
    for step in ...:
        if not control.at_step(checkpoint=save, evaluate=evaluate):
            break

Every change that the loop acts on is written as a `control` record, which is how a dashboard can tell "asked
for" from "done". Under torch.distributed, `poll()` on rank 0 only and broadcast the `Commands`, so that all
ranks act at the same step.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash.errors import RunError

if TYPE_CHECKING:
    from dflash.runs.record import MetricsWriter

CONTROL_NAME = "control.json"
ACTIONS = ("pause", "resume", "checkpoint", "evaluate", "stop")


class Commands(NamedTuple):
    """What the run is asked to do now. `checkpoint` and `evaluate` are true once per request."""

    stop: bool = False
    paused: bool = False
    checkpoint: bool = False
    evaluate: bool = False


class RunControl:
    """Both ends of the wire: the asking side (`ask`, `stop`) and the training side (`at_step`, `poll`).

    Any thread may call any method. Requests that were made before this object existed are not acted on,
    except a pause, which lasts until it is lifted; so make the object before the first step.

    Args:
        handled: what `handled()` of another object gave, in another process: requests since then are acted on too.
    """

    def __init__(
        self,
        run_path: str | os.PathLike[str],
        metrics: MetricsWriter | None = None,
        poll_interval: float = 0.2,
        handled: dict[str, int] | None = None,
    ) -> None:
        self.path = Path(run_path) / CONTROL_NAME
        self.metrics = metrics
        self.poll_interval = poll_interval
        self._lock = threading.Lock()
        self._state = _read(self.path)
        self._done = {name: (handled or self._state)[name] for name in ("checkpoint", "evaluate", "stop")}
        self._next_look = 0.0
        self._paused = False

    def handled(self) -> dict[str, int]:
        """How many requests of each kind are done with; another process that takes over starts from this."""
        return dict(self._done)

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint, also during a pause."""
        self.ask("stop")

    def ask(self, action: str) -> None:
        """Request one of ACTIONS; RunError for any other.

        "pause" holds before the next step with everything in memory, "resume" goes on. "checkpoint" and "evaluate" act at
        the next step boundary, even while paused.
        """
        if action not in ACTIONS:
            raise RunError(f"unknown action {action!r}; choose one of {', '.join(ACTIONS)}")
        with self._lock:
            state = _read(self.path, self._state)
            if action in ("pause", "resume", "stop"):
                state["paused"] = action == "pause"
            if action in state:
                state[action] += 1
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
            temporary.write_text(json.dumps(state))
            os.replace(temporary, self.path)
            self._state, self._next_look = state, 0.0

    def poll(self) -> Commands:
        """The requests of this moment, without waiting. Cheap enough for every step: it reads the file at most once in
        `poll_interval` seconds."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + self.poll_interval
                self._state = _read(self.path, self._state)
            fresh = {name: self._state[name] > self._done[name] for name in ("checkpoint", "evaluate")}
            for name, is_fresh in fresh.items():
                if is_fresh:
                    self._done[name] = self._state[name]
            stop = self._state["stop"] > self._done["stop"]
            return Commands(stop=stop, paused=self._state["paused"] and not stop, **fresh)

    def wait_if_paused(self, heartbeat: Callable[[], Any] = lambda: None) -> Commands:
        """Return at once when not paused; else wait until resumed, stopped, or asked for something to do.

        Calls `heartbeat` about every `poll_interval` seconds meanwhile: a watchdog must not take a pause for a hang.
        """
        commands = self.poll()
        if commands.paused and not self._paused:
            self._paused = True
            self._record("paused")
        while commands.paused and not (commands.checkpoint or commands.evaluate):
            heartbeat()
            time.sleep(self.poll_interval)
            commands = self.poll()
        if self._paused and not commands.paused:
            self._paused = False
            self._record("stopping" if commands.stop else "resumed")
        elif commands.stop:
            self._record("stopping")
        return commands

    def at_step(
        self,
        checkpoint: Callable[[], Any] | None = None,
        evaluate: Callable[[], Any] | None = None,
        heartbeat: Callable[[], Any] = lambda: None,
    ) -> bool:
        """Do what was asked for at this step boundary; False when the run should end."""
        while True:
            commands = self.wait_if_paused(heartbeat)
            for wanted, action, name in (
                (commands.checkpoint, checkpoint, "checkpoint"),
                (commands.evaluate, evaluate, "evaluate"),
            ):
                if wanted and action is not None:
                    action()
                    self._record(f"{name} done")
            if commands.stop or not commands.paused:
                return not commands.stop

    def _record(self, state: str) -> None:
        if self.metrics is not None:
            self.metrics.write("control", state=state)


def _read(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The requests in the file; `default` (or none) when the file is missing or broken."""
    state = {"paused": False, "checkpoint": 0, "evaluate": 0, "stop": 0}
    try:
        found = json.loads(path.read_text())
        state.update({key: type(state[key])(found[key]) for key in state if key in found})
    except (OSError, ValueError, TypeError, AttributeError):
        return dict(default or state)
    return state
