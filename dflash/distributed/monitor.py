"""One lock for all workers of an engine: who waits, who failed, and when everyone stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LOOK = 0.5  # seconds between two looks of a waiter, so that an interrupt of the main thread is seen


class Stopped(Exception):
    """The engine is closing; the worker leaves. Never shown to anyone."""


class Monitor:
    """A condition that wakes all waiters at the first failure.

    The first exception of a worker is kept, with the worker's name as a note; whoever waits in `wait_for` gets it
    raised (`raise_failures`, for the thread that drives the engine) or leaves with `Stopped` (the workers).
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.worker: str | None = None
        self.stopped = False

    def fail(self, worker: str, error: BaseException) -> None:
        """Keep the first failure and wake everyone."""
        with self.changed:
            if self.error is None and not self.stopped:
                self.error, self.worker = error, worker
                error.dflash_worker = worker  # for the `fault` record
                error.add_note(f"raised in worker {worker}")
            self.stopped = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Ask all workers to leave."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def check(self) -> None:
        """For the driving thread: raise a worker's exception, with that worker's traceback."""
        if self.error is not None:
            raise self.error

    def wait_for(self, ready: Callable[[], T | None], raise_failures: bool = False) -> T:
        """`ready()` under the lock until it gives something other than None."""
        with self.changed:
            while True:
                if self.stopped:
                    if raise_failures and self.error is not None:
                        raise self.error
                    raise Stopped
                found = ready()
                if found is not None:
                    return found
                self.changed.wait(_LOOK)
