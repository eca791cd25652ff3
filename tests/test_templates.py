"""Public chat templates: ids of the whole render, a mask of what the model writes, a reason for what is dropped."""

from __future__ import annotations

import re

import pytest
from chat_tokenizer import ids_of
from template_matrix import BEGIN, END, KINDS, MODELS, PAGE, outcome, said, table, template_of, tokenizer_of, user

from dflash.data import ChatRenderer, UnusableRow, chat_of


def as_row(tokenizer, row):
    """What transformers makes of the row as it is."""
    return tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)


def oracle(tokenizer, text, pattern):
    """Ids and mask of a render, by the model's markers: what the regex's group holds is written by the model."""
    ids, mask, at = [], [], 0
    pieces = []
    for found in re.finditer(pattern, text, re.DOTALL):
        pieces += [(text[at : found.start(1)], False), (found.group(1).rstrip(), True)]
        at = found.start(1) + len(pieces[-1][0])
    for piece, written in [*pieces, (text[at:], False)]:
        part = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += part
        mask += [written] * len(part)
    return ids, mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_cell_is_the_whole_render_and_marks_what_the_model_writes(model, kind):
    tokenizer, row = tokenizer_of(model), KINDS[kind]
    try:
        ids, mask = ChatRenderer(tokenizer)(chat_of(row))
    except UnusableRow:
        pytest.skip("dropped; the next test says why")
    if model == "DeepSeek-V3" and "tools" in row:  # joins arguments to text, so it renders JSON text alone
        row = {"messages": chat_of(row).messages(arguments_as_text=True), "tools": row["tools"]}
    if model == "gpt-oss" and kind == "empty reasoning":  # an empty thought is none; as it is, it would open a channel
        row = {"messages": chat_of(row).messages()}
    text = as_row(tokenizer, row)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (ids, mask) == oracle(tokenizer, text, MODELS[model][2])
    written = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    for message in row["messages"]:
        if message["role"] == "assistant":
            assert message["content"] in written
    assert "<think>\n\n</think>" not in written and "<think></think>" not in written


@pytest.mark.parametrize("model", MODELS)
def test_what_is_dropped_could_not_be_rendered(model):
    tokenizer = tokenizer_of(model)
    for kind, row in KINDS.items():
        if not outcome(model, kind).startswith("dropped"):
            continue
        for as_text in (False, True):
            try:
                text = tokenizer.apply_chat_template(chat_of(row).messages(as_text), tools=row.get("tools"), tokenize=False)
            except Exception:
                continue
            if model == "DeepSeek-V3":  # its second call has no header, so no prompt leads to it
                assert kind == "tools, multi-turn" and text.count("<｜Assistant｜>") == 1
            else:
                assert "weather" not in text, f"{model}, {kind}"  # rendered, but without the calls


def test_the_page_holds_the_table():
    assert f"{BEGIN}\n{table()}\n{END}" in PAGE.read_text(), "run python tests/template_matrix.py"


def test_the_storys_target_trains_every_turn_of_a_long_chat():
    """Qwen3.6: earlier turns have no thought, the last one has an empty pair that the template wrote."""
    tokenizer = tokenizer_of("Qwen3.6")
    ids, mask = ChatRenderer(tokenizer)([user("a"), said("one"), user("b"), said("two", reasoning_content="hm")])
    parts = [
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
        ("one<|im_end|>", True),
        ("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n", False),
        ("hm\n</think>\n\ntwo<|im_end|>", True),
        ("\n", False),
    ]
    wanted = [(token, kept) for text, kept in parts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert list(zip(ids, mask, strict=True)) == wanted


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("model", ["Qwen3", "Qwen3.6", "GLM-4.5", "GLM-4.5 with tags around the whole turn"])
def test_an_empty_thought_is_never_supervised(model, kwargs):
    name = model.split(" ")[0]
    tokenizer, template = tokenizer_of(name), template_of(name)
    if "tags" in model:
        head, tail = template.split("<|assistant|>\n", 1)
        body, rest = tail.split("{%- elif m.role == 'tool' -%}", 1)
        opened = "<|assistant|>{% generation %}"
        template = f"{head}{opened}\n{body}{{% endgeneration %}}{{%- elif m.role == 'tool' -%}}{rest}"
    ids, mask = ChatRenderer(tokenizer, template, kwargs)([user("Why?"), said("So.")])
    whole = tokenizer.apply_chat_template([user("Why?"), said("So.")], tokenize=False, chat_template=template, **kwargs)
    written = "\nSo." if name == "GLM-4.5" else "So.<|im_end|>"
    at = whole.index(written)
    assert "think>" in whole[:at]
    parts = [(whole[:at], False), (written, True), (whole[at + len(written) :], False)]
    wanted = [(token, kept) for text, kept in parts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert list(zip(ids, mask, strict=True)) == wanted


def test_ids_by_hand_agree_with_the_tokenizer():
    tokenizer = tokenizer_of("Qwen2.5")
    assert tokenizer("aé", add_special_tokens=False)["input_ids"] == ids_of(tokenizer, "aé")
