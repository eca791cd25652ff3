"""Who captures which item and who trains on it, under torchrun. A pure function of the config, so nobody sends work orders:
item i of a step belongs to replica i % replicas, and the k-th item of a node comes from the node's target k % targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dflash.devices import synchronize
from dflash.distributed.cluster import Cluster
from dflash.train.plan import Planner, WorkItem


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
    synchronize(cluster.device)


def steps_ahead(depth: int, packs_per_step: int, replicas: int) -> int:
    """Steps that targets may be ahead so that `depth` packs are in flight to each drafter."""
    per_drafter = max(1, -(-packs_per_step // replicas))
    return -(-depth // per_drafter)
