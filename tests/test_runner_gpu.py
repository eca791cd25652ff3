"""The pipeline's promises on real GPUs; `tools/gpu_runner.py` measures the same with its speed."""

from __future__ import annotations

import pytest
import torch

from dflash.bench.pipeline_case import SMALL, Case
from dflash.bench.pipeline_checks import check_equal, check_failure, check_memory, check_spread, check_stamps, check_torchrun
from dflash.train.settings import RuntimeOptions
from dflash.train.topology import available_gpus, decide

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(available_gpus() < 2, reason="needs two CUDA devices")]


@pytest.fixture(params=["apart", "paired"])
def topology(request):
    asked = {"apart": dict(gpus="1", target_gpus="0"), "paired": dict(gpus="0,1", target_gpus="0,1")}[request.param]
    return decide(RuntimeOptions(**asked), available_gpus())


@pytest.fixture
def case(topology):
    return Case(SMALL, packs_per_step=2, packs=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("depth", [1, 8])
def test_every_element_of_1000_packs_crosses(topology, depth):
    found = check_stamps(topology, 1000, depth)
    assert found["ok"], found


def test_losses_are_the_serial_ones_within_bfloat16(case, topology):
    found = check_equal(case, topology, 20)
    assert found["ok"], found


def test_memory_is_flat_over_200_steps(case, topology):
    found = check_memory(case, topology, 200)
    assert found["ok"], found


def test_a_failing_target_ends_the_run_and_frees_the_gpus(case, topology):
    found = check_failure(case, topology)
    assert found["ok"], found


def test_torchrun_over_nccl_gives_the_serial_losses(case, topology):
    found = check_torchrun(case, topology, 20)
    assert found["ok"], found


def test_shards_of_one_drafter_over_nccl_give_the_serial_losses():
    topology = decide(RuntimeOptions(gpus="0,1", target_gpus="0,1"), available_gpus())
    found = check_torchrun(Case(SMALL, packs_per_step=2, packs=6, dtype=torch.bfloat16), topology, 20, sharded=True)
    assert found["ok"], found


def test_a_target_over_two_gpus_gives_the_features_of_one():
    topology = decide(RuntimeOptions(gpus="1", target_gpus="0,1", gpus_per_target=2), available_gpus())
    found = check_spread(Case(SMALL, packs_per_step=2, packs=6, dtype=torch.bfloat16, target_layers=8), topology)
    assert found["ok"], found
