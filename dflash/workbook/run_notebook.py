"""`dflash run NOTEBOOK OUT -p name value`: papermill, with the rough edges taken off.

It makes the folders, checks parameter names and types first, saves the notebook while it runs, tells a killed kernel
from a finished one (papermill's own output looks green then), always builds the HTML report, and returns:

    0    every cell ran
    1    a cell raised (a cell's sys.exit(n) returns n)
    2    wrong parameters, or no such notebook or kernel; nothing ran
    130  interrupted
    138  the kernel was killed (out of memory, a crash in native code)

The plain `papermill NOTEBOOK OUT -p name value` keeps working.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import yaml

from dflash.errors import ConfigError, RunError
from dflash.launch.signals import graceful
from dflash.runs.control import RunControl
from dflash.runs.lock import is_running
from dflash.runs.record import MetricsWriter, holds_run, metrics_path, read_metrics
from dflash.views.dashboard.series import RunSeries
from dflash.views.progress import TerminalProgress
from dflash.views.report import build_report
from dflash.views.report.notebook_part import Verdict, run_shown, verdict
from dflash.workbook.parameters import check_parameters, declared_types, extra_settings, read_notebook

OK, CELL_FAILED, REFUSED, INTERRUPTED, KILLED = 0, 1, 2, 130, 138
AUTOSAVE_SECONDS = 5
STOP_PATIENCE = 600.0  # seconds that an interrupted run gets for its step and its checkpoint
ROOT_PARAMETER = "runs_dir"  # the folder of all runs, where a notebook has such a parameter


@dataclass(frozen=True)
class Launched:
    """What came of an execution. `report` None when not even that could be made."""

    code: int
    out: Path
    report: Path | None
    verdict: Verdict
    seconds: float


def run_notebook(
    notebook: str | Path,
    out: str | Path,
    parameters: Mapping[str, Any] | None = None,
    kernel: str | None = None,
    cell_timeout: int | None = None,
    static: bool = False,
    progress: bool = True,
) -> Launched:
    """Execute `notebook` into `out`, then build the report beside it whatever happened.

    ConfigError for a wrong parameter or time limit, RunError for a missing notebook or kernel, or where no cell could be
    run; a failing cell is no exception here but a code in the result.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    notebook, out = Path(notebook), Path(out)
    if cell_timeout is not None and cell_timeout < 1:
        raise ConfigError(f"the time limit of a cell must be at least 1 second, got {cell_timeout}; leave it out for none")
    source = read_notebook(notebook)
    declared = declared_types(source)
    checked = check_parameters(declared, parameters or {}, extra_settings(source))
    if "run_id" in declared and "run_id" not in checked and out.name == "report.ipynb":
        checked["run_id"] = out.resolve().parent.name  # runs/<id>/report.ipynb: the run belongs into that folder
        if ROOT_PARAMETER in declared and ROOT_PARAMETER not in checked:
            checked[ROOT_PARAMETER] = str(out.parent.parent)
    if "run_id" in declared and out.name == "report.ipynb" and holds_run(out.parent):
        raise RunError(
            f"{out.parent} already holds a run, and its report would be overwritten; name another folder, or "
            f"go on with it: dflash train --config {out.parent / 'config.yaml'} --resume"
        )
    kernel = kernel or source.metadata.get("kernelspec", {}).get("name") or "python3"
    python = _python_of(kernel)
    logging.getLogger("papermill").addFilter(_news)
    before = out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    start, code, reason = time.monotonic(), OK, ""
    said = tempfile.TemporaryFile("w+", errors="replace")
    try:
        with graceful(_Stop(out.parent), announce=False), TerminalProgress(out.parent) if progress else nullcontext():
            papermill.execute_notebook(
                str(notebook),
                str(out),
                parameters=checked,
                kernel_name=kernel,
                progress_bar=progress,
                kernel_manager_class=_quiet_kernels(said),
                autosave_cell_every=AUTOSAVE_SECONDS,
                execution_timeout=cell_timeout,
            )
    except PapermillExecutionError as error:
        code = _exit_code(error)
    except DeadKernelError:
        code = KILLED
    except KeyboardInterrupt:
        code = INTERRUPTED
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the tasks that this cut short are no news
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if not out.exists() or verdict(nbformat.read(out, as_version=4)).status == "not run":
            if not before:
                out.unlink(missing_ok=True)  # papermill writes an untouched copy before it starts a kernel
            raise RunError(f"{notebook} could not be started: {reason}") from error
        code = CELL_FAILED
    launched = _conclude(code, out, time.monotonic() - start, static, reason, python)
    if launched.code == KILLED:
        said.seek(0)
        print(*said.read().splitlines()[-20:], sep="\n", file=sys.stderr)
    said.close()
    return launched


def _news(record: logging.LogRecord) -> bool:
    """Not papermill's warning of a setting that stands in no cell: names have been checked."""
    return not record.getMessage().startswith("Passed unknown parameter")


def _quiet_kernels(said: Any) -> type:
    """Kernels that write to the file `said` what would go to this terminal: an interrupted one leaves pages of tracebacks
    of its event loop."""
    from jupyter_client import AsyncKernelManager

    class QuietKernels(AsyncKernelManager):
        async def _async_start_kernel(self, **options: Any) -> None:
            await super()._async_start_kernel(stderr=said, **options)

        start_kernel = _async_start_kernel

    return QuietKernels


def _python_of(name: str) -> str:
    """What a kernel runs. RunError for one that is not installed, with those that are."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    kernels = KernelSpecManager()
    try:
        return kernels.get_kernel_spec(name).argv[0]
    except NoSuchKernel:
        there = ", ".join(sorted(kernels.find_kernel_specs())) or "none; pip install ipykernel"
        raise RunError(f"there is no kernel {name!r}; name one with -k, there are: {there}") from None


def _conclude(code: int, out: Path, seconds: float, static: bool, reason: str = "", python: str = "") -> Launched:
    """Judge the output by its cells, mark what papermill leaves unmarked, and build the report.

    `reason`: what ended it, if no cell raised that (a time limit, for example). `python`: what the kernel runs.
    """
    executed = nbformat.read(out, as_version=4)
    outcome = verdict(executed)
    if code == OK and not outcome.good:
        code = KILLED if outcome.status == "killed" else CELL_FAILED
    if reason:
        outcome = Verdict("failed", outcome.cell, outcome.source, reason, outcome.traceback)
    if outcome.error.startswith("ModuleNotFoundError") and python:
        hint = f"the kernel runs {python}: install it there (`make env` makes an environment), or choose a kernel with -k"
        outcome = replace(outcome, error=f"{outcome.error}; {hint}")
    if code == INTERRUPTED and outcome.status == "killed":
        outcome = Verdict("failed", outcome.cell, outcome.source, "KeyboardInterrupt: interrupted while this cell ran")
    if code != OK:
        _mark(executed, outcome, code)
        nbformat.write(executed, out)
        folder = run_shown(executed, out)
        if folder is not None:
            _close_record(folder, code)
    report = None
    try:
        report = build_report(out, static=static)
    except Exception as error:  # the report must not hide why the run failed
        print(f"no report: {type(error).__name__}: {error}", file=sys.stderr)
    return Launched(code, out, report, outcome, seconds)


def _mark(notebook: nbformat.NotebookNode, outcome: Verdict, code: int) -> None:
    """A last cell that says what happened, and papermill's own marks set to the truth."""
    text = {
        KILLED: "The kernel ended while the cell named below ran, without an error message. The usual "
        "cause is the system's out-of-memory killer (`dmesg | tail` names it); the other is a crash in native code.",
        INTERRUPTED: "The execution was interrupted (Ctrl-C or SIGTERM); the report has the line that resumes the run.",
    }.get(code, f"A cell raised: `{outcome.error[:500]}`")
    if outcome.source:
        text += f"\n\nCell {outcome.cell} (counted from 0):\n\n```python\n{outcome.source[:800]}\n```"
    cell = nbformat.v4.new_markdown_cell(f"## What happened\n\n{text}")
    cell.metadata["tags"] = ["what-happened"]
    if outcome.cell is not None and "papermill" in notebook.cells[outcome.cell].metadata:
        notebook.cells[outcome.cell].metadata.papermill.update(status="failed", exception=True)
    if "papermill" in notebook.metadata:
        notebook.metadata.papermill["exception"] = True
    notebook.cells.append(cell)


def _close_record(folder: Path, code: int) -> None:
    """A killed process cannot write its `run_end`; the launcher, which saw it die, does. Ranks that outlive the kernel which
    started them end their run themselves, with a checkpoint: they are waited for."""
    deadline = time.monotonic() + STOP_PATIENCE
    while is_running(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    records, _ = read_metrics(folder)
    if not records or is_running(folder) or any(record["kind"] == "run_end" for record in records):
        return
    step = next((r.get("step") for r in reversed(records) if r["kind"] == "step"), None)
    status = "interrupted" if code == INTERRUPTED else "failed"
    message = "the kernel was killed" if code == KILLED else "the notebook ended before the run did"
    writer = MetricsWriter(metrics_path(folder))
    writer.write("run_end", status=status, step=step, message=message, seconds=records[-1]["t"] - records[0]["t"])
    writer.close()


def _exit_code(error: Any) -> int:
    if error.ename == "SystemExit" and str(error.evalue).isdigit():
        return int(error.evalue) or OK
    return CELL_FAILED


class _Stop:
    """What Ctrl-C asks for: that the run in `folder` ends after its step, with a checkpoint; then that this process ends.

    Nothing is killed while a checkpoint is written, however long that takes; a second Ctrl-C ends it all at once.
    """

    def __init__(self, folder: Path) -> None:
        self.series = RunSeries(folder)

    def stop(self) -> None:
        """Called in a thread of its own."""
        self.series.follow()
        if self._training():
            print("\nending after this step, with a checkpoint; Ctrl-C once more ends it now", file=sys.stderr, flush=True)
        asked, deadline = 0.0, time.monotonic() + STOP_PATIENCE
        while self._training() and time.monotonic() < deadline:
            if not self.series.answers.get("stopping") and time.monotonic() - asked > 5:  # again: it may have come too early
                RunControl(self.series.path).stop()
                asked = time.monotonic()
            time.sleep(0.2)
            self.series.follow()
        time.sleep(1.2)  # `graceful` takes two signals at once for one
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _training(self) -> bool:
        """Whether there are steps that would be lost, and a process to save them."""
        return bool(self.series.last_step) and self.series.run_end is None and is_running(self.series.path) is not False


def parameters_from(pairs: Iterable[Sequence[str]], yaml_texts: Iterable[str], files: Iterable[str] = ()) -> dict[str, Any]:
    """`-p name value` (text, read by the declared type), `-y 'name: value'` and `-f FILE` as one mapping, as papermill
    orders them."""
    from papermill.iorw import NoDatesSafeLoader  # a date stays text

    found: dict[str, Any] = {}
    for text in [*(Path(file).read_text() for file in files), *yaml_texts]:
        try:
            content = yaml.load(text, Loader=NoDatesSafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"parameters {text!r} are not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict | None):
            raise ConfigError(f"parameters in YAML must be 'name: value', got {text[:80]!r}")
        found.update(content or {})
    return found | {name: value for name, value in pairs}
