"""Packs hold whole documents, lose nothing and come out the same every time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from dflash.data import Conversation, make_packs, split_held_out
from dflash.errors import DataError


def conversation(length, prompt=2, start=10, index=0):
    return Conversation([start + at for at in range(length)], [at >= prompt for at in range(length)], index)


def many(count=60, seed=0):
    rng = random.Random(seed)
    return [conversation(rng.randint(4, 40), start=1000 * index, index=index) for index in range(count)]


def documents(packs):
    """Every document of every pack, by plain slicing: (ids, mask, positions)."""
    for pack in packs:
        at = 0
        for size in pack.lengths.tolist():
            yield (
                tuple(pack.input_ids[at : at + size].tolist()),
                tuple(pack.loss_mask[at : at + size].tolist()),
                pack.position_ids[at : at + size].tolist(),
            )
            at += size


@pytest.mark.parametrize("order", ["best_fit", "in_order"])
def test_every_document_is_there_once_whole_and_counted_from_zero(order):
    items = many()
    packs = make_packs(items, 64, order=order, pad_token_id=3)
    found = list(documents(packs))
    assert Counter(ids for ids, _, _ in found) == Counter(tuple(item.input_ids) for item in items)
    assert {ids: mask for ids, mask, _ in found} == {tuple(item.input_ids): tuple(item.loss_mask) for item in items}
    assert all(positions == list(range(len(ids))) for ids, _, positions in found)
    for number, pack in enumerate(packs):
        used = pack.num_tokens
        assert pack.pack_id == number and len(pack.input_ids) == 64 and used <= 64
        assert pack.input_ids[used:].eq(3).all() and not pack.loss_mask[used:].any()
        assert pack.position_ids[used:].tolist() == list(range(64 - used))
        assert pack.input_ids.dtype == pack.lengths.dtype == torch.int64 and pack.loss_mask.dtype == torch.bool
    if order == "best_fit":
        assert sum(pack.num_tokens for pack in packs) / (64 * len(packs)) > 0.9


def test_same_input_same_packs_and_a_seed_shuffles_them():
    def flat(**options):
        return [pack.input_ids.tolist() for pack in make_packs(many(), 64, **options)]

    assert flat() == flat() and flat(seed=1) == flat(seed=1)
    assert flat(seed=1) != flat() and sorted(flat(seed=1)) == sorted(flat())
    assert flat(order="in_order", seed=1) != flat(order="in_order")


def test_too_long_is_cut_to_a_pack_and_left_out_when_nothing_supervised_remains():
    packs = make_packs([conversation(50, start=100), conversation(50, prompt=40, start=500)], 32)
    assert len(packs) == 1 and packs[0].lengths.tolist() == [32]
    with pytest.raises(DataError, match="no conversation with a supervised token"):
        make_packs([conversation(50, prompt=40)], 32)
    with pytest.raises(DataError, match="pack_length is 1"):
        make_packs(many(), 1)
    with pytest.raises(DataError, match="order 'worst'"):
        make_packs(many(), 32, order="worst")


def test_no_prompt_is_on_both_sides_and_more_data_moves_none():
    def chats(prompts):
        return [
            Conversation([5, prompt, 7, reply, reply], [False, False, False, True, True])
            for prompt in range(prompts)
            for reply in (1, 2)
        ]

    train, held = split_held_out(chats(200), 0.2)
    sides = [{item.input_ids[1] for item in part} for part in (train, held)]
    assert not sides[0] & sides[1] and len(train) + len(held) == 400
    assert 0.1 < len(held) / 400 < 0.3
    assert all(count == 2 for count in Counter(item.input_ids[1] for item in held).values())
    _, more = split_held_out(chats(300), 0.2)
    assert sides[1] == {item.input_ids[1] for item in more if item.input_ids[1] < 200}
    assert split_held_out(chats(200), 0.2, seed=1)[1] != held


def test_small_splits_leave_no_side_empty():
    two = [conversation(6, start=10), conversation(6, start=99)]
    for share in (0.01, 0.99):
        assert [len(part) for part in split_held_out(two, share)] == [1, 1]
    assert split_held_out(two, 0) == (two, [])
    with pytest.raises(DataError, match="1 distinct prompts cannot be split"):
        split_held_out([two[0]] * 3, 0.5)
    with pytest.raises(DataError, match="share is 1.5"):
        split_held_out(two, 1.5)


def test_one_valid_anchor_is_kept_and_none_is_skipped(tmp_path):
    """SpecForge#571: one usable anchor, or an answer at the very end, aborted the run."""
    import json

    from dflash.data import load_conversations

    rows = [{"input_ids": [9] * 8, "loss_mask": [0] * 6 + [1, 1]}, {"input_ids": [9] * 8, "loss_mask": [0] * 7 + [1]}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations, report = load_conversations(path, None, 16, block_size=4)
    assert [item.source_index for item in conversations] == [0]
    assert report.skipped == {"answer too short for a block": 1} and report.short_answers == 1
