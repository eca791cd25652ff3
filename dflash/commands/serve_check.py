"""`dflash serve-check`: serve a run's drafter with vLLM and compare text and acceptance with our own."""

from __future__ import annotations

import argparse
from typing import Any

from dflash.commands import command


def add_parser(subparsers: Any) -> None:
    p = command(
        subparsers,
        "serve-check",
        "serve a run's drafter with vLLM, and compare text and acceptance with our own",
        "dflash serve-check --run runs/night --server-python .venv-serve/bin/python",
    )
    p.add_argument("--run", dest="run_folder", required=True, metavar="FOLDER", help="run folder or id")
    p.add_argument("--server-python", metavar="PATH", help="Python of an environment with vLLM; servers are started from it")
    p.add_argument("--url", help="instead: a vLLM server that is up with this drafter, such as http://127.0.0.1:8000")
    p.add_argument("--format", dest="layout", choices=("zlab", "speculators"), default="zlab", help="layout to serve (zlab)")
    p.add_argument("--drafter", metavar="FOLDER", help="an export to check; default: one of the newest checkpoint")
    p.add_argument("--prompts", metavar="FILE", help="one prompt a line, or JSONL with messages; default: the held-out ones")
    p.add_argument("--limit", type=int, default=16, help="prompts (16)")
    p.add_argument("--max-new-tokens", type=int, default=96, help="(96)")
    p.add_argument("--concurrency", default="1,4,16", help="requests at a time (1,4,16); rounds are compared at the first")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="float32 must agree (float32)")
    p.add_argument("--device", default="cpu", help="of our own decoding (cpu); on a server's GPU, leave room for both")
    p.add_argument("--no-plain", dest="plain", action="store_false", help="no server without the drafter: half the time")
    p.add_argument("--draft-tokens", type=int, metavar="K", help="drafts a call (all of the block)")
    p.add_argument("--port", type=int, help="of the loopback interface; default: a free one")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds a server may take to load (600)")
    p.add_argument("--server-args", default="", metavar="TEXT", help="more arguments of `vllm serve`, in one string")
    p.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Print the table; 1 where text or acceptance disagree."""
    from dflash.errors import ConfigError
    from dflash.evaluate.served import ServeOptions, serve_check
    from dflash.evaluate.verdict import table

    try:
        counts = tuple(int(part) for part in args.concurrency.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"concurrency must be numbers such as 1,4,16, got {args.concurrency!r}") from None
    asked = {name: getattr(args, name) for name in ServeOptions.__dataclass_fields__}
    options = ServeOptions(**asked | {"run": args.run_folder, "concurrency": counts})
    summary = serve_check(options, say=lambda line: print(line, flush=True))
    print("\n" + table(summary))
    return 1 if summary["problems"] else 0
