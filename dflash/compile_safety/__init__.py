"""Compiled attention from several threads: no nested-trace errors, no silent dense runs, no late compiles, no hangs.

install() / uninstall() / installed()   make this process's torch safe for threads, and take it back
warmup([WarmupJob, ...])                compile forward and backward up front; state is bit-identical afterwards
seal() / unseal() / sealed()            no compilation from here on; who traces is recorded (recorded_traces)
Watchdog(run_dir, seconds)              a hang ends the run and leaves its stacks
protected(jobs, run_dir=...)            all of it as one context
CompiledFunction(fn)                    torch.compile that raises a typed error instead of running uncompiled
"""

from dflash.compile_safety.boundary import CompiledFunction, without_cuda_graphs
from dflash.compile_safety.errors import (
    GIB,
    CompileFailedError,
    CompileSafetyError,
    DynamoDisabledError,
    GateTimeoutError,
    HangError,
    NestedTraceError,
    RecompileLimitError,
    SealedRecompileError,
    UnsupportedDeviceError,
    UnsupportedHeadDimError,
    WarmupError,
    dense_bytes,
)
from dflash.compile_safety.gate import TraceGate
from dflash.compile_safety.protect import Protection, install, installed, is_installed, protected, uninstall
from dflash.compile_safety.seal import is_sealed, seal, sealed, unseal
from dflash.compile_safety.tracing import observe_foreign_trace, recorded_traces
from dflash.compile_safety.warmup import WarmupJob, warmup
from dflash.compile_safety.watchdog import HANG_EXIT_CODE, Watchdog

__all__ = [
    "GIB",
    "HANG_EXIT_CODE",
    "CompileFailedError",
    "CompileSafetyError",
    "CompiledFunction",
    "DynamoDisabledError",
    "GateTimeoutError",
    "HangError",
    "NestedTraceError",
    "Protection",
    "RecompileLimitError",
    "SealedRecompileError",
    "TraceGate",
    "UnsupportedDeviceError",
    "UnsupportedHeadDimError",
    "WarmupError",
    "WarmupJob",
    "Watchdog",
    "dense_bytes",
    "install",
    "installed",
    "is_installed",
    "is_sealed",
    "observe_foreign_trace",
    "protected",
    "recorded_traces",
    "seal",
    "sealed",
    "unseal",
    "uninstall",
    "warmup",
    "without_cuda_graphs",
]
