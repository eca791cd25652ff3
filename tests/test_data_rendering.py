"""The loss mask covers exactly what the assistant wrote and its end token (reports: marin#7237, verl#7322)."""

from __future__ import annotations

import pytest
from chat_tokenizer import (
    CHATML,
    NO_END,
    NO_PROMPT,
    TAGGED,
    TAGS_AROUND_ALL,
    TAGS_AROUND_NOTHING,
    THINKING,
    UNSPLITTABLE,
    chat_tokenizer,
    ids_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import ChatRenderer, UnusableRow, chat_of
from dflash.data.spans import Rendering
from dflash.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def answer(text, thought=None):
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def pieces(tokenizer, *parts):
    """Oracle: `(text, written by the assistant)` parts -> ids and mask, each part tokenized by hand."""
    ids, mask = [], []
    for text, written in parts:
        part = ids_of(tokenizer, text)
        ids += part
        mask += [written] * len(part)
    return ids, mask


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["stock", "generation tags"])
def test_one_turn_is_the_answer_plus_its_end_token(template):
    tokenizer = chat_tokenizer(template)
    wanted = pieces(
        tokenizer, ("<|begin|>user\nHow?<|end|>\n<|begin|>assistant\n", False), ("Like so.<|end|>", True), ("\n", False)
    )
    assert ChatRenderer(tokenizer)([user("How?"), answer("Like so.")]) == wanted


def test_every_turn_is_marked_and_an_answer_that_echoes_its_question_is_not_confused():
    tokenizer = chat_tokenizer()
    chat = [{"role": "system", "content": "ok"}, user("ok"), answer("ok"), user("assistant"), answer("assistant")]
    wanted = pieces(
        tokenizer,
        ("<|begin|>system\nok<|end|>\n<|begin|>user\nok<|end|>\n<|begin|>assistant\n", False),
        ("ok<|end|>", True),
        ("\n<|begin|>user\nassistant<|end|>\n<|begin|>assistant\n", False),
        ("assistant<|end|>", True),
        ("\n", False),
    )
    assert ChatRenderer(tokenizer)(chat) == wanted


def test_thinking_chat_equals_the_whole_render_and_marks_only_what_is_in_it():
    tokenizer = chat_tokenizer(THINKING)
    chat = [
        user("a"),
        answer("one", "first thought"),
        user("b"),
        answer("two", "one more"),
        user("c"),
        answer("three", "three or four"),
    ]
    ids, mask = ChatRenderer(tokenizer)(chat)
    assert (ids, mask) == pieces(
        tokenizer,
        ("<|begin|>user\na<|end|>\n<|begin|>assistant\n", False),
        ("one<|end|>", True),
        ("\n<|begin|>user\nb<|end|>\n<|begin|>assistant\n", False),
        ("two<|end|>", True),
        ("\n<|begin|>user\nc<|end|>\n<|begin|>assistant\n", False),
        ("<think>\nthree or four\n</think>\n\nthree<|end|>", True),
        ("\n", False),
    )
    assert ids == tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"]


def test_an_empty_thought_that_the_template_puts_in_is_not_the_assistants():
    tokenizer = chat_tokenizer(THINKING)
    assert ChatRenderer(tokenizer)([user("a"), answer("b")]) == pieces(
        tokenizer,
        ("<|begin|>user\na<|end|>\n<|begin|>assistant\n<think>\n\n</think>\n\n", False),
        ("b<|end|>", True),
        ("\n", False),
    )


def test_a_thought_inside_the_content_is_marked_with_the_answer():
    tokenizer = chat_tokenizer()
    assert ChatRenderer(tokenizer)([user("a"), answer("<think>b</think>b")]) == pieces(
        tokenizer,
        ("<|begin|>user\na<|end|>\n<|begin|>assistant\n", False),
        ("<think>b</think>b<|end|>", True),
        ("\n", False),
    )


def test_a_template_without_generation_prompt_does_not_put_the_header_into_the_mask():
    tokenizer = chat_tokenizer(NO_PROMPT)
    assert ChatRenderer(tokenizer)([user("a"), answer("assistant")]) == pieces(
        tokenizer, ("<|begin|>user\na<|end|>\n<|begin|>assistant\n", False), ("assistant<|end|>", True), ("\n", False)
    )


def test_a_template_without_end_token_marks_the_answer_alone():
    tokenizer = chat_tokenizer(NO_END)
    assert ChatRenderer(tokenizer)([user("a"), answer("b"), user("c"), answer("d")]) == pieces(
        tokenizer,
        ("user: a\nassistant: ", False),
        ("b", True),
        ("\nuser: c\nassistant: ", False),
        ("d", True),
        ("\n", False),
    )


@pytest.mark.parametrize(("template", "kind"), [(TAGS_AROUND_NOTHING, "no token"), (TAGS_AROUND_ALL, "every token")])
def test_a_constant_mask_is_an_error_that_names_the_template(template, kind):
    renderer = ChatRenderer(chat_tokenizer(template))
    with pytest.raises(DataError, match=f"(?s)chat template of .*marks {kind} of a chat"):
        renderer([user("a"), answer("b")])


def test_a_template_that_cannot_be_split_refuses_the_chat_instead_of_masking_wrongly():
    with pytest.raises(UnusableRow, match="cannot be split"):
        ChatRenderer(chat_tokenizer(UNSPLITTABLE))([user("a"), answer("b")])


@pytest.mark.parametrize("tags", [True, False])
def test_a_template_that_takes_parts_alone_leaves_the_answer_out_and_is_refused(tags):
    """Templates of some image models write `content[i].text`; of a plain text they write the end token alone."""
    inner = "{% for part in m['content'] if part['text'] %}{{ part['text'] }}{% endfor %}<|end|>"
    tagged = "{% generation %}" + inner + "{% endgeneration %}" if tags else inner
    template = CHATML.replace("{{ m['content'] }}<|end|>", tagged)
    with pytest.raises(UnusableRow, match="an answer that the chat template leaves out|refused it"):
        ChatRenderer(chat_tokenizer(template))([user("a"), answer("b")])


def test_no_chat_template_says_what_to_do():
    with pytest.raises(DataError, match="a base model has none; put one into its folder as chat_template.jinja, or give"):
        ChatRenderer(chat_tokenizer(None))


def test_tokenizers_without_offsets_give_the_same_mask():
    tokenizer = chat_tokenizer()
    renderer = ChatRenderer(tokenizer)
    chat = [user("a é"), answer("über b"), user("c"), answer("d")]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    spans = Rendering(renderer, chat_of({"messages": chat})).spans()
    assert renderer._mask_by_prefix(whole, spans) == renderer(chat)


texts = st.text(st.sampled_from("ab \n:é<|"), min_size=1, max_size=12).filter(lambda text: text.strip())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_any_chat_is_marked_as_put_together_by_hand(turns):
    tokenizer = chat_tokenizer()
    chat, parts = [], []
    for question, reply in turns:
        chat += [user(question), answer(reply)]
        parts += [
            (f"<|begin|>user\n{question}<|end|>\n<|begin|>assistant\n", False),
            (f"{reply}<|end|>", True),
            ("\n", False),
        ]
    assert ChatRenderer(tokenizer)(chat) == pieces(tokenizer, *parts)
