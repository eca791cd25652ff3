"""What a resume refuses before it loads anything, and what it passes over; one process a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import yaml
from patience import PATIENCE, wait_until
from survival_lab import processes_of
from test_train_command import kinds, losses, material, start, wait_for_steps, write_config  # noqa: F401

from dflash import devices
from dflash.__main__ import main
from dflash.errors import ResumeError, RunError
from dflash.runs import lock as run_lock
from dflash.runs.lock import locked, refuse_running
from dflash.runs.record import METRICS_NAME
from dflash.train.checkpoint import checkpoints, newest_state
from dflash.train.optimizer import MasterAdamW, finite_each
from dflash.train.resolve import Before, resolve, settle_run
from dflash.train.settings import RunConfig


@pytest.fixture(scope="module")
def trained(material, tmp_path_factory):  # noqa: F811
    """A run of eight steps with the checkpoints of steps 4 and 8."""
    config = write_config(material, tmp_path_factory.mktemp("trained") / "runs/r", checkpoint_every=4)
    assert main(["train", "--config", str(config)]) == 0
    return config.parent


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "runs/r"))


def change(run: Path, room: str, **values) -> str:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings[room] |= values
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(run / "config.yaml")


def refused(config: str, capsys) -> str:
    """What a resume says that is refused: one line, and the record is as it was."""
    record = Path(config).with_name(METRICS_NAME)
    before = record.read_bytes() if record.exists() else b""
    assert main(["train", "--config", config, "--resume"]) == 2
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said and "\n" not in said
    assert (record.read_bytes() if record.exists() else b"") == before
    return said


def test_a_run_has_one_process_at_a_time(run, capsys, monkeypatch):
    monkeypatch.setattr(run_lock, "LEAVING", 0.1)
    with locked(run):
        with pytest.raises(RunError, match=f"is being trained by process {os.getpid()} on"):
            refuse_running(run)
        assert f"process {os.getpid()}" in refused(change(run, "train", steps=12), capsys)
        assert main(["train", "--config", change(run, "runtime", launcher="torchrun"), "--resume"]) == 2
    refuse_running(run)
    assert main(["train", "--config", change(run, "runtime", launcher="threads"), "--resume"]) == 0
    assert len(losses(run)) == 12 and not (run / run_lock.OWNER).exists()


def test_a_holder_that_leaves_is_waited_for(tmp_path):
    held, leave = threading.Event(), threading.Event()

    def hold():
        with locked(tmp_path):
            held.set()
            leave.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    threading.Timer(0.3, leave.set).start()
    with locked(tmp_path, wait=PATIENCE):
        assert leave.is_set()
    thread.join()


def test_a_run_folder_is_known_by_what_it_holds(run, tmp_path):
    """A run made with another runs_dir goes on from the command that is printed for it."""
    night = Path(shutil.copytree(run, tmp_path / "elsewhere/night"))
    assert main(["train", "--config", change(night, "train", steps=10), "--resume"]) == 0
    assert [r["step"] for r in kinds(night)["step"]] == list(range(1, 11))


def test_another_target_is_refused_and_a_moved_one_is_not(run, material, tmp_path, capsys):  # noqa: F811
    shutil.copytree(material / "target", tmp_path / "other")
    said = refused(change(run, "target", target=str(tmp_path / "other")), capsys)
    assert str(material / "target") in said and str(tmp_path / "other") in said
    shutil.copytree(material / "target", tmp_path / "moved/target")
    change(run, "train", steps=9)
    assert main(["train", "--config", change(run, "target", target=str(tmp_path / "moved/target")), "--resume"]) == 0


@pytest.mark.parametrize(
    ("room", "name", "was", "now"),
    [("drafter", "drafter_layers", 1, 2), ("target", "num_captured", 2, 1), ("target", "target_layers", [0, 3], [0, 1])],
)
def test_a_drafter_of_another_shape_is_refused(run, capsys, room, name, was, now):
    said = refused(change(run, room, **{name: now}), capsys)
    assert f"{name} {was}, the settings say {now}" in said


def test_a_run_that_started_from_a_drafter_keeps_that_drafters_shape(trained, material, tmp_path, capsys):  # noqa: F811
    """Its own settings of the shape were never read."""
    (_, checkpoint), *_ = checkpoints(trained)
    config = write_config(
        material,
        tmp_path / "runs/second",
        start_from=str(checkpoint),
        drafter_layers=2,
        num_captured=1,
        warm_start=False,
        checkpoint_every=4,
        steps=4,
    )
    assert main(["train", "--config", str(config)]) == 0
    assert main(["train", "--config", change(config.parent, "train", steps=6), "--resume"]) == 0
    assert [r["step"] for r in kinds(config.parent)["step"]] == list(range(1, 7))


TINY = dict(target="random:tiny", data="random:8", warm_start=False, held_out=0)


def test_auto_dtypes_stay_those_of_the_checkpoint(run, monkeypatch):
    """On a CPU "auto" follows the processor, and a run may go on with another one."""
    change(run, "target", target_dtype="auto")
    config = RunConfig.load(change(run, "train", dtype="auto"))
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: True)
    for going_on, wanted in ((False, torch.bfloat16), (True, torch.float32)):
        found = settle_run(run, config) if going_on else resolve(config)
        assert (found.dtype, found.target_dtype) == (wanted, wanted) and not found.notes
    on_gpu = RunConfig.from_parameters(**TINY, dtype="auto", gpus="0", target_gpus="0")  # decided by number alone
    found = resolve(on_gpu, Before("bfloat16", "float32", attention="flex"), gpus=1, ask_gpus=False)
    assert (found.target_dtype, found.dtype) == (torch.bfloat16, torch.float32)
    assert found.notes == ("dtype stays float32, as the checkpoint was trained; dtype=bfloat16 is faster on cuda:0",)


def test_another_dtype_than_the_checkpoints_is_said():
    config = RunConfig.from_parameters(**TINY, gpus="cpu", dtype="bfloat16", target_dtype="bfloat16")
    found = resolve(config, Before("float32", "bfloat16"))
    assert found.config.target.target_dtype == "bfloat16"
    assert found.notes == (
        "target_dtype is bfloat16, and the checkpoint was trained in float32: the run goes on, but it is not "
        "the unbroken run",
    )


def test_an_existing_run_is_refused_for_its_memory_too(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / METRICS_NAME).unlink()
    for launcher in ("threads", "torchrun"):
        config = change(run, "runtime", queue_depth=10**9, launcher=launcher, gpus="cpu:2", target_gpus="cpu:1")
        assert main(["train", "--config", config]) == 2
        said = capsys.readouterr().err
        assert "MemoryEstimateError" in said and "Use a smaller queue_depth" in said and "Traceback" not in said


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(run, capsys):
    shutil.rmtree(run / "checkpoints")
    assert "holds no complete checkpoint" in refused(str(run / "config.yaml"), capsys)


def damage(checkpoint: Path) -> None:
    """Other bytes, as many as before: complete by its sizes."""
    state = checkpoint / "trainer.pt"
    state.write_bytes(os.urandom(state.stat().st_size))


def test_a_damaged_checkpoint_is_passed_over(run, capsys):
    (_, older), (_, newer) = checkpoints(run)
    damage(newer)
    assert main(["train", "--config", change(run, "train", steps=9), "--resume"]) == 0
    shown = capsys.readouterr().out
    assert f"passed over, damaged: {newer.name}" in shown and "resuming after step 4" in shown
    assert [r["step"] for r in kinds(run)["step"]] == list(range(1, 10))


def test_a_disk_that_does_not_answer_is_no_damage(run, monkeypatch):
    def refuse(*given, **more):
        raise OSError("the disk does not answer")

    monkeypatch.setattr("torch.load", refuse)
    with pytest.raises(OSError, match="does not answer"):
        newest_state(run)
    monkeypatch.setattr("torch.load", lambda *given, **more: (_ for _ in ()).throw(EOFError()))  # no words at all
    with pytest.raises(ResumeError, match="can be read"):
        newest_state(run)


def test_where_all_are_damaged_the_error_says_so(run, capsys):
    for _, folder in checkpoints(run):
        damage(folder)
    assert main(["train", "--config", change(run, "train", steps=9), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "can be read: step-00000008, step-00000004" in said and "Traceback" not in said


def test_a_state_of_other_weights_is_refused_by_the_optimizer():
    def optimizer(*shapes):
        return MasterAdamW(
            [torch.nn.Parameter(torch.zeros(s)) for s in shapes], betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0
        )

    state = optimizer((2, 3), (4,)).state_dict()
    optimizer((2, 3), (4,)).load_state_dict(state)
    for other in (optimizer((2, 3)), optimizer((2, 3), (5,))):
        with pytest.raises(ResumeError, match="other weights: 2 tensors"):
            other.load_state_dict(state)


def test_finite_weights_are_finite_however_large():
    huge, nan, inf = torch.full((3,), 1e30), torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf"), 0.0])
    assert finite_each([huge, torch.zeros(0), nan, inf]).tolist() == [True, True, False, False]


@pytest.mark.slow
def test_a_killed_rank_is_named(material, tmp_path):  # noqa: F811
    """The others only see it vanish; the signal is what ended the run."""
    config = write_config(
        material, tmp_path / "runs/killed", gpus="cpu:2", target_gpus="cpu:1", launcher="torchrun", steps=100000
    )
    run, child = config.parent, start(config, tmp_path / "runs")
    wait_for_steps(run, 2, child)
    victim = next(pid for pid in processes_of(config) if rank_of(pid) == "1")
    os.kill(victim, signal.SIGKILL)
    out, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1 and "rank 1: RunError: killed by SIGKILL" in out
    failure = json.loads((run / "failure.json").read_text())
    assert failure["worker"] == "rank 1" and failure["message"].startswith("killed by SIGKILL")
    assert kinds(run)["run_end"][-1]["status"] == "failed"
    wait_until(lambda: not processes_of(config), "the end of all ranks")


def rank_of(pid: int) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((v.removeprefix("RANK=") for v in variables if v.startswith("RANK=")), None)
