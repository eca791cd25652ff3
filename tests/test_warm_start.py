"""A warm start proves its copies: exact, or refused with the reason, or (auto) left out and said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from chat_tokenizer import chat_tokenizer, save_material

from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.warm_start import WarmStartError, warm_start
from dflash.errors import ConfigError
from dflash.target.capture import Target
from dflash.train.prepare import make_drafter
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig

ROOT = Path(__file__).resolve().parents[1]
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def tiny(family: str, **changes) -> Target:
    """A random model of a public family, its norms and biases drawn too, as a trained one has them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    name = family.replace("Gemma3Text", "Gemma3").replace("Config", "")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for weight_name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.uniform_(0.5, 1.5) if "norm" in weight_name else weight.data.normal_()
    return Target(model, None, [0, 2], source=f"tiny {family}")


def drafter_of(target: Target) -> DFlashDrafter:
    torch.manual_seed(1)
    return DFlashDrafter(create_drafter_config(target.config, 2), [0, 2], 4, 4, 60)


EXACT = {
    "Qwen3": "each gives the target's own output",
    "Llama": "up to the query and key norms, which the target's layers do not have",
    "Mistral": "up to the query and key norms",
}
REFUSED = {
    "Qwen2": "its copy differs from it by .* of what it adds .biases",
    "Olmo": "its copy differs",  # its norms have no weights
    "Olmo2": "has no input_layernorm",
    "Cohere": "has no post_attention_layernorm",
    "Gemma2": "its copy differs",
    "Gemma3Text": "its copy differs",
    "StableLm": "its copy differs",
    "Granite": "its copy differs",
}


@pytest.mark.parametrize("family", EXACT)
def test_a_family_that_the_drafter_can_be_is_copied_and_said(family):
    target = tiny(family)
    assert EXACT[family] in warm_start(drafter_of(target), target.decoder)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_with_other_layers_is_refused_with_the_reason(family):
    more = {"residual_multiplier": 0.3} if family == "Granite" else {}
    target = tiny(family, **more)
    with pytest.raises(WarmStartError, match=f"(?s)target layer [23] .*{REFUSED[family]}.*warm_start=False"):
        warm_start(drafter_of(target), target.decoder)


def test_a_window_of_the_targets_layers_is_said():
    """The drafter sees the whole document, so the copy is the target's layer up to its window."""
    target = tiny("Mistral", sliding_window=64)
    assert "own output within its window of 64 tokens" in warm_start(drafter_of(target), target.decoder)


def test_biases_of_zero_are_none():
    target = tiny("Qwen2")
    for name, weight in target.model.named_parameters():
        if name.endswith("bias"):
            weight.data.zero_()
    assert "target layers 2, 3 copied" in warm_start(drafter_of(target), target.decoder)


@pytest.mark.parametrize("wrong", ["rope", "norm"])
def test_the_proof_notices_a_small_fault(wrong):
    target = tiny("Qwen3")
    drafter = drafter_of(target)
    if wrong == "rope":
        config = create_drafter_config(target.config, 2, rope_theta=5e5)
        drafter = DFlashDrafter(config, [0, 2], 4, 4, 60)
    else:
        target.decoder.layers[3].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(WarmStartError, match="its copy differs"):
        warm_start(drafter, target.decoder)


def test_auto_starts_from_random_weights_and_says_so(tmp_path):
    target = tiny("Gemma2")
    save_material(tmp_path, target.model, chat_tokenizer())
    data = SimpleNamespace(conversations=[], mask_token_id=60)

    def weights(setting, said=None):
        options = dict(
            target=str(tmp_path / "target"),
            gpus="cpu",
            warm_start=setting,
            target_layers=[0, 2],
            drafter_layers=2,
            block_size=4,
            max_anchors=4,
            dtype="float32",
            soft_labels=False,  # Gemma 2 caps its logits
        )
        say = (lambda line: None) if said is None else said.append
        resolved = resolve(RunConfig.from_parameters(**options))
        drafter = make_drafter(resolved, target, data, torch.device("cpu"), say)
        return torch.cat([weight.flatten() for weight in drafter.parameters()])

    told = []
    assert torch.equal(weights("auto", told), weights(False))
    assert len(told) == 1 and "no warm start, the drafter starts from random weights: target layer" in told[0]
    with pytest.raises(ConfigError, match="use warm_start=False"):
        weights(True)
    assert RunConfig.from_parameters().drafter.warm_start == "auto"


def test_a_config_from_before_the_proof_means_auto(tmp_path):
    import yaml

    values = RunConfig.from_parameters(warm_start=True).to_dict()
    del values["data"]["max_skipped"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    old = RunConfig.load(tmp_path / "config.yaml")
    assert old.drafter.warm_start == "auto" and old.data.max_skipped == 1.0
    recipe = yaml.safe_load((ROOT / "dflash" / "recipes" / "cpu.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe | {"runtime": {"gpus": "cpu"}}))
    for file in (ROOT / "dflash" / "recipes" / "cpu.yaml", tmp_path / "mine.yaml"):  # such a file was taken for an old one
        assert RunConfig.load(file).data.max_skipped == 0.1
    assert RunConfig.load(ROOT / "dflash" / "recipes" / "cpu.yaml", steps=3) == RunConfig.from_parameters("cpu", steps=3)
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(RunConfig.from_parameters(warm_start=True).to_dict()))
    assert RunConfig.load(tmp_path / "new.yaml").drafter.warm_start is True
