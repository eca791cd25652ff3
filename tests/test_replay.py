"""`dflash replay`: the step of an unbroken run again, and the first number that is not finite."""

from __future__ import annotations

import json
import math

import pytest
import torch
from runner_jobs import first_replica, options, planner, weights
from test_train_command import kinds, material, write_config  # noqa: F401
from test_training import Poisoned, make_trainer, steps_of

from dflash.__main__ import main
from dflash.errors import RunError
from dflash.runs.record import read_metrics
from dflash.target.features import OnlineFeatures
from dflash.train.replay import replay, replay_step
from dflash.train.step import SerialEngine


@pytest.fixture(scope="module")
def trained(material, tmp_path_factory):  # noqa: F811
    config = write_config(
        material,
        tmp_path_factory.mktemp("replay") / "runs/r",
        gpus="cpu:2",
        target_gpus="cpu:1",
        checkpoint_every=3,
        keep_checkpoints=9,
    )
    assert main(["train", "--config", str(config)]) == 0
    return config.parent


@pytest.mark.parametrize("step", [2, 4, 6])  # from the start, right after a checkpoint, two steps after one
def test_a_good_step_has_its_recorded_loss(trained, step, capsys):
    assert main(["replay", "--run", str(trained), "--step", str(step), "--device", "cpu"]) == 0
    record = next(r for r in kinds(trained)["step"] if r["step"] == step)
    told = json.loads((trained / f"replay-step-{step}.json").read_text())
    assert told["loss"] == pytest.approx(record["loss"], rel=1e-5)
    assert told["gradient_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)
    assert [p["pack_id"] for p in told["packs"]] == record["pack_ids"]
    assert sum(p["supervised_slots"] for p in told["packs"]) == record["supervised_slots"]
    assert told["checkpoint_step"] == {2: 0, 4: 3, 6: 3}[step]
    shown = capsys.readouterr().out
    assert "everything finite" in shown and f"on record: loss {record['loss']}" in shown


def test_weights_as_they_are_differ_from_the_exact_ones(trained):
    record = next(r for r in kinds(trained)["step"] if r["step"] == 6)
    quick = replay(trained, 6, walk=False)
    assert quick.finite and quick.loss != pytest.approx(record["loss"], rel=1e-5)


def test_a_step_that_is_not_there_is_refused(trained, capsys):
    with pytest.raises(RunError, match="has steps 1 to 8, got step 9"):
        replay(trained, 9)
    assert main(["replay", "--run", str(trained), "--step", "0", "--device", "cpu"]) == 2


def test_a_step_that_was_not_taken_is_refused_before_anything_is_loaded(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash.train.prepare.prepare", lambda *given, **more: pytest.fail("the target was loaded"))
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    with pytest.raises(RunError, match="r has no record .metrics.jsonl. of any step; give the folder of a run"):
        replay(folder, 3)
    lines = (trained / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] != "step" or json.loads(line)["step"] <= 3]
    (folder / "metrics.jsonl").write_text("".join(kept))
    with pytest.raises(RunError, match="ends at step 3, got step 6; give one that was taken"):
        replay(folder, 6)
    assert not list(folder.glob("replay-*"))
    monkeypatch.undo()
    (folder / "config.yaml").write_text((trained / "config.yaml").read_text())
    assert replay(folder, 4).recorded == {}, "the step that a run crashed in is not on its record"


def test_a_skipped_step_says_how_to_replay_it(tmp_path):
    settings = options(steps=4, packs_per_step=1)
    trainer = make_trainer(tmp_path, settings, source=Poisoned(OnlineFeatures(first_replica(settings)[0]), {3}))
    trainer.train()
    record = steps_of(trainer.run)[2]
    said = [r["message"] for r in read_metrics(trainer.run.path)[0] if r["kind"] == "log" and r["level"] == "warning"]
    assert record["skipped"] and len(said) == 1
    assert f"Packs {record['pack_ids']}" in said[0] and f"replay --run {trainer.run.path} --step 3" in said[0]


class Infinite:
    """Features of one pack that are not finite at a position."""

    def __init__(self, source, pack_id, place):
        self.source, self.pack_id, self.place = source, pack_id, place

    def get(self, pack):
        features = self.source.get(pack)
        if pack.pack_id == self.pack_id:
            features.all_hidden_states[0, self.place, 3] = float("inf")
        return features


def test_a_bad_pack_and_its_first_operation_are_named():
    settings = options(packs_per_step=3)
    target, replica = first_replica(settings)
    plans = planner(settings, replica.drafter)
    items = plans.step(4).items
    bad = items[1].pack.pack_id
    source = Infinite(OnlineFeatures(target), bad, 2)
    finite, packs, _, norm = replay_step(4, plans, source, replica, settings.steps, first_step=4)
    assert finite and not math.isfinite(norm)
    assert [p.pack_id for p in packs if p.bad] == [bad]
    told = packs[1]
    assert not told.features_finite and told.bad[0] == "target features at 1 positions, first 2"
    assert any(name.startswith("gradient of fc") for name in told.bad)
    assert "Backward" in told.origin and "/dflash/" in told.origin and "in the forward pass" in told.origin
    assert told.anchors == items[1].anchors.positions[items[1].anchors.valid].tolist()


def test_a_weight_that_was_not_finite_before_is_said():
    settings = options()
    target, replica = first_replica(settings)
    replica.drafter.norm.weight.data[0] = float("nan")
    finite, packs, loss, _ = replay_step(1, planner(settings, replica.drafter), OnlineFeatures(target), replica, 20)
    assert not finite and math.isnan(loss) and all("loss" in p.bad for p in packs)


def test_the_walk_is_the_runs_own_and_the_step_is_float32():
    """A bfloat16 run: the steps before are taken in bfloat16, the replayed one from the masters in float32."""
    settings = options(steps=6, packs_per_step=1)
    target, replica = first_replica(settings)
    from dflash.train.optimizer import learning_rate
    from dflash.train.step import Replica

    half = Replica(replica.drafter.to(torch.bfloat16), settings)
    plans = planner(settings, half.drafter)
    engine = SerialEngine(half, OnlineFeatures(target), plans)
    recorded = {2: 0.7 * settings.lr}  # the plan had other minutes then
    for step in (1, 2):
        rate = learning_rate(step, 6, settings.warmup_steps, settings.lr, settings.min_lr_ratio)
        engine.step(plans.step(step), recorded.get(step, rate))
    masters = torch.cat([m.detach().flatten() for m in half.optimizer.masters])
    again = Replica(first_replica(settings)[1].drafter.to(torch.bfloat16), settings)
    replay_step(3, plans, OnlineFeatures(target), again, 6, rates=recorded)
    assert again.drafter.fc.weight.dtype == torch.float32 and torch.equal(weights(again), masters)
