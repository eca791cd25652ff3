"""Where each worker's time goes: busy or waiting, on the device's own clock; and which split of GPUs would be best."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflash.runs.tables import Table

if TYPE_CHECKING:
    from dflash.runs.record import MetricsWriter

WAITING = "wait"
NEITHER = ("idle", "reduce")  # waiting for other drafters, an evaluation or a checkpoint says nothing about a split
INTERVAL = 5.0  # seconds between two `stage` records of a worker
SPAN_SECONDS = 300.0  # spans are written for this long, then only the totals: a record must not grow for ever


class Ledger:
    """A worker's phases. `enter(phase)` ends the phase before it. "wait" is waiting for the other side, "idle" and
    "reduce" are neither that nor work, everything else is work.

    On CUDA a phase begins where the work queued so far on the current stream ends, measured by events and read when
    they have passed, never by waiting for them; on the CPU it begins now.

    Args:
        name: of the worker, for instance "target[0]". device: whose clock it is.
        metrics: where `stage` and `span` records go; None keeps the totals only.
    """

    def __init__(self, name: str, device: torch.device, metrics: MetricsWriter | None = None):
        self.name, self.device, self.metrics = name, device, metrics
        self.seconds: dict[str, float] = {}  # phase -> seconds so far
        self.tokens = 0
        self._marks: deque[tuple[str, object, int | None]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._base: tuple[float, object] | None = None
        self._reported = (0.0, 0.0, 0)
        self._lock = threading.Lock()
        self._last_report = self._began = time.perf_counter()

    def enter(self, phase: str, step: int | None = None) -> None:
        """The worker turns to something else."""
        with self._lock:
            mark = self._mark()
            if self._base is None:
                self._base = (time.time(), mark)
            self._marks.append((phase, mark, step))
            self._settle()

    def add_tokens(self, tokens: int) -> None:
        """Context tokens worked through."""
        self.tokens += tokens

    @property
    def busy(self) -> float:
        return sum(s for phase, s in list(self.seconds.items()) if phase not in (WAITING, *NEITHER))

    @property
    def waiting(self) -> float:
        return self.seconds.get(WAITING, 0.0)

    def report(self, queue_depth: int | None, force: bool = False) -> None:
        """A `stage` record of what came since the last one, at most every few seconds."""
        now = time.perf_counter()
        if not force and now - self._last_report < INTERVAL:
            return
        with self._lock:
            self._settle()
        busy, wait, tokens = (a - b for a, b in zip((self.busy, self.waiting, self.tokens), self._reported, strict=True))
        if self.metrics is not None and (tokens or busy):
            self.metrics.write(
                "stage",
                name=self.name,
                tokens=tokens,
                busy_seconds=busy,
                wait_seconds=wait,
                tokens_per_second=tokens / busy if busy > 0 else None,
                queue_depth=queue_depth,
                phases={phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            )
        self._reported, self._last_report = (self.busy, self.waiting, self.tokens), now

    def finish(self) -> None:
        """Close the last phase and read everything."""
        if self._marks:
            self.enter("end")
            if self.device.type == "cuda":
                self._marks[-1][1].synchronize()
            with self._lock:
                self._settle()

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, a, b) -> float:
        return a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a

    def _settle(self) -> None:
        """Read the phases whose end has passed."""
        while len(self._marks) > 1 and (self.device.type != "cuda" or self._marks[1][1].query()):
            phase, start, step = self._marks.popleft()
            seconds = self._between(start, self._marks[0][1])
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            if self.metrics is not None and phase != "idle" and time.perf_counter() - self._began < SPAN_SECONDS:
                began = self._base[0] + self._between(self._base[1], start)
                self.metrics.write("span", worker=self.name, name=phase, start=began, seconds=seconds, step=step)
            if self.device.type == "cuda" and start is not self._base[1]:
                self._spare.append(start)


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one target and of one drafter, each with nothing to wait for."""

    target: float
    drafter: float


@dataclass(frozen=True)
class Split:
    """A division of the same GPUs and the tokens per second it would give."""

    targets: int
    drafters: int
    tokens_per_second: float
    bound_by: str


def splits(gpus: int, rates: Rates, gpus_per_target: int = 1) -> list[Split]:
    """Every split of `gpus` GPUs, best first. The pipeline is as fast as its slower side; equal splits prefer fewer
    drafters, whose gradients then need less averaging. One GPU alone takes turns."""
    if gpus < gpus_per_target + 1:
        both = 1 / (1 / rates.target + 1 / rates.drafter)
        return [Split(1, 1, both, "shared")]
    found = []
    for drafters in range(1, gpus - gpus_per_target + 1):
        targets = (gpus - drafters) // gpus_per_target
        fed, eaten = targets * rates.target, drafters * rates.drafter
        found.append(Split(targets, drafters, min(fed, eaten), "targets" if fed < eaten else "drafters"))
    return sorted(found, key=lambda s: (-s.tokens_per_second, s.drafters))


def advice(gpus: int, rates: Rates, current: tuple[int, int] | None = None, gpus_per_target: int = 1) -> str:
    """The table of all splits, and in one sentence which one is best and by how much."""
    ranked = splits(gpus, rates, gpus_per_target)
    rows = [
        {"targets": s.targets, "drafters": s.drafters, "tokens/s": f"{s.tokens_per_second:,.0f}", "bound by": s.bound_by}
        for s in sorted(ranked, key=lambda s: s.drafters)
    ]
    best = ranked[0]
    sentence = f"best of {gpus}: {best.targets} targets and {best.drafters} drafters, {best.tokens_per_second:,.0f} tokens/s"
    now = next((s for s in ranked if (s.targets, s.drafters) == current), None)
    if now is not None and now is not best and best.tokens_per_second > 1.02 * now.tokens_per_second:
        sentence += (
            f"; {best.tokens_per_second / now.tokens_per_second:.2f} times the {now.tokens_per_second:,.0f} of "
            f"{now.targets} + {now.drafters}, which is bound by its {now.bound_by}"
        )
    elif now is not None:
        sentence += f"; {now.targets} + {now.drafters} is as good"
    return f"{Table(rows)}\n{sentence}"
