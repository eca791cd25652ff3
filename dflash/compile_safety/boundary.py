"""A compiled function that never runs uncompiled: the one place where the package calls `torch.compile`."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch.fx._symbolic_trace as symbolic_trace
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from dflash.compile_safety.errors import (
    CompileFailedError,
    CompileSafetyError,
    DynamoDisabledError,
    NestedTraceError,
    RecompileLimitError,
    SealedRecompileError,
)
from dflash.compile_safety.gate import GATE

_NO_GRAPH_MODES = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
_GRAPH_OPTION = "triton.cudagraphs"


class _RanUncompiled(Exception):
    """Raised by the body of a compiled function when Python, not its compiled form, executes it."""


def without_cuda_graphs(mode: str | None) -> str | None:
    """The nearest `torch.compile` mode that records no CUDA graph; warns when that is another mode.

    CUDA graph trees keep their state per thread, and a call from a second thread hits an assertion inside them
    (pytorch issue 123177). "reduce-overhead" is the default mode plus graphs; "max-autotune" has a graph-free twin.
    """
    if mode not in _NO_GRAPH_MODES:
        return mode
    mapped = _NO_GRAPH_MODES[mode]
    warnings.warn(
        f"compile mode {mode!r} records CUDA graphs, which do not work from several threads; "
        f"using {mapped or 'default'!r} instead",
        stacklevel=2,
    )
    return mapped


class CompiledFunction:
    """`torch.compile(function)`, gated, with typed errors instead of an uncompiled run.

    Each shape is compiled for itself. The body of the compiled function raises when it is executed as Python, so whatever
    makes torch fall back (a nested trace, the recompile limit, a disabled compiler, a hidden error) ends in an exception
    here; the cause is then looked up. Under an outer `torch.compile` the function is inlined into the outer graph.

    Args:
        function: what to compile.
        name: for messages.
        describe: (args, kwargs) -> text about one call, such as its shapes and the memory of a dense run.
        mode, backend: as for `torch.compile`; modes with CUDA graphs are mapped (`without_cuda_graphs`).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        describe: Callable[[tuple, dict], str] | None = None,
        mode: str | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", repr(function))
        self._describe = describe or _shapes
        options = {"mode": without_cuda_graphs(mode)} if mode else {}
        self._compiled = torch.compile(_only_compiled(function), fullgraph=True, dynamic=False, backend=backend, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run compiled, or raise a CompileSafetyError that says why it cannot."""
        if torch.compiler.is_dynamo_compiling():
            return self.function(*args, **kwargs)
        entered = GATE.enter_shared()
        try:
            if symbolic_trace.is_fx_symbolic_tracing():
                raise self._nested_trace(args, kwargs)
            return self._compiled(*args, **kwargs)
        except CompileSafetyError:
            raise
        except _RanUncompiled as error:
            raise self._uncompiled(args, kwargs) from error
        except FailOnRecompileLimitHit as error:
            raise self._limit(error, args, kwargs) from error
        except RuntimeError as error:
            typed = self._typed(error, args, kwargs)
            if typed is None:
                raise
            raise typed from error
        finally:
            if entered:
                GATE.leave_shared()

    # -- errors --------------------------------------------------------------------------------------------------

    def _typed(self, error: RuntimeError, args: tuple, kwargs: dict) -> CompileSafetyError | None:
        text = str(error)
        if "fail_on_recompile" in text:
            return self._sealed(text, args, kwargs)
        if "FX to symbolically trace" in text:
            return self._nested_trace(args, kwargs)
        if isinstance(error, TorchDynamoException):
            return CompileFailedError(
                f"{self.name} does not compile here: {type(error).__name__}: {text.strip()[:1500]}\n"
                f"{self._describe(args, kwargs)}"
            )
        return None

    def _sealed(self, text: str, args: tuple, kwargs: dict) -> SealedRecompileError:
        _, _, guards = text.partition("guard failure(s):")
        guard = "; ".join(line.strip(" -") for line in guards.splitlines() if line.strip())
        guard = guard or "no compiled version exists"
        shapes = self._describe(args, kwargs)
        return SealedRecompileError(
            f"{self.name} would recompile after the seal. Guard that failed: {guard}. The call: {shapes} "
            "Warm up this shape, dtype and grad mode before seal(), or pad to a shape that was warmed.",
            guard=guard,
            shapes=shapes,
        )

    def _nested_trace(self, args: tuple, kwargs: dict) -> NestedTraceError:
        thread = threading.current_thread().name
        return NestedTraceError(
            f"{self.name} was called in thread {thread!r} while FX traces. If another thread traces, call "
            "compile_safety.install() before the threads start; if this one does, keep the compiled call out of the "
            f"traced function. {self._describe(args, kwargs)}"
        )

    def _limit(self, error: Exception, args: tuple, kwargs: dict) -> RecompileLimitError:
        return RecompileLimitError(
            f"{self.name} has been compiled for as many shapes as torch keeps ({error}) and would run uncompiled for "
            "one more. Pad to fewer shapes, or raise the limit in compile_safety.install(recompile_limit=...). "
            f"{self._describe(args, kwargs)}"
        )

    def _uncompiled(self, args: tuple, kwargs: dict) -> CompileSafetyError:
        if symbolic_trace.is_fx_symbolic_tracing():
            return self._nested_trace(args, kwargs)
        reasons = disabled_reasons()
        tail = self._describe(args, kwargs)
        if reasons:
            return DynamoDisabledError(f"{self.name} would run uncompiled: {'; '.join(reasons)}. {tail}")
        return CompileFailedError(f"{self.name} was executed uncompiled, for a reason torch does not tell. {tail}")


def disabled_reasons() -> list[str]:
    """Settings that keep compiled functions from running compiled, each with the way to undo it."""
    reasons = []
    if dynamo_config.disable:
        reasons.append(
            "torch.compile is disabled (torch._dynamo.config.disable, or TORCH_COMPILE_DISABLE or "
            "TORCHDYNAMO_DISABLE in the environment); unset it"
        )
    if dynamo_config.suppress_errors:
        reasons.append("torch._dynamo.config.suppress_errors hides compile errors by running eagerly; set it to False")
    if not dynamo_config.error_on_nested_fx_trace:
        reasons.append(
            "torch._dynamo.config.error_on_nested_fx_trace is False, which runs eagerly beside any FX trace; "
            "set it to True and call compile_safety.install()"
        )
    stance = torch._dynamo.eval_frame._stance.stance
    if stance not in ("default", "fail_on_recompile"):
        reasons.append(f"the compiler stance is {stance!r}; call torch.compiler.set_stance('default')")
    return reasons


def _only_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, assigned=("__name__", "__doc__"))
    def body(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise _RanUncompiled
        return function(*args, **kwargs)

    del body.__wrapped__
    # one code object for each function: torch keys compiled versions, and counts recompiles, by code
    body.__code__ = body.__code__.replace(co_name=f"compiled_{getattr(function, '__name__', 'function')}")
    return body


def _shapes(args: tuple, kwargs: dict) -> str:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}" for t in tensors) + "."
