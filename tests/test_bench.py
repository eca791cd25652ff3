"""The benches at shapes that take milliseconds: what they print and write is measured here and now."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types

import pytest
import torch
from tiny_models import TINY_STEP as TINY
from torch.utils.flop_counter import FlopCounterMode

from dflash.__main__ import main
from dflash.bench import attention, pipeline, target, timing
from dflash.bench.arguments import writable
from dflash.bench.attention import make_mask, visible_pairs
from dflash.bench.shapes import StepShape
from dflash.bench.timing import Timing, matmul_ceiling, measure, refuse_hours
from dflash.bench.workload import make_drafter, make_head, make_inputs, matmul_flops
from dflash.drafter.head_plan import HeadPlan

CPU = torch.device("cpu")


def options(shape, skip=()):
    """A shape as command line options."""
    return [
        word
        for name, value in vars(shape).items()
        if name not in (*skip, "kind")  # the step has --kinds
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def run(capsys, path, *words):
    assert main(["bench", *words, "--device", "cpu", "--dtype", "float32", "--json", str(path)]) == 0
    return json.loads(path.read_text()), capsys.readouterr().out


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_step(capsys, tmp_path, labels):
    result, text = run(
        capsys,
        tmp_path / "deep" / "step.json",
        "step",
        *options(TINY),
        "--labels",
        labels,
        "--optimizer",
        "--repeats",
        "3",
        "--warmup",
        "1",
    )
    (row,) = result["results"]
    assert row["name"] == "plain" and row["labels"] == labels and row["repeats"] == 3  # no kernels on a CPU
    assert 0 < row["seconds_fastest"] <= row["seconds_median"] <= row["seconds_slowest"]
    assert row["tokens_per_second"] == pytest.approx(TINY.tokens / row["seconds_median"])
    assert row["matmul_flops"] == matmul_flops(TINY, labels == "soft")
    assert row["mfu"] == pytest.approx(row["matmul_flops"] / row["seconds_median"] / result["matmul_ceiling"])
    assert row["peak_bytes"] is None and row["loss"] > 0
    assert result["shape"]["tokens"] == 64 and result["environment"]["torch"] == torch.__version__
    assert "tokens/s" in text and "plain" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--repeats", "0"], "--repeats: wanted a whole number of at least 1, got '0'"),
        (["step", "--supervised", "0"], "--supervised: wanted a number above 0 and at most 1, got '0'"),
        (["step", "--chunk-rows", "0"], "--chunk-rows: wanted a whole number of at least 1"),
        (["target", "--tokens", "0"], "--tokens: wanted a whole number of at least 1"),
        (["target", "--document", "many"], "--document: wanted a whole number of at least 1, got 'many'"),
        (["attention", "--warmup", "-1"], "--warmup: wanted a whole number of at least 0"),
        (["pipeline", "--queue-depth", "0"], "--queue-depth: wanted a whole number of at least 1"),
        (["pipeline", "--steps", "1"], "--steps: wanted a whole number of at least 4"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["step", "attention", "target", "pipeline"])
def test_a_result_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, monkeypatch, bench):
    monkeypatch.setattr(f"dflash.bench.{bench}.run", lambda args: pytest.fail("measured"))
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "b.json", "Not a directory|File exists")):
        with pytest.raises(SystemExit) as ended:
            main(["bench", bench, "--json", str(path)])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and re.search(f"wanted a file that can be written, got .*({reason})", error)


def test_the_check_of_a_result_path_leaves_files_alone(tmp_path):
    kept, fresh = tmp_path / "kept.json", tmp_path / "deep" / "fresh.json"
    kept.write_text("{}")
    assert [writable(str(path)) for path in (kept, fresh)] == [str(kept), str(fresh)]
    assert kept.read_text() == "{}" and not fresh.exists()


@pytest.mark.parametrize("bench", ["step", "attention"])
def test_head_counts_of_a_drafter_must_divide(capsys, bench):
    words = [*options(TINY, skip=("heads", "kv_heads")), "--heads", "5", "--kv-heads", "2", "--device", "cpu"]
    assert main(["bench", bench, *words]) == 2
    error = capsys.readouterr().err
    assert "num_attention_heads (5) must be a multiple of num_key_value_heads (2)" in error and error.count("\n") == 1


@pytest.mark.parametrize("bench", ["step", "attention", "target"])
@pytest.mark.parametrize("device", ["mps", "meta"])
def test_a_device_that_cannot_be_used_is_refused(capsys, bench, device):
    assert main(["bench", bench, "--device", device]) == 2
    error = capsys.readouterr().err
    assert f"device {device} is of type {device!r}, and only cpu and cuda work here" in error and error.count("\n") == 1


def test_step_through_a_float8_head(capsys, tmp_path):
    losses = []
    for precision in ("same", "fp8"):
        result, text = run(
            capsys,
            tmp_path / "step.json",
            "step",
            *options(TINY),
            "--labels",
            "hard",
            "--head-precision",
            precision,
            "--repeats",
            "1",
            "--warmup",
            "0",
        )
        assert result["head_precision"] == precision and ("fp8 head" in text) == (precision == "fp8")
        losses.append(result["results"][0]["loss"])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)
    words = [*options(TINY, skip=("hidden",)), "--hidden", "40", "--head-precision", "fp8", "--device", "cpu"]
    assert main(["bench", "step", *words]) == 2
    assert "multiple of 16, the target's is 40; set head_precision=same" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="the peer is not installed here")
def test_step_beside_the_peer(capsys, tmp_path):
    result, text = run(capsys, tmp_path / "step.json", "step", *options(TINY), "--peer", "speculators", "--repeats", "2")
    ours, peer = result["results"]
    assert peer["name"] == "peer speculators"
    assert ours["ratio_to_peer"] == pytest.approx(ours["tokens_per_second"] / peer["tokens_per_second"])


def test_a_step_of_hours_is_refused(capsys):
    assert main(["bench", "step", "--device", "cpu", "--dtype", "float32"]) == 2
    error = capsys.readouterr().err
    assert main(["bench", "step", *options(TINY), "--device", "cpu", "--path", "fast"]) == 2
    assert "Triton kernels do not run on cpu; give --path plain or auto" in capsys.readouterr().err
    assert "would take cpu at least" in error and "give a smaller one, for instance --tokens 512" in error


@pytest.mark.parametrize(
    "words",
    [
        ["attention", "--tokens", "400000", "--anchors", "10240"],
        ["target", "--tokens", "400000"],
        ["target", "--model", "random:tiny@2", "--tokens", "1000000000"],
        ["pipeline", "--gpus", "cpu", "--shape", "full"],
        ["pipeline", "--gpus", "cpu", "--shape", "full", "--hybrid"],
        ["pipeline", "--gpus", "cpu:2", "--target-gpus", "cpu:2", "--shape", "small", "--tokens", "1000000"],
    ],
    ids=" ".join,
)
def test_hours_on_a_cpu_are_refused_before_anything_is_built(capsys, monkeypatch, words):
    small = attention.measure_backend

    def probe(backend, shape, *args, **options):
        assert shape.tokens <= 1024
        return small(backend, shape, *args, **options)

    monkeypatch.setattr(attention, "measure_backend", probe)
    monkeypatch.setattr(target, "report", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(pipeline, "measure_pipeline", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(target, "load_target", lambda *args: pytest.fail("built"))
    device = [] if words[0] == "pipeline" else ["--device", "cpu"]
    assert main(["bench", *words, *device, "--dtype", "float32"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"would take cpu at least [\d,]+ minutes; give a smaller one, for instance --", error)
    assert error.count("\n") == 1


def test_the_ceiling_of_a_cpu_is_its_fastest_call(monkeypatch):
    """A busy machine made of 0.9 TFLOP/s 0.03, and a capture ran at 1.4 of it."""
    monkeypatch.setattr(timing, "measure", lambda *args, **options: Timing(1.0, 0.25, 2.0, 10, None, None))
    assert matmul_ceiling(CPU, torch.float32, 10) == 2 * 10**3 / 0.25


def test_a_gpu_is_not_asked_how_long_it_takes():
    refuse_hours(lambda: pytest.fail("asked"), torch.device("cuda"), "")


def test_a_missing_peer_is_named(capsys, monkeypatch):
    for name in ("speculators", "speculators.models.dflash.core"):
        monkeypatch.setitem(sys.modules, name, None)
    assert (
        main(
            [
                "bench",
                "step",
                *options(TINY),
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--peer",
                "speculators",
                "--repeats",
                "1",
            ]
        )
        == 2
    )
    assert "install its wheel" in capsys.readouterr().err


def test_attention(capsys, tmp_path):
    result, text = run(
        capsys, tmp_path / "a.json", "attention", *options(TINY), "--backends", "sdpa,sdpa_chunked", "--repeats", "2"
    )
    assert [r["backend"] for r in result["results"]] == ["sdpa", "sdpa_chunked"]
    for row in result["results"]:
        for name, flops in (("forward", row["visible_flops"]), ("both", 3.5 * row["visible_flops"])):
            assert row[name]["flops_per_second"] == pytest.approx(flops / row[name]["seconds_median"])
    assert "sdpa_chunked" in text


def test_visible_pairs_counts_the_mask():
    mask = make_mask(TINY, CPU)
    assert visible_pairs(mask) == int(mask.dense.sum())


@pytest.mark.parametrize("model", ["random:tiny@2", "random:tiny-hybrid@4"])
def test_target(capsys, tmp_path, model):
    """Half the layers of a model: tokens per second are scaled to all of them."""
    words = ["--model", model, "--tokens", "48", "--document", "20", "--repeats", "2", "--warmup", "1"]
    result, text = run(capsys, tmp_path / "t.json", "target", *words)
    (row,) = result["results"]  # the fast capture needs a GPU
    assert row["tokens_per_second"] == pytest.approx(48 / row["seconds_median"] / 2)
    assert row["host_seconds"] == row["seconds_median"] and result["model"] == model
    assert result["flash_linear_attention"] is False and "not in use" in text and "plain capture" in text
    if model == "random:tiny@2":
        weights = 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)  # of two layers: q, k, v, o and the MLP
        assert row["matmul_flops_per_second"] == pytest.approx(2 * weights * 48 / row["seconds_median"])


def test_host_seconds_are_the_median_of_calls_into_an_empty_stream(monkeypatch):
    """Without a GPU: the device is named, and its synchronize is counted."""
    events, waits, now = [], iter([0.3, 0.1, 0.1, 0.2, 0.1]), [0.0]
    monkeypatch.setattr(target, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(target, "synchronize", lambda device: events.append("synchronize"))
    timing = Timing(9.0, 9.0, 9.0, 1, None, None)

    def call():
        events.append("call")
        now[0] += next(waits)

    assert target._host_seconds(call, torch.device("cuda"), timing) == pytest.approx(0.1)
    assert events == ["synchronize", "call"] * 5
    assert target._host_seconds(call, CPU, timing) == 9.0 and len(events) == 10


@pytest.mark.parametrize("soft", [True, False])
def test_matmul_flops_are_what_torch_counts(soft):
    """The plain step leaves unsupervised rows out of the head; everything else is counted slot by slot."""
    drafter = make_drafter(
        TINY, make_head(TINY, CPU, torch.float32), CPU, torch.float32, fast_path=False, attention_backend="sdpa"
    )
    inputs = make_inputs(TINY, CPU, torch.float32)
    with FlopCounterMode(display=False) as counter:
        drafter(**inputs.arguments, use_soft_labels=soft)[0].backward()
    counted = sum(v for op, v in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    rows = HeadPlan.make(inputs.anchors, inputs.loss_mask[0], inputs.lengths, TINY.block).query.numel()
    skipped = (TINY.anchors * TINY.block - rows) * 2 * TINY.hidden * TINY.vocab * (3 if soft else 2)
    assert rows > 0 and counted == matmul_flops(TINY, soft) - skipped


def test_full_size_flops():
    assert matmul_flops(StepShape(), soft=True) == pytest.approx(598e12, rel=0.002)
    assert matmul_flops(StepShape(), soft=True) - matmul_flops(StepShape(), soft=False) == pytest.approx(83.3e12, rel=1e-3)


def test_inputs_are_seeded_and_documents_fill_the_pack():
    a, b, other = (make_inputs(TINY, CPU, torch.float32, seed) for seed in (0, 0, 1))
    assert torch.equal(a.all_hidden_states, b.all_hidden_states) and torch.equal(a.anchors.positions, b.anchors.positions)
    assert not torch.equal(a.input_ids, other.input_ids)
    assert int(a.lengths.sum()) == TINY.tokens
    restarts = (a.position_ids[0] == 0).nonzero().flatten()
    assert torch.equal(restarts, torch.cumsum(a.lengths, 0) - a.lengths)


def test_measure_counts_its_calls():
    calls = []
    timing = measure(lambda: calls.append(1), CPU, warmup=2, repeats=3)
    assert len(calls) == 5 and timing.repeats == 3 and timing.peak_bytes is None
    assert matmul_ceiling(CPU, torch.float32, 64) > 0


@pytest.mark.gpu
def test_measure_on_a_gpu_tells_the_memory_of_the_call_alone():
    size = 64 << 20
    timing = measure(lambda: torch.empty(size, dtype=torch.int8, device="cuda").fill_(1), torch.device("cuda"), 1, 20)
    assert timing.peak_bytes - timing.base_bytes == size
    assert 1 <= timing.repeats and 0 < timing.fastest <= timing.median <= timing.slowest


@pytest.mark.slow
def test_kinds_are_trained_beside_each_other(capsys, tmp_path):
    small = dict(
        target="random:tiny", data="random:24", held_out_data="", held_out=0, pack_length=128, max_anchors=8,
        num_captured=2, drafter_layers=1, warm_start=False, selector_rank=4, selector_top_k=4, conv_group_size=8,
    )  # fmt: skip
    words = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    out, kinds = tmp_path / "runs", ["dflash", "dflash2"]
    words += ["--kinds", *kinds, "--seeds", "0", "--steps", "2", "--device", "cpu", "--out", str(out)]
    assert main(["bench", "kinds", *words, "--json", str(tmp_path / "kinds.json")]) == 0
    runs = json.loads((tmp_path / "kinds.json").read_text())["runs"]
    assert [(run["kind"], run["exit"], run["steps"]) for run in runs] == [("dflash", 0, 2), ("dflash2", 0, 2)]
    assert main(["bench", "kinds", *words]) == 2 and "is there already; name a new folder" in capsys.readouterr().err
