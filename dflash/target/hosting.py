"""A vLLM server that gives out hidden states: what it is started with, and where it leaves them.

It answers a prompt with the path of a file (`in_server`), which the asking process reads and deletes. The files lie in
shared memory where that has the room, else in the folder for temporary files.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import ConfigError
from dflash.target.server import Server, require_vllm

IN_SERVER = Path(__file__).with_name("in_server")  # for the server's PYTHONPATH
_SHARED = Path("/dev/shm")
_PREFIX = "dflash-states-"


@dataclass(frozen=True)
class ServerOptions:
    """How a target's server is started.

    Args:
        python: of an environment with vLLM. more: further arguments of `vllm serve`, which win over ours.
        longest: tokens of the longest document. gpus: that it may use; none are hidden from it where this is None.
        parallel: GPUs that share one copy of the target.
        log: file for its output; None keeps it beside the states.
    """

    python: str | None
    more: str = ""
    longest: int = 4096
    gpus: tuple[int, ...] | None = None
    parallel: int = 1
    log: Path | None = None


def states_given(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """The layers whose outputs a server gives, in its order: those captured and the last one, which its head reads."""
    return sorted({*layer_ids, num_layers - 1})


def hidden_state_flags(layers: Sequence[int], folder: str) -> dict[str, list[str]]:
    """Arguments of `vllm serve` for hidden states of these layers, by what they are for."""
    ids = [layer + 1 for layer in layers]  # vLLM counts the stream that enters a layer
    extract = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    extract["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    connector = {
        "kv_connector": "DFlashHiddenStates",
        "kv_connector_module_path": "dflash_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return {
        "layers": ["--speculative-config", json.dumps(extract)],
        "connector": ["--kv-transfer-config", json.dumps(connector)],
        "prefix_caching": ["--no-enable-prefix-caching"],
        "chunked_prefill": ["--no-enable-chunked-prefill"],
    }


def serve_line(folder: str | Path, layers: Sequence[int]) -> str:
    """The line that starts such a server by hand."""
    flags = hidden_state_flags(layers, "/dev/shm/dflash-states")
    words = ["vllm", "serve", str(folder), *(word for part in flags.values() for word in part)]
    return f"PYTHONPATH={shlex.quote(str(IN_SERVER))} {shlex.join(words)}"


def start(folder: str, layers: Sequence[int], dtype: str, options: ServerOptions, needed: int) -> tuple[Server, Path]:
    """Start a server of the model in `folder` and wait for it. Returns it and where it leaves its states.

    Args:
        needed: bytes of states that may wait to be read.

    Documents are computed one at a time: in a batch, rounding depends on what else is in it, and a run that goes on would
    not be the unbroken run. Raises ConfigError or RunError.
    """
    check_python(options.python)
    states = _storage(needed)
    arguments = [folder, "--dtype", dtype, "--max-model-len", str(options.longest + 1), "--max-num-seqs", "1"]
    arguments += ["--max-num-batched-tokens", str(max(2048, options.longest + 1)), "--enforce-eager"]
    arguments += [word for part in hidden_state_flags(layers, str(states)).values() for word in part]
    environment = {"PYTHONPATH": str(IN_SERVER), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if options.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.gpus))
        arguments += ["--tensor-parallel-size", str(options.parallel)]
        arguments += ["--data-parallel-size", str(len(options.gpus) // options.parallel)]
    arguments += shlex.split(options.more)
    server = Server(options.python, arguments, options.log or states / "server.log", environment=environment)
    try:
        return server.__enter__(), states
    except BaseException:
        if options.log is not None:  # else the error names a log that lies there
            shutil.rmtree(states, ignore_errors=True)
        raise


def check_python(python: str | None) -> None:
    """Raises ConfigError where no environment with vLLM is named."""
    if python is None:
        raise ConfigError(
            "a vLLM server runs this target; name the Python of its environment, server_python (make serve-env makes one)"
        )
    require_vllm(python)


def _storage(needed: int) -> Path:
    """A new folder for states, in shared memory where that has room for them; what a killed run left there is removed."""
    roots = [_SHARED, Path(tempfile.gettempdir())]
    for old in (path for root in roots for path in root.glob(f"{_PREFIX}*")):
        owner = old.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    room = _SHARED.is_dir() and os.access(_SHARED, os.W_OK) and shutil.disk_usage(_SHARED).free > 2 * needed
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_SHARED if room else None))
