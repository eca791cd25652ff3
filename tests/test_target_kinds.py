"""Targets of other kinds: attention that sdpa cannot do, adapters, quantised folders, odd tokenizers, base models."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import transformers
from chat_tokenizer import CHATML, chat_tokenizer, save_material
from test_regenerate import chat_target, rows_of, run
from test_warm_start import SIZES, tiny
from tiny_models import slow_greedy
from tokenizers import Tokenizer, models

from dflash.data import load_conversations
from dflash.errors import ConfigError, TargetError
from dflash.target import adapters
from dflash.target.capture import Target, choose_mask_token_id, load_target, validate_mask_token_id
from dflash.target.loading import load_config, resolve_source, supported_attention
from dflash.target.session import TargetSession
from dflash.train.prepare import prepare_data
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig


def gpt_oss() -> Target:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    config._attn_implementation = "eager"
    return Target(transformers.GptOssForCausalLM(config), None, [0, 2], source="tiny gpt-oss")


def saved(target: Target, folder, tokenizer=None):
    target.model.save_pretrained(folder)
    (tokenizer or chat_tokenizer()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["gpt-oss", "Gemma2"])
def test_auto_takes_the_attention_that_the_model_supports(tmp_path, family):
    made = gpt_oss() if family == "gpt-oss" else tiny("Gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
    folder = saved(made, tmp_path / "model")
    assert supported_attention(load_config(resolve_source(folder))) == "eager"
    target = load_target(folder, layer_ids=[0, 2])  # its self-test compares the logits, caps included
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        wanted = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(target.capture(ids).all_hidden_states[..., :32], wanted.hidden_states[1])
    _, logits = TargetSession(target).prefill(ids[0].tolist())
    torch.testing.assert_close(logits, wanted.logits[0, -1], rtol=1e-4, atol=1e-4)
    if family == "Gemma2":
        with pytest.raises(TargetError, match='cannot run with this target_attention .*"auto" takes what it supports'):
            load_target(folder, attention="sdpa")


def test_plain_models_keep_sdpa_and_soft_labels_refuse_capped_logits(tmp_path):
    assert supported_attention(tiny("Qwen3").config) == "sdpa"
    save_material(tmp_path, tiny("Gemma2", vocab_size=300).model, chat_tokenizer())
    config = RunConfig.from_parameters(
        target=str(tmp_path / "target"), data=str(tmp_path / "data.jsonl"), pack_length=128, soft_labels=True, num_captured=2
    )
    with pytest.raises(ConfigError, match="caps its logits; use soft_labels=False"):
        prepare_data(resolve(config))


def test_soft_labels_auto_are_hard_ones_for_a_target_that_caps_its_logits(tmp_path):
    """Every recipe asked for soft labels, so each run for a Gemma 2 was refused."""
    assert RunConfig.from_parameters().train.soft_labels == "auto"
    for family, soft in (("Gemma2", False), ("Qwen3", True)):
        save_material(tmp_path / family, tiny(family, vocab_size=300).model, chat_tokenizer())
        resolved = resolve(settings(tmp_path / family))
        assert resolved.config.train.soft_labels is soft
        assert any("hard labels: soft ones" in note and "caps its logits" in note for note in resolved.notes) is not soft


# -- adapters and quantised folders -----------------------------------------------------------------------------
def adapter_files(folder, base: str | None):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_refused_as_one_where_peft_is_absent(tmp_path, monkeypatch, beside):
    find = importlib.util.find_spec
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    if beside:
        saved(chat_target(), tmp_path / "model")
    folder = adapter_files(tmp_path / "model", "someone/base")
    where = "beside base weights" if beside else "for the base model 'someone/base'"
    with pytest.raises(TargetError, match=f"holds an adapter {where}, and merging it needs the peft package"):
        resolve_source(folder)


def test_adapters_that_cannot_be_merged_are_named(tmp_path):
    """Without weights one was looked for at the hub; one whose base was itself never ended."""
    alone = adapter_files(saved(chat_target(), tmp_path / "model"), None)
    (alone / "adapter_model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds an adapter_config.json and no adapter weights"):
        resolve_source(alone)
    ring = adapter_files(tmp_path / "ring", str(tmp_path / "ring"))
    pytest.importorskip("peft")
    with pytest.raises(TargetError, match="ring', which holds one itself"):
        resolve_source(ring)


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_merged_where_peft_is(tmp_path, beside):
    peft = pytest.importorskip("peft")
    base = saved(chat_target(), tmp_path / "base")
    torch.manual_seed(1)
    model = peft.get_peft_model(
        chat_target().model,
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, base_model_name_or_path=str(base)),
    )
    folder = base if beside else tmp_path / "adapter"
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    target = load_target(folder, layer_ids=[0])
    ids = torch.arange(6, 20)[None]
    with torch.no_grad():
        wanted, plain = model(input_ids=ids).logits, chat_target().model(input_ids=ids).logits
        got = target.model(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert (got - plain).abs().max() > 0.1 and "adapter merged" in target.describe()
    assert not any("lora" in name for name, _ in target.model.named_parameters())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "a_new_one"])
def test_a_quantised_folder_that_cannot_be_loaded_names_its_method(tmp_path, method):
    folder = saved(chat_target(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=f"whose weights are quantised .{method}.,"):
        load_target(folder)


# -- tokenizers ----------------------------------------------------------------------------------------------
class Tokens:
    """A tokenizer as the choice of a mask token sees it."""

    chat_template = "{{ '<tool>' }}"
    pad_token_id = eos_token_id = bos_token_id = unk_token_id = mask_token_id = None

    def __init__(self, ids, special=()):
        self.ids = list(ids)
        self.added_tokens_decoder = {index: transformers.AddedToken(name, special=True) for index, name in special}

    def get_vocab(self):
        return {f"t{index}": index for index in self.ids}

    def __len__(self):
        return len(self.ids)


def test_the_mask_is_a_row_that_no_token_uses():
    holes = Tokens([*range(50), *range(60, 70)])
    assert choose_mask_token_id(holes, 80) == 70
    assert choose_mask_token_id(holes, 70) == 50
    assert choose_mask_token_id(holes, 80, seen={70, 71}) == 72  # ready ids may use rows that the tokenizer does not


def test_the_mask_is_no_token_that_the_data_or_the_template_holds():
    special = [(6, "<think>"), (7, "<tool>"), (8, "<|a|>"), (9, "<|b|>")]
    full = Tokens(range(10), special)
    assert choose_mask_token_id(full, 10) == 8
    assert choose_mask_token_id(full, 10, seen={8}) == 9
    with pytest.raises(TargetError, match="Name the least harmful one with mask_token_id"):
        choose_mask_token_id(full, 10, seen={8, 9})


def settings(root, **changes) -> RunConfig:
    return RunConfig.from_parameters(
        **dict(target=str(root / "target"), data=str(root / "data.jsonl"), pack_length=128, num_captured=1, held_out=2)
        | changes
    )


def test_a_mask_token_of_the_data_is_counted_and_warned(tmp_path):
    save_material(tmp_path, chat_target().model, chat_tokenizer())
    letter = chat_tokenizer()("y")["input_ids"][0]
    data = prepare_data(resolve(settings(tmp_path, mask_token_id=letter)))
    ids = [
        token for item in load_conversations(tmp_path / "data.jsonl", chat_tokenizer(), 128)[0] for token in item.input_ids
    ]
    wanted = f"mask_token_id {letter} is a token of the data: {ids.count(letter):,} of {len(ids):,} tokens"
    assert ids.count(letter) > 5 and wanted in data.report.warnings[0] and wanted in data.report.table()
    chosen = prepare_data(resolve(settings(tmp_path)))
    assert chosen.report.warnings == [] and chosen.mask_token_id not in ids


def test_an_end_id_of_the_generation_config_alone_is_refused_as_mask(tmp_path):
    save_material(tmp_path, chat_target().model, chat_tokenizer())
    file = tmp_path / "target" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, 5]}))
    with pytest.raises(TargetError, match="mask_token_id 5 is also the end token 5"):
        resolve(settings(tmp_path, mask_token_id=5))
    assert validate_mask_token_id(5, chat_tokenizer(), 262, [2]) == 5


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "x"}', '{"eos_token_id": [2, "</s>"]}'])
def test_a_broken_generation_config_is_named(tmp_path, text):
    save_material(tmp_path, chat_target().model, chat_tokenizer())
    (tmp_path / "target" / "generation_config.json").write_text(text)
    with pytest.raises(TargetError, match="generation_config.json cannot be read"):
        resolve(settings(tmp_path))


def test_a_broken_tokenizer_is_not_called_an_unknown_architecture(tmp_path):
    save_material(tmp_path, chat_target().model, chat_tokenizer())
    (tmp_path / "target" / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TargetError, match="the tokenizer of target .* could not be loaded .*files are there and whole"):
        resolve(settings(tmp_path))


def test_an_answer_under_a_metaspace_tokenizer_is_supervised_from_its_first_token(tmp_path):
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dflash.data import ChatRenderer

    words = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *"▁abcdefgh", "▁a", "▁b"]
    vocab = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["[INST]", "[/INST]"],
        chat_template="{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    )
    chat = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "ab"}]
    for template in (
        tokenizer.chat_template,
        tokenizer.chat_template.replace("[/INST]", "[/INST] ").replace("{% else %} ", "{% else %}"),
    ):
        ids, mask = ChatRenderer(tokenizer, template)([*chat, {"role": "user", "content": "d"}, *chat[1:]])
        kept = tokenizer.convert_ids_to_tokens([token for token, there in zip(ids, mask, strict=True) if there])
        assert kept == ["▁a", "b", "</s>"] * 2, template


# -- base models and tokenizers without pad or end ---------------------------------------------------------------
def bare_tokenizer(template):
    tokenizer = chat_tokenizer(template)
    tokenizer.eos_token = tokenizer.pad_token = None
    return tokenizer


def test_a_tokenizer_with_neither_pad_nor_end_writes_answers(tmp_path):
    target = chat_target()
    target.model.config.eos_token_id = target.model.config.pad_token_id = None
    target.model.generation_config.eos_token_id = target.model.generation_config.pad_token_id = None
    folder = saved(target, tmp_path / "model", bare_tokenizer(CHATML))
    (tmp_path / "p.txt").write_text("one\na longer one\n")
    run("--target", folder, "--prompts", tmp_path / "p.txt", "--out", tmp_path / "o.jsonl", "--max-new-tokens", 5)
    for row in rows_of(tmp_path / "o.jsonl"):
        assert row["response_ids"] == slow_greedy(chat_target(), row["prompt_ids"], 5)


def test_a_base_model_answers_plain_prompts_and_its_rows_are_trained_on(tmp_path):
    folder = saved(chat_target(), tmp_path / "model", chat_tokenizer(None))
    (tmp_path / "p.txt").write_text("".join(f"once upon a {number}\n" for number in range(12)))
    arguments = ("--target", folder, "--out", tmp_path / "o.jsonl", "--max-new-tokens", 6)
    run("--prompts", tmp_path / "p.txt", *arguments)
    rows = rows_of(tmp_path / "o.jsonl")
    assert len(rows) == 12 and rows[0]["prompt_ids"] == chat_tokenizer(None)("once upon a 0")["input_ids"]
    conversations, report = load_conversations(tmp_path / "o.jsonl", chat_tokenizer(None), 64)
    assert len(conversations) == report.kept_ids > 0
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(chat) + "\n")
    with pytest.raises(ValueError, match="(?s)p.jsonl line 1 is a chat, and this target has no chat template"):
        run("--prompts", tmp_path / "p.jsonl", "--target", folder, "--out", tmp_path / "x.jsonl")
