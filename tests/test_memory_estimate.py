"""What a run will need, against sums by hand; and the refusal."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_drafter, tiny_target

from dflash.drafter.config import create_drafter_config
from dflash.train.memory import GIB, MemoryEstimateError, count_parameters, estimate, refuse_what_does_not_fit
from dflash.train.settings import RunConfig
from dflash.train.topology import decide


def story_config(**changes) -> RunConfig:
    return RunConfig.from_parameters(
        **dict(
            gpus="5,6,7",
            pack_length=40000,
            max_anchors=1024,
            block_size=32,
            num_captured=5,
            drafter_layers=5,
            soft_labels=True,
            dtype="bfloat16",
            target_dtype="bfloat16",
        )
        | changes
    )


def story_target():
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
    )


def have(topology, gib: float) -> dict:
    return {device: int(gib * GIB) for device in topology.devices}


def test_the_story_fits_h200s_and_not_smaller_cards():
    config, drafter = story_config(), create_drafter_config()
    topology = decide(config.runtime, 8)
    memory = estimate(config, drafter, story_target(), topology, have(topology, 139))
    target, drafts = memory[torch.device("cuda:0")], memory[torch.device("cuda:5")]
    assert 45 < target.parts["target"] / GIB < 55 and "drafter" not in target.parts and "target" not in drafts.parts
    count = drafter.parameter_count(5)
    assert drafts.parts["drafter"] == count * 12 and drafts.parts["optimizer"] == count * 8
    assert drafts.parts["queue"] == 2 * 40000 * 6 * 5120 * 2
    assert drafts.parts["target's head"] == 2 * 248320 * 5120 * 2
    refuse_what_does_not_fit(memory, config)
    assert "target[0]" in topology.table(memory) and "about" in topology.table(memory)
    small = estimate(config, drafter, story_target(), topology, have(topology, 40))
    with pytest.raises(MemoryEstimateError) as error:
        refuse_what_does_not_fit(small, config)
    for part in ("cuda:0 needs about", "of 40.0 GiB", "gpus_per_target", "pack_length 40000"):
        assert part in str(error.value)


def test_shared_devices_add_up_and_sharded_targets_divide():
    config, drafter = story_config(gpus="all", target_gpus=""), create_drafter_config()
    both = decide(config.runtime, 1)
    alone = estimate(config, drafter, story_target(), both, have(both, 200))[torch.device("cuda:0")]
    assert "queue" not in alone.parts and {"target", "drafter"} <= set(alone.parts)
    halves = decide(story_config(gpus="2", gpus_per_target=2).runtime, 3)
    shards = estimate(story_config(gpus="2", gpus_per_target=2), drafter, story_target(), halves, have(halves, 139))
    assert shards[torch.device("cuda:0")].parts["target"] * 2 == pytest.approx(alone.parts["target"], rel=1e-6)
    assert shards[torch.device("cuda:1")].parts["capture"] == alone.parts["capture"]  # states pass through whole


def test_shards_of_a_drafter_divide_what_whole_ones_repeat():
    config, drafter = story_config(drafter_parallel="fsdp2", launcher="torchrun"), create_drafter_config()
    topology = decide(config.runtime, 8)
    shard = estimate(config, drafter, story_target(), topology, have(topology, 139))[torch.device("cuda:5")]
    count = drafter.parameter_count(5)
    assert shard.parts["drafter"] == count * 8 // 3 and shard.parts["optimizer"] == count * 8 // 3
    layer = 2 * 5120 * 4096 + 2 * 5120 * 1024 + 3 * 5120 * 17408  # q and o, k and v, MLP
    assert shard.parts["gathered"] == pytest.approx((5 * 5120**2 + 2 * layer) * 8, rel=1e-3)  # bfloat16 twice, float32
    whole = estimate(story_config(), drafter, story_target(), topology, have(topology, 139))[torch.device("cuda:5")]
    assert shard.need < whole.need - 8 * GIB


def test_counts_are_those_of_the_models():
    target = tiny_target()
    total = sum(p.numel() for p in target.model.parameters())
    assert count_parameters(target.config)[0] == total
    drafter = random_drafter(target)
    count = sum(p.numel() for p in drafter.parameters())
    config = RunConfig.from_parameters(
        gpus="cpu:2",
        target_gpus="cpu:3",
        num_captured=2,
        pack_length=64,
        dtype="float32",
        target_dtype="float32",
        soft_labels=False,
        queue_depth=3,
    )
    topology = decide(config.runtime, 0)
    memory = estimate(config, drafter.config, target.config, topology)[torch.device("cpu")]
    assert memory.parts["target"] == 4 * total  # three CPU workers share one copy
    assert memory.parts["optimizer"] == 2 * 8 * count and memory.parts["drafter"] == 2 * 12 * count
    assert memory.parts["queue"] == 2 * 3 * 64 * 2 * 32 * 4 and memory.fits
