"""Random targets by name, random ids as data, and runs on them: equal bits everywhere, honest words, no needless layers."""

from __future__ import annotations

import functools
import hashlib
import sys

import pytest
import torch
from tiny_models import tiny_target

from dflash.data import make_packs, random_conversations, random_packs
from dflash.drafter.config import create_drafter_config
from dflash.errors import ConfigError, DataError, TargetError
from dflash.evaluate.whole import EvaluateOptions, evaluate
from dflash.launch.run import start_run, train_run
from dflash.runs.record import read_metrics
from dflash.target import fast_capture as fast_target
from dflash.target.capture import load_target
from dflash.target.features import OnlineFeatures, make_source
from dflash.target.random_weights import build_random, random_config, random_head
from dflash.train.memory import MemoryEstimateError
from dflash.train.prepare import prepare, prepare_data
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig
from dflash.train.step import Replica, SerialEngine

CPU = torch.device("cpu")
SMALL = dict(
    target="random:tiny-hybrid@6",
    data="random:4",
    pack_length=96,
    num_captured=3,
    drafter_layers=1,
    block_size=4,
    max_anchors=8,
    warm_start=False,
    gpus="cpu",
    steps=2,
    eval_every=0,
    checkpoint_every=0,
    dtype="float32",
    target_dtype="float32",
)


def settings(**changes) -> RunConfig:
    return RunConfig.from_parameters(**SMALL | changes)


def hashed(key: str, index: int) -> float:
    """The rule in plain integers: uniform in [-1, 1)."""
    digest = hashlib.blake2b(repr((0, key)).encode(), digest_size=8).digest()
    x = (index * 0x5BD1F36B + int.from_bytes(digest[:4], "big")) % 2**32
    x = x ^ (x >> 14) ^ int.from_bytes(digest[4:], "big")
    for shift, factor in ((15, 0x6C8E944D), (13, 0x7A3D4B2F), (16, 0x51ED7A95)):
        x = (x ^ (x >> shift)) * factor % 2**32
    x ^= x >> 15
    return x // 256 / 2**23 - 1


def test_weights_follow_from_name_and_index_alone():
    embed = random_head("random:tiny", CPU, torch.float32).embed_weight.flatten()
    for index in (0, 1, 63, 64, 19_199):
        assert float(embed[index]) == pytest.approx(hashed("model.embed_tokens.weight", index) * 3**0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["random:tiny", "random:tiny-hybrid@4"])
def test_every_process_makes_the_same_model(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = build_random(name, CPU, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left alone"
    torch.manual_seed(2)
    again, head = build_random(name, CPU, torch.bfloat16), random_head(name, CPU, torch.bfloat16)
    for (key, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, other), key
        assert weight.dim() == 1 or float(weight.float().std()) > 0.01, key
    assert torch.equal(head.embed_weight, model.get_input_embeddings().weight)
    assert torch.equal(head.head_weight, model.lm_head.weight)
    assert not torch.equal(head.embed_weight, head.head_weight)


def test_values_look_random():
    from dflash.target.random_weights import _uniform

    a, b = (_uniform(key, torch.Size([1 << 18]), 1.0, CPU, torch.float32) for key in ("a", "b"))
    counts = torch.histc(a, 16, -1, 1)
    assert float((counts / counts.mean() - 1).abs().max()) < 0.03
    for shift in (1, 2, 64, 5120):  # neighbours, and rows of a matrix
        assert abs(float((a[shift:] * a[:-shift]).mean())) < 0.003
    assert abs(float((a * b).mean())) < 0.003
    assert not set(a[:2000].tolist()) & set(b.tolist()[:2000])


def test_pieces_join(monkeypatch):
    whole = random_head("random:tiny", CPU, torch.float32).head_weight
    monkeypatch.setattr("dflash.target.random_weights._PIECE", 1000)
    assert torch.equal(random_head("random:tiny", CPU, torch.float32).head_weight, whole)


def test_the_27b_shape_is_that_of_the_model():
    config = random_config("random:qwen3.6-27b")
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (64, 5120, 248320)
    assert config.layer_types[:5] == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    assert random_config("random:qwen3.6-27b@8").num_hidden_layers == 8
    assert create_drafter_config(config, 5) == create_drafter_config(None, 5), "the published drafter's shape"


@pytest.mark.parametrize("name", ["random:huge", "random:tiny@0", "random:tiny@1001", "random:tiny@x", "random:"])
def test_unknown_shapes_are_refused_with_the_known_ones(name):
    with pytest.raises(TargetError, match="wanted random:SHAPE with SHAPE one of qwen3.6-27b, tiny-hybrid, tiny"):
        load_target(name)


def test_it_says_that_it_is_random():
    target = load_target("random:tiny-hybrid@4", layer_ids=[0, 2])
    assert target.describe().startswith("random:tiny-hybrid@4: Qwen3_5ForCausalLM, hybrid with plain capture, 4 layers")
    assert "(random weights)" in target.describe() and target.tokenizer is None


# -- data -----------------------------------------------------------------------------------------------------------


def test_random_ids_fill_every_pack_and_avoid_what_they_must():
    conversations, report = random_conversations(3, 5000, 50, avoid=(49, 0, 7), seed=1)
    packs = make_packs(conversations, 5000, order="in_order")
    assert [pack.num_tokens for pack in packs] == [5000] * 3
    assert all(1500 <= int(n) <= 3500 for pack in packs for n in pack.lengths)
    drawn = {token for c in conversations for token in c.input_ids}
    assert drawn == set(range(50)) - {49, 0, 7}
    assert report.tokens == 15000 and "no text" in report.source
    again, _ = random_conversations(3, 5000, 50, avoid=(49, 0, 7), seed=1)
    other, _ = random_conversations(3, 5000, 50, avoid=(49, 0, 7), seed=2)
    assert again == conversations and other != conversations


def test_names_of_data():
    assert random_packs("random:24") == 24 and random_packs("data/x.jsonl") is None
    for bad in ("random:", "random:0", "random:-1", "random:many"):
        with pytest.raises(DataError, match="random:N"):
            random_packs(bad)


def test_more_random_ids_than_memory_holds_are_refused():
    with pytest.raises(DataError, match="random:999999' with pack_length 64, 63,999,936 tokens; .* here random:781250"):
        random_conversations(999999, 64, 300)


def test_data_for_a_random_target(tmp_path):
    resolved = resolve(settings(held_out=24))
    data = prepare_data(resolved)
    assert len(data.train_packs) == 4 and not data.held_out and not data.held_out_packs
    assert resolved.config.drafter.mask_token_id == 299
    assert not any((pack.input_ids == 299).any() for pack in data.train_packs)
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 1, 1, 1, 1]}\n' * 3)
    assert len(prepare_data(resolve(settings(data=str(ids), held_out=1))).conversations) == 3
    text = tmp_path / "text.jsonl"
    text.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    with pytest.raises(DataError, match="has no tokenizer.*random:24"):
        prepare_data(resolve(settings(data=str(text))))


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warm_start": True}, "those of 'random:tiny-hybrid@6' are noise; pass warm_start=False"),
        ({"gpus_per_target": 2}, "cannot be spread over gpus_per_target=2"),
    ],
)
def test_what_a_random_target_cannot_give_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(settings(**changes))


def test_one_that_does_not_fit_is_refused_before_it_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr("dflash.train.memory.memory_total", lambda: 16 * 2**30)
    monkeypatch.setattr("dflash.target.random_weights.build_random", None)
    with pytest.raises(MemoryEstimateError, match="the most is target"):
        start_run(settings(target="random:qwen3.6-27b"), root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_says_that_it_is_random_and_saves_nothing_when_told_so(tmp_path):
    config = settings()
    run = start_run(config, root=tmp_path, run_id="r")
    outcome = train_run(run, config)
    records, _ = read_metrics(run.path)
    assert outcome.status == "completed" and outcome.acceptance_length is None
    kinds = [r["kind"] for r in records]
    assert kinds.count("step") == 2 and "eval" not in kinds and "checkpoint" not in kinds
    assert not (run.path / "checkpoints").exists()
    assert any("say nothing of quality" in r.get("message", "") for r in records if r["kind"] == "log")
    assert RunConfig.load(run.path / "config.yaml").target.target == "random:tiny-hybrid@6"


def test_there_is_nothing_to_decode(tmp_path):
    config = settings(checkpoint_every=2, target="random:tiny", num_captured=2)
    run = start_run(config, root=tmp_path, run_id="r")
    train_run(run, config)
    with pytest.raises(ConfigError, match="a random target has nothing to decode"):
        evaluate(EvaluateOptions(run=str(run.path)))


# -- hard labels need no last state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_without_the_last_state_later_layers_do_not_run(kind):
    target = tiny_target(kind, layer_ids=(2, 0))
    calls = []
    for index, layer in enumerate(target.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: calls.append(i))
    ids, lengths = torch.randint(0, 61, (1, 20)), torch.tensor([9, 8])
    whole = target.capture(ids, lengths)
    ran, calls[:] = set(calls), []
    short = target.capture(ids, lengths, last_hidden=False)
    assert ran == {0, 1, 2, 3} and set(calls) == {0, 1, 2}
    assert torch.equal(short.all_hidden_states, whole.all_hidden_states)
    assert short.verifier_last_hidden is None
    assert torch.equal(target.capture(ids, lengths).verifier_last_hidden, whole.verifier_last_hidden), "and it still can"
    target.capture(ids, last_hidden=False)
    assert target.model(input_ids=ids).logits.shape == (1, 20, 61), "nothing stops a forward pass of another kind"


def test_hard_labels_train_on_the_short_capture_with_equal_numbers():
    config = settings(features="online", soft_labels=False)
    losses = []
    for last_hidden in (True, False):
        job = prepare(resolve(config))
        assert isinstance(job.source, OnlineFeatures) and not job.source.last_hidden
        source = OnlineFeatures(job.target, torch.bfloat16, last_hidden=last_hidden)
        engine = SerialEngine(Replica(job.drafter, config.train), source, job.planner)
        losses.append(torch.stack([engine.step(job.planner.step(step), 1e-3) for step in (1, 2, 3)]))
    assert torch.equal(losses[0], losses[1]) and float(losses[0][0, 0]) > 1


def test_soft_labels_keep_the_last_state():
    target, packs = tiny_target(), make_packs(random_conversations(1, 64, 61)[0], 64, order="in_order")
    for soft in (True, False):
        source = make_source(target, packs, mode="online", keep_last_hidden=soft, dtype=torch.float32)
        last = source.get(packs[0]).verifier_last_hidden
        assert (last is not None and bool(last.any())) is soft


# -- fast capture in real loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fast", "kernels", "attached"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_loading_attaches_the_fast_capture(monkeypatch, fast, kernels, attached):
    calls = []

    def attach(target, required=False):
        assert not required
        calls.append(target)
        target.fast = object()

    monkeypatch.setattr(fast_target, "has_recurrence_kernels", lambda target: kernels)
    monkeypatch.setattr(fast_target, "attach", attach)
    target = load_target("random:tiny-hybrid@4", fast=fast)
    assert len(calls) == attached
    assert f"hybrid with {'fast' if attached else 'plain'} capture" in target.describe()
    load_target("random:tiny")  # dense: nothing to attach
    assert len(calls) == attached


def test_a_fast_capture_that_differs_is_not_used_and_says_so(monkeypatch):
    monkeypatch.setattr(fast_target, "has_recurrence_kernels", lambda target: True)
    monkeypatch.setattr(fast_target, "takes", lambda target: True)
    monkeypatch.setattr(fast_target, "_delta_rule", lambda target: None)
    monkeypatch.setattr(fast_target.FastCapture, "difference", lambda self: 0.5)
    target = load_target("random:tiny-hybrid@4")
    assert target.fast is None
    assert "plain capture (its features differ from the plain forward's by 0.5 (relative))" in target.describe()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_bits_are_the_cpus_and_capture_is_fast():
    name, cuda = "random:tiny-hybrid@4", torch.device("cuda", 0)
    there, here = build_random(name, cuda, torch.bfloat16), build_random(name, CPU, torch.bfloat16)
    for (key, weight), other in zip(there.named_parameters(), here.parameters(), strict=True):
        assert torch.equal(weight.cpu(), other), key
    target = load_target("random:qwen3.6-27b@4", cuda)
    wanted = "fast" if fast_target.has_recurrence_kernels(target) else "plain"
    assert f"hybrid with {wanted} capture" in target.describe()


def test_depth_does_not_make_it_chaotic():
    """Two right forward passes have to agree, or no check could tell a wrong one: bfloat16 against float32 at 32 layers."""
    half, full = (build_random("random:tiny-hybrid@32", CPU, dtype) for dtype in (torch.bfloat16, torch.float32))
    for weight, other in zip(full.parameters(), half.parameters(), strict=True):
        weight.copy_(other)
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    last = [model.model(input_ids=ids, use_cache=False).last_hidden_state.float() for model in (half, full)]
    assert float((last[0] - last[1]).norm() / last[1].norm()) < 0.02
    assert float(last[1].std()) > 0.5, "and it is no constant"


def test_the_comparison_takes_the_recurrence_of_other_code():
    target = load_target("random:tiny-hybrid@4")
    module = sys.modules[type(target.decoder.layers[0].linear_attn).__module__]
    before, calls = module.torch_chunk_gated_delta_rule, []

    @functools.wraps(before)
    def packaged(*args, **kwargs):
        calls.append(1)
        return before(*args, **kwargs)

    module.torch_chunk_gated_delta_rule = packaged
    try:
        ids = torch.arange(1, 21)[None]
        wanted = target.capture(ids)
        assert len(calls) == 3, "one call a linear-attention layer"
        with fast_target.plain_recurrence(target):
            got = target.capture(ids)
        assert len(calls) == 3 and module.torch_chunk_gated_delta_rule is packaged
        torch.testing.assert_close(got.all_hidden_states, wanted.all_hidden_states)
    finally:
        module.torch_chunk_gated_delta_rule = before
