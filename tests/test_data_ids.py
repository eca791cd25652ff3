"""Token ids that the target wrote are kept as they are; prepared data is keyed by all that changes it."""

from __future__ import annotations

import json

import pytest
from chat_tokenizer import CHATML, NO_END, chat_tokenizer, ids_of

from dflash.data import load_conversations
from dflash.errors import DataError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written_row(tokenizer, text="hello", **more):
    return {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}],
        "prompt_ids": [1, 50, 51],
        "response_ids": ids_of(tokenizer, text) + [2],
        "finish_reason": "stop",
        **more,
    }


def test_ready_ids_are_kept_verbatim(tmp_path):
    tokenizer = chat_tokenizer()
    row = written_row(tokenizer)
    conversations, report = load_conversations(write(tmp_path / "a.jsonl", [row]), tokenizer, 64)
    assert conversations[0].input_ids == row["prompt_ids"] + row["response_ids"]
    assert conversations[0].loss_mask == [False] * 3 + [True] * 6
    assert conversations[0].finish_reason == "stop" and report.kept_ids == 1
    again, _ = load_conversations(write(tmp_path / "b.jsonl", [{"messages": row["messages"]}]), tokenizer, 64)
    assert again[0].input_ids != conversations[0].input_ids


def test_masked_ids_are_taken_too_and_lengths_must_agree(tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    conversations, _ = load_conversations(write(tmp_path / "a.jsonl", [row]), chat_tokenizer(), 64)
    assert conversations[0].input_ids == [5, 6, 7, 8] and conversations[0].loss_mask == [False, False, True, True]
    with pytest.raises(DataError, match="line 1 has 3 input_ids and 2 loss_mask"):
        load_conversations(write(tmp_path / "b.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1]}]), None, 64)
    with pytest.raises(DataError, match="line 1 has a loss_mask that is no list"):
        load_conversations(write(tmp_path / "c.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": 1}]), None, 64)


def test_ids_outside_the_vocabulary_and_of_another_tokenizer_are_refused(tmp_path):
    tokenizer = chat_tokenizer()
    bad = {"prompt_ids": [1], "response_ids": [5, 49000]}
    with pytest.raises(DataError, match="line 1 holds token id 49000; wanted 0 to 261"):
        load_conversations(write(tmp_path / "a.jsonl", [bad]), tokenizer, 64)
    with pytest.raises(DataError, match="line 1 has prompt_ids that is not a list of integers"):
        load_conversations(write(tmp_path / "b.jsonl", [{"prompt_ids": "1 2", "response_ids": [3]}]), tokenizer, 64)
    rows = [written_row(tokenizer) | {"response_ids": [100, 101, 102, 2]} for _ in range(6)]
    with pytest.raises(DataError, match="were written by another tokenizer"):
        load_conversations(write(tmp_path / "c.jsonl", rows), tokenizer, 64)
    mixed = [written_row(tokenizer)] * 8 + [rows[0]]  # one odd row is no reason to stop
    assert load_conversations(write(tmp_path / "d.jsonl", mixed), tokenizer, 64)[1].conversations == 9


def test_an_answer_cut_by_length_does_not_teach_an_end_token(tmp_path):
    tokenizer = chat_tokenizer()
    rows = [{"messages": written_row(tokenizer)["messages"], "finish_reason": reason} for reason in ("stop", "length")]
    (stopped, cut), _ = load_conversations(write(tmp_path / "a.jsonl", rows), tokenizer, 64)
    assert sum(stopped.loss_mask) == 6 and sum(cut.loss_mask) == 5
    assert [token for token, kept in zip(cut.input_ids, cut.loss_mask, strict=True) if kept] == ids_of(tokenizer, "hello")


def test_length_tokenizer_template_and_content_all_change_the_ids(tmp_path):
    """SpecForge#115: a new max_length or template had no effect, since prepared ids were found by the path alone."""
    tokenizer = chat_tokenizer()
    long = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 60}]}
    path = write(tmp_path / "a.jsonl", [long])
    other = chat_tokenizer()
    other.add_tokens(["xx"])

    def load(tokens, length):
        return [item.input_ids for item in load_conversations(path, tokens, length)[0]]

    first = load(tokenizer, 48)
    variants = [load(tokenizer, 64), load(other, 48), load(chat_tokenizer(NO_END), 48)]
    assert len(variants[0][0]) == 64 and all(ids != first for ids in variants)
    assert load(tokenizer, 48) == load(chat_tokenizer(CHATML), 48) == first
    write(path, [long, long])
    assert load(tokenizer, 48) == first * 2
