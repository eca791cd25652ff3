"""What the report shows, from the run's record and the executed notebook; `templates/report.html` lays it out."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash.runs.record import CONFIG_NAME, ENVIRONMENT_NAME, RESOLVED_NAME, STACKS_NAME
from dflash.runs.tables import Table
from dflash.target.serving import next_commands
from dflash.views import style
from dflash.views.dashboard.log_view import log_lines
from dflash.views.dashboard.panels import Panel, build_panels
from dflash.views.dashboard.series import MAX_LOG_LINES, RunSeries
from dflash.views.examples import examples_html, read_evaluation, samples_html
from dflash.views.report.notebook_part import Verdict, embedded, picture
from dflash.views.report.story import bottleneck, came_to, findings, flatten, hardware, headline, status_of, what_ran
from dflash.views.templates import render

WORDS = {"died": "killed", "empty": "no record"}  # statuses that a reader knows by another name


@dataclass
class Material:
    """All that a page is made of. `series` None: a notebook without a run."""

    title: str
    series: RunSeries | None = None
    verdict: Verdict | None = None
    notebook_html: str = ""
    commands: list[str] = field(default_factory=list)
    static: bool = False

    @property
    def has_run(self) -> bool:
        return self.series is not None and bool(self.series.records)

    @property
    def status(self) -> str:
        """The run's status; a notebook that failed after its run had ended still failed, unless somebody interrupted it."""
        run = status_of(self.series) if self.has_run else "empty"
        ended = self.verdict.status if self.verdict is not None else ""
        if run == "interrupted" or (self.verdict is not None and self.verdict.interrupted):
            return "interrupted"
        if ended in ("failed", "killed"):
            return "failed" if ended == "failed" else "died"
        return {"ok": "completed", "running": "running"}.get(ended, run) if run == "empty" or ended == "running" else run


def page(material: Material) -> str:
    """The whole document."""
    series, status = material.series, material.status
    found: dict[str, Any] = dict.fromkeys(("story", "cards", "odd", "ended", "plots", "events", "log", "serve", "settings"))
    found["began"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(series.start_time)) if material.has_run else ""
    found.update(examples=None, samples=None, log_title="", commands=material.commands, notebook=material.notebook_html)
    if status in ("failed", "died", "interrupted"):
        found["ended"] = _ended(material)
    if material.has_run:
        # a killed notebook's record may lack its end: the page says the same in every place
        environment, facts = _environment(series), _resolved(series.path)
        ended = status if series.run_end is None else status_of(series)  # a notebook may fail after its run has ended
        found["story"] = [
            ("What ran", what_ran((facts or {}).get("settings") or series.config)),
            *([("What it came to", came_to(facts))] if facts else []),
            ("On what", hardware(environment, series)),
            ("Result", headline(series, ended)),
            ("Bottleneck", bottleneck(series)),
        ]
        found.update(cards=_cards(series), odd=findings(series, ended), events=_events(series))
        found["plots"] = plots(build_panels(series, drop_empty=True), material.static)
        found["log"] = log_lines(series, tail=MAX_LOG_LINES)
        cut = len(found["log"]) == MAX_LOG_LINES
        found["log_title"] = f"The log's last {MAX_LOG_LINES} lines" if cut else "The log"
        found["samples"] = samples_html(series.samples)
        evaluation = read_evaluation(series.path)
        if evaluation and evaluation["prompts"]:
            found["examples"] = examples_html(evaluation)
        found["serve"] = next_commands(series.path)
    if series is not None:
        found["settings"] = _settings(series)
    return document("report.html", material.title, material.static, status=status, **found)


def document(template: str, title: str, static: bool, status: str = "", **values: Any) -> str:
    """A template in the page's frame. `status` is the badge before the title."""
    frame = {"title": title, "static": static, "status": status, "word": WORDS.get(status, status), "nav": []}
    made = time.strftime("%Y-%m-%d %H:%M")
    return render(template, **frame, made=made, nonce=secrets.token_urlsafe(16), **values)


def plots(panels: Sequence[Panel], static: bool) -> list[dict[str, Any]]:
    """Each panel for the template's `plot`: its title, its image, and its interactive form unless `static`."""
    from dflash.views.dashboard.plotly_form import grid_figure

    return [
        {
            "title": panel.title,
            "picture": picture([panel]),
            "data": None if static else embedded(json.loads(grid_figure([panel], columns=1, titles=False).to_json())),
        }
        for panel in panels
    ]


def _cards(series: RunSeries) -> list[tuple[str, str]]:
    cards = []
    acceptance = series.last_eval.get("acceptance_length")
    if acceptance is not None:
        best = series.best_eval
        detail = f"; best {best['acceptance_length']:.2f} at step {best.get('step')}" if best else ""
        cards.append((f"{acceptance:.2f}", f"held-out acceptance length, bonus token included{detail}"))
    if series.smooth_loss.last is not None:
        cards.append((f"{series.smooth_loss.last:.3f}", "training loss at the end, smoothed"))
    if series.tokens:
        if len(series.step_rate):
            cards.append((style.number(series.step_rate.median, 0), "context tokens/s, median over the steps"))
        cards.append((_short(series.tokens), "context tokens trained on"))
    cards.append((style.duration(series.seconds), "from the first record to the last"))
    if series.memory_peak:
        name, peak = max(series.memory_peak.items(), key=lambda item: item[1])
        when = f" at step {series.peak_step[name]}" if name in series.peak_step else ""
        cards.append((style.gib(peak), f"highest memory, on {name}{when}"))
    return cards


def _short(value: float) -> str:
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {letter}"
    return f"{value:.0f}"


def _ended(material: Material) -> dict[str, Any]:
    """How a run that did not complete ended, and what there is to go on from."""
    series, verdict = material.series, material.verdict
    interrupted = material.status == "interrupted"
    ended: dict[str, Any] = {"title": "Where it stopped" if interrupted else "What failed", "lines": [], "faults": []}
    ended.update(dict.fromkeys(("source", "traceback", "resume", "stacks")))
    if interrupted:
        ended["lines"].append("Somebody interrupted this run (Ctrl-C, Stop, or SIGTERM); nothing is wrong with it.")
    elif verdict is not None and verdict.status == "failed":
        ended["lines"].append(f"Cell {verdict.cell} of the notebook raised {verdict.error}")
    elif verdict is not None and verdict.status == "killed":
        ended["lines"].append(
            f"The notebook's kernel ended while cell {verdict.cell} ran, without an error message. The usual cause is the "
            "system's out-of-memory killer; a crash in native code is the other."
        )
        ended["source"] = verdict.source[:1500]
    if material.has_run:
        ended["faults"] = [] if interrupted else series.faults[-3:]
        step, total = series.last_step.get("step"), series.total_steps
        done = f"Last completed step: {step}{f' of {total}' if total else ''}." if step else "No step was completed."
        saved = series.checkpoints[-1] if series.checkpoints else None
        kept = (
            f" Last checkpoint: {saved.get('path')} at step {saved.get('step')}." if saved else " No checkpoint was saved."
        )
        ended["lines"].append(done + kept)
        if saved and (series.path / CONFIG_NAME).exists():
            ended["resume"] = f"dflash train --config {shlex.quote(str(series.path / CONFIG_NAME))} --resume"
        stacks = series.path / STACKS_NAME
        if stacks.exists():
            ended["stacks"] = stacks.read_text(errors="replace")[-60_000:]
    if verdict is not None and verdict.traceback and not ended["faults"] and not interrupted:
        ended["traceback"] = verdict.traceback[-20_000:]
    return ended


def _events(series: RunSeries) -> Any:
    """Warmups, checkpoints and faults as a table in the order of time; None without any."""
    start = series.start_time or 0.0
    rows = [(w.get("t"), "warmup", f"{w.get('device')}: {style.duration(w.get('seconds'))}") for w in series.warmups]
    for c in series.checkpoints:
        took = f" in {style.duration(c['seconds'])}" if c.get("seconds") is not None else ""
        rows.append((c.get("t"), "checkpoint", f"step {c.get('step')}, {c.get('path')}{took}"))
    for f in series.faults:
        rows.append((f.get("t"), "fault", style.clip(f"{f.get('worker')}: {f.get('type')}: {f.get('message')}", 400)))
    rows.sort(key=lambda row: row[0] or 0.0)
    rows = [(style.duration((at or start) - start), kind, text) for at, kind, text in rows]
    return Table(rows, ["after", "what", "details"]) if rows else None


def _settings(series: RunSeries) -> list[list[tuple[str, Any]]]:
    """Settings in two columns, what they ran on in a third."""
    file = series.path / CONFIG_NAME
    config = series.config or (yaml.safe_load(file.read_text()) if file.exists() else {}) or {}
    rows = list(flatten(config).items())
    half = -(-len(rows) // 2)
    environment = _environment(series)
    source = environment.get("source") or {}
    changed = " with local changes" if source.get("changed") else ""
    facts = {
        "Python": environment.get("python"),
        "platform": environment.get("platform"),
        "source": f"{source['commit']}{changed}" if source.get("commit") else None,
        "CUDA": (environment.get("cuda") or {}).get("version"),
        **(environment.get("packages") or {}),
        **(environment.get("variables") or {}),
    }
    return [rows[:half], rows[half:], [(name, value) for name, value in facts.items() if value]]


def _resolved(folder: Path) -> dict[str, Any] | None:
    """What the run's settings came to; None for a run that did not write it."""
    try:
        return yaml.safe_load((folder / RESOLVED_NAME).read_text())
    except (OSError, yaml.YAMLError):
        return None


def _environment(series: RunSeries) -> dict[str, Any]:
    found = (series.run_start or {}).get("environment")
    if found:
        return found
    try:
        return json.loads((Path(series.path) / ENVIRONMENT_NAME).read_text())
    except (OSError, ValueError):
        return {}
