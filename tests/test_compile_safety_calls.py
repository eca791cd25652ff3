"""Compiled calls from threads: races shown and cured, warm and cold, beside a trace and in checkpointed segments."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from compile_helpers import boundary, case, clean_compiler, held_trace, reference, run_threads
from patience import PATIENCE
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from dflash import compile_safety
from dflash.compile_safety import CompiledFunction, NestedTraceError, installed
from dflash.compile_safety.protect import settle_device_guard

GLOBAL_FLAG = compile_safety.observe_foreign_trace().flag


@pytest.fixture(autouse=True)
def _clean_compiler():
    yield from clean_compiler()


# -- the first fault: another thread's trace ---------------------------------------------------------------------------


@pytest.mark.skipif(not GLOBAL_FLAG, reason="this torch keeps the tracing flag per thread")
def test_unprotected_a_warm_call_fails_beside_a_foreign_trace():
    plain, inputs = torch.compile(flex_attention, dynamic=False, backend="eager"), case()
    plain(*inputs[:3], block_mask=inputs[3])
    with held_trace(), pytest.raises(RuntimeError, match="FX to symbolically trace"):
        plain(*inputs[:3], block_mask=inputs[3])


def test_protected_a_warm_call_waits_for_the_trace_and_is_right():
    attention, (q, k, v, mask) = boundary(), case()
    with compile_safety.installed():
        before = attention(q, k, v, block_mask=mask)
        with held_trace(seconds=0.3):
            after = attention(q, k, v, block_mask=mask)
    assert torch.equal(before, after)
    assert (after - reference(q, k, v)).abs().max() < 1e-5


def test_functions_wrapped_before_install_are_protected_too():
    plain, inputs = torch.compile(lambda x: x.sin(), backend="eager"), torch.ones(3)
    plain(inputs)
    with compile_safety.installed(), held_trace():
        assert torch.equal(plain(inputs), torch.ones(3).sin())


def test_uninstall_restores_torch():
    import torch._dynamo.convert_frame as convert_frame

    def state():
        symbolic = torch.fx._symbolic_trace
        return (
            convert_frame.compile_lock,
            torch.fx.Tracer.trace,
            symbolic._Patcher.patch_method,
            symbolic.is_fx_symbolic_tracing.__code__,
            torch.autograd._engine_run_backward,
        )

    before = state()
    with compile_safety.installed():
        with compile_safety.installed():
            pass
        assert compile_safety.is_installed() and state() != before
    assert state() == before and not compile_safety.is_installed()
    with pytest.raises(RuntimeError, match="without install"):
        compile_safety.uninstall()
    if GLOBAL_FLAG:
        assert compile_safety.observe_foreign_trace().flag


ROUNDS = """
import threading, sys, torch
sys.path.insert(0, sys.argv[1])
from dflash.compile_safety import installed
with installed():
    for _ in range(20):  # on a CUDA build without a GPU each of these dies without install()
        threads = [threading.Thread(target=torch._C._ensureCUDADeviceGuardSet) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
print("alive")
"""


def test_a_missing_gpus_guard_belongs_to_the_main_thread(monkeypatch):
    """Real on a CUDA build of torch without a GPU; the calls are watched on any."""
    if torch.version.cuda:
        done = subprocess.run([sys.executable, "-c", ROUNDS, str(Path(__file__).parents[1])], capture_output=True, text=True)
        assert done.stdout.strip() == "alive", (done.returncode, done.stderr[-500:])
    callers = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: callers.append(threading.current_thread()))
    with installed():
        pass
    assert callers == [threading.main_thread()]
    other = threading.Thread(target=lambda: callers.append(settle_device_guard()))
    other.start()
    other.join()
    assert callers[1:] == [False]  # a thread that ends must not be the one


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of a GPU do not depend on it")
def test_the_number_of_threads_is_part_of_a_cpu_kernels_settings():
    """Compiled with one thread and reused with two from the cache on disk, torch 2.11's kernel corrupts the heap."""
    seen = []

    def look(graph, inputs):
        seen.append(torch._inductor.config.cpp.threads)
        return graph.forward

    before = torch._inductor.config.cpp.threads
    with installed():
        for count in (1, 2):
            torch.set_num_threads(count)
            torch._dynamo.reset()
            CompiledFunction(lambda x: x + 1, backend=look)(torch.ones(2))
    assert seen == [1, 2] and torch._inductor.config.cpp.threads == before


def test_a_trace_in_the_same_thread_is_a_typed_error():
    attention, (q, k, v, mask) = boundary(), case()
    with compile_safety.installed(), pytest.raises(NestedTraceError, match="GiB"):
        torch.fx.symbolic_trace(lambda x: attention(q, k, v, block_mask=mask))


def test_eager_modules_work_beside_a_foreign_trace():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    before = module(x)
    with compile_safety.installed(), held_trace():
        assert torch.equal(module(x), before)


def test_traces_still_work_while_installed():
    with compile_safety.installed():
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        traced = torch.fx.symbolic_trace(module)
        assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
        traced = torch.fx.symbolic_trace(lambda x: x + math.sqrt(4.0))
        assert torch.equal(traced(torch.ones(2)), torch.full((2,), 3.0))


# -- the third fault: a foreign trace makes guards fail ---------------------------------------------------------------


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_sealed_threads_beside_a_tracing_loop_never_recompile(count):
    """3 threads x 1,000 warm calls (the short run: 100), a noise thread tracing in a loop, compilation forbidden."""
    attention, cases, calls = boundary(), [case(q_len) for q_len in (128, 192, 256)], [0, 0, 0]
    stop, traces = threading.Event(), [0]

    def noise() -> None:
        while not stop.is_set():
            torch.fx.symbolic_trace(lambda x: torch.relu(x) + math.sqrt(4.0))
            traces[0] += 1

    def worker(index: int) -> None:
        q, k, v, mask = cases[index]
        for _ in range(count):
            attention(q, k, v, block_mask=mask)
            calls[index] += 1

    with compile_safety.installed():
        for q, k, v, mask in cases:
            attention(q, k, v, block_mask=mask)
        graphs = counters["stats"]["unique_graphs"]
        with compile_safety.sealed():
            thread = threading.Thread(target=noise, daemon=True)
            thread.start()
            try:
                errors = run_threads(*(lambda i=i: worker(i) for i in range(3)))
            finally:
                stop.set()
                thread.join(PATIENCE)
            records = compile_safety.recorded_traces()
    assert errors == [None] * 3 and calls == [count] * 3
    assert traces[0] > 10 and counters["stats"]["unique_graphs"] == graphs
    assert len(records) >= min(10, traces[0]) and "noise" in records[0].stack


def test_unprotected_a_foreign_trace_makes_a_warm_call_recompile():
    """The flag alone is not enough: `math.log` is replaced for everyone while a thread traces."""
    from contextlib import ExitStack

    from dflash.compile_safety import tracing

    plain, (q, k, v, mask) = torch.compile(flex_attention, dynamic=False, backend="eager"), case()
    with ExitStack() as undo:
        if GLOBAL_FLAG:
            tracing.isolate_flag(undo)
            tracing.count_traces(undo)
        plain(q, k, v, block_mask=mask)
        torch.compiler.set_stance("fail_on_recompile")
        with held_trace(), pytest.raises(RuntimeError, match="math"):
            plain(q, k, v, block_mask=mask)


# -- case 29: cold, all at once, targets running --------------------------------------------------------------------


@pytest.mark.parametrize("launches", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_cold_launches_beside_eager_targets_and_a_tracer(launches):
    """Barrier, first calls of three threads, a target thread in eager mode; equal to single-threaded results."""
    target, prompt = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    expected_target = target(prompt)
    inputs = [(torch.randn(4, n), torch.randn(n, n, requires_grad=True)) for n in (8, 12, 16)]

    def loss(x, w):
        return (x @ w).square().mean() * math.sqrt(2.0)

    def grads(function, x, w):
        return torch.autograd.grad(function(x, w), w)[0]

    expected = [grads(loss, x, w) for x, w in inputs]
    with compile_safety.installed():
        for _ in range(launches):
            torch._dynamo.reset()
            compiled, barrier = CompiledFunction(loss, backend="aot_eager"), threading.Barrier(5)
            got = [None] * 3

            def drafter(i, compiled=compiled, barrier=barrier, got=got):
                barrier.wait(PATIENCE)
                for _ in range(3):
                    got[i] = grads(compiled, *inputs[i])

            def targets(barrier=barrier):
                barrier.wait(PATIENCE)
                for _ in range(20):
                    assert torch.equal(target(prompt), expected_target)

            def tracer(barrier=barrier):
                barrier.wait(PATIENCE)
                for _ in range(3):
                    torch.fx.symbolic_trace(target)

            errors = run_threads(*(lambda i=i, d=drafter: d(i) for i in range(3)), targets, tracer)
            assert errors == [None] * 5
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b)


def test_a_backward_is_compiled_with_its_forward_in_any_thread():
    compiled = []

    def record(kind):
        def compiler(graph, inputs):
            compiled.append((kind, threading.current_thread().name))
            return graph.forward

        return compiler

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def boxed(kind):
        return lambda graph, inputs: make_boxed_func(record(kind)(graph, inputs))

    backend = aot_autograd(fw_compiler=boxed("forward"), bw_compiler=boxed("backward"))
    function = CompiledFunction(lambda x: x.sin().sum(), "sine", backend=backend)
    with compile_safety.installed():
        out = []
        assert run_threads(lambda: out.append(function(torch.ones(3, requires_grad=True)))) == [None]
        assert compiled == [("forward", "t0"), ("backward", "t0")]
        out[0].backward()
    assert len(compiled) == 2


# -- case 32 -------------------------------------------------------------------------------------------------------------


def test_checkpointed_segments_in_two_threads_have_the_right_gradients():
    """Case 32 (pytorch issue 96764): activation checkpointing in threads, 50 repeats."""
    body = CompiledFunction(lambda x, w: torch.tanh(x @ w), "segment", backend="aot_eager")
    pairs = [(torch.randn(3, n), torch.randn(n, n, requires_grad=True)) for n in (4, 6)]
    expected = [torch.autograd.grad(torch.tanh(torch.tanh(x @ w) @ w).sum(), w)[0] for x, w in pairs]

    def worker(index: int) -> None:
        x, w = pairs[index]
        for _ in range(50):
            y = torch.utils.checkpoint.checkpoint(body, x, w, use_reentrant=False)
            y = torch.utils.checkpoint.checkpoint(body, y, w, use_reentrant=False)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], expected[index])

    with compile_safety.installed():
        assert run_threads(lambda: worker(0), lambda: worker(1)) == [None, None]
