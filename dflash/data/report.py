"""What a data file holds and what was left out of it, before any training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dflash.data.chat import UnusableRow

_EDGES = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 65536)
TOO_SHORT, CUT_AWAY = "answer too short for a block", "no answer left after truncation"
_NAMED = 3  # rows of each reason that are named


@dataclass
class DataReport:
    """Counts over one source. `tokens` and `supervised` are of the conversations that were kept.

    `short_answers` counts kept conversations with an answer shorter than a block; `skipped` counts reasons, `places`
    names the first rows of each; `notes` counts what a template left out of conversations that were kept.
    """

    source: str
    rows: int = 0
    conversations: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    short_answers: int = 0
    kept_ids: int = 0
    skipped: Counter = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    lengths: Counter = field(default_factory=Counter)
    longest: int = 0

    def add(self, length: int, supervised: int) -> None:
        """Count one kept conversation of `length` tokens."""
        self.conversations += 1
        self.tokens += length
        self.supervised += supervised
        self.longest = max(self.longest, length)
        self.lengths[max(edge for edge in _EDGES if edge <= length)] += 1

    def skip(self, place: str, row: UnusableRow) -> None:
        """Count one row that is left out."""
        self.skipped[row.reason] += 1
        named = self.places.setdefault(row.reason, [])
        if len(named) < _NAMED:
            named.append(place if row.detail == row.reason else f"{place} {row.detail}")

    @property
    def unusable(self) -> int:
        """Skipped rows that cannot be read or rendered; what is only too short or too long for the settings is none."""
        return sum(count for reason, count in self.skipped.items() if reason not in (TOO_SHORT, CUT_AWAY))

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens, 0 to 1."""
        return self.supervised / self.tokens if self.tokens else 0.0

    def histogram(self) -> tuple[list[int], list[int]]:
        """Lower edges (tokens) and counts, from the shortest to the longest bin that holds something."""
        if not self.lengths:
            return [], []
        inside = [edge for edge in _EDGES if min(self.lengths) <= edge <= max(self.lengths)]
        return inside, [self.lengths[edge] for edge in inside]

    def reasons(self) -> str:
        """The reasons for skipped rows as text: how many, and the first rows of each."""
        width = max((len(reason) for reason in self.skipped), default=0)
        lines = []
        for reason, count in self.skipped.most_common():
            lines.append(f"  {reason:<{width}}  {count:>7,}")
            lines += [f"    {place}" for place in self.places.get(reason, [])]
        return "\n".join(lines)

    def table(self) -> str:
        """The report as text, one fact a line, with a bar per length bin."""
        rows = [
            ("source", self.source),
            ("rows read", f"{self.rows:,}"),
            ("conversations", f"{self.conversations:,}"),
            ("  with the written ids", f"{self.kept_ids:,}"),
            ("tokens", f"{self.tokens:,} (longest {self.longest:,})"),
            ("supervised", f"{self.supervised:,} ({self.supervised_share:.1%})"),
            ("truncated", f"{self.truncated:,}"),
            ("answers under a block", f"{self.short_answers:,}"),
            ("skipped", f"{sum(self.skipped.values()):,}"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        lines += [self.reasons()] if self.skipped else []
        lines += [f"note: {count:,} with {note}" for note, count in self.notes.most_common()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        edges, counts = self.histogram()
        for edge, count in zip(edges, counts, strict=True):
            bar = "#" * max(1 if count else 0, round(30 * count / max(counts)))
            lines.append(f"{f'  from {edge:,} tokens':<{width}}  {count:>7,} {bar}")
        return "\n".join(lines)
