"""The log's tail and the faults of a run, as text and as HTML that reads on a light and on a dark page."""

from __future__ import annotations

import html
import time
from typing import Any

from dflash.views.dashboard import style
from dflash.views.dashboard.series import RunSeries

TAIL = 14


def log_lines(series: RunSeries, tail: int = TAIL) -> list[str]:
    """`12:34:56 worker  message`, oldest first; the order is that of the record."""
    with series.lock:
        records = list(series.log)[-tail:]
    return [
        f"{time.strftime('%H:%M:%S', time.localtime(record.get('t', 0)))} "
        f"{record.get('worker', 'main')}  {record.get('message', '')}"
        for record in records
    ]


def log_html(series: RunSeries, tail: int = TAIL) -> str:
    """The tail as a quiet block; workers told apart by colour."""
    with series.lock:
        records = list(series.log)[-tail:]
        workers = sorted({str(record.get("worker", "main")) for record in series.log})
    if not records:
        return ""
    rows = []
    for record in records:
        worker = str(record.get("worker", "main"))
        colour, _ = style.series_style(workers.index(worker))
        level = str(record.get("level") or "INFO").upper()
        weight = "" if level in ("INFO", "DEBUG") else "font-weight:600;"
        clock = time.strftime("%H:%M:%S", time.localtime(record.get("t", 0)))
        rows.append(
            f'<span style="color:{style.INK}">{clock}</span> '
            f'<span style="border-left:3px solid {colour};padding-left:5px">{html.escape(worker)}</span>  '
            f'<span style="{weight}">{html.escape(str(record.get("message", "")))}</span>'
        )
    return block("\n".join(rows))


def block(content: str) -> str:
    """Monospaced text that wraps, in the page's own colours."""
    return (
        '<pre style="margin:4px 0;padding:6px 10px;max-height:22em;overflow:auto;white-space:pre-wrap;'
        f'font-size:12px;line-height:1.45;border-left:2px solid {style.GRID}">{content}</pre>'
    )


def fault_html(series: RunSeries, last: int = 3) -> str:
    """The newest faults: who, what, and the traceback folded away."""
    with series.lock:
        faults = list(series.faults)[-last:]
    parts = []
    for fault in faults:
        head = html.escape(f"{fault.get('worker', 'main')}: {fault.get('type')}: {fault.get('message')}")
        step = f" at step {fault['step']}" if fault.get("step") is not None else ""
        parts.append(
            f'<div style="border-left:4px solid {style.VERMILLION};padding:4px 10px;margin:6px 0">'
            f"<b>Fault{step}</b> {head}<details><summary>traceback</summary>"
            f"{block(html.escape(str(fault.get('traceback') or 'none recorded')))}</details></div>"
        )
    return "".join(parts)


def log_bundle(series: RunSeries) -> dict[str, Any]:
    """Static form of faults and log."""
    lines = log_lines(series)
    with series.lock:
        faults = list(series.faults)
    text = [f"FAULT {f.get('worker')}: {f.get('type')}: {f.get('message')}" for f in faults[-3:]] + lines
    return {"text/plain": "\n".join(text), "text/html": fault_html(series) + log_html(series)}
