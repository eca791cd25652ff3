"""`dflash evaluate`: acceptance length, exactness and speed of a trained drafter."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash.commands import command


def add_parser(subparsers: Any) -> None:
    p = command(
        subparsers,
        "evaluate",
        "acceptance length, exactness and speed of a trained drafter",
        "dflash evaluate --run runs/night --limit 24",
    )
    p.add_argument("--run", dest="run_folder", metavar="FOLDER", help="run folder or id: newest checkpoint, held-out text")
    p.add_argument("--drafter", metavar="FOLDER", help="drafter folder (checkpoint, z-lab or speculators layout)")
    p.add_argument("--target", help="target; default: the one the drafter was trained for")
    p.add_argument("--prompts", metavar="FILE", help="one prompt a line, or JSONL with messages or prompt")
    p.add_argument("--data", metavar="FILE", help="conversations for prompts, held-out acceptance and parity")
    p.add_argument("--limit", type=int, help="prompts to decode (64 on a GPU, 8 on a CPU)")
    p.add_argument("--max-new-tokens", type=int, help="(160 on a GPU, 64 on a CPU)")
    sampling = p.add_mutually_exclusive_group()
    sampling.add_argument("--greedy", dest="temperature", action="store_const", const=0.0, default=0.0, help="the default")
    sampling.add_argument("--temperature", type=float, default=0.0, help="above 0: sample")
    p.add_argument("--thinking", choices=("auto", "on", "off"), default="auto", help="enable_thinking of the template")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--no-plain", dest="compare", action="store_false", help="no plain decoding: no speed, no exactness")
    p.add_argument("--max-draft", type=int, metavar="K", help="verify only the first K drafts of each block")
    p.add_argument("--parity", type=int, metavar="N", help="responses in the training comparison (8 on a GPU, 2 on a CPU)")
    p.add_argument("--json", metavar="OUT", help="where the figures go, plots beside; default: the run folder")
    p.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Print the table and write evaluation.json; 1 where the text or the training comparison disagrees."""
    from dflash.evaluate.whole import EvaluateOptions, evaluate, table, write_evaluation
    from dflash.runs.record import run_folder
    from dflash.views.evaluation import write_plots

    asked = {name: getattr(args, name) for name in EvaluateOptions.__dataclass_fields__ if hasattr(args, name)}
    options = EvaluateOptions(**asked | {"run": args.run_folder, "parity_responses": args.parity})
    out = args.json or (run_folder(options.run) / "evaluation.json" if options.run else None)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)  # now, not after the work
    summary = evaluate(options)
    print("\n" + table(summary))
    if out:
        written = write_evaluation(summary, out)
        plots = write_plots(summary, written.with_suffix(".png"))
        print(f"written to {written}" + (f", plots to {plots}" if plots else ""))
    disagrees = summary["parity"] is not None and not summary["parity"]["agrees"]
    return 1 if summary["lossless"] is False or disagrees else 0
