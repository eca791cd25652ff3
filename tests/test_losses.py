"""The chunked loss against dense float64, and the weights against their formulas."""

import math

import pytest
import torch

from dflash.drafter.losses import block_metrics, chunked_head_loss, decay_weights, describe_weights, loss_scale
from dflash.errors import ConfigError
from dflash.train.settings import RunConfig


def dense(hidden, head, scale, labels=None, teacher=None):
    logits = hidden @ head.T
    log_p = logits.log_softmax(-1)
    if labels is not None:
        rows = -log_p[torch.arange(len(labels)), labels]
    else:
        log_t = (teacher @ head.T).log_softmax(-1)
        rows = (log_t.exp() * (log_t - log_p)).sum(-1)
    return (rows * scale).sum(), rows, logits.argmax(-1)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_loss_equals_dense_float64(soft, chunk):
    generator = torch.Generator().manual_seed(chunk)
    rows, vocab, size = 23, 50, 12
    hidden = torch.randn(rows, size, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(vocab, size, dtype=torch.float64, generator=generator)
    scale = torch.rand(rows, generator=generator)
    scale[3] = 0
    choice = (
        {"teacher_hidden": torch.randn(rows, size, dtype=torch.float64, generator=generator)}
        if soft
        else {"labels": torch.randint(0, vocab, (rows,), generator=generator)}
    )
    wanted, wanted_rows, wanted_best = dense(hidden, head, scale, choice.get("labels"), choice.get("teacher_hidden"))
    (wanted_grad,) = torch.autograd.grad(wanted * 3, hidden)
    got = chunked_head_loss(hidden, head, chunk_rows=chunk, **choice)
    loss = (got.row_loss * scale).sum()
    (grad,) = torch.autograd.grad(loss * 3, hidden)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.row_loss.double(), wanted_rows, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.prediction, wanted_best)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6)
    assert grad[3].abs().max() == 0 and grad.abs().max() > 0.01


def test_labels_must_be_hard_or_soft():
    with pytest.raises(ConfigError, match="exactly one of labels"):
        chunked_head_loss(torch.ones(1, 2), torch.ones(3, 2))


def test_decay_weights_follow_the_formula():
    got = decay_weights(5, 10.0).tolist()
    assert got == pytest.approx([0, 1, math.exp(-0.1), math.exp(-0.2), math.exp(-0.3)])
    assert decay_weights(4, None).tolist() == [0, 1, 1, 1]
    assert decay_weights(4, 0).tolist() == [0, 1, 0, 0]
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="gamma must be a finite number"):
            decay_weights(4, bad)


def test_the_decay_is_said_in_words_and_unset_is_not_off():
    """Automodel#2908: a config without gamma was read as "no decay"."""
    unset = RunConfig.from_parameters("story").train.gamma
    assert unset == 10.0 and RunConfig.from_dict({"recipe": "story", "train": {}}).train.gamma == 10.0
    assert RunConfig.from_parameters(gamma="").train.gamma is None
    assert describe_weights(8, "decay", unset) == "slot weights fall from 1 at slot 1 to 0.55 at slot 7 (gamma 10)"
    assert describe_weights(8, "decay", None) == "slots 1 to 7 weigh the same (gamma empty)"
    assert describe_weights(8, "decay", 0) == "only slot 1 weighs (gamma 0)"


@pytest.mark.parametrize("gamma", [None, 0, 1.0, 10.0])
def test_constant_row_loss_gives_that_loss_whatever_gamma(gamma):
    weights = decay_weights(6, gamma)[1:].repeat(9) * (torch.arange(45) % 4 > 0)
    weights[:5] = decay_weights(6, gamma)[1:]
    assert float((loss_scale(weights, "weight_mean") * 2.5).sum()) == pytest.approx(2.5)


def test_reductions_and_the_empty_case():
    weights = torch.tensor([0.5, 0.25, 0.0])
    assert loss_scale(weights, "weight_mean").tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert loss_scale(weights, "token_mean").tolist() == pytest.approx([0.25, 0.125, 0])
    assert loss_scale(weights, "weight_mean", total=5.0).tolist() == pytest.approx([0.1, 0.05, 0])
    assert loss_scale(torch.zeros(3), "weight_mean").tolist() == [0, 0, 0]
    assert loss_scale(torch.zeros(3), "weight_mean", total=0.0).tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="unknown reduction 'mean'"):
        loss_scale(weights, "mean")


def test_acceptance_is_counted_over_runs_not_slot_means():
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    supervised = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    got = {k: v.tolist() for k, v in block_metrics(correct, supervised).items()}
    assert got == {
        "correct_by_slot": [2, 3, 1, 2],
        "supervised_by_slot": [3, 3, 2, 2],
        "accepted_by_slot": [2, 2, 0, 0],
        "blocks": 3,
        "accepted": 4,
    }
