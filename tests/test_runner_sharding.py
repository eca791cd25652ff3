"""One drafter in shards (FSDP2, gloo): the serial numbers, checkpoints of shards, and going on with other ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from test_train_command import check_same, losses, material, write_config  # noqa: F401
from tiny_models import random_drafter, tiny_target

from dflash.__main__ import main
from dflash.errors import ConfigError, RunError
from dflash.train import shards
from dflash.train.checkpoint import checkpoints, is_complete, latest_checkpoint, load_trainer_state
from dflash.train.settings import RunConfig, RuntimeOptions
from dflash.train.step import Replica


@pytest.fixture(scope="module")
def serial_run(material, tmp_path_factory):  # noqa: F811
    config = write_config(material, tmp_path_factory.mktemp("serial") / "runs/serial", packs_per_step=4)
    assert main(["train", "--config", str(config)]) == 0
    return config.parent


@pytest.fixture(scope="module")
def sharded_run(material, tmp_path_factory):  # noqa: F811
    """8 steps by two ranks that share one drafter, with checkpoints after 4 and 8."""
    config = write_config(
        material,
        tmp_path_factory.mktemp("sharded") / "runs/whole",
        gpus="cpu:2",
        target_gpus="cpu:1",
        launcher="torchrun",
        drafter_parallel="fsdp2",
        packs_per_step=4,
        checkpoint_every=4,
        keep_checkpoints=9,
    )
    assert main(["train", "--config", str(config)]) == 0, (config.parent / "torchrun.log").read_text()
    return config.parent


def go_on(run: Path, to: Path, after: int, **runtime) -> Path:
    """A copy of a run that resumes from its checkpoint of step `after`, with other runtime settings."""
    shutil.copytree(run, to)
    for step, path in checkpoints(to):
        if step > after:
            shutil.rmtree(path)
    values = yaml.safe_load((to / "config.yaml").read_text())
    values["runtime"].update(runtime)
    values["train"]["checkpoint_every"] = 2
    (to / "config.yaml").write_text(yaml.safe_dump(values))
    log = to / "torchrun.log"
    assert main(["train", "--config", str(to / "config.yaml"), "--resume"]) == 0, log.read_text() if log.exists() else ""
    return to


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(latest_checkpoint(run) / "drafter.safetensors")


def worst(a: dict, b: dict) -> float:
    assert set(a) == set(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_losses_evaluations_and_weights_are_the_serial_ones(sharded_run, serial_run):
    check_same(sharded_run, serial_run)
    folder = latest_checkpoint(sharded_run)
    whole, about = load_trainer_state(folder), load_trainer_state(folder, whole=False)["optimizer"]
    assert about["sharded"] and about["adam_step"] == 8
    names = about["names"]
    for name, master in zip(names, whole["optimizer"]["masters"], strict=True):
        assert torch.equal(master, final(sharded_run)[name])
    theirs = load_trainer_state(latest_checkpoint(serial_run))["optimizer"]
    for index, of in theirs["adamw"]["state"].items():
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(whole["optimizer"]["adamw"]["state"][index][kind], of[kind], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_as_many_ranks_go_on_bit_for_bit(sharded_run, tmp_path):
    again = go_on(sharded_run, tmp_path / "runs/again", 4)
    assert losses(again) == losses(sharded_run) and worst(final(again), final(sharded_run)) == 0
    mine, theirs = (load_trainer_state(latest_checkpoint(run))["optimizer"] for run in (again, sharded_run))
    for index, of in theirs["adamw"]["state"].items():
        assert all(torch.equal(mine["adamw"]["state"][index][kind], of[kind]) for kind in of)


@pytest.mark.slow
def test_threads_and_then_three_ranks_go_on_with_it(sharded_run, tmp_path):
    """Shards of two, then whole drafters, then shards of three, of a whole drafter's checkpoint and of shards of two."""
    threads = go_on(sharded_run, tmp_path / "runs/threads", 4, launcher="threads", drafter_parallel="replicate")
    assert losses(threads) == pytest.approx(losses(sharded_run), abs=1e-6)
    assert not (latest_checkpoint(threads) / shards.FOLDER).exists()
    for run, after in ((threads, 6), (sharded_run, 4)):
        three = go_on(
            run, tmp_path / f"runs/three{after}", after, gpus="cpu:3", launcher="torchrun", drafter_parallel="fsdp2"
        )
        assert losses(three) == pytest.approx(losses(sharded_run), abs=1e-6)
        assert worst(final(three), final(sharded_run)) < 1e-6
        assert len(list((latest_checkpoint(three) / shards.FOLDER).glob("*.distcp"))) == 3


@pytest.fixture
def alone():
    """A process group of one."""
    from types import SimpleNamespace

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(drafter_group=dist.group.WORLD, device=torch.device("cpu"), roles=SimpleNamespace(replicas=1))
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_rank_reads_what_two_wrote_and_refuses_another_drafter(sharded_run, alone, tmp_path):
    from dflash.distributed.sharding import ShardedReplica
    from dflash.drafter.storage import load_drafter

    folder = latest_checkpoint(sharded_run)
    options, about = RunConfig.from_parameters("cpu").train, load_trainer_state(folder, whole=False)["optimizer"]
    drafter = load_drafter(folder)
    for parameter in drafter.parameters():
        parameter.data.fill_(7.0)
    replica = ShardedReplica(drafter, options, alone)
    replica.optimizer.load_shards(folder / shards.FOLDER, about)
    gathered = replica.gather(keep=True)
    assert worst({name: p.detach() for name, p in gathered.named_parameters()}, final(sharded_run)) == 0
    plain = Replica(load_drafter(folder), options)
    plain.optimizer.load_state_dict(load_trainer_state(folder)["optimizer"])
    for mine, other in zip(replica.optimizer.masters, plain.optimizer.masters, strict=True):
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(replica.optimizer.adamw.state[mine][kind], plain.optimizer.adamw.state[other][kind])
    other = ShardedReplica(random_drafter(tiny_target()), options, alone)
    with pytest.raises(RunError, match="are not of this drafter"):
        other.optimizer.load_shards(folder / shards.FOLDER, about)
    (tmp_path / "full").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="shards could not be written to"):
        shards.write(tmp_path / "full", replica.optimizer.tensors(), alone.drafter_group)
    with torch.no_grad():
        replica.optimizer.masters[1][0] = float("nan")
    assert not bool(replica.optimizer.all_finite())
    assert replica.optimizer.first_non_finite([]) == about["names"][1]


def test_a_checkpoint_with_a_torn_shard_is_none(sharded_run, tmp_path):
    shutil.copytree(sharded_run, tmp_path / "torn")
    newest = latest_checkpoint(tmp_path / "torn")
    shard = next((newest / shards.FOLDER).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not is_complete(newest) and latest_checkpoint(tmp_path / "torn").name == "step-00000004"
    with pytest.raises(RunError, match="is not a complete checkpoint"):
        load_trainer_state(newest)


def test_threads_cannot_shard():
    with pytest.raises(ConfigError, match="launcher=torchrun, or drafter_parallel=replicate"):
        RunConfig.from_parameters(drafter_parallel="fsdp2")
    with pytest.raises(ConfigError, match="must be replicate or fsdp2, got 'zero'"):
        RuntimeOptions(drafter_parallel="zero")
