"""Muon against torch's own, and schedules: what a step changes, what a checkpoint keeps, when a run's minutes end it."""

import copy
import math

import pytest
import torch
from runner_jobs import drive, first_replica, options, planner, serial_engine, weights
from test_training import make_trainer, steps_of

from dflash.distributed.replicas import make_replicas
from dflash.distributed.threads import PipelineEngine
from dflash.errors import ResumeError
from dflash.runs.record import read_metrics
from dflash.target.features import OnlineFeatures
from dflash.train.optimizer import MasterAdamW, learning_rate, orthogonal

KNOBS = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1e9}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(12, 12) for _ in range(2)), torch.nn.Linear(12, 40), torch.nn.Linear(40, 12)
    )


def push(module, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    module(torch.randn(9, 12)).square().sum().backward()


def test_muon_is_torchs_on_matrices_and_adamw_on_the_rest():
    ours, reference = model(), model()
    matrices = [p for p in reference.parameters() if p.dim() == 2]
    theirs = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in reference.parameters() if p.dim() != 2], lr=0.02, betas=(0.9, 0.95), weight_decay=0),
    ]
    mine = MasterAdamW(ours.parameters(), **KNOBS, muon=[p for p in ours.parameters() if p.dim() == 2])
    start = [p.detach().clone() for p in ours.parameters()]
    for step in range(4):
        torch.manual_seed(step)
        push(reference, *theirs)
        for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
            p.grad = q.grad.clone()
        mine.accumulate()
        mine.step(0.02)
        for optimizer in theirs:
            optimizer.step()
    for before, p, q in zip(start, ours.parameters(), reference.parameters(), strict=True):
        moved = (q - before).norm()
        assert moved > 0.05 and (p - q).norm() < 0.01 * moved  # bfloat16 sums in another order


@pytest.mark.parametrize("shape", [(3, 20, 50), (2, 50, 20), (1, 30, 30)])
def test_orthogonal_keeps_the_singular_vectors(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(matrices).double()
    u, values, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    inner = u.mT @ found @ vh.mT
    diagonal = inner.diagonal(dim1=1, dim2=2)
    large = values > 0.15 * values[:, :1]  # five rounds do not lift what is nearly zero
    assert ((diagonal > 0.6) & (diagonal < 1.3))[large].all() and large.float().mean() > 0.7
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 0.06


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing_under_muon(bad):
    module = model()
    ours = MasterAdamW(module.parameters(), **KNOBS, muon=[p for p in module.parameters() if p.dim() == 2])
    for spoil in (False, True, False):
        push(module)
        ours.accumulate()
        before = copy.deepcopy(ours.state_dict())
        if spoil:
            ours.gradients[2][0, 0] = bad
        finite = math.isfinite(float(ours.step(0.1)))
        after = ours.state_dict()
        same = [torch.equal(a, b) for kind in ("masters", "muon") for a, b in zip(before[kind], after[kind], strict=True)]
        assert finite is not spoil and all(same) is spoil and any(same) is spoil


def test_a_checkpoint_of_another_optimizer_is_refused():
    def optimizer(muon):
        module = model()
        return MasterAdamW(module.parameters(), **KNOBS, muon=[p for p in module.parameters() if p.dim() == 2] * muon)

    for was, now in ((True, False), (False, True)):
        with pytest.raises(ResumeError, match=f"optimizer={'muon' if was else 'adamw'}, the settings say"):
            optimizer(now).load_state_dict(optimizer(was).state_dict())


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "muon"}, {"position_weights": "acceptance", "loss_fn": "lk"}, {"schedule": "wsd", "loss_fn": "tv"}],
    ids=["muon", "acceptance", "wsd"],
)
def test_a_resumed_run_and_one_over_threads_are_the_unbroken_serial_run(tmp_path, changes):
    settings = options(steps=4, packs_per_step=2, checkpoint_every=2, warmup_steps=1, **changes)
    whole = make_trainer(tmp_path, settings, "whole")
    whole.train()

    part = make_trainer(tmp_path, settings, "part")
    left = iter(range(1, -1, -1))
    part.control.at_step = lambda **requests: next(left) > 0
    assert part.train().step == 2
    state = copy.deepcopy({"optimizer": part.engine.replica.optimizer.state_dict(), "trainer": part.state_dict()})
    again = make_trainer(tmp_path, settings, "part", resume=True)
    again.engine.load_optimizer(state["optimizer"])
    again.load_state_dict(state["trainer"])
    again.train(3)
    assert torch.equal(weights(again.engine.replica), weights(whole.engine.replica))
    assert [(r["loss"], r["lr"]) for r in steps_of(again.run)] == [(r["loss"], r["lr"]) for r in steps_of(whole.run)]

    target, replica = first_replica(settings)
    reference = first_replica(settings)[1]
    losses = drive(serial_engine(target, reference, settings), planner(settings, reference.drafter), settings)
    replicas = make_replicas(replica, [torch.device("cpu")] * 2)
    plans, cpu = planner(settings, replica.drafter), torch.device("cpu")
    engine = PipelineEngine(replicas, [OnlineFeatures(target)], [cpu], plans, settings.steps)
    assert drive(engine, plans, settings) == pytest.approx(losses, rel=1e-5)
    assert torch.equal(weights(replicas[0]), weights(replicas[1]))
    assert losses[-1] < losses[0]


def test_wsd_is_constant_until_the_last_fifth():
    rates = [learning_rate(s, 110, 10, 2.0, 0.1, "wsd") for s in range(1, 111)]
    assert rates[4] == 1.0 and rates[9:90] == pytest.approx([2.0] * 81) and rates[-1] == pytest.approx(0.2)
    falling = rates[89:]
    assert all(a > b for a, b in zip(falling, falling[1:], strict=False))
    assert rates[94] == pytest.approx(0.2 + 1.8 * 0.5)  # a quarter into it: 1 - sqrt(1/4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_minutes_end_a_run_with_its_schedule_at_its_end_whatever_the_first_steps_said(tmp_path, monkeypatch, schedule):
    """Steps of a second, after a slow start: a plan made once would have stopped at a third of the minutes."""
    settings = options(steps=10000, packs_per_step=1, max_minutes=5.0, schedule=schedule)
    trainer = make_trainer(tmp_path, settings)
    now = [0.0]
    monkeypatch.setattr("dflash.train.loop.time.perf_counter", lambda: now[0])
    result = trainer.engine.step(trainer.engine.planner.step(1), 0.0)

    def step(plan, lr):
        now[0] += 3.0 if plan.step <= 20 else 0.5
        return result

    def planned(step, ask=trainer.engine.planner.step):
        now[0] += 0.0 if step <= 20 else 0.5  # the host's share counts too
        return ask(step)

    trainer.engine.step, trainer.engine.planner.step = step, planned
    outcome = trainer.train()
    records = read_metrics(trainer.run.path)[0]
    plans = [r["steps"] for r in records if r["kind"] == "plan"]
    assert plans[0] == 100 and outcome.step == plans[-1] and 255 <= outcome.step <= 264 and len(plans) < 30
    assert now[0] == pytest.approx(300, rel=0.02)
    rates = [r["lr"] for r in steps_of(trainer.run)]
    assert rates[-1] == pytest.approx(settings.lr * settings.min_lr_ratio) and max(rates) == settings.lr
