"""A run's records folded into bounded series: memory stays flat however long the run is.

`RunSeries.follow()` reads what is new in `metrics.jsonl`; the panels (panels.py) read the result. Nothing
here knows how anything is drawn.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from dflash.runs.record import SUPERSEDED_NAME, metrics_path, read_metrics

MAX_BUCKETS = 700  # drawn as an envelope (two points a bucket) this stays below 1,500 points a trace
MAX_ROWS = 160  # columns of the heat map
MAX_SPANS = 1500
MAX_LOG_LINES = 400
MAX_SAMPLES = 8
RECENT = 30  # steps that the time left is estimated from
SMOOTHING = 0.1  # weight of the newest value in the smoothed loss, bias-corrected at the start


class Series:
    """(x, y) points in at most `capacity` buckets of equal numbers of points; older and newer parts equally dense.

    When the buckets are full, neighbours are merged and each later bucket takes twice as many points.
    """

    def __init__(self, capacity: int = MAX_BUCKETS) -> None:
        self.capacity = capacity
        self.stride = 1
        self.count = 0  # all points ever added
        self._data = np.zeros((capacity, 4))  # x of the first point, mean, low, high
        self._used = 0
        self._open: list[tuple[float, float]] = []

    def add(self, x: float, y: float | None) -> None:
        """Add one point; a missing value is left out."""
        if y is None or y != y:
            return
        self.count += 1
        self._open.append((x, y))
        if len(self._open) >= self.stride:
            self._close_bucket()

    def _close_bucket(self) -> None:
        ys = [y for _, y in self._open]
        self._data[self._used] = (self._open[0][0], sum(ys) / len(ys), min(ys), max(ys))
        self._used += 1
        self._open = []
        if self._used == self.capacity:
            pairs = self._data[: self._used // 2 * 2].reshape(-1, 2, 4)
            half = len(pairs)
            self._data[:half, 0] = pairs[:, 0, 0]
            self._data[:half, 1] = pairs[:, :, 1].mean(1)
            self._data[:half, 2] = pairs[:, :, 2].min(1)
            self._data[:half, 3] = pairs[:, :, 3].max(1)
            self._used = half
            self.stride *= 2

    def mean(self) -> tuple[np.ndarray, np.ndarray]:
        """x and the mean of each bucket, with the newest point last."""
        x, y = self._data[: self._used, 0], self._data[: self._used, 1]
        if self._open:
            x, y = np.append(x, self._open[-1][0]), np.append(y, self._open[-1][1])
        return x.copy(), y.copy()

    def envelope(self) -> tuple[np.ndarray, np.ndarray]:
        """x and low, high of each bucket in turn, so that spikes survive thinning; the plain points before that."""
        if self.stride == 1:
            return self.mean()
        data = self._data[: self._used]
        return np.repeat(data[:, 0], 2), data[:, 2:4].reshape(-1).copy()

    @property
    def median(self) -> float:
        """Median over the buckets; NaN without any."""
        return float(np.median(self.mean()[1])) if len(self) else float("nan")

    @property
    def last(self) -> float | None:
        if self._open:
            return self._open[-1][1]
        return float(self._data[self._used - 1, 1]) if self._used else None

    def __len__(self) -> int:
        return self._used + bool(self._open)


class Rows:
    """Vectors over x (per-slot values over steps) in at most `capacity` averaged columns."""

    def __init__(self, capacity: int = MAX_ROWS) -> None:
        self.capacity = capacity
        self.stride = 1
        self.x: list[float] = []
        self.rows: list[np.ndarray] = []
        self._open: list[tuple[float, np.ndarray]] = []

    def add(self, x: float, values: list[float | None]) -> None:
        row = np.array([np.nan if value is None else value for value in values], dtype=float)
        if self.rows and len(row) != len(self.rows[0]):
            return
        self._open.append((x, row))
        if len(self._open) < self.stride:
            return
        self.x.append(self._open[0][0])
        self.rows.append(_mean([row for _, row in self._open]))
        self._open = []
        if len(self.rows) == self.capacity:
            self.x = self.x[::2]
            self.rows = [_mean(self.rows[i : i + 2]) for i in range(0, self.capacity, 2)]
            self.stride *= 2

    def matrix(self) -> np.ndarray:
        """[slots, columns]."""
        return np.stack(self.rows, 1) if self.rows else np.zeros((0, 0))


def _mean(rows: list[np.ndarray]) -> np.ndarray:
    """Mean over rows that ignores missing values and stays silent where all are missing."""
    stack = np.stack(rows)
    known = ~np.isnan(stack)
    total = np.where(known, stack, 0.0).sum(0)
    return np.divide(total, known.sum(0), out=np.full(stack.shape[1], np.nan), where=known.any(0))


class Smoothed(Series):
    """Exponentially smoothed values, bias-corrected at the start."""

    def __init__(self) -> None:
        super().__init__()
        self._value = self._weight = 0.0

    def add(self, x: float, y: float | None) -> None:
        if y is not None:
            self._value += SMOOTHING * (y - self._value)
            self._weight += SMOOTHING * (1 - self._weight)
            super().add(x, self._value / self._weight)


class RunSeries:
    """All that the panels and the summary need to know about one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lock = threading.Lock()
        self.offset = 0
        self.records = 0
        self.start_time: float | None = None
        self.first_step_at: float | None = None  # seconds after the start: before it, models are loaded
        self.last_time: float | None = None
        self.run_start: dict[str, Any] | None = None
        self.run_end: dict[str, Any] | None = None
        self.last_step: dict[str, Any] = {}
        self.last_eval: dict[str, Any] = {}
        self.first_eval: dict[str, Any] = {}
        self.best_eval: dict[str, Any] = {}
        self.planned_steps: int | None = None
        self.data: dict[str, Any] = {}  # rows of its file, and how many of them were left out
        self.control: str | None = None
        self.answers: dict[str, float] = {}  # control state -> when it was last reached
        self.skipped: dict[str, int] = {}
        self.not_finite = 0
        self.tokens = 0
        self.loss, self.smooth_loss, self.eval_loss = Series(), Smoothed(), Series()
        self.train_acceptance, self.eval_acceptance = Smoothed(), Series()
        self.train_slots, self.eval_slots = Rows(), Rows()
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds of the newest steps, without evaluations and pauses
        self.step_seconds, self.step_rate, self.lr, self.grad_norm = Series(), Series(), Series(), Series()
        self.rate: dict[str, Series] = {}
        self.queue: dict[str, Series] = {}
        self.waiting: dict[str, list[float]] = {}  # stage -> [busy seconds, waiting seconds]
        self.phases: dict[str, dict[str, float]] = {}  # stage -> phase -> seconds so far
        self.memory: dict[str, Series] = {}
        self.utilization: dict[str, Series] = {}
        self.memory_peak: dict[str, float] = {}
        self.peak_step: dict[str, int] = {}  # device -> the step that was under way when its memory was highest
        self.held: dict[str, dict[str, float]] = {}  # device -> what lies there between two steps -> bytes
        self.estimated: dict[str, dict[str, float]] = {}  # the same as it was estimated, with what a step needs
        self.expected: dict[str, Any] = {}  # the recipe's measured curve as a band
        self.samples: list[tuple[int, dict[str, Any]]] = []  # (step, a held-out answer), at most MAX_SAMPLES
        self.memory_total: dict[str, float] = {}
        self.spans: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self.log: deque[dict[str, Any]] = deque(maxlen=MAX_LOG_LINES)
        self.faults: list[dict[str, Any]] = []
        self.warmups: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self._cut = 0

    def follow(self, chunk: int = 1 << 20) -> int:
        """Read what has been appended since the last call; the number of new records."""
        new = 0
        if self._was_rewound():
            with self.lock:
                self._begin_again()
        while True:
            records, offset = read_metrics(self.path, self.offset, max_bytes=chunk)
            if offset == self.offset:
                break
            with self.lock:
                self.offset = offset
                for record in records:
                    self.add(record)
            new += len(records)
        return new

    def _was_rewound(self) -> bool:
        """Whether a resume has put the record back since the last look: what it cut is in `superseded.jsonl`."""
        try:
            cut = metrics_path(self.path).with_name(SUPERSEDED_NAME).stat().st_size
        except OSError:
            cut = 0
        before, self._cut = self._cut, cut
        return bool(self.offset) and before != cut

    def _begin_again(self) -> None:
        """Forget everything and read the record from its start; called under the lock."""
        lock, cut = self.lock, self._cut
        self.__init__(self.path)
        self.lock, self._cut = lock, cut

    def add(self, record: dict[str, Any]) -> None:
        """Fold one record in; unknown kinds are ignored."""
        self.records += 1
        time = record.get("t")
        if isinstance(time, (int, float)):
            self.start_time = time if self.start_time is None else self.start_time
            self.last_time = time if self.last_time is None else max(time, self.last_time)
        handler = getattr(self, f"_on_{record['kind']}", None)
        if handler is not None:
            handler(record, (time or 0.0) - (self.start_time or 0.0))

    @property
    def seconds(self) -> float:
        """Length of the record so far."""
        return (self.last_time or 0.0) - (self.start_time or 0.0)

    @property
    def config(self) -> dict[str, Any]:
        return (self.run_start or {}).get("config") or {}

    def setting(self, name: str) -> Any:
        """A setting by its own name, in whichever section it stands; None where it is not."""
        sections = [self.config, *(value for value in self.config.values() if isinstance(value, dict))]
        return next((section[name] for section in sections if section.get(name) is not None), None)

    @property
    def doing(self) -> str:
        """What the run last said it does before its first step: loading, capturing features, warming up."""
        main = [str(record.get("message", "")) for record in list(self.log)[-20:] if record.get("worker") == "main"]
        return main[-1].strip()[:100] if main and not self.last_step else ""

    @property
    def total_steps(self) -> int | None:
        """Planned number of steps: from the newest `plan` record, else from the configuration."""
        total = self.planned_steps if self.planned_steps is not None else self.setting("steps")
        return total if isinstance(total, int) and total > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """What is left of the planned steps at the speed of the newest ones, with the evaluations and checkpoints that are
        due. Loading, capture and pauses do not count. None before the third step, and when nothing is left."""
        step, total = self.last_step.get("step") or 0, self.total_steps
        if not total or step >= total or len(self.recent) < 3:
            return None
        left = sum(self.recent) / len(self.recent) * (total - step)
        if self.planned_steps is None and self.setting("max_minutes"):  # the plan will be cut to this
            left = min(left, 60.0 * self.setting("max_minutes"))
        for newest, every in ((self.last_eval, "eval_every"), ((self.checkpoints or [{}])[-1], "checkpoint_every")):
            due = self.setting(every) or 0
            left += (newest.get("seconds") or 0.0) * (total // due - step // due if due else 0)
        return left

    def _on_run_start(self, record: dict[str, Any], at: float) -> None:
        self.run_start = record
        self.run_end = None

    def _on_run_end(self, record: dict[str, Any], at: float) -> None:
        self.run_end = record

    def _on_step(self, record: dict[str, Any], at: float) -> None:
        step = record.get("step") or 0
        self.last_step = record
        if self.first_step_at is None:
            self.first_step_at = at
        self.tokens += record.get("tokens") or 0
        if record.get("step_seconds"):
            self.recent.append(record["step_seconds"])
        if record.get("skipped"):
            reason = record.get("reason") or "no reason given"
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            return
        loss = record.get("loss")
        if loss is None:
            self.not_finite += 1
        else:
            self.loss.add(step, loss)
            self.smooth_loss.add(step, loss)
        self.train_acceptance.add(step, record.get("acceptance_length"))
        if isinstance(record.get("accuracy"), list):
            self.train_slots.add(step, record["accuracy"])
        self.step_seconds.add(step, record.get("step_seconds"))
        self.step_rate.add(at, record.get("tokens_per_second"))
        self.lr.add(step, record.get("lr"))
        self.grad_norm.add(step, record.get("grad_norm"))

    def _on_eval(self, record: dict[str, Any], at: float) -> None:
        step, acceptance = record.get("step") or 0, record.get("acceptance_length")
        self.last_eval = record
        self.first_eval = self.first_eval or record
        if acceptance is not None and acceptance > self.best_eval.get("acceptance_length", 0.0):
            self.best_eval = record
        self.eval_acceptance.add(step, acceptance)
        self.eval_loss.add(step, record.get("loss"))
        if record.get("sample"):
            self.samples.append((step, record["sample"]))
            if len(self.samples) > MAX_SAMPLES:  # the first and the newest stay, and the others stand evenly
                steps = [step for step, _ in self.samples]
                del self.samples[min(range(1, MAX_SAMPLES), key=lambda i: steps[i + 1] - steps[i - 1])]
        if isinstance(record.get("acceptance_by_slot"), list):
            self.eval_slots.add(step, record["acceptance_by_slot"])

    def _on_device(self, record: dict[str, Any], at: float) -> None:
        name = str(record.get("device"))
        self.memory.setdefault(name, Series()).add(at, record.get("used") or record.get("allocated"))
        self.utilization.setdefault(name, Series()).add(at, record.get("utilization"))
        if (record.get("peak") or 0.0) > self.memory_peak.get(name, 0.0):
            self.memory_peak[name] = record["peak"]
            self.peak_step[name] = (self.last_step.get("step") or 0) + 1
        if record.get("total"):
            self.memory_total[name] = max(self.memory_total.get(name, 0.0), record["total"])

    def _on_memory(self, record: dict[str, Any], at: float) -> None:
        for kind, known in (("parts", self.held), ("estimate", self.estimated)):
            if record.get(kind):
                known[str(record.get("device"))] = record[kind]

    def _on_expected(self, record: dict[str, Any], at: float) -> None:
        self.expected = record

    def _on_stage(self, record: dict[str, Any], at: float) -> None:
        name = str(record.get("name"))
        self.rate.setdefault(name, Series()).add(at, record.get("tokens_per_second"))
        if record.get("queue_depth") is not None:
            self.queue.setdefault(name, Series()).add(at, record["queue_depth"])
        self.phases[name] = record.get("phases") or {}
        share = self.waiting.setdefault(name, [0.0, 0.0])
        share[0] += record.get("busy_seconds") or 0.0
        share[1] += record.get("wait_seconds") or 0.0

    def _on_span(self, record: dict[str, Any], at: float) -> None:
        if isinstance(record.get("start"), (int, float)) and isinstance(record.get("seconds"), (int, float)):
            self.spans.append(record)

    def _on_log(self, record: dict[str, Any], at: float) -> None:
        self.log.append(record)

    def _on_warmup(self, record: dict[str, Any], at: float) -> None:
        self.warmups.append(record)

    def _on_checkpoint(self, record: dict[str, Any], at: float) -> None:
        self.checkpoints.append(record)
        del self.checkpoints[:-50]

    def _on_fault(self, record: dict[str, Any], at: float) -> None:
        self.faults.append(record)
        del self.faults[:-50]

    def _on_data(self, record: dict[str, Any], at: float) -> None:
        self.data = record

    def _on_plan(self, record: dict[str, Any], at: float) -> None:
        self.planned_steps = record.get("steps")

    def _on_control(self, record: dict[str, Any], at: float) -> None:
        state = str(record.get("state"))
        self.answers[state] = record.get("t") or 0.0
        if not state.endswith(" done"):  # a checkpoint made in a pause does not end the pause
            self.control = state
