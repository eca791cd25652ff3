"""The Triton kernels against plain torch in float64: on a GPU, or anywhere in Triton's interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/test_kernels.py

The variable has to be set before Triton is imported (and, with Triton 3.6, numpy be older than 2.2).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from dense_losses import dense_rows

from dflash.bench.shapes import StepShape
from dflash.bench.workload import make_drafter, make_head, make_inputs
from dflash.drafter.attention import AttentionMask, attention
from dflash.drafter.losses import LOSSES
from dflash.drafter.masks import AnchorSet, document_ids, sample_anchors
from dflash.target.capture import Target

pytestmark = [
    pytest.mark.gpu(interpreter=True),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
TINY = StepShape(
    tokens=48,
    anchors=10,
    block=4,
    captured=2,
    document=16,
    supervised=0.7,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=300,
)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("vocab", [100, 4096, 9001])  # below, equal to and not a multiple of a tile
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_loss(device, vocab, dtype):
    from dflash.drafter.kernels.head_loss import hard_loss_, soft_loss_

    torch.manual_seed(vocab)
    x, y = (3 * torch.randn(5, vocab, device=device)).to(dtype), (3 * torch.randn(3, vocab, device=device)).to(dtype)
    x[0, 7] = x[0, vocab - 1] = 30  # a tie: the first index wins
    rows = torch.tensor([2, 0, 1, 1, 0], device=device)
    labels = torch.randint(0, vocab, (5,), device=device)
    exact = x.double().requires_grad_()
    log_t = y.double()[rows].log_softmax(-1)
    limit = 1e-5 if dtype == torch.float32 else 6e-3
    for loss_fn in (*LOSSES, None):
        logits, loss = x.clone(), torch.full((5,), float("nan"), device=device)
        best = torch.full((5,), -1, device=device)
        if loss_fn is not None:
            soft_loss_(logits, y, rows + 4, loss, best, loss_fn=loss_fn, first_teacher=4)
            wanted = dense_rows(exact.log_softmax(-1), log_t, loss_fn)
        else:
            hard_loss_(logits, labels, loss, best)
            wanted = F.cross_entropy(exact, labels, reduction="none")
        grad = torch.autograd.grad(wanted.sum(), exact)[0]
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        assert relative(logits, grad) < limit, loss_fn
        assert torch.equal(best, x.float().argmax(-1)) and best[0] == 7


@pytest.mark.parametrize("block, heads, kv_heads, window", [(32, 4, 1, None), (8, 4, 2, None), (8, 8, 2, 11)])
def test_block_attention(device, block, heads, kv_heads, window):
    torch.manual_seed(block + heads)
    total, lengths = 150, torch.tensor([40, 7, 61, 30])
    mask = torch.rand(total) > 0.3
    anchors = sample_anchors(mask, lengths, block, 7)
    anchors = AnchorSet(anchors.positions.clone(), anchors.valid.clone())
    anchors.positions[-1], anchors.valid[-1] = 0, False
    view = AttentionMask(anchors.to(device), document_ids(lengths, total).to(device), block, window)
    q, grad = torch.randn(2, 1, 7 * block, heads, 16, device=device).transpose(2, 3).unbind()
    k, v = torch.randn(2, 1, total + 7 * block, kv_heads, 16, device=device).transpose(2, 3).unbind()
    results = []
    for backend, dtype in (("triton", torch.float32), ("sdpa", torch.float64)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, view, backend)
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
    for ours, exact in zip(*results, strict=True):
        assert relative(ours, exact) < 1e-5


def test_smaller_tiles_where_shared_memory_is_small(device, monkeypatch):
    from triton.runtime.errors import OutOfResources

    from dflash.compile_safety.errors import UnsupportedHeadDimError
    from dflash.drafter.kernels import attention as kernel

    monkeypatch.setattr(kernel, "_fitting", {})
    q, tried = torch.zeros(1, 4, 8, 16), []

    def run(settings, largest=32):
        tried.append(settings)
        if settings[0] > largest:
            raise OutOfResources(294912, 232448, "shared memory")

    kernel._launch("dq", q, run)
    assert tried == [kernel.CONFIG["dq"], (64, 8, 2), (32, 8, 2)]
    kernel._launch("dq", q, run)
    assert tried[3:] == [(32, 8, 2)]
    with pytest.raises(UnsupportedHeadDimError, match="head_dim 16.*'flex'"):
        kernel._launch("forward", q, lambda settings: run(settings, 0))
    keys = []
    with pytest.raises(UnsupportedHeadDimError):
        kernel._launch("dkv", q, lambda settings: (keys.append(settings[0]), run(settings, 0)))
    assert set(keys) == {kernel.CONFIG["dkv"][0]}  # fixed by the ranges


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("width, size", [(48, 16), (60, 12)])  # 12: groups that fill no power of two
def test_local_convolution(device, taps, width, size):
    from dflash.drafter.convolution import local_convolution
    from dflash.drafter.kernels.convolution import convolve, convolve_backward

    torch.manual_seed(taps)
    rows, block, groups = 3 * 4, 4, width // size
    z, dout = torch.randn(2, rows, width, device=device).unbind()
    base, both = torch.randn(taps, width, device=device), torch.randn(rows, 2 * taps * groups, device=device)
    delta = both[:, taps * groups :]  # a view with the row stride of both sides
    exact = [x.double().requires_grad_() for x in (z, base, delta)]
    wanted = local_convolution(*exact[:2], exact[2].view(rows, taps, groups), block)
    torch.testing.assert_close(convolve(z, base, delta, block).double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    ddelta = torch.full_like(both, float("nan"))[:, taps * groups :]
    got = *convolve_backward(z, base, delta, dout, ddelta, block), ddelta
    for ours, theirs in zip(got, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    "soft, kind",
    [*((soft, kind) for soft in (True, False) for kind in ("dflash", "dflash2")), (True, "convolution"), (True, "selector")],
)
def test_fast_path_is_the_plain_path(device, soft, kind):
    results = []
    for fast in (False, True):
        torch.manual_seed(0)
        drafter = make_drafter(
            replace(TINY, kind=kind),
            make_head(TINY, device, torch.float32),
            device,
            torch.float32,
            fast_path=fast,
            attention_backend="triton" if fast else "sdpa",
            loss_chunk_rows=7,
        )
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        inputs = make_inputs(TINY, device, torch.float32)
        loss, metrics = drafter(**inputs.arguments, use_soft_labels=soft)
        loss.backward()
        results.append((loss, metrics, {n: p.grad for n, p in drafter.named_parameters()}))
    (plain, metrics, grads), (fast, fast_metrics, fast_grads) = results
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        assert relative(fast_grads[name], grad) < 1e-4, name
    for name in ("correct_by_slot", "supervised_by_slot", "accepted_by_slot", "blocks", "accepted"):
        assert torch.equal(metrics[name], fast_metrics[name])


@pytest.mark.parametrize("soft", [True, False])
def test_the_fused_loss_through_a_float8_head(device, soft):
    """Against the plain loss through the same quantized head (whose logits are `test_fp8_head`'s); bfloat16 on a GPU."""
    from dflash.drafter.fp8_head import Fp8Head, obstacle
    from dflash.drafter.losses import chunked_head_loss

    if obstacle(device):
        pytest.skip(obstacle(device))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    table = (0.3 * torch.randn(299, 64, device=device)).to(dtype)  # padded to 304 columns, read with their stride
    states, teacher = torch.randn(2, 23, 64, device=device).to(dtype).unbind()
    kind = {"teacher_hidden": teacher} if soft else {"labels": torch.randint(0, 299, (23,), device=device)}
    results = []
    for fused in (False, True):
        leaf = states.clone().requires_grad_()
        got = chunked_head_loss(leaf, table, chunk_rows=7, fused=fused, head_fp8=Fp8Head.of(table), **kind)
        (got.row_loss * torch.linspace(0, 1, 23, device=device)).sum().backward()
        results.append((got, leaf.grad))
    (plain, grad), (fused, fused_grad) = results
    limit = 1e-5 if dtype == torch.float32 else 6e-3
    assert relative(fused.row_loss.detach(), plain.row_loss.detach()) < 1e-5 and relative(fused_grad, grad) < limit
    assert torch.equal(fused.prediction, plain.prediction)


def test_the_fast_path_refuses_a_second_backward(device):
    drafter = make_drafter(
        TINY, make_head(TINY, device, torch.float32), device, torch.float32, fast_path=True, attention_backend="sdpa"
    )
    loss, _ = drafter(**make_inputs(TINY, device, torch.float32).arguments)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_fast_capture_is_the_plain_capture(device):
    from dflash.target import fast_capture as fast_target
    from dflash.target.capture import load_target

    target = load_target("random:tiny-hybrid@4", device, torch.float32, layer_ids=[0, 2], fast=False)
    ids, lengths = torch.randint(0, 300, (1, 40)), torch.tensor([13, 20])
    plain = target.capture(ids, lengths)
    assert fast_target.attach(target, required=True)
    fast = target.capture(ids, lengths)
    for name in ("all_hidden_states", "verifier_last_hidden"):
        assert relative(getattr(fast, name), getattr(plain, name)) < 1e-4
        assert (getattr(fast, name)[:, 33:] == 0).all()  # the padding tail
    short = target.capture(ids, lengths, last_hidden=False)
    assert torch.equal(short.all_hidden_states, fast.all_hidden_states) and short.verifier_last_hidden is None


def dense_target(kind, device, dtype, layers=3, **changes):
    """Llama (no biases, no head norms), Qwen2 (biases) or Qwen3 (head norms), with weights that are not the initial ones."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        **dict(
            vocab_size=300,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        | changes
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Target(model.to(device, dtype), layer_ids=[0, 1])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Llama", {}), ("Qwen2", {"head_dim": 8}), ("Qwen3", {}), ("Llama", {"attention_bias": True, "mlp_bias": True})],
)
def test_fast_capture_of_a_dense_target_is_the_plain_capture(device, kind, changes):
    from dflash.target import fast_capture as fast_target

    limit = 1e-5 if device.type == "cpu" else 5e-5
    target = dense_target(kind, device, torch.float32, **changes)
    ids, lengths = torch.randint(0, 300, (1, 90)), torch.tensor([13, 50, 1, 20])
    plain = target.capture(ids, lengths)
    assert fast_target.attach(target, required=True) and target.fast.varlen is None
    fast = target.capture(ids, lengths)
    for name in ("all_hidden_states", "verifier_last_hidden"):
        assert relative(getattr(fast, name), getattr(plain, name)) < limit
        assert (getattr(fast, name)[:, 84:] == 0).all()  # the padding tail
    short = target.capture(ids, lengths, last_hidden=False)
    assert torch.equal(short.all_hidden_states, fast.all_hidden_states) and short.verifier_last_hidden is None
    alone = target.capture(ids[:, 13:63])
    assert relative(alone.all_hidden_states, fast.all_hidden_states[:, 13:63]) < limit


@pytest.mark.parametrize("wrong", ["rotary", "borders", "nan"])
def test_a_wrong_fast_forward_is_not_attached(device, monkeypatch, wrong):
    from dflash.errors import TargetError
    from dflash.target import fast_capture as fast_target
    from dflash.target import kernels as target_ops

    target = dense_target("Llama", device, torch.float32, layers=2)
    right, attention = target_ops.norm_partial_rotary, fast_target.packed_attention
    if wrong == "borders":  # every document sees those before it
        monkeypatch.setattr(
            fast_target,
            "packed_attention",
            lambda q, k, v, documents, *rest: attention(q, k, v, documents._replace(sizes=[len(q)]), *rest),
        )
    else:
        turn = -1.0 if wrong == "rotary" else float("nan")
        monkeypatch.setattr(
            target_ops, "norm_partial_rotary", lambda x, w, cos, sin, eps: right(x, w, cos + 0.1, turn * sin, eps)
        )
    with pytest.raises(TargetError, match="differ from the plain forward's"):
        fast_target.attach(target, required=True)
    assert target.fast is None


@pytest.mark.parametrize("rotary", [8, 16])  # in part, and over the whole head
@pytest.mark.parametrize("norm", [False, True])
def test_head_norm_and_rotary_each_optional(device, rotary, norm):
    from dflash.target.kernels import norm_partial_rotary

    torch.manual_seed(0)
    x = torch.randn(21, 3, 40, device=device)[..., :16]  # strides of a wider tensor
    weight = torch.rand(16, device=device) + 0.5
    angle = torch.rand(21, rotary // 2, device=device) * 6
    got = norm_partial_rotary(x, weight if norm else None, angle.cos(), angle.sin(), 1e-6)
    wanted = x.double()
    if norm:
        wanted = wanted / (wanted.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    turned = torch.view_as_complex(torch.stack([wanted[..., : rotary // 2], wanted[..., rotary // 2 : rotary]], -1))
    turned = turned * torch.polar(torch.ones_like(angle).double(), angle.double())[:, None]
    wanted = torch.cat([turned.real, turned.imag, wanted[..., rotary:]], -1)
    assert relative(got, wanted) < 1e-5
