"""The embedding and head of a target alone, read from its files."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash.errors import TargetError
from dflash.target.loading import resolve_source
from dflash.target.random_weights import random_head

_EMBED_SUFFIXES = (
    "embed_tokens.weight",
    "backbone.embeddings.weight",
    "embeddings.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORM_SUFFIXES = ("norm.weight", "norm_f.weight", "final_layernorm.weight", "ln_f.weight")


def target_tables(name: str) -> tuple[Tensor, Tensor]:
    """The target's embedding and head, [V, H] each, read from its files where that needs no model."""
    source = resolve_source(name)
    if source.random:
        made = random_head(name, torch.device("cpu"), torch.bfloat16)
        return made.embed_weight, made.head_weight
    if source.gguf_file is None and source.adapter is None and Path(source.location).is_dir():
        return find_embedding_weights(source.location)
    from dflash.target.capture import load_target

    target = load_target(name, "cpu", self_test=False)
    return target.embed_weight, target.head_weight


def find_embedding_weights(folder: str | Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the input embedding and the head, both `[V, H]`, from a safetensors checkpoint by discovery.

    Model families nest these under different prefixes, so names are found by their endings, in a single file
    or through a sharded index. A checkpoint without a head is a tied one: the embedding is returned twice.

    Raises TargetError listing near names when no embedding is found.
    """
    places = _places(folder)
    embed_name = _pick_name(places, _EMBED_SUFFIXES)
    if embed_name is None:
        near = difflib.get_close_matches("embed_tokens.weight", places, n=4, cutoff=0.3) or sorted(places)[:4]
        raise TargetError(
            f"no input embedding among the {len(places)} tensors of {folder}: looked for names ending "
            f"in {', '.join(_EMBED_SUFFIXES)}; near: {', '.join(near) or 'none'}"
        )
    embed = _read(places, embed_name)
    head_name = _pick_name(places, _HEAD_SUFFIXES)
    head = embed if head_name is None else _read(places, head_name)
    if head.shape != embed.shape:
        raise TargetError(
            f"{head_name} has shape {tuple(head.shape)} but {embed_name} {tuple(embed.shape)}; "
            "wanted both [vocabulary, hidden]"
        )
    return embed, head


def find_final_norm(folder: str | Path) -> Tensor:
    """The weight [H] of the norm between the last layer and the head. Raises TargetError where there is none."""
    places = _places(folder)
    name = _pick_name([name for name in places if not re.search(r"\.\d+\.", name)], _NORM_SUFFIXES)
    if name is None:
        raise TargetError(f"no final norm among the tensors of {folder}: wanted a name in {', '.join(_NORM_SUFFIXES)}")
    return _read(places, name)


def _places(folder: str | Path) -> dict[str, Path]:
    """File of every tensor of a safetensors checkpoint."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            places.update(dict.fromkeys(reader.keys(), file))
    return places


def _read(places: dict[str, Path], name: str) -> Tensor:
    with safe_open(places[name], "pt") as reader:
        return reader.get_tensor(name)


def _pick_name(names, suffixes: tuple[str, ...]) -> str | None:
    """The shortest name that ends in a suffix at a dot boundary, vision, audio and draft parts left out."""
    aside = ("visual", "vision", "audio", "mtp", "position", "patch", "token_type")
    for suffix in suffixes:
        found = [
            name
            for name in names
            if (name == suffix or name.endswith("." + suffix)) and not any(part in name for part in aside)
        ]
        if found:
            return min(found, key=lambda name: (len(name), name))
    return None
