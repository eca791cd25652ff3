"""What a data file holds and what was left out of it, before any training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_EDGES = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 65536)


@dataclass
class DataReport:
    """Counts over one source. `tokens` and `supervised` are of the conversations that were kept.

    `short_answers` counts kept conversations with an answer shorter than a block; `skipped` names reasons.
    `cache` is "hit", "written" or None.
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
    lengths: Counter = field(default_factory=Counter)
    longest: int = 0
    cache: str | None = None

    def add(self, length: int, supervised: int) -> None:
        """Count one kept conversation of `length` tokens."""
        self.conversations += 1
        self.tokens += length
        self.supervised += supervised
        self.longest = max(self.longest, length)
        self.lengths[max(edge for edge in _EDGES if edge <= length)] += 1

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

    def to_dict(self) -> dict:
        """JSON-ready; `from_dict` reads it back."""
        values = dict(self.__dict__)
        values["skipped"] = dict(self.skipped)
        values["lengths"] = {str(edge): count for edge, count in sorted(self.lengths.items())}
        values["supervised_share"] = self.supervised_share
        return values

    @classmethod
    def from_dict(cls, values: dict) -> DataReport:
        values = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        values["skipped"] = Counter(values["skipped"])
        values["lengths"] = Counter({int(edge): count for edge, count in values["lengths"].items()})
        return cls(**values)

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
        rows += [(f"  {reason}", f"{count:,}") for reason, count in self.skipped.most_common()]
        if self.cache:
            rows.append(("prepared data", self.cache))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        edges, counts = self.histogram()
        for edge, count in zip(edges, counts, strict=True):
            bar = "#" * max(1 if count else 0, round(30 * count / max(counts)))
            lines.append(f"{f'  from {edge:,} tokens':<{width}}  {count:>7,} {bar}")
        return "\n".join(lines)

    def figure(self):
        """The length histogram as a matplotlib Figure (no pyplot, so safe in any thread)."""
        from matplotlib.figure import Figure

        edges, counts = self.histogram()
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(edges)), counts, color="#4c78a8")
        axes.set_xticks(range(len(edges)), [f"{edge:,}+" for edge in edges], rotation=45, fontsize=8)
        axes.set_xlabel("tokens in a conversation")
        axes.set_ylabel("conversations")
        axes.set_title(f"{self.conversations:,} conversations, {self.supervised_share:.0%} of the tokens supervised")
        return figure
