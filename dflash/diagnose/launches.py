"""Several drafter threads at once: the launches of `coldrun` as tables and a timeline."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from dflash.compile_safety import CompiledFunction, WarmupJob, protected
from dflash.diagnose.coldrun import ColdReport, attend, make_case
from dflash.drafter.flex import compiled_flex_attention

MARKS = {"first call": "#", "warm call": "-"}  # of the text form
COLUMNS = 72


def launch_rows(reports: list[ColdReport]) -> list[dict[str, Any]]:
    """One row for each launch: processes by outcome, failing threads, seconds."""
    return [
        {
            "protection": "on" if report.protected else "off",
            "processes": sum(report.outcomes.values()),
            "threads": report.threads,
            **{kind: report.outcomes.get(kind, 0) for kind in ("ok", "error", "hang", "mismatch", "crash")},
            "threads that died": report.thread_faults,
            "s a process": float(np.mean(report.seconds)),
        }
        for report in reports
    ]


def timeline_bundle(report: ColdReport) -> dict[str, Any]:
    """When each thread of the first process was in its first call and in warm ones, as a MIME bundle.

    Without the plotting libraries the bundle is text alone.
    """
    spans = report.timelines[0] if report.timelines else []
    lanes = [f"drafter {index}" for index in range(report.threads)]
    text = timeline_text(spans, lanes)
    try:
        return _drawn(spans, lanes, f"Drafter threads, protection {'on' if report.protected else 'off'}", text)
    except ImportError:
        return {"text/plain": text}


def timeline_text(spans: list[dict], lanes: list[str]) -> str:
    """The timeline as characters, one line a thread: # first call, - warm calls."""
    end = max((span["start"] + span["seconds"] for span in spans), default=0.0)
    lines = [f"{len(spans)} calls in {len(lanes)} threads over {end:.1f} s; # first call, - warm calls"]
    for index, lane in enumerate(lanes):
        cells = [" "] * COLUMNS
        for span in spans:
            if span["thread"] == index:
                first = int(span["start"] / end * (COLUMNS - 1))
                last = int((span["start"] + span["seconds"]) / end * (COLUMNS - 1))
                cells[first : last + 1] = MARKS[span["name"]] * (last + 1 - first)
        lines.append(f"{lane:<10} |{''.join(cells)}|")
    return "\n".join(lines)


def _drawn(spans: list[dict], lanes: list[str], title: str, text: str) -> dict[str, Any]:
    from dflash.views import style
    from dflash.views.dashboard.bundle import bundle
    from dflash.views.dashboard.panels import Panel, Spans

    drawn = []
    for name, colour in (("first call", style.ORANGE), ("warm call", style.BLUE)):
        chosen = [span for span in spans if span["name"] == name]
        if chosen:
            drawn.append(
                Spans(
                    name,
                    [lanes[span["thread"]] for span in chosen],
                    np.array([span["start"] for span in chosen]),
                    np.array([span["seconds"] for span in chosen]),
                    colour,
                )
            )
    panel = Panel(
        "threads", title, "seconds since the barrier", "", spans=drawn, lanes=lanes, note="no thread completed a call"
    )
    return bundle([panel], text, columns=1)


def warmed_launch(device: torch.device, calls: int, backend: str, threads: int = 3) -> dict[str, Any]:
    """The full warmup that holds: warm each thread's shape, seal, then run all threads beside one that traces.

    Returns one row: calls made, errors, graphs compiled after the seal, foreign traces, whether outputs are equal.
    """
    call = compiled_flex_attention if backend == "inductor" else CompiledFunction(flex_attention, backend=backend)
    cases = [make_case(device, index) for index in range(threads)]
    jobs = [
        WarmupJob(device, step=lambda c=case: attend(call, c), backward=device.type == "cuda", name=f"drafter {i}")
        for i, case in enumerate(cases)
    ]
    errors: list[str] = []
    equal: list[bool] = []
    stop, traces = threading.Event(), [0]

    def work(index: int, alone: list) -> None:
        try:
            for _ in range(calls):
                got = attend(call, cases[index])
            equal.append(all(torch.equal(a, b) for a, b in zip(got, alone, strict=True)))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    def trace() -> None:
        while not stop.is_set():
            torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
            traces[0] += 1

    with protected(jobs) as protection:
        graphs = counters["stats"]["unique_graphs"]
        alone = [attend(call, case) for case in cases]
        noise = threading.Thread(target=trace, name="tracer", daemon=True)
        workers = [threading.Thread(target=work, args=(i, alone[i]), daemon=True) for i in range(threads)]
        for thread in (noise, *workers):
            thread.start()
        for worker in workers:
            worker.join()
        stop.set()
        noise.join()
    return {
        "threads": threads,
        "calls each": calls,
        "errors": len(errors),
        "graphs after the seal": counters["stats"]["unique_graphs"] - graphs,
        "foreign traces": traces[0],
        "outputs equal": all(equal) and len(equal) == threads,
        "warmup s": protection.warmup.seconds,
        "first error": errors[0][:120] if errors else None,
    }
