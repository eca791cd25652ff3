"""A kernel that dies under papermill while it trains: a non-zero exit, a closed record, no orphan."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from notebook_factory import write_notebook
from patience import PATIENCE, wait_until
from survival_lab import processes_of
from test_train_command import kinds, material, wait_for_steps, write_config  # noqa: F401

from dflash.train.checkpoint import latest_checkpoint
from dflash.workbook.run_notebook import INTERRUPTED, KILLED

ROOT = Path(__file__).parents[1]
SLOW_TO_SAVE = """\
import os, pathlib, time
pathlib.Path(pid_file).write_text(str(os.getpid()))
from dflash.runs.control import RunControl
from dflash.runs.lock import locked
from dflash.runs.record import Run
run = Run.create(pathlib.Path(run_path).parent, {"steps": 100000}, pathlib.Path(run_path).name)
control, step, saved = RunControl(run.path, run.metrics), 0, run.path / "checkpoints"
with locked(run.path):
    while step == 0 or control.at_step():
        step += 1
        run.metrics.write("step", step=step, loss=1.0)
        time.sleep(0.1)
    saved.mkdir()
    (saved / ".step.part").write_text("half")
    time.sleep(8)  # longer than a kernel manager waits for a kernel that is to leave
    (saved / ".step.part").rename(saved / f"step-{step}")
    run.metrics.write("checkpoint", step=step, path=f"checkpoints/step-{step}")
    run.end("interrupted", step=step)
time.sleep(600)"""
CELLS = """\
import os, pathlib
pathlib.Path(pid_file).write_text(str(os.getpid()))
from dflash.train.settings import RunConfig
from dflash.runs.record import Run
from dflash.launch.run import train_run
outcome = train_run(Run.open(run_path), RunConfig.load(run_path + '/config.yaml'))"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["threads", "torchrun"])
def test_a_killed_kernel_leaves_no_orphan_and_a_run_that_resumes(material, tmp_path, launcher):  # noqa: F811
    config = write_config(
        material,
        tmp_path / "runs/night",
        gpus="cpu:2",
        target_gpus="cpu:1",
        launcher=launcher,
        steps=100000,
        checkpoint_every=2,
    )
    run, pid_file = config.parent, tmp_path / "pid"
    parameters = f"run_path: str = {str(run)!r}\npid_file: str = {str(pid_file)!r}"
    notebook = write_notebook(tmp_path / "n.ipynb", parameters, CELLS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash", "run", str(notebook), str(run / "report.ipynb"), "--static"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_steps(run, 5, child)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    output, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == KILLED, output
    assert (run / "report.html").exists() and not Path(f"/proc/{pid_file.read_text()}").exists()
    wait_until(lambda: not processes_of(config), "the end of orphans")
    assert kinds(run)["run_end"][-1]["status"] in ("failed", "interrupted")
    step = int(latest_checkpoint(run).name.removeprefix("step-"))
    values = yaml.safe_load(config.read_text())
    values["train"]["steps"], values["runtime"]["launcher"] = step + 3, "threads"
    config.write_text(yaml.safe_dump(values))
    from dflash.__main__ import main

    assert main(["train", "--config", str(config), "--resume"]) == 0
    seen = [r["step"] for r in kinds(run)["step"]]
    assert seen == list(range(1, step + 4))


@pytest.mark.slow
def test_ctrl_c_waits_for_the_checkpoint_however_long_it_takes(tmp_path):
    run, pid_file = tmp_path / "runs" / "night", tmp_path / "pid"
    parameters = f"run_path: str = {str(run)!r}\npid_file: str = {str(pid_file)!r}"
    notebook = write_notebook(tmp_path / "n.ipynb", parameters, SLOW_TO_SAVE)
    command = [sys.executable, "-m", "dflash", "run", str(notebook), str(run / "report.ipynb"), "--static"]
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for_steps(run, 3, child)
    os.killpg(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == INTERRUPTED, output
    step = kinds(run)["step"][-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{step}"]
    assert [end["status"] for end in kinds(run)["run_end"]] == ["interrupted"]
    page = (run / "report.html").read_text()
    assert 'class="badge interrupted"' in page and f"Interrupted after {step} of 100,000 steps" in page
    assert f"--config {run / 'config.yaml'} --resume" in page and "out-of-memory" not in page
    assert "Traceback" not in output and not Path(f"/proc/{pid_file.read_text()}").exists()


SMALL = """held_out 4, max_conversations 12, pack_length 256, max_anchors 64, eval_every 4, checkpoint_every 4, steps 4000,
max_minutes none, decode_prompts 0"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("DFLASH_INTERRUPTS", 3))))
def test_ctrl_c_at_any_moment_of_training_leaves_a_checkpoint(tmp_path, seed):
    """The default target, SIGINT to the whole process group, three busy processes beside."""
    out, draw = tmp_path / "runs" / "night" / "report.ipynb", random.Random(seed)
    given = [word for pair in SMALL.split(",") for word in ("-p", *pair.split())]
    command = [
        sys.executable,
        "-m",
        "dflash",
        "run",
        str(ROOT / "notebooks" / "05_train.ipynb"),
        str(out),
        "--static",
        *given,
    ]
    options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "start_new_session": True, "text": True}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    wait_for_steps(out.parent, 1, child)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        time.sleep(draw.uniform(0, 8))  # in a step, an evaluation, or a checkpoint: each of them falls due every four steps
        os.killpg(child.pid, signal.SIGINT)
        output, _ = child.communicate(timeout=PATIENCE)
    finally:
        for process in busy:
            process.kill()
    records = kinds(out.parent)
    assert child.returncode == INTERRUPTED, output
    assert [end["status"] for end in records["run_end"]] == ["interrupted"]
    last = records["step"][-1]["step"]
    assert latest_checkpoint(out.parent).name == f"step-{last:08d}"
    assert not list((out.parent / "checkpoints").glob(".*"))
    page = out.with_suffix(".html").read_text()
    assert 'class="badge interrupted"' in page and f"Interrupted after {last:,} of" in page
    assert f"--config {out.parent / 'config.yaml'} --resume" in page and "out-of-memory" not in page
    assert "Traceback" not in output, output
