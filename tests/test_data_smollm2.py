"""The repository's own data with the packaged target: what the file claims is so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash.data import ChatRenderer, load_conversations, make_packs, split_held_out
from dflash.data.chat import question_of

FILE = Path(__file__).resolve().parents[1] / "data" / "smollm2_conversations.jsonl"


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def test_prompts_render_to_the_ids_that_the_target_was_given(smollm2, rows):
    renderer = ChatRenderer(smollm2.tokenizer)
    assert all(renderer.prompt_ids(question_of(row)) == row["prompt_ids"] for row in rows)


def test_written_ids_are_kept_where_text_does_not_come_back_to_them(smollm2, rows):
    tokenizer = smollm2.tokenizer
    lost = 0
    for row in rows:
        body = [token for token in row["response_ids"] if token != 2]
        lost += tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"] != body
    assert lost == 106
    conversations, report = load_conversations(FILE, tokenizer, 512)
    assert report.kept_ids == report.conversations == 600 and report.truncated == 0
    assert all(
        item.input_ids == row["prompt_ids"] + row["response_ids"] for item, row in zip(conversations, rows, strict=True)
    )


def test_tokenized_again_the_mask_is_the_answer_and_its_end_token(smollm2, rows, tmp_path):
    text = [{name: row[name] for name in ("messages", "finish_reason")} for row in rows]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    conversations, _ = load_conversations(tmp_path / "text.jsonl", smollm2.tokenizer, 512)
    for item, row in zip(conversations, rows, strict=True):
        marked = [token for token, kept in zip(item.input_ids, item.loss_mask, strict=True) if kept]
        stopped = row["finish_reason"] == "stop"
        assert (marked[-1] == 2) == stopped
        text = smollm2.tokenizer.decode(marked[:-1] if stopped else marked)
        assert text == row["messages"][1]["content"].rstrip() or text == row["messages"][1]["content"]
        first = item.loss_mask.index(True)
        assert item.input_ids[:first] == row["prompt_ids"]


def test_stored_answers_are_what_the_target_would_write(smollm2, rows):
    """Greedy ids are the target's own argmax, near ties of another number format aside."""
    agree = total = 0
    for row in rows[:3]:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        states = smollm2.capture(ids).verifier_last_hidden[0, len(row["prompt_ids"]) - 1 : -1]
        best = (states @ smollm2.head_weight.T).argmax(-1)
        agree += int((best == torch.tensor(row["response_ids"])).sum())
        total += len(row["response_ids"])
    assert agree / total > 0.98


def test_packs_of_the_held_out_split_are_full_and_share_no_prompt(smollm2):
    conversations, _ = load_conversations(FILE, smollm2.tokenizer, 512)
    train, held = split_held_out(conversations, 0.1)
    assert not {item.prompt_key for item in train} & {item.prompt_key for item in held}
    packs = make_packs(train, 1024, pad_token_id=smollm2.tokenizer.pad_token_id)
    assert sum(pack.num_tokens for pack in packs) == sum(map(len, train))
    assert sum(pack.num_tokens for pack in packs) / (1024 * len(packs)) > 0.95
