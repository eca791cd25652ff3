"""Read a file row by row: JSONL (plain or .gz), JSON, Parquet, Arrow folders of `datasets`, folders of those, plain text.

Rows are yielded one at a time, so that a file may be larger than memory. Each row comes with a place
("file.jsonl line 7") for messages. A row that cannot be read comes as the `UnusableRow` that says why.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash.data.chat import UnusableRow
from dflash.errors import DataError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow")
_TEXT = (".txt", ".txt.gz", ".md")
Row = dict | UnusableRow


def data_files(path: str | Path | list, split: str = "train", text: bool = False) -> list[Path]:
    """The files that `path` stands for, in a fixed order; several paths as a list or with commas between.

    A folder may hold data files, be written by `datasets` (`save_to_disk`), or hold one such folder per split. Hidden
    files and folders in it are no data. `text` takes plain text too, also without an ending.
    """
    if isinstance(path, str) and "," in path and not Path(path).exists():
        path = [part.strip() for part in path.split(",") if part.strip()]
    if isinstance(path, list | tuple):
        return [file for part in path for file in data_files(part, split, text)]
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"data file {path} does not exist")
    if path.is_file():
        wanted = _SUFFIXES + (_TEXT if text else ())
        if not path.name.endswith(wanted) and (path.suffix or not text):
            raise DataError(f"data file {path} has an unknown ending; wanted {', '.join(wanted)}")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DataError(f"dataset folder {path} has no split '{split}'; it has {', '.join(splits)}")
        path = path / split
    if (path / "state.json").is_file():  # one `datasets` split: the state lists its parts in order
        return [path / part["filename"] for part in json.loads((path / "state.json").read_text())["_data_files"]]
    wanted = _SUFFIXES + (_TEXT if text else ())
    files = sorted(file for file in path.rglob("*") if file.name.endswith(wanted) and file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    files = [file for file in files if file.name not in ("dataset_info.json", "state.json", "dataset_dict.json")]
    files = [file for file in files if not file.name.endswith(".meta.json")]
    if not files:
        raise DataError(f"data folder {path} holds no file ending in {', '.join(wanted)}")
    return files


def iter_rows(path: str | Path | list, split: str = "train", text: bool = False) -> Iterator[tuple[str, Row]]:
    """Yield `(place, row)`. With `text`, a line that is no JSON object is a row with that line as its `prompt`."""
    readers = {".parquet": _parquet_rows, ".arrow": _arrow_rows, ".json": _json_rows, ".json.gz": _json_rows}
    for file in data_files(path, split, text):
        ending = next((ending for ending in readers if file.name.endswith(ending)), None)
        rows = readers[ending](file) if ending else _line_rows(file, text)
        try:
            yield from rows
        except DataError:
            raise
        except (ValueError, OSError, EOFError, zlib.error) as error:  # a damaged archive; pyarrow's errors are such
            raise DataError(f"{file} cannot be read ({error}); is it a whole {file.suffix} file?") from error


def _opened(file: Path):
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")


def _line_rows(file: Path, text: bool) -> Iterator[tuple[str, Row]]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file} line {number}", _line_row(line, text)


def _line_row(line: bytes, text: bool) -> Row:
    try:
        content = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        wanted = "is not UTF-8 text; wanted one prompt a line, or JSONL" if text else f"is not valid JSON ({error})"
        return UnusableRow("a line that is not UTF-8 text", wanted)
    if text and not content.startswith("{"):
        return {"prompt": content}
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        return UnusableRow("a line that is no JSON", f"is not valid JSON ({error})")
    if not isinstance(row, dict):
        return UnusableRow("a line that is no object", f"holds a {type(row).__name__}; wanted one JSON object a line")
    return row


def _json_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """A `.json` file holds one list (the usual ShareGPT download), read whole; some hold one object a line."""
    try:
        with _opened(file) as content:
            rows = json.loads(content.read().decode("utf-8-sig"))
    except ValueError as error:
        if getattr(error, "msg", "") == "Extra data":
            yield from _line_rows(file, False)
            return
        raise DataError(f"{file} is not valid JSON ({error})") from error
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        wrong = UnusableRow("an item that is no object", f"holds a {type(row).__name__}; wanted an object")
        yield f"{file} item {number}", row if isinstance(row, dict) else wrong


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
        yield f"{file} row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """A table's objects have every key that any row has, null where a row had none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    nested = isinstance(value, list) and value and isinstance(value[0], dict | list)  # lists of ids stay as they are
    return [_without_nulls(item) for item in value] if nested else value
