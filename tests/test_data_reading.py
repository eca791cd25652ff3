"""Files of every supported kind, and clear errors for the broken ones."""

from __future__ import annotations

import gzip
import json

import pytest
from chat_tokenizer import UNSPLITTABLE, chat_tokenizer, ids_of

from dflash.data import DataReport, iter_conversations, load_conversations
from dflash.data.reading import iter_rows
from dflash.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "hello"},
    ]
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, **options):
    return load_conversations(path, chat_tokenizer(), 128, **options)


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, PARTS], ids=["messages", "sharegpt", "text parts"])
def test_each_layout_gives_the_same_ids(tmp_path, row):
    conversations, report = load(write(tmp_path / "a.jsonl", [row]))
    tokenizer = chat_tokenizer()
    text = "<|begin|>user\nhi<|end|>\n<|begin|>assistant\nhello<|end|>\n"
    assert conversations[0].input_ids == ids_of(tokenizer, text)
    assert report.supervised == len("hello") + 1


def parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pyarrow.Table.from_pylist(rows), path)


def dataset_folder(path, rows):
    """What `datasets` writes with save_to_disk: an Arrow stream and a state that lists it."""
    pyarrow = pytest.importorskip("pyarrow")
    path.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as out:
        with pyarrow.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")


def test_parquet_arrow_gzip_json_and_folders_give_the_rows_of_the_jsonl(tmp_path):
    rows = [CHAT, SHAREGPT["conversations"] and {"messages": [*CHAT["messages"], *CHAT["messages"]]}]
    wanted = [item.input_ids for item in load(write(tmp_path / "a.jsonl", rows))[0]]
    parquet(tmp_path / "a.parquet", rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    dataset_folder(tmp_path / "one", rows)
    dataset_folder(tmp_path / "dict" / "train", rows)
    (tmp_path / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    (tmp_path / "parts").mkdir()
    for number, row in enumerate(rows):
        write(tmp_path / "parts" / f"{number}.jsonl", [row])
    for name in ("a.parquet", "a.jsonl.gz", "a.json", "one", "dict", "parts"):
        assert [item.input_ids for item in load(tmp_path / name)[0]] == wanted, name
    both = [tmp_path / "a.jsonl", tmp_path / "parts"]
    for several in (both, ",".join(map(str, both))):
        assert [item.input_ids for item in load(several)[0]] == wanted * 2
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        load(tmp_path / "dict", split="test")


def test_a_broken_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n" + '{"messages": [\n' + json.dumps(CHAT) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl line 3 is not valid JSON"):
        load(path)


def test_a_line_that_is_no_object_and_bad_utf8_are_named(tmp_path):
    with pytest.raises(DataError, match=r"line 2 holds a list; wanted one JSON object"):
        load(write(tmp_path / "a.jsonl", [CHAT, [1]]))
    (tmp_path / "b.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 1 is not valid JSON"):
        load(tmp_path / "b.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_damaged_archive_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(DataError, match=f"{name} cannot be read .*; is it a whole"):
        load(tmp_path / name)


def test_an_empty_file_and_a_missing_one(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="is empty; wanted at least one"):
        load(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "b.jsonl")
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(DataError, match="unknown ending; wanted .jsonl"):
        load(tmp_path / "c.txt")
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match="holds no file ending in"):
        load(tmp_path / "d")


def test_no_assistant_turn_is_an_error_alone_and_counted_beside_others(tmp_path):
    lone = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(
        DataError, match=r"(?s)none of the 1 conversations .* can be used:\n  no assistant turn +1\n.*a\.jsonl line 1"
    ):
        load(write(tmp_path / "a.jsonl", [lone]))
    conversations, report = load(
        write(
            tmp_path / "b.jsonl",
            [
                lone,
                CHAT,
                {"text": "x"},
                {"messages": [{"role": "narrator", "content": "x"}]},
                {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": [{"type": "image"}]}]},
            ],
        ),
        max_skipped=1.0,
    )
    assert len(conversations) == 1 and conversations[0].source_index == 1
    assert report.rows == 5 and report.skipped == {
        "no assistant turn": 1,
        "no messages, conversations or token ids": 1,
        "unknown role 'narrator'": 1,
        "content that is not text": 1,
    }
    assert ["unknown", "role", "'narrator'", "1"] in [line.split() for line in report.table().splitlines()]


def test_chats_that_a_template_cannot_split_are_counted_and_alone_name_the_template(tmp_path):
    path = write(tmp_path / "a.jsonl", [CHAT, CHAT])
    with pytest.raises(DataError, match=r"(?s)cannot be split at an assistant turn +2\n.*a\.jsonl line 1\n"):
        load_conversations(path, chat_tokenizer(UNSPLITTABLE), 128)
    write(path, [CHAT, {"prompt_ids": [9, 9], "response_ids": [8, 8, 2]}])
    conversations, report = load_conversations(path, chat_tokenizer(UNSPLITTABLE), 128, max_skipped=0.5)
    assert len(conversations) == 1 and report.skipped == {"the chat template cannot be split at an assistant turn": 1}


def test_truncation_and_short_answers_are_counted(tmp_path):
    def row(prompt, response):
        return {"prompt_ids": [7] * prompt, "response_ids": [8] * response}

    path = write(tmp_path / "a.jsonl", [row(4, 10), row(4, 20), row(20, 5), row(4, 1), row(4, 2)])
    conversations, report = load_conversations(path, chat_tokenizer(), 16, block_size=8)
    assert [sum(item.loss_mask) for item in conversations] == [10, 12, 2]
    assert all(len(item) <= 16 for item in conversations)
    assert report.truncated == 1 and report.short_answers == 1 and report.conversations == 3
    assert report.skipped == {"no answer left after truncation": 1, "answer too short for a block": 1}
    assert report.tokens == 14 + 16 + 6 and report.supervised_share == pytest.approx(24 / 36)


def test_rows_are_streamed_not_read_at_once(tmp_path):
    path = write(tmp_path / "a.jsonl", [CHAT] * 3)
    with open(path, "a") as out:
        out.write("not json\n")
    rows = iter_rows(path)
    assert next(rows)[1] == CHAT  # a reader that loads the whole file would have met the broken line
    report = DataReport("a")
    stream = iter_conversations(path, chat_tokenizer(), 64, report)
    next(stream)
    assert report.rows == 1


def test_the_report_as_a_table(tmp_path):
    _, report = load(write(tmp_path / "a.jsonl", [CHAT] * 3 + [{"x": 1}]), max_skipped=0.25)
    edges, counts = report.histogram()
    assert sum(counts) == 3 and edges[0] <= report.longest
    for text in ("conversations", "supervised", "truncated", "skipped", "no messages", "a.jsonl line 4"):
        assert text in report.table()
