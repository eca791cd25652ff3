"""Accounting of waits, advice on splits, and the pipeline bench on CPU workers."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from dflash.__main__ import main
from dflash.bench import pipeline, timing
from dflash.bench.pipeline import cpu_workers
from dflash.distributed import accounting
from dflash.distributed.accounting import Ledger, Rates, advice, splits
from dflash.runs.record import Run, read_metrics
from dflash.train.settings import RuntimeOptions
from dflash.train.topology import decide


def test_the_best_split_is_the_one_whose_slower_side_is_fastest():
    """FACTS: a 27B target gives 7,800 tokens/s, a drafter takes 36,000: of eight GPUs, six should run targets."""
    best = splits(8, Rates(7800, 36000))[0]
    assert (best.targets, best.drafters, best.tokens_per_second, best.bound_by) == (6, 2, 46800, "targets")
    for gpus in range(2, 17):
        for target, drafter in ((1.0, 1.0), (1.0, 5.0), (5.0, 1.0), (2.0, 3.0)):
            wanted = max(min((gpus - d) * target, d * drafter) for d in range(1, gpus))
            assert splits(gpus, Rates(target, drafter))[0].tokens_per_second == pytest.approx(wanted)
    sharded = splits(8, Rates(10, 100), gpus_per_target=3)[0]
    assert (sharded.targets, sharded.drafters) == (2, 1)
    assert splits(1, Rates(2.0, 2.0))[0].tokens_per_second == pytest.approx(1.0)


def test_advice_says_how_much_another_split_would_give():
    text = advice(8, Rates(7800, 36000), (5, 3))
    assert (
        "best of 8: 6 targets and 2 drafters, 46,800 tokens/s; 1.20 times the 39,000 of 5 + 3, which is bound by its targets"
    ) in text
    assert text.count("\n") == 9  # head, rule, seven splits, the sentence
    assert "6 + 2 is as good" in advice(8, Rates(7800, 36000), (6, 2))


def test_the_clock_of_a_pipeline_leaves_the_warm_steps_and_the_last_one_out(monkeypatch):
    """Six steps of which two warm up: the clock runs from the end of the second to the end of the fifth."""
    ends = iter([10.0, 12.0, 13.0, 17.0, 18.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ends))
    clock = timing.StepClock()
    for number in range(6):
        clock.add(torch.tensor([float(number)]))
    assert clock.read() == [[float(number)] for number in range(6)]
    assert clock.seconds(2) == 2.0 and clock.end(2) == 12.0 and clock.each() == [2.0, 1.0, 4.0, 1.0]
    assert clock.seconds(4) == 1.0 and clock.seconds(5) is None


def test_a_ledger_tells_work_from_waiting(tmp_path, monkeypatch):
    run = Run.create(tmp_path, {}, "run")
    now = [100.0]
    monkeypatch.setattr(accounting, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0]))
    ledger = Ledger("target[0]", torch.device("cpu"), run.metrics)
    for phase, seconds in (("capture", 0.05), ("wait", 0.03), ("capture", 0.05), ("idle", 0.02), ("reduce", 0.02)):
        ledger.enter(phase, step=7)
        now[0] += seconds
    ledger.add_tokens(500)
    ledger.finish()
    ledger.report(queue_depth=2, force=True)
    assert (ledger.busy, ledger.waiting) == pytest.approx((0.1, 0.03))
    records, _ = read_metrics(run.path)
    stage = next(r for r in records if r["kind"] == "stage")
    assert stage["name"] == "target[0]" and stage["tokens"] == 500 and stage["queue_depth"] == 2
    assert stage["tokens_per_second"] == pytest.approx(500 / ledger.busy)
    spans = [r for r in records if r["kind"] == "span"]
    assert [s["name"] for s in spans] == ["capture", "wait", "capture", "reduce"]  # idle is a gap
    assert all(s["worker"] == "target[0]" and s["step"] == 7 for s in spans)
    assert [s["start"] for s in spans] == pytest.approx([100.0, 100.05, 100.08, 100.15])
    ledger.report(queue_depth=0, force=True)
    assert sum(r["kind"] == "stage" for r in read_metrics(run.path)[0]) == 1  # nothing new, nothing said


@pytest.mark.parametrize(("gpus", "target_gpus", "workers"), [("cpu", None, 1), ("cpu:2", None, 2), ("cpu:2", "cpu:3", 5)])
def test_workers_that_share_the_cores_are_counted(gpus, target_gpus, workers):
    assert cpu_workers(decide(RuntimeOptions(gpus=gpus, target_gpus=target_gpus), available=0)) == workers


def test_rates_that_a_pipeline_outruns_give_no_advice(capsys, monkeypatch):
    """A stage that shared the machine with others while it was measured alone."""
    monkeypatch.setattr(pipeline, "_TOO_FAST", 0.0)
    assert (
        main(
            [
                "bench",
                "pipeline",
                "--shape",
                "tiny",
                "--gpus",
                "cpu:1",
                "--target-gpus",
                "cpu:1",
                "--target-layers",
                "2",
                "--steps",
                "5",
                "--advise",
                "8",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "no advice: the pipeline was" in shown and "best of 8" not in shown


def test_the_bench_measures_and_advises(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "_TOO_FAST", float("inf"))  # other tests may use this machine
    out = tmp_path / "pipeline.json"
    assert (
        main(
            [
                "bench",
                "pipeline",
                "--shape",
                "tiny",
                "--gpus",
                "cpu:2",
                "--target-gpus",
                "cpu:2",
                "--target-layers",
                "4",
                "--steps",
                "10",
                "--advise",
                "8",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    result = json.loads(out.read_text())
    assert result["target"]["tokens_per_second"] > 0 and result["pipeline"]["finite"]
    together, tokens = result["pipeline"], 2 * result["shape"]["tokens"]  # two drafters, a pack each
    assert together["tokens_per_second"] * together["step_seconds"] == pytest.approx(tokens)
    assert len(together["losses"]) == 10 and together["seconds"] == pytest.approx(together["step_seconds"] / 2)
    shown = capsys.readouterr().out
    assert re.search(rf"^pipeline +[\d,]+ +{together['seconds']:.3f} ", shown, re.M)  # of a pack, as the rows above
    assert "4 CPU workers share the cores of one machine" in shown
    assert "best of 8" in shown and "of its slower side" in shown
