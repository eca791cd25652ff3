"""What a pipeline must keep, on CPU workers and on real GPUs: every element crosses, losses are the serial ones, memory is
flat, and a failing worker ends the run and frees its devices."""

from __future__ import annotations

import gc
import itertools
import traceback
from dataclasses import replace

import pytest
import torch
from pipeline_lab import StampPlanner, StampReplica, StampSource, run_torchrun, serial_run

from dflash.bench.pipeline import memory_now, run_steps
from dflash.bench.pipeline_case import Case, make_engine, make_packs, make_target
from dflash.bench.shapes import SMALL, TINY
from dflash.distributed.threads import PipelineEngine
from dflash.target.features import OnlineFeatures
from dflash.target.spread import shard_target
from dflash.train.settings import RuntimeOptions
from dflash.train.topology import available_gpus, decide

two_gpus = pytest.mark.gpu(2)
TOPOLOGIES = {
    "cpu": dict(gpus="cpu:2", target_gpus="cpu:2"),
    "apart": dict(gpus="1", target_gpus="0"),
    "paired": dict(gpus="0,1", target_gpus="0,1"),
}
TOLERANCE = 0.02  # of a loss in bfloat16, and of memory


@pytest.fixture(params=["cpu", pytest.param("apart", marks=two_gpus), pytest.param("paired", marks=two_gpus)])
def topology(request):
    return decide(RuntimeOptions(**TOPOLOGIES[request.param]), available_gpus())


@pytest.fixture
def case(topology):
    return case_on(topology)


def case_on(topology, **changes) -> Case:
    on_gpu = topology.drafters[0].type == "cuda"
    shape, dtype = (SMALL, torch.bfloat16) if on_gpu else (TINY, torch.float32)
    return Case(shape, packs_per_step=2, packs=6, dtype=dtype, **changes)


@pytest.mark.parametrize("depth", [1, 8])
def test_every_element_of_1000_packs_crosses(topology, depth):
    """Stamped packs, of which each element is compared; sums of gradients are exact too."""
    on_gpu, drafters = topology.drafters[0].type == "cuda", len(topology.drafters)
    tokens, width, steps = (1024, 768, 1000 // drafters) if on_gpu else (64, 48, 1000 // drafters)
    engine = PipelineEngine(
        [StampReplica(device, width) for device in topology.drafters],
        [StampSource(target[0], width) for target in topology.targets],
        [target[0] for target in topology.targets],
        StampPlanner(drafters, tokens),
        steps,
        queue_depth=depth,
        paired=topology.paired,
    )
    try:
        engine.start(1)
        results = [engine.step(engine.planner.step(number), 0.0) for number in range(1, steps + 1)]
        wrong_elements, wrong_sums = torch.stack(results).sum(0)[:2].tolist()
    finally:
        engine.close()
    assert (wrong_elements, wrong_sums) == (0, 0)
    assert sum(replica.seen for replica in engine.replicas) == steps * drafters


def test_losses_are_the_serial_ones(case, topology):
    wanted, _ = serial_run(case, topology, 20)
    got = run_steps(make_engine(case, topology, 20), 20, topology, case.lr, warm=1)
    assert got["finite"] and wanted[-1] < wanted[0]
    assert got["losses"] == pytest.approx(wanted, rel=TOLERANCE if case.dtype is torch.bfloat16 else 1e-5)


def test_memory_is_flat(case, topology):
    """From the tenth step on. On the CPU it is the process's, which the tests before have filled."""
    on_gpu = topology.drafters[0].type == "cuda"
    for device in topology.devices:
        if on_gpu:
            torch.zeros(1, device=device)  # a device without an allocation yet has no peak to reset
            torch.cuda.reset_peak_memory_stats(device)
    steps = 200 if on_gpu else 30
    samples = run_steps(make_engine(case, topology, steps), steps, topology, case.lr, warm=10, sample_every=10)["samples"]
    for device in map(str, topology.devices):
        for what in ("reserved", "peak") if on_gpu else ("allocated",):
            values = [sample[device][what] for sample in samples]
            assert max(values) / min(values) - 1 <= TOLERANCE, (device, what, values)


def test_a_failing_target_ends_the_run_and_frees_the_devices(case, topology):
    calls = itertools.count()

    class Failing:
        def __init__(self, source):
            self.source = source

        def get(self, pack):
            if next(calls) == 6:
                raise OSError("a made-up failure")
            return self.source.get(pack)

    engine = make_engine(case, topology, 100, wrap=lambda source, i: Failing(source) if i == 0 else source)
    with pytest.raises(OSError, match="a made-up failure") as caught:
        run_steps(engine, 100, topology, case.lr)
    assert "in get" in "".join(traceback.format_exception(caught.value))
    del caught, engine
    gc.collect()
    for device in topology.devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
            assert memory_now([device])[str(device)]["allocated"] < 128 << 20


@pytest.mark.parametrize("name", [pytest.param("apart", marks=two_gpus), pytest.param("paired", marks=two_gpus)])
@pytest.mark.parametrize("sharded", [False, True])
def test_torchrun_over_nccl_gives_the_serial_losses(name, sharded):
    """One process a GPU; `sharded`: the ranks hold one drafter together. gloo is in test_runner_processes."""
    topology = decide(RuntimeOptions(**TOPOLOGIES[name]), available_gpus())
    if sharded and name == "apart":
        pytest.skip("one drafter has nobody to share with")
    case = case_on(topology)
    wanted, final = serial_run(case, topology, 20)
    ran = run_torchrun(case, topology, 20, sharded=sharded)
    assert ran.code == 0, ran.output
    assert ran.result["losses"] == pytest.approx(wanted, rel=TOLERANCE)
    parts = len(topology.drafters) if sharded else 1
    assert ran.result["held"] * parts / final.numel() == pytest.approx(1, abs=0.05)


@two_gpus
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_target_over_two_gpus_gives_the_features_of_one(hybrid):
    """Element by element, captured the plain way; and the losses of a run with it."""
    topology = decide(RuntimeOptions(gpus="1", target_gpus="0,1", gpus_per_target=2), available_gpus())
    case, devices = case_on(topology, target_layers=8, hybrid=hybrid), topology.targets[0]
    case = replace(case, fast_capture=False)
    wanted, _ = serial_run(case, topology, 10)
    target, packs = make_target(case, devices[0]), make_packs(case)
    whole = [OnlineFeatures(target).get(pack).to("cpu") for pack in packs]
    target.model.to("cpu")
    shard_target(target, devices)
    assert {p.device for p in target.model.parameters()} == set(devices)
    for one, pack in zip(whole, packs, strict=True):
        two = OnlineFeatures(target).get(pack).to("cpu")
        for name in ("all_hidden_states", "verifier_last_hidden"):
            a, b = getattr(one, name).float(), getattr(two, name).float()
            assert (a - b).norm() <= TOLERANCE * a.norm(), name
    result = run_steps(make_engine(case, topology, 10, target=target), 10, topology, case.lr, warm=1)
    assert result["finite"] and result["losses"] == pytest.approx(wanted, rel=TOLERANCE)
