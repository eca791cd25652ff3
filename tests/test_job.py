"""From settings to a run on the real packaged target, small; and every bad input refused before any weight is read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash.data import Conversation
from dflash.drafter.storage import load_drafter
from dflash.errors import ConfigError, DataError, RunError, TargetError
from dflash.launch.run import start_run, train_run
from dflash.runs.record import Run, read_metrics
from dflash.train import prepare as job_module
from dflash.train.checkpoint import checkpoints, is_complete, latest_checkpoint, load_trainer_state, save_checkpoint
from dflash.train.prepare import frequent_tokens, prepare_data
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig

DATA = Path(__file__).parents[1] / "data" / "smollm2_conversations.jsonl"
SMALL = dict(
    data=str(DATA),
    max_conversations=6,
    held_out=2,
    pack_length=256,
    max_anchors=16,
    block_size=4,
    draft_vocab=0,
    steps=4,
    eval_every=2,
    checkpoint_every=2,
    num_captured=2,
    drafter_layers=1,
    soft_labels=True,
)


@pytest.fixture
def no_weights(monkeypatch):
    """Loading the target is an error: the message must come before it."""

    def refuse(*args, **kwargs):
        raise AssertionError("the target's weights were read before the input was refused")

    monkeypatch.setattr(job_module, "load_target", refuse)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gpus": "97"}, ConfigError, r"97.*(this machine|there)"),
        ({"drafter_layers": 31, "warm_start": True}, ConfigError, "the target has 30, fewer than drafter_layers = 31"),
        ({"num_captured": 50}, ConfigError, "num_captured is 50, and the target has 30 layers; capture at most 30"),
        ({"mask_token_id": 2}, TargetError, "mask_token_id 2 is also the"),
        ({"mask_token_id": 49152}, TargetError, "outside the embedding, which has 49152 rows"),
        ({"target_layers": [1, 30]}, TargetError, "layer id 30 is out of range: this target has layers 0 to 29"),
        ({"target": "no/such/model"}, TargetError, "no/such/model"),
        ({"data": "absent.jsonl"}, DataError, "absent.jsonl does not exist"),
        ({"held_out": 600}, DataError, "held_out is 600, but there are only 600"),
    ],
)
def test_bad_settings_stop_before_long_work(no_weights, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        start_run(RunConfig.from_parameters(**SMALL | changes), root=tmp_path)
    assert not list(tmp_path.iterdir()), "no run folder may be left behind"


def test_the_default_number_of_captured_layers_fits_a_small_target():
    small = RunConfig.from_parameters(target="random:tiny@2", data="random:2", pack_length=96, warm_start=False)
    assert resolve(small).layer_ids == [0, 1]
    with pytest.raises(ConfigError, match="num_captured is 5, and the target has 2 layers"):
        resolve(replace(small, target=replace(small.target, num_captured=5)))
    named = replace(small.target, num_captured=5, target_layers=(1,))
    assert resolve(replace(small, target=named)).layer_ids == [1], "the number is not used where layers are named"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (['{"messages": [{"role": "user", "content": "a"}'], "line 1"),
        ([json.dumps({"messages": [{"role": "user", "content": "only a question"}]})], "no assistant turn|assistant"),
    ],
)
def test_bad_files_stop_before_long_work(no_weights, tmp_path, lines, message):
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        start_run(RunConfig.from_parameters(**SMALL | {"data": str(file)}), root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_held_out_prompts_are_in_no_training_row(tmp_path):
    data = prepare_data(resolve(RunConfig.from_parameters(**SMALL | {"max_conversations": None, "held_out": 24})))
    prompts = {c.prompt_key for c in data.held_out}
    assert len(data.held_out) == 24 and not prompts & {c.prompt_key for c in data.conversations}
    assert len(data.conversations) + len(prompts) <= 600
    same = prepare_data(resolve(RunConfig.from_parameters(**SMALL | {"held_out": 24, "held_out_data": str(DATA)})))
    assert {c.prompt_key for c in same.held_out} == prompts and not prompts & {c.prompt_key for c in same.conversations}


def test_a_draft_vocabulary_keeps_frequent_supervised_tokens_and_ends():
    rows = [Conversation([9, 5, 5, 7, 8], [False, True, True, True, True]), Conversation([9, 7, 5], [False, True, True])]
    assert frequent_tokens(rows, None, [2]) is None
    assert frequent_tokens(rows, 0, [2]).tolist() == [2, 5, 7, 8]
    assert frequent_tokens(rows, 3, [2]).tolist() == [2, 5, 7]


@pytest.mark.slow
def test_a_small_run_on_the_real_target(tmp_path):
    """Trains, records, saves, resumes; the saved drafter is the trained one."""
    config = RunConfig.from_parameters(**SMALL)
    data = prepare_data(resolve(config))
    run = start_run(config, root=tmp_path, run_id="real", data=data)
    said = []
    outcome = train_run(run, config, say=said.append, data=data)
    assert (outcome.status, outcome.step) == ("completed", 4)
    records, _ = read_metrics(run.path)
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4] and all(r["loss"] > 0 for r in steps)
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 2, 4]
    assert records[-1]["kind"] == "run_end" and records[-1]["status"] == "completed"
    assert any("SmolLM2" in line or "smollm2" in line for line in said) and any("supervised" in line for line in said)
    assert RunConfig.load(run.path / "config.yaml") == config

    more = RunConfig.from_parameters(**SMALL | {"steps": 6})
    again = train_run(Run.open(run.path), more, resume=True, data=data)
    assert again.step == 6
    drafter = load_drafter(latest_checkpoint(run.path))
    masters = load_trainer_state(latest_checkpoint(run.path))["optimizer"]["masters"]
    for p, master in zip(drafter.parameters(), masters, strict=True):
        assert torch.equal(p, master.to(p.dtype))
    with pytest.raises(RunError, match="already holds a run"):
        start_run(config, root=tmp_path, run_id="real", data=data)


# -- checkpoints --------------------------------------------------------------------------------------------------


def save(tmp_path, step, **options):
    from tiny_models import random_drafter, tiny_target

    state = {"optimizer": {}, "trainer": {}}
    return save_checkpoint(tmp_path, step, random_drafter(tiny_target()), "tiny", state, **options)


def test_only_complete_checkpoints_count(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert [step for step, _ in checkpoints(tmp_path)] == [4, 6], "two are kept"
    newest = latest_checkpoint(tmp_path)
    (newest / "trainer.pt").write_bytes((newest / "trainer.pt").read_bytes()[:-1])
    assert not is_complete(newest) and latest_checkpoint(tmp_path).name == "step-00000004"
    with pytest.raises(RunError, match="step-00000006 is not a complete checkpoint"):
        load_trainer_state(newest)
    (latest_checkpoint(tmp_path) / "complete.json").unlink()
    with pytest.raises(RunError, match="no complete checkpoint; incomplete: step-00000004, step-00000006"):
        latest_checkpoint(tmp_path)


def test_a_failed_save_leaves_the_older_ones(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="step 2 could not be written.*No space left on device.*Earlier checkpoints"):
        save(tmp_path, 2)
    assert [step for step, _ in checkpoints(tmp_path)] == [1]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
