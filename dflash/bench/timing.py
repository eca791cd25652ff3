"""How things are timed: the device's own clock, after a warmup, medians, peak memory; and the ceiling to compare to."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from dflash.devices import Readback
from dflash.errors import ConfigError

LONGEST = 300.0  # seconds that a measurement may take a CPU at the least


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the repeats; bytes allocated before the calls and at most during them (None on CPU)."""

    median: float
    fastest: float
    slowest: float
    repeats: int
    base_bytes: int | None
    peak_bytes: int | None


def free_memory(device: torch.device) -> None:
    """Give back what earlier measurements left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(call: Callable[[], object], device: torch.device, warmup: int = 2, repeats: int = 5) -> Timing:
    """Time `call`: on CUDA by `triton.testing.do_bench`, about `repeats` times after some calls of its own.

    The calls are queued without a sync in between, as in training, and timed by events, so a host that cannot keep up
    shows. Memory is that of one call before those, since do_bench holds a buffer of its own.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        seconds = [_host_seconds(call) for _ in range(repeats)]
        return Timing(statistics.median(seconds), min(seconds), max(seconds), repeats, None, None)
    from triton.testing import do_bench

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        once = _host_seconds(lambda: (call(), torch.cuda.synchronize()))
        peak = torch.cuda.max_memory_allocated()
        seconds = [ms / 1e3 for ms in do_bench(call, warmup=0, rep=repeats * once * 1e3, return_mode="all")]
    return Timing(statistics.median(seconds), min(seconds), max(seconds), len(seconds), base, peak)


def _host_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class StepClock:
    """Times the steps of a pipeline that keeps running: each result is read one step behind, as training does, so that the
    end of a step is taken while the next one is on its way. The last step has no end, for nothing is behind it."""

    def __init__(self):
        self._results: list[Readback] = []
        self._ends: list[float] = []

    def add(self, result: torch.Tensor) -> None:
        """A step was launched; wait for the one before it."""
        self._results.append(Readback(result))
        if len(self._results) > 1:
            self._results[-2].read()
            self._ends.append(time.perf_counter())

    def end(self, step: int) -> float:
        """When this step was done, in seconds of `time.perf_counter`; steps count from 1."""
        return self._ends[step - 1]

    def seconds(self, warm: int) -> float | None:
        """A step's seconds, from the end of step `warm` to the end of the last but one; None where no step lies between."""
        timed = len(self._ends) - warm
        return (self._ends[-1] - self._ends[warm - 1]) / timed if timed > 0 else None

    def each(self) -> list[float]:
        """Seconds of every single step from the second on, the last one left out."""
        return [b - a for a, b in pairwise(self._ends)]

    def read(self) -> list[list[float]]:
        """The results of all steps, the last one waited for."""
        return [result.read() for result in self._results]


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOP/s of a square matrix product on random data, in this process on this device: of the median call on a GPU, of
    the fastest on a CPU, where a call of a millisecond is soon ten when others want its cores."""
    size = size or (8192 if device.type == "cuda" else 512)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timing = measure(lambda: a @ b, device, warmup=3, repeats=10)
    return 2 * size**3 / (timing.median if device.type == "cuda" else timing.fastest)


def refuse_hours(seconds: Callable[[], float], device: torch.device, smaller: str) -> None:
    """Raise ConfigError where a measurement would keep a CPU busy for long: the default shapes are the 27B target's.

    Args:
        seconds: what all calls take at the least; on CUDA it is not even asked.
        smaller: options that take seconds, for the message.
    """
    if device.type == "cuda":
        return
    least = seconds()
    if least > LONGEST:
        raise ConfigError(
            f"measuring this shape, all calls together, would take {device} at least {least / 60:,.0f} "
            f"minutes; give a smaller one, for instance {smaller}"
        )


def environment(device: torch.device) -> dict:
    """What a number depends on."""
    on_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads",
    }


def write_json(path: str | None, **result) -> None:
    """Write a result where the caller asked for it."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


def timing_fields(timing: Timing) -> dict:
    """A `Timing` for JSON."""
    return {f"seconds_{k}" if k in ("median", "fastest", "slowest") else k: v for k, v in vars(timing).items()}
