"""torchrun's view of a run: which rank does what, requests between ranks, and how a failure ends all of them.

On every node ranks 0..D-1 draft and the others run the target (with targets and drafters on the same devices, every
rank does both). Rank 0 of node 0 is the first drafter: it plans, records, evaluates and saves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dflash.errors import ConfigError, DFlashError, RunError, ServerLostError
from dflash.train.topology import Topology

KILLED = "killed by a signal: "  # begins a line of the ranks' output; what follows names the rank and the signal
CONTROL = "DFLASH_CONTROL"  # environment variable of ranks: the requests that their launcher had handled, as JSON
LAUNCHER = "DFLASH_LAUNCHER"  # environment variable of ranks: which process started them
_LOOK = 0.2  # seconds between two looks for ranks that are still to come
_BEAT = 1.0  # seconds between two signs of life
_SILENT = 20.0  # seconds after which a rank without one counts as dead
_NEVER = timedelta(days=7)  # of collectives: a pause or a long evaluation is no fault; the life line finds the dead
_GRACE = 3.0  # seconds between another rank's failure and this one's end


def under_torchrun() -> bool:
    """Whether this process is a rank."""
    return "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Roles:
    """Ranks and their work. `drafters` and `targets` are counts on a node; `paired`: each rank does both."""

    drafters: int
    targets: int
    nodes: int
    paired: bool

    @property
    def per_node(self) -> int:
        return self.drafters if self.paired else self.drafters + self.targets

    @property
    def replicas(self) -> int:
        """Drafters over all nodes."""
        return self.nodes * self.drafters

    def drafter_rank(self, replica: int) -> int:
        node, index = divmod(replica, self.drafters)
        return node * self.per_node + index

    def target_rank(self, node: int, target: int) -> int:
        return node * self.per_node + (target if self.paired else self.drafters + target)

    @property
    def drafter_ranks(self) -> list[int]:
        return [self.drafter_rank(replica) for replica in range(self.replicas)]


def workers(topology: Topology) -> int:
    """Processes that `--nproc-per-node` has to start for a topology.

    Raises: ConfigError where drafters and targets share some of their GPUs; two ranks cannot talk through one.
    """
    if topology.serial or topology.paired:
        return len(topology.drafters)
    shared = set(topology.drafters) & {device for target in topology.targets for device in target}
    if any(device.type == "cuda" for device in shared):
        raise ConfigError(
            f"under torchrun a GPU has one process, but {', '.join(sorted(map(str, shared)))} both draft and run a target; "
            "give each drafter its own target on its own GPU (gpus and target_gpus equal), keep the two apart, or use "
            "launcher=threads"
        )
    return len(topology.drafters) + len(topology.targets)


def roles_of(topology: Topology, world: int, local_world: int) -> Roles:
    """Raises ConfigError when torchrun started another number of processes than the topology has workers."""
    wanted = workers(topology)
    if local_world != wanted:
        raise ConfigError(
            f"torchrun started {local_world} processes on this node, but {topology} needs {wanted}; use "
            f"--nproc-per-node {wanted}"
        )
    if world % local_world:
        raise ConfigError(
            f"torchrun started {world} processes over all nodes and {local_world} on this one; start "
            f"{local_world} on every node, with the same gpus and target_gpus"
        )
    paired = topology.serial or topology.paired
    return Roles(len(topology.drafters), len(topology.targets), world // local_world, paired)


def open_store(seconds: float) -> dist.Store:
    """The key-value store that all ranks share."""
    store = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]
    store.set_timeout(timedelta(seconds=seconds))
    return dist.PrefixStore("dflash", store)


def word(store: dist.Store, key: str, seconds: float) -> str:
    """What rank 0 says under `key`.

    Raises: ConfigError with the reason of a rank that will not take part; RunError after `seconds`.
    """
    _wait(store, {key: 0}, "", seconds)
    return store.get(key).decode()


def _wait(store: dist.Store, keys: dict[str, int], of: str, seconds: float) -> None:
    """Until all keys are there, which these ranks set. A collective would wait as long for one that has said why it will not
    come."""
    end = time.monotonic() + seconds
    while not store.check(list(keys)):
        if store.check(["refused"]):
            raise ConfigError(store.get("refused").decode())
        if time.monotonic() > end:
            missing = ", ".join(str(rank) for key, rank in keys.items() if not store.check([key]))
            raise RunError(f"rank {missing}{of} did not start within {seconds:.0f} s; look at the output of its node")
        time.sleep(_LOOK)


def meet(store: dist.Store, rank: int, world: int, seconds: float) -> None:
    """Wait until every rank is here.

    Raises: ConfigError with the reason of a rank that will not take part; RunError naming those not here after `seconds`.
    """
    store.set(f"here/{rank}", "1")
    _wait(store, {f"here/{other}": other for other in range(world)}, f" of {world}", seconds)


@contextmanager
def refusing(store: dist.Store) -> Iterator[None]:
    """In the block a rank looks at its settings; an error of it also ends the ranks that wait for this one."""
    try:
        yield
    except DFlashError as error:
        with suppress(RuntimeError, OSError, ValueError):  # nobody to tell
            if not store.check(["refused"]):
                store.set("refused", f"node {os.environ.get('GROUP_RANK', 0)} cannot take part: {error}")
            if os.environ.get("GROUP_RANK", "0") == "0":
                time.sleep(2 * _BEAT)  # the store goes with this node: let the others read what happened
        raise


class Cluster:
    """This rank's place, its process groups and the key-value store that all ranks share."""

    def __init__(self, topology: Topology, timeout: float, store: dist.Store | None = None):
        rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self.roles = roles_of(topology, world, int(os.environ["LOCAL_WORLD_SIZE"]))
        self.rank, self.node, self.local = rank, rank // self.roles.per_node, local
        self.drafts = local < self.roles.drafters
        self.index = local if self.drafts else local - self.roles.drafters  # among the node's drafters or targets
        self.device = topology.drafters[self.index] if self.drafts else topology.targets[self.index][0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")  # receives that wait must not fill the GPU
        kinds = {device.type for device in topology.devices}
        backend = "cpu:gloo,cuda:nccl" if "cuda" in kinds else "gloo"
        self.store = store or open_store(timeout)
        meet(self.store, rank, world, timeout)
        group = dist.PrefixStore("group", self.store)
        dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=_NEVER)
        self.drafter_group = dist.new_group(self.roles.drafter_ranks)
        self.name = f"node {self.node} " * (self.roles.nodes > 1) + (
            f"drafter[{self.index}]" if self.drafts else f"target[{self.index}]"
        )

    @property
    def replica(self) -> int:
        """Number of this drafter over all nodes."""
        return self.node * self.roles.drafters + self.index

    def tell_lost(self, error: ServerLostError) -> None:
        """Tell rank 0 that the server which runs the target is gone."""
        self.store.set("lost", str(error))

    def lost(self) -> ServerLostError | None:
        """What a rank told of a server that is gone."""
        return ServerLostError(self.store.get("lost").decode()) if self.store.check(["lost"]) else None

    def leave(self) -> None:
        """Wait for all ranks, then drop the groups."""
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()


def launcher_mark() -> str:
    """Which process starts the ranks, for the environment variable LAUNCHER."""
    return f"{os.getpid()}:{_started(os.getpid())}"


def launcher_is_gone() -> bool:
    """Whether the process named in LAUNCHER has ended, however it did. Ranks that nobody launched so never find out."""
    pid, _, started = os.environ.get(LAUNCHER, "").partition(":")
    return bool(pid and started) and _started(int(pid)) != started


def _started(pid: int) -> str:
    """A process's start time in clock ticks; "" when it has ended, or where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class LifeLine:
    """Ends this process when another rank failed or fell silent.

    A rank that waits inside a collective for a dead one cannot be woken; so the failing rank leaves its traceback in
    the store, and a thread of every other rank looks there each second and ends its process.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._store = cluster.store.clone() if hasattr(cluster.store, "clone") else cluster.store
        self._stop = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self.on_failure = lambda failure: None

    def start(self) -> LifeLine:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def report(self, error: BaseException) -> bool:
        """Tell all ranks what ended this one. Returns False when another rank was first."""
        payload = {
            "worker": self.cluster.name,
            "rank": self.cluster.rank,
            "type": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        try:
            text = json.dumps(payload)
            return self.cluster.store.compare_set("failure", "", text).decode() == text
        except RuntimeError:
            return True  # the store is gone: nobody else can tell

    def failure(self) -> dict | None:
        """What ended the first rank that failed."""
        if not self._store.check(["failure"]):
            return None
        return json.loads(self._store.get("failure"))

    def _watch(self) -> None:
        beats, asked = 0, False
        while not self._stop.wait(_BEAT):
            if self.cluster.rank == 0 and not asked and launcher_is_gone():
                print(
                    "the process that started this run is gone: ending after this step, with a checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(os.getpid(), signal.SIGTERM)
                asked = True
            try:
                beats += 1
                self._store.set(f"beat/{self.cluster.rank}", str(beats))
                failure = self.failure() or self._silent()
            except RuntimeError:  # the store went with the rank that kept it
                failure = {"worker": "another rank", "rank": -1, "message": "the connection to the other ranks is gone"}
            if failure is not None and not self._stop.is_set():
                self._end(failure)
                return

    def _silent(self) -> dict | None:
        now = time.monotonic()
        for rank in range(self.cluster.roles.nodes * self.cluster.roles.per_node):
            key = f"beat/{rank}"
            value = self._store.get(key) if self._store.check([key]) else b""
            before = self._seen.get(rank)
            if before is None or before[0] != value:
                self._seen[rank] = (value, now)
            elif now - before[1] > _SILENT and rank != self.cluster.rank and not self._store.check([f"left/{rank}"]):
                return {
                    "worker": f"rank {rank}",
                    "rank": rank,
                    "type": RunError.__name__,
                    "traceback": "",
                    "message": f"no sign of life for {_SILENT:.0f} s; its process was killed or its machine is gone",
                }
        return None

    def _end(self, failure: dict) -> None:
        if failure["rank"] != self.cluster.rank:
            self.on_failure(failure)
            self._stop.wait(_GRACE)  # this rank may be on its way out by itself
            if self._stop.is_set():
                return
            print(f"{self.cluster.name} ends: {failure['worker']} failed: {failure['message']}", file=sys.stderr, flush=True)
            os._exit(1)
