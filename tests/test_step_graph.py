"""Padded passes are the plain ones; kept features give the losses of captured ones; what a CUDA graph reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runner_jobs import first_replica, options, packs, planner
from tiny_models import tiny_target

from dflash.drafter.pack_plan import _tensors
from dflash.target.features import CachedFeatures, OnlineFeatures, make_source
from dflash.train.optimizer import MasterAdamW
from dflash.train.step import Replica, SerialEngine


def losses(settings, steps=4, source=None):
    """Sums and norms of some steps, and the weights after them."""
    target, replica = first_replica(settings)
    engine = SerialEngine(replica, source or OnlineFeatures(target), planner(settings, replica.drafter))
    found = [engine.step(engine.planner.step(step), 3e-3) for step in range(1, steps + 1)]
    return torch.stack(found), [p.detach().clone() for p in replica.drafter.parameters()]


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("weights", ["decay", "acceptance"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_padded_steps_are_the_plain_ones(soft, weights, optimizer):
    settings = options(soft_labels=soft, position_weights=weights, optimizer=optimizer, step_graph=False)
    plain, plain_weights = losses(settings)
    padded, padded_weights = losses(replace(settings, step_graph=True))
    torch.testing.assert_close(padded, plain, rtol=2e-5, atol=1e-6)
    for a, b in zip(padded_weights, plain_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_every_padded_plan_has_the_same_sizes_and_its_bytes_hold_it():
    settings = options(step_graph=True)
    _, replica = first_replica(settings)
    items = [planner(settings, replica.drafter).step(step).items[0] for step in (1, 2, 3)]
    plans = [replica.padded_plan(item) for item in items]
    flat = plans[0].bytes()
    views = plans[0].views(flat)  # what a graph reads
    for plan in plans:
        assert plan.spans == plans[0].spans
        flat.copy_(plan.bytes())
        for seen, wanted in zip(_tensors(views), _tensors(plan), strict=True):
            assert seen.dtype == wanted.dtype and torch.equal(seen, wanted)
    assert not all(torch.equal(plan.anchors.positions, plans[0].anchors.positions) for plan in plans)


def test_kept_features_give_the_losses_of_captured_ones():
    settings, target = options(step_graph=False), tiny_target()
    rows = packs()
    room = CachedFeatures(target, 0, dtype=torch.float32).bytes_needed(rows)
    made = dict(mode="auto", max_bytes=0, dtype=torch.float32, device="cpu")
    assert isinstance(make_source(target, rows, room=room - 1, **made), OnlineFeatures)
    kept = make_source(target, rows, room=room, **made)
    assert isinstance(kept, CachedFeatures)
    once, again = losses(settings, source=OnlineFeatures(target, torch.float32)), losses(settings, source=kept)
    assert torch.equal(once[0], again[0])
    assert kept.stats.not_kept == 0 and kept.stats.captured == len(rows) < kept.stats.hits


@pytest.mark.parametrize("muon", [False, True])
def test_a_learning_rate_counts_the_same_as_a_number_and_as_a_tensor(muon):
    def after(rate) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(4))]
        optimizer = MasterAdamW(weights, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0, muon=weights[:muon])
        for _ in range(3):
            for w in weights:
                w.grad = torch.randn_like(w)
            optimizer.accumulate()
            optimizer.step(rate)
        return [w.detach() for w in weights]

    assert all(torch.equal(a, b) for a, b in zip(after(1e-3), after(torch.tensor(1e-3)), strict=True))


def test_made_moments_are_those_of_a_first_step():
    settings = options(step_graph=False)
    (_, one), (_, two) = first_replica(settings), first_replica(settings)
    two.optimizer.make_state()
    for replica in (one, two):
        for p in replica.optimizer.parameters:
            p.grad = torch.full_like(p, 0.01)
        replica.optimizer.accumulate()
        replica.optimizer.step(1e-3)
    assert all(torch.equal(a, b) for a, b in zip(one.optimizer.moments(), two.optimizer.moments(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.optimizer.masters, two.optimizer.masters, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_graphs_are_the_padded_steps_bit_for_bit(optimizer):
    from dflash.bench.pipeline_case import Case, make_planner, make_replica, make_target
    from dflash.bench.shapes import SMALL
    from dflash.compile_safety import installed

    case, device = Case(SMALL, packs=4, soft_labels=True), torch.device("cuda:0")
    target = make_target(case, device)
    source, plans = OnlineFeatures(target), make_planner(case)

    def run(captured: bool) -> tuple[list, list[torch.Tensor]]:
        first = make_replica(case, target, device)
        replica = Replica(first.drafter, replace(first.options, step_graph=True, optimizer=optimizer))
        engine = SerialEngine(replica, source, plans)
        if captured:
            assert "bit-equal" in engine.capture(plans.step(1))[0] and replica.graph is not None
        found = [engine.step(plans.step(step), 1e-3).tolist() for step in (1, 2, 3, 4)]
        return found, [m.detach().clone() for m in replica.optimizer.masters]

    with installed():
        plain, weights = run(False)
        graphed, others = run(True)
    assert plain == graphed and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
