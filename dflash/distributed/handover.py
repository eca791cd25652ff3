"""Features on their way from targets to drafters: ordered, bounded, through buffers that are made once.

Each drafter device has `depth` slots. A target worker claims the next item, captures its features, and places them
into the drafter's next free slot; places are taken in the order of the items, so every drafter gets its items in
order whatever the number of target workers, and a worker that is early waits holding one captured pack, no more.

Copies between devices run on side streams of both ends. Three events keep memory safe: the copy waits until the
capture is done and until the drafter has read what was in the slot before; the drafter's stream waits until the copy
is done. The captured tensors are kept until their copy is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from dflash.distributed.monitor import Monitor, Stopped
from dflash.target.capture import Features
from dflash.train.plan import Planner, WorkItem


def schedule(planner: Planner, first_step: int, last_step: int, replicas: int) -> Iterator[tuple[int, WorkItem]]:
    """(drafter, item) in the order in which packs are trained on."""
    for step in range(first_step, last_step + 1):
        for place, item in enumerate(planner.step(step).items):
            yield place % replicas, item


@dataclass
class Slot:
    """One preallocated place for the features of a pack on a drafter's device."""

    features: Features
    filled: torch.cuda.Event | None = None  # the copy into the slot is done
    read: torch.cuda.Event | None = None  # the drafter has read it


@dataclass
class _Lane:
    """What one drafter has in flight."""

    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    free: deque[Slot] = field(default_factory=deque)
    waiting: deque[WorkItem] = field(default_factory=deque)  # not claimed yet
    turns: deque[int] = field(default_factory=deque)  # item indices in the order in which they take a slot
    ready: dict[int, Slot] = field(default_factory=dict)


@dataclass
class Ticket:
    """An item that a target worker is to capture for a drafter."""

    drafter: int
    item: WorkItem


class HandOver:
    """The queue.

    Args:
        devices: of the drafters, in order. depth: slots for each.
        items: (drafter, item) in order. monitor: the engine's.
        paired: target worker i feeds drafter i alone (both live on one device).
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        depth: int,
        items: Iterator[tuple[int, WorkItem]],
        monitor: Monitor,
        paired: bool = False,
    ):
        self.lanes = [_Lane(device) for device in devices]
        self.depth, self.monitor, self.paired = depth, monitor, paired
        self._items = items
        self._claims = threading.Lock()
        self._exhausted = False
        self._streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}

    def allocate(self, like: Features, with_last_hidden: bool = True) -> None:
        """Make the slots, in the shapes and dtype of a first pack's features.

        Args:
            with_last_hidden: False leaves `verifier_last_hidden` out (hard labels never read it).
        """
        like = like if with_last_hidden else Features(like.all_hidden_states)
        for lane in self.lanes:
            lane.slots = [_slot_like(like, lane.device) for _ in range(self.depth)]
            lane.free.extend(lane.slots)
            for into, source in zip(lane.slots[0].features.tensors, like.tensors, strict=True):
                into.copy_(source)  # a warmup reads them

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of one drafter."""
        return sum(slot.features.nbytes for slot in self.lanes[0].slots)

    def filled(self, drafter: int) -> int:
        """Packs that lie ready for a drafter."""
        return len(self.lanes[drafter].ready)

    # -- the target's side ------------------------------------------------------------------------------------------

    def claim(self, worker: int) -> Ticket | None:
        """The next item for a target worker; None when there is none any more."""
        with self._claims:  # not the monitor's lock: the next item may have to be planned, and nobody else waits for that
            if self.monitor.stopped:
                raise Stopped
            mine = [worker] if self.paired else range(len(self.lanes))
            while not any(self.lanes[i].waiting for i in mine) and not self._exhausted:
                following = next(self._items, None)
                if following is None:
                    self._exhausted = True
                else:
                    self.lanes[following[0]].waiting.append(following[1])
            choices = [i for i in mine if self.lanes[i].waiting]
            if not choices:
                return None
            drafter = min(choices, key=lambda i: self.lanes[i].waiting[0].index)
            item = self.lanes[drafter].waiting.popleft()
            with self.monitor.changed:
                self.lanes[drafter].turns.append(item.index)
            return Ticket(drafter, item)

    def reserve(self, ticket: Ticket) -> Slot:
        """Wait for this item's turn and a free slot."""
        lane = self.lanes[ticket.drafter]

        def turn() -> Slot | None:
            if lane.turns[0] != ticket.item.index or not lane.free:
                return None
            lane.turns.popleft()
            self.monitor.changed.notify_all()
            return lane.free.popleft()

        return self.monitor.wait_for(turn)

    def place(self, ticket: Ticket, slot: Slot, features: Features, worker: int = 0) -> torch.cuda.Event | None:
        """Copy features into a reserved slot and announce it. Returns the event after which the captured tensors may
        go (None: now)."""
        done = self._copy(slot, features, self.lanes[ticket.drafter].device, worker)
        with self.monitor.changed:
            self.lanes[ticket.drafter].ready[ticket.item.index] = slot
            self.monitor.changed.notify_all()
        return done

    def _copy(self, slot: Slot, features: Features, device: torch.device, worker: int) -> torch.cuda.Event | None:
        pairs = list(zip(slot.features.tensors, features.tensors, strict=False))  # a last state may be left behind
        for into, source in pairs:
            if into.shape != source.shape:
                raise ValueError(
                    f"features of shape {list(source.shape)} do not fit a slot of {list(into.shape)}; every "
                    "pack of a run has the same length"
                )
        source_device = features.all_hidden_states.device
        captured = _record(source_device)
        with ExitStack() as stack:
            streams = [self._stream(worker, d) for d in dict.fromkeys((device, source_device)) if d.type == "cuda"]
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
                for event in (captured, slot.read):
                    if event is not None:
                        stream.wait_event(event)
            for into, source in pairs:
                into.copy_(source, non_blocking=into.is_cuda)
            slot.filled = _record(device)
            return _record(source_device) if source_device != device else slot.filled

    def _stream(self, worker: int, device: torch.device) -> torch.cuda.Stream:
        """A side stream of one target worker on one device."""
        with self.monitor.changed:
            if (worker, device) not in self._streams:
                self._streams[worker, device] = torch.cuda.Stream(device)
            return self._streams[worker, device]

    # -- the drafter's side -----------------------------------------------------------------------------------------

    def take(self, drafter: int, index: int) -> Slot:
        """The slot that holds item `index`; the current stream waits for its copy."""
        lane = self.lanes[drafter]
        slot = self.monitor.wait_for(lambda: lane.ready.pop(index, None))
        if slot.filled is not None:
            torch.cuda.current_stream(lane.device).wait_event(slot.filled)
        return slot

    def release(self, drafter: int, slot: Slot) -> None:
        """What the current stream was given so far is all that reads the slot."""
        lane = self.lanes[drafter]
        slot.read = _record(lane.device)
        with self.monitor.changed:
            lane.free.append(slot)
            self.monitor.changed.notify_all()


def _slot_like(features: Features, device: torch.device) -> Slot:
    """A slot on `device` for features of these shapes."""
    return Slot(Features(*(torch.empty_like(tensor, device=device) for tensor in features.tensors)))


def _record(device: torch.device) -> torch.cuda.Event | None:
    """An event on the current stream of a device; None on the CPU, where work is done when the call returns."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
