"""Where the features of a drafter rank come from: from target ranks, or from a target of its own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.distributed.cluster import Cluster
from dflash.distributed.schedule import Route, Schedule
from dflash.errors import ServerLostError
from dflash.target.capture import Features
from dflash.target.features import FeatureSource, UntilLost
from dflash.train.plan import WorkItem

if TYPE_CHECKING:
    from dflash.data import Pack


class Inbox:
    """Where a drafter rank's features come from, item after item."""

    depth: int  # items at hand, or asked for, and not yet taken

    def example(self, item: WorkItem) -> Features:
        """Features of the run's shapes, for a warmup."""
        raise NotImplementedError

    def held_out(self, packs: list[Pack]) -> FeatureSource:
        """The held-out packs' features, on the rank that evaluates."""
        raise NotImplementedError

    def open(self, step: int) -> None:
        """Items of the steps up to this one may come."""

    def expect(self, items: tuple[WorkItem, ...]) -> None:
        """The items that are taken next."""

    def take(self, index: int) -> Features:
        """The features of item `index`, the next one of this drafter."""
        raise NotImplementedError

    def done(self, features: Features) -> None:
        """What `take` gave is read."""

    def capture(self, item: WorkItem) -> None:
        """While there is nothing else to do: have this item's features at hand, the next to be taken."""

    def drain(self) -> None:
        """Take what may still come, and drop it."""


class Received(Inbox):
    """From target ranks, into `depth` slots that are made once, in the order of this drafter's items."""

    def __init__(self, cluster: Cluster, schedule: Schedule, depth: int):
        store, key = cluster.store, f"features/{cluster.node}"
        store.wait([key])
        kind = json.loads(store.get(key))
        options = {"dtype": getattr(torch, kind["dtype"]), "device": cluster.device}
        self.cluster, self._opened = cluster, 0
        self._routes = (r for r in schedule if r.replica == cluster.replica)
        self._next: Route | None = next(self._routes, None)
        self.free = deque(Features(*(torch.zeros(shape, **options) for shape in kind["shapes"])) for _ in range(depth))
        self._coming: deque[tuple[Route, Features, list[dist.Work]]] = deque()

    @property
    def depth(self) -> int:
        return len(self._coming)

    def example(self, item: WorkItem) -> Features:
        return self.free[0]

    def held_out(self, packs: list[Pack]) -> FeatureSource:
        return HeldOutFeatures(self.cluster, packs, self.free[0])

    def open(self, step: int) -> None:
        self._opened = step
        self._post()

    def _post(self) -> None:
        """Ask for the next items, as far as there are slots and opened steps."""
        while self.free and self._next is not None and self._next.step <= self._opened:
            route, slot = self._next, self.free.popleft()
            source = self.cluster.roles.target_rank(self.cluster.node, route.target)
            self._coming.append((route, slot, [dist.irecv(t, source, tag=i) for i, t in enumerate(slot.tensors)]))
            self._next = next(self._routes, None)

    def take(self, index: int) -> Features:
        route, slot, works = self._coming.popleft()
        assert route.item.index == index, (route.item.index, index)
        for work in works:
            work.wait()
        return slot

    def done(self, features: Features) -> None:
        self.free.append(features)
        self._post()

    def drain(self) -> None:
        self._post()
        while self._coming:
            self.done(self.take(self._coming[0][0].item.index))


class HeldOutFeatures:
    """Features of the held-out packs, kept on the host of rank 0, which has no target of its own."""

    def __init__(self, cluster: Cluster, packs: Sequence[Pack], like: Features):
        self.device = cluster.device
        self._kept: dict[int, Tensor] = {}
        dtype, width = like.all_hidden_states.dtype, like.all_hidden_states.shape[-1]
        for pack in packs:
            hidden = torch.empty(1, len(pack.input_ids), width, dtype=dtype, device=self.device)
            dist.recv(hidden, cluster.roles.target_rank(0, 0))
            self._kept[pack.pack_id] = hidden.cpu()

    def get(self, pack: Pack) -> Features:
        return Features(self._kept[pack.pack_id].to(self.device))

    def close(self) -> None:
        self._kept.clear()


class LocalInbox(Inbox):
    """Where every rank has a target of its own: capture when asked, or one item before."""

    def __init__(self, source: FeatureSource, tell_lost: Callable[[ServerLostError], None] | None = None):
        self.source = source
        self._steady = source if tell_lost is None else UntilLost(source, tell_lost)
        self._packs: dict[int, Pack] = {}
        self._early: dict[int, Features] = {}

    @property
    def depth(self) -> int:
        return len(self._early)

    def example(self, item: WorkItem) -> Features:
        return self._steady.get(item.pack)

    def held_out(self, packs: list[Pack]) -> FeatureSource:
        return self.source

    def expect(self, items: tuple[WorkItem, ...]) -> None:
        self._packs = {item.index: item.pack for item in items}

    def capture(self, item: WorkItem) -> None:
        self._early = {item.index: self._steady.get(item.pack)}

    def take(self, index: int) -> Features:
        pack = self._packs.pop(index)
        return self._early.pop(index) if index in self._early else self._steady.get(pack)
