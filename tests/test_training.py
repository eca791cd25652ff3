"""Plans, optimizer and loop: what adds up, what is skipped, what is resumed."""

import copy
import math

import pytest
import torch
from runner_jobs import drive, first_replica, options, packs, planner, serial_engine, weights

from dflash.data import Conversation, make_packs
from dflash.errors import DataError
from dflash.runs.control import RunControl
from dflash.runs.record import Run, read_metrics
from dflash.target.features import OnlineFeatures
from dflash.train.checkpoint import checkpoints, load_trainer_state, save_checkpoint
from dflash.train.loop import NonFiniteParameterError, Trainer
from dflash.train.optimizer import MasterAdamW, learning_rate
from dflash.train.plan import Planner
from dflash.train.step import Replica


def make_trainer(tmp_path, settings, run_id="run", resume=False, source=None, evaluate=None):
    target, replica = first_replica(settings)
    engine = serial_engine(target, replica, settings, source)
    run = Run.open(tmp_path / run_id) if resume else Run.create(tmp_path, {}, run_id)

    def save(step):
        state = {"optimizer": replica.optimizer.state_dict(), "trainer": trainer.state_dict()}
        return save_checkpoint(run.path, step, replica.drafter, "tiny", state, keep=9)

    trainer = Trainer(engine, settings, run, RunControl(run.path, run.metrics), evaluate=evaluate, save=save)
    return trainer


def steps_of(run):
    return [r for r in read_metrics(run.path)[0] if r["kind"] == "step"]


# -- plans --------------------------------------------------------------------------------------------------------


def test_the_stream_of_packs_has_no_short_window_and_visits_all():
    """10 micro-batches in windows of 4: the stream runs on into the next epoch, and the step count is the schedule's."""
    settings = options(packs_per_step=4)
    _, replica = first_replica(settings)
    plans = planner(settings, replica.drafter, packs(10))
    seen = [[item.pack.pack_id for item in plans.step(s).items] for s in (1, 2, 3, 4, 5)]
    assert all(len(ids) == 4 for ids in seen)
    stream = sum(seen, [])
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert stream[:10] != stream[10:]
    assert [item.epoch for item in plans.step(3).items] == [0, 0, 1, 1]


def test_plans_depend_on_the_seed_alone():
    settings = options()
    _, replica = first_replica(settings)
    one, two = planner(settings, replica.drafter), planner(settings, replica.drafter)
    two.step(7)  # asking out of order changes nothing
    for step in (3, 1, 7):
        a, b = one.step(step), two.step(step)
        assert a.denominator == b.denominator
        assert all(torch.equal(x.anchors.positions, y.anchors.positions) for x, y in zip(a.items, b.items, strict=True))
    other = planner(options(seed=1), replica.drafter).step(3)
    assert [i.pack.pack_id for i in other.items] != [i.pack.pack_id for i in one.step(3).items] or not torch.equal(
        other.items[0].anchors.positions, one.step(3).items[0].anchors.positions
    )


def test_denominator_is_the_weight_that_the_model_counts():
    settings = options(packs_per_step=3)
    target, replica = first_replica(settings)
    plan = planner(settings, replica.drafter).step(1)
    total = 0.0
    for item in plan.items:
        sums = replica.accumulate(item, OnlineFeatures(target).get(item.pack), plan.denominator)
        total += float(sums[1])
        assert item.supervised_slots == int(sums[2])
    assert total == pytest.approx(plan.denominator, rel=1e-6)


def test_no_packs_or_answers_too_short_are_refused():
    _, replica = first_replica(options())
    with pytest.raises(DataError, match="there are no training packs"):
        Planner([], options(), block_size=4, max_anchors=4)
    row = make_packs([Conversation([1, 2, 3, 4], [False, False, False, True], 0)], 16)
    with pytest.raises(DataError, match="answers are too short for any block"):
        planner(options(), replica.drafter, row)


# -- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["weight_mean", "token_mean"])
def test_accumulated_gradient_is_that_of_one_big_batch(reduction):
    """Unequal packs: the summed items equal one loss over all slots, weighted over all slots."""
    settings = options(packs_per_step=3, reduction=reduction)
    target, replica = first_replica(settings)
    source, plan = OnlineFeatures(target), planner(settings, replica.drafter).step(1)
    for item in plan.items:
        replica.accumulate(item, source.get(item.pack), plan.denominator)
    got = [g.clone() for g in replica.optimizer.gradients]

    _, single = first_replica(settings)
    losses, denominators = [], []
    for item in plan.items:  # each pack's own mean, weighted by hand
        features, pack = source.get(item.pack), item.pack
        loss, metrics = single.drafter(
            features.all_hidden_states,
            features.verifier_last_hidden,
            pack.input_ids[None],
            pack.loss_mask[None],
            pack.lengths,
            pack.position_ids[None],
            use_soft_labels=True,
            gamma=settings.gamma,
            reduction=reduction,
            anchors=item.anchors,
        )
        share = metrics["weight"] if reduction == "weight_mean" else metrics["supervised_slots"]
        losses.append(loss * share)
        denominators.append(share)
    (sum(losses) / sum(denominators)).backward()
    assert len({int(d) for d in denominators}) > 1, "the packs must differ, or the test proves nothing"
    for mine, p in zip(got, single.drafter.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-7)


def test_masters_are_float32_and_equal_plain_adamw():
    """bfloat16 weights follow float32 AdamW on the same gradients; norms do not decay."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
    reference = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    groups = [
        {"params": [p for p in reference if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in reference if p.dim() <= 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    ours = MasterAdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)
    for _ in range(5):
        model(torch.randn(3, 5).bfloat16()).square().sum().backward()
        gradients = [p.grad.float() for p in model.parameters()]
        ours.accumulate()
        assert all(p.grad is None for p in model.parameters())
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for p, g in zip(reference, gradients, strict=True):
            p.grad = g * min(1.0, 0.5 / float(norm + 1e-6))
        plain.step()
        assert float(ours.step(0.01)) == pytest.approx(float(norm), rel=1e-5)
        for master, p, r in zip(ours.masters, model.parameters(), reference, strict=True):
            torch.testing.assert_close(master, r, rtol=1e-5, atol=1e-6)
            assert torch.equal(p, master.bfloat16())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = torch.nn.Linear(3, 2)
    ours = MasterAdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    model(torch.ones(1, 3)).sum().backward()
    ours.accumulate()
    ours.step(0.1)
    before = copy.deepcopy(ours.state_dict())
    model(torch.ones(1, 3)).sum().backward()
    ours.accumulate()
    ours.gradients[0][0, 0] = bad
    assert not math.isfinite(float(ours.step(0.1)))
    after = ours.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(before["masters"], after["masters"], strict=True))
    for index, state in before["adamw"]["state"].items():
        assert all(torch.equal(value, after["adamw"]["state"][index][name]) for name, value in state.items()), index
    model(torch.ones(1, 3)).sum().backward()
    ours.accumulate()
    assert math.isfinite(float(ours.step(0.1))), "the bad gradient must not linger"


def test_learning_rate_warms_up_and_ends_on_the_last_step():
    rates = [learning_rate(s, 100, 10, 1.0, 0.1) for s in range(1, 101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert learning_rate(5, 3, 10, 1.0, 0.1) == 0.5


# -- the loop -----------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_every_step_is_on_record(tmp_path):
    settings = options(steps=30, packs_per_step=2, eval_every=10, checkpoint_every=15)
    evals = iter(range(1, 9))
    trainer = make_trainer(tmp_path, settings, evaluate=lambda: {"acceptance_length": 1.0 + next(evals) / 10, "blocks": 3})
    outcome = trainer.train()
    records = steps_of(trainer.run)
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    assert outcome.status == "completed" and outcome.skipped_steps == 0 and outcome.acceptance_length == pytest.approx(1.4)
    kinds = [(r["kind"], r["step"]) for r in read_metrics(trainer.run.path)[0] if r["kind"] in ("eval", "checkpoint")]
    assert kinds == [("eval", 0), ("eval", 10), ("checkpoint", 15), ("eval", 20), ("eval", 30), ("checkpoint", 30)]
    assert [step for step, _ in checkpoints(trainer.run.path)] == [15, 30]
    plan = trainer.engine.planner.step(1)
    assert records[0]["tokens"] == sum(int(i.pack.lengths.sum()) for i in plan.items)
    assert records[0]["supervised_slots"] == plan.supervised_slots


class Poisoned:
    """A feature source that spoils the features of chosen requests."""

    def __init__(self, source, calls):
        self.source, self.calls, self.count = source, calls, 0

    def get(self, pack):
        self.count += 1
        features = self.source.get(pack)
        if self.count in self.calls:
            features.all_hidden_states[0, 0] = float("inf")
        return features


def test_a_spoilt_batch_is_skipped_counted_and_survived(tmp_path):
    settings = options(steps=8, packs_per_step=1)
    target, _ = first_replica(settings)
    trainer = make_trainer(tmp_path, settings, source=Poisoned(OnlineFeatures(target), {3}))
    outcome = trainer.train()
    records = steps_of(trainer.run)
    assert outcome.skipped_steps == 1 and [r["skipped"] for r in records] == [s == 3 for s in range(1, 9)]
    assert "not finite" in records[2]["reason"]
    assert all(math.isfinite(r["loss"]) for r in records if not r["skipped"])


def test_a_parameter_that_is_not_finite_stops_the_run_by_name(tmp_path):
    settings = options(steps=20, packs_per_step=1, checkpoint_every=2)
    trainer = make_trainer(tmp_path, settings)
    step = trainer.engine.step

    def spoil(plan, lr):
        if plan.step == 5:
            trainer.engine.replica.drafter.hidden_norm.weight.data[0] = float("nan")
        return step(plan, lr)

    trainer.engine.step = spoil
    with pytest.raises(NonFiniteParameterError, match="hidden_norm.weight is not finite after step 5"):
        trainer.train()
    assert checkpoints(trainer.run.path)[-1][0] == 4, "the last good checkpoint survives"


def test_a_step_without_supervision_is_skipped_and_counted(tmp_path):
    rows = packs(3)
    rows[1].loss_mask[:] = False
    settings = options(steps=6, packs_per_step=1)
    trainer = make_trainer(tmp_path, settings)
    trainer.engine.planner = planner(settings, trainer.engine.replica.drafter, rows)
    before = None
    step = trainer.engine.step

    def watch(plan, lr):
        nonlocal before
        if plan.denominator == 0:
            before = weights(trainer.engine.replica).clone()
        result = step(plan, lr)
        if plan.denominator == 0:
            assert torch.equal(weights(trainer.engine.replica), before), "nothing may move, not even by weight decay"
        return result

    trainer.engine.step = watch
    outcome = trainer.train()
    assert outcome.skipped_steps == 2 and before is not None
    assert {r["reason"] for r in steps_of(trainer.run)} == {None, "no supervised slot"}


@pytest.mark.parametrize("cut", [3, 5, 7])  # mid-epoch, an epoch's last step, the next epoch
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(tmp_path, cut):
    settings = options(steps=9, packs_per_step=1, checkpoint_every=cut)
    whole = make_trainer(tmp_path, settings, "whole")
    whole.train()

    part = make_trainer(tmp_path, settings, "part")
    left = iter(range(cut - 1, -1, -1))
    part.control.at_step = lambda **requests: next(left) > 0  # stop after `cut` steps
    assert part.train().step == cut
    again = make_trainer(tmp_path, settings, "part", resume=True)
    state = load_trainer_state(checkpoints(again.run.path)[-1][1])
    again.engine.load_optimizer(state["optimizer"])
    again.load_state_dict(state["trainer"])
    again.train(state["step"] + 1)
    assert torch.equal(weights(again.engine.replica), weights(whole.engine.replica))
    one, two = steps_of(whole.run), steps_of(again.run)
    assert [r["loss"] for r in one] == [r["loss"] for r in two] and [r["step"] for r in two] == list(range(1, 10))
    assert [r["pack_ids"] for r in one] == [r["pack_ids"] for r in two]


def test_a_time_limit_plans_fewer_steps_and_says_so(tmp_path):
    settings = options(steps=100000, packs_per_step=1, max_minutes=0.002)
    trainer = make_trainer(tmp_path, settings)
    outcome = trainer.train()
    assert 12 <= outcome.step < 100000
    said = [r["message"] for r in read_metrics(trainer.run.path)[0] if r["kind"] == "log"]
    assert any("steps at" in line and "of 100000" in line for line in said)
    assert steps_of(trainer.run)[-1]["lr"] <= settings.lr * settings.min_lr_ratio * 1.01 or outcome.step == 12


def test_stop_ends_in_good_order_with_a_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, options(steps=500, packs_per_step=1))
    step = trainer.engine.step

    def ask(plan, lr):
        if plan.step == 3:
            trainer.control.stop()
        return step(plan, lr)

    trainer.engine.step = ask
    trainer.control.poll_interval = 0.0
    outcome = trainer.train()
    assert outcome.status == "interrupted" and 3 <= outcome.step < 10
    assert checkpoints(trainer.run.path)[-1][0] == outcome.step


def test_ctrl_c_ends_in_good_order_with_a_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, options(steps=500, packs_per_step=1))
    step = trainer.engine.step

    def interrupt(plan, lr):
        if plan.step == 4:
            raise KeyboardInterrupt
        return step(plan, lr)

    trainer.engine.step = interrupt
    outcome = trainer.train()
    assert (outcome.status, outcome.step) == ("interrupted", 3)
    assert [at for at, _ in checkpoints(trainer.run.path)] == [3]
    assert [r["step"] for r in steps_of(trainer.run)] == [1, 2, 3]


def test_serial_engine_is_deterministic():
    settings = options(steps=5)
    runs = []
    for _ in range(2):
        target, replica = first_replica(settings)
        engine = serial_engine(target, replica, settings)
        runs.append(drive(engine, engine.planner, settings))
    assert runs[0] == runs[1]


def test_bfloat16_replica_trains():
    settings = options(steps=25, packs_per_step=2)
    target, replica = first_replica(settings)
    replica = Replica(replica.drafter.to(torch.bfloat16), settings)
    engine = serial_engine(target, replica, settings)
    losses = drive(engine, engine.planner, settings)
    assert losses[-1] < 0.9 * losses[0]
