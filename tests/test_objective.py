"""What a step minimises: losses beyond KL against autograd over whole rows, and weights that follow acceptance."""

import pytest
import torch
from dense_losses import dense_rows
from runner_jobs import first_replica, options, planner

from dflash.drafter.losses import acceptance_weights, chunked_head_loss
from dflash.errors import ConfigError
from dflash.target.features import OnlineFeatures
from dflash.train.settings import RunConfig


@pytest.mark.parametrize("loss_fn", ["kl", "tv", "lk", "lk_hybrid"])
@pytest.mark.parametrize("chunk_rows", [4, 64])
def test_soft_losses_equal_autograd_over_whole_rows(loss_fn, chunk_rows):
    g = torch.Generator().manual_seed(chunk_rows)
    hidden, teacher = torch.randn(2, 19, 8, generator=g, dtype=torch.float64).unbind()
    head, scale = torch.randn(70, 8, generator=g, dtype=torch.float64), torch.rand(19, generator=g, dtype=torch.float64)
    exact, ours = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    rows = dense_rows((exact @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1), loss_fn)
    (rows * scale).sum().backward()
    got = chunked_head_loss(ours, head, teacher_hidden=teacher, loss_fn=loss_fn, chunk_rows=chunk_rows)
    (got.row_loss * scale).sum().backward()
    torch.testing.assert_close(got.row_loss.detach().double(), rows.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-4, atol=1e-6)
    assert exact.grad.abs().max() > 0.01


@pytest.mark.parametrize("loss_fn", ["tv", "lk", "lk_hybrid"])
def test_a_drafter_that_is_the_target_or_its_opposite_gets_finite_numbers(loss_fn):
    head = torch.eye(6)
    teacher = 200 * torch.eye(6)[:3]
    hidden = torch.cat([teacher[:1], 200 * torch.eye(6)[3:5]]).requires_grad_()  # the first accepts all, the others nothing
    got = chunked_head_loss(hidden, head, teacher_hidden=teacher, loss_fn=loss_fn)
    got.row_loss.sum().backward()
    assert got.row_loss[0].abs() < 1e-6 and got.row_loss[1] >= 1 and got.row_loss.isfinite().all()
    assert hidden.grad.isfinite().all()


def by_hand(likely, supervised):
    """Weights of one block's slots, from the smoothed confidences of its slots."""
    weights = []
    for j in range(len(likely)):
        owed = 0.0
        for m in range(j, len(likely)):
            reached = 1.0
            for i in range(m + 1):
                reached *= likely[i] if supervised[i] else 1.0
            owed += reached * supervised[m]
        weights.append(owed)
    return weights


@pytest.mark.parametrize("loss_fn", ["kl", "tv"])
def test_acceptance_weights_by_hand(loss_fn):
    supervised = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0]]).bool()
    slot = supervised.flatten().nonzero().flatten()
    accepted = torch.tensor([0.9, 0.5, 0.1, 1.0, 0.0, 0.3, 0.7])
    row_loss = (1 - accepted if loss_fn == "tv" else -accepted.log()).requires_grad_()
    got = acceptance_weights(row_loss, loss_fn, slot, supervised)
    likely = torch.zeros(12)
    likely[slot] = 0.5 + 0.5 * accepted
    wanted = [by_hand(r, s) for r, s in zip(likely.view(4, 3).tolist(), supervised.tolist(), strict=True)]
    torch.testing.assert_close(got, torch.tensor(wanted).flatten()[slot])
    assert not got.requires_grad and got[0] > got[1] > got[2] > 0


@pytest.mark.parametrize("soft", [True, False])
def test_a_step_with_acceptance_weights_is_its_formula(soft):
    """Over the packs of a step: the weighted row losses over the number of supervised slots."""
    settings = options(packs_per_step=2, soft_labels=soft, position_weights="acceptance")
    target, replica = first_replica(settings)
    source, plan = OnlineFeatures(target), planner(settings, replica.drafter).step(1)
    slots = sum(item.supervised_slots for item in plan.items)
    assert plan.denominator == slots
    loss, weight = 0.0, 0.0
    for item in plan.items:
        value, metrics = replica.loss(item, source.get(item.pack), plan.denominator)
        loss, weight = loss + float(value.detach()), weight + float(metrics["weight"])
    uniform = options(packs_per_step=2, soft_labels=soft, gamma=None)
    plain, _ = first_replica(uniform)[1].loss(plan.items[0], source.get(plan.items[0].pack), slots)
    assert 0 < loss / (weight / slots) < 3 * float(plain.detach())  # a weighted mean of the same row losses
    assert weight / slots == pytest.approx(1.0, abs=0.6)  # three slots at a confidence near 0: 0.875, 0.375, 0.125


def test_bad_objectives_are_refused():
    for name, bad in (("loss_fn", "ce"), ("position_weights", "dpace"), ("optimizer", "sgd"), ("schedule", "linear")):
        with pytest.raises(ConfigError, match=f"{name} must be .*got '{bad}'"):
            RunConfig.from_parameters("cpu", **{name: bad})
    with pytest.raises(ConfigError, match="loss_fn=lk compares with the target's distribution, and soft_labels is off"):
        RunConfig.from_parameters("cpu", loss_fn="lk", soft_labels=False)
    with pytest.raises(ConfigError, match="optimizer=muon needs whole matrices, and drafter_parallel=fsdp2 splits them"):
        RunConfig.from_parameters("cpu", optimizer="muon", drafter_parallel="fsdp2", launcher="torchrun")
