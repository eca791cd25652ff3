"""`dflash regenerate`: have the target write the answers that a drafter is trained on."""

from __future__ import annotations

import argparse
from typing import Any

from dflash.commands import command

ENGINES = ("auto", "static", "continuous", "plain")


def add_parser(subparsers: Any) -> None:
    parser = command(
        subparsers,
        "regenerate",
        "have the target write the answers that its drafter is trained on",
        "dflash regenerate --target /models/Qwen3-8B --prompts prompts.txt --out chats.jsonl",
    )
    add = parser.add_argument
    add("--target", default="smollm2", help="'smollm2', a model folder, a .gguf file or a hub id")
    add("--prompts", default="builtin", help="messages JSONL, prompt JSONL, one prompt a line, or 'builtin'")
    add("--out", required=True, help="JSONL to write; continued if it is there")
    add("--max-new-tokens", type=int, default=192)
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0)
    add("--sampled-share", type=float, default=0.0, help="share of the prompts answered once more, sampled")
    add("--sampled-temperature", type=float, default=0.8)
    add("--seed", type=int, default=0)
    add("--engine", choices=ENGINES, default="auto")
    add("--batch-size", type=int, default=8)
    add("--trial-seconds", type=float, default=15.0, help="time given to each engine's trial (auto, on a GPU)")
    add("--seconds", type=float, default=None, help="stop after this many seconds of writing")
    add("--limit", type=int, default=None, help="first so many prompts only")
    add("--exclude", nargs="*", default=[], help="messages JSONL files whose prompts are left out")
    add("--device", default="auto", help="cpu, cuda, cuda:1; auto: a GPU where there is one")
    add("--dtype", default=None, help="float32 or bfloat16; default: bfloat16 on a GPU, float32 on the CPU")
    add("--endpoint", default=None, help="OpenAI-compatible base URL to ask instead of a local target")
    add("--model", default=None, help="model name at the endpoint; default: the first that it serves")
    add("--api-key-env", default=None, help="environment variable that holds the endpoint's key")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Write the answers; the last line on stdout is a JSON summary."""
    from dflash.data.generate.answers import regenerate
    from dflash.devices import default_device

    if options.device == "auto":
        options.device = default_device()
    return regenerate(options)
