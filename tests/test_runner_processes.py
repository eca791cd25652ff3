"""The same job under torchrun (gloo): the serial reference's numbers, early ends, a rank that fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pipeline_lab import run_torchrun, serial_run

from dflash.bench.pipeline_case import Case
from dflash.bench.shapes import TINY
from dflash.distributed.cluster import Roles, roles_of, workers
from dflash.distributed.inbox import LocalInbox
from dflash.distributed.schedule import Schedule, steps_ahead
from dflash.errors import ConfigError
from dflash.train.settings import RuntimeOptions
from dflash.train.topology import decide


def topology(drafters: str, targets: str | None):
    return decide(RuntimeOptions(gpus=drafters, target_gpus=targets), 0)


def job(**changes) -> Case:
    return Case(TINY, **{"packs_per_step": 4, "packs": 5, "dtype": torch.float32, "lr": 1e-3} | changes)


@pytest.fixture(scope="module")
def reference():
    return serial_run(job(), topology("cpu", "cpu"), 20)


@pytest.mark.slow  # the short run has test_torchrun_gives_the_serial_numbers of test_train_command
@pytest.mark.parametrize(("drafters", "targets"), [("cpu:2", "cpu:2"), ("cpu:2", None)])
def test_losses_and_weights_are_those_of_the_serial_reference(reference, drafters, targets):
    ran = run_torchrun(job(), topology(drafters, targets), 20)
    assert ran.code == 0, ran.output
    assert ran.result["losses"] == pytest.approx(reference[0], abs=1e-6)
    assert float((ran.result["weights"] - reference[1]).abs().max()) < 1e-6
    assert reference[0][-1] < reference[0][0]


@pytest.mark.slow
def test_shards_of_one_drafter_give_the_serial_numbers(reference):
    """4 packs over 3 drafters: two of them join the second pass with nothing."""
    ran = run_torchrun(job(), topology("cpu:3", None), 20, sharded=True)
    assert ran.code == 0, ran.output
    assert ran.result["losses"] == pytest.approx(reference[0], abs=1e-6)
    assert float((ran.result["weights"] - reference[1]).abs().max()) < 1e-6
    assert ran.result["held"] < 0.36 * reference[1].numel()


@pytest.mark.slow
def test_five_targets_and_three_drafters(reference):
    ran = run_torchrun(job(), topology("cpu:3", "cpu:5"), 20, 2)
    assert ran.code == 0, ran.output
    assert ran.result["losses"] == pytest.approx(reference[0], abs=1e-6)


@pytest.mark.slow
def test_a_run_that_ends_early_leaves_nobody_waiting(reference):
    ran = run_torchrun(job(), topology("cpu:2", "cpu:1"), 20, 4, stop_after=3)
    assert ran.code == 0, ran.output
    assert ran.result["losses"] == pytest.approx(reference[0][:3], abs=1e-6)


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_of_them():
    ran = run_torchrun(job(), topology("cpu:2", "cpu:1"), 20, fail={"rank": 2, "item": 5})
    assert ran.code != 0 and ran.result is None
    assert "OSError: a made-up failure of a rank" in ran.output and "in failing" in ran.output


def test_a_rank_with_a_target_of_its_own_captures_one_item_ahead_and_none_twice():
    calls = []
    inbox = LocalInbox(SimpleNamespace(get=lambda pack: calls.append(pack) or f"features of {pack}"))
    items = [SimpleNamespace(index=index, pack=f"pack {index}") for index in range(4)]
    inbox.expect(tuple(items[:2]))
    assert [inbox.take(0), inbox.take(1)] == ["features of pack 0", "features of pack 1"]
    inbox.capture(items[2])
    assert inbox.depth == 1 and calls == ["pack 0", "pack 1", "pack 2"]
    inbox.expect(tuple(items[2:]))
    assert [inbox.take(2), inbox.take(3)] == ["features of pack 2", "features of pack 3"]
    assert inbox.depth == 0 and calls == ["pack 0", "pack 1", "pack 2", "pack 3"]


def test_ranks_and_roles():
    plan = topology("cpu:3", "cpu:5")
    assert workers(plan) == 8 and workers(topology("cpu:2", None)) == 2
    roles = roles_of(plan, world=16, local_world=8)
    assert roles == Roles(3, 5, 2, False) and roles.drafter_ranks == [0, 1, 2, 8, 9, 10]
    assert roles.target_rank(1, 4) == 15
    with pytest.raises(ConfigError, match="--nproc-per-node 8"):
        roles_of(plan, 4, 4)
    overlap = decide(RuntimeOptions(gpus="0,1", target_gpus="1,2"), 3)
    with pytest.raises(ConfigError, match="cuda:1 both draft and run a target"):
        workers(overlap)


def test_each_node_feeds_its_own_drafters():
    from types import SimpleNamespace

    from runner_jobs import first_replica, options, planner

    settings = options(packs_per_step=6)
    plans = planner(settings, first_replica(settings)[1].drafter)
    roles = Roles(drafters=2, targets=3, nodes=2, paired=False)
    seen = []
    for node in range(2):
        routes = list(Schedule(plans, SimpleNamespace(roles=roles, node=node), 1, 4))
        assert {r.replica // 2 for r in routes} == {node}
        assert [r.target for r in routes] == [k % 3 for k in range(len(routes))]
        seen += [(r.item.index, r.replica) for r in routes]
    assert sorted(seen) == [(i, i % 6 % 4) for i in range(24)]
    assert steps_ahead(2, 4, 4) == 2 and steps_ahead(8, 6, 2) == 3 and steps_ahead(1, 1, 3) == 1
