"""One way to print a table: aligned text in a terminal, HTML in a notebook and in a report."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

Row = Mapping[str, Any] | Sequence[Any]


class Table:
    """Rows as mappings of equal keys, or as sequences under `head` (None: no head line).

    None prints as "-", a bool as yes or no, a float with four digits. Columns of numbers stand to the right.
    `links` maps a row's number to the address that its first cell links to.
    """

    def __init__(self, rows: Sequence[Row], head: Sequence[str] | None = None, links: Mapping[int, str] | None = None):
        if head is None and rows and isinstance(rows[0], Mapping):
            head = list(rows[0])
        rows = [[row[name] for name in head] if isinstance(row, Mapping) else list(row) for row in rows]
        self.head, self.rows, self.links = head, [[_cell(value) for value in row] for row in rows], links or {}
        self._align = ["right" if _numeric(column) else "left" for column in zip(*rows, strict=True)] or None

    def __str__(self) -> str:
        if not self.rows:
            return "(no rows)"
        text = self._format("simple" if self.head else "plain", self.rows)
        return "\n".join(line.rstrip() for line in text.splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [[html.escape(cell) for cell in row] for row in self.rows]
        for number, address in self.links.items():
            rows[number][0] = f'<a href="{html.escape(address, quote=True)}">{rows[number][0]}</a>'
        text = self._format("unsafehtml", rows, [html.escape(name) for name in self.head or ()])
        return re.sub(r"(?<=>) +| +(?=</t[hd]>)", "", text)  # tabulate aligns the source, too

    __html__ = _repr_html_  # jinja2 takes it as it is

    def _format(self, form: str, rows: list[list[str]], head: Sequence[str] | None = None) -> str:
        options = {"disable_numparse": True, "colalign": self._align, "preserve_whitespace": True}
        return tabulate(rows, headers=head or self.head or (), tablefmt=form, **options)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _numeric(column: Sequence[Any]) -> bool:
    """Whether a column holds numbers, some of them perhaps missing."""
    known = [value for value in column if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)
