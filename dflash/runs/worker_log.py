"""What each worker prints, kept in order and apart from the notebook's cells.

A notebook puts a thread's output into whichever cell runs at that moment, or drops it. So a worker thread
enters `worker_output(metrics, "drafter[1]", folder)`; from then on each line that it prints, logs or warns
becomes a `log` record (the dashboard's log panel shows them) and a line of `logs/<worker>.log`, and nothing
reaches a cell.
Threads that never enter are not affected.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from dflash.runs.record import MetricsWriter

_lock = threading.Lock()
_workers: dict[int, _Worker] = {}
_MAX_LINE = 4000


class _Worker:
    """One thread's lines on their way to the record and to its file."""

    def __init__(self, metrics: MetricsWriter, name: str, folder: Path) -> None:
        self.metrics, self.name = metrics, name
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name).strip('_')}.log", "a", buffering=1)
        self._partial = {"INFO": "", "ERROR": ""}

    def feed(self, text: str, level: str) -> None:
        """Take printed text; a line is passed on when its newline arrives. A progress bar's rewrites of one line (carriage
        returns) count as that line's last state."""
        *lines, self._partial[level] = (self._partial[level] + text).split("\n")
        self._partial[level] = self._partial[level].rsplit("\r", 1)[-1][-_MAX_LINE:]
        for line in lines:
            self.line(line.rstrip("\r").rsplit("\r", 1)[-1], level)

    def line(self, message: str, level: str) -> None:
        try:
            self.file.write(message + "\n")
        except OSError:  # a full disk loses lines, not the worker; the record announces its own losses
            pass
        if message.strip():
            self.metrics.write("log", worker=self.name, level=level, message=message[:_MAX_LINE])

    def close(self) -> None:
        for level, rest in self._partial.items():
            if rest.strip():
                self.line(rest, level)
        try:
            self.file.close()
        except OSError:
            pass


class _Router(io.TextIOBase):
    """Stands in for sys.stdout or sys.stderr: workers' text to their record, everyone else's where it went."""

    def __init__(self, stream: TextIO, level: str) -> None:
        self.stream, self.level = stream, level

    def write(self, text: str) -> int:
        worker = _workers.get(threading.get_ident())
        if worker is None:
            return self.stream.write(text)
        worker.feed(text, self.level)
        return len(text)

    def flush(self) -> None:
        if threading.get_ident() not in _workers:
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:  # encoding, fileno, parent_header of ipykernel's stream, ...
        return getattr(self.stream, name)


class _Handler(logging.Handler):
    """Logging of worker threads; other threads' records are left to the other handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        worker = _workers.get(record.thread or 0)
        if worker is not None:
            worker.line(self.format(record), record.levelname)


_handler = _Handler()


@contextmanager
def worker_output(metrics: MetricsWriter, worker: str, folder: str | Path) -> Iterator[None]:
    """Route the current thread's prints, warnings and logging to `log` records and `folder`/<worker>.log."""
    ident = threading.get_ident()
    entry = _Worker(metrics, worker, Path(folder))
    with _lock:
        if not _workers:
            _install()
        outer = _workers.get(ident)
        _workers[ident] = entry
    try:
        yield
    finally:
        with _lock:
            if outer is None:
                del _workers[ident]
            else:
                _workers[ident] = outer
            if not _workers:
                _uninstall()
        entry.close()


def _install() -> None:
    sys.stdout, sys.stderr = _Router(sys.stdout, "INFO"), _Router(sys.stderr, "ERROR")
    logging.getLogger().addHandler(_handler)


def _uninstall() -> None:
    if isinstance(sys.stdout, _Router):
        sys.stdout = sys.stdout.stream
    if isinstance(sys.stderr, _Router):
        sys.stderr = sys.stderr.stream
    logging.getLogger().removeHandler(_handler)
