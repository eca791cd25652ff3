"""The seal: after warmup no compilation can happen any more; an unseen shape stops instead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash.compile_safety.errors import SealedRecompileError
from dflash.compile_safety.tracing import record_traces, refuse_compilation

_lock = threading.Lock()
_restore: list = []  # what unseal() calls, in order; empty when not sealed


def is_sealed() -> bool:
    return bool(_restore)


def seal() -> None:
    """Forbid compilations in the whole process, and record every FX trace from now on (`recorded_traces`).

    torch's stance `fail_on_recompile` stops a call whose guards fail; `compiled_flex_attention` turns that into
    SealedRecompileError with the guard and the shapes. It holds in every thread, and before any count of recompiles,
    so the recompile limit is never reached. A backward that was never compiled is stopped too, which the stance alone
    does not do. Traces are recorded, and late backwards stopped, while `install()` is in effect. Sealing twice is the
    same as once.
    """
    with _lock:
        if _restore:
            return
        stance = torch.compiler.set_stance("fail_on_recompile")
        refuse_compilation(_refuse_late_backward)
        record_traces(True)
        _restore.extend(
            [lambda: stance.__exit__(None, None, None), lambda: refuse_compilation(None), lambda: record_traces(False)]
        )


def unseal() -> None:
    """Allow compilations again. What was recorded stays readable until the next seal."""
    with _lock:
        while _restore:
            _restore.pop(0)()


@contextmanager
def sealed() -> Iterator[None]:
    """`seal()` for the length of a block; a block inside a sealed one changes nothing."""
    if is_sealed():
        yield
        return
    seal()
    try:
        yield
    finally:
        unseal()


def _refuse_late_backward() -> None:
    """Asked before the compile lock is taken; the stance already stops forwards, so a backward is what is left."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller == "torch._inductor.compile_fx":
        raise SealedRecompileError(
            "a backward pass would be compiled after the seal; warm up forward and backward of every shape, in the "
            "grad mode of the run, before seal()",
            guard="backward not compiled",
        )
