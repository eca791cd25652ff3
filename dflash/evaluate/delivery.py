"""From a run or a drafter folder to what a server loads: the export with its card, and the target's folder beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash.devices import dtype_named
from dflash.drafter.export import export_drafter, read_any, require_empty
from dflash.drafter.storage import draft_vocabulary
from dflash.errors import ConfigError, TargetError
from dflash.evaluate.card import write_card
from dflash.runs.record import run_folder
from dflash.target.folder import is_folder, write_target_folder
from dflash.target.head import target_tables
from dflash.target.loading import load_config, resolve_source
from dflash.target.serving import serve_lines
from dflash.train.checkpoint import latest_checkpoint


@dataclass(frozen=True)
class ExportOptions:
    """What to export: a run's newest checkpoint, or a drafter folder of any layout."""

    layout: str
    out: str
    run: str | None = None
    drafter: str | None = None
    dtype: str = "keep"  # "keep", or of the written tensors
    target: str | None = None  # where the drafter's folder does not say, or it has moved
    target_folder: str | None = None  # write the target there, for servers; the export names it as its verifier
    verifier: str | None = None  # name of the target in a speculators config
    num_target_layers: int | None = None
    approximate: bool = False

    def __post_init__(self) -> None:
        if (self.run is None) == (self.drafter is None):
            raise ConfigError("give either a run folder (--run) or a drafter folder (--drafter), not both or none")


@dataclass(frozen=True)
class Delivery:
    """What was written. `target`: what a server loads as the target, None where the target is a GGUF and no folder of it
    was asked for."""

    source: Path
    out: Path
    target: str | None
    settings: dict[str, Any]
    remarks: list[str]
    lines: dict[str, str]
    tensors: int
    dtype: str


def deliver(options: ExportOptions) -> Delivery:
    """Write the export and, if asked, the target's folder. Raises ConfigError, RunError or TargetError."""
    require_empty(Path(options.out))
    source = latest_checkpoint(run_folder(options.run)) if options.run else Path(options.drafter)
    drafter, settings = read_any(source, options.approximate)
    if options.dtype != "keep":
        drafter = drafter.to(dtype_named(options.dtype))
    name = options.target or settings["target"]
    layers, architectures, head = options.num_target_layers or settings.get("num_target_layers"), [], None
    foreign = options.layout != "dflash"
    if foreign and (layers is None or options.layout == "speculators" or options.target_folder):
        if name is None:
            raise ConfigError(f"{source} does not say which target it belongs to; name it with --target")
        config = load_config(resolve_source(name))
        refuse_other_target(settings, config, str(source), str(name))
        layers = layers or config.num_hidden_layers
        architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    low_rank = drafter.config.has_selector and drafter.config.selector_codebooks == "low_rank"
    if foreign and (low_rank or options.layout == "speculators" and draft_vocabulary(drafter) is not None):
        if name is None:
            raise ConfigError(f"{source} does not say which target it belongs to; name it with --target")
        embed, head = target_tables(name)
        drafter.embed_tokens = embed.to(drafter.fc.weight)
    served = _served_as(name, options)
    if served is None and options.layout == "speculators":
        raise ConfigError(
            f"a speculators config names its target for the server, and servers load no GGUF ({name}); add "
            "--target-folder DIR to have the target written as they want it, or --verifier NAME"
        )
    if options.target_folder:  # first: a finished one is kept, should the export fail
        write_target_folder(name, options.target_folder)
    remarks = export_drafter(
        drafter,
        options.out,
        options.layout,
        name or "unknown",
        num_target_layers=layers,
        architectures=architectures,
        head=head,
        verifier=options.verifier or served,
    )
    lines: dict[str, str] = {}
    if foreign and served is None:
        remarks.append("servers load no GGUF: --target-folder DIR writes the target as they want it")
    elif foreign:
        lines = serve_lines(options.layout, options.out, served, drafter.block_size)
    if foreign:
        write_card(Path(options.out) / "README.md", run_folder(options.run) if options.run else None, source, lines)
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    return Delivery(source, Path(options.out), served, settings, remarks, lines, len(drafter.state_dict()), dtype)


def _served_as(name: str | None, options: ExportOptions) -> str | None:
    """The target's name for a server: a folder or a hub id; None for a GGUF, or where nothing says."""
    if options.target_folder or options.verifier or name is None:
        return str(Path(options.target_folder).resolve()) if options.target_folder else options.verifier
    if is_folder(name):
        return str(Path(name).expanduser().resolve())
    try:
        source = resolve_source(name)
        if source.server is not None:
            return str(Path(source.location).resolve())
        return None if source.gguf_file else str(name)
    except TargetError:  # it has moved since
        return str(name)


def refuse_other_target(settings: dict[str, Any], config: Any, drafter: str, target: str) -> None:
    """Raises ConfigError where a drafter cannot belong to a target with this config."""
    own = settings["config"]
    pairs = [(name, own[name], getattr(config, name, None)) for name in ("hidden_size", "vocab_size")]
    last = max(settings["target_layer_ids"])
    wrong = [f"{name} {ours} against {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if last >= config.num_hidden_layers:
        wrong.append(f"it reads layer {last} of {config.num_hidden_layers}")
    if wrong:
        raise ConfigError(f"{drafter} is the drafter of another target than {target}: {', '.join(wrong)}; name its own")
