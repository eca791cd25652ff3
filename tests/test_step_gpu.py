"""A training step on a GPU leaves the host free to run ahead: nothing in it waits for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch

from dflash.bench.pipeline_case import Case, make_planner, make_replica, make_target
from dflash.bench.shapes import SMALL
from dflash.compile_safety import installed
from dflash.devices import Readback
from dflash.target.features import OnlineFeatures

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def no_waiting():
    """torch raises where an operation waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["flex", "triton"])
@pytest.mark.parametrize("soft", [True, False])
def test_capture_and_step_wait_for_nothing(attention, soft):
    case = Case(SMALL, packs=4, soft_labels=soft)
    target = make_target(case, torch.device("cuda:0"))
    replica = make_replica(case, target, torch.device("cuda:0"))
    replica.drafter.attention_backend = attention
    source, planner = OnlineFeatures(target, last_hidden=soft), make_planner(case)

    def step(number: int) -> torch.Tensor:
        plan = planner.step(number)
        for item in plan.items:
            replica.accumulate(item, source.get(item.pack), plan.denominator)
        return replica.apply(1e-3, plan)

    with installed():
        for number in (1, 2):  # compiles, and fills the caches of host and device memory
            step(number)
        with no_waiting():
            result = step(3)
    assert result.tolist()[1] == 1.0
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():  # the guard itself works
        result.tolist()


def test_reading_a_result_does_not_wait_for_what_was_queued_after_it():
    result = torch.arange(3.0, device="cuda")
    readback = Readback(result)
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's time
    later = torch.cuda.Event()
    later.record()
    assert readback.read() == [0.0, 1.0, 2.0] and not later.query()
    assert result.tolist() == [0.0, 1.0, 2.0] and later.query(), "tolist does wait"
