"""One process trains a run at a time: two that write one record and prune each other's checkpoints lose both."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from dflash.errors import RunError

LOCK, OWNER = ".lock", ".lock-owner.json"
LEAVING = 5.0  # seconds for a process that is about to leave


@contextmanager
def locked(run_path: str | os.PathLike[str], wait: float | None = None) -> Iterator[None]:
    """Hold a run folder for the block. The system releases the lock when the process ends, even when it is killed.

    Args:
        wait: seconds to wait for another holder to leave; None is LEAVING.

    Raises: RunError naming the process that holds it.
    """
    path = Path(run_path)
    lock = FileLock(path / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=LEAVING if wait is None else wait)
    except Timeout:
        raise RunError(
            f"{path} is being trained by {_owner(path)}; follow it, or end it first: dflash control {path} stop"
        ) from None
    try:
        mark = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(timespec="seconds")}
        (path / OWNER).write_text(json.dumps(mark))
        yield
    finally:
        (path / OWNER).unlink(missing_ok=True)
        lock.release()


def is_running(run_path: str | os.PathLike[str]) -> bool | None:
    """Whether some process trains this run now; None for a run that was never locked (another engine's, an old one)."""
    if not (Path(run_path) / LOCK).exists():
        return None
    lock = FileLock(Path(run_path) / LOCK, thread_local=False)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that this user may not write to
        return None


def refuse_running(run_path: str | os.PathLike[str]) -> None:
    """Raises RunError where some process trains this run now."""
    with locked(run_path):
        pass


def _owner(path: Path) -> str:
    try:
        mark = json.loads((path / OWNER).read_text())
        return f"process {mark['pid']} on {mark['host']} since {mark['since']}"
    except (OSError, ValueError, KeyError):
        return "another process"
