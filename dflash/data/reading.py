"""Read conversations row by row: JSONL (plain or .gz), Parquet, Arrow folders of `datasets`, folders of
those.

Rows are yielded one at a time, so that a file may be larger than memory. Each row comes with a place
("file.jsonl line 7") for messages.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from dflash.errors import DataError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class UnusableRow(Exception):
    """A readable row that no training conversation can be made of; its text is the reason that is counted."""


def data_files(path: str | Path | list, split: str = "train") -> list[Path]:
    """The files that `path` stands for, in a fixed order; several paths as a list or with commas between.

    A folder may hold data files, be written by `datasets` (`save_to_disk`), or hold one such folder per split.
    """
    if isinstance(path, str) and "," in path and not Path(path).exists():
        path = [part.strip() for part in path.split(",") if part.strip()]
    if isinstance(path, list | tuple):
        return [file for part in path for file in data_files(part, split)]
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"data file {path} does not exist")
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise DataError(f"data file {path} has an unknown ending; wanted {', '.join(_SUFFIXES)}")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DataError(f"dataset folder {path} has no split '{split}'; it has {', '.join(splits)}")
        path = path / split
    if (path / "state.json").is_file():  # one `datasets` split: the state lists its parts in order
        return [path / part["filename"] for part in json.loads((path / "state.json").read_text())["_data_files"]]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES) and file.is_file())
    files = [file for file in files if file.name not in ("dataset_info.json", "state.json", "dataset_dict.json")]
    files = [file for file in files if not file.name.endswith(".meta.json")]
    if not files:
        raise DataError(f"data folder {path} holds no file ending in {', '.join(_SUFFIXES)}")
    return files


def iter_rows(path: str | Path | list, split: str = "train") -> Iterator[tuple[str, dict]]:
    """Yield `(place, row)`; a broken line stops with its number."""
    readers = {".parquet": _parquet_rows, ".arrow": _arrow_rows, ".json": _json_rows}
    for file in data_files(path, split):
        rows = readers.get(file.suffix, _jsonl_rows)(file)
        while True:
            try:
                item = next(rows, None)
            except DataError:
                raise
            except (ValueError, OSError, EOFError, zlib.error) as error:  # a damaged archive; pyarrow's errors are such
                raise DataError(f"{file} cannot be read ({error}); is it a whole {file.suffix} file?") from error
            if item is None:
                break
            yield item


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict]]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file} line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # JSON and encoding errors alike
                raise DataError(f"{place} is not valid JSON ({error}); repair or remove that line") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} holds a {type(row).__name__}; wanted one JSON object a line")
            yield place, row


def _json_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """A `.json` file holds one list (the usual ShareGPT download); it is read whole."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}); if it has one object a line, name it .jsonl") from error
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        if not isinstance(row, dict):
            raise DataError(f"{file} item {number} holds a {type(row).__name__}; wanted an object")
        yield f"{file} item {number}", row


def _pyarrow(file: Path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {file} needs the pyarrow package: pip install pyarrow") from error
    return pyarrow


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict]]:
    table = _pyarrow(file).parquet.ParquetFile(file)
    yield from _numbered(file, (row for batch in table.iter_batches(256) for row in batch.to_pylist()))


def _arrow_rows(file: Path) -> Iterator[tuple[str, dict]]:
    pyarrow = _pyarrow(file)
    with pyarrow.memory_map(str(file)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(source)
            reader = (table.get_batch(index) for index in range(table.num_record_batches))
        yield from _numbered(file, (row for batch in reader for row in batch.to_pylist()))


def _numbered(file: Path, rows: Iterator[dict]) -> Iterator[tuple[str, dict]]:
    for number, row in enumerate(rows, 1):
        yield f"{file} row {number}", row


def messages_of(row: dict) -> list[dict]:
    """OpenAI-style messages of a row, ShareGPT `conversations` turned into them.

    Reasoning is kept as `reasoning_content`. Raises UnusableRow where there is no text conversation.
    """
    turns = row.get("messages") or row.get("conversations") or row.get("conversation")
    if not isinstance(turns, list) or not turns:
        raise UnusableRow("no messages, conversations or token ids")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise UnusableRow("a turn that is no object")
        name = turn.get("role") or turn.get("from")
        role = _ROLES.get(str(name).lower())
        if role is None:
            raise UnusableRow(f"unknown role '{name}'")
        message = {"role": role, "content": _text(turn.get("content", turn.get("value")))}
        reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
        if role == "assistant" and isinstance(reasoning, str) and reasoning.strip():
            message["reasoning_content"] = reasoning
        if turn.get("tool_calls"):
            message["tool_calls"] = turn["tool_calls"]
        messages.append(message)
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRow("no assistant turn")
    return messages


def _text(content) -> str:
    """Message text; a list of parts is joined when every part is text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part.get("text") or "" for part in content)
    raise UnusableRow("content that is not text")
