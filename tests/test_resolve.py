"""A config is settled once: the run, a replay and a resume read `resolved.yaml`; a run folder from before it works too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig

from dflash import devices
from dflash.__main__ import main
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import read_settings, save_drafter
from dflash.launch.run import start_run, train_run
from dflash.runs.record import Run, read_metrics
from dflash.target.random_weights import random_config
from dflash.train import resolve as resolving
from dflash.train.checkpoint import latest_checkpoint, load_trainer_state
from dflash.train.replay import replay
from dflash.train.resolve import Before, recall, resolve, settle_run
from dflash.train.resolved import read_resolved
from dflash.train.settings import RunConfig

OLD = Path(__file__).parent / "fixtures" / "old_run"
SETTINGS = dict(
    target="random:tiny",
    data="random:24",
    pack_length=64,
    held_out=0,
    warm_start=False,
    drafter_layers=1,
    num_captured=1,
    block_size=4,
    max_anchors=8,
    steps=6,
    packs_per_step=1,
    eval_every=0,
    checkpoint_every=4,
    dtype="float32",
)


def steps_of(run: Path) -> list[dict]:
    return [record for record in read_metrics(run)[0] if record["kind"] == "step"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three drafters asked for one pack a step."""
    torch.set_num_threads(1)
    config = RunConfig.from_parameters(**SETTINGS, gpus="cpu:3")
    run = start_run(config, tmp_path_factory.mktemp("resolved"), "r")
    with pytest.MonkeyPatch.context() as patch:  # nothing is decided again
        for name in ("decide", "compute_dtype", "estimate", "load_tokenizer", "create_drafter_config", "automatic_backend"):
            patch.setattr(resolving, name, lambda *given, name=name, **more: pytest.fail(f"{name} was called again"))
        train_run(run, config)
    return run.path


def test_a_replay_takes_the_packs_that_the_run_took(trained):
    record = steps_of(trained)[4]
    found = replay(trained, 5)
    assert [p.pack_id for p in found.packs] == record["pack_ids"] and len(record["pack_ids"]) == 3
    assert found.loss == pytest.approx(record["loss"], rel=1e-6)
    assert found.gradient_norm == pytest.approx(record["grad_norm"], rel=1e-5)


def test_what_is_written_is_what_was_resolved(trained):
    config = RunConfig.load(trained / "config.yaml")
    found = read_resolved(trained)
    assert found == resolve(config) and config.train.packs_per_step == 1
    settled = found.config
    assert (settled.train.packs_per_step, settled.train.dtype, settled.drafter.attention) == (3, "float32", "sdpa_chunked")
    assert settled.target.target_layers == (2,) and settled.drafter.mask_token_id == 299
    assert found.notes == ("packs_per_step 1 leaves 2 of 3 drafters idle; using 3",)
    said = [r["message"] for r in read_metrics(trained)[0] if r["kind"] == "log"]
    assert found.notes[0] in said and [str(d) for d in found.topology.drafters] == ["cpu"] * 3
    assert "auto" not in (settled.target.target_dtype, settled.train.dtype, settled.drafter.attention)


def test_the_report_says_what_it_came_to(trained):
    assert main(["report", str(trained), "--static"]) == 0
    page = (trained / "report.html").read_text()
    for said in ("Drafters on cpu (3)", "3 packs a step", "float32 with sdpa_chunked attention", "layers 2 captured"):
        assert said in page, said


@pytest.mark.parametrize(("gpus", "asked", "packs"), [("cpu:2", 1, 3), ("cpu:4", 1, 4), ("cpu:2", 5, 5), ("cpu:1", 2, 2)])
def test_a_run_that_goes_on_keeps_its_packs_whatever_drafters_it_has(gpus, asked, packs):
    config = RunConfig.from_parameters(**SETTINGS | {"packs_per_step": asked}, gpus=gpus)
    assert resolve(config, Before(packs_per_step=3, packs_asked=1)).config.train.packs_per_step == packs


def test_other_settings_are_resolved_anew(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "r")
    config = RunConfig.from_parameters(**SETTINGS | {"steps": 8}, gpus="cpu:2")
    outcome = train_run(Run.open(run), config, resume=True)
    assert outcome.step == 8 and [len(r["pack_ids"]) for r in steps_of(run)] == [3] * 8
    assert len(read_resolved(run).topology.drafters) == 2
    (run / "resolved.yaml").write_text("torn: [")
    assert read_resolved(run) is None and recall(run).config.train.packs_per_step == 3, "by the record"


def test_auto_follows_the_processor_and_not_the_clock(monkeypatch):
    config = RunConfig.from_parameters(**SETTINGS | {"dtype": "auto"}, gpus="cpu")
    for has, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda has=has: has)
        found = resolve(config)
        assert (found.dtype, found.target_dtype) == (wanted, wanted)


@pytest.mark.parametrize(
    ("line", "has"),
    [("flags : fpu avx512_bf16 sse", True), ("Features : fp asimd bf16", True), ("flags : fpu avx512f sse", False)],
)
def test_what_the_processor_says(monkeypatch, line, has):
    monkeypatch.setattr(devices.Path, "read_text", lambda path: f"model name : x\n{line}\n")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert devices.cpu_has_bfloat16.__wrapped__() is has


def test_memory_is_that_of_the_drafter_that_training_starts_from(tmp_path):
    shape = create_drafter_config(random_config("random:tiny"), 3, intermediate_size=1024)
    save_drafter(DFlashDrafter(shape, [1], 4, 8, 299), tmp_path, "random:tiny")
    config = RunConfig.from_parameters(**SETTINGS, gpus="cpu", start_from=str(tmp_path))
    found = resolve(config)
    assert found.drafter == shape and found.config.drafter.drafter_layers == 3 and found.layer_ids == [1]
    assert found.memory[torch.device("cpu")].parts["optimizer"] == 8 * shape.parameter_count(1)


# -- a run folder from before resolved.yaml ------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path):
    """Three drafters, one pack a step asked for, trained in bfloat16 by "auto", started from a drafter of its own shape."""
    run = Path(shutil.copytree(OLD, tmp_path / "runs/old"))
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["drafter"]["start_from"] = str(run / "start")
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_an_old_run_replays(old):
    for step in (1, 5):
        record = steps_of(old)[step - 1]
        found = replay(old, step)
        assert [p.pack_id for p in found.packs] == record["pack_ids"] and len(record["pack_ids"]) == 3
        assert found.loss == pytest.approx(record["loss"], rel=0.01)
    assert not (old / "resolved.yaml").exists(), "a look leaves the folder as it was"


def test_an_old_run_goes_on_in_the_dtypes_of_its_checkpoint(old, monkeypatch):
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: False)
    before = steps_of(old)
    settings = yaml.safe_load((old / "config.yaml").read_text())
    settings["train"]["steps"] = 8
    (old / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", "--config", str(old / "config.yaml"), "--resume"]) == 0
    records = steps_of(old)
    assert records[:6] == before and [len(r["pack_ids"]) for r in records] == [3] * 8
    found = read_resolved(old)
    assert (found.dtype, found.target_dtype, found.drafter.intermediate_size) == (torch.bfloat16, torch.bfloat16, 24)
    folder = latest_checkpoint(old)
    assert folder.name == "step-00000008" and read_settings(folder)["config"]["num_attention_heads"] == 2
    assert load_trainer_state(folder)["plan"] == load_trainer_state(OLD / "checkpoints/step-00000006")["plan"]


def test_an_old_run_is_reported(old):
    assert main(["report", str(old), "--static"]) == 0
    page = (old / "report.html").read_text()
    assert "random:tiny" in page and 'class="badge completed"' in page


@pytest.mark.slow
def test_a_run_in_ranks_reads_the_same_facts(tmp_path):
    """Settled by the process that starts them: with other packs a step in resolved.yaml the ranks take those."""
    config = RunConfig.from_parameters(**SETTINGS, gpus="cpu:2", launcher="torchrun")
    run = start_run(config, tmp_path, "r")
    found = read_resolved(run.path).to_dict()
    found["settings"]["train"]["packs_per_step"] = 5
    (run.path / "resolved.yaml").write_text(yaml.safe_dump(found))
    assert settle_run(run.path, config).config.train.packs_per_step == 5
    assert train_run(run, config).status == "completed"
    assert [len(r["pack_ids"]) for r in steps_of(run.path)] == [5] * 6
    assert json.loads((latest_checkpoint(run.path) / "complete.json").read_text())["dtypes"][1] == "float32"


@pytest.mark.parametrize(
    ("heads", "block", "was", "wanted"),
    [
        (8, 8, None, "triton"),
        (6, 8, None, "flex"),  # three query heads per key head
        (8, 6, None, "flex"),
        (8, 8, "flex", "flex"),  # a run that goes on keeps its own
        (6, 8, "sdpa_chunked", "flex"),  # it began on a CPU
    ],
)
def test_automatic_attention_on_a_gpu(monkeypatch, heads, block, was, wanted):
    monkeypatch.setattr("dflash.drafter.kernels.usable", lambda device: device.type == "cuda")
    shape = create_drafter_config(
        LlamaConfig(hidden_size=48, num_attention_heads=heads, num_key_value_heads=2, head_dim=64), 1
    )
    options, notes = RunConfig.from_parameters(block_size=block).drafter, []
    assert resolving._attention(options, shape, torch.device("cuda:0"), Before(attention=was), notes) == wanted
    assert len(notes) == (was != "flex") and all(f"attention is {wanted}: " in note for note in notes)
    assert resolving._attention(options, shape, torch.device("cpu"), Before(attention="flex"), notes) == "sdpa_chunked"
