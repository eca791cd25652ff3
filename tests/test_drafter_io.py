"""A drafter that is saved and loaded is the same drafter, and a damaged one is refused by name."""

import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.drafter.config import DrafterConfig
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import load_drafter, save_drafter
from dflash.errors import ConfigError, RunError

CONFIG = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=24,
    vocab_size=40,
    max_position_embeddings=64,
)


def make_drafter(**changes):
    torch.manual_seed(3)
    return DFlashDrafter(DrafterConfig(**{**CONFIG, **changes}), [0, 2], block_size=4, max_anchors=8, mask_token_id=39)


def stub_target(layer_ids=(0, 2), hidden=16):
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(40, hidden, generator=generator)
    return types.SimpleNamespace(
        layer_ids=list(layer_ids), embed_weight=table, head_weight=table + 1, device=torch.device("cpu")
    )


@pytest.mark.parametrize("draft_vocab", [None, 7])
def test_round_trip_is_bit_equal(tmp_path, draft_vocab):
    drafter = make_drafter(draft_vocab_size=draft_vocab, sliding_window=(None, 6))
    ids = None if draft_vocab is None else torch.tensor([5, 3, 39, 0, 11, 20, 8])
    target = stub_target()
    drafter.load_target_head(target.embed_weight, target.head_weight, ids)
    save_drafter(drafter, tmp_path, "a/target")
    again = load_drafter(tmp_path, target)
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert again.config == drafter.config and again.block_size == 4 and again.mask_token_id == 39
    assert torch.equal(again.lm_head, drafter.lm_head) and torch.equal(again.draft_index, drafter.draft_index)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter.json", "drafter.safetensors"]


def test_loading_leaves_the_random_state_alone(tmp_path):
    save_drafter(make_drafter(), tmp_path, "t")
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    load_drafter(tmp_path)
    assert torch.equal(torch.rand(1), wanted)


def test_stored_dtype(tmp_path):
    save_drafter(make_drafter(), tmp_path, "t", torch.bfloat16)
    assert {v.dtype for v in load_file(tmp_path / "drafter.safetensors").values()} == {torch.bfloat16}
    assert load_drafter(tmp_path).fc.weight.dtype == torch.bfloat16
    assert load_drafter(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


def test_missing_and_extra_tensors_are_named(tmp_path):
    save_drafter(make_drafter(), tmp_path, "t")
    tensors = load_file(tmp_path / "drafter.safetensors")
    tensors["stray"] = tensors.pop("norm.weight")
    save_file(tensors, tmp_path / "drafter.safetensors")
    with pytest.raises(ConfigError, match=r"missing \['norm.weight'\].*extra \['stray'\]"):
        load_drafter(tmp_path)


def test_incomplete_folder(tmp_path):
    with pytest.raises(RunError, match="no drafter.json"):
        load_drafter(tmp_path)
    save_drafter(make_drafter(), tmp_path, "t")
    whole = (tmp_path / "drafter.safetensors").read_bytes()
    (tmp_path / "drafter.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="incomplete"):
        load_drafter(tmp_path)


def test_wrong_target_is_refused(tmp_path):
    save_drafter(make_drafter(), tmp_path, "t")
    with pytest.raises(ConfigError, match=r"layer_ids=\[0, 2\]"):
        load_drafter(tmp_path, stub_target(layer_ids=(1, 2)))
    with pytest.raises(ConfigError, match="create_drafter_config"):
        load_drafter(tmp_path, stub_target(hidden=12))
