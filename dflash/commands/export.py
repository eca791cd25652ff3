"""`dflash export`: write a drafter in the z-lab or speculators layout, or read one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash.commands import command
from dflash.errors import ConfigError

FORMATS = ("zlab", "speculators", "dflash")


def add_parser(subparsers: Any) -> None:
    p = command(
        subparsers,
        "export",
        "write a drafter in the z-lab or speculators layout, or read one",
        "dflash export --run runs/night --format zlab --out drafter",
    )
    p.add_argument("--run", dest="run_folder", metavar="FOLDER", help="run folder or id; its newest checkpoint is exported")
    p.add_argument("--drafter", metavar="FOLDER", help="drafter folder of any layout")
    p.add_argument("--format", choices=FORMATS, required=True, help="dflash: a checkpoint of this package")
    p.add_argument("--out", required=True, metavar="DIR", help="new folder")
    p.add_argument("--dtype", choices=("keep", "float32", "bfloat16"), default="keep", help="of the written tensors")
    p.add_argument("--target", help="the drafter's target, where the folder does not say or it has moved")
    p.add_argument("--verifier", metavar="NAME", help="name of the target written into a speculators config")
    p.add_argument("--num-target-layers", type=int, help="default: read from the target's config")
    p.add_argument("--approximate", action="store_true", help="import what this package cannot compute exactly, too")
    p.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Write the folder; say what is in it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from dflash.devices import dtype_named
    from dflash.drafter.export import export_drafter, read_any
    from dflash.drafter.storage import draft_vocabulary
    from dflash.runs.record import run_folder
    from dflash.target.head import target_head
    from dflash.target.loading import load_config, resolve_source
    from dflash.train.checkpoint import latest_checkpoint

    if (args.run_folder is None) == (args.drafter is None):
        raise ConfigError("give either a run folder (--run) or a drafter folder (--drafter), not both or none")
    folder = latest_checkpoint(run_folder(args.run_folder)) if args.run_folder else Path(args.drafter)
    drafter, settings = read_any(folder, args.approximate)
    if args.dtype != "keep":
        drafter = drafter.to(dtype_named(args.dtype))
    name = args.target or settings["target"]
    layers, architectures, head = args.num_target_layers or settings.get("num_target_layers"), [], None
    if args.format == "zlab" and layers is None or args.format == "speculators":
        if name is None:
            raise ConfigError(f"{folder} does not say which target it belongs to; name it with --target")
        config = load_config(resolve_source(name))
        layers = layers or config.num_hidden_layers
        architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    if args.format == "speculators" and draft_vocabulary(drafter) is not None:
        head = target_head(name)
    remarks = export_drafter(
        drafter,
        args.out,
        args.format,
        name or "unknown",
        num_target_layers=layers,
        architectures=architectures,
        head=head,
        verifier=args.verifier,
    )
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    print(f"{folder} -> {args.out} ({args.format}, {len(drafter.state_dict())} tensors, {dtype})")
    print(f"target layers {drafter.target_layer_ids}: an id is the output of that layer, 0-based")
    for remark in remarks:
        print(f"note: {remark}")
    return 0
