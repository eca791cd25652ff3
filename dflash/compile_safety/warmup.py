"""Warmup: compile forward and backward before any concurrency, and leave no trace of it in the training state."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dflash.compile_safety import tracing
from dflash.compile_safety.errors import GIB, WarmupError
from dflash.compile_safety.gate import GATE
from dflash.compile_safety.tracing import is_applied
from dflash.devices import on, synchronize

MAX_COPIED_TABLE = 16 << 20  # bytes


@dataclass(frozen=True)
class WarmupJob:
    """One drafter replica to warm up.

    Args:
        device: where it runs.
        step: runs forward and backward as training does (its mask, shapes, dtype and grad mode). Called twice: to
            compile, and to prove that nothing is left to compile.
        modules, generators: whose state must be bit-identical afterwards.
        backward: False for a replica that only ever runs forward.
        name: for messages; the device where empty.
    """

    device: torch.device | str
    step: Callable[[], Any]
    modules: Sequence[nn.Module] = ()
    generators: Sequence[torch.Generator] = ()
    backward: bool = True
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or str(self.device)


@dataclass(frozen=True)
class DeviceWarmup:
    """What one job took. `peak_bytes` is the device's allocator peak, on CPU the process's peak resident size."""

    name: str
    device: str
    seconds: float  # the compiling step
    warm_seconds: float  # the step after it, which compiled nothing
    graphs: int  # graphs captured and compiled
    peak_bytes: int
    loss: float | None  # what `step` returned, where that is a number

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"loss={self.loss:.2f}, "
        return (
            f"Warmup OK: {loss}mem={self.peak_bytes / GIB:.1f}GB ({self.name}: {self.graphs} graphs in "
            f"{self.seconds:.1f} s, then {self.warm_seconds:.2f} s a step)"
        )


@dataclass(frozen=True)
class WarmupReport:
    """One entry for each job, in order."""

    devices: list[DeviceWarmup]

    @property
    def seconds(self) -> float:
        return sum(entry.seconds + entry.warm_seconds for entry in self.devices)

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.devices)


def warmup(jobs: Sequence[WarmupJob]) -> WarmupReport:
    """Run each job's step twice, one job after another, and put all state back.

    While a job runs, every other thread's trace, compilation, compiled call and backward waits (the gate), so a
    late warmup is as safe as an early one. The second step runs with compilation forbidden.

    Returns the time, the compiled graphs and the memory of each job. Afterwards the weights, buffers, gradients,
    optimizer state, generators and the global random states are bit-identical to before.

    Raises:
        WarmupError: a step needs another compilation the second time (its shapes change), ran no backward, or
            changed a frozen parameter.
    """
    return WarmupReport([_warm_one(job) for job in jobs])


def _warm_one(job: WarmupJob) -> DeviceWarmup:
    device = torch.device(job.device)
    with GATE.exclusive(), on(device), preserved_state(job):
        _reset_peak(device)
        graphs, backwards = counters["stats"]["unique_graphs"], tracing.backwards_of_thread()
        seconds, loss = _timed(job.step, device)
        graphs = counters["stats"]["unique_graphs"] - graphs
        if job.backward and is_applied() and tracing.backwards_of_thread() == backwards:
            raise WarmupError(
                f"warmup of {job.label}: the step ran no backward; it would be compiled later, under load. Call "
                "loss.backward() in the step, or say backward=False."
            )
        with _compiling_forbidden(job):
            warm_seconds, _ = _timed(job.step, device)
        return DeviceWarmup(job.label, str(device), seconds, warm_seconds, graphs, _peak(device), loss)


@contextmanager
def _compiling_forbidden(job: WarmupJob) -> Iterator[None]:
    stance = torch._dynamo.eval_frame._stance.stance
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    except RuntimeError as error:
        if "recompile" not in str(error):
            raise
        raise WarmupError(
            f"warmup of {job.label}: the second, equal step needs another compilation, so its shapes, grad mode or "
            f"captured values change from step to step. {error}"
        ) from error
    finally:
        torch.compiler.set_stance(stance)


def _timed(step: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    begin = time.perf_counter()
    result = step()
    synchronize(device)
    seconds = time.perf_counter() - begin
    if isinstance(result, Tensor) and result.numel() == 1:
        result = result.item()
    return seconds, float(result) if isinstance(result, int | float) else None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- state ------------------------------------------------------------------------------------------------------------


@dataclass
class _Saved:
    """Copies, on the host, of everything a step may change."""

    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (live, copy)
    frozen: list[tuple[str, Tensor, int]] = field(default_factory=list)  # (name, live, version)
    grads: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)  # (live, grad, its copy)
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)


@contextmanager
def preserved_state(job: WarmupJob) -> Iterator[None]:
    """Bit-identical state after the block: weights, buffers, gradients, generators, random states.

    Copies are kept on the host, so the device's memory peak stays that of the step. Frozen parameters, and buffers
    above 16 MiB that no checkpoint holds, are not copied (they are the target's tables, shared by all replicas); a
    change to one raises WarmupError.
    """
    saved = _save_modules(job.modules)
    generators = [(generator, generator.get_state()) for generator in job.generators]
    restore_random = _save_random(torch.device(job.device))
    try:
        yield
    finally:
        restore_random()
        for generator, state in generators:
            generator.set_state(state)
        _restore_modules(saved, job.label)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _save_modules(modules: Sequence[nn.Module]) -> _Saved:
    saved, known = _Saved(), set()
    for module in modules:
        saved.modes.extend((part, part.training) for part in module.modules())
        for name, parameter in module.named_parameters():
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            if not parameter.requires_grad:
                saved.frozen.append((name, parameter, parameter._version))
                continue
            saved.tensors.append((parameter, _host(parameter)))
            grad = parameter.grad
            saved.grads.append((parameter, grad, None if grad is None else _host(grad)))
        _save_buffers(module, saved, known)
    return saved


def _save_buffers(module: nn.Module, saved: _Saved, known: set[int]) -> None:
    """Buffers are copied; large ones that no checkpoint holds are shared tables and are watched like frozen weights."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if id(buffer) in known:
                continue
            known.add(id(buffer))
            if name in part._non_persistent_buffers_set and buffer.nbytes > MAX_COPIED_TABLE:
                saved.frozen.append((name, buffer, buffer._version))
            else:
                saved.tensors.append((buffer, _host(buffer)))


def _restore_modules(saved: _Saved, label: str) -> None:
    with torch.no_grad():
        for live, before in saved.tensors:
            live.copy_(before)
        for parameter, grad, before in saved.grads:
            parameter.grad = grad
            if grad is not None:
                grad.copy_(before)
    for module, training in saved.modes:
        module.training = training
    for name, parameter, version in saved.frozen:
        if parameter._version != version:
            raise WarmupError(f"warmup of {label}: the step changed the frozen tensor {name!r} in place")


def _save_random(device: torch.device) -> Callable[[], None]:
    cpu, python = torch.get_rng_state(), random.getstate()
    accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if accelerator is not None:
            torch.cuda.set_rng_state(accelerator, device)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)

    return restore
