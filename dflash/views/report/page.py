"""The report's HTML: one file that opens without a network, summary first."""

from __future__ import annotations

import base64
import html
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash.runs.record import CONFIG_NAME, ENVIRONMENT_NAME, STACKS_NAME
from dflash.views.dashboard import style
from dflash.views.dashboard.log_view import log_lines
from dflash.views.dashboard.panels import build_panels
from dflash.views.dashboard.series import RunSeries
from dflash.views.examples import examples_html, read_evaluation
from dflash.views.report.notebook_part import Verdict, figure_html
from dflash.views.report.script import plotly_script
from dflash.views.report.story import bottleneck, findings, flatten, hardware, headline, status_of, what_ran
from dflash.views.report.style_sheet import CSS

escape = html.escape


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
    def status(self) -> str:
        """The run's status; a notebook that failed after its run had ended still failed."""
        if self.verdict is not None and self.verdict.status in ("failed", "killed"):
            return "failed" if self.verdict.status == "failed" else "died"
        if self.series is None or not self.series.records:
            return "completed" if self.verdict is not None and self.verdict.good else "empty"
        return status_of(self.series, now=time.time())


def page(material: Material) -> str:
    """The whole document."""
    sections = [("Summary", summary_html(material))]
    series = material.series
    if material.status in ("failed", "died"):
        sections.append(("What failed", failure_html(material)))
    if series is not None and series.records:
        sections.append(("Curves", curves_html(series, material.static)))
        examples = read_evaluation(series.path)
        if examples and examples["prompts"]:
            sections.append(("Examples", examples_html(examples)))
        if series.faults or series.warmups or series.checkpoints or series.log:
            sections.append(("What happened", events_html(series)))
    if material.commands:
        lines = "\n".join(material.commands)
        sections.append(("Repeat it", f'<pre class="wrap">{escape(lines)}</pre>'))
    if series is not None:
        sections.append(("Configuration and environment", configuration_html(series)))
    if material.notebook_html:
        sections.append(("Notebook", f'<div class="notebook">{material.notebook_html}</div>'))
    badge = f'<span class="badge {material.status}">{escape(_word(material.status))}</span>'
    return document(material, sections, badge)


def document(material: Material, sections: list[tuple[str, str]], badge: str) -> str:
    """Sections (title, HTML) in the page's frame; `badge` is HTML before the title."""
    from pygments.formatters import HtmlFormatter

    css = CSS + HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    css += "@media (prefers-color-scheme: dark) {" + dark + "}.highlight,.highlight pre{background:var(--code)}"
    body, links = [], []
    for title, content in sections:
        anchor = title.lower().replace(" ", "-")
        links.append(f'<a href="#{anchor}">{escape(title)}</a>')
        heading = "" if title == "Summary" else f"<h2>{escape(title)}</h2>"
        kind = ' class="failure"' if title == "What failed" else ""
        body.append(f'<section id="{anchor}"{kind}>{heading}{content}</section>')
    header = f"<header><h1>{badge}{escape(material.title)}</h1><nav>{''.join(links[1:])}</nav></header>"
    script = "" if material.static else plotly_script()
    made = time.strftime("%Y-%m-%d %H:%M")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(material.title)}</title><style>{css}</style></head>\n<body><main>{header}\n"
        + "\n".join(body)
        + f"<footer>Made {made} from the run's own record; this file needs no network.</footer>"
        + f"</main>\n{script}"
        "</body></html>\n"
    )


def _word(status: str) -> str:
    return {"died": "killed", "empty": "no record", "interrupted": "stopped"}.get(status, status)


def summary_html(material: Material) -> str:
    """Headline, numbers, and the story in four lines."""
    series = material.series
    if series is None or not series.records:
        text = "This notebook ran to its end." if material.status == "completed" else "There is no run to report."
        return f"<p>{text}</p>" if material.status != "failed" else ""
    environment = (series.run_start or {}).get("environment") or _json(series.path / ENVIRONMENT_NAME)
    status = status_of(series, now=time.time())
    remarks = findings(series, status)
    odd = (
        '<ul class="findings">'
        + "".join(f'<li class="{remark.level}">{escape(remark.text)}</li>' for remark in remarks)
        + "</ul>"
        if remarks
        else "Nothing stood out."
    )
    story = [
        ("What ran", escape(what_ran(series.config))),
        ("On what", escape(hardware(environment, series))),
        ("Result", escape(headline(series, status))),
        ("Bottleneck", escape(bottleneck(series))),
        ("Anything odd", odd),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in story)
    return f'{_cards(series)}<dl class="story">{rows}</dl>'


def _cards(series: RunSeries) -> str:
    cards = []
    acceptance = series.last_eval.get("acceptance_length")
    if acceptance is not None:
        best = series.best_eval
        detail = f"best {best['acceptance_length']:.2f} at step {best.get('step')}" if best else ""
        cards.append((f"{acceptance:.2f}", f"held-out acceptance length, bonus token included; {detail}"))
    if series.smooth_loss.last is not None:
        cards.append((f"{series.smooth_loss.last:.3f}", "training loss at the end, smoothed"))
    if series.tokens:
        rates = series.step_rate.mean()[1]
        median = sorted(rates)[len(rates) // 2] if len(rates) else None
        if median:
            cards.append((style.number(median, 0), "context tokens/s, median over the steps"))
        cards.append((_short(series.tokens), "context tokens trained on"))
    cards.append((style.duration(series.seconds), "from the first record to the last"))
    if series.memory_peak:
        name, peak = max(series.memory_peak.items(), key=lambda item: item[1])
        cards.append((style.gib(peak), f"highest memory, on {name}"))
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(t)}</span></div>' for v, t in cards)
        + "</div>"
    )


def _short(value: float) -> str:
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {letter}"
    return f"{value:.0f}"


def failure_html(material: Material) -> str:
    """What failed, where, and what is left to go on from."""
    parts = []
    series, verdict = material.series, material.verdict
    if verdict is not None and verdict.status == "failed":
        parts.append(f"<p>Cell {verdict.cell} of the notebook raised <b>{escape(verdict.error)}</b></p>")
    elif verdict is not None and verdict.status == "killed":
        parts.append(
            f"<p>The notebook's kernel ended while cell {verdict.cell} ran, without an error message. The "
            "usual cause is the system's out-of-memory killer; a crash in native code is the other.</p>"
            f"<pre>{escape(verdict.source[:1500])}</pre>"
        )
    if series is not None:
        for fault in series.faults[-3:]:
            at = f" at step {fault['step']}" if fault.get("step") is not None else ""
            parts.append(
                f"<p><b>{escape(str(fault.get('worker')))}</b>{at}: {escape(str(fault.get('type')))}: "
                f"{escape(str(fault.get('message')))}</p>"
                f'<pre class="tall">{escape(str(fault.get("traceback") or "no traceback recorded"))}</pre>'
            )
        good = series.last_step.get("step")
        saved = series.checkpoints[-1] if series.checkpoints else None
        parts.append(f"<p>Last completed step: {good if good is not None else 'none'}. ")
        parts[-1] += (
            f"Last checkpoint: <code>{escape(str(saved.get('path')))}</code> at step {saved.get('step')}.</p>"
            if saved
            else "No checkpoint was saved.</p>"
        )
        stacks = series.path / STACKS_NAME
        if stacks.exists():
            text = stacks.read_text(errors="replace")
            parts.append(
                f"<details><summary>What every thread was doing ({STACKS_NAME})</summary>"
                f'<pre class="tall">{escape(text[-60_000:])}</pre></details>'
            )
    if verdict is not None and verdict.traceback and not (series and series.faults):
        parts.append(f'<pre class="tall">{escape(verdict.traceback[-20_000:])}</pre>')
    return "".join(parts)


def curves_html(series: RunSeries, static: bool) -> str:
    """One figure a panel, in two columns."""
    from dflash.views.dashboard.image_form import png
    from dflash.views.dashboard.plotly_form import figure

    parts = []
    for panel in build_panels(series, drop_empty=True):
        picture = base64.b64encode(png([panel], dpi=100)).decode("ascii")
        data = None if static else json.loads(figure(panel).to_json())
        parts.append(figure_html(picture, data, panel.title, wide=False))
    return f'<div class="plots">{"".join(parts)}</div>'


def events_html(series: RunSeries) -> str:
    """Faults, warmups and checkpoints as a table, and the log's tail."""
    start = series.start_time or 0.0
    rows = [(w.get("t"), "warmup", f"{w.get('device')}: {style.duration(w.get('seconds'))}") for w in series.warmups]
    for c in series.checkpoints:
        took = f" in {style.duration(c['seconds'])}" if c.get("seconds") is not None else ""
        rows.append((c.get("t"), "checkpoint", f"step {c.get('step')}, {c.get('path')}{took}"))
    for f in series.faults:
        rows.append((f.get("t"), "fault", f"{f.get('worker')}: {f.get('type')}: {f.get('message')}"))
    rows.sort(key=lambda row: row[0] or 0.0)
    table = "".join(
        f'<tr><td class="number">{style.duration((at or start) - start)}</td><td>{kind}</td>'
        f"<td>{escape(text[:400])}</td></tr>"
        for at, kind, text in rows
    )
    head = '<tr><th class="number">after</th><th>what</th><th></th></tr>'
    text = f"<table>{head}{table}</table>" if rows else ""
    lines = log_lines(series, tail=60)
    if lines:
        tail = escape("\n".join(lines))
        head = f"The log's last {len(lines)} lines"
        text += f'<details><summary>{head}</summary><pre class="tall">{tail}</pre></details>'
    return text


def configuration_html(series: RunSeries) -> str:
    """Settings in two columns, what they ran on in a third."""
    file = series.path / CONFIG_NAME
    config = series.config or (yaml.safe_load(file.read_text()) if file.exists() else {}) or {}
    rows = [f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in flatten(config).items()]
    half = -(-len(rows) // 2)
    settings = f"<table>{''.join(rows[:half])}</table><table>{''.join(rows[half:])}</table>"
    environment = (series.run_start or {}).get("environment") or _json(series.path / ENVIRONMENT_NAME)
    packages = {name: version for name, version in (environment.get("packages") or {}).items() if version}
    source = environment.get("source") or {}
    commit = f"{source['commit']}{' with local changes' if source.get('changed') else ''}" if source.get("commit") else None
    facts = {
        "Python": environment.get("python"),
        "platform": environment.get("platform"),
        "source": commit,
        "CUDA": (environment.get("cuda") or {}).get("version"),
        **packages,
        **(environment.get("variables") or {}),
    }
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in facts.items() if value
    )
    return f'<div class="columns">{settings}<table>{rows}</table></div>'


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
