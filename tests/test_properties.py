"""Whatever comes in: a typed error or finite numbers, and nothing skipped that is not counted."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, random_drafter, tiny_target

from dflash.data import Conversation, load_conversations, make_packs
from dflash.drafter.masks import AnchorSet
from dflash.errors import ConfigError, DataError, DFlashError
from dflash.target.features import OnlineFeatures
from dflash.train.plan import Planner
from dflash.train.settings import _SECTIONS, RunConfig
from dflash.train.step import Replica, SerialEngine, read_sums

quick = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
LENGTH = 32


@pytest.fixture(scope="module")
def target():
    return tiny_target()


# -- settings -----------------------------------------------------------------------------------------------------

NAMES = [f.name for section in _SECTIONS.values() for f in dataclasses.fields(section)]
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", "none", "5,6,7", "[1, 2]", "(0.9, 0.95)", "1e-3", "true", "-1", "nan", "inf"]),
    st.lists(st.one_of(st.integers(-3, 9), st.floats(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=8)), values, max_size=4))
def test_any_settings_are_refused_by_name_or_survive_their_file(given_values):
    try:
        config = RunConfig.from_parameters(**given_values)
    except ConfigError as error:
        said = str(error)
        assert any(str(name) in said or repr(name) in said for name in given_values), f"no setting is named: {said}"
        return
    assert RunConfig.from_dict(config.to_dict()) == config
    for section in (values for values in dataclasses.asdict(config).values() if isinstance(values, dict)):
        assert not any(isinstance(v, float) and math.isnan(v) for v in section.values()), section


# -- files ------------------------------------------------------------------------------------------------------------

texts = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
ids = st.lists(st.integers(-2, 300), max_size=20)
chats = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", ""]),
            "content": st.one_of(texts, st.none(), st.integers()),
        }
    ),
    max_size=4,
)
good = st.fixed_dictionaries(
    {
        "messages": st.lists(texts.filter(str.strip), min_size=2, max_size=2).map(
            lambda two: [{"role": "user", "content": two[0]}, {"role": "assistant", "content": two[1] + " and more"}]
        )
    }
)
rows = st.lists(
    st.one_of(
        good,
        st.fixed_dictionaries({"messages": chats}),
        st.fixed_dictionaries({"prompt_ids": ids, "response_ids": ids}),
        st.fixed_dictionaries({"input_ids": ids, "loss_mask": st.lists(st.booleans(), max_size=20)}),
        st.fixed_dictionaries({"messages": st.one_of(st.none(), texts, st.integers())}),
        st.just({}),
        st.just([]),
        st.just("x"),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows, st.integers(4, 60), st.integers(2, 6))
def test_any_file_is_refused_or_every_row_is_accounted_for(tmp_path_factory, content, max_length, block_size):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    try:
        found, report = load_conversations(path, chat_tokenizer(), max_length, block_size=block_size, vocab_size=262)
    except DataError:
        return
    assert report.rows == len(content) == len(found) + sum(report.skipped.values())
    for c in found:
        assert len(c.input_ids) == len(c.loss_mask) <= max_length and any(c.loss_mask)
        assert all(0 <= token < 262 for token in c.input_ids)


# -- packs, anchors, losses ------------------------------------------------------------------------------------------


@st.composite
def conversations(draw):
    found = []
    for index in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, LENGTH + 8))
        found.append(
            Conversation(
                draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)),
                draw(st.lists(st.booleans(), min_size=size, max_size=size)),
                index,
            )
        )
    return found


def countable(pack, block_size):
    """Oracle: positions that can start a block, by plain loops over the documents."""
    begin, found = 0, 0
    mask = pack.loss_mask.tolist()
    for size in pack.lengths.tolist():
        for a in range(begin, begin + size):
            found += mask[a] and any(mask[a + k] for k in range(1, block_size) if a + k < begin + size)
        begin += size
    return found


@quick
@given(
    conversations(),
    st.integers(2, 6),
    st.integers(1, 40),
    st.sampled_from([None, 0.0, 0.5, 4.0, 1e6]),
    st.sampled_from(["weight_mean", "token_mean"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_any_conversations_train_to_finite_weights_or_are_counted(
    target, found, block_size, max_anchors, gamma, reduction, soft, packs_per_step
):
    from runner_jobs import options

    try:
        packs = make_packs(found, LENGTH)
        drafter = random_drafter(target, block_size)
        drafter.max_anchors = max_anchors
        settings = options(gamma=gamma, reduction=reduction, soft_labels=soft, packs_per_step=packs_per_step)
        plans = Planner(packs, settings, block_size, max_anchors)
    except DataError:
        supervised = [c for c in found if any(c.loss_mask[:LENGTH])]
        assert not supervised or not any(countable(p, block_size) for p in make_packs(found, LENGTH))
        return
    engine, skipped = SerialEngine(Replica(drafter, settings), OnlineFeatures(target), plans), 0
    for step in (1, 2):
        plan = plans.step(step)
        for item in plan.items:
            assert int(item.anchors.valid.sum()) == min(max_anchors, countable(item.pack, block_size))
        *sums, norm, finite = engine.step(plan, 1e-3).tolist()
        told = read_sums(sums)
        skipped += plan.denominator <= 0
        assert told["supervised_slots"] == plan.supervised_slots and finite == 1.0
        assert math.isfinite(told["loss"]) and math.isfinite(norm) and told["loss"] >= 0
        if plan.supervised_slots == 0:
            assert told["loss"] == 0.0 and plan.denominator == 0
    assert skipped == sum(plans.step(s).denominator <= 0 for s in (1, 2))
    assert all(bool(torch.isfinite(p).all()) for p in drafter.parameters())


fitting = st.lists(st.integers(1, LENGTH // 3), min_size=1, max_size=3)


masks = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
places_in = st.one_of(*[st.integers(0, LENGTH - 1)] * 9, st.integers(-1, LENGTH))


@settings(quick, max_examples=150)
@given(
    st.one_of(fitting, fitting, st.lists(st.integers(-2, LENGTH + 4), max_size=4)),
    masks,
    st.lists(st.tuples(places_in, st.booleans()), min_size=1, max_size=8),
    st.data(),
)
def test_any_lengths_and_anchors_give_finite_gradients_or_a_typed_error(target, lengths, mask, places, data):
    """Empty and overlong documents, anchors in the padding, at 0, twice, past a document's end."""
    drafter = random_drafter(target)
    hidden = torch.randn(1, LENGTH, 2 * 32)
    anchors = AnchorSet(torch.tensor([p for p, _ in places]), torch.tensor([v for _, v in places]))
    try:
        loss, metrics = drafter(
            hidden,
            torch.randn(1, LENGTH, 32),
            torch.randint(0, VOCAB, (1, LENGTH)),
            torch.tensor([mask]),
            torch.tensor(lengths, dtype=torch.int64),
            torch.arange(LENGTH)[None],
            use_soft_labels=data.draw(st.booleans()),
            anchors=anchors,
        )
    except (ValueError, DFlashError) as error:
        outside = any(not 0 <= p < LENGTH for p, _ in places)
        wrong = not lengths or min(lengths) < 1 or sum(lengths) > LENGTH
        assert wrong and "lengths" in str(error) or outside and "anchors lie at" in str(error), error
        return
    assert lengths and sum(lengths) <= LENGTH and min(lengths) >= 1 and all(0 <= p < LENGTH for p, _ in places)
    assume(loss.requires_grad)
    loss.backward()
    assert bool(torch.isfinite(loss)) and all(bool(torch.isfinite(v).all()) for v in metrics.values())
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in drafter.parameters())
