"""The same metrics as TensorBoard events; `metrics.jsonl` remains the record.

Live: `run.metrics.sinks.append(TensorBoardSink(run.path / "tensorboard"))`. Afterwards, for any run:
`export_events(run.path)`. Needs the tensorboard package, which is no requirement of this project.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError
from dflash.runs.record import read_metrics

SCALARS = {
    "step": ("loss", "acceptance_length", "lr", "grad_norm", "tokens_per_second", "step_seconds"),
    "eval": ("loss", "acceptance_length"),
    "device": ("allocated", "reserved", "peak", "used", "utilization"),
    "stage": ("tokens_per_second", "queue_depth"),
}


class TensorBoardSink:
    """Called with each record. Tags: `step/loss`, `eval/acceptance_length`, `device/cuda:0/used`, ...

    Records without a step (devices, stages) are put at the last step seen. ConfigError without tensorboard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            hint = "pip install tensorboard, or drop the sink"
            raise ConfigError(f"TensorBoard is not installed ({error}); {hint}") from error
        self._writer = SummaryWriter(str(folder))
        self._step = 0

    def __call__(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind in ("step", "eval"):
            self._step = record.get("step") or self._step
        for name in SCALARS.get(str(kind), ()):
            value = record.get(name)
            if isinstance(value, (int, float)):
                who = record.get("device") or record.get("name") if kind in ("device", "stage") else None
                tag = f"{kind}/{who}/{name}" if who else f"{kind}/{name}"
                self._writer.add_scalar(tag, float(value), self._step, walltime=record.get("t"))

    def close(self) -> None:
        self._writer.close()


def export_events(run_path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Path:
    """Write a finished run's metrics as TensorBoard event files (default: `tensorboard/` in the run folder)."""
    folder = Path(folder) if folder else Path(run_path) / "tensorboard"
    sink = TensorBoardSink(folder)
    for record in read_metrics(run_path)[0]:
        sink(record)
    sink.close()
    return folder
