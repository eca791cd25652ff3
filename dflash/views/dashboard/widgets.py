"""The interactive view: a status line, buttons, all plots in one FigureWidget, the log's tail.

One FigureWidget, because each one carries plotly.js in its state: eight of them send 40 MB to the browser.
It is made in the cell's own thread (`open`) and afterwards changed only by the dashboard's thread: new
arrays in one message where the traces keep their shape, new traces in the same widget otherwise. On close
the same place is handed to the static bundle, so that the saved notebook holds the final plots without any
widget state.
"""

from __future__ import annotations

import base64
import time

import ipywidgets
import numpy as np
import plotly.graph_objects as go
from IPython.display import display

from dflash.runs.control import RunControl
from dflash.views import style
from dflash.views.dashboard.bundle import bundle, one_line
from dflash.views.dashboard.log_view import log_bundle, log_html
from dflash.views.dashboard.panels import Panel, build_panels
from dflash.views.dashboard.plotly_form import grid_figure, shape_of, traces
from dflash.views.dashboard.series import RunSeries
from dflash.views.templates import render

BUTTONS = (
    ("pause", "Pause", "pause", "hold before the next step"),
    ("resume", "Resume", "play", "go on"),
    ("checkpoint", "Checkpoint now", "save", "save at the next step boundary"),
    ("evaluate", "Evaluate now", "check", "measure held-out acceptance at the next step boundary"),
    ("stop", "Stop", "stop", "end after this step, with a checkpoint"),
)
ARRAYS = frozenset(("x", "y", "z", "base", "zmax"))
ANSWERS = {"pause": "paused", "resume": "resumed", "stop": "stopping"}

# A FigureWidget measures itself before it is attached to the page, and takes 700 pixels. It does listen to
# the window's resize event, so that is what it gets whenever its width is wrong. On a narrow page it is scrolled sideways:
# two columns of plots would lie over each other. Replaced by the log on close.
FIT_SCRIPT = """
const timer = setInterval(() => {
  const plots = [...document.querySelectorAll('.jupyter-widgets .js-plotly-plot')];
  for (const plot of plots) {
    plot.style.minWidth = '860px';
    plot.parentElement.style.overflowX = 'auto';
  }
  const wrong = (e) => e._fullLayout && e.clientWidth && Math.abs(e._fullLayout.width - e.clientWidth) > 4;
  if (plots.some(wrong)) window.dispatchEvent(new Event('resize'));
}, 700);
setTimeout(() => clearInterval(timer), 600000);
"""


class WidgetView:
    """See the module's text."""

    interval, longest = 0.5, 6.0

    def __init__(self, control: RunControl) -> None:
        self.control = control
        self._asked: tuple[str, float] | None = None
        self._drawn: list[Panel] = []

    def open(self, series: RunSeries) -> None:
        self._status = ipywidgets.HTML()
        self._buttons = {}
        for action, label, icon, tip in BUTTONS:
            button = ipywidgets.Button(description=label, icon=icon, tooltip=tip)
            button.layout.width = "auto"
            button.on_click(lambda _, action=action: self._ask(action, series))
            self._buttons[action] = button
        self._drawn = build_panels(series)
        self._figure = go.FigureWidget(grid_figure(self._drawn))
        self._figure._config = {"displaylogo": False, "responsive": True}
        self._log = ipywidgets.HTML()
        self.update(series)
        buttons = ipywidgets.HBox(list(self._buttons.values()), layout=ipywidgets.Layout(flex_flow="row wrap"))
        self._box = ipywidgets.VBox([self._status, buttons, self._figure, self._log])
        self._meta = {"dflash": {"run": str(series.path)}}
        self._place = display(self._box, display_id=True)
        script = {"application/javascript": FIT_SCRIPT, "text/plain": ""}
        self._log_place = display(script, raw=True, display_id=True)

    def update(self, series: RunSeries) -> None:
        panels = build_panels(series)
        if [shape_of(panel) for panel in panels] != [shape_of(panel) for panel in self._drawn]:
            self._new_traces(grid_figure(panels))
        else:
            self._new_arrays(panels)
        self._drawn = panels
        self._set(self._status, status_html(series, self._waiting_for(series)))
        self._set(self._log, log_html(series, steady=True))
        paused = series.control == "paused"
        over = series.run_end is not None
        for action, button in self._buttons.items():
            disabled = over or (action == "pause" and paused) or (action == "resume" and not paused)
            if button.disabled != disabled:
                button.disabled = disabled
            _answer_while_busy(button)

    def close(self, series: RunSeries) -> None:
        panels = build_panels(series, drop_empty=True)
        text = one_line(series)
        content = bundle(panels, text) if panels else {"text/plain": text}
        self._place.update(content, raw=True, metadata=self._meta)
        self._log_place.update(log_bundle(series), raw=True)
        # A page that was reloaded meanwhile has lost the display's id and cannot be handed the bundle; it still
        # shows the box, which therefore stays, with the final image in it.
        image = base64.b64decode(content["image/png"]) if panels else b""
        self._box.children = (self._status, ipywidgets.Image(value=image, format="png"), self._log)
        self._set(self._status, status_html(series))
        self._set(self._log, log_html(series))
        for widget in (self._figure, *self._buttons.values()):
            widget.close()

    def _new_traces(self, fresh: go.Figure) -> None:
        """Another set of curves (a device appeared, a panel got its first data): same widget, new content."""
        layout = fresh.layout.to_plotly_json()
        layout.pop("height")  # setting the height would freeze the width, too; it does not change anyway
        self._figure.data = ()
        self._figure.update_layout(layout, overwrite=True)
        self._figure.add_traces(list(fresh.data))

    def _new_arrays(self, panels: list[Panel]) -> None:
        """The same curves with new numbers: one message for all panels that changed."""
        place = 0
        with self._figure.batch_update():
            for old, panel in zip(self._drawn, panels, strict=True):
                count = len(panel.lines) + len(panel.spans) + (panel.heat is not None)
                if not _same_data(old, panel):
                    drawn = self._figure.data[place : place + count]
                    for trace, fresh in zip(drawn, traces(panel), strict=True):
                        for key in ARRAYS.intersection(fresh):
                            trace[key] = fresh[key]
                place += count

    def _ask(self, action: str, series: RunSeries) -> None:
        """A button was pressed (kernel's main thread, or a subshell while a cell runs)."""
        self._asked = (action, time.time())
        self.control.ask(action)
        self._set(self._status, status_html(series, self._waiting_for(series)))

    def _waiting_for(self, series: RunSeries) -> str:
        """What was asked for and not yet answered by the run; empty when nothing is open."""
        if self._asked is None:
            return ""
        action, since = self._asked
        with series.lock:
            answered = series.answers.get(ANSWERS.get(action, f"{action} done"), 0.0) >= since - 0.5
        if answered:
            self._asked = None
            return ""
        return f"{action} asked for; the run acts on it at its next step boundary"

    @staticmethod
    def _set(widget: ipywidgets.HTML, value: str) -> None:
        if widget.value != value:
            widget.value = value


def status_html(series: RunSeries, waiting: str = "") -> str:
    """The head of the dashboard: state, progress, and the few numbers that matter."""
    with series.lock:
        state = (series.run_end or {}).get("status") or series.control or "running"
        step, total, left = series.last_step.get("step") or 0, series.total_steps, series.seconds_left
        acceptance, best = (e.get("acceptance_length") for e in (series.last_eval, series.best_eval))
        loss, rate, seconds = series.smooth_loss.last, series.step_rate.last, series.seconds
    state = {"resumed": "running"}.get(state, state)
    colours = {"failed": style.VERMILLION, "completed": style.GREEN, "paused": style.ORANGE}
    known = {  # all of them from the start: a number that appears later would move the buttons below
        "step": f"{step} of {total}" if total else str(step),
        "loss": None if loss is None else f"{loss:.3f}",
        "held-out acceptance length, bonus token included": None if acceptance is None else f"{acceptance:.3f}",
        "best": None if best is None else f"{best:.3f}",
        "tokens/s": style.number(rate, 0) if rate else None,
        "elapsed": style.duration(seconds),
        "left, about": style.duration(left) if left is not None and state == "running" else None,
    }
    waiting = waiting or (series.doing if state == "running" else "")
    cells = [(name, value or "\N{EN DASH}") for name, value in known.items()]
    done = min(100.0, 100 * step / total) if total else 0.0
    colour = colours.get(state, style.BLUE)
    return str(render("status.html", state=state, colour=colour, cells=cells, done=done, waiting=waiting))


def _answer_while_busy(widget: ipywidgets.Widget) -> None:
    """Let a button's clicks through while a cell runs.

    JupyterLab sends a widget's messages to a subshell, a second thread of the kernel, so that they need not wait for
    the running cell. ipykernel (7.4) sends them back to the thread that last wrote to the widget, here the busy one;
    forgetting which that was restores the subshell. Does nothing on other versions.
    """
    getattr(widget.comm, "__dict__", {}).pop("_reply_subshell_id", None)


def _same_data(old: Panel, new: Panel) -> bool:
    """Whether two panels of equal shape hold equal numbers."""
    if len(old.lines) != len(new.lines) or len(old.spans) != len(new.spans):
        return False
    pairs = [(a.x, b.x) for a, b in zip(old.lines, new.lines, strict=True)]
    pairs += [(a.y, b.y) for a, b in zip(old.lines, new.lines, strict=True)]
    pairs += [(a.starts, b.starts) for a, b in zip(old.spans, new.spans, strict=True)]
    if old.heat is not None and new.heat is not None:
        pairs += [(old.heat.z, new.heat.z)]
    return all(a.shape == b.shape and np.array_equal(a, b, equal_nan=True) for a, b in pairs)
