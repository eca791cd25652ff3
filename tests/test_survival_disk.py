"""Full disks: no good checkpoint, no run and no fault is lost to one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from runner_jobs import options
from survival_lab import save
from test_training import make_trainer, steps_of

from dflash.compile_safety import HangError
from dflash.compile_safety.watchdog import Watchdog
from dflash.errors import RunError
from dflash.runs import worker_log
from dflash.runs.record import MetricsWriter, Run, read_metrics
from dflash.runs.worker_log import worker_output
from dflash.train.checkpoint import checkpoints, latest_checkpoint, load_trainer_state

HERE = Path(__file__).parent


# -- full disks ---------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str):
    """A tmpfs of `size`; skips where it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Take all room but about `leave` bytes."""
    filler, free = folder / "filler", os.statvfs(folder)
    filler.write_bytes(b"\0" * max(0, free.f_bavail * free.f_bsize - leave))
    return filler


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_disk_that_fills_in_a_save_costs_no_good_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as disk:
        folder = save(disk, 1, {"optimizer": {"x": torch.zeros(1000)}})
        for leave in (200_000, 60_000, 8_192, 0):  # in trainer.pt, in the weights, at the first file
            filler = fill(disk, leave)
            with pytest.raises(RunError, match="step 2 could not be written.*Earlier checkpoints are untouched"):
                save(disk, 2, {"optimizer": {"x": torch.zeros(100_000)}})
            filler.unlink()
            assert latest_checkpoint(disk) == folder and load_trainer_state(folder)["step"] == 1
            assert [p.name for p in (disk / "checkpoints").iterdir()] == [folder.name]
        save(disk, 2)
        assert latest_checkpoint(disk).name == "step-00000002"


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_disk_that_fills_while_logging_costs_counted_records_and_no_run(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "1m") as disk:
        trainer = make_trainer(disk, options(steps=40, packs_per_step=1))
        step, fillers = trainer.engine.step, []

        def filling(plan, lr):
            if plan.step == 4:
                fillers.append(fill(disk, 0))
            if plan.step == 35:  # the last page of the file took some
                fillers.pop().unlink()
            return step(plan, lr)

        trainer.engine.step = filling
        outcome = trainer.train()
        trainer.run.end(outcome.status)
        records = read_metrics(trainer.run.path)[0]
        seen = [r["step"] for r in records if r["kind"] == "step"]
        assert outcome.status == "completed" and seen[-1] == 40 and len(seen) == len(set(seen))
        lost = 40 - len(seen)
        assert 0 < lost <= records[-1]["dropped_records"] <= lost + 2
        assert capsys.readouterr().err.count("metrics are being lost") == 1
        assert latest_checkpoint(trainer.run.path).name == "step-00000040"


def test_training_goes_on_when_a_save_meets_a_full_disk_and_the_last_save_does_not(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, options(steps=8, packs_per_step=1, checkpoint_every=2))
    write, calls = torch.save, []

    def full(*arguments, **keywords):
        calls.append(1)
        if len(calls) in (2, 4):  # the saves of steps 4 and 8
            raise RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed writing file data/0")
        return write(*arguments, **keywords)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="the checkpoint of step 8 could not be written"):
        trainer.train()
    assert [step for step, _ in checkpoints(trainer.run.path)] == [2, 6] and len(steps_of(trainer.run)) == 8
    said = [r for r in read_metrics(trainer.run.path)[0] if r["kind"] == "log" and r["level"] == "error"]
    assert len(said) == 1 and "step 4 could not be written" in said[0]["message"] and "goes on" in said[0]["message"]


def test_a_torn_record_is_counted(tmp_path, monkeypatch, capsys):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    writer.write("step", step=1)
    monkeypatch.setattr(os, "write", real)
    writer.write("step", step=2)
    assert writer.dropped == 1 and [r["step"] for r in read_metrics(writer.path)[0]] == [2]
    assert "7 of" in capsys.readouterr().err


class FullFile:
    """A file on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")

    close = flush = lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device"))


def test_a_full_disk_ends_no_worker_that_prints_and_hides_no_fault(tmp_path, monkeypatch, capsys):
    run = Run.create(tmp_path, {}, "r")
    with worker_output(run.metrics, "drafter[0]", run.path / "logs"):
        entry = worker_log._workers[threading.get_ident()]
        entry.file.close()
        entry.file = FullFile()
        print("a line")
    assert [r["message"] for r in read_metrics(run.path)[0] if r["kind"] == "log"] == ["a line"]
    (run.path / "failure.json").mkdir()  # cannot be written
    run.fault(ValueError("the reason"))
    assert read_metrics(run.path)[0][-1]["message"] == "the reason" and "could not be written" in capsys.readouterr().err


def test_a_hang_on_a_full_disk_still_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(Watchdog, "_write", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(HangError, match="they could not be written: .*No space left"):
        with Watchdog(tmp_path, 0.5):
            threading.Event().wait(PATIENCE)
