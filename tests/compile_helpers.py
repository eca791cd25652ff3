"""Shared by the compile-safety tests: a clean compiler around each test, held traces, threads that report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo.config as dynamo_config

from dflash import compile_safety

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
def held_trace(seconds: float = 20.0) -> Iterator[threading.Event]:
    """Another thread inside torch.fx.symbolic_trace until the block ends, the event is set, or `seconds` pass."""
    inside, release = threading.Event(), threading.Event()

    def function(x):
        inside.set()
        release.wait(seconds)
        return x + 1

    thread = threading.Thread(target=lambda: torch.fx.symbolic_trace(function), daemon=True, name="holder")
    thread.start()
    assert inside.wait(20)
    try:
        yield release
    finally:
        release.set()
        thread.join(20)


def run_threads(*bodies: Callable[[], object], timeout: float = 60.0) -> list[BaseException | None]:
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
