"""Read a file row by row: JSONL, JSON (both plain or .gz), Parquet, Arrow folders of `datasets`, folders of those, text.

Rows are yielded one at a time, so that a file may be larger than memory; a list in a JSON or JSONL file is read whole. Each
row comes with a place ("file.jsonl line 7") for messages; one that cannot be read comes as the `UnusableRow` that says why.
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

_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_SUFFIXES = (*_LINES, ".json", ".json.gz", ".parquet", ".arrow")
_TEXT = (".txt", ".txt.gz", ".md")
Row = dict | UnusableRow


def data_files(path: str | Path | list, split: str = "train", text: bool = False) -> list[Path]:
    """The files that `path` stands for, in a fixed order; several paths as a list or with commas between.

    A folder may hold data files, be written by `datasets` (`save_to_disk`), or hold one such folder per split. Hidden
    files and folders in it are no data. `text` takes plain text too, also without an ending; in a folder only `.txt`, and
    only where there is nothing else, for a README beside data is no data.
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
        if not _ends(path, wanted) and (path.suffix or not text):
            raise DataError(f"data file {path} has an unknown ending; wanted {', '.join(wanted)}")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DataError(f"dataset folder {path} has no split '{split}'; it has {', '.join(splits)}")
        path = path / split
    if (path / "state.json").is_file():  # one `datasets` split: the state lists its parts in order
        return [path / part["filename"] for part in json.loads((path / "state.json").read_text())["_data_files"]]
    found = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_data(file.relative_to(path))]
    files = [file for file in found if _ends(file, _SUFFIXES)]
    if text and not files:
        files = [file for file in found if _ends(file, (".txt", ".txt.gz"))]
    if not files:
        raise DataError(f"data folder {path} holds no file ending in {', '.join(_SUFFIXES)}")
    return files


def _is_data(file: Path) -> bool:
    beside = file.name in ("dataset_info.json", "state.json", "dataset_dict.json") or file.name.endswith(".meta.json")
    return not beside and not any(part.startswith(".") for part in file.parts)


def _ends(file: Path, endings: tuple[str, ...]) -> bool:
    return file.name.lower().endswith(endings)


def iter_rows(path: str | Path | list, split: str = "train", text: bool = False) -> Iterator[tuple[str, Row]]:
    """Yield `(place, row)`. With `text`, a line that is no JSON is a row with that line as its `prompt`."""
    for file in data_files(path, split, text):
        try:
            yield from _rows(file, text)
        except DataError:
            raise
        except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:  # pyarrow's errors are such, too
            raise DataError(f"{file} cannot be read ({error}); is it a whole {file.suffix} file?") from error


def _rows(file: Path, text: bool) -> Iterator[tuple[str, Row]]:
    if _ends(file, (".parquet", ".arrow")):
        return _parquet_rows(file) if _ends(file, (".parquet",)) else _arrow_rows(file)
    if _ends(file, (".json", ".json.gz")):
        return _json_rows(file)
    if _ends(file, _LINES):
        with _opened(file) as content:
            if content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                return _json_rows(file)
    return _line_rows(file, text)


def _opened(file: Path):
    return gzip.open(file, "rb") if _ends(file, (".gz",)) else open(file, "rb")


def _line_rows(file: Path, text: bool) -> Iterator[tuple[str, Row]]:
    openings = ("{", "[") if _ends(file, _LINES) else ("{",)
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file} line {number}", _line_row(line, openings if text else ())


def _line_row(line: bytes, openings: tuple[str, ...]) -> Row:
    """`openings`: what a line of JSON begins with, where other lines are prompts."""
    try:
        content = line.decode().lstrip("\ufeff").strip()
        problem = "it holds zero bytes, as UTF-16 does" if "\0" in content else ""
    except UnicodeDecodeError as error:
        content, problem = "", str(error)
    if problem:
        wanted = "is not UTF-8 text; wanted one prompt a line, or JSONL" if openings else "is not valid JSON"
        return UnusableRow("a line that is not UTF-8 text", f"{wanted} ({problem}); save the file as UTF-8")
    if openings and not content.startswith(openings):
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
