"""The loss over the head, chunk by chunk, against dense float64; which rows reach it; what it keeps alive."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.drafter.head_plan import HeadPlan, teacher_spans
from dflash.drafter.losses import chunked_head_loss, peak_bytes
from dflash.drafter.masks import AnchorSet
from dflash.errors import ConfigError


def dense(hidden, head, scale, labels=None, teacher=None):
    """Loss, gradient for hidden, row losses, argmax: written out in float64."""
    x = hidden.double().detach().requires_grad_()
    logits = x @ head.double().T
    if teacher is None:
        rows = F.cross_entropy(logits, labels, reduction="none")
    else:
        log_t = torch.log_softmax(teacher.double() @ head.double().T, -1)
        rows = (log_t.exp() * (log_t - torch.log_softmax(logits, -1))).sum(-1)
    loss = (rows * scale.double()).sum()
    loss.backward()
    return loss.detach(), x.grad, rows.detach(), logits.argmax(-1)


def case(seed, rows=23, hidden=16, vocab=131):
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(rows, hidden, generator=g),
        "head": torch.randn(vocab, hidden, generator=g),
        "scale": torch.rand(rows, generator=g) * (torch.rand(rows, generator=g) > 0.3),
        "labels": torch.randint(0, vocab, (rows,), generator=g),
        "teacher": torch.randn(rows, hidden, generator=g),
    }


def total(got, c):
    return (got.row_loss * c["scale"]).sum()


@pytest.mark.parametrize("chunk_rows", [1, 5, 23, 64])  # 5 does not divide 23
@pytest.mark.parametrize("soft", [False, True])
def test_chunked_equals_dense(chunk_rows, soft):
    c = case(chunk_rows + soft)
    hidden = c["hidden"].clone().requires_grad_()
    kind = {"teacher_hidden": c["teacher"]} if soft else {"labels": c["labels"]}
    got = chunked_head_loss(hidden, c["head"], chunk_rows=chunk_rows, **kind)
    got_loss = total(got, c)
    (3 * got_loss).backward()
    loss, grad, rows, argmax = dense(
        c["hidden"], c["head"], c["scale"], **({"teacher": c["teacher"]} if soft else {"labels": c["labels"]})
    )
    torch.testing.assert_close(got_loss.detach().double(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.row_loss.detach().double(), rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), 3 * grad, rtol=1e-5, atol=5e-6)
    assert torch.equal(got.prediction, argmax)


def test_rows_of_weight_zero_get_no_gradient():
    c = case(3)
    hidden = c["hidden"].clone().requires_grad_()
    total(chunked_head_loss(hidden, c["head"], labels=c["labels"], chunk_rows=4), c).backward()
    silent = c["scale"] == 0
    assert silent.any() and (hidden.grad[silent] == 0).all() and (hidden.grad[~silent] != 0).any(-1).all()


def test_a_draft_vocabulary_is_a_smaller_head():
    c = case(4)
    kept = torch.tensor([130, 3, 77, 12, 9])
    hidden = c["hidden"].clone().requires_grad_()
    got = chunked_head_loss(hidden, c["head"][kept], teacher_hidden=c["teacher"], chunk_rows=7)
    got_loss = total(got, c)
    got_loss.backward()
    loss, grad, _, argmax = dense(c["hidden"], c["head"][kept], c["scale"], teacher=c["teacher"])
    torch.testing.assert_close(got_loss.detach().double(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.prediction, argmax) and got.prediction.max() < 5


def test_shared_teacher_rows_equal_their_copies():
    c = case(5)
    index = torch.randint(0, 6, (23,), generator=torch.Generator().manual_seed(5))
    results = []
    for extra in ({"teacher_hidden": c["teacher"][:6], "teacher_rows": index}, {"teacher_hidden": c["teacher"][index]}):
        hidden = c["hidden"].clone().requires_grad_()
        loss = total(chunked_head_loss(hidden, c["head"], chunk_rows=10, **extra), c)
        loss.backward()
        results.append((loss, hidden.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_labels_or_teacher_but_not_both():
    c = case(6)
    for kind in ({}, {"labels": c["labels"], "teacher_hidden": c["teacher"]}):
        with pytest.raises(ConfigError, match="exactly one"):
            chunked_head_loss(c["hidden"], c["head"], **kind)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("soft", [False, True])
def test_logits_of_all_rows_never_exist(soft):
    c = case(7, rows=64, hidden=4, vocab=500)
    hidden = c["hidden"].clone().requires_grad_()
    kind = {"teacher_hidden": c["teacher"]} if soft else {"labels": c["labels"]}
    with _Largest() as seen:
        total(chunked_head_loss(hidden, c["head"], chunk_rows=8, **kind), c).backward()
    assert seen.elements == 8 * 500  # a chunk's logits, an eighth of all


def test_peak_at_full_size_is_below_the_bound():
    rows, vocab, chunk = 512 * 15, 248320, 1024  # 512 anchors of 16 slots
    everything = rows * vocab * 2  # one [rows, V] tensor in bfloat16: 3.8 GB
    assert peak_bytes(rows, vocab, chunk, 2, teachers=chunk, fused=True) == 2 * chunk * vocab * 2 < everything / 3
    assert peak_bytes(rows, vocab, chunk, 2, teachers=chunk, fused=False) == chunk * vocab * 16 < 4.1e9
    assert peak_bytes(100, vocab, chunk, 2, teachers=0, fused=True) == 100 * vocab * 2  # no more rows than there are


@pytest.mark.gpu
@pytest.mark.parametrize("soft", [True, False])
def test_memory_on_the_device_stays_within_the_bound(soft):
    rows, hidden, vocab, chunk = 8192, 512, 100_000, 1024
    states = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16)
    kind = (
        {"teacher_hidden": torch.randn_like(states)}
        if soft
        else {"labels": torch.zeros(rows, dtype=torch.int64, device="cuda")}
    )
    scale = torch.full((rows,), 1 / rows, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (chunked_head_loss(states, head, chunk_rows=chunk, **kind).row_loss * scale).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 3 * states.nbytes  # the saved one, the scaled one, the leaf's
    assert peak < peak_bytes(rows, vocab, chunk, 2, teachers=chunk * soft, fused=True) + gradients + 2**24 < rows * vocab * 2


def plan_case():
    """Two documents of 9 and 8 positions in a row of 20; one padding anchor."""
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[2, 3, 4, 5, 6, 8, 11, 12, 14, 15, 16, 18]] = True
    anchors = AnchorSet(torch.tensor([2, 3, 5, 12, 0]), torch.tensor([True, True, True, True, False]))
    return anchors, mask, torch.tensor([9, 8]), 5


def test_head_plan_by_hand():
    anchors, mask, lengths, size = plan_case()
    plan = HeadPlan.make(anchors, mask, lengths, size)
    wanted = []  # (block, slot): the label is in the anchor's document, supervised, and the anchor is real
    for block, (anchor, valid) in enumerate(zip(anchors.positions.tolist(), anchors.valid.tolist(), strict=True)):
        for slot in range(1, size):
            end = 9 if anchor < 9 else 17
            if valid and anchor + slot < end and mask[anchor + slot]:
                wanted.append((block, slot))
    assert plan.query.tolist() == [block * size + slot for block, slot in wanted]
    assert plan.slot.tolist() == [block * (size - 1) + slot - 1 for block, slot in wanted]
    assert plan.label_at.tolist() == [int(anchors.positions[block]) + slot for block, slot in wanted]
    assert plan.teacher_at.tolist() == sorted({at - 1 for at in plan.label_at.tolist()})
    assert torch.equal(plan.teacher_at[plan.teacher_row], plan.label_at - 1)
    assert len(plan.teacher_at) < len(plan.label_at)  # blocks at 2, 3 and 5 overlap
    assert plan.supervised.sum() == len(wanted) and not plan.supervised[-1].any()


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_teacher_spans_cover_their_chunks(chunk_rows):
    plan = HeadPlan.make(*plan_case())
    spans = teacher_spans(plan.teacher_row, chunk_rows)
    assert len(spans) == math.ceil(len(plan.teacher_row) / chunk_rows)
    for chunk, (first, last) in enumerate(spans):
        rows = plan.teacher_row[chunk * chunk_rows : (chunk + 1) * chunk_rows].tolist()
        assert first == min(rows) and last == max(rows) + 1
