"""torchrun for the ranks of one machine, with its rendezvous on the loopback interface alone.

    python -m dflash.launch.agent --nproc-per-node 3 -m dflash train --config runs/<id>/config.yaml

torchrun's own stores listen on every interface whatever endpoint they are given, and anyone who reaches one can write to
it. So this process opens the store on a loopback socket and registers a rendezvous of one machine that hands it out. Over
several machines use torchrun itself (docs/runner.md).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from dflash.distributed.cluster import KILLED

LOOPBACK = "127.0.0.1"
_AT_ONCE = 10  # seconds; torchrun kills what does not end by its SIGTERM after 30


class LoopbackRendezvous(RendezvousHandler):
    """One machine meets itself over a store that only it reaches."""

    use_agent_store = True  # the ranks join it too

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(
            self._store, rank=0, world_size=1, bootstrap_store_info=RendezvousStoreInfo(LOOPBACK, self._store.port)
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def keep_to_loopback() -> None:
    """Let the ranks' own connections use the loopback interface too, unless the environment says otherwise."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def killed_ranks(error: ChildFailedError) -> list[tuple[int, int]]:
    """(rank, signal) of those that a signal ended: they could not say so themselves, and the others only saw them vanish.
    Not those that torchrun ended because another had failed."""
    first = min(failure.timestamp for failure in error.failures.values())
    return [
        (rank, -failure.exitcode)
        for rank, failure in sorted(error.failures.items())
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and failure.timestamp - first < _AT_ONCE
    ]


def main(arguments: Sequence[str]) -> None:
    """torchrun's command line; exits with its code."""
    keep_to_loopback()
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    try:
        options = f"--nnodes 1 --rdzv-backend loopback --rdzv-endpoint {LOOPBACK}:0 --local-addr {LOOPBACK}"
        run.main([*options.split(), *arguments])
    except ChildFailedError as error:
        for rank, number in killed_ranks(error):
            print(f"{KILLED}rank {rank} by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        raise
    except SignalException as error:  # its ranks have left by themselves, or were ended
        print(f"torchrun ends: {error.sigval.name}", file=sys.stderr, flush=True)
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main(sys.argv[1:])
