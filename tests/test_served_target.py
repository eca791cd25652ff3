"""Targets that a server runs, over a stand-in for it: features, what is refused, the loss of a server."""

from __future__ import annotations

import json
import random
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from stub_states import serving, tiny_folder
from transformers import LlamaForCausalLM

from dflash.data import Conversation, make_packs
from dflash.errors import ConfigError, RunError, ServerLostError, TargetError
from dflash.launch.run import start_run, train_run
from dflash.runs.record import Run, read_metrics
from dflash.target.capture import Features, load_target
from dflash.target.features import CachedFeatures, UntilLost
from dflash.target.hosting import ServerOptions, hidden_state_flags, states_given
from dflash.target.loading import resolve_source
from dflash.target.served import open_served
from dflash.target.serving import next_commands
from dflash.train.checkpoint import checkpoints
from dflash.train.resolve import _beside_a_server, resolve
from dflash.train.settings import RunConfig
from dflash.train.topology import Topology, decide


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def server(tiny, tmp_path):
    folder, model = tiny
    with serving(model, folder, tmp_path) as found:
        yield found


def opened(server, layers=(2, 0), **options):
    return open_served(resolve_source(server.target), layers, torch.float32, ServerOptions(None, **options))


def pack_of(lengths, total):
    rng = random.Random(3)
    rows = [Conversation([rng.randrange(6, 200) for _ in range(n)], [True] * n) for n in lengths]
    return make_packs(rows, total)[0]


def test_features_are_those_of_the_model_in_process(server):
    """Two captured layers in an order of our own, every document for itself, padding zero, the norm taken once."""
    pack, target = pack_of([40, 7, 25], 96), opened(server)
    plain = load_target(server.folder, "cpu", torch.float32, [2, 0])
    wanted = plain.capture(pack.input_ids[None], pack.lengths, pack.position_ids)
    found = target.capture(pack.input_ids[None], pack.lengths, pack.position_ids)
    for ours, theirs in zip(found.tensors, wanted.tensors, strict=True):
        assert theirs.norm() > 1 and (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert found.all_hidden_states[0, 72:].abs().max() == 0
    assert target.capture(pack.input_ids[None], pack.lengths, last_hidden=False).verifier_last_hidden is None
    assert torch.equal(target.embed_weight, plain.embed_weight) and torch.equal(target.head_weight, plain.head_weight)
    assert "the same bits" in target.found and "of its norm away from transformers" in target.found
    assert not list(server.states.iterdir())  # every file is read and removed
    target.close()


def test_a_norm_that_scales_by_one_more_than_its_weight_is_found_by_the_servers_numbers(tiny, tmp_path):
    """Gemma's way: the file's weight is one less. Only the server's log-probabilities can tell."""
    folder, model = tiny
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    changed = LlamaForCausalLM.from_pretrained(folder)
    changed.model.norm.weight.data -= 1
    changed.save_pretrained(other)
    with serving(model, other, tmp_path) as server:
        target = open_served(resolve_source(server.target), [2, 0], torch.float32, ServerOptions(None))
        assert torch.allclose(target._norm, model.model.norm.weight)


def test_documents_are_asked_for_together_and_a_slow_server_is_waited_for(server):
    target, pack = opened(server), pack_of([9] * 10, 96)
    server.delay, server.most = 0.2, 0
    target.capture(pack.input_ids[None], pack.lengths)
    assert 2 <= server.most <= 8


def drop_row(tensors):
    for name in tensors:
        tensors[name] = tensors[name][1:].clone()


def drop_states(tensors):
    tensors["hidden_states"] = tensors["hidden_states"][:-1].clone()


def drift(tensors, count=[0]):  # noqa: B006
    count[0] += 1
    tensors["hidden_states"] *= 1 + 0.01 * count[0]


@pytest.mark.parametrize(
    "fault, told",
    [
        ({"connector": False}, "no hidden states .*--speculative-config .* --kv-transfer-config"),
        ({"about": {"foreign": True, "layer_ids": [0, 2, 3]}}, "another hidden-states connector; .*--kv-transfer-config"),
        (
            {"layer_ids": [0, 1, 3]},
            r"layers \[0, 1, 3\], and this run needs \[0, 2, 3\]; start it with --speculative-config",
        ),
        ({"prefix_caching": True}, "caches prefixes.*--no-enable-prefix-caching"),
        ({"chunked_prefill": True}, "prefills in chunks.*--no-enable-chunked-prefill"),
        ({"change": drop_states}, "47 rows of states for 48 tokens; .*--no-enable-prefix-caching"),
        ({"change": drop_row}, "states of other tokens than it got"),
        ({"change": drift}, "other features to the same row asked twice"),
        ({"change": lambda t: t["hidden_states"].add_(5.0)}, "serves another model than .*log-probabilities"),
        ({"tokenize": lambda text, **_: [1, 2]}, "another tokenizer than .*--tokenizer"),
        ({"longest": 64}, "takes 63 tokens.*--max-model-len 201"),
        ({"fail": True}, "could not write .*No space left on device"),
    ],
)
def test_a_server_that_will_not_do_is_named_with_the_flag_that_mends_it(server, fault, told):
    for name, value in fault.items():
        if hasattr(server, name):
            setattr(server, name, value)
        else:
            server.about[name] = value
    with pytest.raises(TargetError, match=told):
        opened(server, longest=200)


def test_another_model_behind_the_address(tiny, tmp_path):
    """Of the same shape: its head tells. Of another: its states do. With only layers that differ: transformers does."""
    folder, model = tiny
    for changes, told in (({"seed": 1}, "log-probabilities differ"), ({"hidden": 16}, "wanted .3, 32.")):
        other = tiny_folder(tmp_path, **changes, save=False)[1]
        with serving(other, folder, tmp_path) as server, pytest.raises(TargetError, match=f"another model.*{told}"):
            opened(server)
    swapped = LlamaForCausalLM.from_pretrained(folder).eval()
    swapped.model.layers[0].mlp, swapped.model.layers[1].mlp = swapped.model.layers[1].mlp, swapped.model.layers[0].mlp
    with serving(swapped, folder, tmp_path) as server, pytest.raises(TargetError, match="from transformers', wanted"):
        opened(server)


def test_a_server_that_answers_and_writes_where_nobody_sees_it(server, monkeypatch):
    monkeypatch.setattr("dflash.target.served._PATIENCE", 0.3)
    server.lose = True
    with pytest.raises(TargetError, match="no such file appears here.*shared_storage_path"):
        opened(server)


def test_no_server_at_the_address(tiny):
    with pytest.raises(RunError, match="no server answers at http://127.0.0.1:9/health; start it: PYTHONPATH="):
        open_served(resolve_source(f"vllm+http://127.0.0.1:9{tiny[0]}"), [0], torch.float32, ServerOptions(None))


def test_names(tiny, tmp_path, monkeypatch):
    folder = tiny[0]
    assert resolve_source(f"vllm:{folder}").server == "" and resolve_source(f"vllm:{folder}").location == str(folder)
    found = resolve_source(f"vllm+http://h:8000{folder}")
    assert (found.server, found.location) == ("http://h:8000", str(folder))
    monkeypatch.chdir(folder.parent)
    assert resolve_source("vllm+http://h:1/model").location == "model" and resolve_source(folder).server is None
    for name, told in (
        ("vllm:", "names no folder"),
        ("vllm+ftp://h/x", "names no folder"),
        ("vllm:smollm2", "write_target_"),
    ):
        with pytest.raises(TargetError, match=told):
            resolve_source(name)
    assert states_given([2, 0], 4) == [0, 2, 3] and states_given([3, 1], 4) == [1, 3]
    extract = json.loads(hidden_state_flags([0, 2, 3], "/x")["layers"][1])
    assert extract["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def config_of(server, data, **changes):
    settings = dict(target=server.target, data=str(data), held_out=2, pack_length=64, max_anchors=16, block_size=4)
    settings |= dict(num_captured=2, drafter_layers=1, steps=8, eval_every=4, checkpoint_every=100, features="online")
    settings |= dict(max_minutes=None, lr=1e-3, gpus="cpu", dtype="float32", target_dtype="float32", warm_start=False)
    return RunConfig.from_parameters(recipe="cpu", **(settings | changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng, path = random.Random(1), tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {
            "prompt_ids": [6 + n, *(rng.randrange(6, 200) for _ in range(5))],
            "response_ids": [rng.randrange(6, 200) for _ in range(20)],
        }
        for n in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def weights(run):
    return (checkpoints(run.path)[-1][1] / "drafter.safetensors").read_bytes()


@pytest.mark.parametrize("workers", [{}, {"gpus": "cpu:2", "target_gpus": "cpu:2", "packs_per_step": 2}])
def test_a_server_that_dies_ends_the_run_with_a_checkpoint_and_it_goes_on_as_if_unbroken(tiny, data, tmp_path, workers):
    folder, model = tiny
    with serving(model, folder, tmp_path, given=(0, 3)) as server:
        server.about["layer_ids"] = states_given(resolve(config_of(server, data)).layer_ids, 4)
        port, given, config = server.server_address[1], server.about["layer_ids"], config_of(server, data, **workers)
        whole = start_run(config, tmp_path, "whole")
        train_run(whole, config)
        asked, server.asked = server.asked, 0
        run = start_run(config, tmp_path, "broken")
        server.left = asked // 2
        with pytest.raises(ServerLostError, match="is gone .*its output is where it was started"):
            train_run(run, config)
    saved = checkpoints(run.path)[-1][0]
    records, _ = read_metrics(run.path)
    steps = [r["step"] for r in records if r["kind"] == "step"]
    assert 1 <= saved < 8 and steps[-1] == saved and not any(r.get("skipped") for r in records if r["kind"] == "step")
    assert [r["status"] for r in records if r["kind"] == "run_end"] == ["failed"]
    with serving(model, folder, tmp_path, given=given, port=port):
        train_run(Run.open(run.path), config, resume=True)
    assert weights(run) == weights(whole)


def test_the_offline_cache_asks_once_and_training_is_that_over_the_model_in_process(server, data, tmp_path):
    server.about["layer_ids"] = states_given(resolve(config_of(server, data)).layer_ids, 4)
    ended = []
    for target in (server.target, str(server.folder)):
        config = config_of(
            server, data, target=target, features="offline", cache_dir=str(tmp_path / "kept"), warm_start="auto"
        )
        run = start_run(config, tmp_path / "runs")
        ended.append((train_run(run, config), [r["loss"] for r in read_metrics(run.path)[0] if r["kind"] == "step"]))
    asked = server.asked
    again = config_of(server, data, features="offline", cache_dir=str(tmp_path / "kept"))
    train_run(start_run(again, tmp_path / "runs"), again)
    assert server.asked - asked == 2  # the check alone
    assert ended[0][0].acceptance_length == pytest.approx(ended[1][0].acceptance_length, abs=0.02)
    assert ended[0][1] == pytest.approx(ended[1][1], rel=1e-3)


def test_the_way_to_a_server_names_the_targets_folder(server, tmp_path):
    mark = tmp_path / "checkpoints" / "step-1"
    mark.mkdir(parents=True)
    (mark / "complete.json").write_text("{}")
    (mark / "drafter.json").write_text(json.dumps({"target": server.target, "block_size": 4}))
    assert f"vllm serve {server.folder} " in next_commands(tmp_path)[1]


def test_features_after_the_loss_are_nan_and_nothing_is_asked_any_more():
    calls, told = [], []

    def get(pack):
        calls.append(pack)
        if len(calls) > 1:
            raise ServerLostError("gone")
        return Features(torch.ones(1, 3, 2), torch.ones(1, 3, 1))

    source = UntilLost(SimpleNamespace(get=get), told.append)
    assert source.get(0).all_hidden_states.sum() == 6 and source.lost is None
    for _ in range(2):
        assert all(t.isnan().all() for t in source.get(1).tensors)
    assert calls == [0, 1] and [str(error) for error in told] == ["gone"] and source.lost is told[0]
    with pytest.raises(ServerLostError):  # before the first features nobody knows what they look like
        UntilLost(SimpleNamespace(get=lambda pack: get(pack))).get(0)


def test_a_cache_does_not_keep_what_a_lost_server_did_not_give(server):
    target, pack = opened(server), pack_of([9, 9], 32)
    cache = CachedFeatures(target, 2**20)
    server.left = 0
    with pytest.raises(ServerLostError):
        cache.get(pack)
    assert cache.stats.packs == 0


def test_gpus_that_a_target_would_have_had_are_the_servers(server, data):
    config = config_of(server, data, gpus="2,3", target_gpus="0,1", gpus_per_target=2)
    topology, settled = _beside_a_server(decide(config.runtime, 4), config)
    assert [str(d) for d in topology.drafters] == ["cuda:2", "cuda:3"] and not topology.shared
    assert [str(t[0]) for t in topology.targets] == ["cpu", "cpu"] and settled.runtime.target_gpus == "0,1"
    config = config_of(server, data, gpus="2,3", target_gpus="0,1", launcher="torchrun")
    assert _beside_a_server(decide(config.runtime, 4), config)[0].paired  # each rank asks for itself
    serial: Topology = decide(config_of(server, data).runtime, 0)
    assert _beside_a_server(serial, config)[0] is serial


def test_a_server_to_start_needs_a_python_with_vllm(tiny, data, tmp_path):
    config = config_of(SimpleNamespace(target=f"vllm:{tiny[0]}"), data)
    with pytest.raises(ConfigError, match="server_python"):
        resolve(config)
    config = config_of(SimpleNamespace(target=f"vllm:{tiny[0]}"), data, server_python=str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="is no Python that starts"):
        resolve(config)
    assert threading.active_count() < 64
