"""Decoded examples of a run: `evaluation.json` as text coloured by what each target call brought.

The part of that file which is read here (evaluate.py writes it; all lengths include the bonus token):

    {"acceptance_length": 1.6, "acceptance_interval": [1.5, 1.7], "speedup": 1.2, "exact": 8, "compared": 8,
     "warnings": [], "prompts": [{"prompt": "..", "chunks": [{"text": "The answer", "accepted": 1}, ...],
         "acceptance_length": 1.6, "tokens": 96, "target_calls": 60, "seconds": 2.1, "plain_seconds": 2.9}]}

A chunk is what one target call brought: `accepted` draft tokens and the bonus token. Only `prompts` with `prompt`
and `chunks` must be there; the rest is shown where it is.
"""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Any

from dflash.errors import DataError

EVALUATION_NAME = "evaluation.json"
# A <pre>, because what cleans a notebook's HTML shortens a stretch of white space anywhere else: indentation would go.
ANSWER_STYLE = (
    "white-space:pre-wrap;font-family:inherit;font-size:inherit;line-height:1.75;margin:6px 0;padding:0;"
    "background:none;overflow:visible"
)
# Light to strong: one token (nothing accepted) is left plain, so that what the drafter brought stands out.
LEVELS = ("transparent", "#56B4E955", "#56B4E9AA", "#009E7388", "#009E73CC", "#E69F00AA", "#E69F00EE")


def read_evaluation(run_path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The run's examples, None if it has none; DataError for a file of another form."""
    path = Path(run_path) / EVALUATION_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        for entry in content["prompts"]:
            entry["prompt"], [chunk["text"] for chunk in entry["chunks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no evaluation record ({error}); evaluate the run again") from error
    return content


def examples_html(content: dict[str, Any], most: int = 6) -> str:
    """The prompts with their answers, each target call's text shaded by the tokens it brought."""
    widest = max((_tokens(c) for entry in content["prompts"] for c in entry["chunks"]), default=1)
    legend = "".join(
        f'<span style="background:{_level(count)};padding:1px 7px;margin-right:5px;border-radius:3px;'
        f'border:1px solid #8884">{count}</span>'
        for count in range(1, min(widest, len(LEVELS)) + 1)
    )
    parts = [f'<p class="facts">{html.escape(_overall(content))}</p>'] if _overall(content) else []
    parts += [f'<p class="findings bad"><b>{html.escape(str(text))}</b></p>' for text in content.get("warnings") or []]
    parts.append(f'<p class="legend">Tokens that one target call brought, bonus token included: {legend}</p>')
    for entry in content["prompts"][:most]:
        text = "".join(
            f'<span title="{_tokens(chunk)} tokens, {chunk.get("accepted", 0)} drafted" '
            f'style="background:{_level(_tokens(chunk))};border-right:1px solid #8886">'
            f"{html.escape(chunk['text'])}</span>"
            for chunk in entry["chunks"]
        )
        parts.append(
            f'<div class="example"><p class="prompt">{html.escape(readable(entry["prompt"]))}</p>'
            f'<pre class="answer" style="{ANSWER_STYLE}">{text}</pre>'
            f'<p class="facts">{html.escape(_facts(entry))}</p></div>'
        )
    left = len(content["prompts"]) - most
    if left > 0:
        parts.append(f'<p class="facts">{left} more in {EVALUATION_NAME}.</p>')
    return "".join(parts)


def readable(prompt: str) -> str:
    """A rendered chat prompt without its template marks: what was asked, the system part left out."""
    turns = re.split(r"<\|im_start\|>(\w+)\n", prompt)
    if len(turns) >= 3:
        asked = [text for role, text in zip(turns[1::2], turns[2::2], strict=True) if role == "user"]
        prompt = asked[-1] if asked else prompt
    return re.sub(r"<\|[^|>]{1,40}\|>", " ", prompt).strip()


def _overall(content: dict[str, Any]) -> str:
    facts = []
    if content.get("acceptance_length") is not None:
        spread = content.get("acceptance_interval")
        between = f" (95% interval {spread[0]:.2f} to {spread[1]:.2f} over prompts)" if spread else ""
        facts.append(f"acceptance length {content['acceptance_length']:.2f}, bonus token included{between}")
    if content.get("speedup"):
        facts.append(f"{content['speedup']:.2f} times as fast as plain decoding")
    if content.get("compared"):
        facts.append(f"{content.get('exact')} of {content['compared']} answers equal to plain greedy token for token")
    return " · ".join(facts)


def _facts(entry: dict[str, Any]) -> str:
    facts = []
    if entry.get("acceptance_length") is not None:
        facts.append(f"acceptance length {entry['acceptance_length']:.2f} (bonus token included)")
    if entry.get("tokens") and entry.get("target_calls"):
        facts.append(f"{entry['tokens']} tokens in {entry['target_calls']} target calls")
    seconds, plain = entry.get("seconds"), entry.get("plain_seconds")
    if seconds and plain:
        facts.append(f"{seconds:.2f} s, plain decoding {plain:.2f} s ({plain / seconds:.2f} times)")
    elif seconds:
        facts.append(f"{seconds:.2f} s")
    return " · ".join(facts)


def _tokens(chunk: dict[str, Any]) -> int:
    return int(chunk.get("tokens") or chunk.get("accepted", 0) + 1)


def _level(tokens: int) -> str:
    return LEVELS[min(max(tokens, 1), len(LEVELS)) - 1]
