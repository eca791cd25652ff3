"""`dflash bench`: measure a drafter step, the attention, a target's capture, the pipeline."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import fields
from typing import Any

from dflash.bench.arguments import add_json_argument, add_timing_arguments, share, whole
from dflash.bench.shapes import KINDS, SHAPES, TARGET, StepShape
from dflash.commands import command


def add_parser(subparsers: Any) -> None:
    """Register `bench` and, under it, every bench."""
    about = "measure a drafter step, the attention, a target's capture, the pipeline"
    parser = command(subparsers, "bench", about, "dflash bench pipeline --shape tiny --steps 4")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="what")
    for add in (add_step, add_kinds, add_attention, add_target, add_pipeline):
        bench = add(benches)
        add_json_argument(bench)
        bench.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Measure, print, and write the JSON asked for."""
    return importlib.import_module(f"dflash.bench.{args.bench}").run(args)


def add_step(benches: Any) -> argparse.ArgumentParser:
    small = "--tokens 1024 --anchors 64 --block 8 --hidden 256 --intermediate 768 --heads 4 --kv-heads 2 --vocab 8192"
    parser = command(benches, "step", "the drafter's training step", f"dflash bench step {small}")
    _add_step_shape(parser)
    _add_device(parser)
    add = parser.add_argument
    add("--kinds", nargs="+", default=["dflash"], choices=tuple(KINDS), help="drafters, one after the other")
    add("--labels", default="soft", choices=["soft", "hard"])
    paths = ["auto", "fast", "plain", "both"]
    add("--path", default="auto", choices=paths, help="over the Triton kernels, over plain modules, or both in turn")
    add("--attention", default=None, help="attention backend; the device's default")
    add("--chunk-rows", type=whole(), default=None, help="rows of logits alive at once")
    fp8 = "logits in the drafter's dtype, or through a quantized copy of the frozen head"
    add("--head-precision", default="same", choices=["same", "fp8"], help=fp8)
    add("--optimizer", action="store_true", help="include AdamW over float32 masters")
    add("--peer", choices=["speculators"], help="time an installed peer on the same tensors")
    add_timing_arguments(parser, warmup=2, repeats=5)
    add("--seed", type=int, default=0)
    return parser


def add_kinds(benches: Any) -> argparse.ArgumentParser:
    example = "dflash bench kinds --device cpu --seeds 0 --steps 40 --set pack_length=512 --set max_anchors=32"
    parser = command(benches, "kinds", "train drafters of several kinds beside each other", example)
    add = parser.add_argument
    add("--kinds", nargs="+", default=["dflash", "dflash2"], choices=tuple(KINDS))
    add("--seeds", nargs="+", type=whole(0), default=[0, 1, 2])
    add("--minutes", type=float, default=5.0, help="of each run's training")
    add("--steps", type=whole(), default=None, help="most steps of a run")
    add("--limit", type=float, default=9.0, help="minutes after which runs are ended")
    add("--device", default="0", help='a GPU\'s number, or "cpu"')
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of a run; may repeat")
    add("--out", default="out/kinds", help="new folder for the runs")
    return parser


def add_attention(benches: Any) -> argparse.ArgumentParser:
    parser = command(
        benches, "attention", "the drafter's attention alone", "dflash bench attention --tokens 4096 --anchors 128 --block 8"
    )
    _add_step_shape(parser)
    _add_device(parser)
    parser.add_argument("--backends", help="of flex, triton, sdpa, sdpa_chunked, with commas; default: the device's")
    add_timing_arguments(parser, warmup=3, repeats=10)
    return parser


def add_target(benches: Any) -> argparse.ArgumentParser:
    about = "a target's feature capture, plain and fast"
    parser = command(benches, "target", about, "dflash bench target --model smollm2 --tokens 1024 --document 300")
    parser.add_argument("--model", default=TARGET, help="smollm2, a folder, random:tiny ...; %(default)s")
    parser.add_argument("--tokens", type=whole(), default=16384, help="of a pack")
    parser.add_argument("--document", type=whole(), default=2000, help="mean tokens of a document")
    _add_device(parser)
    add_timing_arguments(parser, warmup=2, repeats=5)
    return parser


def add_pipeline(benches: Any) -> argparse.ArgumentParser:
    about = "targets and drafters alone and together; which split is best"
    parser = command(benches, "pipeline", about, "dflash bench pipeline --shape tiny --gpus cpu:2 --advise 8")
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="default: medium on a GPU, else tiny")
    add("--tokens", type=whole(), help="context tokens of a pack; the shape's")
    add("--gpus", help="drafter devices, as in a run (cpu:2 for two CPU workers)")
    add("--target-gpus", help="target devices")
    add("--target-layers", type=whole(2), default=8, help="layers below the last are captured")
    add("--hybrid", action="store_true", help="a target with linear attention (Qwen3.6's kind)")
    add("--labels", default="soft", choices=["soft", "hard"])
    add("--dtype", choices=["bfloat16", "float32"], help="the device's default")
    add("--steps", type=whole(4), default=20)
    add("--packs-per-step", type=whole(), help="one for each drafter")
    add("--queue-depth", type=whole(), default=2)
    every = "print every split of this many GPUs (default: of those in use)"
    add("--advise", type=whole(), nargs="?", const=0, default=None, metavar="GPUS", help=every)
    return parser


def _add_step_shape(parser: argparse.ArgumentParser) -> None:
    """One option for each field of `StepShape`."""
    for field in fields(StepShape):
        if field.name == "kind":
            continue
        kind = share if isinstance(field.default, float) else whole()
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto: a GPU where there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
