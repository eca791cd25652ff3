"""Reading `gpus`, and who runs where."""

from __future__ import annotations

import pytest
import torch

from dflash.errors import ConfigError
from dflash.train.settings import RunConfig, RuntimeOptions
from dflash.train.topology import decide, default_drafters, parse_gpus


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        ("", None),
        ("  ", None),
        ([], None),
        ("[]", None),
        (5, [5]),
        ("5", [5]),
        (" 5 ", [5]),
        ("5,", [5]),
        ("5,6,7", [5, 6, 7]),
        ("5, 6, 7", [5, 6, 7]),
        ("5 6 7", [5, 6, 7]),
        ("[5, 6, 7]", [5, 6, 7]),
        ("(5,)", [5]),
        ("['5', '6']", [5, 6]),
        ([5, 6, 7], [5, 6, 7]),
        ((5, "6"), [5, 6]),
        ("7,5", [7, 5]),
        ("cuda:5,cuda:6", [5, 6]),
        ("all", list(range(8))),
        ("ALL", list(range(8))),
        ("cpu", "cpu"),
        (" CPU ", "cpu"),
        ("cpu:3", "cpu:3"),
        (0, [0]),
        (torch.tensor(3), [3]),
    ],
)
def test_gpus_as_people_write_them(value, wanted):
    assert parse_gpus(value, 8) == wanted


@pytest.mark.parametrize(
    "value",
    [
        True,
        [True],
        5.0,
        "5.0",
        [5.5],
        -1,
        "-1",
        "5,5",
        [5, "5"],
        "5_6",
        "five",
        "5-7",
        {"a": 1},
        "cpu:0",
        "٥",
        8,
        "0,8",
        "cpu,5",
        object(),
        b"5",
    ],
)
def test_everything_else_is_refused(value):
    with pytest.raises(ConfigError):
        parse_gpus(value, 8)


def test_a_gpu_that_is_not_there_says_what_is():
    with pytest.raises(ConfigError) as error:
        parse_gpus("5,6,7", 0)
    assert str(error.value) == (
        "gpus=5,6,7 asks for GPU 5, but this machine has 0 GPUs; run without gpus (uses the CPU) or with gpus=cpu"
    )
    with pytest.raises(ConfigError, match=r"target_gpus=2 asks for GPU 2, but this machine has 2 GPUs \(0 to 1\)"):
        parse_gpus(2, 2, "target_gpus")
    with pytest.raises(ConfigError, match="0 GPUs; run without gpus"):
        parse_gpus("all", 0)


def places(topology):
    return ([d.index for d in topology.drafters], [[d.index for d in t] for t in topology.targets], topology.shared)


def test_defaults_for_any_number_of_gpus():
    assert places(decide(RuntimeOptions(), 1)) == ([0], [[0]], True)
    assert places(decide(RuntimeOptions(), 2)) == ([1], [[0]], False)
    assert places(decide(RuntimeOptions(), 4)) == ([3], [[0], [1], [2]], False)
    assert places(decide(RuntimeOptions(), 8)) == ([5, 6, 7], [[0], [1], [2], [3], [4]], False)
    for count in range(2, 65):
        topology = decide(RuntimeOptions(), count)
        assert len(topology.drafters) == default_drafters(count) == max(1, int(count * 0.375))
        assert len(topology.drafters) + len(topology.targets) == count and not topology.shared
    cpu = decide(RuntimeOptions(), 0)
    assert cpu.drafters == (torch.device("cpu"),) and cpu.targets == ((torch.device("cpu"),),) and cpu.serial


def test_the_story_line():
    config = RunConfig.from_parameters(gpus="5,6,7")
    assert places(decide(config.runtime, 8)) == ([5, 6, 7], [[0], [1], [2], [3], [4]], False)


def test_gpus_that_an_environment_variable_hides_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    wanted = (
        r"has 3 GPUs \(0 to 2\): CUDA_VISIBLE_DEVICES=5,6,7 leaves these, and gpus counts them from 0 "
        r"\(0 is 5, 1 is 6, 2 is 7\); choose among them"
    )
    with pytest.raises(ConfigError, match=wanted):
        parse_gpus("5,6,7", 3)
    assert parse_gpus("0,1,2", 3) == [0, 1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0f3c,MIG-77aa")
    with pytest.raises(ConfigError, match="target_gpus counts them from 0 .0 is GPU-0f3c, 1 is MIG-77aa."):
        parse_gpus([2], 2, "target_gpus")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="has 0 GPUs, since CUDA_VISIBLE_DEVICES='' hides all it may have; run without"):
        parse_gpus(5, 0)


def test_overrides_and_sharded_targets():
    assert places(decide(RuntimeOptions(gpus=[6, 7], target_gpus="0,1,2,3"), 8)) == ([6, 7], [[0], [1], [2], [3]], False)
    assert places(decide(RuntimeOptions(target_gpus="0,1"), 4)) == ([2, 3], [[0], [1]], False)
    sharded = decide(RuntimeOptions(gpus="5,6,7", gpus_per_target=2), 8)
    assert places(sharded) == ([5, 6, 7], [[0, 1], [2, 3]], False)
    assert "GPU 4 stays idle" in sharded.reason and "GPU 4 stays idle" in sharded.table()
    with pytest.raises(ConfigError, match="gpus_per_target=3 needs 3 GPUs for one target, but 1 of 2 are left"):
        decide(RuntimeOptions(gpus_per_target=3), 2)


def test_shared_gpus():
    both = decide(RuntimeOptions(gpus="all"), 2)
    assert places(both) == ([0, 1], [[0], [1]], True) and both.paired and not both.serial
    assert decide(RuntimeOptions(gpus=0), 1).serial
    assert places(decide(RuntimeOptions(target_gpus="0,1"), 2)) == ([1], [[0], [1]], True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": "cpu:999999999"}, "asks for 999999999 workers on one CPU; at most 64"),
        ({"gpus": "cpu:1", "target_gpus": "cpu:65"}, "target_gpus=cpu:65 asks for 65 workers"),
        ({"gpus": "cpu:2", "gpus_per_target": 2}, "gpus_per_target=2 spreads a target over GPUs, and here a side runs on"),
    ],
)
def test_what_a_cpu_cannot_stand_for_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        decide(RuntimeOptions(**changes), 8)


def test_cpu_workers_stand_in_for_devices():
    topology = decide(RuntimeOptions(gpus="cpu:3", target_gpus="cpu:5"), 0)
    assert len(topology.drafters) == 3 and len(topology.targets) == 5 and not topology.serial
    assert all(d.type == "cpu" for d in topology.devices) and not topology.shared
    assert not decide(RuntimeOptions(gpus="cpu:2", target_gpus="cpu:2"), 0).paired
    assert not decide(RuntimeOptions(gpus="cpu:1", target_gpus="cpu:1"), 0).serial
    assert decide(RuntimeOptions(gpus="cpu", target_gpus="cpu"), 0).serial
    pairs = decide(RuntimeOptions(gpus="cpu:2"), 0)
    assert pairs.paired and len(pairs.targets) == 2
    assert places(decide(RuntimeOptions(gpus="cpu"), 8)) == ([None], [[None]], True)
    mixed = decide(RuntimeOptions(gpus="1", target_gpus="cpu"), 2)
    assert str(mixed.drafters[0]) == "cuda:1" and str(mixed.targets[0][0]) == "cpu"
    assert "target[4]" in topology.table() and "drafter[2]" in topology.table()
