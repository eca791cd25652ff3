"""A drafter on disk: `drafter.safetensors` with its own weights, `drafter.json` with its shape.

The target's embedding and head are not in the file: they are the target's, and `load_drafter` shares them again.
With a draft vocabulary, the int64 tensor `draft_token_ids` [Vd] lies in the safetensors file beside the weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.drafter.config import DrafterConfig
from dflash.drafter.model import DFlashDrafter, Running
from dflash.errors import ConfigError, RunError

WEIGHTS, SETTINGS = "drafter.safetensors", "drafter.json"
DRAFT_IDS = "draft_token_ids"


def draft_vocabulary(drafter: DFlashDrafter) -> Tensor | None:
    """The target ids [Vd] that the drafter may propose, or None when it proposes all of them."""
    full = drafter.config.draft_vocab_size in (None, drafter.config.vocab_size)
    return None if full else drafter.draft_token_ids


def drafter_settings(drafter: DFlashDrafter, target_name: str) -> dict[str, Any]:
    """What `drafter.json` says: enough to build the same module again."""
    return {
        "format": "dflash-drafter/1",
        "config": drafter.config.to_dict(),
        "target_layer_ids": list(drafter.target_layer_ids),
        "block_size": drafter.block_size,
        "max_anchors": drafter.max_anchors,
        "mask_token_id": drafter.mask_token_id,
        "target": str(target_name),
    }


def save_drafter(drafter: DFlashDrafter, folder: str | Path, target_name: str, dtype: torch.dtype | None = None) -> Path:
    """Write the drafter into `folder` (made if missing); the two files appear whole or not at all.

    Args:
        dtype: dtype of the stored weights; None keeps the module's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(device="cpu", dtype=dtype or value.dtype).contiguous()
        for name, value in drafter.state_dict().items()
    }
    ids = draft_vocabulary(drafter)
    if ids is not None:
        tensors[DRAFT_IDS] = ids.detach().to("cpu", torch.int64).contiguous()
    save_file(tensors, folder / (WEIGHTS + ".part"), metadata={"format": "pt"})
    (folder / (SETTINGS + ".part")).write_text(json.dumps(drafter_settings(drafter, target_name), indent=2) + "\n")
    for name in (WEIGHTS, SETTINGS):
        with open(folder / (name + ".part"), "rb") as file:
            os.fsync(file.fileno())
        os.replace(folder / (name + ".part"), folder / name)
    return folder


def read_settings(folder: str | Path) -> dict[str, Any]:
    """`drafter.json` of a folder. Raises RunError when it is missing or torn."""
    path = Path(folder) / SETTINGS
    if not path.is_file():
        raise RunError(
            f"no {SETTINGS} in {Path(folder)}; wanted a drafter folder, for instance runs/<id>/checkpoints/step-XXXXXXXX"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is no valid JSON ({error}); the checkpoint is incomplete, take another") from None


def load_drafter(
    folder: str | Path,
    target: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> DFlashDrafter:
    """Build the drafter of `folder`.

    Args:
        target: shares its embedding and head with the drafter (a `Target`, or anything with `embed_weight` and
            `head_weight`); None leaves the drafter without a head, as a warm start or an export wants it.
        device: None takes the target's, or the CPU. dtype: None keeps the stored one.
        options: further arguments of `DFlashDrafter`, such as `attention_backend`.

    Raises: RunError for a missing or torn file, ConfigError when tensors are missing, extra or of another shape, or
        when the target does not fit the drafter.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise RunError(f"{folder} has {SETTINGS} but no {WEIGHTS}; the checkpoint is incomplete, take an earlier one")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise RunError(f"{path} cannot be read ({error}); the checkpoint is incomplete, take an earlier one") from None
    return build_drafter(settings, tensors, target, device, dtype, str(path), **options)


def build_drafter(
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Any,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    source: str,
    **options: Any,
) -> DFlashDrafter:
    """A drafter from settings and tensors under this package's names; `source` is named in errors."""
    ids = tensors.pop(DRAFT_IDS, None)
    with torch.random.fork_rng(devices=[]):  # its initial values are overwritten: leave the caller's generator alone
        drafter = DFlashDrafter(
            DrafterConfig.from_dict(settings["config"]),
            settings["target_layer_ids"],
            settings["block_size"],
            settings["max_anchors"],
            settings["mask_token_id"],
            **options,
        )
    wanted = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    got = {name: tuple(value.shape) for name, value in tensors.items()}
    if wanted != got:
        missing, extra = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
        shapes = [
            f"{n} {list(got[n])}, wanted {list(wanted[n])}" for n in sorted(set(got) & set(wanted)) if got[n] != wanted[n]
        ]
        raise ConfigError(
            f"{source} does not hold this drafter: missing {missing[:3] or 'none'}, extra {extra[:3] or 'none'}, "
            f"wrong shape {shapes[:3] or 'none'}"
        )
    stored = dtype or next(iter(tensors.values())).dtype
    where = device if device is not None else (target.device if target is not None else "cpu")
    drafter = drafter.to(device=where, dtype=stored)
    drafter.load_state_dict(tensors)
    if ids is not None:
        _set_draft_vocabulary(drafter, ids)
    elif draft_vocabulary(drafter) is not None:
        raise ConfigError(f"{source} has a draft vocabulary of {drafter.config.draft_vocab_size} and no {DRAFT_IDS}")
    if target is not None:
        share_target(drafter, target)
    return drafter


def with_parts(drafter: DFlashDrafter, config: DrafterConfig) -> DFlashDrafter:
    """The same drafter in the shape that `DrafterConfig.extended` gave; parts that it lacked start as the identity."""
    if config == drafter.config:
        return drafter
    with torch.random.fork_rng(devices=[]):
        whole = DFlashDrafter(
            config,
            drafter.target_layer_ids,
            drafter.block_size,
            drafter.max_anchors,
            drafter.mask_token_id,
            **{name: getattr(drafter, name) for name in Running.__dataclass_fields__},
        ).to(drafter.fc.weight)
    for name, buffer in drafter.named_buffers():
        setattr(whole, name, buffer)
    refused = whole.load_state_dict(drafter.state_dict(), strict=False).unexpected_keys
    assert not refused, f"{refused} have no place in the extended drafter"
    return whole


def share_target(drafter: DFlashDrafter, target: Any) -> None:
    """Give the drafter the target's embedding and head, and refuse a target that it was not made for."""
    if hasattr(target, "layer_ids") and list(target.layer_ids) != drafter.target_layer_ids:
        raise ConfigError(
            f"the target captures layers {list(target.layer_ids)}, the drafter was trained on "
            f"{drafter.target_layer_ids}; load the target with layer_ids={drafter.target_layer_ids}"
        )
    drafter.load_target_head(target.embed_weight, target.head_weight, draft_vocabulary(drafter))


def _set_draft_vocabulary(drafter: DFlashDrafter, ids: Tensor) -> None:
    ids = ids.to(torch.int64)
    vocabulary, wanted = drafter.config.vocab_size, drafter.config.draft_vocab_size
    distinct = ids.unique().numel() == ids.numel()
    if ids.numel() != wanted or not distinct or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ConfigError(f"{DRAFT_IDS} must be {wanted} distinct ids below {vocabulary}, got {ids.numel()}")
    index = torch.full((vocabulary,), -1, dtype=torch.int64)
    index[ids] = torch.arange(ids.numel())
    device = drafter.fc.weight.device
    drafter.draft_token_ids, drafter.draft_index = ids.to(device), index.to(device)
