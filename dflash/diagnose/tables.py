"""Plain text tables and device facts for the isolation notebooks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from dflash.runs.environment import interpreter


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as an aligned table; floats with four significant digits, None as '-'."""
    if not rows:
        return "(no rows)"
    heads = list(rows[0])
    cells = [heads, *([_cell(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def environment_line() -> str:
    """Interpreter, torch and devices in two lines."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(names)) or "no GPU"
    return f"{interpreter()}\ntorch {torch.__version__} · {devices} · {os.cpu_count()} cores"
