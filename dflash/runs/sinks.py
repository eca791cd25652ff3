"""The same numbers where a team looks for them: TensorBoard, Weights & Biases, MLflow. `metrics.jsonl` remains the record.

`-p log_to tensorboard` or `-p log_to wandb,mlflow`. Each package's own settings hold: `WANDB_MODE=offline` and
`WANDB_PROJECT`, `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`. None of the packages is a requirement of this project.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError
from dflash.runs.record import Run, read_metrics

SCALARS = {
    "step": ("loss", "acceptance_length", "lr", "grad_norm", "tokens_per_second", "step_seconds"),
    "eval": ("loss", "acceptance_length"),
    "device": ("allocated", "reserved", "peak", "used", "utilization"),
    "stage": ("tokens_per_second", "queue_depth"),
}


class Sink:
    """Called with each record; a kind of sink says how its `log` takes numbers by tag, and how it ends.

    Tags: `step/loss`, `eval/acceptance_length`, `device/cuda:0/used`, ... Records without a step (devices, stages) are put at
    the last step seen. A service that fails is announced once and left out from then on: the run goes on.
    """

    def __init__(self) -> None:
        self._step, self._lock, self._broken = 0, threading.Lock(), False

    def __call__(self, record: dict[str, Any]) -> None:
        kind = str(record.get("kind"))
        who = record.get("device") or record.get("name") if kind in ("device", "stage") else None
        values = {
            "/".join(filter(None, (kind, who, name))): float(record[name])
            for name in SCALARS.get(kind, ())
            if isinstance(record.get(name), (int, float))
        }
        with self._lock:
            if kind in ("step", "eval"):
                self._step = record.get("step") or self._step
            if values:
                self._try(self.log, values, self._step, record.get("t") or time.time())

    def close(self) -> None:
        with self._lock:
            self._try(self.end)

    def _try(self, call: Any, *values: Any) -> None:
        if self._broken:
            return
        try:
            call(*values)
        except Exception as error:  # of whatever kind: the record has the numbers
            self._broken = True
            print(f"{type(self).__name__} gets no more numbers: {type(error).__name__}: {error}", file=sys.stderr)

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Take numbers of one moment (unix seconds)."""
        raise NotImplementedError

    def end(self) -> None:
        """No more will come."""
        raise NotImplementedError


class TensorBoardSink(Sink):
    """Event files in `folder`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"TensorBoard is not installed ({error}); pip install tensorboard, or drop the sink") from error
        self._writer = SummaryWriter(str(folder))

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, walltime=when)

    def end(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """A run of the same name in Weights & Biases; its files lie in the run folder."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        import wandb

        project = os.environ.get("WANDB_PROJECT", "dflash")
        self._run = wandb.init(project=project, name=run.id, id=run.id, resume="allow", dir=str(run.path), config=run.config)
        self._run.define_metric("*", step_metric="training_step")

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        self._run.log({"training_step": step, **values})

    def end(self) -> None:
        self._run.finish()


class MlflowSink(Sink):
    """A run of the same name in MLflow, with the settings as parameters; without a tracking address in `mlruns` of the run
    folder."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        from mlflow.tracking import MlflowClient

        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want a database
            address = (run.path / "mlruns").resolve().as_uri()
        self._client = MlflowClient(address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dflash")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run.id).info.run_id
        for section, settings in run.config.items():
            for setting, value in settings.items() if isinstance(settings, Mapping) else [(section, settings)]:
                self._client.log_param(self._id, setting, value)

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        from mlflow.entities import Metric

        plain = {re.sub(r"[^\w. /-]", "_", tag): value for tag, value in values.items()}  # what MLflow takes as a name
        metrics = [Metric(tag, value, int(when * 1000), step) for tag, value in plain.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self) -> None:
        self._client.set_terminated(self._id)


SINKS = {
    "tensorboard": lambda run: TensorBoardSink(run.path / "tensorboard"),
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}
_PIP = {"mlflow": "mlflow-skinny"}


def sink_names(log_to: str | None) -> list[str]:
    """The names in a setting such as "wandb,mlflow". ConfigError for one that there is not."""
    names = [name.strip() for name in (log_to or "").split(",") if name.strip()]
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"log_to must name {', '.join(SINKS)}, or several of them with commas; got {name!r}")
    return names


def refuse_missing(log_to: str | None) -> None:
    """ConfigError for a sink whose package is not installed, with the line that installs it."""
    for name in sink_names(log_to):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log_to={name} needs a package: pip install {_PIP.get(name, name)}, or leave log_to empty")


def open_sinks(log_to: str | None, run: Run) -> list[Sink]:
    """The sinks that a setting names, for one run."""
    return [SINKS[name](run) for name in sink_names(log_to)]


def export_events(run_path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> Path:
    """Write a finished run's metrics as TensorBoard event files (default: `tensorboard/` in the run folder)."""
    folder = Path(folder) if folder else Path(run_path) / "tensorboard"
    sink = TensorBoardSink(folder)
    for record in read_metrics(run_path)[0]:
        sink(record)
    sink.close()
    return folder
