"""`dflash run`: parameters checked first, honest exit codes, a report whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from notebook_factory import outputs, write_notebook
from patience import PATIENCE, wait_until
from synthetic_run import write_run

from dflash.__main__ import main as command_line
from dflash.errors import ConfigError, RunError
from dflash.runs.lock import locked
from dflash.runs.record import Run, read_metrics
from dflash.train.settings import RunConfig, setting_names
from dflash.workbook import run_notebook as run_notebook_module
from dflash.workbook.parameters import (
    check_parameters,
    check_variables,
    declared_parameters,
    declared_types,
    extra_settings,
    help_text,
    read_as,
    run_config,
)
from dflash.workbook.run_notebook import CELL_FAILED, INTERRUPTED, KILLED, OK, _close_record, parameters_from, run_notebook

ROOT = str(Path(__file__).parent.parent)
PARAMETERS = """\
gpus: str | int | list | None = None  # drafter GPUs, for example "5,6,7"
steps: int = 10  # training steps
lr: float = 1e-3  # learning rate
soft: bool = False  # soft labels
run_id: str = ''  # folder under runs/
"""


@pytest.fixture
def notebook(tmp_path):
    return write_notebook(tmp_path / "n.ipynb", PARAMETERS, "print(gpus, steps, lr, soft, run_id)")


@pytest.fixture
def declared(notebook):
    return declared_types(nbformat.read(notebook, as_version=4))


def test_the_parameters_cell_is_read_without_running_it(notebook, declared):
    found = declared_parameters(nbformat.read(notebook, as_version=4))
    assert list(found) == list(declared) == ["gpus", "steps", "lr", "soft", "run_id"]
    assert (declared["steps"], found["steps"].default, found["steps"].help) == ("int", "10", "training steps")
    assert 'gpus    Union[str , int , list , None] = None  drafter GPUs, for example "5,6,7"' in help_text(found)


@pytest.mark.parametrize(
    ("annotation", "given", "wanted"),
    [
        ("Optional[float]", "2.0", 2.0),
        ("Optional[float]", None, None),
        ("Optional[int]", "none", None),
        ("Union[str , int , None]", 5, 5),
        ("list[int]", [5, 6], [5, 6]),
        ("dict", {"a": 1}, {"a": 1}),
        ("bool", "false", False),
        ("None", "anything", "anything"),
        ("Path", "elsewhere", "elsewhere"),
    ],
)
def test_annotations_are_read_as_types(annotation, given, wanted):
    value = read_as("x", annotation, given)
    assert value == wanted and type(value) is type(wanted)


def test_a_value_of_another_type_says_how_to_pass_it():
    with pytest.raises(ConfigError, match=r"x must be list, got 'a' \(str\); pass it with -y 'x: ...'"):
        read_as("x", "list[int]", "a")
    with pytest.raises(ConfigError, match=r"x must be int, got True \(bool\)"):
        read_as("x", "int", True)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("gpus", "5,6,7", "5,6,7"),
        ("gpus", [5, 6], [5, 6]),
        ("gpus", "", None),
        ("steps", "20", 20),
        ("lr", "3e-4", 3e-4),
        ("soft", "false", False),
        ("soft", "True", True),
        ("steps", 7.0, 7),
        ("run_id", "1", "1"),
    ],
)
def test_values_take_their_declared_type(declared, name, given, wanted):
    value = check_parameters(declared, {name: given})[name]
    assert value == wanted and type(value) is type(wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpuz": 5}, "no parameter 'gpuz'; did you mean gpus?"),
        ({"steps": "many"}, "steps must be int, got 'many'"),
        ({"soft": "maybe"}, "soft must be bool"),
        ({"zzz": 1}, "Its parameters: gpus, steps, lr, soft, run_id"),
    ],
)
def test_wrong_names_and_types_are_refused(declared, given, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        check_parameters(declared, given)


TRAINING = Path(ROOT) / "notebooks" / "05_train.ipynb"


def test_a_notebook_of_settings_takes_every_setting_of_a_run():
    training = nbformat.read(TRAINING, as_version=4)
    declared, settings = declared_types(training), extra_settings(training)
    assert "drafter_parallel" not in declared and settings == setting_names()
    given = {"drafter_parallel": "fsdp2", "queue_depth": "4", "steps": "7", "background": "true"}
    wanted = {"drafter_parallel": "fsdp2", "queue_depth": 4, "steps": 7, "background": True}
    assert check_parameters(declared, given, settings) == wanted
    with pytest.raises(ConfigError, match="no parameter 'drafter_paralel'; did you mean drafter_parallel?"):
        check_parameters(declared, {"drafter_paralel": "fsdp2"}, settings)
    assert extra_settings(nbformat.read(TRAINING.parent / "01_standalone_kernel.ipynb", as_version=4)) == []


@pytest.mark.parametrize(
    ("yaml_text", "wanted"),
    [
        ("gpus: [5, 6, 7]", [5, 6, 7]),
        ("gpus: 5,6,7", "5,6,7"),
        ("gpus: 5", 5),
        ("max_conversations: 20", 20),
        ("max_conversations: null", None),
        ("gamma: 2.0", 2.0),
        ("gamma: null", None),
        ("gamma: ''", None),
        ("lr: 3e-4", 3e-4),
        ("target_layers: [1, 14, 27]", [1, 14, 27]),
        ("betas: [0.9, 0.99]", [0.9, 0.99]),
        ("target: 2026-11-30", "2026-11-30"),
        ("steps: null", None),
    ],
)
def test_whatever_papermill_takes_is_taken(yaml_text, wanted):
    training = nbformat.read(TRAINING, as_version=4)
    given = parameters_from([], [yaml_text])
    value = check_parameters(declared_types(training), given, extra_settings(training))[next(iter(given))]
    assert value == wanted and type(value) is type(wanted)


def test_a_running_notebook_checks_its_own_variables():
    cells = ["", "import os", "%not python", PARAMETERS, "# Parameters\nsteps = '20'\nsoft = 'false'\n", "steps"]
    names = {"In": cells, "gpus": 5, "steps": "20", "lr": 1, "soft": "false", "run_id": "", "other": "x"}
    assert check_variables(names) == (("gpus", "steps", "lr", "soft", "run_id"), ("steps", "soft"))
    assert (names["steps"], names["lr"], names["soft"], names["other"]) == (20, 1.0, False, "x")
    assert check_variables({"steps": "many"}) == ((), ()), "nothing to read the declarations from"
    names["steps"] = "many"
    assert check_variables(names, ["steps"]) and names["steps"] == "many"
    with pytest.raises(ConfigError, match="steps must be int, got 'many'"):
        check_variables(names)
    misspelt = {**names, "stepz": 3, "In": [PARAMETERS, "# Parameters\nstepz = 3\n"]}
    with pytest.raises(ConfigError, match=r"no parameter 'stepz'; did you mean steps\?"):
        check_variables(misspelt, ["steps"])
    with pytest.raises(ConfigError, match="run_id must be str, got 7 .*-r NAME VALUE"):
        check_variables({**names, "steps": 3, "run_id": 7})


CELL = "recipe: str = 'cpu'\ngamma: Optional[float] = None\nsteps: Optional[int] = None\nrun_id: str = ''\n"


def test_what_a_cell_leaves_at_none_is_the_recipes_and_a_passed_none_is_a_value():
    cell = {"recipe": "cpu", "gamma": None, "steps": None, "run_id": ""}
    wanted = RunConfig.from_parameters("cpu")
    assert run_config({**cell, "In": [CELL, "run_config(globals())"]}) == wanted == run_config(cell)
    passed = {**cell, "In": [CELL, "# Parameters\ngamma = None\nsteps = None\nlr = 0.5\n"], "lr": 0.5}
    config = run_config(passed)
    assert (config.train.gamma, config.train.steps, config.train.lr) == (None, wanted.train.steps, 0.5)
    assert run_config({**cell, "gamma": "none"}).train.gamma is None, "also from the cell itself"


def test_variables_that_are_nearly_a_settings_name_are_refused():
    names = {"block_size": 6, "steps": "12", "run_id": "x", "unrelated": 5, "_oh": {}, "os": object(), "In": [CELL]}
    config = run_config(names)
    assert (config.drafter.block_size, config.train.steps) == (6, 12)
    with pytest.raises(ConfigError, match="unknown parameter 'block_sise'; did you mean 'block_size'"):
        run_config({**names, "block_sise": 4})
    with pytest.raises(ConfigError, match="did you mean 'run_id'"):
        run_config({**names, "runid": "a"})
    own = {name: "x" for name in ("run_id", "runs_dir", "live", "background", "decode_prompts", "min_acceptance")}
    assert run_config(own) == RunConfig.from_parameters(), "no name of the notebook's own is nearly a setting's"


def test_nothing_runs_and_nothing_is_written_on_a_wrong_parameter(notebook, tmp_path, capsys):
    out = tmp_path / "runs" / "x" / "report.ipynb"
    assert command_line(["run", str(notebook), str(out), "-p", "gpuz", "5"]) == 2
    assert "did you mean gpus?" in capsys.readouterr().err and not out.parent.exists()
    with pytest.raises(RunError, match="there is no notebook .*; .* has n.ipynb"):
        run_notebook(tmp_path / "m.ipynb", out)


def test_what_cannot_start_says_why_and_leaves_nothing(notebook, tmp_path, capsys, monkeypatch):
    out = tmp_path / "runs" / "x" / "report.ipynb"
    assert command_line(["run", str(notebook), str(out), "-k", "nosuch"]) == 2
    assert "there is no kernel 'nosuch'; name one with -k, there are: " in capsys.readouterr().err
    assert command_line(["run", str(notebook), str(out), "--cell-timeout", "-5"]) == 2
    assert "must be at least 1 second, got -5" in capsys.readouterr().err and not (tmp_path / "runs").exists()

    def broken(source, copy, **options):
        Path(copy).write_text(Path(source).read_text())
        raise OSError("no sockets left")

    monkeypatch.setattr("papermill.execute_notebook", broken)
    assert command_line(["run", str(notebook), str(out)]) == 2
    assert "could not be started: OSError: no sockets left" in capsys.readouterr().err and not list(out.parent.iterdir())


def test_a_kernel_that_lacks_a_package_is_named_with_its_python(tmp_path, monkeypatch, capsys):
    """papermill#418; from another folder, as the notebook's path and the report's go by the caller's."""
    spec = tmp_path / "kernels" / "bare"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "bare", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_notebook(tmp_path / "n.ipynb", "x: int = 1", "import a_package_that_nobody_has")
    assert command_line(["run", "n.ipynb", "out.ipynb", "--static", "-k", "bare"]) == CELL_FAILED
    wanted = f"No module named 'a_package_that_nobody_has'; the kernel runs {sys.executable}: install it there (`make env`"
    assert wanted in capsys.readouterr().err and wanted in (tmp_path / "out.ipynb").read_text()


def test_a_cell_past_its_time_limit_is_named(tmp_path, capsys):
    path = write_notebook(tmp_path / "n.ipynb", "x: int = 1", "import time; time.sleep(60)")
    assert command_line(["run", str(path), str(tmp_path / "out.ipynb"), "--static", "--cell-timeout", "2"]) == CELL_FAILED
    assert "Timeout" in capsys.readouterr().err


def test_yaml_parameters(tmp_path):
    (tmp_path / "p.yaml").write_text("steps: 3\nlr: 0.1\n")
    (tmp_path / "empty.yaml").write_text("")
    found = parameters_from([["lr", "3e-4"]], ["gpus: [5, 6]"], [str(tmp_path / name) for name in ("p.yaml", "empty.yaml")])
    assert found == {"steps": 3, "lr": "3e-4", "gpus": [5, 6]}
    with pytest.raises(ConfigError, match="are not YAML"):
        parameters_from([], ["gpus: [1,"])
    with pytest.raises(ConfigError, match="must be 'name: value'"):
        parameters_from([], ["gpus"])


def test_a_good_notebook_makes_folders_and_a_report(notebook, tmp_path):
    out = tmp_path / "runs" / "night-1" / "report.ipynb"
    launched = run_notebook(notebook, out, {"gpus": "5,6,7", "soft": "false"}, progress=False, static=True)
    assert launched.code == OK and launched.report == out.with_suffix(".html") and launched.report.exists()
    assert outputs(out)[0][1]["text"] == "5,6,7 10 0.001 False night-1\n"


def test_the_report_of_an_earlier_run_is_not_overwritten(notebook, tmp_path):
    folder = Run.create(tmp_path / "runs", {"steps": 1}, "night-1").path
    (folder / "report.ipynb").write_text("kept")
    with pytest.raises(RunError, match="night-1 already holds a run, .*; name another folder, or go on with it"):
        run_notebook(notebook, folder / "report.ipynb", progress=False, static=True)
    assert (folder / "report.ipynb").read_text() == "kept"


def test_a_path_that_cannot_be_is_one_line(capsys):
    from dflash.commands import report

    def fail(arguments):
        open("/no/such/folder/x", "w")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "main", fail)
        assert command_line(["report", "x"]) == 2
    assert capsys.readouterr().err == "FileNotFoundError: No such file or directory: /no/such/folder/x\n"


def test_plain_papermill_keeps_working(notebook, tmp_path):
    out = tmp_path / "plain.ipynb"
    line = [sys.executable, "-m", "papermill", str(notebook), str(out), "-p", "steps", "5", "--no-progress-bar"]
    assert subprocess.run(line, capture_output=True).returncode == 0
    assert outputs(out)[0][1]["text"] == "None 5 0.001 False \n"


def test_a_failing_cell_is_reported(tmp_path):
    cells = "print('before')", "raise ValueError('not today')", "print('no')"
    path = write_notebook(tmp_path / "n.ipynb", "x: int = 1", *cells)
    launched = run_notebook(path, tmp_path / "out.ipynb", progress=False, static=True)
    assert launched.code == CELL_FAILED and launched.verdict.error == "ValueError: not today"
    page = launched.report.read_text()
    assert 'class="badge failed"' in page and "ValueError: not today" in page and "before" in page
    last = nbformat.read(launched.out, as_version=4).cells[-1]
    assert "What happened" in last.source and "not today" in last.source


def test_the_exit_code_of_a_cell_survives_and_a_setting_without_a_cell_is_no_news(tmp_path, caplog):
    path = write_notebook(tmp_path / "n.ipynb", "x: int = 1", "import sys; sys.exit(3)  # run_config(globals())")
    given = {"weight_decay": "0.1"}  # which papermill alone would call unknown
    assert run_notebook(path, tmp_path / "out.ipynb", given, progress=False, static=True).code == 3
    assert "unknown" not in caplog.text


KILL = "import os, signal, time; time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"


def test_a_killed_kernel_is_marked_in_notebook_record_and_report(tmp_path):
    folder = write_run(tmp_path / "runs", "killed", steps=20)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # its run_end never came
    path = write_notebook(tmp_path / "n.ipynb", "x: int = 1", "print('started')", KILL, "print('never')")
    launched = run_notebook(path, folder / "report.ipynb", progress=False, static=True)
    assert launched.code == KILLED and launched.verdict.status == "killed"
    executed = nbformat.read(launched.out, as_version=4)
    assert executed.metadata.papermill["exception"] is True
    assert executed.cells[launched.verdict.cell].metadata.papermill["status"] == "failed"
    assert "out-of-memory" in executed.cells[-1].source and "SIGKILL" in executed.cells[-1].source
    end = read_metrics(folder)[0][-1]
    assert (end["kind"], end["status"], end["step"]) == ("run_end", "failed", 20)
    page = launched.report.read_text()
    assert 'class="badge died"' in page and "kernel ended while cell" in page and "Last completed step: 20" in page


def test_ranks_that_outlive_their_kernel_write_the_one_end(tmp_path, monkeypatch):
    """The kernel that started them was killed; they end the run with a checkpoint, and say so."""
    folder = write_run(tmp_path / "runs", "killed", steps=20)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    held = threading.Event()

    def rank():
        with locked(folder):
            held.set()
            time.sleep(0.5)
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"kind": "run_end", "t": 1.0, "status": "interrupted"}) + "\n")

    thread = threading.Thread(target=rank)
    thread.start()
    assert held.wait(PATIENCE)
    _close_record(folder, KILLED)
    thread.join()
    ends = [r for r in read_metrics(folder)[0] if r["kind"] == "run_end"]
    assert [end["status"] for end in ends] == ["interrupted"]
    monkeypatch.setattr(run_notebook_module, "STOP_PATIENCE", 0.3)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    with locked(folder):
        _close_record(folder, KILLED)
    assert not [r for r in read_metrics(folder)[0] if r["kind"] == "run_end"], "who still trains writes the end"
    _close_record(folder, KILLED)
    assert [r["status"] for r in read_metrics(folder)[0] if r["kind"] == "run_end"] == ["failed"]


def test_sigterm_leaves_a_saved_notebook_and_a_report(tmp_path):
    started = tmp_path / "started"
    path = write_notebook(
        tmp_path / "n.ipynb",
        "x: int = 1",
        "print('begun', flush=True)",
        f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)",
    )
    out = tmp_path / "out.ipynb"
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash", "run", str(path), str(out), "--static"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    wait_until(started.exists, "the notebook's second cell")
    child.terminate()
    _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == INTERRUPTED, err
    assert "begun" in json.dumps(nbformat.read(out, as_version=4)) and out.with_suffix(".html").exists()
