"""A run that stops making progress ends, with the stacks of all its threads on disk."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from dflash.compile_safety.errors import HangError
from dflash.compile_safety.gate import GATE

HANG_EXIT_CODE = 86  # of a process whose main thread could not be reached any more
STACKS, FAILURE = "stacks.txt", "failure.json"


class Watchdog:
    """Ends the run when no `beat()` came for `seconds`.

    What happens then, in this order:
      1. `stacks.txt` (all Python threads, autograd workers included) and `failure.json` are written to `run_dir`;
      2. `on_hang(reason)` is called in the watchdog's thread;
      3. HangError is raised in the main thread, by a SIGINT that interrupts waits for locks, queues and threads;
      4. if the watchdog is not stopped within `grace` seconds (the main thread sits in native code), the process
         ends with exit code 86. `grace=None` leaves the process alone.

    Use it as a context manager, or with `start()` and `stop()`, from the main thread.

    Args:
        run_dir: folder for the two files; created where missing.
        seconds: bound on the time between two beats; the first beat is `start()`.
    """

    def __init__(
        self,
        run_dir: str | Path,
        seconds: float = 600.0,
        on_hang: Callable[[str], None] | None = None,
        grace: float | None = 30.0,
    ) -> None:
        if seconds <= 0:
            raise ValueError(f"a watchdog needs a bound above 0 seconds, got {seconds}")
        self.run_dir = Path(run_dir)
        self.seconds = seconds
        self.on_hang = on_hang
        self.grace = grace
        self.reason: str | None = None  # set when the bound has passed
        self._stop = threading.Event()
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._handler: Callable[[int, FrameType | None], object] | int | None = None
        self._raised = False

    def beat(self) -> None:
        """A step was completed."""
        self._last = time.monotonic()

    def start(self) -> Watchdog:
        """Begin to watch."""
        self._last = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the watch. A reason that has not been raised yet is raised now."""
        self._stop.set()
        if self._handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.stop()
        if self.reason is not None and not isinstance(error, HangError):
            raise HangError(self.reason) from error

    # -- the watching thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 10)):
            if time.monotonic() - self._last >= self.seconds:
                self._expire()
                return

    def _expire(self) -> None:
        reason = (
            f"no step was completed for {self.seconds:g} s; the stacks of all threads are in "
            f"{self.run_dir / STACKS}. Compile gate: {GATE.describe()}"
        )
        try:
            self._write(reason)
        except OSError as error:  # a full disk must not turn a hang into an endless one
            reason += f" (they could not be written: {error})"
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        self.reason = reason
        if self.on_hang is not None:
            try:
                self.on_hang(reason)
            except Exception as error:  # the run must end whatever the callback does
                print(f"watchdog: on_hang raised {type(error).__name__}: {error}", file=sys.stderr)
        if self._handler is not None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if self.grace is not None and not self._stop.wait(self.grace):
            print(f"watchdog: {reason}", file=sys.stderr, flush=True)
            os._exit(HANG_EXIT_CODE)

    def _write(self, reason: str) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with open(self.run_dir / STACKS, "w") as file:
            for thread in threading.enumerate():
                file.write(f"# {thread.ident:#018x} {thread.name}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        failure = {"type": "HangError", "message": reason, "t": time.time(), "exit_code": HANG_EXIT_CODE}
        (self.run_dir / FAILURE).write_text(json.dumps(failure, indent=2) + "\n")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and not self._raised:
            self._raised = True
            raise HangError(self.reason)
        if callable(self._handler):
            self._handler(number, frame)
