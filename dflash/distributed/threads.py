"""One process, one thread a device: targets capture features, drafters train on them, gradients are summed each step.

The thread that calls `step` drives. Workers never outlive a failure: the first exception stops everyone and is raised
in the driving thread, with the traceback of the worker it came from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.compile_safety import HangError, WarmupJob
from dflash.devices import on
from dflash.distributed.accounting import Ledger
from dflash.distributed.handover import HandOver, Ticket, schedule
from dflash.distributed.monitor import Monitor, Stopped
from dflash.distributed.replicas import GradientSum, check_equal, make_replicas
from dflash.distributed.sources import OnDevice, make_sources
from dflash.errors import ConfigError
from dflash.runs.record import Run
from dflash.runs.worker_log import worker_output
from dflash.target.features import FeatureSource, UntilLost
from dflash.train.holding import of_drafter, of_target
from dflash.train.plan import Planner, StepPlan
from dflash.train.prepare import Prepared
from dflash.train.step import Engine, Replica, refuse_lost, warmup_jobs
from dflash.train.step_graph import capture

if TYPE_CHECKING:
    from dflash.data import Pack

_JOIN = 10.0  # seconds that a worker may take to leave


class PipelineEngine(Engine):
    """`Engine` over threads.

    Args:
        replicas: one a drafter device, with equal weights; the first is evaluated and saved.
        sources: one a target worker; each gives the same features for the same pack.
        source_devices: where each worker's target runs.
        planner: the run's.
        last_step: targets prepare no item past it.
        queue_depth: packs of features in flight to each drafter.
        run: where records go; None writes none.
        paired: target worker i feeds drafter i alone.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        sources: Sequence[FeatureSource],
        source_devices: Sequence[torch.device],
        planner: Planner,
        last_step: int,
        *,
        queue_depth: int = 2,
        run: Run | None = None,
        paired: bool = False,
    ):
        if paired and len(sources) != len(replicas):
            raise ConfigError(f"paired targets and drafters must be as many, got {len(sources)} and {len(replicas)}")
        self.replica, self.replicas, self.sources = replicas[0], list(replicas), [UntilLost(s) for s in sources]
        self.source_devices = [torch.device(d) for d in source_devices]
        self.planner = planner
        self.last_step, self.queue_depth, self.paired = last_step, queue_depth, paired
        self.held_out: FeatureSource = OnDevice(sources[0], self.source_devices[0])  # asked by the driving thread
        self.run = run
        self.monitor = Monitor()
        self.reduce = GradientSum(self.replicas)
        metrics = None if run is None else run.metrics
        self.drafter_ledgers = [Ledger(f"drafter[{i}]", r.device, metrics) for i, r in enumerate(self.replicas)]
        self.target_ledgers = [Ledger(f"target[{i}]", d, metrics) for i, d in enumerate(self.source_devices)]
        self.hand_over: HandOver | None = None
        # A target and a drafter on one GPU share its stream, so taking turns in queueing work costs little. It makes what
        # either allocates independent of the other's timing: the peak is the larger one's, not now and then the sum.
        both = {r.device for r in self.replicas} & set(self.source_devices)
        self._turns = {device: threading.Lock() for device in both if device.type == "cuda"}
        self._order: tuple[int, str, StepPlan | None, float] = (0, "", None, 0.0)
        self._done: dict[int, Tensor | None] = {}
        self._threads: list[threading.Thread] = []

    # -- the driving thread -----------------------------------------------------------------------------------------

    def warmup_jobs(self, plan: StepPlan) -> list[WarmupJob]:
        """Make the buffers for the run that begins with `plan`; one job for each replica that compiles something."""
        self._make_buffers(plan)
        item, jobs = plan.items[0], []
        for i, (replica, lane) in enumerate(zip(self.replicas, self.hand_over.lanes, strict=True)):
            features = lane.slots[0].features
            jobs += [replace(job, name=f"drafter[{i}]") for job in warmup_jobs([replica], lambda f=features: (item, f))]
        return jobs

    def capture(self, plan: StepPlan) -> list[str]:
        """One replica after another, before their workers start."""
        if not self.replica.padded:
            return []
        self._make_buffers(plan)
        lines = []
        for replica, lane in zip(self.replicas, self.hand_over.lanes, strict=True):
            with on(replica.device):
                lines.append(capture(replica, plan.items[0], lane.slots[0].features))
        return lines

    def held_out_source(self, packs: list[Pack]) -> FeatureSource:
        return self.held_out

    def named_tensors(self) -> Iterator[tuple[str, Iterable[Tensor]]]:
        for source in self.sources:
            yield from of_target(source.source)
        for replica in self.replicas:
            yield from of_drafter(replica.drafter, replica.optimizer)
        for lane in self.hand_over.lanes:
            yield "features in flight", [tensor for slot in lane.slots for tensor in slot.features.tensors]

    def load_optimizer(self, state: dict, folder: Path | None = None) -> None:
        """Every replica goes on from one state."""
        for replica in self.replicas:
            replica.optimizer.load_state_dict(state)

    def start(self, first_step: int) -> None:
        """Let the workers go."""
        plan = self.planner.step(first_step)
        self._make_buffers(plan)
        self._log(
            f"{len(self.sources)} target and {len(self.replicas)} drafter workers, {self.queue_depth} packs in "
            f"flight a drafter ({self.hand_over.nbytes / 2**20:,.0f} MiB), gradients: {self.reduce.how}"
        )
        for i in range(min(len(self.sources), len(plan.items)) if self.paired else len(self.sources)):
            self._spawn(f"target[{i}]", self._target, i)
        for i in range(len(self.replicas)):
            self._spawn(f"drafter[{i}]", self._draft, i)

    def step(self, plan: StepPlan, lr: float) -> Tensor:
        """One step over all replicas: their shares, the sum of their gradients, their equal updates."""
        sums = self._everyone("share", plan, lr)
        self.reduce.start()
        applied = self._everyone("apply", plan, lr)
        self._report(force=plan.step == self.last_step)
        device = self.replica.device
        present = [s.to(device) for s in sums if s is not None]
        result = torch.cat([torch.stack(present).sum(0), applied[0]])
        refuse_lost(result, next((source.lost for source in self.sources if source.lost), None))
        return result

    def close(self) -> None:
        """Stop the workers, whatever state they are in."""
        self.monitor.stop()
        deadline = time.monotonic() + _JOIN
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            self._log(f"still busy after {_JOIN:.0f} s, left behind: {', '.join(left)}", "warning")
        elif self.monitor.error is None and self._threads:  # after a failure a device may not answer any more
            for ledger in (*self.drafter_ledgers, *self.target_ledgers):
                ledger.finish()
            self._report(force=True)
        self._threads = []
        self.hand_over = None

    def on_hang(self, reason: str) -> None:
        self.monitor.fail("watchdog", HangError(reason))

    def verify(self) -> None:
        """Raises ReplicasDivergedError where the replicas' weights are not bit-equal."""
        check_equal(self.replicas)

    def _everyone(self, what: str, plan: StepPlan, lr: float) -> list[Tensor | None]:
        """Give all drafters an order and wait for all of them."""
        with self.monitor.changed:
            self.monitor.check()
            self._done = {}
            self._order = (self._order[0] + 1, what, plan, lr)
            self.monitor.changed.notify_all()
        try:
            return self.monitor.wait_for(
                lambda: (
                    [self._done[i] for i in range(len(self.replicas))] if len(self._done) == len(self.replicas) else None
                ),
                raise_failures=True,
            )
        except Stopped:
            raise ConfigError("the engine is closed; make a new one to train on") from None

    def _report(self, force: bool = False) -> None:
        for i, ledger in enumerate(self.drafter_ledgers):
            ledger.report(self.hand_over.filled(i), force)
        for ledger in self.target_ledgers:
            ledger.report(None, force)

    def _log(self, message: str, level: str = "info") -> None:
        if self.run is not None:
            self.run.metrics.write("log", worker="main", level=level, message=message)

    def _make_buffers(self, plan: StepPlan) -> None:
        """The queue from this step on. The first pack goes through every target, one after another, so that kernels
        are tuned before anything is concurrent."""
        if self.hand_over is not None:
            return
        features = None
        for source, device in zip(self.sources, self.source_devices, strict=True):
            with on(device):
                features = source.get(plan.items[0].pack)
        items = schedule(self.planner, plan.step, self.last_step, len(self.replicas))
        self.hand_over = HandOver(
            [replica.device for replica in self.replicas], self.queue_depth, items, self.monitor, self.paired
        )
        self.hand_over.allocate(features, self.replica.options.soft_labels)

    def _turn(self, device: torch.device):
        """The right to queue work on a device that a target and a drafter share."""
        return self._turns.get(device) or nullcontext()

    # -- the workers ------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, work: Callable[[int], None], index: int) -> None:
        def run() -> None:
            device = (self.source_devices if work == self._target else [r.device for r in self.replicas])[index]
            output = nullcontext() if self.run is None else worker_output(self.run.metrics, name, self.run.path / "logs")
            with output:
                try:
                    with on(device):
                        work(index)
                except Stopped:
                    pass
                except BaseException as error:  # carried to the driving thread, whatever it is
                    self.monitor.fail(name, error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _target(self, index: int) -> None:
        """Claim, capture, hand over; until there is nothing left."""
        source, ledger, queue = self.sources[index], self.target_ledgers[index], self.hand_over
        ledger.enter("wait")
        kept: list[tuple[object, torch.cuda.Event | None]] = []  # features whose copies may still run
        while True:
            ticket: Ticket | None = queue.claim(index)
            if ticket is None:
                return
            with self._turn(self.source_devices[index]):
                ledger.enter("capture", step=None)
                features = source.get(ticket.item.pack)
                ledger.enter("wait")
            ledger.add_tokens(int(ticket.item.pack.lengths.sum()))
            slot = queue.reserve(ticket)
            done = queue.place(ticket, slot, features, index)
            for _, event in kept:
                if event is not None:  # queued behind this capture: the copy had all its time to run
                    torch.cuda.current_stream(self.source_devices[index]).wait_event(event)
            kept = [(features, done)]

    def _draft(self, index: int) -> None:
        """Obey the driving thread."""
        replica, ledger, queue = self.replicas[index], self.drafter_ledgers[index], self.hand_over
        seen = 0
        ledger.enter("idle")
        while True:
            seen, what, plan, lr = self.monitor.wait_for(lambda seen=seen: self._order if self._order[0] > seen else None)
            if what == "share":
                result = None
                self.reduce.ready(index)  # for a share without items; each item moves it on
                ledger.enter("wait", plan.step)
                for item in plan.share(index, len(self.replicas)):
                    slot = queue.take(index, item.index)
                    with self._turn(replica.device):
                        ledger.enter("forward+backward", plan.step)
                        sums = replica.accumulate(item, slot.features, plan.denominator)
                        self.reduce.ready(index)
                        queue.release(index, slot)
                        ledger.enter("wait", plan.step)
                    ledger.add_tokens(int(item.pack.lengths.sum()))
                    result = sums if result is None else result + sums
                ledger.enter("reduce", plan.step)
            else:
                with self._turn(replica.device):
                    self.reduce.wait(index)
                    ledger.enter("optimizer", plan.step)
                    result = replica.apply(lr, plan)
                    ledger.enter("idle")
            with self.monitor.changed:
                self._done[index] = result
                self.monitor.changed.notify_all()


def threads_engine(prepared: Prepared, run: Run | None = None) -> PipelineEngine:
    """The engine of a prepared run: replicas of its drafter and copies of its target on the run's devices."""
    resolved = prepared.resolved
    topology, config = resolved.topology, resolved.config
    engine = PipelineEngine(
        make_replicas(Replica(prepared.drafter, config.train), topology.drafters),
        make_sources(prepared),
        [target[0] for target in topology.targets],
        prepared.planner,
        config.train.steps,
        queue_depth=config.runtime.queue_depth,
        run=run,
        paired=topology.paired,
    )
    engine.held_out = OnDevice(prepared.source, prepared.target.device)
    return engine
