"""A GGUF target equals its safetensors original; its memory is stated; MoE routing keeps the original's rule."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_target as build

from dflash.target.capture import Target
from dflash.target.loading import load_config, load_model, resolve_source

gguf = pytest.importorskip("gguf")


def interleave(weight, heads):
    """llama.cpp keeps rotary pairs side by side: (2, half) of each head becomes (half, 2)."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_llama(path, model):
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            tensors[f"blk.{layer}.{theirs}.weight"] = interleave(weight, heads) if heads else weight
    for name, weight in tensors.items():
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_logits_equal_the_safetensors_ones_and_memory_is_stated(tmp_path):
    """transformers#45668."""
    original = build("dense")
    write_llama(tmp_path / "tiny.gguf", original.model)
    source = resolve_source(tmp_path / "tiny.gguf")
    loaded = Target(load_model(source, torch.float32), None, [0, 2], "tiny.gguf", note=source.size_note)
    ids = torch.randint(1, 60, (1, 17))
    wanted, got = original.capture(ids), loaded.capture(ids)
    torch.testing.assert_close(got.all_hidden_states, wanted.all_hidden_states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        got.verifier_last_hidden @ loaded.head_weight.T,
        wanted.verifier_last_hidden @ original.head_weight.T,
        atol=1e-4,
        rtol=1e-4,
    )
    assert loaded.memory_bytes == original.memory_bytes == 4 * sum(p.numel() for p in original.model.parameters())
    line = loaded.describe()
    assert "unpacked from a GGUF of" in line and "MB as float32" in line and "captured layers 0, 2" in line
    assert "unpacked" not in original.describe()


def test_a_header_is_read_once_while_the_file_stays_as_it_is(tmp_path, monkeypatch):
    """A real one takes seconds to parse, and config, tokenizer and weights were each read from it, nine times a run."""
    from dflash.target import loading

    seen, read = [], loading.AutoConfig.from_pretrained
    monkeypatch.setattr(
        loading.AutoConfig, "from_pretrained", lambda *args, **more: seen.append(args) or read(*args, **more)
    )
    original = build("dense")
    write_llama(tmp_path / "tiny.gguf", original.model)
    source = resolve_source(tmp_path / "tiny.gguf")
    first = load_config(source)
    first.vocab_size = 3
    assert load_config(source).vocab_size == original.config.vocab_size and len(seen) == 1
    load_model(source, torch.float32)
    assert len(seen) == 1
    write_llama(tmp_path / "tiny.gguf", build("dense", vocab_size=64).model)
    load_config(source)
    assert len(seen) == 2


def test_moe_gguf_keeps_normalised_routing(tmp_path):
    """The GGUF does not carry `norm_topk_prob`; transformers' own default is the wrong one for this family."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3moe")
    for add, value in (
        (writer.add_block_count, 2),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 48),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_expert_count, 4),
        (writer.add_expert_used_count, 2),
    ):
        add(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = load_config(resolve_source(tmp_path))
    assert config.norm_topk_prob is True and config.num_experts_per_tok == 2


def test_the_packaged_target_states_its_memory(smollm2):
    assert smollm2.memory_bytes == 4 * 134_515_008
    assert "538 MB as float32 (unpacked from a GGUF of 98 MB)" in smollm2.describe()
