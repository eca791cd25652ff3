"""Runs go on: kills in a save, the record after a resume, other numbers of drafters, other data."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from patience import PATIENCE
from runner_jobs import first_replica, options, packs, planner, serial, weights
from survival_lab import save
from test_runner_threads import engine_of
from test_train_command import kinds, losses, material, write_config  # noqa: F401

from dflash.__main__ import main
from dflash.runs.record import MetricsWriter, Run, read_metrics
from dflash.train.checkpoint import (
    best_checkpoint,
    checkpoint_facts,
    checkpoints,
    latest_checkpoint,
    load_trainer_state,
    save_checkpoint,
)
from dflash.train.optimizer import MasterAdamW
from dflash.train.plan import Planner
from dflash.train.prepare import prepare_data
from dflash.train.resolve import resolve
from dflash.train.resume import SUPERSEDED, plan_fingerprint, rewind_record, same_plan
from dflash.train.settings import RunConfig
from dflash.train.step import Replica

HERE = Path(__file__).parent


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_in_a_save_lose_nothing(tmp_path, times):
    """Half-written folders never count; what was complete before a kill is complete after it (speculators#739)."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    ran = subprocess.run(
        [sys.executable, str(HERE / "survival_lab.py"), str(tmp_path), str(times)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["killed"] >= times and seen["inside"] >= times // 4, f"the kills must hit saves: {seen}"
    assert (seen["backwards"], seen["lost"], seen["twice"]) == (0, 0, 0), seen
    one, two = tmp_path / "whole", tmp_path / "killed"
    assert losses(one) == losses(two) and len(losses(two)) == 60
    a, b = (load_trainer_state(latest_checkpoint(run))["optimizer"]["masters"] for run in (one, two))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not [p for p in (two / "checkpoints").iterdir() if p.name.startswith(".")], "nothing half-written stays"


def test_saving_a_step_again_never_leaves_it_without_a_checkpoint(tmp_path):
    final = save(tmp_path, 3, {"optimizer": {"mark": torch.tensor(1)}})
    final.rename(final.with_name(f".{final.name}.before"))  # killed between the two renames of the second save
    assert latest_checkpoint(tmp_path) == final
    save(tmp_path, 3, {"optimizer": {"mark": torch.tensor(2)}})
    assert int(load_trainer_state(latest_checkpoint(tmp_path))["optimizer"]["mark"]) == 2
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [final.name]


def test_the_best_checkpoint_outlives_newer_ones_and_a_resume(tmp_path):
    for step, length in ((1, 1.2), (2, 1.9), (3, 1.4), (4, None), (5, 1.3)):
        save(tmp_path, step, keep=2, facts={"acceptance_length": length})
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 4, 5]
    assert best_checkpoint(tmp_path).name == "step-00000002"
    save(tmp_path, 6, keep=1, facts={"acceptance_length": 2.0})
    assert [step for step, _ in checkpoints(tmp_path)] == [6] and checkpoint_facts(best_checkpoint(tmp_path))["step"] == 6


def test_a_trained_run_keeps_the_checkpoint_of_its_best_evaluation(material, tmp_path, monkeypatch):  # noqa: F811
    lengths = iter([1.0, 1.5, 3.0, 2.0, 2.5])
    monkeypatch.setattr("dflash.launch.course.evaluate_acceptance", lambda *a: {"acceptance_length": next(lengths)})
    config = write_config(material, tmp_path / "runs/best", eval_every=2, checkpoint_every=2, keep_checkpoints=1)
    assert main(["train", "--config", str(config)]) == 0
    assert [step for step, _ in checkpoints(config.parent)] == [4, 8]
    assert checkpoint_facts(best_checkpoint(config.parent))["acceptance_length"] == 3.0


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    folder, proof = save(tmp_path, 1), tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(proof),))

    torch.save({"optimizer": Evil()}, folder / "trainer.pt")
    mark = json.loads((folder / "complete.json").read_text())
    mark["files"]["trainer.pt"] = (folder / "trainer.pt").stat().st_size
    (folder / "complete.json").write_text(json.dumps(mark))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_trainer_state(folder)
    assert not proof.exists()


# -- the record -------------------------------------------------------------------------------------------------------


def test_the_record_goes_back_to_the_checkpoint_and_keeps_what_it_cuts(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    other = MetricsWriter(run.metrics.path)  # another rank, which keeps the file open
    for step in (1, 2):
        run.metrics.write("step", step=step, loss=1.0)
    folder = save(run.path, 2, facts={"metrics_offset": run.metrics.offset})
    run.metrics.write("checkpoint", step=2, path=str(folder))
    for step in (3, 4):
        run.metrics.write("step", step=step, loss=2.0)
    run.fault(ValueError("a made-up end"))
    with open(run.metrics.path, "ab") as file:
        file.write(b'{"kind":"step","step":5,"lo')  # killed in a write
    before = run.metrics.path.read_bytes()
    assert rewind_record(run, folder) == 4
    other.write("step", step=3, loss=3.0)
    records = read_metrics(run.path)[0]
    assert [r["kind"] for r in records] == ["run_start", "step", "step", "checkpoint", "resume", "step"]
    assert [r["loss"] for r in records if r["kind"] == "step"] == [1.0, 1.0, 3.0]
    resumed = records[4]
    assert (resumed["step"], resumed["superseded_steps"]) == (2, 2) and "a made-up end" in resumed["before"][0]
    cut = (run.path / SUPERSEDED).read_bytes()
    assert before.endswith(cut.rstrip(b"\n")) and cut.count(b'"kind":"step"') == 3


def test_nothing_is_cut_twice_and_older_checkpoints_without_an_offset_are_read(tmp_path):
    run = Run.create(tmp_path, {}, "r")
    for step in (1, 2, 3):
        run.metrics.write("step", step=step)
    folder = save(run.path, 2)  # no offset in its mark
    assert rewind_record(run, folder) == 1
    assert rewind_record(run, folder) == 0
    assert [r["step"] for r in read_metrics(run.path)[0] if r["kind"] == "step"] == [1, 2]
    assert sum(r["kind"] == "resume" for r in read_metrics(run.path)[0]) == 1


def test_a_follower_of_the_record_sees_each_step_once_after_a_resume(tmp_path):
    from dflash.views.dashboard.series import RunSeries

    run = Run.create(tmp_path, {}, "r")
    run.metrics.write("step", step=1, loss=1.0, tokens=10)
    folder = save(run.path, 1, facts={"metrics_offset": run.metrics.offset})
    for step in (2, 3):
        run.metrics.write("step", step=step, loss=1.0, tokens=10)
    run.end("failed")
    series = RunSeries(run.path)
    series.follow()
    assert series.tokens == 30 and series.run_end is not None
    again = Run.open(run.path)
    rewind_record(again, folder)
    for step in (2, 3, 4, 5):
        again.metrics.write("step", step=step, loss=1.0, tokens=10)
    series.follow()
    assert series.tokens == 50 and series.run_end is None and series.last_step["step"] == 5


def test_a_run_that_failed_and_was_resumed_has_every_step_once(material, tmp_path, monkeypatch):  # noqa: F811
    """The unbroken run's losses, through the command line and threads."""
    fixed = dict(gpus="cpu:2", target_gpus="cpu:1", checkpoint_every=3)
    whole = write_config(material, tmp_path / "runs/whole", **fixed)
    assert main(["train", "--config", str(whole)]) == 0
    config = write_config(material, tmp_path / "runs/parts", **fixed)
    accumulate, calls = Replica.accumulate, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 10:  # two items a step: step 5
            raise ValueError("a made-up failure")
        return accumulate(*arguments)

    monkeypatch.setattr(Replica, "accumulate", failing)
    assert main(["train", "--config", str(config)]) == 1
    assert kinds(config.parent)["run_end"][-1]["status"] == "failed"
    assert main(["train", "--config", str(config), "--resume"]) == 0
    records = kinds(config.parent)
    assert [r["step"] for r in records["step"]] == list(range(1, 9)) and losses(config.parent) == losses(whole.parent)
    assert "fault" not in records and [r["status"] for r in records["run_end"]] == ["completed"]
    assert "a made-up failure" in records["resume"][0]["before"][0]
    assert "a made-up failure" in (config.parent / SUPERSEDED).read_text()


# -- state -------------------------------------------------------------------------------------------------------------


def test_optimizers_that_load_one_state_do_not_share_it():
    model = torch.nn.Linear(3, 2)
    first = MasterAdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    model(torch.ones(1, 3)).sum().backward()
    first.accumulate()
    first.step(0.1)
    state = first.state_dict()
    kept = {k: v.clone() for k, v in state["adamw"]["state"][0].items()}
    second = torch.nn.Linear(3, 2)
    other = MasterAdamW(second.parameters(), betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    other.load_state_dict(state)
    second(torch.ones(1, 3)).sum().backward()
    other.accumulate()
    other.step(0.1)
    assert all(torch.equal(kept[k], first.adamw.state_dict()["state"][0][k]) for k in kept)


@pytest.mark.parametrize("drafters", [1, 2, 3])
def test_a_run_of_three_drafters_goes_on_with_any_number(tmp_path, drafters):
    """State is the same on every replica, so one copy serves all (SpecForge's fault was one rank's state for all)."""
    settings = options(steps=8)
    wanted, final = serial(settings)
    engine, plans = engine_of(3, 1, settings)
    try:
        engine.start(1)
        got = [float(engine.step(plans.step(step), settings.lr)[0]) for step in range(1, 5)]
        states = [replica.optimizer.state_dict() for replica in engine.replicas]
        for other in states[1:]:
            assert all(torch.equal(a, b) for a, b in zip(states[0]["masters"], other["masters"], strict=True))
            for index, moments in states[0]["adamw"]["state"].items():
                assert all(torch.equal(value, other["adamw"]["state"][index][name]) for name, value in moments.items())
        folder = save_checkpoint(tmp_path, 4, engine.replica.drafter, "tiny", {"optimizer": states[0]})
    finally:
        engine.close()
    engine, plans = engine_of(drafters, 1, settings)
    engine.load_optimizer(load_trainer_state(folder)["optimizer"])
    try:
        engine.start(5)
        got += [float(engine.step(plans.step(step), settings.lr)[0]) for step in range(5, 9)]
    finally:
        engine.close()
    assert got == pytest.approx(wanted, abs=1e-6)
    assert float((weights(engine.replica) - final).abs().max()) < 1e-6
    engine.verify()


def test_other_data_or_order_is_noticed_on_resume():
    settings = options()
    drafter = first_replica(settings)[1].drafter
    plans = planner(settings, drafter)
    state = {"plan": plan_fingerprint(plans)}
    assert same_plan(state, planner(settings, drafter)) is None and same_plan({}, plans) is None
    for other in (
        planner(options(seed=1), drafter),
        planner(settings, drafter, packs(4)),
        planner(settings, drafter, packs(5, seed=4)),
    ):
        assert isinstance(other, Planner) and "not the unbroken run" in same_plan(state, other)


@pytest.mark.parametrize("launcher", ["threads", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_run_in_three_parts_is_the_unbroken_run_bit_for_bit(material, tmp_path, launcher):  # noqa: F811
    """Resumed in mid-epoch and at an epoch's end."""
    fixed = dict(gpus="cpu:2", target_gpus="cpu:1", launcher=launcher, min_lr_ratio=1.0, eval_every=100, pack_length=256)
    whole = write_config(material, tmp_path / "runs/whole", **fixed)
    assert main(["train", "--config", str(whole)]) == 0
    per_epoch = len(prepare_data(resolve(RunConfig.load(whole))).train_packs)
    cuts = [2, 5, 8]
    assert any(2 * cut % per_epoch == 0 for cut in cuts[:2]) and any(2 * cut % per_epoch for cut in cuts[:2]), per_epoch
    config = write_config(material, tmp_path / "runs/parts", **fixed)
    values = yaml.safe_load(config.read_text())
    for number, steps in enumerate(cuts):
        values["train"]["steps"] = steps
        config.write_text(yaml.safe_dump(values))
        assert main(["train", "--config", str(config), *["--resume"] * bool(number)]) == 0
    one, two = kinds(whole.parent)["step"], kinds(config.parent)["step"]
    for name in ("step", "loss", "grad_norm", "lr", "pack_ids", "supervised_slots", "epoch"):
        assert [r[name] for r in one] == [r[name] for r in two], name
    states = [load_trainer_state(latest_checkpoint(c.parent))["optimizer"] for c in (whole, config)]
    assert all(torch.equal(a, b) for a, b in zip(*(s["masters"] for s in states), strict=True))
    for index, moments in states[0]["adamw"]["state"].items():
        assert all(torch.equal(value, states[1]["adamw"]["state"][index][name]) for name, value in moments.items())
