"""The gate: shared and exclusive sides, re-entrance, upgrades, fairness, time limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from compile_helpers import run_threads
from patience import PATIENCE

from dflash.compile_safety import GateTimeoutError, TraceGate
from dflash.compile_safety.gate import in_backward


def gate(**kwargs) -> TraceGate:
    return TraceGate(**{"timeout": PATIENCE, "passes": lambda: False, **kwargs})


def test_shared_holders_overlap_and_exclusive_ones_do_not():
    tested, inside, seen = gate(), threading.Barrier(3), []

    def shared() -> None:
        with tested.shared():
            inside.wait(PATIENCE)  # only passes when all three are inside at once

    assert run_threads(shared, shared, shared) == [None] * 3

    def exclusive() -> None:
        with tested.exclusive():
            seen.append("in")
            time.sleep(0.02)
            seen.append("out")

    assert run_threads(exclusive, exclusive, exclusive) == [None] * 3
    assert seen == ["in", "out"] * 3


def test_exclusive_waits_for_shared_and_the_other_way_round():
    tested, order = gate(), []
    with tested.shared():
        thread = threading.Thread(target=lambda: (tested.enter_exclusive(), order.append("exclusive")))
        thread.start()
        time.sleep(0.1)
        order.append("shared ends")
    thread.join(PATIENCE)
    assert order == ["shared ends", "exclusive"]


def test_both_sides_are_reentrant_in_one_thread():
    tested = gate(timeout=0.5)
    with tested.shared(), tested.shared(), tested.exclusive(), tested.shared(), tested.exclusive():
        pass
    with tested.exclusive(), tested.shared(), tested.exclusive():
        pass
    assert "exclusive: nobody; shared: nobody; waiting: nobody" == tested.describe()


def test_two_threads_that_hold_the_shared_side_can_both_upgrade():
    tested, both, alone = gate(), threading.Barrier(2), []

    def upgrade() -> None:
        with tested.shared():
            both.wait(PATIENCE)
            with tested.exclusive():
                alone.append(1)
                assert len(alone) == 1
                time.sleep(0.05)
                alone.pop()
            with tested.shared():
                pass

    assert run_threads(upgrade, upgrade) == [None, None]
    assert "shared: nobody" in tested.describe()


def test_the_shared_hold_is_back_after_an_upgrade():
    tested, order = gate(), []

    def other() -> None:
        with tested.exclusive():
            order.append("other")

    with tested.shared():
        with tested.exclusive():
            thread = threading.Thread(target=other)
            thread.start()
            time.sleep(0.1)
        time.sleep(0.1)
        order.append("holder")
    thread.join(PATIENCE)
    assert order == ["holder", "other"]


def test_a_tracing_loop_and_busy_callers_do_not_starve_each_other():
    tested, seen = gate(), [0, 0, 0]  # how often each had its turn

    def loop(index: int, side: Callable) -> None:  # as long as another one still waits for its turns
        while min(seen) < 50:
            with side():
                seen[index] += 1

    sides = (tested.exclusive, tested.shared, tested.shared)
    assert run_threads(*(lambda i=i, side=side: loop(i, side) for i, side in enumerate(sides))) == [None] * 3


def test_a_thread_inside_a_backward_never_waits():
    tested = gate(passes=lambda: threading.current_thread().name == "t0", timeout=0.5)
    passed = []

    def engine() -> None:
        with tested.shared(), tested.exclusive():
            passed.append(True)

    with tested.exclusive():
        assert run_threads(engine) == [None]
    assert passed == [True]


def test_a_caller_that_others_depend_on_goes_before_a_queued_trace():
    tested = gate(barge_after=0.1)
    needed, done = threading.Event(), threading.Event()

    def holder() -> None:  # in a compiled call, waits for the caller's progress
        with tested.shared():
            needed.set()
            assert done.wait(PATIENCE)

    def tracer() -> None:
        needed.wait(PATIENCE)
        with tested.exclusive():
            pass

    def caller() -> None:
        needed.wait(PATIENCE)
        time.sleep(0.1)  # queued behind the trace
        with tested.shared():
            done.set()

    assert run_threads(holder, tracer, caller) == [None] * 3


def test_a_wait_without_end_raises_and_names_the_holder():
    tested = gate(timeout=0.3)
    with tested.exclusive():
        (error,) = run_threads(lambda: tested.enter_shared())
    assert isinstance(error, GateTimeoutError)
    assert "MainThread" in str(error) and "t0 (shared)" not in str(error.__cause__)
    with tested.shared():
        (error,) = run_threads(lambda: tested.enter_exclusive())
    assert isinstance(error, GateTimeoutError) and "shared: MainThread" in str(error)
    with tested.exclusive():  # nothing is left behind
        pass


def test_an_interrupted_wait_leaves_nothing_behind():
    tested = gate()

    class Interrupt(Exception):
        pass

    class Interrupting(threading.Event):
        def wait(self, timeout=None):
            raise Interrupt

    with tested.shared():
        real, threading.Event = threading.Event, Interrupting
        try:
            (error,) = run_threads_with(real, lambda: tested.enter_exclusive())
        finally:
            threading.Event = real
    assert isinstance(error, Interrupt)
    assert tested.describe() == "exclusive: nobody; shared: nobody; waiting: nobody"


def run_threads_with(event_type: type, body) -> list[BaseException | None]:
    """Like run_threads, for a body under a replaced threading.Event: the thread is started on the real one."""
    errors: list[BaseException | None] = [None]
    replaced, threading.Event = threading.Event, event_type

    def guarded() -> None:
        threading.Event = replaced
        try:
            body()
        except BaseException as error:
            errors[0] = error

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(PATIENCE)
    return errors


def test_in_backward_is_true_inside_hooks_only():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(in_backward()))
    assert not in_backward()
    (x * 2).sum().backward()
    assert seen == [True] and not in_backward()
