"""Two launchers of torchrun on one machine stand for two machines: each feeds its own drafter, both average together."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from patience import PATIENCE
from safetensors.torch import load_file
from test_train_command import ENVIRONMENT, kinds, losses, material, write_config  # noqa: F401

from dflash.__main__ import main
from dflash.distributed.cluster import meet, roles_of
from dflash.errors import ConfigError, RunError
from dflash.train.checkpoint import latest_checkpoint
from dflash.train.settings import RuntimeOptions
from dflash.train.topology import decide


def start_nodes(config, nodes: int, processes: int | list[int]) -> list[subprocess.Popen]:
    """The command line of docs/runner.md, once for each node; a list gives each node its own number of processes."""
    counts = processes if isinstance(processes, list) else [processes] * nodes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
    ]
    train = ["-m", "dflash", "train", "--config", str(config)]
    return [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "--nproc-per-node", str(counts[node]), *train],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]


def wait(children: list[subprocess.Popen]) -> list[str]:
    try:
        return [child.communicate(timeout=PATIENCE)[0] for child in children]
    finally:
        for child in children:
            child.kill()


@pytest.mark.slow
def test_two_nodes_give_the_serial_numbers(material, tmp_path):  # noqa: F811
    serial = write_config(material, tmp_path / "runs/serial", packs_per_step=4)
    assert main(["train", "--config", str(serial)]) == 0
    config = write_config(
        material, tmp_path / "runs/nodes", packs_per_step=4, gpus="cpu:1", target_gpus="cpu:1", launcher="torchrun"
    )
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


@pytest.mark.parametrize("processes", [[2, 4], [4, 2]])
@pytest.mark.slow
def test_a_wrong_number_on_one_node_ends_both_with_the_right_one(material, tmp_path, processes):  # noqa: F811
    config = write_config(
        material, tmp_path / "runs/nodes", packs_per_step=4, gpus="cpu:1", target_gpus="cpu:1", launcher="torchrun"
    )
    children = start_nodes(config, 2, processes)
    for output in wait(children):
        assert "use --nproc-per-node 2" in output
    assert [child.returncode for child in children] == [1, 1]
    assert not (config.parent / "metrics.jsonl").exists() or "step" not in kinds(config.parent)


def test_nodes_of_different_sizes_are_refused():
    topology = decide(RuntimeOptions(gpus="cpu:1", target_gpus="cpu:1"))
    assert roles_of(topology, 4, 2).nodes == 2
    with pytest.raises(ConfigError, match="5 processes over all nodes and 2 on this one; .*on every node"):
        roles_of(topology, 5, 2)


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("here/2", "1")
    with pytest.raises(RunError, match="rank 1, 3 of 4 did not start within 0 s"):
        meet(store, 0, 4, 0.1)
    store.set("refused", "node 1 cannot take part: no GPU 5")
    with pytest.raises(ConfigError, match="node 1 cannot take part: no GPU 5"):
        meet(store, 0, 4, 60.0)
    for rank in (1, 3):
        store.set(f"here/{rank}", "1")
    meet(store, 0, 4, 0.0)
