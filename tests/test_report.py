"""report.html: offline, small, summary first, honest about failures."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import re
import time

import nbformat
import pytest
from synthetic_run import write_run

from dflash.errors import DataError, RunError
from dflash.runs.record import Run
from dflash.views.dashboard.series import RunSeries
from dflash.views.examples import examples_html, read_evaluation, readable
from dflash.views.report import build_report
from dflash.views.report.notebook_part import repeat_commands, verdict
from dflash.views.report.story import bottleneck, findings, hardware, headline, status_of, what_ran

CONFIG = {
    "target": {"target": "smollm2"},
    "drafter": {"drafter_layers": 2, "block_size": 8, "max_anchors": 128},
    "data": {"pack_length": 1024, "data": "data/x.jsonl"},
    "train": {"soft_labels": False, "steps": 100},
}
EVALUATION = {
    "acceptance_length": 1.5,
    "acceptance_interval": [1.4, 1.6],
    "speedup": 1.2,
    "exact": 1,
    "compared": 1,
    "warnings": ["prompts are in another mode"],
    "prompts": [
        {
            "prompt": "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nWhy <b>?<|im_end|>\n<|im_start|>assistant\n",
            "chunks": [{"text": "Be", "accepted": 0}, {"text": "cause </script>", "accepted": 3}],
            "acceptance_length": 2.5,
            "tokens": 5,
            "target_calls": 2,
            "seconds": 1.0,
            "plain_seconds": 1.5,
        }
    ],
}


def load(path):
    series = RunSeries(path)
    series.follow()
    return series


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("runs"), steps=100, config=CONFIG)
    (path / "evaluation.json").write_text(json.dumps(EVALUATION))
    return path


def sections(page):
    return re.findall(r'<section id="([^"]+)"', page)


def test_a_report_is_one_small_file_without_a_network(finished):
    page = build_report(finished).read_text()
    assert len(page) < 5e6
    body = re.sub(r'<script id="plotly-gz".*?</script>', "", page, flags=re.S)
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', body)  # images and anchors of its own only
    assert "http://" not in body and "https://" not in body
    assert page.count('id="plotly-gz"') == 1
    packed = re.search(r'<script id="plotly-gz" type="text/plain">([^<]+)<', page).group(1)
    assert b"Plotly" in gzip.decompress(base64.b64decode(packed))[:2000] or len(packed) > 1_000_000
    assert page.count('<figure class="plot">') == page.count("data:image/png;base64,") == 11
    for data in re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.S):
        assert json.loads(data)["data"]


def test_the_summary_comes_first_and_says_it_in_words(finished):
    page = build_report(finished).read_text()
    assert sections(page) == [
        "summary",
        "curves",
        "while-it-trained",
        "examples",
        "what-happened",
        "configuration-and-environment",
    ]
    text = re.sub(r"<[^>]+>", " ", page[: page.index('id="curves"')])
    assert re.search(r"Started 20\d\d-\d\d-\d\d \d\d:\d\d", text)
    for phrase in (
        "A 2-layer drafter with blocks of 8 slots for the target smollm2",
        "held-out acceptance length of 1.62 tokens per target call (bonus token included), from 1.08 at step 10",
        "The target is the bottleneck: drafters waited 67% of their time, targets 11%",
        "2 steps were skipped (2.0%): no supervised slot (2)",
    ):
        assert phrase in text, phrase


def test_static_is_small_and_has_no_script(finished, tmp_path):
    out = build_report(finished, tmp_path / "deep" / "s.html", static=True)
    page = out.read_text()
    assert "<script" not in page and page.count("data:image/png") == 11 and len(page) < 800_000


def test_examples_are_coloured_escaped_and_readable(finished):
    content = read_evaluation(finished)
    shown = examples_html(content)
    assert "Why &lt;b&gt;?" in shown and "Be kind" not in shown and "im_start" not in shown
    assert "cause &lt;/script&gt;" in shown and 'title="4 tokens, 3 drafted"' in shown
    plain, rich = re.findall(r'title="\d tokens[^>]*background:([^;"]+)', shown)
    assert plain == "transparent" != rich
    assert "acceptance length 1.50, bonus token included (95% interval 1.40 to 1.60 over prompts)" in shown
    assert "1.50 times" in shown and "prompts are in another mode" in shown
    assert readable("plain question") == "plain question"


def test_code_keeps_its_indentation_in_both_places_of_a_report(tmp_path):
    texts = ["def f():", "\n    ", "if x:\n", "        ", "return 1"]
    content = {"prompts": [{"prompt": "p", "chunks": [{"text": text, "accepted": 0} for text in texts]}]}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    cell = nbformat.v4.new_code_cell("show()", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("display_data", data={"text/html": examples_html(content)})]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    write_run(tmp_path, "r", steps=4, config=CONFIG)
    for name in ("evaluation.json", "n.ipynb"):
        (tmp_path / name).rename(tmp_path / "r" / name)
    page = build_report(tmp_path / "r" / "n.ipynb", static=True).read_text()
    after_training = page[page.index('id="examples"') :]
    answers = re.findall(r'<pre class="answer"[^>]*>(.*?)</pre>', after_training, flags=re.S)
    assert [re.sub("<[^>]+>", "", answer) for answer in answers] == ["".join(texts)] * 2


def test_a_broken_evaluation_record_is_named(tmp_path):
    (tmp_path / "evaluation.json").write_text('{"prompts": [{"text": 1}]}')
    with pytest.raises(DataError, match="is no evaluation record"):
        read_evaluation(tmp_path)
    assert read_evaluation(tmp_path / "none") is None


def test_a_failed_run_says_what_failed_with_stacks_and_last_good_step(tmp_path):
    path = write_run(tmp_path, steps=30, fault=True, end="failed")
    page = build_report(path).read_text()
    assert sections(page)[:3] == ["summary", "what-failed", "curves"]
    assert 'class="badge failed"' in page
    failure = page[page.index('id="what-failed"') : page.index('id="curves"')]
    for phrase in (
        "drafter[1]",
        "a made-up failure",
        "Traceback (most recent call last)",
        "Last completed step: 30",
        "checkpoints/last",
        "What every thread was doing",
        "most recent call first",
    ):
        assert phrase in failure, phrase


def test_a_run_that_was_killed_is_not_called_complete(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    run.metrics.write("step", t=time.time() - 3600, step=5, loss=1.0)
    series = load(run.path)
    assert status_of(series, now=series.last_time + 10) == "running"
    assert status_of(series, now=series.last_time + 1000) == "died"
    assert "The record stops without an end" in findings(series, "died")[0].text
    assert headline(series, "died") == "Killed after 5 steps; held-out acceptance was not measured."


def test_odd_things_are_noticed(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    for step in range(1, 201):
        late = step > 150
        loss, rate = (3.0, 50) if late else (2.0, 100)
        run.metrics.write("step", t=1000.0 + step, step=step, loss=loss, tokens_per_second=rate)
        run.metrics.write(
            "device", t=1000.0 + step, device="cuda:0", used=(120 if late else 100) << 30, peak=140 << 30, total=141 << 30
        )
    for step, value in ((50, 1.5), (100, 1.6), (200, 1.4)):
        run.metrics.write("eval", t=1200.0, step=step, acceptance_length=value)
    run.metrics.write("step", t=1201.0, step=201, loss=float("inf"))
    run.end("completed", dropped_records=3)
    texts = " ".join(f.text for f in findings(load(run.path), "completed"))
    assert "3 records could not be written" in texts
    for phrase in (
        "not finite in 1 step.",
        "best at step 100 (1.60) and ended 0.20 lower",
        "The loss rose by 4",
        "Throughput fell by 50%",
        "Memory in use on cuda:0 grew by 20%",
        "within 1% of its memory limit",
    ):
        assert phrase in texts, phrase
    quiet = write_run(tmp_path, "quiet", steps=40)
    assert [f.level for f in findings(load(quiet), "completed")] == []


def test_the_bottleneck_is_read_from_the_record(tmp_path, monkeypatch):
    def verdict_of(name, *records):
        run = Run.create(tmp_path, {}, name)
        for kind, fields in records:
            run.metrics.write(kind, **fields)
        return bottleneck(load(run.path))

    target = ("stage", {"name": "target[0]", "busy_seconds": 1.0, "wait_seconds": 3.0})
    drafter = ("stage", {"name": "drafter[1]", "busy_seconds": 4.0, "wait_seconds": 0.0})
    said = verdict_of("a", target, drafter)
    assert said.startswith("The drafter is the bottleneck: drafters waited 0%") and "More drafter devices would" in said
    here = ("device", {"device": "cpu", "used": 1, "utilization": 95.0})
    assert verdict_of("f", target, drafter, here).endswith("targets 75%."), "workers on a CPU share its cores"
    assert "balanced" in verdict_of("b", ("stage", {**target[1], "wait_seconds": 0.0}), drafter)
    busy = ("device", {"device": "cpu", "used": 1, "utilization": 95.0})
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    said = verdict_of("c", busy)
    assert said == f"The process kept {0.95 * cores:.1f} of {cores} cores busy on average: compute sets the pace."
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert "OMP_NUM_THREADS=0 allowed it no more" in verdict_of("e", busy)
    assert verdict_of("d").startswith("Not measured")


def test_words_only_claim_what_the_record_holds(finished):
    assert what_ran({}) == "The configuration does not say."
    assert what_ran({"drafter_layers": 3}) == "A 3-layer drafter."
    environment = {
        "cuda": {"devices": [{"name": "H200", "memory": 141 << 30}] * 8},
        "packages": {"torch": "2.13"},
        "cpu": {"name": "EPYC", "usable": 2, "memory": 8 << 30},
    }
    assert hardware(environment, load(finished)) == "2 × H200 (141.0 GiB), torch 2.13"  # the devices that were used
    bare = RunSeries("nowhere")
    bare.memory["cpu"] = bare.loss
    assert hardware(environment, bare) == "2 cores of EPYC, 8.00 GiB of memory, no GPU, torch 2.13"


def executed(*cells):
    notebook = nbformat.v4.new_notebook()
    for source, count, outputs in cells:
        cell = nbformat.v4.new_code_cell(source, execution_count=count, outputs=outputs)
        cell.metadata["papermill"] = {"status": "completed", "exception": None}
        notebook.cells.append(cell)
    return notebook


def test_a_killed_kernel_is_told_from_a_finished_one():
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="bad", traceback=["\x1b[31mline\x1b[0m"])
    assert verdict(executed(("a = 1", 1, []), ("b", 2, []))).good
    killed = verdict(executed(("a = 1", 1, []), ("train()", None, []), ("b", None, [])))
    assert (killed.status, killed.cell, killed.source) == ("killed", 1, "train()")
    last = executed(("a = 1", 1, []), ("train()", 2, []))  # the kernel had begun the cell: it has a count
    last.cells[0].metadata["execution"] = {"iopub.execute_input": "t", "shell.execute_reply": "t"}
    last.cells[1].metadata["execution"] = {"iopub.execute_input": "t"}
    assert (verdict(last).status, verdict(last).cell) == ("killed", 1)
    failed = verdict(executed(("a = 1", 1, []), ("train()", 2, [error]), ("b", None, [])))
    assert (failed.status, failed.cell, failed.error, failed.traceback) == ("failed", 1, "ValueError: bad", "line")
    assert verdict(executed(("a", None, []))).status == "not run"
    assert verdict(executed(("a", 1, []), ("  ", None, []))).good  # an empty cell is never numbered


def test_the_command_that_repeats_a_run_is_shell_safe():
    notebook = executed(("a", 1, []))
    notebook.metadata["papermill"] = {
        "input_path": "notebooks/05_train.ipynb",
        "output_path": "runs/a b/report.ipynb",
        "parameters": {"gpus": "5,6,7", "layers": [1, 2], "lr": 0.001},
    }
    assert repeat_commands(notebook)[1] == (
        "mkdir -p 'runs/a b-2' && papermill notebooks/05_train.ipynb 'runs/a b-2/report.ipynb' -p gpus 5,6,7 "
        "-y 'layers: [1, 2]' -p lr 0.001 -p run_id 'a b-2'"
    )
    assert repeat_commands(executed()) == []


def test_widget_state_and_scripts_of_a_notebook_stay_out(tmp_path):
    view = nbformat.v4.new_output(
        "display_data",
        {
            "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
            "text/plain": "VBox()",
            "application/javascript": "alert(1)",
        },
    )
    notebook = executed(("show()", 1, [view]))
    notebook.metadata["widgets"] = {"state": "x" * 1_000_000}
    nbformat.write(notebook, tmp_path / "n.ipynb")
    page = build_report(tmp_path / "n.ipynb", static=True).read_text()
    assert len(page) < 100_000 and "alert(1)" not in page and "This notebook ran to its end." in page


def test_the_lines_of_a_text_form_stay_lines_under_the_plot(tmp_path):
    drawn = [
        nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": text})
        for text in ("one line", "drafter 0 |##--|\ndrafter 1 | ###|")
    ]
    nbformat.write(executed(("show()", 1, drawn)), tmp_path / "n.ipynb")
    page = build_report(tmp_path / "n.ipynb", static=True).read_text()
    assert "<figcaption>one line</figcaption>" in page
    assert '<figcaption class="drawn">drafter 0 |##--|\ndrafter 1 | ###|</figcaption>' in page
    assert re.search(r"figcaption\.drawn \{[^}]*white-space:\s*pre;", page)


def test_sources_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(RunError, match="does not exist; give an executed notebook or a run folder"):
        build_report(tmp_path / "x.ipynb")
    (tmp_path / "y.md").write_text("# no notebook")
    with pytest.raises(RunError, match="y.md is not a notebook; give an executed notebook or a run folder"):
        build_report(tmp_path / "y.md")
    with pytest.raises(RunError, match="holds neither report.ipynb nor a run"):
        build_report(tmp_path)


def test_the_style_sheet_is_whole():
    """A string cut over two lines would make a browser drop the rule, and with it the font."""
    from dflash.views.templates import _css

    CSS = _css()
    assert CSS.count("{") == CSS.count("}") and all(line.count('"') % 2 == 0 for line in CSS.splitlines())
    assert re.search(r"body \{[^}]*font-family:system-ui", CSS)


def test_an_interrupted_run_says_so_and_how_to_go_on(tmp_path):
    """Ctrl-C leaves a notebook that looks killed; nobody is to look for a lack of memory."""
    path = write_run(tmp_path, steps=30, end="interrupted", config={"steps": 100})
    last = executed(("a = 1", 1, []), ("job.wait()", 2, []))
    last.cells[0].metadata["execution"] = {"iopub.execute_input": "t", "shell.execute_reply": "t"}
    last.cells[1].metadata["execution"] = {"iopub.execute_input": "t"}
    nbformat.write(last, path / "report.ipynb")
    assert verdict(last).status == "killed"
    page = build_report(path, static=True).read_text()
    assert 'class="badge interrupted">interrupted<' in page and "where-it-stopped" in sections(page)
    assert "Interrupted after 30 of 100 steps" in page and "Last completed step: 30 of 100." in page
    assert f"dflash train --config {path / 'config.yaml'} --resume" in page
    assert "out-of-memory" not in page and "What failed" not in page


def test_a_run_whose_process_holds_the_lock_is_running_however_silent(tmp_path):
    from dflash.runs.lock import locked

    run = Run.create(tmp_path, {}, "r")
    run.metrics.write("step", t=time.time() - 3600, step=5, loss=1.0)
    with locked(run.path):
        assert status_of(load(run.path)) == "running"
    assert status_of(load(run.path)) == "died"
    run.metrics.write("step", step=6, loss=1.0)
    assert status_of(load(run.path)) == "died", "the process has left, however fresh its last record"


def test_repeating_a_run_names_a_folder_that_is_free(tmp_path):
    notebook = executed(("a", 1, []))
    record = {"input_path": "n.ipynb", "parameters": {"run_id": "night-2", "target": "5"}}
    notebook.metadata["papermill"] = {**record, "output_path": str(tmp_path / "night-2" / "report.ipynb")}
    (tmp_path / "night-3").mkdir()
    line = repeat_commands(notebook, tmp_path / "night-2" / "report.ipynb")[0]
    again = f"{tmp_path}/night-4/report.ipynb"
    assert line == f"""dflash run n.ipynb {again} -p run_id night-4 -y 'target: "5"'"""
    notebook.metadata["papermill"]["output_path"] = "out.ipynb"
    assert repeat_commands(notebook)[0].startswith("dflash run n.ipynb out-2.ipynb -p run_id night-2")


def test_only_the_report_s_own_script_may_run(tmp_path):
    """A notebook that somebody else executed may hold HTML with scripts; the browser refuses them."""
    evil = nbformat.v4.new_output(
        "display_data", data={"text/html": "<script>alert(1)</script><img src=x onerror=alert(2)>"}
    )
    nbformat.write(executed(("show()", 1, [evil])), tmp_path / "n.ipynb")
    page = build_report(tmp_path / "n.ipynb").read_text()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    nonce = re.fullmatch(r"'nonce-(\S{20,})'", rules["script-src"]).group(1)
    assert rules["default-src"] == "'none'" and re.findall(r'<script nonce="([^"]+)"', page) == [nonce]
    assert page.index("Content-Security-Policy") < page.index("alert(1)")
    static = build_report(tmp_path / "n.ipynb", static=True).read_text()
    assert "script-src &#39;none&#39;" in static
    assert nonce not in build_report(tmp_path / "n.ipynb").read_text(), "a nonce that an output could know"


def test_the_run_s_plots_stand_in_the_page_once(tmp_path):
    path = write_run(tmp_path, steps=20)
    drawn = nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "synthetic: completed"})
    drawn.metadata["dflash"] = {"run": str(path)}
    nbformat.write(executed(("dashboard.start()", 1, [drawn])), path / "report.ipynb")
    page = build_report(path, static=True).read_text()
    assert 'iVBORw0KGgo="' not in page and "The plots are above, under Curves." in page and "synthetic: completed" in page


def test_a_notebook_at_work_is_not_called_killed_nor_its_finished_run(tmp_path):
    path = write_run(tmp_path, steps=20)
    notebook = executed(("a = 1", 1, []), ("decode()", None, []))
    notebook.metadata["papermill"] = {"input_path": "n.ipynb", "start_time": "2026-01-01", "end_time": None}
    nbformat.write(notebook, path / "report.ipynb")
    page = build_report(path, static=True).read_text()
    assert 'class="badge running"' in page and "Completed after 20 steps" in page and "out-of-memory" not in page
    os.utime(path / "report.ipynb", (1e9, 1e9))  # nobody has saved it for long: papermill was killed, too
    page = build_report(path, static=True).read_text()
    assert 'class="badge died"' in page and "Completed after 20 steps" in page and "stops without an end" not in page
