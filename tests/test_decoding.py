"""Speculative decoding writes exactly what the target alone would write. Oracle: whole forward passes, no cache."""

import pytest
import torch
from tiny_models import SECOND, VOCAB, ScriptedDrafter, random_drafter, slow_greedy, tiny_target

from dflash.drafter.selector import Candidates
from dflash.errors import ConfigError
from dflash.evaluate.decoding import SampledRule, plain_generate, speculative_generate
from dflash.target import session as target_session

PROMPT = [3, 17, 5, 42, 8, 11, 29]
KINDS = ["dense", "sliding", "hybrid"]
BLOCK = 5


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def text(target):
    return slow_greedy(target, PROMPT, 64)


def drafters(target, text):
    """Perfect, always wrong, and half right in a pattern that ends runs at every slot."""
    whole = PROMPT + text + [0] * 8

    def mixed(position):
        right = whole[position]
        return right if (position * 7919) % 11 < 7 else (right + 1) % VOCAB

    return {
        "perfect": ScriptedDrafter(target, lambda position: whole[position], BLOCK),
        "wrong": ScriptedDrafter(target, lambda position: (whole[position] + 1) % VOCAB, BLOCK),
        "mixed": ScriptedDrafter(target, mixed, BLOCK),
        "random": random_drafter(target, BLOCK),
        "second": random_drafter(target, BLOCK, **SECOND),
        "draft vocabulary": random_drafter(target, BLOCK, draft_ids=[7, 3, 50, 21, 33, 12, 44]),
    }


@pytest.mark.parametrize("name", ["perfect", "wrong", "mixed", "random", "second", "draft vocabulary"])
def test_greedy_text_does_not_depend_on_the_drafter(target, text, name):
    """Case 46: a cache crop that leaves rejected tokens in a recurrent state changes the text on hybrid targets."""
    result = speculative_generate(target, drafters(target, text)[name], PROMPT, 64, eos_token_ids=[])
    assert result.tokens == text
    assert [token for chunk in result.chunks for token in chunk] == text
    assert result.finish_reason == "length"
    if name == "perfect":
        assert result.accepted[:-1] == [BLOCK - 1] * (len(result.accepted) - 1)
        assert result.target_calls == -(-63 // BLOCK) and result.acceptance_length == 63 / 13
    if name == "wrong":
        assert set(result.accepted) == {0} and result.target_calls == 63 and result.acceptance_length == 1.0


@pytest.mark.slow
def test_hybrid_target_256_tokens():
    target = tiny_target("hybrid")
    wanted = plain_generate(target, PROMPT, 256, eos_token_ids=[]).tokens
    assert wanted == slow_greedy(target, PROMPT, 256)
    for name, drafter in drafters(target, wanted).items():
        assert speculative_generate(target, drafter, PROMPT, 256, eos_token_ids=[]).tokens == wanted, name


def test_plain_generate(target, text):
    result = plain_generate(target, PROMPT, 64, eos_token_ids=[])
    assert result.tokens == text and result.target_calls == 63 and result.forwards == 64


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 2])
def test_max_new_tokens_is_exact(target, text, count):
    for name, drafter in drafters(target, text).items():
        result = speculative_generate(target, drafter, PROMPT, count, eos_token_ids=[])
        assert result.tokens == text[:count], name
        assert result.target_calls >= -(-(count - 1) // BLOCK)


@pytest.mark.parametrize("most", [0, 1, 2, 99])
def test_fewer_drafts_verified(target, text, most):
    result = speculative_generate(target, drafters(target, text)["perfect"], PROMPT, 21, eos_token_ids=[], max_draft=most)
    assert result.tokens == text[:21] and max(result.accepted) == min(most, BLOCK - 1)
    assert result.target_calls == -(-20 // (min(most, BLOCK - 1) + 1))


def refuse_text_past_an_end(target, text, places, names=("perfect", "mixed", "random")):
    every = drafters(target, text)
    for place in places:
        stops = [text[place], VOCAB + 100]
        for name in names:
            result = speculative_generate(target, every[name], PROMPT, 64, eos_token_ids=stops)
            assert result.tokens == text[: place + 1], (place, name)
            assert result.finish_reason == ("stop" if place < 64 else "length")


def first_places(text):
    """Where a token stands that has not stood before: as the end token it ends the text there."""
    return [place for place, token in enumerate(text) if token not in text[:place]]


def test_end_token_at_every_slot(target, text):
    """Case 47: an end token inside a block ends the text there, whichever id of several it is."""
    by_slot = {place % BLOCK: place for place in reversed(first_places(text))}
    assert by_slot.keys() == set(range(BLOCK))  # every slot of a perfect drafter's block
    refuse_text_past_an_end(target, text, by_slot.values())


@pytest.mark.slow
def test_end_token_at_every_place(target, text):
    refuse_text_past_an_end(target, text, first_places(text))


def test_end_tokens_come_from_the_target(target, text):
    target.model.config.eos_token_id = [VOCAB - 3, text[9]]
    try:
        stops = {VOCAB - 3, text[9]}
        end = next(place for place, token in enumerate(text) if token in stops)
        assert speculative_generate(target, random_drafter(target), PROMPT, 64).tokens == text[: end + 1]
        assert plain_generate(target, PROMPT, 64).tokens == text[: end + 1]
    finally:
        target.model.config.eos_token_id = None


def test_decoding_features_are_training_features(target, text):
    """The features that decoding feeds the drafter are those of training capture, position by position."""
    seen = []

    class Spy(ScriptedDrafter):
        def extend(self, context, features):
            seen.append(features)
            super().extend(context, features)

    whole = PROMPT + text + [0] * 8
    spy = Spy(target, lambda position: whole[position] if position % 3 else 1, BLOCK)
    speculative_generate(target, spy, PROMPT, 40, eos_token_ids=[])
    got = torch.cat(seen, 1)
    wanted = target.capture(torch.tensor([PROMPT + text])).all_hidden_states[:, : got.shape[1]]
    assert got.shape[1] >= len(PROMPT) + 39
    difference = (got - wanted).abs() / wanted.std()
    assert float(difference.max()) < 2e-3  # a feature of a neighbouring position or layer is off by about 1


def test_target_fed_token_by_token_where_chunks_do_not_continue(monkeypatch, target, text):
    monkeypatch.setattr(target_session, "chunks_continue", lambda target: False)
    monkeypatch.setattr(type(target), "is_hybrid", property(lambda self: True))
    for drafter in drafters(target, text).values():
        assert speculative_generate(target, drafter, PROMPT, 20, eos_token_ids=[]).tokens == text[:20]


def test_broken_continuation_is_noticed(monkeypatch):
    target = tiny_target("hybrid")
    real = target_session.run_cached

    def forgetful(target, ids, cache, name):
        if cache is not None and ids.shape[1] > 1:
            cache = None  # what a version without an initial state does
        return real(target, ids, cache, name)

    monkeypatch.setattr(target_session, "run_cached", forgetful)
    with pytest.warns(UserWarning, match="token by token"):
        assert not target_session.chunks_continue(target)


# -- sampling ---------------------------------------------------------------------------------------------------


def exact_distribution(target_logits, temperature):
    return torch.softmax(target_logits.double() / temperature, -1)


SLOW, OVERLAPS = pytest.mark.slow, ("same", "other", "narrow")


@pytest.mark.parametrize("overlap, draws", [("other", 10_000), *(pytest.param(o, 40_000, marks=SLOW) for o in OVERLAPS)])
def test_rejection_sampling_keeps_the_targets_distribution(overlap, draws):
    """Two slots, drawn many times: the pair of written tokens follows the target's joint distribution."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, temperature = 6, 0.7
    after = torch.randn(1 + vocabulary, vocabulary, generator=generator) * 1.5  # row 0: first token; 1 + t: after t
    ids = torch.arange(vocabulary) if overlap != "narrow" else torch.tensor([4, 1])
    proposal = after[:1, ids] if overlap == "same" else torch.randn(1, len(ids), generator=generator)

    class Stub:
        draft_token_ids = ids

        class config:
            vocab_size = vocabulary

    rule = SampledRule(temperature, generator)
    counts = torch.zeros(vocabulary, vocabulary)
    for _ in range(draws):
        drafts = rule.draft(Stub, proposal)
        logits = torch.stack([after[0], after[1 + drafts[0]]])
        kept, extra = rule.verify(drafts, logits)
        first, second = (drafts[0], extra) if kept else (extra, rule.choose(after[1 + extra]))
        counts[first, second] += 1
    first = exact_distribution(after[0], temperature)
    joint = first[:, None] * exact_distribution(after[1:], temperature)
    error = (counts / draws - joint).abs()
    assert bool((error < 4.5 * (joint / draws).sqrt() + 1e-4).all())
    if overlap != "same":  # the test must be able to fail: the drafter's own distribution is far away
        own = torch.zeros(vocabulary, dtype=torch.float64)
        own[ids] = exact_distribution(proposal[0], temperature)
        assert float((own - first).abs().max()) > 0.1


def test_the_selectors_walk_by_hand():
    """Two slots of three candidates: the second slot's scores depend on what the first one took."""
    unary, pairs = torch.tensor([[2.0, 1.9, 0.0], [1.0, 0.9, 0.5]]), torch.zeros(2, 9, 3)
    pairs[0, 7] = torch.tensor([0.0, 0.3, 0.0])  # after the anchor 7 the second candidate wins
    pairs[1, 4] = torch.tensor([0.0, 0.0, 0.9])  # after 4 the third does
    found = walk_of(unary, pairs, torch.tensor([[3, 4, 5], [6, 7, 8]]), anchor=7)
    assert found.best().tolist() == [4, 8]
    pairs[0, 7] = 0
    assert found.best().tolist() == [3, 6]


def walk_of(unary, pairs, ids, anchor):
    """Candidates with written-out pair scores [slot, token before, candidate]."""
    found = object.__new__(Candidates)
    found.ids, found.unary, found.anchor = ids, unary, anchor
    found.scores = lambda slot, previous: unary[slot] + pairs[slot, int(previous)]
    return found


@pytest.mark.parametrize("draws", [8_000, pytest.param(30_000, marks=SLOW)])
@pytest.mark.parametrize("top", [2, 6])
def test_sampling_along_the_walk_keeps_the_targets_distribution(top, draws):
    """As above for candidates of which a slot has two, or the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, temperature = 6, 0.7
    after = torch.randn(1 + vocabulary, vocabulary, generator=generator) * 1.5
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:top] for _ in range(2)])
    found = walk_of(torch.randn(2, top, generator=generator), torch.randn(2, vocabulary, top, generator=generator), ids, 3)

    class Stub:
        class config:
            vocab_size = vocabulary

    rule, counts, drafted = SampledRule(temperature, generator), torch.zeros(vocabulary, vocabulary), torch.zeros(vocabulary)
    for _ in range(draws):
        drafts = rule.draft(Stub, found)
        drafted[drafts[0]] += 1
        logits = torch.stack([after[0], after[1 + drafts[0]], after[0]])
        kept, extra = rule.verify(drafts, logits)
        written = [*drafts[:kept], extra]
        if len(written) == 1:
            written.append(rule.choose(after[1 + extra]))
        counts[written[0], written[1]] += 1
    first = exact_distribution(after[0], temperature)
    joint = first[:, None] * exact_distribution(after[1:], temperature)
    error = (counts / draws - joint).abs()
    assert bool((error < 4.5 * (joint / draws).sqrt() + 1e-4).all())
    assert float((drafted / draws - first).abs().max()) > 0.1  # the drafts alone are far from it


def test_sampling_repeats_with_its_seed(target):
    drafter = random_drafter(target)

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return speculative_generate(target, drafter, PROMPT, 24, 1.0, generator, eos_token_ids=[]).tokens

    assert run(1) == run(1) and run(1) != run(2) and len(run(1)) == 24


def test_low_temperature_is_greedy(target, text):
    drafter = random_drafter(target)
    generator = torch.Generator().manual_seed(0)
    assert speculative_generate(target, drafter, PROMPT, 20, 1e-4, generator, eos_token_ids=[]).tokens == text[:20]
    assert plain_generate(target, PROMPT, 20, 1e-4, generator, eos_token_ids=[]).tokens == text[:20]


def test_refusals(target):
    drafter = random_drafter(target)
    with pytest.raises(ConfigError, match="prompt is empty"):
        speculative_generate(target, drafter, [], 4)
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, got 0"):
        plain_generate(target, PROMPT, 0)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        speculative_generate(target, drafter, PROMPT, 4, temperature=-1.0)
    drafter.target_layer_ids = [1, 3]
    with pytest.raises(ConfigError, match=r"layer_ids=\[1, 3\]"):
        speculative_generate(target, drafter, PROMPT, 4)
