"""A target folder that holds an adapter (LoRA and the like): merged into its base model, or refused by name without peft.

transformers loads the base weights beside an adapter and says nothing where peft is absent, so a run would train on
another model than the one that was named.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash.errors import TargetError

_CONFIG = "adapter_config.json"


def holds_adapter(folder: Path) -> bool:
    return (folder / _CONFIG).is_file()


def base_of(name: str, folder: Path) -> str | None:
    """The adapter's base model, None where its weights lie in the folder. Raises TargetError without peft or a base."""
    weights = [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind) if "adapter" not in file.name]
    try:
        base = json.loads((folder / _CONFIG).read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise TargetError(f"target folder '{name}' holds an adapter whose {_CONFIG} cannot be read ({error})") from error
    if not list(folder.glob("adapter_model.*")):
        raise TargetError(
            f"target folder '{name}' holds an {_CONFIG} and no adapter weights (adapter_model.safetensors); fetch them, or "
            f"remove {_CONFIG} to train for the base model"
        )
    here = bool(weights) and (folder / "config.json").is_file()
    what = "beside base weights" if here else f"for the base model '{base}'"
    if importlib.util.find_spec("peft") is None:
        raise TargetError(
            f"target folder '{name}' holds an adapter {what}, and merging it needs the peft package: pip install peft; "
            "or merge it once (merge_and_unload, save_pretrained) and give that folder"
        )
    if not here and not base:
        raise TargetError(f"target folder '{name}' holds an adapter alone, and its {_CONFIG} names no base model")
    if not here and holds_adapter(Path(base).expanduser()):
        raise TargetError(f"target folder '{name}' holds an adapter for '{base}', which holds one itself; merge that first")
    return None if here else base


@contextmanager
def without_adapter(location: str) -> Iterator[str]:
    """The folder as the base model alone: transformers would load an adapter that lies in it, unmerged."""
    if not holds_adapter(Path(location)):
        yield location
        return
    with tempfile.TemporaryDirectory() as view:
        for file in Path(location).iterdir():
            if not file.name.startswith("adapter_"):
                (Path(view) / file.name).symlink_to(file.resolve())
        yield view


def merged(model: torch.nn.Module, folder: str) -> torch.nn.Module:
    """The model with the adapter's changes in its weights."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder).merge_and_unload()
