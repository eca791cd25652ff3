"""The same chat in every form gives the same ids; one bad row never ends a run and never passes in silence."""

from __future__ import annotations

import gzip
import json

import pytest
from chat_tokenizer import CHATML, TAGGED, chat_tokenizer, save_material
from template_matrix import tokenizer_of
from test_data_reading import dataset_folder, parquet
from test_regenerate import FakeServer, address, chat_target, rows_of, run, server  # noqa: F401

from dflash.data import ChatRenderer, UnusableRow, chat_of, load_conversations
from dflash.data.generate.prompts import read_prompts
from dflash.errors import DataError
from dflash.evaluate.whole import EvaluateOptions
from dflash.evaluate.whole import _prompts as evaluate_prompts
from dflash.launch.run import start_run, train_run
from dflash.runs.record import read_metrics
from dflash.train.prepare import prepare, prepare_data
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig
from dflash.views.dashboard.series import RunSeries
from dflash.views.report.story import findings

RAIN = {"type": "object", "properties": {"c": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "Does it rain?", "parameters": RAIN}}]
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "rain", "arguments": {"c": "Rome é"}}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "rain", "tool_call_id": "abcdef123", "content": "no"},
        {"role": "assistant", "content": "It is dry."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Look again."},
    ],
    "tools": TOOLS,
}


def changed(**turns):
    """The chat with some turns replaced."""
    messages = [turns.get(f"at{index}", message) for index, message in enumerate(CHAT["messages"])]
    return CHAT | {"messages": messages}


def call_as(**changes):
    return changed(at2={"role": "assistant", "content": "", **changes})


def filled(value, keys=("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content")):
    return value | {"messages": [dict.fromkeys(keys) | message for message in value["messages"]]}


TEXT = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
ROWS = {
    "openai": CHAT,
    "messages as text": CHAT | {"messages": json.dumps(CHAT["messages"]), "tools": json.dumps(TOOLS)},
    "tools as an object": CHAT | {"tools": TOOLS[0]},
    "tools as texts": CHAT | {"tools": [json.dumps(TOOLS[0])]},
    "functions": {"messages": CHAT["messages"], "functions": [TOOLS[0]["function"]]},
    "nulls": filled(CHAT),
    "calls as text": call_as(tool_calls=json.dumps([CALL])),
    "one call as an object": call_as(tool_calls=CALL),
    "a call as text": call_as(tool_calls=[json.dumps(CALL)]),
    "arguments as text": call_as(tool_calls=[CALL | {"function": CALL["function"] | {"arguments": TEXT}}]),
    "without function": call_as(tool_calls=[{"id": "abcdef123", **CALL["function"]}]),
    "parts": changed(at1={"role": "user", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}]}),
    "thinking": changed(at6={"role": "assistant", "content": "Yes.", "thinking": "Look again."}),
    "a system column": {"system": "Be brief.", "conversations": CHAT["messages"][1:], "tools": TOOLS},
    "sharegpt": {
        "system": "Be brief.",
        "tools": TOOLS,
        "conversations": [
            {"from": "human", "value": "Rain?"},
            {"from": "function_call", "value": json.dumps({"id": "abcdef123", **CALL["function"]})},
            {"from": "observation", "value": "no", "name": "rain", "tool_call_id": "abcdef123"},
            {"from": "gpt", "value": "It is dry."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "<think>\nLook again.\n</think>\n\nYes."},
        ],
    },
}
MODELS = ("Qwen3", "Qwen3.6", "Mistral Small 3.2", "GLM-4.5", "gpt-oss")


def ids_under(model, row):
    return ChatRenderer(tokenizer_of(model))(chat_of(row))


@pytest.mark.parametrize("model", MODELS)
def test_every_form_of_a_row_gives_the_same_ids(model):
    """OpenAI text arguments were quoted twice, flat calls and null columns broke, a system column was lost."""
    tokenizer = tokenizer_of(model)
    wanted = tokenizer.apply_chat_template(CHAT["messages"], tools=TOOLS, tokenize=False)
    for name, row in ROWS.items():
        if model in ("Mistral Small 3.2", "gpt-oss") and name == "sharegpt":
            continue  # these do not look for a thought inside the content
        ids, mask = ids_under(model, row)
        assert ids == tokenizer(wanted, add_special_tokens=False)["input_ids"], name
        assert mask == ids_under(model, CHAT)[1], name


def write_all(root):
    """The chat in a file of every kind."""
    line = json.dumps(CHAT)
    (root / "a.jsonl").write_text(line + "\n")
    (root / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\n")
    (root / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (root / "a.json").write_text(json.dumps([CHAT]))
    (root / "a.json.gz").write_bytes(gzip.compress(json.dumps([CHAT]).encode()))
    (root / "lines.json").write_text(line + "\n" + line + "\n")
    parquet(root / "a.parquet", [CHAT])
    dataset_folder(root / "saved", [CHAT])
    (root / "folder" / ".ipynb_checkpoints").mkdir(parents=True)
    for place in (root / "folder", root / "folder" / ".ipynb_checkpoints"):
        (place / "a.jsonl").write_text(line + "\n")
    (root / "folder" / ".hidden.jsonl").write_text("{")
    for name, row in ROWS.items():
        (root / f"{name.replace(' ', '_')}.jsonl").write_text(json.dumps(row) + "\n")
    return [
        "a.jsonl",
        "bom.jsonl",
        "a.jsonl.gz",
        "a.json",
        "a.json.gz",
        "lines.json",
        "a.parquet",
        "saved",
        "folder",
        "nulls.jsonl",
        "sharegpt.jsonl",
    ]


def test_every_file_gives_the_same_ids_as_data_and_the_same_question_as_prompts(tmp_path):
    """Data and prompts had a reader each: prompts refused gz and ShareGPT, and took a byte order mark for text."""
    tokenizer = tokenizer_of("Qwen3")
    wanted, question = ids_under("Qwen3", CHAT)[0], ChatRenderer(tokenizer).prompt_ids
    first = None
    for name in write_all(tmp_path):
        conversations, report = load_conversations(tmp_path / name, tokenizer, 4096)
        assert [item.input_ids for item in conversations] == [wanted] * (2 if name == "lines.json" else 1), name
        assert not report.skipped
        chats = [chat for _, chat in read_prompts(tmp_path / name).chats]
        first = first or question(chats[0])
        assert [question(chat) for chat in chats] == [first] * len(conversations), name
    text = tokenizer.apply_chat_template(CHAT["messages"][:-1], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert first == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_prompts_file_of_lines_may_have_a_byte_order_mark_and_be_packed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n{"prompt": [{"role": "user", "content": "two"}]}\n')
    (tmp_path / "plain").write_text("one\ntwo\n")
    for name in ("a.txt", "b.txt.gz", "c.jsonl", "plain"):
        assert [chat.last_question for _, chat in read_prompts(tmp_path / name).chats] == ["one", "two"]


def test_a_table_is_not_taken_for_prompts_line_by_line(tmp_path):
    for name in ("a.csv", "a.xlsx", "a.jsonl.zst"):
        (tmp_path / name).write_text("id,question\n1,why\n")
        with pytest.raises(DataError, match="has an unknown ending; wanted .jsonl"):
            read_prompts(tmp_path / name)


FIELDS = (
    "{% for m in messages %}<|begin|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}"
    "{{ ' ' + m.tool_call_id if m.tool_call_id else '' }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} ARGS]{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
ARGUMENTS = {
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
    "tojson": "{{ c.function.arguments | tojson }}",
    "text alone": "{{ '' + c.function.arguments }}",
    "printed": "{{ c.function.arguments }}",
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_names_ids_and_arguments_reach_the_template(kind):
    tokenizer = chat_tokenizer(FIELDS.replace("ARGS", ARGUMENTS[kind]))
    rows = [ROWS["openai"], ROWS["arguments as text"]]
    rows = [
        row | {"messages": [*row["messages"][:1], {"role": "user", "name": "Ann", "content": "Hi"}, *row["messages"][2:]]}
        for row in rows
    ]
    found = [tokenizer.decode(ChatRenderer(tokenizer)(chat_of(row))[0]) for row in rows]
    written = {"items": "c=Rome é"}.get(kind, '{"c": "Rome é"}')
    assert found[0] == found[1]
    for part in ("user Ann\nHi", "tool rain abcdef123\nno", f"[abcdef123 rain {written}]"):
        assert part in found[0]


STRICT = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    1,
)
GOOD = {"messages": [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes yes yes"}]}


def answered(**turn):
    return {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "so so so", **turn}]}


BAD = {
    "a line that is no JSON": '{"messages": [',
    "a line that is no object": "[1, 2]",
    "a line that is not UTF-8 text": b'{"messages": "\xff"}',
    "no messages, conversations or token ids": {"text": "x"},
    "messages that are no JSON": {"messages": "hello"},
    "a turn that is no object": {"messages": ["hi"]},
    "unknown role 'narrator'": {"messages": [{"role": "narrator", "content": "x"}]},
    "no assistant turn": {"messages": GOOD["messages"][:1]},
    "content that is not text": answered(content=[{"type": "image"}]),
    "empty answer": answered(content=""),
    "text that is no valid Unicode": json.dumps(answered(content="half \ud83d yes")),
    "tool_calls that are no JSON": answered(tool_calls="call(x)"),
    "a tool call without a function's name": answered(tool_calls=[{"function": {"arguments": None}}]),
    "tool call arguments that are no JSON": answered(tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]),
    "tool call arguments that are no object": answered(tool_calls=[{"function": {"name": "f", "arguments": [1]}}]),
    "tool calls that the chat template does not write": answered(tool_calls=[CALL]),
    "tools that are no JSON": answered() | {"tools": "rain(c)"},
    "tools that are no objects": answered() | {"tools": [3]},
    "token ids that are no list of integers": {"prompt_ids": "1 2", "response_ids": [3, 4]},
    "token ids outside the vocabulary": {"prompt_ids": [1], "response_ids": [70, 49000]},
    "a loss_mask of another length": {"input_ids": [70, 71, 72], "loss_mask": [0, 1]},
    "a loss_mask that is no list": {"input_ids": [70, 71, 72], "loss_mask": 1},
    "the chat template refused it (no system)": {"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]]},
}


def as_line(row):
    return row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()


def mixed_file(path, good):
    """Good rows with one of each bad kind among them; the line of each bad one."""
    lines, at = [], {}
    for reason, row in BAD.items():
        lines += [json.dumps(GOOD | {"n": n}).encode() for n in range(good // len(BAD))]
        lines.append(as_line(row))
        at[reason] = len(lines)
    lines += [json.dumps(GOOD).encode()] * (good + len(BAD) - len(lines))
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return at


@pytest.mark.parametrize("tags", [False, True], ids=["stock", "generation tags"])
def test_a_thousand_good_rows_and_one_of_each_bad_kind(tmp_path, tags):
    strict = (
        STRICT
        if not tags
        else STRICT.replace(CHATML.split("{% for m in messages %}")[1], TAGGED.split("{% for m in messages %}")[1])
    )
    at = mixed_file(tmp_path / "a.jsonl", 1000)
    conversations, report = load_conversations(tmp_path / "a.jsonl", chat_tokenizer(strict), 128)
    assert len(conversations) == 1000 and report.rows == 1000 + len(BAD)
    assert report.skipped == dict.fromkeys(BAD, 1)
    table = report.table()
    for reason, line in at.items():
        assert reason in table and f"a.jsonl line {line}" in report.places[reason][0]


def test_a_run_on_such_a_file_ends_well_and_its_record_names_each_bad_row(tmp_path):
    save_material(tmp_path, chat_target().model, chat_tokenizer(STRICT))
    at = mixed_file(tmp_path / "data.jsonl", 1000)
    rows = [{"messages": [{"role": "user", "content": f"say {n}"}, GOOD["messages"][1]]} for n in range(4)]
    with open(tmp_path / "data.jsonl", "a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig.from_parameters(
        target=str(tmp_path / "target"), data=str(tmp_path / "data.jsonl"), pack_length=128, num_captured=1, block_size=4,
        max_anchors=8, drafter_layers=1, held_out=1, steps=2, eval_every=0, gpus="cpu", features="online",
    )  # fmt: skip
    run = start_run(config, tmp_path / "runs")
    assert train_run(run, config).status == "completed"
    logged = "\n".join(record["message"] for record in read_metrics(run.path)[0] if record["kind"] == "log")
    for reason, line in at.items():
        assert reason in logged and f"data.jsonl line {line}" in logged
    series = RunSeries(run.path)
    series.follow()
    told = f"{len(BAD)} of the {len(BAD) + 1004:,} rows of {tmp_path / 'data.jsonl'} were left out"
    assert any(told in finding.text for finding in findings(series, "completed"))


def test_too_many_bad_rows_stop_the_run_with_the_table_before_the_target_is_loaded(tmp_path, monkeypatch):
    save_material(tmp_path, chat_target().model, chat_tokenizer(STRICT))
    at = mixed_file(tmp_path / "data.jsonl", 100)
    monkeypatch.setattr("dflash.train.prepare.load_target", lambda *a, **k: pytest.fail("the target was loaded"))
    options = dict(target=str(tmp_path / "target"), data=str(tmp_path / "data.jsonl"), pack_length=128, num_captured=1)
    with pytest.raises(DataError) as error:
        prepare(resolve(RunConfig.from_parameters(**options)))
    assert f"{len(BAD)} of the {100 + len(BAD)} conversations" in str(error.value) and "at most 10% may be" in str(
        error.value
    )
    assert all(reason in str(error.value) and f"line {line}" in str(error.value) for reason, line in at.items())
    more = [{"messages": [{"role": "user", "content": f"say {n}"}, GOOD["messages"][1]]} for n in range(3)]
    with open(tmp_path / "data.jsonl", "a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in more))
    assert (
        prepare_data(resolve(RunConfig.from_parameters(**options, held_out=1, max_skipped=0.5))).report.conversations == 103
    )


def test_an_empty_answer_outside_its_generation_tag_is_counted():
    """One such row was a template error that ended the run."""
    template = TAGGED.replace("{{ m['content'] }}<|end|>{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}<|end|>")
    with pytest.raises(UnusableRow, match="empty answer"):
        ChatRenderer(chat_tokenizer(template))(chat_of(answered(content=" ")))


# -- the same in every command that renders ------------------------------------------------------------------------
def prompts_with_a_bad_one(path):
    system = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    lines = [json.dumps({"prompt": f"question {n}"}) for n in range(18)]
    path.write_text("\n".join([*lines[:5], json.dumps(system), *lines[5:], '{"prompt": "half \\ud83d"}']) + "\n")
    return path


def test_regenerate_and_evaluate_leave_out_what_the_template_refuses(tmp_path, capsys):
    target = chat_target()
    target.tokenizer.chat_template = STRICT
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    prompts = prompts_with_a_bad_one(tmp_path / "p.jsonl")
    run("--target", tmp_path / "target", "--prompts", prompts, "--out", tmp_path / "o.jsonl", "--max-new-tokens", 3)
    assert len(rows_of(tmp_path / "o.jsonl")) == 18
    told = capsys.readouterr().err
    assert "p.jsonl line 6 was refused by the chat template: no system" in told and "p.jsonl line 20" in told
    options = EvaluateOptions(drafter="x", prompts=str(prompts))
    found, warnings = evaluate_prompts(options, target, [], read_prompts(prompts))
    assert len(found) == 18 and "p.jsonl line 6 was refused" in warnings[0]


def test_regenerate_keeps_the_tool_calls_of_the_history(tmp_path, server):  # noqa: F811
    (tmp_path / "p.jsonl").write_text(json.dumps(ROWS["arguments as text"]) + "\n")
    run("--endpoint", address(server), "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl")
    sent = server.seen[0]
    assert sent["tools"] == TOOLS
    assert json.loads(sent["messages"][2]["tool_calls"][0]["function"]["arguments"]) == CALL["function"]["arguments"]
    assert sent["messages"][3]["tool_call_id"] == "abcdef123"
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert row["tools"] == TOOLS and row["messages"][2]["tool_calls"][0]["function"] == CALL["function"]
    run("--endpoint", address(server), "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl")
    assert len(rows_of(tmp_path / "o.jsonl")) == 1  # known again


def test_a_server_that_refuses_one_prompt_or_answers_half_an_emoji_costs_that_one_alone(
    tmp_path,
    server,  # noqa: F811
    monkeypatch,
    capsys,
):
    def post(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        if text == "question 3":
            return self._send(400, {"error": "too long"})
        answer = "half \ud83d" if text == "question 5" else text.upper()
        self._send(200, {"choices": [{"message": {"content": answer}, "finish_reason": "stop"}]})

    monkeypatch.setattr(FakeServer, "do_POST", post)
    (tmp_path / "p.txt").write_text("".join(f"question {n}\n" for n in range(8)))
    run("--endpoint", address(server), "--prompts", tmp_path / "p.txt", "--out", tmp_path / "o.jsonl")
    assert sorted(row["messages"][1]["content"] for row in rows_of(tmp_path / "o.jsonl")) == [
        f"QUESTION {n}" for n in (0, 1, 2, 4, 6, 7)
    ]
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["unanswered"] == 2 and summary["conversations"] == 6 and summary["remaining"] == 0
