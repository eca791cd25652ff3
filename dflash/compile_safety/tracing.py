"""Thread-aware FX tracing: what torch keeps per process, kept per thread, while installed.

Up to torch 2.13 "FX is tracing" is one flag for the process, and a trace replaces `nn.Module.__call__` for every
thread. So a trace anywhere breaks compiled calls, and eager modules, everywhere. `apply` changes torch so that both
concern the tracing thread alone, and so that traces and compilations go through the gate. What needs changing is
decided by watching a trace from outside (`observe_foreign_trace`), not by version numbers; where torch already
behaves, that part is left alone.

`torch.compile` binds the tracing check when it wraps a function. The check's *code* is exchanged, not its name, so
functions wrapped before the change see it too, and so does everything after it is undone.

Upstream threads about this: pytorch issues 118260, 126024, 136833, 168042; PRs 168999 and 187589.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.convert_frame as convert_frame
import torch._functorch.config as functorch_config
import torch._higher_order_ops.utils as hop_utils
import torch._inductor.config as inductor_config
import torch.autograd.graph as autograd_graph
import torch.fx._symbolic_trace as symbolic_trace

from dflash.compile_safety.gate import GATE

MAX_RECORDS = 1000
STACK_LINES = 25


class _ThreadState(threading.local):
    depth = 0  # nested FX traces of this thread
    backwards = 0  # backward passes that this thread started


_state = _ThreadState()
_records: deque[TraceRecord] = deque(maxlen=MAX_RECORDS)
_recording = False


@dataclass(frozen=True)
class ForeignTrace:
    """What a thread notices of a trace that another thread runs."""

    flag: bool  # compiled calls believe that they are being traced
    modules: bool  # nn.Module.__call__ is replaced
    functions: bool  # functions of the math module are replaced (guards of compiled code fail)


@dataclass(frozen=True)
class TraceRecord:
    """One FX trace seen while recording: who traced what, when (unix seconds), from where."""

    thread: str
    ident: int
    time: float
    tracer: str
    root: str
    stack: str


def thread_is_tracing() -> bool:
    """True inside an FX trace of the calling thread (counted only while installed)."""
    return _state.depth > 0


def backwards_of_thread() -> int:
    """How many backward passes the calling thread has started (counted only while installed)."""
    return _state.backwards


def is_applied() -> bool:
    """True between `apply` and the end of its ExitStack."""
    return isinstance(convert_frame.compile_lock, GatedCompileLock)


def recorded_traces() -> list[TraceRecord]:
    """The FX traces of this process since recording began (at the seal), oldest first, the last 1000."""
    return list(_records)


def record_traces(on: bool) -> None:
    """Start (forgetting older records) or stop recording."""
    global _recording
    if on:
        _records.clear()
    _recording = on


def observe_foreign_trace(timeout: float = 10.0) -> ForeignTrace:
    """Hold a thread inside a trace for a moment and note what this thread sees of it."""
    inside, release = threading.Event(), threading.Event()
    module_call, square_root = torch.nn.Module.__call__, math.sqrt

    def held(x):
        inside.set()
        release.wait(timeout)
        return x

    tracer = threading.Thread(target=lambda: torch.fx.Tracer().trace(held), name="trace-observer", daemon=True)
    tracer.start()
    try:
        inside.wait(timeout)
        return ForeignTrace(
            flag=symbolic_trace.is_fx_symbolic_tracing(),
            modules=torch.nn.Module.__call__ is not module_call,
            functions=math.sqrt is not square_root,
        )
    finally:
        release.set()
        tracer.join(timeout)


# -- the changes, each undone by the ExitStack that it is given -------------------------------------------------------


def apply(undo: ExitStack, recompile_limit: int) -> ForeignTrace:
    """Make every change that this torch needs; closing `undo` takes all of them back. Returns what was observed."""
    with GATE.exclusive():
        seen = _observed()
        if seen.flag:
            isolate_flag(undo)
        if seen.modules:
            _isolate_module_patches(undo)
        _gate_traces(undo)
        _gate_compilations(undo, recompile_limit)
        _hold_gate_in_backward(undo)
    return seen


@functools.cache
def _observed() -> ForeignTrace:
    return observe_foreign_trace()


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.callback(setattr, owner, name, before)


def isolate_flag(undo: ExitStack) -> None:
    """Let both checks answer for the calling thread, in every place that has a reference to them."""

    def is_fx_symbolic_tracing():
        return torch.fx._symbolic_trace._dflash_thread_is_tracing() and not torch.compiler.is_compiling()

    def is_fx_tracing():
        return torch.fx._symbolic_trace._dflash_thread_is_tracing()

    symbolic_trace._dflash_thread_is_tracing = thread_is_tracing
    undo.callback(delattr, symbolic_trace, "_dflash_thread_is_tracing")
    undo.callback(setattr, symbolic_trace, "_is_fx_tracing_flag", False)  # a value some thread left behind
    for function in (is_fx_symbolic_tracing, is_fx_tracing):
        _set(undo, getattr(symbolic_trace, function.__name__), "__code__", function.__code__)
    _suspend_in_compilation_env(undo)


def _suspend_in_compilation_env(undo: ExitStack) -> None:
    """Higher-order ops clear the flag while they compile inside a trace; clear this thread's depth likewise.

    The helper is imported by name all over torch, so the function inside its `contextmanager` wrapper is exchanged.
    """
    wrapper = hop_utils._set_compilation_env
    names = wrapper.__code__.co_freevars
    cell = wrapper.__closure__[names.index("func")]
    original = contextmanager(cell.cell_contents)

    def suspended(*args, **kwargs):
        depth, _state.depth = _state.depth, 0
        try:
            with original(*args, **kwargs):
                yield
        finally:
            _state.depth = depth

    _set(undo, cell, "cell_contents", suspended)


def _isolate_module_patches(undo: ExitStack) -> None:
    """Let a trace's replacement of `nn.Module` methods act in the tracing thread only."""
    patch_method = symbolic_trace._Patcher.patch_method

    def patch_for_this_thread(self, cls, name, new_fn, deduplicate=True):
        owner, before = threading.get_ident(), getattr(cls, name)

        @functools.wraps(new_fn)
        def only_here(*args, **kwargs):
            return (new_fn if threading.get_ident() == owner else before)(*args, **kwargs)

        return patch_method(self, cls, name, only_here, deduplicate)

    _set(undo, symbolic_trace._Patcher, "patch_method", patch_for_this_thread)


def _gate_traces(undo: ExitStack) -> None:
    """Every FX trace holds the gate's exclusive side, is counted for its thread, and recorded while that is on."""
    trace = torch.fx.Tracer.trace

    @functools.wraps(trace)
    def gated_trace(self, root, *args, **kwargs):
        if _recording:
            _records.append(_record(self, root))
        with GATE.exclusive():
            _state.depth += 1
            try:
                return trace(self, root, *args, **kwargs)
            finally:
                _state.depth -= 1

    _set(undo, torch.fx.Tracer, "trace", gated_trace)


def count_traces(undo: ExitStack) -> None:
    """Only the counting part of the above, without the gate: what the thread-aware flag alone needs."""
    trace = torch.fx.Tracer.trace

    @functools.wraps(trace)
    def counted_trace(self, root, *args, **kwargs):
        _state.depth += 1
        try:
            return trace(self, root, *args, **kwargs)
        finally:
            _state.depth -= 1

    _set(undo, torch.fx.Tracer, "trace", counted_trace)


def _record(tracer: Any, root: Any) -> TraceRecord:
    thread = threading.current_thread()
    name = type(root).__name__ if isinstance(root, torch.nn.Module) else getattr(root, "__qualname__", repr(root))
    stack = "".join(traceback.format_stack()[-STACK_LINES:-2])
    return TraceRecord(thread.name, thread.ident or 0, time.time(), type(tracer).__name__, str(name), stack)


class GatedCompileLock:
    """Stands for dynamo's compile lock: the gate's exclusive side first, then the lock itself.

    In this order a compilation, a lazily compiled backward and `torch._dynamo.reset()` never wait for the gate while
    they hold the lock. Whoever holds it compiles under `settings`: since torch 2.13 a setting made in one thread is
    not seen by others, so it has to be made here, in the thread that compiles.
    """

    def __init__(self, lock: Any, settings: Callable[[ExitStack], None]) -> None:
        self.lock = lock
        self._settings = settings
        self._held = threading.local()

    def __enter__(self) -> None:
        _refuse_compilation()
        with ExitStack() as stack:
            stack.enter_context(GATE.exclusive())
            stack.enter_context(self.lock)
            self._settings(stack)
            self._stacks().append(stack.pop_all())

    def __exit__(self, *exc_info: object) -> None:
        self._stacks().pop().close()

    def _stacks(self) -> list[ExitStack]:
        if not hasattr(self._held, "stacks"):
            self._held.stacks = []
        return self._held.stacks


def _allow() -> None:
    """The default of `refuse_compilation`: nothing is refused."""


_refuse_compilation: Callable[[], None] = _allow


def refuse_compilation(check: Callable[[], None] | None) -> None:
    """Have `check` asked before each compilation, where it may raise; None allows them all again."""
    global _refuse_compilation
    _refuse_compilation = check or _allow


def _gate_compilations(undo: ExitStack, recompile_limit: int) -> None:
    """Compilations hold the exclusive side, compile backwards with their forwards, and may be this many."""

    def settings(stack: ExitStack) -> None:
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(dynamo_config.patch(recompile_limit=recompile_limit))
        # A kernel for the CPU holds scratch memory for as many threads as there were when it was compiled. Named in the
        # settings, that number is part of the cache's key, so that no run with more threads writes past it (torch 2.11).
        if inductor_config.cpp.threads < 1 and not torch.cuda.is_available():
            stack.enter_context(inductor_config.patch({"cpp.threads": torch.get_num_threads()}))

    _set(undo, convert_frame, "compile_lock", GatedCompileLock(convert_frame.compile_lock, settings))


def _hold_gate_in_backward(undo: ExitStack) -> None:
    """A backward pass holds the shared side from start to end, on behalf of the engine threads that work for it.

    So no thread can be inside a trace, waiting for an engine thread, while that engine thread is busy with a backward
    that waits for the trace to end (a deadlock seen on CUDA). A backward that a trace itself starts passes freely.
    """
    run_backward = autograd_graph._engine_run_backward

    @functools.wraps(run_backward)
    def gated_backward(*args, **kwargs):
        _state.backwards += 1
        with GATE.shared():
            return run_backward(*args, **kwargs)

    _set(undo, autograd_graph, "_engine_run_backward", gated_backward)
    _set(undo, torch.autograd, "_engine_run_backward", gated_backward)
