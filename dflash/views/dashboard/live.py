"""Follows a run from a thread and keeps one place in the notebook up to date.

In JupyterLab that place holds live widgets, replaced by the static bundle when the run ends, the block ends,
or an exception passes through. Everywhere else (papermill, nbconvert, a kernel without a front end) it holds
the static bundle from the start, refreshed now and then, so that a notebook whose kernel dies still shows a
recent plot.

The thread limits itself: it sleeps long enough after each update to use at most BUDGET of one core.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError
from dflash.runs.control import RunControl
from dflash.views.dashboard.bundle import bundle, one_line
from dflash.views.dashboard.log_view import log_bundle
from dflash.views.dashboard.panels import build_panels
from dflash.views.dashboard.series import RunSeries

BUDGET = 0.02  # share of one core that updates may use
LINE_EVERY = 10.0  # seconds between two lines of text; longer in a long run, whose notebook stays small
LIVE = ("auto", "on", "off")


class LiveDashboard:
    """Plots of the run in `run_path`, following its metrics.jsonl. Use as a context manager or start and stop.

    `live`: "on" = widgets, "off" = static images with their interactive form, "auto" = widgets where a
    JupyterLab session is attached. Their buttons write `control.json`, which the training loop follows (control.py).
    Outside a notebook kernel nothing is shown. ConfigError for an unknown `live` value.
    """

    def __init__(self, run_path: str | os.PathLike[str], live: str = "auto") -> None:
        if live not in LIVE:
            raise ConfigError(f"live is {live!r}; choose one of {', '.join(LIVE)}")
        self.run_path = Path(run_path)
        self.series = RunSeries(self.run_path)
        self.interactive = live == "on" or (live == "auto" and has_front_end())
        self.updates = 0
        self.update_seconds = 0.0  # processor time of all updates
        self.error: BaseException | None = None
        self._view: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()

    def start(self) -> LiveDashboard:
        """Show the dashboard in the current cell and follow the run from a thread."""
        if self._thread is not None:
            return self
        self._view = self._make_view()
        self.series.follow()
        self._view.open(self.series)
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Replace the live view by its final static form. Safe to call twice, and from any thread."""
        if self._thread is None:
            return
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)
        self._close()

    def _make_view(self) -> Any:
        if not in_kernel():
            return NullView()
        if self.interactive:
            try:
                from dflash.views.dashboard.widgets import WidgetView

                return WidgetView(RunControl(self.run_path))
            except ImportError as error:
                print(f"live widgets are unavailable ({error}); showing static plots instead")
        return StaticView()

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.thread_time()
                if self.series.follow() or not self.updates:
                    self._view.update(self.series)
                    self.updates += 1
                spent = time.thread_time() - start
                self.update_seconds += spent
                if self.series.run_end is not None:
                    break
                self._stop.wait(min(max(self._view.interval, spent / BUDGET), self._view.longest))
        except Exception as error:  # plots must never end a training run; `error` and the last view remain
            self.error = error
        if self.series.run_end is not None:
            self._close()

    def _close(self) -> None:
        with self._closing:
            if self._view is None:
                return
            view, self._view = self._view, None
            try:
                self.series.follow()
                view.close(self.series)
            except Exception as error:
                self.error = error

    def __enter__(self) -> LiveDashboard:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


class NullView:
    """Outside a notebook there is no place to draw in."""

    interval = longest = 1.0

    def open(self, series: RunSeries) -> None:
        pass

    def update(self, series: RunSeries) -> None:
        pass

    def close(self, series: RunSeries) -> None:
        pass


class StaticView:
    """Two display places in the cell: the plots' bundle, and the log's tail with any fault."""

    interval, longest = 5.0, 90.0

    def open(self, series: RunSeries) -> None:
        from IPython.display import display

        self._meta = {"dflash": {"run": str(series.path)}}
        text = {"text/plain": one_line(series)}
        self._plots = display(text, raw=True, display_id=True, metadata=self._meta)
        self._log = display({"text/plain": ""}, raw=True, display_id=True)
        self._next_line = time.monotonic() + LINE_EVERY

    def update(self, series: RunSeries) -> None:
        self._draw(series, drop_empty=False)
        if series.records and time.monotonic() >= self._next_line:
            print(one_line(series), flush=True)  # papermill's log shows what is printed, not what is drawn
            self._next_line = time.monotonic() + max(LINE_EVERY, series.seconds / 40)

    def close(self, series: RunSeries) -> None:
        self._draw(series, drop_empty=True)

    def _draw(self, series: RunSeries, drop_empty: bool) -> None:
        panels = build_panels(series, drop_empty)
        text = one_line(series)
        drawn = any(not panel.empty for panel in panels)  # before the first record a line of text is enough
        content = bundle(panels, text) if drawn else {"text/plain": text}
        self._plots.update(content, raw=True, metadata=self._meta)
        self._log.update(log_bundle(series), raw=True)


def show_run(run_path: str | os.PathLike[str]) -> RunSeries:
    """Display a finished (or running) run once, in its static form; returns its series."""
    from IPython.display import display

    series = RunSeries(run_path)
    series.follow()
    display(bundle(build_panels(series, drop_empty=True), one_line(series)), raw=True)
    return series


def has_front_end() -> bool:
    """Whether a Jupyter server started this kernel for a notebook (papermill and nbconvert do not say so)."""
    return bool(os.environ.get("JPY_SESSION_NAME"))


def in_kernel() -> bool:
    """Whether this process is a notebook kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
