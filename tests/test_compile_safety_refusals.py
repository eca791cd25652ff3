"""Typed errors instead of dense runs, the seal, and packs of one shape that compile nothing again."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch._dynamo.config as dynamo_config
from compile_helpers import boundary, case, clean_compiler, held_trace, run_threads
from test_masks import oracle as mask_oracle
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from dflash import compile_safety
from dflash.compile_safety import (
    CompiledFunction,
    CompileFailedError,
    DynamoDisabledError,
    NestedTraceError,
    RecompileLimitError,
    SealedRecompileError,
    UnsupportedDeviceError,
    UnsupportedHeadDimError,
    dense_bytes,
)
from dflash.drafter import flex
from dflash.drafter.masks import document_ids, sample_anchors, visibility

GLOBAL_FLAG = compile_safety.observe_foreign_trace().flag


@pytest.fixture(autouse=True)
def _clean_compiler():
    yield from clean_compiler()


# -- never silently dense ---------------------------------------------------------------------------------------------


class Spy:
    """A flex_attention whose uncompiled runs are counted; compiled code does not hold the count."""

    def __init__(self) -> None:
        self.dense = 0

    def function(self):
        spy = self

        def spied(q, k, v, block_mask=None, enable_gqa=False, scale=None, kernel_options=None):
            if not torch.compiler.is_dynamo_compiling():
                spy.dense += 1
            return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, scale=scale)

        return spied


@pytest.mark.parametrize("reset_elsewhere", [False, True])
def test_the_recompile_limit_is_an_error_and_never_a_dense_run(reset_elsewhere):
    """Case 28 (vllm-project/vllm#27178): limit 2, five shapes, also after a reset in another thread."""
    spy = Spy()
    attention = CompiledFunction(spy.function(), "attention", flex._describe, backend="eager")
    with compile_safety.installed(recompile_limit=2):
        for q_len in (128, 192):
            q, k, v, mask = case(q_len)
            attention(q, k, v, block_mask=mask)
        if reset_elsewhere:
            assert run_threads(torch._dynamo.reset) == [None]
            for q_len in (256, 320):
                q, k, v, mask = case(q_len)
                attention(q, k, v, block_mask=mask)
        for q_len in (384, 448, 512):
            q, k, v, mask = case(q_len)
            with pytest.raises(RecompileLimitError, match=r"as many shapes.*GiB"):
                attention(q, k, v, block_mask=mask)
    assert spy.dense == 0


def test_the_limit_of_install_holds_in_every_thread():
    """Since torch 2.13 a setting made in one thread is not seen in others; 20 shapes are more than torch's own 8."""
    function = CompiledFunction(lambda x: x * 2, "double", backend="eager")

    def worker() -> None:
        for length in range(2, 22):
            function(torch.ones(length))

    with compile_safety.installed(recompile_limit=20):
        assert run_threads(worker) == [None]
    torch._dynamo.reset()
    with compile_safety.installed(recompile_limit=19):
        (error,) = run_threads(worker)
    assert isinstance(error, RecompileLimitError)


def test_a_disabled_compiler_is_an_error():
    spy = Spy()
    attention, (q, k, v, mask) = CompiledFunction(spy.function(), "attention", flex._describe, backend="eager"), case()
    torch.compiler.set_stance("force_eager")
    with pytest.raises(DynamoDisabledError, match=r"force_eager.*set_stance.*GiB"):
        attention(q, k, v, block_mask=mask)
    torch.compiler.set_stance("default")
    dynamo_config.disable = True
    with pytest.raises(DynamoDisabledError, match="unset it"):
        CompiledFunction(spy.function(), "attention", flex._describe, backend="eager")(q, k, v, block_mask=mask)
    assert spy.dense == 0


def test_a_hidden_compile_error_is_an_error():
    def failing(graph, inputs):
        raise ValueError("no such kernel")

    spy = Spy()
    attention, (q, k, v, mask) = CompiledFunction(spy.function(), "attention", flex._describe, backend=failing), case()
    dynamo_config.suppress_errors = True
    with pytest.raises(CompileFailedError, match=r"(?s)no such kernel.*GiB"):
        attention(q, k, v, block_mask=mask)
    assert spy.dense == 0


@pytest.mark.skipif(not GLOBAL_FLAG, reason="this torch keeps the tracing flag per thread")
def test_a_hidden_nested_trace_is_an_error_even_without_install():
    spy = Spy()
    attention, (q, k, v, mask) = CompiledFunction(spy.function(), "attention", flex._describe, backend="eager"), case()
    attention(q, k, v, block_mask=mask)
    dynamo_config.error_on_nested_fx_trace = False
    with held_trace(), pytest.raises(NestedTraceError, match="compile_safety.install"):
        attention(q, k, v, block_mask=mask)
    assert spy.dense == 0


def test_flex_with_gradients_on_cpu_is_refused_with_the_dense_size():
    q, k, v, mask = case()
    with pytest.raises(UnsupportedDeviceError, match=r"no backward on CPU.*0\.00 GiB.*sdpa_chunked"):
        flex.compiled_flex_attention(q.requires_grad_(), k, v, block_mask=mask)
    meta = [t.detach().to("meta") for t in (q, k, v)]
    with pytest.raises(UnsupportedDeviceError, match="meta"):
        flex.compiled_flex_attention(*meta)


def test_the_field_logs_shapes_give_its_out_of_memory_size():
    gib = dense_bytes(1, 32, 32768, 40000 + 32768) / 2**30
    assert gib == 32 * 32768 * 72768 * 4 / 2**30 and 276 < gib < 292


@pytest.mark.parametrize("mode, mapped", [("reduce-overhead", None), ("max-autotune", "max-autotune-no-cudagraphs")])
def test_cuda_graph_modes_are_mapped_and_said_so(mode, mapped):
    """Case 31 (pytorch issue 123177); two threads then run."""
    with pytest.warns(UserWarning, match="CUDA graphs"):
        assert compile_safety.without_cuda_graphs(mode) == mapped
    assert compile_safety.without_cuda_graphs("max-autotune-no-cudagraphs") == "max-autotune-no-cudagraphs"


def test_two_threads_run_where_reduce_overhead_was_asked_for():
    with pytest.warns(UserWarning, match="using 'default' instead"):
        double = CompiledFunction(lambda x: x * 2, "double", mode="reduce-overhead")
    with compile_safety.installed():
        assert run_threads(*(lambda: double(torch.ones(4)) for _ in range(2))) == [None, None]


def test_smaller_tiles_are_tried_before_a_head_dim_is_refused(monkeypatch):
    """Case 34 (pytorch issues 198224, 180278, 133254), without the GPU: the kernel's error is played."""
    seen = []

    def too_large(q, k, v, **kwargs):
        seen.append(kwargs["kernel_options"])
        if len(seen) == 1:
            raise RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory")
        return q

    class OnGpu(torch.Tensor):
        device = torch.device("cuda:0")

    monkeypatch.setattr(flex, "_flex", too_large)
    monkeypatch.setattr(flex, "_small_tiles", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "small GPU")
    q = torch.zeros(1, 2, 256, 256).as_subclass(OnGpu)
    flex.compiled_flex_attention(q, q, q)
    assert seen[0] is None and seen[1]["BLOCK_M"] == 32
    monkeypatch.setattr(flex, "_flex", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of resource: shared")))
    with pytest.raises(UnsupportedHeadDimError, match=r"head_dim 256 on small GPU.*GiB"):
        flex.compiled_flex_attention(q, q, q)


# -- the seal ----------------------------------------------------------------------------------------------------------


def test_a_new_shape_after_the_seal_names_the_guard_and_the_shape():
    attention = boundary()
    with compile_safety.installed():
        q, k, v, mask = case(128)
        attention(q, k, v, block_mask=mask)
        with compile_safety.sealed():
            attention(q, k, v, block_mask=mask)
            q, k, v, mask = case(192)
            with pytest.raises(SealedRecompileError) as caught:
                attention(q, k, v, block_mask=mask)
        assert "128" in caught.value.guard and "192" in caught.value.shapes and "192" in str(caught.value)
        attention(q, k, v, block_mask=mask)  # unsealed again
    assert not compile_safety.is_sealed()


def test_the_seal_holds_in_every_thread():
    attention, (q, k, v, mask) = boundary(), case()
    with compile_safety.installed():
        attention(q, k, v, block_mask=mask)
        other = case(192)
        with compile_safety.sealed():
            errors = run_threads(
                lambda: attention(q, k, v, block_mask=mask), lambda: attention(*other[:3], block_mask=other[3])
            )
    assert errors[0] is None and isinstance(errors[1], SealedRecompileError)


def test_a_function_never_compiled_is_refused_after_the_seal():
    attention, (q, k, v, mask) = boundary(), case()
    with compile_safety.installed(), compile_safety.sealed(), pytest.raises(SealedRecompileError, match="no compiled"):
        attention(q, k, v, block_mask=mask)


def test_a_late_new_shape_unsealed_takes_the_compile_lock():
    """Three threads meet new shapes while others call warm ones: one compilation at a time, no error."""
    running, worst = [0], [0]
    guard = threading.Lock()

    def backend(graph, inputs):
        with guard:
            running[0] += 1
            worst[0] = max(worst[0], running[0])
        threading.Event().wait(0.05)
        with guard:
            running[0] -= 1
        return graph.forward

    function = CompiledFunction(lambda x: x * 2, "double", backend=backend)
    with compile_safety.installed():
        errors = run_threads(*(lambda n=n: [function(torch.ones(n, m)) for m in (2, 3, 4)] for n in (5, 6, 7)))
    assert errors == [None] * 3 and worst[0] == 1


def test_a_backward_left_uncompiled_is_refused_after_the_seal():
    function = torch.compile(lambda x: x.sin().square(), dynamic=False)
    out = function(torch.ones(3, requires_grad=True)).sum()  # its backward is lazy: nothing is installed yet
    with compile_safety.installed(), compile_safety.sealed(), pytest.raises(SealedRecompileError, match="backward"):
        out.backward()


# -- the real boundary, with generated kernels -------------------------------------------------------------------------


def test_the_boundary_with_the_anchor_rule_small_queries_and_changing_packs():
    """Case 35 (attention-gym#159): 8 anchors x 16 = 128 rows; new packs of one shape compile nothing."""
    total, block, anchors = 256, 16, 8
    generator = torch.Generator().manual_seed(0)
    q_len, kv_len = anchors * block, 256 + anchors * block
    q, k, v = (
        torch.randn(1, heads, length, 32, generator=generator) for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    graphs = None
    with compile_safety.installed(), torch.no_grad():
        for step in range(5):
            lengths = torch.tensor([40 + 20 * step, 60, 256 - 100 - 20 * step])
            loss_mask = torch.ones(total, dtype=torch.bool)
            chosen = sample_anchors(loss_mask, lengths, block, anchors, generator)
            rule = visibility(chosen, document_ids(lengths, total), block)
            mask = flex.build_block_mask(rule, q_len, kv_len, "cpu")
            out = flex.compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            allowed = mask_oracle(chosen.positions.tolist(), chosen.valid.tolist(), lengths.tolist(), total, block)
            scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(32)
            dense = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v.double().repeat_interleave(2, 1)
            assert (out - dense).abs().max() < 1e-4
            graphs = graphs or counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_five_hundred_packs_compile_once():
    """Case 35 (TorchSpec#187, speculators#731): varied packing, static shapes, one graph."""
    attention, generator = boundary(), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, length, 16, generator=generator) for length in (32, 96, 96))
    before = counters["stats"]["unique_graphs"]
    with compile_safety.installed(), torch.no_grad():
        for _ in range(500):
            cut = int(torch.randint(8, 56, (1,), generator=generator))
            lengths = torch.tensor([cut, 64 - cut])
            chosen = sample_anchors(torch.ones(64, dtype=torch.bool), lengths, 8, 4, generator)
            rule = visibility(chosen, document_ids(lengths, 64), 8)
            attention(q, k, v, block_mask=flex.build_block_mask(rule, 32, 96, "cpu"))
    assert counters["stats"]["unique_graphs"] == before + 1
