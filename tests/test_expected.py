"""What a run is measured against: its recipe's curve, and the memory that it was estimated to need."""

from __future__ import annotations

import pytest
import torch
import yaml
from runner_jobs import first_replica, options, serial_engine
from synthetic_run import write_run

from dflash.runs.record import Run
from dflash.train import recipes
from dflash.train.expected import expected_band
from dflash.train.holding import bytes_by_device
from dflash.train.settings import RunConfig
from dflash.views.dashboard.panels import PANELS
from dflash.views.dashboard.series import RunSeries
from dflash.views.report.story import findings

CURVES = {
    "margin": 0.05,
    "curves": [
        {"measured": "machine A", "acceptance": {0: 1.0, 100: 1.2, 200: 1.4}},
        {"measured": "machine B", "acceptance": {0: 1.0, 100: 1.3}},
    ],
}


@pytest.fixture
def with_curve(tmp_path, monkeypatch):
    """The cpu recipe with measured curves."""
    values = yaml.safe_load((recipes.FOLDER / "cpu.yaml").read_text()) | {"expected": CURVES}
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(recipes, "FOLDER", tmp_path)


def test_the_band_spans_the_curves_with_a_margin(with_curve):
    config = RunConfig.from_parameters("cpu", max_minutes=2, eval_every=50)  # neither changes what a step learns
    band = expected_band(config.to_dict(), 1)
    assert band["steps"] == [0, 100, 200] and band["measured"] == "machine A; machine B"
    assert band["low"] == pytest.approx([1.0, 1.15, 1.35])  # no length is below 1
    assert band["high"] == pytest.approx([1.05, 1.35, 1.45])  # B says nothing of step 200


@pytest.mark.parametrize("changed", [{"lr": 0.001}, {"data": "chats.jsonl"}, {"target": "random:tiny"}, {"steps": 100}])
def test_another_run_has_no_band(with_curve, changed):
    assert expected_band(RunConfig.from_parameters("cpu", **changed).to_dict(), 1) is None


def test_more_packs_a_step_have_no_band_nor_has_a_recipe_without_a_curve(with_curve):
    config = RunConfig.from_parameters("cpu").to_dict()
    assert expected_band(config, 1) is not None and expected_band(config, 3) is None
    assert expected_band({**config, "recipe": None}, 1) is None


def test_every_recipe_file_can_be_read_whole():
    for name in recipes.recipe_names():
        assert recipes.EXPECTED not in recipes.read_recipe(name)
        band = expected_band(RunConfig.from_parameters(name, data="x.jsonl").to_dict(), 1)
        assert band is None


def test_the_cpu_recipe_s_own_band_rises():
    band = expected_band(RunConfig.from_parameters("cpu").to_dict(), 1)
    assert band["steps"][0] == 0 and band["low"][0] == 1.0 and band["low"][-1] > 1.5
    assert all(0.05 < high - low < 0.25 for low, high in zip(band["low"], band["high"], strict=True))


def band_run(tmp_path, lengths: dict[int, float]) -> RunSeries:
    run = Run.create(tmp_path, {}, "night")
    run.metrics.write("expected", steps=[0, 100], low=[1.0, 1.2], high=[1.1, 1.4], measured="two cores")
    for step, length in lengths.items():
        run.metrics.write("eval", step=step, acceptance_length=length)
    series = RunSeries(run.path)
    series.follow()
    return series


def test_a_run_that_leaves_the_band_is_told(tmp_path):
    series = band_run(tmp_path, {0: 1.0, 50: 1.05, 100: 1.3})
    (found,) = findings(series, "completed")
    assert found.level == "odd" and found.text == (
        "Held-out acceptance left the band of the recipe at step 50: 1.05, where 1.10 to 1.25 is expected (measured on "
        "two cores)."
    )
    panel = PANELS["acceptance"](series)
    (band,) = [line for line in panel.lines if line.area]
    assert max(band.y) == pytest.approx(1.4) and min(band.y) == 1.0 and max(band.x) == 100
    series.planned_steps = 50  # the plot is not wider than the run
    (band,) = [line for line in PANELS["acceptance"](series).lines if line.area]
    assert max(band.x) == 50 and max(band.y) == pytest.approx(1.25)


def test_samples_stay_few_and_stand_evenly(tmp_path):
    run = Run.create(tmp_path, {}, "night")
    for step in range(0, 401, 10):
        run.metrics.write("eval", step=step, acceptance_length=1.0, sample={"prompt": "p", "chunks": []})
    series = RunSeries(run.path)
    series.follow()
    steps = [step for step, _ in series.samples]
    assert len(steps) == 8 and (steps[0], steps[-1]) == (0, 400)
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 100


@pytest.mark.parametrize("length, level", [(1.3, None), (1.5, "note")])
def test_inside_it_nothing_is_said_and_above_it_is_no_fault(tmp_path, length, level):
    found = findings(band_run(tmp_path, {0: 1.0, 100: length, 200: 1.5}), "completed")
    assert [finding.level for finding in found] == ([level] if level else [])


def test_what_is_in_memory_is_counted_from_the_tensors():
    settings = options(steps=4, packs_per_step=1)
    target, replica = first_replica(settings)
    engine = serial_engine(target, replica, settings)
    engine.start(1)
    engine.step(engine.planner.step(1), 1e-3)
    found = bytes_by_device(engine.named_tensors())["cpu"]
    trained = sum(p.nbytes for p in replica.drafter.parameters() if p.requires_grad)
    moments = sum(s[name].nbytes for s in replica.optimizer.adamw.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert found["drafter"] >= trained and found["optimizer"] == pytest.approx(moments, rel=0.01)
    assert found["target"] >= sum(p.nbytes for p in target.model.parameters()) * 0.99


def test_shared_memory_counts_once():
    whole = torch.zeros(100)
    assert bytes_by_device([("a", [whole[:50]]), ("b", [whole, torch.zeros(10)])]) == {"cpu": {"a": 400, "b": 40}}


def test_the_memory_plot_stands_the_peak_beside_the_estimate(tmp_path):
    series = RunSeries(write_run(tmp_path, steps=20, devices=1))
    series.follow()
    panel = PANELS["holdings"](series)
    assert panel.lanes == ["cuda:0 at step 2", "cuda:0 estimated"]
    totals = [sum(group.lengths[lane] for group in panel.spans) for lane in range(2)]
    assert totals == pytest.approx([60, 60])  # the peak of the record; the estimate's sum
    (rest,) = [group for group in panel.spans if group.name.startswith("activations")]
    assert rest.lengths.tolist() == pytest.approx([6, 6])
