"""What a colleague would say about a run: what ran, on what, the result, the bottleneck, anything odd.

Plain functions from the folded record (`RunSeries`) to sentences, used by the report and by `00_runs`. A
sentence is written only where the record supports it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.runs.lock import is_running
from dflash.target.random_weights import is_random
from dflash.views import style
from dflash.views.dashboard.panels import BONUS
from dflash.views.dashboard.series import RunSeries, Series

FLAT = 0.02  # the runtime contract: steady memory of a GPU moves by at most 2% after warmup
FLAT_PROCESS = 0.15  # resident memory of a process is the system's business, too
SILENT_AFTER = 120.0  # a record without an end that is older than this belongs to a run that died


@dataclass(frozen=True)
class Finding:
    """One remark. `level`: "note" (worth knowing), "odd" (look at it), "bad" (the run is not what it should be)."""

    level: str
    text: str


def status_of(series: RunSeries, now: float | None = None) -> str:
    """completed, interrupted, failed, died (no end was written), running, or empty. `now` is for tests."""
    if series.run_end is not None:
        return str(series.run_end.get("status") or "completed")
    if not series.records:
        return "empty"
    if series.faults:
        return "failed"
    alive = is_running(series.path)
    if alive is None:
        now = time.time() if now is None else now
        alive = series.last_time is not None and now - series.last_time < SILENT_AFTER
    return "running" if alive else "died"


def headline(series: RunSeries, status: str) -> str:
    """The result in one sentence."""
    step, total = series.last_step.get("step"), series.total_steps
    steps = f"{step:,} steps" if step else "no step"
    if step and total and status in ("interrupted", "failed", "died", "running"):
        steps = f"{step:,} of {total:,} steps"
    acceptance = series.last_eval.get("acceptance_length")
    verb = {"died": "Killed", "running": "Still running"}.get(status, status.capitalize())
    if acceptance is None:
        return f"{verb} after {steps}; held-out acceptance was not measured."
    gain = ""
    first = series.first_eval.get("acceptance_length")
    if first is not None and series.first_eval.get("step") != series.last_eval.get("step"):
        gain = f", from {first:.2f} at step {series.first_eval.get('step')}"
    reached = f"a held-out acceptance length of {acceptance:.2f} tokens per target call ({BONUS})"
    return f"{verb} after {steps} with {reached}{gain}."


def what_ran(config: dict[str, Any]) -> str:
    """The configuration as a sentence; only settings that are there."""
    flat = flatten(config)

    def get(*names: str) -> Any:
        return next((flat[name] for name in names if flat.get(name) is not None), None)

    layers, block = get("drafter_layers", "num_draft_layers", "layers"), get("block_size")
    target, data = get("target"), get("data")
    parts = []
    if layers is not None or block is not None:
        size = f"{layers}-layer " if layers is not None else ""
        block_text = f" with blocks of {block} slots" if block is not None else ""
        parts.append(f"A {size}drafter{block_text}")
        if target:
            parts[-1] += f" for the target {target}"
            if is_random(target):
                parts[-1] += " (random weights: its losses and acceptance say nothing of quality)"
    if get("pack_length") is not None:
        anchors = f" and up to {get('max_anchors')} anchors" if get("max_anchors") is not None else ""
        parts.append(f"packs of {get('pack_length'):,} tokens{anchors}")
    kinds = {True: "soft labels", False: "hard labels", "auto": "soft labels, hard ones where the target caps its logits"}
    labels = kinds.get(get("soft_labels", "use_soft_labels"))
    if labels:
        parts.append(labels)
    if get("warm_start") is not None:
        starts = {False: "random initial weights", "auto": "warm start from the target's layers where they allow it"}
        parts.append(starts.get(get("warm_start"), "warm start from the target's layers"))
    if data:
        parts.append(f"trained on {data}")
    return ", ".join(parts) + "." if parts else "The configuration does not say."


def came_to(facts: dict[str, Any]) -> str:
    """What the settings came to on that machine (`resolved.yaml`), as a sentence."""
    settings, devices = facts["settings"], facts["devices"]
    packs, train = settings["train"]["packs_per_step"], settings["train"]
    target = settings["target"]
    layers = ", ".join(map(str, target["target_layers"]))
    parts = [
        f"Drafters on {_places(devices['drafters'])}",
        f"targets on {_places('+'.join(group) for group in devices['targets'])}",
        f"{packs} {'pack' if packs == 1 else 'packs'} a step",
        f"drafter in {train['dtype']} with {settings['drafter']['attention']} attention",
        f"target in {target['target_dtype']}, layers {layers} captured",
    ]
    return "; ".join(parts) + "." + "".join(f" Note: {note}." for note in facts["notes"])


def _places(names: Iterable[str]) -> str:
    """`cpu, cpu, cpu` -> `cpu (3)`."""
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in Counter(names).items())


def hardware(environment: dict[str, Any], series: RunSeries) -> str:
    """The devices that the run really used, as far as the record tells."""
    cuda = (environment.get("cuda") or {}).get("devices") or []
    used = [name for name in series.memory if name.startswith("cuda")]
    packages = environment.get("packages") or {}
    software = f"torch {packages['torch']}" if packages.get("torch") else ""
    if cuda and (used or not series.memory):
        names: dict[str, int] = {}
        for index, device in enumerate(cuda):
            if not used or f"cuda:{index}" in used:
                label = f"{device.get('name')} ({style.gib(device.get('memory'))})"
                names[label] = names.get(label, 0) + 1
        where = ", ".join(f"{count} × {label}" for label, count in names.items())
    elif used:
        where = f"{len(used)} GPU{'s' if len(used) > 1 else ''} ({', '.join(sorted(used))})"
    else:
        cpu = environment.get("cpu") or {}
        memory = f", {style.gib(cpu['memory'])} of memory" if cpu.get("memory") else ""
        where = f"{cpu.get('usable') or '?'} cores of {cpu.get('name') or 'a CPU'}{memory}, no GPU"
    return ", ".join(part for part in (where, software) if part)


def _on_gpus(series: RunSeries) -> bool:
    """Whether more devices can help at all: workers on a CPU share its cores."""
    return any(name.startswith("cuda") for name in series.memory) or not series.memory


def bottleneck(series: RunSeries) -> str:
    """Who waited for whom; or how busy the devices were; or that nothing was measured."""
    share: dict[str, list[float]] = {}
    for name, (busy, waiting) in series.waiting.items():
        kind = name.split("[")[0]
        total = share.setdefault(kind, [0.0, 0.0])
        total[0] += busy
        total[1] += waiting
    waits = {kind: waiting / (busy + waiting) for kind, (busy, waiting) in share.items() if busy + waiting > 0}
    if "target" in waits and "drafter" in waits:
        target, drafter = waits["target"], waits["drafter"]
        facts = f"drafters waited {drafter:.0%} of their time, targets {target:.0%}"
        for side, waited in (("target", drafter - target), ("drafter", target - drafter)):
            if waited > 0.1:
                more = f" More {side} devices would raise throughput." if _on_gpus(series) else ""
                return f"The {side} is the bottleneck: {facts}.{more}"
        return f"Target and drafter are balanced: {facts}."
    if waits:
        worst = max(waits, key=lambda kind: waits[kind])
        if waits[worst] > 0.2:
            return f"The {worst} waited {waits[worst]:.0%} of its time for work."
    busy = {name: float(np.mean(s.mean()[1])) for name, s in series.utilization.items() if len(s)}
    if busy:
        mean = sum(busy.values()) / len(busy)
        if list(busy) == ["cpu"]:
            return _processor(series, mean)
        verdict = "compute sets the pace" if mean >= 70 else "something other than compute sets the pace"
        return f"The devices were busy {mean:.0f}% of the time on average: {verdict}."
    return "Not measured: the run wrote neither stage timings nor utilisation."


def _processor(series: RunSeries, mean: float) -> str:
    environment = (series.run_start or {}).get("environment") or {}
    cores = (environment.get("cpu") or {}).get("usable")
    threads = (environment.get("variables") or {}).get("OMP_NUM_THREADS")
    used = f"{mean / 100 * cores:.1f} of {cores} cores" if cores else f"{mean:.0f}% of the cores"
    if threads and cores and threads.isdigit() and int(threads) < cores:
        return f"The process kept {used} busy on average; OMP_NUM_THREADS={threads} allowed it no more."
    verdict = "compute sets the pace" if mean >= 70 else "loading, input, or other work on the machine took the rest"
    return f"The process kept {used} busy on average: {verdict}."


def findings(series: RunSeries, status: str) -> list[Finding]:
    """Everything odd, worst first."""
    found: list[Finding] = []
    if status == "died":
        text = (
            "The record stops without an end: the process was killed (out of memory, a lost machine, by hand). "
            f"The last record is from {style.duration(series.seconds)} after the start, "
            f"at step {series.last_step.get('step', 0)}."
        )
        found.append(Finding("bad", text))
    for fault in series.faults:
        step = f" at step {fault['step']}" if fault.get("step") is not None else ""
        found.append(
            Finding("bad", f"{fault.get('worker')}{step}: {fault.get('type')}: {_first_line(fault.get('message'))}")
        )
    if series.not_finite:
        count = series.not_finite
        found.append(Finding("bad", f"The loss was not finite in {count} step{'s' if count > 1 else ''}."))
    lost = (series.run_end or {}).get("dropped_records")
    if lost:
        found.append(Finding("bad", f"{lost} records could not be written (a full disk?): the curves have gaps."))
    found += _data(series) + _skips(series) + _curves(series) + _devices(series)
    order = {"bad": 0, "odd": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def _data(series: RunSeries) -> list[Finding]:
    found = [Finding("odd", _first_line(warning)) for warning in series.data.get("warnings", ())]
    left_out = series.data.get("left_out")
    if left_out:
        rows, source = series.data["rows"], series.data["source"]
        text = f"{left_out:,} of the {rows:,} rows of {source} were left out; the log names them with the reasons."
        found.append(Finding("odd", text))
    return found


def _skips(series: RunSeries) -> list[Finding]:
    total = sum(series.skipped.values())
    if not total:
        return []
    share = total / max(1, total + series.loss.count)
    reasons = "; ".join(f"{reason} ({count})" for reason, count in series.skipped.items())
    level = "odd" if share > 0.05 else "note"
    return [Finding(level, f"{total} {'steps were' if total > 1 else 'step was'} skipped ({share:.1%}): {reasons}.")]


def _curves(series: RunSeries) -> list[Finding]:
    found = []
    best, last = series.best_eval.get("acceptance_length"), series.last_eval.get("acceptance_length")
    if best is not None and last is not None and best - last > 0.02:
        found.append(
            Finding(
                "odd",
                f"Held-out acceptance was best at step {series.best_eval.get('step')} ({best:.2f}) and ended "
                f"{best - last:.2f} lower: overfitting, or noise of a small held-out set.",
            )
        )
    found += _against_expected(series)
    change = _drift(series.smooth_loss)
    if change is not None and change > 0.02:
        found.append(Finding("odd", f"The loss rose by {change:.0%} between the run's second and last quarter."))
    change = _drift(series.step_rate)
    if change is not None and change < -0.15:
        found.append(Finding("odd", f"Throughput fell by {-change:.0%} between the second and last quarter."))
    return found


def _against_expected(series: RunSeries) -> list[Finding]:
    """Where the held-out curve first left the band that its recipe expects."""
    band = series.expected
    if not band:
        return []
    for step, length in zip(*series.eval_acceptance.mean(), strict=True):
        low, high = (float(np.interp(step, band["steps"], band[side])) for side in ("low", "high"))
        if step <= band["steps"][-1] and not low <= length <= high:
            return [
                Finding(
                    "odd" if length < low else "note",
                    f"Held-out acceptance left the band of the recipe at step {step:.0f}: {length:.2f}, where {low:.2f} to "
                    f"{high:.2f} is expected (measured on {band['measured']}).",
                )
            ]
    return []


def _devices(series: RunSeries) -> list[Finding]:
    found = []
    for name, memory in sorted(series.memory.items()):
        change = _drift(memory, since=series.first_step_at or 0.0)
        if change is not None and change > (FLAT_PROCESS if name == "cpu" else FLAT):
            found.append(
                Finding("odd", f"Memory in use on {name} grew by {change:.0%} between the second and last quarter.")
            )
        peak, total = series.memory_peak.get(name), series.memory_total.get(name)
        if peak and total and name != "cpu" and peak > 0.95 * total:
            found.append(Finding("odd", f"{name} came within {1 - peak / total:.0%} of its memory limit."))
    return found


def _drift(series: Series, since: float = float("-inf")) -> float | None:
    """Relative change from the second to the last quarter of a series from x = `since` on; None when it is too
    short to tell."""
    x, y = series.mean()
    y = y[x >= since]
    quarter = len(y) // 4
    if series.count < 40 or quarter < 3:
        return None
    before, after = float(np.median(y[quarter : 2 * quarter])), float(np.median(y[-quarter:]))
    return (after - before) / before if before > 0 else None


def _first_line(text: Any) -> str:
    lines = str(text or "no message").strip().splitlines()
    return style.clip(lines[0], 300) if lines else "no message"


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Settings by their own name (names are unique across sections)."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value))
        else:
            flat[key] = value
    return flat
