"""Runs that survive, on real GPUs: out of memory, resume in threads and over NCCL, replay of a step that ran with flex."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import yaml
from chat_tokenizer import chat_tokenizer, save_material
from test_train_command import kinds, losses, write_config
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.__main__ import main
from dflash.runs.record import Run
from dflash.train.memory_help import DeviceOutOfMemory
from dflash.train.settings import RunConfig
from dflash.train.step import Replica
from dflash.train.topology import available_gpus

GPUS = available_gpus()
pytestmark = pytest.mark.gpu
SHARED = dict(gpus="0", target_gpus="0")
APART = dict(gpus="1", target_gpus="0")
LAYOUTS = [SHARED, pytest.param(APART, marks=pytest.mark.gpu(2))]
NAMES = ["shared", "apart"]
BFLOAT16 = dict(dtype="bfloat16", target_dtype="bfloat16")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A random target whose head dimension the compiled kernels take, and conversations."""
    root = tmp_path_factory.mktemp("material")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    save_material(root, LlamaForCausalLM(config), tokenizer)
    return root


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_out_of_memory_names_the_device_and_the_run_goes_on_afterwards(material, tmp_path, monkeypatch, layout):
    config = write_config(material, tmp_path / "runs/oom", checkpoint_every=2, **BFLOAT16, **layout)
    accumulate, fired = Replica.accumulate, []

    def exhausted(self, *arguments):
        if not fired and len(losses(config.parent)) >= 3:
            fired.append(True)
            device = next(self.drafter.parameters()).device
            free, _ = torch.cuda.mem_get_info(device)
            torch.empty(free + 2**30, dtype=torch.uint8, device=device)
        return accumulate(self, *arguments)

    monkeypatch.setattr(Replica, "accumulate", exhausted)
    from dflash.launch.run import train_run

    with pytest.raises(DeviceOutOfMemory) as caught:
        train_run(Run.open(config.parent), RunConfig.load(config))
    text = str(caught.value)
    device = f"cuda:{layout['gpus']}"
    for wanted in (
        f"on {device} is out of memory",
        "Tried to allocate",
        f"memory of {device} (GiB)",
        "estimated in all",
        "max_anchors (now 16)",
    ):
        assert wanted in text, wanted
    monkeypatch.undo()
    del caught
    gc.collect()
    torch.cuda.empty_cache()
    assert main(["train", "--config", str(config), "--resume"]) == 0
    records = kinds(config.parent)
    assert [r["step"] for r in records["step"]] == list(range(1, 9))


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
@pytest.mark.parametrize("launcher", ["threads", "torchrun"])
def test_a_run_in_two_parts_is_the_unbroken_run(material, tmp_path, launcher, layout):
    fixed = dict(launcher=launcher, min_lr_ratio=1.0, eval_every=100, **BFLOAT16, **layout)
    whole = write_config(material, tmp_path / "runs/whole", **fixed)
    assert main(["train", "--config", str(whole)]) == 0
    config = write_config(material, tmp_path / "runs/parts", **fixed)
    values = yaml.safe_load(config.read_text())
    for number, steps in enumerate((4, 8)):
        values["train"]["steps"] = steps
        config.write_text(yaml.safe_dump(values))
        assert main(["train", "--config", str(config), *["--resume"] * bool(number)]) == 0
    one, two = losses(whole.parent), losses(config.parent)
    print(f"{launcher}: largest difference of a loss {max(abs(a - b) for a, b in zip(one, two, strict=True)):.3g}")
    assert len(one) == 8 and two == pytest.approx(one, rel=1e-3)
    packs = [[r["pack_ids"] for r in kinds(c.parent)["step"]] for c in (whole, config)]
    assert packs[0] == packs[1]


@pytest.mark.parametrize("attention", ["flex", "triton"])
def test_a_step_that_ran_in_bfloat16_is_replayed_in_float32(material, tmp_path, attention):
    config = write_config(
        material, tmp_path / "runs/r", checkpoint_every=3, keep_checkpoints=9, attention=attention, **BFLOAT16, **SHARED
    )
    assert main(["train", "--config", str(config)]) == 0
    assert main(["replay", "--run", str(config.parent), "--step", "6", "--device", "cuda:0"]) == 0
    record = next(r for r in kinds(config.parent)["step"] if r["step"] == 6)
    told = json.loads((config.parent / "replay-step-6.json").read_text())
    assert told["loss"] == pytest.approx(record["loss"], rel=2e-2)
    assert [p["pack_id"] for p in told["packs"]] == record["pack_ids"]
