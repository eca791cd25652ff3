"""The workbook in a real browser: plots move while training runs, buttons work, a reload reconnects.

Screenshots are kept in $DFLASH_SCREENSHOTS, or in pytest's temporary folder.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import nbformat
import pytest
from boxes import TEXTS, WATCH_SHIFTS, overlaps
from lab import CHROMIUM, FLAGS, PLOT, STATIC, WIDTHS, Notebook, Server
from notebook_factory import write_notebook
from patience import PATIENCE, wait_until
from synthetic_run import write_run

from dflash.runs.record import read_metrics
from dflash.views.dashboard import PANELS
from dflash.views.report import build_report

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="pip install playwright"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory):
    named = os.environ.get("DFLASH_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    server = Server(folder, tmp_path_factory.mktemp("home"))
    yield server
    server.stop()


@pytest.fixture
def open_notebook(browser, server, shots):
    contexts = []

    def opened(name: str, height: int = 1500) -> Notebook:
        context = browser.new_context(viewport={"width": 1400, "height": height})
        context.set_default_timeout(PATIENCE * 1000)
        contexts.append(context)
        return Notebook(context.new_page(), server, name, shots)

    yield opened
    for context in contexts:
        context.pages[0].screenshot(path=str(shots / "last.png"))
        context.close()


LOOP = f"""
import random, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from dflash.launch.background import BackgroundRun
from dflash.runs.control import RunControl
from dflash.views.dashboard import LiveDashboard
from dflash.runs.record import Run
from synthetic_run import write_step
run, rng = Run.create("runs", {{"steps": steps, "eval_every": 1, "held_out": 4}}, run_id), random.Random(0)
def train(control):
    saved = lambda: run.metrics.write("checkpoint", step=step, path="checkpoints/now", seconds=0.1)
    for step in range(1, steps + 1):
        if not control.at_step(checkpoint=saved):
            return "stopped"
        write_step(run, rng, step, steps, 2, 7, t=time.time())
        time.sleep(0.2)
    return "done"
"""


def kinds(path: Path, kind: str) -> list[dict]:
    return [record for record in read_metrics(path)[0] if record["kind"] == kind]


def steps(path: Path) -> int:
    return len(kinds(path, "step"))


def stop_button(book) -> float:
    """How far below the top of its notebook's output the Stop button stands, in pixels."""
    rule = """() => document.querySelector('.jupyter-button:last-child').getBoundingClientRect().top
        - document.querySelector('.jp-OutputArea-output .jupyter-widgets').getBoundingClientRect().top"""
    return book.page.evaluate(rule)


def test_background_training_moves_pauses_resumes_reconnects_and_stops(folder, open_notebook):
    write_notebook(
        folder / "background.ipynb",
        "steps: int = 3000\nrun_id: str = 'background'",
        LOOP,
        "job = BackgroundRun(run, train, worker='drafter[1]').start()\ndashboard = LiveDashboard(run.path).start()",
        "print('a later cell ran meanwhile')",
    )
    run = folder / "runs" / "background"
    book = open_notebook("background.ipynb")
    book.run_all()
    book.page.wait_for_selector(PLOT)
    wait_until(lambda: book.points() > 50, "the plot gets its first points")
    before, top = book.points(), stop_button(book)
    wait_until(lambda: book.points() > before + 50, "the plot grows while training runs")
    assert abs(stop_button(book) - top) <= 5, "the buttons moved under the pointer"
    wait_until(lambda: book.sees("a later cell ran meanwhile"), "the cell had returned at once")
    width, place = book.page.evaluate(WIDTHS)
    assert abs(width - place) < 8, "the plot is as wide as its cell"
    assert book.page.locator(PLOT).count() == 1
    book.shot("1-background-running")

    book.press("Pause")
    wait_until(lambda: kinds(run, "control")[-1:] and kinds(run, "control")[-1]["state"] == "paused", "the run pauses")
    wait_until(lambda: book.sees("paused"), "the dashboard says so")
    held = steps(run)
    time.sleep(2)
    assert steps(run) == held
    book.press("Checkpoint now")
    wait_until(lambda: kinds(run, "checkpoint"), "a checkpoint while paused")
    book.shot("2-background-paused")
    book.press("Resume")
    wait_until(lambda: steps(run) > held + 5, "the run goes on")

    book.save()
    book.open()  # reload
    book.page.wait_for_selector(PLOT)
    wait_until(lambda: book.points() > 50, "the plot is back after the reload")
    before = book.points()
    wait_until(lambda: book.points() > before + 20, "and still follows the run")
    book.shot("3-background-after-reload")

    book.press("Stop")
    wait_until(lambda: kinds(run, "run_end"), "the run ends")
    assert kinds(run, "run_end")[0]["status"] == "interrupted"
    wait_until(lambda: book.page.locator(".jupyter-button").count() == 0, "the buttons go")
    book.page.wait_for_selector(".jp-OutputArea-output img")  # a reloaded page keeps the image
    book.shot("4-background-stopped")


def test_buttons_reach_a_cell_that_is_still_training(folder, open_notebook):
    write_notebook(
        folder / "foreground.ipynb",
        "steps: int = 3000\nrun_id: str = 'foreground'",
        LOOP,
        "with LiveDashboard(run.path):\n    print(train(RunControl(run.path, run.metrics)))\nrun.end('interrupted')",
    )
    run = folder / "runs" / "foreground"
    book = open_notebook("foreground.ipynb")
    book.run_all()
    book.page.wait_for_selector(PLOT)
    wait_until(lambda: book.points() > 50, "the plot gets points while its cell is busy")
    book.shot("5-foreground-running")
    book.press("Pause")
    wait_until(lambda: kinds(run, "control")[-1:] and kinds(run, "control")[-1]["state"] == "paused", "it pauses")
    book.press("Resume")
    wait_until(lambda: kinds(run, "control")[-1]["state"] == "resumed", "it resumes")
    book.press("Stop")
    wait_until(lambda: book.sees("stopped"), "the cell ends")
    wait_until(lambda: book.page.locator(".jupyter-button").count() == 0, "the static plot takes the place")
    book.page.wait_for_selector(STATIC, state="attached")
    book.shot("6-foreground-stopped")
    book.page.mouse.move(700, 40)
    book.page.mouse.move(700, 900)
    book.page.wait_for_selector(PLOT)  # JupyterLab shows the image until the pointer comes near
    book.save()
    saved = nbformat.read(folder / "foreground.ipynb", as_version=4)
    outputs = [o for c in saved.cells for o in c.get("outputs", []) if "image/png" in (o.get("data") or {})]
    assert len(outputs) == 1 and "stopping" in outputs[0]["data"]["text/plain"]
    assert (folder / "foreground.ipynb").stat().st_size < 1_000_000  # no widget state of megabytes


def test_a_failure_in_the_cell_leaves_the_plot_and_the_traceback(folder, open_notebook):
    write_notebook(
        folder / "failing.ipynb",
        "steps: int = 3000\nrun_id: str = 'failing'",
        LOOP,
        "with LiveDashboard(run.path):\n    for step in range(1, 30):\n"
        "        write_step(run, rng, step, 30, 2, 7, t=time.time())\n        time.sleep(0.1)\n"
        "    raise ValueError('this run was meant to fail')",
    )
    book = open_notebook("failing.ipynb")
    book.run_all()
    wait_until(lambda: book.sees("this run was meant to fail"), "the traceback is in the cell")
    wait_until(lambda: book.page.locator(".jupyter-button").count() == 0, "no dead widgets remain")
    book.page.wait_for_selector(STATIC, state="attached")
    book.shot("7-failing")


def test_an_untrusted_notebook_still_shows_an_image(folder, open_notebook, tmp_path):
    """Case 55, the browser's half: no scripts run for an untrusted notebook, and the PNG is there."""
    import papermill

    path = write_notebook(
        tmp_path / "n.ipynb",
        "folder: str = ''",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom dflash.views.dashboard import show_run; _ = show_run(folder)",
    )
    made = write_run(tmp_path, "r", steps=30)
    out = folder / "untrusted.ipynb"
    papermill.execute_notebook(str(path), str(out), parameters={"folder": str(made)}, progress_bar=False)
    book = open_notebook("untrusted.ipynb")
    book.page.wait_for_selector(STATIC, state="attached")
    assert book.page.locator(PLOT).count() == 0
    book.shot("8-untrusted")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_draws_offline(browser, shots, tmp_path, scheme):
    failed = scheme == "dark"
    made = write_run(tmp_path, "demo", steps=200, devices=8, fault=failed, end="failed" if failed else "completed")
    report = build_report(made)
    context = browser.new_context(viewport={"width": 1200, "height": 1000}, color_scheme=scheme, offline=True)
    context.set_default_timeout(PATIENCE * 1000)
    page, errors = context.new_page(), []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("requestfailed", lambda request: errors.append(request.url[:200]))
    page.goto(report.as_uri())
    for y in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"window.scrollTo(0, {y})")
        time.sleep(0.2)
    page.wait_for_function(f"document.querySelectorAll('{PLOT}').length === {len(PANELS)}")
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0 and not errors
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=str(shots / f"9-report-{scheme}.png"), full_page=True)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1000, 1600])
def test_no_text_of_a_report_lies_over_other_text(browser, shots, tmp_path, width, scheme):
    """Eight devices, a failure, examples: all that a report can hold."""
    made = write_run(tmp_path, "demo", steps=200, devices=8, fault=True, end="failed")
    report = build_report(made)
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme, offline=True)
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    page.goto(report.as_uri())
    for y in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):  # plots are drawn when they come near
        page.evaluate(f"window.scrollTo(0, {y})")
        time.sleep(0.2)
    page.wait_for_function(f"document.querySelectorAll('{PLOT}').length === {len(PANELS)}")
    page.evaluate("window.scrollTo(0, 0)")
    time.sleep(0.5)
    page.screenshot(path=str(shots / f"13-report-{width}-{scheme}.png"), full_page=True)
    texts = page.evaluate(TEXTS, "main")
    assert len(texts) > 200 and overlaps(texts) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    context.close()


def test_nothing_of_the_live_dashboard_moves(browser, server, folder, shots):
    """From the first record on, while curves, faults, samples and log lines arrive."""
    name = "boxes"
    write_notebook(
        folder / f"{name}.ipynb",
        f"steps: int = 300\nrun_id: str = '{name}'",
        LOOP,
        "job = BackgroundRun(run, train).start()\ndashboard = LiveDashboard(run.path).start()",
        "print('a later cell')",
    )
    context = browser.new_context(viewport={"width": 1600, "height": 2400})
    context.set_default_timeout(PATIENCE * 1000)
    book = Notebook(context.new_page(), server, f"{name}.ipynb", shots)
    book.run_all()
    book.page.wait_for_selector(PLOT)
    wait_until(lambda: steps(folder / "runs" / name) > 3, "the first steps")
    time.sleep(2)
    book.page.evaluate(WATCH_SHIFTS)
    wait_until(lambda: len(kinds(folder / "runs" / name, "eval")) > 1, "the second evaluation")
    time.sleep(2)
    book.shot("14-dashboard")
    assert book.page.evaluate("window.shifts") == []
    book.press("Stop")
    context.close()


def test_a_report_without_scripts_shows_its_images(browser, shots, tmp_path):
    report = build_report(write_run(tmp_path, "demo", steps=60))
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(report.as_uri())
    images = page.locator("figure.plot img")
    assert images.count() == len(PANELS) and images.first.bounding_box()["width"] > 300
    page.screenshot(path=str(shots / "9-report-no-scripts.png"), full_page=True)
    context.close()


SMALL = """
held_out = 4; max_conversations = "12"; pack_length = 256; max_anchors = 16; steps = 4000; max_minutes = ""
draft_vocab = "512"; eval_every = 20; decode_prompts = 0; drafter_layers = 1; soft_labels = False
run_id = "browser"; runs_dir = {runs!r}
"""


def copy_notebook(name: str, folder: Path, override: str) -> Path:
    """A copy of a real notebook that runs in the repository, with a cell of small settings after its parameters."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    place = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(override))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"import os; os.chdir({str(ROOT)!r})"))
    nbformat.write(notebook, folder / name)
    return folder / name


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "notebooks" / "05_train.ipynb").exists(), reason="05_train is not there")
def test_real_training_is_seen_paused_resumed_and_stopped(folder, open_notebook, tmp_path):
    """05 with the real target at a small size: the plot moves, the buttons reach the busy cell, the notebook ends."""
    copy_notebook("05_train.ipynb", folder, SMALL.format(runs=str(tmp_path)))
    run = tmp_path / "browser"
    book = open_notebook("05_train.ipynb", height=2200)
    book.run_all()
    book.page.wait_for_selector(PLOT)
    wait_until(lambda: steps(run) > 5, "training starts")
    book.page.locator(PLOT).scroll_into_view_if_needed()
    before = book.points()
    wait_until(lambda: book.points() > before + 5, "the plot grows while the cell trains")
    book.shot("10-train-running")
    book.press("Pause")
    wait_until(lambda: kinds(run, "control")[-1:] and kinds(run, "control")[-1]["state"] == "paused", "it pauses")
    held = steps(run)
    time.sleep(2)
    assert steps(run) <= held + 1
    book.press("Resume")
    wait_until(lambda: steps(run) > held + 2, "it resumes")
    book.press("Stop")
    wait_until(lambda: kinds(run, "run_end"), "it ends")
    assert kinds(run, "run_end")[0]["status"] == "interrupted"
    book.page.wait_for_selector(STATIC, state="attached")
    wait_until(lambda: book.sees("acceptance length"), "the later cells run")
    book.shot("11-train-stopped")


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "notebooks" / "04_threaded_launch.ipynb").exists(), reason="04 is not there")
def test_the_threaded_launch_runs_in_the_browser(folder, open_notebook):
    copy_notebook("04_threaded_launch.ipynb", folder, "")
    book = open_notebook("04_threaded_launch.ipynb", height=2200)
    book.run_all()
    time.sleep(3)
    idle = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
    wait_until(lambda: book.page.locator(idle).count() and not book.page.locator("text='[*]:'").count(), "it ends")
    book.shot("12-threaded-launch")
    assert not book.page.locator(".jp-OutputArea-output[data-mime-type*='error']").count()
