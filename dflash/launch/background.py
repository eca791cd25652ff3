"""Training that does not hold the cell: a thread that trains, and a handle to wait for it or to steer it.

job = BackgroundRun(run, lambda control: train(config, run, control=control)).start()
LiveDashboard(run.path).start()          # the cell returns; the plots go on
...
result = job.wait()                      # a later cell; the worker's exception is raised here
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflash.errors import RunError
from dflash.runs.control import RunControl
from dflash.runs.record import Run
from dflash.runs.worker_log import worker_output


@contextmanager
def library_bars_off() -> Iterator[None]:
    """No progress bars of transformers meanwhile: in a thread they would be widgets in whichever cell runs, and in
    an executed notebook they stay at 0%."""
    from transformers.utils import logging as library

    enabled = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            library.enable_progress_bar()


class BackgroundRun:
    """Runs `function(control)` in a thread of this process.

    The thread's prints go to the run's log, never to a cell. An exception is recorded as a `fault` with the
    run ended as failed, and raised again by `wait()`. `record_end` False leaves both records to the function.
    """

    def __init__(
        self,
        run: Run,
        function: Callable[[RunControl], Any],
        worker: str = "main",
        control: RunControl | None = None,
        record_end: bool = True,
    ) -> None:
        self.run = run
        self.control = control or RunControl(run.path, run.metrics)
        self.error: BaseException | None = None
        self.result: Any = None
        self._function, self._worker, self._record_end = function, worker, record_end
        self._started = time.time()
        self._thread = threading.Thread(target=self._work, name=f"run-{run.id}", daemon=True)

    def start(self) -> BackgroundRun:
        """Begin, and return at once."""
        self._started = time.time()
        self._thread.start()
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Any:
        """The function's result. Raises its exception; RunError when it is still running after `timeout`
        seconds.

        Interrupting the wait (Kernel > Interrupt) asks the run to stop after its step.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self._thread.is_alive():
                self._thread.join(0.2)
                if deadline is not None and time.monotonic() > deadline:
                    raise RunError(f"{self.run.id} is still running after {timeout:.0f} s; wait longer, or call stop()")
        except KeyboardInterrupt:
            self.stop()
            raise
        if self.error is not None:
            raise self.error
        return self.result

    def stop(self) -> None:
        """Ask the run to end after the current step; `wait()` then returns its result."""
        self.control.stop()

    def _work(self) -> None:
        logs = os.path.join(self.run.path, "logs")
        with library_bars_off(), worker_output(self.run.metrics, self._worker, logs):
            try:
                self.result = self._function(self.control)
                status, message = "completed", None
                if self.control.poll().stop:
                    status, message = "interrupted", "stopped on request"
            except BaseException as error:  # carried over to wait(), whatever it is
                self.error = error
                status, message = "failed", f"{type(error).__name__}: {error}"
        if not self._record_end:
            return
        if self.error is not None:
            self.run.fault(self.error, worker=self._worker)
        self.run.end(status, seconds=time.time() - self._started, message=message)
