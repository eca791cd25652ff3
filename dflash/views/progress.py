"""A run's progress in a terminal: one tqdm line, or a line each ten seconds in a log file."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash.runs.record import holds_run
from dflash.views import style
from dflash.views.dashboard.bundle import one_line
from dflash.views.dashboard.series import RunSeries

FORMAT = "{desc} {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt}{postfix}"


class TerminalProgress:
    """Follows the run in `folder`, which need not exist yet, from a thread, and shows it on stderr for the block."""

    def __init__(self, folder: str | os.PathLike[str], every: float = 10.0) -> None:
        self.series, self.every = RunSeries(Path(folder)), every
        self.live = sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> TerminalProgress:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if self._bar is not None:
            self._bar.close()

    def _follow(self) -> None:
        while not self._stop.wait(1.0 if self.live else self.every):
            if holds_run(self.series.path) and self.series.follow():
                self._show()

    def _show(self) -> None:
        series, step = self.series, self.series.last_step.get("step") or 0
        if not self.live:
            print(one_line(series), file=sys.stderr, flush=True)
        elif step:
            if self._bar is None:
                self._bar = tqdm(bar_format=FORMAT, desc=series.path.name, position=1, leave=False, dynamic_ncols=True)
            self._bar.total, self._bar.n = series.total_steps, step
            self._bar.set_postfix_str(postfix(series))


def postfix(series: RunSeries) -> str:
    """Loss, held-out acceptance, speed and time left, as far as they are known."""
    acceptance, left = series.last_eval.get("acceptance_length"), series.seconds_left
    parts = [
        f"loss {series.smooth_loss.last:.3f}" if series.smooth_loss.last is not None else "",
        f"acceptance {acceptance:.2f}" if acceptance is not None else "",
        f"{style.number(series.step_rate.last, 0)} tokens/s" if series.step_rate.last else "",
        f"{style.duration(left)} left" if left is not None else "",
    ]
    return ", ".join(part for part in parts if part)
