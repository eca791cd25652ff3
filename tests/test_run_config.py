"""Settings: what people, YAML and papermill deliver, and what is refused with which words."""

from pathlib import Path

import pytest
import yaml

from dflash.drafter.config import DrafterConfig, create_drafter_config
from dflash.errors import ConfigError
from dflash.train import recipes
from dflash.train.settings import RECIPE_SETTINGS, RunConfig, setting_names


def test_round_trip_through_yaml(tmp_path):
    config = RunConfig.from_parameters(target_layers="1,14,27", gpus="5,6,7", gamma=None, lr="3e-4", betas=[0.9, 0.99])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert RunConfig.load(file) == config
    assert config.target.target_layers == (1, 14, 27) and config.train.lr == 3e-4 and config.train.gamma is None


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("gpus", "5,6,7", "5,6,7"),
        ("gpus", 5, 5),
        ("gpus", [5, 6], [5, 6]),
        ("gpus", "", None),
        ("warm_start", "false", False),
        ("warm_start", "True", True),
        ("lr", "3e-4", 3e-4),
        ("steps", "200", 200),
        ("steps", 1e3, 1000),
        ("gamma", "none", None),
        ("gamma", "0", 0.0),
        ("draft_vocab", "0", 0),
        ("draft_vocab", "", None),
        ("target_layers", "", None),
        ("target_layers", [3, 5], (3, 5)),
        ("target_layers", 4, (4,)),
        ("max_conversations", "12", 12),
    ],
)
def test_values_are_read_by_declared_type(name, given, wanted):
    config = RunConfig.from_parameters(**{name: given})
    got = next(getattr(section, name) for section in vars(config).values() if hasattr(section, name))
    assert got == wanted and type(got) is type(wanted)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"blok_size": 3}, "unknown parameter 'blok_size'; did you mean 'block_size'"),
        ({"lr": "fast"}, r"lr must be float, got 'fast' \(str\)"),
        ({"steps": 1.5}, "steps must be int, got 1.5"),
        ({"warm_start": "maybe"}, "warm_start must be auto, true or false, got 'maybe'"),
        ({"steps": True}, "steps must be int, got True"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"lr": 0}, "lr must be positive"),
        ({"lr": "nan"}, "lr must be positive"),
        ({"lr": float("inf")}, "lr must be positive and finite, got inf"),
        ({"seed": 10**20 - 1}, "seed must be between -2..63 and 2..63 - 1, got 99999999999999999999"),
        ({"block_size": 300, "pack_length": 256}, "block_size 300 does not fit into a pack of pack_length 256"),
        ({"weight_decay": -1}, "weight_decay must be finite and at least 0"),
        ({"cache_gib": "-1"}, "cache_gib must be finite and at least 0"),
        ({"min_lr_ratio": 2}, "min_lr_ratio must be between 0 and 1"),
        ({"gamma": -1}, "gamma must be a finite number"),
        ({"attention": "dense"}, "attention must be auto, flex, triton"),
        ({"pack_length": 3}, "pack_length must be at least 16"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"launcher": "slurm"}, "launcher must be threads or torchrun"),
        ({"betas": [0.9, 1.0]}, "betas must be two numbers"),
        ({"reduction": "mean"}, "reduction must be weight_mean or token_mean"),
    ],
)
def test_bad_values_name_the_knob(parameters, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_parameters(**parameters)


def test_files_are_refused_with_the_nearest_name(tmp_path):
    file = tmp_path / "config.yaml"
    for text, message in (
        ("train: {learning_rate: 1}", "unknown train setting 'learning_rate'"),
        ("training: {lr: 1}", "unknown section 'training'; did you mean 'train'"),
        ("train: 3", "section 'train' must be a mapping"),
        ("- 1", "must hold sections"),
        ("{", "cannot read the config file"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            RunConfig.load(file)
    file.write_bytes(b"\x89PNG\r\n\xff\xfe\x00")
    for path in (file, tmp_path / "absent.yaml"):
        with pytest.raises(ConfigError, match=f"cannot read the config file {path}"):
            RunConfig.load(path)


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_each_recipe_says_every_setting_that_has_no_default_and_no_other_place_does():
    assert recipes.recipe_names() == ["cpu", "gpu", "large", "story"]
    for name in recipes.recipe_names():
        sections = recipes.read_recipe(name)
        flat = {setting for content in sections.values() for setting in content}
        assert flat >= set(RECIPE_SETTINGS) - ({"data"} if name == "large" else set()), name
        given = {"data": "random:4"} if name == "large" else {}
        config = RunConfig.from_parameters(name, **given)
        assert config.recipe == name and RunConfig.from_dict(config.to_dict()) == config
        for section, content in sections.items():
            assert {s: getattr(getattr(config, section), s) for s in content} == content, "as the file says"
    assert RunConfig.from_parameters("gpu").train.lr == 2e-3 and RunConfig.from_parameters("cpu").drafter.draft_vocab == 0


def test_what_is_passed_wins_over_the_recipe_also_none():
    config = RunConfig.from_parameters("cpu", steps="7", gamma=None, max_minutes="", draft_vocab=None)
    assert (config.train.steps, config.train.gamma, config.train.max_minutes) == (7, None, None)
    assert config.drafter.draft_vocab is None and config.drafter.block_size == 4, "the recipe's"
    assert RunConfig.from_dict({"recipe": "gpu", "train": {"lr": "3e-3"}}) == RunConfig.from_parameters("gpu", lr=3e-3)


@pytest.mark.parametrize(
    ("gpus_there", "given", "wanted"),
    [
        (0, {}, "cpu"),
        (0, {"target": "/models/Qwen3-8B"}, "cpu"),
        (1, {}, "gpu"),
        (8, {"gpus": "5,6,7"}, "gpu"),
        (8, {"target": "smollm2"}, "gpu"),
        (8, {"gpus": "cpu:3"}, "cpu"),
        (8, {"gpus": "5,6,7", "target": "/models/Qwen3-8B", "data": "chats.jsonl"}, "large"),
    ],
)
def test_auto_looks_at_the_devices_and_the_target(monkeypatch, gpus_there, given, wanted):
    monkeypatch.setattr(recipes, "available_gpus", lambda: gpus_there)
    for recipe in ("auto", "", None):
        assert RunConfig.from_parameters(recipe, **given).recipe == wanted


def test_the_large_recipe_follows_what_was_published_and_wants_your_data():
    config = RunConfig.from_parameters("large", target="/models/Qwen3-8B", data="chats.jsonl")
    drafter, train = config.drafter, config.train
    assert (drafter.drafter_layers, drafter.block_size, drafter.draft_vocab) == (5, 16, None)
    assert (train.gamma, train.lr) == (7.0, 6e-4)
    with pytest.raises(ConfigError, match="leaves `data` to you: .*dflash regenerate.*random:24"):
        RunConfig.from_parameters("large", target="/models/Qwen3-8B")
    with pytest.raises(ConfigError, match="there is no recipe 'huge'; give auto, cpu, gpu, large, story"):
        RunConfig.from_parameters("huge")


def test_a_config_file_from_before_the_recipes_loads_as_it_is(tmp_path, monkeypatch):
    """Every setting stands in such a file; what this machine's recipe says has no part in it."""
    monkeypatch.setattr(recipes, "available_gpus", lambda: 8)
    old = RunConfig.from_parameters("cpu", gpus="cpu", lr=0.005).to_dict()
    del old["recipe"]
    del old["drafter"]["head_precision"]  # a setting that came later, with a default
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    config = RunConfig.load(tmp_path / "config.yaml")
    assert config.recipe is None and config.train.lr == 0.005 and config.drafter.head_precision == "same"
    assert config.to_dict()["train"] == old["train"]


def test_a_recipes_data_is_found_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(RunConfig.from_parameters("cpu").data.data) == recipes.ROOT / "data/smollm2_conversations.jsonl"
    monkeypatch.chdir(recipes.ROOT)
    assert RunConfig.from_parameters("cpu").data.data == "data/smollm2_conversations.jsonl"
    assert setting_names()[0] == "recipe"


# -- the drafter's shape ----------------------------------------------------------------------------------------------


def test_drafter_config_refuses_what_cannot_be():
    for values, message in (
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"draft_vocab_size": 10**9}, "draft_vocab_size must lie in"),
        ({"sliding_window": [4]}, "one entry per layer"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            DrafterConfig(**values)
    with pytest.raises(ConfigError, match="unknown drafter setting 'num_layers'; did you mean"):
        DrafterConfig.from_dict({"num_layers": 3})
    with pytest.raises(ConfigError, match="unknown drafter setting 'hidden'"):
        create_drafter_config(None, hidden=3)
    config = DrafterConfig(num_hidden_layers=2, sliding_window=[None, 64])
    assert DrafterConfig.from_dict(config.to_dict()) == config


def test_drafter_config_follows_the_target_also_a_nested_one():
    from transformers import LlamaConfig, Qwen3Config

    text = Qwen3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=100,
        rope_parameters={"rope_theta": 5e6, "rope_type": "default"},
    )
    got = create_drafter_config(text, num_draft_layers=3, intermediate_size=80)
    assert (got.hidden_size, got.num_hidden_layers, got.head_dim, got.intermediate_size) == (64, 3, 32, 80)
    assert got.rope_theta == 5e6 and got.vocab_size == 100

    class Multimodal:
        text_config = text

    assert create_drafter_config(Multimodal()).hidden_size == 64
    llama = create_drafter_config(LlamaConfig(hidden_size=64, num_attention_heads=8, vocab_size=9))
    assert llama.head_dim == 8 and llama.num_key_value_heads == 8
    with pytest.raises(ConfigError, match="has no hidden_size"):
        create_drafter_config(object())
