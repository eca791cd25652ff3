"""`dflash export`: write a drafter in the z-lab or speculators layout, or read one."""

from __future__ import annotations

import argparse
from typing import Any

from dflash.commands import command

FORMATS = ("zlab", "speculators", "dflash")


def add_parser(subparsers: Any) -> None:
    p = command(
        subparsers,
        "export",
        "write a drafter for a server, in the z-lab or speculators layout, or read one",
        "dflash export --run runs/night --format zlab --out drafter --target-folder target",
    )
    p.add_argument("--run", dest="run_folder", metavar="FOLDER", help="run folder or id; its newest checkpoint is exported")
    p.add_argument("--drafter", metavar="FOLDER", help="drafter folder of any layout")
    p.add_argument("--format", dest="layout", choices=FORMATS, required=True, help="dflash: a checkpoint of this package")
    p.add_argument("--out", required=True, metavar="DIR", help="new folder")
    p.add_argument("--dtype", choices=("keep", "float32", "bfloat16"), default="keep", help="of the written tensors")
    p.add_argument("--target", help="the drafter's target, where the folder does not say or it has moved")
    p.add_argument(
        "--target-folder",
        metavar="DIR",
        help="write the target there as a Hugging Face folder, with the weights that the drafter was trained against, and "
        "name it as the verifier; a finished folder is kept",
    )
    p.add_argument("--verifier", metavar="NAME", help="name of the target written into a speculators config")
    p.add_argument("--num-target-layers", type=int, help="default: read from the target's config")
    p.add_argument("--approximate", action="store_true", help="import what this package cannot compute exactly, too")
    p.add_argument("--push", metavar="OWNER/NAME", help="upload the export to this hub repository, private if it is new")
    p.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Write the folder; say what is in it and how it is served."""
    from dflash.evaluate.delivery import ExportOptions, deliver

    asked = {name: getattr(args, name) for name in ExportOptions.__dataclass_fields__ if name != "run"}
    done = deliver(ExportOptions(run=args.run_folder, **asked))
    print(f"{done.source} -> {done.out} ({args.layout}, {done.tensors} tensors, {done.dtype})")
    print(f"target layers {done.settings['target_layer_ids']}: an id is the output of that layer, 0-based")
    for remark in done.remarks:
        print(f"note: {remark}")
    for server, line in done.lines.items():
        print(f"serve with {server}:\n  {line}")
    if args.push:
        print(f"pushed to {push(args.out, args.push)}")
    return 0


def push(folder: str, name: str) -> str:
    """Upload a folder to a model repository of the hub; returns its address. Raises ConfigError where the hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    from dflash.errors import ConfigError

    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="DFlash drafter")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the hub did not take {name}: {first}; the export is in {folder}") from None
    return str(address)
