"""The lines that serve a drafter, as an export's card, the command line and a run's report print them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from dflash.target.loading import is_served, resolve_source


def serve_lines(layout: str, export: str, target: str, block_size: int) -> dict[str, str]:
    """Server name -> command line. `target`: the folder or hub id of the target that the server loads.

    A block has one verified token, so `block_size - 1` tokens are drafted. vLLM counts those; SGLang counts the block.
    """
    settings = {"method": "dflash", "model": export, "num_speculative_tokens": block_size - 1}
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(settings)]
    if layout == "speculators":  # its config names the target and the number of drafts
        return {"vLLM": shlex.join(["vllm", "serve", export])}
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "DFLASH"]
    sglang += ["--speculative-draft-model-path", export, "--speculative-num-draft-tokens", str(block_size)]
    return {"vLLM": shlex.join(vllm), "SGLang": shlex.join(sglang)}


def next_commands(folder: str | Path) -> list[str]:
    """The two commands that take a run to a server; none without a finished checkpoint, or for random weights."""
    marks = sorted(Path(folder).glob("checkpoints/step-*/complete.json"))
    settings = json.loads(marks[-1].with_name("drafter.json").read_text()) if marks else {"target": "random:"}
    target, path = settings["target"], Path(folder).resolve()
    if target.startswith("random:"):
        return []
    run = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    out, export = f"{run}/drafter", ["dflash", "export", "--run", run, "--format", "zlab", "--out", f"{run}/drafter"]
    if is_served(target):
        target = resolve_source(target).location
    if target.lower() in ("", "default", "smollm2") or target.endswith(".gguf"):  # a server loads no GGUF
        target = f"{run}/target"
        export += ["--target-folder", target]
    return [shlex.join(export), serve_lines("zlab", out, target, settings["block_size"])["vLLM"]]
