"""Captured features against transformers' own outputs, per document, for dense, sliding and hybrid targets."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_models import tiny_target as build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.errors import TargetError
from dflash.target.capture import Target, choose_mask_token_id, default_layer_ids, group_documents, validate_mask_token_id

KINDS = ("dense", "sliding", "hybrid")


def oracle(target, ids):
    """Layer outputs of one document by `output_hidden_states`; the last one by hooking the final norm's input."""
    seen = {}
    hook = target.decoder.norm.register_forward_pre_hook(lambda module, args: seen.update(last=args[0]))
    with torch.no_grad():
        states = target.decoder(input_ids=ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    return [*states.hidden_states[1:-1], seen["last"]], states.last_hidden_state


@pytest.mark.parametrize("kind", KINDS)
def test_layer_id_means_that_layers_output_the_last_one_included(kind):
    target = build(kind, layer_ids=(3, 0, 2))
    ids = torch.randint(1, 60, (1, 13))
    layers, last = oracle(target, ids)
    features = target.capture(ids)
    torch.testing.assert_close(features.all_hidden_states, torch.cat([layers[3], layers[0], layers[2]], -1))
    torch.testing.assert_close(features.verifier_last_hidden, last)
    assert features.nbytes == 13 * 4 * 32 * 4


class AddsItsNumber(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, states, **kwargs):
        return states + self.number


def test_stub_whose_layer_i_adds_i_gives_the_running_sum():
    """vllm#40727 and others: the input of layer l, one layer early, looks almost right."""
    target = build("dense", layer_ids=(0, 1, 2, 3))
    target.decoder.layers = nn.ModuleList([AddsItsNumber(index) for index in range(4)])
    target = Target(target.model, layer_ids=[0, 1, 2, 3])
    target.embed_weight.zero_()
    features = target.capture(torch.tensor([[1, 2]])).all_hidden_states.view(2, 4, 32)
    assert features[0, :, 0].tolist() == [0, 1, 3, 6]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [65536, 16])
def test_a_documents_features_do_not_depend_on_its_neighbours(kind, max_tokens):
    """transformers#46851: linear-attention state ran on into the next packed document, with no error."""
    target = build(kind, layer_ids=(0, 1, 3))
    target.max_batch_tokens = max_tokens
    sizes = [7, 12, 1, 12, 9]
    ids = torch.randint(1, 60, (1, sum(sizes) + 3))
    packed = target.capture(ids, torch.tensor(sizes))
    at = 0
    for size in sizes:
        alone = target.capture(ids[:, at : at + size])
        layers, last = oracle(target, ids[:, at : at + size])
        for got in (packed.all_hidden_states[:, at : at + size], alone.all_hidden_states):
            torch.testing.assert_close(got, torch.cat([layers[0], layers[1], layers[3]], -1), atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(packed.verifier_last_hidden[:, at : at + size], last, atol=2e-4, rtol=2e-4)
        at += size
    assert not packed.all_hidden_states[:, at:].any() and not packed.verifier_last_hidden[:, at:].any()
    changed = ids.clone()
    changed[0, :7] = 3  # another first document
    torch.testing.assert_close(
        target.capture(changed, torch.tensor(sizes)).all_hidden_states[:, 7:],
        packed.all_hidden_states[:, 7:],
        atol=0,
        rtol=0,
    )


def test_the_isolation_test_would_fail_on_a_plain_packed_forward():
    """The fault itself: one forward over the whole pack changes the second document of a hybrid target."""
    target = build("hybrid", layer_ids=(0, 3))
    ids = torch.randint(1, 60, (1, 20))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        whole = target.decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    right = target.capture(ids, torch.tensor([8, 12]), positions).verifier_last_hidden
    assert (whole[:, :8] - right[:, :8]).abs().max() < 1e-4
    assert (whole[:, 8:] - right[:, 8:]).abs().max() > 1e-2


def test_documents_of_like_length_run_together_within_the_bound():
    sizes = [100, 10, 98, 50, 97, 9, 10]
    groups = group_documents(sizes, 300)
    assert sorted(index for group in groups for index in group) == list(range(7))
    for group in groups:
        longest = max(sizes[index] for index in group)
        assert longest * len(group) <= max(300, longest)
        assert all(sizes[index] >= 0.75 * longest for index in group)
    assert len(groups) == 3
    assert group_documents([500], 300) == [[0]]


def test_bad_packs_are_refused():
    target = build()
    ids = torch.randint(1, 60, (1, 8))
    with pytest.raises(TargetError, match=r"shape \(8,\); wanted \[1, T\]"):
        target.capture(ids[0])
    with pytest.raises(TargetError, match="lengths sum to 9, but the pack has 8"):
        target.capture(ids, torch.tensor([4, 5]))
    with pytest.raises(TargetError, match=r"position_ids\[4\] is 4; wanted 0"):
        target.capture(ids, torch.tensor([4, 4]), torch.arange(8)[None])


def test_rows_that_are_not_one_per_token_are_one_clear_error():
    """verl-SpeCo#99: hidden rows cover one position less than the tokens; pairing them shifts every label."""
    target = build()
    target.decoder.norm.register_forward_hook(lambda module, args, output: output[:, :-1])
    with pytest.raises(TargetError, match=r"hidden states for 7 positions \(layer last\) and was given 8 tokens"):
        target.capture(torch.randint(1, 60, (1, 8)))


def test_captures_of_two_threads_do_not_mix():
    target = build()
    packs = [torch.randint(1, 60, (1, 16)) for _ in range(2)]
    wanted = [target.capture(pack).all_hidden_states for pack in packs]
    wrong = []

    def work(number):
        for _ in range(20):
            if not torch.equal(target.capture(packs[number]).all_hidden_states, wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_close_removes_the_hooks():
    target = build()
    target.close()
    assert not any(layer._forward_hooks for layer in target.decoder.layers)


@pytest.mark.parametrize("kind", KINDS)  # plain norms, and the (1 + w) norm of the hybrid family
def test_self_test_passes_and_our_teacher_logits_are_the_targets(kind):
    target = build(kind)
    with torch.no_grad():
        target.decoder.norm.weight.uniform_(-0.5, 2)  # a norm that does something, whichever form it has
    assert target.self_test() < 1e-3
    ids = torch.randint(1, 60, (1, 11))
    logits = target.capture(ids).verifier_last_hidden @ target.head_weight.T
    with torch.no_grad():
        own = target.model(input_ids=ids).logits
    torch.testing.assert_close(logits.log_softmax(-1), own.log_softmax(-1), atol=1e-4, rtol=1e-4)


def no_norm(target):
    target.capture = lambda ids, *rest: _replaced(target, ids, lambda states: states)


def twice(target):
    target.capture = lambda ids, *rest: _replaced(
        target, ids, lambda states: target.decoder.norm(target.decoder.norm(states))
    )


def plain_scale(target):
    """w where the family scales by 1 + w (Model-Optimizer#1846)."""
    weight = target.decoder.norm.weight
    target.capture = lambda ids, *rest: _replaced(
        target, ids, lambda states: torch.nn.functional.rms_norm(states, (32,), weight, 1e-6)
    )


def soft_cap(target):
    target.model.lm_head.register_forward_hook(lambda module, args, output: 5 * torch.tanh(output / 5))


def leak(target):
    real = Target.capture
    target.capture = lambda ids, *rest: real(target, ids, None)


def nan(target):
    target.decoder.norm.weight.fill_(float("nan"))


def _replaced(target, ids, final):
    from dflash.target.capture import Features

    parts = [oracle(target, part)[0][-1] for part in (ids[:, :8], ids[:, 8:])]
    states = torch.cat(parts, 1)
    return Features(states, final(states))


@pytest.mark.parametrize("fault", [no_norm, twice, plain_scale, soft_cap, leak, nan])
def test_self_test_stops_on(fault):
    target = build("hybrid")
    with torch.no_grad():
        target.decoder.norm.weight.uniform_(0.5, 2)
        fault(target)
        with pytest.raises(TargetError, match="differs from the target's own logits by .* standard deviations"):
            target.self_test()


def test_tied_embeddings_share_one_tensor_and_untied_do_not():
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    tied = Target(LlamaForCausalLM(config), layer_ids=[0])
    assert tied.head_weight.data_ptr() == tied.embed_weight.data_ptr() and tied.self_test() < 1e-3
    assert build().head_weight.data_ptr() != build().embed_weight.data_ptr()


def test_default_layer_ids_are_the_published_spread():
    assert default_layer_ids(64) == [1, 16, 31, 46, 61]
    assert default_layer_ids(36) == [1, 9, 17, 25, 33]
    assert default_layer_ids(30, 1) == [15]
    assert default_layer_ids(4, 4) == [0, 1, 2, 3]
    with pytest.raises(TargetError, match="asked for 5 captured layers of a target with 4"):
        default_layer_ids(4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4], "layer id 4 is out of range: this target has layers 0 to 3"),
        ([-1], "layer id -1 is out of range"),
        ([1, 1], "without repeats"),
        ([], "non-empty"),
        ([1.0], "1.0 is not an integer"),
        ([True], "not an integer"),
    ],
)
def test_bad_layer_ids(ids, message):
    with pytest.raises(TargetError, match=message):
        Target(build().model, layer_ids=ids)


def test_a_model_without_layers_is_named():
    with pytest.raises(TargetError, match=r"'thing' \(Linear\) has no decoder with a list of `layers`"):
        Target(nn.Linear(2, 2), source="thing")


def test_fingerprint_follows_weights_layers_and_dtype():
    marks = [
        build().fingerprint(),
        build(seed=1).fingerprint(),
        build(layer_ids=(0, 1)).fingerprint(),
        build(dtype=torch.bfloat16).fingerprint(),
        build("sliding").fingerprint(),
    ]
    assert len(set(marks)) == 5 and build().fingerprint() == marks[0]


def test_mask_token_choice_and_its_bad_values():
    from chat_tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer()
    size = len(tokenizer)
    assert choose_mask_token_id(tokenizer, size + 10) == size  # a row of the embedding that no token owns
    assert choose_mask_token_id(tokenizer, size) == 5  # not 3 and 4, the marks of a thought
    tokenizer.add_special_tokens({"mask_token": "<|unused|>"})
    assert choose_mask_token_id(tokenizer, size) == 5
    for bad, message in (
        (0, "also the pad token"),
        (2, "also the eos token"),
        (1, "also the bos token"),
        (7, "also the end token 7"),
        (size, f"outside the embedding, which has {size} rows"),
        (-1, "outside the embedding"),
        ("3", "wanted an integer"),
    ):
        with pytest.raises(TargetError, match=message):
            validate_mask_token_id(bad, tokenizer, size, end_ids=[7])
    assert validate_mask_token_id(5, tokenizer, size, [7]) == 5
