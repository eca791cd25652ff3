"""One process a device under torchrun: features go rank to rank, gradients are summed in the drafters' group.

The schedule is a pure function of the config, so nobody sends work orders: item i of a step belongs to replica
i % replicas, and the k-th item of a node comes from the node's target k % targets. A target may capture items of the
steps that the drafters have opened; that, and receives that are posted only for free slots, is the backpressure.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.compile_safety import WarmupJob
from dflash.distributed.accounting import Ledger
from dflash.distributed.cluster import Cluster
from dflash.distributed.replicas import flatten_gradients, refuse_unequal
from dflash.distributed.threads import zero_sums
from dflash.target.capture import Features
from dflash.train.plan import Planner, StepPlan, WorkItem
from dflash.train.step import FeatureSource, Replica, warmup_jobs

_POLL = 0.01  # seconds between two looks for opened steps
STEP, END = 1.0, 0.0


@dataclass(frozen=True)
class Route:
    """An item of a node: who captures it and who trains on it."""

    step: int
    item: WorkItem
    target: int  # of the node
    replica: int  # over all nodes


class Schedule:
    """The items of one node, in order."""

    def __init__(self, planner: Planner, cluster: Cluster, first_step: int, last_step: int):
        self.planner, self.cluster = planner, cluster
        self.first_step, self.last_step = first_step, last_step

    def __iter__(self) -> Iterator[Route]:
        roles, node, count = self.cluster.roles, self.cluster.node, 0
        for step in range(self.first_step, self.last_step + 1):
            for place, item in enumerate(self.planner.step(step).items):
                replica = place % roles.replicas
                if replica // roles.drafters != node:
                    continue
                target = replica % roles.drafters if roles.paired else count % roles.targets
                yield Route(step, item, target, replica)
                count += 1


def handshake(cluster: Cluster) -> None:
    """Open the connection of every target with every drafter of its node, in one global order, so that the first real
    transfers find them open and no two ranks wait for each other."""
    roles = cluster.roles
    if roles.paired:
        return
    word = torch.zeros(1, device=cluster.device)
    for target in range(roles.targets):
        for drafter in range(roles.drafters):
            sender = roles.target_rank(cluster.node, target)
            receiver = roles.drafter_rank(cluster.node * roles.drafters + drafter)
            if cluster.rank == sender:
                dist.send(word, receiver)
            elif cluster.rank == receiver:
                dist.recv(word, sender)
    if cluster.device.type == "cuda":
        torch.cuda.synchronize(cluster.device)


def steps_ahead(depth: int, packs_per_step: int, replicas: int) -> int:
    """Steps that targets may be ahead so that `depth` packs are in flight to each drafter."""
    per_drafter = max(1, -(-packs_per_step // replicas))
    return -(-depth // per_drafter)


# -- the target's side ----------------------------------------------------------------------------------------------


class Feeder:
    """Captures this target's share of the node's items and sends them."""

    def __init__(
        self, cluster: Cluster, source: FeatureSource, schedule: Schedule, soft_labels: bool, ledger: Ledger | None = None
    ):
        self.cluster, self.source, self.schedule = cluster, source, schedule
        self.soft, self.ledger = soft_labels, ledger or Ledger(cluster.name, cluster.device)
        self._opened = 0

    def announce(self, features: Features) -> None:
        """Tell the node's drafters what a pack's features look like."""
        if self.cluster.index == 0:
            kind = {
                "hidden": list(features.all_hidden_states.shape),
                "last": list(features.verifier_last_hidden.shape),
                "dtype": str(features.all_hidden_states.dtype).removeprefix("torch."),
            }
            self.cluster.store.set(f"features/{self.cluster.node}", json.dumps(kind))

    def run(self) -> None:
        """Until the drafters have closed the run."""
        sent: tuple[list[dist.Work], list[Tensor]] = ([], [])
        for route in self.schedule:
            if route.target != self.cluster.index:
                continue
            self.ledger.enter("wait")
            if not self._wait_until_open(route.step):
                break
            self.ledger.enter("capture", route.step)
            features = self.source.get(route.item.pack)
            self.ledger.enter("wait", route.step)
            self.ledger.add_tokens(int(route.item.pack.lengths.sum()))
            for work in sent[0]:  # the one before: it had this capture's time
                work.wait()
            tensors = [
                t.to(self.cluster.device).contiguous()
                for t in (features.all_hidden_states, features.verifier_last_hidden)[: 1 + self.soft]
            ]
            to = self.cluster.roles.drafter_rank(route.replica)
            sent = ([dist.isend(t, to, tag=i) for i, t in enumerate(tensors)], tensors)
            if self.cluster.device.type == "cuda":  # keep the host beside the device
                torch.cuda.current_stream(self.cluster.device).synchronize()
            self.ledger.report(None)
        for work in sent[0]:
            work.wait()
        self.ledger.finish()
        self.ledger.report(None, force=True)

    def _wait_until_open(self, step: int) -> bool:
        """Wait for the drafters to open a step; False when it never will be."""
        store = self.cluster.store
        while step > self._opened:
            closed = store.check(["closed"])
            if store.check(["opened"]):
                self._opened = int(store.get("opened"))
            if step > self._opened:
                if closed:
                    return False
                time.sleep(_POLL)
        return True


# -- the drafter's side ---------------------------------------------------------------------------------------------


class Inbox:
    """Receives into `depth` slots that are made once, in the order of this drafter's items."""

    def __init__(self, cluster: Cluster, schedule: Schedule, depth: int, soft_labels: bool, timeout: float):
        store, key = cluster.store, f"features/{cluster.node}"
        store.wait([key])
        kind = json.loads(store.get(key))
        dtype, device = getattr(torch, kind["dtype"]), cluster.device
        self.cluster, self.soft = cluster, soft_labels
        self._routes = (r for r in schedule if r.replica == cluster.replica)
        self._next: Route | None = next(self._routes, None)
        self.free: deque[Features] = deque()
        for _ in range(depth):
            hidden = torch.zeros(kind["hidden"], dtype=dtype, device=device)
            last = (
                torch.zeros(kind["last"], dtype=dtype, device=device)
                if soft_labels
                else hidden.new_zeros(1, 1, 1).expand(kind["last"])
            )
            self.free.append(Features(hidden, last))
        self._coming: deque[tuple[Route, Features, list[dist.Work]]] = deque()

    @property
    def depth(self) -> int:
        """Receives posted or done and not yet taken."""
        return len(self._coming)

    def post(self, opened: int) -> None:
        """Ask for the next items, as far as there are slots and opened steps."""
        while self.free and self._next is not None and self._next.step <= opened:
            route, slot = self._next, self.free.popleft()
            source = self.cluster.roles.target_rank(self.cluster.node, route.target)
            tensors = (slot.all_hidden_states, slot.verifier_last_hidden)[: 1 + self.soft]
            self._coming.append((route, slot, [dist.irecv(t, source, tag=i) for i, t in enumerate(tensors)]))
            self._next = next(self._routes, None)

    def take(self, index: int) -> Features:
        """The features of item `index`, the next one of this drafter."""
        route, slot, works = self._coming.popleft()
        assert route.item.index == index, (route.item.index, index)
        for work in works:
            work.wait()
        return slot

    def drain(self, opened: int) -> None:
        """Receive what targets may still send, and drop it."""
        self.post(opened)
        while self._coming:
            self.free.append(self.take(self._coming[0][0].item.index))
            self.post(opened)


class LocalInbox:
    """Where every rank has a target of its own: capture when asked, or one item before."""

    def __init__(self, source: FeatureSource):
        self.source = source
        self._packs: dict[int, object] = {}
        self._early: dict[int, Features] = {}

    @property
    def depth(self) -> int:
        """Items captured before they were asked for."""
        return len(self._early)

    def expect(self, items: tuple[WorkItem, ...]) -> None:
        self._packs = {item.index: item.pack for item in items}

    def capture(self, item: WorkItem) -> None:
        """Have this item's features at hand, the next to be taken."""
        self._early = {item.index: self.source.get(item.pack)}

    def take(self, index: int) -> Features:
        pack = self._packs.pop(index)
        return self._early.pop(index) if index in self._early else self.source.get(pack)


class ProcessEngine:
    """`engine.Engine` of one drafter rank. Rank 0 is driven by the trainer and leads; the others `follow`."""

    def __init__(
        self,
        cluster: Cluster,
        replica: Replica,
        planner: Planner,
        inbox: Inbox | LocalInbox,
        ahead: int,
        last_step: int,
        ledger: Ledger | None = None,
    ):
        self.cluster, self.replica, self.planner, self.inbox = cluster, replica, planner, inbox
        self.ahead, self.last_step = ahead, last_step
        self.ledger = ledger or Ledger(cluster.name, cluster.device)
        self.flat = self._gradient_buffer()
        self._opened = 0
        self._closed = False

    def _gradient_buffer(self) -> Tensor | None:
        return flatten_gradients(self.replica) if self.cluster.roles.replicas > 1 else None

    @property
    def leads(self) -> bool:
        return self.cluster.replica == 0

    def warmup_jobs(self, plan: StepPlan) -> list[WarmupJob]:
        """On the shapes of the run; features are zeros where they come from another rank."""
        item = plan.items[0]
        if isinstance(self.inbox, LocalInbox):
            return warmup_jobs([self.replica], lambda: (item, self.inbox.source.get(item.pack)))
        return warmup_jobs([self.replica], lambda: (item, self.inbox.free[0]))

    def load_optimizer(self, state: dict) -> None:
        self.replica.optimizer.load_state_dict(state)

    def start(self, first_step: int) -> None:
        """Let the targets begin."""
        self.verify()
        self._open(first_step)

    def step(self, plan: StepPlan, lr: float) -> Tensor:
        """Rank 0: have every drafter run this step, and run this rank's share."""
        self._order(STEP, plan.step, lr)
        return self._run(plan, lr)

    def follow(self, beat=lambda: None) -> None:
        """The other drafters: do what rank 0 orders, until it ends."""
        while True:
            what, step, lr = self._order()
            beat()
            if what == END:
                break
            if what == STEP:
                self._run(self.planner.step(int(step)), lr)
            else:
                self._obey(what)
            beat()
        self._drain(int(step))

    def _obey(self, what: float) -> None:
        """An order that is neither a step nor the end; whole drafters know no other."""
        raise AssertionError(f"unknown order {what}")

    def close(self) -> None:
        """Nothing to stop here: a run that ended well was closed by `finish`, a failed one ends its process."""

    def finish(self) -> None:
        """Rank 0, when the last step is done: release all other ranks."""
        self.cluster.store.set("closed", "1")
        self._order(END, self._opened, 0.0)
        self._drain(self._opened)

    def verify(self) -> None:
        """Raises ReplicasDivergedError on every drafter where weights are not bit-equal."""
        refuse_unequal(self.replica.optimizer.masters, self.cluster.drafter_group)

    def _order(self, what: float = END, step: int = 0, lr: float = 0.0) -> tuple[float, float, float]:
        """Rank 0's word to all drafters."""
        order = torch.tensor([what, float(step), lr], dtype=torch.float64)
        dist.broadcast(order, self.cluster.roles.drafter_rank(0), group=self.cluster.drafter_group)
        return tuple(order.tolist())

    def _open(self, step: int) -> None:
        """Steps up to `step + ahead` may be captured."""
        self._opened = min(step + self.ahead, self.last_step)
        if self.leads:
            self.cluster.store.set("opened", str(self._opened))
        if isinstance(self.inbox, Inbox):
            self.inbox.post(self._opened)

    def _run(self, plan: StepPlan, lr: float) -> Tensor:
        self._open(plan.step)
        ledger, items = self.ledger, plan.share(self.cluster.replica, self.cluster.roles.replicas)
        sums = zero_sums(self.replica.drafter.block_size, self.cluster.device)
        if isinstance(self.inbox, LocalInbox):
            self.inbox.expect(items)
        ledger.enter("wait", plan.step)
        for item in items:
            features = self.inbox.take(item.index)
            ledger.enter("forward+backward", plan.step)
            sums = sums + self.replica.accumulate(item, features, plan.denominator)
            ledger.enter("wait", plan.step)
            ledger.add_tokens(int(item.pack.lengths.sum()))
            if isinstance(self.inbox, Inbox):
                self.inbox.free.append(features)
                self.inbox.post(self._opened)
        self._fill(plan, len(items))
        ledger.enter("reduce", plan.step)
        pending = self._reduce(sums)
        if isinstance(self.inbox, LocalInbox):  # while gradients travel, and the slowest rank is waited for
            self._capture_next(plan)
        for work in pending:
            work.wait()
        ledger.enter("optimizer", plan.step)
        applied = self.replica.apply(lr, plan)
        ledger.enter("idle")
        ledger.report(self.inbox.depth, force=plan.step == self.last_step)
        return torch.cat([sums, applied])

    def _fill(self, plan: StepPlan, done: int) -> None:
        """What a drafter with fewer items than others does meanwhile: nothing, where its gradient is added as it is."""

    def _capture_next(self, plan: StepPlan) -> None:
        """The first item of this rank's next step, where there is one."""
        if plan.step < self.last_step:
            items = self.planner.step(plan.step + 1).share(self.cluster.replica, self.cluster.roles.replicas)
            if items:
                self.inbox.capture(items[0])

    def _reduce(self, sums: Tensor) -> list[dist.Work]:
        """Gradients and metric sums become those of all drafters, once what is returned has been waited for."""
        group, tensors = self.cluster.drafter_group, () if self.flat is None else (self.flat, sums)
        return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]

    def _drain(self, opened: int) -> None:
        if not self._closed and isinstance(self.inbox, Inbox):
            self.inbox.drain(opened)
        self._closed = True
        self.verify()
        self.ledger.finish()
