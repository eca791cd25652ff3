"""One run, one folder, one append-only record: `metrics.jsonl`.

Every room writes through `MetricsWriter.write(kind, **fields)`; the dashboard, the report and the tests read
the same file with `read_metrics`. A line is one JSON object with `kind` and `t` (unix seconds); readers
ignore kinds and keys that they do not know, so the schema grows without breaking an older run.

Strict JSON: numbers that are not finite become `null` and keep their key, so that a NaN loss is visible as a
gap.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from dflash.errors import RunError
from dflash.runs.environment import environment_summary
from dflash.runs.sampler import DeviceSampler

__all__ = ["DeviceSampler", "MetricsWriter", "Run", "holds_run", "metrics_path", "plain", "read_metrics"]

METRICS_NAME = "metrics.jsonl"
SUPERSEDED_NAME = "superseded.jsonl"  # what resumes cut from the record (`resume`)
CONFIG_NAME = "config.yaml"
RESOLVED_NAME = "resolved.yaml"  # what the config came to (`train.resolved`)
ENVIRONMENT_NAME = "environment.json"
FAILURE_NAME = "failure.json"
STACKS_NAME = "stacks.txt"

Sink = Callable[[dict[str, Any]], None]


def plain(value: Any) -> Any:
    """`value` as strict JSON can hold it: numpy and torch scalars and arrays unwrapped, non-finite floats as None."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        if hasattr(value, "detach"):
            value = value.detach()
        return plain(value.tolist())
    return str(value)


class MetricsWriter:
    """Appends records to `metrics.jsonl`, one `write` system call a line; any thread may call it.

    The file is opened in append mode, so ranks of one machine may share it. A full disk does not end a
    training run: the first failed write is announced on stderr, later ones are counted in `dropped`.
    """

    def __init__(self, path: str | os.PathLike[str], sinks: Iterable[Sink] = ()) -> None:
        self.path = Path(path)
        self.dropped = 0
        self.sinks: list[Sink] = list(sinks)
        self._lock = threading.Lock()
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._torn = _ends_torn(self.path)

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one record. `t` defaults to now. Writing after `close` is ignored (late sampler threads)."""
        record = {"kind": kind, "t": time.time(), **fields}
        try:
            line = json.dumps(record, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError):
            record = plain(record)
            line = json.dumps(record, allow_nan=False, separators=(",", ":"))
        data = line.encode() + b"\n"
        with self._lock:
            if self._fd is None:
                return
            self._append(data)
        for sink in self.sinks:
            sink(record)

    def _append(self, data: bytes) -> None:
        if self._torn:  # close a half-written line first, or it would swallow this one
            data = b"\n" + data
        try:
            written = os.write(self._fd, data)
            self._torn = written != len(data)
            if self._torn:
                self._lost(f"{written} of {len(data)} bytes written")
        except OSError as error:
            self._lost(error)

    def _lost(self, why: object) -> None:
        if not self.dropped:
            print(f"metrics are being lost: {self.path}: {why}", file=sys.stderr)
        self.dropped += 1

    @property
    def offset(self) -> int:
        """Bytes in the file now, those of other writers included; 0 after `close`."""
        with self._lock:
            return 0 if self._fd is None else os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        for sink in self.sinks:
            getattr(sink, "close", lambda: None)()


def _ends_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def metrics_path(path: str | os.PathLike[str]) -> Path:
    """The metrics file of a run folder; a file path is returned as it is."""
    path = Path(path)
    return path / METRICS_NAME if path.is_dir() or path.suffix != ".jsonl" else path


def read_metrics(
    path: str | os.PathLike[str], since_offset: int = 0, max_bytes: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Records after byte `since_offset`, and the offset to continue from.

    A last line without its newline is left for the next call; a broken line in the middle is skipped; a file
    that does not exist yet has no records; a file shorter than the offset was replaced and is read from its
    start. `max_bytes` bounds one read (a longer line is still read whole).
    """
    path = metrics_path(path)
    try:
        size = path.stat().st_size
    except OSError:
        return [], 0
    if size < since_offset:
        since_offset = 0
    if size == since_offset:
        return [], since_offset
    with open(path, "rb") as file:
        file.seek(since_offset)
        data = file.read(-1 if max_bytes is None else max_bytes)
        if b"\n" not in data:
            data += file.readline()
    complete = data[: data.rfind(b"\n") + 1]
    records = []
    for line in complete.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records, since_offset + len(complete)


class Run:
    """A run folder: `config.yaml`, `environment.json`, `metrics.jsonl`, and whatever the run adds."""

    def __init__(self, path: Path, config: dict[str, Any], sinks: Iterable[Sink] = ()) -> None:
        self.path = path
        self.id = path.name
        self.config = config
        self.metrics = MetricsWriter(path / METRICS_NAME, sinks)

    @classmethod
    def create(
        cls, root: str | os.PathLike[str], config: Mapping[str, Any], run_id: str | None = None, sinks: Iterable[Sink] = ()
    ) -> Run:
        """Make `root/run_id` (default: the time of day) and write its configuration, environment and first record.

        A folder that only holds an executed notebook is fine; RunError if it already holds a run.
        """
        root = Path(root)
        run_id = run_id or _fresh_id(root)
        if Path(run_id).name != run_id or run_id in (".", ".."):
            raise RunError(f"run id {run_id!r} is not a plain folder name; use letters, digits, '-' and '_'")
        path = root / run_id
        if holds_run(path):
            raise RunError(f"{path} already holds a run; choose another run_id, resume it, or delete the folder first")
        path.mkdir(parents=True, exist_ok=True)
        config = plain(config)
        environment = environment_summary()
        (path / CONFIG_NAME).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        (path / ENVIRONMENT_NAME).write_text(json.dumps(environment, indent=1))
        run = cls(path, config, sinks)
        run.metrics.write("run_start", run_id=run.id, config=config, environment=environment)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], sinks: Iterable[Sink] = ()) -> Run:
        """Continue an existing run folder (resume, another rank). RunError if there is no run in it."""
        path = Path(path)
        if not holds_run(path):
            raise RunError(f"{path} holds no run ({CONFIG_NAME} or {METRICS_NAME} is missing); check the path")
        config_file = path / CONFIG_NAME
        config = yaml.safe_load(config_file.read_text()) if config_file.exists() else {}
        return cls(path, config or {}, sinks)

    def fault(self, error: BaseException, worker: str = "main", step: int | None = None) -> None:
        """Record an exception with its traceback, as a `fault` record and as `failure.json`."""
        import traceback

        text = "".join(traceback.format_exception(error))
        fields = {"worker": worker, "type": type(error).__name__, "message": str(error), "traceback": text}
        self.metrics.write("fault", step=step, **fields)
        failure = {"time": datetime.now().isoformat(timespec="seconds"), "step": step, **fields}
        try:
            (self.path / FAILURE_NAME).write_text(json.dumps(failure, indent=1))
        except OSError as full:  # the fault itself must reach the caller
            print(f"{self.path / FAILURE_NAME} could not be written: {full}", file=sys.stderr)

    def end(self, status: str = "completed", **fields: Any) -> None:
        """Write the `run_end` record ("completed", "failed" or "interrupted") and close the writer."""
        if self.metrics.dropped:
            fields = {**fields, "dropped_records": self.metrics.dropped}
        self.metrics.write("run_end", status=status, **fields)
        self.metrics.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.metrics.close()


def holds_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run's record."""
    path = Path(path)
    return (path / METRICS_NAME).exists() or (path / CONFIG_NAME).exists()


def _fresh_id(root: Path) -> str:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidate, count = stamp, 1
    while (root / candidate).exists():
        count += 1
        candidate = f"{stamp}-{count}"
    return candidate


def run_folder(path: str | Path) -> Path:
    """A run folder by path or by id under runs/. Raises RunError naming the runs there are."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / "config.yaml").exists():
            return candidate
    there = sorted(p.parent.name for p in Path("runs").glob("*/config.yaml"))
    raise RunError(f"no run at {path}; there are: {', '.join(there) or 'none'}")
