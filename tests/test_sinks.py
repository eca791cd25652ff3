"""The numbers of a run in TensorBoard, W&B and MLflow, without a network; what is missing is refused by name."""

from __future__ import annotations

import importlib.util
import random

import pytest
from synthetic_run import write_records

from dflash.errors import ConfigError
from dflash.runs.record import Run
from dflash.runs.sinks import Sink, open_sinks, refuse_missing
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig


def needs(name: str):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def recorded(folder, log_to: str) -> Run:
    """A made-up run of 20 steps on one device, with sinks."""
    run = Run.create(folder, {"train": {"lr": 0.002}, "recipe": "cpu"}, "night")
    run.metrics.sinks += open_sinks(log_to, run)
    write_records(run, random.Random(0), 20, 1, 3)
    run.end("completed")
    return run


@needs("wandb")
def test_wandb_offline_gets_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = recorded(tmp_path, "wandb")
    (file,) = run.path.glob("wandb/offline-run-*/run-night.wandb")
    content = file.read_bytes()
    for tag in (b"step/loss", b"eval/acceptance_length", b"device/cuda:0/used", b"training_step"):
        assert tag in content


@needs("mlflow")
def test_mlflow_gets_the_numbers_in_a_file_store(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = recorded(tmp_path, "mlflow")
    client = MlflowClient((run.path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("dflash").experiment_id])
    assert found.info.run_name == "night" and found.info.status == "FINISHED" and found.data.params["lr"] == "0.002"
    history = client.get_metric_history(found.info.run_id, "eval/acceptance_length")
    assert [metric.step for metric in history] == list(range(2, 21, 2))
    assert history[-1].value == pytest.approx(1.62)
    assert {"step/loss", "device/cuda_0/used", "stage/target_0_/tokens_per_second"} <= set(found.data.metrics)


@pytest.mark.parametrize("name, pip", [("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_refused_by_name_before_anything_is_loaded(monkeypatch, name, pip):
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else object())
    config = RunConfig.from_parameters("cpu", target="random:tiny", data="random:4", soft_labels=False, log_to=name)
    with pytest.raises(ConfigError, match=f"log_to={name} needs a package: pip install {pip},"):
        resolve(config)


def test_names_are_checked():
    with pytest.raises(ConfigError, match="log_to must name tensorboard, wandb, mlflow.*got 'wandbb'"):
        RunConfig.from_parameters("cpu", log_to="tensorboard, wandbb")
    refuse_missing(None)


def test_a_service_that_fails_does_not_end_the_run(tmp_path, capsys):
    class Broken(Sink):
        def log(self, values, step, when):
            raise OSError("no route to host")

        end = log

    run = Run.create(tmp_path, {}, "night")
    run.metrics.sinks.append(Broken())
    write_records(run, random.Random(0), 20, 1, 3)
    run.end("completed")
    assert capsys.readouterr().err.count("Broken gets no more numbers: OSError: no route to host") == 1
