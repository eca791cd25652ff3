"""The questions that a target answers to make training text: those of a file, or our own.

Our own are templates x topics (`prompts.yaml`), always the same list in the same order. Prompts that a data file already
holds can be left out with `exclude`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import yaml

from dflash.data.chat import Chat, UnusableRow, chat_of, question_of
from dflash.data.conversations import MAX_SKIPPED, refuse_skipped
from dflash.data.reading import iter_rows
from dflash.data.report import DataReport
from dflash.errors import DataError


@functools.cache
def templates_and_topics() -> tuple[list[str], list[str]]:
    """Templates and topics of `prompts.yaml`, in the order written there, topics without repeats."""
    own = yaml.safe_load(resources.files(__package__).joinpath("prompts.yaml").read_text())
    names = (name.strip() for theme in own["topics"].values() for name in theme.split(","))
    return own["templates"], list(dict.fromkeys(names))


def make_prompts(exclude: Iterable[str] = (), limit: int | None = None) -> list[str]:
    """Distinct prompts, the templates interleaved so that any first part of the list holds all of them.

    Prompt number i takes template `i mod 26` and a topic that steps with it, so neighbours share neither.
    """
    (templates, names), known = templates_and_topics(), set(exclude)
    prompts: dict[str, None] = {}
    for start in range(len(names)):
        for index, template in enumerate(templates):
            prompt = template.format(names[(start + 37 * index) % len(names)])
            if prompt not in known:
                prompts[prompt] = None
    return list(prompts)[:limit]


def prompts_in(path: str | Path) -> set[str]:
    """The first user message of every conversation in a data file (any kind that `dflash.data` reads). DataError for a file
    without any: nothing would be left out."""
    found = set()
    for _, row in iter_rows(path):
        try:
            turns = () if isinstance(row, UnusableRow) else chat_of(row).turns
        except UnusableRow:
            continue
        found.update([turn.content for turn in turns if turn.role == "user"][:1])
    if not found:
        raise DataError(f"{path} holds no conversation whose prompt could be left out; give a data file, or no --exclude")
    return found


@dataclass
class Questions:
    """Chats that wait for an answer, the place of each, and what was left out of their file."""

    report: DataReport
    chats: list[tuple[str, Chat]] = field(default_factory=list)

    def rendered(self, read: Callable[[Chat], list[int]]) -> list[tuple[Chat, list[int]]]:
        """Each chat with the ids that the target is given; what its template refuses is left out and counted.

        Raises DataError, with the reasons, when too many rows of the file had to be left out.
        """
        found = []
        for place, chat in self.chats:
            try:
                found.append((chat, read(chat)))
            except UnusableRow as reason:
                self.report.skip(place, reason)
        if self.chats:
            refuse_skipped(self.report, bool(found), MAX_SKIPPED, "prompts")
        return found


def read_prompts(path: str | Path) -> Questions:
    """Questions from any file that `dflash.data` reads, its last answers dropped; or from one with a prompt a line.

    Raises DataError, with the reasons, when more than a tenth of the rows hold none.
    """
    if not Path(path).expanduser().exists() and "," not in str(path):
        raise DataError(f"there is no prompts file {path}; give a file with one prompt a line, or any data file")
    found = Questions(DataReport(str(path)))
    for place, row in iter_rows(path, text=True):
        found.report.rows += 1
        try:
            if isinstance(row, UnusableRow):
                raise row
            found.chats.append((place, question_of(row)))
        except UnusableRow as reason:
            found.report.skip(place, reason)
    if not found.report.rows:
        raise DataError(f"there are no prompts in {path}; give a file with one prompt a line, or any data file")
    refuse_skipped(found.report, bool(found.chats), MAX_SKIPPED, "prompts")
    return found
