"""Ctrl-C, the stop button and SIGTERM end a run after its current step, with a checkpoint; a second one ends it now."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Received:
    """Which signal asked for the end; None while nobody did."""

    number: int | None = None


@contextmanager
def graceful(control: Any, announce: bool = True) -> Iterator[Received]:
    """Turn the first SIGINT or SIGTERM into `control.stop()`; the second one has its usual effect (KeyboardInterrupt).

    Outside the main thread, where signals cannot be handled, this changes nothing.
    """
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: object) -> None:
        if received.number is not None:
            raise KeyboardInterrupt
        received.number = number
        # not here: the main thread may hold the lock that stop() takes
        threading.Thread(target=control.stop, name="stop-request", daemon=True).start()
        if announce:
            print("\nending after this step, with a checkpoint; once more ends it now", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
