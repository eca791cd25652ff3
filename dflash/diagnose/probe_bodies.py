"""What each probe does inside its own process; see `probes`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.compile_safety import tracing
from dflash.compile_safety.boundary import CompiledFunction
from dflash.compile_safety.errors import CompileSafetyError
from dflash.compile_safety.protect import DEFAULT_RECOMPILE_LIMIT, install

HOLD = 3.0  # seconds a trace is held where nobody ends it earlier
Verdict = tuple[str, str]

uncompiled_runs: list[str] = []  # one entry for each time Python executed the compiled function's body


def spied_flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """flex_attention that notes when it runs uncompiled; compiled code does not contain the note."""
    if not torch.compiler.is_dynamo_compiling():
        uncompiled_runs.append(threading.current_thread().name)
    return flex_attention(q, k, v, block_mask=block_mask)


def run_body(name: str, protect: bool, backend: str, device: str) -> Verdict:
    """Run the probe `name` in this process; it changes torch's settings, so it should be a process of its own."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "lazy_backward_deadlock" and device != "cuda":
        return "skipped", "needs a CUDA device: on CPU a backward runs in the calling thread"
    if protect:
        install(recompile_limit=2 if name == "recompile_limit_goes_dense" else DEFAULT_RECOMPILE_LIMIT)
    call = CompiledFunction(spied_flex, backend=backend) if protect else _plain(backend)
    return _BODIES[name](call, protect, torch.device(device))


def _plain(backend: Any) -> Callable[..., Tensor]:
    return torch.compile(spied_flex, dynamic=False, backend=backend)


def _case(device: torch.device, q_len: int = 128, grad: bool = False) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
    generator = torch.Generator().manual_seed(q_len)
    shapes = ((1, 2, q_len, 32), (1, 2, q_len + 128, 32), (1, 2, q_len + 128, 32))
    tensors = [torch.randn(shape, generator=generator).to(device).requires_grad_(grad) for shape in shapes]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q_len, q_len + 128, device=device)
    return *tensors, mask


@contextmanager
def _foreign_trace() -> Iterator[threading.Event]:
    """Another thread inside an FX trace, held until the block ends or HOLD seconds have passed."""
    inside, release = threading.Event(), threading.Event()

    def held(x: Any) -> Any:
        inside.set()
        release.wait(HOLD)
        return x + 1

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(held), name="foreign-trace", daemon=True)
    thread.start()
    inside.wait(30)
    try:
        yield release
    finally:
        release.set()
        thread.join(30)


def fx_flag_race(call: Callable, protect: bool, device: torch.device) -> Verdict:
    case = _case(device)
    with _foreign_trace():
        try:
            call(*case)
        except Exception as error:
            return "fault", f"{type(error).__name__}: {error}"
    return "clean", "a first call went through beside another thread's trace"


def warm_cache_still_races(call: Callable, protect: bool, device: torch.device) -> Verdict:
    case = _case(device)
    before = call(*case)
    with _foreign_trace():
        try:
            after = call(*case)
        except Exception as error:
            return "fault", f"warm call: {type(error).__name__}: {error}"
    if not torch.equal(before, after):
        return "fault", "the warm call's output differs from the one before"
    return "clean", "a warm call went through beside another thread's trace, output equal"


def recompile_limit_goes_dense(call: Callable, protect: bool, device: torch.device) -> Verdict:
    dynamo_config.recompile_limit = 2
    for count, q_len in enumerate((128, 256, 384, 512, 640), 1):
        try:
            call(*_case(device, q_len))
        except CompileSafetyError as error:
            return "clean", f"shape {count}: {type(error).__name__}, {len(uncompiled_runs)} uncompiled runs"
    if uncompiled_runs:
        return "fault", f"{len(uncompiled_runs)} of 5 shapes ran uncompiled (dense) with recompile_limit 2"
    return "clean", "all shapes ran compiled"


def suppressed_error_goes_dense(call: Callable, protect: bool, device: torch.device) -> Verdict:
    notes = []
    dynamo_config.error_on_nested_fx_trace = False
    case = _case(device)
    with _foreign_trace():
        notes.append(_outcome(call, case, "nested trace"))
    dynamo_config.error_on_nested_fx_trace = True
    dynamo_config.suppress_errors = True
    failing = CompiledFunction(spied_flex, backend=_failing) if protect else _plain(_failing)
    notes.append(_outcome(failing, _case(device, 256), "failed compile"))
    return ("fault" if uncompiled_runs else "clean"), "; ".join(notes)


def _failing(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    raise RuntimeError("this backend always fails")


def _outcome(call: Callable, case: tuple, what: str) -> str:
    before = len(uncompiled_runs)
    try:
        call(*case)
        end = ""
    except Exception as error:
        end = f" and ended in {type(error).__name__}"
        if len(uncompiled_runs) == before:
            return f"{what}: {type(error).__name__}"
    return f"{what}: ran {'uncompiled' if len(uncompiled_runs) > before else 'compiled'}{end}"


def foreign_trace_recompiles(call: Callable, protect: bool, device: torch.device) -> Verdict:
    """Without protection the tracing flag alone is made thread-aware, else the first fault would hide this one."""
    with ExitStack() as undo:
        if not protect and tracing.observe_foreign_trace().flag:
            tracing.isolate_flag(undo)
            tracing.count_traces(undo)
        case = _case(device)
        call(*case)
        torch.compiler.set_stance("fail_on_recompile")
        with _foreign_trace():
            try:
                call(*case)
            except RuntimeError as error:
                guard = " ".join(str(error).partition("guard failure(s):")[2].split()) or str(error)
                return "fault", f"a warm call beside another thread's trace wants to recompile: {guard}"
    return "clean", "no recompile beside another thread's trace"


def foreign_trace_breaks_modules(call: Callable, protect: bool, device: torch.device) -> Verdict:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    before = module(x)
    with _foreign_trace():
        try:
            after = module(x)
        except Exception as error:
            return "fault", f"an eager module call beside another thread's trace: {type(error).__name__}: {error}"
    same = isinstance(after, Tensor) and torch.equal(before, after)
    return ("clean", "eager modules are untouched") if same else ("fault", "an eager module returned something else")


def lazy_backward_deadlock(call: Callable, protect: bool, device: torch.device) -> Verdict:
    """Thread B's backward starts exactly while thread A compiles its forward, before A's trace needs the engine."""
    first, second = _case(device, 256, grad=True), _case(device, 512, grad=True)
    loss = call(*first).sum()  # forward compiled; without protection its backward is not
    compiling, started = threading.Event(), threading.Event()

    def on_start(_: Any) -> None:
        if threading.current_thread().name == "A":
            compiling.set()
            started.wait(10)
            threading.Event().wait(2.0)  # time for B's backward to reach the engine thread

    errors: list[str] = []

    def guarded(body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        return run

    def b() -> None:
        compiling.wait(60)
        started.set()
        loss.backward()

    callback_handler.register_start_callback(on_start)
    threads = [
        threading.Thread(target=guarded(lambda: call(*second).sum().backward()), name="A", daemon=True),
        threading.Thread(target=guarded(b), name="B", daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if errors:
        return "fault", errors[0]
    return "clean", "forward compilation and another thread's backward both finished"


_BODIES: dict[str, Callable[[Callable, bool, torch.device], Verdict]] = {
    body.__name__: body
    for body in (
        fx_flag_race,
        warm_cache_still_races,
        recompile_limit_goes_dense,
        suppressed_error_goes_dense,
        lazy_backward_deadlock,
        foreign_trace_recompiles,
        foreign_trace_breaks_modules,
    )
}
