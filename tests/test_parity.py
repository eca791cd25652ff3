"""Case 49: training accuracy and decoding acceptance agree at the same anchors, and a fault is traced to its tensor."""

import pytest
import torch
from test_acceptance import agreeing_drafter, make_pack
from tiny_models import SECOND, tiny_target

from dflash.evaluate import decoding
from dflash.evaluate.parity import parity_check
from dflash.target import session as target_session


@pytest.mark.parametrize("kind, options", [("dense", {}), ("hybrid", {}), ("dense", SECOND)])
def test_training_and_decoding_agree(kind, options):
    target = tiny_target(kind)
    pack, texts, source = make_pack(target)
    parity = parity_check(target, agreeing_drafter(target, 4, **options), source, [pack])
    assert parity.agrees and parity.largest_gap == 0 and parity.difference is None
    assert parity.accuracy_training == parity.accuracy_decoding and len(parity.accuracy_training) == 3
    assert parity.acceptance_training == parity.acceptance_decoding
    assert parity.acceptance_decoding[0] > 0 or kind == "hybrid"
    assert sum(len(text) - 1 for text in texts) >= parity.anchors >= max(len(text) for text in texts) / 4
    assert "every draft equal" in parity.message()


def test_forced_text_need_not_be_the_targets_own():
    target = tiny_target()
    pack, _, source = make_pack(target)
    pack.input_ids[10] = (pack.input_ids[10] + 1) % 50
    other = target.capture(pack.input_ids[None], pack.lengths)
    source.get = lambda _: other
    assert parity_check(target, agreeing_drafter(target, 4), source, [pack]).agrees


@pytest.fixture
def case():
    target = tiny_target()
    pack, _, source = make_pack(target)
    return target, agreeing_drafter(target, 4), source, pack


def test_wrong_layer_in_decoding_is_named(case, monkeypatch):
    """Decoding reads the stream that enters a layer instead of its output (the off-by-one of case 16)."""
    target, drafter, source, pack = case
    real = target_session.run_cached

    def shifted(target, ids, cache, name):
        layers, last, cache = real(target, ids, cache, name)
        return [layers[0], layers[0]], last, cache

    monkeypatch.setattr(target_session, "run_cached", shifted)
    parity = parity_check(target, drafter, source, [pack])
    assert not parity.agrees and parity.largest_gap > 0.01
    assert parity.difference.tensor == "target features of layer 2"
    assert "slot" in parity.message() and "target features of layer 2" in parity.message()


def test_wrong_positions_in_decoding_are_named(case, monkeypatch):
    target, drafter, source, pack = case
    from dflash.evaluate.parity import Recorder

    def late(self, context, features):  # rotary positions one too high from the second chunk on
        self.context = context
        self.features.append(features)
        if context.length:
            context.length += 1
            self.drafter.extend(context, features)
            context.length -= 1
        else:
            self.drafter.extend(context, features)

    monkeypatch.setattr(Recorder, "extend", late)
    parity = parity_check(target, drafter, source, [pack])
    assert parity.difference.tensor == "context keys of drafter layer 0"


def test_wrong_mask_token_in_decoding_is_named(case, monkeypatch):
    target, drafter, source, pack = case
    real = type(drafter).propose

    def other(self, context, anchor_token):
        self.mask_token_id -= 1
        try:
            return real(self, context, anchor_token)
        finally:
            self.mask_token_id += 1

    monkeypatch.setattr(type(drafter), "propose", other)
    parity = parity_check(target, drafter, source, [pack])
    assert parity.difference.tensor == "draft logits" and parity.difference.slot >= 1
    assert parity.different_blocks > 1


def test_stale_cache_in_decoding_is_noticed(case, monkeypatch):
    """Rejected tokens left in the target's cache change the features of everything after them."""
    target, drafter, source, pack = case

    def forgetful(self, count):
        self.length += count
        self._pending, self._last, self._saved = [], [], None

    monkeypatch.setattr(target_session.TargetSession, "keep", forgetful)
    parity = parity_check(target, drafter, source, [pack])
    assert not parity.agrees and parity.difference.tensor.startswith("target features")


def test_cached_features_of_another_model_are_named(case):
    target, drafter, source, pack = case
    stale = tiny_target(seed=9).capture(pack.input_ids[None], pack.lengths)
    source.get = lambda _: stale
    parity = parity_check(target, drafter, source, [pack])
    assert parity.difference.tensor == "target features of layer 0" and "position 0" in parity.difference.place


def test_nothing_to_compare():
    target = tiny_target()
    pack, _, source = make_pack(target)
    pack.loss_mask = torch.zeros_like(pack.loss_mask)
    parity = parity_check(target, agreeing_drafter(target, 4), source, [pack])
    assert not parity.agrees and parity.anchors == 0


def test_forced_rule_follows_the_text():
    rule = decoding.ForcedRule([5, 6, 7, 8])
    assert rule.choose(torch.zeros(10)) == 5
    assert rule.verify([6, 9], torch.zeros(3, 10)) == (1, 7)
    assert rule.verify([8, 1], torch.zeros(3, 10)) == (0, 8)
