"""An attention that a run's devices or shape cannot serve is refused before its data is read; the rule of shapes is
compared with a count of rows and tiles by hand."""

from __future__ import annotations

import pytest
from chat_tokenizer import chat_tokenizer

from dflash.drafter import kernels
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import save_drafter
from dflash.errors import ConfigError
from dflash.launch.run import start_run
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig

ON_A_GPU = {"gpus": 1, "ask_gpus": False}


@pytest.fixture
def target(tmp_path):
    """A folder with a config and a tokenizer: 9 query heads and 3 key heads, as SmolLM2 has them."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=144,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=96,
        num_hidden_layers=4,
        vocab_size=270,
    ).save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"")  # never opened
    return str(tmp_path / "target")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("triton", "attention 'triton' needs CUDA and Triton, got cpu; use attention='sdpa_chunked'"),
        ("flex", "attention='flex' has no backward on a CPU.*use attention='auto'"),
    ],
)
def test_gpu_attention_on_a_cpu_is_refused_before_anything_is_read(tmp_path, target, attention, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=message):
        start_run(
            RunConfig.from_parameters(target=target, data="absent.jsonl", gpus="cpu", attention=attention),
            root=tmp_path / "runs",
        )
    assert not (tmp_path / "runs").exists()


def test_a_cache_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache_dir .*file/cache cannot be made .Not a directory.; name a folder"):
        resolve(RunConfig.from_parameters(cache_dir=str(tmp_path / "file" / "cache")), **ON_A_GPU)
    resolve(RunConfig.from_parameters(cache_dir=str(tmp_path / "cache")), **ON_A_GPU)
    assert (tmp_path / "cache").is_dir()


def test_shapes_that_the_kernels_do_not_take_are_refused_on_a_gpu(target, monkeypatch):
    tiny = dict(target="random:tiny", warm_start=False, attention="triton")
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    with pytest.raises(ConfigError, match=r"powers of two.*got 9 / 3 heads, blocks of 8, head_dim 16; use attention='flex'"):
        resolve(RunConfig.from_parameters(target=target, attention="triton", block_size=8), **ON_A_GPU)
    with pytest.raises(ConfigError, match="got 4 / 2 heads, blocks of 12"):
        resolve(RunConfig.from_parameters(**tiny, block_size=12), **ON_A_GPU)
    for fine in (tiny, dict(target=target), dict(target=target, attention="flex")):
        resolve(RunConfig.from_parameters(**fine), **ON_A_GPU)


def test_a_drafter_to_start_from_brings_its_own_shape(target, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    config = RunConfig.from_parameters(target=target)
    nine = resolve(config, **ON_A_GPU).drafter
    assert (nine.num_attention_heads, nine.num_key_value_heads) == (9, 3)
    save_drafter(DFlashDrafter(nine, [0], block_size=8, mask_token_id=89), tmp_path / "drafter", target)
    config = RunConfig.from_parameters(
        target="random:tiny", attention="triton", block_size=8, start_from=str(tmp_path / "drafter")
    )
    with pytest.raises(ConfigError, match="got 9 / 3 heads"):
        resolve(config, **ON_A_GPU)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block", "fits"),
    [
        (32, 8, 128, 32, True),  # 4 x 32 rows: one block a tile
        (32, 8, 128, 64, False),  # 256 rows
        (9, 3, 64, 8, False),  # 3 heads a key head
        (4, 2, 16, 4, True),  # 8 rows, 16 blocks a tile
        (4, 2, 8, 4, False),  # too narrow for a tensor core's tile
        (24, 24, 128, 4, True),  # 4 rows, 32 blocks
        (128, 1, 64, 8, False),  # 1,024 rows
        (64, 1, 64, 2, False),  # one block of two slots a tile: fewer than 16 keys of its own
    ],
)
def test_which_shapes_fit(heads, kv_heads, head_dim, block, fits):
    assert kernels.supported(heads, kv_heads, head_dim, block) is fits
