"""A target over several devices: which part goes where, and that captures through accelerate's hooks are the same."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import check_device_map
from tiny_models import random_drafter, tiny_target

from dflash.errors import ConfigError
from dflash.target.features import OnlineFeatures
from dflash.target.spread import device_map, shard_target
from dflash.train.settings import RuntimeOptions
from dflash.train.topology import decide


def gpus(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


def bytes_by_device(target, plan) -> dict[torch.device, int]:
    """By the longest prefix that a weight's name has in the map."""
    found: dict[torch.device, int] = {}
    for name, weight in target.model.named_parameters():
        place = max((part for part in plan if name == part or name.startswith(part + ".")), key=len)
        found[plan[place]] = found.get(plan[place], 0) + weight.nbytes
    return found


@pytest.mark.parametrize("kind", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_part_has_one_place_and_layers_go_in_order(kind, count):
    target, devices = tiny_target(kind), gpus(count)
    plan = device_map(target, devices)
    check_device_map(target.model, plan)  # raises where a parameter or buffer has no place
    layers = [plan[f"model.layers.{index}"].index for index in range(4)]
    assert layers == sorted(layers) and set(layers) == set(range(count))
    assert plan["model.embed_tokens"].index == plan["model.rotary_emb"].index == 0
    assert plan["model.norm"].index == plan["lm_head"].index == count - 1


def test_devices_get_about_as_many_bytes_and_a_tied_head_stays_with_the_embedding():
    from transformers import LlamaConfig, LlamaForCausalLM

    from dflash.target.capture import Target

    config = LlamaConfig(
        vocab_size=640,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    target = Target(LlamaForCausalLM(config), layer_ids=[1, 5])
    plan = device_map(target, gpus(2))
    assert plan["lm_head"].index == plan["model.embed_tokens"].index == 0
    layer = sum(p.nbytes for p in target.decoder.layers[0].parameters())
    held = bytes_by_device(target, plan)
    assert abs(held[gpus(2)[0]] - held[gpus(2)[1]]) <= layer
    assert sum(held.values()) == target.memory_bytes
    assert [plan[f"model.layers.{i}"].index for i in range(12)] == [0] * 5 + [1] * 7  # 20480 + 5 x 9280 of 131840 weights


def test_a_decoder_inside_a_multimodal_model_is_found():
    target = tiny_target()
    outer = torch.nn.Module()
    outer.model = torch.nn.Module()
    outer.model.visual, outer.model.language_model = torch.nn.Linear(4, 4), target.decoder
    outer.model.scale = torch.nn.Parameter(torch.ones(3))
    outer.lm_head = target.model.lm_head
    outer.get_output_embeddings = lambda: outer.lm_head
    outer.get_input_embeddings = lambda: target.decoder.embed_tokens
    target.model = outer
    plan = device_map(target, gpus(2))
    check_device_map(outer, plan)
    assert plan["model.visual"].index == plan["model.scale"].index == 0
    assert plan["model.language_model.layers.3"].index == plan["lm_head"].index == 1


def test_more_devices_than_layers_are_refused():
    with pytest.raises(ConfigError, match="than its 4 layers; use gpus_per_target=4 or less"):
        device_map(tiny_target(), gpus(5))


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_captures_through_the_hooks_are_bit_equal(kind):
    """Both devices are the CPU here: what is tested is that accelerate's wrappers and the capture's hooks agree."""
    from runner_jobs import packs

    plain, spread = tiny_target(kind), tiny_target(kind)
    shard_target(spread, [torch.device("cpu")] * 2)
    assert f"{kind} with plain capture (the target is spread over devices)" in spread.describe()
    assert hasattr(spread.decoder.layers[0], "_hf_hook") and spread.describe().count("on cpu;") == 1
    for pack in packs(2):
        ours, theirs = OnlineFeatures(spread).get(pack), OnlineFeatures(plain).get(pack)
        assert torch.equal(ours.all_hidden_states, theirs.all_hidden_states) and bool(ours.all_hidden_states.any())
        assert torch.equal(ours.verifier_last_hidden, theirs.verifier_last_hidden)
    assert torch.equal(random_drafter(spread).lm_head, random_drafter(plain).lm_head)


def test_a_device_without_room_is_refused_before_anything_moves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 10_000))
    target = tiny_target()
    with pytest.raises(ConfigError, match=r"cuda:0 has 0.0 GiB free.*gpus_per_target, now 2"):
        shard_target(target, gpus(2))
    assert {p.device.type for p in target.model.parameters()} == {"cpu"}


def test_a_drafter_may_sit_on_a_part_of_the_target():
    topology = decide(RuntimeOptions(gpus="1", target_gpus="0,1", gpus_per_target=2), 2)
    assert topology.shared and not topology.paired and not topology.serial
    assert topology.targets == ((torch.device("cuda:0"), torch.device("cuda:1")),)
