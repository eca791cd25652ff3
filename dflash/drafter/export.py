"""Write a drafter in the layout of the published z-lab drafters or of the speculators package, and read both.

    dflash export --run runs/<id> --format zlab --out DIR
    dflash export --drafter DIR --format dflash --out DIR      a foreign drafter as a checkpoint of ours

Tensors keep their names and bits. Neither layout stores the target's embedding and head; with a draft vocabulary,
speculators stores the head rows and the `t2d` / `d2t` maps beside them. See `layouts` for the configs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.drafter.layouts import SPECULATORS_OFFSET, settings_in_layout, speculators_config, zlab_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import (
    DRAFT_IDS,
    SETTINGS,
    build_drafter,
    draft_vocabulary,
    drafter_settings,
    load_drafter,
    read_settings,
    save_drafter,
    with_parts,
)
from dflash.errors import ConfigError

FORMATS = ("zlab", "speculators", "dflash")
_NOT_THE_STACK = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "lm_head.weight", "t2d", "d2t")


def export_drafter(
    drafter: DFlashDrafter,
    out: str | Path,
    layout: str,
    target_name: str,
    *,
    num_target_layers: int | None = None,
    architectures: list[str] | None = None,
    head: Tensor | None = None,
    verifier: str | None = None,
) -> list[str]:
    """Write `drafter` into the new folder `out` in the dtype that it has.

    Args:
        num_target_layers: of the target; needed for "zlab". head: the target's head [V, H]; needed for "speculators"
            with a draft vocabulary (None takes the rows that the drafter shares). verifier: name under which the
            layout's reader finds the target; None takes `target_name`.

    Returns: remarks for the user.
    Raises: ConfigError when the layout cannot hold the drafter, or `out` already holds one.
    """
    out = Path(out)
    if layout not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {layout!r}")
    require_empty(out)
    if layout == "dflash":
        save_drafter(drafter, out, target_name)
        return []
    _refuse_unreadable(drafter, num_target_layers)
    second = drafter.config.drafter_kind == "dflash2"
    drafter = _both_parts(drafter) if second else drafter
    settings = drafter_settings(drafter, target_name)
    tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    if second:
        _write_codebooks_out(drafter, settings, tensors)
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    verifier = verifier or str(target_name)
    ids, remarks = draft_vocabulary(drafter), []
    if layout == "zlab":
        if num_target_layers is None:
            raise ConfigError("the z-lab layout states the target's number of layers; give num_target_layers")
        config = zlab_config(settings, dtype, num_target_layers)
        if drafter.config.sliding_window:
            remarks.append("its readers count a sliding window from each slot, training counted it from the anchor")
    else:
        config = speculators_config(settings, dtype, verifier, architectures or [])
        if ids is not None and not second:
            tensors |= _vocabulary_tensors(drafter, ids, head)
    if ids is not None and (second or layout == "zlab"):
        remarks.insert(
            0,
            f"{'DFlash 2' if second else 'the z-lab layout'} has no draft vocabulary: this drafter was trained on "
            f"{ids.numel()} tokens and will propose over the target's whole vocabulary",
        )
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "README.md").write_text(_card(settings, layout, _shown(verifier), dtype, remarks))
    _verify(out, tensors)
    return remarks


def require_empty(out: Path) -> None:
    """Raises ConfigError where `out` is a file or holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is {'not empty' if out.is_dir() else 'a file'}; name a new or empty folder")


def _both_parts(drafter: DFlashDrafter) -> DFlashDrafter:
    """A DFlash 2 drafter as servers want it, with both parts; one that it lacks does nothing."""
    own = drafter.config
    parts: dict[str, Any] = {}
    if not own.has_convolution:
        parts = {"conv_kernel_size": 2, "conv_group_size": math.gcd(own.hidden_size, 16)}
    if not own.has_selector:
        parts |= {"selector_top_k": min(16, own.draft_vocab_size or own.vocab_size), "selector_rank": 1}
        parts["selector_codebooks"] = "full"
    return with_parts(drafter, replace(own, **parts))


@torch.no_grad()
def _write_codebooks_out(drafter: DFlashDrafter, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Low-rank codebooks become the [V, r] that servers read. Raises ConfigError without the target's embedding."""
    if drafter.config.selector_codebooks == "full":
        return
    if not drafter.embed_tokens.shape[0]:
        raise ConfigError(
            "low-rank codebooks are written out over the target's embedding, and this drafter was opened without it; "
            "open it with the target (--target)"
        )
    settings["config"]["selector_codebooks"] = "full"
    tables = drafter.candidate_selector.codebooks(drafter.embed_tokens[: drafter.config.vocab_size])
    for name, table in zip(("predecessor", "successor"), tables, strict=True):
        del tensors[f"candidate_selector.{name}_projection.weight"]
        tensors[f"candidate_selector.{name}_codebook"] = table.cpu().contiguous()


def _refuse_unreadable(drafter: DFlashDrafter, num_target_layers: int | None) -> None:
    """Raise ConfigError for what a reader of the config would get wrong: a layer past the target's last, or one dtype
    in the config and another in some tensor."""
    last = max(drafter.target_layer_ids)
    if num_target_layers is not None and last >= num_target_layers:
        raise ConfigError(
            f"num_target_layers is {num_target_layers}, and the drafter reads the output of layer {last} (0-based); "
            f"give the target's own number, at least {last + 1}, or leave it out to have it read from the target"
        )
    kinds: dict[torch.dtype, str] = {}
    for name, value in drafter.state_dict().items():
        kinds.setdefault(value.dtype, name)
    if len(kinds) > 1:
        found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in kinds.items())
        raise ConfigError(f"the layouts state one dtype for all tensors, and {found}; convert them with --dtype")


def _vocabulary_tensors(drafter: DFlashDrafter, ids: Tensor, head: Tensor | None) -> dict[str, Tensor]:
    """`t2d` [V] bool, `d2t` [Vd] int64 (target id minus draft id) and the head rows, ids ascending as `t2d` implies."""
    order = ids.cpu().argsort()
    ids = ids.cpu()[order]
    if head is not None:
        rows = head.detach().cpu()[ids]
    elif drafter.lm_head.shape[0] == ids.numel():
        rows = drafter.lm_head.detach().cpu()[order]
    else:
        raise ConfigError("with a draft vocabulary the speculators layout stores the head rows; give the target's head")
    t2d = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {
        "t2d": t2d,
        "d2t": ids - torch.arange(ids.numel()),
        "lm_head.weight": rows.to(drafter.fc.weight.dtype).contiguous(),
    }


def _verify(out: Path, wanted: Mapping[str, Tensor]) -> None:
    """Every tensor is in the file, bit for bit, and no other."""
    got = read_weights(out)
    assert got.keys() == wanted.keys(), f"{out} holds other tensors than were written"
    for name, value in wanted.items():
        same = got[name].dtype == value.dtype and torch.equal(got[name].view(torch.uint8), value.view(torch.uint8))
        assert same, f"{name} in {out} is not what was written"


def _shown(verifier: str) -> str:
    """A folder by its last name: cards are passed on."""
    return Path(verifier).name if Path(verifier).is_absolute() else verifier


def _card(settings: Mapping[str, Any], layout: str, verifier: str, dtype: str, remarks: list[str]) -> str:
    layers, size = list(settings["target_layer_ids"]), settings["block_size"]
    where = {
        "zlab": f"`dflash_config.target_layer_ids` = {layers}, the same numbers",
        "speculators": f"`aux_hidden_state_layer_ids` = {[layer + SPECULATORS_OFFSET for layer in layers]}, one more: "
        "that format counts the stream that enters a layer",
    }[layout]
    lines = [
        f"# DFlash drafter for {verifier}",
        "",
        f"Block size {size}: slot 0 is the last verified token, {size - 1} tokens are drafted. "
        f"{settings['config']['num_hidden_layers']} layers, {dtype}.",
        "",
        f"Target features are the outputs of target layers {layers} (0-based; transformers' `hidden_states[l + 1]`). "
        f"In this config: {where}.",
        "",
        "Embedding and head are the target's; "
        + (
            f"only the head rows of the {settings['config']['draft_vocab_size']} draft tokens are in the file."
            if layout == "speculators" and settings["config"]["draft_vocab_size"]
            else "neither is in the file."
        ),
    ]
    return "\n".join(lines + [f"\nNote: {remark}." for remark in remarks]) + "\n"


# -- reading ------------------------------------------------------------------------------------------------------


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, in one file or several."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no .safetensors file; wanted a drafter folder")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}
    return tensors


def read_layout(folder: str | Path) -> dict[str, Any]:
    """Settings (as in `drafter.json`) of a z-lab or speculators folder, with `layout` and `limits`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has neither {SETTINGS} nor config.json; wanted a drafter folder")
    layout, settings, limits = settings_in_layout(json.loads(path.read_text()))
    return settings | {"layout": layout, "limits": limits}


def import_drafter(
    folder: str | Path,
    target: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    approximate: bool = False,
    **options: Any,
) -> DFlashDrafter:
    """A drafter from a z-lab or speculators folder, to evaluate or to start training from.

    Args:
        target: shares its embedding and head; None leaves the drafter without.
        approximate: load also what this package cannot compute as the config asks (a causal block in sliding layers,
            scaled rotary positions); acceptance then comes out lower than the drafter deserves.

    Raises: ConfigError naming what does not fit, tensors that are missing or unknown, or a stored head that is not the
        target's.
    """
    settings = read_layout(folder)
    if settings["limits"] and not approximate:
        raise ConfigError(
            f"{folder} asks for more than this drafter computes: {'; '.join(settings['limits'])}. Pass "
            "approximate=True (--approximate) to load it all the same"
        )
    tensors = {name.removeprefix("model."): value for name, value in read_weights(folder).items()}
    own = {name: tensors.pop(name) for name in _NOT_THE_STACK if name in tensors}
    reduced = settings["config"]["draft_vocab_size"] is not None
    if reduced:
        if "d2t" not in own:
            count = settings["config"]["draft_vocab_size"]
            raise ConfigError(f"{folder} has a draft vocabulary of {count} and no d2t map")
        tensors[DRAFT_IDS] = own["d2t"].to(torch.int64) + torch.arange(own["d2t"].numel())
    drafter = build_drafter(settings, tensors, target, device, dtype, str(folder), **options)
    if target is not None and "lm_head.weight" in own:
        stored, shared = own["lm_head.weight"], drafter.lm_head
        wanted = shared.to("cpu", stored.dtype)
        if stored.shape != wanted.shape or not torch.allclose(stored.float(), wanted.float(), atol=0.02, rtol=0.02):
            raise ConfigError(f"{folder} brings its own lm_head {list(stored.shape)}, which is not this target's head")
    return drafter


def drafter_layout(folder: str | Path) -> dict[str, Any]:
    """`drafter.json`'s content for a drafter folder of any known layout."""
    return read_settings(folder) if (Path(folder) / SETTINGS).is_file() else read_layout(folder)


def open_drafter(folder: str | Path, target: Any, dtype: torch.dtype, **options: Any) -> DFlashDrafter:
    """A drafter from a checkpoint of this package, or from a z-lab or speculators folder."""
    load = load_drafter if (Path(folder) / SETTINGS).is_file() else import_drafter
    return load(folder, target, dtype=dtype, **options)


def read_any(folder: str | Path, approximate: bool = False) -> tuple[DFlashDrafter, dict[str, Any]]:
    """A drafter without a target from a folder of any layout, and its settings."""
    if (Path(folder) / SETTINGS).is_file():
        return load_drafter(folder), read_settings(folder)
    return import_drafter(folder, approximate=approximate), read_layout(folder)
