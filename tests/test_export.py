"""Exports keep every bit, state their layer ids, read back equal, and fit both transformers versions' rope layout."""

import json

import pytest
import torch
from chat_tokenizer import chat_tokenizer, save_material
from safetensors.torch import load_file, save_file
from tiny_models import random_drafter, tiny_target
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash.__main__ import main
from dflash.drafter.export import export_drafter, import_drafter, read_layout, read_weights
from dflash.drafter.layers import rotary_tables
from dflash.drafter.storage import load_drafter, save_drafter
from dflash.errors import ConfigError
from dflash.target.capture import Target
from dflash.train.checkpoint import save_checkpoint

IDS = [50, 7, 3, 21, 33, 12, 44]  # a draft vocabulary, out of order


def export(drafter, folder, layout, **options):
    return export_drafter(
        drafter, folder, layout, "some/target", num_target_layers=4, architectures=["LlamaForCausalLM"], **options
    )


def logits_of(drafter, seed=0):
    """Draft logits after a random context, in the order of target ids."""
    generator = torch.Generator().manual_seed(seed)
    context = drafter.new_context()
    features = torch.randn(1, 9, 64, generator=generator).to(drafter.fc.weight.dtype)
    drafter.extend(context, features)
    return drafter.propose(context, 5)[:, drafter.draft_token_ids.argsort()]


@pytest.mark.parametrize("layout", ["zlab", "speculators", "dflash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_bit_equal_and_complete(tmp_path, layout, dtype):
    target = tiny_target(dtype=dtype)
    drafter = random_drafter(target).to(dtype)
    export(drafter, tmp_path / "x", layout)
    written = read_weights(tmp_path / "x")
    own = drafter.state_dict()
    assert written.keys() == own.keys()
    assert all(written[name].dtype == dtype and torch.equal(written[name], own[name]) for name in own)
    if layout != "dflash":
        config = json.loads((tmp_path / "x/config.json").read_text())
        stack = config.get("transformer_layer_config", config)
        assert config["dtype"] == stack["dtype"] == str(dtype).removeprefix("torch.")
        assert {path.name for path in (tmp_path / "x").iterdir()} == {"config.json", "model.safetensors", "README.md"}
        again = import_drafter(tmp_path / "x", target)
        assert again.config == drafter.config and again.block_size == 5 and again.mask_token_id == drafter.mask_token_id
        assert again.fc.weight.dtype == dtype and torch.equal(logits_of(again), logits_of(drafter))


def test_layer_ids_of_the_two_layouts_differ_by_one(tmp_path):
    """Case 16: here and in z-lab, id l is the output of layer l; speculators counts the stream entering a layer."""
    drafter = random_drafter(tiny_target(layer_ids=(1, 3)))
    export(drafter, tmp_path / "z", "zlab")
    export(drafter, tmp_path / "s", "speculators")
    zlab = json.loads((tmp_path / "z/config.json").read_text())["dflash_config"]["target_layer_ids"]
    speculators = json.loads((tmp_path / "s/config.json").read_text())["aux_hidden_state_layer_ids"]
    assert zlab == [1, 3] and speculators == [2, 4]
    assert read_layout(tmp_path / "z")["target_layer_ids"] == read_layout(tmp_path / "s")["target_layer_ids"] == [1, 3]
    assert "[2, 4], one more" in (tmp_path / "s/README.md").read_text()


class Adder(torch.nn.Module):
    """A layer that adds its number."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, **_):
        return x + self.number


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_reloaded_ids_read_the_same_features(tmp_path, layout):
    """Case 16: on a target whose layer i adds i + 1, the ids that come back capture the same outputs, last layer too."""
    target = tiny_target(layer_ids=(0, 3))
    for index in range(4):
        target.decoder.layers[index].forward = Adder(index + 1).forward
    target = Target(target.model, None, [0, 3])
    ids = torch.tensor([[4, 9, 2]])
    features = target.capture(ids).all_hidden_states
    embedded = target.embed_weight[ids[0]]
    assert torch.allclose(features[0, :, :32], embedded + 1) and torch.allclose(features[0, :, 32:], embedded + 10)
    export(random_drafter(target), tmp_path / "x", layout)
    again = Target(target.model, None, read_layout(tmp_path / "x")["target_layer_ids"])
    assert torch.equal(again.capture(ids).all_hidden_states, features)
    # transformers numbers the embedding 0: z-lab reads hidden_states[id + 1], speculators hidden_states[id]
    config = json.loads((tmp_path / "x/config.json").read_text())
    index = (
        [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
        if layout == "zlab"
        else config["aux_hidden_state_layer_ids"]
    )
    streams = [embedded + sum(range(1, n + 1)) for n in range(5)]
    assert torch.allclose(torch.cat([streams[i] for i in index], -1), features[0])


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("keep", ["rope_theta", "rope_parameters", "both"])
def test_rope_base_is_found_in_either_layout(tmp_path, layout, keep):
    """Case 26: theta 5e6 survives a reader of transformers 4 (`rope_theta`) and of 5 (`rope_parameters`)."""
    drafter = random_drafter(tiny_target(), rope_theta=5e6)
    export(drafter, tmp_path / "x", layout)
    path = tmp_path / "x/config.json"
    config = json.loads(path.read_text())
    stack = config["transformer_layer_config"] if layout == "speculators" else config
    assert stack["rope_theta"] == stack["rope_parameters"]["rope_theta"] == 5e6
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**{k: v for k, v in stack.items() if k != "architectures"}))
    wanted = 5e6 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(theirs.inv_freq, wanted)
    for name in {"rope_theta", "rope_parameters"} - {keep} if keep != "both" else ():
        del stack[name]
    path.write_text(json.dumps(config))
    again = import_drafter(tmp_path / "x")
    assert again.config.rope_theta == 5e6
    position = torch.arange(40)
    for ours, saved in zip(
        rotary_tables(position, 8, again.config.rope_theta), rotary_tables(position, 8, 5e6), strict=True
    ):
        assert torch.equal(ours, saved)


def test_draft_vocabulary_in_speculators(tmp_path):
    target = tiny_target()
    drafter = random_drafter(target, draft_ids=IDS)
    export(drafter, tmp_path / "x", "speculators")
    tensors = load_file(tmp_path / "x/model.safetensors")
    assert tensors["t2d"].nonzero()[:, 0].tolist() == sorted(IDS)
    assert [row + int(offset) for row, offset in enumerate(tensors["d2t"])] == sorted(IDS)
    assert torch.equal(tensors["lm_head.weight"], target.head_weight[sorted(IDS)])
    assert tensors.keys() == drafter.state_dict().keys() | {"t2d", "d2t", "lm_head.weight"}
    again = import_drafter(tmp_path / "x", target)
    assert again.draft_token_ids.tolist() == sorted(IDS)
    torch.testing.assert_close(logits_of(again), logits_of(drafter), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="not this target's head"):
        import_drafter(tmp_path / "x", tiny_target(seed=5))


def test_draft_vocabulary_in_zlab_is_given_up_with_a_remark(tmp_path):
    drafter = random_drafter(tiny_target(), draft_ids=IDS)
    remarks = export(drafter, tmp_path / "x", "zlab")
    assert len(remarks) == 1 and "no draft vocabulary" in remarks[0]
    assert "no draft vocabulary" in (tmp_path / "x/README.md").read_text()
    again = import_drafter(tmp_path / "x", tiny_target())
    torch.testing.assert_close(logits_of(again)[:, sorted(IDS)], logits_of(drafter), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["zlab", "speculators", "dflash"])
def test_tied_target(tmp_path, layout):
    """Case 43: a target that ties its head and has no lm_head tensor; the drafter's config never says tied."""
    target = tiny_target()
    target.model.config.tie_word_embeddings = True
    target.model.lm_head.weight = target.model.model.embed_tokens.weight
    target.model.save_pretrained(tmp_path / "target")
    assert "lm_head.weight" not in load_file(tmp_path / "target/model.safetensors")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    from dflash.target.capture import load_target

    loaded = load_target(tmp_path / "target", layer_ids=[0, 2])
    assert torch.equal(loaded.head_weight, loaded.embed_weight)
    drafter = random_drafter(loaded, draft_ids=IDS if layout != "zlab" else None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{}")
    save_checkpoint(tmp_path / "run", 1, drafter, str(tmp_path / "target"), {})
    assert main(["export", "--run", str(tmp_path / "run"), "--format", layout, "--out", str(tmp_path / "x")]) == 0
    if layout == "dflash":
        again = load_drafter(tmp_path / "x", loaded)
    else:
        config = json.loads((tmp_path / "x/config.json").read_text())
        assert config["tie_word_embeddings"] is False
        assert config.get("transformer_layer_config", config)["tie_word_embeddings"] is False
        again = import_drafter(tmp_path / "x", loaded)
    assert torch.equal(again.lm_head, loaded.embed_weight[again.draft_token_ids])
    torch.testing.assert_close(logits_of(again), logits_of(drafter), atol=1e-5, rtol=1e-5)


def test_sliding_windows(tmp_path):
    drafter = random_drafter(tiny_target(), sliding_window=(6, None))
    assert "sliding window from each slot" in export(drafter, tmp_path / "z", "zlab")[0]
    export(drafter, tmp_path / "s", "speculators")
    config = json.loads((tmp_path / "s/config.json").read_text())
    assert config["sliding_window_non_causal"] is True
    assert config["transformer_layer_config"]["layer_types"] == ["sliding_attention", "full_attention"]
    assert import_drafter(tmp_path / "s").config == drafter.config
    with pytest.raises(ConfigError, match="--approximate"):
        import_drafter(tmp_path / "z")
    assert import_drafter(tmp_path / "z", approximate=True).config == drafter.config
    with pytest.raises(ConfigError, match="one size"):
        export(random_drafter(tiny_target(), sliding_window=(6, 9)), tmp_path / "w", "zlab")


def published_config():
    """The shape of a published z-lab config: block size inside, sliding layers causal by default."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 61,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "num_target_layers": 4,
        "dflash_config": {"block_size": 5, "mask_token_id": 60, "target_layer_ids": [0, 2]},
    }


def foreign(tmp_path, drafter, **changes):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(published_config() | changes))
    tensors = {f"model.{name}": value for name, value in drafter.state_dict().items()}
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:5]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_published_shards_and_prefix_are_read(tmp_path):
    target = tiny_target()
    drafter = random_drafter(target)
    again = import_drafter(foreign(tmp_path / "p", drafter), target)
    assert again.block_size == 5 and again.config.rope_theta == 1e7
    assert all(torch.equal(again.state_dict()[n], v) for n, v in drafter.state_dict().items())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}, "causal inside a block"),
        ({"is_causal": True}, "causal"),
        ({"attention_bias": True}, "biases"),
        ({"add_swa_attention_sink_bias": True}, "attention sinks"),
        ({"is_neox_style": False}, "in pairs"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}}, "only 0.25"),
        (
            {
                "dflash_config": {
                    "block_size": 5,
                    "mask_token_id": 60,
                    "target_layer_ids": [0, 2],
                    "final_logit_softcapping": 20.0,
                }
            },
            "softcapping",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, changes, words):
    folder = foreign(tmp_path / "p", random_drafter(tiny_target()), **changes)
    with pytest.raises(ConfigError, match=words):
        import_drafter(folder)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("attention_sink_bias", True, "attention sinks"),
        ("causal", True, "blocks are causal"),
        ("use_swa", True, "use_swa"),
        ("attention_value_scale", 0.5, "attention_value_scale = 0.5"),
    ],
)
def test_what_servers_compute_by_a_nested_key_is_refused_too(tmp_path, key, value, words):
    inner = published_config()["dflash_config"]
    folder = foreign(tmp_path / "p", random_drafter(tiny_target()), dflash_config=inner | {key: value})
    with pytest.raises(ConfigError, match=words):
        import_drafter(folder)
    default = 1.0 if key == "attention_value_scale" else False
    import_drafter(foreign(tmp_path / "q", random_drafter(tiny_target()), dflash_config=inner | {key: default}))


def test_keys_of_servers_are_written_though_they_are_defaults(tmp_path):
    export(random_drafter(tiny_target()), tmp_path / "z", "zlab")
    config = json.loads((tmp_path / "z/config.json").read_text())
    assert config["is_causal"] is config["dflash_config"]["causal"] is False
    assert config["dflash_config"]["attention_sink_bias"] is False and config["use_sliding_window"] is False
    assert config["rope_parameters"] == {"rope_theta": config["rope_theta"], "rope_type": "default"}
    assert config["layer_types"] == ["full_attention"] * 2 and config["sliding_window"] is None


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_more_layer_ids_than_target_layers_are_refused(tmp_path, layout):
    """Case 77: the config would name the output of a layer that the target does not have."""
    drafter = random_drafter(tiny_target(layer_ids=(0, 3)))
    with pytest.raises(ConfigError, match="num_target_layers is 2, .* layer 3 .* at least 4"):
        export_drafter(drafter, tmp_path / "x", layout, "some/target", num_target_layers=2)
    assert not (tmp_path / "x").exists()
    export_drafter(drafter, tmp_path / "x", layout, "some/target", num_target_layers=4)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_tensors_of_two_dtypes_are_refused(tmp_path, layout):
    """Case 77: a config states one dtype; a norm that stayed in float32 would be read as another."""
    drafter = random_drafter(tiny_target()).bfloat16()
    drafter.layers[1].input_layernorm.float()
    with pytest.raises(ConfigError, match="layers.1.input_layernorm.weight is float32; convert them with --dtype"):
        export(drafter, tmp_path / "x", layout)
    export(drafter.bfloat16(), tmp_path / "x", layout)


def test_broken_folders(tmp_path):
    drafter = random_drafter(tiny_target())
    with pytest.raises(ConfigError, match="neither drafter.json nor config.json"):
        import_drafter(tmp_path)
    folder = foreign(tmp_path / "p", drafter)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="missing"):
        import_drafter(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="no known drafter layout"):
        import_drafter(folder)
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    with pytest.raises(ConfigError, match="eagle3"):
        import_drafter(folder)
    (folder / "config.json").write_text(json.dumps(published_config() | {"dflash_config": {"block_size": 5}}))
    with pytest.raises(ConfigError, match="target_layer_ids, mask_token_id"):
        import_drafter(folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; name a new or empty folder"):
        export(drafter, tmp_path / "full/file", "zlab")
    with pytest.raises(ConfigError, match="not empty"):
        export(drafter, tmp_path / "full", "zlab")


def test_command_round_trip_and_dtype(tmp_path, capsys):
    target = tiny_target()
    drafter = random_drafter(target)
    save_drafter(drafter, tmp_path / "own", "some/target")
    run = ["export", "--num-target-layers", "4", "--target", str(tmp_path / "target")]
    target.model.save_pretrained(tmp_path / "target")
    assert (
        main(
            [
                *run,
                "--drafter",
                str(tmp_path / "own"),
                "--format",
                "zlab",
                "--out",
                str(tmp_path / "z"),
                "--dtype",
                "bfloat16",
            ]
        )
        == 0
    )
    assert (
        main(
            [
                *run,
                "--drafter",
                str(tmp_path / "z"),
                "--format",
                "speculators",
                "--out",
                str(tmp_path / "s"),
                "--verifier",
                "public/name",
            ]
        )
        == 0
    )
    assert main([*run, "--drafter", str(tmp_path / "s"), "--format", "dflash", "--out", str(tmp_path / "d")]) == 0
    assert "an id is the output of that layer" in capsys.readouterr().out
    config = json.loads((tmp_path / "s/config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"architectures": ["LlamaForCausalLM"], "name_or_path": "public/name"}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    last = load_drafter(tmp_path / "d")
    assert all(torch.equal(last.state_dict()[n], v.bfloat16()) for n, v in drafter.state_dict().items())
    assert main(["export", "--format", "zlab", "--out", str(tmp_path / "q")]) == 2


@pytest.mark.parametrize("layout", ["dflash", "zlab", "speculators"])
def test_training_starts_from_a_published_drafter(tmp_path, layout):
    """`start_from` takes any layout: the first weights are the published ones, and settings that disagree are refused."""
    from types import SimpleNamespace

    from dflash.train.prepare import make_drafter
    from dflash.train.resolve import resolve
    from dflash.train.settings import RunConfig

    target = tiny_target(vocab_size=270)
    save_material(tmp_path / "m", target.model, chat_tokenizer())
    published = random_drafter(target, block_size=5)
    folder = tmp_path / layout
    if layout == "dflash":
        save_drafter(published, folder, "tiny")
    else:
        export_drafter(published, folder, layout, "tiny", num_target_layers=4)

    def resolved(**changes):
        settings = dict(target=str(tmp_path / "m/target"), start_from=str(folder), block_size=5, gpus="cpu", dtype="float32")
        return resolve(RunConfig.from_parameters(**settings | changes))

    found = resolved(max_anchors=3)
    assert found.layer_ids == target.layer_ids and found.drafter == published.config
    assert found.config.drafter.mask_token_id == published.mask_token_id
    drafter = make_drafter(found, target, SimpleNamespace(conversations=[]), torch.device("cpu"))
    assert drafter.max_anchors == 3 and drafter.block_size == 5 and drafter.lm_head.shape[0] > 0
    for (name, ours), theirs in zip(drafter.named_parameters(), published.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(ConfigError, match="block_size is 4, the drafter in .* was made with 5; pass block_size=5"):
        resolved(block_size=4)
    with pytest.raises(ConfigError, match="neither drafter.json nor config.json"):
        resolved(start_from=str(tmp_path))
