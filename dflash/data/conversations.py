"""From a file to conversations: render chats or keep ids, check and count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash.data.chat import UnusableRow, chat_of
from dflash.data.packing import Conversation
from dflash.data.reading import iter_rows
from dflash.data.rendering import ChatRenderer, ConstantMaskError
from dflash.data.report import CUT_AWAY, TOO_SHORT, DataReport
from dflash.errors import DataError

MAX_SKIPPED = 0.1  # share of a file's rows that may be left out
_ID_CHECKS = 16  # rows whose ids are compared with their text


def iter_conversations(
    path: str | Path | list,
    tokenizer,
    max_length: int,
    report: DataReport,
    *,
    block_size: int = 2,
    vocab_size: int | None = None,
    split: str = "train",
    day: str = "",
) -> Iterator[Conversation]:
    """Yield usable conversations one by one and count everything in `report`.

    Args:
        max_length: longer conversations are cut to it (counted).
        block_size: only counts answers shorter than a block; what has no anchor at all is skipped.
        vocab_size: ids at or above it are refused; None takes the tokenizer's.
        day: what a chat template that writes the date is given, as 2026-12-01; empty: today's.
    """
    if max_length < 2:
        raise DataError(f"max_length is {max_length}; wanted at least 2")
    reader = _RowReader(tokenizer, day)
    limit = vocab_size or (len(tokenizer) if tokenizer is not None else 2**62)
    known: set[int] = set()
    for index, (place, row) in enumerate(iter_rows(path, split)):
        report.rows += 1
        try:
            if isinstance(row, UnusableRow):
                raise row
            ids, mask, from_ids = reader(place, row)
            _refuse_ids(ids, limit)
            if not any(mask):
                raise UnusableRow("token ids without an answer", "holds no token to train on: its answer is empty")
            truncated = len(ids) > max_length
            ids, mask = ids[:max_length], mask[:max_length]
            if not _has_anchor(mask, block_size):
                raise UnusableRow(TOO_SHORT if any(mask) else CUT_AWAY)
        except UnusableRow as reason:
            report.skip(place, reason)
            continue
        key = hash((*ids, *mask))
        report.notes["the ids of an earlier conversation"] += key in known
        known.add(key)
        report.truncated += truncated
        report.short_answers += _longest_run(mask) < block_size
        report.kept_ids += from_ids
        report.add(len(ids), sum(mask))
        yield Conversation(ids, mask, index, row.get("finish_reason"))
    if reader.renderer is not None:
        report.notes.update(reader.renderer.notes)
    report.notes = +report.notes


def load_conversations(
    path: str | Path | list, tokenizer, max_length: int, *, max_skipped: float = MAX_SKIPPED, **options
) -> tuple[list[Conversation], DataReport]:
    """All usable conversations of a file, a folder or a list of them (also comma-separated), and the report.

    A row that cannot be used is left out, counted and named. Raises DataError, with the table of reasons, when those are
    more than the share `max_skipped` of the rows; and for an empty file or a damaged one.
    """
    report = DataReport(str(path))
    conversations = list(iter_conversations(path, tokenizer, max_length, report, **options))
    refuse_skipped(report, bool(conversations), max_skipped, "conversations")
    return conversations, report


def refuse_skipped(report: DataReport, any_left: bool, max_skipped: float, what: str) -> None:
    """Raises DataError when nothing is left of a file, or more than `max_skipped` of its rows cannot be used."""
    if not report.rows:
        raise DataError(f"{report.source} is empty; wanted at least one of its {what}")
    if not any_left:
        raise DataError(f"none of the {report.rows} {what} of {report.source} can be used:\n{report.reasons()}")
    if report.unusable > max_skipped * report.rows:
        raise DataError(
            f"{report.unusable:,} of the {report.rows:,} {what} of {report.source} cannot be used; at most "
            f"{max_skipped:.0%} may be (max_skipped). Mend these rows:\n{report.reasons()}"
        )


class _RowReader:
    """Turns one row into ids and mask; keeps the renderer and the check of ids against text."""

    def __init__(self, tokenizer, day: str):
        self.tokenizer, self.day = tokenizer, day
        self.renderer: ChatRenderer | None = None
        self.compared = self.differing = 0

    def __call__(self, place: str, row: dict) -> tuple[list[int], list[bool], bool]:
        prompt, response = row.get("prompt_ids"), row.get("response_ids")
        if prompt is not None and response is not None:
            prompt, response = _checked_ids("prompt_ids", prompt), _checked_ids("response_ids", response)
            self._compare(place, row, response)
            return prompt + response, [False] * len(prompt) + [True] * len(response), True
        if row.get("input_ids") is not None and row.get("loss_mask") is not None:
            ids = _checked_ids("input_ids", row["input_ids"])
            return ids, _checked_mask(row["loss_mask"], len(ids)), True
        chat = chat_of(row)
        if self.tokenizer is None:
            raise DataError(
                f"{place} is text, and the target has no tokenizer to read it with; give rows with input_ids "
                "and loss_mask, or data='random:24' for 24 packs of random ids"
            )
        if self.renderer is None:
            self.renderer = ChatRenderer(self.tokenizer, day=self.day)
        try:
            ids, mask = self.renderer(chat)
        except ConstantMaskError as error:
            raise UnusableRow("a loss mask that marks nothing or everything", f"is not usable: {error}") from error
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
        try:
            text = chat_of(row).turns[-1].content.strip()
        except UnusableRow:
            return
        decoded = self.tokenizer.decode(response, skip_special_tokens=True).strip()
        self.compared += 1
        self.differing += decoded != text
        if self.compared >= 4 and 2 * self.differing > self.compared:
            raise DataError(
                f"{place}: response_ids decode to {decoded[:40]!r}, the text is {text[:40]!r}; the ids were "
                f"written by another tokenizer than '{self.tokenizer.name_or_path}'. Give the target "
                "they belong to, or take prompt_ids and response_ids out of the rows, and their text is tokenized again"
            )


def _checked_ids(name: str, values) -> list[int]:
    if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
        raise UnusableRow("token ids that are no list of integers", f"has {name} that is not a list of integers")
    return list(values)


def _checked_mask(values, length: int) -> list[bool]:
    if not isinstance(values, list | tuple):
        raise UnusableRow(
            "a loss_mask that is no list", "has a loss_mask that is no list; wanted one entry for each of input_ids"
        )
    if len(values) != length:
        raise UnusableRow(
            "a loss_mask of another length", f"has {length} input_ids and {len(values)} loss_mask entries; wanted equal"
        )
    wrong = [value for value in values if not isinstance(value, int | float) or value not in (0, 1)]
    if wrong:  # labels of -100, or the text "0", would all count as true
        raise UnusableRow("a loss_mask of other values than 0 and 1", f"has {wrong[0]!r} in its loss_mask; wanted 0 or 1")
    return [bool(value) for value in values]


def _refuse_ids(ids: list[int], limit: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < limit), None)
    if wrong is not None:
        raise UnusableRow(
            "token ids outside the vocabulary",
            f"holds token id {wrong}; wanted 0 to {limit - 1}: the ids belong to another tokenizer",
        )


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
