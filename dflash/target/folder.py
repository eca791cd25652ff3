"""A target as a Hugging Face folder, for servers: they load no GGUF, and a hub's model of the same name has other weights.

The weights are those that the drafter was trained against, bit for bit: a GGUF is unpacked to float32, which holds its
values exactly; any other target keeps the dtype of its files. Tokenizer, chat template and generation config lie beside
them, with the end tokens that training and decoding stop at.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from dflash.errors import TargetError
from dflash.target.capture import load_target
from dflash.target.loading import Source, load_config, no_bars, resolve_source


def is_folder(name: str | Path) -> bool:
    """Whether a server can load the target by this name as it stands: a folder with a config."""
    return (Path(name).expanduser() / "config.json").is_file()


def write_target_folder(name: str | Path, out: str | Path) -> Path:
    """Write target `name` into the new folder `out`, whole or not at all; a finished folder there is kept.

    Raises: TargetError for a target of random weights, a folder that holds something else, or a target that cannot be
        loaded.
    """
    out, source = Path(out), resolve_source(name)
    if source.random:
        raise TargetError(f"target '{name}' has random weights and no tokenizer; nothing serves it")
    if is_folder(out):
        _refuse_other(out, source)
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TargetError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; name a new or empty folder for the target")
    kept = getattr(load_config(source), "dtype", None)
    dtype = kept if source.gguf_file is None and isinstance(kept, torch.dtype) else torch.float32
    target = load_target(name, "cpu", dtype, fast=False)
    model, tokenizer, ends = target.model, target.tokenizer, target.end_ids
    for part in (model.config, model.config.get_text_config(), model.generation_config):
        part.eos_token_id, part.pad_token_id = ends[0] if len(ends) == 1 else ends, tokenizer.pad_token_id
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        beside.mkdir(parents=True)
        with no_bars():
            model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        _name_for_all(beside / "tokenizer_config.json")
        _verify(beside, model)
        if out.exists():
            out.rmdir()
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return out


def _name_for_all(path: Path) -> None:
    """transformers 5 writes a class name that version 4, which some servers still use, does not know."""
    text = path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    path.write_text(text)


def _refuse_other(out: Path, source: Source) -> None:
    ours, there = load_config(source), load_config(resolve_source(out))
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    if any(getattr(ours, name, None) != getattr(there, name, None) for name in names):
        raise TargetError(f"{out} already holds another target than '{source.name}'; name a new folder")


def _verify(folder: Path, model: torch.nn.Module) -> None:
    """Every written tensor is the model's, bit for bit."""
    own = model.state_dict()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            for name in reader.keys():
                wrote = reader.get_tensor(name)
                same = name in own and wrote.dtype == own[name].dtype
                assert same and torch.equal(wrote.view(torch.uint8), own[name].contiguous().view(torch.uint8)), name
