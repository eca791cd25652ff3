"""Files and rows as people really have them: read like the plain form, or left out, counted and named; never silent."""

from __future__ import annotations

import datetime
import gzip
import json
from dataclasses import replace

import pytest
from chat_tokenizer import CHATML, TAGGED, THINKING, chat_tokenizer, ids_of, save_material
from template_matrix import said, tokenizer_of, user
from test_data_reading import parquet
from test_regenerate import chat_target

from dflash.data import ChatRenderer, UnusableRow, chat_of, load_conversations, question_of
from dflash.data.generate.prompts import prompts_in, read_prompts
from dflash.errors import DataError
from dflash.train.prepare import prepare_data
from dflash.train.resolve import resolve, settle_run
from dflash.train.settings import RunConfig

GOOD = {"messages": [user("say é"), said("yes yes")]}
LINE = json.dumps(GOOD, ensure_ascii=False).encode()
WANTED = "<|begin|>user\nsay é<|end|>\n<|begin|>assistant\nyes yes<|end|>\n"


def texts(path, **options):
    tokenizer = chat_tokenizer()
    conversations, report = load_conversations(path, tokenizer, 256, **options)
    return [tokenizer.decode(item.input_ids) for item in conversations], report


@pytest.mark.parametrize(
    ("name", "content"),
    {
        "a.ndjson": LINE + b"\n",
        "A.JSONL": LINE + b"\r\n\r\n",
        "A.JSONL.GZ": gzip.compress(LINE),
        "list.jsonl": json.dumps([GOOD]).encode(),
        "indented.jsonl": b"\xef\xbb\xbf\r\n" + json.dumps([GOOD], indent=1).encode(),
        "list.jsonl.gz": gzip.compress(json.dumps([GOOD], indent=1).encode()),
        "twice_marked.jsonl": b"\xef\xbb\xbf\xef\xbb\xbf" + LINE,
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_endings_and_lists_are_read_the_same_as_data_and_as_prompts(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name)[0] == [WANTED]
    assert [chat.last_question for _, chat in read_prompts(tmp_path / name).chats] == ["say é"]


def test_what_a_crash_or_another_encoding_leaves_is_no_prompt(tmp_path):
    """Zero bytes after the last line, or lines of UTF-16, were taken for questions."""
    (tmp_path / "a.jsonl").write_bytes((LINE + b"\n") * 20 + b"\0" * 64)
    (tmp_path / "b.txt").write_bytes("".join(f"question {n}\n" for n in range(20)).encode("utf-16"))
    assert len(texts(tmp_path / "a.jsonl")[0]) == len(read_prompts(tmp_path / "a.jsonl").chats) == 20
    with pytest.raises(DataError, match="(?s)none of the 21 prompts.*line 2 is not UTF-8 text.*save the file as UTF-8"):
        read_prompts(tmp_path / "b.txt")


def test_a_readme_beside_data_is_no_prompt_and_a_folder_of_texts_is(tmp_path):
    (tmp_path / "README.md").write_text("# What this is\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert [chat.last_question for _, chat in read_prompts(tmp_path).chats] == ["one", "two"]
    (tmp_path / "a.jsonl").write_bytes(LINE)
    assert [chat.last_question for _, chat in read_prompts(tmp_path).chats] == ["say é"]


def test_a_file_nested_too_deep_and_one_without_prompts_are_named(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match="a.json cannot be read .maximum recursion"):
        texts(tmp_path / "a.json")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="there are no prompts in .*empty.jsonl"):
        read_prompts(tmp_path / "empty.jsonl")


def test_a_file_of_prompts_to_leave_out_that_holds_none_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "say e"}\n{"messages": [\n')
    with pytest.raises(DataError, match="a.jsonl holds no conversation whose prompt could be left out"):
        prompts_in(tmp_path / "a.jsonl")


def test_copies_of_a_conversation_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes((LINE + b"\n") * 3)
    found, report = texts(f"{tmp_path / 'a.jsonl'},{tmp_path / 'a.jsonl'}")
    assert len(found) == 6 and "note: 5 with the ids of an earlier conversation" in report.table()


def test_rows_left_out_of_the_held_out_file_are_said_too(tmp_path):
    save_material(tmp_path, chat_target().model, chat_tokenizer())
    lines = (tmp_path / "data.jsonl").read_text()
    (tmp_path / "held.jsonl").write_text(lines + '{"messages": [\n')
    options = dict(target=str(tmp_path / "target"), data=str(tmp_path / "data.jsonl"), pack_length=128, num_captured=1)
    data = prepare_data(
        resolve(RunConfig.from_parameters(**options, held_out=2, held_out_data=str(tmp_path / "held.jsonl")))
    )
    assert "held.jsonl line 25 is not valid JSON" in data.report.table()


# -- forms of a row ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row",
    {
        "null beside value": {
            "conversations": [
                {"role": None, "from": "human", "content": None, "value": "say é"},
                {"role": None, "from": "gpt", "content": None, "value": "yes yes"},
            ]
        },
        "roles with capitals and spaces": {
            "messages": [{"role": "User", "content": "say é"}, {"role": " assistant ", "content": "yes yes"}]
        },
        "a list for each field": {"messages": {"role": ["user", "assistant"], "content": ["say é", "yes yes"]}},
        "parts of the responses API": {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": "say é"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "yes yes"}]},
            ]
        },
        "empty messages beside conversations": {
            "messages": [],
            "conversations": [{"from": "human", "value": "say é"}, {"from": "gpt", "value": "yes yes"}],
        },
    }.items(),
    ids=lambda item: item[0],
)
def test_these_forms_are_the_plain_one(row):
    tokenizer = chat_tokenizer()
    assert ChatRenderer(tokenizer)(chat_of(row[1])) == ChatRenderer(tokenizer)(chat_of(GOOD))


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
def test_a_system_column_is_the_first_turn_whatever_it_is_called(column):
    for text in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert chat_of({column: text, **GOOD}).turns[0].content == "Be brief."
        assert question_of({column: text, "prompt": "say é"}).turns[0].content == "Be brief."
    with pytest.raises(UnusableRow, match="content that is not text"):
        chat_of({column: {"a": 1}, **GOOD})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "text": "say é"}, said("yes")]}, "has a user turn that holds role, text"),
        ({"instruction": "a", "output": "b"}, "holds instruction, output; wanted `messages`"),
        ({"messages": GOOD["messages"], "chat_template_kwargs": [1]}, "chat_template_kwargs that are no object"),
    ],
)
def test_what_would_render_without_its_text_is_left_out(row, reason):
    with pytest.raises(UnusableRow) as error:
        chat_of(row)
    assert reason in error.value.detail


def test_sharegpt_calls_and_results_by_their_other_names():
    call = json.dumps({"name": "rain", "arguments": {"c": "a"}})

    def ids(calling, told):
        turns = [("human", "Rain?"), (calling, call), (told, "no"), ("gpt", "dry")]
        row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        return ChatRenderer(tokenizer_of("Qwen3"))(chat_of(row))

    assert ids("tool_call", "tool_response") == ids("tool_call", "tool_result") == ids("function_call", "observation")


def test_a_row_says_what_its_template_gets():
    """TRL's column; what the caller passes goes before it."""
    row = GOOD | {"chat_template_kwargs": {"word": "W", "null": None}}
    template = "{{ word or '' }}" + CHATML
    for kwargs, wanted in (({}, "W"), ({"word": "V"}, "V")):
        tokenizer = chat_tokenizer(template)
        renderer = ChatRenderer(tokenizer, template_kwargs=kwargs)
        assert tokenizer.decode(renderer(chat_of(row))[0]).startswith(wanted + "<|begin|>user")
        assert tokenizer.decode(renderer.prompt_ids(question_of(row))).startswith(wanted + "<|begin|>user")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}, {"train": 0.0}])
@pytest.mark.parametrize("template", [CHATML, TAGGED, THINKING], ids=["stock", "generation tags", "thinking"])
def test_an_answer_that_is_not_to_be_learnt_is_not_supervised(template, mark):
    """OpenAI's `weight`; it was trained on all the same."""
    tokenizer = chat_tokenizer(template)
    turns = [user("a"), said("bad", **mark), user("b"), said("good", weight=1), user("c"), said("worse", **mark)]
    ids, mask = ChatRenderer(tokenizer)(chat_of({"messages": turns}))
    assert [token for token, kept in zip(ids, mask, strict=True) if kept] == ids_of(tokenizer, "good<|end|>")
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    assert ids == ChatRenderer(tokenizer)(chat_of({"messages": plain}))[0]


def test_a_run_that_goes_on_another_day_has_the_ids_it_began_with(tmp_path, monkeypatch):
    """gpt-oss, Mistral and Llama 3.2 write the date; prompts are held out by their ids, so the next day others were."""
    save_material(tmp_path, chat_target().model, chat_tokenizer("{{ strftime_now('%d %b %Y') }}\n" + CHATML))
    config = RunConfig.from_parameters(
        target=str(tmp_path / "target"), data=str(tmp_path / "data.jsonl"), pack_length=128, num_captured=1, held_out=4
    )

    def found(resolved):
        data = prepare_data(resolved)
        return [item.input_ids for item in data.conversations], [item.input_ids for item in data.held_out]

    (tmp_path / "run").mkdir()
    began = settle_run(tmp_path / "run", config)
    monkeypatch.setattr("dflash.train.resolve.date", Tomorrow)
    again = settle_run(tmp_path / "run", replace(config, train=replace(config.train, steps=7)))
    assert found(settle_run(tmp_path / "run", config)) == found(again) == found(began)
    other = found(resolve(config))
    assert other[0] != found(began)[0] and chat_tokenizer().decode(other[0][0]).startswith("31 Dec 2099\n<|begin|>user")


class Tomorrow(datetime.date):
    @classmethod
    def today(cls):
        return cls(2099, 12, 31)


def test_a_chat_that_begins_with_an_answer_says_so():
    with pytest.raises(UnusableRow, match="a chat that begins with an answer"):
        ChatRenderer(chat_tokenizer())(chat_of({"messages": [said("hi"), *GOOD["messages"]]}))


def test_a_turn_that_a_template_leaves_out_is_noted():
    renderer = ChatRenderer(tokenizer_of("gpt-oss"))
    renderer(chat_of({"messages": [*GOOD["messages"], {"role": "system", "content": "later"}, *GOOD["messages"]]}))
    assert renderer.notes == {"a user or system turn whose text the chat template leaves out or changes": 1}


@pytest.mark.parametrize("mask", [["0", "1", "1"], [-100, 71, 72], [[0], [1], [1]], [0, 0.5, 1], [None, 1, 1]])
def test_a_loss_mask_of_other_values_is_left_out(tmp_path, mask):
    """Each of these counted as true, so the prompt was trained on."""
    rows = [GOOD, {"input_ids": [70, 71, 72], "loss_mask": mask}, {"prompt_ids": [70, 71], "response_ids": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, report = texts(tmp_path / "a.jsonl", max_skipped=1.0)
    assert found == [WANTED] and report.unusable == 2
    assert report.skipped == {"a loss_mask of other values than 0 and 1": 1, "token ids without an answer": 1}


def test_a_table_with_times_and_icons_in_its_turns_is_read(tmp_path):
    """Icons of terminal fonts lie where the marks of the renderer lay."""
    now = datetime.datetime(2026, 1, 2)
    turns = [{**user("say \U000f0001"), "at": now}, {**said("yes \U000f0001"), "at": None}]
    parquet(tmp_path / "a.parquet", [{"messages": turns}])
    assert texts(tmp_path / "a.parquet")[0] == [
        "<|begin|>user\nsay \U000f0001<|end|>\n<|begin|>assistant\nyes \U000f0001<|end|>\n"
    ]
    (chat,) = [chat for _, chat in read_prompts(tmp_path / "a.parquet").chats]
    assert json.loads(json.dumps(chat.messages()))[0]["at"] == str(now)
