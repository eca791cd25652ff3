"""Switching the protection on and off, and all of it as one context."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.compile_safety import tracing
from dflash.compile_safety.gate import GATE
from dflash.compile_safety.seal import sealed
from dflash.compile_safety.warmup import WarmupJob, WarmupReport, warmup
from dflash.compile_safety.watchdog import Watchdog

DEFAULT_RECOMPILE_LIMIT = 64  # shapes x devices x grad modes of one process; torch's own 8 is for one device

_lock = threading.Lock()
_undo: ExitStack | None = None
_count = 0
_seen: tracing.ForeignTrace | None = None
_fork_hook_set = False


def install(recompile_limit: int = DEFAULT_RECOMPILE_LIMIT) -> tracing.ForeignTrace:
    """Make compiled calls, traces and backward passes of this process safe to run from several threads.

    Call it before the threads start; functions that `torch.compile` wrapped earlier are protected too. Nested calls
    count, and the last `uninstall()` takes every change back. What it changes in torch:

      * the tracing check and a trace's patches of `nn.Module` concern the tracing thread only, where torch does not
        already do that (decided by watching a trace, once for the process);
      * traces and compilations take turns with compiled calls and backward passes (the gate);
      * a backward is compiled together with its forward, in the calling thread, never in an autograd engine thread;
      * a build of torch for CUDA on a machine without a GPU is kept from crashing at its first compilation in a thread
        (`settle_device_guard`; called from the main thread only);
      * torch keeps compiled versions of one function for `recompile_limit` combinations of shape, device and grad
        mode, in every thread (a limit set in torch's own configuration may hold in one thread only).

    Returns what the watched trace showed.
    """
    global _undo, _count, _seen, _fork_hook_set
    with _lock:
        _count += 1
        if _count > 1:
            return _seen
        if not _fork_hook_set:
            os.register_at_fork(after_in_child=GATE._reset)
            _fork_hook_set = True
        settle_device_guard()
        with ExitStack() as stack:
            _seen = tracing.apply(stack, recompile_limit)
            _undo = stack.pop_all()
        return _seen


def settle_device_guard() -> bool:
    """Have torch replace the device guard of a GPU that is not there now, in the main thread. Returns whether it could.

    A build for CUDA without a GPU does it in whichever thread compiles first, and keeps a pointer to an object of that
    thread. When the thread has ended, the next compilation anywhere reads freed memory and the process dies of a
    segmentation fault (seen on torch 2.11.0, in `c10::impl::ensureCUDADeviceGuardSet`; a build for the CPU, and one that
    has its GPU, replace nothing).
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None or threading.current_thread() is not threading.main_thread():
        return False
    ensure()
    return True


def uninstall() -> None:
    """Undo one `install()`; the last one restores torch. Raises RuntimeError where nothing is installed."""
    global _undo, _count
    with _lock:
        if not _count:
            raise RuntimeError("compile_safety.uninstall() without install()")
        _count -= 1
        if not _count:
            with GATE.exclusive():
                _undo.close()
            _undo = None


def is_installed() -> bool:
    return _count > 0


@contextmanager
def installed(recompile_limit: int = DEFAULT_RECOMPILE_LIMIT) -> Iterator[tracing.ForeignTrace]:
    """`install()` for the length of a block."""
    seen = install(recompile_limit)
    try:
        yield seen
    finally:
        uninstall()


@dataclass
class Protection:
    """What `protected()` hands out: the warmup's report and the running watchdog, where asked for."""

    warmup: WarmupReport | None = None
    watchdog: Watchdog | None = None

    def beat(self) -> None:
        """Tell the watchdog, if there is one, that a step was completed."""
        if self.watchdog is not None:
            self.watchdog.beat()


@contextmanager
def protected(
    jobs: Sequence[WarmupJob] = (),
    *,
    run_dir: str | Path | None = None,
    step_timeout: float = 600.0,
    on_hang: Callable[[str], None] | None = None,
) -> Iterator[Protection]:
    """Everything at once: install, warm up `jobs`, seal if there were any, and watch; all undone at the end of the block.

    Args:
        jobs: warmed one after another (`warmup`).
        run_dir: where a hang leaves its stacks; None runs without a watchdog.
        step_timeout: seconds without `beat()` that count as a hang.
        on_hang: told the reason before HangError is raised in the main thread.
    """
    protection = Protection()
    with ExitStack() as stack:
        stack.enter_context(installed())
        if jobs:
            protection.warmup = warmup(jobs)
            stack.enter_context(sealed())
        if run_dir is not None:
            protection.watchdog = stack.enter_context(Watchdog(run_dir, step_timeout, on_hang=on_hang))
        yield protection
