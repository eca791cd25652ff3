"""The lines that serve a drafter, as an export's card, the command line and a run's report print them."""

from __future__ import annotations

import json
import shlex


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


def next_commands(run: str, block_size: int) -> list[str]:
    """The two commands that take a finished run to a server."""
    out, target = f"{run}/drafter", f"{run}/target"
    export = ["dflash", "export", "--run", run, "--format", "zlab", "--out", out, "--target-folder", target]
    return [shlex.join(export), serve_lines("zlab", out, target, block_size)["vLLM"]]
