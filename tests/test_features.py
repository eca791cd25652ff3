"""Cached features equal captured ones, are bounded, and follow everything that changes them."""

from __future__ import annotations

import weakref

import pytest
import torch
from tiny_models import tiny_target as build

from dflash.data import Conversation, make_packs
from dflash.errors import ConfigError, TargetError
from dflash.target.capture import Features
from dflash.target.features import CachedFeatures, OnlineFeatures, check_features, make_source, pack_key


def packs(count=12, length=32):
    generator = torch.Generator().manual_seed(3)
    items = []
    for index in range(count):
        ids = torch.randint(1, 60, (9 + index % 5,), generator=generator).tolist()
        items.append(Conversation(ids, [False] * 3 + [True] * (len(ids) - 3), index))
    return make_packs(items, length)


def same(left: Features, right: Features, dtype=torch.float32):
    torch.testing.assert_close(left.all_hidden_states, right.all_hidden_states.to(dtype), atol=0, rtol=0)
    torch.testing.assert_close(left.verifier_last_hidden, right.verifier_last_hidden.to(dtype), atol=0, rtol=0)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_equal_captured_and_the_target_runs_once(tmp_path, on_disk, dtype):
    target, rows = build(), packs()
    cache = CachedFeatures(target, 2**20, tmp_path if on_disk else None, dtype)
    for _ in range(2):
        for pack in rows:
            got = cache.get(pack)
            assert got.all_hidden_states.shape == (1, 32, 64) and got.all_hidden_states.dtype == dtype
            same(got, target.capture(pack.input_ids[None], pack.lengths), dtype)
    assert cache.stats.captured == len(rows) == cache.stats.hits and cache.stats.not_kept == 0
    assert cache.stats.bytes == cache.bytes_needed(rows) or on_disk


def test_disk_entries_serve_the_next_run_and_another_target_makes_its_own(tmp_path):
    rows = packs()
    CachedFeatures(build(), 2**20, tmp_path).prepare(rows)
    again = CachedFeatures(build(), 2**20, tmp_path)
    again.prepare(rows)
    assert again.stats.captured == 0 and again.stats.packs == len(rows)
    for other in (build(seed=1), build(layer_ids=(1, 2))):
        fresh = CachedFeatures(other, 2**20, tmp_path)
        same(fresh.get(rows[0]), other.capture(rows[0].input_ids[None], rows[0].lengths), torch.bfloat16)
        assert fresh.stats.captured == 1
    assert CachedFeatures(build(), 2**20, tmp_path, torch.float32).stats.packs == 0


def test_damaged_file_is_captured_again(tmp_path):
    rows = packs()
    CachedFeatures(build(), 2**20, tmp_path).prepare(rows)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:50])
    cache = CachedFeatures(build(), 2**20, tmp_path)
    same(cache.get(rows[0]), build().capture(rows[0].input_ids[None], rows[0].lengths), torch.bfloat16)
    assert cache.stats.captured == 1


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_kept_stays_within_the_bound(tmp_path, on_disk):
    """DeepSpec#21: cached hidden states grew to terabytes."""
    target, rows = build(), packs(40)
    whole = CachedFeatures(target, 2**30).bytes_needed(rows)
    cache = CachedFeatures(target, whole // 3, tmp_path if on_disk else None)
    for _ in range(3):
        for pack in rows:
            same(cache.get(pack), target.capture(pack.input_ids[None], pack.lengths), torch.bfloat16)
    assert 0 < cache.stats.packs < len(rows) and cache.stats.bytes <= whole // 3
    assert cache.stats.not_kept > 0
    if on_disk:
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < whole // 3 + 200 * len(rows)


def test_online_features_leave_nothing_behind(tmp_path):
    """DeepSpec#21: without the offline cache, neither disk nor memory grows with the number of packs."""
    target, rows = build(), packs(40)
    source = make_source(target, rows, "online", 0, tmp_path)
    kept = []
    for _ in range(25):  # a thousand packs
        for pack in rows:
            kept.append(weakref.ref(source.get(pack)))
    assert list(tmp_path.rglob("*")) == []
    assert sum(ref() is not None for ref in kept) == 0


def test_hard_labels_need_no_last_hidden_state():
    target, rows = build(), packs()
    cache = CachedFeatures(target, 2**20, keep_last_hidden=False)
    got = cache.get(rows[0])
    assert got.verifier_last_hidden is None
    assert cache.stats.bytes == rows[0].num_tokens * 64 * 2


def test_prepare_reports_progress():
    calls = []
    rows = packs()
    CachedFeatures(build(), 2**20).prepare(rows, lambda *args: calls.append(args))
    assert [call[:2] for call in calls] == [(number + 1, len(rows)) for number in range(len(rows))]
    assert calls[-1][2] > 0


def test_key_follows_ids_and_document_borders_not_the_padding():
    pack = packs()[0]
    key = pack_key(pack)
    pack.input_ids[pack.num_tokens :] = 7
    assert pack_key(pack) == key
    pack.lengths = torch.tensor([pack.num_tokens])
    assert pack_key(pack) != key
    pack.input_ids[0] += 1
    assert len({key, pack_key(pack)}) == 2


def test_rows_that_do_not_match_the_pack_are_refused():
    """verl-SpeCo#99, at the cache's door."""
    target, pack = build(), packs()[0]
    features = target.capture(pack.input_ids[None], pack.lengths)
    check_features(features, pack, target)
    short = Features(features.all_hidden_states[:, :-1], features.verifier_last_hidden)
    with pytest.raises(TargetError, match=r"has shape \(1, 31, 64\); the pack has 32 tokens, so wanted \(1, 32, 64\)"):
        check_features(short, pack, target)
    cache = CachedFeatures(target, 2**20)
    cache.get(pack)
    cache._memory[pack_key(pack)] = cache._memory[pack_key(pack)][:-1]
    with pytest.raises(TargetError, match="cached features have shape"):
        cache.get(pack)


def test_source_by_name():
    target, rows = build(), packs()
    need = CachedFeatures(target, 0).bytes_needed(rows)
    assert isinstance(make_source(target, rows, "auto", need), CachedFeatures)
    assert isinstance(make_source(target, rows, "auto", need - 1), OnlineFeatures)
    assert isinstance(make_source(target, rows, "offline", need - 1), CachedFeatures)
    online = make_source(target, rows, "online")
    same(online.get(rows[0]), target.capture(rows[0].input_ids[None], rows[0].lengths))
    with pytest.raises(ConfigError, match="features is 'both'"):
        make_source(target, rows, "both")
    with pytest.raises(ConfigError, match="bound is -1 bytes"):
        CachedFeatures(target, -1)
