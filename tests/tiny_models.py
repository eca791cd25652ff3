"""Tiny random targets and stand-in drafters for the decoding, evaluation and export tests."""

from __future__ import annotations

import types

import torch

from dflash.bench.workload import StepShape
from dflash.drafter.config import DrafterConfig, create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.target.capture import Target

VOCAB = 61
SECOND = {"drafter_kind": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def tiny_target(
    kind: str = "dense", layer_ids=(0, 2), seed: int = 0, dtype=torch.float32, vocab_size: int = VOCAB
) -> Target:
    """ "dense" (Llama), "sliding" (Qwen3 with windows of 6) or "hybrid" (Qwen3.5: linear and full attention)."""
    torch.manual_seed(seed)
    common = dict(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    if kind == "dense":
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**common))
    elif kind == "sliding":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        kinds = ["sliding_attention", "full_attention"] * 2
        model = Qwen3ForCausalLM(Qwen3Config(**common, layer_types=kinds, use_sliding_window=True, sliding_window=6))
    else:
        from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        kinds = ["linear_attention"] * 3 + ["full_attention"]
        model = Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **common,
                layer_types=kinds,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_conv_kernel_dim=4,
            )
        )
    return Target(model.to(dtype).eval(), None, list(layer_ids), source=f"tiny {kind}")


def random_drafter(target: Target, block_size: int = 5, draft_ids=None, seed: int = 1, **changes) -> DFlashDrafter:
    """A drafter with random weights on a tiny target."""
    torch.manual_seed(seed)
    count = None if draft_ids is None else len(draft_ids)
    config: DrafterConfig = create_drafter_config(
        target.config, num_draft_layers=2, initializer_range=0.2, draft_vocab_size=count, **changes
    )
    drafter = DFlashDrafter(config, target.layer_ids, block_size, 8, config.vocab_size - 1)
    drafter.load_target_head(target.embed_weight, target.head_weight, None if draft_ids is None else torch.tensor(draft_ids))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "conv" in name or "selector" in name:  # away from the identity that they start as
                parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


class ScriptedDrafter:
    """Proposes what `script(position) -> token` says for each position of the text, with certainty."""

    def __init__(self, target: Target, script, block_size: int = 5):
        self.script, self.block_size = script, block_size
        self.target_layer_ids = target.layer_ids
        self.fc = types.SimpleNamespace(weight=torch.zeros(1))
        self.config = types.SimpleNamespace(vocab_size=VOCAB, draft_vocab_size=None)
        self.draft_token_ids = torch.arange(VOCAB)

    def new_context(self):
        return types.SimpleNamespace(length=0)

    def extend(self, context, features):
        context.length += features.shape[1]

    def propose(self, context, anchor_token):
        positions = range(context.length + 1, context.length + self.block_size)
        tokens = torch.tensor([self.script(position) for position in positions])
        return torch.nn.functional.one_hot(tokens, VOCAB).float() * 50


def slow_greedy(target: Target, prompt: list[int], count: int, stops=()) -> list[int]:
    """Plain greedy text by whole forward passes of the transformers model, no cache: the oracle."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


TINY_STEP = StepShape(
    tokens=64,
    anchors=8,
    block=4,
    captured=2,
    document=24,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=48,
    vocab=96,
)  # for the benches
