"""Ctrl-C, the stop button and SIGTERM end a run after its current step, with a checkpoint; a second one ends it now.

Whoever stops all processes of a job at once (systemd, Slurm, a container) signals a rank twice, directly and through its
torchrun: two signals within `_SAME` seconds are one wish.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME = 1.0


class Received:
    """Which signal asked for the end; None while nobody did."""

    number: int | None = None
    at: float = 0.0


@contextmanager
def graceful(control: Any | None, announce: bool = True, insist: bool = True) -> Iterator[Received]:
    """Turn the first SIGINT or SIGTERM into `control.stop()`; a later one has its usual effect (KeyboardInterrupt), or
    none without `insist`. With no `control`, as in a rank that does not lead, the first one has no effect either.

    Outside the main thread, where signals cannot be handled, this changes nothing.
    """
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: object) -> None:
        if received.number is not None:
            if insist and time.monotonic() - received.at > _SAME:
                raise KeyboardInterrupt
            return
        received.number, received.at = number, time.monotonic()
        if control is not None:  # not in this thread: it may hold the lock that stop() takes
            threading.Thread(target=control.stop, name="stop-request", daemon=True).start()
        if announce:
            print("\nending after this step, with a checkpoint; once more ends it now", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
