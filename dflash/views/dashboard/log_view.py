"""The log's tail and the faults of a run, as text and as HTML that reads on a light and on a dark page."""

from __future__ import annotations

import time
from typing import Any

from dflash.views import style
from dflash.views.dashboard.series import RunSeries
from dflash.views.examples import samples_html
from dflash.views.templates import render

TAIL = 14
TOGETHER = 0.003  # seconds: lines of one worker this close together were printed together


def _tail(series: RunSeries, tail: int) -> list[dict[str, Any]]:
    """The newest records; where the first is the middle of something printed at once (a table), that is whole, too."""
    with series.lock:
        records = list(series.log)
    first = max(0, len(records) - tail)
    while first and len(records) - first < 4 * tail and _together(records[first - 1], records[first]):
        first -= 1
    return records[first:]


def _together(before: dict[str, Any], after: dict[str, Any]) -> bool:
    near = abs((after.get("t") or 0) - (before.get("t") or 0)) < TOGETHER
    return near and before.get("worker") == after.get("worker")


def _clock(record: dict[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record.get("t", 0)))


def log_lines(series: RunSeries, tail: int = TAIL) -> list[str]:
    """`12:34:56 worker  message`, oldest first; the order is that of the record."""
    return [f"{_clock(r)} {r.get('worker', 'main')}  {r.get('message', '')}" for r in _tail(series, tail)]


def log_html(series: RunSeries, steady: bool = False) -> str:
    """The newest held-out answer, the newest faults with their tracebacks folded away, and the log's tail.

    `steady` keeps its height while a run goes on, so that nothing below it moves.
    """
    with series.lock:
        faults, samples = list(series.faults)[-3:], series.samples[-1:]
        workers = sorted({str(record.get("worker", "main")) for record in series.log})
    lines = [
        {
            "clock": _clock(record),
            "worker": record.get("worker", "main"),
            "colour": style.series_style(workers.index(str(record.get("worker", "main"))))[0],
            "loud": str(record.get("level") or "INFO").upper() not in ("INFO", "DEBUG"),
            "message": record.get("message", ""),
        }
        for record in _tail(series, TAIL)
    ]
    evaluates = bool(series.setting("eval_every") and series.setting("held_out"))
    sample = samples_html(samples, most=1)
    return str(render("log.html", faults=faults, lines=lines, sample=sample, steady=steady, evaluates=evaluates))


def log_bundle(series: RunSeries) -> dict[str, Any]:
    """Static form of faults and log."""
    with series.lock:
        faults = list(series.faults)[-3:]
    text = [f"FAULT {f.get('worker')}: {f.get('type')}: {f.get('message')}" for f in faults] + log_lines(series)
    return {"text/plain": "\n".join(text), "text/html": log_html(series)}
