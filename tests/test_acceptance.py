"""The teacher-forced walk gives what the decoder gives, and batched drafts are the decoder's drafts."""

import types

import pytest
import torch
from tiny_models import SECOND, random_drafter, tiny_target

from dflash.evaluate.acceptance import (
    draft_hidden,
    evaluate_acceptance,
    predict,
    response_spans,
    summarize,
    walk,
    walk_packs,
)
from dflash.evaluate.decoding import plain_generate, speculative_generate
from dflash.evaluate.samples import replayed_answer

PROMPTS = [[3, 17, 5, 42], [8, 11, 29, 33, 2, 50], [7, 7, 9]]


def make_pack(target, prompts=PROMPTS, count=24, padding=3):
    """Greedy answers of the target, packed; with the features of training capture."""
    texts = [plain_generate(target, prompt, count + i, eos_token_ids=[]).tokens for i, prompt in enumerate(prompts)]
    ids, mask, positions, lengths = [], [], [], []
    for prompt, text in zip(prompts, texts, strict=True):
        ids += prompt + text
        mask += [False] * len(prompt) + [True] * len(text)
        positions += range(len(prompt) + len(text))
        lengths.append(len(prompt) + len(text))
    pack = types.SimpleNamespace(
        input_ids=torch.tensor(ids + [0] * padding),
        loss_mask=torch.tensor(mask + [False] * padding),
        pack_id=4,
        position_ids=torch.tensor([*positions, *range(padding)]),
        lengths=torch.tensor(lengths),
    )
    features = target.capture(pack.input_ids[None], pack.lengths)
    return pack, texts, types.SimpleNamespace(get=lambda asked: features if asked is pack else None)


def agreeing_drafter(target, block_size, **options):
    """A random drafter bent towards the target's own head, so that some drafts stand."""
    drafter = random_drafter(target, block_size, **options)
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], 1))
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight *= 4
            for part in (layer.attention_conv, layer.mlp_conv) if drafter.config.has_convolution else ():
                part.reset_parameters()
                part.base_kernel.add_(0.03 * torch.randn_like(part.base_kernel))
                part.kernel_projection.weight.normal_(std=0.01)
    return drafter


@pytest.mark.parametrize("options", [{}, {"sliding_window": (None, 5)}, {"draft_ids": list(range(0, 60, 2))}, SECOND])
def test_walk_equals_decoding(options):
    target = tiny_target()
    pack, texts, source = make_pack(target)
    drafter = agreeing_drafter(target, 4, **options)
    walks = walk_packs(drafter, source, [pack])
    assert [number for number, _ in walks] == [4, 4, 4]
    stood = 0
    for (_, found), prompt, text in zip(walks, PROMPTS, texts, strict=True):
        decoded = speculative_generate(target, drafter, prompt, len(text), eos_token_ids=[])
        assert decoded.tokens == text
        assert found.gains == [len(chunk) for chunk in decoded.chunks[1:]]
        assert [min(run, gain - 1) for run, gain in zip(found.runs, found.gains, strict=True)] == decoded.accepted
        assert sum(found.gains) == len(text) - 1
        stood += sum(found.runs)
    if "draft_ids" not in options:
        assert stood > 0  # otherwise the comparison shows little
    summary = evaluate_acceptance(drafter, source, [pack])
    calls = sum(len(found.gains) for _, found in walks)
    assert summary["blocks"] == calls == sum(summary["histogram"])
    assert summary["acceptance_length"] == sum(len(text) - 1 for text in texts) / calls


def test_a_sample_is_what_the_decoder_writes_for_the_first_prompt():
    target = tiny_target()
    pack, texts, source = make_pack(target)
    drafter = agreeing_drafter(target, 4)
    sample = replayed_answer(drafter, source, pack, None)
    decoded = speculative_generate(target, drafter, PROMPTS[0], len(texts[0]), eos_token_ids=[])
    assert sample["prompt"] == " ".join(map(str, PROMPTS[0]))
    assert [chunk["text"] for chunk in sample["chunks"]] == [" ".join(map(str, chunk)) for chunk in decoded.chunks]
    assert [chunk["tokens"] for chunk in sample["chunks"]] == [len(chunk) for chunk in decoded.chunks]
    assert sample["acceptance_length"] == decoded.acceptance_length
    pack.loss_mask[:] = False
    assert replayed_answer(drafter, source, pack, None) is None


def test_batched_drafts_are_the_training_forward_and_the_decoders():
    from dflash.drafter.masks import AnchorSet

    target = tiny_target()
    pack, _, source = make_pack(target)
    drafter = random_drafter(target, 4, sliding_window=(3, None))
    features = source.get(pack).all_hidden_states
    begin, size = int(pack.lengths[0]), int(pack.lengths[1])
    anchors = torch.tensor([1, 6, 7, size - 1])
    context = drafter.new_context()
    drafter.extend(context, features[:, begin : begin + size])
    ids = pack.input_ids[begin : begin + size]
    ours = draft_hidden(drafter, context, ids[anchors], anchors)
    with torch.no_grad():
        places = AnchorSet(anchors + begin, torch.ones(4, dtype=torch.bool))
        trained = drafter.draft(*drafter.pack_inputs(features, pack.input_ids, pack.position_ids, places, pack.lengths))
    torch.testing.assert_close(ours, trained, atol=1e-5, rtol=1e-5)
    for row, anchor in enumerate(anchors.tolist()):
        context = drafter.new_context()
        drafter.extend(context, features[:, begin : begin + anchor])
        logits = drafter.propose(context, int(ids[anchor]))
        torch.testing.assert_close(ours[row, 1:] @ drafter.lm_head.T, logits, atol=1e-4, rtol=1e-5)
        assert torch.equal(predict(drafter, ours[row, 1:]), logits.argmax(-1))


def test_a_selectors_record_tells_which_part_works():
    target = tiny_target()
    pack, _, source = make_pack(target)
    drafter = agreeing_drafter(target, 4, **SECOND)
    record = evaluate_acceptance(drafter, source, [pack])
    assert record["oracle_length"] > max(record["acceptance_length"], record["argmax_length"]) > 1
    assert record["oracle_by_slot"] == sorted(record["oracle_by_slot"], reverse=True)
    with torch.no_grad():
        drafter.candidate_selector.successor_codebook.zero_()
    plain = evaluate_acceptance(drafter, source, [pack])
    assert plain["acceptance_length"] == plain["argmax_length"] == record["argmax_length"]
    assert "oracle_length" not in evaluate_acceptance(agreeing_drafter(target, 4), source, [pack])


def test_spans():
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    spans = [(s.document, s.start, s.end) for s in response_spans(mask, torch.tensor([6, 3]))]
    assert spans == [(0, 1, 3), (0, 4, 6), (6, 6, 8)]  # a response does not run on into the next document


def test_walk_by_hand():
    #        a0 a1 a2 a3 a4 a5 a6     text of 8 tokens: 7 to be gained after the first
    found = walk([2, 9, 9, 0, 3, 9, 9], 0, 8)
    assert found.anchors == [0, 3, 4] and found.runs == [2, 0, 3] and found.gains == [3, 1, 3]
    summary = summarize(found.runs, found.gains, 4)
    assert summary["acceptance_length"] == 7 / 3 and summary["histogram"] == [1, 0, 2, 0]
    assert summary["acceptance_by_slot"] == [2 / 3, 2 / 3, 1 / 3]
    assert summarize([], [], 3) == {
        "acceptance_length": None,
        "acceptance_by_slot": [0.0, 0.0],
        "histogram": [0, 0, 0],
        "blocks": 0,
        "tokens": 0,
    }


def test_max_positions_and_mode():
    target = tiny_target()
    pack, _, source = make_pack(target)
    drafter = random_drafter(target, 4).train()
    assert len(walk_packs(drafter, source, [pack], max_positions=1)) == 1
    assert len(walk_packs(drafter, source, [pack], max_positions=24)) == 2
    assert drafter.training
