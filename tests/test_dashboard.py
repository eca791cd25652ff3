"""Series, panels, both drawing forms, the static bundle, and the dashboard in an executed notebook."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import struct
from pathlib import Path

import nbformat
import numpy as np
import pytest
from notebook_factory import outputs, write_notebook
from synthetic_run import write_run, write_step

from dflash.errors import ConfigError
from dflash.runs.record import Run
from dflash.views.dashboard import PANELS, LiveDashboard, RunSeries, build_panels
from dflash.views.dashboard.bundle import PLOTLY_MIME, bundle, one_line
from dflash.views.dashboard.image_form import png
from dflash.views.dashboard.log_view import log_bundle, log_lines
from dflash.views.dashboard.plotly_form import grid_figure
from dflash.views.dashboard.series import MAX_BUCKETS, MAX_LOG_LINES, Rows, Series
from dflash.views.dashboard.widgets import status_html
from dflash.views.style import INK, SERIES, duration

ROOT = str(Path(__file__).parent.parent)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs"), steps=120, devices=2)


@pytest.fixture
def series(finished):
    series = RunSeries(finished)
    series.follow()
    return series


def test_a_series_stays_bounded_and_evenly_dense():
    series = Series(capacity=100)
    for x in range(10_000):
        series.add(x, float(x))
    x, y = series.mean()
    assert 50 <= len(x) <= 101 and series.count == 10_000
    gaps = np.diff(x[:-1])
    assert gaps.min() == gaps.max()  # equal strides from the oldest to the newest
    assert np.allclose(y[:-1], x[:-1] + (series.stride - 1) / 2)  # the mean of each bucket of a ramp
    assert series.last == 9999.0


def test_a_single_spike_survives_thinning():
    series = Series(capacity=100)
    for x in range(5000):
        series.add(x, 99.0 if x == 1234 else 1.0)
    series.add(5001, None)
    series.add(5002, float("nan"))
    assert series.envelope()[1].max() == 99.0 and series.mean()[1].max() < 99.0
    assert series.count == 5000


def test_rows_average_known_values_only():
    rows = Rows(capacity=4)
    for step in range(8):
        rows.add(step, [float(step), None if step % 2 else 1.0])
    assert rows.matrix().shape == (2, len(rows.x))
    assert np.isfinite(rows.matrix()).all() and (rows.matrix()[1] == 1.0).all()


def test_the_record_is_folded_as_written(series):
    assert series.last_step["step"] == 120 and series.run_end["status"] == "completed"
    assert series.skipped == {"no supervised slot": 2}  # steps 49 and 99
    assert series.loss.count == 118
    assert series.eval_acceptance.count == 10 and math.isclose(series.last_eval["acceptance_length"], 1.62)
    assert series.tokens == 120 * 2048
    assert set(series.memory) == {"cuda:0", "cuda:1"} and set(series.rate) == {"target[0]", "drafter[1]"}
    assert series.follow() == 0  # nothing new


def test_following_in_pieces_equals_reading_at_once(tmp_path, series):
    run = Run.create(tmp_path, {}, "r")
    piecewise, rng = RunSeries(run.path), random.Random(3)
    for step in range(1, 40):
        write_step(run, rng, step, 40, 2, 7, t=float(step))
        piecewise.follow(chunk=200)
    whole = RunSeries(run.path)
    whole.follow()
    for name in ("loss", "smooth_loss", "eval_acceptance", "step_rate"):
        for ours, theirs in zip(getattr(piecewise, name).mean(), getattr(whole, name).mean(), strict=True):
            assert np.array_equal(ours, theirs)


def test_memory_is_flat_over_twenty_thousand_steps(tmp_path):
    run, rng = RunSeries(tmp_path), random.Random(0)
    loose = Run.create(tmp_path, {}, "r")
    captured = []
    loose.metrics.write = lambda kind, **fields: captured.append({"kind": kind, **fields})
    for step in range(1, 20_001):
        write_step(loose, rng, step, 20_000, 8, 7, t=float(step))
        for record in captured:
            run.add(record)
        captured.clear()
    for panel in build_panels(run):
        assert not panel.empty
        assert max([len(line.x) for line in panel.lines], default=0) <= 1500
        if panel.heat is not None:
            assert panel.heat.z.size <= 160 * 7
    assert len(run.loss) <= MAX_BUCKETS and len(run.log) <= MAX_LOG_LINES
    assert sum(len(s) for s in run.memory.values()) <= 8 * MAX_BUCKETS


def test_every_panel_names_its_units_and_says_what_it_waits_for(series, tmp_path):
    panels = build_panels(series)
    assert [panel.key for panel in panels] == list(PANELS)
    for panel in panels:
        assert panel.title and panel.x_title
        assert panel.y_title or panel.lanes
    by_key = {panel.key: panel for panel in panels}
    assert "bonus token included" in by_key["acceptance"].title
    assert by_key["memory"].y_title == "GiB" and by_key["rate"].y_title == "tokens/s"
    assert 55 < by_key["memory"].lines[0].y.mean() < 57  # bytes became GiB
    for panel in build_panels(RunSeries(tmp_path)):
        assert panel.empty and panel.note


def test_colours_are_distinguishable():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert len(set(SERIES)) == len(SERIES) and set(SERIES) <= {
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#E69F00",
        "#CC79A7",
        "#56B4E9",
        "#8A8A8A",
    }
    for page in ("#FFFFFF", "#111111"):  # JupyterLab's two themes
        assert contrast(INK, page) > 4
        assert min(contrast(colour, page) for colour in SERIES) > 2


def test_both_forms_draw_the_same_numbers(series):
    panels = build_panels(series)
    drawn = grid_figure(panels)
    wanted = sum(len(panel.lines) + len(panel.spans) + (panel.heat is not None) for panel in panels)
    assert len(drawn.data) == wanted
    acceptance = next(panel for panel in panels if panel.key == "acceptance")
    held_out = next(line for line in acceptance.lines if line.name == "held-out")
    trace = next(t for t in drawn.data if t.name == "held-out" and len(t.y) == 10 and t.yaxis == "y2")
    assert np.allclose(np.asarray(trace.y), held_out.y, atol=1e-5)
    assert drawn.layout.yaxis2.title.text == acceptance.y_title and acceptance.title in drawn.layout.annotations[1].text
    image = png(panels)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert 850 < width < 950 and height > 900 and len(image) < 400_000
    assert len({png([panel]) for panel in panels}) == len(panels)  # no panel is blank like another


def test_an_image_shows_its_curve(series):
    """The held-out curve's colour is really there, and gone when the curve is."""
    from io import BytesIO

    from PIL import Image

    def pixels(panel):
        colours = np.asarray(Image.open(BytesIO(png([panel]))).convert("RGB")).reshape(-1, 3)
        return int((np.abs(colours - np.array([0xD5, 0x5E, 0x00])).sum(1) < 30).sum())

    full, empty = PANELS["acceptance"](series), PANELS["acceptance"](RunSeries("nowhere"))
    assert pixels(full) > 200 and pixels(empty) == 0


def test_figures_keep_both_themes_readable(series):
    for panel in build_panels(series):
        layout = grid_figure([panel], 1).layout
        assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)" and layout.font.color == INK
        assert layout.width is None  # follows the page


def test_the_bundle_holds_image_figure_and_one_line(series):
    content = bundle(build_panels(series), one_line(series))
    assert set(content) == {PLOTLY_MIME, "image/png", "text/plain"}
    assert base64.b64decode(content["image/png"])[:4] == b"\x89PNG"
    json.dumps(content[PLOTLY_MIME], allow_nan=False)
    assert len(json.dumps(content)) < 700_000
    text = content["text/plain"]
    assert "\n" not in text and "completed" in text and "step 120 of 120" in text
    assert "held-out acceptance length 1.620 (bonus token included)" in text


def test_missing_numbers_leave_gaps_not_crashes(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    run.metrics.write("step", step=1, loss=float("nan"), accuracy=[float("nan")] * 3, tokens_per_second=None)
    run.metrics.write("device", device="cpu", used=None, utilization=None)
    run.metrics.write("eval", step=1, acceptance_length=None, acceptance_by_slot=[None, None])
    run.metrics.write("span", name="forward", start=None, seconds=1)
    run.metrics.write("future-kind", anything={"x": 1})
    series = RunSeries(run.path)
    series.follow()
    assert series.not_finite == 1 and series.loss.count == 0
    bundle(build_panels(series), one_line(series))


def test_log_lines_keep_the_record_s_order_and_escape_html(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    for number in range(30):
        run.metrics.write("log", worker=f"w{number % 3}", level="INFO", message=f"<b>{number}</b>")
    series = RunSeries(run.path)
    series.follow()
    numbers = [int(re.search(r"<b>(\d+)", line).group(1)) for line in log_lines(series, tail=10)]
    assert numbers == list(range(20, 30))
    assert "<b>29" not in log_bundle(series)["text/html"] and "&lt;b&gt;29" in log_bundle(series)["text/html"]


def test_live_values_are_checked_and_nothing_happens_outside_a_notebook(finished, capsys):
    with pytest.raises(ConfigError, match="live is 'yes'; choose one of auto, on, off"):
        LiveDashboard(finished, live="yes")
    with LiveDashboard(finished) as dashboard:
        pass
    dashboard.stop()
    assert capsys.readouterr().out == "" and dashboard.error is None


def test_the_widget_view_draws_follows_and_hands_over(tmp_path, monkeypatch):
    """The interactive view without a browser: one figure, new arrays in place, buttons that write the control file."""
    from dflash.runs.control import RunControl
    from dflash.views.dashboard import widgets

    updates = []

    class Place:
        def update(self, content, **options):
            updates.append(content)

    monkeypatch.setattr(widgets, "display", lambda *content, **options: Place())
    run, rng = Run.create(tmp_path, {"steps": 30}, "r"), random.Random(0)
    series, control = RunSeries(run.path), RunControl(run.path, run.metrics, poll_interval=0.0)
    view = widgets.WidgetView(RunControl(run.path))
    series.follow()
    view.open(series)
    only = view._figure
    for step in range(1, 31):
        write_step(run, rng, step, 30, 2, 7, t=float(step))
        series.follow()
        view.update(series)
    assert view._figure is only  # each FigureWidget carries 5 MB of plotly.js: there must be one
    drawn = {(trace.name, trace.yaxis): trace for trace in only.data}
    assert np.allclose(np.asarray(drawn["smoothed", "y"].y), series.smooth_loss.mean()[1], atol=1e-4)
    assert "30 of 30" in view._status.value and "bonus token included" in view._status.value
    view._buttons["pause"].click()
    assert "pause asked for" in view._status.value and control.poll().paused
    view._buttons["resume"].click()
    view._buttons["checkpoint"].click()
    assert control.poll() == (False, False, True, False)
    for state in ("paused", "checkpoint done"):  # a checkpoint made in a pause does not end the pause
        run.metrics.write("control", state=state)
    series.follow()
    view.update(series)
    assert not view._buttons["resume"].disabled and ">paused<" in view._status.value
    assert "asked for" not in view._status.value
    view._buttons["stop"].click()
    assert not control.at_step()
    view.close(series)
    assert set(updates[0]) == {PLOTLY_MIME, "image/png", "text/plain"}


def run_papermill(path, out, **parameters):
    import papermill

    return papermill.execute_notebook(str(path), str(out), parameters=parameters, progress_bar=False)


LOOP = """
import random, threading, time, sys
sys.path[:0] = [root, root + "/tests"]
from dflash.views.dashboard import LiveDashboard
from dflash.runs.record import Run
from synthetic_run import write_step
run, rng = Run.create(folder, {"steps": steps}, "r"), random.Random(0)
"""


def test_an_executed_notebook_keeps_final_plots_in_the_right_cell(tmp_path, monkeypatch):
    """Case 55: no Chrome, an untrusted viewer: a static image is there, and no exception."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("BROWSER_PATH", "/nonexistent")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    path = write_notebook(
        tmp_path / "n.ipynb",
        "root: str = ''\nfolder: str = ''\nsteps: int = 3",
        LOOP,
        "dashboard = LiveDashboard(run.path).start()",
        "for step in range(1, steps + 1):\n    write_step(run, rng, step, steps, 1, 7, t=time.time())\n"
        "    print('step', step)",
        "run.end('completed', step=steps)\ndashboard.stop()\nassert dashboard.error is None, dashboard.error",
    )
    run_papermill(path, tmp_path / "out.ipynb", root=ROOT, folder=str(tmp_path), steps=12)
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    start = next(i for i, c in enumerate(executed.cells) if "LiveDashboard(run.path).start()" in c.source)
    plots = [(i, o) for i, o in outputs(tmp_path / "out.ipynb") if "image/png" in (o.get("data") or {})]
    assert [i for i, _ in plots] == [start]  # one plot, in the cell that started it, though later cells ran
    output = plots[0][1]
    assert base64.b64decode(output["data"]["image/png"])[:4] == b"\x89PNG" and PLOTLY_MIME in output["data"]
    assert "completed" in output["data"]["text/plain"] and "step 12 of 12" in output["data"]["text/plain"]
    assert output["metadata"]["dflash"]["run"].endswith("/r")
    assert "widgets" not in executed.metadata


@pytest.mark.slow
def test_ten_thousand_steps_leave_a_small_notebook_with_its_last_line(tmp_path, monkeypatch):
    """Case 52: the notebook stays below 5 MB, its last line is there, and the whole log is in a file."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    path = write_notebook(
        tmp_path / "n.ipynb",
        "root: str = ''\nfolder: str = ''\nsteps: int = 3",
        LOOP + "from dflash.launch.background import BackgroundRun",
        "def work(control):\n    for step in range(1, steps + 1):\n"
        "        write_step(run, rng, step, steps, 1, 7, t=time.time())\n"
        "        print(f'\\rstep {step}', end='' if step % 5 else '\\n')\n",
        "with LiveDashboard(run.path):\n    BackgroundRun(run, work, worker='main').start().wait()",
        "print('the last line')",
    )
    run_papermill(path, tmp_path / "out.ipynb", root=ROOT, folder=str(tmp_path), steps=10_000)
    assert (tmp_path / "out.ipynb").stat().st_size < 5e6
    found = outputs(tmp_path / "out.ipynb")
    assert found[-1][1]["text"] == "the last line\n"
    assert sum(len(str(o.get("text", ""))) for _, o in found) < 1000  # no flood in the cells
    log = (tmp_path / "r" / "logs" / "main.log").read_text().splitlines()
    assert len(log) == 2000 and log[-1] == "step 10000"


def test_eight_workers_log_in_order_while_other_cells_run(tmp_path, monkeypatch):
    """Case 53: lines in order in the log and in the panel; no worker line in a cell; the exception in the cell."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    path = write_notebook(
        tmp_path / "n.ipynb",
        "root: str = ''\nfolder: str = ''\nsteps: int = 3",
        LOOP + "from dflash.launch.background import BackgroundRun\nfrom dflash.runs.worker_log import worker_output\n",
        "def one(name):\n    with worker_output(run.metrics, name, run.path / 'logs'):\n"
        "        for n in range(steps):\n            print(f'line {n}'); time.sleep(0.02)\n"
        "def work(control):\n    threads = [threading.Thread(target=one, args=(f'worker {w}',)) for w in range(8)]\n"
        "    [t.start() for t in threads]; [t.join() for t in threads]\n"
        "    raise RuntimeError('worker 3 gave up')\n",
        "dashboard = LiveDashboard(run.path).start()\njob = BackgroundRun(run, work, worker='launcher').start()",
        "print('cell A'); time.sleep(0.3)",
        "print('cell B'); time.sleep(0.3)",
        "try:\n    job.wait()\nfinally:\n    dashboard.stop()",
    )
    import papermill

    with pytest.raises(papermill.PapermillExecutionError, match="worker 3 gave up"):
        run_papermill(path, tmp_path / "out.ipynb", root=ROOT, folder=str(tmp_path), steps=30)
    printed = "".join(o["text"] for _, o in outputs(tmp_path / "out.ipynb") if o.output_type == "stream")
    lines = [line for line in printed.splitlines() if not line.startswith("r: ")]  # the dashboard's own, in a slow run
    assert lines == ["cell A", "cell B"]
    for worker in range(8):
        lines = (tmp_path / "r" / "logs" / f"worker_{worker}.log").read_text().splitlines()
        assert lines == [f"line {n}" for n in range(30)]
    panel = next(o for _, o in outputs(tmp_path / "out.ipynb") if "text/html" in (o.get("data") or {}))
    assert "worker 3 gave up" in panel["data"]["text/html"] and "line 29" in panel["data"]["text/plain"]


def test_durations_read_well():
    assert [duration(s) for s in (0.44, 42, 60, 95, 3720, None)] == [
        "0.4 s",
        "42 s",
        "1 min",
        "1 min 35 s",
        "1 h 02 min",
        "unknown",
    ]


def test_the_time_left_comes_from_the_newest_steps_and_what_is_due(tmp_path):
    """Two minutes of loading and an hour's pause say nothing about the steps to come."""
    run = Run.create(tmp_path, {"train": {"steps": 130, "eval_every": 50, "checkpoint_every": 0}}, "r")
    run.metrics.write("eval", t=120.0, step=0, acceptance_length=1.0, seconds=10.0)
    for step in range(1, 41):
        pause = 3600.0 if step > 20 else 0.0
        run.metrics.write("step", t=120.0 + pause + 2 * step, step=step, loss=1.0, step_seconds=2.0)
    series = RunSeries(run.path)
    series.follow()
    assert series.seconds_left == pytest.approx(90 * 2.0 + 2 * 10.0)  # evaluations at 50 and 100
    assert "about 3 min 20 s left" in one_line(series)
    run.metrics.write("plan", steps=40)
    series.follow()
    assert series.seconds_left is None, "the plan's last step is done"


def test_minutes_before_the_first_step_are_not_silent(tmp_path):
    run = Run.create(tmp_path, {"steps": 9}, "r")
    run.metrics.write("log", worker="main", level="info", message="captured 12 of 64 packs at 141 tokens/s")
    series = RunSeries(run.path)
    series.follow()
    assert "captured 12 of 64 packs" in one_line(series) and "captured 12 of 64 packs" in status_html(series)
    run.metrics.write("step", step=1, loss=1.0)
    series.follow()
    assert "captured" not in one_line(series) and "captured" not in status_html(series)


def test_a_capture_reports_its_progress_and_the_time_left(monkeypatch):
    from types import SimpleNamespace

    from dflash.target.features import CachedFeatures
    from dflash.train import prepare

    class Slow(CachedFeatures):
        def __init__(self):
            self.now = 100.0

        def prepare(self, packs, progress):
            for done in range(1, len(packs) + 1):
                self.now += 3.0
                progress(done, len(packs), 341.0)

    source, lines = Slow(), []
    monkeypatch.setattr(prepare, "time", SimpleNamespace(perf_counter=lambda: source.now))
    prepare.capture_features(source, SimpleNamespace(held_out_packs=[0], train_packs=[1] * 6), lines.append)
    assert lines == [
        "captured 2 of 7 packs at 341 tokens/s, about 15 s left",
        "captured 4 of 7 packs at 341 tokens/s, about 9.0 s left",
        "captured 6 of 7 packs at 341 tokens/s, about 3.0 s left",
        "captured 7 of 7 packs at 341 tokens/s",
    ]


def test_a_crowded_legend_stands_beside_its_plot(tmp_path):
    path = write_run(tmp_path, steps=8, devices=8)
    series = RunSeries(path)
    series.follow()
    panel = PANELS["memory"](series)
    layout = grid_figure([panel], 1).layout
    assert len(panel.lines) == 8 and layout.legend.orientation == "v"
    assert layout.legend.x >= layout.xaxis.domain[1] and layout.legend.y <= layout.yaxis.domain[1]
    few = grid_figure([PANELS["loss"](series)], 1).layout
    assert few.legend.orientation == "h" and few.legend.y >= few.yaxis.domain[1]


def test_the_buttons_stay_where_they_are_while_numbers_arrive(tmp_path):
    """The head has all its numbers from the start, so that nothing below it moves."""
    run = Run.create(tmp_path, {"steps": 30}, "r")
    series, rng = RunSeries(run.path), random.Random(0)

    def skeleton(waiting=""):
        return [re.sub(r"([^-])width:[\d.]+%", r"\1", tag) for tag in re.findall(r"<[^>]+>", status_html(series, waiting))]

    first = skeleton()
    for step in range(1, 31):
        write_step(run, rng, step, 30, 1, 7, t=float(step))
        series.follow()
        assert skeleton() == skeleton("pause asked for") == first
    assert sum("min-width:6em" in tag for tag in first) == 7


def test_a_terminal_shows_loss_acceptance_speed_and_time_left(tmp_path, capsys):
    from dflash.views.progress import TerminalProgress, postfix

    run, rng = Run.create(tmp_path, {"steps": 60}, "r"), random.Random(0)
    for step in range(1, 31):
        write_step(run, rng, step, 60, 1, 7, t=float(step))
    with TerminalProgress(run.path, every=0.05) as progress:
        while not progress.series.records:
            progress._stop.wait(0.05)
    assert "r: running · step 30 of 60 · loss" in capsys.readouterr().err
    assert re.fullmatch(r"loss \d\.\d{3}, acceptance 1\.32, [\d,]+ tokens/s, 30 s left", postfix(progress.series))
