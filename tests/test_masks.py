"""The visibility rule against plain loops written from the design's words."""

import math

import pytest
import torch

from dflash.drafter.attention import AttentionMask, DenseAttentionTooLarge, attention, check_dense_bytes
from dflash.drafter.masks import AnchorSet, block_supervision, document_ids, eligible_anchors, sample_anchors
from dflash.errors import ConfigError


def oracle(anchors, valid, lengths, total, block_size, window=None):
    """Allowed (query, key) pairs, one `if` per sentence of the rule."""
    document = []
    for i, n in enumerate(lengths):
        document += [i] * n
    document += [-1] * (total - len(document))
    queries = len(anchors) * block_size
    allowed = [[False] * (total + queries) for _ in range(queries)]
    for q in range(queries):
        block, anchor = q // block_size, anchors[q // block_size]
        for key in range(total + queries):
            if key >= total:
                allowed[q][key] = (key - total) // block_size == block
            elif valid[block] and key < anchor and document[key] == document[anchor]:
                allowed[q][key] = window is None or key >= anchor - window
    return torch.tensor(allowed)


@pytest.mark.parametrize("window", [None, 3])
def test_dense_mask_equals_the_rule(window):
    lengths, total, block = [7, 1, 9], 20, 3
    positions, valid = [2, 3, 7, 8, 11, 12, 0], [True] * 6 + [False]  # overlapping blocks, a boundary, a padding anchor
    anchors = AnchorSet(torch.tensor(positions), torch.tensor(valid))
    documents = document_ids(torch.tensor(lengths), total)
    mask = AttentionMask(anchors, documents, block, window).dense
    assert torch.equal(mask, oracle(positions, valid, lengths, total, block, window))
    assert mask.any(-1).all(), "no row may be fully masked"


def test_document_ids_mark_the_padding():
    assert document_ids(torch.tensor([2, 3]), 7).tolist() == [0, 0, 1, 1, 1, -1, -1]


def test_supervision_stops_at_the_document_end_and_outside_the_loss_mask():
    lengths, total = torch.tensor([5, 5]), 10
    loss_mask = torch.ones(total, dtype=torch.bool)
    loss_mask[2] = False
    anchors = AnchorSet(torch.tensor([1, 4, 8, 0]), torch.tensor([True, True, True, False]))
    got = block_supervision(anchors, loss_mask, document_ids(lengths, total), 4)
    assert got.int().tolist() == [
        [0, 0, 1, 1],  # position 2 is not supervised
        [0, 0, 0, 0],  # the next document's first token is supervised, and must not count
        [0, 1, 0, 0],  # 9 is the last position of the pack
        [0, 0, 0, 0],  # padding anchor
    ]


def test_eligible_anchors_need_a_supervised_slot():
    loss_mask = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    documents = document_ids(torch.tensor([5, 3]), 8)
    assert eligible_anchors(loss_mask, documents, 3).int().tolist() == [0, 1, 0, 1, 0, 1, 0, 0]


def test_eligible_anchors_are_those_whose_block_trains_something():
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(300):
        total, block_size = draw(1, 60), draw(1, 9)
        loss_mask = torch.rand(total, generator=generator) < draw(0, 11) / 10
        lengths = torch.tensor([draw(0, total // 3 + 1) for _ in range(3)])  # an empty document, and a tail, may be there
        documents = document_ids(lengths, total)
        everywhere = AnchorSet(torch.arange(total), loss_mask & (documents >= 0))
        wanted = block_supervision(everywhere, loss_mask, documents, block_size).any(-1)
        assert torch.equal(eligible_anchors(loss_mask, documents, block_size), wanted)


def test_sampled_anchors_are_sorted_distinct_seeded_and_padded():
    loss_mask = torch.ones(50, dtype=torch.bool)
    lengths = torch.tensor([50])
    draw = [sample_anchors(loss_mask, lengths, 4, 10, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(draw[0].positions, draw[1].positions)
    positions = draw[0].positions.tolist()
    assert positions == sorted(set(positions)) and draw[0].valid.all()
    few = sample_anchors(loss_mask[:6], torch.tensor([6]), 4, 10, torch.Generator().manual_seed(3))
    assert few.positions.shape == few.valid.shape == (10,)
    assert few.valid.sum() == 5  # the last position has no slot after it
    assert few.positions[:5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("supervised", [0, 1, 2])
def test_one_or_no_eligible_anchor_is_no_error(supervised):
    loss_mask = torch.zeros(12, dtype=torch.bool)
    loss_mask[12 - supervised :] = True  # an answer at the very tail, shorter than a block
    anchors = sample_anchors(loss_mask, torch.tensor([12]), 8, 4, torch.Generator().manual_seed(0))
    assert int(anchors.valid.sum()) == max(0, supervised - 1)


def test_sampler_is_uniform():
    eligible, wanted, draws = 700, 512, 2000
    loss_mask = torch.zeros(720, dtype=torch.bool)
    loss_mask[10 : 10 + eligible + 1] = True  # the last supervised position cannot start a block
    generator = torch.Generator().manual_seed(7)
    counts = torch.zeros(720)
    for _ in range(draws):
        anchors = sample_anchors(loss_mask, torch.tensor([720]), 8, wanted, generator)
        assert anchors.positions.unique().numel() == wanted
        counts[anchors.positions] += 1
    p = wanted / eligible
    sigma = math.sqrt(draws * p * (1 - p))
    assert ((counts[10 : 10 + eligible] - draws * p).abs() <= 4.5 * sigma).all()
    assert counts[:10].sum() == 0 and counts[10 + eligible :].sum() == 0


@pytest.mark.parametrize("window", [None, 5])
def test_chunked_attention_equals_dense_in_float64(window):
    generator = torch.Generator().manual_seed(0)
    lengths, total, block = torch.tensor([13, 20, 9]), 48, 4
    loss_mask = torch.ones(total, dtype=torch.bool)
    anchors = sample_anchors(loss_mask, lengths, block, 40, generator)  # two and a half chunks, some padding
    mask = AttentionMask(anchors, document_ids(lengths, total), block, window)
    shape = (1, 2, total + mask.queries, 8)
    q = torch.randn(1, 4, mask.queries, 8, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(8)
    allowed = oracle(anchors.positions.tolist(), anchors.valid.tolist(), lengths.tolist(), total, block, window)
    wanted = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    for backend in ("sdpa", "sdpa_chunked"):
        torch.testing.assert_close(attention(q, k, v, mask, backend), wanted, rtol=1e-10, atol=1e-10)


def test_dense_attention_refuses_above_its_bound():
    with pytest.raises(DenseAttentionTooLarge, match=r"32768 queries x 72768 keys x 32 heads needs 144\.\d+ GiB"):
        check_dense_bytes(32, 32768, 72768, 2, 2 << 30)
    anchors = AnchorSet(torch.tensor([1]), torch.tensor([True]))
    mask = AttentionMask(anchors, document_ids(torch.tensor([4]), 4), 2)
    x = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    with pytest.raises(DenseAttentionTooLarge, match="max_dense_bytes"):
        attention(*x, mask, "sdpa", max_dense_bytes=10)
    with pytest.raises(ConfigError, match="unknown attention backend 'dense'"):
        attention(*x, mask, "dense")
