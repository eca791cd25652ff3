"""What a run will need, against sums by hand; and the refusal."""

from __future__ import annotations

import pytest
import torch
from chat_tokenizer import chat_tokenizer, save_material
from test_regenerate import chat_target
from tiny_models import random_drafter, tiny_target
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash.data import make_packs, random_conversations
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.target.capture import Target
from dflash.train.memory import GIB, MemoryEstimateError, count_parameters, estimate, refuse_what_does_not_fit
from dflash.train.plan import Planner
from dflash.train.prepare import prepare_data, with_vocabulary
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig
from dflash.train.step import Replica
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


def peak_of(call) -> int:
    """Most bytes that the CPU's allocator handed out and had not back, while `call` ran, by torch's own profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def bytes_of(tensors) -> int:
    """Memory of tensors, each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("changes", [{}, {"soft_labels": True}, {"draft_vocab": 1000}, {"target_dtype": "float32"}], ids=str)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(changes):
    """Target and drafter on one device: tables that they share count once, and capture is over when a step begins."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=6144, hidden_size=128, intermediate_size=512, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    config = RunConfig.from_parameters(
        **dict(gpus="cpu", target_layers=[1, 5], pack_length=256, max_anchors=64, warm_start=False, dtype="bfloat16")
        | dict(block_size=8, draft_vocab=None, soft_labels=False, gamma=10.0, target_dtype="bfloat16")
        | changes
    )
    topology = decide(config.runtime, 0)
    drafter_shape = create_drafter_config(shape, 2, draft_vocab_size=changes.get("draft_vocab"))
    target = Target(AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, config.target.target_dtype)), None, [1, 5])
    conversations, _ = random_conversations(2, config.data.pack_length, shape.vocab_size)
    pack = make_packs(conversations, config.data.pack_length, order="in_order")[0]
    drafter = DFlashDrafter(drafter_shape, [1, 5], 8, config.drafter.max_anchors, shape.vocab_size - 1)
    drafter.to(torch.bfloat16)
    ids = torch.arange(1000) if "draft_vocab" in changes else None
    drafter.load_target_head(target.embed_weight, target.head_weight, ids)
    replica = Replica(drafter, config.train)
    plan = Planner([pack], config.train, 8, config.drafter.max_anchors).step(1)
    kept = {}

    def step() -> None:
        kept["features"] = target.capture(pack.input_ids[None], pack.lengths, None, config.train.soft_labels)
        replica.accumulate(plan.items[0], kept["features"], plan.denominator)
        replica.apply(1e-3, plan)

    step()  # makes the optimizer's state
    kept.clear()
    state = [value for value in vars(replica.optimizer).values() if isinstance(value, list)]
    state = [tensor for value in state for tensor in value if isinstance(tensor, torch.Tensor)]
    moments = 8 * sum(weight.numel() for weight in drafter.parameters())
    standing = bytes_of([*target.model.parameters(), *drafter.parameters(), *drafter.buffers(), *state]) + moments
    measured = standing + peak_of(step)
    estimated = estimate(config, drafter_shape, shape, topology)[torch.device("cpu")]
    assert estimated.need == pytest.approx(measured, rel=0.1), estimated.parts


def test_a_draft_vocabulary_that_the_text_decides_is_in_the_estimate_once_the_text_is_read(tmp_path):
    """The CPU's recipe has one: for SmolLM2 the logits of 49,152 tokens were counted, twice the measured peak."""
    save_material(tmp_path, chat_target().model, chat_tokenizer())
    options = dict(target=str(tmp_path / "target"), data=str(tmp_path / "data.jsonl"), num_captured=1, held_out=2)
    resolved = resolve(RunConfig.from_parameters(draft_vocab=0, pack_length=128, **options))
    data = prepare_data(resolved)
    size = len({token for c in data.conversations for token, kept in zip(c.input_ids, c.loss_mask, strict=True) if kept})
    named = resolve(RunConfig.from_parameters(draft_vocab=size, pack_length=128, **options))
    before, after, wanted = (run.memory[torch.device("cpu")] for run in (resolved, with_vocabulary(resolved, data), named))
    assert 2 < size < 30 and after.parts == wanted.parts and after.need < before.need
    assert with_vocabulary(named, data) is named


GPU_SHAPES = {
    "train-gpu": dict(
        target="smollm2", data="random:8", num_captured=5, drafter_layers=4, max_anchors=512, pack_length=4096, gamma=4.0
    ),
    "27B-shape, 4 layers": dict(
        target="random:qwen3.6-27b@4",
        data="random:4",
        target_layers=[0, 3],
        pack_length=16384,
        max_anchors=512,
        block_size=16,
        soft_labels=True,
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_the_estimate_is_within_a_tenth_of_a_gpus_peak(tmp_path, shape):
    """Tensors alone: the estimate's part for the CUDA context is no tensor."""
    from dflash.launch.run import start_run, train_run

    options = dict(gpus="0", steps=4, eval_every=0, checkpoint_every=0, warm_start=False, features="online", held_out=0)
    config = RunConfig.from_parameters(**options | GPU_SHAPES[shape])
    memory = resolve(config).memory[torch.device("cuda:0")]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    train_run(start_run(config, tmp_path), config)
    measured = torch.cuda.max_memory_allocated(0)
    assert memory.need - memory.parts["cuda"] == pytest.approx(measured, rel=0.1), memory.parts
