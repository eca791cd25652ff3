"""Progress: one tqdm line in a terminal, or a line each ten seconds in a log file and under papermill."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from dflash.runs.record import holds_run
from dflash.views import style
from dflash.views.dashboard.bundle import one_line
from dflash.views.dashboard.live import has_front_end
from dflash.views.dashboard.series import RunSeries

T = TypeVar("T")
WORK = "{desc} {percentage:3.0f}%|{bar:24}| {elapsed}, {remaining} left"
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


def tell(line: str) -> None:
    """Print now, into a file too."""
    print(line, flush=True)


class Work:
    """A piece of work that goes on for `total` of something, and shows it for the block.

    Args:
        say: takes the lines where there is no terminal and no JupyterLab: one each `every` seconds, and one at the end.
    """

    def __init__(self, what: str, total: int, unit: str = "", say: Callable[[str], None] = tell, every: float = 10.0):
        self.what, self.total, self.unit, self.say, self.every = what, total, unit, say, every
        self.live = sys.stderr.isatty() or has_front_end()
        self.done = 0

    def __enter__(self) -> Work:
        self._begun = self._told = time.monotonic()
        self._bar = tqdm(total=self.total, desc=self.what, bar_format=WORK, leave=True) if self.live else None
        return self

    def to(self, done: int) -> None:
        """So much of it is done."""
        self.done = done
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif now - self._told >= self.every and done < self.total:
            self._told = now
            left = (now - self._begun) * (self.total - done) / done if done else None
            self.say(f"{self._line(now)}, {style.duration(left)} left")

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each counted when the next one is asked for."""
        for index, item in enumerate(items):
            yield item
            self.to(index + 1)

    def _line(self, now: float) -> str:
        return f"{self.what}: {self.done:,} of {self.total:,} {self.unit}, {style.duration(now - self._begun)}"

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self.say(self._line(time.monotonic()))
