"""Targets and drafters in threads: the serial reference's numbers, order, backpressure, failures."""

from __future__ import annotations

import threading
import time
import traceback

import pytest
import torch
from patience import PATIENCE, wait_until
from runner_jobs import LENGTH, drive, drive_until_hang, first_replica, options, packs, planner, serial, weights

from dflash.distributed.handover import HandOver, schedule
from dflash.distributed.monitor import Monitor
from dflash.distributed.replicas import ReplicasDivergedError, copy_target, make_replicas
from dflash.distributed.threads import PipelineEngine
from dflash.errors import worker_of
from dflash.target.capture import Features
from dflash.target.features import OnlineFeatures
from dflash.train.plan import Planner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference():
    return serial(options())


def engine_of(drafters: int, targets: int, settings, wrap=lambda source, i: source, **keywords):
    target, replica = first_replica(settings)
    replicas = make_replicas(replica, [CPU] * drafters)
    plans = planner(settings, replica.drafter)
    own = [target, *(copy_target(target, CPU) for _ in range(targets - 1))]
    sources = [wrap(OnlineFeatures(t), i) for i, t in enumerate(own)]
    return PipelineEngine(replicas, sources, [CPU] * targets, plans, settings.steps, **keywords), plans


@pytest.mark.parametrize(("drafters", "targets", "depth"), [(2, 1, 2), (2, 2, 1), (2, 3, 8), (3, 5, 2), (1, 1, 2)])
def test_losses_and_weights_are_those_of_the_serial_reference(reference, drafters, targets, depth):
    settings = options()
    engine, plans = engine_of(drafters, targets, settings, queue_depth=depth)
    losses = drive(engine, plans, settings)
    assert losses == pytest.approx(reference[0], abs=1e-6)
    assert float((weights(engine.replica) - reference[1]).abs().max()) < 1e-6
    assert len(set(losses)) == len(losses) and losses[-1] < losses[0]
    for other in engine.replicas[1:]:
        assert torch.equal(weights(other), weights(engine.replica))
    engine.verify()


def test_paired_targets_and_drafters(reference):
    settings = options(steps=5)
    engine, plans = engine_of(2, 2, settings, paired=True)
    assert drive(engine, plans, settings) == pytest.approx(reference[0][:5], abs=1e-6)


def test_a_drafter_without_items_joins_with_zeros():
    settings = options(packs_per_step=1, steps=4)
    wanted, final = serial(settings)
    for paired in (False, True):
        engine, plans = engine_of(3, 3, settings, paired=paired)
        assert drive(engine, plans, settings) == pytest.approx(wanted, abs=1e-6)
        assert float((weights(engine.replicas[2]) - final).abs().max()) < 1e-6
        engine.verify()


def test_on_a_shared_gpu_capture_and_step_take_turns(reference, monkeypatch):
    """The CPU stands for the GPU; without the turns both sides are inside at once."""
    inside, together = [0], []

    def watched(call):
        def inner(*arguments):
            inside[0] += 1
            together.append(inside[0])
            time.sleep(0.01)
            try:
                return call(*arguments)
            finally:
                inside[0] -= 1

        return inner

    class Watched:
        def __init__(self, source):
            self.get, self.close = watched(source.get), source.close

    for turns, most in (({}, 2), ({CPU: threading.Lock()}, 1)):
        together.clear()
        settings = options(steps=6, packs_per_step=2)
        engine, plans = engine_of(1, 1, settings, wrap=lambda s, i: Watched(s), paired=True)
        monkeypatch.setattr(engine, "_turns", turns)
        monkeypatch.setattr(engine.replica, "accumulate", watched(engine.replica.accumulate))
        drive(engine, plans, settings)
        assert max(together) == most


def test_weights_that_part_are_noticed():
    settings = options(steps=1)
    engine, _ = engine_of(2, 1, settings)
    engine.verify()
    with torch.no_grad():
        engine.replicas[1].drafter.fc.weight.view(-1)[7] += 1e-7
    with pytest.raises(ReplicasDivergedError, match=r"drafter\[1\]"):
        engine.verify()


class Failing:
    """A source that raises at its third request."""

    def __init__(self, source):
        self.source, self.calls = source, 0

    def get(self, pack):
        self.calls += 1
        if self.calls == 3:
            raise OSError("a made-up failure of the target")
        return self.source.get(pack)


def test_a_worker_that_raises_ends_the_run_with_its_traceback():
    settings = options()
    engine, plans = engine_of(2, 2, settings, wrap=lambda s, i: Failing(s) if i == 1 else s)
    before = threading.active_count()
    with pytest.raises(OSError, match="a made-up failure") as caught:
        drive(engine, plans, settings)
    assert "in get" in "".join(traceback.format_exception(caught.value))
    assert worker_of(caught.value) == "target[1]" and "raised in worker target[1]" in caught.value.__notes__
    assert threading.active_count() == before


def test_a_drafter_that_raises_ends_the_run_too():
    settings = options()
    engine, plans = engine_of(2, 2, settings)
    original, calls = engine.replicas[1].accumulate, []

    def accumulate(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("a made-up failure of the drafter")
        return original(*arguments)

    engine.replicas[1].accumulate = accumulate
    with pytest.raises(ValueError, match="a made-up failure of the drafter") as caught:
        drive(engine, plans, settings)
    assert worker_of(caught.value) == "drafter[1]"
    assert not [t for t in threading.enumerate() if t.name.startswith(("drafter[", "target["))]


def test_a_target_that_hangs_ends_the_run_with_all_stacks(tmp_path):
    """The watchdog's bound passes; the step that is waited for ends with HangError."""
    release, settings = threading.Event(), options()

    class Hanging:
        def __init__(self, source):
            self.source, self.calls = source, 0

        def get(self, pack):
            self.calls += 1
            if self.calls > 3:
                release.wait(PATIENCE)
            return self.source.get(pack)

    engine, plans = engine_of(1, 1, settings, wrap=lambda s, i: Hanging(s))
    drive_until_hang(engine, plans, settings, tmp_path, release)
    assert "test_runner_threads.py" in (tmp_path / "stacks.txt").read_text()


class Stamped:
    """Features that say which pack and which element they are."""

    def __init__(self, width: int = 6):
        self.width, self.captured = width, 0

    def get(self, pack):
        self.captured += 1
        hidden = torch.arange(LENGTH * self.width, dtype=torch.float32).view(1, LENGTH, self.width) + 1000 * pack.pack_id
        return Features(hidden, hidden[..., :2] + 0.5)


class Counting:
    """A planner of stamped packs: pack ids are numbers of the stream."""

    def __init__(self, rows, per_step):
        self.rows, self.per_step = rows, per_step

    def step(self, step):
        from dflash.train.plan import StepPlan, WorkItem

        first = (step - 1) * self.per_step
        items = []
        for index in range(first, first + self.per_step):
            pack = self.rows[index % len(self.rows)]
            items.append(WorkItem(index, 0, pack, None, 1.0, 1))
        return StepPlan(step, tuple(items), 1.0)


@pytest.mark.parametrize("depth", [1, 8])
def test_stamped_packs_cross_unharmed(depth):
    monitor, rows = Monitor(), packs(7)
    source, total, drafters = Stamped(), 250, 2
    queue = HandOver([CPU] * drafters, depth, schedule(Counting(rows, 4), 1, total, drafters), monitor)
    queue.allocate(source.get(rows[0]))
    storage = {slot.features.all_hidden_states.data_ptr() for lane in queue.lanes for slot in lane.slots}

    def feed(worker):
        while (ticket := queue.claim(worker)) is not None:
            queue.place(ticket, queue.reserve(ticket), source.get(ticket.item.pack), worker)

    feeders = [threading.Thread(target=feed, args=(i,), daemon=True) for i in range(3)]
    for feeder in feeders:
        feeder.start()
    mismatches, seen, wanted = 0, set(), Stamped()
    for index in range(total * 4):
        slot = queue.take(index % 4 % drafters, index)
        seen.add(slot.features.all_hidden_states.data_ptr())
        expected = wanted.get(rows[index % len(rows)])
        mismatches += int((slot.features.all_hidden_states != expected.all_hidden_states).sum())
        mismatches += int((slot.features.verifier_last_hidden != expected.verifier_last_hidden).sum())
        queue.release(index % 4 % drafters, slot)
    for feeder in feeders:
        feeder.join(PATIENCE)
    assert mismatches == 0 and seen <= storage and len(storage) == depth * drafters
    assert not any(feeder.is_alive() for feeder in feeders)


def test_a_slow_drafter_makes_the_targets_wait():
    settings = options(packs_per_step=1, steps=40)
    stamped = []

    class Count:
        def __init__(self, source):
            self.source = source

        def get(self, pack):
            stamped.append(pack.pack_id)
            return self.source.get(pack)

    depth, targets = 2, 2
    engine, plans = engine_of(1, targets, settings, wrap=lambda s, i: Count(s), queue_depth=depth)
    try:
        engine.start(1)
        full = depth + 2 * targets  # nobody trains; each target captured one pack before the start
        wait_until(lambda: len(stamped) >= full)
        time.sleep(0.3)
        assert len(stamped) == full
        buffers = {s.features.all_hidden_states.data_ptr() for s in engine.hand_over.lanes[0].slots}
        for step in range(1, 4):
            engine.step(plans.step(step), settings.lr)
        wait_until(lambda: len(stamped) >= full + 3)
        time.sleep(0.3)
        assert len(stamped) == full + 3
        assert {s.features.all_hidden_states.data_ptr() for s in engine.hand_over.lanes[0].slots} == buffers
    finally:
        engine.close()
    assert engine.target_ledgers[0].waiting > 0.3  # most of both pauses


def test_closing_in_the_middle_leaves_no_thread():
    settings = options()
    engine, plans = engine_of(2, 3, settings)
    engine.start(1)
    engine.step(plans.step(1), settings.lr)
    engine.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(("drafter[", "target["))]


def test_planning_the_next_item_keeps_nobody_else_waiting():
    """A plan of a large pack takes milliseconds: neither the queue nor who asks for an earlier plan may wait for it."""
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Planner):
        def _make(self, step: int):
            if step == 2:
                asked.set()
                assert go_on.wait(PATIENCE)
            return super()._make(step)

    plans = Slow(packs(), options(packs_per_step=1), 4, 8)
    first = plans.step(1)
    monitor = Monitor()
    queue = HandOver([CPU], 1, schedule(plans, 1, 2, 1), monitor)
    assert queue.claim(0).item.index == 0
    claimed = []
    worker = threading.Thread(target=lambda: claimed.append(queue.claim(1)), daemon=True)
    worker.start()
    assert asked.wait(PATIENCE)
    try:
        assert monitor.changed.acquire(timeout=PATIENCE)
        monitor.changed.release()
        assert plans.step(1) is first
    finally:
        go_on.set()
        worker.join(PATIENCE)
    assert claimed[0].item.index == 1 and plans.step(2) is plans.step(2) and queue.claim(0) is None
