"""What needs a CUDA device: the deadlock, backward under threads, head dims, memory of changing packs."""

from __future__ import annotations

import threading

import pytest
import torch
from compile_helpers import clean_compiler, run_threads
from patience import PATIENCE
from torch._dynamo.utils import counters

from dflash import compile_safety
from dflash.compile_safety import UnsupportedHeadDimError, WarmupJob
from dflash.diagnose.coldrun import run_cold
from dflash.diagnose.probes import run_probe
from dflash.drafter import flex
from dflash.drafter.masks import dense_mask, document_ids, sample_anchors, visibility

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _clean_compiler():
    yield from clean_compiler()


def draw(heads: int, length: int, head_dim: int, device: str = "cuda:0", dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, heads, length, head_dim, device=device, dtype=dtype, requires_grad=True)


def pack(total: int, block: int, anchors: int, seed: int, device: str = "cuda:0"):
    generator = torch.Generator().manual_seed(seed)
    cut = int(torch.randint(total // 4, total // 2, (1,), generator=generator))
    lengths = torch.tensor([cut, total - cut])
    chosen = sample_anchors(torch.ones(total, dtype=torch.bool), lengths, block, anchors, generator).to(device)
    return visibility(chosen, document_ids(lengths, total).to(device), block)


def test_the_lazy_backward_deadlock_is_shown_and_cured():
    off = run_probe("lazy_backward_deadlock", protect=False, device="cuda", limit=90)
    on = run_probe("lazy_backward_deadlock", protect=True, device="cuda", limit=180)
    assert off.verdict == "hang" and on.verdict == "clean", (off, on)


def test_cold_threads_on_one_gpu():
    report = run_cold(2, protect=True, devices=["cuda:0"], limit=240)
    assert report.faults == 0, report.details


@pytest.mark.gpu(2)
def test_cold_threads_on_two_gpus():
    report = run_cold(2, protect=True, devices=["cuda:0", "cuda:1"], limit=240)
    assert report.faults == 0, report.details


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_dims_run_or_stop_by_name(head_dim):
    """Case 34: forward and backward run, with smaller tiles if need be, or the error names head_dim and GPU."""
    q, k, v = draw(4, 256, head_dim), draw(2, 768, head_dim), draw(2, 768, head_dim)
    rule = pack(512, 16, 16, seed=0)
    mask = flex.build_block_mask(rule, 256, 768, "cuda:0")
    with compile_safety.installed():
        try:
            out = flex.compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        except UnsupportedHeadDimError as error:
            assert str(head_dim) in str(error) and torch.cuda.get_device_name(0) in str(error)
            return
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    reference = [t.detach().float().requires_grad_() for t in (q, k, v)]
    allowed = dense_mask(rule, 256, 768, "cuda:0")
    want = torch.nn.functional.scaled_dot_product_attention(*reference, attn_mask=allowed, enable_gqa=True)
    expected = torch.autograd.grad(want.square().sum(), reference)
    assert (out.float() - want).abs().max() < 0.05
    for got, wanted in zip(grads, expected, strict=True):
        assert (got.float() - wanted).norm() / wanted.norm() < 0.02


def test_eight_anchors_of_sixteen_run_forward_and_backward():
    """Case 35: 128 query rows and fewer, where torch would choose its decoding kernel."""
    with compile_safety.installed():
        for anchors in (4, 8):
            rule, rows = pack(512, 16, anchors, seed=anchors), anchors * 16
            q, k, v = draw(8, rows, 64), draw(2, 512 + rows, 64), draw(2, 512 + rows, 64)
            mask = flex.build_block_mask(rule, rows, 512 + rows, "cuda:0")
            out = flex.compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            out.sum().backward()
            want = torch.nn.functional.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), attn_mask=dense_mask(rule, rows, 512 + rows, "cuda:0"), enable_gqa=True
            )
            assert (out.float() - want).abs().max() < 0.05 and q.grad.isfinite().all()


def test_changing_packs_compile_once_and_keep_memory_flat():
    """Case 35: 500 steps of varied packing, compiled masks; reserved memory moves by at most 2%."""
    q, k, v = draw(8, 512, 64), draw(2, 2560, 64), draw(2, 2560, 64)

    def step(seed: int) -> None:
        mask = flex.build_block_mask(pack(2048, 16, 32, seed), 512, 2560, "cuda:0")
        flex.compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=True).sum().backward()

    with compile_safety.installed():
        for seed in range(5):
            step(seed)
        graphs, reserved = counters["stats"]["unique_graphs"], torch.cuda.memory_reserved()
        with compile_safety.sealed():
            for seed in range(500):
                step(seed)
    assert counters["stats"]["unique_graphs"] == graphs
    assert torch.cuda.memory_reserved() <= reserved * 1.02


def test_sealed_threads_with_backward_beside_a_tracing_loop():
    """3 threads x 300 warm forward and backward calls, a noise thread tracing, sealed: no error, equal gradients."""
    stop, traces = threading.Event(), [0]
    inputs = [(draw(4, rows, 64), draw(2, 512 + rows, 64), draw(2, 512 + rows, 64)) for rows in (128, 256, 512)]
    masks = [
        flex.build_block_mask(pack(512, 16, q.shape[2] // 16, i), q.shape[2], k.shape[2], "cuda:0")
        for i, (q, k, _) in enumerate(inputs)
    ]

    def step(index: int) -> tuple:
        out = flex.compiled_flex_attention(*inputs[index], block_mask=masks[index], enable_gqa=True)
        return torch.autograd.grad(out.float().square().sum(), inputs[index])

    def worker(index: int) -> None:
        for _ in range(300):
            got = step(index)
        assert all(torch.equal(a, b) for a, b in zip(got, alone[index], strict=True))

    def noise() -> None:
        while not stop.is_set():
            torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
            traces[0] += 1

    jobs = [WarmupJob("cuda:0", step=lambda i=i: step(i), name=f"shape {i}") for i in range(3)]
    with compile_safety.protected(jobs):
        alone = [step(index) for index in range(3)]
        thread = threading.Thread(target=noise, daemon=True)
        thread.start()
        errors = run_threads(*(lambda i=i: worker(i) for i in range(3)))
        stop.set()
        thread.join(PATIENCE)
    assert errors == [None] * 3 and traces[0] > 10
