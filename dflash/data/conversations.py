"""From a file to conversations: render or keep ids, check, count, and cache what was prepared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from dflash.data.packing import Conversation
from dflash.data.reading import UnusableRow, data_files, iter_rows, messages_of
from dflash.data.rendering import ChatRenderer
from dflash.data.report import DataReport
from dflash.errors import DataError

_FORMAT = 1  # part of the cache key: raise it when the same file would give other ids
_ID_CHECKS = 16  # rows whose ids are compared with their text


def iter_conversations(
    path: str | Path | list,
    tokenizer,
    max_length: int,
    report: DataReport,
    *,
    block_size: int = 2,
    vocab_size: int | None = None,
    use_ids: bool = True,
    template: str | None = None,
    template_kwargs: dict | None = None,
    split: str = "train",
) -> Iterator[Conversation]:
    """Yield usable conversations one by one and count everything in `report`.

    Args:
        max_length: longer conversations are cut to it (counted).
        block_size: only counts answers shorter than a block; what has no anchor at all is skipped.
        vocab_size: ids at or above it are refused; None takes the tokenizer's.
        use_ids: keep `prompt_ids` + `response_ids` where a row has them, instead of tokenizing its text
        again.
    """
    if max_length < 2:
        raise DataError(f"max_length is {max_length}; wanted at least 2")
    reader = _RowReader(tokenizer, use_ids, template, template_kwargs)
    limit = vocab_size or (len(tokenizer) if tokenizer is not None else 2**62)
    for index, (place, row) in enumerate(iter_rows(path, split)):
        report.rows += 1
        try:
            ids, mask, from_ids = reader(place, row)
        except UnusableRow as reason:
            report.skipped[str(reason)] += 1
            continue
        if ids and (min(ids) < 0 or max(ids) >= limit):
            raise DataError(
                f"{place} holds token id {max(ids) if min(ids) >= 0 else min(ids)}; "
                f"wanted 0 to {limit - 1}: the ids belong to another tokenizer"
            )
        truncated = len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        longest = _longest_run(mask)
        if not _has_anchor(mask, block_size):
            report.skipped[
                "no answer left after truncation" if truncated and not any(mask) else "answer too short for a block"
            ] += 1
            continue
        report.truncated += truncated
        report.short_answers += longest < block_size
        report.kept_ids += from_ids
        report.add(len(ids), sum(mask))
        yield Conversation(ids, mask, index, row.get("finish_reason"))


def load_conversations(
    path: str | Path | list, tokenizer, max_length: int, *, cache_dir: str | Path | None = None, **options
) -> tuple[list[Conversation], DataReport]:
    """All usable conversations of a file, a folder or a list of them (also comma-separated), and the report.

    With `cache_dir`, prepared ids are kept there under a key of everything that changes them, and read back
    the next time. Raises DataError for a broken line (named), an empty file, or one without any usable
    conversation.
    """
    cache = None
    if cache_dir is not None:
        key = cache_key(path, tokenizer, max_length, **options)
        cache = Path(cache_dir).expanduser() / f"conversations-{key}.pt"
        if cache.is_file():
            return _read_cache(cache)
    report = DataReport(str(path))
    conversations = list(iter_conversations(path, tokenizer, max_length, report, **options))
    if not report.rows:
        raise DataError(f"{path} is empty; wanted at least one conversation")
    if not conversations:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in report.skipped.most_common(4))
        hint = ""
        if any("template" in reason for reason in report.skipped):
            hint = f"; the template is the {ChatRenderer(tokenizer, options.get('template')).name}"
        raise DataError(f"none of the {report.rows} conversations of {path} can be used: {reasons}{hint}")
    if cache is not None:
        report.cache = "written"
        _write_cache(cache, conversations, report)
    return conversations, report


class _RowReader:
    """Turns one row into ids and mask; keeps the renderer and the check of ids against text."""

    def __init__(self, tokenizer, use_ids: bool, template, template_kwargs):
        self.tokenizer, self.use_ids = tokenizer, use_ids
        self.template, self.template_kwargs = template, template_kwargs
        self.renderer: ChatRenderer | None = None
        self.compared = self.differing = 0

    def __call__(self, place: str, row: dict) -> tuple[list[int], list[bool], bool]:
        prompt, response = row.get("prompt_ids"), row.get("response_ids")
        if self.use_ids and prompt is not None and response is not None:
            prompt, response = (_checked_ids(place, "prompt_ids", prompt), _checked_ids(place, "response_ids", response))
            self._compare(place, row, response)
            return prompt + response, [False] * len(prompt) + [True] * len(response), True
        if self.use_ids and row.get("input_ids") is not None and row.get("loss_mask") is not None:
            ids = _checked_ids(place, "input_ids", row["input_ids"])
            if not isinstance(row["loss_mask"], list | tuple):
                raise DataError(f"{place}: loss_mask is not a list; wanted one entry for each of input_ids")
            mask = [bool(value) for value in row["loss_mask"]]
            if len(ids) != len(mask):
                raise DataError(f"{place} has {len(ids)} input_ids and {len(mask)} loss_mask entries; wanted equal")
            return ids, mask, True
        if self.tokenizer is None:
            raise DataError(
                f"{place} is text, and the target has no tokenizer to read it with; give rows with input_ids "
                "and loss_mask, or data='random:24' for 24 packs of random ids"
            )
        if self.renderer is None:
            self.renderer = ChatRenderer(self.tokenizer, self.template, self.template_kwargs)
        ids, mask = self.renderer(messages_of(row), row.get("tools"))
        if row.get("finish_reason") == "length":
            self._drop_end(ids, mask)
        return ids, mask, False

    def _drop_end(self, ids: list[int], mask: list[bool]) -> None:
        """The template closes an answer that the target left open: that end token is not the target's."""
        last = len(mask) - 1 - mask[::-1].index(True)
        if ids[last] in self.tokenizer.all_special_ids:
            mask[last] = False

    def _compare(self, place: str, row: dict, response: list[int]) -> None:
        """Another tokenizer's ids are valid numbers that train nonsense: compare some with the text."""
        if self.tokenizer is None or self.compared >= _ID_CHECKS or not row.get("messages"):
            return
        text = str(row["messages"][-1].get("content") or "").strip()
        decoded = self.tokenizer.decode(response, skip_special_tokens=True).strip()
        self.compared += 1
        self.differing += decoded != text
        if self.compared >= 4 and 2 * self.differing > self.compared:
            raise DataError(
                f"{place}: response_ids decode to {decoded[:40]!r}, the text is {text[:40]!r}; the ids were "
                f"written by another tokenizer than '{self.tokenizer.name_or_path}'. Give the target "
                "they belong to, or use_ids=False to tokenize the text again"
            )


def _checked_ids(place: str, name: str, values) -> list[int]:
    if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
        raise DataError(f"{place}: {name} is not a list of integers")
    return list(values)


def _longest_run(mask: list[bool]) -> int:
    """Length of the longest stretch of supervised tokens, the longest answer."""
    best = run = 0
    for value in mask:
        run = run + 1 if value else 0
        best = max(best, run)
    return best


def _has_anchor(mask: list[bool], block_size: int) -> bool:
    """Whether some supervised position has a supervised token within the rest of its block."""
    last = None
    for index, value in enumerate(mask):
        if value:
            if last is not None and index - last < max(2, block_size):
                return True
            last = index
    return False


def tokenizer_fingerprint(tokenizer) -> str:
    """Hash of vocabulary, merges and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256((body + special).encode()).hexdigest()[:20]


def cache_key(path: str | Path | list, tokenizer, max_length: int, **options) -> str:
    """Hash of everything that changes the ids: file contents, tokenizer, template, length, options."""
    digest = hashlib.sha256()
    for file in data_files(path, options.get("split", "train")):
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    template = options.get("template") or getattr(tokenizer, "chat_template", None)
    tokens = tokenizer_fingerprint(tokenizer) if tokenizer is not None else None
    settings = {name: value for name, value in options.items() if name != "template"}
    digest.update(json.dumps([_FORMAT, tokens, template, max_length, settings], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:24]


def _write_cache(path: Path, conversations: list[Conversation], report: DataReport) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = torch.tensor([token for item in conversations for token in item.input_ids], dtype=torch.int32)
    mask = torch.tensor([value for item in conversations for value in item.loss_mask], dtype=torch.bool)
    body = {
        "ids": flat,
        "mask": mask,
        "lengths": torch.tensor([len(item) for item in conversations]),
        "sources": torch.tensor([item.source_index for item in conversations]),
        "finish": [item.finish_reason for item in conversations],
        "report": report.to_dict(),
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save(body, temporary)
    temporary.replace(path)  # a reader sees the whole file or none


def _read_cache(path: Path) -> tuple[list[Conversation], DataReport]:
    body = torch.load(path, weights_only=True)
    report = DataReport.from_dict(body["report"])
    report.cache = "hit"
    sizes = body["lengths"].tolist()
    ids, mask = body["ids"].split(sizes), body["mask"].split(sizes)
    return [
        Conversation(ids[at].tolist(), mask[at].tolist(), source, finish)
        for at, (source, finish) in enumerate(zip(body["sources"].tolist(), body["finish"], strict=True))
    ], report
