"""Two launchers of torchrun on one machine stand for two machines: each feeds its own drafter, both average together."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from test_train_command import ENVIRONMENT, kinds, losses, material, write_config  # noqa: F401

from dflash.__main__ import main
from dflash.checkpoint import latest_checkpoint


def start_nodes(config, nodes: int, processes: int) -> list[subprocess.Popen]:
    """The command line of docs/runner.md, once for each node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(processes),
               "--master-addr", "127.0.0.1", "--master-port", str(port)]
    train = ["-m", "dflash", "train", "--config", str(config)]
    return [subprocess.Popen([*command, "--node-rank", str(node), *train], env=ENVIRONMENT, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True) for node in range(nodes)]


def wait(children: list[subprocess.Popen]) -> list[str]:
    try:
        return [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()


def test_two_nodes_give_the_serial_numbers(material, tmp_path):  # noqa: F811
    serial = write_config(material, tmp_path / "runs/serial", packs_per_step=4)
    assert main(["train", "--config", str(serial)]) == 0
    config = write_config(material, tmp_path / "runs/nodes", packs_per_step=4, gpus="cpu:1", target_gpus="cpu:1",
                          launcher="torchrun")
    children = start_nodes(config, 2, 2)
    output = "\n".join(wait(children))
    assert [child.returncode for child in children] == [0, 0], output
    assert losses(config.parent) == pytest.approx(losses(serial.parent), abs=1e-6) and len(losses(serial.parent)) == 8
    mine, theirs = (load_file(latest_checkpoint(c.parent) / "drafter.safetensors") for c in (config, serial))
    assert max(float((mine[k] - theirs[k]).abs().max()) for k in theirs) < 1e-6
    records = kinds(config.parent)
    assert records["run_end"][-1]["status"] == "completed" and "fault" not in records
    fed = sum(r["tokens"] for r in records["stage"] if r["name"] == "node 0 drafter[0]")
    assert 0 < fed < sum(r["tokens"] for r in records["step"])  # node 1 took the rest
