"""Shared by the compile-safety tests: a clean compiler around each test, held traces, threads that report, attention."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo.config as dynamo_config
from patience import PATIENCE
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash import compile_safety
from dflash.compile_safety import CompiledFunction
from dflash.drafter import flex

SETTINGS = ("recompile_limit", "suppress_errors", "disable", "error_on_nested_fx_trace", "fail_on_recompile_limit_hit")


def clean_compiler() -> Iterator[None]:
    """No compiled code, default settings and nothing installed, before and after; the body of a fixture."""
    before = {name: getattr(dynamo_config, name) for name in SETTINGS}
    torch._dynamo.reset()
    yield
    compile_safety.unseal()
    while compile_safety.is_installed():
        compile_safety.uninstall()
    torch.compiler.set_stance("default")
    for name, value in before.items():
        setattr(dynamo_config, name, value)
    torch._dynamo.reset()


@contextmanager
def held_trace(seconds: float = PATIENCE) -> Iterator[threading.Event]:
    """Another thread inside torch.fx.symbolic_trace until the block ends, the event is set, or `seconds` pass."""
    inside, release = threading.Event(), threading.Event()

    def function(x):
        inside.set()
        release.wait(seconds)
        return x + 1

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(function), daemon=True, name="holder")
    thread.start()
    assert inside.wait(PATIENCE)
    try:
        yield release
    finally:
        release.set()
        thread.join(PATIENCE)


def run_threads(*bodies: Callable[[], object], timeout: float = PATIENCE) -> list[BaseException | None]:
    """Run the bodies at once; returns each one's exception, or None. A thread that does not end fails the test."""
    errors: list[BaseException | None] = [None] * len(bodies)

    def guarded(index: int) -> None:
        try:
            bodies[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True, name=f"t{i}") for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return errors


def case(q_len: int = 128, head_dim: int = 16):
    """q `[1, 2, q_len, head_dim]`, k and v 64 rows longer, and a causal mask."""
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = (torch.randn(1, 2, length, head_dim, generator=generator) for length in (q_len, q_len + 64, q_len + 64))
    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, q_len, q_len + 64, device="cpu")
    return q, k, v, mask


def reference(q, k, v, mask=None):
    """Causal attention over the first keys in float64, row by row."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for i in range(q.shape[2]):
        scores = q[:, :, i : i + 1] @ k[:, :, : i + 1].transpose(-1, -2) / math.sqrt(q.shape[-1])
        out[:, :, i : i + 1] = scores.softmax(-1) @ v[:, :, : i + 1]
    return out


def boundary(backend="eager") -> CompiledFunction:
    """flex_attention behind the compile boundary, with a cheap backend."""
    return CompiledFunction(flex_attention, "attention", flex._describe, backend=backend)
