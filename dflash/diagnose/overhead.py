"""What the protection costs on a warm call while nobody traces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch._dynamo

from dflash.compile_safety.boundary import CompiledFunction
from dflash.compile_safety.protect import installed


def _scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def measure_gate_overhead(calls: int = 2000, rounds: int = 15) -> dict[str, float]:
    """Microseconds that the boundary and the gate add to a warm compiled call, no trace under way.

    A function too small to hide them is compiled twice, plainly and as a CompiledFunction, and called in alternating
    rounds; the medians of the rounds are compared. Returns `plain_us`, `protected_us` and `overhead_us`.
    """
    x = torch.zeros(8)
    plain = torch.compile(_scale, backend="eager", fullgraph=True, dynamic=False)
    with installed(), torch.no_grad():
        protected = CompiledFunction(_scale, backend="eager")
        for function in (plain, protected):
            _round(function, x, 200)
        times = [(_round(plain, x, calls), _round(protected, x, calls)) for _ in range(rounds)]
    plain_us = statistics.median(time for time, _ in times) * 1e6
    protected_us = statistics.median(time for _, time in times) * 1e6
    overhead = statistics.median(gated - bare for bare, gated in times) * 1e6
    return {"plain_us": plain_us, "protected_us": protected_us, "overhead_us": overhead}


def _round(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        function(x)
    return (time.perf_counter() - begin) / calls
